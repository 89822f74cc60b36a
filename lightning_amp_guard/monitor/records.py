# SPDX-License-Identifier: Apache-2.0
"""What the monitor knows of a run: one row per attempt, statistics at log steps, facts of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "WINDOW",
    "Baseline",
    "GradientStats",
    "Row",
    "RunFacts",
    "RunView",
    "ScheduleLead",
]


@dataclass(frozen=True)
class GradientStats:
    """Describes the gradients of one attempt as they lie in float16's range; made at log steps.

    Args:
        zero: Elements that are zero in float16 once multiplied by the scale.
        subnormal: Elements that are not zero but below 2**-14 once multiplied by the scale.
        normal: Elements that float16 holds at full precision.
        overflow: Elements that are inf or NaN, or become so in float16.
        largest: Largest |gradient|, true value (unscaled); inf or NaN if there is one.
        exponents: Elements by the exponent e of their true value, 2**e <= |g| < 2**(e+1); zeros and
            non-finite ones are in no bin.
        kept: Norm at the moment of unscaling over the norm that the backward pass made, both true
            values: 1 if nobody touched the gradients in between; `None` where it is not known.
        per_layer: L2 norm of the true gradients by top-level parameter name; may be empty.
    """

    zero: int
    subnormal: int
    normal: int
    overflow: int
    largest: float
    exponents: Mapping[int, int] = field(default_factory=dict)
    kept: float | None = None
    per_layer: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Gradient elements looked at."""
        return self.zero + self.subnormal + self.normal + self.overflow


@dataclass(frozen=True)
class Row:
    """Records one attempt; the lines of a ledger. NaN and inf are kept as floats here.

    Args:
        attempt: 0-based count of the optimizer's attempts.
        epoch: 0-based epoch.
        batch_idx: Batch of the window's last micro-batch, within the epoch.
        optimizer: Position in `trainer.optimizers`.
        applied: Whether the update was applied.
        reason: Name of the `SkipReason`, or `None` when applied.
        scale: The scale that the gradients carried (1.0 without a scaler).
        next_scale: The scale after what the attempt caused.
        lr: Learning rate of the first parameter group at the attempt.
        loss: Mean over the window of the loss as the user returned it; `None` where not looked at.
        grad_norm: True total L2 norm before clipping; `None` where not looked at.
        micro_batches: Backward passes in the window.
        batch_id: Content hash of the last micro-batch, 16 hexadecimal digits; or `None`.
        param_checksum: Content hash of the parameters after the attempt; or `None`.
        stats: The gradients' statistics, at log steps.
    """

    attempt: int
    epoch: int
    batch_idx: int
    optimizer: int
    applied: bool
    reason: str | None
    scale: float
    next_scale: float
    lr: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    micro_batches: int = 1
    batch_id: str | None = None
    param_checksum: str | None = None
    stats: GradientStats | None = None


@dataclass(frozen=True)
class RunFacts:
    """Says under what a run went on, and how fast and large it was; kept beside a ledger.

    Args:
        plugin: Class name of the precision plugin.
        precision: "16-mixed", "bf16-mixed", "32-true" or another of Lightning's names.
        device: Device type.
        scaling: Whether losses are scaled.
        growth_interval: Applied updates before the scale grows; `None` where it never moves.
        world_size: Number of processes.
        samples_per_s: Throughput after two warm-up steps, from there to the last log step; `None`
            where unknown.
        peak_mib: Peak memory in MiB (allocated on the device; the process's RSS on the CPU); `None`
            where unknown, as where the process had a higher peak before the fit.
        versions: Versions of torch, lightning and this package.
    """

    plugin: str
    precision: str
    device: str
    scaling: bool
    growth_interval: int | None = None
    world_size: int = 1
    samples_per_s: float | None = None
    peak_mib: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleLead:
    """Says how far a schedule has advanced beside the updates of its optimizer, in this fit.

    Args:
        name: The scheduler's class name.
        optimizer: Position of its optimizer.
        advanced: Turns that it has advanced.
        due: Turns that it should have: those with an applied update since the turn before.
        skipped: Skips of its optimizer in this fit.
    """

    name: str
    optimizer: int
    advanced: int
    due: int
    skipped: int = 0


@dataclass(frozen=True)
class Baseline:
    """Another run of the same model to compare with, read from its ledger.

    Args:
        rows: Its rows, oldest first.
        facts: Its facts, where its file of them is there.
    """

    rows: Sequence[Row]
    facts: RunFacts | None = None


@dataclass(frozen=True)
class RunView:
    """Shows the rules what is known at one moment; everything they look at is in here.

    Args:
        facts: Under what the run goes on.
        rows: The newest rows of all optimizers, oldest first (at most `WINDOW`). Without a ledger
            loss, norm and checksum are known at log steps only.
        schedules: Schedules with `interval="step"`.
        culprit: What is known of the module that made the first non-finite value of the latest
            trouble, as a sentence or part of one, e.g. "`net.culprit` (Linear) in the forward pass";
            `None` if unknown.
        culprit_path: The same as a name for `fp32_modules`, e.g. "net.culprit"; `None` where float32
            would not help, as for weights that hold NaN.
        culprit_help: Likely cause and change of the same, where float32 would not help; or `None`.
        fp32_modules: What runs in float32 already, by the plugin's argument.
        custom_op: Name of the `autograd.Function` or custom operator at fault, if it was one.
        bad_batch: `str()` of `scan_batch`'s report on the latest batch that was not finite and whose
            loss was not either; empty if there was none.
        resumed_without_scaler: What the checkpoint lacked, as a clause; empty if nothing.
        half_parameters: Names of trainable parameters that are not float32.
        half_reduction: What reduces gradients in half precision between ranks; empty if nothing.
        rank_checksums: Parameter checksums of all ranks at the last log step, where all hold all.
        baseline: The run to compare with.
        updates_at_scale: Applied updates in a row, of all optimizers, at the present scale.
        weight_bytes: Bytes of the parameters.
        state_bytes: Bytes of optimizer state and gradients.
        bad_attempts: Optimizer and attempt of each loss with such a batch, oldest first; empty where
            not known one by one.
    """

    facts: RunFacts
    rows: Sequence[Row] = ()
    schedules: Sequence[ScheduleLead] = ()
    culprit: str | None = None
    culprit_path: str | None = None
    culprit_help: tuple[str, str] | None = None
    fp32_modules: Sequence[str] = ()
    custom_op: str | None = None
    bad_batch: str = ""
    resumed_without_scaler: str = ""
    half_parameters: Sequence[str] = ()
    half_reduction: str = ""
    rank_checksums: Sequence[str] = ()
    baseline: Baseline | None = None
    updates_at_scale: int = 0
    weight_bytes: int = 0
    state_bytes: int = 0
    bad_attempts: Collection[tuple[int, int]] = ()


WINDOW = 256
