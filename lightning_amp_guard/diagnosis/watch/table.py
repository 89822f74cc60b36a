# SPDX-License-Identifier: Apache-2.0
"""Numbers of watched calls that stay on their devices until somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_amp_guard.diagnosis.watch.seen import Numbers, Seen

__all__ = ["Table"]


class Table:
    """Collects what was measured of each call, a row of numbers on the device it was measured on."""

    def __init__(self) -> None:
        self._seen: list[tuple[Seen, Tensor]] = []
        self._packed: list[tuple[list[Seen], Tensor]] = []

    def add(self, seen: Seen, numbers: Tensor) -> None:
        """Take down a call. Host sync: none.

        Args:
            seen: The call.
            numbers: The fields of `Numbers` as one tensor.
        """
        self._seen.append((seen, numbers))

    def pack(self) -> None:
        """Put the numbers of each device into one tensor. Host sync: none."""
        taken, self._seen = self._seen, []
        for device in dict.fromkeys(numbers.device for _, numbers in taken):
            here = [(seen, numbers) for seen, numbers in taken if numbers.device == device]
            self._packed.append(([s for s, _ in here], torch.stack([n for _, n in here])))

    def read(self) -> Iterator[Seen]:
        """Yield every call with its numbers. Host sync: one per device."""
        self.pack()
        for device in dict.fromkeys(table.device for _, table in self._packed):
            here = [(seen, table) for seen, table in self._packed if table.device == device]
            rows = torch.cat([table for _, table in here]).tolist()
            for seen, row in zip([s for part, _ in here for s in part], rows, strict=True):
                seen.numbers = Numbers(*row)
                yield seen
