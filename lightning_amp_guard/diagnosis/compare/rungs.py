# SPDX-License-Identifier: Apache-2.0
"""A few updates of a copy of a module in one precision, and what they showed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.compare.noise import SameNoise
from lightning_amp_guard.diagnosis.replay.replay import (
    LossFn,
    autocast,
    on_device,
    training_loss,
    undisturbed,
)
from lightning_amp_guard.diagnosis.replay.surroundings import random_states

__all__ = [
    "FLOAT32",
    "LADDER",
    "MakeOptimizer",
    "Program",
    "Run",
    "Rung",
    "gradients_of",
    "in_float32",
    "norm_of",
    "small_lr",
    "wide_dtype",
]

FLOAT32 = "32-true"
MakeOptimizer = Callable[[list[Parameter]], Optimizer]
_LOWEST_SCALE = 1.0
_RELATIVE_STEP = 0.01


class Rung(NamedTuple):
    """One step of the ladder.

    Args:
        name: As reports call it.
        precision: What autocast is set to.
        scales: Whether the loss is scaled.
    """

    name: str
    precision: str
    scales: bool = False


LADDER = (
    Rung(FLOAT32, FLOAT32),
    Rung("bf16-mixed", "bf16-mixed"),
    Rung("16-mixed without scaler", "16-mixed"),
    Rung("16-mixed", "16-mixed", scales=True),
)


@dataclass(frozen=True)
class Program:
    """What every rung does alike.

    Args:
        loss_fn: As in `training_loss`.
        device: Where the batch goes; `None` leaves it.
        scale: The scale a rung with scaler begins with.
        steps: Points of the curves, at least 1.
        make_optimizer: Makes the optimizer from the parameters; `None`: plain SGD.
        lr: SGD's learning rate.
    """

    loss_fn: LossFn | None
    device: torch.device | None
    scale: float = 2.0**16
    steps: int = 1
    make_optimizer: MakeOptimizer | None = None
    lr: float | None = None


@dataclass
class Run:
    """Runs a module in one precision; gradients are unscaled, and float32 as the weights are.

    Args:
        module: A copy that may be changed.
        rung: The precision.
        program: The step.
    """

    module: Module
    rung: Rung
    program: Program
    skipped: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.program.scale if self.rung.scales else 1.0

    def calibrate(self, batch: Any) -> None:
        """Halve the scale until the gradients are finite, as training does in its first steps."""
        while self.scale > _LOWEST_SCALE:
            with undisturbed(self.module):
                loss = self._attempt(batch)
                if not math.isfinite(loss) or self._is_finite():
                    return
            self._back_off()

    def step(self, batch: Any) -> float:
        """Run forward and backward pass, and return the loss. A skipped attempt is repeated."""
        while True:
            states = random_states(set() if self.program.device is None else {self.program.device})
            loss = self._attempt(batch)
            overflow = self.rung.scales and math.isfinite(loss) and not self._is_finite()
            if not overflow or self.scale <= _LOWEST_SCALE:
                self._unscale()
                return loss
            self._back_off()
            for put_back in states:
                put_back()

    def grad_norm(self) -> float:
        """Return the L2 norm over all gradients, 0 without any. Host sync: one."""
        return norm_of(gradients_of(self.module.parameters()))

    def train(self, batch: Any, loss: float, lr: float) -> tuple[list[float], list[float]]:
        """Make updates, the first with the gradients there are; return losses and norms before each.

        Args:
            batch: The batch.
            loss: Of the step that made the gradients.
            lr: Learning rate of plain SGD, where the program makes no optimizer.
        """
        params = [p for p in self.module.parameters() if p.requires_grad]
        make = self.program.make_optimizer
        optimizer = torch.optim.SGD(params, lr=lr) if make is None else make(params)
        losses, norms = [loss], [self.grad_norm()]
        for _ in range(1, self.program.steps):
            optimizer.step()
            losses.append(self.step(batch))
            norms.append(self.grad_norm())
        return losses, norms

    def _attempt(self, batch: Any) -> float:
        self.module.zero_grad(set_to_none=True)
        data = on_device(batch, self.program.device)
        precision, device = self.rung.precision, self.program.device
        with in_float32(precision), SameNoise():
            with autocast(precision, device):
                loss = training_loss(self.module, data, self.program.loss_fn)
            with autocast(FLOAT32, device):
                # a tensor, as torch's scaler multiplies by: a float16 loss becomes float32
                factor = torch.tensor(self.scale, device=loss.device)
                (loss * factor).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _is_finite(self) -> bool:
        return math.isfinite(self.grad_norm())

    def _back_off(self) -> None:
        self.scale, self.skipped = 0.5 * self.scale, self.skipped + 1

    def _unscale(self) -> None:
        if self.scale != 1.0:
            for param in self.module.parameters():
                if param.grad is not None:
                    param.grad.mul_(1.0 / self.scale)


def in_float32(precision: str) -> AbstractContextManager[None]:
    """Return a context in which float32 products are no TF32 ones, where float32 is the precision."""
    return _upstream.full_float32() if precision == FLOAT32 else nullcontext()


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to add many numbers up in: float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients there are, as plain real tensors: of sparse ones the summed values."""
    found = [p.grad for p in params if p.grad is not None]
    return _upstream.as_plain([grad.coalesce() if grad.is_sparse else grad for grad in found])


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm over all tensors, 0 without any. Host sync: one."""
    norms = [torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor)) for tensor in tensors]
    if not norms:
        return 0.0
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())


def small_lr(params: Iterable[Tensor]) -> float:
    """Return the rate at which SGD moves no parameter by more than 1 % of its norm; zeros aside."""
    plain = [(_upstream.as_plain([p.detach()]), gradients_of([p])) for p in params]
    moved = [(norm_of(values), norm_of(grads)) for values, grads in plain]
    limits = [size / step for size, step in moved if size and step]
    norm = math.hypot(*[step for _, step in moved])
    found = _RELATIVE_STEP * (min(limits) if limits else 1 / norm if norm else 0.0)
    return found if math.isfinite(found) else 0.0
