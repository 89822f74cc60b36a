# SPDX-License-Identifier: Apache-2.0
"""How much memory training takes, and for what, before it is begun."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.arguments import check_batch, check_module
from lightning_amp_guard.diagnosis.memory.optimizer_state import ParamSize, kind_of, state_bytes
from lightning_amp_guard.diagnosis.memory.saved import TRUE_PRECISIONS, saved_bytes
from lightning_amp_guard.diagnosis.replay.replay import LossFn

__all__ = ["MemoryReport", "estimate_memory"]

_PRECISIONS = ("16-mixed", "bf16-mixed", "32-true", *TRUE_PRECISIONS)
# What Lightning's Trainer takes these for.
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
_UNITS = ("bytes", "kB", "MB", "GB")


@dataclass(frozen=True)
class MemoryReport:
    """Says how many bytes one training process needs, and for what.

    Args:
        parameters: Number of elements of the parameters.
        trained: Those of them that are trained.
        optimizer: Kind of the optimizer.
        precision: As the Trainer writes it.
        weights: Bytes of the parameters and of the buffers.
        buffers: Those of them that are buffers.
        master_weights: Bytes of float32 copies of low precision weights: 0, as torch's autocast
            keeps the weights themselves in float32, and "16-true" keeps no copy.
        gradients: Bytes of the gradients of all trained parameters, as dense ones.
        optimizer_state: Bytes that the optimizer keeps after its first step.
        activations_by_dtype: Bytes that autograd saves for the backward pass, by dtype, other than
            `casts`; `None` if no batch was given.
        casts: Bytes of low precision copies of weights that autograd saves; `None` without a batch.
    """

    parameters: int
    trained: int
    optimizer: str
    precision: str
    weights: int
    buffers: int
    master_weights: int
    gradients: int
    optimizer_state: int
    activations_by_dtype: Mapping[str, int] | None = field(default=None, hash=False)
    casts: int | None = None

    @property
    def activations(self) -> int | None:
        """Bytes of saved activations of all dtypes; `None` without a batch."""
        found = self.activations_by_dtype
        return None if found is None else sum(found.values())

    @property
    def total(self) -> int:
        """Bytes of all that is reported."""
        kept = self.weights + self.master_weights + self.gradients + self.optimizer_state
        return kept + (self.activations or 0) + (self.casts or 0)

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by purpose; with a batch also `activations`, by dtype too, and `casts`."""
        flat = {
            "weights": self.weights,
            "master_weights": self.master_weights,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer_state,
        }
        if self.activations_by_dtype is not None:
            flat |= {"activations": self.activations or 0}
            flat |= {f"activations_{name}": n for name, n in self.activations_by_dtype.items()}
            flat |= {"casts": self.casts or 0}
        return {**flat, "total": self.total}

    def __str__(self) -> str:
        power = min(3, int(math.log10(max(1, self.total))) // 3)

        def line(name: str, size: int) -> str:
            value = f"{size:,}" if power == 0 else f"{size / 1000**power:,.2f}"
            return f"  {name:<20}{value:>14} {_UNITS[power]}"

        lines = [
            f"{self.parameters:,} parameters, {self.trained:,} of them trained,"
            f" {self.optimizer}, {self.precision}:"
        ]
        for name, size in self.to_dict().items():
            dtype = name.removeprefix("activations_")
            if dtype != name:  # a part of the row of `activations`
                name = f"  of it {dtype}"
            elif name == "total":
                if self.activations_by_dtype is None:
                    lines.append(f"  {'activations':<20}{'not measured':>14}")
                lines.append("  " + "-" * (len(lines[1]) - 2))
            lines.append(line(name, size))
        return "\n".join(lines)


def estimate_memory(
    module_or_count: Module | int,
    *,
    optimizer: Any = "adam",
    precision: str = "16-mixed",
    batch: Any = None,
    loss_fn: LossFn | None = None,
) -> MemoryReport:
    """Estimate the memory of training: weights, gradients, optimizer state and, measured, activations.

    True to what torch keeps: under "16-mixed" and "bf16-mixed" weights, gradients and optimizer
    state stay float32 and only activations and casts of the weights are low precision, so that
    memory drops less than by half; "16-true", "bf16-true" and "64-true" convert the whole module,
    and gradients and state with it. One process is meant; sharded parameters count with this rank's
    part. Workspaces, fragmentation and the batch itself come on top.

    Args:
        module_or_count: The module (also on the meta device; shared parameters count once, frozen
            ones have neither gradient nor state), or a number of float32 parameters.
        optimizer: A name ("adam", "adamw", "sgd", "sgd-momentum", "adagrad", "rmsprop",
            "adafactor", "lion", "adam-8bit", ...), a class, or an instance: its state is measured
            if it has stepped. Adafactor takes a bare number of parameters for one square matrix.
        precision: "16-mixed", "bf16-mixed", "32-true", "16-true", "bf16-true" or "64-true".
        batch: With it, one forward pass in that precision measures the saved activations. The
            module is in training or evaluation mode as given, and as before afterwards.
        loss_fn: `loss_fn(module, batch)` -> scalar; without it the module's `training_step`.

    Raises:
        ValueError: unknown precision or optimizer, a negative count, a lazy parameter, or no loss.
        TypeError: `module_or_count` is neither, `batch` is a loader, or it was given with a count.

    Host sync: none without a batch.

    Example:
        >>> print(estimate_memory(100_000_000_000, precision="32-true"))
        100,000,000,000 parameters, 100,000,000,000 of them trained, adam, 32-true:
          weights                     400.00 GB
          master_weights                0.00 GB
          gradients                   400.00 GB
          optimizer_state             800.00 GB
          activations           not measured
          -------------------------------------
          total                     1,600.00 GB
    """
    precision = _checked_precision(precision)
    _check_given(module_or_count, batch)
    if isinstance(module_or_count, Module):
        report = _of_module(module_or_count, optimizer, precision)
        if batch is None:
            return report
        found, casts = saved_bytes(module_or_count, batch, precision, loss_fn)
        named = {str(dtype).removeprefix("torch."): size for dtype, size in found.items()}
        return MemoryReport(**{**vars(report), "activations_by_dtype": named, "casts": casts})
    if batch is not None:
        raise TypeError(
            f"`batch` was given with `module_or_count={module_or_count!r}`. Expected the module:"
            " activations are measured by running it. Write `estimate_memory(module, batch=batch)`."
        )
    return _of_count(_checked_count(module_or_count), optimizer, precision)


def _of_module(module: Module, optimizer: Any, precision: str) -> MemoryReport:
    def itemsize(tensor: Tensor) -> int:
        dtype = TRUE_PRECISIONS.get(precision) if tensor.is_floating_point() else None
        return (dtype or tensor.dtype).itemsize

    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"Parameter {name!r} has no shape yet. Expected an initialized module. Most likely"
                " it is lazy: run `module(x)` once before."
            )
    params, buffers = list(module.parameters()), list(module.buffers())
    trained = [p for p in params if p.requires_grad]
    sizes = [ParamSize(tuple(p.shape), itemsize(p)) for p in _upstream.as_plain(trained)]
    of_buffers = sum([b.numel() * itemsize(b) for b in _upstream.as_plain(buffers)])
    return MemoryReport(
        parameters=sum([p.numel() for p in params]),
        trained=sum([p.numel() for p in trained]),
        optimizer=_name(optimizer),
        precision=precision,
        weights=sum([p.numel() * itemsize(p) for p in _upstream.as_plain(params)]) + of_buffers,
        buffers=of_buffers,
        master_weights=0,
        gradients=sum([size.numel * size.itemsize for size in sizes]),
        optimizer_state=state_bytes(optimizer, sizes, itemsize),
    )


def _of_count(count: int, optimizer: Any, precision: str) -> MemoryReport:
    itemsize = TRUE_PRECISIONS[precision].itemsize if precision in TRUE_PRECISIONS else 4
    shape: tuple[int, ...] = (count,)
    if kind_of(optimizer) == "adafactor":
        shape = (math.isqrt(count), math.isqrt(count))
    size = count * itemsize
    return MemoryReport(
        *(count, count, _name(optimizer), precision),
        weights=size,
        buffers=0,
        master_weights=0,
        gradients=size,
        optimizer_state=state_bytes(optimizer, [ParamSize(shape, itemsize)], lambda p: itemsize),
    )


def _name(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def _check_given(module_or_count: Any, batch: Any) -> None:
    if isinstance(module_or_count, type) or isinstance(batch, Module):
        check_module("estimate_memory", module_or_count, batch)
    check_batch("estimate_memory", batch, "estimate_memory(module, batch={})")


def _checked_precision(precision: Any) -> str:
    known = _ALIASES.get(str(precision), precision)
    if known not in _PRECISIONS:
        names = ", ".join(map(repr, _PRECISIONS))
        raise ValueError(f"`precision={precision!r}`: expected one of {names}.")
    return str(known)


def _checked_count(count: Any) -> int:
    whole = isinstance(count, float) and count.is_integer()
    if isinstance(count, bool) or not (isinstance(count, int) or whole):
        raise TypeError(
            f"`module_or_count={count!r}`: expected a module or a whole number of parameters, got"
            f" {type(count).__name__}."
        )
    if count < 0:
        raise ValueError(f"`module_or_count={count!r}`: expected a number of parameters >= 0.")
    return int(count)
