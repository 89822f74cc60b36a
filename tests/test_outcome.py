# SPDX-License-Identifier: Apache-2.0
"""What became of an attempt, and the counts that go with it."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_guard import SkipReason, StepOutcome, StepTally

APPLIED = StepOutcome(0, 0, True, None, 8.0, 8.0, 1, 2.5)
SKIPPED = StepOutcome(0, 0, False, SkipReason.NONFINITE_GRADIENTS, 8.0, 4.0, 1)


def counted(plan):
    tally = StepTally()
    for good in plan:
        tally = tally.after(APPLIED if good else SKIPPED)
    return tally


@pytest.mark.parametrize("value", [APPLIED, SKIPPED, StepTally(3, 1, 2, 1)])
def test_record_cannot_be_changed_afterwards(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 5)


@pytest.mark.parametrize("value", [APPLIED, SKIPPED, StepTally(3, 1, 2, 1), *SkipReason])
def test_record_survives_copy_and_pickle(value):
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_grad_norm_is_absent_unless_given():
    assert SKIPPED.grad_norm is None
    assert APPLIED.grad_norm == 2.5


def test_reasons_are_the_three_of_the_contract():
    assert [reason.name for reason in SkipReason] == [
        "NONFINITE_LOSS",
        "NONFINITE_GRADIENTS",
        "PARTNER_SKIPPED",
    ]


@pytest.mark.parametrize(
    ("reason", "cause", "remedy"),
    [
        (
            SkipReason.NONFINITE_LOSS,
            "loss itself was inf or NaN",
            "look for inf or NaN in the batch",
        ),
        (SkipReason.NONFINITE_GRADIENTS, "loss was finite but a gradient", "fp32_modules="),
        (SkipReason.PARTNER_SKIPPED, "all_or_none", "look at that optimizer's outcome"),
    ],
)
def test_sentence_gives_cause_and_remedy(reason, cause, remedy):
    assert cause in reason.sentence
    assert remedy in reason.sentence
    assert reason.sentence.endswith(".")
    assert "\n" not in reason.sentence


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([], StepTally(0, 0, 0, 0)),
        ([True], StepTally(1, 1, 0, 0)),
        ([False], StepTally(1, 0, 1, 1)),
        ([True, False, False, True], StepTally(4, 2, 2, 0)),
        ([False, True, False, False], StepTally(4, 1, 3, 2)),
    ],
)
def test_tally_counts_by_hand(plan, expected):
    assert counted(plan) == expected


@settings(deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=40))
def test_attempted_is_applied_plus_skipped(plan):
    tally = counted(plan)
    assert tally.attempted == len(plan)
    assert tally.attempted == tally.applied + tally.skipped
    assert tally.consecutive_skips <= tally.skipped
    trailing = next((i for i, good in enumerate(reversed(plan)) if good), len(plan))
    assert tally.consecutive_skips == trailing


def test_counting_leaves_the_old_tally_alone():
    before = StepTally(1, 1, 0, 0)
    before.after(SKIPPED)
    assert before == StepTally(1, 1, 0, 0)


def test_forgiven_tally_keeps_all_but_the_consecutive_skips():
    assert StepTally(9, 4, 5, 3).forgiven() == StepTally(9, 4, 5, 0)


def test_total_adds_counts_and_takes_the_largest_run_of_skips():
    tallies = (StepTally(4, 2, 2, 1), StepTally(6, 1, 5, 5), StepTally(1, 1, 0, 0))
    assert StepTally.total(iter(tallies)) == StepTally(11, 4, 7, 5)
    assert StepTally.total([]) == StepTally()
