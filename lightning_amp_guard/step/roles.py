# SPDX-License-Identifier: Apache-2.0
"""Who takes part in an attempt from outside: what guards, clock, monitor and checkpoints offer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from lightning_amp_guard.step.lanes import Cell, Lane

__all__ = ["PassListener", "Reopens", "Verifier", "Witness"]


class PassListener(Protocol):
    """Who follows what the gradients of each cell are made of."""

    def before_pass(self, cell: Cell) -> None:
        """Learn that a backward pass may add to the gradients there are, before they are touched."""

    def after_pass(self, cell: Cell) -> None:
        """Learn that a backward pass has reached the cell."""

    def inherited(self, cell: Cell, before: Sequence[Cell]) -> None:
        """Learn that `cell` goes on from other cells."""


class Verifier(Protocol):
    """Who objects to gradients that were touched while they carried the scale."""

    def verify(self, lanes: Iterable[Lane], cell: Cell) -> None:
        """Raise or warn if gradients of `cell` were changed behind the scaler's back."""


class Reopens(Protocol):
    """An open window from a checkpoint."""

    saved: dict[str, Any]

    def open(self) -> None:
        """Give the parameters their gradients back."""


class Witness(Protocol):
    """Who looks at true gradients before hooks and clipping do."""

    def looks(self) -> bool:
        """Return whether this attempt's gradients are to be shown."""

    def wants_norm(self) -> bool:
        """Return whether the norm of an attempt that is not shown is wanted."""

    def show(self, lane: Lane) -> None:
        """Look at the gradients of `lane`."""
