# SPDX-License-Identifier: Apache-2.0
"""The record of attempts: what became of each, and the counts per optimizer."""

from __future__ import annotations

from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.step.lanes import Lane

__all__ = ["Record"]


class Record:
    """Makes the outcome of an attempt, and counts it.

    Args:
        settings: The plugin's checked settings.
        tallies: Running counts per optimizer, extended and updated in place.
    """

    def __init__(self, settings: AmpSettings, tallies: list[StepTally]) -> None:
        self.settings, self.tallies = settings, tallies

    def follow(self, lanes: list[Lane]) -> None:
        """Begin counts at zero for the optimizers that have none yet."""
        while len(self.tallies) < len(lanes):
            self.tallies.append(StepTally())

    def next_skip_raises(self, lane: Lane) -> bool:
        """Return whether a skip of the lane's next attempt would end the run with an error."""
        limit = self.settings.max_consecutive_skips
        if self.settings.error_if_nonfinite:
            return True
        return limit is not None and self.tallies[lane.idx].consecutive_skips + 1 >= limit

    def conclude(
        self, lane: Lane, reason: SkipReason | None, scales: tuple[float, float], norm: float | None
    ) -> StepOutcome:
        """Return the outcome of the lane's attempt, counted.

        Args:
            lane: The optimizer's lane.
            reason: Why it was skipped; `None` if it was applied.
            scales: The one that the gradients carried, and the one after the attempt.
            norm: The unscaled total L2 norm before clipping, where it was computed anyway.
        """
        outcome = StepOutcome(
            lane.idx,
            self.tallies[lane.idx].attempted,
            reason is None,
            reason,
            *scales,
            lane.micro_batches,
            norm if reason is None else None,
        )
        self.tallies[lane.idx] = self.tallies[lane.idx].after(outcome)
        return outcome
