# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: scale, learning rate, loss, gradient norm, and gradients in FP16's range."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_amp_guard.monitor.plot import panels
from lightning_amp_guard.monitor.plot.histogram import exponent_histogram
from lightning_amp_guard.monitor.records import Baseline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["build_figure", "draw_report"]

_DPI = 100
_INCHES = (12.0, 13.0)  # 1200 pixels wide
_HEIGHTS = (1.25, 0.7, 1.0, 1.0, 1.5)


def draw_report(run: Baseline, path: str | Path) -> None:
    """Draw a run into a picture 1200 pixels wide; the suffix chooses the format (`.png`, `.pdf`).

    Args:
        run: What `read_run` returns.
        path: The picture to write; one that is there is replaced.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The picture cannot be written.
        ValueError: The run has no attempt, or the suffix is of no known format.
    """
    figure = build_figure(run)
    from matplotlib import style

    with style.context("default"):  # ticks and the size of the picture are settled only here
        figure.savefig(path, dpi=_DPI)


def build_figure(run: Baseline) -> Figure:
    """Return the figure that `draw_report` writes; pyplot and its state play no part.

    Five panels share the width: scale on a log2 axis with skips marked by reason, learning rate,
    loss and gradient norm over the attempts, one line for each optimizer, and the histogram of
    gradient exponents before and after scaling over what float16 makes of them (the figure of
    Micikevicius et al., Mixed Precision Training, arXiv 1710.03740). A column that the ledger does
    not hold says so in its panel. Inf and NaN are marked at the top of a panel.

    Args:
        run: What `read_run` returns.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The run has no attempt.
    """
    if not run.rows:
        raise ValueError("`draw_report`: the ledger holds no attempt. Expected at least one line.")
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "`draw_report` needs matplotlib: pip install 'lightning-amp-guard[report]'"
        ) from error
    with style.context("default"):  # the same picture whatever the user's settings
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_title(run), fontsize=13)
        scale, *columns, histogram = figure.subplots(5, 1, height_ratios=_HEIGHTS)
        panels.draw_scale(scale, run.rows)
        for panel, column in zip(columns, panels.COLUMNS, strict=True):
            panels.draw_column(panel, run.rows, column)
            panel.sharex(scale)
        first, last = (f(row.attempt for row in run.rows) for f in (min, max))
        margin = max(0.5, 0.03 * (last - first))
        scale.set_xlim(first - margin, last + margin)
        scale.xaxis.set_major_locator(MaxNLocator(integer=True))
        for panel in (scale, *columns[:-1]):
            panel.tick_params(labelbottom=False)
        columns[-1].set_xlabel("attempt")
        panels.draw_histogram(histogram, exponent_histogram(run.rows))
    return figure


def _title(run: Baseline) -> str:
    skips = Counter(panels.reason_text(row.reason) for row in run.rows if not row.applied)
    by_reason = ", ".join(f"{n:,} for {reason}" for reason, n in skips.most_common())
    attempts = len(run.rows)
    counts = f"{attempts:,} attempt{'s' * (attempts != 1)}, {skips.total():,} skipped"
    counts += f" ({by_reason})" if by_reason else ""
    if run.facts is None:
        return counts
    facts = run.facts
    ranks = f" on {facts.world_size} ranks" if facts.world_size > 1 else ""
    return f"{facts.plugin}, {facts.precision}, {facts.device}{ranks}\n{counts}"
