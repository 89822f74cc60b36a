# SPDX-License-Identifier: Apache-2.0
"""TokenClock on two ranks: gradients of the joint big batch, and one total."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_amp_guard import SafeAMP, TokenClock
from tests.distributed.harness import Pair
from tests.helpers import BAD, GOOD, PlantedOverflow, make_trainer
from tests.test_tokens import (
    ManualTagger,
    SavesAfter,
    Tagger,
    batch_of,
    big_batch,
    close,
    loading,
    plugin,
    summed_loss,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

# (valid tokens, seed) of each rank's batches
RANKS = ([(12, 0), (1, 1), (5, 2)], [(2, 3), (7, 4), (0, 5)])
FIRST = [*RANKS[0][:2], *RANKS[1][:2]]  # 22 tokens
LAST = [RANKS[0][2], RANKS[1][2]]  # 5


def two_ranks(
    model, rank, clock, *callbacks, use=None, strategy=None, ckpt_path=None, skip=0, **kw
):
    """Fit this rank's batches, in windows of two; return gradients and totals."""
    trainer = make_trainer(
        use or plugin(),
        devices=2,
        strategy=strategy or DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        callbacks=[clock, *callbacks],
        **kw,
    )
    data = loading([batch_of(*part) for part in RANKS[rank][skip:]])
    trainer.fit(model, data, ckpt_path=ckpt_path)
    grads = [None if grad is None else grad.tolist() for grad in model.grads]
    return grads, model.totals, clock.total, clock.seen


def averaging(precision, **kwargs):
    def check(rank, folder):
        clock = TokenClock(normalize_gradients=True)
        use = plugin(precision, **kwargs)
        return two_ranks(Tagger(), rank, clock, use=use, accumulate_grad_batches=2)

    check.__name__ = f"averaging_{precision}_{sorted(kwargs)}"
    return check


AVERAGING = [
    averaging("16-mixed"),
    averaging("16-mixed", sync_found_inf=True),
    averaging("16-mixed", sync_found_inf=False),
    averaging("bf16-mixed"),
    averaging("bf16-mixed", bf16_guard=False),
]


def counting_alone(rank, folder):
    return two_ranks(Tagger(), rank, TokenClock(), accumulate_grad_batches=2)


def overflow_on_one_rank(rank, folder):
    model = Tagger([BAD if rank else GOOD])
    return two_ranks(model, rank, TokenClock(normalize_gradients=True), accumulate_grad_batches=2)


def sharded(rank, folder):
    class Sharded(Tagger):
        def configure_model(self):
            fully_shard(self.lin, mesh=self.device_mesh["data_parallel"])

        def grad(self):
            return torch.cat([p.grad.full_tensor().flatten() for p in self.parameters()])

        def training_step(self, batch, batch_idx):
            with torch.autocast("cpu", enabled=False):
                return summed_loss(self.lin, batch)

    return two_ranks(
        Sharded(),
        rank,
        TokenClock(normalize_gradients=True),
        use=SafeAMP("bf16-mixed"),
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        accumulate_grad_batches=2,
    )


class ByHand(ManualTagger):
    """Backward passes without a sync; rank 1 has none in the second batch."""

    def on_before_optimizer_step(self, optimizer):
        absent = self.lin.weight.grad is None
        self.grads.append(None if absent else self.grad())


def rank_without_gradients(rank, folder):
    def act(model, optimizer, batch):
        optimizer.zero_grad()
        if not (rank and model.seen == 1):
            model.manual_backward(summed_loss(model.lin, batch))
            model.clip_gradients(optimizer, 1000.0, gradient_clip_algorithm="norm")
        optimizer.step()

    model = ByHand(act)
    return two_ranks(model, rank, TokenClock(normalize_gradients=True), strategy=unsynced())


def unsynced():
    class Unsynced(DDPStrategy):
        """Every rank for itself."""

        def _setup_model(self, model):
            return model

        def _register_ddp_hooks(self):
            """No DDP, no hooks."""

        def pre_backward(self, closure_loss):
            """Nothing to prepare."""

    return Unsynced(process_group_backend="gloo")


def manual_with_sync(rank, folder):
    def act(model, optimizer, batch):
        optimizer.zero_grad()
        loss = PlantedOverflow.apply(summed_loss(model.lin, batch), False)
        model.manual_backward(loss)
        model.trainer.precision_plugin.unscale_(optimizer)
        optimizer.step()

    return two_ranks(ManualTagger(act), rank, TokenClock(normalize_gradients=True))


def saves_inside_a_window(rank, folder):
    clock, path = TokenClock(normalize_gradients=True), folder / "inside.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*inside an accumulation window on several processes.*")
        saves = SavesAfter(path, 0)
        first = two_ranks(Tagger(), rank, clock, saves, accumulate_grad_batches=2)
    again = TokenClock(normalize_gradients=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
        return first, two_ranks(
            Tagger(), rank, again, ckpt_path=path, skip=1, accumulate_grad_batches=2
        )


CHECKS = [
    *AVERAGING,
    counting_alone,
    overflow_on_one_rank,
    manual_with_sync,
    rank_without_gradients,
    saves_inside_a_window,
    sharded,
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("tokens"), CHECKS)


def both(answers):
    """What both ranks noted alike: gradients, totals; `seen` is each rank's own."""
    (grads, totals, total, first), (others, totals_1, total_1, second) = answers
    assert repr((grads, totals, total)) == repr((others, totals_1, total_1))  # NaN is equal to none
    return [torch.tensor(grad) for grad in grads], totals, total, (first, second)


@pytest.mark.parametrize("check", [*AVERAGING, sharded], ids=lambda check: check.__name__)
def test_gradients_equal_those_of_the_joint_big_batch(pair, check):
    grads, totals, total, seen = both(pair(check))
    assert len(grads) == 2
    close(grads[0], big_batch(*FIRST))
    close(grads[1], big_batch(*LAST))
    assert (totals, total, seen) == ([0, 22, 27], 27, (18, 9))


def test_clock_alone_leaves_the_mean_over_ranks_and_micro_batches(pair):
    grads, totals, _, _ = both(pair(counting_alone))
    close(grads[0], big_batch(*FIRST) * 22 / 4)
    assert totals == [0, 22, 27]


def test_overflow_on_one_rank_counts_on_none(pair):
    _, totals, total, seen = both(pair(overflow_on_one_rank))
    assert (totals, total, seen) == ([0, 0, 5], 5, (18, 9))


def test_manual_steps_unscaled_ahead_are_reduced_once_per_window(pair):
    grads, totals, _, _ = both(pair(manual_with_sync))
    for grad, *parts in zip(grads, *RANKS, strict=True):
        close(grad, big_batch(*parts))
    assert totals == [14, 22, 27]


def test_rank_without_gradients_takes_part(pair):
    (first, totals, *_), (second, totals_1, *_) = pair(rank_without_gradients)
    # not reduced: each rank holds its own sum, times the ranks, over both ranks' tokens
    close(torch.tensor(first[0]), big_batch((12, 0)) * 12 * 2 / 14)
    close(torch.tensor(second[0]), big_batch((2, 3)) * 2 * 2 / 14)
    close(torch.tensor(first[1]), big_batch((1, 1)) * 2)
    assert second[1] is None
    assert totals == totals_1 == [14, 15, 20]


def test_window_of_several_processes_restarts_with_its_tokens(pair):
    (_, first), (_, second) = pair(saves_inside_a_window)
    grads, totals, total, _ = both([first, second])
    close(grads[0], big_batch(RANKS[0][1], RANKS[1][1]))
    assert (totals, total) == ([8], 8)
