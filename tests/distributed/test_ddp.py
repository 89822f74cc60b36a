# SPDX-License-Identifier: Apache-2.0
"""Two DDP processes apply or skip together, with equal scales, tallies and reasons."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import AmpGuardWarning, SafeAMP, SkipLimitError, _upstream
from lightning_amp_guard.step.ranks import total
from tests.distributed.harness import Pair
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, PlantedOverflow, fit, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

OVERFLOW, LOSS, PARTNER = "NONFINITE_GRADIENTS", "NONFINITE_LOSS", "PARTNER_SKIPPED"

# ------------------------------------------------------------------ models
#
# Every weight starts at 8 and moves by half its gradient. Rank 0 sees ones, so its gradient is 1;
# rank 1 sees threes, so its gradient is 3. Synchronised, or on the joint batch, it is 2.


def weight(start=8.0):
    layer = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(layer.weight, start)
    return layer


class Traced(Line):
    """`Line` that notes scale, tallies and weights after every batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scales, self.tallies, self.weights = [], [], []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        plugin = self.trainer.precision_plugin
        self.scales.append(1.0 if plugin.scaler is None else plugin.scaler.get_scale())
        self.tallies.append([(t.attempted, t.applied, t.skipped) for t in plugin.tallies])
        self.weights.append([float(p.detach()[0, 0]) for p in self.parameters()])

    def told(self):
        reasons = [outcome.reason and outcome.reason.name for outcome in self.outcomes]
        return {
            "scales": self.scales,
            "tallies": self.tallies,
            "weights": self.weights,
            "reasons": reasons,
            "carried": [(outcome.scale, outcome.next_scale) for outcome in self.outcomes],
        }


class Manual(Traced):
    """`Traced` in manual optimization; with `sync=False` no backward pass is synchronised."""

    def __init__(self, *args, sync=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.sync = sync

    def backward_of(self, loss):
        with contextlib.nullcontext() if self.sync else self.trainer.strategy.model.no_sync():
            self.manual_backward(loss)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if loss is not None:
            self.backward_of(loss)
        optimizer.step()


class Beside(Traced):
    """A second weight whose gradient DDP does not reduce; `beside` is its plan."""

    def __init__(self, beside=(), **kwargs):
        super().__init__(**kwargs)
        self.side = weight()
        self.beside = list(beside)

    def training_step(self, batch, batch_idx):
        bad = self.seen < len(self.beside) and self.beside[self.seen] == BAD
        return self.loss(batch) + PlantedOverflow.apply(self.side(batch[0]).float().mean(), bad)


class Ignored(Beside):
    """DDP was told to ignore the second weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["side.weight"])


class Thawed(Beside):
    """The second weight is frozen when DDP wraps the model, and trained all the same."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.side.requires_grad_(False)

    def on_train_start(self):
        self.side.requires_grad_(True)


class ThawedLater(Thawed):
    """The optimizer gets the second weight only then, as Lightning's `BaseFinetuning` does it."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.lin.parameters(), lr=0.5)

    def on_train_start(self):
        super().on_train_start()
        self.trainer.optimizers[0].add_param_group({"params": list(self.side.parameters())})


class Branches(Traced):
    """Two weights, of which a rank uses one."""

    def __init__(self, plan, branch):
        super().__init__(plan)
        self.other = weight()
        self.branch = branch

    def training_step(self, batch, batch_idx):
        bad = self.seen < len(self.plan) and self.plan[self.seen] == BAD
        used = self.other if self.branch else self.lin
        return PlantedOverflow.apply(used(batch[0]).float().mean(), bad)


class Two(Manual):
    """Two optimizers, one weight each, with a plan each; the second steps every `every`th batch."""

    def __init__(self, first=(), second=(), *, every=1, together=False):
        super().__init__(sync=False)
        self.other = weight()
        self.plans = (list(first), list(second))
        self.every, self.together = every, together

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for layer, plan in zip((self.lin, self.other), self.plans, strict=True):
            fault = plan[self.seen] if self.seen < len(plan) else GOOD
            if fault != NONE:
                loss = layer(batch[0]).float().mean()
                self.backward_of(PlantedOverflow.apply(loss, fault == BAD))
        if (batch_idx + 1) % self.every:
            optimizers = optimizers[:1]
        plugin = self.trainer.precision_plugin
        with plugin.all_or_none() if self.together else contextlib.nullcontext():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (self.lin, self.other)]


class Compressed(Traced):
    """A hook reduces gradients in half precision; in float32 they would not overflow."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def on_fit_start(self):
        self.trainer.strategy.model.register_comm_hook(None, self.hook)


class GivesUp(Traced):
    """Raises at the clip where a gradient is not finite, and lets the step go."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e6, error_if_nonfinite=True)

    def optimizer_step(self, *args, **kwargs):
        with contextlib.suppress(RuntimeError):
            super().optimizer_step(*args, **kwargs)


class SavesInsideWindow(Traced):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:  # the second window's first micro-batch
            self.trainer.save_checkpoint(self.path)


def plugin_of(**kwargs):
    return SafeAMP(**{"init_scale": 8.0, "growth_interval": 2, **kwargs})


def two_ranks(model, rank, n=4, *, plugin=None, ckpt_path=None, ddp=None, **kwargs):
    """Fit `model` on this rank's own batches; return what it noted."""
    trainer = make_trainer(
        plugin or plugin_of(),
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **(ddp or {})),
        use_distributed_sampler=False,
        **kwargs,
    )
    data = DataLoader(TensorDataset(torch.full((4 * n, 4), 1.0 + 2.0 * rank)), batch_size=4)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def one_process(model, n=4, *, plugin=None, **kwargs):
    """Fit `model` on the joint batches."""
    both = torch.tensor([1.0] * 4 + [3.0] * 4).reshape(8, 1).expand(8, 4)
    data = DataLoader(TensorDataset(both.repeat(n, 1)), batch_size=8)
    return fit(model, plugin or plugin_of(), data=data, **kwargs)


# ------------------------------------------------------------------ checks, run on both ranks


def told(model, rank, *args, **kwargs):
    two_ranks(model, rank, *args, **kwargs)
    return model.told()


def overflow_on_one_rank(rank, folder):
    return told(Traced([GOOD, BAD] if rank else []), rank)


def nan_loss_on_one_rank(rank, folder):
    return told(Traced([GOOD, NAN_LOSS] if rank else []), rank)


def overflow_before_the_sync(rank, folder):
    model, views = Traced([GOOD, GOOD, BAD] if rank else []), {"gradient_as_bucket_view": True}
    return told(model, rank, 6, accumulate_grad_batches=2, ddp=views)


def nan_loss_before_the_sync(rank, folder):
    model = Traced([GOOD, GOOD, NAN_LOSS] if rank else [])
    return told(model, rank, 6, accumulate_grad_batches=2)


def manual_with_sync(rank, folder):
    return told(Manual([GOOD, BAD] if rank else []), rank)


def other_branch_overflows(rank, folder):
    model = Branches([GOOD, BAD] if rank else [], branch=rank)
    return told(model, rank, ddp={"find_unused_parameters": True})


def ignored_parameter_overflows(rank, folder):
    return told(Ignored([GOOD, BAD] if rank else []), rank)


def thawed_parameter_overflows(rank, folder):
    return told(Thawed([GOOD, BAD] if rank else []), rank)


def parameter_thawed_later_overflows(rank, folder):
    return told(ThawedLater([GOOD, BAD] if rank else []), rank)


def manual_without_sync(rank, folder):
    return told(Manual([GOOD, BAD, NAN_LOSS] if rank else [], sync=False), rank)


def bfloat16_without_sync(rank, folder):
    plugin = SafeAMP("bf16-mixed")
    return told(Manual([GOOD, BAD] if rank else [], sync=False), rank, plugin=plugin)


def rank_without_gradients(rank, folder):
    plans = ([GOOD, NAN_LOSS, BAD, GOOD, NONE, GOOD], [GOOD, NONE, NONE, GOOD, NONE, NONE])
    return told(Manual(plans[rank], sync=False), rank, 6)


def rank_without_gradients_after_nan_loss(rank, folder):
    plans = ([GOOD, BAD], [NAN_LOSS, NONE])
    return told(Manual(plans[rank], sync=False), rank, 3)


def growth_beside_open_window(rank, folder):
    model = Two([GOOD, GOOD, BAD] if rank else [], [NONE, GOOD, NONE] if rank else [], every=2)
    return told(model, rank, plugin=plugin_of(growth_interval=1))


def overflow_of_each_optimizer_in_turn(rank, folder):
    second = [GOOD, NONE, NONE] if rank else [GOOD, GOOD, BAD]
    return told(Two([GOOD, BAD], second), rank, 3)


def all_or_none(rank, folder):
    return told(Two(second=[GOOD, BAD] if rank else [], together=True), rank, 3)


def all_or_none_after_partners_overflow(rank, folder):
    return told(Two(second=[BAD, NONE], together=True), rank, 2)


def all_or_none_without_gradients(rank, folder):
    first, second = ([GOOD, BAD], []) if rank else ([], [GOOD, NONE, NONE])
    return told(Two(first, second, together=True), rank, 3)


def reductions(rank, folder):
    """Count all-reduces that Python asks for; DDP's own come from C++."""
    counts, real = {}, torch.distributed.all_reduce

    def counting(*args, **kwargs):
        counts[key] += 1
        return real(*args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        for sync in ("auto", True, False):
            for plan in ([], [GOOD, BAD]):
                key = (sync, len(plan))
                counts[key] = 0
                two_ranks(Traced(plan), rank, plugin=plugin_of(sync_found_inf=sync))
        key = "ignored"
        counts[key] = 0
        two_ranks(Ignored(), rank)
    finally:
        torch.distributed.all_reduce = real
    return counts


def opted_out(rank, folder):
    plugin = plugin_of(sync_found_inf=False)
    return told(Ignored([GOOD, BAD] if rank else []), rank, plugin=plugin)


def bf16_compress_without_nccl(state, bucket):
    """Stand in for torch's hook of a like name, which refuses to run on gloo."""
    return default_hooks.allreduce_hook(state, bucket)


def compressed(rank, folder):
    answers = {}
    for hook in (default_hooks.fp16_compress_hook, bf16_compress_without_nccl):
        model = Compressed(hook)
        plugin = plugin_of(init_scale=2.0**16, growth_interval=2000, fp32_modules=["lin"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AmpGuardWarning)
            two_ranks(model, rank, plugin=plugin)
        ours = [str(w.message) for w in caught if w.category is AmpGuardWarning]
        answers[hook.__name__] = {**model.told(), "warnings": ours}
    return answers


def precision_of_rank_0(rank, folder):
    """Rank 0 has native float16 alone, rank 1 native bfloat16 alone."""
    real, _upstream.native_low_precision = (
        _upstream.native_low_precision,
        lambda device: (
            rank == 1,
            rank == 0,
        ),
    )
    try:
        trainer = two_ranks(Traced(), rank, plugin=SafeAMP("auto"))
    finally:
        _upstream.native_low_precision = real
    return trainer.precision_plugin.precision


def counts_over_ranks(rank, folder):
    return total([2**40 + rank, 3 * rank], torch.device("cpu"))


def skip_limit(rank, folder):
    plan = [GOOD, BAD, BAD, BAD] if rank else []
    with pytest.raises(SkipLimitError) as caught:
        two_ranks(Traced(plan), rank, plugin=plugin_of(max_consecutive_skips=2))
    return str(caught.value)


def steps_given_up(rank, folder):
    found = {}
    for sync in ("auto", True):
        model = GivesUp([GOOD, BAD] if rank else [])
        two_ranks(model, rank, plugin=plugin_of(sync_found_inf=sync))
        found[sync] = model.told()
    return found


def saved_inside_window(rank, folder):
    model = SavesInsideWindow(folder / "inside.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        two_ranks(model, rank, accumulate_grad_batches=2)
    return [str(w.message) for w in caught if w.category is AmpGuardWarning]


def saved_by_two(rank, folder):
    model = Traced([GOOD, BAD] if rank else [])
    two_ranks(model, rank).save_checkpoint(folder / "two.ckpt")
    return model.told()


def resumed_by_two(rank, folder):
    model = Traced([BAD] if rank else [])
    two_ranks(model, rank, max_epochs=2, ckpt_path=folder / "one.ckpt")
    return model.told()


CHECKS = [
    overflow_on_one_rank,
    nan_loss_on_one_rank,
    overflow_before_the_sync,
    nan_loss_before_the_sync,
    manual_with_sync,
    other_branch_overflows,
    ignored_parameter_overflows,
    thawed_parameter_overflows,
    parameter_thawed_later_overflows,
    manual_without_sync,
    bfloat16_without_sync,
    rank_without_gradients,
    rank_without_gradients_after_nan_loss,
    growth_beside_open_window,
    overflow_of_each_optimizer_in_turn,
    all_or_none,
    all_or_none_after_partners_overflow,
    all_or_none_without_gradients,
    reductions,
    opted_out,
    compressed,
    precision_of_rank_0,
    counts_over_ranks,
    skip_limit,
    steps_given_up,
    saved_inside_window,
    saved_by_two,
    resumed_by_two,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def pair(folder):
    one_process(Traced([GOOD, BAD])).save_checkpoint(folder / "one.ckpt")
    return Pair(folder, CHECKS)


def assert_equal_but_for_weights(first, second):
    assert {**first, "weights": None} == {**second, "weights": None}


# ------------------------------------------------------------------ what the checks have to give


@pytest.mark.parametrize(
    ("check", "plan", "accumulate", "scales", "weights", "reasons"),
    [
        (overflow_on_one_rank, [GOOD, BAD], 1, [8, 4, 4, 8], [7, 7, 6, 5], [None, OVERFLOW]),
        (nan_loss_on_one_rank, [GOOD, NAN_LOSS], 1, [8, 8, 16, 16], [7, 7, 6, 5], [None, LOSS]),
        (
            overflow_before_the_sync,
            [GOOD, GOOD, BAD],
            2,
            [8, 8, 8, 4, 4, 4],
            [8, 7, 7, 7, 7, 6],
            [None, OVERFLOW],
        ),
        (
            nan_loss_before_the_sync,
            [GOOD, GOOD, NAN_LOSS],
            2,
            [8, 8, 8, 8, 8, 16],
            [8, 7, 7, 7, 7, 6],
            [None, LOSS],
        ),
        (manual_with_sync, [GOOD, BAD], 1, [8, 4, 4, 8], [7, 7, 6, 5], [None, OVERFLOW]),
    ],
)
def test_two_ranks_equal_one_process_on_the_joint_batch(
    pair, check, plan, accumulate, scales, weights, reasons
):
    first, second = pair(check)
    assert first == second
    assert first["scales"] == scales
    assert first["weights"] == [[w] for w in weights]
    attempts = len(scales) // accumulate
    assert first["reasons"] == reasons + [None] * (attempts - len(reasons))
    assert first["tallies"][-1] == [(attempts, attempts - 1, 1)]

    model = (Manual if check is manual_with_sync else Traced)(plan)
    one_process(model, len(scales), accumulate_grad_batches=accumulate)
    assert model.told() == first


def test_branch_that_one_rank_does_not_use_is_skipped_on_both(pair):
    first, second = pair(other_branch_overflows)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["scales"] == [8, 4, 4, 8]
    # The mean over ranks of (1, 0), and of (0, 3).
    assert first["weights"] == [[7.75, 7.25], [7.75, 7.25], [7.5, 6.5], [7.25, 5.75]]


@pytest.mark.parametrize(
    "check",
    [
        ignored_parameter_overflows,
        thawed_parameter_overflows,
        parameter_thawed_later_overflows,
    ],
)
def test_gradient_that_ddp_does_not_reduce_is_skipped_on_both(pair, check):
    first, second = pair(check)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["scales"] == [8, 4, 4, 8]
    assert first["weights"] == [[7, 7.5], [7, 7.5], [6, 7], [5, 6.5]]
    assert second["weights"] == [[7, 6.5], [7, 6.5], [6, 5], [5, 3.5]]


def test_manual_steps_without_a_sync_agree_on_verdict_and_blame(pair):
    first, second = pair(manual_without_sync)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, OVERFLOW, LOSS, None]
    assert first["scales"] == [8, 4, 4, 4]
    assert first["weights"] == [[7.5], [7.5], [7.5], [7]]
    assert second["weights"] == [[6.5], [6.5], [6.5], [5]]


def test_bfloat16_guard_agrees_as_well(pair):
    first, second = pair(bfloat16_without_sync)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"] == [[7.5], [7.5], [7], [6.5]]
    assert second["weights"] == [[6.5], [6.5], [5], [3.5]]


def test_rank_without_gradients_takes_part(pair):
    first, second = pair(rank_without_gradients)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, LOSS, OVERFLOW, None, None]
    assert first["scales"] == [8, 8, 4, 4, 4, 8]
    # In the fifth batch no rank has a gradient: no attempt.
    assert [tallies[0] for tallies in first["tallies"]] == [
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 2),
        (4, 2, 2),
        (4, 2, 2),
        (5, 3, 2),
    ]
    assert first["weights"] == [[7.5], [7.5], [7.5], [7], [7], [6.5]]
    assert second["weights"] == [[6.5], [6.5], [6.5], [5], [5], [5]]


def test_loss_of_an_earlier_window_is_not_blamed(pair):
    first, second = pair(rank_without_gradients_after_nan_loss)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [LOSS, OVERFLOW, None]
    assert first["scales"] == [8, 4, 4]


def test_growth_waits_for_a_window_that_is_open_on_one_rank(pair):
    first, second = pair(growth_beside_open_window)
    assert_equal_but_for_weights(first, second)
    # Rank 0 alone holds gradients of the second optimizer after the first and the third batch.
    assert first["scales"] == [8, 16, 8, 16]
    assert first["reasons"] == [None, None, None, OVERFLOW, None, None]
    assert first["weights"] == [[7.5, 8], [7, 7], [7, 7], [6.5, 6]]
    assert second["weights"] == [[6.5, 8], [5, 6.5], [5, 6.5], [3.5, 5]]


def test_overflow_of_another_optimizer_does_not_hide_a_later_one(pair):
    first, second = pair(overflow_of_each_optimizer_in_turn)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, None, OVERFLOW, None, None, OVERFLOW]
    assert first["scales"] == [8, 4, 2]


def test_all_or_none_holds_over_ranks(pair):
    first, second = pair(all_or_none)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, None, PARTNER, OVERFLOW, None, None]
    assert first["tallies"][-1] == [(3, 2, 1), (3, 2, 1)]
    assert first["weights"] == [[7.5, 7.5], [7.5, 7.5], [7, 7]]
    assert second["weights"] == [[6.5, 6.5], [6.5, 6.5], [5, 5]]


def test_all_or_none_with_a_rank_that_has_no_gradients(pair):
    first, second = pair(all_or_none_without_gradients)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [None, None, OVERFLOW, PARTNER, None, None]
    assert first["weights"] == [[7.5, 7.5], [7.5, 7.5], [7, 7.5]]
    assert second["weights"] == [[6.5, 6.5], [6.5, 6.5], [5, 5]]


def test_all_or_none_forgets_the_overflow_of_a_partner_without_gradients(pair):
    first, second = pair(all_or_none_after_partners_overflow)
    assert_equal_but_for_weights(first, second)
    assert first["reasons"] == [PARTNER, OVERFLOW, None]
    assert first["tallies"][-1] == [(2, 1, 1), (1, 0, 1)]


def test_plain_ddp_makes_no_extra_reduction_under_auto(pair):
    first, second = pair(reductions)
    assert first == second
    lightnings_own = first[False, 0]
    extra = {key: count - lightnings_own for key, count in first.items()}
    assert extra == {
        ("auto", 0): 0,
        ("auto", 2): 1,  # the blame, at the skip
        (True, 0): 4,
        (True, 2): 5,
        (False, 0): 0,
        (False, 2): 0,
        "ignored": 4,
    }


def test_without_agreement_ranks_part_as_under_stock(pair):
    first, second = pair(opted_out)
    assert first["reasons"] == [None] * 4
    assert second["reasons"] == [None, OVERFLOW, None, None]


def test_compression_hook_gets_one_warning_that_explains_its_overflows(pair):
    answers = pair(compressed)
    for answer in answers:
        # 65536 overflows on both ranks, 3 * 32768 on the second; 3 * 16384 does not.
        assert answer["fp16_compress_hook"]["reasons"] == [OVERFLOW, OVERFLOW, None, None]
        assert answer["fp16_compress_hook"]["scales"] == [2**15, 2**14, 2**14, 2**14]
        assert answer["fp16_compress_hook"]["weights"] == [[8], [8], [7], [6]]
        assert answer["bf16_compress_without_nccl"]["reasons"] == [None] * 4
    (warning,) = answers[0]["fp16_compress_hook"]["warnings"]
    for part in ("`fp16_compress_hook`", "float16", "65504", "skipped", "register_comm_hook"):
        assert part in warning
    (warning,) = answers[0]["bf16_compress_without_nccl"]["warnings"]
    assert "rounds them to 8 bits" in warning
    assert not answers[1]["fp16_compress_hook"]["warnings"]  # rank 0 speaks for all


def test_all_ranks_take_the_precision_that_rank_0_chose(pair):
    assert pair(precision_of_rank_0) == ["16-mixed"] * 2


def test_counts_are_summed_exactly(pair):
    assert pair(counts_over_ranks) == [[2**41 + 1, 3]] * 2
    assert total([5, 7], torch.device("cpu")) == [5, 7]  # one process


def test_skip_limit_is_reached_on_both_ranks(pair):
    first, second = pair(skip_limit)
    assert first == second
    for part in ("skipped 2 updates in a row", "'lin.weight'"):
        assert part in first


# ------------------------------------------------------------------ checkpoints


def test_overflow_whose_step_was_given_up_backs_off_on_both_ranks(pair):
    first, second = pair(steps_given_up)
    assert first == second
    for told in first.values():
        assert told["scales"] == [8.0, 8.0, 4.0, 8.0]  # answered when the gradients are gone
        assert told["weights"] == [[7.0], [7.0], [6.0], [5.0]]
        assert told["tallies"][-1] == [(3, 3, 0)]


def test_checkpoint_inside_a_window_says_that_the_window_is_lost(pair, folder):
    first, second = pair(saved_inside_window)
    (warning,) = first
    for part in ("inside an accumulation window", "several processes", "are not in it"):
        assert part in warning
    assert not second
    assert torch.load(folder / "inside.ckpt", weights_only=True)["SafeAMP"]["window"] is None


def test_checkpoint_of_two_ranks_resumes_on_one(pair, folder):
    first, second = pair(saved_by_two)
    assert first == second
    assert (first["scales"][-1], first["tallies"][-1]) == (8, [(4, 3, 1)])
    model = Traced([BAD])
    one_process(model, max_epochs=2, ckpt_path=folder / "two.ckpt")
    assert model.told() == AFTER_RESUME


def test_checkpoint_of_one_process_resumes_on_two_ranks(pair):
    for answer in pair(resumed_by_two):
        assert answer == AFTER_RESUME


# The first epoch ended with scale 8, one batch counted towards growth and the weight at 5.
AFTER_RESUME = {
    "scales": [4, 4, 8, 8],
    "tallies": [[(5, 3, 2)], [(6, 4, 2)], [(7, 5, 2)], [(8, 6, 2)]],
    "weights": [[5], [4], [3], [2]],
    "reasons": [OVERFLOW, None, None, None],
    "carried": [(8, 4), (4, 4), (4, 4), (8, 8)],
}
