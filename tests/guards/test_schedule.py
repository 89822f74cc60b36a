# SPDX-License-Identifier: Apache-2.0
"""SchedulerGate: a schedule advances with applied updates only, and is otherwise left alone."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_amp_guard import AmpGuardWarning, SafeAMP, SchedulerGate
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, ManualLine, PlantedOverflow, fit

G, B, N, O = GOOD, BAD, NAN_LOSS, NONE  # noqa: E741

# Lightning's own remark on a plan with NONE in it
none_is_meant = pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")


def halving(optimizer):
    """1/2 of the rate at each advance: 0.5, 0.25, 0.125, exact in binary."""
    return StepLR(optimizer, step_size=1, gamma=0.5)


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, **kwargs})


def position(trainer):
    """How often the schedule has advanced."""
    return trainer.lr_scheduler_configs[0].scheduler.last_epoch


class NotesRates:
    """Notes the rate in force at each applied update."""

    def on_step_outcome(self, outcome):
        super().on_step_outcome(outcome)
        if outcome.applied:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.used = [*getattr(self, "used", []), rate]


class Rates(NotesRates, Line):
    """In automatic optimization."""


# ---------------------------------------------------------------------- automatic optimization


@none_is_meant
@pytest.mark.parametrize(
    ("plan", "frequency", "accumulate", "advances"),
    [
        ([G, G, G, G], 1, 1, 4),
        ([G, B, G, B], 1, 1, 2),
        ([B, B, B, B], 1, 1, 0),
        ([B, N, G, G], 1, 1, 2),
        ([G, O, G, O], 1, 1, 2),
        # turns after batches 2, 4, 6; nothing was applied in batches 3 and 4
        ([G, B, B, B, G, G], 2, 1, 2),
        # turns after batches 3 and 6; one applied update is enough
        ([B, G, B, B, B, G], 3, 1, 2),
        ([G, B, B, B, B, B], 3, 1, 1),
        # windows of two micro-batches: applied, skipped, applied
        ([G, G, B, G, G, G], 1, 2, 2),
        ([G, G, G, N, O, G], 1, 2, 2),
        # Lightning tells turns by micro-batches: with frequency 2 after 2, 4 and 6
        ([G, G, B, G, G, G], 2, 2, 2),
    ],
)
def test_step_schedule_waits_on_skipped_steps(plan, frequency, accumulate, advances):
    model = Line(plan, make_scheduler=halving, frequency=frequency)
    trainer = fit(model, plugin(), n=len(plan), accumulate_grad_batches=accumulate)
    assert position(trainer) == advances
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**advances


@none_is_meant
@pytest.mark.parametrize(
    ("epochs", "frequency", "advances"),
    [
        ([[G, G], [G, G]], 1, 2),
        ([[B, B], [G, B], [B, B]], 1, 1),
        ([[G, N], [N, N], [B, G]], 1, 2),
        ([[O, O], [G, G]], 1, 1),
        # turns after epochs 2 and 4
        ([[G, B], [B, B], [B, B], [B, B]], 2, 1),
        ([[B, B], [B, B], [B, B], [G, B]], 2, 1),
        # turns after epoch 3 only
        ([[G, B], [B, B], [B, B], [G, G]], 3, 1),
    ],
)
def test_epoch_schedule_waits_for_an_epoch_with_an_update(epochs, frequency, advances):
    plan = [fault for epoch in epochs for fault in epoch]
    model = Line(plan, make_scheduler=halving, interval="epoch", frequency=frequency)
    trainer = fit(model, plugin(), n=2, max_epochs=len(epochs))
    assert position(trainer) == advances


def test_used_rates_are_the_schedule_without_holes():
    model = Rates([B, G, B, G, G, G], make_scheduler=halving)
    fit(model, plugin(), n=6)
    assert model.used == [0.5, 0.25, 0.125, 0.0625]
    assert model.weight == 8 - 0.9375


def test_one_cycle_is_walked_without_holes():
    def cycle(optimizer):
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=8)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, want = cycle(optimizer), []
    for _ in range(6):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    model = Rates([B, G, B, G, G, G, G, G], make_scheduler=cycle)
    fit(model, plugin(), n=8)
    assert model.used == want


@pytest.mark.parametrize(
    ("interval", "n", "epochs"), [("step", 7, 1), ("epoch", 1, 7)], ids=["step", "epoch"]
)
def test_plateau_hears_nothing_of_skipped_steps(interval, n, epochs):
    class Plateau(Line):
        def training_step(self, batch, batch_idx):
            # falls with each good batch, and is useless on the others
            good = self.plan[self.seen] == G
            self.log("l", 8.0 - self.seen if good else float("inf"))
            return super().training_step(batch, batch_idx)

    model = Plateau(
        [G, G, B, N, B, G, G],
        make_scheduler=lambda o: ReduceLROnPlateau(o, patience=1, factor=0.1),
        interval=interval,
        monitor="l",
    )
    trainer = fit(model, plugin(), n=n, max_epochs=epochs)
    assert position(trainer) == 4
    # three infinite metrics in a row would have passed the patience of 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_disabled_gate_lets_the_schedule_run_ahead_as_in_stock():
    model = Line([G, B, B, G], make_scheduler=halving)
    trainer = fit(model, plugin(), callbacks=[SchedulerGate(enabled=False)])
    assert position(trainer) == 4
    assert "lr_scheduler_step" not in vars(model)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_bf16_schedule_waits_as_well(precision):
    model = Line([G, B, G, N], make_scheduler=halving)
    trainer = fit(model, plugin(precision=precision))
    assert position(trainer) == 2


class TimmStyle:
    """A scheduler of its own kind: no `step()` without arguments, but `step_update`."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, []

    def step_update(self, num_updates, metric=None):
        self.updates.append(num_updates)

    def step(self, epoch):
        raise AssertionError("the module steps it by `step_update`")

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


class StepsItsWay(Line):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step_update(num_updates=self.global_step, metric=metric)


def test_overridden_lr_scheduler_step_is_called_at_applied_updates_only():
    model = StepsItsWay([G, B, B, G, G], make_scheduler=TimmStyle)
    trainer = fit(model, plugin(), n=5)
    # global_step keeps Lightning's meaning, arrivals: the calls after batches 1, 4 and 5
    assert trainer.lr_scheduler_configs[0].scheduler.updates == [1, 4, 5]
    assert "lr_scheduler_step" not in vars(model)


@dataclass
class Equal:
    """Schedulers that are all equal, cannot be hashed, and take no weak reference."""

    __slots__ = ("optimizer", "steps")
    optimizer: Any
    steps: int

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_schedulers_that_compare_equal_are_told_apart():
    class Two(Line):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            configs = [
                {"scheduler": Equal(optimizer, 0), "interval": "step", "frequency": f}
                for f in (1, 2)
            ]
            return [optimizer], configs

    trainer = fit(Two([G, B, B, G]), plugin(), n=4)
    # the second one's turns: after batches 1 and 2 (applied), after 3 and 4 (applied)
    assert [c.scheduler.steps for c in trainer.lr_scheduler_configs] == [2, 2]


def test_schedule_of_an_unguarded_optimizer_is_left_alone():
    model = Line(
        make_optimizer=lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=1),
        make_scheduler=halving,
    )
    trainer = fit(model, plugin(precision="bf16-mixed"), n=3)
    assert model.outcomes == []  # LBFGS steps by its closure, there is no outcome to go by
    assert position(trainer) == 3


# ---------------------------------------------------------------------- manual optimization


class ManualSchedule(NotesRates, ManualLine):
    """Calls `scheduler.step(*args)` at the end of every `every`-th batch."""

    args = ()

    def __init__(self, plan=(), make_scheduler=halving, every=1, **kwargs):
        super().__init__(plan, make_scheduler=make_scheduler, **kwargs)
        self.every = every

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if (batch_idx + 1) % self.every == 0:
            self.lr_schedulers().step(*self.args)


@pytest.mark.parametrize(
    ("plan", "every", "advances"),
    [
        ([G, G, G], 1, 3),
        ([G, B, G], 1, 2),
        ([B, B, N], 1, 0),
        ([B, G, B, B, B, G], 2, 2),  # some applied: it passes
        ([G, B, B, B, G, G], 2, 2),  # all skipped: nothing
        ([G, O, O, G], 1, 4),  # no attempt at all: it passes
        ([G, O, B, O, G, O], 2, 2),  # skipped or without gradient: nothing
    ],
)
def test_manual_scheduler_step_does_nothing_after_skips_alone(plan, every, advances):
    trainer = fit(ManualSchedule(plan, every=every), plugin(), n=len(plan))
    assert position(trainer) == advances


def test_manual_scheduler_step_at_epoch_end_looks_back_on_the_epoch():
    class AtEpochEnd(ManualLine):
        def on_train_epoch_end(self):
            self.lr_schedulers().step()

    model = AtEpochEnd([B, B, G, B, B, B], make_scheduler=halving)
    assert position(fit(model, plugin(), n=2, max_epochs=3)) == 1


def test_manual_plateau_hears_nothing_of_skipped_steps():
    model = ManualSchedule([G, B, B, B, G], lambda o: ReduceLROnPlateau(o, patience=1, factor=0.1))
    model.args = (1.0,)
    trainer = fit(model, plugin(), n=5)
    # best, and one bad call, which the patience of 1 bears
    assert position(trainer) == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_manual_step_passes_every_time_with_the_gate_disabled():
    model = ManualSchedule([G, B, B])
    assert position(fit(model, plugin(), n=3, callbacks=[SchedulerGate(enabled=False)])) == 3


def test_each_scheduler_follows_its_own_optimizer():
    class Two(ManualLine):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(4, 1, bias=False)

        def configure_optimizers(self):
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (self.lin, self.other)]
            return optimizers, [halving(o) for o in reversed(optimizers)]

        def training_step(self, batch, batch_idx):
            for optimizer, layer, plan in zip(
                self.optimizers(), (self.lin, self.other), ([G, G, G], [B, G, B]), strict=True
            ):
                loss = layer(batch[0]).float().mean()
                self.manual_backward(PlantedOverflow.apply(loss, plan[batch_idx] == B))
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in self.lr_schedulers():
                scheduler.step()

    trainer = fit(Two(), plugin(), n=3)
    assert [c.scheduler.last_epoch for c in trainer.lr_scheduler_configs] == [1, 3]


def test_manual_scheduler_with_slots_and_without_hash_is_gated():
    trainer = fit(ManualSchedule([G, B, G], lambda o: Equal(o, 0)), plugin(), n=3)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.steps == 2
    assert type(scheduler) is Equal


# ---------------------------------------------------------------------- nested schedulers


def chained(optimizer):
    return ChainedScheduler([ConstantLR(optimizer, 0.5, total_iters=2), halving(optimizer)])


def sequential(optimizer):
    parts = [ConstantLR(optimizer, 0.5, total_iters=2), halving(optimizer)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize("make_scheduler", [chained, sequential])
@pytest.mark.parametrize("model_type", [Rates, ManualSchedule])
def test_nested_schedulers_advance_once_per_applied_update(make_scheduler, model_type):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, want = make_scheduler(optimizer), []
    for _ in range(4):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    model = model_type([B, G, B, G, B, G, G], make_scheduler=make_scheduler)
    fit(model, plugin(), n=7)
    assert model.used == want


# ---------------------------------------------------------------------- torch's warning


@none_is_meant
@pytest.mark.parametrize("plan", [[B], [B, B, G], [N, G, G], [B, O, G], [O, G]], ids=" ".join)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_torch_does_not_warn_of_the_order_because_of_a_skip(plan, interval):
    model = Line(plan, make_scheduler=halving, interval=interval)
    n, epochs = (len(plan), 1) if interval == "step" else (1, len(plan))
    fit(model, plugin(), n=n, max_epochs=epochs)  # warnings are errors here


@pytest.mark.parametrize("plan", [[B], [B, B, G], [N, G, G], [B, O, G]], ids=" ".join)
def test_torch_does_not_warn_of_the_order_because_of_a_manual_skip(plan):
    fit(ManualSchedule(plan), plugin(), n=len(plan))


# ---------------------------------------------------------------------- swapped schedulers


def test_scheduler_swapped_in_by_swa_is_gated_too():
    plan = [G, G, G, G, B, B, G, B, B, B]  # two batches an epoch
    model = Line(plan, make_scheduler=halving, interval="epoch")
    swa = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=1)
    trainer = fit(model, plugin(), n=2, max_epochs=5, callbacks=[swa])
    swapped = trainer.lr_scheduler_configs[0].scheduler
    assert swapped is swa._swa_scheduler
    # swapped in at the start of the second epoch; the second and fourth had an update. Torch
    # counts the call of its constructor as well.
    assert swapped._step_count == 1 + 2


def test_learning_rate_finder_is_gated_and_leaves_the_schedule_alone(tmp_path):
    model = Line([G, B, G, B, G, *[G, B, G, G, B]], make_scheduler=halving)
    finder = LearningRateFinder(
        min_lr=2.0**-10,
        max_lr=0.5,
        num_training_steps=5,
        early_stop_threshold=None,
        update_attr=False,
    )
    amp = plugin()
    trainer = fit(model, amp, n=5, callbacks=[finder], default_root_dir=str(tmp_path))
    rates = finder.optimal_lr.results["lr"]
    # rates are tried at applied updates: the batch after a skip gets the same one again
    assert rates[1] == rates[2] > rates[0]
    assert rates[3] == rates[4] > rates[2]
    assert position(trainer) == 3
    assert (amp.tally.attempted, amp.tally.applied) == (5, 3)
    assert amp.scaler.get_scale() == 16.0  # 64, two overflows of the fit itself
    assert "lr_scheduler_step" not in vars(model)


def test_scheduler_replaced_by_a_callback_starts_with_no_debt():
    class Replaces(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 1:
                self.first = self.trainer.lr_scheduler_configs[0].scheduler
                self.trainer.lr_scheduler_configs[0].scheduler = halving(self.first.optimizer)

    model = Replaces([G, G, B, G], make_scheduler=halving)
    trainer = fit(model, plugin())
    assert model.first.last_epoch == 2
    assert position(trainer) == 1


# ---------------------------------------------------------------------- left as it was


class Looks(ManualSchedule):
    """Hands the scheduler to `look` in the middle of the fit, after a skip."""

    look = staticmethod(lambda scheduler: None)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1:
            self.look(self.lr_schedulers())


def during(look, make_scheduler=halving):
    model, seen = Looks([G, B, G], make_scheduler), []
    model.look = lambda scheduler: seen.append(look(scheduler))
    trainer = fit(model, plugin(), n=3)
    return seen[0], trainer.lr_scheduler_configs[0].scheduler


def step_lr_with_lambda(optimizer):
    return LambdaLR(optimizer, halve_each)


def halve_each(step):
    return 0.5**step


@pytest.mark.parametrize(
    "make_scheduler", [halving, step_lr_with_lambda, chained, sequential, lambda o: Equal(o, 0)]
)
def test_state_dict_of_the_scheduler_is_untouched(make_scheduler):
    state, _ = during(lambda scheduler: scheduler.state_dict(), make_scheduler)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    fresh = make_scheduler(optimizer)
    assert sorted(state) == sorted(fresh.state_dict())
    fresh.load_state_dict(state)


def test_gated_scheduler_still_looks_like_its_class():
    seen, after = during(
        lambda s: (
            type(s).__name__,
            type(s).__qualname__,
            type(s).__module__,
            isinstance(s, StepLR),
        )
    )
    assert seen == ("StepLR", "StepLR", StepLR.__module__, True)
    assert type(after) is StepLR
    assert "step" not in vars(after)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize("make_scheduler", [halving, step_lr_with_lambda])
def test_copy_of_a_gated_scheduler_is_a_plain_one(copied, make_scheduler):
    twin, after = during(copied, make_scheduler)
    assert type(twin) is type(after)
    assert (twin.last_epoch, after.last_epoch) == (1, 2)
    twin.step()  # nobody's optimizer made an attempt, and nobody asks
    assert twin.last_epoch == 2


class Plain(Line):
    """A module that can be pickled."""

    def __init__(self):
        super().__init__([G, B, G])
        self.make_optimizer = self.make_scheduler = None
        self.twins = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.twins = [copy.deepcopy(self), pickle.loads(pickle.dumps(self))]
        super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("which", [0, 1], ids=["deepcopy", "pickle"])
def test_copy_of_the_module_made_during_the_fit_steps_schedules_itself(which):
    model = Plain()
    trainer = fit(model, plugin(), n=3)
    assert position(trainer) == 2
    twin = model.twins[which]
    scheduler = halving(torch.optim.SGD(twin.parameters(), lr=0.5))
    scheduler.optimizer.step()
    for _ in range(2):
        twin.lr_scheduler_step(scheduler, None)
    assert scheduler.last_epoch == 2
    # and the copy can be trained under the gate again: [good, bad, good]
    twin.seen = 0
    assert position(fit(twin, plugin(), n=3)) == 2


@pytest.mark.parametrize("model_type", [Line, ManualSchedule])
def test_module_and_scheduler_are_as_they_were_after_an_exception(model_type):
    class Fails(model_type):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self.seen == 2:
                raise RuntimeError("planted")

    model, amp = Fails([G, B, G, B], make_scheduler=halving), plugin()
    with pytest.raises(RuntimeError, match="planted"):
        fit(model, amp)
    assert "lr_scheduler_step" not in vars(model)
    scheduler = amp.trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is StepLR
    # fits again, with the schedule gated once: batches 3 and 4
    assert position(fit(model, amp, n=2)) == 1


def test_own_lr_scheduler_step_of_the_instance_comes_back():
    calls = []
    model = Line([G, B, G], make_scheduler=halving)

    def mine(scheduler, metric):
        calls.append(metric)
        scheduler.step()

    model.lr_scheduler_step = mine
    fit(model, plugin(), n=3)
    assert calls == [None, None]
    assert model.lr_scheduler_step is mine


def test_flags_of_a_former_resume_do_not_reach_the_next_fit():
    gate = SchedulerGate()

    class Loads(Line):
        def on_train_start(self):
            gate.load([[False, True], [True, False]])  # of two schedulers, here is one

    fit(Loads([B], make_scheduler=halving), plugin(), n=1, callbacks=[gate])
    trainer = fit(Line([B], make_scheduler=halving), plugin(), n=1, callbacks=[gate])
    assert position(trainer) == 0


# ---------------------------------------------------------------------- kept by the module itself


def adamw(params):
    return torch.optim.AdamW(params, lr=0.5, fused=True)


class KeepsIts:
    """Keeps its scheduler to itself; `lrs[i]` is the rate in force during batch i."""

    def __init__(self, *args, make_own=halving, **kwargs):
        super().__init__(*args, **kwargs)
        self.make_own, self.lrs = make_own, []

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        self.own = self.make_own(optimizer)
        return optimizer

    def on_train_batch_start(self, batch, batch_idx):
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class StepsItInOptimizerStep(KeepsIts, Line):
    """As Lightning's own tutorials do it."""

    on_step_outcome = None  # nobody needs outcomes at once but the schedule

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.own.step()


class StepsItAtBatchEnd(KeepsIts, Line):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.own.step()


class StepsItByHand(KeepsIts, ManualLine):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.own.step()


class MakesItInTime(StepsItAtBatchEnd):
    """The scheduler comes only when training starts, in a list."""

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def on_train_start(self):
        self.several = [halving(self.trainer.optimizers[0])]

    @property
    def own(self):
        return self.several[0]


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["plain", "late"])
@pytest.mark.parametrize(
    "kind", [StepsItInOptimizerStep, StepsItAtBatchEnd, StepsItByHand, MakesItInTime]
)
def test_scheduler_that_the_module_keeps_waits_on_skipped_steps(kind, optimizer):
    model = kind([B, G, N, G, G], optimizer)
    fit(model, plugin(), n=6)
    assert model.lrs == [0.5, 0.5, 0.25, 0.25, 0.125, 0.0625]
    assert type(model.own) is StepLR


class MakesItInTheFirstStep(StepsItAtBatchEnd):
    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def training_step(self, batch, batch_idx):
        if not self.seen:
            self.own = halving(self.trainer.optimizers[0])
        return super().training_step(batch, batch_idx)


def test_scheduler_that_the_module_makes_in_its_first_step_waits_on_skipped_steps():
    model = MakesItInTheFirstStep([B, G, N, G, G])
    fit(model, plugin(), n=6)
    assert model.lrs == [0.5, 0.5, 0.25, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["plain", "late"])
def test_scheduler_that_the_module_makes_anew_in_each_epoch_waits_on_skipped_steps(optimizer):
    class MakesItAnew(StepsItAtBatchEnd):
        on_step_outcome = None

        def configure_optimizers(self):
            return self.make_optimizer(self.parameters())

        def on_train_epoch_start(self):
            optimizer = self.trainer.optimizers[0]
            optimizer.param_groups[0].update(lr=0.5, initial_lr=0.5)
            self.own = halving(optimizer)

    model = MakesItAnew([B, G, G, N, G, B], optimizer)
    fit(model, plugin(), n=3, max_epochs=2)
    assert model.lrs == [0.5, 0.5, 0.25, 0.5, 0.5, 0.25]


def test_scheduler_that_the_module_keeps_runs_ahead_with_the_gate_disabled():
    model = StepsItInOptimizerStep([G, B, G])
    fit(model, plugin(), n=3, callbacks=[SchedulerGate(enabled=False)])
    assert model.lrs == [0.5, 0.25, 0.125]


def test_inner_schedulers_that_the_module_keeps_as_well_follow_the_outer_one():
    class KeepsParts(StepsItInOptimizerStep):
        def configure_optimizers(self):
            optimizer = self.make_optimizer(self.parameters())
            self.warm_up = ConstantLR(optimizer, factor=1.0, total_iters=1)
            self.rest = halving(optimizer)
            self.own = SequentialLR(optimizer, [self.warm_up, self.rest], milestones=[1])
            return optimizer

    model = KeepsParts([B, G, B])
    fit(model, plugin(), n=6)
    assert model.lrs == [0.5, 0.5, 0.5, 0.5, 0.25, 0.125]
    assert model.own.last_epoch == 4


def test_scheduler_that_the_module_keeps_of_those_it_hands_over_has_one_gate():
    class KeepsAndHandsOver(KeepsIts, Line):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.own, "interval": "step"},
            }

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kinds = [type(self.own) is StepLR, *getattr(self, "kinds", [])]

    model = KeepsAndHandsOver([B, G, G])
    fit(model, plugin(), n=4)
    assert model.lrs == [0.5, 0.5, 0.25, 0.125]
    assert model.kinds == [True] * 4


def test_scheduler_class_that_cannot_be_derived_from_is_said_to_run_ahead():
    class Demands(StepLR):
        def __init_subclass__(cls, *, tag):
            cls.tag = tag

    class Halving(Demands, tag="halving"):
        pass

    model = StepsItAtBatchEnd([B, G, G], make_own=lambda o: Halving(o, step_size=1, gamma=0.5))
    with pytest.warns(AmpGuardWarning, match="`Halving` are not left out .*'tag'"):
        fit(model, plugin(), n=3)
    assert model.lrs == [0.5, 0.25, 0.125]
    assert type(model.own) is Halving


def test_scheduler_of_an_optimizer_outside_the_fit_is_left_alone():
    class OfAnother(StepsItAtBatchEnd):
        def configure_optimizers(self):
            optimizer = self.make_optimizer(self.parameters())
            other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
            self.own = halving(other)
            other.step()  # torch expects one before the scheduler's first
            return optimizer

    model = OfAnother([B, B, B])
    fit(model, plugin(), n=4)
    assert model.own.last_epoch == 4


@none_is_meant
def test_flags_of_a_kept_scheduler_survive_a_resume(tmp_path):
    class EverySecond(KeepsIts, Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 2 and not self.trainer.ckpt_path:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")
            if batch_idx % 2:
                self.own.step()

    # batches 0, 1: a turn with an update; 2 is skipped, 3 has no loss: a turn with nothing but a skip
    whole, resumed = EverySecond([G, G, B, O]), EverySecond([O])
    fit(whole, plugin(), n=6)
    fit(resumed, plugin(), n=6, ckpt_path=tmp_path / "x.ckpt")
    assert whole.own.last_epoch == 2
    assert resumed.own.last_epoch == 1  # its turn after 3 was left out, that after 5 was not
