# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two ranks: SafeAMP sees the shards, and both ranks decide alike."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_amp_guard import AmpGuardWarning, SafeAMP
from tests.distributed.harness import Pair
from tests.distributed.models import (
    CLIPPED,
    LOSS,
    NORM,
    OVERFLOW,
    PARTNER,
    Rows,
    SavesInsideWindow,
    alike,
    fused,
    joint_data,
    momentum,
    own_data,
)
from tests.helpers import BAD, GOOD, NAN_LOSS, WantsNorm, fit, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

# ------------------------------------------------------------------ models


class Sharded(Rows):
    """`Rows` with one row on each rank."""

    def shard(self, *parts):
        if not isinstance(self.lin.weight, DTensor):
            for part in (*parts, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_model(self):
        self.shard(self.lin)

    def rows(self):
        return self.lin.weight.full_tensor().detach()[:, 0].tolist()


class AsksNorm(Sharded):
    """Somebody wants the norm at every attempt, as AmpMonitor does at log steps."""

    def on_train_start(self):
        self.trainer.precision_plugin.running().witnesses.append(WantsNorm())


class Mixed(AsksNorm):
    """Before the sharded weight one whose `DTensor` is replicated, and one that is no `DTensor`."""

    def __init__(self, *args):
        super().__init__(*args, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.5, foreach=False))
        lin = self.lin
        del self.lin
        self.replicated, self.plain = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        self.lin = lin

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.lin, mesh=mesh)
        self.replicated = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.replicated.to_local().sum() + self.plain.sum()


class OneRow(Sharded):
    """A single row, so that rank 1 holds an empty shard."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lin = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.lin.weight, 8.0)

    def training_step(self, batch, batch_idx):
        half = self.lin(batch[0]) / 2
        return self.loss(torch.cat([half, half], 1))


class Together(Sharded):
    """Manual optimization of two weights that step together; the plan is the second one's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 2, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)

    def configure_model(self):
        self.shard(self.lin, self.other)

    def rows(self):
        return [*super().rows(), *self.other.weight.full_tensor().detach()[:, 0].tolist()]

    def training_step(self, batch, batch_idx):
        loss = self.lin(batch[0]).float().mean(0).sum() + self.loss(self.other(batch[0]))
        self.manual_backward(loss)
        with self.trainer.precision_plugin.all_or_none():
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (self.lin, self.other)]


def plugin_of(**kwargs):
    return SafeAMP(**{"init_scale": 8.0, "growth_interval": 2, **kwargs})


def two_ranks(model, rank, n=4, *, plugin=None, ckpt_path=None, one_file=False, **kwargs):
    """Fit `model` on this rank's own batches."""
    strategy = ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not one_file,
        process_group_backend="gloo",
    )
    trainer = make_trainer(
        plugin or plugin_of(), devices=2, strategy=strategy, use_distributed_sampler=False, **kwargs
    )
    with warnings.catch_warnings():
        # a plain DataLoader cannot resume inside an epoch; these batches are all alike
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
        trainer.fit(model, own_data(rank, n), ckpt_path=ckpt_path)
    return trainer


def one_process(model, n=4, *, plugin=None, **kwargs):
    """Fit `model` on the joint batches."""
    return fit(model, plugin or plugin_of(), data=joint_data(n), **kwargs)


# ------------------------------------------------------------------ checks, run on both ranks


def told(model, rank, *args, **kwargs):
    two_ranks(model, rank, *args, **kwargs)
    return model.told()


def overflow_in_one_shard(rank, folder):
    return told(Sharded([GOOD, BAD]), rank)


def nan_loss_on_one_rank(rank, folder):
    return told(Sharded([GOOD, NAN_LOSS] if rank else []), rank)


def overflow_with_fused_adam(rank, folder):
    return told(Sharded([GOOD, BAD], fused), rank)


def clipped_by_norm(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, gradient_clip_val=1.0)


def clipped_with_fused_adam(rank, folder):
    return told(Sharded([GOOD, BAD], fused), rank, gradient_clip_val=1.0)


def clipped_by_value(rank, folder):
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    return told(Sharded([GOOD, BAD]), rank, **clip)


def accumulated(rank, folder):
    return told(Sharded([GOOD, GOOD, BAD]), rank, 6, accumulate_grad_batches=2)


def bfloat16(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, plugin=SafeAMP("bf16-mixed"))


def norm_asked_for(rank, folder):
    return told(AsksNorm([GOOD, BAD]), rank)


def mixed_with_plain_tensors(rank, folder):
    return told(Mixed([GOOD, BAD]), rank)


def empty_shard(rank, folder):
    return told(OneRow([GOOD, BAD]), rank, gradient_clip_val=1.0)


def two_optimizers_together(rank, folder):
    return told(Together([GOOD, BAD]), rank)


def anomaly_mode(rank, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        answer = told(Sharded([GOOD, BAD]), rank, detect_anomaly=True)
    return answer, [str(w.message) for w in caught if w.category is AmpGuardWarning]


def saved_in_parts(rank, folder):
    two_ranks(Sharded([GOOD, BAD], momentum), rank).save_checkpoint(folder / "two")
    return told(Sharded([BAD], momentum), rank, max_epochs=2, ckpt_path=folder / "two")


def saved_in_one_file(rank, folder):
    model = Sharded([GOOD, BAD], momentum)
    two_ranks(model, rank, one_file=True).save_checkpoint(folder / "two.ckpt")
    return model.told()


def resumed_from_one_process(rank, folder):
    return told(Sharded([BAD], momentum), rank, max_epochs=2, ckpt_path=folder / "one.ckpt")


def resumed_inside_a_window(rank, folder):
    path = folder / "inside.ckpt"
    return told(Sharded([], momentum), rank, ckpt_path=path, accumulate_grad_batches=2)


CHECKS = [
    overflow_in_one_shard,
    nan_loss_on_one_rank,
    overflow_with_fused_adam,
    clipped_by_norm,
    clipped_with_fused_adam,
    clipped_by_value,
    accumulated,
    bfloat16,
    norm_asked_for,
    mixed_with_plain_tensors,
    empty_shard,
    two_optimizers_together,
    anomaly_mode,
    saved_in_parts,
    saved_in_one_file,
    resumed_from_one_process,
    resumed_inside_a_window,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def pair(folder):
    one_process(Rows([GOOD, BAD], momentum)).save_checkpoint(folder / "one.ckpt")
    inside = SavesInsideWindow(folder / "inside.ckpt", [], momentum)
    one_process(inside, accumulate_grad_batches=2)
    return Pair(folder, CHECKS)


# ------------------------------------------------------------------ what the checks have to give


@pytest.mark.parametrize(
    ("check", "fault", "scales", "rows"),
    [
        (overflow_in_one_shard, BAD, [8, 4, 4, 8], [7, 7, 6, 5]),
        (nan_loss_on_one_rank, NAN_LOSS, [8, 8, 16, 16], [7, 7, 6, 5]),
        (clipped_by_value, BAD, [8, 4, 4, 8], [7.5, 7.5, 7, 6.5]),
    ],
)
def test_two_ranks_equal_one_process_on_the_joint_batch(pair, check, fault, scales, rows):
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    reference = Rows([GOOD, fault])
    one_process(reference, **(clip if check is clipped_by_value else {}))
    first, second = pair(check)
    alike(first, second, reference.told())
    assert first["scales"] == scales
    assert first["weights"] == [[row, row] for row in rows]
    assert first["reasons"] == [None, LOSS if fault == NAN_LOSS else OVERFLOW, None, None]
    assert first["tallies"][-1] == [(4, 3, 1)]


def test_accumulated_gradients_are_shards_too(pair):
    reference = Rows([GOOD, GOOD, BAD])
    one_process(reference, 6, accumulate_grad_batches=2)
    first, second = pair(accumulated)
    alike(first, second, reference.told())
    assert first["scales"] == [8, 8, 8, 4, 4, 4]
    assert first["weights"] == [[row, row] for row in (8, 7, 7, 7, 7, 6)]


def test_bfloat16_guard_skips_on_both(pair):
    first, second = pair(bfloat16)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"] == [[row, row] for row in (7, 7, 6, 5)]


@pytest.mark.parametrize(
    ("check", "optimizer", "clip"),
    [
        (clipped_by_norm, None, 1.0),
        (overflow_with_fused_adam, fused, None),
        (clipped_with_fused_adam, fused, 1.0),
    ],
)
def test_clipping_and_fused_steps_equal_one_process(pair, check, optimizer, clip):
    reference = Rows([GOOD, BAD], optimizer)
    one_process(reference, gradient_clip_val=clip)
    first, second = pair(check)
    alike(first, second, reference.told(), rtol=1e-6)
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"][1] == first["weights"][0]


def test_clipping_is_by_the_norm_over_all_shards(pair):
    first, _ = pair(clipped_by_norm)
    rows = torch.tensor([8 - CLIPPED / 2, 8 - CLIPPED / 2, 8 - CLIPPED, 8 - CLIPPED * 3 / 2])
    torch.testing.assert_close(
        torch.tensor(first["weights"]), rows.reshape(4, 1).expand(4, 2), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("check", [clipped_by_norm, norm_asked_for])
def test_norm_is_that_of_all_shards(pair, check):
    for answer in pair(check):
        assert answer["norms"] == [
            pytest.approx(NORM),
            None,
            pytest.approx(NORM),
            pytest.approx(NORM),
        ]


def test_overflow_behind_a_replicated_and_a_plain_gradient_is_found_by_both(pair):
    first, second = pair(mixed_with_plain_tensors)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"] == [[row, row] for row in (7, 7, 6, 5)]
    # Beside the eight gradients of 2 there are four of 1.
    assert first["norms"] == [pytest.approx(6), None, pytest.approx(6), pytest.approx(6)]


def test_rank_with_an_empty_shard_decides_alike(pair):
    first, second = pair(empty_shard)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    # Four gradients of 2 have the norm 4, so clipping to 1 leaves 0.5 of each.
    expected = torch.tensor([7.75, 7.75, 7.5, 7.25]).reshape(4, 1)
    torch.testing.assert_close(torch.tensor(first["weights"]), expected, rtol=1e-6, atol=0)


def test_all_or_none_over_shards(pair):
    first, second = pair(two_optimizers_together)
    assert first == second
    assert first["reasons"] == [None, None, PARTNER, OVERFLOW, None, None, None, None]
    assert first["weights"] == [[row] * 4 for row in (7, 7, 6, 5)]


def test_anomaly_mode_says_that_it_is_off(pair):
    (first, told_by_first), (second, told_by_second) = pair(anomaly_mode)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert len(told_by_first) == 1
    assert "gradients are sharded" in told_by_first[0]
    assert not told_by_second


# ------------------------------------------------------------------ checkpoints
#
# Momentum 0.5 on a gradient of 2: buffers 2, 3, 3.5 take the weight from 8 to 7, 5.5, 3.75 in the
# first epoch, with the second batch skipped. 3.75, 3.875, 3.9375 go on in the second.

FIRST_EPOCH = [7, 7, 5.5, 3.75]
AFTER_RESUME = {
    "scales": [4, 4, 8, 8],
    "tallies": [[(5, 3, 2)], [(6, 4, 2)], [(7, 5, 2)], [(8, 6, 2)]],
    "weights": [[row, row] for row in (3.75, 1.875, -0.0625, -2.03125)],
    "reasons": [OVERFLOW, None, None, None],
    "norms": [None] * 4,
    "carried": [(8, 4), (4, 4), (4, 4), (8, 8)],
}


@pytest.mark.parametrize("check", [saved_in_parts, resumed_from_one_process])
def test_resume_on_two_ranks(pair, check):
    first, second = pair(check)
    assert first == AFTER_RESUME
    assert second == AFTER_RESUME


def test_checkpoint_of_two_ranks_resumes_on_one(pair, folder):
    first, second = pair(saved_in_one_file)
    assert first == second
    assert first["weights"] == [[row, row] for row in FIRST_EPOCH]
    model = Rows([BAD], momentum)
    one_process(model, max_epochs=2, ckpt_path=folder / "two.ckpt")
    assert model.told() == AFTER_RESUME


def test_window_of_one_process_goes_on_in_shards(pair):
    # Half of the window's gradient came with the checkpoint, the fourth batch adds the other half.
    for answer in pair(resumed_inside_a_window):
        assert answer["tallies"] == [[(2, 2, 0)]]
        assert answer["weights"] == [[5.5, 5.5]]
