# SPDX-License-Identifier: Apache-2.0
"""A short training run of one precision: its losses, its time, its memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard.diagnosis.compare.copies import copy_of
from lightning_amp_guard.diagnosis.compare.rungs import FLOAT32, Program, Run, Rung, small_lr
from lightning_amp_guard.diagnosis.replay.replay import autocast, on_device, training_loss

__all__ = ["Timing", "Trial", "clock", "fitting_lr", "run_trial"]

clock: Callable[[], float] = time.perf_counter
_WARM_UP = 2


class Timing(NamedTuple):
    """Seconds a step takes: forward, backward and update, the batch on the device already.

    Args:
        fastest: The fastest of all.
        low: The first quartile.
        median: The median.
        high: The third quartile.
    """

    fastest: float
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Return the quartiles of some steps, at least one."""
        if len(seconds) == 1:
            return cls(*[float(seconds[0])] * 4)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(min(seconds), low, median, high)

    def beats(self, other: Timing) -> bool:
        """Return whether it is faster beyond the noise: the middle halves do not overlap."""
        return self.high < other.low


@dataclass(frozen=True)
class Trial:
    """What a short run in one precision showed.

    Args:
        precision: "32-true", "bf16-mixed" or "16-mixed".
        timing: Of a step.
        memory: Bytes, of the kind that the recommendation names.
        nonfinite_rate: Share of the attempts with a non-finite loss or gradient, after the scale's
            calibration.
        losses: Of each applied attempt.
        scale: The scale in the end.
        metric: What `metric_fn` gave; `None` without one.
    """

    precision: str
    timing: Timing
    memory: int
    nonfinite_rate: float
    losses: tuple[float, ...]
    scale: float
    metric: float | None

    def drift_from(self, other: Trial) -> float:
        """Return how far the second half of the losses lies off, relative to the other's largest.

        NaN where one of them has no loss.
        """
        mine, theirs = _later(self.losses), _later(other.losses)
        if not mine or not theirs:
            return math.nan
        size = max(abs(loss) for loss in other.losses)
        off = abs(statistics.fmean(mine) - statistics.fmean(theirs))
        return off / size if size else off


def run_trial(
    module: Module,
    batches: Sequence[Any],
    precision: str,
    program: Program,
    metric_fn: Callable[[Any], float] | None = None,
) -> Trial:
    """Train one copy for the losses, another for time and memory, and return what they showed.

    Args:
        module: The module; it is copied.
        batches: At least one; taken in turn.
        precision: The precision.
        program: The step; `program.steps` updates, and `program.lr` for plain SGD.
        metric_fn: As in `recommend_precision`.
    """
    rung = Rung(precision, precision, scales=precision == "16-mixed")
    run = Run(copy_of(module, program.device), rung, program)
    losses, rate = _train(run, batches)
    metric = None if metric_fn is None else _metric(run, metric_fn)
    timing, memory = _measure(module, batches, run)
    return Trial(precision, timing, memory, rate, tuple(losses), run.scale, metric)


def _optimizer(module: Module, program: Program) -> torch.optim.Optimizer:
    params = [p for p in module.parameters() if p.requires_grad]
    if program.make_optimizer is not None:
        return program.make_optimizer(params)
    return torch.optim.SGD(params, lr=program.lr or 0.0)


def _train(run: Run, batches: Sequence[Any]) -> tuple[list[float], float]:
    """Return the losses of the applied attempts, and the share of attempts that were not finite."""
    run.calibrate(batches[0])
    calibration, bad = run.skipped, 0
    optimizer = _optimizer(run.module, run.program)
    losses = []
    for i in range(run.program.steps):
        loss = run.step(batches[i % len(batches)])
        if math.isfinite(loss) and math.isfinite(run.grad_norm()):
            losses.append(loss)
            optimizer.step()
        else:
            bad += 1
    skipped = run.skipped - calibration
    return losses, (bad + skipped) / (run.program.steps + skipped)


def _metric(run: Run, metric_fn: Callable[[Any], float]) -> float:
    run.module.eval()
    with torch.no_grad(), autocast(run.rung.precision, run.program.device):
        found = metric_fn(run.module)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(
            f"`metric_fn` returned {found!r:.60} of type {type(found).__name__}. Expected one number,"
            " larger where the module is better. For a loss return its negative."
        )
    return float(found)


def _measure(module: Module, batches: Sequence[Any], run: Run) -> tuple[Timing, int]:
    """Time plain steps of another copy: what makes runs comparable costs time itself.

    TF32 is as the caller has set it, since that is what float32 would cost him.
    """
    program, precision = run.program, run.rung.precision
    copy = copy_of(module, program.device)
    optimizer = _optimizer(copy, program)
    kind = "cpu" if program.device is None else program.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=run.scale, enabled=run.rung.scales)
    backend = None if kind == "cpu" else torch.get_device_module(kind)
    seconds = []
    saved = _Saved(copy)

    def step(data: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision, program.device):
            loss = training_loss(copy, data, program.loss_fn)
        with autocast(FLOAT32, program.device):
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    with saved:
        step(on_device(batches[0], program.device))
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(program.device)
    for i in range(_WARM_UP - 1 + program.steps):
        data = on_device(batches[i % len(batches)], program.device)
        _wait(backend, program.device)
        begin = clock()
        step(data)
        _wait(backend, program.device)
        seconds.append(clock() - begin)
    peak = torch.cuda.max_memory_allocated(program.device) if kind == "cuda" else saved.total
    return Timing.of(seconds[_WARM_UP - 1 :]), peak


def _wait(backend: Any, device: torch.device | None) -> None:
    if backend is not None:
        backend.synchronize(device)


class _Saved:
    """Counts the bytes that a forward pass saves for backward; parameters and repeats left out."""

    def __init__(self, module: Module) -> None:
        self.total = 0
        self._known = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used again
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self._kept.append(storage)
                self.total += storage.nbytes()
        return tensor


def _later(losses: Sequence[float]) -> Sequence[float]:
    return losses[len(losses) // 2 :]


def fitting_lr(module: Module, batch: Any, program: Program) -> float:
    """Return the learning rate of plain SGD for all precisions, from float32's first gradients."""
    run = Run(copy_of(module, program.device), Rung(FLOAT32, FLOAT32), program)
    run.step(batch)
    return small_lr(run.module.parameters())
