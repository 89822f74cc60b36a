# SPDX-License-Identifier: Apache-2.0
"""How an attempt is judged: non-finite or not, and what is to blame."""

from __future__ import annotations

import torch

from lightning_amp_guard import _upstream
from lightning_amp_guard.outcome import SkipReason
from lightning_amp_guard.scaler import read_flags
from lightning_amp_guard.step.lanes import Lane
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["blame", "read_verdict"]


def read_verdict(lane: Lane) -> tuple[bool, float | None]:
    """Return whether a gradient is non-finite, and the total norm where something computed it.

    Host sync: the one of an attempt; flag and norm travel together.
    """
    flags, norm = list(lane.flags.values()), lane.norm
    if norm is None:
        return read_flags(flags), None
    norm = _upstream.whole(norm.detach()).float()
    together = torch.stack([*(f.to(norm.device) for f in flags), norm])
    *found, value = together.tolist()
    return any(found), value


def blame(
    lane: Lane, windows: GradientWindows, ranks: RankAgreement | None
) -> tuple[SkipReason, bool]:
    """Return why a non-finite attempt is skipped, and whether the scale has answered it already.

    The forward pass does not depend on the scale, so a loss that is itself inf or NaN is no fault
    of the scale's. And gradients made at a scale that has backed off since need no second backoff.

    Host sync: one for the losses and one for the flags of each cell; over ranks one all-reduce.
    """
    cells = lane.cells
    bad = [cell.is_nonfinite() for cell in cells]
    # the gradients of a rank's loss may be held by another rank, so there every loss counts
    lost = [
        (b or ranks is not None) and c.had_nonfinite_loss() for b, c in zip(bad, cells, strict=True)
    ]
    fresh = [
        b and not c.overflowed_earlier(windows.overflows) for b, c in zip(bad, cells, strict=True)
    ]
    if ranks is not None:
        together, n = ranks.any(*bad, *lost, *fresh), len(cells)
        bad, lost, fresh = together[:n], together[n : 2 * n], together[2 * n :]
    bad_loss = any([b and loss for b, loss in zip(bad, lost, strict=True)])
    # where no check of a backward pass found it, it was put there by hand: none of the scale's doing
    answered = not any(fresh)
    return SkipReason.NONFINITE_LOSS if bad_loss else SkipReason.NONFINITE_GRADIENTS, answered
