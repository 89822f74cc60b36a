# SPDX-License-Identifier: Apache-2.0
"""Accumulation windows: whose gradients carry the scale, since when, and who touched them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.lanes import Cell, Lane, Stage, shared_by
from lightning_amp_guard.step.roles import PassListener

__all__ = ["GradientWindows"]


class GradientWindows:
    """Keeps every optimizer's window, so that a gradient's scale is always known.

    Gradients are either scaled (by the scale in force) or true. A backward pass adds scaled
    gradients, so whatever is left of true ones is multiplied by the scale first; whenever the scale
    moves, gradients still held are multiplied by the ratio. Torch keeps no such book: there a
    gradient that outlives its step, or a scale that moves while another optimizer accumulates, mixes
    values of different scales.

    Args:
        optimizers: The Trainer's optimizers, in order.
        scaler: The scaler in force, or one that stays at 1.0 where losses are not scaled.
        scaling: Whether losses are scaled at all.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: SkipAwareGradScaler,
        *,
        scaling: bool = True,
    ) -> None:
        self.scaler = scaler
        self.scaling = scaling
        self.lanes = [
            Lane(i, _upstream.unwrap_optimizer(optimizer)) for i, optimizer in enumerate(optimizers)
        ]
        self.cells: list[Cell] = []
        self.pending: Tensor | None = None
        self.reached: list[Cell] = []  # by the last backward pass
        self.loss: Tensor | None = None  # of the last backward pass
        self.overflows = 0
        self.settle: Callable[[], None] | None = None
        self.listener: PassListener | None = None
        # told of a cell whose gradients are gone before its window is begun anew
        self.thrown_away: Callable[[Cell], None] = lambda cell: None
        self._known: list[tuple[Lane, list[list[int]]]] = []
        self.refresh()

    def lane(self, optimizer: Any) -> Lane | None:
        """Return the optimizer's lane, or `None` if there is none."""
        optimizer = _upstream.unwrap_optimizer(optimizer)
        return next((lane for lane in self.lanes if lane.optimizer is optimizer), None)

    def follow(self, optimizers: Sequence[Any]) -> None:
        """Take over the Trainer's optimizers of now, where a callback replaced them in the fit."""
        raw = {id(o): o for o in map(_upstream.unwrap_optimizer, optimizers)}
        known = {id(lane.optimizer): lane for lane in self.lanes}
        self.lanes = [known.get(key) or Lane(0, optimizer) for key, optimizer in raw.items()]
        for idx, lane in enumerate(self.lanes):
            lane.idx = idx
        self.refresh()

    def refresh(self) -> None:
        """Sort the parameters into cells anew if parameters were added, removed or replaced."""
        known = [
            (x, [list(map(id, g["params"])) for g in x.optimizer.param_groups]) for x in self.lanes
        ]
        if known == self._known:
            return
        self._known = known
        groups = shared_by(self.lanes)
        self.cells = [self._cell(params) for params in groups.values()]
        for lane in self.lanes:
            lane.cells = [c for c, idxs in zip(self.cells, groups, strict=True) if lane.idx in idxs]

    def _cell(self, params: list[Tensor]) -> Cell:
        """Return the cell of `params`, going on from the cells that held them so far."""
        cell, held_by = Cell(params), {p: old for old in self.cells for p in old.params}
        before = list(dict.fromkeys(held_by[p] for p in params if p in held_by))
        cell.scaled = any(old.scaled for old in before)
        for old in before:
            cell.micro_batches = max(cell.micro_batches, old.micro_batches)
            cell.nonfinite_loss |= old.nonfinite_loss
            cell.losses += [loss for loss in old.losses if all(loss is not x for x in cell.losses)]
            cell.tainted += old.tainted
            cell.overflows_before = max(cell.overflows_before, old.overflows_before)
            cell.scale, cell.consumed = old.scale, cell.consumed or old.consumed
            if cell.scaled and not old.scaled and (scale := self.scaler.get_scale()) != 1.0:
                self.scaler.multiply_held_(
                    Cell([p for p in params if held_by.get(p) is old]), scale
                )
        if self.listener is not None:
            self.listener.inherited(cell, before)
        cell.mark()
        return cell

    # ------------------------------------------------------------------ backward

    def before_backward(self, loss: Tensor) -> None:
        """Make every gradient carry the scale, so that the backward pass can add to it.

        Host sync: none.
        """
        self.refresh()
        for cell in self.cells:
            if self.listener is not None:
                self.listener.before_pass(cell)
            if not cell.has_gradients():
                self.thrown_away(cell)
                cell.restart()
                if len(self.cells) > 1:
                    cell.mark()
            elif not cell.scaled:
                if self.settle is not None:  # was it skipped? that decides what is left over
                    self.settle()
                self._rescale_leftovers(cell)
            cell.scaled = True
        for lane in self.lanes:
            lane.stage, lane.norm = Stage.OPEN, None
        self.pending = loss

    def _rescale_leftovers(self, cell: Cell) -> None:
        # unscaled but not stepped, the window goes on, unless the gradients were zeroed meanwhile
        # host reads only where something of the last window might have to be kept
        consumed = cell.consumed
        if (consumed and not cell.spoiled) or not cell.is_nonzero():
            self.thrown_away(cell)
            cell.restart()
        elif consumed:
            cell.restart(leftovers=True)
        answered = cell.spoiled or cell.overflows_before != self.overflows
        if (scale := self.scaler.get_scale()) != 1.0 or (answered and self.scaling):
            flags = self.scaler.multiply_held_(cell, scale)
            if answered:
                cell.tainted = list(flags.values())
        cell.mark()

    def after_backward(self) -> None:
        """Note which gradients the backward pass made. Host sync: none."""
        loss, self.pending = self.pending, None
        if loss is None:
            return
        self.reached, self.loss = [], loss
        for cell in self.cells:
            # with one optimizer the loss is its own; with several, only of those it reached
            if len(self.cells) == 1 or _upstream.moved_since(cell.params, cell.marks):
                cell.add_loss(loss)
                cell.mark()
                self.reached.append(cell)
                if self.listener is not None:
                    self.listener.after_pass(cell)

    # ------------------------------------------------------------------ step

    def unscale_(self, lane: Lane) -> None:
        """Divide the lane's gradients by the scale and check them. Host sync: none."""
        lane.flags = {}
        again = lane.stage is Stage.STEPPED
        for cell in lane.cells:
            if again:
                cell.restart(leftovers=True)
            if cell.scaled:
                cell.overflows_before, cell.scale = self.overflows, self.scaler.policy.scale
            flags = self.scaler.check_(cell, scaled=self.scaling and cell.scaled)
            cell.flags = cell.unanswered = list(flags.values())
            cell.agreed = False
            lane.add_flags(flags)
            cell.scaled = False
        lane.stage = Stage.UNSCALED
        self.scaler.note_unscaled(lane.optimizer, lane.flags)

    def check_edits(self, lane: Lane) -> None:
        """Check gradients that were edited or assigned since they were unscaled and checked.

        Gradient surgery puts them together out of several passes, one of which may have overflowed.
        Host sync: none.
        """
        for cell in lane.cells:
            if not _upstream.moved_since(cell.params, cell.marks):
                continue
            lane.add_flags(self.scaler.multiply_held_(cell, 1.0))
            cell.mark()

    def note_unscaled(self, lane: Lane) -> None:
        """Take down that the lane's gradients are finite and unscaled, or will be by its step."""
        for cell in lane.cells:
            if cell.scaled:
                cell.overflows_before, cell.scale = self.overflows, self.scaler.policy.scale
            cell.flags, cell.scaled = [], False
        lane.flags, lane.stage = {}, Stage.UNSCALED
        self.scaler.note_unscaled(lane.optimizer, {})

    def clear(self, lane: Lane) -> None:
        """Forget the last window of a lane that arrives at its step without gradients.

        It may still be judged with others, other ranks or the partners of a block, so nothing is left
        to unscale: the verdict stands. Losses of this window count: a rank may hold no shard.
        """
        for cell in lane.cells:
            if cell.consumed:
                cell.restart()
            cell.overflows_before, cell.scale = self.overflows, self.scaler.get_scale()
            cell.flags = []
        lane.flags, lane.stage = {}, Stage.UNSCALED

    # ------------------------------------------------------------------ the scale moves

    def held(self) -> list[Cell]:
        """Return the cells with scaled gradients that no step has consumed. Host sync: none."""
        return [cell for cell in self.cells if cell.scaled and cell.has_gradients()]

    def unstepped(self) -> list[Cell]:
        """Return the cells with gradients of backward passes that no attempt has been made on.

        Held ones, and those unscaled ahead of a step that is yet to come; not what a step left
        behind. Host sync: none.
        """
        return [c for c in self.cells if c.micro_batches and not c.consumed and c.has_gradients()]

    def move(self, ratio: float) -> None:
        """Multiply held gradients by `ratio`; at an overflow, remember which had overflowed too.

        Host sync: none.
        """
        for cell in self.held():
            flags = self.scaler.multiply_held_(cell, ratio)
            if ratio <= 1.0:
                cell.tainted = list(flags.values())

    def can_grow(self, factor: float) -> bool:
        """Return whether held gradients stay finite when multiplied by `factor`.

        Host sync: one if gradients are held.
        """
        grads = [g for cell in self.held() for g in cell.gradients()]
        if not grads:
            return True
        limit = torch.finfo(torch.float32).max / factor
        return not any(limit < size < float("inf") for size in _upstream.magnitudes(grads))
