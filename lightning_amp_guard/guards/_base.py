# SPDX-License-Identifier: Apache-2.0
"""What every guard has in common, and what it may know of the plugin that drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from typing_extensions import Self

from lightning_amp_guard.arguments.checks import flag
from lightning_amp_guard.arguments.misplaced import as_callback
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import StepOutcome, StepTally
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.attempt import AttemptEngine

__all__ = ["Guard", "GuardCore", "GuardSetup", "Host", "InstancePatch"]


class Host(Protocol):
    """What a guard may know of the plugin: settings, the way to the run, how to speak."""

    scaler: SkipAwareGradScaler | None
    engine: AttemptEngine | None
    trainer: Any
    module: Any
    guards: list[Any]
    precision: Any
    switched: str | None
    settings: AmpSettings

    @property
    def tallies(self) -> list[StepTally]:
        """The counts per optimizer, extended in place."""

    def settle(self) -> None:
        """Tell of attempts whose outcome nobody has needed so far."""

    def fall_back(self, precision: str) -> None:
        """Go on in another precision, without a scale."""

    def running(self) -> AttemptEngine:
        """Return the engine of the fit that is under way."""

    def saved_gates(self) -> dict[str, Any]:
        """Return what the guards have to keep, by guard name."""

    def fail(self, message: str) -> Exception:
        """Return Lightning's `MisconfigurationException` with `message`."""

    def info(self, message: str) -> None:
        """Print one line on rank 0."""

    def warn(self, message: str) -> None:
        """Warn with `AmpGuardWarning` on rank 0."""

    def hear(self, stage: Literal["outcome", "loss", "batch"], call: Callable[[Any], None]) -> None:
        """Call `call` for the rest of the fit, or for "batch" at the next training batch."""

    def unhear(self, call: Callable[[Any], None]) -> None:
        """Call it no more."""

    def unguarded(self) -> set[int]:
        """Return the optimizers that step without an outcome."""

    def parameter_names(self) -> dict[int, str]:
        """Return the module's parameter names by `id(parameter)`."""


class GuardCore:
    """One rule, enforced; driven by the precision plugin, free of Lightning.

    The plugin calls `attach` once the optimizers of a fit exist, `after_outcome` after each attempt
    and `detach` when the fit is over, after an exception too. A guard knows no other guard.

    Args:
        enabled: `False` leaves the rule to the user, as in stock Lightning.
    """

    name = "Guard"
    takes_late_outcomes = False  # does it ask the host to `settle` before it needs an outcome?

    @names_its_class
    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = flag(type(self).__name__, "enabled", enabled)
        self.host: Host | None = None

    def attach(self, host: Host) -> None:
        """Take up work for one fit."""
        self.host = host

    def detach(self) -> None:
        """Undo every side effect; harmless when there is none."""
        self.host = None

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Read the outcome of an attempt."""

    def after_skip(self, outcome: StepOutcome, batch: Any) -> None:
        """Read the outcome of a skipped attempt, and its last batch (`None` where not known)."""

    @property
    def finding(self) -> str:
        """What to add to an error that ends the run."""
        return ""

    @property
    def fp32_path(self) -> str | None:
        """The module that its remedy names."""
        return None

    @property
    def remedy(self) -> str:
        """What to do where no smaller scale helps, "" where one may."""
        return ""

    def see_batch(self, batch: Any) -> None:
        """Look at the first training batch of a fit."""

    def see_epoch(self) -> None:
        """Look at what the module has made by the first batch of a fit, or of an epoch."""

    def save(self) -> Any:
        """Return what has to survive a resume, as plain values; `None` for nothing."""
        return None

    def load(self, saved: Any) -> None:
        """Take up what `save` returned."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        # Lightning gives every callback `log` and `log_dict`, which are the module's
        own = {k: v for k, v in self.__dict__.items() if k not in ("log", "log_dict")}
        return {**own, "host": None}


class GuardSetup:
    """The one Lightning hook that a guard has: it refuses a Trainer that would never drive it."""

    misconfiguration: ClassVar[type[Exception]] = MisconfigurationException
    namespace: ClassVar[str] = "lightning_amp_guard"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse to run without a plugin that drives guards.

        Raises:
            MisconfigurationException: The Trainer's precision plugin is not of this package, or of
                the other Lightning namespace.
        """
        plugin = trainer.precision_plugin
        kinds = getattr(plugin, "guard_types", None)
        if kinds is not None and plugin.namespace == self.namespace:
            return
        remedy = (
            f"Write `from {self.namespace} import SafeAMP`, `Trainer(plugins=[SafeAMP()])`, and drop"
            " `precision=`."
            if kinds is None
            else f"Write `from {plugin.namespace} import {type(self).__name__}`."
        )
        seen = f"`{type(plugin).__module__}.{type(plugin).__name__}`"
        raise self.misconfiguration(
            f"`{type(self).__name__}()` was passed to `Trainer(callbacks=...)`, but the precision"
            f" plugin is {seen}, which does not drive it. Expected the plugin and the guards from one"
            f" place. {remedy}"
        )

    def __repr__(self) -> str:
        """Return the line that puts it where it belongs."""
        return as_callback(self, "plugins=[SafeAMP()], ")


class Guard(GuardCore, GuardSetup, Callback):
    """A guard as a Lightning callback, so that it can be configured where callbacks are.

    The plugin drives it, passed or supplied, by the same path. Of Lightning's hooks it has `setup`
    alone, to refuse a Trainer whose plugin would never call it.
    """


class InstancePatch:
    """Puts a wrapper in the place of one instance's method, until `undo`.

    Copies and pickles of the instance made meanwhile get their own method back, not the wrapper.

    Args:
        instance: The object whose method is wrapped.
        name: The method's name.
        wrapper: Called as `wrapper(original, *args, **kwargs)`.
    """

    def __init__(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self.instance, self.name, self.wrapper = instance, name, wrapper
        self.own = instance.__dict__.get(name)
        self.original = getattr(instance, name)
        instance.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.instance, self.name))

    @classmethod
    def once(cls, instance: Any, name: str, wrapper: Callable[..., Any]) -> Self:
        """Return a new patch, or the one that is there already."""
        there = instance.__dict__.get(name)
        return there if isinstance(there, cls) else cls(instance, name, wrapper)

    def undo(self) -> None:
        """Give the instance its method back, if the wrapper is still there."""
        if self.instance.__dict__.get(self.name) is not self:
            return
        if self.own is None:
            del self.instance.__dict__[self.name]
        else:
            self.instance.__dict__[self.name] = self.own
