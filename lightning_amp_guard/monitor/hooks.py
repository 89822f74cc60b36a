# SPDX-License-Identifier: Apache-2.0
"""When the monitor does what: its Lightning hooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.misplaced import as_callback
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.monitor import loggers, view
from lightning_amp_guard.monitor.arguments import (
    checked_baseline,
    checked_every,
    checked_ledger,
    checked_names,
    checked_skips,
)
from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.ledger.fit_ledger import ledger_path, read_baseline
from lightning_amp_guard.monitor.metrics import SkipWatch
from lightning_amp_guard.monitor.rules.registry import find
from lightning_amp_guard.monitor.run import MonitoredRun
from lightning_amp_guard.monitor.run_view import run_view
from lightning_amp_guard.monitor.summary import show, summarize
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["AmpMonitorCore"]


class AmpMonitorCore:
    """See `AmpMonitor`; free of the Lightning namespace whose callback it becomes."""

    @names_its_class
    def __init__(
        self,
        *,
        ledger: bool | str | os.PathLike[str] = False,
        checksum_every: int = 1,
        baseline: str | os.PathLike[str] | None = None,
        prog_bar: bool | Sequence[str] = True,
        warn_after: int | None = 8,
    ) -> None:
        super().__init__()
        self.ledger = checked_ledger(ledger)
        self.checksum_every = checked_every(checksum_every)
        self.baseline = checked_baseline(baseline)
        self.prog_bar = checked_names(prog_bar)
        self.warn_after = checked_skips(warn_after)
        self.findings: list[Finding] = []
        self.ledger_path: Path | None = None
        self._saved: dict[str, Any] = {}
        self._lost_scaler = ""
        self._forget_fit()

    @property
    def takes_late_outcomes(self) -> bool:
        """Whether outcomes may come later: a ledger takes down each attempt as it is made."""
        return self.ledger is False

    def _forget_fit(self) -> None:
        self._run: MonitoredRun | None = None
        self._watch = SkipWatch(None, None)
        self._logged = False

    # ------------------------------------------------------------------ from start to end of a fit

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget what the former fit's checkpoint lacked."""
        self._lost_scaler = ""

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        """Note whether the run's scaler will find its state; `load_state_dict` follows, if at all."""
        if _upstream.is_fitting(trainer):
            key = getattr(self, "state_key", "")
            saved = checkpoint.get("callbacks", {}).get(key, {})
            self._saved = {}
            self._lost_scaler = view.missing_scaler_state(trainer, checkpoint, saved.get("scale"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the counts that there are by now, those of a checkpoint included.

        Raises:
            OSError: `baseline` cannot be read, or the ledger not be made.
            LedgerError: `baseline` is no ledger.
        """
        self._close()
        baseline = None if self.baseline is None else read_baseline(self.baseline)
        self.findings = []
        # another run with the same monitor begins at nothing
        saved = self._saved if _upstream.batch_number(trainer) else {}
        self._run = MonitoredRun(
            trainer,
            pl_module,
            self._hear,
            looks=self.ledger is not False,
            every=self.checksum_every,
            baseline=baseline,
            saved=saved,
        )
        self._watch = SkipWatch(self.warn_after, self._run.source.settings)
        if self.ledger is not False:
            self.ledger_path = ledger_path(self.ledger, trainer)
            if trainer.global_rank == 0:
                self._run.ledger.open(self.ledger_path, saved)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock of the throughput."""
        if self._run is not None:
            self._run.speed.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the clock of the throughput run again."""
        if self._run is not None:
            self._run.speed.go_on()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the summary."""
        if self._run is not None:
            self._find(self._run)
            self._run.ledger.write_facts(self._run.log_step.facts)
            show(summarize(trainer, self._run, self.findings))
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report what has been found, and leave nothing behind."""
        try:
            if self._run is not None:
                self._find(self._run)
        finally:
            self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind."""
        self._close()

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._saved = self._run.state()
        self._forget_fit()

    # ------------------------------------------------------------------ a batch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide whether the batch is logged, so that gradients are looked at then and only then."""
        if self._logged:
            self._logged = False
            loggers.forget(trainer)
        if self._run is not None:
            self._run.looks.at_log_step = _upstream.is_log_step(trainer)
            self._run.begin_batch(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Take down the loss."""
        if self._run is not None:
            self._run.passes.before(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Take down what the backward pass made, before any hook can touch it."""
        if self._run is not None:
            self._run.passes.after()

    def on_step_outcome(self, trainer: Any, pl_module: Any, outcome: StepOutcome) -> None:
        """Take an attempt's outcome into account; called by the precision plugin."""
        if self._run is not None:
            self._hear(outcome)

    def _hear(self, outcome: StepOutcome) -> None:
        assert self._run is not None
        self._run.hear(outcome)
        if outcome.reason is not None and (message := self._watch.see(outcome)):
            rank_zero_warn(message, category=AmpGuardWarning)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the values if the loggers take this batch's, and look for findings."""
        run = self._run
        if run is None:
            return
        run.end_batch()
        # a callback or the module may have asked for the end of the fit since the batch began
        due = run.looks.at_log_step or (trainer.should_stop and _upstream.is_log_step(trainer))
        if not (due and loggers.closes_window(trainer)):
            return
        values = run.log_step.read()
        if not run.looks.always or trainer.world_size > 1:
            run.note_last(outputs, batch)
        self._logged = True
        loggers.emit(pl_module, values, self.prog_bar)
        self._find(run)
        run.ledger.write_facts(run.log_step.facts)

    def _find(self, run: MonitoredRun) -> None:
        seen = run_view(run, self._lost_scaler)
        for finding in find(seen, {known.code for known in self.findings}):
            self.findings.append(finding)
            rank_zero_warn(str(finding), category=AmpGuardWarning)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return where the ledger stands and which losses its open window holds."""
        return self._saved if self._run is None else self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember where the former run's ledger stood at the checkpoint."""
        self._saved = dict(state_dict)

    def __repr__(self) -> str:
        """Return the line that puts it where it belongs."""
        return as_callback(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        state = {**self.__dict__, "_run": None, "_watch": SkipWatch(None, None), "_logged": False}
        # Lightning hangs the module's own methods on every callback
        return {name: value for name, value in state.items() if name not in ("log", "log_dict")}
