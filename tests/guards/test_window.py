# SPDX-License-Identifier: Apache-2.0
"""WindowGuard: a gradient carries one scale from the first micro-batch to its step."""

import pytest
import torch

from lightning_amp_guard import SafeAMP, SkipReason, WindowGuard
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, ManualLine, PlantedOverflow, fit


class Duo(ManualLine):
    """Two weights from 8.0 on, an optimizer each (lr 0.5, gradient 1 per backward).

    `script[i]` are the calls of batch i: "a" or "b" is a backward pass of that weight's loss, "a!"
    one whose gradient overflows, "ab!" one of both losses together, "A" or "B" a step followed by
    `zero_grad`.
    """

    def __init__(self, *script, lr_b=0.5, gain_b=1.0):
        super().__init__()
        self.other = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)
        self.script, self.lr_b, self.gain_b = script, lr_b, gain_b
        self.scales = []

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.lin.parameters(), lr=0.5),
            torch.optim.SGD(self.other.parameters(), lr=self.lr_b),
        ]

    def part(self, name):
        layer, gain = (self.lin, 1.0) if name == "a" else (self.other, self.gain_b)
        # 0 in the forward pass, so that a large gain overflows nowhere but in the gradient
        return (layer.weight - layer.weight.detach()).sum() * gain

    def training_step(self, batch, batch_idx):
        for call in self.script[batch_idx].split():
            if call in ("A", "B"):
                optimizer = self.optimizers()["AB".index(call)]
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss = sum(self.part(name) for name in call.rstrip("!"))
                self.manual_backward(PlantedOverflow.apply(loss, call.endswith("!")))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        super().on_train_batch_end(outputs, batch, batch_idx)

    @property
    def weights(self):
        return self.weight, float(self.other.weight.detach()[0, 0])


def run(*script, guard=None, init_scale=4.0, growth_interval=1, **kwargs):
    model = Duo(*script, **kwargs)
    amp = SafeAMP(init_scale=init_scale, growth_interval=growth_interval)
    fit(model, amp, n=len(script), callbacks=[guard] if guard else [])
    return model, amp


# ---------------------------------------------------------------------- growth waits


def test_growth_waits_for_an_open_window():
    model, _ = run("a A b", "a A b B")
    # due after batch 0, where B holds gradients; after batch 1 nobody does
    assert model.scales == [4.0, 8.0]
    assert model.weights == (7.0, 7.0)


def test_growth_waits_at_most_one_further_interval():
    model, _ = run("a A b", "a A b", "a A b", "a A b B", growth_interval=1)
    # counter 1 waits, counter 2 is one interval later: 8 after batch 1; batches 2, 3 likewise,
    # with nobody holding at the end of batch 3
    assert model.scales == [4.0, 8.0, 8.0, 16.0]
    # four gradients of 1, whatever the scale was when each was made
    assert model.weights == (6.0, 6.0)


def test_growth_with_a_longer_interval_waits_that_much_longer():
    model, _ = run(*["a A b"] * 4, growth_interval=2)
    # due at counter 2, put off until counter 4
    assert model.scales == [4.0, 4.0, 4.0, 8.0]


def test_optimizer_that_never_steps_does_not_stop_growth():
    model, _ = run(*["a A b"] * 6)
    assert model.scales == [4.0, 8.0, 8.0, 16.0, 16.0, 32.0]


def test_growth_leaves_out_a_factor_that_would_overflow_held_gradients():
    # B's gradient is 2^125, times 4 it is 2^127: doubled it would leave float32
    model, amp = run("b a A", "a A", "a A", "a A B", gain_b=2.0**125, lr_b=2.0**-125)
    assert model.scales == [4.0, 4.0, 4.0, 8.0]
    assert model.weights == (6.0, 7.0)
    assert amp.tallies[1].applied == 1


def test_without_the_guard_the_scale_moves_inside_the_window_as_in_stock():
    model, _ = run("a A b", "a A b B", guard=WindowGuard(enabled=False))
    assert model.scales == [8.0, 16.0]
    # 4 + 8 divided by 8 is 1.5 where two gradients of 1 were meant
    assert model.weights == (7.0, 8 - 0.5 * 1.5)


# ---------------------------------------------------------------------- backoff does not wait


def test_backoff_multiplies_held_gradients_at_once():
    model, _ = run("b a! A", "b a A B", growth_interval=100)
    assert model.scales == [2.0, 2.0]
    # B's first gradient was made at 4, its second at 2
    assert model.weights == (7.5, 7.0)


def test_two_overflows_of_gradients_made_at_one_scale_are_one_backoff():
    model, _ = run("ab! A B", "ab A B", growth_interval=100)
    assert model.scales == [2.0, 2.0]
    skipped = [(o.optimizer_idx, o.reason, o.scale, o.next_scale) for o in model.outcomes[:2]]
    gradients = SkipReason.NONFINITE_GRADIENTS
    assert skipped == [(0, gradients, 4.0, 2.0), (1, gradients, 2.0, 2.0)]
    assert model.weights == (7.5, 7.5)


def test_overflows_of_gradients_made_at_two_scales_are_two_backoffs():
    model, _ = run("a! A b! B", growth_interval=100)
    assert model.scales == [1.0]
    assert model.weights == (8.0, 8.0)


def test_overflow_in_one_window_costs_the_other_nothing():
    model, amp = run("a! b A", "a b A", "a b A B", growth_interval=100)
    assert amp.tallies[0].applied == 2
    assert model.weights == (7.0, 6.5)


# ---------------------------------------------------------------------- one optimizer


@pytest.mark.parametrize("accumulate", [2, 3])
def test_scale_is_constant_within_an_automatic_window(accumulate):
    class Watches(Line):
        def __init__(self, plan):
            super().__init__(plan)
            self.scales = []

        def training_step(self, batch, batch_idx):
            self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
            return super().training_step(batch, batch_idx)

    # windows: applied (grows), overflow in its first micro-batch (backs off), NaN loss (stays)
    plan = [GOOD] * accumulate
    plan += [BAD] + [GOOD] * (accumulate - 1) + [NAN_LOSS] + [GOOD] * (accumulate - 1)
    model = Watches(plan)
    fit(
        model,
        SafeAMP(init_scale=4.0, growth_interval=1),
        n=4 * accumulate,
        accumulate_grad_batches=accumulate,
    )
    assert model.scales == [s for s in (4.0, 8.0, 4.0, 4.0) for _ in range(accumulate)]
    assert [(o.scale, o.next_scale) for o in model.outcomes] == [
        (4.0, 4.0),
        (8.0, 4.0),
        (4.0, 4.0),
        (4.0, 4.0),
    ]
    # each micro-batch gives 1 / accumulate; two windows of four were applied
    torch.testing.assert_close(model.weight, 7.0, rtol=0, atol=1e-3 if accumulate == 3 else 0.0)


@pytest.mark.parametrize("guard", [WindowGuard(), WindowGuard(enabled=False)])
def test_one_optimizer_needs_no_guard(guard):
    model = Line([GOOD, BAD])
    fit(model, SafeAMP(init_scale=4.0, growth_interval=1), n=4, callbacks=[guard])
    # 4 grows to 8, backs off to 4, grows to 8 and 16
    assert [o.scale for o in model.outcomes] == [4.0, 8.0, 4.0, 8.0]
    assert model.weight == 6.5
