# SPDX-License-Identifier: Apache-2.0
"""Ledger files, for those who read and write them: everything about the format in one place."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_amp_guard.monitor.ledger.facts import facts_path, read_facts, write_facts
from lightning_amp_guard.monitor.ledger.json_fields import LedgerError
from lightning_amp_guard.monitor.ledger.line import COLUMNS, decode, encode
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from lightning_amp_guard.monitor.records import Baseline, Row

__all__ = [
    "COLUMNS",
    "LedgerError",
    "LedgerWriter",
    "decode",
    "encode",
    "facts_path",
    "read_facts",
    "read_ledger",
    "read_run",
    "write_facts",
]


def read_ledger(path: str | Path) -> list[Row]:
    """Return the rows of a ledger, oldest first; row i is line i + 1.

    A last line that was cut short, as by a killed run, is left out.

    Args:
        path: The ledger.

    Raises:
        LedgerError: A line is broken; the message names file, line and key.
        OSError: The file cannot be read.
    """
    rows: list[Row] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and _is_cut(line):
                break
            rows.append(decode(line, f"{path}, line {number}"))
    return rows


def _is_cut(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def read_run(path: str | Path) -> Baseline:
    """Return the rows of a ledger with the facts of its run, where they are there.

    Args:
        path: The ledger.

    Raises:
        LedgerError: The ledger, or the file of facts beside it, is broken.
        OSError: The ledger cannot be read.
    """
    rows = read_ledger(path)
    return Baseline(rows, read_facts(path))
