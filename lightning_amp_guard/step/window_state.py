# SPDX-License-Identifier: Apache-2.0
"""The open accumulation window as saved values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import ScalerStateError
from lightning_amp_guard.scaler import read_flags
from lightning_amp_guard.state import damaged, is_count, is_dict, is_flag_pair, is_positive, read
from lightning_amp_guard.step.attempt import AttemptEngine
from lightning_amp_guard.step.lanes import Cell, Stage
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["SavedWindow", "lost_in_batch", "save_window"]


def save_window(engine: AttemptEngine, names: dict[int, str]) -> dict[str, Any] | None:
    """Return the gradients that no step has consumed and the counts beside them.

    Returns:
        `None` when nothing is open; else plain values and, by parameter name, clones of the
        gradients as they are, multiplied by "scale".
    """
    windows, movement = engine.windows, engine.movement
    held = windows.unstepped()
    batch = [movement.applied_in_batch, movement.overflowed_in_batch]
    if not held and not any(batch):
        return None
    return {
        "scale": engine.scaler.get_scale(),
        "gradients": {
            names[id(p)]: p.grad.detach().clone()
            for cell in held
            for p in cell.params
            if p.grad is not None and id(p) in names
        },
        "optimizers": [
            _row([c for c in lane.cells if c in held], windows) for lane in windows.lanes
        ],
        "batch": batch,
    }


def lost_in_batch(engine: AttemptEngine, number: int, loader_moved_on: bool) -> list[str]:
    """Return what a checkpoint in the middle of a batch loses, as clauses; empty for nothing.

    Lightning counts the batch as not done and repeats it, unless the loader keeps its own place and
    has handed it out already.

    Args:
        engine: The engine in the middle of the batch.
        number: The batch's running number.
        loader_moved_on: Whether the loader restores its own place.
    """
    lost = []
    if loader_moved_on:
        lost.append("this batch is not seen again, for the loader has handed it out")
    elif engine.movement.applied_within(number):
        lost.append("this batch is seen again, though an update with it is in the weights")
    if engine.windows.unstepped():
        lost.append("the open accumulation window begins anew, with fewer micro-batches")
    return lost


def _row(cells: list[Cell], windows: GradientWindows) -> list[Any]:
    """Return `[micro-batches, a loss was non-finite, overflow answered, unscaled already]`."""
    return [
        max((cell.micro_batches for cell in cells), default=0),
        any([cell.had_nonfinite_loss() for cell in cells]),
        any([_answered(cell, windows) for cell in cells]),
        any([not cell.scaled for cell in cells]),
    ]


def _answered(cell: Cell, windows: GradientWindows) -> bool:
    moved = not cell.scaled and cell.overflows_before != windows.overflows
    return (moved and cell.is_nonfinite()) or read_flags(cell.tainted)


class SavedWindow:
    """An open window from a checkpoint: checked at once, opened before the first batch.

    Lightning clears all gradients after it has restored the training state, so they are given back
    only when the first training batch arrives.

    Args:
        engine: The engine of the resumed fit.
        saved: What `save_window` returned.
        names: Parameter names by `id`.

    Raises:
        ScalerStateError: A value is impossible, or a gradient fits no parameter.
    """

    def __init__(
        self, engine: AttemptEngine, saved: Mapping[str, Any], names: dict[int, str]
    ) -> None:
        self.saved = dict(saved)
        self.engine = engine
        self.scale = read(saved, "scale", is_positive, "a finite number above 0")
        self.gradients = read(saved, "gradients", is_dict, "a dict of tensors")
        lanes = len(engine.windows.lanes)
        self.counts = read(
            saved,
            "optimizers",
            lambda value: _are_counts(value) and len(value) == lanes,
            f"[count, flag, flag, flag] for each of {lanes} optimizers",
        )
        self.batch = read(saved, "batch", is_flag_pair, "two flags")
        cells = engine.windows.cells
        self.params = {names[id(p)]: p for c in cells for p in c.params if id(p) in names}
        for name, grad in self.gradients.items():
            _check_fit(name, grad, self.params.get(name))

    def open(self) -> None:
        """Give the parameters their gradients back, at the scale in force."""
        for name, grad in self.gradients.items():
            param = self.params[name]
            whole = grad.to(param.device, param.dtype, copy=True)
            param.grad = _upstream.sharded_like(whole, param)
        ratio = self.engine.scaler.get_scale() / self.scale
        for lane, row in zip(self.engine.windows.lanes, self.counts, strict=False):
            lane.stage = Stage.OPEN
            # what overflowed and is gone by now has a window of its own
            for cell in [c for c in lane.cells if c.has_gradients() or not c.unanswered]:
                self._reopen(cell, *row, ratio=ratio)
        movement = self.engine.movement
        movement.applied_in_batch, movement.overflowed_in_batch = self.batch

    def _reopen(
        self,
        cell: Cell,
        micro: int,
        bad_loss: bool,
        answered: bool,
        unscaled: bool,
        *,
        ratio: float,
    ) -> None:
        cell.scaled = not unscaled and cell.has_gradients()
        if cell.scaled and ratio != 1.0:
            self.engine.scaler.multiply_held_(cell, ratio)
        cell.micro_batches, cell.nonfinite_loss = micro, bad_loss
        cell.tainted = [torch.ones(())] if answered else []
        cell.scale = self.engine.scaler.get_scale()
        cell.mark()


def _check_fit(name: object, grad: object, param: Tensor | None) -> None:
    key = f"gradients.{name}"
    if param is None:
        raise ScalerStateError(
            f'The checkpoint holds a gradient under "{key}", but no optimizer trains a parameter of'
            " that name. The model was changed since: resume from a checkpoint outside a window."
        )
    if not isinstance(grad, Tensor) or grad.shape != param.shape:
        raise damaged(key, getattr(grad, "shape", grad), f"a tensor of shape {tuple(param.shape)}")
    if not (grad.is_floating_point() or grad.is_complex()) or grad.dtype in (torch.float16,):
        raise damaged(key, grad.dtype, "a float32 tensor")


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, list)
        and len(v) == 4
        and is_count(v[0])
        and all(isinstance(flag, bool) for flag in v[1:])
        for v in value
    )
