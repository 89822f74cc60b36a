# SPDX-License-Identifier: Apache-2.0
"""One optimizer's accumulation window, and the parameters it is made of."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.scaler import read_flags

__all__ = ["Cell", "Lane", "Stage", "shared_by"]

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
        self.spoiled = False  # was that attempt skipped?
        self.micro_batches = 0
        self.losses: list[Tensor] = []
        self.nonfinite_loss = False
        self.flags: list[Tensor] = []  # is a gradient non-finite, as of the last check?
        self.unanswered: list[Tensor] = []  # those flags, until the scale has had its turn
        self.agreed = False  # are they those of all ranks?
        self.tainted: list[Tensor] = []  # flags: did it overflow at an earlier scale already?
        self.overflows_before = 0  # overflows that the scale had answered when it was unscaled
        self.scale = 1.0  # the scale that the gradients carried then

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient. Host sync: none."""
        return any([p.grad is not None for p in self.params])

    def gradients(self) -> list[Tensor]:
        """Return the gradients there are, as plain tensors over the same memory."""
        return _upstream.as_plain([p.grad for p in self.params if p.grad is not None])

    def is_nonzero(self) -> bool:
        """Return whether a gradient has an element that is not zero. Host sync: one."""
        return any(_upstream.magnitudes(self.gradients()))

    def was_zeroed(self) -> bool:
        """Return whether every gradient was set to zero since the last backward pass.

        Host sync: none, or one if they were all written to.
        """
        moved = len(_upstream.moved_since(self.params, self.marks))
        return moved == sum([p.grad is not None for p in self.params]) and not self.is_nonzero()

    def mark(self) -> None:
        """Remember identity and version of every gradient."""
        self.marks = _upstream.grad_marks(self.params)

    def restart(self, *, leftovers: bool = False) -> None:
        """Begin a new window.

        Args:
            leftovers: Gradients of the last one are still there, and what spoiled them with them.
        """
        self.micro_batches, self.consumed, self.unanswered = 0, False, []
        if not leftovers:
            self.spoiled = False
            self.losses, self.nonfinite_loss, self.tainted = [], False, []

    def is_nonfinite(self) -> bool:
        """Return whether the last check found inf or NaN. Host sync: one."""
        return read_flags(self.flags)

    def overflowed_earlier(self, overflows: int) -> bool:
        """Return whether the scale has answered the overflow. Host sync: one if it has moved."""
        return overflows != self.overflows_before or read_flags(self.tainted)

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
    finite: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameter, flag
    shared: bool = False  # are the flags those of all ranks?
    present: Tensor | None = None  # has any rank a gradient?

    def has_gradients(self) -> bool:
        """Return whether a parameter of the optimizer has a gradient. Host sync: none."""
        return any([cell.has_gradients() for cell in self.cells])

    def gradients(self) -> list[Tensor]:
        """Return the gradients there are."""
        return [p.grad for cell in self.cells for p in cell.params if p.grad is not None]

    def add_flags(self, flags: Mapping[torch.device, Tensor]) -> None:
        """Take down what a check has found, beside what others found. Host sync: none."""
        for device, flag in flags.items():
            known = self.flags.get(device)
            self.flags[device] = flag if known is None else known + flag

    def note_finite(self) -> None:
        """Note which gradients are finite, before clipping changes them. Host sync: none."""
        params = [p for cell in self.cells for p in cell.params if p.grad is not None]
        grads = _upstream.as_plain([p.grad for p in params if p.grad is not None])
        self.finite = [(p, g.isfinite().all()) for p, g in zip(params, grads, strict=True)]

    @property
    def micro_batches(self) -> int:
        """Backward passes that the window holds."""
        return max((cell.micro_batches for cell in self.cells), default=0)

    @property
    def scale(self) -> float:
        """The scale that the gradients carried when they were unscaled."""
        cells = [cell for cell in self.cells if cell.has_gradients()] or self.cells
        return max((cell.scale for cell in cells), default=1.0)


def shared_by(lanes: Iterable[Lane]) -> dict[tuple[int, ...], list[Tensor]]:
    """Return the parameters by the optimizers that train them. Host sync: none."""
    owners: dict[Tensor, tuple[int, ...]] = {}
    for lane in lanes:
        for param in _upstream.all_params(lane.optimizer.param_groups):
            owners[param] = (*owners.get(param, ()), lane.idx)
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for param, idxs in owners.items():
        groups.setdefault(idxs, []).append(param)
    return groups
