# SPDX-License-Identifier: Apache-2.0
"""A rank that raises ends the run on all ranks, and says why itself."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_amp_guard import ScaledGradientError
from tests.distributed.harness import Pair, RankError
from tests.distributed.test_ddp import Manual, Traced, two_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


class RaisesOnRankOne(Traced):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("planted in the training step")
        return super().training_step(batch, batch_idx)


class ClipsScaledOnRankOne(Manual):
    """The guard objects on rank 1, while rank 0 waits for the verdict."""

    def backward_of(self, loss):
        super().backward_of(loss)
        if self.seen == 1 and self.global_rank == 1:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def raises_in_training_step(rank, folder):
    two_ranks(RaisesOnRankOne(), rank)


def raises_in_a_guard(rank, folder):
    two_ranks(ClipsScaledOnRankOne(), rank)


def stays_away(rank, folder):
    if rank == 1:
        time.sleep(60)
    torch.distributed.init_process_group("gloo")


@pytest.mark.parametrize(
    ("check", "error"),
    [
        (raises_in_training_step, "ValueError: planted in the training step"),
        (raises_in_a_guard, f"{ScaledGradientError.__name__}: `UnscaleGuard`"),
    ],
)
def test_rank_that_raises_ends_both_within_30_seconds(tmp_path, check, error):
    pair = Pair(tmp_path, [check])
    assert pair.seconds < 30
    assert not pair.killed
    assert pair.codes == [1, 1]
    assert error in pair.printed[1]
    assert error not in pair.printed[0]
    with pytest.raises(RankError, match=f"rank 1 in {check.__name__}"):
        pair(check)


def test_harness_kills_what_is_still_waiting_at_the_bound(tmp_path):
    pair = Pair(tmp_path, [stays_away], bound=1.0)
    assert pair.killed
    with pytest.raises(RankError, match="killed at the bound"):
        pair(stays_away)
