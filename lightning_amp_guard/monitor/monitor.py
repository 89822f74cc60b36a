# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor: the callback that shows what mixed precision does to a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.monitor.metrics import KEYS, FitMetrics, SkipWatch
from lightning_amp_guard.monitor.summary import show, summarize
from lightning_amp_guard.outcome import StepOutcome
from lightning_amp_guard.plugin import AmpPlugin
from lightning_amp_guard.settings import flag, whole

__all__ = ["AmpMonitor", "AmpMonitorCore"]


class AmpMonitorCore:
    """See `AmpMonitor`; free of the Lightning namespace whose callback it becomes."""

    def __init__(self, *, prog_bar: bool = True, warn_after: int | None = 8) -> None:
        super().__init__()
        self.prog_bar = flag("AmpMonitor", "prog_bar", prog_bar)
        expected = "a whole number above 0, or None for no warning"
        self.warn_after = (
            None if warn_after is None else whole("AmpMonitor", "warn_after", warn_after, expected)
        )
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._metrics: FitMetrics | None = None
        self._watch = SkipWatch(None, None)
        self._asked: list[Callable[[], bool]] | None = None
        self._at_log_step = False
        self._logged = False

    # ------------------------------------------------------------------ when

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the counts that the plugin has by now, those of a checkpoint included."""
        self._close()
        plugin = trainer.precision_plugin
        if not isinstance(plugin, AmpPlugin):
            self._say_what_is_missing(plugin)
            return
        self._metrics = FitMetrics(plugin.tallies)
        settings = None if plugin.scaler is None else plugin.scaler.policy.settings
        self._watch = SkipWatch(self.warn_after, settings)
        self._asked = plugin.running().wants_norm
        self._asked.append(self._wants_norm)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide whether the batch is logged, so that the norm is computed then and only then."""
        if self._metrics is not None:
            self._metrics.norm = None
        if self._logged:
            self._logged = False
            _upstream.rest_logged(trainer, "on_train_batch_end", KEYS)
        self._at_log_step = _upstream.is_log_step(trainer) or bool(trainer.fast_dev_run)

    def _wants_norm(self) -> bool:
        return self._at_log_step

    def on_step_outcome(self, trainer: Any, pl_module: Any, outcome: StepOutcome) -> None:
        """Take an attempt's outcome into account; called by the precision plugin."""
        if self._metrics is None:
            return
        self._metrics.see(outcome)
        if outcome.reason is not None and (message := self._watch.see(outcome)):
            rank_zero_warn(message, category=AmpGuardWarning)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the values if the loggers take this batch's."""
        # a callback or the module may have asked for the end of the fit since the batch began
        at_log_step = self._at_log_step or (trainer.should_stop and _upstream.is_log_step(trainer))
        if at_log_step and _closes_window(trainer):
            values = self._values(trainer.precision_plugin)
            self._logged = bool(values)
            # On the host, in float64: a plain number would be moved to the module's device and be
            # read back for each logger and bar, and the host would wait every time.
            pl_module.log_dict(
                {k: torch.tensor(v, dtype=torch.float64, device="cpu") for k, v in values.items()},
                prog_bar=self.prog_bar,
                batch_size=1,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the summary."""
        plugin, metrics = trainer.precision_plugin, self._metrics
        if isinstance(plugin, AmpPlugin) and metrics is not None:
            show(summarize(trainer, plugin, metrics))
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind."""
        self._close()

    # ------------------------------------------------------------------ what

    def _values(self, plugin: Any) -> dict[str, float]:
        scale = _scale(plugin)
        if self._metrics is not None:
            return self._metrics.values(plugin.tally, 1.0 if scale is None else scale)
        return {} if scale is None else {"amp/scale": scale}

    def _say_what_is_missing(self, plugin: Any) -> None:
        logged = "nothing" if _scale(plugin) is None else "only amp/scale"
        rank_zero_info(
            f"`AmpMonitor`: the precision plugin is `{type(plugin).__name__}`, which does not tell"
            f" what becomes of a step: {logged} is logged. Skips are seen with"
            " `Trainer(plugins=[SafeAMP()])`."
        )

    def _close(self) -> None:
        if self._asked is not None and self._wants_norm in self._asked:
            self._asked.remove(self._wants_norm)
        self._forget_fit()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        gone = {"_metrics": None, "_watch": SkipWatch(None, None), "_asked": None}
        state = {**self.__dict__, **gone, "_at_log_step": False, "_logged": False}
        # Lightning hangs the module's own methods on every callback
        return {name: value for name, value in state.items() if name not in ("log", "log_dict")}


def _scale(plugin: Any) -> float | None:
    scaler = getattr(plugin, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else None


def _closes_window(trainer: Any) -> bool:
    """Return whether the batch ends an accumulation window; loggers take no other batch's values."""
    done = trainer.fit_loop.epoch_loop.batch_progress
    ready = done.current.ready
    last = ready == trainer.num_training_batches or done.is_last_batch
    return bool(last or ready % trainer.accumulate_grad_batches == 0)


class AmpMonitor(AmpMonitorCore, Callback):
    """Shows scale, skips and gradient norm while a run goes on, and sums them up at its end.

    A skipped update leaves no trace in the loss curve, so a run that skips every other step looks
    merely slow. At log steps (`Trainer(log_every_n_steps=...)`) the values below go to the loggers
    and the progress bar, and `ModelCheckpoint` and its kind can monitor them. One `AmpGuardWarning`
    says when skips go on beyond the calibration of the scale. Nothing in the run is changed. Under
    a precision plugin of another make outcomes stay unknown: the scale of a stock scaler is logged,
    and one line says so.

    | key | value |
    |---|---|
    | `amp/scale` | the scale in force after the batch; 1.0 under bfloat16 |
    | `amp/skipped` | updates skipped since the last log step (or the fit's start), all optimizers |
    | `amp/applied_steps` | updates applied over the run, before a resume too, all optimizers |
    | `amp/skipped_steps` | updates skipped over the run, before a resume too, all optimizers |
    | `amp/consecutive_skips` | updates skipped in a row up to now, the largest of all optimizers |
    | `amp/skip_rate` | `skipped_steps` divided by all attempts over the run |
    | `amp/grad_norm` | unscaled L2 norm before clipping of the batch's last applied attempt, or nan |

    Args:
        prog_bar: Whether the values also appear in the progress bar.
        warn_after: Skips in a row of one optimizer, those that still search for the scale left out,
            after which to warn; a share above 10 % of the last 100 attempts warns too. `None` never
            warns.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: `warn_after` is below 1.

    Runs: on_train_start, on_train_batch_start, on_step_outcome, on_train_batch_end, on_train_end.
    Reads: the plugin's outcomes, tallies and scale; under a foreign plugin the scaler's scale.
    Keeps: nothing; the counts are in the precision plugin's checkpoint entry.
    Host sync: none. The gradient norm travels with the read that every attempt makes; under a
        foreign plugin, one at a log step for the scale.
    Costs: 12 Python calls a step beyond an empty callback's 78, no tensor operation. A log step costs
        one walk over the gradients, unless clipping computes the norm anyway, and seven `self.log`
        calls: 5,600 Python calls, 4 ms of one CPU core.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> monitor = AmpMonitor(warn_after=16)
        >>> trainer = Trainer(accelerator="cpu", callbacks=[monitor], logger=False)
    """
