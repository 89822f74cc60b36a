# SPDX-License-Identifier: Apache-2.0
"""One optimizer's accumulation window, and the parameters it is made of."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.scaler import read_flags

__all__ = ["Cell", "Lane", "Stage"]

_KEPT_LOSSES = 64  # then they are folded into one flag, so that long windows keep no memory


class Stage(enum.Enum):
    """Where an optimizer is within its window."""

    OPEN = "gradients are being accumulated"
    UNSCALED = "gradients are unscaled and checked"
    STEPPED = "the attempt is over"


class Cell:
    """Parameters that belong to exactly the same optimizers: their gradients share one state.

    Args:
        params: The parameters.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.param_groups = [{"params": params}]
        self.marks: list[_upstream.GradMark] = [None] * len(params)
        self.scaled = False  # do gradients, where there are any, carry the scale?
        self.consumed = False  # has an attempt been made on them?
        self.micro_batches = 0
        self.losses: list[Tensor] = []
        self.nonfinite_loss = False
        self.tainted: list[Tensor] = []  # flags: did it overflow at an earlier scale already?

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient. Host sync: none."""
        return any([p.grad is not None for p in self.params])

    def gradients(self) -> list[Tensor]:
        """Return the gradients there are, as plain tensors over the same memory."""
        return _upstream.as_plain([p.grad for p in self.params if p.grad is not None])

    def mark(self) -> None:
        """Remember identity and version of every gradient."""
        self.marks = _upstream.grad_marks(self.params)

    def restart(self) -> None:
        """Begin a new window."""
        self.micro_batches, self.losses, self.consumed = 0, [], False
        self.nonfinite_loss, self.tainted = False, []

    def add_loss(self, loss: Tensor) -> None:
        """Keep a detached loss of this window, to be looked at only after a skip."""
        self.micro_batches += 1
        self.losses.append(loss)
        if len(self.losses) > _KEPT_LOSSES:
            self.nonfinite_loss, self.losses = self.had_nonfinite_loss(), []

    def had_nonfinite_loss(self) -> bool:
        """Return whether a loss of this window was inf or NaN. Host sync: one if asked of losses."""
        if not self.nonfinite_loss and self.losses:
            finite = [loss.isfinite().all() for loss in self.losses]
            self.nonfinite_loss = not torch.stack([f.to(finite[0].device) for f in finite]).all()
            self.losses = []
        return bool(self.nonfinite_loss)


@dataclass(eq=False)
class Lane:
    """One optimizer's way through its windows."""

    idx: int
    optimizer: Optimizer
    cells: list[Cell] = field(default_factory=list)
    stage: Stage = Stage.OPEN
    flags: dict[torch.device, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None
    shared: bool = False  # are the flags those of all ranks?
    present: Tensor | None = None  # has any rank a gradient?
    overflows_before: int = 0  # overflows that the scale had answered when this was unscaled

    def has_gradients(self) -> bool:
        """Return whether a parameter of the optimizer has a gradient. Host sync: none."""
        return any([cell.has_gradients() for cell in self.cells])

    def gradients(self) -> list[Tensor]:
        """Return the gradients there are."""
        return [p.grad for cell in self.cells for p in cell.params if p.grad is not None]

    @property
    def micro_batches(self) -> int:
        """Backward passes that the window holds."""
        return max((cell.micro_batches for cell in self.cells), default=0)

    def had_nonfinite_loss(self) -> bool:
        """Return whether a loss of the window was inf or NaN. Host sync: one per cell."""
        return any([cell.had_nonfinite_loss() for cell in self.cells])

    def overflowed_earlier(self) -> bool:
        """Return whether the gradients had overflowed when the scale last moved. Host sync: one."""
        return any([read_flags(cell.tainted) for cell in self.cells])
