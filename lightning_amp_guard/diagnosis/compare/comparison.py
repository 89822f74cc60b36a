# SPDX-License-Identifier: Apache-2.0
"""What `compare_precisions` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_amp_guard.diagnosis.compare.judgement import Problem
from lightning_amp_guard.diagnosis.compare.layers import NO_UNDERFLOW, Agreement, Underflow
from lightning_amp_guard.diagnosis.compare.text import as_text
from lightning_amp_guard.diagnosis.flat import strict

__all__ = ["ComparisonReport", "LayerReport", "RungReport"]

_NAMED = 3
_PROTECTED = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class LayerReport:
    """One layer: a module with parameters of its own, or a leaf that ran.

    Args:
        name: As in `named_modules()`; "" is the module itself.
        kind: Its class.
        activation_share: Largest |output| in float32, divided by 65504; above 1 it is inf in
            float16. NaN if it did not run.
        gradient_norm: L2 norm of its own parameters' gradient in float32; NaN without one.
        underflow: What float16 would do to that gradient without a scaler.
        agreement: By the rung's name, how its gradient compares with the one in float32.
    """

    name: str
    kind: str
    activation_share: float
    gradient_norm: float = math.nan
    underflow: Underflow = NO_UNDERFLOW
    agreement: Mapping[str, Agreement] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers under flat names."""
        flat = {
            "name": self.name,
            "kind": self.kind,
            "activation_share": self.activation_share,
            "gradient_norm": self.gradient_norm,
            **self.underflow._asdict(),
        }
        for rung, agreement in self.agreement.items():
            flat |= {f"{rung}/{key}": value for key, value in agreement._asdict().items()}
        return flat


@dataclass(frozen=True)
class RungReport:
    """One precision of the ladder.

    Args:
        name: "32-true", "bf16-mixed", "16-mixed without scaler" or "16-mixed".
        scale: The scale of the first step, after its overflows; 1 without a scaler.
        loss: Of the first step.
        output_error: L2 norm of the output's difference to float32, relative to float32's; NaN
            where the outputs do not compare.
        grad_norm: L2 norm over all gradients of the first step, unscaled.
        losses: The loss before each update.
        grad_norms: The gradient norm before each update.
        skipped: Attempts that overflowed and were repeated at half the scale.
        nonfinite: The first operator with a non-finite result, "" if the first step is finite.
        problems: What is wrong in this precision.
        runs: Whether the step ran: an operator may lack this dtype. Numbers are NaN if not.
    """

    name: str
    scale: float
    loss: float
    output_error: float
    grad_norm: float
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    skipped: int = 0
    nonfinite: str = ""
    problems: tuple[Problem, ...] = ()
    runs: bool = True

    @property
    def healthy(self) -> bool:
        """Whether it computes what float32 computes, as far as its precision goes."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers under flat names; points of the curves as `losses/0`, `losses/1`, ..."""
        return {
            "name": self.name,
            "scale": self.scale,
            "loss": self.loss,
            "output_error": self.output_error,
            "grad_norm": self.grad_norm,
            "skipped": self.skipped,
            "nonfinite": self.nonfinite,
            "healthy": self.healthy,
            "runs": self.runs,
            "problems": "; ".join([problem.sentence for problem in self.problems]),
            **{f"losses/{i}": loss for i, loss in enumerate(self.losses)},
            **{f"grad_norms/{i}": norm for i, norm in enumerate(self.grad_norms)},
        }


@dataclass(frozen=True)
class ComparisonReport:
    """Says where low precision computes something else than float32 on one batch.

    Args:
        rungs: The ladder, float32 first.
        layers: In the order of `named_modules()`.
        output: The name of the submodule whose output was compared; `None` if there was none.
        lr: Learning rate of the curves' plain SGD; NaN with an optimizer of the caller's.
    """

    rungs: tuple[RungReport, ...]
    layers: tuple[LayerReport, ...]
    output: str | None
    lr: float

    @property
    def healthy(self) -> bool:
        """Whether float32 itself, bf16-mixed and 16-mixed with its scaler are healthy.

        What 16-mixed loses without a scaler is expected and does not count.
        """
        return all(self.rung(name).healthy for name in _PROTECTED)

    @property
    def verdict(self) -> str:
        """One sentence: what to use, or which layer computes something else where."""
        broken = [self.rung(name) for name in _PROTECTED if not self.rung(name).healthy]
        if not broken:
            return f"Healthy: {self._praise()}."
        if broken[0].name == "32-true":
            return f"Not healthy: already in float32, {broken[0].problems[0].sentence}."
        told = "; ".join([f"in {rung.name}, {rung.problems[0].sentence}" for rung in broken])
        return f"Not healthy: {told}; {_remedy(broken)}."

    def rung(self, name: str) -> RungReport:
        """Return what one precision showed.

        Args:
            name: "32-true", "bf16-mixed", "16-mixed without scaler" or "16-mixed".

        Raises:
            KeyError: there is no rung of that name.
        """
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise KeyError(f"no rung {name!r}: expected one of {[rung.name for rung in self.rungs]}")

    def plot(self, path: Any = None) -> Any:
        """Draw curves, norm ratios, activations and underflow into one picture.

        Args:
            path: Where to save it; `None` saves nothing.

        Returns:
            The `matplotlib.figure.Figure`. Global state of matplotlib is not touched.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from lightning_amp_guard.diagnosis.compare.plot import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values on one flat level.

        Keys are `RUNG/KEY`, `LAYER/KEY` and `LAYER/RUNG/KEY`. The module itself is the
        layer "": its keys begin with a slash. Inf and NaN become `None`, as in strict JSON.
        """
        flat: dict[str, Any] = {
            "healthy": self.healthy,
            "verdict": self.verdict,
            "output": self.output,
            "lr": self.lr,
        }
        parts: list[RungReport | LayerReport] = [*self.rungs, *self.layers]
        for part in parts:
            values = part.to_dict()
            del values["name"]  # it is in the key
            flat |= {f"{part.name}/{key}": value for key, value in values.items()}
        return strict(flat)

    def __str__(self) -> str:
        return as_text(self)

    def _praise(self) -> str:
        plain, scaled = self.rung("16-mixed without scaler"), self.rung("16-mixed")
        said = f"bf16-mixed and 16-mixed (scale {scaled.scale:g}) agree with float32"
        lost = max(self.layers, key=lambda layer: layer.underflow.zero_share, default=None)
        if not plain.healthy:
            return f"{said}; without a scaler, {plain.problems[0].sentence}"
        if lost is None or not lost.underflow.zero_share:
            return said
        share = 100 * lost.underflow.zero_share
        return (
            f"{said}; a scaler saves {share:.2g} % of the gradient of {lost.name!r} from underflow"
        )


def _remedy(broken: Sequence[RungReport]) -> str:
    """Return what to write. The name of the whole module is no remedy: that is float32."""
    layers = dict.fromkeys([name for rung in broken for name in rung.problems[0].layers if name])
    keep = f"`SafeAMP(fp32_modules={list(layers)[:_NAMED]})`" if layers else '`precision="32-true"`'
    if len(broken) > 1:
        return f"use {keep}"
    other = "16-mixed" if broken[0].name == "bf16-mixed" else "bf16-mixed"
    return f'use `precision="{other}"`, or {keep}'
