# SPDX-License-Identifier: Apache-2.0
"""One monitored fit: everything that is gathered between its first and its last batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.diagnosis.watch import Culprit
from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.audit import Audit
from lightning_amp_guard.monitor.ledger.content import content_hash, hexadecimal
from lightning_amp_guard.monitor.ledger.journal import Journal, Losses
from lightning_amp_guard.monitor.metrics import FitMetrics, SkipWatch, expected_share, tallies_since
from lightning_amp_guard.monitor.records import Baseline, RunView
from lightning_amp_guard.monitor.statistics import Aggregates, GradientLook, local_norm, wide
from lightning_amp_guard.monitor.suspicion import Suspicion
from lightning_amp_guard.monitor.throughput import (
    FitTotals,
    Throughput,
    lifetime_peaks,
    memory,
    samples_in,
)
from lightning_amp_guard.outcome import StepOutcome, StepTally
from lightning_amp_guard.plugin.plugin import AmpPlugin
from lightning_amp_guard.step.lanes import Lane
from lightning_amp_guard.step.ranks import total
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["MonitoredRun"]


class MonitoredRun:
    """Listens to a fit, natively or by an audit, and answers what the log step and the rules ask.

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
        self.trainer, self.module, self.baseline, self.saved = trainer, module, baseline, saved
        plugin = trainer.precision_plugin
        self.native = plugin if isinstance(plugin, AmpPlugin) else None
        self.at_log_step, self.looks_always = False, looks
        self.looks_taken: dict[tuple[int, int], GradientLook] = {}
        self._made: dict[int, Tensor] = {}
        self._loss: Tensor | None = None
        self._detailed = looks or baseline is not None
        self.audit: Audit | None = None
        if self.native is None:
            counted = [StepTally(**tally) for tally in saved.get("tallies", ())]
            self.audit = Audit(trainer, hear, self._witness, self.wants_norm, counted)
            self.scaler = self.audit.scaler
        else:
            self.scaler = self.native.scaler
            self.native.running().witnesses.append(self)
        parameters = list(module.parameters())
        self._known_optimizers = trainer.optimizers
        owners = [_upstream.unwrap_optimizer(o) for o in trainer.optimizers]
        self.journal = Journal(owners, parameters, looks and trainer.global_rank == 0, every)
        self.journal.losses = Losses(saved.get("losses", ()))
        self.metrics = FitMetrics(self.tallies)
        self.speed = Throughput()
        self.aggregates = Aggregates(device := trainer.strategy.root_device)
        self.totals = FitTotals(self.aggregates.largest_of_ranks(lifetime_peaks(device)))
        self.facts = view.run_facts(trainer, self.scaler)
        self.facts_lost = False
        self._half = view.half_parameters(module)
        self.schedules = view.positions(trainer)
        self._layers = {id(p): name.rpartition(".")[0] for name, p in module.named_parameters()}
        self.rank_checksums: Sequence[str] = ()
        self._updates_at_scale = 0
        self.suspicion = Suspicion(module, self._locator(), trainer.precision)
        self.batch: Any = None

    # ------------------------------------------------------------------ what the run says

    @property
    def settings(self) -> ScaleSettings | None:
        """How the scale moves, where this package moves it."""
        return getattr(getattr(self.scaler, "policy", None), "settings", None)

    @property
    def tallies(self) -> list[StepTally]:
        """The counts per optimizer, over the whole run."""
        source = self.native if self.native is not None else self.audit
        return [] if source is None else list(source.tallies)

    @property
    def scale(self) -> float:
        """The scale in force; 1.0 without one. Host sync: one under a foreign scaler."""
        if self.audit is not None:
            return self.audit.scale
        scaler = None if self.native is None else self.native.scaler  # `on_limit` may end scaling
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def switched(self) -> str | None:
        """The precision that the run has gone over to by `on_limit`."""
        return None if self.native is None else self.native.switched

    @property
    def expected_share(self) -> float:
        """The share of attempts that growth makes a settled run skip."""
        if self.settings is None and self.scaler is not None:
            return 1.0 / (self.scaler.get_growth_interval() + 1)
        return expected_share(self.settings)

    @property
    def backoff_factor(self) -> float:
        """What an overflow multiplies the scale by; 0.5 without one."""
        return 0.5 if self.scaler is None else float(self.scaler.get_backoff_factor())

    def close(self) -> None:
        """Listen no more."""
        self.suspicion.close()
        self.batch = None
        if self.audit is not None:
            self.audit.close()
        elif self.native is not None and self.native.engine is not None:
            witnesses = self.native.engine.witnesses
            if self in witnesses:
                witnesses.remove(self)
        if self.journal.writer is not None:
            self.journal.complete()
            self.journal.writer.close()

    def state(self) -> dict[str, Any]:
        """Return what a resumed monitor needs, as plain values.

        Host sync: one per attempt of a log step that is not over, for a ledger.
        """
        if self.journal.holds_lines:
            # saved by somebody who came before this log step's end: its lines are to be counted
            self.journal.complete({key: look.read() for key, look in self.looks_taken.items()})
        state: dict[str, Any] = {"scale": self.scale}
        if self.audit is not None:
            state["tallies"] = [vars(tally).copy() for tally in self.tallies]
        if self.journal.looks:
            state["losses"] = self.journal.losses.state()
        if (writer := self.journal.writer) is not None:
            state["ledger"] = [str(writer.path), writer.lines, writer.digest]
            if writer.ended:
                state["ledger_ended"] = True
        return state

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
        if self.speed.warming_up and (clock := _token_clock(self.trainer)) is not None:
            # at a batch's end the clock has counted it, wherever it stands among the callbacks
            self.speed.tokens(int(clock.seen))

    def before_backward(self, loss: Tensor) -> None:
        """Take down the loss of a backward pass. Host sync: none."""
        self.suspicion.see_loss(loss)
        if self.audit is not None:
            self.audit.before_backward(loss)
            if self.journal.looks:
                self._loss = self._as_returned(loss) / self.audit.known_scale.value

    def after_backward(self) -> None:
        """Take down what a backward pass made. Host sync: none."""
        if self.audit is not None:
            reached, loss = self.audit.after_backward(), self._loss
            optimizers, self._loss = self.audit.optimizers, None
        elif self.native is not None and (self.journal.looks or self.at_log_step):
            windows = self.native.running().windows
            reached, loss = _reached(windows), windows.loss
            optimizers = [lane.optimizer for lane in windows.lanes]
            loss = None if loss is None or not self.journal.looks else self._as_returned(loss)
        else:
            return
        if loss is not None:
            for idx, first in reached:
                self.journal.losses.add(idx, loss, first=first)
        if self.at_log_step and self._may_be_touched():
            for idx, _ in reached:
                self._note_made(idx, optimizers[idx])

    def _note_made(self, idx: int, optimizer: Any) -> None:
        params = _upstream.all_params(optimizer.param_groups)
        grads = [p.grad for p in params if p.grad is not None]
        self._made.pop(idx, None)
        if grads:
            # the plugin makes held gradients follow a scale that others move; stock leaves them
            carried = 1.0 if self.native is None else self.scale
            self._made[idx] = local_norm(grads) / carried

    def _as_returned(self, loss: Tensor) -> Tensor:
        return loss.detach().to(wide(loss.device)) * self._divisor()

    def _divisor(self) -> int:
        # Lightning has divided the loss by it
        return self.trainer.accumulate_grad_batches if self.module.automatic_optimization else 1

    def _may_be_touched(self) -> bool:
        if self.scaler is None:
            return False
        guards = () if self.native is None else self.native.guards
        return not any(guard.name == "UnscaleGuard" for guard in guards)

    def looks(self) -> bool:
        """Return whether gradients are looked at: at log steps. Host sync: none."""
        return self.at_log_step

    def wants_norm(self) -> bool:
        """Return whether the gradient norm is wanted: at log steps, and for a ledger always."""
        return self.at_log_step or self.looks_always

    def show(self, lane: Lane) -> None:
        """Take down what the true gradients of `lane` look like. Host sync: none."""
        self._take_look(lane.idx, lane.gradients(), lane.scale, 1.0)

    def _witness(self, idx: int, grads: list[Tensor], scale: float, carried: float) -> None:
        if self.at_log_step:
            self._take_look(idx, grads, scale, carried)

    def _take_look(self, idx: int, grads: list[Tensor], scale: float, carried: float) -> None:
        layers: list[str] = []
        self._follow()
        if self._detailed:
            owner = self.journal.optimizers[idx]
            held = [p for p in _upstream.all_params(owner.param_groups) if p.grad is not None]
            layers = [self._layers.get(id(p), "") for p in held]
        source: Any = self.audit if self.native is None else self.native.running()
        attempt = source.tallies[idx].attempted
        # one that evaluates its closure several times is looked at each time: the last look counts
        made = self._made.get(idx)
        if made is not None and self.native is not None:
            made = made * scale
        look = GradientLook(grads, scale, carried, made, layers)
        self.looks_taken[idx, attempt] = look

    def _follow(self) -> None:
        """Take over the Trainer's optimizers of now, where a callback replaced them in the fit."""
        if self.trainer.optimizers is not self._known_optimizers:
            self._known_optimizers = self.trainer.optimizers
            owners = [_upstream.unwrap_optimizer(o) for o in self._known_optimizers]
            self.journal.optimizers = owners

    def hear(self, outcome: StepOutcome) -> None:
        """Take an outcome into account. Host sync: with a ledger, one."""
        self.metrics.see(outcome, scaled=self.native is None or self.native.switched is None)
        if self.looks_always:
            self._follow()
        self.journal.hear(outcome, hold=self.at_log_step)
        if outcome.applied and outcome.scale == outcome.next_scale:
            self._updates_at_scale += 1
        else:
            self._updates_at_scale = 0
        if not outcome.applied or self.suspicion.armed or self.looks_always:
            self._suspect(outcome)

    def _suspect(self, outcome: StepOutcome) -> None:
        """Look for what made inf or NaN, where the plugin has nobody who does."""
        newest = self.journal.newest if self.journal.looks else None
        late = self.native is not None and self.native.telling_late
        batch = None if late else self.batch
        self.suspicion.hear(outcome, None if newest is None else newest.loss, batch)

    # ------------------------------------------------------------------ a log step

    def read(self) -> dict[str, float]:
        """Return the values to log, and take the statistics down.

        Host sync: one for all statistics, after the device is done; under a foreign scaler one more.
        """
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock = _token_clock(self.trainer)
        if clock is not None:
            self.speed.tokens(int(clock.seen))
        looks, self.looks_taken, self._made = self.looks_taken, {}, {}
        rates, peaks = self.speed.rates(), memory(device)
        values, stats = self.aggregates.read(rates, peaks, list(looks.values()))
        if clock is None:
            del values["amp/tokens_per_s"]
        self.journal.complete(dict(zip(looks, stats, strict=True)))
        self.totals.see(values, self.speed.seconds)
        rate, peak = self.totals.samples_per_s, self.totals.peak_mib
        self.facts = replace(self.facts, samples_per_s=rate, peak_mib=peak)
        return {**self.metrics.values(StepTally.total(self.tallies), self.scale), **values}

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
            whole = float(loss) * self._divisor()
        self.journal.add_to_last(loss=whole, param_checksum=hexadecimal(own))
        newest = self.journal.newest
        if newest is not None and not self.journal.looks:
            self.suspicion.note(
                newest.optimizer, newest.attempt, whole, batch, applied=newest.applied
            )

    def look(self, lost_scaler: str = "") -> RunView:
        """Return what the rules get to see. Host sync: none.

        Args:
            lost_scaler: What the checkpoint lacked for the scaler.
        """
        fits = tallies_since(self.tallies, self.metrics.before)
        leads = view.schedule_leads(self.trainer, self.schedules, fits)
        culprit = self.suspicion.culprit
        weights = state = 0
        if self.baseline is not None:
            weights = view.parameter_bytes(self.journal.parameters)
            state = view.state_bytes(self.journal.optimizers, self.journal.parameters)
        return RunView(
            self.facts,
            self.journal.rows(),
            leads if self.module.automatic_optimization else (),
            culprit=None if culprit is None else str(culprit),
            culprit_path=None if culprit is None else culprit.path,
            culprit_help=None if culprit is None else self._help(culprit),
            fp32_modules=() if self.native is None else self.native.settings.fp32_modules,
            custom_op=None if culprit is None else _guilty_operator(culprit),
            bad_batch=self.suspicion.bad_batch,
            bad_attempts=self.suspicion.bad_attempts,
            resumed_without_scaler=lost_scaler,
            half_parameters=self._half,
            half_reduction=view.half_reduction(self.trainer),  # hooks may be registered late
            rank_checksums=self.rank_checksums,
            baseline=self.baseline,
            updates_at_scale=self._updates_at_scale,
            weight_bytes=weights,
            state_bytes=state,
        )

    def _help(self, culprit: Culprit) -> tuple[str, str] | None:
        """Return cause and change where float32 for the module would not help."""
        if culprit.path is not None or not (
            culprit.module or culprit.parameters or culprit.buffers
        ):
            return None
        if culprit.parameters and self.native is None and self.scaler is None:
            return None  # nothing held NaN gradients back: the weights are not the beginning
        return culprit.cause, culprit.change.removesuffix(".")

    def _locator(self) -> Any:
        guards = () if self.native is None else self.native.guards
        return next((guard for guard in guards if guard.name == "NonFiniteLocator"), None)

    def watch(self, patience: int | None) -> SkipWatch:
        """Return a watch over this fit's skips."""
        return SkipWatch(patience, self.settings)


def _reached(windows: GradientWindows) -> list[tuple[int, bool]]:
    """Return the optimizers that the last pass has reached, each with whether its window is new."""
    return [
        (lane.idx, max(cell.micro_batches for cell in lane.cells) == 1)
        for lane in windows.lanes
        if any(cell in windows.reached for cell in lane.cells)
    ]


def _guilty_operator(culprit: Culprit) -> str | None:
    """Return the custom operator at fault; that a whole step runs one somewhere proves nothing."""
    own = culprit.custom or ""
    return culprit.custom if culprit.module or (own and own in culprit.operator) else None


def _token_clock(trainer: Any) -> Any:
    clocks = [cb for cb in trainer.callbacks if getattr(cb, "name", "") == "TokenClock"]
    return clocks[0] if clocks else None
