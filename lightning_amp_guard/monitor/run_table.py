# SPDX-License-Identifier: Apache-2.0
"""What a ledger comes to, as a short table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_amp_guard.monitor.plot.panels import reason_text
from lightning_amp_guard.monitor.records import Baseline, Row
from lightning_amp_guard.monitor.summary import scale_text

__all__ = ["run_rows"]


def run_rows(run: Baseline) -> list[tuple[str, str]]:
    """Return what the run came to as `(label, text)`: facts, counts per optimizer, first and last.

    Args:
        run: What `read_run` returns, with at least one row.
    """
    rows = _facts(run)
    optimizers = sorted({row.optimizer for row in run.rows})
    for idx in optimizers:
        lane = [row for row in run.rows if row.optimizer == idx]
        label = f"optimizer {idx}" if len(optimizers) > 1 else "attempts"
        rows.append((label, _counts(lane)))
    scales = [row.scale for row in run.rows]
    low, high, last = map(scale_text, (min(scales), max(scales), run.rows[-1].next_scale))
    rows.append(("scale", f"{low} to {high}, then {last}"))
    for label, values in {
        "loss": (row.loss for row in run.rows),
        "gradient norm": (row.grad_norm for row in run.rows),
    }.items():
        if text := _span(values):
            rows.append((label, text))
    return rows


def _facts(run: Baseline) -> list[tuple[str, str]]:
    if (facts := run.facts) is None:
        return []
    ranks = f", {facts.world_size} processes" if facts.world_size > 1 else ""
    rows = [("run", f"{facts.plugin}, {facts.precision} on {facts.device}{ranks}")]
    if facts.samples_per_s is not None:
        rows.append(("throughput", f"{facts.samples_per_s:,.4g} samples/s"))
    if facts.peak_mib is not None:
        rows.append(("peak memory", f"{facts.peak_mib:,.4g} MiB"))
    return rows


def _counts(lane: Sequence[Row]) -> str:
    skips = Counter(reason_text(row.reason) for row in lane if not row.applied)
    by_reason = ", ".join(f"{n:,} for {reason}" for reason, n in skips.most_common())
    text = f"{len(lane):,}: {len(lane) - skips.total():,} applied, {skips.total():,} skipped"
    return f"{text} ({by_reason})" if by_reason else text


def _span(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    if not known:
        return ""
    lost = f"; {len(known) - len(finite):,} inf or NaN" if len(finite) < len(known) else ""
    return f"first {known[0]:.6g}, last {known[-1]:.6g}{lost}"
