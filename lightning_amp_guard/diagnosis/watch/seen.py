# SPDX-License-Identifier: Apache-2.0
"""What a watched step did, call by call, and which of the calls is to blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

__all__ = ["Numbers", "Seen", "choose"]


@dataclass(frozen=True)
class Numbers:
    """What was measured of the values that went in and came out, as read from the device.

    Args:
        lowest_in: Smallest value that went in; NaN if one was NaN, 0 if there was none.
        highest_in: Largest value that went in.
        lowest: Smallest value that came out.
        highest: Largest value that came out.
        bad: How many of them were not finite; above 2**24 about.
        inf: Not 0 if one was inf or -inf.
        largest: The largest finite |x| of them.
    """

    lowest_in: float
    highest_in: float
    lowest: float
    highest: float
    bad: float
    inf: float
    largest: float


@dataclass
class Seen:
    """One call of a module, or one operator's backward pass.

    Args:
        module: The module's name.
        kind: The module's class name.
        direction: "forward" or "backward".
        begin: When it began, as a running count of events.
        end: When it ended; the same for a backward pass.
        dtype: Of what came out, the lowest precision among it.
        elements: How many values came out.
        floats_in: Whether any floating point values went in.
        graded: Whether gradients were recorded.
        operator: The backward pass's operator, "" in the forward pass.
        is_loss: Whether it stands for a loss, which the whole step computed.
        composite: Whether the operator consists of others, so that its dtype says little.
        numbers: What was measured, once it has been read.
    """

    module: str
    kind: str
    direction: Literal["forward", "backward"]
    begin: int
    end: int
    dtype: torch.dtype
    elements: int
    floats_in: bool
    graded: bool
    operator: str = ""
    is_loss: bool = False
    composite: bool = False
    numbers: Numbers = field(default_factory=lambda: Numbers(0, 0, 0, 0, 0, 0, 0))

    @property
    def finite(self) -> bool:
        """Whether all that came out was finite."""
        return not self.numbers.bad

    @property
    def finite_in(self) -> bool:
        """Whether all that went in was finite."""
        return math.isfinite(self.numbers.lowest_in) and math.isfinite(self.numbers.highest_in)

    @property
    def masked_in(self) -> bool:
        """Whether what went in was finite but for some -inf, as in an attention mask."""
        return self.numbers.lowest_in == -math.inf and self.numbers.highest_in < math.inf

    @property
    def only_minus_inf(self) -> bool:
        """Whether -inf is all that was not finite in what came out."""
        return not self.finite and self.numbers.highest < math.inf  # false for NaN

    @property
    def at_fault(self) -> bool:
        """Whether finite values (or a mask) went in, and worse came out."""
        if self.finite:
            return False
        passed_on = self.masked_in and self.only_minus_inf
        return self.finite_in or (self.direction == "forward" and self.masked_in and not passed_on)

    @property
    def spoiled_in(self) -> bool:
        """Whether what went in was worse than a mask."""
        return not (self.finite_in or self.masked_in)

    @property
    def doubtful(self) -> bool:
        """Whether it may well be in order: a mask made from nothing, or a call without gradients."""
        return not self.graded or (self.only_minus_inf and not self.floats_in)

    def holds(self, other: Seen) -> bool:
        """Whether `other` happened inside of this call."""
        return self.begin < other.begin and other.end < self.end


def choose(seen: Sequence[Seen]) -> Seen | None:
    """Return the one to blame, or `None`.

    In the forward pass the first call in order, innermost first, with finite inputs and an output
    that is not, unless a call around it healed that; -inf in an input counts as finite as long as
    nothing worse comes out. Made in vain (masks made from nothing, calls without gradients), such a
    call stands back behind a later one that does not contain it. Without any, the step itself is to
    blame for a loss that is not finite. In the backward pass: the first operator, in backward order,
    whose incoming gradient was finite and whose outgoing one is not; its module made it. But where
    that module had read inf or NaN in the forward pass, which something after it then hid (a `tanh`,
    say), the gradient is the consequence, and whoever made them is to blame.

    Args:
        seen: What was watched, with its numbers.
    """
    losses = [s for s in seen if s.is_loss]
    bad_loss = next((loss for loss in losses if not loss.finite), None)
    calls = [s for s in seen if s.direction == "forward" and not s.is_loss]
    forward = _first_forward(calls)
    if bad_loss is not None:
        return forward or bad_loss
    backward = [s for s in seen if s.direction == "backward" and s.at_fault]
    first = min(backward, key=lambda s: s.end, default=None)
    if first is not None and any(s.module == first.module and s.spoiled_in for s in calls):
        return _first_forward(calls, though_healed=True) or first
    return first if losses or first is not None else forward


def _first_forward(calls: list[Seen], *, though_healed: bool = False) -> Seen | None:
    healers = [] if though_healed else [c for c in calls if c.finite]
    faults = [s for s in calls if s.at_fault and not any(c.holds(s) for c in healers)]
    faults.sort(key=lambda s: s.end)
    if not faults or not faults[0].doubtful:
        return faults[0] if faults else None
    better = [s for s in faults if not s.doubtful and not s.holds(faults[0])]
    return better[0] if better else faults[0]
