# SPDX-License-Identifier: Apache-2.0
"""What several rules read off the rows of a run in the same way."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence

from lightning_amp_guard.diagnosis.counts import LEAST_ORDINARY_SCALE
from lightning_amp_guard.monitor.records import Row, RunFacts, RunView
from lightning_amp_guard.outcome import SkipReason
from lightning_amp_guard.plugin.fp32_scope import with_module

__all__ = [
    "LEAST_LR",
    "by_optimizer",
    "change",
    "describe_skips",
    "expected_share",
    "first_nonfinite",
    "fraction_text",
    "has_bad_loss",
    "is_low",
    "is_ours",
    "losses",
    "owner",
    "persistent_losses",
    "persistent_skips",
    "still_rising",
    "thirds",
    "unexplained",
    "unexplained_losses",
]

# As the monitor's `warn_after`: the search for a scale explains none of the skips counted here.
_STREAK = 8
_LOST = 3  # known losses in a row that were inf or NaN and applied: the weights are lost
_SHARE_OVER = 100
_SHARE_ALLOWED = 0.1
# Half of float32's rounding step at 1 (IEEE 754): a step of this size leaves a weight of 1 where it is.
LEAST_LR = 2.0**-24


def by_optimizer(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows of each optimizer, oldest first."""
    lanes: dict[int, list[Row]] = {}
    for row in rows:
        lanes.setdefault(row.optimizer, []).append(row)
    return lanes


def losses(rows: Iterable[Row]) -> list[float]:
    """Return the finite losses among the rows', oldest first."""
    return [row.loss for row in rows if row.loss is not None and math.isfinite(row.loss)]


def still_rising(rows: Sequence[Row]) -> bool:
    """Return whether the learning rate is on its way up: nothing can be said of progress yet."""
    rates = [row.lr for row in rows if row.lr is not None]
    return bool(rates) and rates[-1] > rates[len(rates) // 2] * 1.001


def is_low(facts: RunFacts) -> bool:
    """Return whether the run computes in 16 bits."""
    return facts.precision.startswith(("16", "bf16", "transformer-engine"))


def is_ours(facts: RunFacts) -> bool:
    """Return whether one of this package's plugins drives the run."""
    return facts.plugin in ("SafeAMP", "SafeFSDP")


def owner(facts: RunFacts) -> str:
    """Return the plugin of this package that fits the run."""
    return "SafeFSDP" if facts.plugin in ("SafeFSDP", "FSDPPrecision") else "SafeAMP"


def change(view: RunView) -> str:
    """Return the line that ends non-finite gradients: the culprit in float32 where it is known."""
    if view.culprit_path:
        chosen = with_module(view.fp32_modules, view.culprit_path)
        argument = f"fp32_modules={json.dumps(chosen)}"
        if view.facts.precision == "bf16-mixed":
            argument = f'precision="bf16-mixed", {argument}'
    elif view.facts.scaling:
        argument = 'precision="bf16-mixed"'
    else:
        argument = 'precision="bf16-mixed", error_if_nonfinite=True'
    return f"`Trainer(plugins=[{owner(view.facts)}({argument})])`"


def first_nonfinite(view: RunView) -> str:
    """Return what is known of who made the first inf or NaN, to append; empty if nothing."""
    return "" if view.culprit is None else f"; first non-finite: {view.culprit}"


def fraction_text(part: int, whole: int) -> str:
    """Return "3 of 4 (75 %)"."""
    return f"{part} of {whole} ({100 * part / max(whole, 1):.3g} %)"


def unexplained(rows: Sequence[Row], facts: RunFacts) -> list[Row]:
    """Return the skips of one optimizer that the search for a scale does not explain.

    Ordinary are overflows that take the scale to a new low (from 2**24 about ten of them, down to
    16), those that hysteresis bears before the scale backs off from the very same value, and skips
    for a partner's sake, which count at the partner. Skips for a non-finite loss are never ordinary:
    the loss does not depend on the scale.

    Args:
        rows: Rows of one optimizer, oldest first.
        facts: Where nothing is scaled, nothing is ordinary.
    """
    partner = SkipReason.PARTNER_SKIPPED.name
    skips = [row for row in rows if not row.applied and row.reason != partner]
    left = {row.scale for row in skips if row.next_scale < row.scale}
    low, found = math.inf, []
    for row in skips:
        if row.reason == SkipReason.NONFINITE_GRADIENTS.name and facts.scaling:
            low = min(low, row.scale)
            if LEAST_ORDINARY_SCALE <= row.next_scale < low:
                low = row.next_scale
                continue
            if row.next_scale == row.scale and row.scale in left:
                continue
        found.append(row)
    return found


def persistent_skips(rows: Sequence[Row], facts: RunFacts) -> list[Row]:
    """Return the unexplained overflows of one optimizer if they go on, else an empty list.

    They go on if there are 8 in a row, the ordinary ones between them left out, or if they are more
    than 10 % of the last 100 attempts and more than twice the share that growth causes,
    1 / (growth_interval + 1).
    """
    found = [
        row for row in unexplained(rows, facts) if row.reason == SkipReason.NONFINITE_GRADIENTS.name
    ]
    if not found:
        return []
    recent = [row for row in found if row.attempt > rows[-1].attempt - _SHARE_OVER]
    allowed = max(_SHARE_ALLOWED, 2 * expected_share(facts))
    if len(recent) > _SHARE_OVER * allowed:
        return recent
    last_applied = max((row.attempt for row in rows if row.applied), default=-1)
    streak = [row for row in found if row.attempt > last_applied]
    return streak if len(streak) >= _STREAK else []


def has_bad_loss(row: Row) -> bool:
    """Return whether the attempt's loss was inf or NaN, as far as known."""
    if row.reason == SkipReason.NONFINITE_LOSS.name:
        return True
    return row.loss is not None and not math.isfinite(row.loss)


def unexplained_losses(view: RunView) -> list[Row]:
    """Return the rows whose loss was inf or NaN though their batch was not.

    A bad loss that was applied leaves inf or NaN in the weights, so a bad batch explains the applied
    ones after it too.
    """
    explained = set(view.bad_attempts)
    return [
        row
        for row in view.rows
        if has_bad_loss(row) and (row.optimizer, row.attempt) not in explained
        if not view.bad_batch or (explained and not row.applied)
    ]


def persistent_losses(view: RunView) -> list[Row]:
    """Return the unexplained bad losses of one optimizer if they go on, else an empty list.

    They go on if the newest 8 known losses in a row are among them, or 3 that were applied, which no
    later step mends, or if they are more than 10 % of the last 100 attempts.
    """
    for idx, bad in by_optimizer(unexplained_losses(view)).items():
        rows = [row for row in view.rows if row.optimizer == idx]
        recent = [row for row in bad if row.attempt > rows[-1].attempt - _SHARE_OVER]
        judged = [row for row in rows if row.loss is not None or has_bad_loss(row)]
        good = max((row.attempt for row in judged if not has_bad_loss(row)), default=-1)
        streak = [row for row in bad if row.attempt > good]
        lost = [row for row in streak if row.applied]
        if len(recent) > _SHARE_OVER * _SHARE_ALLOWED:
            return recent
        if len(streak) >= _STREAK or len(lost) >= _LOST:
            return streak
    return []


def expected_share(facts: RunFacts) -> float:
    """Return the share of attempts that growth makes a settled run skip; 0 if nothing grows."""
    interval = facts.growth_interval if facts.scaling else None
    return 0.0 if interval is None else 1 / (max(interval, 1) + 1)


def describe_skips(found: Sequence[Row], rows: Sequence[Row], facts: RunFacts) -> str:
    """Return how many of the optimizer's attempts the skips `found` are, and where the last was."""
    over = rows[-1].attempt - found[0].attempt + 1
    expected = f"{100 * expected_share(facts):.2g} %"
    last = f"; the last was attempt {found[-1].attempt}, at scale {found[-1].scale:g}"
    if has_bad_loss(found[-1]):
        return (
            f"{fraction_text(len(found), over)} attempts of optimizer {found[-1].optimizer} from"
            f" attempt {found[0].attempt} on had a loss known to be inf or NaN"
            f" ({sum(not row.applied for row in found)} were skipped){last}"
        )
    return (
        f"optimizer {found[-1].optimizer} skipped {fraction_text(len(found), over)} attempts from"
        f" attempt {found[0].attempt} on for inf or NaN in the gradients, where growth of the scale"
        f" explains {expected}{last}"
    )


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the medians of the first and the last third, and the spread around them.

    The spread is the median absolute deviation from the third's own median (Hampel, 1974): a single
    spike, or a trend between the thirds, does not widen it.
    """
    size = len(values) // 3
    first, last = values[:size], values[-size:]
    start, end = statistics.median(first), statistics.median(last)
    away = [abs(v - start) for v in first] + [abs(v - end) for v in last]
    return start, end, statistics.median(away)
