# SPDX-License-Identifier: Apache-2.0
"""Where values would fall in the range of a floating point format: zero, subnormal, overflow."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_amp_guard.diagnosis.counts import (
    EXPONENTS,
    KINDS,
    checked_scale,
    exponent_counts,
    numbers_in,
    pieces,
    range_counts,
)
from lightning_amp_guard.diagnosis.flat import strict

__all__ = [
    "EXPONENTS",
    "KINDS",
    "RangeReport",
    "Values",
    "classify_range",
    "exponent_counts",
    "range_counts",
]

Values: TypeAlias = "Tensor | float | Iterable[Any]"


@dataclass(frozen=True)
class RangeReport:
    """Says how many values a format would round to zero, hold, or lose to overflow.

    Falsy if there were no values at all.

    Args:
        dtype: The format that the values were judged in.
        scale: What they were multiplied by before.
        zero: Values that round to 0.
        subnormal: Values below the smallest normal number: held with fewer bits.
        normal: Values held with full precision.
        overflow: Values beyond the largest finite number (inf itself too).
        nan: Values that are NaN.
        underflow: Those of `zero` that are not 0 themselves: lost by rounding.
        headroom_bits: log2(largest finite number / largest |value * scale|), the doublings of the
            scale that are left; negative after an overflow, inf if every value is 0 or NaN.
        lost_bits: Doublings of the scale that would make the smallest non-zero value normal; 0 if
            nothing is subnormal or lost.
    """

    dtype: torch.dtype
    scale: float
    zero: int
    subnormal: int
    normal: int
    overflow: int
    nan: int
    underflow: int
    headroom_bits: float
    lost_bits: int

    @property
    def total(self) -> int:
        """Number of values."""
        return self.zero + self.subnormal + self.normal + self.overflow + self.nan

    @property
    def shares(self) -> dict[str, float]:
        """Share of the values by kind, 0 to 1; all 0 if there are none."""
        return {kind: getattr(self, kind) / (self.total or 1) for kind in KINDS}

    @property
    def recoverable(self) -> bool:
        """Whether a larger scale can make every non-zero value normal without an overflow."""
        return self.lost_bits <= self.headroom_bits

    def __bool__(self) -> bool:
        return self.total > 0

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers under flat names (`zero`, `zero_share`, ...); `None` for inf."""
        numbers = {
            "dtype": _name(self.dtype),
            "scale": self.scale,
            "total": self.total,
            **{kind: getattr(self, kind) for kind in KINDS},
            "underflow": self.underflow,
            **{f"{kind}_share": share for kind, share in self.shares.items()},
            "headroom_bits": self.headroom_bits,
            "lost_bits": self.lost_bits,
        }
        return strict(numbers)

    def __str__(self) -> str:
        if not self:
            return "no values"
        lines = [f"{self.total} values, times {self.scale:.10g}, in {_name(self.dtype)}:"]
        lines += [
            f"  {kind:<9}  {getattr(self, kind):>10}  {share:7.2%}"
            for kind, share in self.shares.items()
        ]
        if self.underflow:
            lines[1] += f"  ({self.underflow} not 0 before rounding)"
        if math.isfinite(self.headroom_bits):
            lines.append(f"  headroom   {self.headroom_bits:10.1f}  bits")
        if self.lost_bits:
            but = "" if self.recoverable else ", but overflow elsewhere"
            remedy = f"a scale of 2**{self.lost_bits} times this would make all normal{but}"
            lines.append(f"  lost       {self.lost_bits:10}  bits: {remedy}")
        return "\n".join(lines)


def classify_range(
    values: Values, scale: float = 1.0, dtype: torch.dtype = torch.float16
) -> RangeReport:
    """Count which of `values * scale` round to zero, are subnormal, normal or overflow in `dtype`.

    The question behind loss scaling (figure 3 of arXiv 1710.03740): gradients below 2^-24 vanish in
    float16, those below 2^-14 lose bits, those above 65504 are inf. Zeros that a sparse tensor does
    not store are not counted; a `DTensor` counts on this rank.

    Args:
        values: A tensor of any floating point or complex dtype, an array, a number, or an iterable
            of these (a generator over gradients too; `None` is passed over). Complex numbers count
            twice, real and imaginary part.
        scale: What the values are multiplied by; positive and finite.
        dtype: float16, bfloat16, float32, float64, or one of torch's signed float8 formats.

    Raises:
        TypeError: `values` holds what is no floating point number, or `scale` is no number.
        ValueError: `scale` is not positive and finite, or `dtype` is none of those.

    Host sync: two per device. Memory: at most 16 MiB of temporaries.

    Example:
        >>> for scale in (2.0**10, 2.0**16):
        ...     found = classify_range([2.0**-30, 2.0**-20, 2.0], scale, torch.float16)
        ...     found.zero, found.subnormal, found.normal, found.overflow, found.headroom_bits > 0
        (0, 1, 2, 0, True)
        (0, 0, 2, 1, False)
    """
    scale = checked_scale(scale, dtype)
    counts: dict[torch.device, Tensor] = {}
    ends: dict[torch.device, Tensor] = {}
    for tensor in _tensors(values):
        found = torch.cat([range_counts(tensor, scale, dtype), _zeros(tensor)])
        at, extremes = found.device, _extremes(tensor)
        counts[at] = counts[at] + found if at in counts else found
        ends[at] = torch.maximum(ends[at], extremes) if at in ends else extremes
    numbers_found = [0] * 6, *[count.tolist() for count in counts.values()]
    zero, subnormal, normal, overflow, nan, zeros = map(sum, zip(*numbers_found, strict=True))
    both = [0.0, -math.inf], *[end.tolist() for end in ends.values()]
    largest, smallest = map(max, zip(*both, strict=True))
    return RangeReport(
        *(dtype, scale, zero, subnormal, normal, overflow, nan),
        underflow=zero - zeros,
        headroom_bits=_headroom(largest, scale, dtype),
        lost_bits=_lost(-smallest, scale, dtype) if subnormal or zero > zeros else 0,
    )


def _headroom(largest: float, scale: float, dtype: torch.dtype) -> float:
    if largest in (0.0, math.inf):
        return -math.inf if largest else math.inf
    return math.log2(torch.finfo(dtype).max) - math.log2(largest) - math.log2(scale)


def _lost(smallest: float, scale: float, dtype: torch.dtype) -> int:
    # Mantissas and exponents apart: the product itself may be below what a float holds.
    (m, e), (n, f) = math.frexp(smallest), math.frexp(scale)
    exponent = e + f + math.frexp(m * n)[1]
    return max(0, math.frexp(torch.finfo(dtype).smallest_normal)[1] - exponent)


@torch.no_grad()
def _zeros(values: Tensor) -> Tensor:
    plain = numbers_in(values)
    total = torch.zeros(1, dtype=torch.int64, device=plain.device)
    for piece in pieces(plain):
        total += (piece == 0).sum()
    return total


@torch.no_grad()
def _extremes(values: Tensor) -> Tensor:
    """Return the largest |x|, and the negative of the smallest that is not 0 (-inf if none)."""
    plain = numbers_in(values)
    wide = torch.float64 if plain.dtype is torch.float64 else torch.float32
    zero = torch.zeros((), dtype=wide, device=plain.device)
    ends = torch.stack([zero, zero - math.inf])
    for piece in pieces(plain):
        x = piece.to(wide).abs().nan_to_num_(nan=0.0, posinf=math.inf)
        least = x.masked_fill(x == 0, math.inf).amin()
        ends = torch.maximum(ends, torch.stack([x.amax(), -least]))
    return ends


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield tensors one at a time, so that a generator's values need not exist together."""
    if isinstance(values, Tensor):
        yield values
    elif _is_number(values):
        yield torch.tensor([values], dtype=torch.float64)
    elif hasattr(values, "__array__"):
        yield torch.tensor(_writable(values))
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        yield from _elements(values)
    else:
        raise TypeError(
            f"`values` holds {type(values).__name__} {values!r:.60}. Expected tensors, arrays, numbers"
            " or iterables of these. For named gradients write `gradients.values()`."
        )


def _writable(array: Any) -> Any:
    import numpy  # here already, or there would be no array

    return numpy.array(array)  # torch takes neither read-only memory nor negative strides


def _elements(values: Iterable[Any]) -> Iterator[Tensor]:
    run: list[float] = []
    for value in values:
        if _is_number(value):
            run.append(float(value))
            continue
        if value is not None:
            yield from _tensors(value)
    if run:
        yield torch.tensor(run, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
