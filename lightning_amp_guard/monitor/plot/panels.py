# SPDX-License-Identifier: Apache-2.0
"""The panels of a run's picture, each drawn into axes that it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_amp_guard.monitor.plot.histogram import FP16_BANDS, ExponentHistogram
from lightning_amp_guard.monitor.records import Row
from lightning_amp_guard.outcome import SkipReason

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["COLUMNS", "draw_column", "draw_histogram", "draw_scale", "reason_text"]

COLUMNS = {
    "lr": "learning rate",
    "loss": "loss\n(mean over the window)",
    "grad_norm": "gradient norm\n(unscaled, L2)",
}
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito
_REASONS = {
    SkipReason.NONFINITE_GRADIENTS.name: ("non-finite gradients", "v", "#d62728"),
    SkipReason.NONFINITE_LOSS.name: ("non-finite loss", "X", "#9467bd"),
    SkipReason.PARTNER_SKIPPED.name: ("a partner's skip", "s", "#7f7f7f"),
}
_BANDS = {"zero": "#f4c7c3", "subnormal": "#fde8c8", "normal": "#dcefdc", "overflow": "#f4c7c3"}
_LOG_SPAN = 100.0  # values that span more are drawn on a log axis
_FEW = 60  # attempts that are drawn as points too


def reason_text(reason: str | None) -> str:
    """Return the name of a skip's reason in words."""
    known = _REASONS.get(reason or "")
    return known[0] if known else (reason or "unknown reason").lower().replace("_", " ")


def _by_optimizer(rows: Sequence[Row]) -> Mapping[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.optimizer, []).append(row)
    return dict(sorted(found.items()))


def _draw_lines(axes: Axes, lanes: Mapping[int, list[tuple[int, float]]], unplaceable: str) -> None:
    """Draw a line of (attempt, value) for each optimizer; what is not finite is marked at the top."""
    for idx, points in lanes.items():
        color = _COLORS[idx % len(_COLORS)]
        axes.plot(
            [x for x, _ in points],
            [y if math.isfinite(y) else math.nan for _, y in points],
            color=color,
            linewidth=1.2,
            marker="." if len(points) < _FEW else "",
            label=f"optimizer {idx}" if len(lanes) > 1 else "_",
        )
        if lost := [x for x, y in points if not math.isfinite(y)]:
            axes.plot(
                lost,
                [1.0] * len(lost),
                "|",
                color=color,
                markersize=10,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
                label=unplaceable,
            )


def draw_scale(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the scale on a log2 axis, and every skip on it by reason."""
    lanes = {
        idx: [(row.attempt, row.scale if row.scale > 0 else math.nan) for row in lane]
        for idx, lane in _by_optimizer(rows).items()
    }
    _draw_lines(axes, lanes, "0, inf or NaN")
    placed = [row for row in rows if 0 < row.scale < math.inf]
    skipped = [row for row in placed if not row.applied]
    for reason in dict.fromkeys(row.reason for row in skipped):
        _, marker, color = _REASONS.get(reason or "", ("", "D", "black"))
        axes.scatter(
            [row.attempt for row in skipped if row.reason == reason],
            [row.scale for row in skipped if row.reason == reason],
            marker=marker,
            color=color,
            s=30,
            zorder=3,
            label=f"skipped: {reason_text(reason)}",
        )
    axes.set_yscale("log", base=2)
    scales = [row.scale for row in placed] or [1.0]
    axes.set_ylim(min(scales) / 2, max(scales) * 2)
    _finish(axes, "loss scale\n(log2 axis)")


def draw_column(axes: Axes, rows: Sequence[Row], column: str) -> None:
    """Draw one of `COLUMNS`, on a log axis if its values are positive and span a factor of 100."""
    lanes = {
        idx: [(row.attempt, y) for row in lane if (y := getattr(row, column)) is not None]
        for idx, lane in _by_optimizer(rows).items()
    }
    values = [y for lane in lanes.values() for _, y in lane]
    finite = [y for y in values if math.isfinite(y)]
    _draw_lines(axes, lanes, "inf or NaN")
    if not finite:
        _say(axes, "no finite value" if values else "not in this ledger")
    elif min(finite) > 0 and max(finite) > _LOG_SPAN * min(finite):
        axes.set_yscale("log")
    _finish(axes, COLUMNS[column])


def draw_histogram(axes: Axes, histogram: ExponentHistogram) -> None:
    """Draw the gradients' exponents over bands that say what float16 makes of them."""
    exponents = {*histogram.before, *histogram.after}
    low, high = min(exponents, default=0) - 2, max(exponents, default=0) + 3
    low, high = min(low, -31), max(high, 22)  # wide enough for the names of the bands
    _draw_bands(axes, low, high)
    if not exponents:
        _say(axes, _nothing(histogram))
    else:
        name = "before scaling (true value)" if histogram.scaled else "gradients (scale 1)"
        _draw_counts(axes, histogram, histogram.before, name, filled=True)
        if histogram.scaled:
            _draw_counts(axes, histogram, histogram.after, "after scaling", filled=False)
        axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel(f"log2 |gradient element|, over {histogram.log_steps:,} log steps")
    _finish(axes, "share of finite non-zero\nelements (%)")


def _nothing(histogram: ExponentHistogram) -> str:
    if histogram.log_steps:
        return "no finite non-zero gradient at a log step"
    return "no gradient statistics in this ledger"


def _draw_bands(axes: Axes, low: float, high: float) -> None:
    for name, (begin, end) in FP16_BANDS.items():
        left, right = max(begin, low), min(end, high)
        axes.axvspan(left, right, color=_BANDS[name], zorder=0, linewidth=0)
        axes.text(
            (left + right) / 2,
            1.02,
            f"{name} in FP16",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9,
        )


def _draw_counts(
    axes: Axes, histogram: ExponentHistogram, counts: Mapping[int, int], name: str, *, filled: bool
) -> None:
    total = sum(counts.values())
    bins = range(min(counts), max(counts) + 2)
    shares = [100 * counts.get(e, 0) / total for e in bins[:-1]]
    parts = [f"{100 * histogram.share(counts, b):.3g} % {b}" for b in FP16_BANDS if b != "normal"]
    axes.stairs(
        shares,
        list(bins),
        fill=filled,
        baseline=0 if filled else None,
        color="#9db4c9" if filled else _COLORS[1],
        linewidth=1.8,
        label="\n".join([f"{name}:", *(f"  {part}" for part in parts)]),
        zorder=2 if filled else 3,
    )


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="dimgray")
    axes.set_yticks([])


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    entries: dict[str, Artist] = {}
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
        entries.setdefault(name, handle)  # one entry for the marks of all optimizers
    if entries:
        axes.legend(
            list(entries.values()),
            list(entries),
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),  # beside the data
            borderaxespad=0.0,
            frameon=False,
            fontsize=9,
        )
