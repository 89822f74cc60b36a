# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of a fit: a handful of lines, as a table where the terminal shows one."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_amp_guard import _upstream
from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.metrics import search_skips, tallies_since
from lightning_amp_guard.monitor.run import MonitoredRun
from lightning_amp_guard.monitor.schedule_end import ScheduleEnd
from lightning_amp_guard.outcome import SkipReason, StepTally

__all__ = ["FitSummary", "ScheduleEnd", "show", "summarize"]

_TITLE = "Mixed precision in this fit"
_CAUSES = {
    SkipReason.NONFINITE_GRADIENTS: "non-finite gradients",
    SkipReason.NONFINITE_LOSS: "non-finite loss",
    SkipReason.PARTNER_SKIPPED: "a partner's skip",
}
_SCHEDULES_SHOWN = 2
_FINDINGS_SHOWN = 7
_COLUMNS = 80


@dataclass(frozen=True)
class FitSummary:
    """Holds what the summary of a fit says.

    Args:
        tally: Counts of this fit, all optimizers together.
        run: Counts of the whole run, earlier fits and the checkpoint's past included.
        reasons: Skips of this fit by reason.
        expected: The share of skips that growth explains.
        scales: Lowest, highest and last scale; `None` where nothing scales.
        schedules: The step-interval schedules, and those that the module steps by hand.
        findings: Codes of the findings.
        switched: The precision that the run has gone over to by `on_limit`, which has no scale.
        searched: Skips that the way from the highest to the lowest scale explains.
    """

    tally: StepTally
    run: StepTally
    reasons: Mapping[SkipReason, int]
    expected: float
    scales: tuple[float, float, float] | None
    schedules: Sequence[ScheduleEnd] = ()
    findings: Sequence[str] = ()
    switched: str | None = None
    searched: int = 0

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines as `(label, text)`, at most nine."""
        tally = self.tally
        rows = [
            ("attempts", f"{tally.attempted}"),
            ("applied", f"{tally.applied}"),
            ("skipped", self._skipped()),
            ("skip share", self._judged_share()),
        ]
        if self.scales is not None:
            low, high, last = map(scale_text, self.scales)
            now = f"now {last}" if self.switched is None else f"then {self.switched} by `on_limit`"
            rows.append(("scale", f"{low} to {high}, {now}"))
        if self.run.attempted > tally.attempted:
            rows.append(
                ("whole run", f"{self.run.applied} applied of {self.run.attempted} attempts")
            )
        return [*rows, *self._schedule_rows(), ("findings", self._found() or "none")]

    def _skipped(self) -> str:
        by_reason = ", ".join(f"{n} for {_CAUSES[r]}" for r, n in _sorted_by_count(self.reasons))
        text = f"{self.tally.skipped}" + (f" ({by_reason})" if by_reason else "")
        if len(text) > _COLUMNS - len("  skip share  "):
            text = text.replace("non-finite ", "")
        return text

    def _judged_share(self) -> str:
        """Say which share was skipped, and whether growth and the search for a scale explain it."""
        tally, usual = self.tally, f"about {100 * self.expected:.2g} %" if self.expected else "none"
        share = f"{100 * tally.skipped / max(tally.attempted, 1):.3g} %"
        if lost := self.reasons.get(SkipReason.NONFINITE_LOSS, 0):
            lost_share = f"{100 * lost / max(tally.attempted, 1):.3g} %"
            return f"{share}, high: {lost_share} for the loss, which no scale explains"
        # one overflow, and two for each growth that the applied updates allow, are none too many
        growths = tally.applied * self.expected / (1 - self.expected)
        by_growth = 1 + 2 * growths if self.expected else 0
        if tally.skipped <= by_growth:
            return f"{share}, normal ({usual} is expected)"
        if tally.skipped <= by_growth + self.searched:
            return f"{share}, normal while the scale settles (then {usual})"
        return f"{share}, high ({usual} is expected once the scale has settled)"

    def _found(self) -> str:
        codes = list(self.findings)
        if len(codes) > _FINDINGS_SHOWN:
            hidden = len(codes) - _FINDINGS_SHOWN + 1
            codes[_FINDINGS_SHOWN - 1 :] = [f"and {hidden} more"]
        return ", ".join(codes)

    def _schedule_rows(self) -> list[tuple[str, str]]:
        rows = [(f"schedule {s.name}", s.sentence) for s in self.schedules]
        if len(rows) > _SCHEDULES_SHOWN:
            hidden = len(rows) - _SCHEDULES_SHOWN + 1
            rows[_SCHEDULES_SHOWN - 1 :] = [("schedules", f"and {hidden} more")]
        return rows


def _sorted_by_count(reasons: Mapping[SkipReason, int]) -> list[tuple[SkipReason, int]]:
    return sorted(reasons.items(), key=lambda item: -item[1])


def scale_text(scale: float) -> str:
    """Return a scale for reading: powers of two from 1024 as such, others in short."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 and scale >= 1024 else f"{scale:g}"


def as_text(rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows as plain text under the title, aligned.

    Where 80 columns do not hold that, long names of schedules stand out of the alignment.
    """
    width = max(len(label) for label, _ in rows)
    if any(width + 4 + len(text) > _COLUMNS for _, text in rows):
        width = max(len(label) for label, _ in rows if not label.startswith("schedule "))
    return "\n".join([f"{_TITLE}:", *(f"  {label:<{width}}  {text}" for label, text in rows)])


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows as a rich table without colours, as wide as its longest line.

    Plain ASCII where standard error cannot show box characters.
    """
    rich_table, rich_console, box = map(
        importlib.import_module, ("rich.table", "rich.console", "rich.box")
    )
    unicode = (sys.stderr.encoding or "").lower().startswith("utf")
    table = rich_table.Table(
        title=_TITLE, show_header=False, box=box.ROUNDED if unicode else box.ASCII
    )
    for row in rows:
        table.add_row(*row)
    console = rich_console.Console(
        file=io.StringIO(), width=160, color_system=None, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(table)
    return str(captured.get()).rstrip("\n")


def summarize(trainer: Any, run: MonitoredRun, findings: Sequence[Finding] = ()) -> FitSummary:
    """Return what the fit came to; called before the plugin takes the fit down. Host sync: none."""
    source, metrics = run.source, run.metrics
    fits, scales, searched = tallies_since(source.tallies, metrics.before), None, 0
    if source.scaler is not None:
        last = source.scale
        scales = (min(metrics.lowest, last), max(metrics.highest, last), last)
        if source.switched is not None:
            scales = (metrics.lowest, metrics.highest, last)
        searched = search_skips(scales, source.backoff_factor) * len(fits)
    return FitSummary(
        StepTally.total(fits),
        StepTally.total(source.tallies),
        metrics.reasons,
        source.expected_share,
        scales,
        _schedule_ends(trainer, run, fits),
        [finding.code for finding in findings],
        source.switched,
        searched,
    )


def _schedule_ends(trainer: Any, run: MonitoredRun, fits: Sequence[StepTally]) -> list[ScheduleEnd]:
    gated = any(guard.name == "SchedulerGate" for guard in run.source.guards)
    owners = [_upstream.unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
    by_hand = not run.module.automatic_optimization
    ends = []
    configs, now = trainer.lr_scheduler_configs, view.positions(trainer)
    for config, start, end in zip(configs, run.schedules, now, strict=False):
        turns = None if start is None or end is None else end - start
        # by hand Lightning says "epoch" of every schedule
        if not (bool(turns) if by_hand else config.interval == "step"):
            continue
        optimizer = _upstream.unwrap_optimizer(getattr(config.scheduler, "optimizer", None))
        name, frequency = type(config.scheduler).__name__, 0 if by_hand else config.frequency
        ends += [
            ScheduleEnd(name, fit.attempted, fit.applied, gated, frequency, turns)
            for owner, fit in zip(owners, fits, strict=False)
            if owner is optimizer
        ]
    return ends


def show(summary: FitSummary) -> None:
    """Print the summary on rank 0, at most twelve lines of 80 columns."""
    rank_zero_info(_as_shown(summary.rows()))


def _as_shown(rows: Sequence[tuple[str, str]]) -> str:
    # Lightning's log lines go to standard error
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        table = as_table(rows)
        if max(map(len, table.splitlines())) <= shutil.get_terminal_size().columns:
            return table
    return as_text(rows)
