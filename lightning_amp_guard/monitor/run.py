# SPDX-License-Identifier: Apache-2.0
"""One monitored fit: everything that is gathered between its first and its last batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.gradient_looks import GradientLooks
from lightning_amp_guard.monitor.ledger.content import content_hash, hexadecimal
from lightning_amp_guard.monitor.ledger.fit_ledger import FitLedger
from lightning_amp_guard.monitor.ledger.journal import Journal, Losses
from lightning_amp_guard.monitor.log_step import LogStep
from lightning_amp_guard.monitor.metrics import FitMetrics
from lightning_amp_guard.monitor.passes import BackwardPasses
from lightning_amp_guard.monitor.records import Baseline
from lightning_amp_guard.monitor.source import Source
from lightning_amp_guard.monitor.suspicion import Suspicion
from lightning_amp_guard.monitor.throughput import Throughput, samples_in
from lightning_amp_guard.outcome import StepOutcome
from lightning_amp_guard.step.ranks import total

__all__ = ["MonitoredRun"]


class MonitoredRun:
    """Puts together who listens to a fit, and leads batches and attempts past them.

    `source` knows counts and scale, `journal` keeps the attempts and `ledger` their file, `passes`
    the losses, `looks` the gradients, `log_step` what is shown, `suspicion` what made inf or NaN.

    Args:
        trainer: The Trainer, about to train.
        module: Its LightningModule.
        hear: Receives each outcome after it was taken down; only used under a foreign plugin.
        looks: Whether losses, batches and parameters are looked at for a ledger.
        every: Attempts from one parameter checksum to the next.
        baseline: Another run to compare with.
        saved: What `state` returned before the resume.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        hear: Callable[[StepOutcome], None],
        *,
        looks: bool,
        every: int,
        baseline: Baseline | None,
        saved: Mapping[str, Any],
    ) -> None:
        self.trainer, self.module, self.baseline = trainer, module, baseline
        self.source = source = Source(trainer)
        keeps = looks and trainer.global_rank == 0
        self.journal = journal = Journal([], list(module.parameters()), keeps, every)
        journal.follow(trainer.optimizers)
        journal.losses = Losses(saved.get("losses", ()))
        self.ledger = FitLedger(journal)
        detailed = looks or baseline is not None
        self.looks = GradientLooks(trainer, module, source, journal, always=looks, layers=detailed)
        source.listen(hear, self.looks, self.looks.witness, saved.get("tallies", ()))
        self.metrics = FitMetrics(source.tallies)
        self.speed = Throughput()
        self.log_step = LogStep(trainer, source, self.metrics, self.looks, journal, self.speed)
        self.half_parameters = view.half_parameters(module)
        self.schedules = view.positions(trainer)
        self.rank_checksums: Sequence[str] = ()
        self.updates_at_scale = 0
        locator = next((g for g in source.guards if g.name == "NonFiniteLocator"), None)
        self.suspicion = Suspicion(module, locator, trainer.precision)
        self.passes = BackwardPasses(trainer, module, source, journal, self.looks, self.suspicion)
        self.batch: Any = None

    def close(self) -> None:
        """Listen no more."""
        self.suspicion.close()
        self.batch = None
        self.source.close()
        self.ledger.close()

    def state(self) -> dict[str, Any]:
        """Return what a resumed monitor needs, as plain values.

        Host sync: one per attempt of a log step that is not over, for a ledger.
        """
        if self.journal.holds_lines:
            # saved by somebody who came before this log step's end: its lines are to be counted
            self.journal.complete({key: look.read() for key, look in self.looks.taken.items()})
        state = self.source.state()
        if self.journal.looks:
            state["losses"] = self.journal.losses.state()
        return {**state, **self.ledger.state()}

    # ------------------------------------------------------------------ a batch

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Begin a batch. Host sync: none."""
        self.metrics.norm = None
        self.batch = batch
        if self.suspicion.armed:
            self.suspicion.see_batch(batch)
        self.journal.batch(self.trainer.current_epoch, batch_idx, batch)
        self.speed.batch(samples_in(batch))

    def end_batch(self) -> None:
        """End a batch. Host sync: one in the warm-up, with a `TokenClock`."""
        self.batch = None
        if self.speed.warming_up:
            # at a batch's end the clock has counted it, wherever it stands among the callbacks
            self.log_step.count_tokens()

    def hear(self, outcome: StepOutcome) -> None:
        """Take an outcome into account. Host sync: with a ledger, one."""
        native = self.source.native
        self.metrics.see(outcome, scaled=native is None or native.switched is None)
        if self.looks.always:
            self.journal.follow(self.trainer.optimizers)
        self.journal.hear(outcome, hold=self.looks.at_log_step)
        if outcome.applied and outcome.scale == outcome.next_scale:
            self.updates_at_scale += 1
        else:
            self.updates_at_scale = 0
        if not outcome.applied or self.suspicion.armed or self.looks.always:
            self._suspect(outcome)

    def _suspect(self, outcome: StepOutcome) -> None:
        """Look for what made inf or NaN, where the plugin has nobody who does."""
        newest = self.journal.newest if self.journal.looks else None
        late = self.source.native is not None and self.source.native.telling_late
        batch = None if late else self.batch
        self.suspicion.hear(outcome, None if newest is None else newest.loss, batch)

    def note_last(self, outputs: Any, batch: Any) -> None:
        """Look at loss and parameters of a log step's attempt where no ledger does it.

        Host sync: two; one more, and a collective, where several ranks hold all parameters.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        checksum = content_hash(self.journal.parameters)
        if checksum is None:
            return
        several = self.trainer.world_size > 1 and view.ranks_hold_all(self.trainer)
        own = int(checksum)
        if several:
            # a sum with zeros gathers; Lightning's own gathering warns under newer torch
            counts = [0] * self.trainer.world_size
            counts[self.trainer.global_rank] = own
            counts = total(counts, self.trainer.strategy.root_device)
            self.rank_checksums = [hexadecimal(value) for value in counts]
        whole = None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            whole = float(loss) * self.passes.divisor()
        self.journal.add_to_last(loss=whole, param_checksum=hexadecimal(own))
        newest = self.journal.newest
        if newest is not None and not self.journal.looks:
            self.suspicion.note(
                newest.optimizer, newest.attempt, whole, batch, applied=newest.applied
            )
