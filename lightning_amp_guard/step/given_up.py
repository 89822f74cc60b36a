# SPDX-License-Identifier: Apache-2.0
"""Overflows that no attempt comes of, because the script throws the gradients away first."""

from __future__ import annotations

from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason
from lightning_amp_guard.scaler import read_flags
from lightning_amp_guard.step.lanes import Cell
from lightning_amp_guard.step.movement import ScaleMovement
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["GivenUp"]


class GivenUp:
    """Answers an overflow of gradients that were thrown away before an attempt judged them.

    Scripts that guard themselves zero non-finite gradients in `on_after_backward` (Lightning issue
    4956), or give the step up when `clip_grad_norm_(..., error_if_nonfinite=True)` raises. Without an
    answer the scale would never come down from where everything overflows, and nothing be trained.
    Torch's `update()` answers what was unscaled, stepped or not; so does this. What was never
    unscaled nobody has checked: after such a window the next one is checked after its backward
    passes, at the cost of one walk over the gradients each, in automatic optimization alone (by hand,
    zeroing the by-products of another optimizer's backward pass is everyday business).

    Args:
        settings: The plugin's checked settings.
        windows: The optimizers' windows.
        movement: What moves the scale.
        manual: Whether the user steps by hand.
    """

    def __init__(
        self, settings: AmpSettings, windows: GradientWindows, movement: ScaleMovement, manual: bool
    ) -> None:
        self.settings, self.windows, self.movement = settings, windows, movement
        self.manual = manual
        self.ranks: RankAgreement | None = None
        self.watching = False  # until the next arrival at a step

    def check(self, cells: list[Cell]) -> None:
        """Check what a backward pass has made. Host sync: none."""
        for cell in cells:
            cell.unanswered = list(self.windows.scaler.multiply_held_(cell, 1.0).values())
            cell.agreed = False
            cell.overflows_before = self.windows.overflows
            cell.mark()

    def thrown_away(self, cell: Cell) -> None:
        """Back off if the gradients that are gone were known to have overflowed, or look closer.

        Host sync: none, or one or two where they had been checked.
        """
        agreed = cell.agreed and not self.manual
        if not self.windows.scaling or cell.consumed or not (cell.micro_batches or agreed):
            return
        if self.ranks is not None and self.ranks.on_every_attempt() and not agreed:
            return  # the other ranks may have kept theirs, or not know that they overflowed
        if not self.manual:
            self.watching = True
        flags, cell.unanswered = cell.unanswered, []
        if read_flags(flags) and self.settings.backs_off(self._reason(cell)):
            self.movement.overflowed(answered=cell.overflowed_earlier(self.windows.overflows))

    def answered(self) -> None:
        """Learn that the scale has had its turn at all that was checked so far."""
        for cell in self.windows.cells:
            cell.unanswered = []

    def _reason(self, cell: Cell) -> SkipReason:
        # over ranks an inf has reached all of them, but a loss is known to its own rank alone
        bad_loss = self.ranks is None and cell.had_nonfinite_loss()
        return SkipReason.NONFINITE_LOSS if bad_loss else SkipReason.NONFINITE_GRADIENTS
