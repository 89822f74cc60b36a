# SPDX-License-Identifier: Apache-2.0
"""One line of a ledger: an attempt as strict JSON, and back without a loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from lightning_amp_guard.monitor.ledger.json_fields import Fields, parse_object
from lightning_amp_guard.monitor.records import GradientStats, Row

__all__ = ["COLUMNS", "decode", "encode"]

COLUMNS = (
    "attempt",
    "epoch",
    "batch_idx",
    "optimizer",
    "applied",
    "reason",
    "scale",
    "next_scale",
    "lr",
    "loss",
    "grad_norm",
    "micro_batches",
    "batch_id",
    "param_checksum",
)
_FLOATS = ("scale", "next_scale")
_LOOKED_AT = ("lr", "loss", "grad_norm")  # null where nobody looked
_TEXTS = ("reason", "batch_id", "param_checksum")
_WHOLE = ("attempt", "epoch", "batch_idx", "optimizer", "micro_batches")
_COUNTS = ("zero", "subnormal", "normal", "overflow")
_ENCODER = json.JSONEncoder(allow_nan=False)


def encode(row: Row) -> str:
    """Return the row as one line of strict JSON, without the line's end.

    JSON has no inf and no NaN: they are written as null, and the line then says which of them it
    was in one more key, `nonfinite`. A row with statistics has one more key, `stats`. The text is
    plain ASCII. Host sync: none.

    Args:
        row: The attempt.

    Example:
        >>> row = Row(7, 0, 7, 0, False, "NONFINITE_LOSS", 8.0, 8.0, loss=float("nan"))
        >>> line = encode(row)
        >>> line[:12], line[-29:]
        ('{"attempt": ', '"nonfinite": {"loss": "nan"}}')
    """
    record: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
    if nonfinite := _take_nonfinite(record, (*_FLOATS, *_LOOKED_AT)):
        record["nonfinite"] = nonfinite
    if row.stats is not None:
        record["stats"] = _encode_stats(row.stats)
    return _ENCODER.encode(record)


def _take_nonfinite(record: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Replace inf and NaN by None, and return which of them they were, by key."""
    taken = {}
    for name in names:
        if (value := record[name]) is None:
            continue
        record[name] = value = float(value)
        if not math.isfinite(value):
            record[name], taken[name] = None, str(value)
    return taken


def _encode_stats(stats: GradientStats) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(stats, name) for name in _COUNTS}
    record["largest"] = stats.largest
    record["exponents"] = {str(e): n for e, n in stats.exponents.items()}
    record["kept"] = stats.kept
    record["per_layer"] = layers = dict(stats.per_layer)
    nonfinite = _take_nonfinite(record, ("largest", "kept"))
    if of_layers := _take_nonfinite(layers, stats.per_layer):
        nonfinite["per_layer"] = of_layers
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def decode(line: str | bytes, place: str = "this line") -> Row:
    """Return the row that `encode` made the line of; keys that it does not know are passed over.

    Args:
        line: One line, with or without its end.
        place: The file and line number, for the error.

    Raises:
        LedgerError: The line is no JSON object, or a key is missing or holds what it cannot hold.

    Example:
        >>> row = Row(0, 0, 3, 0, True, None, 8.0, 8.0, loss=0.5)
        >>> decode(encode(row)) == row
        True
    """
    record = parse_object(line, place)
    fields = Fields(record, place)
    values: dict[str, Any] = {name: fields.whole(name) for name in _WHOLE}
    values |= {name: fields.number(name) for name in _FLOATS}
    values |= {name: fields.number_or_none(name) for name in _LOOKED_AT}
    values |= {name: fields.text_or_none(name) for name in _TEXTS}
    stats = None if record.get("stats") is None else _decode_stats(fields.inner("stats"))
    return Row(**values, applied=fields.flag("applied"), stats=stats)


def _decode_stats(fields: Fields) -> GradientStats:
    bins, layers = fields.inner("exponents"), fields.inner("per_layer")
    return GradientStats(
        **{name: fields.whole(name) for name in _COUNTS},
        largest=fields.number("largest"),
        exponents={bins.name_as_exponent(e): bins.whole(e) for e in bins.record},
        kept=fields.number_or_none("kept"),
        per_layer={name: layers.number(name) for name in layers.record},
    )
