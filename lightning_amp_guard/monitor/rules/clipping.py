# SPDX-License-Identifier: Apache-2.0
"""The rule about gradients that were clipped while they carried the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import Row, RunView
from lightning_amp_guard.monitor.rules.reading import is_ours, owner

__all__ = ["clipped_while_scaled"]

# Less than this share of the norm survives a clip of gradients that carry a scale of 1024 or more,
# unless they were 50 times smaller than what they were clipped to.
_KEPT = 0.05
# Clip values as people write them: mantissas in decimal, and where such values end.
_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 7.5, 8.0, 9.0)
_ROUND_WITHIN = 1e-3
_LARGEST_CLIP = 100.0
# One round number may be chance, any number that three log steps agree on is none.
_LOOKS = 3
_ALIKE_WITHIN = 0.01


def clipped_while_scaled(view: RunView) -> Finding | None:
    """AMP101: gradients that carried the scale were cut to a size that is meant for true ones.

    Such a clip leaves its mark: what arrives, times the scale, is the clip value. So all log steps at
    which at most 5 % of the norm was kept must agree, times the scale, on one round number (within
    0.1 %), or at least three of them on any (within 1 %) though the share kept differs. Masks and
    divisors (by a token count, say) do neither.
    """
    touched = [
        _Cut(row, row.stats.kept, row.stats.largest)
        for row in view.rows
        if row.scale > 1 and row.stats is not None and row.stats.kept is not None
        if 0 < row.stats.kept < _KEPT
    ]
    for idx in sorted({cut.row.optimizer for cut in touched}):
        cuts = [cut for cut in touched if cut.row.optimizer == idx]
        kept = [cut.kept for cut in cuts]
        norms = [(cut.row.grad_norm or 0.0) * cut.row.scale for cut in cuts]
        peaks = [cut.largest * cut.row.scale for cut in cuts]
        if _pinned(norms, kept):
            return _clipped(view, cuts, "norm", norms[-1])
        if _pinned(peaks, kept):
            return _clipped(view, cuts, "largest element", peaks[-1])
    return None


class _Cut(NamedTuple):
    """A row whose gradients lost nearly all of their norm before they were unscaled."""

    row: Row
    kept: float
    largest: float


def _clipped(view: RunView, cuts: Sequence[_Cut], what: str, asked: float) -> Finding:
    row, kept, _ = cuts[-1]
    fix = f"or let the plugin unscale before it: `Trainer(plugins=[{owner(view.facts)}()])`"
    if is_ours(view.facts):
        fix = "or unscale first: `self.trainer.precision_plugin.unscale_(optimizer)`"
    return Finding(
        "AMP101",
        "gradients are nearly zero after clipping",
        f"at attempt {row.attempt} of optimizer {row.optimizer} the {what} was {asked:.4g} while"
        f" the gradients were multiplied by the scale of {row.scale:g}: asked to clip to"
        f" {asked:.4g}, the optimizer got {asked / row.scale:.4g}; {100 * kept:.3g} % of the norm that"
        f" the backward pass made was left ({len(cuts)} log steps like it)",
        "gradients were clipped while they were still multiplied by the scale",
        f"Clip in `on_before_optimizer_step`, {fix}",
    )


def _pinned(scaled: Sequence[float], kept: Sequence[float]) -> bool:
    """Return whether scaled sizes were cut to one value, rather than all in one proportion."""
    low, high = min(scaled), max(scaled)
    if not 0 < low <= high < math.inf:
        return False
    if (
        high <= _LARGEST_CLIP
        and all(_is_round(value) for value in scaled)
        and high <= low * (1 + 2 * _ROUND_WITHIN)
    ):
        return True
    alike = len(scaled) >= _LOOKS and high <= low * (1 + _ALIKE_WITHIN)
    return alike and max(kept) > min(kept) * (1 + 2 * _ALIKE_WITHIN)


def _is_round(value: float) -> bool:
    mantissa = value / 10.0 ** math.floor(math.log10(value))
    return any(abs(mantissa - r) <= _ROUND_WITHIN * r for r in (*_ROUND, 10.0))
