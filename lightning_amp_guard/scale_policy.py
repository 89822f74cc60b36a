# SPDX-License-Identifier: Apache-2.0
"""How the scale moves: plain arithmetic on Python numbers, without tensors and without a Trainer."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from lightning_amp_guard.arguments.settings import LARGEST_SCALE, SMALLEST_SCALE, ScaleSettings

__all__ = ["ScalePolicy", "float32"]


def float32(value: float) -> float:
    """Return `value` rounded to float32, as a store into torch's scale tensor rounds it."""
    return ctypes.c_float(value).value


@dataclass
class ScalePolicy:
    """Moves the scale as `torch.amp.GradScaler.update` does, within bounds and with hysteresis.

    With hysteresis 1 and no bound hit, scale and counter equal those of torch's
    `_amp_update_scale_` bit for bit: the product is taken in double precision and rounded to
    float32, and growth that would leave float32's range is left out. Hysteresis follows Megatron-LM's
    `DynamicGradScaler`. The scale is never 0 and never inf.

    Args:
        settings: The checked settings.
        scale: The scale in force; a float32 value.
        growth_tracker: Clean batches since the scale last moved.
        hysteresis_left: Overflows still borne before the scale backs off.

    Example:
        >>> policy = ScalePolicy.start(ScaleSettings(init_scale=8.0, growth_interval=1))
        >>> policy.overflow(), policy.scale
        (0.5, 4.0)
        >>> policy.clean_batch(), policy.scale
        (2.0, 8.0)
    """

    settings: ScaleSettings
    scale: float
    growth_tracker: int
    hysteresis_left: int

    @classmethod
    def start(cls, settings: ScaleSettings) -> ScalePolicy:
        """Return a policy at its start."""
        return cls(settings, float32(settings.init_scale), 0, settings.hysteresis)

    def overflow(self) -> float:
        """Take an overflow into account and return the factor by which the scale moved (1.0: not).

        Host sync: none.
        """
        if not self.settings.dynamic:
            return 1.0
        self.growth_tracker = 0
        self.hysteresis_left = max(self.hysteresis_left - 1, 0)
        if self.hysteresis_left > 0:
            return 1.0
        return self._move(float32(self.scale * self.settings.backoff_factor))

    def clean_batch(self, *, wait: bool = False) -> float:
        """Count a batch without overflow and return the factor by which the scale moved.

        Args:
            wait: Somebody holds gradients made at this scale: growth is put off, but by no more
                than one further `growth_interval`.

        Host sync: none.
        """
        if not self.settings.dynamic:
            return 1.0
        self.growth_tracker += 1
        if not self.would_grow(wait=wait):
            return 1.0
        return self.grow()

    def would_grow(self, *, wait: bool = False, ahead: int = 0) -> bool:
        """Return whether growth is due at the present count (or `ahead` batches later)."""
        due = self.settings.growth_interval * (2 if wait else 1)
        return self.settings.dynamic and self.growth_tracker + ahead >= due

    def grow(self) -> float:
        """Multiply the scale by `growth_factor` and return the factor by which it moved."""
        self.growth_tracker = 0
        self.hysteresis_left = self.settings.hysteresis
        grown = float32(self.scale * self.settings.growth_factor)
        return self._move(grown if math.isfinite(grown) else self.scale)

    def clamp(self, scale: float) -> float:
        """Return `scale` moved to the nearest bound where it lies outside."""
        low, high = self.bounds
        return float32(min(max(scale, low), high))

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest scale allowed."""
        low = max(self.settings.min_scale or SMALLEST_SCALE, SMALLEST_SCALE)
        return low, min(self.settings.max_scale or LARGEST_SCALE, LARGEST_SCALE)

    def _move(self, scale: float) -> float:
        before, self.scale = self.scale, self.clamp(scale)
        return self.scale / before
