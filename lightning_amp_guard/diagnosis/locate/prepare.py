# SPDX-License-Identifier: Apache-2.0
"""What a replay needs to know of a module and its batch before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.frames import short_name
from lightning_amp_guard.diagnosis.leaves import as_text, leaves_of
from lightning_amp_guard.diagnosis.locate.trace import Tracer

__all__ = ["clear_gradients", "compiled", "computes_on", "note_inputs", "uncompiled"]


def note_inputs(tracer: Tracer, module: Module, batch: Any) -> None:
    """Tell the tracer what is not finite before the step. Host sync: one per tensor."""
    for path, value in leaves_of(batch):
        if isinstance(value, Tensor):
            tracer.add_input(value, as_text(path))
    for name, part in module.named_modules():
        prefix = f"{short_name(name)}." if name else ""
        owner = short_name(name)
        for key, param in part.named_parameters(recurse=False):
            tracer.add_input(param, f"parameter '{prefix}{key}'", owner)
        for key, buffer in part.named_buffers(recurse=False):
            tracer.add_input(buffer, f"buffer '{prefix}{key}'", owner)
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                tracer.add_input(value, f"attribute '{prefix}{key}'", owner)


def clear_gradients(module: Module) -> None:
    """Let no parameter have a gradient."""
    for param in module.parameters():
        param.grad = None


def computes_on(module: Module, batch: Any, target: torch.device | None) -> str:
    """Return the device type of a step; the accelerator's where several take part."""
    if target is not None and target.type != "meta":
        return target.type
    tensors = [*module.parameters(), *module.buffers(), *_upstream.tensors_in(batch)]
    kinds = [tensor.device.type for tensor in tensors]
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def compiled(module: Module) -> str:
    """Return the names of compiled submodules, for a message; "" without any."""
    names = [name for name, part in module.named_modules() if _upstream.is_compiled(part)]
    return ", ".join([repr(short_name(name)) for name in names])


@contextmanager
def uncompiled(needed: bool) -> Iterator[None]:
    """Let compiled modules run eagerly meanwhile, if needed; nothing is compiled or thrown away."""
    if not needed:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
