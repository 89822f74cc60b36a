# SPDX-License-Identifier: Apache-2.0
"""Counting values by their size on their own device, without a host read."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream

__all__ = [
    "EXPONENTS",
    "KINDS",
    "LEAST_ORDINARY_SCALE",
    "checked_scale",
    "exponent_counts",
    "numbers_in",
    "pieces",
    "range_counts",
    "stored",
]

# Gradients that overflow float16 at this scale exceed 65504 / 16 = 4096: no calibration any more.
LEAST_ORDINARY_SCALE = 16.0

KINDS = ("zero", "subnormal", "normal", "overflow", "nan")
# Exponents floor(log2 |x|) that `exponent_counts` tells apart; float32 has -149 to 127.
EXPONENTS = range(-160, 128)

# Bits of the mantissa after the point. Not from `finfo.eps`, which is wrong for float8_e5m2fnuz.
_MANTISSA_BITS = {
    getattr(torch, name): bits
    for name, bits in {
        "float16": 10,
        "bfloat16": 7,
        "float32": 23,
        "float64": 52,
        "float8_e4m3fn": 3,
        "float8_e4m3fnuz": 3,
        "float8_e5m2": 2,
        "float8_e5m2fnuz": 2,
    }.items()
    if hasattr(torch, name)
}
_PIECE = 2**19  # elements looked at together: at most 16 MiB of temporaries
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@torch.no_grad()
def range_counts(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Count on the device how `values * scale` fall into the range of `dtype`.

    The product is taken in float32 (float64 for float64 values, and for scales that float32 does
    not have), then compared with the bounds between which round-to-nearest-even ends up in a kind.

    Args:
        values: Floating point or complex tensor of any layout; sharded: this rank's part.
        scale: What the values are multiplied by; positive and finite.
        dtype: As in `classify_range`.

    Returns:
        int64 of shape (5,) on the device of `values`, in the order of `KINDS`.

    Raises:
        TypeError: `values` are not floating point or complex.
        ValueError: `scale` or `dtype` as in `classify_range`.

    Host sync: none. Memory: at most 16 MiB of temporaries.

    Example:
        >>> range_counts(torch.tensor([0.0, 2.0**-20, 1.0, 1e5]), 1.0, torch.float16)
        tensor([1, 1, 1, 1, 0])
    """
    scale, plain = checked_scale(scale, dtype), numbers_in(values)
    single = torch.finfo(torch.float32)
    wide = plain.dtype is torch.float64 or not single.smallest_normal <= scale <= single.max
    compute = torch.float64 if wide or dtype is torch.float64 else torch.float32
    zero, normal, overflow, tie_is_inside = _bounds(dtype)
    total = torch.zeros(4, dtype=torch.int64, device=plain.device)  # cumulative
    for piece in pieces(plain):
        x = piece.to(compute).mul(scale).abs_()
        inside = x <= overflow if tie_is_inside else x < overflow
        total += torch.stack([(x <= zero).sum(), (x < normal).sum(), inside.sum(), (x == x).sum()])
    every = torch.full_like(total[:1], plain.numel())
    return torch.cat([total, every]).diff(prepend=torch.zeros_like(every))


@torch.no_grad()
def exponent_counts(values: Tensor) -> Tensor:
    """Count on the device how many values have each exponent, floor(log2 |x|).

    Zero, inf and NaN are in no bin; float64 values beyond the range are in the outermost ones.

    Args:
        values: Floating point or complex tensor of any layout; sharded: this rank's part.

    Returns:
        int64 of shape (288,) on the device of `values`; bin `i` counts exponent `EXPONENTS[i]`.

    Raises:
        TypeError: `values` are not floating point or complex.

    Host sync: none. Memory: at most 16 MiB of temporaries.

    Example:
        >>> found = exponent_counts(torch.tensor([0.75, 0.5, 2.0, 0.0, float("inf")]))
        >>> {EXPONENTS[i]: int(found[i]) for i in found.nonzero().flatten()}
        {-1: 2, 1: 1}
    """
    plain, none = numbers_in(values), len(EXPONENTS)
    wide = plain.dtype is torch.float64
    total = torch.zeros(none + 1, dtype=torch.int64, device=plain.device)
    one = torch.ones((), dtype=torch.int64, device=plain.device)
    for piece in pieces(plain):
        x = (piece if wide else piece.float()).reshape(-1)
        _, exponent = torch.frexp(x)  # |x| = m * 2^e with 0.5 <= m < 1
        index = exponent.long().sub_(1 + EXPONENTS.start).clamp_(0, none - 1)
        index.masked_fill_((x == 0) | ~x.isfinite(), none)
        total.scatter_add_(0, index, one.expand_as(index))  # bincount would wait for the device
    return total[:none]


def pieces(values: Tensor, size: int = _PIECE) -> Iterator[Tensor]:
    """Yield views that make up a strided tensor, of at most `size` elements, in no order.

    Nothing is copied, whatever the strides; empty tensors yield nothing.
    """
    if values.numel() <= size:
        yield from [values] if values.numel() else []
        return
    values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    if values.is_contiguous():
        yield from values.view(-1).split(size)  # type: ignore[no-untyped-call]
        return
    longest = max(range(values.dim()), key=values.size)
    step = max(1, size * values.size(longest) // values.numel())
    for part in values.split(step, longest):  # type: ignore[no-untyped-call]
        yield from pieces(part, size)


def checked_scale(scale: Any, dtype: torch.dtype) -> float:
    """Return the scale as a float, or raise what `range_counts` documents."""
    if dtype not in _MANTISSA_BITS:
        known = ", ".join(map(str, _MANTISSA_BITS))
        raise ValueError(f"`dtype={dtype!r}`: expected one of {known}.")
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"`scale={scale!r}`: expected a number, got {type(scale).__name__}.")
    factor = float(scale)
    if not 0 < factor < math.inf:
        raise ValueError(f"`scale={scale!r}`: expected a positive finite number.")
    return factor


def _bounds(dtype: torch.dtype) -> tuple[float, float, float, bool]:
    """Bounds of |x|: up to it 0, below it subnormal, from it overflow; does the last tie stay inside?

    Halfway between neighbours the one with an even last bit wins: 0 and the smallest normal number
    have one, and the largest finite number of all formats but float8_e4m3fn has not.
    """
    info, bits = torch.finfo(dtype), _MANTISSA_BITS[dtype]
    smallest = math.ldexp(info.smallest_normal, -bits)
    last_bit = math.ldexp(1.0, math.frexp(info.max)[1] - 1 - bits)
    tie_is_inside = info.max / last_bit % 2 == 0
    return smallest / 2, info.smallest_normal - smallest / 2, info.max + last_bit / 2, tie_is_inside


def numbers_in(values: Tensor) -> Tensor:
    """Return the strided real tensor that holds what a floating point tensor stores on this rank.

    Raises:
        TypeError: the tensor is neither floating point nor complex.
    """
    if not (values.is_floating_point() or values.is_complex()):
        raise TypeError(
            f"Values of {values.dtype} have no range to be judged. Expected floating point or complex"
            " numbers. Most likely labels or indices were passed: leave them out, or write `.float()`."
        )
    return stored(values)


def stored(values: Tensor) -> Tensor:
    """Return the strided real tensor whose memory holds the tensor's values on this rank."""
    if values.layout in _COMPRESSED or values.is_nested:
        values = values.values()
    return _upstream.as_plain([values.detach()])[0]
