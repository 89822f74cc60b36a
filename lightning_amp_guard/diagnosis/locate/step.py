# SPDX-License-Identifier: Apache-2.0
"""One step run again and again: followed, or only looked at for inf and NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard.diagnosis.locate.float32 import in_float32
from lightning_amp_guard.diagnosis.locate.modes import traced
from lightning_amp_guard.diagnosis.locate.prepare import clear_gradients, note_inputs
from lightning_amp_guard.diagnosis.locate.sites import Site, Sites
from lightning_amp_guard.diagnosis.locate.trace import Origin, Tracer
from lightning_amp_guard.diagnosis.locate.values import is_finite, values_of
from lightning_amp_guard.diagnosis.replay.replay import (
    LossFn,
    autocast,
    on_device,
    training_loss,
    undisturbed,
)

__all__ = ["Seen", "Step"]


class Seen(NamedTuple):
    """What one traced step has shown: the origins (by number) of the harm, and where it is done."""

    tracer: Tracer
    numbers: frozenset[int]
    direction: str
    raised: str = ""


@dataclass(frozen=True)
class Step:
    """Replays one step, as often as needed, each time from the same state.

    Args:
        module: The module.
        batch: The batch; each replay gets a copy.
        loss_fn: As in `locate_nonfinite`.
        device: Where the batch goes; `None` leaves it.
        kind: The device type whose autocast is meant.
    """

    module: Module
    batch: Any
    loss_fn: LossFn | None
    device: torch.device | None
    kind: str

    def trace(self, precision: str, scale: float, chosen: Sequence[str] = ()) -> Seen:
        """Follow one step, with the modules of the names `chosen` in float32."""
        tracer = Tracer(Sites(self.module, self.kind))
        with undisturbed(self.module), in_float32(self.module, chosen, self.kind):
            batch = on_device(self.batch, self.device)
            note_inputs(tracer, self.module, batch)
            clear_gradients(self.module)
            try:
                with traced(tracer):
                    with autocast(precision, self.kind):
                        loss = training_loss(self.module, batch, self.loss_fn)
                    if numbers := tracer.origins_of(loss):
                        return Seen(tracer, numbers, "forward")
                    scaled = _times(loss, scale)
                    if not is_finite(scaled):
                        return Seen(tracer, _overflown(tracer, loss, scaled), "backward")
                    scaled.backward()  # type: ignore[no-untyped-call]
            except (ArithmeticError, AssertionError, RuntimeError, ValueError) as error:
                return _before_error(tracer, error)
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            numbers = frozenset().union(*[tracer.origins_of(g) for g in grads])
            return Seen(tracer, numbers, "backward")

    def is_finite_in(self, precision: str, scale: float, *, forward_only: bool = False) -> bool:
        """Return whether loss and gradients are finite, or the loss alone. Host sync: some."""
        with undisturbed(self.module):
            clear_gradients(self.module)
            batch = on_device(self.batch, self.device)
            with autocast(precision, self.kind):
                loss = training_loss(self.module, batch, self.loss_fn)
            if forward_only or not is_finite(loss):
                return is_finite(loss)
            _times(loss, scale).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            return all([is_finite(grad) for grad in grads])


def _times(loss: Tensor, scale: float) -> Tensor:
    # by a tensor, as torch's scaler does: a float16 loss becomes float32
    return loss * torch.tensor(scale, device=loss.device)


def _overflown(tracer: Tracer, loss: Tensor, scaled: Tensor) -> frozenset[int]:
    site = Site(op="aten.mul.Tensor", kernel="aten.mul.Tensor", direction="backward")
    tracer.origins.append(Origin(site, values_of(scaled), (values_of(loss),)))
    return frozenset({len(tracer.origins) - 1})


def _before_error(tracer: Tracer, error: Exception) -> Seen:
    blamable = [i for i, origin in enumerate(tracer.origins) if not origin.intended]
    if not blamable:
        raise error
    first = min(blamable)
    raised = f"the step then raised {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return Seen(tracer, frozenset({first}), tracer.origins[first].site.direction, raised)
