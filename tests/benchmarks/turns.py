# SPDX-License-Identifier: Apache-2.0
"""Times the arms of a workload in turns, within one process."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from tests.benchmarks.arms import Arm, Job
from tests.benchmarks.conditions import no_collection
from tests.benchmarks.models import MAKING
from tests.benchmarks.workloads import Workload

__all__ = ["WARM_UP", "Runner", "Times", "race"]

WARM_UP = 5  # steps before the first timed one


@dataclass(frozen=True)
class Times:
    """Seconds per step."""

    fastest: float
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(min(samples), median, low, high)


class Runner(threading.Thread):
    """An arm in a thread of its own, which goes on for a turn and then waits.

    Only one runs at a time, so threads share nothing but the process. On the CPU a sample is one
    step's time on the processor, which other programs' load lengthens little. On CUDA it is a whole
    turn's on the wall, synchronised at both ends: within it the host may run ahead, which is what is
    to be seen.
    """

    def __init__(self, workload: Workload, arm: Arm, device: str, turns: int) -> None:
        super().__init__(name=arm.name, daemon=True)
        self.arm, self.device, self.turn = arm, device, workload.turn
        self.job: Job = workload.job(arm, device, WARM_UP + turns * self.turn, self._border)
        self.samples: list[float] = []
        self.error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._at, self._since, self._made = 0, 0.0, 0.0
        self._abandoned = False
        self._clock = time.thread_time if device == "cpu" else time.perf_counter

    def run(self) -> None:
        try:
            self._go.acquire()
            if not self._abandoned:
                self.arm.run(self.job)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
        finally:
            self._done.release()

    def advance(self) -> None:
        """Let it run: through its warm-up the first time, then for a turn, in the end to its end."""
        self._go.release()
        self._done.acquire()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """End the thread wherever it waits."""
        self._abandoned = True
        self._go.release()
        self.join()

    def _border(self, optimizers: Sequence[Optimizer]) -> None:
        at, every = self._at - WARM_UP, self.turn if self.device == "cuda" else 1
        if at >= 0 and at % every == 0:
            self._synchronize()
            now = self._clock()
            if at > 0:
                making = MAKING.seconds - self._made if self.device == "cpu" else 0.0
                self.samples.append((now - self._since - making) / every)
            if at % self.turn == 0:
                self._done.release()
                self._go.acquire()
                if self._abandoned:
                    raise _Abandoned
            self._made = MAKING.seconds
            self._since = self._clock()
        self._at += 1

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class _Abandoned(BaseException):
    """Raised in the thread of an arm that nobody waits for any more."""


def race(workload: Workload, arms: Sequence[Arm], device: str, steps: int) -> dict[str, Times]:
    """Run the arms in turns, the order shifted by one each round; return each one's times."""
    turns = -(-steps // workload.turn)
    runners = [Runner(workload, arm, device, turns) for arm in arms]
    for runner in runners:
        runner.start()
    try:
        with no_collection():
            for r in range(turns + 1):
                for i in range(len(runners)):
                    runners[(r + i) % len(runners)].advance()
        for runner in runners:
            runner.advance()
    finally:
        for runner in runners:
            runner.abandon()
    return {runner.arm.name: Times.of(runner.samples) for runner in runners}
