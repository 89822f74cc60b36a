# SPDX-License-Identifier: Apache-2.0
"""When the scale moves: a backoff at once, growth at the end of a batch."""

from __future__ import annotations

from typing import Protocol

from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["ScaleMovement", "WindowKeeper"]


class WindowKeeper(Protocol):
    """Who keeps one scale per window when the scale moves."""

    def must_wait(self, windows: GradientWindows) -> bool:
        """Return whether growth has to wait for gradients that others hold."""

    def may_grow(self, windows: GradientWindows, factor: float) -> bool:
        """Return whether held gradients would stay finite."""

    def scale_moved(self, windows: GradientWindows, ratio: float) -> None:
        """Bring held gradients to the new scale."""


class ScaleMovement:
    """Decides when an attempt or a batch moves the scale; how it moves is the scaler's policy.

    Torch moves the scale in `update()`, which Lightning calls after each optimizer's step: in the
    middle of another optimizer's window. Here an overflow backs off at once and growth is counted
    once per training batch that had an applied attempt and no overflow.

    Args:
        scaler: The scaler in force.
        windows: The optimizers' windows.
    """

    def __init__(self, scaler: SkipAwareGradScaler, windows: GradientWindows) -> None:
        self.scaler = scaler
        self.windows = windows
        self.keeper: WindowKeeper | None = None
        self.ranks: RankAgreement | None = None
        self.applied_in_batch = self.overflowed_in_batch = False
        self._counted: int | None = None

    def applied(self) -> None:
        """Learn that an attempt was applied."""
        self.applied_in_batch = True

    def applied_within(self, number: int) -> bool:
        """Return whether an attempt was applied in the batch of that running number, now under way."""
        return self.applied_in_batch or self._counted == number

    def overflowed(self, *, answered: bool) -> None:
        """Back off at once. Host sync: none.

        Args:
            answered: The gradients were made at a scale that has backed off since: that was this
                very overflow, and the scale stays.
        """
        self.overflowed_in_batch = True
        if answered:
            return
        self.windows.overflows += 1
        before = self.scaler.get_scale()
        self.scaler.back_off()
        if self.scaler.get_scale() == before:
            self.scale_moved(1.0)  # marks held gradients that have overflowed as well

    def scale_moved(self, ratio: float) -> None:
        """Bring held gradients to the new scale. Host sync: none."""
        if self.keeper is not None:
            self.keeper.scale_moved(self.windows, ratio)

    def end_batch(self, number: int | None) -> None:
        """Count the batch towards growth if it had an applied attempt and no overflow.

        Args:
            number: The batch's running number; one that was counted is not counted again. `None`
                where batches cannot come twice.

        Host sync: none; one when growth is due while gradients are held.
        """
        clean = self.applied_in_batch and not self.overflowed_in_batch
        self.applied_in_batch = self.overflowed_in_batch = False
        if not clean or (number is not None and number == self._counted):
            return
        self._counted = number
        policy = self.scaler.policy
        if not policy.would_grow(ahead=1) or self.keeper is None:
            self.scaler.count_clean_batch()
            return
        wait, too_large = self._ask_ranks(
            self.keeper.must_wait(self.windows),
            not self.keeper.may_grow(self.windows, policy.settings.growth_factor),
        )
        if policy.would_grow(wait=wait, ahead=1) and too_large:
            policy.growth_tracker += 1
        else:
            self.scaler.count_clean_batch(wait=wait)

    def _ask_ranks(self, *flags: bool) -> list[bool]:
        return list(flags) if self.ranks is None else self.ranks.any(*flags)
