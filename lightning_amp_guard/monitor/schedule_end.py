# SPDX-License-Identifier: Apache-2.0
"""Where a learning rate schedule stands at the end of a fit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ScheduleEnd"]


@dataclass(frozen=True)
class ScheduleEnd:
    """Says where a schedule stands at the end of a fit.

    Args:
        name: The scheduler's class name.
        attempted: Attempts of its optimizer in this fit.
        applied: Applied updates of its optimizer in this fit.
        gated: Whether it advanced with applied updates only.
        frequency: Attempts from one turn to the next; 0 where the module steps it by hand.
        turns: How often it advanced in this fit; `None` where it does not say.
    """

    name: str
    attempted: int
    applied: int
    gated: bool = True
    frequency: int = 1
    turns: int | None = None

    @property
    def sentence(self) -> str:
        """How far the schedule ends short, or runs ahead where nothing held it back."""
        if self.frequency == 0:
            return f"{_counted(self.turns or 0, 'turn')} in {_counted(self.attempted, 'attempt')}"
        if self.frequency > 1:
            return self._sentence_of_turns()
        gap, of = self.attempted - self.applied, f"{self.attempted} attempts"
        if self.gated:
            return f"ends {gap} short of {of}"
        return f"not gated: ran through {of}, {gap} ahead of the updates"

    def _sentence_of_turns(self) -> str:
        planned, due = self.attempted // self.frequency, self.applied // self.frequency
        if self.gated:
            made = due if self.turns is None else self.turns
            return f"ends {max(planned - made, 0)} short of {_counted(planned, 'turn')}"
        made = planned if self.turns is None else self.turns
        return (
            f"not gated: made {_counted(made, 'turn')}, {max(made - due, 0)} ahead of the updates"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
