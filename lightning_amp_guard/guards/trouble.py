# SPDX-License-Identifier: Apache-2.0
"""A run of skips while it is watched, and when it outlasts the search for a scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_amp_guard.diagnosis.counts import LEAST_ORDINARY_SCALE
from lightning_amp_guard.diagnosis.watch import Culprit, NonFiniteWatch
from lightning_amp_guard.guards._base import Host
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["Trouble", "outlasts"]

_ORDINARY_SKIPS = 24  # from 2**24 down to 16 it takes 20
_ALIKE = 2  # watched steps in a row with one culprit that no smaller scale would mend


@dataclass
class Trouble:
    """What is known since a skip has armed the locator."""

    watch: NonFiniteWatch
    optimizers: set[int] = field(default_factory=set)
    skips: int = 0
    alike: int = 0  # watched steps in a row with one culprit
    unmoved: int = 0  # skips in a row that left the scale where it was
    others: int = 0  # attempts since the last skip
    scanned: str = ""  # of the window's batches so far
    scanning: bool = False
    told: bool = False  # is its module named already?

    def count(self, outcome: StepOutcome) -> None:
        """Count a skip."""
        self.optimizers.add(outcome.optimizer_idx)
        self.skips, self.others = self.skips + 1, 0
        self.unmoved = self.unmoved + 1 if outcome.next_scale >= outcome.scale else 0


def outlasts(host: Host, trouble: Trouble, culprit: Culprit, outcome: StepOutcome) -> bool:
    """Return whether the search for a scale does not explain the skips."""
    borne = 0 if host.scaler is None else host.scaler.policy.settings.hysteresis - 1
    return (
        outcome.scale <= LEAST_ORDINARY_SCALE
        or trouble.unmoved > borne + 1
        or trouble.skips > _ORDINARY_SKIPS
        or (trouble.alike >= _ALIKE and not culprit.may_be_overflow)
    )
