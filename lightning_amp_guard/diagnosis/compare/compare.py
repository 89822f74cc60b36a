# SPDX-License-Identifier: Apache-2.0
"""`compare_precisions`: float32, bfloat16 and float16 on copies of a module and one batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard.diagnosis.arguments import check_positive, check_step, check_whole
from lightning_amp_guard.diagnosis.compare.comparison import (
    ComparisonReport,
    LayerReport,
    RungReport,
)
from lightning_amp_guard.diagnosis.compare.copies import copy_of, own_params
from lightning_amp_guard.diagnosis.compare.judgement import (
    error_problem,
    nonfinite_problems,
    problems_of,
)
from lightning_amp_guard.diagnosis.compare.layers import (
    Agreement,
    Forward,
    agreement_of,
    relative_error,
    underflow_of,
)
from lightning_amp_guard.diagnosis.compare.rungs import (
    FLOAT32,
    LADDER,
    MakeOptimizer,
    Program,
    Run,
    Rung,
    gradients_of,
    norm_of,
    small_lr,
)
from lightning_amp_guard.diagnosis.locate.locate import locate_nonfinite
from lightning_amp_guard.diagnosis.replay.replay import LossFn, device_of, undisturbed
from lightning_amp_guard.diagnosis.replay.surroundings import random_states

__all__ = ["compare_precisions"]


def compare_precisions(
    module: Module,
    batch: Any,
    *,
    steps: int = 5,
    output: str | None = None,
    loss_fn: LossFn | None = None,
    device: torch.device | str | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer | None = None,
    scale: float = 2.0**16,
) -> ComparisonReport:
    """Train copies of a module for a few steps on one batch in every precision, and compare them.

    The ladder is float32 (TF32 off), bfloat16 autocast, float16 autocast without a scaler and with
    one. All begin with the same weights and random state, and random operators draw the same numbers
    in each precision. What is compared comes from the first step; the updates make the curves. An
    overflow under the scaler halves the scale and repeats the attempt, as training would; the others
    apply whatever gradients they get. A precision in which the step raises a `RuntimeError` is not
    healthy; in float32 the error goes on to the caller. The module itself is as before afterwards.

    Args:
        module: A LightningModule in automatic optimization, or any module with `loss_fn`.
        batch: The one batch.
        steps: Updates in each precision, at least 1.
        output: The submodule whose output is compared, a name of `named_modules()`; `None`: the
            last leaf that ran and gave more than one number with a graph (in float32).
        loss_fn: `loss_fn(module, batch)`, a scalar loss; `None`: `training_step(batch, 0)`.
        device: Where copies and batch go; `None`: where the module is.
        lr: Learning rate of plain SGD, positive; `None`: the largest with which the first update
            in float32 moves no parameter by more than 1 % of its norm (zeros left out).
        optimizer: Makes the optimizer from the list of parameters, instead of SGD.
        scale: What the scaler begins with.

    Returns:
        A frozen report without tensors: `.healthy`, `.verdict`, `.rungs`, `.layers`, `.plot()`.

    Raises:
        ValueError: an argument out of range, an unknown `output`, a module that cannot be copied, or
            a step without a scalar loss.
        TypeError: an argument of another type (a loader for the batch), or neither `training_step`
            nor `loss_fn`.

    Host sync: many; it is no part of training. Memory: two copies of the module and, while the
    other rungs run, float32's gradients.

    Example:
        >>> net = torch.nn.Linear(4, 2)
        >>> report = compare_precisions(net, torch.ones(3, 4), loss_fn=lambda m, x: m(x).sum())
        >>> report.healthy, len(report.rung("16-mixed").losses)
        (True, 5)
    """
    check_step("compare_precisions", module, batch)
    check_whole("steps", steps, at_least=1)
    check_positive("scale", scale)
    if lr is not None:
        check_positive("lr", lr)
    where = torch.device(device) if device is not None else device_of(module)
    program = Program(loss_fn, where, float(scale), steps, optimizer, lr)
    with undisturbed(module):
        states = random_states(set() if where is None else {where})
        ladder = _Ladder(module, batch, program, output)
        for rung in LADDER:
            for put_back in states:
                put_back()
            ladder.climb(rung)
        return ladder.report()


class _Ladder:
    """Runs the rungs one after the other; of the tensors, only float32's outlive a rung."""

    def __init__(self, module: Module, batch: Any, program: Program, output: str | None) -> None:
        self.module, self.batch, self.program = module, batch, program
        self.output, self.lr = output, program.lr
        self.reference: dict[str, list[Tensor]] = {}
        self.value: Tensor | None = None
        self.layers: dict[str, LayerReport] = {}
        self.agreements: dict[str, dict[str, Agreement]] = {}
        self.rungs: list[RungReport] = []

    def climb(self, rung: Rung) -> None:
        """Run one rung on a copy of its own; an operator may not exist in its dtype."""
        try:
            self._climb(rung)
        except RuntimeError as error:
            if rung.name == FLOAT32:
                raise
            nan = math.nan
            made = RungReport(rung.name, 1.0, nan, nan, nan, losses=(nan,), grad_norms=(nan,))
            self.rungs.append(replace(made, problems=(error_problem(error),), runs=False))

    def _climb(self, rung: Rung) -> None:
        run = Run(copy_of(self.module, self.program.device), rung, self.program)
        run.calibrate(self.batch)
        scale = run.scale
        with Forward(run.module, self.output) as forward:
            loss = run.step(self.batch)
        if rung.name == FLOAT32:
            self._refer(run.module, forward)
        norm, error = run.grad_norm(), relative_error(forward.value, self.value)
        found = self._agreements(run.module)
        place, culprit = self._locate(run) if not math.isfinite(loss + norm) else ("", None)
        norms = {name: agreement.norm for name, agreement in found.items()}
        problems = nonfinite_problems(loss, norms, place, culprit)
        if rung.name != FLOAT32:
            self.agreements[rung.name] = found
            true = {name: self.layers[name].gradient_norm for name in found}
            problems = problems or problems_of(rung.precision, found, true, error)
        losses, grad_norms = run.train(self.batch, loss, self.lr or 0.0)
        made = RungReport(
            *(rung.name, scale, loss, error, norm),
            losses=tuple(losses),
            grad_norms=tuple(grad_norms),
            skipped=run.skipped,
            nonfinite=place,
            problems=tuple(problems),
        )
        self.rungs.append(made)

    def report(self) -> ComparisonReport:
        """Return what was seen."""
        lr = self.lr if self.program.make_optimizer is None else None
        lr = math.nan if lr is None else lr
        layers = [
            replace(
                layer,
                agreement={
                    rung: found[name] for rung, found in self.agreements.items() if name in found
                },
            )
            for name, layer in self.layers.items()
        ]
        return ComparisonReport(
            tuple(self.rungs), tuple(layers), self.output, math.nan if lr is None else lr
        )

    def _refer(self, module: Module, forward: Forward) -> None:
        """Take float32's output, gradients and activations as what the others are measured by."""
        if self.output is not None and forward.value is None:
            raise ValueError(
                f"`output={self.output!r}`: this submodule gave no floating point tensor in the step."
                " Expected one that runs in it. Leave `output` away to take the last leaf that ran."
            )
        self.output, self.value = forward.name, forward.value
        self.lr = self.lr or small_lr(module.parameters())
        owned, shares = own_params(module), forward.shares()
        for name, part in module.named_modules():
            grads = gradients_of(owned.get(name, []))
            if not grads and name not in shares:
                continue
            if grads:
                self.reference[name] = [grad.clone() for grad in grads]
            self.layers[name] = LayerReport(
                *(name, type(part).__name__, shares.get(name, math.nan)),
                gradient_norm=norm_of(grads) if grads else math.nan,
                underflow=underflow_of(grads),
            )

    def _agreements(self, module: Module) -> dict[str, Agreement]:
        owned, found = own_params(module), {}
        for name, reference in self.reference.items():
            grads = gradients_of(owned[name])
            if len(grads) == len(reference):
                found[name] = agreement_of(grads, reference)
        return found

    def _locate(self, run: Run) -> tuple[str, str | None]:
        found = locate_nonfinite(
            run.module,
            self.batch,
            loss_fn=self.program.loss_fn,
            device=self.program.device,
            precision=run.rung.precision,
            scale=run.scale,
        )
        if not found:
            return "in no single operator", None
        return str(found).partition("\n")[0], found.module
