# SPDX-License-Identifier: Apache-2.0
"""What is read at a log step: gradients, speed and memory, in one transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.gradient_looks import GradientLooks
from lightning_amp_guard.monitor.ledger.journal import Journal
from lightning_amp_guard.monitor.metrics import FitMetrics
from lightning_amp_guard.monitor.source import Source
from lightning_amp_guard.monitor.statistics import Aggregates
from lightning_amp_guard.monitor.throughput import FitTotals, Throughput, lifetime_peaks, memory
from lightning_amp_guard.outcome import StepTally

__all__ = ["LogStep"]


class LogStep:
    """Reads what a log step shows, and sums up speed and memory of the fit in its facts.

    Args:
        trainer: The Trainer.
        source: The scale and the counts.
        metrics: What outcomes have told.
        looks: The gradients.
        journal: Whose rows get the gradients' statistics.
        speed: The clock.

    Host sync: two on CUDA, for the peaks from before the fit.
    """

    def __init__(
        self,
        trainer: Any,
        source: Source,
        metrics: FitMetrics,
        looks: GradientLooks,
        journal: Journal,
        speed: Throughput,
    ) -> None:
        self.trainer, self.source, self.metrics = trainer, source, metrics
        self.looks, self.journal, self.speed = looks, journal, speed
        self.aggregates = Aggregates(device := trainer.strategy.root_device)
        self.totals = FitTotals(self.aggregates.largest_of_ranks(lifetime_peaks(device)))
        self.facts = view.run_facts(trainer, source.scaler)

    def count_tokens(self) -> bool:
        """Tell the clock how many tokens have been seen, if a `TokenClock` counts them.

        Host sync: one with a `TokenClock`.
        """
        clocks = [cb for cb in self.trainer.callbacks if getattr(cb, "name", "") == "TokenClock"]
        if clocks:
            self.speed.tokens(int(clocks[0].seen))
        return bool(clocks)

    def read(self) -> dict[str, float]:
        """Return the values to log, and take the statistics down.

        Host sync: one for all statistics, after the device is done; under a foreign scaler one more.
        """
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        counts_tokens = self.count_tokens()
        looks = self.looks.hand_over()
        rates, peaks = self.speed.rates(), memory(device)
        values, stats = self.aggregates.read(rates, peaks, list(looks.values()))
        if not counts_tokens:
            del values["amp/tokens_per_s"]
        self.journal.complete(dict(zip(looks, stats, strict=True)))
        self.totals.see(values, self.speed.seconds)
        rate, peak = self.totals.samples_per_s, self.totals.peak_mib
        self.facts = replace(self.facts, samples_per_s=rate, peak_mib=peak)
        tally = StepTally.total(self.source.tallies)
        return {**self.metrics.values(tally, self.source.scale), **values}
