# SPDX-License-Identifier: Apache-2.0
"""Smallest, largest and non-finite values of tensors, as numbers that stay on the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_amp_guard import _upstream

__all__ = ["extremes", "floats", "measured"]

_LAYOUTS = (torch.strided, torch.sparse_coo)


def floats(tree: Any) -> list[Tensor]:
    """Return the floating point and complex tensors in nested containers that have values."""
    return [t for t in _upstream.tensors_in(tree) if _has_values(t)]


def _has_values(tensor: Tensor) -> bool:
    floating = tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1)
    real = not tensor.is_meta and not tensor.is_nested and tensor.layout in _LAYOUTS
    return floating and real and tensor.numel() > 0


def _plain(tensors: list[Tensor]) -> list[Tensor]:
    """Return what holds the values; subclasses that hide them are left out."""
    plain = _upstream.as_plain([t.detach() for t in tensors])
    return [t for t in plain if type(t) in (Tensor, Parameter) and t.numel()]


@torch.no_grad()
def extremes(tensors: list[Tensor]) -> Tensor | None:
    """Return the smallest and the largest value in float32, on the first tensor's device.

    Both are NaN where a value is. `None` if there is no value. Host sync: none.

    Args:
        tensors: As `floats` returns them; values of complex ones are their parts.

    Example:
        >>> extremes([torch.tensor([1.0, -3.0]), torch.tensor([2.0])]).tolist()
        [-3.0, 2.0]
    """
    # float32 before the stack: autocast to bfloat16 refuses to stack float16, and the reverse
    pairs = [torch.stack([_in_float32(end) for end in t.aminmax()]) for t in _plain(tensors)]
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    together = torch.stack([pair.to(pairs[0].device) for pair in pairs])
    return torch.stack((together[:, 0].amin(), together[:, 1].amax()))


@torch.no_grad()
def measured(tensors: list[Tensor]) -> Tensor | None:
    """Return `extremes`, the count of inf and NaN, whether there is an inf, the largest finite |x|.

    Five float32 numbers on the first tensor's device, `None` if there is no value. Host sync: none.

    Args:
        tensors: As `floats` returns them.

    Example:
        >>> measured([torch.tensor([1.0, float("-inf"), -3.0])]).tolist()
        [-inf, 1.0, 1.0, 1.0, 3.0]
    """
    ends = extremes(tensors)
    if ends is None:
        return None
    counts = torch.stack([_counts(t).to(ends.device) for t in _plain(tensors)])
    return torch.cat((ends, counts[:, :1].sum(0), counts[:, 1:].amax(0)))


def _counts(tensor: Tensor) -> Tensor:
    # sums of `isnan()` and `isinf()` take ten times as long
    finite = torch.nan_to_num(tensor, 0.0, 0.0, 0.0)
    bad = (finite != tensor).float().sum()
    low, high = torch.nan_to_num(tensor, 0.0, math.inf, -math.inf).aminmax()
    least, most = finite.aminmax()
    largest = torch.maximum(least.abs(), most.abs())
    return torch.stack((bad, (low.isinf() | high.isinf()).float(), _in_float32(largest)))


def _in_float32(values: Tensor) -> Tensor:
    """Return `values` in float32, where finite ones stay finite."""
    if values.dtype is torch.float64:
        largest = torch.finfo(torch.float32).max
        values = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
    return values.float()
