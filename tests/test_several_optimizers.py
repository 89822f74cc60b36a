# SPDX-License-Identifier: Apache-2.0
"""Several optimizers in manual optimization: every gradient arrives with its true value."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_amp_guard import (
    SafeAMP,
    ScaledGradientError,
    SkipLimitError,
    SkipReason,
    StepTally,
)
from tests.helpers import PlantedOverflow, fit

GRADIENTS, LOSS = SkipReason.NONFINITE_GRADIENTS, SkipReason.NONFINITE_LOSS


class Nets(L.LightningModule):
    """Weights a, b, c that start at 8; SGD with lr 0.5 moves one by 0.5 for a gradient of 1.

    `step(nets, x, i)` is the training step; `owned` says which weights each optimizer trains.
    """

    def __init__(self, step, owned=("a", "b"), make=None, make_schedulers=None):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b, self.c = (torch.nn.Linear(4, 1, bias=False) for _ in range(3))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 8.0)
        self.step, self.owned = step, owned
        self.make = make or (lambda p: torch.optim.SGD(p, lr=0.5))
        self.make_schedulers = make_schedulers
        self.outcomes, self.scales = [], []

    def training_step(self, batch, batch_idx):
        self.step(self, batch[0], batch_idx)

    def term(self, name, x, gain=1.0, bad=False):
        """Return a loss in which every element of the weight has the gradient `gain`, or inf."""
        return PlantedOverflow.apply(getattr(self, name)(x).float().mean() * gain, bad)

    def backward_of(self, names, x, bad="", nan=False):
        """Run one backward pass for the sum of the named terms."""
        loss = sum(self.term(name, x, bad=name in bad) for name in names)
        self.manual_backward(loss * float("nan") if nan else loss)

    def on_step_outcome(self, outcome):
        self.outcomes.append(outcome)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.plugin.scaler.get_scale())

    @property
    def plugin(self):
        return self.trainer.precision_plugin

    def weights(self, names="ab"):
        return [float(getattr(self, name).weight.detach()[0, 0]) for name in names]

    def verdicts(self):
        """Return optimizer, reason, scale and next scale of every attempt."""
        return [(o.optimizer_idx, o.reason, o.scale, o.next_scale) for o in self.outcomes]

    def configure_optimizers(self):
        made = [self.make([getattr(self, n).weight for n in names]) for names in self.owned]
        return (made, self.make_schedulers(made)) if self.make_schedulers else made


def safe(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, "growth_interval": 1000, **kwargs})


def run(step, n=8, plugin=None, **kwargs):
    """Fit `n` batches and return the nets."""
    nets = Nets(step, **kwargs)
    fit(nets, plugin or safe(), n)
    return nets


# ---------------------------------------------------------------------- one scale per window


def joint_backward(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("ab", x)
    for optimizer in (a, b):
        optimizer.step()
        optimizer.zero_grad()


def both_backwards_then_both_steps(nets, x, i):
    for optimizer in nets.optimizers():
        optimizer.zero_grad()
    for name in "ab":
        nets.backward_of(name, x)
    for optimizer in nets.optimizers():
        optimizer.step()


def step_after_each_backward(nets, x, i):
    for optimizer, name in zip(nets.optimizers(), "ab", strict=True):
        optimizer.zero_grad()
        nets.backward_of(name, x)
        optimizer.step()


def a_accumulates_four(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("b", x)
    b.step()
    b.zero_grad()
    nets.manual_backward(nets.term("a", x) / 4)
    if i % 4 == 3:
        a.step()
        a.zero_grad()


def three_inner_steps_of_b(nets, x, i):
    a, b = nets.optimizers()
    for _ in range(3):
        b.zero_grad()
        nets.backward_of("b", x)
        b.step()
    a.zero_grad()
    nets.backward_of("a", x)
    a.step()


def by_products_cleared(set_to_none):
    def step(nets, x, i):
        a, b = nets.optimizers()
        a.zero_grad(set_to_none=set_to_none)
        nets.backward_of("ab", x)
        a.step()
        b.zero_grad(set_to_none=set_to_none)
        nets.backward_of("b", x)
        b.step()

    return step


def by_products_cleared_at_the_next_turn(nets, x, i):
    a, b = nets.optimizers()
    b.zero_grad()
    nets.backward_of("b", x)
    b.step()
    a.zero_grad()
    nets.backward_of("ab", x)
    a.step()


def by_products_zeroed_at_once(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("b", x)
    b.step()
    nets.backward_of("ab", x)
    a.step()
    for optimizer in (a, b):
        optimizer.zero_grad(set_to_none=False)


def by_products_never_cleared(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("ab", x)
    a.step()
    a.zero_grad()
    nets.backward_of("b", x)
    b.step()


def b_never_steps(nets, x, i):
    a, _ = nets.optimizers()
    nets.backward_of("ab", x)
    a.step()
    a.zero_grad()


def toggled(nets, x, i):
    for optimizer in nets.optimizers():
        nets.toggle_optimizer(optimizer)
        nets.backward_of("ab", x)
        optimizer.step()
        optimizer.zero_grad()
        nets.untoggle_optimizer(optimizer)


def closures(nets, x, i):
    for optimizer, name in zip(nets.optimizers(), "ab", strict=True):

        def closure(optimizer=optimizer, name=name):
            optimizer.zero_grad()
            loss = nets.term(name, x)
            nets.manual_backward(loss)
            return loss.detach() * 0 + 3.0

        assert optimizer.step(closure=closure) == 3.0


def two_steps_for_one_backward(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("ab", x)
    a.step()
    b.step()
    a.step()
    a.zero_grad()
    b.zero_grad()


# With growth_interval=1 and nothing held the scale doubles in each of the 8 batches; with gradients
# held at the end of every batch in every second one; accumulating four: after 2, 4, 6 and 8.
EACH, EVERY_SECOND = 64.0 * 2**8, 64.0 * 2**4
PATTERNS = {
    "joint backward": (joint_backward, [4.0, 4.0], EACH),
    "both backwards, both steps": (both_backwards_then_both_steps, [4.0, 4.0], EACH),
    "step after each backward": (step_after_each_backward, [4.0, 4.0], EACH),
    "windows of different length": (a_accumulates_four, [7.0, 4.0], EVERY_SECOND),
    "inner steps": (three_inner_steps_of_b, [4.0, -4.0], EACH),
    "by-products set to None": (by_products_cleared(True), [4.0, 4.0], EACH),
    "by-products set to zero": (by_products_cleared(False), [4.0, 4.0], EACH),
    "by-products over night": (by_products_cleared_at_the_next_turn, [4.0, 4.0], EVERY_SECOND),
    "by-products zeroed at once": (by_products_zeroed_at_once, [4.0, 4.0], EACH),
    # b's gradient grows by 2 a batch: 0.5 * (2 + 4 + ... + 16) = 36
    "by-products never cleared": (by_products_never_cleared, [4.0, -28.0], EACH),
    "b never steps": (b_never_steps, [4.0, 8.0], EVERY_SECOND),
    "toggled": (toggled, [4.0, 4.0], EACH),
    "closures": (closures, [4.0, 4.0], EACH),
    "two steps for one backward": (two_steps_for_one_backward, [0.0, 4.0], EACH),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_arrive_true_while_the_scale_grows(pattern):
    step, weights, scale = PATTERNS[pattern]
    nets = run(step, plugin=safe(growth_interval=1))
    assert nets.weights() == weights
    assert all(outcome.applied for outcome in nets.outcomes)
    assert nets.scales[-1] == scale


@pytest.mark.parametrize("by_products", [False, True])
def test_optimizers_switched_on_and_off_by_epoch(by_products):
    """In each epoch of two batches one optimizer sleeps; it wakes with zero_grad."""

    def step(nets, x, i):
        on = nets.current_epoch % 2
        optimizer = nets.optimizers()[on]
        optimizer.zero_grad()
        nets.backward_of("ab" if by_products else "ab"[on], x)
        optimizer.step()

    nets = Nets(step)
    fit(nets, safe(growth_interval=1), 2, max_epochs=4)
    assert nets.weights() == [6.0, 6.0]
    assert [tally.applied for tally in nets.plugin.tallies] == [4, 4]
    assert nets.scales[-1] == (EVERY_SECOND if by_products else EACH)


def test_zero_gradients_are_stepped_as_in_float32():
    def make(params):
        return torch.optim.SGD(params, lr=0.5, momentum=0.5)

    def step(nets, x, i):
        a, b = nets.optimizers()
        a.zero_grad(set_to_none=False)
        nets.backward_of("b" if i % 2 else "ab", x)
        a.step()
        b.step()
        b.zero_grad()

    nets = run(step, 4, make=make)
    # a: gradients 1 0 1 0, buffer 1, 0.5, 1.25, 0.625; b: gradient 1, buffer 1, 1.5, 1.75, 1.875
    assert nets.weights() == [8 - 0.5 * 3.375, 8 - 0.5 * 6.125]
    assert [o.applied for o in nets.outcomes] == [True] * 8


def test_steps_without_gradients_are_no_attempts():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x)
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()

    nets = run(step, 4)
    assert nets.plugin.tallies == [StepTally(4, 4, 0, 0), StepTally()]


# ---------------------------------------------------------------------- nothing starves


def test_backoff_never_waits_and_held_gradients_follow_at_once():
    seen = []

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x, bad="a" if i == 1 else "")
        seen.append(float(nets.b.weight.grad[0, 0]))
        a.step()
        seen.append(float(nets.b.weight.grad[0, 0]))
        a.zero_grad()
        if i % 2:
            b.step()
            b.zero_grad()

    nets = run(step, 4)
    # the overflow of batch 1 finds two gradients of b at 64 each
    assert seen == [64.0, 64.0, 128.0, 64.0, 32.0, 32.0, 64.0, 64.0]
    assert nets.scales == [64.0, 32.0, 32.0, 32.0]
    assert nets.weights() == [8 - 3 * 0.5, 8 - 4 * 0.5]


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_growth_waits_for_open_windows_one_more_interval_at_most(interval):
    nets = run(b_never_steps, 4 * interval + 1, plugin=safe(growth_interval=interval))
    waited = [64.0 * 2 ** ((batch + 1) // (2 * interval)) for batch in range(4 * interval + 1)]
    assert nets.scales == waited
    # all of b's gradients are there, at the scale of now
    assert float(nets.b.weight.grad[0, 0]) == waited[-1] * (4 * interval + 1)


def test_growth_that_waited_comes_with_the_step():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x)
        a.step()
        a.zero_grad()
        if i == 3:
            b.step()
            b.zero_grad()

    nets = run(step, 4, plugin=safe(growth_interval=3))
    assert nets.scales == [64.0, 64.0, 64.0, 128.0]


@pytest.mark.parametrize("pattern", ["joint backward", "inner steps", "closures"])
def test_growth_is_counted_per_batch_not_per_step(pattern):
    nets = run(PATTERNS[pattern][0], 8, plugin=safe(growth_interval=4))
    assert nets.scales == [64.0] * 3 + [128.0] * 4 + [256.0]


def test_batch_with_an_overflow_does_not_count_towards_growth():
    def step(nets, x, i):
        nets.backward_of("ab", x, bad="b" if i == 1 else "")
        for optimizer in nets.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    nets = run(step, 5, plugin=safe(growth_interval=2))
    assert nets.scales == [64.0, 32.0, 32.0, 64.0, 64.0]


def overflow_in(bad):
    """Both backwards in one, then a steps, then b."""

    def step(nets, x, i):
        nets.backward_of("abc", x, bad=bad if i == 0 else "")
        for optimizer in nets.optimizers():
            optimizer.step()
        for optimizer in nets.optimizers():
            optimizer.zero_grad()

    return step


def overflow_in_both_clipped_first(nets, x, i):
    nets.backward_of("ab", x, bad="ab" if i == 0 else "")
    for optimizer in nets.optimizers():
        nets.clip_gradients(optimizer, 1000.0, "norm")
    for optimizer in nets.optimizers():
        optimizer.step()
        optimizer.zero_grad()


def overflow_held_over_batches(nets, x, i):
    """b overflows in batch 0 as a does, but steps only in batch 2."""
    a, b = nets.optimizers()
    nets.backward_of("ab", x, bad="ab" if i == 0 else "")
    a.step()
    a.zero_grad()
    if i == 2:
        b.step()
        b.zero_grad()


def overflow_stepped_twice(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("ab", x, bad="a" if i == 0 else "")
    a.step()
    b.step()
    a.step()
    for optimizer in (a, b):
        optimizer.zero_grad()


def overflow_stepped_twice_around_anothers_backward(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("a", x, bad="a" if i == 0 else "")
    a.step()
    nets.backward_of("b", x)
    b.step()
    a.step()
    for optimizer in (a, b):
        optimizer.zero_grad()


def overflow_clipped_before_anothers_turns(nets, x, i):
    a, b = nets.optimizers()
    nets.backward_of("ab", x, bad="ab" if i == 0 else "")
    nets.clip_gradients(a, 1000.0, "norm")
    for _ in range(2):
        b.step()
        b.zero_grad()
        nets.backward_of("b", x)
    a.step()
    for optimizer in (a, b):
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("step", "owned"),
    [
        pytest.param(overflow_in("ab"), ("a", "b"), id="in both"),
        pytest.param(overflow_in("c"), ("ac", "bc"), id="in a shared parameter"),
        pytest.param(overflow_in("abc"), ("ac", "bc"), id="in all with a shared parameter"),
        pytest.param(overflow_in_both_clipped_first, ("a", "b"), id="both clipped before"),
        pytest.param(
            overflow_clipped_before_anothers_turns, ("a", "b"), id="clipped before another's turns"
        ),
        pytest.param(overflow_held_over_batches, ("a", "b"), id="held over batches"),
        pytest.param(overflow_stepped_twice, ("a", "b"), id="stepped twice"),
        pytest.param(
            overflow_stepped_twice_around_anothers_backward, ("a", "b"), id="stepped twice, apart"
        ),
    ],
)
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_overflows_of_gradients_made_at_one_scale_are_one(step, owned, hysteresis):
    nets = run(step, 3, plugin=safe(hysteresis=hysteresis), owned=owned)
    skipped = [outcome for outcome in nets.outcomes if not outcome.applied]
    assert [outcome.reason for outcome in skipped] == [GRADIENTS, GRADIENTS]
    assert nets.scales == [32.0 if hysteresis == 1 else 64.0] * 3


def test_outcome_names_the_scale_that_its_gradients_carried():
    """Both were unscaled at 64; the scale has fallen to 32 when b steps."""
    nets = run(overflow_in_both_clipped_first, 1)
    assert nets.verdicts() == [(0, GRADIENTS, 64.0, 32.0), (1, GRADIENTS, 64.0, 32.0)]


def test_answered_overflow_leaves_the_growth_counter_at_the_lowest_scale_too():
    """a overflows at scale 1 and is never zeroed; its second skip, in batch 2, is no new overflow."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        if i == 0:
            nets.backward_of("a", x, bad="a")
        if i % 2:
            nets.backward_of("b", x)
            b.step()
            b.zero_grad()
        else:
            a.step()

    nets = run(step, 4, plugin=safe(init_scale=1.0, growth_interval=2))
    assert nets.scales == [1.0, 1.0, 1.0, 2.0]


def test_overflow_at_the_new_scale_backs_off_again():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x, bad="ab" if i < 2 else "")
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()

    nets = run(step, 3)
    assert nets.scales == [32.0, 16.0, 16.0]


def test_new_overflow_beside_an_answered_one_backs_off():
    """The shared c overflowed at 64, which was answered; b's own parameter overflows at 32."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        if i == 0:
            nets.backward_of("ac", x, bad="ac")
            a.step()
        else:
            nets.backward_of("b", x, bad="b")
            b.step()

    nets = run(step, 2, owned=("ac", "bc"))
    assert nets.verdicts() == [(0, GRADIENTS, 64.0, 32.0), (1, GRADIENTS, 32.0, 16.0)]


def test_overflow_once_zeroed_is_forgotten():
    """b held an overflow when a backed off; b was zeroed, so its next overflow is a new one."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        if i == 0:
            nets.backward_of("ab", x, bad="ab")
            a.step()
            a.zero_grad()
            b.zero_grad(set_to_none=False)
        else:
            nets.backward_of("b", x, bad="b")
            b.step()

    nets = run(step, 2)
    assert nets.verdicts() == [(0, GRADIENTS, 64.0, 32.0), (1, GRADIENTS, 32.0, 16.0)]


# ---------------------------------------------------------------------- growth looks ahead


@pytest.mark.parametrize(
    ("exponent", "scales"),
    [
        # b holds 2**121 * 64 = 2**127, which twice would be inf: the scale waits for b's step
        (121, [64.0, 64.0, 64.0, 128.0, 256.0]),
        # b holds 2**126; twice that is finite, and at 128 it waits in its turn
        (120, [64.0, 128.0, 128.0, 256.0]),
    ],
    ids=["would become inf", "stays finite"],
)
def test_scale_grows_while_held_gradients_stay_finite(exponent, scales):
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x)
        a.step()
        a.zero_grad()
        if i == 0:
            nets.manual_backward((nets.b.weight * 2.0**exponent).sum())
        if i == 3:
            b.step()
            b.zero_grad()

    def make(params):
        return torch.optim.SGD(params, lr=2.0**-exponent)

    nets = run(step, len(scales), plugin=safe(growth_interval=1), make=make)
    assert nets.weights("b") == [7.0]
    assert nets.scales == scales


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_held_nonfinite_gradient_stays_visible_through_growth(value):
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x)
        a.step()
        a.zero_grad()
        if i == 0:
            nets.manual_backward((nets.b.weight * value).sum())
        if i == 3:
            b.step()

    nets = run(step, 4, plugin=safe(growth_interval=1))
    assert nets.scales[:3] == [64.0, 128.0, 128.0]
    reason = nets.outcomes[-1].reason  # b's loss was 8 * value, and so not finite itself
    assert (nets.outcomes[-1].optimizer_idx, reason) == (1, LOSS)
    assert nets.weights("b") == [8.0]


# ---------------------------------------------------------------------- blame


def test_nonfinite_loss_skips_its_own_optimizer_and_leaves_the_scale():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x, nan=i == 1)
        a.step()
        a.zero_grad()
        nets.backward_of("b", x)
        b.step()
        b.zero_grad()

    nets = run(step, 4, plugin=safe(growth_interval=4))
    assert nets.weights() == [8 - 3 * 0.5, 8 - 4 * 0.5]
    assert [o.reason for o in nets.outcomes] == [None, None, LOSS, None, None, None, None, None]
    # b's update makes batch 1 count
    assert nets.scales == [64.0, 64.0, 64.0, 128.0]


def test_nonfinite_loss_is_blamed_where_its_by_products_went():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x, nan=True)
        a.step()
        b.step()

    nets = run(step, 1)
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0), (1, LOSS, 64.0, 64.0)]


def test_overflow_is_not_blamed_on_a_loss_that_never_reached_it():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x, nan=True)
        nets.backward_of("b", x, bad="b")
        a.step()
        b.step()

    nets = run(step, 1)
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0), (1, GRADIENTS, 64.0, 32.0)]


@pytest.mark.parametrize("early", ["clip", "unscale"])
def test_nonfinite_loss_is_remembered_over_an_early_unscale(early):
    """a is clipped before b's backward pass, and steps after it."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("a", x, nan=True)
        if early == "clip":
            nets.clip_gradients(a, 1.0, "norm")
        else:
            nets.plugin.unscale_(a)
        nets.backward_of("b", x)
        a.step()
        b.step()

    nets = run(step, 1)
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0), (1, None, 64.0, 64.0)]
    assert [o.micro_batches for o in nets.outcomes] == [1, 1]


@pytest.mark.parametrize("between", ["nothing", "another's backward", "its own backward"])
def test_nan_left_by_a_nonfinite_loss_does_not_grind_the_scale(between):
    """Without zero_grad the NaN is still there at the next steps, and still the loss's fault."""

    def step(nets, x, i):
        a, _ = nets.optimizers()
        if i == 0:
            nets.backward_of("a", x, nan=True)
        elif between != "nothing":
            nets.backward_of("a" if between == "its own backward" else "b", x)
        a.step()

    nets = run(step, 4)
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0)] * 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nonfinite_loss_once_zeroed_is_forgotten(set_to_none):
    def step(nets, x, i):
        a, _ = nets.optimizers()
        nets.backward_of("a", x, nan=i == 0, bad="a" if i == 1 else "")
        a.step()
        a.zero_grad(set_to_none=set_to_none)

    nets = run(step, 2)
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0), (0, GRADIENTS, 64.0, 32.0)]


def test_shared_parameter_once_zeroed_takes_its_blame_along():
    """The shared c got a NaN from a's loss and was cleared; what is left of b's is an overflow."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("b", x, bad="b")
        nets.backward_of("ac", x, nan=True)
        a.step()
        a.zero_grad()
        b.step()

    nets = run(step, 1, owned=("ac", "bc"))
    assert nets.verdicts() == [(0, LOSS, 64.0, 64.0), (1, GRADIENTS, 64.0, 32.0)]


# ---------------------------------------------------------------------- tallies and schedules


def a_overflows_in(*bad):
    def step(nets, x, i):
        nets.backward_of("ab", x, bad="a" if i in bad else "")
        for optimizer in nets.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        if nets.make_schedulers:
            for scheduler in nets.lr_schedulers():
                scheduler.step()

    return step


def test_each_optimizer_has_its_own_tally():
    nets = run(a_overflows_in(1, 3, 4), 5)
    assert nets.plugin.tallies == [StepTally(5, 2, 3, 2), StepTally(5, 5, 0, 0)]
    assert nets.plugin.tally == StepTally(10, 7, 3, 2)
    assert [(o.optimizer_idx, o.attempt) for o in nets.outcomes] == [
        (k, i) for i in range(5) for k in (0, 1)
    ]
    assert nets.weights() == [7.0, 5.5]


def halving(optimizers, step_size=1):
    return [torch.optim.lr_scheduler.StepLR(o, step_size, gamma=0.5) for o in optimizers]


def test_each_schedule_is_gated_by_its_own_optimizer():
    nets = run(a_overflows_in(0, 2), 4, make_schedulers=halving)
    assert [s.last_epoch for s in nets.lr_schedulers()] == [2, 4]
    assert [o.param_groups[0]["lr"] for o in nets.optimizers()] == [0.5 / 4, 0.5 / 16]
    # a: lr 0.5 in batch 1, 0.25 in batch 3; b: 0.5 + 0.25 + 0.125 + 0.0625
    assert nets.weights() == [8 - 0.75, 8 - 0.9375]


def test_schedules_in_another_order_find_their_optimizers():
    nets = run(a_overflows_in(0, 2), 4, make_schedulers=lambda made: halving(made[::-1]))
    assert [s.last_epoch for s in nets.lr_schedulers()] == [4, 2]


def test_skip_limit_counts_each_optimizer_and_names_it():
    def step(nets, x, i):
        nets.backward_of("ab", x, bad="b" if i % 3 else "a")
        for optimizer in nets.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    nets = Nets(step)
    plugin = safe(max_consecutive_skips=2)
    # skipped: a, b, b: five attempts run, and the sixth is b's second skip in a row
    with pytest.raises(SkipLimitError, match=r"optimizer 1 skipped 2 updates in a row") as caught:
        fit(nets, plugin, 6)
    assert "'b.weight'" in str(caught.value)
    assert "a.weight" not in str(caught.value)
    assert [t.skipped for t in plugin.tallies] == [1, 2]
    assert [t.consecutive_skips for t in plugin.tallies] == [0, 0]  # for a checkpoint of the end


# ---------------------------------------------------------------------- a long run


def _gan_gain(i):
    """Return the gradient of batch i: a power of two, of either sign."""
    return (1.0, -2.0, 0.5, -1.0, 2.0)[i % 5]


def _own_float32_run(n):
    """Return the trajectory of one network that trains by itself."""
    weight = torch.nn.Parameter(torch.full((1, 4), 8.0))
    optimizer = torch.optim.AdamW([weight], lr=0.125)
    trajectory = []
    for i in range(n):
        optimizer.zero_grad()
        (weight * _gan_gain(i)).sum().backward()
        optimizer.step()
        trajectory.append(float(weight.detach()[0, 0]))
    return trajectory


@pytest.mark.parametrize("culprit", ["a", "b"])
def test_other_network_of_a_gan_never_notices_the_overflows(culprit):
    """b discriminates, a generates through b and leaves gradients on it; 1,000 batches."""
    trajectory, other = [], "b" if culprit == "a" else "a"

    def step(nets, x, i):
        a, b = nets.optimizers()
        bad, gain = i % 7 == 6, _gan_gain(i)
        b.zero_grad()
        nets.manual_backward(nets.term("b", x, gain, bad and culprit == "b"))
        b.step()
        a.zero_grad()
        loss = nets.term("a", x, gain, bad and culprit == "a") + nets.term("b", x)
        nets.manual_backward(loss)
        a.step()
        trajectory.append(nets.weights(other)[0])

    def make(params):
        return torch.optim.AdamW(params, lr=0.125)

    # at the end of each batch b holds by-products, so growth takes 2 * 3 clean batches: the six
    # between two overflows, and the last six
    plugin = safe(growth_interval=3)
    nets = run(step, 1000, plugin=plugin, make=make)
    assert trajectory == _own_float32_run(1000)
    tallies = {name: plugin.tallies[k] for k, name in enumerate("ab")}
    assert tallies[other] == StepTally(1000, 1000, 0, 0)
    assert tallies[culprit] == StepTally(1000, 858, 142, 0)
    assert nets.scales[:14] == [64.0] * 5 + [128.0, 64.0] + [64.0] * 5 + [128.0, 64.0]
    assert nets.scales[-7:] == [64.0] * 6 + [128.0]


# ---------------------------------------------------------------------- checkpoints


class SaveEveryBatch(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def gan_with_windows(nets, x, i):
    """b in every batch, a accumulates three; b overflows in batch 4, a in 6; schedules of both."""
    a, b = nets.optimizers()
    of_a, of_b = nets.lr_schedulers()
    nets.backward_of("b", x, bad="b" if i == 4 else "")
    b.step()
    of_b.step()
    b.zero_grad()
    nets.backward_of("ab", x, bad="a" if i == 6 else "")
    if i % 3 == 2:
        a.step()
        of_a.step()
        a.zero_grad()
        b.zero_grad()


def answered_over_a_checkpoint(nets, x, i):
    """a's window overflows in batch 3 and ends in batch 5; b overflows in batch 4."""
    a, b = nets.optimizers()
    nets.backward_of("a", x, bad="a" if i == 3 else "")
    nets.backward_of("b", x, bad="b" if i == 4 else "")
    b.step()
    b.zero_grad()
    if i % 3 == 2:
        a.step()
        a.zero_grad()


def nan_loss_over_a_checkpoint(nets, x, i):
    """a's window holds a NaN loss that b's does not, and ends two batches later."""
    a, b = nets.optimizers()
    nets.backward_of("ac", x, nan=i == 3)
    nets.backward_of("b", x, bad="b" if i == 4 else "")
    b.step()
    b.zero_grad()
    if i % 3 == 2:
        a.step()
        a.zero_grad()


def clipped_in_every_batch(nets, x, i):
    """a's window is open and unscaled at the end of every batch."""
    a, b = nets.optimizers()
    nets.backward_of("b", x, bad="b" if i == 4 else "")
    b.step()
    b.zero_grad()
    nets.backward_of("ac", x)
    nets.clip_gradients(a, 1000.0, "norm")
    if i % 3 == 2:
        a.step()
        a.zero_grad()


def _make_adamw(params):
    return torch.optim.AdamW(params, lr=0.125)


def _everything(nets, plugin):
    optimizers = [o.state_dict() for o in nets.trainer.optimizers]
    schedules = [c.scheduler.state_dict() for c in nets.trainer.lr_scheduler_configs]
    tracker = plugin.scaler.state_dict()
    return nets.state_dict(), optimizers, schedules, tracker, plugin.tallies


@pytest.mark.parametrize(
    "step",
    [
        gan_with_windows,
        answered_over_a_checkpoint,
        nan_loss_over_a_checkpoint,
        clipped_in_every_batch,
    ],
)
def test_resume_from_any_batch_equals_the_uninterrupted_run(tmp_path, step):
    n = 9

    def build():
        schedulers = partial(halving, step_size=2) if step is gan_with_windows else None
        return Nets(step, ("ac", "b"), _make_adamw, schedulers), safe(growth_interval=2)

    whole, plugin = build()
    fit(whole, plugin, n, callbacks=[SaveEveryBatch(tmp_path)])
    assert any(not outcome.applied for outcome in whole.outcomes)
    for last in range(n - 1):
        resumed, other = build()
        fit(resumed, other, n, ckpt_path=tmp_path / f"{last}.ckpt")
        assert resumed.scales == whole.scales[last + 1 :]
        assert resumed.outcomes == whole.outcomes[len(whole.outcomes) - len(resumed.outcomes) :]
        assert_same(_everything(resumed, other), _everything(whole, plugin))


def assert_same(one, other):
    """Compare nested values exactly, tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def test_open_windows_of_both_optimizers_survive(tmp_path):
    """a accumulates four, b two: the checkpoint of batch 4 lies in a window of each."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x)
        for optimizer, length in ((a, 4), (b, 2)):
            if i % length == length - 1:
                optimizer.step()
                optimizer.zero_grad()

    fit(Nets(step), safe(), 8, callbacks=[SaveEveryBatch(tmp_path)])
    saved = torch.load(tmp_path / "4.ckpt", weights_only=True)
    (window,) = (v["window"] for v in saved.values() if isinstance(v, dict) and "window" in v)
    assert {name: float(g[0, 0]) for name, g in window["gradients"].items()} == {
        "a.weight": 64.0,
        "b.weight": 64.0,
    }
    resumed = Nets(step)
    fit(resumed, safe(), 8, ckpt_path=tmp_path / "4.ckpt")
    assert resumed.weights() == [8 - 0.5 * 8, 8 - 0.5 * 8]
    assert [(o.optimizer_idx, o.micro_batches) for o in resumed.outcomes] == [
        (1, 2),
        (0, 4),
        (1, 2),
    ]


def test_checkpoint_between_windows_holds_no_gradients(tmp_path):
    """What a step has consumed is no window, although another's backward pass rescaled it."""
    fit(Nets(step_after_each_backward), safe(), 2, callbacks=[SaveEveryBatch(tmp_path)])
    saved = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert [v["window"] for v in saved.values() if isinstance(v, dict) and "window" in v] == [None]


# ---------------------------------------------------------------------- shared parameters


@pytest.mark.parametrize("owned", [("ac", "bc"), ("abc", "abc")])
def test_shared_parameters_get_the_true_gradient_from_each(owned):
    def step(nets, x, i):
        nets.backward_of("abc", x)
        for optimizer in nets.optimizers():
            optimizer.step()
        for optimizer in nets.optimizers():
            optimizer.zero_grad()

    nets = run(step, 4, plugin=safe(growth_interval=1), owned=owned)
    twice = 8 - 2 * 4 * 0.5
    assert nets.weights("abc") == ([6.0, 6.0, twice] if owned[0] == "ac" else [twice] * 3)


def test_shared_parameter_accumulates_for_both_between_their_steps():
    """c belongs to a, which steps every batch, and to b, which steps every second one."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("abc", x)
        a.step()
        nets.a.weight.grad = None
        if i % 2:
            b.step()
            b.zero_grad()

    nets = run(step, 4, plugin=safe(growth_interval=1), owned=("ac", "bc"))
    # c has 1, then 2 when a steps, and 2 when b does: 5 in two batches
    assert nets.weights("abc") == [6.0, 6.0, 8 - 0.5 * 10]


# ---------------------------------------------------------------------- parameters added later


def test_parameters_added_between_batches_are_unscaled_too():
    def step(nets, x, i):
        a, b = nets.optimizers()
        if i == 2:
            a.add_param_group({"params": [nets.c.weight]})
        nets.backward_of("abc" if i >= 2 else "ab", x)
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()

    nets = run(step, 4, plugin=safe(growth_interval=1))
    assert nets.weights("abc") == [6.0, 6.0, 7.0]


@pytest.mark.parametrize("moves", ["growth", "backoff"])
def test_parameters_added_in_an_open_window_follow_the_scale(moves):
    """c joins a, whose window is open; the scale moves before a's step."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("b", x, bad="b" if moves == "backoff" else "")
        b.step()
        b.zero_grad()
        if i == 0:
            nets.backward_of("a", x)
            a.add_param_group({"params": [nets.c.weight]})
            nets.backward_of("c", x)
        if i == 1 and moves == "growth":
            return
        if i:
            a.step()
            a.zero_grad()

    nets = run(step, 3, plugin=safe(growth_interval=1))
    assert nets.scales == ([64.0, 128.0, 256.0] if moves == "growth" else [32.0, 16.0, 8.0])
    assert nets.weights("ac") == [7.5, 7.5]


def test_parameter_that_gets_a_second_owner_keeps_its_scale():
    """b takes c over, too, while a's window holds a gradient of it."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ac" if i == 0 else "b", x)
        if i == 1:
            b.add_param_group({"params": [nets.c.weight]})
            b.step()
            nets.b.weight.grad = None
            a.step()
            a.zero_grad()

    nets = run(step, 2, owned=("ac", "b"))
    assert nets.weights("abc") == [7.5, 7.5, 7.0]


# ---------------------------------------------------------------------- mistakes are named


def plain_backward(nets, x):
    nets.backward_of("b", x)
    nets.term("a", x).backward()


def plain_backward_before(nets, x):
    nets.term("a", x).backward()
    nets.backward_of("b", x)


def plain_backward_onto_by_products(nets, x):
    nets.backward_of("ab", x)
    nets.term("a", x).backward()


def plain_clip(nets, x):
    nets.backward_of("ab", x)
    torch.nn.utils.clip_grad_norm_(nets.a.parameters(), 1.0)


def edit_before_anothers_backward(nets, x):
    nets.backward_of("a", x)
    nets.a.weight.grad.mul_(0.5)
    nets.backward_of("b", x)


def replaced(nets, x):
    nets.backward_of("ab", x)
    nets.a.weight.grad = nets.a.weight.grad * 0.5


MADE, CHANGED = "were not made by `self.manual_backward`", "were changed in place or replaced"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (plain_backward, MADE),
        (plain_backward_before, MADE),
        (plain_backward_onto_by_products, "`loss.backward\\(\\)`"),
        (plain_clip, CHANGED),
        (edit_before_anothers_backward, CHANGED),
        (replaced, "`.grad` was assigned|changed in place or replaced"),
    ],
)
def test_mistake_names_parameter_and_optimizer(mistake, says):
    def step(nets, x, i):
        a, b = nets.optimizers()
        mistake(nets, x)
        b.step()
        a.step()

    nets = Nets(step)
    with pytest.raises(ScaledGradientError, match=says) as caught:
        fit(nets, safe(), 1)
    assert "'a.weight' (optimizer 0)" in str(caught.value)
    assert nets.weights("a") == [8.0]


def test_edits_of_true_gradients_are_no_mistake():
    """Unscaled first, a's gradient is clipped, and b's replaced, before other backward passes."""

    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x)
        nets.plugin.unscale_(a)
        torch.nn.utils.clip_grad_value_(nets.a.parameters(), 0.5)
        nets.plugin.unscale_(b)
        nets.b.weight.grad = nets.b.weight.grad * 4
        nets.backward_of("a", x)
        a.step()
        b.step()
        for optimizer in (a, b):
            optimizer.zero_grad()

    nets = run(step, 2)
    assert nets.weights() == [8 - 2 * 0.5 * 1.5, 8 - 2 * 0.5 * 4]


# ---------------------------------------------------------------------- nothing is half done


def test_same_plugin_and_nets_fit_again_after_an_exception_between_windows():
    def step(nets, x, i):
        a, b = nets.optimizers()
        nets.backward_of("ab", x)
        b.step()
        b.zero_grad()
        nets.plugin.unscale_(a)
        nets.backward_of("b", x)
        if i == 1 and nets.fails:
            raise RuntimeError("planted")
        a.step()
        a.zero_grad()
        b.zero_grad()

    nets, plugin = Nets(step), safe(growth_interval=1)
    nets.fails = True
    with pytest.raises(RuntimeError, match="planted"):
        fit(nets, plugin, 4)
    assert nets.weights() == [7.5, 7.0]
    nets.fails = False
    fit(nets, plugin, 4)
    assert nets.weights() == [7.5 - 4 * 0.5, 7.0 - 4 * 0.5]
    assert plugin.tallies == [StepTally(5, 5, 0, 0), StepTally(6, 6, 0, 0)]
