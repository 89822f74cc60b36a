# SPDX-License-Identifier: Apache-2.0
"""`all_or_none`: several optimizers apply their updates together, or none of them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_amp_guard import AmpGuardError, SafeAMP, SkipReason, StepOutcome, UnscaleGuard
from tests.helpers import PlantedOverflow, fit


class Pair(L.LightningModule):
    """Two weights at 8 with gradient 1; `bad[name]` and `nan[name]` list the batches with a fault."""

    def __init__(
        self, bad: dict[str, set[int]] | None = None, fused: bool = False, **nan: set[int]
    ):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))
        for part in (self.a, self.b):
            torch.nn.init.constant_(part.weight, 8.0)
        self.bad, self.nan, self.fused = bad or {}, nan, fused
        self.outcomes: list[StepOutcome] = []

    def loss(self, name: str, batch: Any, i: int) -> torch.Tensor:
        loss = getattr(self, name)(batch[0]).float().mean()
        loss = PlantedOverflow.apply(loss, i in self.bad.get(name, ()))
        return loss * float("nan") if i in self.nan.get(name, ()) else loss

    def training_step(self, batch: Any, i: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss("a", batch, i))
        self.manual_backward(self.loss("b", batch, i))
        self.together(*self.optimizers(), batch=batch)

    def together(self, a: Any, b: Any, batch: Any) -> None:
        with self.trainer.precision_plugin.all_or_none(a, b):
            a.step()
            a.zero_grad()
            b.step()

    def on_step_outcome(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def weights(self) -> tuple[float, float]:
        return tuple(float(part.weight.detach()[0, 0]) for part in (self.a, self.b))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(part.parameters(), lr=0.5, fused=self.fused, momentum=0.5)
            for part in (self.a, self.b)
        ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_overflow_skips_both_and_backs_off_once(name: str, fused: bool) -> None:
    model, plugin = Pair({name: {0}}, fused), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=2)
    # only the second batch is applied: momentum starts with it, so each weight moves by 0.5
    assert model.weights() == (7.5, 7.5)
    own, partner = SkipReason.NONFINITE_GRADIENTS, SkipReason.PARTNER_SKIPPED
    expected = [own, partner] if name == "a" else [partner, own]
    assert [outcome.reason for outcome in model.outcomes] == [*expected, None, None]
    assert plugin.scaler.get_scale() == 32.0
    assert [tally.skipped for tally in plugin.tallies] == [1, 1]


def test_two_overflows_made_at_one_scale_are_one_backoff() -> None:
    model, plugin = Pair({"a": {0}, "b": {0}}), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=1)
    assert [o.reason for o in model.outcomes] == [SkipReason.NONFINITE_GRADIENTS] * 2
    assert plugin.scaler.get_scale() == 32.0


def test_partner_of_a_nonfinite_loss_leaves_scale_and_counter() -> None:
    model, plugin = Pair(a={1}), SafeAMP(init_scale=64.0, growth_interval=10)
    fit(model, plugin, n=2)
    assert [o.reason for o in model.outcomes[2:]] == [
        SkipReason.NONFINITE_LOSS,
        SkipReason.PARTNER_SKIPPED,
    ]
    assert plugin.scaler.state_dict()["scale"] == 64.0
    assert plugin.scaler.state_dict()["_growth_tracker"] == 1


def test_no_arguments_mean_every_optimizer() -> None:
    class All(Pair):
        def together(self, a: Any, b: Any, batch: Any) -> None:
            with self.trainer.precision_plugin.all_or_none():
                b.step()
                a.step()

    model = All({"a": {0}})
    fit(model, SafeAMP(init_scale=64.0), n=1)
    assert [(o.optimizer_idx, o.applied) for o in model.outcomes] == [(1, False), (0, False)]


def test_bf16_applies_all_or_none_too() -> None:
    model = Pair({"b": {0}})
    fit(model, SafeAMP("bf16-mixed"), n=2)
    assert model.weights() == (7.5, 7.5)
    assert model.outcomes[0].reason is SkipReason.PARTNER_SKIPPED


def test_hooks_and_clipping_see_true_gradients_inside() -> None:
    class Clipped(Pair):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.clip_gradients(optimizer, 0.5, "norm")

    model = Clipped()
    fit(model, SafeAMP(init_scale=64.0), n=1)
    # the norm of four ones is 2, clipped to 0.5 each gradient is 0.25: a step of 0.125
    assert model.weights() == pytest.approx((7.875, 7.875), abs=1e-5)
    assert [outcome.grad_norm for outcome in model.outcomes] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        (lambda m, a, b, x: m.manual_backward(m.loss("a", x, 9)), "a backward pass inside"),
        (lambda m, a, b, x: m.plugin.all_or_none(b).__enter__(), "a block inside another"),
        (lambda m, a, b, x: b.step(), "optimizer 1 steps inside"),
    ],
)
def test_what_would_not_be_judged_together_is_refused(inside: Any, says: str) -> None:
    class Wrong(Pair):
        def together(self, a: Any, b: Any, batch: Any) -> None:
            self.plugin = self.trainer.precision_plugin
            with self.plugin.all_or_none(a):
                inside(self, a, b, batch)

    model, plugin = Wrong(), SafeAMP(init_scale=64.0)
    with pytest.raises(AmpGuardError, match=says):
        fit(model, plugin, n=1)
    assert model.weights() == (8.0, 8.0)
    again = Pair()
    fit(again, plugin, n=1)  # nothing is left of the block
    assert again.weights() == (7.5, 7.5)


def test_plain_backward_is_noticed_on_entry() -> None:
    class Plain(Pair):
        def manual_backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    with pytest.raises(AmpGuardError, match="manual_backward"):
        fit(Plain(), SafeAMP(init_scale=64.0), n=1)


def test_outside_of_manual_optimization_there_is_nothing_to_hold() -> None:
    with pytest.raises(AmpGuardError, match="manual optimization"):
        SafeAMP().all_or_none()


def test_an_optimizer_without_gradients_takes_no_part() -> None:
    class OneSided(Pair):
        def loss(self, name: str, batch: Any, i: int) -> torch.Tensor:
            return super().loss("a", batch, i)

    model = OneSided()
    fit(model, SafeAMP(init_scale=64.0, growth_interval=5), n=1, callbacks=[UnscaleGuard()])
    assert model.weights() == (7.0, 8.0)  # two backward passes of the loss of a: gradient 2
    assert [o.optimizer_idx for o in model.outcomes] == [0]
