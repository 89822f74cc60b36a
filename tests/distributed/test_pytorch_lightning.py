# SPDX-License-Identifier: Apache-2.0
"""Ranks agree under `pytorch_lightning.Trainer` too, and its own weight averages are gated."""

from __future__ import annotations

import pytest

pl = pytest.importorskip("pytorch_lightning")

from lightning_amp_guard import pytorch_lightning as mirror  # noqa: E402
from tests.distributed.harness import Pair  # noqa: E402
from tests.helpers import batches  # noqa: E402
from tests.test_pytorch_lightning import Line  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


class OneRank(Line):
    """The second batch overflows, or is NaN, on rank 1 alone."""

    def __init__(self, *, nan=False):
        super().__init__()
        self.nan = nan

    def training_step(self, batch, batch_idx):
        on = self.global_rank == 1 and batch_idx == 1
        self.bad = {1} if on and not self.nan else set()
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if on and self.nan else loss


def run(*, nan):
    model, plugin = OneRank(nan=nan), mirror.SafeAMP(init_scale=64.0)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "logger"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        plugins=[plugin],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(model, batches(6))
    reasons = [outcome.reason and outcome.reason.name for outcome in model.outcomes]
    return plugin.scaler.get_scale(), reasons, model.weight


def overflow(rank, folder):
    return run(nan=False)


def nonfinite_loss(rank, folder):
    return run(nan=True)


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (overflow, (32.0, [None, "NONFINITE_GRADIENTS", None], 7.0)),
        (nonfinite_loss, (64.0, [None, "NONFINITE_LOSS", None], 7.0)),
    ],
)
def test_both_ranks_skip_for_one_reason(tmp_path, check, expected):
    pair = Pair(tmp_path, [check])
    assert [tuple(result) for result in pair(check)] == [expected] * 2
