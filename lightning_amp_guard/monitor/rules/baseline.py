# SPDX-License-Identifier: Apache-2.0
"""Rules that compare a run in 16 bits with a float32 run of the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import Row, RunFacts, RunView
from lightning_amp_guard.monitor.rules.reading import fraction_text, is_low, owner

__all__ = ["memory_hardly_drops", "no_faster", "norms_differ"]

# Two runs of one program lie within a few percent of each other on a quiet machine.
_NO_FASTER = 1.05
_ATTEMPTS_TIMED = 16
_HARDLY_LESS = 0.9
_DOMINATE = 0.6
_MIB = 2.0**20
# Rounding in 11 bits moves a norm by far less; seen three times, so that one odd batch is none.
_TIMES = 10.0
_ATTEMPTS_APART = 3
_LOSS_WITHIN = 0.1
# Norms below this share of the float32 run's largest are what rounding leaves after convergence.
_NEGLIGIBLE = 0.01


def _float32(view: RunView) -> RunFacts | None:
    """Return the facts of a float32 baseline on like devices, else `None`."""
    base = None if view.baseline is None else view.baseline.facts
    if base is None or not is_low(view.facts) or not base.precision.startswith("32"):
        return None
    same = (base.device, base.world_size) == (view.facts.device, view.facts.world_size)
    return base if same else None


def _positive(*values: float | None) -> list[float] | None:
    known = [v for v in values if v is not None and 0 < v < math.inf]
    return known if len(known) == len(values) else None


# ---------------------------------------------------------------------- AMP106


def no_faster(view: RunView) -> Finding | None:
    """AMP106: at most 1.05 times the samples per second of the float32 run, after 16 attempts."""
    base = _float32(view)
    rates = None if base is None else _positive(view.facts.samples_per_s, base.samples_per_s)
    if rates is None or rates[0] > _NO_FASTER * rates[1] or len(view.rows) < _ATTEMPTS_TIMED:
        return None
    facts = view.facts
    cause = (
        "time is not in low-precision matmuls: operations fall back to float32, or casts dominate"
    )
    remedy = "See where the time goes: `print(profile_dtypes(model, batch))`"
    if facts.device == "cpu":
        cause = f"few CPUs compute in 16 bits natively; otherwise {cause}"
        remedy = 'Train in float32 on this device: `Trainer(precision="32-true")`'
    return Finding(
        "AMP106",
        "mixed precision is no faster",
        f"{rates[0]:.4g} samples/s in {facts.precision}, {rates[1]:.4g} in the float32 baseline:"
        f" {rates[0] / rates[1]:.3g} times as fast, on {facts.device}",
        cause,
        remedy,
    )


# ---------------------------------------------------------------------- AMP110


def memory_hardly_drops(view: RunView) -> Finding | None:
    """AMP110: peak memory is at least 0.9 times the float32 run's, and mostly weights and state.

    Mixed precision keeps weights, gradients and optimizer state in float32; only activations and
    casts shrink. So it is a finding where the former are more than 60 % of the peak.
    """
    base = _float32(view)
    peaks = None if base is None else _positive(view.facts.peak_mib, base.peak_mib)
    if peaks is None or peaks[0] < _HARDLY_LESS * peaks[1]:
        return None
    weights, state = view.weight_bytes / _MIB, view.state_bytes / _MIB
    if weights + state <= _DOMINATE * peaks[0]:
        return None
    share = 100 * (weights + state) / peaks[0]
    return Finding(
        "AMP110",
        "memory hardly drops",
        f"peak {peaks[0]:.4g} MiB in {view.facts.precision}, {peaks[1]:.4g} MiB in the float32"
        f" baseline; weights take {weights:.4g} MiB, gradients and optimizer state {state:.4g} MiB,"
        f" together {share:.3g} % of the peak",
        "weights, gradients and optimizer state dominate, and mixed precision keeps them in float32",
        "Shard them over devices, or keep less state; see what each takes:"
        ' `print(estimate_memory(model, optimizer="adam", precision="16-mixed"))`',
    )


# ---------------------------------------------------------------------- AMP113


class _Norms(NamedTuple):
    """Norms of one attempt: of this run and of the baseline."""

    attempt: int
    here: float
    base: float

    @property
    def apart(self) -> bool:
        """Whether they are more than `_TIMES` apart."""
        return max(self.here, self.base) > _TIMES * min(self.here, self.base)

    @property
    def bits(self) -> float:
        """How far apart they are, in powers of two."""
        low, high = sorted((self.here, self.base))
        return math.log2(high / low) if low > 0 else math.inf


def norms_differ(view: RunView) -> Finding | None:
    """AMP113: gradient norms are more than 10 times the float32 run's, or less than a tenth.

    Compared are applied attempts with the same number, batch, optimizer and window length, while the
    losses still agree within 10 % (before the trajectories part). At least three of them, and half
    of all, must be that far apart, in the total norm or in one layer's; norms below 1 % of the
    float32 run's largest do not count.
    """
    if view.baseline is None or not is_low(view.facts):
        return None
    base = view.baseline.facts
    if base is not None and not base.precision.startswith("32"):
        return None
    pairs = list(_comparable(view.rows, view.baseline.rows))
    norms = {name: list(_norms(pairs, name)) for name in ["", *_layers(pairs)]}
    apart = {name: found for name, all_ in norms.items() if (found := _apart(all_))}
    if not apart:
        return None
    # a layer says more than the total
    name = max(apart, key=lambda n: (n != "", max(norm.bits for norm in apart[n])))
    return _tell(view, name, apart[name], len(norms[name]))


def _comparable(rows: Sequence[Row], base: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield the pairs of rows that differ in nothing but the precision."""
    others = {(row.optimizer, row.attempt): row for row in base}
    for row in rows:
        other = others.get((row.optimizer, row.attempt))
        if other is None or not (row.applied and other.applied):
            continue
        if row.micro_batches != other.micro_batches or not _alike(row.loss, other.loss):
            continue
        if None in (row.batch_id, other.batch_id) or row.batch_id == other.batch_id:
            yield row, other


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    return abs(one - other) <= _LOSS_WITHIN * max(abs(one), abs(other))


def _layers(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """Return the names of the layers whose norms both runs know."""
    names = dict.fromkeys(
        name
        for row, other in pairs
        if row.stats is not None and other.stats is not None
        for name in row.stats.per_layer
        if name in other.stats.per_layer
    )
    return list(names)


def _norms(pairs: Sequence[tuple[Row, Row]], layer: str) -> Iterator[_Norms]:
    """Yield the norms of a layer, or of all ("") where they say something."""
    largest: dict[int, float] = {}
    for _, other in pairs:
        if _finite(other.grad_norm):
            known = largest.get(other.optimizer, 0.0)
            largest[other.optimizer] = max(known, other.grad_norm or 0.0)
    for row, other in pairs:
        here, base = _norm(row, layer), _norm(other, layer)
        if here is None or base is None or not (_finite(here) and _finite(base)):
            continue
        floor = _NEGLIGIBLE * largest.get(other.optimizer, 0.0)
        if max(here, base) > floor:
            yield _Norms(row.attempt, here, base)


def _norm(row: Row, layer: str) -> float | None:
    if not layer:
        return row.grad_norm
    norms: Mapping[str, float] = {} if row.stats is None else row.stats.per_layer
    return norms.get(layer)


def _finite(norm: float | None) -> bool:
    return norm is not None and 0 <= norm < math.inf


def _apart(norms: Sequence[_Norms]) -> list[_Norms]:
    found = [norm for norm in norms if norm.apart]
    return found if len(found) >= max(_ATTEMPTS_APART, len(norms) / 2) else []


def _tell(view: RunView, layer: str, apart: Sequence[_Norms], compared: int) -> Finding:
    worst = max(apart, key=lambda norm: norm.bits)
    what = f"the gradient norm of {layer!r}" if layer else "the gradient norm"
    path = layer.rpartition(".")[0] or layer or "name.of.module"
    ratio = (
        f"{worst.here / worst.base:.3g} times that" if worst.base > 0 else "where there was none"
    )
    return Finding(
        "AMP113",
        "gradient norms differ from float32's",
        f"{what} was {worst.here:.4g} at attempt {worst.attempt} and {worst.base:.4g} in the float32"
        f" baseline ({ratio}); more than {_TIMES:g} times apart at"
        f" {fraction_text(len(apart), compared)} comparable attempts",
        "an operation is wrong in low precision"
        + (f", in {layer!r} or in what follows it" if layer else "")
        + ": it loses its gradients, or rounds or overflows on the way",
        "Run it in float32 (`compare_precisions(model, batch)` names layers):"
        f' `Trainer(plugins=[{owner(view.facts)}(fp32_modules=["{path}"])])`',
    )
