# SPDX-License-Identifier: Apache-2.0
"""Rules about skipped updates, the scale, schedules and ranks."""

from __future__ import annotations

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import Row, RunView
from lightning_amp_guard.monitor.rules.reading import (
    by_optimizer,
    change,
    describe_skips,
    first_nonfinite,
    fraction_text,
    has_bad_loss,
    is_ours,
    owner,
    persistent_losses,
    persistent_skips,
)

__all__ = [
    "overflows_go_on",
    "ranks_differ",
    "scale_never_moves",
    "scaler_state_missing",
    "schedule_ahead",
]

_FLOAT16_MAX = 65504.0
# A scale that works grows after one interval without an overflow (`torch.amp.GradScaler`).
_INTERVALS = 3
# Up here one more doubling or few leave float32, and growth stops by itself.
_LARGEST_GROWING = 2.0**120


def schedule_ahead(view: RunView) -> Finding | None:
    """AMP102: a schedule advanced more often than its optimizer was updated, and there are skips.

    One turn is enough: an update that was skipped is the only thing that parts the two.
    """
    seen = {i: sum(not r.applied for r in rows) for i, rows in by_optimizer(view.rows).items()}
    skips = {s.optimizer: max(s.skipped, seen.get(s.optimizer, 0)) for s in view.schedules}
    ahead = [s for s in view.schedules if s.advanced > s.due and skips.get(s.optimizer, 0)]
    if not ahead:
        return None
    worst = max(ahead, key=lambda s: s.advanced - s.due)
    return Finding(
        "AMP102",
        "the schedule is ahead of the updates",
        f"{worst.name} of optimizer {worst.optimizer} advanced {worst.advanced} times where"
        f" {worst.due} were due, {worst.advanced - worst.due} ahead; {skips[worst.optimizer]} of the"
        " optimizer's attempts seen were skipped",
        "skipped updates advanced it, so the learning rate falls (or warms up) too early",
        "Let the plugin hold it back, `SchedulerGate` included:"
        f" `Trainer(plugins=[{owner(view.facts)}()])`",
    )


def overflows_go_on(view: RunView) -> Finding | None:
    """AMP103: one optimizer's overflows go on beyond calibration and growth of the scale.

    See `persistent_skips` for the thresholds. Where a module is known to make inf or NaN of finite
    values, losses that stay so count as well, see `persistent_losses`. Silent where a custom operator
    is known to be at fault: AMP105 says more.
    """
    if view.custom_op:
        return None
    lanes = by_optimizer(view.rows)
    found = max(
        (persistent_skips(rows, view.facts) for rows in lanes.values()), key=len, default=[]
    )
    if view.culprit is not None:
        found = found or persistent_losses(view)
    if not found:
        return None
    rows = lanes[found[-1].optimizer]
    title, cause, fallback = _why_overflows(view, found[-1])
    remedy = "Run that module in float32: " if view.culprit_path else fallback
    if view.culprit_path or not _harmless(view, found[-1]):
        remedy += change(view)
    if view.culprit_help is not None:
        cause, remedy = view.culprit_help
    evidence = describe_skips(found, rows, view.facts) + first_nonfinite(view)
    return Finding("AMP103", title, evidence, cause, remedy)


def _harmless(view: RunView, last: Row) -> bool:
    """Return whether a bad loss had finite gradients: then no step is skipped, and none can raise."""
    return is_ours(view.facts) and last.applied


def _why_overflows(view: RunView, last: Row) -> tuple[str, str, str]:
    """Return title, cause, and what to do where no module is known."""
    if _harmless(view, last):
        return (
            "non-finite losses go on",
            "an operation is undefined for what it gets (a division by zero, a root or logarithm of 0)"
            " or overflows, in a part of the loss that passes finite gradients on; updates are applied",
            "Find the operation: `locate_nonfinite(module, batch)`",
        )
    if view.facts.scaling and has_bad_loss(last):
        return (
            "overflows go on",
            f"the forward pass leaves float16's range, which ends at {_FLOAT16_MAX:g}, or an operation"
            " in it is undefined for what it gets; no scale can help",
            "Take bfloat16, which has float32's range: ",
        )
    if view.facts.scaling:
        seen = "and the scale itself has fallen to 0"
        if last.scale > 0:
            seen = "even at that scale a gradient, or a value on the way to it, exceeds"
            seen += f" {_FLOAT16_MAX / last.scale:.3g}"
        return (
            "overflows go on",
            f"float16's range is too narrow for this model: {seen}",
            "Take bfloat16, which has float32's range: ",
        )
    return (
        f"non-finite {'losses' if has_bad_loss(last) else 'gradients'} go on",
        "nothing is scaled here, so no scale can help: an operation makes inf or NaN by itself (a"
        " division by zero, a root or logarithm of 0, an overflow)",
        "Stop at the first one, which names the parameters: ",
    )


def scaler_state_missing(view: RunView) -> Finding | None:
    """AMP107: the fit was resumed from a checkpoint that lacked the state of the scaler."""
    if not view.resumed_without_scaler or not view.rows:
        return None
    first, skipped = view.rows[0], sum(not row.applied for row in view.rows)
    return Finding(
        "AMP107",
        "the scaler's state is missing after the resume",
        f"{view.resumed_without_scaler}; the scale is {first.scale:g} at attempt {first.attempt},"
        f" the oldest seen, and {fraction_text(skipped, len(view.rows))} attempts since were skipped",
        "the checkpoint was written under another precision or plugin class, or without"
        " `ScalerCheckpoint`, so scale and growth count started anew and the run parts from the"
        " original",
        "Write and resume checkpoints under one plugin that reads both:"
        f' `Trainer(plugins=[{owner(view.facts)}()]).fit(model, ckpt_path="last")`',
    )


def ranks_differ(view: RunView) -> Finding | None:
    """AMP111: parameters differ between ranks that hold all, or gradients travel as halves."""
    distinct = len(set(view.rank_checksums))
    several = max(view.facts.world_size, len(view.rank_checksums))
    reduced = view.half_reduction if several > 1 else ""
    if distinct < 2 and not reduced:
        return None
    scale = view.rows[-1].scale if view.rows else 1.0
    seen = []
    if distinct > 1:
        odd = [i for i, c in enumerate(view.rank_checksums) if c != view.rank_checksums[0]]
        seen.append(
            f"{distinct} different parameter checksums on {several} ranks; rank"
            f" {', '.join(map(str, odd[:4]))}{' ...' if odd[4:] else ''} parted from rank 0"
        )
    if reduced:
        seen.append(
            f"{reduced} reduces gradients of {several} ranks in half precision, at scale {scale:g}:"
            f" true gradients above {_FLOAT16_MAX / max(scale, 2.0**-126):.3g} leave float16"
        )
    return Finding(
        "AMP111",
        "ranks differ" if distinct > 1 else "gradients are reduced in half precision",
        "; ".join(seen),
        "rounding in half precision depends on the order of the sum, and sums leave its range"
        if reduced
        else "gradients were not reduced alike on every rank (in half precision, or not at all)",
        "Reduce in float32, without a communication hook:"
        ' `Trainer(strategy=DDPStrategy(ddp_comm_hook=None), devices="auto")`',
    )


def scale_never_moves(view: RunView) -> Finding | None:
    """AMP112: under a foreign plugin the scale stood still for three growth intervals of updates.

    Silent under this package's plugins, whose scale may rest at a bound, where the scale is static,
    and where it is so large that growth ends by itself.
    """
    facts, interval = view.facts, view.facts.growth_interval
    if is_ours(facts) or not facts.scaling or interval is None or not view.rows:
        return None
    scale, still = view.rows[-1].scale, view.updates_at_scale
    interval *= len(by_optimizer(view.rows))  # they may share one `update()` per batch
    if still < _INTERVALS * max(interval, 1) or scale > _LARGEST_GROWING:
        return None
    return Finding(
        "AMP112",
        "the scale never moves",
        f"{still} updates in a row were applied at scale {scale:g} without an overflow;"
        f" growth_interval={facts.growth_interval}, so the scale should have grown at least"
        f" {still // max(interval, 1)} times",
        "scaling is not in effect: the scaler's `update()` is never reached, or a static one was put"
        " in its place",
        f"Let the plugin drive the scaler: `Trainer(plugins=[{owner(facts)}()])`",
    )
