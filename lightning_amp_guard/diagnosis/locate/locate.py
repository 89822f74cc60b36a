# SPDX-License-Identifier: Apache-2.0
"""Which operator made the first non-finite value of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from lightning_amp_guard.diagnosis.arguments import check_positive, check_step
from lightning_amp_guard.diagnosis.counts import LEAST_ORDINARY_SCALE
from lightning_amp_guard.diagnosis.locate.blame import blamed, described
from lightning_amp_guard.diagnosis.locate.finding import NonFiniteReport
from lightning_amp_guard.diagnosis.locate.float32 import EVERY
from lightning_amp_guard.diagnosis.locate.prepare import (
    compiled,
    computes_on,
    uncompiled,
)
from lightning_amp_guard.diagnosis.locate.remedies import (
    Facts,
    explain,
    is_ordinary,
)
from lightning_amp_guard.diagnosis.locate.step import Step
from lightning_amp_guard.diagnosis.replay.replay import (
    LossFn,
    autocast,
    device_of,
    undisturbed,
)

__all__ = ["locate_nonfinite"]

_MOST_TOGETHER = 8  # modules that are named to run in float32


def locate_nonfinite(
    module: Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    device: torch.device | str | None = None,
    precision: str = "16-mixed",
    scale: float = 2.0**16,
) -> NonFiniteReport:
    """Name the operator that made the first non-finite value that harms the loss or a gradient.

    One step is replayed under autocast (forward, loss times scale, backward), and every operator is
    looked at. A candidate has finite inputs and a result that is not. Blamed is the first candidate
    whose value reaches the loss, or, if the loss is finite, the gradient of a parameter: what is
    masked out again harms nobody. Values that are meant to be infinite (`masked_fill(mask, -inf)`)
    and memory not yet written to are blamed only if nothing else is. A value that the forward pass
    made and hid (in a branch of `torch.where`) is blamed if the backward pass multiplies by it.

    A fault is followed by a few replays, in float32 and at smaller scales, which tell faults of the
    formula from those of the precision and from ordinary calibration of the scale, and find which
    modules have to run in float32 together. Where no ordinary scale helps, the report is on the
    smallest power of two that fails. Compiled modules run uncompiled meanwhile. Module and random
    state are as before afterwards.

    Args:
        module: A LightningModule in automatic optimization, or any module with `loss_fn`.
        batch: The batch as `training_step` gets it; it is copied.
        loss_fn: `loss_fn(module, batch)` returns a scalar loss; default: `training_step(batch, 0)`.
        device: Where to replay; default: where the module is. Modules on several devices stay there.
        precision: "16-mixed", "bf16-mixed", or "32-true".
        scale: Multiplies the loss in "16-mixed"; positive and finite. Others do not scale.

    Returns:
        The report, falsy if loss and gradients are finite. It holds no tensors.

    Raises:
        ValueError: an unknown precision, a bad scale, or a step without a scalar loss.
        TypeError: `module` is none, `batch` is a loader, the scale no number, or there is neither
            `training_step` nor `loss_fn`.

    Host sync: one per operator. Memory: two copies of the module's tensors meanwhile.

    Example:
        >>> net = torch.nn.Linear(1, 1)
        >>> report = locate_nonfinite(net, torch.zeros(4, 1), loss_fn=lambda net, x: net(x / x).sum())
        >>> report.op, report.direction, report.kind
        ('aten.div.Tensor', 'forward', 'nan')
        >>> print(report.remedy)
        Keep away from the edge: `x / y.clamp(min=1e-6)`.
    """
    check_step("locate_nonfinite", module, batch)
    check_positive("scale", scale)
    autocast(precision, "cpu")  # raises for an unknown precision
    with undisturbed(module):
        if device is not None:
            module.to(device)
        target = device_of(module)
        step = Step(module, batch, loss_fn, target, computes_on(module, batch, target))
        return _Search(step).locate(precision, float(scale) if precision == "16-mixed" else 1.0)


@dataclass(frozen=True)
class _Search:
    """Follows one step, and, where it finds a fault, replays it until its cause is known."""

    step: Step

    def locate(self, precision: str, scale: float) -> NonFiniteReport:
        names = compiled(self.step.module)
        notes = [f"compiled and left alone, so run uncompiled here: {names}"] if names else []
        with uncompiled(bool(names)):
            seen = self.step.trace(precision, scale)
            past = seen.numbers and seen.direction == "backward" and scale > 1.0 and not seen.raised
            safe = None
            if past:
                safe = self._safe_scale(precision, scale)
                if not is_ordinary(safe):
                    # the scale may have overflown earlier than what no ordinary scale mends
                    lower = 1.0 if safe is None else 2 * safe
                    again = self.step.trace(precision, lower)
                    seen, scale = (again, lower) if again.numbers else (seen, scale)
            notes += [seen.raised] if seen.raised else []
            empty = NonFiniteReport(precision, scale, notes=tuple(notes))
            if not seen.numbers:
                return empty
            origin, other = blamed(seen.tracer.origins, seen.numbers)
            facts = Facts(precision, scale, safe, device=self.step.kind)
            if not origin.subject:
                facts = self._facts(facts, seen.direction, origin.site.module)
        found = described(empty, origin, other, seen.direction, seen.tracer.sites.names)
        cause, remedy = explain(origin, other, facts)
        return replace(found, cause=cause, remedy=remedy)

    def _facts(self, facts: Facts, direction: str, module: str) -> Facts:
        if facts.is_calibration or facts.precision == "32-true":
            return facts
        forward_only = direction == "forward"
        finite = self._runs_finite("32-true", forward_only=forward_only)
        facts = replace(facts, finite_in_float32=finite)
        if not module or finite is False:
            return facts
        if modules := self._together(facts, module):
            return replace(facts, modules=modules)
        others = [p for p in ("bf16-mixed", "32-true") if p != facts.precision]
        finite_in = (p for p in others if self._runs_finite(p, forward_only=False))
        return replace(facts, instead=next(finite_in, ""))

    def _runs_finite(self, precision: str, *, forward_only: bool) -> bool | None:
        """Return whether the step is finite in another precision; `None` if it cannot run in it."""
        try:
            return self.step.is_finite_in(precision, 1.0, forward_only=forward_only)
        except (RuntimeError, ValueError, TypeError):  # the program needs its half precision
            return None

    def _together(self, facts: Facts, module: str) -> tuple[str, ...]:
        """Return which modules have to run in float32, since they read what `module` then makes.

        Every one where it cannot be told which of them; none where not even that helps.
        """
        chosen = [module]
        while True:
            try:
                seen = self.step.trace(
                    facts.precision, min(facts.scale, LEAST_ORDINARY_SCALE), chosen
                )
            except (RuntimeError, ValueError, TypeError):  # another module needs half precision
                return ()
            if not seen.numbers:
                return (EVERY,) if EVERY in chosen else tuple(chosen)
            if EVERY in chosen:
                return ()
            origin, _ = blamed(seen.tracer.origins, seen.numbers)
            told = not origin.subject and origin.site.module not in ("", *chosen)
            chosen.append(origin.site.module if told and len(chosen) < _MOST_TOGETHER else EVERY)

    def _safe_scale(self, precision: str, scale: float) -> float | None:
        """Return the largest power of two at which the gradients are finite, if there is one."""
        if not self.step.is_finite_in(precision, 1.0):
            return None
        low, high = 0, math.ceil(math.log2(scale))  # finite at 2**low, not at 2**high
        while high - low > 1:
            middle = (low + high) // 2
            if self.step.is_finite_in(precision, 2.0**middle):
                low = middle
            else:
                high = middle
        return 2.0**low
