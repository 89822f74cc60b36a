# SPDX-License-Identifier: Apache-2.0
"""How fast a run goes and how much memory it takes, measured at log steps."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["FitTotals", "Throughput", "lifetime_peaks", "memory", "samples_in"]

_MIB = 2.0**20


class Throughput:
    """Counts samples and turns them into a rate when asked; the first batches do not count.

    Args:
        warm_up: Batches left out at the beginning of a fit: caches fill, kernels are chosen.
        clock: Seconds, rising.

    Example:
        >>> ticks = iter([0.0, 4.0])
        >>> speed = Throughput(warm_up=1, clock=lambda: next(ticks))
        >>> for samples in (8, 8, 8):
        ...     speed.batch(samples)
        >>> speed.rates()
        (4.0, 0.0)
    """

    def __init__(self, warm_up: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        self.warm_up = warm_up
        self.clock = clock
        self._since: float | None = None
        self._paused: float | None = None
        self._samples = self._seen = 0
        self.warming_up = True
        self._tokens = self._tokens_now = 0
        self.seconds = 0.0  # that the last call of `rates` was about

    def batch(self, samples: int) -> None:
        """Count a batch at its beginning. Host sync: none."""
        self._seen += 1
        if self._seen > self.warm_up:
            if self._since is None:
                self._since = self.clock()
                self.warming_up = False
            self._samples += samples

    def tokens(self, total: int) -> None:
        """Learn how many tokens have been seen in all; only their growth matters."""
        self._tokens_now = total
        if self.warming_up:
            self._tokens = total

    def rates(self) -> tuple[float, float]:
        """Return samples and tokens per second since the last call; NaN while no time has passed.

        The caller has waited for the device.
        """
        self.seconds = 0.0
        if self._since is None:
            return math.nan, math.nan
        now, tokens = self.clock(), self._tokens_now
        seconds = now - self._since
        if seconds <= 0.0:
            return math.nan, math.nan
        rates = self._samples / seconds, (tokens - self._tokens) / seconds
        self._since, self._samples, self._tokens = now, 0, tokens
        self.seconds = seconds
        return rates

    def pause(self) -> None:
        """Stop the clock: a validation begins."""
        self._paused = self.clock()

    def go_on(self) -> None:
        """Let the clock run again."""
        if self._since is not None and self._paused is not None:
            self._since += self.clock() - self._paused
        self._paused = None


class FitTotals:
    """Sums up a fit's speed and memory from the values of its log steps.

    Args:
        before: `lifetime_peaks` when the fit began. Until a fit exceeds what came before it, its own
            peak is not known.

    Example:
        >>> totals = FitTotals({"amp/peak_allocated_mib": 500.0})
        >>> totals.see({"amp/samples_per_s": 8.0, "amp/peak_allocated_mib": 500.0}, seconds=3.0)
        >>> totals.see({"amp/samples_per_s": 4.0, "amp/peak_allocated_mib": 500.0}, seconds=1.0)
        >>> totals.samples_per_s, totals.peak_mib
        (7.0, None)
    """

    def __init__(self, before: Mapping[str, float]) -> None:
        self._before = before.get("amp/peak_allocated_mib", 0.0)
        self._samples = self._seconds = 0.0
        self.peak_mib: float | None = None

    def see(self, values: Mapping[str, float], seconds: float) -> None:
        """Take a log step's values into account. Host sync: none.

        Args:
            values: By metric key, rates summed over ranks.
            seconds: What the rates are about.
        """
        rate = values["amp/samples_per_s"]
        if seconds > 0.0 and math.isfinite(rate):
            self._samples += rate * seconds
            self._seconds += seconds
        mib = values.get("amp/peak_allocated_mib", values.get("amp/process_rss_mib", 0.0))
        if mib > max(self._before, self.peak_mib or 0.0):
            self.peak_mib = mib

    @property
    def samples_per_s(self) -> float | None:
        """Samples over seconds of all log intervals together; `None` where nothing is known."""
        return self._samples / self._seconds if self._samples else None


def samples_in(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor found in a batch; 1 if none."""
    first = batch[0] if type(batch) is list and batch else batch  # what most loaders make
    if not isinstance(first, Tensor) or not first.ndim:
        first = next(_tensors(batch), None)
    return first.shape[0] if first is not None else 1


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch that have a first dimension, in their order."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
        return
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif is_dataclass(batch) and not isinstance(batch, type):
        batch = vars(batch).values()
    elif not isinstance(batch, (list, tuple)):
        return
    for part in batch:
        yield from _tensors(part)


def memory(device: torch.device) -> dict[str, float]:
    """Return memory in MiB by metric key: the allocator's peaks on CUDA, else the process's RSS.

    Host sync: none.
    """
    if device.type == "cuda":
        return {
            "amp/peak_allocated_mib": torch.cuda.max_memory_allocated(device) / _MIB,
            "amp/peak_reserved_mib": torch.cuda.max_memory_reserved(device) / _MIB,
        }
    return {"amp/process_rss_mib": _rss()} if device.type == "cpu" else {}


def lifetime_peaks(device: torch.device) -> dict[str, float]:
    """Return of `memory` what never falls, so that something before a fit may have made it.

    Host sync: none.
    """
    return memory(device) if device.type == "cuda" else {}


def _rss() -> float:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    if sys.platform == "win32":
        return math.nan
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (_MIB if sys.platform == "darwin" else 1024.0)
