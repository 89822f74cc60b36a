# SPDX-License-Identifier: Apache-2.0
"""A GradScaler whose scale lives on the host and stays within bounds."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import flag
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.scale_policy import ScalePolicy
from lightning_amp_guard.state import read_scaler_state

__all__ = ["BoundedGradScaler", "ScaleWatcher", "one_number"]


class ScaleWatcher(Protocol):
    """Who keeps the accumulation windows while the scaler serves a precision plugin."""

    def before_backward(self, outputs: Tensor | Iterable[Tensor]) -> None:
        """Learn that `outputs` are about to be scaled for a backward pass."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the optimizer's gradients once per window."""

    def scale_moved(self, ratio: float) -> None:
        """Learn that the scale was just multiplied by `ratio`."""

    def updated(self) -> None:
        """Learn that `update` has taken all into account that was checked so far."""


class BoundedGradScaler(torch.amp.GradScaler):
    """Keeps settings, scale and counters; see `SkipAwareGradScaler` for the arguments.

    Torch keeps the scale in a tensor on the device and reads it from there. Since the host learns of
    every skip anyway, the scale is a Python number here and the tensor follows it, so asking for it
    costs nothing.
    """

    @names_its_class
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        hysteresis: int = 1,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
    ) -> None:
        settings = ScaleSettings(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            dynamic,
            hysteresis,
            min_scale,
            max_scale,
        ).checked(type(self).__name__)
        super().__init__(
            device,
            settings.init_scale,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
            flag(type(self).__name__, "enabled", enabled),
        )
        self.policy = ScalePolicy.start(settings)
        self.watcher: ScaleWatcher | None = None
        self._inverse: Tensor | None = None
        self.settle: Callable[[], None] | None = None

    def set_scale(self, scale: float) -> None:
        """Set the scale, moved to the nearest bound. Host sync: none."""
        self._settle()
        before = self.policy.scale
        self.policy.scale = self.policy.clamp(scale)
        self._moved(self.policy.scale / before)

    def _moved(self, ratio: float) -> None:
        if ratio == 1.0:
            return
        self._inverse = None
        self._init_scale = self.policy.scale
        if self._scale is not None:
            self._scale.fill_(self.policy.scale)
        if self.watcher is not None:
            self.watcher.scale_moved(ratio)

    def get_scale(self) -> float:
        """Return the scale. Host sync: none, or one where attempts are still to be read."""
        self._settle()
        return self.policy.scale if self.is_enabled() else 1.0

    def _settle(self) -> None:
        if self.settle is not None:
            self.settle()

    @property
    def device_scale(self) -> Tensor:
        """The scale as it is on the device, where attempts may have moved it that nobody has read."""
        assert self._scale is not None
        return self._scale

    def move_on_device(self, tracker: Tensor, found: Tensor) -> None:
        """Let the scale on the device follow an attempt; the host follows later. Host sync: none.

        Args:
            tracker: Clean attempts since the scale last moved, int32.
            found: 1.0 at an overflow, else 0.0.
        """
        settings = self.policy.settings
        _upstream.update_scale_(
            self.device_scale,
            tracker,
            found,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
        )
        self.device_scale.clamp_(*self.policy.bounds)
        self._inverse = None

    def _get_growth_tracker(self) -> int:
        self._settle()
        return self.policy.growth_tracker if self.is_enabled() else 0

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor."""
        self._set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor."""
        self._set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in batches."""
        self._set(growth_interval=new_interval)

    def _set(self, **changes: Any) -> None:
        self._settle()
        settings = replace(self.policy.settings, **changes)
        within = replace(settings, init_scale=self.policy.clamp(settings.init_scale))
        self.policy.settings = within.checked(type(self).__name__)
        self._growth_factor = self.policy.settings.growth_factor
        self._backoff_factor = self.policy.settings.backoff_factor
        self._growth_interval = self.policy.settings.growth_interval

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore torch's five values; a scale outside the bounds moves to the bound.

        Raises:
            ScalerStateError: A key is missing or its value impossible; the message names it.
        """
        if not self.is_enabled():
            return
        state = read_scaler_state(state_dict)
        self._set(**{k: state[k] for k in ("growth_factor", "backoff_factor", "growth_interval")})
        self.set_scale(state["scale"])
        self.policy.growth_tracker = state["_growth_tracker"]
        self.policy.hysteresis_left = self.policy.settings.hysteresis

    def __getstate__(self) -> dict[str, Any]:
        """Pickle settings and state; windows under way and tensors on a device stay behind."""
        gone = {
            "watcher": None,
            "settle": None,
            "_inverse": None,
            "_scale": None,
            "_growth_tracker": None,
        }
        if not self.is_enabled():
            return {**self.__dict__, "watcher": None, "settle": None}
        states = self._per_optimizer_states
        start = {
            "_init_scale": self.policy.scale,
            "_init_growth_tracker": self.policy.growth_tracker,
            "_per_optimizer_states": type(states)(states.default_factory),  # type: ignore[attr-defined]
        }
        return {**self.__dict__, **gone, **start}


def one_number(new_scale: Any) -> float:
    """Return what is to become the scale as a plain number.

    Raises:
        ValueError: It is NaN, or a tensor of several elements.
        TypeError: It is no number.

    Host sync: one if it is a tensor.
    """
    one = isinstance(new_scale, Tensor) and new_scale.numel() == 1
    value = new_scale.detach().item() if one else new_scale
    seen = (
        f"`update(new_scale={new_scale!r})`: expected a number above 0 or a tensor of one element."
    )
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(seen)
    if isinstance(value, Tensor) or math.isnan(value):
        raise ValueError(seen)
    return float(value)
