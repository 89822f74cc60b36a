# SPDX-License-Identifier: Apache-2.0
"""What became of one attempt to step, and the running counts of such attempts."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SkipReason", "StepOutcome", "StepTally"]


class SkipReason(enum.Enum):
    """Says why an attempt was skipped; `sentence` gives the cause and the remedy."""

    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRADIENTS = "nonfinite_gradients"
    PARTNER_SKIPPED = "partner_skipped"

    @property
    def sentence(self) -> str:
        """The cause and the remedy, in one sentence."""
        return _SENTENCES[self]


_SENTENCES = {
    SkipReason.NONFINITE_LOSS: (
        "The loss itself was inf or NaN before it was scaled, so a smaller scale cannot help: look"
        " for inf or NaN in the batch, or for an operation that needs float32"
        ' (`SafeAMP(fp32_modules=["name.of.module"])`).'
    ),
    SkipReason.NONFINITE_GRADIENTS: (
        "The loss was finite but a gradient was inf or NaN: under float16 the scaled gradients"
        " usually overflowed, and the scale backs off by itself; if it goes on, use"
        ' `precision="bf16-mixed"`, or run the module at fault in float32'
        ' (`SafeAMP(fp32_modules=["name.of.module"])`).'
    ),
    SkipReason.PARTNER_SKIPPED: (
        "Another optimizer of the same `all_or_none` block had a non-finite gradient, so this one"
        " was skipped with it: look at that optimizer's outcome."
    ),
}


@dataclass(frozen=True)
class StepOutcome:
    """Records one attempt: an arrival at the optimizer step with at least one gradient.

    Made once, when it is known, and only read afterwards. Nothing but a non-finite gradient decides
    whether an attempt is skipped; the movement of the scale never does.

    Args:
        optimizer_idx: Position in `trainer.optimizers`.
        attempt: 0-based count of this optimizer's attempts.
        applied: Whether the optimizer step ran.
        reason: `None` when applied.
        scale: The scale that the gradients carried (1.0 without a scaler).
        next_scale: The scale after whatever this attempt caused; growth at the end of the batch
            shows in the next outcome's `scale`.
        micro_batches: Backward passes that the accumulation window holds.
        grad_norm: Unscaled total L2 norm before clipping where something computed it anyway and
            the attempt was applied, else `None`.

    Example:
        >>> outcome = StepOutcome(0, 3, True, None, 1024.0, 1024.0, 2)
        >>> outcome.applied, outcome.grad_norm
        (True, None)
    """

    optimizer_idx: int
    attempt: int
    applied: bool
    reason: SkipReason | None
    scale: float
    next_scale: float
    micro_batches: int
    grad_norm: float | None = None


@dataclass(frozen=True)
class StepTally:
    """Counts attempts; a new tally comes out of `after`, the old one stays as it was.

    Args:
        attempted: Attempts so far; always `applied + skipped`.
        applied: Attempts whose optimizer step ran.
        skipped: Attempts left out.
        consecutive_skips: Skips since the last applied attempt.

    Example:
        >>> bad = StepOutcome(0, 0, False, SkipReason.NONFINITE_GRADIENTS, 4.0, 2.0, 1)
        >>> StepTally().after(bad)
        StepTally(attempted=1, applied=0, skipped=1, consecutive_skips=1)
    """

    attempted: int = 0
    applied: int = 0
    skipped: int = 0
    consecutive_skips: int = 0

    def after(self, outcome: StepOutcome) -> StepTally:
        """Return the tally with `outcome` counted."""
        applied = int(outcome.applied)
        return StepTally(
            self.attempted + 1,
            self.applied + applied,
            self.skipped + 1 - applied,
            0 if applied else self.consecutive_skips + 1,
        )

    def forgiven(self) -> StepTally:
        """Return the tally with no consecutive skips, as a checkpoint of a given-up run keeps it."""
        return StepTally(self.attempted, self.applied, self.skipped, 0)

    @staticmethod
    def total(tallies: Iterable[StepTally]) -> StepTally:
        """Return the sum of `tallies`; its `consecutive_skips` is the largest among them."""
        tallies = list(tallies)
        return StepTally(
            sum(t.attempted for t in tallies),
            sum(t.applied for t in tallies),
            sum(t.skipped for t in tallies),
            max((t.consecutive_skips for t in tallies), default=0),
        )
