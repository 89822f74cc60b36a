# SPDX-License-Identifier: Apache-2.0
"""The newest attempts, their losses by window, and what of them is written and when."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD

from lightning_amp_guard import SkipReason, StepOutcome
from lightning_amp_guard.monitor.ledger.journal import Journal, Losses
from lightning_amp_guard.monitor.records import WINDOW, GradientStats
from tests.costs import Ops, PythonCalls, host_reads


class Lines:
    """Stands for a ledger's writer."""

    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(row)
        return True


def outcome(attempt=0, idx=0, **changes):
    told = {"applied": True, "reason": None, "scale": 8.0, "next_scale": 8.0, "micro_batches": 1}
    return StepOutcome(idx, attempt, **{**told, **changes})


def stats(zero):
    return GradientStats(zero, 0, 0, 0, 1.0)


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(3))


def journal(weight, looks=True, every=1, lr=0.5):
    made = Journal([SGD([weight], lr=lr)], [weight], looks, every)
    made.writer = Lines() if looks else None
    return made


# ---------------------------------------------------------------------- losses


def test_mean_is_taken_over_the_window_and_the_next_begins_anew():
    losses = Losses()
    for value in (1.0, 2.0, 6.0):
        losses.add(0, torch.tensor(value))
    losses.add(1, torch.tensor(7.0))
    assert losses.close(0) == 3.0
    assert losses.close(0) is None
    assert losses.close(1) == 7.0


def test_first_of_a_window_drops_what_was_left():
    losses = Losses()
    losses.add(0, torch.tensor(100.0))
    losses.add(0, torch.tensor(4.0), first=True)
    losses.add(0, torch.tensor(2.0))
    assert losses.close(0) == 3.0


def test_losses_are_added_in_double_precision():
    losses = Losses()
    for _ in range(10):
        losses.add(0, torch.tensor(0.1, dtype=torch.float16))
    assert losses.close(0).item() == pytest.approx(0.1, rel=1e-3)
    assert losses.close(0) is None


def test_open_windows_go_through_a_checkpoint():
    losses = Losses()
    losses.add(0, torch.tensor(1.0))
    losses.add(2, torch.tensor(5.0))
    losses.add(2, torch.tensor(6.0))
    state = losses.state()
    assert state == [[0, 1.0, 1], [2, 11.0, 2]]
    resumed = Losses(state)
    resumed.add(0, torch.tensor(2.0))
    assert (resumed.close(0), resumed.close(2)) == (1.5, 5.5)


def test_a_loss_keeps_no_graph(weight):
    losses = Losses()
    losses.add(0, weight.sum())
    assert losses.close(0).grad_fn is None


# ---------------------------------------------------------------------- rows


def test_a_row_holds_what_was_looked_at(weight):
    book = journal(weight)
    book.batch(2, 5, torch.ones(4))
    book.losses.add(0, torch.tensor(3.0))
    skip = outcome(
        4, applied=False, reason=SkipReason.NONFINITE_LOSS, next_scale=4.0, micro_batches=3
    )
    book.hear(skip)
    (row,) = book.writer.rows
    assert (row.attempt, row.epoch, row.batch_idx, row.optimizer) == (4, 2, 5, 0)
    assert (row.applied, row.reason, row.scale, row.next_scale) == (
        False,
        "NONFINITE_LOSS",
        8.0,
        4.0,
    )
    assert (row.lr, row.loss, row.grad_norm, row.micro_batches) == (0.5, 3.0, None, 3)
    assert len(row.batch_id) == len(row.param_checksum) == 16
    assert book.rows() == [row]
    assert book.newest == row


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_comes_through_the_transfer(weight, loss):
    book = journal(weight)
    book.losses.add(0, torch.tensor(loss))
    book.hear(outcome())
    assert repr(book.newest.loss) == repr(loss)


def test_without_looking_nothing_is_read(weight):
    book = journal(weight, looks=False)
    book.batch(0, 1, torch.ones(4))
    ops, calls = Ops(), PythonCalls()
    with ops:
        calls.start()
        book.hear(outcome(grad_norm=2.0))
        calls.stop()
    assert not ops.count
    assert host_reads(ops, calls) == 0
    (row,) = book.rows()
    assert (row.loss, row.batch_id, row.param_checksum, row.grad_norm) == (None, None, None, 2.0)


def test_loss_batch_and_parameters_are_one_transfer(weight):
    book = journal(weight)
    ops, calls = Ops(), PythonCalls()
    with ops:
        calls.start()
        book.batch(0, 1, {"x": torch.ones(4), "y": torch.ones(2)})
        book.losses.add(0, torch.tensor(3.0))
        book.hear(outcome())
        calls.stop()
    reads = calls.methods["tolist"]
    assert reads == 1
    # on the host itself: the float of the eight bytes that came
    assert host_reads(ops, calls) <= 2


def test_checksum_changes_if_and_only_if_a_parameter_does(weight):
    book = journal(weight)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                weight[1] = torch.nextafter(weight[1], torch.tensor(2.0))
        book.hear(outcome(step))
    one, two, three, four = (row.param_checksum for row in book.rows())
    assert one == two != three == four


def test_checksums_are_thinned_out_by_attempt(weight):
    book = journal(weight, every=3)
    for attempt in range(2, 8):
        book.hear(outcome(attempt))
    assert [row.attempt for row in book.rows() if row.param_checksum] == [3, 6]


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)])
def test_lr_is_the_one_of_the_attempt(weight, rate):
    book = journal(weight, looks=False, lr=rate)
    book.hear(outcome(0))
    group = book.optimizers[0].param_groups[0]
    if isinstance(rate, torch.Tensor):
        group["lr"].fill_(9.0)
    else:
        group["lr"] = 9.0
    book.hear(outcome(1))
    book.hear(outcome(0, idx=1))  # an optimizer that nobody has shown
    assert [row.lr for row in book.rows()] == [0.25, 9.0, None]


def test_the_newest_attempts_are_kept(weight):
    book = journal(weight, looks=False)
    assert book.newest is None
    for attempt in range(WINDOW + 3):
        book.hear(outcome(attempt))
    assert [row.attempt for row in book.rows()] == list(range(3, WINDOW + 3))


# ---------------------------------------------------------------------- log steps


def test_lines_of_a_log_step_wait_for_their_statistics(weight):
    book = journal(weight)
    book.hear(outcome(0))
    book.hear(outcome(1), hold=True)
    book.hear(outcome(0, idx=1), hold=True)
    assert [row.attempt for row in book.writer.rows] == [0]
    book.complete({(1, 0): stats(5), (0, 1): stats(7)})
    told = [(row.optimizer, row.attempt, row.stats and row.stats.zero) for row in book.writer.rows]
    assert told == [(0, 0, None), (0, 1, 7), (1, 0, 5)]
    assert [row.stats for row in book.rows()] == [row.stats for row in book.writer.rows]


def test_statistics_go_to_their_attempts_alone(weight):
    book = journal(weight, looks=False)
    for attempt in range(4):
        book.hear(outcome(attempt))
    book.complete({(0, 1): stats(1), (0, 9): stats(9), (3, 3): stats(3)})
    assert [row.stats and row.stats.zero for row in book.rows()] == [None, 1, None, None]


def test_lines_are_written_without_statistics_when_there_will_be_none(weight):
    book = journal(weight)
    book.hear(outcome(), hold=True)
    book.complete()
    book.complete()
    assert [row.stats for row in book.writer.rows] == [None]


def test_more_attempts_in_a_batch_than_are_kept_are_all_written(weight):
    book = journal(weight)
    for attempt in range(WINDOW + 5):
        book.hear(outcome(attempt), hold=True)
    book.complete({(0, WINDOW + 4): stats(1)})
    assert [row.attempt for row in book.writer.rows] == list(range(WINDOW + 5))
    assert book.writer.rows[-1].stats == stats(1)


def test_what_a_log_step_adds_goes_to_the_last_row_of_a_run_without_ledger(weight):
    book, written = journal(weight, looks=False), journal(weight)
    for one in (book, written):
        one.add_to_last(loss=3.0)  # before the first attempt
        one.hear(outcome(0))
        one.hear(outcome(1))
        one.add_to_last(loss=4.0)
    assert [row.loss for row in book.rows()] == [None, 4.0]
    assert [row.loss for row in written.rows()] == [None, None]
