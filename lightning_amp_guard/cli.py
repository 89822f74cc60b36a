# SPDX-License-Identifier: Apache-2.0
"""The command `amp-guard`: pictures and comparisons of ledgers, memory, and the installation."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from lightning_amp_guard.diagnosis.doctor.doctor import examine, own_version
from lightning_amp_guard.monitor.ledger.difference import (
    compared_columns,
    first_difference,
    unknown_columns,
)
from lightning_amp_guard.monitor.ledger.file import LedgerError, read_run
from lightning_amp_guard.monitor.plot import draw_report
from lightning_amp_guard.monitor.records import Baseline
from lightning_amp_guard.monitor.run_table import run_rows

__all__ = ["main", "parse_count"]

_SUFFIXES = {"k": 3, "m": 6, "b": 9, "t": 12}
_MOST = 10**18


def main(argv: Sequence[str] | None = None) -> int:
    """Run `amp-guard` and return its exit status: 0, 1 if ledgers differ, 2 for bad arguments.

    Args:
        argv: Arguments; by default those of the process.
    """
    try:
        parser = _make_parser()
        options = parser.parse_args(None if argv is None else list(argv))
        run: Callable[[Any], int] = _COMMANDS[options.command][0]
        return run(options[options.command])
    except (LedgerError, _BadArgumentError, ImportError) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"amp-guard: {reason}", file=sys.stderr)
    return 2


class _BadArgumentError(Exception):
    """An argument that only the command itself can judge."""


def _make_parser() -> Any:
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        raise ImportError(
            "the command line needs jsonargparse: pip install 'lightning-amp-guard[cli]'"
        ) from None
    parser = ArgumentParser(prog="amp-guard", description=__doc__, version=own_version())
    commands = parser.add_subcommands(dest="command")
    for name, (run, declare) in _COMMANDS.items():
        described = (run.__doc__ or "").splitlines()[0]
        command = ArgumentParser(description=described)
        declare(command)
        commands.add_subcommand(name, command, help=described)
    return parser


def _report(options: Any) -> int:
    """Draw a run from its ledger and print a summary."""
    run, picture = _read(options.ledger), options.output
    if not picture:
        raise _BadArgumentError("-o: expected the name of the picture to write, such as run.png")
    picture = picture if Path(picture).suffix else f"{picture}.png"  # as matplotlib names it
    try:
        draw_report(run, picture)
    except ValueError as error:  # matplotlib's, of a suffix that it does not know
        raise _BadArgumentError(f"{picture}: {error}") from None
    _show(f"Run {options.ledger}", run_rows(run))
    print(f"drawn to {picture}")
    return 0


def _declare_report(command: Any) -> None:
    command.add_argument("ledger", type=str, help="the ledger, e.g. amp_ledger.jsonl")
    command.add_argument(
        "-o", "--output", type=str, default="amp_report.png", help="the picture to write"
    )


def _compare(options: Any) -> int:
    """Say where two ledgers part first; exit status 1 if they do."""
    if not 0 <= options.rtol < float("inf"):
        raise _BadArgumentError(
            f"--rtol {options.rtol}: expected a finite number, 0 or above, such as 0.01"
        )
    a, b = _read(options.a), _read(options.b)
    # each process sees batches of its own, and the ledger is that of the first
    apart = options.rtol and a.facts and b.facts and a.facts.world_size != b.facts.world_size
    leave_out = ("batch_id", "loss") if apart else ()
    found = first_difference(a.rows, b.rows, options.rtol, leave_out)
    if found is not None:
        print(f"{options.a} (first) and {options.b} (second) part: {found}")
        return 1
    within = f" within {options.rtol:g}" if options.rtol else ""
    unknown = unknown_columns(a.rows, b.rows, options.rtol, leave_out)
    columns = [c for c in compared_columns(options.rtol, leave_out) if c not in unknown]
    blind = f"; not known in both: {', '.join(unknown)}" if unknown else ""
    print(f"equal over {len(a.rows):,} attempts{within}; compared: {', '.join(columns)}{blind}")
    return 0


def _declare_compare(command: Any) -> None:
    command.add_argument("a", type=str, help="the first ledger")
    command.add_argument("b", type=str, help="the second ledger")
    command.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        help="relative tolerance of loss, gradient norm and learning rate, for runs in another"
        " precision or on another number of processes; 0: equal to the last bit",
    )


def _read(path: str) -> Baseline:
    run = read_run(path)
    if not run.rows:
        raise _BadArgumentError(f"{path}: holds no attempt; expected at least one whole line")
    return run


def _memory(options: Any) -> int:
    """Estimate the memory of weights, gradients and optimizer state."""
    from lightning_amp_guard.diagnosis.memory import estimate_memory

    count = parse_count(options.count)
    try:
        report = estimate_memory(count, optimizer=options.optimizer, precision=options.precision)
    except (TypeError, ValueError) as error:
        raise _BadArgumentError(str(error)) from None
    print(report)
    return 0


def _declare_memory(command: Any) -> None:
    command.add_argument("count", type=str, help="number of parameters: 7e9, 1.5B, 350M")
    command.add_argument("--optimizer", type=str, default="adam")
    command.add_argument("--precision", type=str, default="16-mixed")


def parse_count(text: str) -> int:
    """Return a number of parameters written as a person would.

    Args:
        text: Digits, with an exponent or one of the suffixes k, M, B and T, in either case.

    Example:
        >>> parse_count("1.5B"), parse_count("7e9"), parse_count("124_000")
        (1500000000, 7000000000, 124000)
    """
    digits, power = text.strip(), 0
    if digits and digits[-1].lower() in _SUFFIXES:
        digits, power = digits[:-1], _SUFFIXES[digits[-1].lower()]
    try:
        count = Decimal(digits).scaleb(power)
    except ArithmeticError:  # no number, or one beyond what a Decimal holds
        count = Decimal(0)
    if not count.is_finite() or not 1 <= count <= _MOST or count != count.to_integral_value():
        raise _BadArgumentError(
            f"{text!r}: expected a whole number of parameters from 1 to 1e18, such as 7e9 or 1.5B"
        )
    return int(count)


def _doctor(options: Any) -> int:
    """Show versions, devices, and the known upstream faults of what is installed."""
    report = examine()
    _show("Installation", report.rows())
    _show("Known upstream faults -> what this package does", report.fault_rows())
    return 0


def _show(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table: by rich on a terminal where it is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, show_header=False, title_justify="left")
        for label, text in rows:
            table.add_row(label, text)
        Console(markup=False, highlight=False).print(table)
        return
    width = max(len(label) for label, _ in rows)
    print("\n".join([f"{title}:", *(f"  {label:<{width}}  {text}" for label, text in rows)]))


_COMMANDS: dict[str, tuple[Callable[[Any], int], Callable[[Any], None]]] = {
    "report": (_report, _declare_report),
    "compare": (_compare, _declare_compare),
    "memory": (_memory, _declare_memory),
    "doctor": (_doctor, lambda command: None),
}

if __name__ == "__main__":
    sys.exit(main())
