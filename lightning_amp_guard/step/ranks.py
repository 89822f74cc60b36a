# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks: all apply or all skip, with equal scales and reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream

__all__ = ["DdpSpread", "RankAgreement", "total"]


class RankAgreement:
    """Lets every rank learn whether something holds on any of them.

    Torch's scaler decides on each rank by itself, so ranks whose gradients are not synchronised part
    (PyTorch issues 136009 and 90057): one applies, another skips, and the scales drift.

    Args:
        device: Where the flags are reduced; the strategy's root device.
        on_every_attempt: Returns whether the non-finite flag itself has to be reduced; asked at
            each attempt, since communication hooks may be registered late. Plain DDP spreads an inf
            with the gradients, so there every rank finds it without a collective of its own.
    """

    def __init__(self, device: torch.device, *, on_every_attempt: Callable[[], bool]) -> None:
        self.device = device
        self.on_every_attempt = on_every_attempt

    def any(self, *flags: bool) -> list[bool]:
        """Return, per flag, whether it is set on any rank. Host sync: one all-reduce."""
        together = torch.tensor(flags, dtype=torch.float32, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in together.tolist()]

    def share(self, flags: Iterable[Tensor], present: bool) -> tuple[Tensor, Tensor]:
        """Return, as flags on the device: a gradient is non-finite on any rank; any rank has one.

        A rank without gradients takes part with 0, or the others would wait for it for ever. Host
        sync: none; one all-reduce.
        """
        both = torch.zeros(2, device=self.device)
        both[1] = float(present)
        for flag in flags:
            both[0].add_(flag.to(self.device))
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return both[0], both[1]


def total(counts: Sequence[int], device: torch.device) -> list[int]:
    """Return each count summed over all ranks, or as it is in one process.

    All ranks have to call it. Host sync: one; one all-reduce.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return list(counts)
    together = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(together)
    return [int(count) for count in together.tolist()]


class DdpSpread:
    """Knows whether an inf reaches every rank with the gradients, so that no flag need be reduced.

    So it does under DDP's own all-reduce in automatic optimization, for parameters that DDP reduces:
    not for those that were frozen when it wrapped the model and are trained now.

    Args:
        strategy: Lightning's strategy; the model is wrapped by now.
        automatic: Whether every step follows a synchronised backward pass.
        optimizers: Returns the optimizers of now, whose parameters count.
    """

    def __init__(
        self, strategy: Any, automatic: bool, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        self._strategy, self._automatic = strategy, automatic
        self._optimizers = optimizers
        self._reduced = {id(p) for p in _upstream.reduced_by_ddp(strategy)}
        self._sizes: list[int] = []
        self._others: list[Tensor] = []

    def __call__(self) -> bool:
        """Return whether it does at this attempt: hooks and parameters may come late."""
        if not _upstream.plain_ddp(self._strategy, self._automatic):
            return False
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._others = [p for p in _upstream.all_params(groups) if id(p) not in self._reduced]
        return not any([p.requires_grad or p.grad is not None for p in self._others])
