# SPDX-License-Identifier: Apache-2.0
"""The ledger of one fit: where it is, how it is opened, resumed and ended, and its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.monitor.ledger.file import read_run, write_facts
from lightning_amp_guard.monitor.ledger.journal import Journal
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from lightning_amp_guard.monitor.records import Baseline, RunFacts

__all__ = ["FitLedger", "ledger_path", "read_baseline"]

_NAME = "amp_ledger.jsonl"


def ledger_path(ledger: Any, trainer: Any) -> Path:
    """Return where the ledger goes; to be called on every rank.

    Args:
        ledger: A path, or `True` for the logger's directory.
        trainer: The Trainer, which broadcasts its directory.
    """
    if ledger is True:
        return Path(trainer.log_dir or trainer.default_root_dir) / _NAME
    return Path(ledger)


def read_baseline(path: Path) -> Baseline:
    """Return the run to compare with.

    Raises:
        OSError: The ledger cannot be read; the message says how to write one.
        LedgerError: It is no ledger.
    """
    try:
        return read_run(path)
    except OSError as error:
        why = (
            f"{error.strerror or error}: `AmpMonitor(baseline=...)` cannot be read. Expected the"
            " ledger of a 32-true run of the same model. Write one first:"
            ' `Trainer(precision="32-true", callbacks=[AmpMonitor(ledger=PATH)])`'
        )
        raise OSError(error.errno, why, str(path)) from error


class FitLedger:
    """Gives the journal of a fit its file, and keeps the facts of the run beside it.

    Without `open`, as on other ranks than the first, it does nothing.

    Args:
        journal: Whose attempts the file holds.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._facts_lost = False

    def open(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Begin the file, after a resume with the former run's lines up to its checkpoint.

        Args:
            path: The file to make.
            saved: What `state` returned before the resume; nothing for a new run.

        Raises:
            OSError: The file cannot be made.
        """
        former = saved.get("ledger")
        if former is None:
            self.journal.writer = LedgerWriter(path)
            return
        self.journal.writer, missing = LedgerWriter.resume(path, *former)
        if missing:
            rank_zero_warn(missing, category=AmpGuardWarning)
        if saved.get("ledger_ended"):
            rank_zero_warn(
                f"The ledger {str(path)!r} has a gap after line {former[1]}: the former run could"
                " write no more (disk full?), so its attempts from there to the checkpoint are missing."
                " To have them, resume from a checkpoint before the gap.",
                category=AmpGuardWarning,
            )

    def state(self) -> dict[str, Any]:
        """Return where the file stands, as plain values for `open`. Host sync: none."""
        if (writer := self.journal.writer) is None:
            return {}
        state: dict[str, Any] = {"ledger": [str(writer.path), writer.lines, writer.digest]}
        if writer.ended:
            state["ledger_ended"] = True
        return state

    def write_facts(self, facts: RunFacts) -> None:
        """Write the facts beside the file; after one warning no more where that fails."""
        writer = self.journal.writer
        if writer is None or writer.ended or self._facts_lost:
            return
        try:
            write_facts(writer.path, facts)
        except OSError as error:
            self._facts_lost = True
            why = f"the facts of the run cannot be written: {error}. It goes on without them."
            rank_zero_warn(
                f"Beside the ledger {str(writer.path)!r} {why}", category=AmpGuardWarning
            )

    def close(self) -> None:
        """Write the lines that wait for a log step's end, and end the file."""
        if self.journal.writer is not None:
            self.journal.complete()
            self.journal.writer.close()
