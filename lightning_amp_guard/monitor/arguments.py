# SPDX-License-Identifier: Apache-2.0
"""The checked arguments of `AmpMonitor`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_amp_guard.arguments.checks import (
    choice_meant,
    flag_meant,
    names_meant,
    refuse,
    whole,
)
from lightning_amp_guard.monitor.metrics import LOG_KEYS

__all__ = ["checked_baseline", "checked_every", "checked_ledger", "checked_names", "checked_skips"]


def checked_ledger(ledger: Any) -> Any:
    """Return `True`, `False`, or the path to write to."""
    if isinstance(ledger, bool):
        return ledger
    if (path := _as_path(ledger)) is None:
        expected, write = "True, False or a path", flag_meant(ledger)
        raise TypeError(refuse("AmpMonitor", "ledger", ledger, expected, write=write))
    return path


def checked_baseline(baseline: Any) -> Path | None:
    """Return the path of the ledger to compare with, or `None` for no comparison."""
    if baseline is None:
        return None
    if (path := _as_path(baseline)) is None:
        write = "fp32.jsonl"
        raise TypeError(refuse("AmpMonitor", "baseline", baseline, "a path", write=write))
    return path


def _as_path(value: Any) -> Path | None:
    return Path(value) if isinstance(value, (str, os.PathLike)) and str(value) else None


def checked_every(checksum_every: Any) -> int:
    """Return the attempts from one checksum to the next."""
    expected = "a whole number of attempts above 0"
    return whole("AmpMonitor", "checksum_every", checksum_every, expected, 1)


def checked_skips(warn_after: Any) -> int | None:
    """Return the skips in a row to warn after, or `None` for no warning."""
    if warn_after is None:
        return None
    expected = "a whole number above 0, or None for no warning"
    return whole("AmpMonitor", "warn_after", warn_after, expected, 8)


def checked_names(prog_bar: Any) -> bool | tuple[str, ...]:
    """Return the keys for the progress bar in full; `True` for all of them, `False` for none."""
    legal = "True, False, or a list of names such as " + '["scale", "skipped_steps"]'
    if isinstance(prog_bar, bool):
        return prog_bar
    listed = isinstance(prog_bar, Sequence) and not isinstance(prog_bar, str)
    if not listed or not all([isinstance(name, str) for name in prog_bar]):
        write = names_meant(prog_bar) or flag_meant(prog_bar)
        raise TypeError(refuse("AmpMonitor", "prog_bar", prog_bar, legal, write=write))
    keys = tuple(f"amp/{name.removeprefix('amp/')}" for name in prog_bar)
    if strange := [key for key in keys if key not in LOG_KEYS]:
        known = [key.removeprefix("amp/") for key in LOG_KEYS]
        why = f"There is no value {strange[0]!r}; the names are {', '.join(map(repr, known))}."
        near = [choice_meant(key.removeprefix("amp/"), known) for key in keys]
        raise ValueError(refuse("AmpMonitor", "prog_bar", prog_bar, legal, why, near))
    return keys
