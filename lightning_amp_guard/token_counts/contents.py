# SPDX-License-Identifier: Apache-2.0
"""What one cell's gradients are made of, in tokens, and its saved form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard.state import damaged, is_count, is_positive

__all__ = ["Contents", "check_rows"]


@dataclass(frozen=True)
class Contents:
    """What a cell's gradients are made of: times `accumulate / factor` they are the summed loss's.

    Args:
        counts: This rank's valid tokens behind them, and those of them not yet in the total.
        accumulate: What Lightning divided their losses by.
        factor: What they were multiplied by since; `None` before that.
        batch: The count of the last batch in them, which is added once however often it comes;
            `None` after an attempt.
        origin: The same object for as long as the gradients are not zeroed.
    """

    counts: Tensor
    accumulate: int
    factor: Tensor | None = None
    batch: Tensor | None = None
    origin: object = field(default_factory=object)

    def row(self) -> list[Any]:
        """Return `[tokens, of them new, accumulate, factor]` as plain numbers. Host sync: two."""
        factor = None if self.factor is None else float(self.factor)
        return [*self.counts.tolist(), self.accumulate, factor]

    @classmethod
    def of_row(cls, row: Sequence[Any], device: torch.device) -> Contents:
        """Return the contents that a checked row stands for."""
        *counts, accumulate, factor = row
        divided = None if factor is None else torch.tensor(factor, device=device)
        return cls(torch.tensor(counts, dtype=torch.int64, device=device), accumulate, divided)


def check_rows(rows: Sequence[object]) -> None:
    """Raise `ScalerStateError` if a saved row is impossible."""
    for row in rows:
        if row is not None and not _is_row(row):
            raise damaged("window", row, "[tokens, of them new, divisor above 0, factor or None]")


def _is_row(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 4
        and all([is_count(n) for n in row[:3]])
        and row[1] <= row[0]
        and row[2] > 0
        and (row[3] is None or is_positive(row[3]))
    )
