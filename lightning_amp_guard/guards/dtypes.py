# SPDX-License-Identifier: Apache-2.0
"""DtypeGuard: master weights, gradients and optimizer state are float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["DtypeGuard"]

_HALF = (torch.float16, torch.bfloat16)
_COMPRESSED = {  # by a part of the hook's name in `torch.distributed.algorithms.ddp_comm_hooks`
    "fp16_compress": (
        "as float16, multiplied by the scale where there is one: above 65504 they become inf, which"
        " no rank's own gradient was, so updates are skipped and the scale backs off further than"
        " the model needs."
    ),
    "bf16_compress": "as bfloat16, which rounds them to 8 bits before they are added up.",
}


class DtypeGuardCore(GuardCore):
    """See `DtypeGuard`."""

    name = "DtypeGuard"
    takes_late_outcomes = True

    @names_its_class
    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._unseen: set[int] = set()

    def attach(self, host: Host) -> None:
        """Refuse trainable half precision parameters."""
        super().attach(host)
        self._unseen = {lane.idx for lane in host.running().windows.lanes}
        half = {n: p.dtype for n, p in host.module.named_parameters() if _trained_in_half(p)}
        if not half:
            return
        shown = ", ".join(f"{name!r} ({dtype})" for name, dtype in list(half.items())[:3])
        more = f" and {len(half) - 3} more" if len(half) > 3 else ""
        raise host.fail(
            f"`DtypeGuard`: trainable parameters are stored in half precision: {shown}{more}."
            " Expected float32: mixed precision casts copies and keeps the weights, small updates"
            " would be rounded away otherwise. Most likely the model was converted with `.half()`"
            " or loaded in half precision. Write `model.float()` before `trainer.fit`, or freeze"
            " them with `parameter.requires_grad_(False)`."
        )

    def see_batch(self, batch: Any) -> None:
        """Warn of a float16 input batch, and of gradients that ranks exchange in half precision."""
        self._see_compression()
        found = _upstream.tensors_in(batch)
        if self.host is not None and any(t.dtype is torch.float16 for t in found):
            self.host.warn(
                "`DtypeGuard`: the first training batch holds float16 tensors. Expected float32:"
                " values above 65504 are inf before the model sees them, and operations that"
                " autocast keeps in float32 start from rounded inputs. Most likely the dataset"
                " stores halves. Convert them with `.float()`, autocast casts what is safe."
            )

    def _see_compression(self) -> None:
        if self.host is None:
            return
        for name in _upstream.comm_hook_names(self.host.trainer.strategy):
            told = next((_COMPRESSED[key] for key in _COMPRESSED if key in name), None)
            if told is not None:
                self.host.warn(
                    f"`DtypeGuard`: the communication hook `{name}` exchanges gradients between ranks"
                    f" {told} Expected float32. Most likely it was registered to save bandwidth. Remove"
                    " it (`ddp_comm_hook=` of `DDPStrategy`, or `register_comm_hook`)."
                )
                return

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Warn of half precision optimizer state, at an optimizer's first applied update."""
        if not outcome.applied or outcome.optimizer_idx not in self._unseen or self.host is None:
            return
        self._unseen.discard(outcome.optimizer_idx)
        optimizer = self.host.running().windows.lanes[outcome.optimizer_idx].optimizer
        dtypes = {
            f"{key!r} ({value.dtype})"
            for state in optimizer.state.values()
            if isinstance(state, Mapping)  # some optimizers keep counts of their own beside it
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dtype in _HALF
        }
        if dtypes:
            self.host.warn(
                f"`DtypeGuard`: optimizer {outcome.optimizer_idx} keeps state in half precision:"
                f" {', '.join(sorted(dtypes))}. Expected float32: small moments are rounded to zero."
                " Most likely the state was loaded from a half precision run. Remove it from the"
                " checkpoint, or convert it with `.float()`."
            )


def _trained_in_half(param: Tensor) -> bool:
    return param.requires_grad and param.dtype in _HALF


class DtypeGuard(DtypeGuardCore, Guard):
    """Refuses trainable half precision parameters, and warns of other halves.

    Mixed precision keeps float32 master weights: in float16 an update below 2^-11 of the weight
    is rounded away (section 3.1 of arXiv 1710.03740), and torch refuses to unscale float16 gradients
    in the middle of the first step. Frozen half precision parameters are fine. DDP's compression
    hooks get one warning too: in float16 they make overflows of their own.

    Args:
        enabled: `False` checks nothing.

    Runs: at fit start, on the first batch, at each optimizer's first applied update.
    Keeps: nothing.
    Host sync: none.
    """
