# SPDX-License-Identifier: Apache-2.0
"""What hooks see of a forward pass, and how the gradients of two runs compare, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.range import EXPONENTS, exponent_counts, range_counts

__all__ = [
    "NO_UNDERFLOW",
    "Agreement",
    "Forward",
    "Underflow",
    "agreement_of",
    "relative_error",
    "underflow_of",
]

_FLOAT16 = torch.finfo(torch.float16)
_NORMAL_FROM = -14  # exponent of float16's smallest normal number
_LAST_EXPONENT = 15  # of its largest finite number, 65504
_LEFT_BEHIND = 1e-3  # share of the gradients that a recovering scale may leave below normal


@dataclass
class Forward:
    """Watches the forward pass of a module through hooks, which are gone after the `with` block.

    Args:
        module: The module.
        output: The name of the submodule whose output counts; `None`: the last leaf that ran and
            gave more than one number with a graph.

    Raises:
        ValueError: no submodule has the name `output`.
    """

    module: Module
    output: str | None = None
    name: str | None = None
    value: Tensor | None = None
    largest: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = dict(self.module.named_modules())
        if self.output is not None and self.output not in parts:
            known = ", ".join([repr(name) for name in list(parts)[1:6]])
            raise ValueError(
                f"`output={self.output!r}`: `{type(self.module).__name__}` has no such submodule."
                f" Expected a name of `module.named_modules()`, as {known or repr('')}."
            )
        self._handles = [
            part.register_forward_hook(self._hook(name, not any(True for _ in part.children())))
            for name, part in parts.items()
            if name == self.output or not any(True for _ in part.children()) or _owns(part)
        ]

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def shares(self) -> dict[str, float]:
        """Return max |output| / 65504 by module, over all its calls. Host sync: one."""
        if not self.largest:
            return {}
        device = next(iter(self.largest.values())).device
        sizes = torch.stack([size.to(device) for size in self.largest.values()]).tolist()
        return {n: s / _FLOAT16.max for n, s in zip(self.largest, sizes, strict=True)}

    def _hook(self, name: str, is_leaf: bool) -> Any:
        def hook(part: Module, args: Any, output: Any) -> None:
            found = [t for t in _upstream.tensors_in(output) if t.is_floating_point()]
            if not found:
                return
            sizes = [t.detach().abs().amax().float() for t in found if t.numel()]
            if name in self.largest:
                sizes.append(self.largest[name])
            if sizes:
                self.largest[name] = torch.stack([s.to(sizes[0].device) for s in sizes]).amax()
            wanted = is_leaf and found[0].requires_grad and found[0].numel() > 1
            if name == self.output or (self.output is None and wanted):
                self.name, self.value = name, found[0].detach().clone()

        return hook


class Agreement(NamedTuple):
    """How a layer's gradient compares with the one in float32.

    Args:
        norm: Its L2 norm.
        ratio: The norm divided by the one in float32; 1 where both are 0, inf where only that one
            is, NaN where it is not finite.
        cosine: Of the angle between them; 1 where both are 0, 0 where one of them is.
    """

    norm: float
    ratio: float
    cosine: float


class Underflow(NamedTuple):
    """What float16 would do to a layer's unscaled gradient. Zeros in float32 are not counted.

    Args:
        zero_share: Share of the elements that become 0.
        subnormal_share: Share of them that lose bits.
        recover_log2: The least power of two that makes all but one in a thousand normal, as far as
            the largest leaves room below 65504; 0 if nothing is to be gained.
    """

    zero_share: float = 0.0
    subnormal_share: float = 0.0
    recover_log2: int = 0


NO_UNDERFLOW = Underflow()


def agreement_of(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compare a layer's gradient with the one in float32. Host sync: one per parameter."""
    dot = norm = true = 0.0
    for grad, other in zip(grads, reference, strict=True):
        a, b = _wide(grad), _wide(other)
        if a.shape != b.shape:  # a sparse gradient of other rows
            return Agreement(float(a.norm()), math.nan, math.nan)
        products = torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]).tolist()
        dot, norm, true = dot + products[0], norm + products[1], true + products[2]
    norm, true = math.sqrt(norm), math.sqrt(true)
    if not (math.isfinite(norm) and math.isfinite(true)):
        return Agreement(norm, math.nan, math.nan)
    if not true or not norm:
        same = norm == true
        return Agreement(norm, 1.0 if same else math.inf if norm else 0.0, 1.0 if same else 0.0)
    return Agreement(norm, norm / true, dot / norm / true)


def underflow_of(grads: Sequence[Tensor]) -> Underflow:
    """Return what float16 would do to a float32 gradient. Host sync: one per parameter."""
    histogram = [0] * len(EXPONENTS)
    zero = subnormal = 0
    for grad in grads:
        counts = range_counts(grad, 1.0, torch.float16)[:2]
        both = torch.cat([counts, (grad == 0).sum()[None], exponent_counts(grad)]).tolist()
        zero, subnormal = zero + both[0] - both[2], subnormal + both[1]
        histogram = [a + b for a, b in zip(histogram, both[3:], strict=True)]
    total = sum(histogram)
    if not total or not zero + subnormal:
        return Underflow()
    counts_by = dict(zip(EXPONENTS, histogram, strict=True))
    return Underflow(zero / total, subnormal / total, _recovering(counts_by, total))


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """Return the L2 norm of the difference over that of the reference; NaN if they do not compare.

    Host sync: one.
    """
    if value is None or reference is None or value.shape != reference.shape:
        return math.nan
    a, b = _wide(value), _wide(reference).to(value.device)
    difference, size = torch.stack([(a - b).norm(), b.norm()]).tolist()
    if not difference:
        return 0.0
    return float(difference / size) if size else math.inf


def _recovering(counts: Mapping[int, int], total: int) -> int:
    allowed, left = total * _LEFT_BEHIND, 0
    highest = max(exponent for exponent, count in counts.items() if count)
    for exponent in EXPONENTS:
        left += counts[exponent]
        if left > allowed:
            wanted = max(0, _NORMAL_FROM - exponent)
            return max(0, min(wanted, _LAST_EXPONENT - highest))
    return 0


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 where the device has it: squares of float32 overflow at 1.8e19."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _owns(part: Module) -> bool:
    return any(True for _ in part.parameters(recurse=False))
