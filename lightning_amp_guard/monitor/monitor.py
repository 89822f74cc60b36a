# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor: the callback that shows what mixed precision does to a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import (
    choice_meant,
    flag_meant,
    names_meant,
    refuse,
    whole,
)
from lightning_amp_guard.arguments.misplaced import as_callback
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.ledger.file import read_run, write_facts
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from lightning_amp_guard.monitor.metrics import LOG_KEYS, SkipWatch
from lightning_amp_guard.monitor.records import Baseline
from lightning_amp_guard.monitor.rules.registry import find
from lightning_amp_guard.monitor.run import MonitoredRun
from lightning_amp_guard.monitor.summary import show, summarize
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["AmpMonitor", "AmpMonitorCore"]

LEDGER = "amp_ledger.jsonl"


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
        self.ledger = _checked_path("ledger", ledger, "True, False or a path")
        expected = "a whole number of attempts above 0"
        self.checksum_every = whole("AmpMonitor", "checksum_every", checksum_every, expected, 1)
        self.baseline = None if baseline is None else _checked_path("baseline", baseline, "a path")
        self.prog_bar = _checked_names(prog_bar)
        expected = "a whole number above 0, or None for no warning"
        self.warn_after = (
            None
            if warn_after is None
            else whole("AmpMonitor", "warn_after", warn_after, expected, 8)
        )
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

    # ------------------------------------------------------------------ when

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
        baseline = self._read_baseline()
        self.findings = []
        self._run = MonitoredRun(
            trainer,
            pl_module,
            self._hear,
            looks=self.ledger is not False,
            every=self.checksum_every,
            baseline=baseline,
            # another run with the same monitor begins at nothing
            saved=self._saved if _upstream.batch_number(trainer) else {},
        )
        self._watch = self._run.watch(self.warn_after)
        if self.ledger is not False:
            self._open_ledger(trainer, self._run)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide whether the batch is logged, so that gradients are looked at then and only then."""
        if self._logged:
            self._logged = False
            _upstream.rest_logged(trainer, "on_train_batch_end", LOG_KEYS)
        if self._run is not None:
            self._run.at_log_step = _upstream.is_log_step(trainer)
            self._run.begin_batch(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Take down the loss."""
        if self._run is not None:
            self._run.before_backward(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Take down what the backward pass made, before any hook can touch it."""
        if self._run is not None:
            self._run.after_backward()

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
        if not (run.at_log_step or (trainer.should_stop and _upstream.is_log_step(trainer))):
            return
        if not _closes_window(trainer):
            return
        values = run.read()
        if not run.looks_always or trainer.world_size > 1:
            run.note_last(outputs, batch)
        self._logged = True
        # On the host, in float64: a plain number would be moved to the module's device and be
        # read back for each logger and bar, and the host would wait every time.
        made = {k: torch.tensor(v, dtype=torch.float64, device="cpu") for k, v in values.items()}
        in_bar = self.prog_bar if isinstance(self.prog_bar, tuple) else LOG_KEYS * self.prog_bar
        for bar in (True, False):
            some = {key: value for key, value in made.items() if (key in in_bar) is bar}
            if some:
                pl_module.log_dict(some, prog_bar=bar, batch_size=1)
        self._find(run)
        self._write_facts(run)

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
            self._write_facts(self._run)
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

    # ------------------------------------------------------------------ ledger, baseline, findings

    def _open_ledger(self, trainer: Any, run: MonitoredRun) -> None:
        place: Any = self.ledger
        if self.ledger is True:
            # asked of the Trainer on every rank: it broadcasts
            place = Path(trainer.log_dir or trainer.default_root_dir) / LEDGER
        self.ledger_path = Path(place)
        former = run.saved.get("ledger")
        if trainer.global_rank != 0:
            return
        if former is None:
            run.journal.writer = LedgerWriter(place)
            return
        run.journal.writer, missing = LedgerWriter.resume(place, *former)
        if missing:
            rank_zero_warn(missing, category=AmpGuardWarning)
        if run.saved.get("ledger_ended"):
            rank_zero_warn(
                f"The ledger {str(place)!r} has a gap after line {former[1]}: the former run could"
                " write no more (disk full?), so its attempts from there to the checkpoint are missing."
                " To have them, resume from a checkpoint before the gap.",
                category=AmpGuardWarning,
            )

    def _read_baseline(self) -> Baseline | None:
        if self.baseline is None:
            return None
        try:
            return read_run(self.baseline)
        except OSError as error:
            why = (
                f"{error.strerror or error}: `AmpMonitor(baseline=...)` cannot be read. Expected the"
                " ledger of a 32-true run of the same model. Write one first:"
                ' `Trainer(precision="32-true", callbacks=[AmpMonitor(ledger=PATH)])`'
            )
            raise OSError(error.errno, why, str(self.baseline)) from error

    def _write_facts(self, run: MonitoredRun) -> None:
        writer = run.journal.writer
        if writer is None or writer.ended or run.facts_lost:
            return
        try:
            write_facts(writer.path, run.facts)
        except OSError as error:
            run.facts_lost = True
            why = f"the facts of the run cannot be written: {error}. It goes on without them."
            rank_zero_warn(
                f"Beside the ledger {str(writer.path)!r} {why}", category=AmpGuardWarning
            )

    def _find(self, run: MonitoredRun) -> None:
        seen = run.look(self._lost_scaler)
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

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._saved = self._run.state()
        self._forget_fit()

    def __repr__(self) -> str:
        """Return the line that puts it where it belongs."""
        return as_callback(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        state = {**self.__dict__, "_run": None, "_watch": SkipWatch(None, None), "_logged": False}
        # Lightning hangs the module's own methods on every callback
        return {name: value for name, value in state.items() if name not in ("log", "log_dict")}


def _checked_names(prog_bar: Any) -> bool | tuple[str, ...]:
    """Return the keys for the progress bar in full; `True` for all of them, `False` for none."""
    legal = "True, False, or a list of names such as " + '["scale", "skipped_steps"]'
    if isinstance(prog_bar, bool):
        return prog_bar
    listed = isinstance(prog_bar, Sequence) and not isinstance(prog_bar, str)
    if not listed or not all([isinstance(name, str) for name in prog_bar]):
        write = names_meant(prog_bar) or flag_meant(prog_bar)
        raise TypeError(refuse("AmpMonitor", "prog_bar", prog_bar, legal, write=write))
    keys = tuple(f"amp/{name.removeprefix('amp/')}" for name in prog_bar)
    if strange := [key for key in keys if key not in LOG_KEYS]:
        known = [key.removeprefix("amp/") for key in LOG_KEYS]
        why = f"There is no value {strange[0]!r}; the names are {', '.join(map(repr, known))}."
        near = [choice_meant(key.removeprefix("amp/"), known) for key in keys]
        raise ValueError(refuse("AmpMonitor", "prog_bar", prog_bar, legal, why, near))
    return keys


def _checked_path(name: str, value: Any, expected: str) -> Any:
    if isinstance(value, (str, os.PathLike)) and str(value):
        return Path(value)
    if name == "ledger" and isinstance(value, bool):
        return value
    write = flag_meant(value) if name == "ledger" else "fp32.jsonl"
    raise TypeError(refuse("AmpMonitor", name, value, expected, write=write))


def _closes_window(trainer: Any) -> bool:
    """Return whether the batch ends an accumulation window; loggers take no other batch's values."""
    done = trainer.fit_loop.epoch_loop.batch_progress
    ready = done.current.ready
    last = ready == trainer.num_training_batches or done.is_last_batch
    return bool(last or ready % trainer.accumulate_grad_batches == 0)


class AmpMonitor(AmpMonitorCore, Callback):
    """Shows what mixed precision does to a run, names what is wrong with it, and keeps a ledger.

    A skipped update leaves no trace in the loss curve, so a run that skips every other step looks
    merely slow. At log steps (`Trainer(log_every_n_steps=...)`) the values below go to the loggers
    and the progress bar, and `ModelCheckpoint` and its kind can monitor them. Findings (`AMP101` to
    `AMP113`, see `Finding`) are shown once, as an `AmpGuardWarning`, in the summary at the end, and
    in `findings`. A bar with room for a few is `prog_bar=["scale", "skipped_steps", "grad_norm"]`.
    Nothing in the run is changed. It also audits stock `MixedPrecision`, bfloat16 and
    32-true runs, whose ledgers serve as a baseline.

    | key | value |
    |---|---|
    | `amp/scale` | the scale in force after the batch; 1.0 where nothing is scaled |
    | `amp/skipped` | updates skipped since the last log step (or the fit's start), all optimizers |
    | `amp/applied_steps` | updates applied over the run, before a resume too, all optimizers |
    | `amp/skipped_steps` | updates skipped over the run, before a resume too, all optimizers |
    | `amp/consecutive_skips` | updates skipped in a row up to now, the largest of all optimizers |
    | `amp/skip_rate` | `skipped_steps` divided by all attempts over the run |
    | `amp/grad_norm` | unscaled L2 norm before clipping of the batch's last applied attempt, or nan |
    | `amp/zero_grad_fraction` | share of the batch's scaled gradients that are zero in float16 |
    | `amp/subnormal_grad_fraction` | share of them that are not zero but below 2**-14 |
    | `amp/headroom_bits` | log2(65504 / largest scaled gradient): doublings before an overflow |
    | `amp/samples_per_s` | samples a second since the last log step, after 2 warm-up batches |
    | `amp/tokens_per_s` | with a `TokenClock`: tokens a second since the last log step, all ranks |
    | `amp/peak_allocated_mib` | on CUDA: the allocator's peak of tensors in MiB, largest of all ranks |
    | `amp/peak_reserved_mib` | on CUDA: the allocator's peak of reserved memory in MiB, likewise |
    | `amp/process_rss_mib` | on the CPU: resident memory of the process in MiB, likewise |

    A sample is an element of the first dimension of the batch's first tensor; validation does not
    count as time. Gradient statistics are those of the log step's own batch, before hooks and
    clipping, in the range of float16 whatever the precision; nan where it had no attempt.

    The ledger is strict JSON Lines, a line per attempt of rank 0, written at once: a killed run loses
    the last line at most. A line holds `attempt`, `epoch`, `batch_idx`, `optimizer`, `applied`,
    `reason`, `scale`, `next_scale`, `lr`, `loss` (the mean over the window, as the user returned
    it), `grad_norm`, `micro_batches`, `batch_id` and `param_checksum` (content hashes); inf and NaN
    become null, with `nonfinite` beside; lines of log steps add `stats`. With an accumulation that is
    no power of two, `loss` is right to one rounding of its dtype. A resumed run's file begins
    with the lines up to its checkpoint; a former file there is renamed. `amp-guard report` draws it,
    `amp-guard compare` finds where two runs part.

    Args:
        ledger: `True` writes `amp_ledger.jsonl` in the logger's directory (without one in
            `default_root_dir`); a path writes there.
        checksum_every: Attempts from one `param_checksum` to the next; the lines between have none.
        baseline: The ledger of a 32-true run of the same model, for AMP106, AMP110 and AMP113.
        prog_bar: Which values also appear in the progress bar: `True` for all, `False` for none, or
            their names in the table, with or without `amp/`: `["scale", "skipped_steps"]`. Loggers
            get all of them.
        warn_after: Skips in a row of one optimizer, those that still search for the scale left out,
            after which to warn; a share above 10 % of the last 100 attempts warns too. `None` never
            warns.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: `warn_after` or `checksum_every` is below 1, `prog_bar` names no value that there
            is; `baseline` is no ledger.
        OSError: The ledger cannot be made, or the baseline not be read.

    Runs: on_train_start, on_train_batch_start, on_before_backward, on_after_backward,
        on_step_outcome, on_train_batch_end, on_train_end.
    Reads: the plugin's outcomes, tallies and scale; under a foreign plugin torch's own flags.
    Keeps: where the ledger stands, and the losses of an open window; the counts are in the precision
        plugin's checkpoint entry.
    Host sync: none between log steps (one per step under a foreign scaler with a fused optimizer); at
        a log step one for the gradient statistics and two for loss and parameters. With a ledger
        one per attempt, besides the attempt's own (under a foreign plugin one more, for the norm).
    Costs: 20 Python calls a step beyond an empty callback's 65 (under stock 39 beyond 78), no tensor
        operation. A log step costs 10,800 Python calls, 15 ms of one CPU core, nearly all of it in
        twelve `self.log` calls, plus about 30 ms per million parameters on one CPU core for the
        gradient statistics. The ledger costs 130 calls, 1.2 ms per attempt with a small model;
        `param_checksum` walks over the parameters twice: 0.1 s for 25 million on one core.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> monitor = AmpMonitor(warn_after=16)
        >>> trainer = Trainer(accelerator="cpu", callbacks=[monitor], logger=False)
    """
