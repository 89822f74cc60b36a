# SPDX-License-Identifier: Apache-2.0
"""`profile_dtypes`: which operators run in which dtype, and what autocast does not reach."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.profiler import ProfilerActivity, profile

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.arguments import check_step
from lightning_amp_guard.diagnosis.profile.autocast_rules import (
    is_missed,
    is_ruleless,
    note_of,
    reason_of,
)
from lightning_amp_guard.diagnosis.profile.calls import Call, CallLog, recorded
from lightning_amp_guard.diagnosis.profile.dtype_report import (
    DtypeReport,
    DtypeRow,
    MissedMatmul,
    PlainFunction,
    RulelessOp,
)
from lightning_amp_guard.diagnosis.replay.replay import (
    LossFn,
    autocast,
    device_of,
    on_device,
    training_loss,
    undisturbed,
)

__all__ = ["profile_dtypes"]

_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
_OWN = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.")


def profile_dtypes(
    module: Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    precision: str = "16-mixed",
    device: torch.device | str | None = None,
) -> DtypeReport:
    """Report calls, time and compute dtype of every operator of one step, forward and backward.

    Mixed precision that is no faster spends its time elsewhere: in matrix products that stayed in
    float32 (named with the line that made them), in casts, or in operators that low precision does
    not help. The step runs three times from the same state: to warm up, under `torch.profiler` for
    the times, and under a dispatch mode for the dtypes, so that neither falsifies the other. The
    module is as before afterwards. What a custom operator does inside stays hidden, and so does a
    compiled module's interior.

    Args:
        module: A LightningModule in automatic optimization, or any module with `loss_fn`.
        batch: One batch.
        loss_fn: `loss_fn(module, batch)`, a scalar loss; `None`: `training_step(batch, 0)`.
        precision: "16-mixed", "bf16-mixed" or "32-true".
        device: Where the batch is moved to and autocast looks at; `None`: the module's device.

    Returns:
        A frozen report; `str()` is a table, `.findings` the sentences that ask for a change.

    Raises:
        ValueError: an unknown precision, or a step without a scalar loss.
        TypeError: `module` is none, `batch` is a loader, or neither `training_step` nor `loss_fn`.

    Host sync: several; it is no part of training.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> report = profile_dtypes(net, torch.ones(2, 4), loss_fn=lambda m, x: m(x).sum())
        >>> [(row.dtype, row.calls) for row in report.rows if row.op == "aten::addmm"]
        [('float16', 1)]
    """
    check_step("profile_dtypes", module, batch)
    where = device if device is not None else device_of(module)
    kind = torch.device(where or torch.accelerator.current_accelerator() or "cpu").type
    log = CallLog(module, kind)

    def step(log: CallLog | None = None) -> None:
        data = on_device(batch, where)
        seen = recorded(log) if log is not None else nullcontext()
        with undisturbed(module), autocast(precision, where), seen:
            loss = training_loss(module, data, loss_fn)
            if log is not None:
                log.see_graph(loss)
                log.backward = True
            with autocast("32-true", where):  # as in a Trainer's step
                loss.backward()  # type: ignore[no-untyped-call]

    step()
    events = _events(step, kind)
    step(log)
    return _report(log, _seconds(log.calls, events, kind), precision)


def _events(step: Callable[[], None], kind: str) -> Sequence[Any]:
    extra = [_ACTIVITIES[kind]] if kind in _ACTIVITIES else []
    with profile(activities=[ProfilerActivity.CPU, *extra]) as profiler:
        step()
    return profiler.events() or []


def _seconds(calls: Sequence[Call], events: Sequence[Any], kind: str) -> list[float]:
    """Return the time of each call: the k-th of an operator is the profiler's k-th of that name."""
    names = {call.name for call in calls}
    found = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name in names and not _is_inside(event, names):
            micros = event.device_time_total if kind in _ACTIVITIES else event.cpu_time_total
            found[event.name].append(1e-6 * float(micros))
    made = Counter(call.name for call in calls)
    even = {
        name: [sum(found[name]) / count] * count
        for name, count in made.items()
        if len(found[name]) != count  # then only the sum is known
    }
    left = {name: iter(even.get(name, found[name])) for name in names}
    return [next(left[call.name]) for call in calls]


def _is_inside(event: Any, names: set[str]) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in names:
            return True
        parent = parent.cpu_parent
    return False


def _report(log: CallLog, seconds: Sequence[float], precision: str) -> DtypeReport:
    total = sum(seconds) or 1.0
    times = dict(zip(map(id, log.calls), seconds, strict=True))

    def share(calls: Sequence[Call]) -> float:
        return sum(times[id(call)] for call in calls) / total

    rows = [
        DtypeRow(op, dtype, len(calls), share(calls) * total, share(calls))
        for (op, dtype), calls in _grouped(log.calls, lambda c: (c.name, c.dtype)).items()
    ]
    low = precision != "32-true"
    return DtypeReport(
        precision=precision,
        device=log.device,
        seconds=sum(seconds),
        cast_share=share([call for call in log.calls if call.is_cast]),
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        missed_matmuls=_missed(log, share) if low else (),
        without_rule=_ruleless(log, share) if low else (),
        functions=_plain_functions(log) if low else (),
    )


def _missed(log: CallLog, share: Callable[[Sequence[Call]], float]) -> tuple[MissedMatmul, ...]:
    found = _grouped([c for c in log.calls if is_missed(c)], _by_place).values()
    return tuple(MissedMatmul(*_placed(c, share), reason_of(c[0], log.device)) for c in found)


def _ruleless(log: CallLog, share: Callable[[Sequence[Call]], float]) -> tuple[RulelessOp, ...]:
    calls = [c for c in log.calls if is_ruleless(c, log.device)]
    found = _grouped(calls, _by_place).values()
    return tuple(RulelessOp(*_placed(c, share), note_of(c[0], log.device)) for c in found)


def _placed(
    calls: Sequence[Call], share: Callable[[Sequence[Call]], float]
) -> tuple[str, str, int, float, str, str | None]:
    """Return what a `PlacedOp` says of the calls of one operator from one line."""
    first, place = calls[0], calls[0].place
    return first.op, first.dtype, len(calls), share(calls), place.source, place.module


def _plain_functions(log: CallLog) -> tuple[PlainFunction, ...]:
    return tuple(
        PlainFunction(function.__qualname__, place.source)
        for function, place in log.functions.items()
        if not _upstream.uses_custom_fwd(function)
        and not f"{function.__module__}.".startswith(_OWN)
    )


def _by_place(call: Call) -> Any:
    return call.op, call.dtype, call.place.source  # no module is on the stack of a recomputation


def _grouped(calls: Sequence[Call], key: Callable[[Call], Any]) -> dict[Any, list[Call]]:
    groups = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return groups
