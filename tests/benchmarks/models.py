# SPDX-License-Identifier: Apache-2.0
"""The models of the benchmarks; a hand-written loop calls the same `training_step` as a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

__all__ = ["MAKING", "Adversaries", "ManyParameters", "Shared", "Stopwatch", "TinyMLP"]

MEBI = 1_000_000


class Stopwatch:
    """Adds up the processor's seconds inside `with`, so that a step's time can do without them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time() - self._since


MAKING = Stopwatch()  # writing planted gradients; CPU only, on a device nothing is taken out


class Model(L.LightningModule):
    """A module with AdamW, one kernel per step if `fused`, over all of its parameters."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused

    def configure_optimizers(self) -> Any:
        # not fused: torch's own choice, for-loop on the CPU and foreach on a device
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused or None)


class TinyMLP(Model):
    """Two layers so small that what is measured is the framework around them."""

    def __init__(self, fused: bool = False, width: int = 16) -> None:
        super().__init__(fused)
        self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().pow(2).mean()


class Shared(Model):
    """One Linear called 16 times, so that its weight is cast 16 times, or once and kept.

    SGD with learning rate 1: after one step the weight has moved by its gradient.
    """

    def __init__(self, fused: bool = False, width: int = 32, lr: float = 1e-3) -> None:
        super().__init__(fused)
        self.lin = nn.Linear(width, width)
        self.lr = lr
        nn.init.orthogonal_(
            self.lin.weight
        )  # keeps the early calls' gradients as large as the late

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for _ in range(16):
            hidden = torch.tanh(self.lin(hidden))
        return hidden.float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Planted(torch.autograd.Function):
    """A loss whose backward pass writes dense gradients at the price of one fill."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, owner: ManyParameters) -> Tensor:
        ctx.owner = owner
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.owner.plant(grad)
        return grad, None


class ManyParameters(Model):
    """`count` parameter elements in 100 tensors, and a forward pass that costs nothing.

    Every element's gradient is 1e-3 times the backward seed, so it carries the loss scale, in memory
    held from the start. Making it is kept out of the times on the CPU (`MAKING`).
    """

    def __init__(self, fused: bool = False, count: int = 25 * MEBI, tensors: int = 25) -> None:
        super().__init__(fused)
        self.anchor = nn.Parameter(torch.zeros(()))
        self.many = nn.ParameterList(torch.zeros(count // tensors) for _ in range(tensors))
        self.made: list[Tensor] = []

    def plant(self, seed: Tensor) -> None:
        with MAKING:
            if not self.made:
                self.made = [torch.empty_like(p) for p in self.many]
            value = seed * 1e-3
            for param, made in zip(self.many, self.made, strict=True):
                param.grad = made.copy_(value)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Planted.apply(self.anchor, self)


class Adversaries(Model):
    """A generator and a discriminator with an optimizer each, stepped by hand."""

    def __init__(self, fused: bool = False, width: int = 16) -> None:
        super().__init__(fused)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.critic = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def play(
        self, real: Tensor, optimizers: Sequence[Any], turn: Callable[[Tensor, Any], object]
    ) -> None:
        """One update of each; `turn(loss, optimizer)` zeroes gradients, backpropagates and steps."""
        score = nn.functional.softplus
        fake = self.generator(torch.randn_like(real))
        for_critic = score(self.critic(fake.detach())) + score(-self.critic(real))
        turn(for_critic.float().mean(), optimizers[0])
        turn(score(-self.critic(fake)).float().mean(), optimizers[1])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.play(batch, self.optimizers(), self._turn)

    def _turn(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        nets = (self.critic, self.generator)
        return [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
