# SPDX-License-Identifier: Apache-2.0
"""A comparison of precisions as two small tables for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_amp_guard.diagnosis.compare.comparison import (
        ComparisonReport,
        LayerReport,
        RungReport,
    )

__all__ = ["as_text"]

_LAYERS_SHOWN = 10
_SHORT = {"bf16-mixed": "bf16", "16-mixed without scaler": "fp16 bare", "16-mixed": "fp16"}


def as_text(report: ComparisonReport) -> str:
    """Return the verdict, a line for each precision, and one for each of the worst layers."""
    head = (
        f"{'precision':<24} {'scale':>8} {'loss':>10} {'output off':>10} {'grad norm':>10}"
        f" {'last loss':>10}"
    )
    rungs = [_rung(rung) for rung in report.rungs]
    layers = sorted(report.layers, key=lambda layer: -_strangeness(layer))[:_LAYERS_SHOWN]
    if not layers:
        return "\n".join([report.verdict, head, *rungs])
    ratios = "".join([f" {_SHORT[name]:>9}" for name in _SHORT])
    legend = f"{'layer':<24} {'|x|/65504':>9} {'zero':>6} {'subn.':>6} {'scale':>6}{ratios}"
    more = len(report.layers) - len(layers)
    last = [f"... and {more} more layers"] if more else []
    return "\n".join([report.verdict, head, *rungs, legend, *map(_layer, layers), *last])


def _rung(rung: RungReport) -> str:
    off = "-" if math.isnan(rung.output_error) else f"{rung.output_error:.2g}"
    line = (
        f"{rung.name:<24} {rung.scale:>8g} {rung.loss:>10.4g} {off:>10} {rung.grad_norm:>10.4g}"
        f" {rung.losses[-1]:>10.4g}"
    )
    return f"{line}\n    {rung.nonfinite}" if rung.nonfinite else line


def _layer(layer: LayerReport) -> str:
    name = layer.name or f"({layer.kind})"
    name = name if len(name) <= 24 else f"...{name[-21:]}"
    seen = "-" if math.isnan(layer.activation_share) else f"{layer.activation_share:.2g}"
    zero, subnormal, recover = layer.underflow
    lost = f"{100 * zero:>4.0f} % {100 * subnormal:>4.0f} % {f'2^{recover}' if recover else '-':>6}"
    ratios = [
        f" {layer.agreement[name].ratio:>9.2g}" if name in layer.agreement else f" {'-':>9}"
        for name in _SHORT
    ]
    return f"{name:<24} {seen:>9} {lost}{''.join(ratios)}"


def _strangeness(layer: LayerReport) -> float:
    """Return how many doublings a layer's norms are off float32's, plus what underflows."""
    off = 0.0
    for agreement in layer.agreement.values():
        ratio = agreement.ratio
        inside = math.isfinite(ratio) and ratio > 0
        off = max(off, abs(math.log2(ratio)) if inside else 1000.0)
    large = 1000.0 if layer.activation_share > 1 else 0.0
    return off + large + layer.underflow.zero_share + layer.underflow.subnormal_share
