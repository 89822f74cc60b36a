# SPDX-License-Identifier: Apache-2.0
"""The life of a precision plugin from set-up to teardown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch.nn import Module
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import AmpGuardError
from lightning_amp_guard.guards._base import GuardCore
from lightning_amp_guard.guards.checkpoint import ScalerCheckpointCore
from lightning_amp_guard.outcome import StepOutcome, StepTally
from lightning_amp_guard.plugin.configuration import Configuration
from lightning_amp_guard.plugin.fp32_scope import Float32Scopes
from lightning_amp_guard.plugin.guard_choice import choose_guards
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.anomaly import AnomalyProbe
from lightning_amp_guard.step.attempt import AttemptEngine
from lightning_amp_guard.step.ranks import DdpSpread, RankAgreement

__all__ = ["LifeCycle"]

_STAGES = {"outcome": "_after", "loss": "_see_loss", "batch": "_see_batch"}


class LifeCycle(Configuration):
    """Sets a fit up and takes it down, whichever Lightning base class stands behind.

    Lightning calls `convert_module` and `connect` for every Trainer function, and `teardown` also
    after an exception; only a fit gets windows, guards and listeners, and all of it is undone there.
    """

    guard_types: ClassVar[tuple[type[GuardCore], ...]] = ()

    def _prepare(self) -> None:
        self._tallies: list[StepTally] = []
        self._last: StepOutcome | None = None
        self.trainer: Any = None
        self.module: Any = None
        self.engine: AttemptEngine | None = None
        self._checkpoint = ScalerCheckpointCore()
        self._forget_run()

    def _forget_run(self) -> None:
        self.guards: list[Any] = []
        self.active = False
        self._gates: dict[str, Any] = {}
        self._scopes: Float32Scopes | None = None
        self._unguarded: set[int] = set()
        self._after: list[Callable[[StepOutcome], None]] = []
        self._after_skip: list[Callable[[StepOutcome, Any], None]] = []
        self._see_batch: list[Callable[[Any], None]] = []
        self._see_epoch: list[Callable[[], None]] = []
        self._begun = False  # has this fit had a batch?
        self._see_loss: list[Callable[[Any], None]] = []
        self._heard: tuple[Any, int] = (None, 0)
        self._patient = self._unseen = self._hurried = self._hold_alarm = False
        self.telling_late = False  # are outcomes told after their batch is gone?
        self._batch: Any = None  # of a training step in manual optimization
        self._overdue: AmpGuardError | None = None  # to be raised at the end of the next step
        self._held: AmpGuardError | None = None  # likewise, unless that step knows more
        self._hooks: list[Callable[[StepOutcome], Any]] = []
        self._handled: list[Any] = []
        self._probe = AnomalyProbe(self.warn)

    def settle(self) -> None:
        """Read the attempts that nobody has read yet, and tell of them."""

    @property
    def tallies(self) -> list[StepTally]:
        """The counts per optimizer. Host sync: one where attempts are still to be read."""
        self.settle()
        return self._tallies

    @property
    def last_outcome(self) -> StepOutcome | None:
        """The newest outcome. Host sync: one where attempts are still to be read."""
        self.settle()
        return self._last

    @property
    def tally(self) -> StepTally:
        """The sum over all optimizers; its `consecutive_skips` is the largest."""
        return StepTally.total(self.tallies)

    # ------------------------------------------------------------------ life cycle

    def convert_module(self, module: Any) -> Any:
        """Learn the module and put `fp32_modules` in force, for every Trainer function."""
        self.refuse_without_trainer(module)
        self.module, self.trainer = module, module.trainer
        self.resolve(self.trainer)
        self._remove_scopes()
        try:
            self._scopes = Float32Scopes(
                module, self.settings.fp32_modules, self.device, self.autocast_context_manager
            )
        except ValueError as error:
            given = list(self.settings.fp32_modules)
            raise self.fail(f"`{self._name()}(fp32_modules={given!r})`: {error}") from None
        return super().convert_module(module)  # type: ignore[misc]

    def connect(self, model: Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Begin a fit: windows, guards, listeners. Validate, test and predict change nothing."""
        if self.trainer is not None and _upstream.is_fitting(self.trainer):
            self._close()
            self._open(optimizers)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def _open(self, optimizers: list[Optimizer]) -> None:
        scaling = self.scaler is not None
        plain = [_upstream.unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._unguarded = {i for i, o in enumerate(plain) if _upstream.needs_closure(o)}
        self.speak_of_closures([plain[i] for i in sorted(self._unguarded)])
        self.engine = AttemptEngine(
            self.settings,
            self.scaler or SkipAwareGradScaler("cpu", 1.0, dynamic=False),
            optimizers,
            self._tallies,
            scaling=scaling,
            checking=scaling or self.settings.bf16_guard,
            manual=not self.module.automatic_optimization,
        )
        self.engine.optimizers_now = lambda: list(self.trainer.optimizers)
        self._agree_over_ranks(self.engine)
        if self.scaler is not None:
            self.scaler.watcher, self.scaler.settle = self.engine, self.settle
        self.engine.windows.settle = self.settle
        self.active = True
        chosen: list[Any] = choose_guards(self.trainer.callbacks, self.guard_types, self.fail)
        self.guards = [guard for guard in chosen if guard.enabled]
        self._checkpoint = next(
            guard for guard in chosen if isinstance(guard, ScalerCheckpointCore)
        )
        for guard in self.guards:
            guard.attach(self)
        self._after = [g.after_outcome for g in self.guards if _overrides(g, "after_outcome")]
        self._after_skip = [g.after_skip for g in self.guards if _overrides(g, "after_skip")]
        self._see_batch = [g.see_batch for g in self.guards if _overrides(g, "see_batch")]
        self._see_epoch = [g.see_epoch for g in self.guards if _overrides(g, "see_epoch")]
        self._see_loss, self._begun = [], False
        self._heard = (None, 0)

    def _agree_over_ranks(self, engine: AttemptEngine) -> None:
        strategy, sync = self.trainer.strategy, self.settings.sync_found_inf
        if self.trainer.world_size == 1 or sync is False:
            return
        spread = DdpSpread(
            strategy, not engine.manual, lambda: [lane.optimizer for lane in engine.windows.lanes]
        )
        engine.ranks = RankAgreement(
            strategy.root_device, on_every_attempt=lambda: sync is True or not spread()
        )
        engine.given_up.ranks = engine.inspection.ranks = engine.ranks
        if engine.manual:  # otherwise no gradient is held when the scale may grow
            engine.movement.ranks = engine.ranks

    def fall_back(self, precision: str) -> None:
        """Go on in another precision; gradients that others hold are unscaled first."""
        if self.scaler is not None:
            self.scaler.watcher = self.scaler.settle = None
        if self.engine is not None:
            self.engine.stop_scaling()
        super().fall_back(precision)

    def _close(self) -> None:
        if self.active:
            self.settle()
            self._gates = self.saved_gates()
        self.active = False
        if (late := self._overdue or self._held) is not None:
            self.warn(str(late))  # found out at the very end: no step is left to raise it
        self._overdue, self._held, self._batch, self._hurried = None, None, None, False
        self._probe.loss = None  # left there by an exception before the backward pass
        if self.scaler is not None:
            self.scaler.watcher = self.scaler.settle = None
        for guard in self.guards:
            guard.detach()

    def _remove_scopes(self) -> None:
        scopes, self._scopes = self._scopes, None
        if scopes is not None:
            scopes.remove()

    def teardown(self) -> None:
        """Undo every side effect; tallies, scale and an open window stay for a checkpoint."""
        self._close()
        self._remove_scopes()
        self._handled = []
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------------ for the guards

    def saved_gates(self) -> dict[str, Any]:
        """Return what the guards have to keep, by guard name."""
        if not self.active:
            return self._gates
        return {g.name: saved for g in self.guards if (saved := g.save()) is not None}

    def running(self) -> AttemptEngine:
        """Return the engine of the fit that is under way."""
        assert self.engine is not None
        return self.engine

    def hear(self, stage: Literal["outcome", "loss", "batch"], call: Callable[[Any], None]) -> None:
        """Call `call` for the rest of the fit, or for "batch" at the next training batch.

        A list is replaced, not changed: it may be run through at the moment.
        """
        name = _STAGES[stage]
        setattr(self, name, [*getattr(self, name), call])
        self._heard = (None, 0)  # whether outcomes may be late has to be found out again

    def unhear(self, call: Callable[[Any], None]) -> None:
        """Call it no more."""
        for name in _STAGES.values():
            setattr(self, name, [heard for heard in getattr(self, name) if heard != call])
        self._heard = (None, 0)

    def unguarded(self) -> set[int]:
        """Return the optimizers that step without an outcome."""
        return self._unguarded

    def parameter_names(self) -> dict[int, str]:
        """Return the module's parameter names by `id(parameter)`."""
        return {id(p): name for name, p in self.module.named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle settings, scale and counts; what belongs to a run stays behind."""
        self.settle()
        gone = dict.fromkeys(
            ("trainer", "module", "engine", "_probe", "_overdue", "_held", "_batch")
        )
        fresh = {"guards": [], "active": False, "_scopes": None, "_after": [], "_see_batch": []}
        fresh |= {"_after_skip": [], "_see_loss": [], "_see_epoch": []}
        rest = {"_heard": (None, 0), "_hooks": [], "_handled": []}
        return {**self.__dict__, **gone, **fresh, **rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without a run."""
        self.__dict__.update(state)
        self._probe = AnomalyProbe(self.warn)


def _overrides(guard: Any, name: str) -> bool:
    return getattr(type(guard), name) is not getattr(GuardCore, name)
