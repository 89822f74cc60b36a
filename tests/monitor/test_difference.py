# SPDX-License-Identifier: Apache-2.0
"""Two ledgers: where they part first, in which column, and what does not count."""

import math
from dataclasses import replace

import pytest

from lightning_amp_guard.monitor.ledger.difference import compared_columns, first_difference
from lightning_amp_guard.monitor.ledger.file import COLUMNS
from lightning_amp_guard.monitor.records import GradientStats, Row

BASE = [
    Row(i, 0, i, 0, True, None, 8.0, 8.0, 0.1, 1.0 / (i + 1), 2.0, 1, f"b{i}", f"p{i}")
    for i in range(5)
]


def changed(at, **values):
    return [replace(row, **values) if i == at else row for i, row in enumerate(BASE)]


def test_equal_ledgers_have_no_difference():
    assert first_difference(BASE, list(BASE)) is None
    assert first_difference([], []) is None


OTHER = {
    "epoch": 1,
    "batch_idx": 9,
    "applied": False,
    "reason": "NONFINITE_LOSS",
    "scale": 4.0,
    "next_scale": 4.0,
    "lr": 0.2,
    "loss": 0.7,
    "grad_norm": 3.0,
    "micro_batches": 2,
    "batch_id": "other",
    "param_checksum": "other",
}


def test_every_column_of_a_ledger_is_compared_exactly_but_those_that_match_rows():
    assert set(OTHER) == set(COLUMNS) - {"attempt", "optimizer"} == set(compared_columns())


@pytest.mark.parametrize("column", OTHER)
def test_difference_names_attempt_column_values_and_lines(column):
    base = changed(3, reason="NONFINITE_GRADIENTS") if column == "reason" else BASE
    found = first_difference(base, changed(3, **{column: OTHER[column]}))
    assert (found.optimizer, found.attempt, found.column) == (0, 3, column)
    assert found.values == (getattr(base[3], column), OTHER[column])
    assert (found.lines, found.also) == ((4, 4), ())


@pytest.mark.parametrize("column", ["lr", "loss", "grad_norm", "scale"])
def test_the_last_bit_counts(column):
    value = math.nextafter(getattr(BASE[1], column), math.inf)
    assert first_difference(BASE, changed(1, **{column: value})).column == column


def test_first_attempt_counts_and_in_it_the_column_nearest_the_cause():
    other = changed(2, param_checksum="q", loss=9.0, batch_id="x")
    other[4] = replace(other[4], epoch=3)
    found = first_difference(BASE, other)
    assert (found.attempt, found.column) == (2, "batch_id")
    assert found.also == ("loss", "param_checksum")


def test_columns_go_from_what_went_into_an_attempt_to_what_came_out():
    found = first_difference(changed(2, reason="NONFINITE_GRADIENTS"), changed(2, **OTHER))
    into = ("epoch", "batch_idx", "micro_batches", "batch_id", "scale", "lr")
    out = ("loss", "grad_norm", "applied", "reason", "next_scale", "param_checksum")
    assert (found.column, *found.also) == into + out


def test_what_one_ledger_does_not_know_is_not_compared():
    unknown = {
        "lr": None,
        "loss": None,
        "grad_norm": None,
        "batch_id": None,
        "param_checksum": None,
    }
    assert first_difference(BASE, changed(2, **unknown)) is None
    assert first_difference(changed(2, **unknown), BASE) is None


def test_nan_equals_nan_and_nothing_else_and_infinities_have_signs():
    nan, inf = changed(1, loss=math.nan), changed(1, loss=math.inf)
    assert first_difference(nan, changed(1, loss=math.nan)) is None
    assert first_difference(inf, changed(1, loss=math.inf)) is None
    for rtol in (0.0, 0.5):
        assert first_difference(nan, inf, rtol).column == "loss"
        assert first_difference(inf, changed(1, loss=-math.inf), rtol).column == "loss"
        assert first_difference(BASE, nan, rtol).column == "loss"
        assert first_difference(BASE, inf, rtol).column == "loss"


def test_statistics_are_not_compared():
    assert first_difference(BASE, changed(1, stats=GradientStats(0, 0, 1, 0, 1.0))) is None


# ------------------------------------------------------------------- tolerance


@pytest.mark.parametrize("column", ["lr", "loss", "grad_norm"])
def test_tolerance_is_relative_to_the_larger_value(column):
    one, other = changed(1, **{column: 100.0}), changed(1, **{column: 90.0})
    for a, b in ((one, other), (other, one)):
        assert first_difference(a, b, rtol=0.11) is None
        assert first_difference(a, b, rtol=0.1) is None  # 10 is 0.1 times 100
        assert first_difference(a, b, rtol=0.09).column == column


def test_with_a_tolerance_what_differs_by_nature_is_not_compared():
    others = {"scale": 4.0, "next_scale": 2.0, "param_checksum": "q", "micro_batches": 4}
    assert first_difference(BASE, changed(1, epoch=2, batch_idx=7, **others), rtol=1e-6) is None


@pytest.mark.parametrize("values", [{"applied": False}, {"batch_id": "other"}])
def test_with_a_tolerance_applied_and_batch_have_to_be_equal(values):
    found = first_difference(BASE, changed(1, **values), rtol=0.5)
    assert (found.attempt, [found.column]) == (1, list(values))


def test_columns_can_be_left_out():
    other = changed(1, batch_id="x", loss=0.9)
    assert first_difference(BASE, other, leave_out=("batch_id",)).column == "loss"
    assert first_difference(BASE, other, leave_out=("batch_id", "loss")) is None
    assert compared_columns(0.1, ("batch_id",)) == ("lr", "loss", "grad_norm", "applied")


@pytest.mark.parametrize("rtol", [-1e-9, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(rtol):
    with pytest.raises(ValueError, match=r"rtol=.*0 or above"):
        first_difference(BASE, BASE, rtol)


# -------------------------------------------------------------------- matching


def test_a_shorter_ledger_differs_after_the_common_part():
    for a, b, lines, values in (
        (BASE, BASE[:3], (4, None), (3, None)),
        (BASE[:3], BASE, (None, 4), (None, 3)),
    ):
        found = first_difference(a, b)
        assert (found.attempt, found.column) == (3, "attempt")
        assert (found.lines, found.values) == (lines, values)


def test_a_difference_in_the_common_part_comes_before_a_missing_attempt():
    found = first_difference(BASE[1:], changed(4, loss=9.0)[:5])
    assert (found.attempt, found.column, found.lines) == (4, "loss", (4, 5))


def test_ledgers_without_a_common_attempt_differ():
    found = first_difference(BASE[:2], BASE[2:])
    assert (found.attempt, found.column, found.lines) == (0, "attempt", (1, None))
    assert first_difference([], BASE[:1]).attempt == 0


def test_rows_are_matched_by_optimizer_whatever_their_order_in_the_file():
    second = [replace(row, optimizer=1, loss=7.0) for row in BASE]
    interleaved = [row for pair in zip(BASE, second, strict=True) for row in pair]
    assert first_difference(interleaved, [*BASE, *second]) is None
    second[2] = replace(second[2], loss=8.0)
    found = first_difference(interleaved, [*BASE, *second])
    assert (found.optimizer, found.attempt, found.lines) == (1, 2, (6, 8))


def test_attempts_that_were_counted_anew_are_compared_one_by_one():
    again = [replace(row, epoch=1) for row in BASE]
    assert first_difference([*BASE, *again], [*BASE, *again]) is None
    assert first_difference([*BASE, *again], [*BASE, *BASE]).lines == (6, 6)


# ------------------------------------------------------------------------ text


def test_text_says_where_what_and_what_else():
    found = first_difference(BASE, changed(1, loss=0.25, param_checksum="q"))
    assert str(found) == (
        "attempt 1 of optimizer 0 differs in loss: 0.5 (line 2 of the first)"
        " and 0.25 (line 2 of the second); so do param_checksum"
    )
    assert str(first_difference(BASE[:1], BASE)) == (
        "attempt 1 of optimizer 0 is in the second ledger only (line 2); the first has none such"
    )
    assert "in the first ledger only (line 2)" in str(first_difference(BASE, BASE[:1]))
