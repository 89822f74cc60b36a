# SPDX-License-Identifier: Apache-2.0
"""Where two ledgers part: the first attempt, and in which column."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_amp_guard.monitor.records import Row

__all__ = ["Difference", "compared_columns", "first_difference", "unknown_columns"]

# What went into an attempt, and then what came out of it: the first to differ is nearest the cause.
_EXACT = (
    "epoch",
    "batch_idx",
    "micro_batches",
    "batch_id",
    "scale",
    "lr",
    "loss",
    "grad_norm",
    "applied",
    "reason",
    "next_scale",
    "param_checksum",
)
# Another precision has another scale and other last bits, another number of processes other windows.
_WITHIN = ("batch_id", "lr", "loss", "grad_norm", "applied")


@dataclass(frozen=True)
class Difference:
    """Says at which attempt two ledgers part, and in what.

    Args:
        optimizer: Position of the attempt's optimizer.
        attempt: 0-based attempt of that optimizer.
        column: The first column that differs; "attempt" where only one ledger has the attempt.
        values: What the first and the second ledger hold there.
        lines: 1-based lines of the attempt in both; `None` in a ledger that does not have it.
        also: Further columns that differ in this attempt.
    """

    optimizer: int
    attempt: int
    column: str
    values: tuple[object, object]
    lines: tuple[int | None, int | None]
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"attempt {self.attempt} of optimizer {self.optimizer}"
        if self.column == "attempt":
            first = self.lines[0] is not None
            line = self.lines[0] if first else self.lines[1]
            has, lacks = ("first", "second") if first else ("second", "first")
            return f"{where} is in the {has} ledger only (line {line}); the {lacks} has none such"
        (one, other), (here, there) = self.values, self.lines
        also = f"; so do {', '.join(self.also)}" if self.also else ""
        return (
            f"{where} differs in {self.column}: {one!r} (line {here} of the first)"
            f" and {other!r} (line {there} of the second){also}"
        )


def compared_columns(rtol: float = 0.0, leave_out: Collection[str] = ()) -> tuple[str, ...]:
    """Return the columns that `first_difference` compares, in the order in which it looks.

    Args:
        rtol: As there.
        leave_out: As there.
    """
    return tuple(name for name in (_WITHIN if rtol else _EXACT) if name not in leave_out)


def unknown_columns(
    a: Sequence[Row], b: Sequence[Row], rtol: float = 0.0, leave_out: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the columns of which no attempt is known in both ledgers: they were not compared.

    Args:
        a: Rows of one ledger.
        b: Rows of the other.
        rtol: As in `first_difference`.
        leave_out: As there.
    """
    ours, theirs = _by_attempt(a), _by_attempt(b)
    pairs = [(row, theirs[key][1]) for key, (_, row) in ours.items() if key in theirs]
    return tuple(
        name
        for name in compared_columns(rtol, leave_out)
        if name != "reason"  # that an update has none is known, too
        and all(getattr(x, name) is None or getattr(y, name) is None for x, y in pairs)
    )


def first_difference(
    a: Sequence[Row], b: Sequence[Row], rtol: float = 0.0, leave_out: Collection[str] = ()
) -> Difference | None:
    """Return where two ledgers part first; `None` if they are equal.

    Rows are matched by optimizer and attempt. A value that one of them does not have (`None`) is
    unknown and not compared; NaN equals NaN. All attempts that both have come first, in the order of
    `a`; only if they are equal does an attempt that one of them lacks count. Statistics are not
    compared.

    Args:
        a: Rows of one ledger.
        b: Rows of the other.
        rtol: Relative tolerance, at least 0. With 0 all columns have to be equal to the last bit.
            Above, for runs in another precision or on another number of processes, learning rate,
            loss and gradient norm may differ by `rtol` times the larger of the two, applied and batch
            have to be equal, and the rest is not compared: scales, checksums and the place within
            the epoch differ there by nature.
        leave_out: Columns that are not compared.

    Raises:
        ValueError: `rtol` is negative or not finite.

    Example:
        >>> a = [Row(i, 0, i, 0, True, None, 8.0, 8.0, loss=1.0 / (i + 1)) for i in range(3)]
        >>> b = [*a[:2], Row(2, 0, 2, 0, True, None, 8.0, 8.0, loss=0.5)]
        >>> found = first_difference(a, b)
        >>> found.attempt, found.column
        (2, 'loss')
        >>> first_difference(a, b, rtol=0.4) is None
        True
    """
    if not 0 <= rtol < math.inf:
        raise ValueError(
            f"`first_difference(rtol={rtol!r})`: expected a finite number, 0 or above."
        )
    ours, theirs = _by_attempt(a), _by_attempt(b)
    columns = compared_columns(rtol, leave_out)
    for key, (line, row) in ours.items():
        if key not in theirs:
            continue
        there, other = theirs[key]
        if differing := [c for c in columns if not _equal(row, other, c, rtol)]:
            column, *also = differing
            values = getattr(row, column), getattr(other, column)
            return Difference(key[0], key[1], column, values, (line, there), tuple(also))
    return _lacking(ours, theirs)


_Rows = dict[tuple[int, int, int], tuple[int, Row]]


def _by_attempt(rows: Sequence[Row]) -> _Rows:
    """Return lines and rows by optimizer, attempt and how often the attempt was there before."""
    seen: Counter[tuple[int, int]] = Counter()
    found: _Rows = {}
    for line, row in enumerate(rows, 1):
        key = row.optimizer, row.attempt
        found[row.optimizer, row.attempt, seen[key]] = line, row
        seen[key] += 1
    return found


def _equal(row: Row, other: Row, column: str, rtol: float) -> bool:
    one, two = getattr(row, column), getattr(other, column)
    if one is None or two is None or one == two:
        return True
    if not isinstance(one, float) or not isinstance(two, float):
        return False
    return math.isclose(one, two, rel_tol=rtol) or (math.isnan(one) and math.isnan(two))


def _lacking(ours: _Rows, theirs: _Rows) -> Difference | None:
    for key, (line, row) in ours.items():
        if key not in theirs:
            return Difference(
                row.optimizer, row.attempt, "attempt", (row.attempt, None), (line, None)
            )
    for key, (line, row) in theirs.items():
        if key not in ours:
            return Difference(
                row.optimizer, row.attempt, "attempt", (None, row.attempt), (None, line)
            )
    return None
