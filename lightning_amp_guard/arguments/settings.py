# SPDX-License-Identifier: Apache-2.0
"""The arguments of the plugin: checked once, kept as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_amp_guard.arguments.checks import (
    choice,
    flag,
    names_meant,
    other_precision,
    real,
    refuse,
    whole,
)
from lightning_amp_guard.outcome import SkipReason

__all__ = ["LARGEST_SCALE", "SMALLEST_SCALE", "AmpSettings", "ScaleSettings"]

# Within these the scale and its reciprocal are finite float32 numbers, and not 0.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class ScaleSettings:
    """How the scale moves. The four growth and backoff values mean exactly what torch's do.

    Args:
        init_scale: The scale at the start.
        growth_factor: Above 1; multiplies the scale when it grows.
        backoff_factor: Between 0 and 1; multiplies the scale when it backs off.
        growth_interval: Batches in a row with an applied update and no overflow before it grows.
        dynamic: `False` keeps the scale at `init_scale`.
        hysteresis: The n-th overflow since the last growth backs off, and each further one.
        min_scale: Lower bound; `None` for none.
        max_scale: Upper bound; `None` for none.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    dynamic: bool = True
    hysteresis: int = 1
    min_scale: float | None = 1.0
    max_scale: float | None = 2.0**24

    def checked(self, owner: str) -> ScaleSettings:
        """Return the settings with every value checked; errors name `owner` and the argument."""
        usual = ScaleSettings  # whose class attributes are the defaults
        above, name = "a finite number above 1", "growth_factor"
        growth = real(owner, name, self.growth_factor, above, usual.growth_factor)
        if growth <= 1:
            raise ValueError(
                refuse(owner, name, self.growth_factor, above, write=usual.growth_factor)
            )
        between, name = "a number between 0 and 1", "backoff_factor"
        backoff = real(owner, name, self.backoff_factor, between, usual.backoff_factor)
        if backoff >= 1:
            raise ValueError(
                refuse(owner, name, self.backoff_factor, between, write=usual.backoff_factor)
            )
        bounds = [
            None
            if v is None
            else real(owner, n, v, "a finite number above 0, or None for no bound", None)
            for n, v in (("min_scale", self.min_scale), ("max_scale", self.max_scale))
        ]
        checked = ScaleSettings(
            self._start(owner),
            growth,
            backoff,
            whole(owner, "growth_interval", self.growth_interval, default=usual.growth_interval),
            flag(owner, "dynamic", self.dynamic),
            whole(owner, "hysteresis", self.hysteresis, default=usual.hysteresis),
            *bounds,
        )
        checked._check_bounds(owner)
        return checked

    def _start(self, owner: str) -> float:
        usual = ScaleSettings.init_scale
        start = real(owner, "init_scale", self.init_scale, default=usual)
        if not SMALLEST_SCALE <= start <= LARGEST_SCALE:
            legal = "a number from 2**-126 to 2**127, which float32 and its reciprocal can hold"
            raise ValueError(refuse(owner, "init_scale", self.init_scale, legal, write=usual))
        return start

    def _check_bounds(self, owner: str) -> None:
        low, high = self.min_scale or 0.0, self.max_scale or math.inf
        if low > high:
            raise ValueError(
                refuse(
                    owner,
                    "min_scale",
                    low,
                    f"at most `max_scale`, which is {high!r}",
                    f"Write `{owner}(min_scale={high!r}, max_scale={low!r})`.",
                )
            )
        if not low <= self.init_scale <= high:
            raise ValueError(
                refuse(
                    owner,
                    "init_scale",
                    self.init_scale,
                    f"a value between `min_scale={self.min_scale!r}` and"
                    f" `max_scale={self.max_scale!r}`",
                    "Move the bound as well, or pass None for no bound. Write"
                    f" `{owner}(init_scale={self.init_scale!r},"
                    f" {'min' if self.init_scale < low else 'max'}_scale=None)`.",
                )
            )


@dataclass(frozen=True)
class AmpSettings:
    """Everything a precision plugin of this package is configured with, the scale apart."""

    precision: str = "16-mixed"
    backoff_on_nonfinite_loss: bool = False
    max_consecutive_skips: int | None = 32
    on_limit: str = "raise"
    error_if_nonfinite: bool = False
    bf16_guard: bool = True
    fp32_modules: tuple[str, ...] = ()
    weight_cache: bool = False
    sync_found_inf: Literal["auto"] | bool = "auto"

    def backs_off(self, reason: SkipReason | None) -> bool:
        """Return whether a skip for `reason` is the scale's to answer."""
        return reason is SkipReason.NONFINITE_GRADIENTS or (
            reason is SkipReason.NONFINITE_LOSS and self.backoff_on_nonfinite_loss
        )

    def checked(self, owner: str, precisions: Sequence[str]) -> AmpSettings:
        """Return the settings with every value checked; errors name `owner` and the argument."""
        choice(owner, "precision", self.precision, precisions, other_precision(self.precision))
        choice(
            owner,
            "on_limit",
            self.on_limit,
            ("raise", "bf16-mixed", "32-true"),
        )
        if self.on_limit == self.precision:
            raise ValueError(
                refuse(
                    owner,
                    "on_limit",
                    self.on_limit,
                    f"another precision than `precision={self.precision!r}`, which the run has",
                    write="32-true",
                )
            )
        choice(owner, "sync_found_inf", self.sync_found_inf, ("auto", True, False))
        limit = self.max_consecutive_skips
        if limit is not None:
            limit = whole(
                owner,
                "max_consecutive_skips",
                self.max_consecutive_skips,
                "a whole number above 0, or None for no limit",
                default=None if limit == 0 else AmpSettings.max_consecutive_skips,
            )
        for name in (
            "backoff_on_nonfinite_loss",
            "error_if_nonfinite",
            "bf16_guard",
            "weight_cache",
        ):
            flag(owner, name, getattr(self, name))
        patterns = _patterns(owner, self.fp32_modules)
        return AmpSettings(
            **{**_as_dict(self), "fp32_modules": patterns, "max_consecutive_skips": limit}
        )


def _patterns(owner: str, value: object) -> tuple[str, ...]:
    expected = 'a list of module names or patterns, such as ["head", "blocks.*.norm"]'
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if (
        not isinstance(value, Sequence)
        or not listed
        or not all([isinstance(p, str) for p in value])
    ):
        why, write = "", names_meant(value)
        if write is None:
            write, why = ["head"], "Names are those of `model.named_modules()`."
        raise TypeError(refuse(owner, "fp32_modules", value, expected, why, write))
    if any(not p.removeprefix("!") for p in value):
        raise ValueError(refuse(owner, "fp32_modules", value, expected, "A pattern is empty."))
    return tuple(value)


def _as_dict(settings: AmpSettings) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in fields(settings)}
