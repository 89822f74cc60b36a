# SPDX-License-Identifier: Apache-2.0
"""What is not finite in a tensor, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_amp_guard import _upstream

__all__ = ["Values", "covers_its_memory", "has_nan", "is_finite", "values_of"]


@dataclass(frozen=True)
class Values:
    """Describes a tensor without keeping it.

    Args:
        dtype: Its dtype, as "float16".
        shape: Its shape.
        inf: Elements that are inf or -inf.
        nan: Elements that are NaN.
        total: Elements it stores.
        zeros: Elements that are zero.
        low: Smallest finite element; `None` without one.
        high: Largest finite element; `None` without one.
    """

    dtype: str
    shape: tuple[int, ...]
    inf: int
    nan: int
    total: int
    zeros: int
    low: float | None
    high: float | None

    @property
    def kind(self) -> str:
        """What is not finite: "inf", "nan", "inf and nan", or ""."""
        return " and ".join(["inf"] * bool(self.inf) + ["nan"] * bool(self.nan))

    @property
    def max_abs(self) -> float | None:
        """Largest |x| among the finite elements; `None` without one."""
        return None if self.low is None or self.high is None else max(-self.low, self.high)

    @property
    def finite_share(self) -> float:
        """Share of the elements that are finite, from 0 to 1."""
        return 1 - (self.inf + self.nan) / max(self.total, 1)

    def __str__(self) -> str:
        parts = [f"{self.dtype} {self.shape}"]
        if self.low is not None:
            parts.append(f"{self.low:.4g} to {self.high:.4g}")
        if self.zeros and self.total > 1:
            parts.append(f"{self.zeros} of {self.total} zero")
        parts += [f"{self.nan} NaN"] * bool(self.nan) + [f"{self.inf} inf"] * bool(self.inf)
        return ", ".join(parts)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every stored element is finite; integers and tensors without data are.

    Host sync: one.
    """
    stored = _stored(tensor)
    return stored is None or bool(torch.isfinite(stored).all())


def has_nan(tensor: Tensor) -> bool:
    """Return whether an element is NaN. Host sync: one."""
    stored = _stored(tensor)
    return stored is not None and bool(torch.isnan(stored).any())


def covers_its_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is no view of a part of its memory. Host sync: none."""
    if tensor.layout is not torch.strided or hasattr(tensor, "_local_tensor"):
        return True
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def values_of(tensor: Tensor) -> Values:
    """Return what there is to say about a tensor. Host sync: a few."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    stored = _stored(tensor)
    if stored is None:
        return Values(dtype, shape, 0, 0, tensor.numel(), 0, None, None)
    finite = stored[torch.isfinite(stored)]
    return Values(
        dtype=dtype,
        shape=shape,
        inf=int(torch.isinf(stored).sum()),
        nan=int(torch.isnan(stored).sum()),
        total=stored.numel(),
        zeros=int((stored == 0).sum()),
        low=float(finite.min()) if finite.numel() else None,
        high=float(finite.max()) if finite.numel() else None,
    )


def _stored(tensor: Tensor) -> Tensor | None:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return None
    if tensor.is_nested:
        tensor = tensor.values()
    (found,) = _upstream.as_plain([tensor.detach()])
    if found.numel() == 0:
        return None
    return found.float() if found.element_size() == 1 else found
