# SPDX-License-Identifier: Apache-2.0
"""What the rules get to see, gathered from Trainer, plugin and module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.monitor.records import RunFacts, ScheduleLead
from lightning_amp_guard.outcome import StepTally
from lightning_amp_guard.plugin.plugin import AmpPlugin

__all__ = [
    "half_parameters",
    "half_reduction",
    "missing_scaler_state",
    "parameter_bytes",
    "positions",
    "ranks_hold_all",
    "run_facts",
    "schedule_leads",
    "state_bytes",
]

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "lightning-amp-guard")


def run_facts(trainer: Any, scaler: torch.amp.GradScaler | None) -> RunFacts:
    """Return under what the run goes on; speed and memory are known later."""
    plugin = trainer.precision_plugin
    settings = getattr(getattr(scaler, "policy", None), "settings", None)
    moves = scaler is not None and (settings is None or settings.dynamic)
    return RunFacts(
        type(plugin).__name__,
        str(getattr(plugin, "precision", trainer.precision)),
        trainer.strategy.root_device.type,
        scaler is not None,
        scaler.get_growth_interval() if moves and scaler is not None else None,
        trainer.world_size,
        versions=_versions(),
    )


def _versions() -> Mapping[str, str]:
    found = {name: _version(name) for name in _PACKAGES}
    return {name: seen for name, seen in found.items() if seen}


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def half_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of trainable floating point parameters that are narrower than float32."""
    return [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4
    ]


def half_reduction(trainer: Any) -> str:
    """Return what reduces gradients in half precision between ranks, or an empty string."""
    if trainer.world_size == 1:
        return ""
    for name in _upstream.comm_hook_names(trainer.strategy):
        if "fp16" in name or "bf16" in name:
            return f"DDP's communication hook `{name}`"
    config = getattr(trainer.precision_plugin, "mixed_precision_config", None)
    dtype = getattr(config, "reduce_dtype", None)
    half = dtype in (torch.float16, torch.bfloat16)
    return f"FSDP with `reduce_dtype={dtype}`" if half else ""


def ranks_hold_all(trainer: Any) -> bool:
    """Return whether every rank holds all parameters."""
    kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    return not kinds & {"FSDPStrategy", "ModelParallelStrategy"}


def missing_scaler_state(trainer: Any, checkpoint: Mapping[str, Any], was: float | None) -> str:
    """Return what the checkpoint lacks for the run's scaler, as a clause, or an empty string.

    Args:
        trainer: The Trainer that resumes.
        checkpoint: The whole checkpoint.
        was: The scale when it was written, if this monitor was there.
    """
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return ""
    own = type(plugin).__qualname__
    names = (own, "native_amp_scaling_state")
    held = any(checkpoint.get(name) for name in names)
    if isinstance(plugin, AmpPlugin):
        held = _has_scale(plugin.saved_entry(checkpoint))
    if held:
        return ""
    before = "" if was is None else f", where it was {was:g} when the checkpoint was written"
    return f"the checkpoint holds no scaler state for `{own}`{before}"


def _has_scale(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool("scale" in entry or entry.get("scaler"))


def positions(trainer: Any) -> list[int | None]:
    """Return, per schedule, how often it has advanced; `None` where it does not say."""
    return [
        at if isinstance(at := getattr(config.scheduler, "last_epoch", None), int) else None
        for config in trainer.lr_scheduler_configs
    ]


def schedule_leads(
    trainer: Any, start: Sequence[int | None], fits: Sequence[StepTally]
) -> list[ScheduleLead]:
    """Return how far step-interval schedules advanced beside their optimizers' updates.

    Args:
        trainer: The Trainer, in automatic optimization.
        start: `positions` when the fit began.
        fits: Attempts per optimizer in this fit.
    """
    owners = [_upstream.unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
    leads = []
    for config, before, now in zip(
        trainer.lr_scheduler_configs, start, positions(trainer), strict=False
    ):
        owner = _upstream.unwrap_optimizer(getattr(config.scheduler, "optimizer", None))
        known = [i for i, o in enumerate(owners) if o is owner]
        if config.interval != "step" or before is None or now is None or not known:
            continue
        fit = fits[known[0]] if known[0] < len(fits) else StepTally()
        applied = fit.applied
        # a turn every `frequency` batches; it may fall on the first of them
        due = applied if config.frequency == 1 else applied // config.frequency + 1
        name = type(config.scheduler).__name__
        leads.append(ScheduleLead(name, known[0], now - before, due, fit.skipped))
    return leads


def parameter_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of the parameters."""
    return sum(p.numel() * p.element_size() for p in _upstream.as_plain(parameters))


def state_bytes(optimizers: Sequence[Any], parameters: Sequence[Tensor]) -> int:
    """Return the bytes of optimizer state, and of a gradient for each trainable parameter."""
    state = [v for o in optimizers for s in o.state.values() for v in s.values()]
    held = [v for v in state if isinstance(v, Tensor)]
    return parameter_bytes(held) + parameter_bytes([p for p in parameters if p.requires_grad])
