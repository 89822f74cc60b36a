# SPDX-License-Identifier: Apache-2.0
"""Which fields of a batch hold inf or NaN before the model has seen them."""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard.diagnosis.arguments import check_batch
from lightning_amp_guard.diagnosis.leaves import as_text, is_array, leaves_of

__all__ = ["BadField", "BatchReport", "bad_fields", "scan", "scan_batch"]

_SHOWN = 10
_NEVER = 2**62  # stands for "no bad sample"
_PIECE = 2**20  # elements looked at together, or one sample


@dataclass(frozen=True)
class BadField:
    """Says what is not finite in one field of a batch.

    Args:
        path: Where it is, as Python reaches it: "batch['image']", "batch[0][2].x".
        dtype: "float32", "complex64", ..., or "float" for Python numbers.
        shape: Its shape; () for a number.
        inf: Elements that are inf or -inf.
        negative_inf: Those of them that are -inf; 0 for complex numbers.
        nan: Elements that are NaN.
        first: Index of the first sample (along the first dimension) that has one; `None` for a
            number.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    inf: int
    negative_inf: int
    nan: int
    first: int | None

    def __str__(self) -> str:
        found = [f"{self.nan} NaN"] * bool(self.nan) + [f"{self.inf} inf"] * bool(self.inf)
        total = torch.Size(self.shape).numel()
        line = f"{self.path} holds {' and '.join(found)} in {total} values"
        line += f" ({self.dtype}, shape {self.shape})" if self.shape else f" ({self.dtype})"
        line += "" if self.first is None else f", first at sample {self.first}"
        masked = not self.nan and self.negative_inf == self.inf < total
        return line + (", all -inf: a mask?" if masked else "")


@dataclass(frozen=True)
class BatchReport:
    """Says which fields of a batch hold inf or NaN. Falsy if every number is finite.

    Args:
        fields: The fields that are not finite, in the order of the batch.
        scanned: Number of fields with floating point numbers.
    """

    fields: tuple[BadField, ...]
    scanned: int

    @property
    def inf(self) -> int:
        """Elements that are inf or -inf, over all fields."""
        return sum([found.inf for found in self.fields])

    @property
    def nan(self) -> int:
        """Elements that are NaN, over all fields."""
        return sum([found.nan for found in self.fields])

    def __bool__(self) -> bool:
        return bool(self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the totals, and the counts of each bad field under its path; a shape as "3x2"."""
        totals = {"scanned": self.scanned, "bad": len(self.fields)}
        flat: dict[str, Any] = {**totals, "inf": self.inf, "nan": self.nan}
        for found in self.fields:
            flat |= {
                f"{found.path} inf": found.inf,
                f"{found.path} negative_inf": found.negative_inf,
                f"{found.path} nan": found.nan,
                f"{found.path} first": found.first,
                f"{found.path} dtype": found.dtype,
                f"{found.path} shape": "x".join([str(size) for size in found.shape]),
            }
        return flat

    def __str__(self) -> str:
        if not self.scanned:
            return "The batch holds no floating point numbers."
        if not self.fields:
            return f"The batch is finite: {self.scanned} fields with floating point numbers."
        lines = [str(found) for found in self.fields[:_SHOWN]]
        if len(self.fields) > _SHOWN:
            lines.append(f"and {len(self.fields) - _SHOWN} more fields")
        return "\n".join(lines)


def scan_batch(batch: Any) -> BatchReport:
    """Find every inf and NaN in a batch, however it is nested.

    Looks into mappings, lists, tuples, sets, named tuples, dataclasses, objects with attributes
    (tokenizers' batches, graphs), sparse, complex and nested tensors, numpy arrays and Python
    numbers. Integers, strings, modules and iterators are passed over; a sharded tensor is seen on
    this rank; what refers to itself is seen once. Nothing is changed or kept.

    Args:
        batch: Anything that a data loader yields.

    Raises:
        TypeError: `batch` is the loader itself, a data set, an iterator, a module or a class.

    Host sync: one per device (sparse tensors may add some of torch's own).
    Memory: about 16 MiB of temporaries, or one sample's.

    Example:
        >>> batch = {"x": [torch.tensor([[1.0], [float("nan")]])], "y": torch.tensor([0, 1])}
        >>> print(scan_batch(batch))
        batch['x'][0] holds 1 NaN in 2 values (float32, shape (2, 1)), first at sample 1
        >>> bool(scan_batch({"x": torch.ones(3)}))
        False
    """
    check_batch("scan_batch", batch, "scan_batch({})")
    return scan(batch)


def scan(batch: Any) -> BatchReport:
    """Do as `scan_batch`, and take whatever a training step was given for a batch."""
    seen = list(leaves_of(batch))
    rows: dict[torch.device, list[Tensor]] = {}
    for _, value in seen:
        if isinstance(value, Tensor):
            rows.setdefault(value.device, []).append(_counts(value))
    read = {device: iter(torch.stack(found).tolist()) for device, found in rows.items()}
    fields = []
    for path, value in seen:
        on_device = isinstance(value, Tensor)
        counts = next(read[value.device]) if on_device else _counts_on_host(value)
        if counts[0] or counts[2]:
            fields.append(_field(as_text(path), value, counts))
    return BatchReport(tuple(fields), len(seen))


def bad_fields(batch: Any) -> str:
    """Return in words what `scan` finds; "" for nothing."""
    report = scan(batch)
    return str(report) if report else ""


def _field(path: str, value: Any, counts: Sequence[int]) -> BadField:
    inf, negative, nan, first = counts
    if isinstance(value, Tensor) and value.is_nested:
        value = value.values()
    dtype, shape = str(getattr(value, "dtype", "float")), getattr(value, "shape", None)
    if shape is None:
        shape = (len(value),) if isinstance(value, (list, tuple)) else ()
    at = None if first == _NEVER or not shape else first
    return BadField(path, dtype.removeprefix("torch."), tuple(shape), inf, negative, nan, at)


@torch.no_grad()
def _counts(tensor: Tensor) -> Tensor:
    """Return inf, -inf, NaN and the first bad sample as int64 of shape (4,). Host sync: none."""
    values, sample_of = _stored(tensor.detach())
    values = values if values.dim() else values.reshape(1)
    counts = torch.zeros(3, dtype=torch.int64, device=values.device)
    never = first = torch.full_like(counts[:1], _NEVER)
    rows = len(values) if values.numel() else 0
    step = max(1, _PIECE * rows // max(1, values.numel()))
    for start in range(0, rows, step):
        part = _comparable(values[start : start + step])
        nan, inf = part.isnan(), part.isinf()
        negative = inf.new_zeros(()) if part.is_complex() else inf & (part < 0)
        counts += torch.stack([inf.sum(), negative.sum(), nan.sum()])
        bad = (nan | inf).reshape(len(part), -1).any(1)
        if sample_of is None:
            at = torch.arange(start, start + len(part), device=values.device)
        else:
            at = sample_of[start : start + step]
        first = torch.minimum(first, torch.where(bad, at, never).amin())
    return torch.cat([counts, first])


def _stored(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the stored values, and the sample of each row where that is not its number."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.layout is torch.sparse_coo:
        summed = tensor.coalesce()
        return summed.values(), summed.indices()[0] if summed.sparse_dim() else None
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor, None
    values = tensor.values()  # compressed or nested: which sample a value is of is not looked up
    return values, torch.full((len(values),), _NEVER, device=values.device)


def _comparable(part: Tensor) -> Tensor:
    if part.itemsize == 1:
        return part.float()  # float8
    return part.to(torch.complex64) if part.dtype is torch.complex32 else part


def _counts_on_host(value: Any) -> tuple[int, int, int, int]:
    if is_array(value):
        return _counts_of_array(value)
    row = value if isinstance(value, (list, tuple)) else [value]
    numbers = [0.0 if isinstance(x, int) else x for x in row]  # a large int fits no float
    nan, inf = [cmath.isnan(x) for x in numbers], [cmath.isinf(x) for x in numbers]
    bad = [a or b for a, b in zip(nan, inf, strict=True)]
    first = bad.index(True) if any(bad) else _NEVER
    negative = sum([isinstance(x, float) and x == -math.inf for x in numbers])
    return sum(inf), negative, sum(nan), first


def _counts_of_array(value: Any) -> tuple[int, int, int, int]:
    numpy = sys.modules["numpy"]
    array = numpy.asarray(value)
    nan, inf = numpy.isnan(array), numpy.isinf(array)
    bad = (nan | inf).any(axis=tuple(range(1, array.ndim)))
    first = int(bad.argmax()) if bad.any() else _NEVER
    negative = 0 if array.dtype.kind == "c" else int((array == -math.inf).sum())
    return int(inf.sum()), negative, int(nan.sum()), first
