# SPDX-License-Identifier: Apache-2.0
"""The facts of a run, in a file beside its ledger."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_amp_guard.monitor.ledger.json_fields import Fields, parse_object
from lightning_amp_guard.monitor.records import RunFacts

__all__ = ["facts_path", "read_facts", "write_facts"]


def facts_path(path: str | Path) -> Path:
    """Return the path of the run's facts beside its ledger: `amp_ledger.run.json`.

    Args:
        path: The ledger, e.g. `amp_ledger.jsonl`.

    Example:
        >>> facts_path("amp_ledger.1.jsonl").name
        'amp_ledger.1.run.json'
    """
    path = Path(path)
    numbered = path.suffix[1:].isdigit()  # "ledger.1" is not "ledger" with a suffix
    return path.with_name(f"{path.name if numbered else path.stem}.run.json")


def read_facts(path: str | Path) -> RunFacts | None:
    """Return the facts of a ledger's run; `None` where there is no file of them.

    Args:
        path: The ledger.

    Raises:
        LedgerError: The file of facts is broken.
    """
    place = facts_path(path)
    try:
        text = place.read_bytes()
    except FileNotFoundError:
        return None
    fields = Fields(parse_object(text, str(place)), str(place))
    versions = fields.inner("versions")
    return RunFacts(
        **{name: fields.text(name) for name in ("plugin", "precision", "device")},
        scaling=fields.flag("scaling"),
        growth_interval=fields.whole_or_none("growth_interval"),
        world_size=fields.whole("world_size"),
        samples_per_s=fields.number_or_none("samples_per_s"),
        peak_mib=fields.number_or_none("peak_mib"),
        versions={name: versions.text(name) for name in versions.record},
    )


def write_facts(path: str | Path, facts: RunFacts) -> None:
    """Write the facts of a run beside its ledger, whole or not at all.

    A number that is not finite is written as null, which stands for unknown.

    Args:
        path: The ledger.
        facts: What to write.

    Raises:
        OSError: The file cannot be written; a former one is left as it was.
    """
    record: dict[str, Any] = {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in asdict(facts).items()
    }
    place = facts_path(path)
    made = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        made.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="ascii")
        made.replace(place)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
