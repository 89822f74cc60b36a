# SPDX-License-Identifier: Apache-2.0
"""How a run's gradients lie in float16's range, before and after scaling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_amp_guard.monitor.records import Row

__all__ = ["FP16_BANDS", "ExponentHistogram", "exponent_histogram"]

# log2 of the bounds between what float16 makes of a number: half its smallest subnormal 2**-24 and
# less rounds to zero, below 2**-14 it is subnormal, from 65520 (2**16 but for rounding) it is inf.
FP16_BANDS = {
    "zero": (-math.inf, -25),
    "subnormal": (-25, -14),
    "normal": (-14, 16),
    "overflow": (16, math.inf),
}


@dataclass(frozen=True)
class ExponentHistogram:
    """Counts gradient elements by the exponent e of 2**e <= |g| < 2**(e+1), over all log steps.

    Args:
        before: True gradients, as they would be without scaling.
        after: The same, multiplied by the scale of their attempt.
        log_steps: Attempts that were looked at.
    """

    before: Mapping[int, int]
    after: Mapping[int, int]
    log_steps: int

    @property
    def scaled(self) -> bool:
        """Whether scaling changed anything."""
        return self.before != self.after

    def share(self, counts: Mapping[int, int], band: str) -> float:
        """Return the share of elements (0 to 1) in one of `FP16_BANDS`; 0 if there are none."""
        low, high = FP16_BANDS[band]
        total = sum(counts.values())
        return sum(n for e, n in counts.items() if low <= e < high) / max(total, 1)


def exponent_histogram(rows: Sequence[Row]) -> ExponentHistogram:
    """Return the exponents of all rows with statistics; zeros, inf and NaN have none.

    Args:
        rows: Attempts. A scale that is no power of two counts as the nearest one.

    Example:
        >>> from lightning_amp_guard.monitor.records import GradientStats
        >>> stats = GradientStats(0, 0, 3, 0, 0.002, exponents={-30: 1, -9: 2})
        >>> row = Row(0, 0, 0, 0, True, None, 1024.0, 1024.0, stats=stats)
        >>> found = exponent_histogram([row])
        >>> found.after, found.share(found.before, "zero")
        (Counter({1: 2, -20: 1}), 0.3333333333333333)
    """
    before: Counter[int] = Counter()
    after: Counter[int] = Counter()
    log_steps = 0
    for row in rows:
        if row.stats is None:
            continue
        log_steps += 1
        shift = round(math.log2(row.scale)) if 0 < row.scale < math.inf else 0
        before.update(row.stats.exponents)
        after.update({e + shift: n for e, n in row.stats.exponents.items()})
    return ExponentHistogram(before, after, log_steps)
