# SPDX-License-Identifier: Apache-2.0
"""`weight_cache=True`: what it saves, what it does to a gradient, and what it must not break."""

from __future__ import annotations

import functools

import lightning.pytorch as L
import pytest
import torch

from lightning_amp_guard import SafeAMP
from tests.costs import CAST, Meter, Ops
from tests.helpers import Line, ManualLine, batches, fit, make_trainer


class Uses(L.LightningModule):
    """One Linear, weight 0, called `uses` times on `value`: each use has the gradient `value`."""

    def __init__(self, uses: int, value: float = 1.0, width: int = 1) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(width, width, bias=False)
        torch.nn.init.zeros_(self.lin.weight)
        self.uses, self.value = uses, value

    def training_step(self, batch, batch_idx):
        x = torch.full((1, self.lin.in_features), self.value, dtype=torch.float16)
        return torch.stack([self.lin(x).float().sum() for _ in range(self.uses)]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def plugin(cache, precision="16-mixed"):
    scale = {"init_scale": 1.0} if precision == "16-mixed" else {}
    return SafeAMP(precision, weight_cache=cache, **scale)


def gradient(model, precision, cache):
    """The shared weight's gradient of one step as the update shows it, and the tally."""
    chosen = plugin(cache, precision)
    fit(model, chosen, 1)
    return -float(model.lin.weight.detach()[0, 0]), chosen.tally


class Casts(Meter):
    """Counts the casts of one batch that make a half-precision tensor of the weight's shape."""

    def __init__(self, shape):
        super().__init__()
        self.ops = CastsOf(shape)


class CastsOf(Ops):
    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) == CAST and out.dtype == torch.float16 and out.shape == self.shape:
            self.seen += 1
        return out


@pytest.mark.parametrize(("options", "casts"), [({}, 16), ({"weight_cache": True}, 1)])
def test_the_cache_casts_a_weight_once_in_a_forward_pass_and_is_off_by_default(options, casts):
    model = Uses(16, width=4)
    meter = Casts((4, 4))
    trainer = make_trainer(SafeAMP(init_scale=1.0, **options), callbacks=[meter])
    trainer.fit(model, batches(8))
    assert meter.ops.seen == casts


def test_with_the_cache_4096_gradients_of_one_stop_at_2048():
    # 2048 + 1 = 2048 in float16: the sum is taken on the cast, before it reaches the weight
    cached, tally = gradient(Uses(4096), "16-mixed", cache=True)
    assert (cached, tally.applied) == (2048.0, 1)


def test_without_the_cache_4096_gradients_of_one_add_up():
    exact, tally = gradient(Uses(4096), "16-mixed", cache=False)
    assert (exact, tally.applied) == (4096.0, 1)


def test_with_the_cache_16_gradients_of_8192_overflow_and_the_step_is_skipped():
    # 131072 is beyond float16's 65504
    moved, tally = gradient(Uses(16, 8192.0), "16-mixed", cache=True)
    assert (moved, tally.applied, tally.skipped) == (0.0, 0, 1)


def test_without_the_cache_16_gradients_of_8192_add_up():
    exact, tally = gradient(Uses(16, 8192.0), "16-mixed", cache=False)
    assert (exact, tally.applied, tally.skipped) == (131072.0, 1, 0)


@pytest.mark.parametrize(("cache", "expected"), [(True, 256.0), (False, 512.0)])
def test_with_the_cache_bfloat16_stops_at_256(cache, expected):
    # eight significant bits: 256 + 1 = 256
    exact, _ = gradient(Uses(512), "bf16-mixed", cache)
    assert exact == expected


class LooksAhead(Line):
    """A forward pass without gradients before the real one, in the same training step.

    Older torch kept the cast without its graph, so the real pass gave the weight no gradient
    (pytorch/pytorch#65766, #112583, #158232). Lightning turned its cache off for this
    (Lightning-AI/pytorch-lightning#20644, #20921). Since pytorch/pytorch#165068 torch makes the kept
    cast with its graph whether or not gradients are on.
    """

    def __init__(self, no_gradients, **kwargs):
        super().__init__(**kwargs)
        self.no_gradients = no_gradients

    def training_step(self, batch, batch_idx):
        with self.no_gradients():
            self.lin(batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize(
    "no_gradients",
    [torch.no_grad, torch.inference_mode, functools.partial(torch.set_grad_enabled, False)],
)
def test_a_forward_pass_without_gradients_takes_none_from_the_next(no_gradients, precision, cache):
    model = LooksAhead(no_gradients)
    chosen = plugin(cache, precision)
    fit(model, chosen, 3)
    # three updates of 0.5 from 8
    assert (model.weight, chosen.tally.applied) == (6.5, 3)


def test_the_cache_ends_with_the_forward_pass():
    class Sees(Line):
        def training_step(self, batch, batch_idx):
            self.out = [*getattr(self, "out", []), float(self.lin(batch[0]).detach()[0, 0])]
            return super().training_step(batch, batch_idx)

    model = Sees()
    fit(model, plugin(True), 3)
    assert model.out == [32.0, 30.0, 28.0]  # 4 times 8, 7.5, 7


class StepsTwice(ManualLine):
    """Three updates within one training step, each after a forward pass of its own."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.out = []
        for _ in range(3):
            optimizer.zero_grad()
            out = self.lin(batch[0])
            self.out.append(float(out.detach()[0, 0]))
            self.manual_backward(out.float().mean())
            optimizer.step()


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_forward_pass_after_a_manual_step_sees_the_updated_weight(precision, cache):
    model = StepsTwice()
    fit(model, plugin(cache, precision), 1)
    assert model.out == [32.0, 30.0, 28.0]  # 4 times 8, 7.5, 7


class ByClosure(ManualLine):
    """LBFGS, which evaluates its closure twice in one step, moving the weight in between."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.out = []

        def closure():
            optimizer.zero_grad()
            out = self.lin(batch[0])
            self.out.append(float(out.detach()[0, 0]))
            loss = out.float().mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("cache", [False, True])
def test_a_closure_that_is_evaluated_again_sees_the_moved_weight(cache):
    model = ByClosure(make_optimizer=lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=2))
    fit(model, plugin(cache, "bf16-mixed"), 1)
    # first step of min(1, 1 / |g|_1) = 1/4 along g = 1: 4 times 8, then 4 times 7.75
    assert model.out == [32.0, 31.0]
