# SPDX-License-Identifier: Apache-2.0
"""The gradients of one log step in numbers, read in one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MaxMetric, Metric, SumMetric

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.range import EXPONENTS, exponent_counts, range_counts
from lightning_amp_guard.monitor.records import GradientStats

__all__ = ["Aggregates", "GradientLook", "local_norm", "wide"]

_FLOAT16_MAX = 65504.0


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating point dtype of a device; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def local_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm over this rank's part of `grads`. Host sync: none."""
    return torch.nn.utils.get_total_norm([g.float() for g in _upstream.as_plain(grads)])


class GradientLook:
    """What one attempt's gradients look like, as tensors that nobody has read yet.

    Args:
        grads: The gradients, before hooks and clipping.
        scale: The scale of their window.
        carried: The factor that they still carry: 1 once unscaled.
        made: Norm of the gradients as the last backward pass left them, times the scale, or `None`.
        layers: Name of each gradient's layer, for norms by layer; empty for none.

    Host sync: none.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        scale: float,
        carried: float,
        made: Tensor | None,
        layers: Sequence[str] = (),
    ) -> None:
        self.scale, self.carried, self.layers = scale, carried, layers
        plain = [g for g in _upstream.as_plain(grads) if g.numel()]
        device = plain[0].device if plain else torch.device("cpu")
        zero = torch.zeros((), device=device)
        self.counts = torch.zeros(5, dtype=torch.int64, device=device)
        self.exponents = exponent_counts(torch.zeros(1, device=device))
        self._wide = wide(device)
        self.largest = zero.to(self._wide)
        for grad in plain:
            counts = range_counts(grad, scale / carried, torch.float16)
            self.counts = self.counts + counts.to(device)
            self.exponents = self.exponents + exponent_counts(grad).to(device)
            largest = grad.detach().abs().max().to(device, self._wide)
            self.largest = torch.maximum(self.largest, largest)
        kept = zero + math.nan
        if made is not None and plain:
            kept = local_norm(plain) / carried / (made.to(device) / scale)
        self.kept = kept.to(self._wide)
        norms = [g.norm(dtype=self._wide).to(device) for g in _upstream.as_plain(grads)]
        self.norms = torch.stack(norms) if layers and norms else zero.new_empty(0)

    def numbers(self) -> list[Tensor]:
        """Return everything as wide vectors, to travel with others."""
        parts = [self.counts, self.largest[None], self.kept[None], self.exponents, self.norms]
        return [part.to(self._wide) for part in parts]

    def read(self) -> GradientStats:
        """Return the statistics by themselves. Host sync: one."""
        return self.decode(torch.cat(self.numbers()).tolist())

    def decode(self, numbers: Sequence[float]) -> GradientStats:
        """Return the statistics from the numbers that were read."""
        zero, subnormal, normal, overflow, nan = (int(n) for n in numbers[:5])
        shift = round(math.log2(self.carried))
        bins = enumerate(numbers[7 : 7 + len(EXPONENTS)], EXPONENTS[0] - shift)
        squares: dict[str, float] = {}
        for layer, norm in zip(self.layers, numbers[7 + len(EXPONENTS) :], strict=False):
            squares[layer] = squares.get(layer, 0.0) + (norm / self.carried) ** 2
        return GradientStats(
            zero,
            subnormal,
            normal,
            overflow + nan,
            numbers[5] / self.carried,
            {e: int(n) for e, n in bins if n},
            None if math.isnan(numbers[6]) else numbers[6],
            {layer: math.sqrt(square) for layer, square in squares.items()},
        )


class Aggregates:
    """Adds up over the attempts of a batch and over ranks, through torchmetrics, without reading.

    Counts and rates are summed, largest values and memory are maxima. Every rank takes part in every
    `read`, with zeros where it has nothing.

    Args:
        device: Where the states live.
    """

    def __init__(self, device: torch.device) -> None:
        def make(kind: type[Metric]) -> Any:
            return kind(nan_strategy="disable").to(device)

        self._make = make
        self.device = device
        self.zero, self.subnormal, self.total = make(SumMetric), make(SumMetric), make(SumMetric)
        self.largest = make(MaxMetric)
        self.samples, self.tokens = make(SumMetric), make(SumMetric)
        self.memory: dict[str, Any] = {}

    def largest_of_ranks(self, memory: dict[str, float]) -> dict[str, float]:
        """Return the largest of all ranks by key. Host sync: one per value; a collective, too."""
        largest = {}
        for key, value in memory.items():
            metric = self._make(MaxMetric)
            metric.update(value)
            largest[key] = float(metric.compute())
        return largest

    def see(self, look: GradientLook) -> None:
        """Take an attempt's gradients into account. Host sync: none."""
        self.zero.update(look.counts[0])
        self.subnormal.update(look.counts[1])
        self.total.update(look.counts.sum())
        self.largest.update(look.largest * (look.scale / look.carried))

    def read(
        self, rates: tuple[float, float], memory: dict[str, float], looks: Sequence[GradientLook]
    ) -> tuple[dict[str, float], list[GradientStats]]:
        """Return the values to log by key, and the statistics of each of `looks`; begin anew.

        Host sync: one, for everything. A collective per value where there are several ranks.
        """
        for look in looks:
            self.see(look)
        gathered = self._gather(rates, memory)
        parts = [torch.stack([v.to(wide(self.device)).reshape(()) for v in gathered.values()])]
        for look in looks:
            parts += [part.to(self.device) for part in look.numbers()]
        numbers = torch.cat(parts).tolist()
        values = dict(zip(gathered, numbers, strict=False))
        stats, at = [], len(values)
        for look in looks:
            length = sum(part.numel() for part in look.numbers())
            stats.append(look.decode(numbers[at : at + length]))
            at += length
        return _to_log(values), stats

    def _gather(self, rates: tuple[float, float], memory: dict[str, float]) -> dict[str, Tensor]:
        nothing = torch.zeros((), device=self.device)
        for metric in (self.zero, self.subnormal, self.total, self.largest):
            metric.update(nothing)  # computed without an update, torchmetrics would warn
        self.samples.update(rates[0])
        self.tokens.update(rates[1])
        metrics = {
            "zero": self.zero,
            "subnormal": self.subnormal,
            "total": self.total,
            "largest": self.largest,
            "amp/samples_per_s": self.samples,
            "amp/tokens_per_s": self.tokens,
        }
        for key, value in memory.items():
            if key not in self.memory:
                self.memory[key] = self._make(MaxMetric)
            self.memory[key].update(value)
            metrics[key] = self.memory[key]
        values = {key: metric.compute() for key, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return values


def _to_log(values: dict[str, float]) -> dict[str, float]:
    zero, subnormal, total, largest = (
        values.pop(key) for key in ("zero", "subnormal", "total", "largest")
    )
    seen = {"amp/zero_grad_fraction": math.nan, "amp/subnormal_grad_fraction": math.nan}
    headroom = math.nan
    if total:
        seen = {
            "amp/zero_grad_fraction": zero / total,
            "amp/subnormal_grad_fraction": subnormal / total,
        }
        headroom = _headroom_bits(largest)
    return {**seen, "amp/headroom_bits": headroom, **values}


def _headroom_bits(largest: float) -> float:
    if largest == 0.0:
        return math.inf
    return -math.inf if math.isinf(largest) else math.log2(_FLOAT16_MAX / largest)
