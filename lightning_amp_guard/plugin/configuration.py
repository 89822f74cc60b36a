# SPDX-License-Identifier: Apache-2.0
"""The arguments that every precision plugin of this package takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import refuse
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.arguments.settings import AmpSettings, ScaleSettings
from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.plugin.scaler_choice import choose_scaler
from lightning_amp_guard.scaler import SkipAwareGradScaler

__all__ = ["Configuration"]


class Configuration:
    """Checks the arguments, keeps them, and settles those that depend on the run; see `SafeAMP`."""

    misconfiguration: ClassVar[type[Exception]]

    @names_its_class
    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed", "auto"] = "16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        hysteresis: int = 1,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
        backoff_on_nonfinite_loss: bool = False,
        max_consecutive_skips: int | None = 32,
        on_limit: Literal["raise", "bf16-mixed", "32-true"] = "raise",
        error_if_nonfinite: bool = False,
        bf16_guard: bool = True,
        fp32_modules: Sequence[str] = (),
        weight_cache: bool = False,
        sync_found_inf: Literal["auto"] | bool = "auto",
    ) -> None:
        owner = self._name()
        settings = AmpSettings(
            precision,
            backoff_on_nonfinite_loss,
            max_consecutive_skips,
            on_limit,
            error_if_nonfinite,
            bf16_guard,
            fp32_modules,  # type: ignore[arg-type]
            weight_cache,
            sync_found_inf,
        ).checked(owner, ("16-mixed", "bf16-mixed", "auto"))
        scale = ScaleSettings(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            dynamic,
            hysteresis,
            min_scale,
            max_scale,
        ).checked(owner)
        self._device_given = _checked_device(owner, device)
        self._own_scaler = choose_scaler(owner, settings.precision, scale, scaler)
        self.settings = settings
        self.precision: Any = settings.precision
        self.switched: str | None = None
        self.device = self._device_given or ("cuda" if torch.cuda.is_available() else "cpu")
        self.scaler: SkipAwareGradScaler | None = None
        if settings.precision == "16-mixed":
            self.scaler = self._own_scaler
        self._prepare()

    def _prepare(self) -> None:
        """Make ready for the first run; the life cycle's business."""

    @property
    def state_key(self) -> str:
        """Refuse to be taken for a callback, which Lightning asks for this name first.

        Raises:
            MisconfigurationException: Always; an `AttributeError` as well, for those who only ask
                whether there is such an attribute.
        """
        name, kinds = self._name(), (type(self.fail("")), AttributeError)
        raise type(kinds[0].__name__, kinds, {})(
            f"`Trainer(callbacks=[{name}()])`: `{name}` is a precision plugin, not a callback."
            f" Expected it among the plugins. Write `Trainer(plugins=[{name}()])`."
        )

    def _name(self) -> str:
        return type(self).__name__

    def fail(self, message: str) -> Exception:
        """Return Lightning's `MisconfigurationException` with `message`."""
        return self.misconfiguration(message)

    def info(self, message: str) -> None:
        """Print one line on rank 0."""
        rank_zero_info(message)

    def warn(self, message: str) -> None:
        """Warn with `AmpGuardWarning` on rank 0."""
        rank_zero_warn(message, category=AmpGuardWarning)

    def refuse_without_trainer(self, module: Any) -> None:
        """Refuse Lightning Fabric, which has no loop that the plugin could follow.

        Raises:
            MisconfigurationException: The module cannot belong to a Trainer.
        """
        if not hasattr(type(module), "trainer"):
            raise self.fail(
                f"`{self._name()}`: the module {type(module).__name__} is no `LightningModule`."
                " Expected one, set up by a `Trainer`: Lightning Fabric has no loop for the plugin to"
                f" follow. Write `Trainer(plugins=[{self._name()}()])`, or leave the plugin out of"
                " `Fabric`."
            )

    def resolve(self, trainer: Any) -> None:
        """Settle what depends on the run: the device, and what "auto" means on it.

        Raises:
            MisconfigurationException: `device` is another than the Trainer's, the device has no
                float16 autocast, or the strategy brings an engine of its own.
        """
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
            raise self.fail(
                f"`{self._name()}`: DeepSpeed scales losses and skips steps in its own engine, which"
                " this plugin would bypass. Expected a strategy that leaves this to the precision"
                ' plugin, such as "ddp", or `ModelParallelStrategy` (FSDP2) for sharded models. With'
                ' `DeepSpeedStrategy` drop the plugin and write `Trainer(precision="16-mixed")`.'
            )
        device = trainer.strategy.root_device.type
        if self._device_given not in (None, device):
            raise self.fail(
                f"`{self._name()}(device={self._device_given!r})`: the Trainer runs on {device!r}."
                " Expected the same device type. Leave `device` out to follow the Trainer."
            )
        self.device = device
        if self.precision == "auto":
            native = trainer.strategy.broadcast(_upstream.native_low_precision(device))
            self.settle_precision(*native)
        if self.precision == "16-mixed" and not _upstream.has_float16_autocast(device):
            raise self.fail(
                f"`{self._name()}(precision={self.settings.precision!r})`: torch has no float16"
                f" autocast on {device!r}. Expected a device type that has it, such as"
                f' "cuda" or "cpu". Write `{self._name()}(precision="bf16-mixed")`.'
            )

    def speak_of_closures(self, optimizers: list[Optimizer]) -> None:
        """Say what becomes of optimizers that evaluate their closure several times in a step.

        Raises:
            MisconfigurationException: Under a scaler, which needs true gradients before the step.
        """
        if not optimizers:
            return
        name = type(optimizers[0]).__name__
        if self.scaler is not None:
            raise self.fail(
                f"`{self._name()}(precision={self.precision!r})`: the optimizer `{name}` evaluates"
                " its closure several times within a step, so its gradients cannot be unscaled and"
                " checked once before it. Expected an optimizer whose `step()` works without a"
                f' closure. Write `{self._name()}(precision="bf16-mixed")`, which needs no scale.'
            )
        self.info(
            f"`{name}` needs its closure, so its updates are not guarded: a non-finite gradient is"
            " applied, and schedules of this optimizer advance at every step."
        )

    def settle_precision(self, bf16: bool, fp16: bool) -> None:
        """Choose what "auto" stands for, by what the device computes natively."""
        self.precision = "bf16-mixed" if bf16 or not fp16 else "16-mixed"
        self.scaler = self._own_scaler if self.precision == "16-mixed" else None
        slow = "" if bf16 or fp16 else ", which is emulated here: 32-true is faster"
        self.info(
            f'`{self._name()}(precision="auto")` chose {self.precision!r} on {self.device!r}{slow}.'
        )

    def autocast_dtype(self) -> torch.dtype:
        """Return the dtype that autocast computes in, where it is on."""
        return torch.float16 if self.precision == "16-mixed" else torch.bfloat16

    def fall_back(self, precision: str) -> None:
        """Compute in another precision from now on, without a scale.

        An autocast region that is open, that of a `training_step` in manual optimization, changes
        with it. Optimizers, schedules and counts go on.

        Args:
            precision: "bf16-mixed" or "32-true".
        """
        self.precision, self.scaler, self.switched = precision, None, precision
        if torch.is_autocast_enabled(self.device):  # on leaving it, torch restores what was before
            torch.set_autocast_enabled(self.device, precision != "32-true")
            torch.set_autocast_dtype(self.device, self.autocast_dtype())

    def autocast_context_manager(self) -> torch.autocast:
        """Return the autocast context of a forward pass."""
        dtype, cache = self.autocast_dtype(), self.settings.weight_cache
        if self.precision == "32-true":
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, dtype=dtype, cache_enabled=cache)


def _checked_device(owner: str, device: object) -> str | None:
    expected = 'a device type such as "cuda", or None'
    why = f"Leave it out to follow the Trainer: `{owner}()`."
    if device is None:
        return None
    if not isinstance(device, str):
        line = (
            f'Write `{owner}(device="{device.type}")`.' if isinstance(device, torch.device) else why
        )
        raise TypeError(refuse(owner, "device", device, expected, line))
    try:
        return torch.device(device).type
    except RuntimeError:
        why = f'Write `{owner}(device="cuda")`.' if device == "gpu" else why
        raise ValueError(refuse(owner, "device", device, expected, why)) from None
