# SPDX-License-Identifier: Apache-2.0
"""One walk over the gradients where nobody looks, and the long way as soon as somebody does."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_guard import SafeAMP
from lightning_amp_guard.step.one_walk import combined_factor
from tests.costs import Ops
from tests.helpers import BAD, GOOD, Line, ManualLine, batches, fit, make_trainer, stock_plugin

UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
NORM = "aten._foreach_norm.Scalar"
MULTIPLY = ("aten._foreach_mul_.Scalar", "aten._foreach_mul_.Tensor")
SCALE = 2.0**8

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.5),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
}


class Silent(Line):
    """`Line` without an outcome hook; the gradient's norm is 2, so a clip to 1 halves it."""

    on_step_outcome = None


class Watched(Silent):
    """Looks at the gradients before the step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.lin.weight.grad.norm()))


class Counting(L.Callback):
    """Counts the operations of the third batch."""

    def __init__(self):
        self.ops = Ops()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.ops.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.ops.__exit__(None, None, None)


def counted(model, plugin, **kwargs):
    counting = Counting()
    fit(model, plugin, n=4, callbacks=[counting], **kwargs)
    count = counting.ops.count
    multiplies = sum(count[name] for name in MULTIPLY)
    return count[UNSCALE], count[NORM], multiplies


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_clipping_costs_one_norm_and_one_multiply(name):
    optimizer_alone = counted(Silent((), MAKE[name]), None)[2]
    seen = counted(Silent((), MAKE[name]), SafeAMP(init_scale=SCALE), gradient_clip_val=1.0)
    assert seen == (0, 1, 1 + optimizer_alone)


@pytest.mark.parametrize("name", ["adamw-fused", "sgd-fused"])
def test_fused_optimizers_take_the_factor_and_nothing_is_multiplied(name):
    seen = counted(Silent((), MAKE[name]), SafeAMP(init_scale=SCALE), gradient_clip_val=1.0)
    assert seen == (0, 1, 0)


def test_nothing_is_multiplied_where_neither_scale_nor_clip_asks_for_it():
    # the norm of the gradient is 2
    seen = counted(Silent(), SafeAMP("bf16-mixed"), gradient_clip_val=5.0)
    assert seen == (0, 1, 0)


def test_bf16_guard_costs_no_walk_where_clipping_reads_the_norm():
    seen = counted(Silent(), SafeAMP("bf16-mixed"), gradient_clip_val=1.0)
    assert seen == (0, 1, 1)


class LookingCallback(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        """Look."""


class OwnClipping(Silent):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class OwnClip(SafeAMP):
    def clip_grad_by_norm(self, optimizer, clip_val):
        super().clip_grad_by_norm(optimizer, clip_val)


@pytest.mark.parametrize(
    ("model", "plugin", "kwargs"),
    [
        (Watched, SafeAMP, {}),
        (OwnClipping, SafeAMP, {}),
        (Silent, OwnClip, {}),
        (Silent, SafeAMP, {"gradient_clip_algorithm": "value"}),
    ],
    ids=["module hook", "own clipping", "own plugin", "by value"],
)
def test_the_long_way_is_taken_as_soon_as_anything_looks(model, plugin, kwargs):
    seen = counted(model(), plugin(init_scale=SCALE), gradient_clip_val=1.0, **kwargs)
    assert seen[0] == 1


def test_a_callback_that_comes_during_the_fit_is_seen():
    counting = Counting()

    class Adds(Silent):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.callbacks.append(LookingCallback())

    fit(Adds(), SafeAMP(init_scale=SCALE), n=4, callbacks=[counting], gradient_clip_val=1.0)
    assert counting.ops.count[UNSCALE] == 1


def test_hooks_still_see_true_gradients():
    model = Watched()
    fit(model, SafeAMP(init_scale=SCALE), n=3, gradient_clip_val=1.0)
    assert model.norms == [2.0, 2.0, 2.0]


def test_step_hooks_of_others_see_true_gradients_of_fused_optimizers():
    seen = []

    def make(params):
        optimizer = MAKE["adamw-fused"](params)
        optimizer.register_step_pre_hook(
            lambda o, a, k: seen.append(float(o.param_groups[0]["params"][0].grad.norm()))
        )
        return optimizer

    fit(Silent((), make), SafeAMP(init_scale=SCALE), n=2, gradient_clip_val=5.0)
    assert seen == [2.0, 2.0]


def weights(model, plugin, **kwargs):
    fit(model, plugin, n=6, **kwargs)
    return model.lin.weight.detach().clone()


@pytest.mark.parametrize("clip", [0.3, 1.0, 100.0])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_equal_stock_bit_for_bit(name, clip):
    plan = [GOOD, BAD, GOOD]
    ours = weights(Silent(plan, MAKE[name]), SafeAMP(init_scale=SCALE), gradient_clip_val=clip)
    stock = weights(Line(plan, MAKE[name]), stock_plugin(init_scale=SCALE), gradient_clip_val=clip)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("scale", [SCALE, 3.0])
@pytest.mark.parametrize("name", MAKE)
def test_updates_stay_within_a_millionth_of_the_long_way(name, scale):
    plan = [GOOD, BAD, GOOD]
    one = weights(Silent(plan, MAKE[name]), SafeAMP(init_scale=scale), gradient_clip_val=0.3)
    long = weights(Watched(plan, MAKE[name]), SafeAMP(init_scale=scale), gradient_clip_val=0.3)
    torch.testing.assert_close(one, long, rtol=1e-6, atol=0.0)


def test_the_outcome_holds_the_true_norm_before_clipping():
    plugin = SafeAMP(init_scale=SCALE)
    fit(Silent(), plugin, n=2, gradient_clip_val=1.0)
    assert plugin.last_outcome.grad_norm == 2.0


class Huge(Silent):
    """Gradients of 2**70 in float32: finite, while the sum of their squares is not."""

    def training_step(self, batch, batch_idx):
        return (self.lin.weight * 2.0**70).sum()


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_finite_gradient_whose_norm_overflows_is_applied(name):
    plugin = SafeAMP(init_scale=SCALE)
    fit(Huge((), MAKE[name]), plugin, n=2, gradient_clip_val=1.0)
    assert (plugin.tally.applied, plugin.tally.skipped, plugin.scaler.get_scale()) == (2, 0, SCALE)


@pytest.mark.parametrize("name", MAKE)
def test_an_overflow_is_skipped_and_leaves_the_optimizer_alone(name):
    plugin, model = SafeAMP(init_scale=SCALE), Silent([BAD], MAKE[name])
    trainer = make_trainer(plugin, gradient_clip_val=1.0)
    trainer.fit(model, batches(1))
    assert model.weight == 8.0
    state = trainer.optimizers[0].state
    assert all(not v.any() for s in state.values() for v in s.values() if v is not None)
    assert plugin.scaler.get_scale() == SCALE / 2


def test_clipping_in_manual_optimization_still_unscales_first():
    class Clips(ManualLine):
        on_step_outcome = None

        def between(self, optimizer):
            self.clip_gradients(optimizer, 1.0, "norm")

    model = Clips()
    fit(model, SafeAMP(init_scale=SCALE), n=1)
    # lr 0.5 times a gradient of 1 clipped to 0.5
    assert model.weight == pytest.approx(8.0 - 0.25, rel=1e-6)


class Steep(Silent):
    """Each gradient is 2**20, of norm 2**21, at a weight of 0."""

    def __init__(self, plan, make_optimizer):
        super().__init__(plan, make_optimizer, start=0.0)

    def training_step(self, batch, batch_idx):
        return (self.lin.weight * 2.0**20).sum()


@pytest.mark.parametrize("exponent", [24, 40])  # a factor of few bits, and one that is 0
@pytest.mark.parametrize("name", MAKE)
def test_a_factor_too_small_for_float32_loses_no_update(name, exponent):
    model, plugin = Steep((), MAKE[name]), SafeAMP(init_scale=2.0**exponent, max_scale=None)
    fit(model, plugin, n=1, gradient_clip_val=1.3 * 2.0**-100)
    # clipped, each gradient is 1.3 * 2**-101; Adam divides by its eps alone; the lr is 0.5
    moved = 1.3 * 2.0**-102 * (1e8 if "adam" in name else 1.0)
    assert plugin.tally.applied == 1
    expected = torch.full_like(model.lin.weight, -moved)
    torch.testing.assert_close(model.lin.weight.detach(), expected.detach(), rtol=1e-5, atol=0.0)


@settings(max_examples=200, deadline=None)
@given(
    grads=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6),
    exponent=st.integers(-4, 20),
    clip=st.floats(1e-3, 1e3),
)
def test_factor_equals_torch_bit_for_bit(grads, exponent, clip):
    true = torch.tensor(grads)
    parameter = torch.nn.Parameter(torch.zeros_like(true))
    parameter.grad = true.clone()
    total = torch.nn.utils.clip_grad_norm_([parameter], clip)
    scaled = true * 2.0**exponent
    norm, factor = combined_factor(float(scaled.norm()), 2.0**exponent, clip)
    if float(total) > 1e-18:  # below, squares fall out of float32's range
        assert norm == float(total)
    normal = scaled.abs() > 1e-30
    assert torch.equal((scaled * factor)[normal], parameter.grad[normal])
