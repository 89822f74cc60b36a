# SPDX-License-Identifier: Apache-2.0
"""The errors and the warning that the package raises during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_amp_guard.outcome import StepOutcome

__all__ = [
    "AmpGuardError",
    "AmpGuardWarning",
    "NonFiniteGradientError",
    "ScaledGradientError",
    "ScalerStateError",
    "SkipLimitError",
]


class AmpGuardError(RuntimeError):
    """Says what went wrong in a mixed precision run, where, and what to change.

    Bad arguments raise `ValueError` or `TypeError` and impossible set-ups raise Lightning's
    `MisconfigurationException`, both before the first batch; the children of this class are
    raised while the run goes on.

    Args:
        message: What was seen, what was expected, the likely cause and the change to make.
        outcome: The attempt that led here, or `None` when no attempt was under way.
    """

    def __init__(self, message: str, outcome: StepOutcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome

    def __reduce__(self) -> tuple[type[AmpGuardError], tuple[str, StepOutcome | None]]:
        """Pickle with the outcome, so that a spawned process can hand the error over."""
        return type(self), (str(self), self.outcome)


class ScaledGradientError(AmpGuardError):
    """Gradients were changed, replaced or made while (or without) being multiplied by the scale."""


class SkipLimitError(AmpGuardError):
    """One optimizer skipped `max_consecutive_skips` updates in a row."""


class NonFiniteGradientError(AmpGuardError):
    """An update was skipped under `error_if_nonfinite=True`; the message names the parameters."""


class ScalerStateError(AmpGuardError):
    """A checkpoint's scaler state is damaged; the message names the key in quotes."""


class AmpGuardWarning(UserWarning):
    """Something deserves attention, and the run goes on."""
