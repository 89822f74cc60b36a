# SPDX-License-Identifier: Apache-2.0
"""Rules about runs that go on and get nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import WINDOW, GradientStats, Row, RunView
from lightning_amp_guard.monitor.rules.reading import (
    LEAST_LR,
    by_optimizer,
    change,
    first_nonfinite,
    fraction_text,
    losses,
    owner,
    still_rising,
    thirds,
    unexplained,
)

__all__ = ["loss_does_not_fall", "weights_stand_still"]

# More than any warm-up of an optimizer leaves out, and more skips than the search for a scale.
_FROZEN_UPDATES = 16
_FROZEN_ROWS = 3
_UNEXPLAINED_SKIPS = 8
# Eight losses in each third, so that the medians mean something.
_LOSSES = 24
_LOOKS = 3
_HALVES = (
    "the weights that the optimizer updates are not float32, so updates below the weights'"
    " rounding step (2**-11 of the value in float16, 2**-8 in bfloat16) are rounded away",
    "Keep the weights in float32, mixed precision casts copies: `model.float()`",
)


# ---------------------------------------------------------------------- AMP104


def weights_stand_still(view: RunView) -> Finding | None:
    """AMP104: the loss moves and the parameters' checksum does not.

    Fires after 16 applied updates at a learning rate above 2**-24 that left at least three known
    checksums equal, or after 16 attempts that were all skipped, at least 8 of them unexplained by
    the search for a scale.
    """
    rows = _since_checksum(view.rows)
    tried = [r for r in rows if r.applied and r.lr is not None and r.lr > LEAST_LR]
    known = [r for r in rows if r.param_checksum is not None]
    if len(tried) >= _FROZEN_UPDATES and len(known) >= _FROZEN_ROWS - 1:
        return None if still_rising(tried) else _frozen(view, tried)
    skipped = _newest_skips(view.rows)
    lanes = by_optimizer(skipped).values()
    if len(skipped) < _FROZEN_UPDATES:
        return None
    if max(len(unexplained(lane, view.facts)) for lane in lanes) < _UNEXPLAINED_SKIPS:
        return None
    return _all_skipped(view, skipped)


def _since_checksum(rows: Sequence[Row]) -> list[Row]:
    """Return the rows after the first, up to the last, that show the newest known checksum."""
    known = [i for i, row in enumerate(rows) if row.param_checksum is not None]
    if not known:
        return []
    first = last = known[-1]
    for i in reversed(known):
        if rows[i].param_checksum != rows[last].param_checksum:
            break
        first = i
    return list(rows[first + 1 : last + 1])


def _newest_skips(rows: Sequence[Row]) -> list[Row]:
    applied = [i for i, row in enumerate(rows) if row.applied]
    return list(rows[applied[-1] + 1 if applied else 0 :])


def _moved(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Return the lowest and highest finite loss, or `None` if the loss does not move."""
    seen = losses(rows)
    if len(seen) < 2 or max(seen) - min(seen) <= 1e-6 * max(map(abs, seen)):
        return None
    return min(seen), max(seen)


def _frozen(view: RunView, rows: Sequence[Row]) -> Finding | None:
    moved = _moved(rows)
    if moved is None:
        return None
    stats = [row.stats for row in rows if row.stats is not None]
    lost = _exact_zeros(stats[-1]) if stats else 0
    total = stats[-1].total if stats else 0
    cause, remedy = _why_frozen(view, total > 0 and 2 * lost >= total)
    zeros = f"; {fraction_text(lost, total)} gradient elements are exactly zero" if stats else ""
    return Finding(
        "AMP104",
        "the loss moves, the weights do not",
        f"{len(rows)} updates from attempt {rows[0].attempt} to {rows[-1].attempt} were applied at"
        f" learning rates up to {max(r.lr or 0.0 for r in rows):g} and left the parameters' checksum"
        f" as it was, while the loss went between {moved[0]:.4g} and {moved[1]:.4g}{zeros}",
        cause,
        remedy,
    )


def _why_frozen(view: RunView, mostly_zero: bool) -> tuple[str, str]:
    if mostly_zero and view.facts.precision.startswith("16"):
        return (
            "the gradients underflow to exactly zero, so updates change nothing",
            f"Scale the loss more: `Trainer(plugins=[{owner(view.facts)}(init_scale=2.0**24)])`",
        )
    if view.half_parameters:
        return _HALVES
    return (
        "no gradient reaches the weights, updates are smaller than their rounding step, or the"
        " optimizer holds other parameters than the model (made before the model was changed)",
        "Make the optimizer from the model's own parameters:"
        " `return torch.optim.AdamW(self.parameters(), lr=1e-3)`",
    )


def _all_skipped(view: RunView, rows: Sequence[Row]) -> Finding | None:
    moved = _moved(rows)
    if moved is None:
        return None
    return Finding(
        "AMP104",
        "the loss moves, the weights do not",
        f"the last {len(rows)} attempts, {rows[0].attempt} to {rows[-1].attempt}, were all skipped,"
        f" the scale going from {rows[0].scale:g} to {rows[-1].next_scale:g}, while the loss went"
        f" between {moved[0]:.4g} and {moved[1]:.4g}",
        "every update is skipped for inf or NaN" + first_nonfinite(view),
        f"Take the cause away: {change(view) if view.culprit_help is None else view.culprit_help[1]}",
    )


# ---------------------------------------------------------------------- AMP109


def loss_does_not_fall(view: RunView) -> Finding | None:
    """AMP109: the loss does not fall in the first `WINDOW` attempts, and gradients are lost.

    The median of the last third of at least 24 losses is not below that of the first third by 1 %,
    or by a quarter of the spread, at a learning rate that is above 2**-24 and not still rising.
    That alone is no fault of the precision. It becomes one if most elements of the gradients are
    exactly zero and most of the others lie at float16's lower end (or all are zero) at more than half
    of at least three log steps, or if trained weights are not float32. Later plateaus are not
    judged: a converged run looks the same.
    """
    for rows in by_optimizer(view.rows).values():
        tried = [r for r in rows if r.lr is not None and r.lr > LEAST_LR]
        seen = losses(tried)
        if len(seen) < _LOSSES or rows[0].attempt >= WINDOW or still_rising(tried):
            continue
        start, end, spread = thirds(seen)
        if start - end > max(0.01 * abs(start), 0.25 * spread):
            continue
        flat = (
            f"the median loss of optimizer {rows[0].optimizer} went from {start:.4g} to {end:.4g}"
            f" over {len(seen)} attempts"
        )
        if (found := _underflow(view, rows, flat)) is not None:
            return found
        if view.half_parameters:
            shown = ", ".join(repr(name) for name in view.half_parameters[:3])
            cause, remedy = _HALVES
            seen_text = f"{flat}; {len(view.half_parameters)} trained parameters are not float32: "
            return Finding("AMP109", "the loss does not fall", seen_text + shown, cause, remedy)
    return None


def _underflow(view: RunView, rows: Sequence[Row], flat: str) -> Finding | None:
    if not view.facts.precision.startswith("16"):
        return None
    looks = [(row, row.stats) for row in rows if row.stats is not None and row.stats.total]
    lost = [(row, stats) for row, stats in looks if _is_underflow(stats)]
    if len(looks) < _LOOKS or 2 * len(lost) <= len(looks):
        return None
    row, stats = lost[-1]
    return Finding(
        "AMP109",
        "the loss does not fall",
        f"{flat}; at attempt {row.attempt}, scale {row.scale:g},"
        f" {fraction_text(_exact_zeros(stats), stats.total)} gradient elements are exactly zero and"
        f" {stats.subnormal} of the other {stats.subnormal + stats.normal} below 2**-14, where"
        f" float16 loses bits; so at {len(lost)} of {len(looks)} log steps",
        "most gradients underflow: they are smaller than float16 can hold at this scale",
        "Scale the loss more: "
        f"`Trainer(plugins=[{owner(view.facts)}(init_scale=2.0**24, growth_interval=200)])`",
    )


def _exact_zeros(stats: GradientStats) -> int:
    """Return the elements that are zero as they are, not merely small beside float16's range."""
    if not stats.exponents:
        return stats.zero
    return max(stats.total - stats.overflow - sum(stats.exponents.values()), 0)


def _is_underflow(stats: GradientStats) -> bool:
    left = stats.subnormal + stats.normal
    if stats.overflow or 2 * _exact_zeros(stats) < stats.total:
        return False
    return left == 0 or 2 * stats.subnormal >= left
