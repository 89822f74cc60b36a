# SPDX-License-Identifier: Apache-2.0
"""What the rules get to see of a monitored fit."""

from __future__ import annotations

from lightning_amp_guard.diagnosis.watch import Culprit
from lightning_amp_guard.monitor import view
from lightning_amp_guard.monitor.metrics import tallies_since
from lightning_amp_guard.monitor.records import RunView
from lightning_amp_guard.monitor.run import MonitoredRun
from lightning_amp_guard.monitor.source import Source

__all__ = ["run_view"]


def run_view(run: MonitoredRun, lost_scaler: str = "") -> RunView:
    """Return what the rules get to see. Host sync: none.

    Args:
        run: The fit.
        lost_scaler: What the checkpoint lacked for the scaler.
    """
    source, journal, suspicion = run.source, run.journal, run.suspicion
    fits = tallies_since(source.tallies, run.metrics.before)
    leads = view.schedule_leads(run.trainer, run.schedules, fits)
    culprit = suspicion.culprit
    weights = state = 0
    if run.baseline is not None:
        weights = view.parameter_bytes(journal.parameters)
        state = view.state_bytes(journal.optimizers, journal.parameters)
    return RunView(
        run.log_step.facts,
        journal.rows(),
        leads if run.module.automatic_optimization else (),
        culprit=None if culprit is None else str(culprit),
        culprit_path=None if culprit is None else culprit.path,
        culprit_help=None if culprit is None else _help(culprit, source),
        fp32_modules=() if source.native is None else source.native.settings.fp32_modules,
        custom_op=None if culprit is None else _guilty_operator(culprit),
        bad_batch=suspicion.bad_batch,
        bad_attempts=suspicion.bad_attempts,
        resumed_without_scaler=lost_scaler,
        half_parameters=run.half_parameters,
        half_reduction=view.half_reduction(run.trainer),  # hooks may be registered late
        rank_checksums=run.rank_checksums,
        baseline=run.baseline,
        updates_at_scale=run.updates_at_scale,
        weight_bytes=weights,
        state_bytes=state,
    )


def _help(culprit: Culprit, source: Source) -> tuple[str, str] | None:
    """Return cause and change where float32 for the module would not help."""
    if culprit.path is not None:
        return None
    if culprit.parameters and source.native is None and source.scaler is None:
        return None  # nothing held NaN gradients back: the weights are not the beginning
    return culprit.cause, culprit.change.removesuffix(".")


def _guilty_operator(culprit: Culprit) -> str | None:
    """Return the custom operator at fault; that a whole step runs one somewhere proves nothing."""
    own = culprit.custom or ""
    return culprit.custom if culprit.module or (own and own in culprit.operator) else None
