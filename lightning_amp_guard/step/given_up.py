# SPDX-License-Identifier: Apache-2.0
"""Overflows that no attempt comes of, because the script throws the gradients away first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason
from lightning_amp_guard.scaler import read_flags
from lightning_amp_guard.state import is_count, is_dict, is_flag_pair, read
from lightning_amp_guard.step.lanes import Cell, Lane
from lightning_amp_guard.step.movement import ScaleMovement
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["GivenUp", "read_given_up"]

_WATCHED = 2  # arrivals: the window's own, and that of the next one, whose first pass may overflow


class GivenUp:
    """Answers an overflow of gradients that were thrown away before an attempt judged them.

    Scripts that guard themselves zero non-finite gradients in `on_after_backward` (Lightning issue
    4956), or give the step up when `clip_grad_norm_(..., error_if_nonfinite=True)` raises. Without an
    answer the scale would never come down from where everything overflows, and nothing be trained.
    Torch's `update()` answers what was unscaled, stepped or not; so does this. What was never
    unscaled nobody has checked: after such a pass the rest of its window and the next one are checked
    after their backward passes, at the cost of one walk over the gradients each, in automatic
    optimization alone (by hand, zeroing the by-products of another optimizer's backward pass is
    everyday business).

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
        self.watching = 0  # for so many arrivals at a step

    def check(self, cells: list[Cell]) -> None:
        """Check what a backward pass has made. Host sync: none, or one where attempts wait."""
        if self.windows.settle is not None:
            self.windows.settle()  # these gradients were made after those overflows
        for cell in cells:
            cell.unanswered = list(self.windows.scaler.multiply_held_(cell, 1.0).values())
            cell.agreed = False
            cell.overflows_before = self.windows.overflows
            cell.mark()

    def arrived(self) -> None:
        """Learn that a window has come to its step."""
        if self.watching:
            self.watching -= 1

    def thrown_away(self, cell: Cell) -> None:
        """Back off if the gradients that are gone were known to have overflowed, or look closer.

        Host sync: none, or one or two where they had been checked.
        """
        if not self._may_answer(cell):
            return
        if not self.manual:
            self.watching = _WATCHED
        if self._overflowed(cell):
            self.movement.overflowed(answered=cell.overflowed_earlier(self.windows.overflows))
        cell.unanswered = []

    def _may_answer(self, cell: Cell) -> bool:
        """Return whether no attempt was made on the cell's gradients, and all ranks know of it."""
        agreed = cell.agreed and not self.manual
        if not self.windows.scaling or cell.consumed or not (cell.micro_batches or agreed):
            return False
        # the other ranks may have kept theirs, or not know that they overflowed
        return self.ranks is None or agreed or not self.ranks.on_every_attempt()

    def _overflowed(self, cell: Cell) -> bool:
        return read_flags(cell.unanswered) and self.settings.backs_off(self._reason(cell))

    def answered(self) -> None:
        """Learn that the scale has had its turn at all that was checked so far."""
        for cell in self.windows.cells:
            cell.unanswered = []

    def _reason(self, cell: Cell) -> SkipReason:
        # over ranks an inf has reached all of them, but a loss is known to its own rank alone
        bad_loss = self.ranks is None and cell.had_nonfinite_loss()
        return SkipReason.NONFINITE_LOSS if bad_loss else SkipReason.NONFINITE_GRADIENTS

    # ------------------------------------------------------------------ checkpoints

    def save(self, *, inside_batch: bool) -> dict[str, Any] | None:
        """Return what it has seen, as plain values; `None` for nothing.

        Args:
            inside_batch: Whether a resumed run repeats the batch, and its overflow with it.

        Host sync: none, or one or two for each cell that was checked and not stepped.
        """
        lanes = self.windows.lanes
        owed = [[False, False] if inside_batch else self._owed(lane) for lane in lanes]
        if not self.watching and not any([overflowed for overflowed, _ in owed]):
            return None
        return {"watching": self.watching, "owed": owed}

    def _owed(self, lane: Lane) -> list[bool]:
        """Return whether gradients overflowed that may yet be thrown away, and the scale knows."""
        cells = [c for c in lane.cells if self._may_answer(c) and self._overflowed(c)]
        known = [cell.overflowed_earlier(self.windows.overflows) for cell in cells]
        return [bool(cells), bool(cells) and all(known)]

    def load(self, watching: int, owed: list[list[bool]]) -> None:
        """Take up what `save` returned."""
        self.watching = watching
        for lane, (overflowed, known) in zip(self.windows.lanes, owed, strict=False):
            for cell in lane.cells if overflowed else []:
                one = torch.ones(())
                cell.unanswered, cell.tainted = [one], [one] if known else []
                cell.micro_batches, cell.agreed = max(cell.micro_batches, 1), True


def read_given_up(entry: Mapping[str, Any]) -> tuple[int, list[list[bool]]]:
    """Return what `GivenUp.load` takes, from a checkpoint entry that may hold nothing of it.

    Raises:
        ScalerStateError: A value is impossible; the message names the key.
    """
    if "given_up" not in entry:
        return 0, []
    saved = read(entry, "given_up", is_dict, "a dict")
    watching = read(saved, "watching", is_count, "a whole number of at least 0")
    owed = read(saved, "owed", _are_flag_pairs, "a list of two flags for each optimizer")
    return min(watching, _WATCHED), owed


def _are_flag_pairs(value: object) -> bool:
    return isinstance(value, list) and all(is_flag_pair(pair) for pair in value)
