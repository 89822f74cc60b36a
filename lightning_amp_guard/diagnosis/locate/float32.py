# SPDX-License-Identifier: Apache-2.0
"""Chosen modules in float32 for one replay, as `fp32_modules` of the plugin would run them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.frames import short_name

__all__ = ["EVERY", "in_float32"]

EVERY = "*"


@contextmanager
def in_float32(root: Module, names: Collection[str], device: str) -> Iterator[None]:
    """Run the modules of these names with autocast off and half precision inputs cast.

    Args:
        root: The module that holds them.
        names: As `named_modules()` gives them; `EVERY` stands for all of them.
        device: The device type whose autocast is switched off.
    """
    with ExitStack() as undo:
        for name, part in root.named_modules():
            if name and (short_name(name) in names or EVERY in names):
                scope = _Scope(device)
                undo.callback(scope.abandon)
                before = part.register_forward_pre_hook(scope.enter, prepend=True, with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(part.register_forward_hook(scope.leave, always_call=True).remove)
        yield


class _Scope:
    def __init__(self, device: str) -> None:
        self.device = device
        self.entered: list[torch.autocast] = []

    def enter(self, module: Module, args: Any, kwargs: Any) -> Any:
        self.entered.append(torch.autocast(self.device, enabled=False))
        self.entered[-1].__enter__()  # type: ignore[no-untyped-call]
        return _upstream.map_tensors(_widened, (args, kwargs))

    def leave(self, module: Module, args: Any, output: Any) -> None:
        if self.entered:
            self.entered.pop().__exit__(None, None, None)

    def abandon(self) -> None:
        """Leave what a KeyboardInterrupt left entered: torch calls no hooks then."""
        while self.entered:
            self.entered.pop().__exit__(None, None, None)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
