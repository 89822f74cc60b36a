# SPDX-License-Identifier: Apache-2.0
"""`recommend_precision`: which precision to train in on this device, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import Dataset

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.arguments import (
    check_batch,
    check_module,
    check_positive,
    check_whole,
    kind_of,
)
from lightning_amp_guard.diagnosis.compare.compare import compare_precisions
from lightning_amp_guard.diagnosis.compare.comparison import ComparisonReport
from lightning_amp_guard.diagnosis.compare.rungs import FLOAT32, MakeOptimizer, Program
from lightning_amp_guard.diagnosis.recommend.recommendation import Recommendation
from lightning_amp_guard.diagnosis.recommend.trial import Trial, fitting_lr, run_trial
from lightning_amp_guard.diagnosis.replay.replay import LossFn, device_of, undisturbed
from lightning_amp_guard.diagnosis.replay.surroundings import random_states

__all__ = ["recommend_precision"]

_CANDIDATES = ("bf16-mixed", "16-mixed")  # in the order of preference
_MOST_NONFINITE = 0.1  # share of attempts; growth of the scale alone causes 1 / 2001
_MOST_DRIFT = 0.05
_METRIC_LOSS = 0.01
_LESS_MEMORY = 0.9


def recommend_precision(
    module: Module,
    batches: Iterable[Any],
    *,
    metric_fn: Callable[[Any], float] | None = None,
    loss_fn: LossFn | None = None,
    steps: int = 20,
    device: torch.device | str | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | None = None,
    scale: float = 2.0**16,
) -> Recommendation:
    """Recommend "bf16-mixed", "16-mixed" or "32-true" for a module, by short runs of each.

    In order: a precision must be native to the device; must agree with float32 on the first batch
    (`compare_precisions`); must be finite, without drift of the loss or loss of the metric over
    `steps` updates; and must save time or memory. bfloat16 comes first, since it needs no scaler,
    then float16 with one; float32 is what remains. Times are quartiles over `steps` synchronized
    steps after two to warm up, and count only where the middle halves do not overlap: on a shared
    machine more is not known. float32 is timed with TF32 as set. Copies are trained; the module is
    as before afterwards.

    Args:
        module: A LightningModule in automatic optimization, or any module with `loss_fn`.
        batches: A list or loader; its first `steps` batches are used, in turn.
        metric_fn: `metric_fn(module)`, a number that is larger where the module is better, called
            with the trained copy in eval mode, without gradients, under the precision's autocast.
        loss_fn: `loss_fn(module, batch)`, a scalar loss; `None`: `training_step(batch, 0)`.
        steps: Updates in each precision, at least 2; twenty and more say something about time.
        device: Where copies and batches go; `None`: where the module is.
        lr: Learning rate of plain SGD; `None`: as in `compare_precisions`.
        optimizer: Makes the optimizer from the list of parameters, instead of SGD.
        scale: What the scaler begins with.

    Returns:
        A frozen report: `.precision`, `.reasons`, `.trials`; `str()` is a table. Memory is the
        allocator's peak on CUDA (its peak statistics are reset), elsewhere the bytes that the
        forward pass saves for backward.

    Raises:
        ValueError: no batch, an argument out of range, or a module that cannot be copied.
        TypeError: `batches` is one batch, an argument has another type, or the metric is no number.

    Host sync: many; it is no part of training.

    Example:
        >>> net = torch.nn.Linear(4, 2)
        >>> found = recommend_precision(net, [torch.ones(2, 4)], loss_fn=lambda m, x: m(x).sum())
        >>> found.precision in ("32-true", "bf16-mixed", "16-mixed")
        True
    """
    check_module("recommend_precision", module, batches, "batches")
    check_whole("steps", steps, at_least=2)
    check_positive("scale", scale)
    if lr is not None:
        check_positive("lr", lr)
    where = torch.device(device) if device is not None else device_of(module)
    kind = "cpu" if where is None else where.type
    with undisturbed(module):
        used = _first(batches, steps)
        program = Program(loss_fn, where, float(scale), steps, optimizer, lr)
        compared = compare_precisions(
            *(module, used[0]), steps=1, loss_fn=loss_fn, device=where, scale=scale
        )
        program = replace(program, lr=lr or fitting_lr(module, used[0], program))
        states = random_states(set() if where is None else {where})
        trials = []
        for precision in (FLOAT32, *_CANDIDATES):
            if not compared.rung(precision).runs:
                continue
            for put_back in states:
                put_back()
            trials.append(run_trial(module, used, precision, program, metric_fn))
    native = _upstream.native_low_precision(kind)
    chosen, reasons = _choose(trials, compared, native, kind)
    memory = "peak of the allocator" if kind == "cuda" else "saved for backward by one forward pass"
    return Recommendation(chosen, tuple(reasons), tuple(trials), kind, native, memory)


def _first(batches: Any, count: int) -> Sequence[Any]:
    one = isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable)
    if one or isinstance(batches, (Module, Dataset, type)):
        remedy = "For a single batch write `recommend_precision(module, [batch])`."
        if isinstance(batches, Dataset):
            remedy = "Write `recommend_precision(module, DataLoader(dataset, batch_size=4))`."
        elif callable(getattr(type(batches), "train_dataloader", None)):
            remedy = "Write `recommend_precision(module, datamodule.train_dataloader())`."
        raise TypeError(
            f"`recommend_precision(batches=...)`: `batches` is {kind_of(batches)}. Expected a list or"
            f" loader of batches. {remedy}"
        )
    found = list(islice(iter(batches), count))
    if not found:
        raise ValueError("`batches` is empty. Expected at least one batch.")
    check_batch(
        "recommend_precision", found[0], "recommend_precision(module, loader)", "batches[0]"
    )
    return found


def _choose(
    trials: Sequence[Trial], compared: ComparisonReport, native: tuple[bool, bool], kind: str
) -> tuple[str, list[str]]:
    """Return the precision and the reasons, in the order in which they were found."""
    base = trials[0]
    broken = compared.rung(FLOAT32).problems
    if broken or base.nonfinite_rate:
        told = broken[0].sentence if broken else "some steps are not finite"
        return FLOAT32, [f"float32 itself is not healthy: {told}; mend that first"]
    reasons = []
    found = {trial.precision: trial for trial in trials}
    for precision, is_native in zip(_CANDIDATES, native, strict=True):
        trial = found.get(precision)
        fault = _fault(precision, trial, base, compared, is_native, kind)
        if fault or trial is None:
            reasons.append(f"{precision}: {fault}")
            continue
        gains, losses = _gains(trial, base)
        if gains:
            return trial.precision, [*reasons, f"{trial.precision}: {' and '.join(gains)}"]
        reasons.append(f"{trial.precision}: {' and '.join(losses)}")
    return FLOAT32, [*reasons, "32-true: what remains"]


def _fault(
    precision: str,
    trial: Trial | None,
    base: Trial,
    compared: ComparisonReport,
    native: bool,
    kind: str,
) -> str:
    """Return what speaks against a precision, "" if nothing does."""
    problems = compared.rung(precision).problems
    if not native:
        return f"this {kind} device has no native arithmetic for it"
    if problems or trial is None:
        return problems[0].sentence
    drift = trial.drift_from(base)
    if trial.nonfinite_rate > _MOST_NONFINITE:
        return f"{100 * trial.nonfinite_rate:.0f} % of the steps are not finite"
    if not drift <= _MOST_DRIFT:
        return f"the loss drifts {100 * drift:.2g} % from float32's"
    if trial.metric is None or base.metric is None:
        return ""
    if not trial.metric >= base.metric - _METRIC_LOSS * abs(base.metric):
        return f"the metric is {trial.metric:.4g}, float32's {base.metric:.4g}"
    return ""


def _gains(trial: Trial, base: Trial) -> tuple[list[str], list[str]]:
    """Return what a precision gains over float32, and what it does not."""
    gains, missed = [], []
    ratio = base.timing.median / trial.timing.median if trial.timing.median else math.nan
    if trial.timing.beats(base.timing):
        gains.append(f"{ratio:.2f} times as fast as float32")
    elif base.timing.beats(trial.timing):
        missed.append(f"slower than float32 ({ratio:.2f} times as fast)")
    else:
        missed.append(f"not faster than float32 beyond the noise ({ratio:.2f} times as fast)")
    share = trial.memory / base.memory if base.memory else 1.0
    if share > _LESS_MEMORY:
        missed.append(f"{100 * share:.0f} % of its memory")
    elif not base.timing.beats(trial.timing):
        gains.append(f"{100 * share:.0f} % of its memory")
    return gains, missed
