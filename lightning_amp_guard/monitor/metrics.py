# SPDX-License-Identifier: Apache-2.0
"""What the monitor computes, on plain numbers and without a Trainer."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.diagnosis.counts import LEAST_ORDINARY_SCALE
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally

__all__ = [
    "KEYS",
    "LOG_KEYS",
    "FitMetrics",
    "SkipWatch",
    "expected_share",
    "search_skips",
    "tallies_since",
]

KEYS = (
    "amp/scale",
    "amp/skipped",
    "amp/applied_steps",
    "amp/skipped_steps",
    "amp/consecutive_skips",
    "amp/skip_rate",
    "amp/grad_norm",
)
LOG_KEYS = (
    *KEYS,
    "amp/zero_grad_fraction",
    "amp/subnormal_grad_fraction",
    "amp/headroom_bits",
    "amp/samples_per_s",
    "amp/tokens_per_s",
    "amp/peak_allocated_mib",
    "amp/peak_reserved_mib",
    "amp/process_rss_mib",
)

_SHARE_OVER = 100
_SHARE_ALLOWED = 0.1


def expected_share(settings: ScaleSettings | None) -> float:
    """Return the share of attempts that growth makes a settled run skip; 0 if nothing grows.

    Each growth of the scale is found too large by one overflow (`hysteresis` of them) and followed
    by `growth_interval` applied updates: 1 / (growth_interval + 1).

    Args:
        settings: How the scale moves; `None` without a scaler.
    """
    if settings is None or not settings.dynamic:
        return 0.0
    return settings.hysteresis / (settings.growth_interval + settings.hysteresis)


def search_skips(scales: Sequence[float], backoff_factor: float) -> int:
    """Return how many overflows of one optimizer take the scale from its highest to its lowest value.

    Below a scale of 16 no search is at work any more.

    Args:
        scales: The lowest and the highest scale.
        backoff_factor: What an overflow multiplies the scale by.

    Example:
        >>> search_skips((2.0**14, 2.0**24), 0.5), search_skips((1.0, 64.0), 0.5)
        (10, 2)
    """
    low, high = max(scales[0], LEAST_ORDINARY_SCALE), scales[1]
    if not low < high < math.inf:
        return 0
    return math.ceil(math.log(low / high) / math.log(backoff_factor) - 1e-9)


def tallies_since(now: Sequence[StepTally], before: Sequence[StepTally]) -> list[StepTally]:
    """Return, per optimizer, what was counted after `before`; `consecutive_skips` is today's."""
    return [
        StepTally(
            n.attempted - b.attempted,
            n.applied - b.applied,
            n.skipped - b.skipped,
            n.consecutive_skips,
        )
        for n, b in zip_longest(now, before[: len(now)], fillvalue=StepTally())
    ]


class FitMetrics:
    """Follows the outcomes of one fit and turns the plugin's counts into the logged values.

    Counts are differences of the plugin's tallies, which survive a resume; nothing is counted twice
    and no aggregator has to be updated between log steps.

    Args:
        before: The plugin's tallies when the fit began.

    Example:
        >>> metrics = FitMetrics([])
        >>> bad = StepOutcome(0, 0, False, SkipReason.NONFINITE_GRADIENTS, 8.0, 4.0, 1)
        >>> metrics.see(bad)
        >>> metrics.values(StepTally().after(bad), 4.0)["amp/skipped"]
        1.0
    """

    def __init__(self, before: Sequence[StepTally]) -> None:
        self.before = list(before)
        self.reasons: Counter[SkipReason] = Counter()
        self.lowest, self.highest = math.inf, 0.0
        self.norm: float | None = None
        self._skips_logged = StepTally.total(before).skipped

    def see(self, outcome: StepOutcome, *, scaled: bool = True) -> None:
        """Take an outcome into account. Host sync: none.

        Args:
            outcome: What became of the attempt.
            scaled: Whether its scale belongs to the range that the summary shows.
        """
        if outcome.grad_norm is not None:
            self.norm = outcome.grad_norm
        if scaled and outcome.scale > self.highest:
            self.highest = outcome.scale
        if scaled and outcome.next_scale < self.lowest:
            self.lowest = outcome.next_scale
        if outcome.reason is not None:
            self.reasons[outcome.reason] += 1

    def values(self, tally: StepTally, scale: float) -> dict[str, float]:
        """Return the values to log, by key, and begin a new log interval. Host sync: none.

        Args:
            tally: The plugin's counts over the whole run and all optimizers.
            scale: The scale in force.
        """
        skipped = tally.skipped - self._skips_logged
        self._skips_logged = tally.skipped
        numbers = (
            scale,
            skipped,
            tally.applied,
            tally.skipped,
            tally.consecutive_skips,
            tally.skipped / max(tally.attempted, 1),
            math.nan if self.norm is None else self.norm,
        )
        return dict(zip(KEYS, map(float, numbers), strict=True))


@dataclass
class _Skips:
    """What the watch remembers of one optimizer's skips; applied attempts leave no trace."""

    low: float
    last: int = -2
    in_a_row: int = 0
    recent: deque[int] = field(default_factory=deque)


class SkipWatch:
    """Notices, once, that skips go on beyond what the search for a scale explains.

    A skip that takes the scale to a new low belongs to the calibration (from 2**24 about ten of them
    are ordinary) and does not count. Of the others, `patience` in a row of one optimizer are too
    many, and so is a share above 10 % of its last 100 attempts, or above twice the share that
    growth causes, whichever is larger.

    Args:
        patience: Skips in a row, calibration left out; `None` never speaks.
        settings: How the scale moves; `None` without a scaler.
    """

    def __init__(self, patience: int | None, settings: ScaleSettings | None) -> None:
        self.patience = patience
        self.expected = expected_share(settings)
        # overflows that hysteresis bears move no scale, yet are as ordinary as those that do
        borne = settings.hysteresis - 1 if settings else 0
        self._in_a_row = (patience or 0) + borne
        self._in_share = math.ceil(_SHARE_OVER * max(_SHARE_ALLOWED, 2 * self.expected)) + borne
        self._lanes: dict[int, _Skips] = {}
        self._spoken = patience is None

    def see(self, outcome: StepOutcome) -> str | None:
        """Return the warning if this skip is the one too many, else `None`. Host sync: none."""
        if self._spoken or outcome.reason is None:
            return None
        skips = self._lanes.setdefault(outcome.optimizer_idx, _Skips(outcome.scale))
        if outcome.attempt != skips.last + 1:
            skips.in_a_row = 0
        skips.last = outcome.attempt
        if LEAST_ORDINARY_SCALE <= outcome.next_scale < skips.low:
            skips.low = outcome.next_scale
            return None
        skips.in_a_row += 1
        skips.recent.append(outcome.attempt)
        while skips.recent[0] <= outcome.attempt - _SHARE_OVER:
            skips.recent.popleft()
        return self._speak(outcome, outcome.reason, skips)

    def _speak(self, outcome: StepOutcome, reason: SkipReason, skips: _Skips) -> str | None:
        if skips.in_a_row >= self._in_a_row:
            seen = f"{skips.in_a_row} updates in a row"
        elif len(skips.recent) > self._in_share:
            seen = f"{len(skips.recent)} of its last {_SHARE_OVER} attempts"
        else:
            return None
        self._spoken = True
        return (
            f"`AmpMonitor(warn_after={self.patience})`: optimizer {outcome.optimizer_idx} skipped"
            f" {seen}, the last (attempt {outcome.attempt}) at scale {outcome.scale:g}, and the"
            " calibration of the scale does not explain them. Expected"
            f" {100 * self.expected:.2g} % of attempts to be skipped once the scale has settled."
            f" {reason.sentence}"
        )
