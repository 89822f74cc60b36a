# SPDX-License-Identifier: Apache-2.0
"""`detect_anomaly=True` under a scaler: only a NaN that is there without the scale counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream

__all__ = ["AnomalyProbe"]

_OFF = (
    "`Trainer(detect_anomaly=True)`: the backward pass cannot be probed without the scale here"
    " ({why}), so NaN checks are off while losses are scaled. A scaled gradient may overflow float16"
    " at any time, which is no anomaly. Use `checkpoint(..., use_reentrant=False)`, or look for the"
    ' NaN with `precision="32-true"`.'
)


class AnomalyProbe:
    """Runs a backward pass so that anomaly detection sees the loss without its scale.

    An overflow of scaled gradients is part of calibration, yet torch's anomaly mode raises for the
    NaN it becomes. So the unscaled loss goes through `torch.autograd.grad` first, where a NaN is a
    true one and raises with the usual traceback; the scaled backward then runs without NaN checks.
    Costs a second backward pass, in anomaly mode only.

    Args:
        say: Speaks once when the probe is impossible.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False
        self.loss: Tensor | None = None

    @staticmethod
    def on() -> bool:
        """Return whether torch checks backward passes for NaN."""
        return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()

    def run(self, module: Module, backward: Callable[[], Any], sharded: bool = False) -> None:
        """Probe the loss set aside in `loss`, then run `backward` without NaN checks.

        Raises:
            RuntimeError: Torch's own, for a NaN that is there without the scale.
        """
        loss, self.loss = self.loss, None
        if sharded:
            self._give_up("gradients are sharded")
        elif loss is not None and loss.requires_grad:
            self._probe(loss, [p for p in module.parameters() if p.requires_grad])
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            backward()

    def _probe(self, loss: Tensor, params: list[Tensor]) -> None:
        if _upstream.checkpoints_reentrantly(loss):
            self._give_up("reentrant activation checkpointing")
        else:
            ones = torch.ones_like(loss)
            torch.autograd.grad(loss, params, ones, retain_graph=True, allow_unused=True)

    def _give_up(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._say(_OFF.format(why=why))
