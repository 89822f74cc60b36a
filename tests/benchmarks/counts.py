# SPDX-License-Identifier: Apache-2.0
"""Counts a step of an arm exactly, and weighs the error of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from tests.benchmarks.arms import Arm
from tests.benchmarks.conditions import no_collection
from tests.benchmarks.models import Shared
from tests.benchmarks.workloads import Workload
from tests.costs import CAST, WARM, Ops, PeakBytes, PythonCalls, host_reads

__all__ = ["FROM_START", "Counts", "count", "gradient_error"]

FROM_START = 3  # steps over which memory is recorded: the first creates optimizer state


@dataclass(frozen=True)
class Counts:
    """One healthy step, from one border to the next.

    Args:
        reads: Times that the host waits for a value.
        ops: Operator calls that pass the dispatcher.
        walks: Passes over all gradients outside of backward pass and update.
        python: Calls of Python and C functions.
        casts: Conversions of dtype or device.
        peak: Bytes allocated at most during the first three steps, beyond the module's own.
    """

    reads: int
    ops: int
    walks: float
    python: int
    casts: int
    peak: int


class Counter:
    """A border that counts one step's operators, another's Python calls, and the first ones' bytes.

    Apart, since each way of counting would see the others' own calls.
    """

    steps = WARM + 3

    def __init__(self, device: str) -> None:
        self.at = 0
        self.bytes = PeakBytes(device)
        self.methods, self.python = PythonCalls(), PythonCalls()
        self.ops = Ops()

    def __call__(self, optimizers: Sequence[Optimizer]) -> None:
        if self.at == FROM_START:
            self.bytes.stop()
        elif self.at == WARM:
            self.ops = Ops(optimizers).__enter__()
            self.methods.start()
        elif self.at == WARM + 1:
            self.methods.stop()
            self.ops.__exit__(None, None, None)
        elif self.at == WARM + 2:
            self.python.start()
        elif self.at == WARM + 3:
            self.python.stop()
        self.at += 1

    def stop(self) -> None:
        """Put every instrument away that an exception left running."""
        if self.at <= FROM_START:
            self.bytes.stop()
        elif self.at == WARM + 1:
            self.ops.__exit__(None, None, None)
        self.methods.stop()
        self.python.stop()

    def counts(self) -> Counts:
        assert self.at == self.steps + 1, f"{self.at} borders instead of {self.steps + 1}"
        return Counts(
            host_reads(self.ops, self.methods),
            self.ops.count.total(),
            round(self.ops.walks, 3),
            self.python.total,
            self.ops.count[CAST],
            self.bytes.peak,
        )


def count(workload: Workload, arm: Arm, device: str) -> Counts:
    """Run one arm by itself and return the counts of a step."""
    counter = Counter(device)
    job = workload.job(arm, device, counter.steps, counter)
    job.model.to(device)
    with no_collection():  # else the last arm's garbage is freed while this one's bytes are counted
        counter.bytes.start()
        try:
            arm.run(job)
        finally:
            counter.stop()
    return counter.counts()


def gradient_error(workload: Workload, arm: Arm, device: str) -> float:
    """Return |g - g32| / |g32| of the shared weight after one step with learning rate 1."""
    one = replace(workload, model=lambda fused: Shared(fused, lr=1.0))
    seen: list[torch.Tensor] = []
    job = one.job(arm, device, 1, lambda optimizers: seen.append(weight.detach().cpu().double()))
    weight: Any = job.model.lin.weight
    arm.run(job)
    moved, exact = seen[0] - seen[1], _float32_gradient(one, arm, device)
    return float((moved - exact).norm() / exact.norm())


def _float32_gradient(workload: Workload, arm: Arm, device: str) -> torch.Tensor:
    job = workload.job(arm, device, 1, lambda optimizers: None)
    job.model.to(device).training_step(job.batch, 0).backward()
    return job.model.lin.weight.grad.cpu().double()
