# SPDX-License-Identifier: Apache-2.0
"""What a rule found: the symptom with its numbers, the likely cause, and what to write."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """Tells of one fault of a run, ready to be shown, stored or tested for.

    Args:
        code: "AMP101" to "AMP113"; the same fault always has the same code.
        title: The symptom, in a few words.
        evidence: What was seen, with its numbers and places.
        cause: What most likely lies behind it.
        remedy: What to change; ends in the code to write.

    Example:
        >>> finding = Finding(
        ...     "AMP102",
        ...     "the schedule is ahead of the updates",
        ...     "StepLR advanced 6 times for 4 updates",
        ...     "skipped steps advanced it",
        ...     "Let the plugin hold it back: `Trainer(plugins=[SafeAMP()])`",
        ... )
        >>> print(finding)
        AMP102: the schedule is ahead of the updates
          seen: StepLR advanced 6 times for 4 updates
          likely cause: skipped steps advanced it
          change: Let the plugin hold it back: `Trainer(plugins=[SafeAMP()])`
    """

    code: str
    title: str
    evidence: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        """Return four lines, whatever line breaks the parts contain."""
        parts = (
            f"{self.code}: {self.title}",
            f"seen: {self.evidence}",
            f"likely cause: {self.cause}",
            f"change: {self.remedy}",
        )
        return "\n  ".join(" ".join(part.split()) for part in parts)

    def to_dict(self) -> dict[str, str]:
        """Return the parts by name, all of them strings, as JSON can hold them."""
        return asdict(self)
