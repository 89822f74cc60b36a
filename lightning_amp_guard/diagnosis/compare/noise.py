# SPDX-License-Identifier: Apache-2.0
"""Equal seeds that mean equal noise, whatever the dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream

__all__ = ["SameNoise"]

_HALF = (torch.float16, torch.bfloat16)
# Fused attention would leave low precision if it were widened; RReLU writes to a second argument.
_LEFT_ALONE = ("scaled_dot_product", "flash_attention", "efficient_attention", "rrelu", "rnn")


class SameNoise(_upstream.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets random operators draw in float32, and rounds what they give to the dtype asked for.

    A generator with one seed gives other numbers in float16 than in float32 (more than 16 normal
    ones on the CPU, any dropout mask of vectorized CUDA kernels), so that two precisions would be
    compared under different noise. Left alone are the masks inside fused attention.

    Example:
        >>> def noise(dtype):
        ...     with SameNoise(), torch.random.fork_rng():
        ...         return torch.manual_seed(0) and torch.randn(17, dtype=dtype)
        >>> torch.equal(noise(torch.float32).half(), noise(torch.float16))
        True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, a random one in float32. Host sync: none."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_left_alone(func.name()):
            return func(*args, **kwargs)
        asked = kwargs.get("dtype")
        halves = [t for t in _upstream.tensors_in((args, kwargs)) if t.dtype in _HALF]
        if asked not in _HALF and (asked is not None or not halves):
            return func(*args, **kwargs)
        return _drawn_wide(func, args, kwargs, asked or halves[0].dtype)


def _is_left_alone(name: str) -> bool:
    return any(part in name for part in _LEFT_ALONE)


def _drawn_wide(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    wide: dict[int, tuple[Tensor, Tensor]] = {}

    def widened(tensor: Tensor) -> Tensor:
        if tensor.dtype not in _HALF:
            return tensor
        made = tensor.float()
        wide[id(made)] = tensor, made  # kept, so that no `id` is used again
        return made

    def narrowed(tensor: Tensor) -> Tensor:
        if id(tensor) in wide:  # written in place
            return wide[id(tensor)][0].copy_(tensor)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if kwargs.get("dtype") in _HALF:
        kwargs = {**kwargs, "dtype": torch.float32}
    args, kwargs = _upstream.map_tensors(widened, (args, kwargs))
    return _upstream.map_tensors(narrowed, func(*args, **kwargs))
