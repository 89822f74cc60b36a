# SPDX-License-Identifier: Apache-2.0
"""The path of a step with one optimizer, rule by rule, through a real Trainer in real FP16."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard import (
    AmpGuardWarning,
    NonFiniteGradientError,
    SafeAMP,
    SkipLimitError,
    SkipReason,
    StepOutcome,
    StepTally,
    _upstream,
)
from tests.helpers import (
    BAD,
    GOOD,
    NAN_LOSS,
    NONE,
    Line,
    ManualLine,
    PlantedOverflow,
    batches,
    fit,
    make_trainer,
    stock_plugin,
)

# Lightning says so once per fit; missing losses are planted here.
names_culprits = pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")  # of skips that go on
returns_none = pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")

SCALE = 2.0**10


def safe(**kwargs):
    return SafeAMP(**{"init_scale": SCALE, **kwargs})


def sgd(params, **kwargs):
    return torch.optim.SGD(params, lr=0.5, **kwargs)


def fused_sgd(params):
    return sgd(params, fused=True)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


plain_and_fused = pytest.mark.parametrize(
    "make_optimizer", [sgd, fused_sgd], ids=["plain", "fused"]
)
both_modes = pytest.mark.parametrize("kind", [Line, ManualLine], ids=["automatic", "manual"])


def flags(model):
    return [outcome.applied for outcome in model.outcomes]


def reasons(model):
    return [outcome.reason for outcome in model.outcomes]


def scales(model):
    return [outcome.scale for outcome in model.outcomes]


# ---------------------------------------------------------------- the stages, in order


class TracedSGD(torch.optim.SGD):
    trace = None

    def step(self, closure=None):
        self.trace.append("step")
        return super().step(closure)


class TracedStepLR(torch.optim.lr_scheduler.StepLR):
    trace = None

    def step(self, *args):
        if self.trace is not None:
            self.trace.append("scheduler")
        super().step(*args)


class TracedAverage(WeightAveraging):
    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        update = self._average_model.update_parameters

        def traced(module):
            pl_module.trace.append("average")
            update(module)

        self._average_model.update_parameters = traced


class TracedMixin:
    """Writes down each stage as it happens; what it may see of the gradient goes beside it."""

    def __init__(self, plan=()):
        super().__init__(plan)
        self.trace = []

    def configure_optimizers(self):
        optimizer = TracedSGD(self.parameters(), lr=0.5)
        scheduler = TracedStepLR(optimizer, step_size=1, gamma=0.5)
        optimizer.trace = scheduler.trace = self.trace
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def loss(self, batch):
        self.trace.append("forward")
        return super().loss(batch)

    def on_before_backward(self, loss):
        # the weight of 8 on four ones makes a loss of 32
        assert float(loss.detach()) == 32 * SCALE or self.plan[self.seen] == NAN_LOSS
        self.trace.append("scaled")

    def backward(self, loss, *args, **kwargs):
        self.trace.append("backward")
        super().backward(loss, *args, **kwargs)

    def on_after_backward(self):
        self.trace.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.trace.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.trace.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_step_outcome(self, outcome):
        self.trace.append("outcome")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trace.append("on_train_batch_end")


class TracedLine(TracedMixin, Line):
    pass


class TracedManualLine(TracedMixin, ManualLine):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()


class TracedCallback(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.trace.append("callback: on_before_optimizer_step")

    def on_step_outcome(self, trainer, pl_module, outcome):
        pl_module.trace.append("callback: outcome")


def traced_fit(model, monkeypatch, n=1):
    plugin = safe()
    unscale = plugin.scaler.check_

    def traced(*args, **kwargs):
        model.trace.append("unscale")
        return unscale(*args, **kwargs)

    monkeypatch.setattr(plugin.scaler, "check_", traced)
    # the order of callbacks must not matter: the average is asked before the outcome is told
    fit(model, plugin, n=n, callbacks=[TracedAverage(), TracedCallback()])
    return model.trace


HEAD = ["forward", "scaled", "backward", "on_after_backward", "unscale"]
HOOKS = ["callback: on_before_optimizer_step", "on_before_optimizer_step"]
TOLD = ["callback: outcome", "outcome"]
END = ["on_train_batch_end"]
TAKEN = {
    "applied": ([GOOD], ["step"], ["scheduler"], ["average"]),
    "skipped": ([BAD], [], [], []),
    "nan loss": ([NAN_LOSS], [], [], []),
}


@pytest.mark.parametrize(("plan", "step", "scheduler", "average"), TAKEN.values(), ids=TAKEN)
def test_an_automatic_step_takes_the_documented_path(plan, step, scheduler, average, monkeypatch):
    trace = traced_fit(TracedLine(plan), monkeypatch)
    assert trace == [*HEAD, *HOOKS, "clip", *step, *TOLD, *scheduler, *average, *END]


@pytest.mark.parametrize(("plan", "step", "scheduler", "average"), TAKEN.values(), ids=TAKEN)
def test_a_manual_step_takes_the_same_path_without_the_trainers_clip(
    plan, step, scheduler, average, monkeypatch
):
    trace = traced_fit(TracedManualLine(plan), monkeypatch)
    assert trace == [*HEAD, *HOOKS, *step, *TOLD, *scheduler, *average, *END]


def test_a_step_without_a_loss_reaches_the_hooks_and_no_outcome(monkeypatch):
    model = TracedManualLine([GOOD, NONE])
    trace = traced_fit(model, monkeypatch, n=2)
    second = trace[trace.index("on_train_batch_end") + 1 :]
    # no attempt, so the user's own scheduler call passes; no update, so no sample
    assert second == ["forward", *HOOKS, "scheduler", *END]


# ---------------------------------------------------------------- rule 1: true gradients


class SeesGradients(L.Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(pl_module.lin.weight.grad.tolist())


@both_modes
@plain_and_fused
def test_hooks_of_callback_and_module_see_true_gradients(kind, make_optimizer):
    class Sees(kind):
        def on_before_optimizer_step(self, optimizer):
            callback.seen.append(self.lin.weight.grad.tolist())

    callback = SeesGradients()
    model = Sees([GOOD, GOOD], make_optimizer)
    fit(model, safe(growth_interval=1), n=2, callbacks=[callback])
    assert callback.seen == [[[1.0] * 4]] * 4
    assert model.weight == 7.0


@both_modes
@plain_and_fused
def test_what_a_hook_does_to_the_gradients_reaches_the_update(kind, make_optimizer):
    class Halves(kind):
        def on_before_optimizer_step(self, optimizer):
            self.lin.weight.grad.mul_(0.5)

    model = Halves([GOOD], make_optimizer)
    fit(model, safe(), n=1)
    assert model.weight == 7.75


class ClipsByHand(ManualLine):
    clip = None

    def between(self, optimizer):
        self.clip_gradients(optimizer, **self.clip)


@plain_and_fused
@pytest.mark.parametrize(
    ("clip", "weight", "norm"),
    [
        # four ones have the norm 2: a quarter is left
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}, 7.875, 2.0),
        ({"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"}, 7.875, None),
        ({"gradient_clip_val": 2.5, "gradient_clip_algorithm": "norm"}, 7.5, 2.0),
    ],
    ids=["norm", "value", "loose"],
)
def test_manual_clipping_acts_on_true_gradients(make_optimizer, clip, weight, norm):
    model = ClipsByHand([GOOD], make_optimizer)
    model.clip = clip
    fit(model, safe(), n=1)
    torch.testing.assert_close(model.weight, weight, rtol=0, atol=1e-6)
    assert model.outcomes == [StepOutcome(0, 0, True, None, SCALE, SCALE, 1, norm)]


@plain_and_fused
@pytest.mark.parametrize(("clip", "weight", "norm"), [("norm", 7.875, 2.0), ("value", 7.75, None)])
def test_the_trainers_clipping_acts_on_true_gradients(make_optimizer, clip, weight, norm):
    model = Line([GOOD], make_optimizer)
    fit(model, safe(), n=1, gradient_clip_val=0.5, gradient_clip_algorithm=clip)
    torch.testing.assert_close(model.weight, weight, rtol=0, atol=1e-6)
    assert model.outcomes[0].grad_norm == norm


def test_outcome_has_the_norm_before_clipping_of_an_accumulated_window():
    # three micro-batches of a third each, on 16 weights: ones again, with the norm 4
    model = Line(width=16)
    fit(model, safe(), n=3, accumulate_grad_batches=3, gradient_clip_val=1.0)
    assert [(o.micro_batches, o.applied) for o in model.outcomes] == [(3, True)]
    torch.testing.assert_close(model.outcomes[0].grad_norm, 4.0, rtol=1e-3, atol=0)


UNSCALES = {
    "plugin, wrapper": lambda plugin, wrapper: plugin.unscale_(wrapper),
    "plugin, optimizer": lambda plugin, wrapper: plugin.unscale_(wrapper.optimizer),
    "scaler, wrapper": lambda plugin, wrapper: plugin.scaler.unscale_(wrapper),
    "scaler, optimizer": lambda plugin, wrapper: plugin.scaler.unscale_(wrapper.optimizer),
}


@plain_and_fused
@pytest.mark.parametrize("again", UNSCALES.values(), ids=UNSCALES)
@pytest.mark.parametrize("first", UNSCALES.values(), ids=UNSCALES)
def test_unscaling_twice_in_a_window_is_unscaling_once(first, again, make_optimizer):
    class Unscales(ManualLine):
        def between(self, optimizer):
            plugin = self.trainer.precision_plugin
            for unscale in (first, again):
                unscale(plugin, optimizer)
                assert self.lin.weight.grad.tolist() == [[1.0] * 4]
            self.lin.weight.grad.mul_(0.5)  # true gradients may be edited

    model = Unscales([GOOD, GOOD], make_optimizer)
    fit(model, safe(growth_interval=1), n=2)
    assert model.weight == 7.5
    assert scales(model) == [SCALE, 2 * SCALE]


def test_unscaling_outside_of_a_fit_does_nothing():
    plugin, weight = safe(), torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), SCALE)
    plugin.unscale_(sgd([weight]))
    assert weight.grad.item() == SCALE


class Surgery(ManualLine):
    """Adds the true gradients of two tasks up by hand, 1 + 2; `plan` says which task overflows."""

    def __init__(self, plan, assigns, clips):
        super().__init__(plan)
        self.assigns, self.clips = assigns, clips

    def training_step(self, batch, batch_idx):
        optimizer, parts = self.optimizers(), []
        for task in (1, 2):
            optimizer.zero_grad()
            loss = self.lin(batch[0]).float().mean() * task
            bad = batch_idx < len(self.plan) and self.plan[batch_idx] == task
            self.manual_backward(PlantedOverflow.apply(loss, bad))
            self.trainer.precision_plugin.unscale_(optimizer)
            parts.append(self.lin.weight.grad.clone())
        if self.assigns:
            self.lin.weight.grad = parts[0] + parts[1]
        else:
            self.lin.weight.grad.copy_(parts[0] + parts[1])
        if self.clips:
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("assigns", [True, False])
@pytest.mark.parametrize("task", [1, 2])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_gradients_put_together_from_several_passes_are_judged_as_they_are(
    precision, task, assigns, clips
):
    model = Surgery([None, task], assigns, clips)
    plugin = safe() if precision == "16-mixed" else SafeAMP(precision=precision)
    fit(model, plugin, n=3)
    assert model.weight == 5.0  # two updates with 3
    assert flags(model) == [True, False, True]
    if plugin.scaler is not None:
        assert plugin.scaler.get_scale() == SCALE / 2  # one overflow, one backoff


def test_gradients_that_nobody_edits_after_an_early_check_are_not_checked_again():
    class Clips(ManualLine):
        checks = 0

        def between(self, optimizer):
            scaler = self.trainer.precision_plugin.scaler
            check = scaler.multiply_held_

            def counted(holder, ratio):
                self.checks += 1
                return check(holder, ratio)

            scaler.multiply_held_ = counted
            self.trainer.precision_plugin.unscale_(optimizer)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            del self.trainer.precision_plugin.scaler.multiply_held_

    model = Clips()
    fit(model, safe(), n=2)
    assert model.weight == pytest.approx(7.5, abs=1e-5)  # a norm of 2 clipped to 1, twice
    assert model.checks == 0


def test_gradients_may_be_edited_before_their_time_once_they_are_unscaled():
    class EditsAfterBackward(Line):
        def on_after_backward(self):
            self.trainer.precision_plugin.unscale_(self.optimizers())
            self.lin.weight.grad.mul_(0.5)

    model = EditsAfterBackward()
    fit(model, safe(growth_interval=1), n=4, accumulate_grad_batches=2)
    # a half becomes a quarter; a half more, three quarters become three eighths: twice
    assert model.weight == 7.625
    assert [o.micro_batches for o in model.outcomes] == [2, 2]


@plain_and_fused
def test_loops_written_against_torchs_scaler_go_on_working(make_optimizer):
    class ByHand(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer, scaler = self.optimizers().optimizer, self.trainer.precision_plugin.scaler
            optimizer.zero_grad()
            scaler.scale(self.loss(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    model = ByHand([GOOD, BAD, GOOD, GOOD], make_optimizer)
    plugin = safe(growth_interval=2)
    fit(model, plugin, n=4)
    assert model.weight == 7.25
    assert plugin.scaler.get_scale() == SCALE  # once down, once up


# ---------------------------------------------------------------- rule 4: gradients that outlive


class Script(ManualLine):
    """Runs one named action list per batch: "b" backward, "s" step, "z"/"0" zero_grad, "u" unscale.

    Between the two kinds of zero_grad, "z" sets gradients to None and "0" to zeros.
    """

    def __init__(self, *acts, plan=(), make_optimizer=sgd):
        super().__init__(plan, make_optimizer)
        self.acts, self.backwards = acts, 0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for act in self.acts[batch_idx]:
            if act == "b":
                self.seen, self.backwards = self.backwards, self.backwards + 1
                self.manual_backward(self.loss(batch))
            elif act == "s":
                optimizer.step()
            elif act == "u":
                self.trainer.precision_plugin.unscale_(optimizer)
            else:
                optimizer.zero_grad(set_to_none=act == "z")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """The plan follows backward passes here, not batches."""


@plain_and_fused
@pytest.mark.parametrize(
    ("acts", "weight"),
    [
        (["bs", "bs"], 6.5),  # never zeroed: 1, then 2
        (["bs", "bs", "bs"], 5.0),  # 1, 2, 3
        (["bss"], 7.0),  # the second step sees the same 1
        (["bs", "s", "s"], 6.5),
        (["bu", "bs"], 7.0),  # unscaled early, the step given up: 2
        (["bub", "us"], 7.0),
        (["bu", "b", "u", "bs"], 6.5),
        (["bsb", "s"], 6.5),
        (["bs0", "bs"], 7.0),
        (["bs", "0s", "bs"], 7.0),  # zeros are gradients: the step in the middle adds nothing
        (["bsu", "bus"], 6.5),
        (["b", "b", "bs"], 6.5),  # one window over three batches
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("growth_interval", [1, 1000], ids=["growing", "constant"])
def test_gradients_that_outlive_a_step_count_as_in_float32(
    acts, weight, growth_interval, make_optimizer
):
    model = Script(*acts, make_optimizer=make_optimizer)
    fit(model, safe(growth_interval=growth_interval), n=len(acts))
    assert model.weight == weight
    assert all(flags(model))


@plain_and_fused
def test_a_scale_set_by_hand_in_a_window_moves_its_gradients_too(make_optimizer):
    class SetsScale(Script):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.precision_plugin.scaler.update(new_scale=SCALE * 4.0**-batch_idx)

    model = SetsScale("b", "b", "bs", make_optimizer=make_optimizer)
    fit(model, safe(), n=3)
    assert model.weight == 6.5  # 1 + 1 + 1
    assert scales(model) == [SCALE / 16]


def test_a_window_that_was_unscaled_early_keeps_its_count_and_its_blame():
    model = Script("bu", "bs", plan=[NAN_LOSS, GOOD])
    plugin = safe()
    fit(model, plugin, n=2)
    assert model.outcomes == [StepOutcome(0, 0, False, SkipReason.NONFINITE_LOSS, SCALE, SCALE, 2)]


def test_stepping_again_on_the_same_overflow_is_one_backoff():
    model = Script("bs", "s", "zbs", plan=[BAD, GOOD])
    fit(model, safe(), n=3)
    assert flags(model) == [False, False, True]
    # the second attempt is made on the gradients of the first, which carried the first scale
    assert scales(model) == [SCALE, SCALE, SCALE / 2]
    assert [o.next_scale for o in model.outcomes] == [SCALE / 2] * 3
    assert model.weight == 7.5


@pytest.mark.parametrize("second", ["s", "bs"], ids=["stepped-again", "added-to"])
def test_a_nan_loss_left_in_the_gradients_keeps_the_blame(second):
    model = Script("bs", second, "zbs", plan=[NAN_LOSS, GOOD, GOOD])
    fit(model, safe(), n=3)
    assert reasons(model) == [SkipReason.NONFINITE_LOSS, SkipReason.NONFINITE_LOSS, None]
    assert scales(model) == [SCALE] * 3


@pytest.mark.parametrize("fault", [BAD, NAN_LOSS])
def test_gradients_zeroed_in_place_are_forgiven(fault):
    model = Script("bs0", "bs0", "bs0", "bs", plan=[fault, BAD, GOOD, BAD])
    fit(model, safe(), n=4)
    blame = SkipReason.NONFINITE_GRADIENTS
    assert reasons(model)[1:] == [blame, None, blame]
    assert scales(model)[2] == scales(model)[1] / 2


@plain_and_fused
def test_a_step_given_up_in_a_hook_counts_as_in_float32(make_optimizer):
    class GivesUp(ManualLine):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            with suppress(ZeroDivisionError):
                self.optimizers().step()

        def on_before_optimizer_step(self, optimizer):
            if self.seen == 0:
                raise ZeroDivisionError

    model = GivesUp([GOOD, GOOD], make_optimizer)
    fit(model, safe(), n=2)
    assert model.weight == 7.0  # one update with 1 + 1
    assert [(o.attempt, o.applied, o.micro_batches) for o in model.outcomes] == [(0, True, 2)]


@plain_and_fused
def test_a_step_that_ran_out_of_memory_can_be_taken_again(make_optimizer):
    class Retries(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx == 0:
                raised = optimizer.optimizer.register_step_pre_hook(out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
                raised.remove()
            optimizer.step()

    model = Retries([GOOD, GOOD], make_optimizer)
    fit(model, safe(), n=2)
    assert model.weight == 7.0
    assert [o.attempt for o in model.outcomes] == [0, 1]


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("planted")


# ---------------------------------------------------------------- rule 6: steps without gradients


@both_modes
@returns_none
def test_a_step_without_any_gradient_is_no_attempt(kind):
    model = kind([NONE, GOOD, NONE])
    plugin = safe(growth_interval=1)
    trainer = fit(model, plugin, n=3)
    assert trainer.global_step == 3  # arrivals, as Lightning counts them
    assert plugin.tally == StepTally(1, 1, 0, 0)
    assert (model.weight, plugin.scaler.get_scale()) == (7.5, 2 * SCALE)


@plain_and_fused
def test_zero_gradients_are_stepped_as_in_float32(make_optimizer):
    def with_decay(params):
        return torch.optim.SGD(params, lr=0.5, weight_decay=0.5, fused=make_optimizer is fused_sgd)

    model = Script("bs0", "s", make_optimizer=with_decay)
    fit(model, safe(), n=2)
    assert model.weight == 4.125  # 8 - 0.5 * (1 + 4) = 5.5; 5.5 - 0.5 * 2.75
    assert flags(model) == [True, True]


@returns_none
@plain_and_fused
def test_automatic_optimization_may_zero_gradients_in_place(make_optimizer):
    class ZeroesInPlace(Line):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    def with_momentum(params):
        return torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=make_optimizer is fused_sgd)

    model = ZeroesInPlace([GOOD, NONE, BAD, GOOD], with_momentum)
    fit(model, safe(), n=4)
    # buffer 1; 0.5 for the zeros of the batch without a loss; left alone; 0.25 + 1
    assert model.weight == 8.0 - 0.5 * (1 + 0.5 + 1.25)
    assert [(o.applied, o.micro_batches) for o in model.outcomes] == [
        (True, 1),
        (True, 0),
        (False, 1),
        (True, 1),
    ]


@plain_and_fused
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_added_to_the_optimizer_during_the_fit_are_unscaled_too(
    make_optimizer, accumulate
):
    class Unfreezes(Line):
        def __init__(self):
            super().__init__([GOOD, GOOD, GOOD, BAD, GOOD], make_optimizer)
            self.late = torch.nn.Parameter(torch.zeros(()))

        def loss(self, batch):
            loss = super().loss(batch)
            return loss + self.late

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:  # with two micro-batches: in the middle of a window
                self.optimizers().optimizer.add_param_group({"params": [self.late]})

        def configure_optimizers(self):
            return make_optimizer(self.lin.parameters())

    model = Unfreezes()
    fit(model, safe(growth_interval=1), n=6, accumulate_grad_batches=accumulate)
    if accumulate == 1:
        assert flags(model) == [True, True, True, False, True, True]
        assert (model.weight, float(model.late.detach())) == (5.5, -2.0)
    else:
        # windows 1 and 3 apply; `late` collected gradients from the first batch on, as in float32
        assert flags(model) == [True, False, True]
        assert (model.weight, float(model.late.detach())) == (7.0, -1.0)
    assert set(reasons(model)) == {None, SkipReason.NONFINITE_GRADIENTS}


@pytest.mark.parametrize("fault", [GOOD, BAD])
def test_sparse_gradients_are_unscaled_and_checked(fault):
    class Sparse(Line):
        def __init__(self):
            super().__init__([GOOD, fault])
            self.table = torch.nn.Embedding(3, 1, sparse=True)
            torch.nn.init.zeros_(self.table.weight)

        def loss(self, batch):
            rows = self.table(torch.tensor([1, 1, 2])).sum()  # row 1 twice, row 0 never
            armed = self.plan[self.seen] == BAD
            return self.lin(batch[0]).float().mean() + PlantedOverflow.apply(rows, armed)

    model = Sparse()
    fit(model, safe(growth_interval=1), n=2)
    updates = 2 if fault == GOOD else 1
    assert model.table.weight[:, 0].tolist() == [0.0, -1.0 * updates, -0.5 * updates]
    assert model.weight == 8.0 - 0.5 * updates


@returns_none
def test_a_window_is_stepped_though_its_last_batch_had_no_loss():
    model = Line([GOOD, NONE, NONE, GOOD, NONE])
    fit(model, safe(), n=5, accumulate_grad_batches=2)
    # windows: (1 + nothing) / 2, (nothing + 1) / 2, nothing
    assert model.weight == 7.5
    assert [o.micro_batches for o in model.outcomes] == [1, 1]


# ---------------------------------------------------------------- closures and overrides


@plain_and_fused
def test_a_step_returns_what_its_closure_returns(make_optimizer):
    class Closes(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return ("result", batch_idx)

            self.results.append(optimizer.step(closure))
            self.results.append(optimizer.step(closure=closure))

    model = Closes([GOOD, BAD, GOOD], make_optimizer)
    model.results = []
    fit(model, safe(), n=3)
    assert model.results == [("result", i) for i in (0, 0, 1, 1, 2, 2)]
    assert flags(model) == [True, True, False, False, True, True]
    assert model.weight == 6.0


def test_a_manual_step_without_a_closure_returns_none():
    class Returns(ManualLine):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.results = [self.optimizers().step()]

    model = Returns()
    fit(model, safe(), n=1)
    assert model.results == [None]


def test_a_users_optimizer_step_is_followed():
    class EveryOther(Line):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    model = EveryOther([GOOD, GOOD, BAD, BAD, GOOD, GOOD], None, step_lr)
    trainer = fit(model, safe(), n=6)
    assert flags(model) == [True, False, True]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert model.weight == 7.25  # 0.5, then half the learning rate


def test_a_users_clipping_is_followed():
    class Clips(Line):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            assert self.lin.weight.grad.tolist() == [[1.0] * 4]
            self.clip_gradients(optimizer, 0.25, "value")

    model = Clips([GOOD, GOOD], fused_sgd)
    fit(model, safe(), n=2)
    assert model.weight == 7.75


def test_a_users_backward_is_followed():
    class Twice(Line):
        def backward(self, loss, *args, **kwargs):
            super().backward(loss, *args, retain_graph=True, **kwargs)
            super().backward(loss, *args, **kwargs)

    model = Twice([GOOD, BAD, GOOD])
    fit(model, safe(), n=3)
    assert flags(model) == [True, False, True]
    assert model.weight == 6.0  # two updates with a gradient of 2


# ---------------------------------------------------------------- rule 7: nothing is half done

BEFORE = ["training_step", "on_before_backward", "backward", "autograd", "on_after_backward"]
AT = ["on_before_optimizer_step", "step"]
AFTER = ["on_step_outcome", "on_train_batch_end"]
PLACES = [
    *((Line, where) for where in [*BEFORE, "on_before_zero_grad", *AT, *AFTER]),
    (Line, "configure_gradient_clipping"),
    (Line, "lr_scheduler_step"),
    *((ManualLine, where) for where in [*BEFORE, *AT, *AFTER]),
]


class Fails:
    """Runs out of memory at `where` in its second batch, once; mixed into a `Line`."""

    where, armed = "", True

    def __init__(self):
        super().__init__((), self.hooked_sgd, step_lr)

    def maybe_raise(self, *args):
        if self.armed and self.seen == 1:
            self.armed = False
            raise torch.OutOfMemoryError("planted")

    def hooked_sgd(self, params):
        optimizer = sgd(params)
        if self.where == "step":
            optimizer.register_step_pre_hook(self.maybe_raise)
        return optimizer

    def loss(self, batch):
        if self.where == "training_step":
            self.maybe_raise()
        loss = super().loss(batch)
        if self.where == "autograd":
            loss.register_hook(self.maybe_raise)
        return loss

    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.lr_schedulers().step()
        return result


def raising(kind, where):
    """Return the class of a `kind` that fails at `where`, a hook or one of three other places."""

    def hook(self, *args, **kwargs):
        self.maybe_raise()
        return getattr(super(cls, self), where)(*args, **kwargs)

    hooks = {} if where in ("training_step", "autograd", "step") else {where: hook}
    cls = type("Raises", (Fails, kind), {"where": where, **hooks})
    return cls


def marks_on(trainer, model):
    """What a fit may leave its marks on: types, attribute names and module hooks."""
    things = [trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler, *trainer.callbacks]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return [(type(thing), sorted(vars(thing))) for thing in things], sorted(vars(model)), hooks


@pytest.mark.parametrize(("kind", "where"), PLACES, ids=[f"{k.__name__}-{w}" for k, w in PLACES])
def test_after_an_exception_everything_is_ready_to_fit_again(kind, where):
    model, plugin = raising(kind, where)(), safe(growth_interval=1, fp32_modules=["lin"])
    clip = {"gradient_clip_val": 3.0} if kind is Line else {}
    trainer = make_trainer(plugin, callbacks=[WeightAveraging()], **clip)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        trainer.fit(model, batches(4))
    applied = 2 if where in [*AFTER, "lr_scheduler_step"] else 1
    weight = 7.25 if applied == 2 else 7.5
    assert (model.weight, plugin.tally) == (weight, StepTally(applied, applied, 0, 0))
    assert marks_on(trainer, model) == marks_on(*stock_run(kind, where, clip))
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_anomaly_enabled()

    scale, model.seen, model.outcomes = plugin.scaler.get_scale(), 2, []
    trainer.callbacks = []  # the average would replace the weights
    trainer.fit(model, batches(4))
    assert scales(model) == [scale, 2 * scale, 4 * scale, 8 * scale]
    assert [o.attempt for o in model.outcomes] == [applied + i for i in range(4)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert model.weight == weight - 0.9375  # 0.5 + 0.25 + 0.125 + 0.0625


def stock_run(kind, where, clip):
    model = raising(kind, where if where != "on_step_outcome" else "on_train_batch_end")()
    trainer = make_trainer(stock_plugin(init_scale=SCALE), callbacks=[WeightAveraging()], **clip)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        trainer.fit(model, batches(4))
    return trainer, model


@both_modes
def test_after_a_fit_nothing_is_left_on_user_objects(kind):
    class Plain(kind):
        def training_step(self, batch, batch_idx):
            result = super().training_step(batch, batch_idx)
            if not self.automatic_optimization:
                self.lr_schedulers().step()
            return result

    marks = []
    for plugin in (safe(fp32_modules=["lin"]), stock_plugin(init_scale=SCALE)):
        model = Plain([], None, step_lr, interval="epoch")
        swa = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2)
        callbacks = [WeightAveraging()] if kind is ManualLine else [WeightAveraging(), swa]
        trainer = fit(model, plugin, n=2, callbacks=callbacks, max_epochs=2)
        marks.append(marks_on(trainer, model))
    assert marks[0] == marks[1]


def test_a_backward_that_ran_out_of_memory_may_be_swallowed():
    class Swallows(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.loss(batch)
            if batch_idx == 1:
                loss.register_hook(out_of_memory)
            with suppress(torch.OutOfMemoryError):
                self.manual_backward(loss)
                optimizer.step()
            optimizer.zero_grad()

    model = Swallows()
    fit(model, safe(growth_interval=1), n=4)
    assert scales(model) == [SCALE, 2 * SCALE, 4 * SCALE]
    assert [o.micro_batches for o in model.outcomes] == [1, 1, 1]
    assert model.weight == 6.5


# ---------------------------------------------------------------- rule 10: trouble has a name


@both_modes
@pytest.mark.parametrize(
    ("fault", "reason", "last", "parts"),
    [
        (BAD, SkipReason.NONFINITE_GRADIENTS, SCALE / 4, ["loss was finite", "scale 256"]),
        (NAN_LOSS, SkipReason.NONFINITE_LOSS, SCALE, ["loss itself was inf or NaN", "scale 1024"]),
    ],
    ids=["gradients", "loss"],
)
@names_culprits
def test_the_nth_skip_in_a_row_ends_the_run_and_says_why(kind, fault, reason, last, parts):
    model = kind([fault, fault, GOOD, fault, fault, fault, GOOD])
    plugin = safe(max_consecutive_skips=3)
    if fault == BAD:
        plugin = safe(max_consecutive_skips=3, init_scale=SCALE * 4)
    with pytest.raises(SkipLimitError) as error:
        fit(model, plugin, n=7)
    message = str(error.value)
    for part in [*parts, "max_consecutive_skips=3", "3 updates in a row", "'lin.weight'"]:
        assert part in message
    assert message.endswith("`loss_fn(x.float())`")  # it is no submodule that could run in float32
    after = last / 2 if fault == BAD else last
    assert error.value.outcome == StepOutcome(0, 5, False, reason, last, after, 1)
    assert model.outcomes[-1] == error.value.outcome
    assert (model.weight, plugin.scaler.get_scale()) == (7.5, after)
    assert plugin.tally == StepTally(6, 1, 5, 0)


@names_culprits
def test_without_a_limit_skips_never_end_the_run():
    plugin = safe(max_consecutive_skips=None)
    fit(Line([BAD] * 40), plugin, n=40)
    assert plugin.tally == StepTally(40, 0, 40, 40)
    assert plugin.scaler.get_scale() == 1.0  # the default bound


@names_culprits
def test_the_default_limit_is_32():
    plugin = safe()
    with pytest.raises(SkipLimitError, match="32 updates in a row"):
        fit(Line([BAD] * 40), plugin, n=40)
    assert plugin.tally.attempted == 32


@pytest.mark.filterwarnings(
    # what Lightning says whenever this callback meets a fit without `ckpt_path`
    "ignore:`.fit.ckpt_path=None.` was called without a model:UserWarning",
    "ignore:.*but there is no last checkpoint available:UserWarning",
)
def test_a_checkpoint_of_a_given_up_run_does_not_end_the_next_one(tmp_path):
    class Saves(OnExceptionCheckpoint):
        def teardown(self, *args):
            """Keep the file."""

    with pytest.raises(SkipLimitError):
        fit(
            Line([BAD] * 2),
            safe(max_consecutive_skips=2),
            n=4,
            callbacks=[Saves(tmp_path)],
            enable_checkpointing=True,
        )
    path = tmp_path / "on_exception.ckpt"
    saved = torch.load(path, weights_only=True)["SafeAMP"]["tallies"]
    assert saved == [{"attempted": 2, "applied": 0, "skipped": 2, "consecutive_skips": 0}]
    plugin = safe(max_consecutive_skips=2)
    fit(Line([BAD, GOOD]), plugin, n=4, ckpt_path=path)
    assert plugin.tally.skipped == 3


class TwoLines(L.LightningModule):
    """Two layers of two weights; the gradient of "bad" is not finite, that of "good" is one half."""

    def __init__(self, value):
        super().__init__()
        self.good = torch.nn.Linear(2, 1, bias=False)
        self.bad = torch.nn.Linear(2, 1, bias=False)
        self.bad.weight.register_hook(lambda grad: torch.full_like(grad, value))

    def training_step(self, batch, batch_idx):
        return (self.good(batch[0]) + self.bad(batch[0])).float().mean() / 2

    def configure_optimizers(self):
        return sgd(self.parameters())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=["inf", "nan"])
@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"error_if_nonfinite": True}, NonFiniteGradientError),
        ({"max_consecutive_skips": 1}, SkipLimitError),
    ],
    ids=["error_if_nonfinite", "limit"],
)
def test_errors_name_the_parameter_at_fault_also_after_clipping(
    setting, error, value, clip, precision
):
    clipping = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": clip} if clip else {}
    with pytest.raises(error) as raised:
        fit(TwoLines(value), SafeAMP(precision, **setting), data=batches(2, 2), **clipping)
    assert "'bad.weight'" in str(raised.value)
    assert "'good.weight'" not in str(raised.value)
    assert raised.value.outcome.attempt == 0


def test_error_if_nonfinite_lets_clean_steps_pass():
    model = Line([GOOD, GOOD, BAD])
    with pytest.raises(NonFiniteGradientError, match=r"attempt 2 .* scale 1024.*'lin.weight'"):
        fit(model, safe(error_if_nonfinite=True), n=4)
    assert flags(model) == [True, True, False]


# ---------------------------------------------------------------- set-ups


class Quadratic(Line):
    def loss(self, batch):
        return self.lin(batch[0]).float().pow(2).mean()


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=2)


def test_lbfgs_is_refused_under_fp16_before_the_first_batch():
    model = Quadratic((), lbfgs)
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*bf16-mixed"):
        fit(model, safe(), n=2)
    assert model.seen == 0


@pytest.mark.parametrize("mode", ["automatic", "manual"])
def test_lbfgs_runs_unguarded_under_bf16_and_that_is_said_once(mode, caplog):
    class Closes(Quadratic, ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)
            self.lr_schedulers().step()

    model = (Closes if mode == "manual" else Quadratic)((), lbfgs, step_lr)
    plugin = SafeAMP("bf16-mixed")
    with caplog.at_level(logging.INFO):
        trainer = fit(model, plugin, n=3)
    assert sum("LBFGS" in record.message for record in caplog.records) == 1
    assert model.weight < 8.0
    assert plugin.tally == StepTally()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_another_device_than_the_trainers_is_refused_at_set_up():
    model = Line()
    with pytest.raises(MisconfigurationException, match=r"device='cuda'.*'cpu'"):
        fit(model, SafeAMP(device="cuda"))
    assert model.seen == 0
    fit(model, SafeAMP(device="cpu"), n=1)
    assert model.seen == 1


@pytest.mark.parametrize(
    ("native", "chosen", "slow"),
    [
        ((True, True), "bf16-mixed", False),
        ((True, False), "bf16-mixed", False),
        ((False, True), "16-mixed", False),
        ((False, False), "bf16-mixed", True),
    ],
)
def test_auto_takes_what_the_device_computes_natively(native, chosen, slow, monkeypatch, caplog):
    monkeypatch.setattr(_upstream, "native_low_precision", lambda device: native)
    plugin, model = SafeAMP("auto", init_scale=SCALE), Line([GOOD, BAD])
    with caplog.at_level(logging.INFO):
        trainer = fit(model, plugin, n=2)
        fit(Line(), plugin, n=1)
    lines = [r.message for r in caplog.records if '"auto"' in r.message]
    assert len(lines) == 1
    assert repr(chosen) in lines[0]
    assert ("32-true is faster" in lines[0]) is slow
    assert trainer.precision == plugin.precision == chosen
    assert (plugin.scaler is None) == (chosen == "bf16-mixed")
    assert flags(model) == [True, False]


@pytest.mark.parametrize(("guard", "applied"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(BAD, SkipReason.NONFINITE_GRADIENTS), (NAN_LOSS, SkipReason.NONFINITE_LOSS)],
)
@both_modes
@plain_and_fused
def test_bf16_guard_skips_what_is_not_finite(kind, fault, reason, guard, applied, make_optimizer):
    model = kind([GOOD, fault, GOOD], make_optimizer, width=4)
    plugin = SafeAMP("bf16-mixed", bf16_guard=guard)
    fit(model, plugin, n=3)
    first, third = (StepOutcome(0, i, True, None, 1.0, 1.0, 1) for i in (0, 2))
    second = StepOutcome(0, 1, applied, None if applied else reason, 1.0, 1.0, 1)
    assert model.outcomes == [first, second, third]
    assert plugin.scaler is None
    assert (model.weight == 7.0) is guard
    assert torch.isfinite(model.lin.weight).all() == guard


# ---------------------------------------------------------------- anomaly detection


class Zeros(Line):
    """A column of zeros, so that a gradient that overflows on its way becomes NaN there."""

    def loss(self, batch):
        x = batch[0].clone()
        x[:, 1] = 0.0
        return super().loss((x,))


# A quarter of the scale reaches float16 for each of four samples, and they are summed: 2**20 to
# 2**18 overflow on the way (NaN in the column of zeros), 2**17 and 2**16 in the sum.
OVERFLOWING = [2.0**k for k in (20, 19, 18, 17, 16)]


@both_modes
def test_anomaly_detection_does_not_take_an_overflow_for_an_anomaly(kind):
    model = type("ZerosInMode", (Zeros, kind), {})()
    fit(model, SafeAMP(init_scale=2.0**20), n=7, detect_anomaly=True)
    assert scales(model) == [*OVERFLOWING, 2.0**15, 2.0**15]
    assert flags(model) == [False] * 5 + [True] * 2
    assert model.weight == 7.0
    assert not torch.is_anomaly_enabled()


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")  # torch's own traceback
@both_modes
def test_anomaly_detection_raises_for_a_nan_that_is_there_without_the_scale(kind):
    class TrueNaN(kind):
        def loss(self, batch):
            # the root of zero has an infinite slope, times zero
            return super().loss(batch) + (self.lin(batch[0]).float() * 0).sqrt().mean()

    model = TrueNaN()
    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(model, safe(), n=2, detect_anomaly=True)
    assert model.outcomes == []
    assert not torch.is_anomaly_enabled()


def test_anomaly_detection_is_off_under_reentrant_checkpointing_and_that_is_said_once():
    class Recomputes(Zeros):
        def loss(self, batch):
            x = batch[0].clone().requires_grad_()
            with torch.no_grad():
                x[:, 1] = 0.0
            return checkpoint(lambda x: self.lin(x).float().mean(), x, use_reentrant=True)

    model = Recomputes()
    with pytest.warns(AmpGuardWarning, match="reentrant") as said:
        fit(model, SafeAMP(init_scale=2.0**20), n=6, detect_anomaly=True)
    assert sum(warning.category is AmpGuardWarning for warning in said) == 1
    assert flags(model) == [False] * 5 + [True]
    assert model.weight == 7.5


def test_a_backward_that_failed_under_anomaly_detection_does_not_haunt_the_next_fit():
    class Looks(raising(Line, "on_before_backward")):
        checked = ()

        def backward(self, loss, *args, **kwargs):
            self.checked = (*self.checked, torch.is_anomaly_enabled())
            super().backward(loss, *args, **kwargs)

    model, plugin = Looks(), safe()
    with pytest.raises(torch.OutOfMemoryError):
        fit(model, plugin, n=2, detect_anomaly=True)
    assert model.checked == (True,)
    fit(model, plugin, n=2)
    assert model.checked == (True, False, False)


# ---------------------------------------------------------------- how the scale moves


MOVES = {
    # the second overflow since the last growth backs off, and each further one
    "hysteresis": (
        {"hysteresis": 2, "growth_interval": 3},
        "bgbbgggbg",
        [1, 1, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2],
    ),
    "static": ({"dynamic": False, "growth_interval": 1}, "gbgb", [1, 1, 1, 1]),
    "floor": ({"min_scale": SCALE / 2}, "bbbg", [1, 1 / 2, 1 / 2, 1 / 2]),
    "ceiling": ({"max_scale": SCALE * 2, "growth_interval": 1}, "gggb", [1, 2, 2, 2]),
    # a NaN loss neither advances nor resets the counter
    "nan loss at 0": ({"growth_interval": 2}, "ggnggbg", [1, 1, 2, 2, 2, 4, 2]),
    "nan loss at 1": ({"growth_interval": 2}, "gnggbgg", [1, 1, 1, 2, 2, 1, 1]),
    "nan loss backs off": (
        {"backoff_on_nonfinite_loss": True, "growth_interval": 2},
        "gnggg",
        [1, 1, 1 / 2, 1 / 2, 1],
    ),
    "factors": (
        {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1},
        "gbbg",
        [1, 4, 1, 1 / 4],
    ),
}


@both_modes
@pytest.mark.parametrize(("settings", "plan", "expected"), MOVES.values(), ids=MOVES)
@names_culprits
def test_the_scale_moves_by_its_settings(kind, settings, plan, expected):
    model = kind([{"g": GOOD, "b": BAD, "n": NAN_LOSS}[p] for p in plan])
    fit(model, safe(**settings), n=len(plan))
    assert scales(model) == [SCALE * factor for factor in expected]
    assert flags(model) == [p == "g" for p in plan]


def test_several_manual_steps_of_one_batch_count_once_towards_growth():
    model = Script("bsbs", "bsbs")
    fit(model, safe(growth_interval=1), n=2)
    assert scales(model) == [SCALE, SCALE, 2 * SCALE, 2 * SCALE]


# ---------------------------------------------------------------- whom the outcome is told


class Listens(L.Callback):
    def __init__(self):
        self.heard = []

    def on_step_outcome(self, trainer, pl_module, outcome):
        self.heard.append((trainer, pl_module, outcome))
        pl_module.log("from_callback", float(outcome.applied))


@both_modes
def test_callbacks_and_module_hear_each_outcome_and_may_log(kind):
    class Logs(kind):
        def on_step_outcome(self, outcome):
            super().on_step_outcome(outcome)
            self.log("from_module", outcome.scale)

    callback, model, plugin = Listens(), Logs([GOOD, BAD]), safe()
    trainer = fit(model, plugin, n=2, callbacks=[callback])
    assert callback.heard == [(trainer, model, outcome) for outcome in model.outcomes]
    assert plugin.last_outcome is model.outcomes[1]
    assert trainer.callback_metrics == {"from_callback": 0.0, "from_module": SCALE}


@both_modes
def test_an_on_step_outcome_that_cannot_be_called_is_absent(kind):
    class NoHook(kind):
        on_step_outcome = "not a hook"

    class NoHookCallback(L.Callback):
        on_step_outcome = None

    plugin = safe()
    fit(NoHook(), plugin, n=2, callbacks=[NoHookCallback()])
    assert plugin.tally.applied == 2


# ---------------------------------------------------------------- beyond one fit


def test_several_fits_and_trainers_go_on_with_one_plugin():
    plugin = safe(growth_interval=2)
    first, second = Line([GOOD, BAD, GOOD]), Line([GOOD, GOOD, BAD])
    trainer = fit(first, plugin, n=3)
    fit(second, plugin, n=3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, batches(3))
    assert [o.attempt for o in first.outcomes] == [0, 1, 2, 6, 7, 8]
    assert [o.attempt for o in second.outcomes] == [3, 4, 5]
    # the overflow halves it; one clean batch, one more, growth, an overflow, three clean batches
    assert scales(first) == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE]
    assert scales(second) == [SCALE / 2, SCALE, SCALE]
    assert plugin.tally == StepTally(9, 7, 2, 0)
    assert (first.weight, second.weight) == (5.5, 7.0)
    assert plugin.scaler.state_dict()["_growth_tracker"] == 1


class AlsoEvaluates(Line):
    def validation_step(self, batch, batch_idx):
        assert torch.is_autocast_enabled("cpu")
        return self.lin(batch[0]).float().mean()

    test_step = predict_step = validation_step


def test_a_plugin_may_evaluate_before_it_ever_fits():
    plugin, model = safe(), AlsoEvaluates()
    trainer = make_trainer(plugin)
    trainer.validate(model, batches(1), verbose=False)
    assert plugin.tallies == []
    assert plugin.scaler.get_scale() == SCALE
    trainer.fit(model, batches(2), batches(1))
    assert model.weight == 7.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_validate_test_and_predict_change_nothing(accumulate):
    plugin, model = safe(growth_interval=1), AlsoEvaluates([GOOD, BAD, GOOD])
    trainer = make_trainer(plugin, accumulate_grad_batches=accumulate)
    trainer.fit(model, batches(4), batches(1))
    before, tallies = copy.deepcopy(plugin.state_dict()), list(plugin.tallies)
    last, weight = plugin.last_outcome, model.weight
    for function in ("validate", "test", "predict"):
        kwargs = {} if function == "predict" else {"verbose": False}
        getattr(trainer, function)(model, batches(2), **kwargs)
        assert plugin.state_dict() == before
        assert plugin.tallies == tallies
        assert plugin.last_outcome is last
    assert model.weight == weight
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(4), batches(1))
    assert model.weight == weight - 4 / accumulate * 0.5


def test_validation_inside_a_window_leaves_the_window_alone():
    plugin, model = safe(growth_interval=1), AlsoEvaluates([GOOD, GOOD, BAD, GOOD, GOOD, GOOD])
    trainer = make_trainer(plugin, accumulate_grad_batches=2, val_check_interval=1)
    trainer.fit(model, batches(6), batches(1))
    assert flags(model) == [True, False, True]
    assert [o.micro_batches for o in model.outcomes] == [2, 2, 2]
    assert scales(model) == [SCALE, 2 * SCALE, SCALE]
    assert model.weight == 7.0


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_the_learning_rate_finder_leaves_scale_and_tallies_as_they_were(used, tmp_path):
    plugin, model = safe(growth_interval=2), Line([GOOD, GOOD, GOOD, BAD, GOOD])
    if used:
        fit(Line([BAD, GOOD]), plugin, n=2)
    before, tally = copy.deepcopy(plugin.scaler.state_dict()), plugin.tally
    trainer = make_trainer(plugin, default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(model, batches(8), num_training=8, update_attr=False)
    assert len(found.results["loss"]) == 8
    assert flags(model)[:5] == [True, True, True, False, True]  # it did train, and it did overflow
    assert plugin.scaler.state_dict() == before
    assert plugin.tally == tally
    assert model.weight == 8.0
    model.outcomes = []
    trainer.fit(model, batches(2))
    assert [o.attempt for o in model.outcomes] == [tally.attempted, tally.attempted + 1]
    # two clean batches since the scale last moved, or the one of the earlier fit and one more
    assert scales(model) == ([SCALE / 2, SCALE] if used else [SCALE, SCALE])


# ---------------------------------------------------------------------- parameters that change


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_parameter_replaced_in_its_group_is_unscaled_and_checked(at, accumulate):
    """As densification and pruning do: another parameter in the same place of the group."""

    class Replaces(Line):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == at:
                new = torch.nn.Parameter(self.lin.weight.detach().clone())
                self.lin.weight = new
                self.trainer.optimizers[0].param_groups[0]["params"] = [new]

    ours, stock = Replaces(), Replaces()
    fit(ours, SafeAMP(init_scale=64.0), 4, accumulate_grad_batches=accumulate)
    fit(stock, stock_plugin(init_scale=64.0), 4, accumulate_grad_batches=accumulate)
    assert ours.weight == stock.weight


def test_a_group_added_beside_frozen_parameters_is_trained():
    class Adds(Line):
        def __init__(self):
            super().__init__(make_optimizer=lambda _: torch.optim.SGD(self.idle.parameters(), 0.5))
            self.idle = torch.nn.Linear(1, 1)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.optimizers[0].add_param_group({"params": [self.lin.weight]})

    model, plugin = Adds(), SafeAMP(init_scale=64.0)
    fit(model, plugin, 3)
    assert model.weight == 7.0  # batches 1 and 2
    assert plugin.tally.applied == 2


@pytest.mark.parametrize("guarded", [False, True])
def test_bf16_windows_end_with_their_step_also_unguarded(guarded):
    class InPlace(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad(set_to_none=False)
            self.manual_backward(self.loss(batch))
            optimizer.step()

    model = InPlace()
    fit(model, SafeAMP("bf16-mixed", bf16_guard=guarded), 3)
    assert [outcome.micro_batches for outcome in model.outcomes] == [1, 1, 1]
    assert model.weight == 6.5
