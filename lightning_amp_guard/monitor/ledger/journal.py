# SPDX-License-Identifier: Apache-2.0
"""The newest attempts of a run, and the ledger that keeps them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.monitor.ledger.content import batch_hash, content_hash, hexadecimal
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from lightning_amp_guard.monitor.records import WINDOW, GradientStats, Row
from lightning_amp_guard.monitor.statistics import wide
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["Journal", "Losses"]


class Losses:
    """Means over accumulation windows of the losses as the user returned them, per optimizer.

    Host sync: none until read; `state` reads.
    """

    def __init__(self, saved: Iterable[Sequence[float]] = ()) -> None:
        self.windows: dict[int, tuple[Tensor, int]] = {
            int(idx): (torch.tensor(total, dtype=torch.float64), int(n)) for idx, total, n in saved
        }

    def add(self, idx: int, loss: Tensor, *, first: bool = False) -> None:
        """Add the loss of a micro-batch; `first` begins the optimizer's window anew."""
        total, n = self.windows.get(idx, (None, 0))
        loss = loss.detach().sum().to(wide(loss.device))
        if total is None or first:
            self.windows[idx] = loss, 1
        else:
            self.windows[idx] = total.to(loss.device) + loss, n + 1

    def close(self, idx: int) -> Tensor | None:
        """Return the mean over the optimizer's window, as a tensor, and begin the next."""
        total, n = self.windows.pop(idx, (None, 0))
        return None if total is None else total / n

    def state(self) -> list[list[float]]:
        """Return the open windows as plain numbers. Host sync: one per optimizer."""
        return [[idx, float(total), n] for idx, (total, n) in self.windows.items()]


class Journal:
    """Keeps the last attempts, and writes each to the ledger where there is one.

    Without a ledger nothing is read: a row then holds what its outcome holds.

    Args:
        optimizers: The Trainer's optimizers, unwrapped; see `follow`.
        parameters: The module's parameters, for the checksum.
        looks: Whether batches, losses and parameters are looked at: there is a ledger on some rank.
        every: Attempts from one parameter checksum to the next.
    """

    def __init__(
        self, optimizers: Sequence[Any], parameters: Sequence[Tensor], looks: bool, every: int
    ) -> None:
        self.optimizers, self.parameters = optimizers, parameters
        self.looks, self.every = looks, every
        self._followed: Sequence[Any] | None = None
        self.writer: LedgerWriter | None = None
        self.losses = Losses()
        self.epoch = self.batch_idx = 0
        self._batch_id: Tensor | None = None
        self._recent: deque[Row | tuple[int, int, Any, StepOutcome]] = deque(maxlen=WINDOW)
        self._waiting: list[Row] = []

    def follow(self, optimizers: Sequence[Any]) -> None:
        """Take over the Trainer's optimizers of now, where a callback replaced them in the fit."""
        if optimizers is not self._followed:
            self._followed = optimizers
            self.optimizers = [_upstream.unwrap_optimizer(optimizer) for optimizer in optimizers]

    def batch(self, epoch: int, batch_idx: int, batch: Any) -> None:
        """Learn which batch is worked on. Host sync: none."""
        self.epoch, self.batch_idx = epoch, batch_idx
        if self.looks:
            self._batch_id = batch_hash(batch)

    def hear(self, outcome: StepOutcome, *, hold: bool = False) -> None:
        """Take down an attempt.

        Args:
            outcome: What became of it.
            hold: Wait with the line until `complete` brings the statistics of a log step.

        Host sync: with a ledger one, for loss, checksum and batch hash together.
        """
        lr = self._lr(outcome.optimizer_idx)
        if not self.looks:
            self._recent.append((self.epoch, self.batch_idx, lr, outcome))
            return
        row = self._row(lr, outcome, *self._read(outcome))
        self._recent.append(row)
        if hold:
            self._waiting.append(row)
        else:
            self._write(row)

    def complete(self, stats: Mapping[tuple[int, int], GradientStats] | None = None) -> None:
        """Give rows their statistics, and write those that waited for them.

        Args:
            stats: The statistics of a log step by optimizer and attempt; none to wait no longer.
        """
        waiting, self._waiting = self._waiting, []
        left = dict(stats or {})
        for row in waiting:
            self._write(replace(row, stats=left.get((row.optimizer, row.attempt))))
        for i in range(len(self._recent) - 1, -1, -1):
            if not left:
                break
            row = self._as_row(self._recent[i])
            if (one := left.pop((row.optimizer, row.attempt), None)) is not None:
                self._recent[i] = replace(row, stats=one)

    @property
    def newest(self) -> Row | None:
        """The newest attempt's row, `None` before the first. Host sync: none."""
        return self._as_row(self._recent[-1]) if self._recent else None

    @property
    def holds_lines(self) -> bool:
        """Whether lines of a log step wait for its end."""
        return bool(self._waiting)

    def rows(self) -> list[Row]:
        """Return the newest attempts, oldest first. Host sync: none."""
        return [self._as_row(entry) for entry in self._recent]

    def add_to_last(self, **seen: Any) -> None:
        """Add what a log step has looked at to the last row of a run without a ledger."""
        if self._recent and not self.looks:
            self._recent[-1] = replace(self._as_row(self._recent[-1]), **seen)

    # ------------------------------------------------------------------ rows

    def _lr(self, idx: int) -> Any:
        if idx >= len(self.optimizers):
            return None
        lr = self.optimizers[idx].param_groups[0]["lr"]
        return lr.detach().clone() if isinstance(lr, Tensor) else lr  # schedules write into it

    def _read(self, outcome: StepOutcome) -> tuple[float | None, str | None, str | None]:
        loss = self.losses.close(outcome.optimizer_idx)
        due = outcome.attempt % self.every == 0
        checksum = content_hash(self.parameters) if due else None
        parts = [checksum, self._batch_id, None if loss is None else _bits(loss)]
        found = [p for p in parts if p is not None]
        if not found:
            return None, None, None
        bits = iter(torch.stack([p.to(found[0].device) for p in found]).tolist())
        numbers = [None if p is None else next(bits) for p in parts]
        seen, batch, loss_bits = numbers
        return (
            None if loss_bits is None else _as_float(loss_bits),
            None if batch is None else hexadecimal(batch),
            None if seen is None else hexadecimal(seen),
        )

    def _row(
        self,
        lr: Any,
        outcome: StepOutcome,
        loss: float | None = None,
        batch_id: str | None = None,
        checksum: str | None = None,
    ) -> Row:
        return self._as_row(
            (self.epoch, self.batch_idx, lr, outcome),
            loss=loss,
            batch_id=batch_id,
            param_checksum=checksum,
        )

    @staticmethod
    def _as_row(entry: Row | tuple[int, int, Any, StepOutcome], **more: Any) -> Row:
        if isinstance(entry, Row):
            return entry
        epoch, batch_idx, lr, outcome = entry
        return Row(
            outcome.attempt,
            epoch,
            batch_idx,
            outcome.optimizer_idx,
            outcome.applied,
            None if outcome.reason is None else outcome.reason.name,
            outcome.scale,
            outcome.next_scale,
            lr=None if lr is None else float(lr),
            grad_norm=outcome.grad_norm,
            micro_batches=outcome.micro_batches,
            **more,
        )

    def _write(self, row: Row) -> None:
        if self.writer is not None:
            self.writer.write(row)


def _bits(loss: Tensor) -> Tensor:
    return (loss if loss.dtype is torch.float64 else loss.cpu().double()).view(torch.int64)


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits).view(torch.float64))
