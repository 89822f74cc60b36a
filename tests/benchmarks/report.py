# SPDX-License-Identifier: Apache-2.0
"""The table of a workload, as text or through rich, and the same as plain values for JSON."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks.counts import Counts
from tests.benchmarks.turns import Times

__all__ = ["Row", "say", "show"]

MIB = 2.0**20


@dataclass(frozen=True)
class Row:
    """One arm of a workload; without times where it was skipped, and then with the reason."""

    arm: str
    skipped: str | None = None
    times: Times | None = None
    counts: Counts | None = None
    gradient_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows that were measured as a table, and a line for each that was skipped."""
    measured = [row for row in rows if row.times is not None]
    columns = _columns(measured) if measured else {}
    if columns and importlib.util.find_spec("rich") is not None:
        _show_rich(title, columns)
    elif columns:
        _show_plain(title, columns)
    for row in rows:
        if row.skipped is not None:
            say(f"{row.arm}: skipped, {row.skipped}")


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    first = rows[0]
    columns: dict[str, list[str]] = {"arm": [row.arm for row in rows]}
    columns["fastest ms"] = [f"{row.times.fastest * 1e3:.3f}" for row in rows]
    columns["x first"] = [f"{row.times.fastest / first.times.fastest:.2f}" for row in rows]
    columns["median ms"] = [f"{row.times.median * 1e3:.3f}" for row in rows]
    columns["IQR ms"] = [f"{row.times.low * 1e3:.3f} to {row.times.high * 1e3:.3f}" for row in rows]
    columns["reads"] = [str(row.counts.reads) for row in rows]
    columns["ops"] = [str(row.counts.ops) for row in rows]
    columns["walks"] = [f"{row.counts.walks:.2f}" for row in rows]
    columns["Python"] = [str(row.counts.python) for row in rows]
    columns["casts"] = [str(row.counts.casts) for row in rows]
    columns["peak MiB"] = [_bytes(row.counts.peak) for row in rows]
    columns["beyond first"] = [_bytes(row.counts.peak - first.counts.peak) for row in rows]
    if any(row.gradient_error is not None for row in rows):
        columns["gradient error"] = [f"{row.gradient_error:.1e}" for row in rows]
    return columns


def _bytes(count: int) -> str:
    return f"{round(count / MIB, 3) + 0.0:.3f}"  # no negative zero


def _show_plain(title: str, columns: dict[str, list[str]]) -> None:
    widths = [max(map(len, [head, *cells])) for head, cells in columns.items()]
    lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    say(title)
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        say("  ".join(cells))


def _show_rich(title: str, columns: dict[str, list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(columns):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
