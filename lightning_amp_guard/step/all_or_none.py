# SPDX-License-Identifier: Apache-2.0
"""Several optimizers that step together or not at all."""

from __future__ import annotations

import torch

from lightning_amp_guard.errors import AmpGuardError
from lightning_amp_guard.step.lanes import Lane

__all__ = ["AllOrNone"]


class AllOrNone:
    """Judges the gradients of several optimizers together, once, before any of them steps.

    Args:
        lanes: The optimizers' lanes, unscaled and checked.

    Host sync: one for all of them.
    """

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes
        flags = [flag for lane in lanes for flag in lane.flags.values()]
        device = flags[0].device if flags else None
        self.doomed = bool(flags) and bool(torch.stack([f.to(device) for f in flags]).any())

    def admit(self, lane: Lane) -> None:
        """Raise if the optimizer is not one of the block's.

        Raises:
            AmpGuardError: It was not named, so it was not judged with the others.
        """
        if lane not in self.lanes:
            named = ", ".join(str(member.idx) for member in self.lanes)
            raise AmpGuardError(
                f"`all_or_none(...)`: optimizer {lane.idx} steps inside the block, which is for"
                f" {named}. Expected only the optimizers that the block names, whose gradients"
                " were checked together on entry. Name it as well, or step it outside."
            )

    @staticmethod
    def refuse_backward() -> AmpGuardError:
        """Return the error for a backward pass inside a block."""
        return AmpGuardError(
            "`all_or_none(...)`: a backward pass inside the block. Expected all of them before it:"
            " the gradients are unscaled and checked together on entry, later ones would not be."
            " Move `self.manual_backward(loss)` before the `with` statement."
        )

    @staticmethod
    def refuse_nesting() -> AmpGuardError:
        """Return the error for a block inside a block."""
        return AmpGuardError(
            "`all_or_none(...)`: a block inside another one. Expected one block for all optimizers"
            " that belong together. Name them all in the outer `with plugin.all_or_none(...)`."
        )
