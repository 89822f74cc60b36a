# SPDX-License-Identifier: Apache-2.0
"""SchedulerGate: a schedule advances with applied updates only."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import wraps
from inspect import getattr_static, isfunction
from typing import Any

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.guards._base import Guard, GuardCore, Host, InstancePatch
from lightning_amp_guard.outcome import StepOutcome
from lightning_amp_guard.state import read_flag_pairs

__all__ = ["SchedulerGate"]


class Turn:
    """What happened to a scheduler's optimizer since the scheduler's last turn."""

    def __init__(self, applied: bool = False, skipped: bool = False) -> None:
        self.applied, self.skipped = applied, skipped
        self.others: list[Turn] = []  # of its methods other than `step`

    def note(self, applied: bool) -> None:
        """Take down what became of an attempt."""
        self.applied |= applied
        self.skipped |= not applied
        for other in self.others:
            other.note(applied)

    def take(self) -> tuple[bool, bool]:
        """Return `(applied, skipped)` and begin anew."""
        seen = self.applied, self.skipped
        self.applied = self.skipped = False
        return seen


class SchedulerGateCore(GuardCore):
    """See `SchedulerGate`."""

    name = "SchedulerGate"
    takes_late_outcomes = True

    @names_its_class
    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._heard = False  # of an outcome since the last look at what the module keeps?
        self._turns: list[tuple[Any, Turn]] = []  # by identity: schedulers may define __eq__
        self._pending: list[list[bool]] = []
        self._patch: InstancePatch | None = None
        self._swapped: list[tuple[Any, type]] = []
        self._own: list[Any] = []  # those that the module keeps to itself, and steps itself

    def attach(self, host: Host) -> None:
        """Stand before the schedulers of this fit."""
        self.detach()
        super().attach(host)
        self._pending = []
        if host.module.automatic_optimization:
            self._patch = InstancePatch.once(host.module, "lr_scheduler_step", self._at_turn)
        self.see_epoch()

    def detach(self) -> None:
        """Give module and schedulers back as they were."""
        if self._patch is not None:
            self._patch.undo()
        for scheduler, kind in self._swapped:
            scheduler.__class__ = kind
        self._patch, self._swapped, self._turns, self._own = None, [], [], []
        super().detach()

    def see_epoch(self) -> None:
        """Find the schedulers that the module did not hand to the Trainer, inner ones aside."""
        assert self.host is not None
        self._heard = False
        found = _upstream.schedulers_of(self.host.module)
        outer = [*found, *(config.scheduler for config in self.host.trainer.lr_scheduler_configs)]
        inner = [scheduler for one in outer for scheduler in _upstream.schedulers_of(one)]
        handed = outer[len(found) :]
        self._own = [s for s in found if all([s is not other for other in (*handed, *inner)])]
        self._follow()

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Remember what became of the optimizer's attempt."""
        if not self._heard and self.host is not None:
            self.see_epoch()  # the module may have made them in this very step
            self._heard = True
        for turn, optimizer in self._follow():
            if optimizer == outcome.optimizer_idx:
                turn.note(outcome.applied)
        if not outcome.applied and self.host is not None:
            lane = self.host.running().windows.lanes[outcome.optimizer_idx]
            _upstream.count_as_stepped(lane.optimizer)

    def _follow(self) -> list[tuple[Turn, int | None]]:
        """Return the turns of the schedulers there are now, callbacks may have swapped them."""
        if self.host is None:
            return []
        by_trainer = self.host.module.automatic_optimization
        handed = [config.scheduler for config in self.host.trainer.lr_scheduler_configs]
        found: list[tuple[Turn, int | None]] = []
        for scheduler in (*handed, *self._own):
            turn = self._turn_of(scheduler)
            if turn is None:
                turn = Turn(*(self._pending.pop(0) if self._pending else ()))
                self._turns.append((scheduler, turn))
                if not by_trainer or len(found) >= len(handed):
                    self._swap(scheduler, turn)
            found.append((turn, self._optimizer_of(scheduler)))
        return found

    def _turn_of(self, scheduler: Any) -> Turn | None:
        return next((turn for known, turn in self._turns if known is scheduler), None)

    def _optimizer_of(self, scheduler: Any) -> int | None:
        optimizer = _upstream.unwrap_optimizer(getattr(scheduler, "optimizer", None))
        assert self.host is not None
        for lane in self.host.running().windows.lanes:
            if lane.optimizer is optimizer:
                return lane.idx
        return None

    def _gated(self, scheduler: Any) -> bool:
        """Return whether the scheduler's optimizer makes attempts that this guard hears of."""
        idx = self._optimizer_of(scheduler)
        return idx is not None and self.host is not None and idx not in self.host.unguarded()

    def _at_turn(self, step: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Automatic optimization: let the turn pass only after an applied update."""
        assert self.host is not None
        self.host.settle()
        self._follow()
        turn = self._turn_of(scheduler)
        if turn is not None and self._gated(scheduler) and not turn.take()[0]:
            return None
        return step(scheduler, *args, **kwargs)

    def _swap(self, scheduler: Any, turn: Turn) -> None:
        """The user's own calls: leave one out when every attempt since the last was skipped.

        The class is swapped, because an instance attribute would land in the `state_dict`.
        """
        kind = type(scheduler)
        gates = {"step": self._gate(kind, "step", turn)} if hasattr(kind, "step") else {}
        # timm's have `step(epoch)` and `step_update(num_updates)`, each with turns of its own
        for name in dir(kind):
            if name.startswith("step_") and isfunction(getattr_static(kind, name)):
                turn.others.append(Turn(turn.applied, turn.skipped))
                gates[name] = self._gate(kind, name, turn.others[-1])

        def reduce(self: Any, protocol: Any) -> Any:
            reduced: Any = object.__reduce_ex__(self, protocol)
            made, args, *rest = reduced
            # pickle compares the class that `__newobj__` makes with the object's own
            made = _new if made is copyreg.__newobj__ else made  # type: ignore[attr-defined]
            return made, tuple(kind if a is gated else a for a in args), *rest

        names = {**gates, "__reduce_ex__": reduce, "__module__": kind.__module__}
        names |= {"__qualname__": kind.__qualname__, "__slots__": ()}  # no other layout
        try:
            gated = type(kind.__name__, (kind,), names)
            scheduler.__class__ = gated
        except TypeError as error:  # it demands something of its subclasses
            self._say_ungated(kind.__name__, error)
        else:
            self._swapped.append((scheduler, kind))

    def _say_ungated(self, kind: str, error: TypeError) -> None:
        assert self.host is not None
        self.host.warn(
            f"`{self.name}`: steps of the scheduler `{kind}` are not left out after skipped updates,"
            f" since its class refuses a subclass of its own ({error}). Expected one that can be"
            " derived from without arguments. Give `__init_subclass__` defaults, or return the"
            " scheduler from `configure_optimizers` in automatic optimization."
        )

    def _gate(self, kind: type, name: str, turn: Turn) -> Callable[..., Any]:
        method = getattr(kind, name)

        @wraps(method)
        def gated(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.host is not None:
                self.host.settle()
            applied, skipped = turn.take()
            if skipped and not applied:
                return None
            return method(scheduler, *args, **kwargs)

        return gated

    def save(self) -> list[list[bool]]:
        """Return `[applied, skipped]` since the last turn, per scheduler of the Trainer."""
        return [[turn.applied, turn.skipped] for turn, _ in self._follow()]

    def load(self, saved: Any) -> None:
        """Take up the flags that `save` returned."""
        flags = read_flag_pairs(saved, "the schedulers")
        turns = [turn for turn, _ in self._follow()]
        for turn, (applied, skipped) in zip(turns, flags, strict=False):
            for one in (turn, *turn.others):
                one.applied, one.skipped = applied, skipped
        self._pending = flags[len(turns) :]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        fresh: dict[str, Any] = {"_turns": [], "_pending": [], "_patch": None, "_swapped": []}
        return {**super().__getstate__(), **fresh, "_own": []}


def _new(kind: type, *args: Any) -> Any:
    return kind.__new__(kind, *args)


class SchedulerGate(SchedulerGateCore, Guard):
    """Lets a learning rate scheduler advance only with applied updates of its optimizer.

    Stock Lightning advances every schedule at every arrival, skipped or not: 6 schedule steps for
    4 updates, a warm-up that ends early, a OneCycle with holes (Lightning issues 5558 and 18828). In
    automatic optimization a scheduler takes its turn (step or epoch interval, `frequency`, plateau,
    an overridden `lr_scheduler_step`) only if an update of its optimizer was applied since its
    previous turn. In manual optimization your `scheduler.step()` does nothing if every attempt
    since the previous call was skipped; with no attempt at all it passes; likewise `step_update` and
    other methods named `step_...`. So it is, in either mode, with a scheduler of torch's that the
    module keeps as an attribute and steps itself (`self.lr_scheduler.step()` in `optimizer_step`)
    instead of handing it to the Trainer. Schedulers of optimizers that the plugin does not step are
    left alone (steps by `plugin.scaler.step`, past Lightning, too), and their `state_dict` is
    untouched.

    Args:
        enabled: `False` lets schedules advance as in stock Lightning.

    Runs: after each attempt, and at a scheduler's turn.
    Reads: `trainer.lr_scheduler_configs`, at every attempt, since callbacks swap them.
    Keeps: two flags per scheduler in the plugin's checkpoint entry.
    Host sync: none.
    """
