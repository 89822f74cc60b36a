# SPDX-License-Identifier: Apache-2.0
"""How many valid tokens the gradients hold, and gradients per token; free of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import AmpGuardError
from lightning_amp_guard.step.lanes import Cell, Lane
from lightning_amp_guard.token_counts.contents import Contents

__all__ = ["TokenWindows"]


class Judged(NamedTuple):
    """The counts of all ranks, and whether the attempt that they are for has begun."""

    counts: Tensor
    begun: bool


class Due(NamedTuple):
    """An attempt whose outcome is not known yet: its new tokens, and what each cell held."""

    tokens: Tensor
    held: list[tuple[Cell, Contents]]


class TokenWindows:
    """Counts the tokens in every optimizer's window, and divides its gradients by them.

    Gradients are either raw (sums of losses that were divided by `accumulate`) or divided. Before a
    backward pass adds raw ones, divided ones are made raw again, so nothing is divided twice.

    Args:
        accumulate: Returns what the next loss is divided by.
        device: Where counts are kept and reduced.
        ranks: Over how many processes gradients are averaged.
        normalize: Whether gradients are divided at all.
        settle: Returns what makes outcomes known that wait on the device, `None` where none wait.
        owner: The callback's class name, for messages.
    """

    def __init__(
        self,
        accumulate: Callable[[], int],
        device: torch.device,
        *,
        ranks: int = 1,
        normalize: bool = False,
        settle: Callable[[], Callable[[], object] | None] = lambda: None,
        owner: str = "TokenClock",
    ) -> None:
        self.accumulate, self.device = accumulate, device
        self.ranks, self.normalize, self.owner = ranks, normalize, owner
        self.settle = settle
        self.batch: Tensor | None = None
        self._contents: WeakKeyDictionary[Cell, Contents] = WeakKeyDictionary()
        self._judged: dict[Lane, Judged] = {}
        self._due: dict[Lane, list[Due]] = {}

    # ------------------------------------------------------------------ backward

    def before_pass(self, cell: Cell) -> None:
        """Make held gradients like those that the backward pass adds. Host sync: none."""
        self._judged.clear()
        held = self._contents.get(cell)
        if held is None:
            return
        grads = cell.gradients()
        if not grads:
            del self._contents[cell]
            return
        if not cell.scaled and (settle := self.settle()) is not None:
            settle()
            held = self._contents[cell]
        counts, accumulate = held.counts, self.accumulate()
        if not cell.scaled or len(_upstream.moved_since(cell.params, cell.marks)) == len(grads):
            # after `zero_grad(set_to_none=False)` they hold nothing
            counts = counts * _any_nonzero(grads).to(counts.device)
        ratio = held.accumulate / accumulate
        if self.normalize and (held.factor is not None or ratio != 1.0):
            factor = torch.full((), ratio, device=counts.device)
            _multiply(grads, factor if held.factor is None else factor / held.factor)
        self._contents[cell] = replace(held, counts=counts, accumulate=accumulate, factor=None)

    def after_pass(self, cell: Cell) -> None:
        """Add the batch in hand to what the cell's gradients hold. Host sync: none."""
        held, batch = self._contents.get(cell), self.batch
        if batch is None:
            return
        if held is None:
            held = Contents(batch.new_zeros(2), self.accumulate())
        if held.batch is not batch:
            held = replace(held, counts=held.counts + batch, batch=batch)
        self._contents[cell] = held

    def inherited(self, cell: Cell, before: Sequence[Cell]) -> None:
        """Take over what is known of the cells that `cell` goes on from."""
        for old in before:
            if old in self._contents:
                self._contents[cell] = self._contents[old]
                return

    # ------------------------------------------------------------------ the attempt

    def adjust(self, lane: Lane, attempt: bool) -> None:
        """Learn all ranks' counts, once per window, and divide. Host sync: none.

        Whether a rank takes part in the all-reduce must not depend on its having gradients.

        Args:
            lane: The optimizer's lane, its gradients unscaled.
            attempt: Whether its attempt follows at once, which asks again unless asked ahead of it.
        """
        known = self._judged.get(lane)
        if known is None or (attempt and known.begun):
            if known is not None and (settle := self.settle()) is not None:
                settle()  # stepped again: are these tokens in the total already?
            known = Judged(self._over_ranks(lane), False)
        self._judged[lane] = Judged(known.counts, attempt or known.begun)
        if self.normalize:
            for cell, counts in zip(lane.cells, known.counts, strict=False):
                if cell.has_gradients():
                    self._divide(lane, cell, counts[0])
        if attempt:
            self._expect(lane, known.counts[:, 1].max())

    def _over_ranks(self, lane: Lane) -> Tensor:
        """Return `[tokens, tokens not yet in the total]` for each cell, summed over ranks."""
        none = torch.zeros(2, dtype=torch.int64, device=self.device)
        held = [(cell, self._contents.get(cell)) for cell in lane.cells]
        rows = [c.counts if c and _holds(cell, c) else none for cell, c in held]
        counts = torch.stack(rows or [none])
        if self.ranks > 1:
            dist.all_reduce(counts)
        return counts

    def _divide(self, lane: Lane, cell: Cell, tokens: Tensor) -> None:
        held = self._contents.get(cell)
        if held is None or (held.factor is not None and _made_since(cell, held)):
            raise AmpGuardError(
                f"`{self.owner}(normalize_gradients=True)`: optimizer {lane.idx} has gradients that"
                " no backward pass of a training batch made, so their tokens are not known."
                " Expected all of them from Lightning's backward pass. Write"
                " `self.manual_backward(loss)` instead of `loss.backward()`, in `training_step`."
            )
        if held.factor is None:
            # the mean over ranks of sums, each divided by `accumulate`
            factor = held.accumulate * self.ranks / tokens.clamp(min=1).float()
            _multiply(cell.gradients(), factor)
            self._contents[cell] = replace(held, factor=factor)

    def _expect(self, lane: Lane, tokens: Tensor) -> None:
        """Note what the outcome to come will be of."""
        held = [(cell, c) for cell in lane.cells if (c := self._contents.get(cell))]
        for cell, contents in held:
            self._contents[cell] = replace(contents, batch=None)
        due = self._due.setdefault(lane, [])
        if self.ranks > 1 or self.settle() is None:
            due.clear()  # outcomes follow at once, so what is left here has had none
        if self.ranks > 1 or lane.has_gradients():
            due.append(Due(tokens, held))

    def conclude(self, lane: Lane, *, counted: bool) -> Tensor | None:
        """Return the tokens, over all ranks, that the next attempt without an outcome brought.

        Args:
            lane: The optimizer's lane.
            counted: Whether they are in the total from now on.

        Returns:
            A 0-dimensional int64 tensor; `None` if the attempt was not seen. Host sync: none.
        """
        due = self._due.get(lane)
        if not due:
            return None
        tokens, held = due.pop(0)
        for cell, then in held if counted else []:
            now = self._contents.get(cell)
            if now is not None and now.origin is then.origin:
                old = then.counts * then.counts.new_tensor([0, 1])
                self._contents[cell] = replace(now, counts=now.counts - old)
        return tokens

    # ------------------------------------------------------------------ checkpoints

    def rows(self, cells: Sequence[Cell]) -> list[list[Any] | None]:
        """Return, per cell, its contents as plain numbers. Host sync: two per cell."""
        held = [self._contents.get(cell) for cell in cells]
        return [None if contents is None else contents.row() for contents in held]

    def take_up(self, cells: Sequence[Cell], rows: Sequence[list[Any] | None]) -> None:
        """Restore checked rows; those of cells whose gradients do not come back are dropped later."""
        for cell, row in zip(cells, rows, strict=False):
            if row is not None:
                self._contents[cell] = Contents.of_row(row, self.device)


def _holds(cell: Cell, held: Contents) -> bool:
    """Return whether the window goes on: a rank that holds no shard of it has no gradients either."""
    return held.batch is not None or cell.has_gradients()


def _made_since(cell: Cell, held: Contents) -> bool:
    """Return whether a gradient was replaced after the attempt, with no backward pass known."""
    moved = _upstream.moved_since(cell.params, cell.marks) if held.batch is None else []
    return any([not same for _, same in moved])


def _any_nonzero(grads: list[Tensor]) -> Tensor:
    """Return, on the device, whether an element is anything but zero (NaN is)."""
    return torch.stack([(g != 0).any().to(grads[0].device) for g in grads]).any()


def _multiply(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply in place by the kernel that divides the scale out: version counters stay."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    with torch.no_grad():
        for (device, _), group in alike.items():
            flag = torch.zeros((), device=device)
            _upstream.any_nonfinite_and_multiply_(group, flag, factor.to(device))
