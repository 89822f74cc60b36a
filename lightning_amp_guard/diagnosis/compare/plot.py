# SPDX-License-Identifier: Apache-2.0
"""A comparison of precisions as one picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_amp_guard.diagnosis.compare.comparison import ComparisonReport

__all__ = ["draw"]

_LAYERS_SHOWN = 24
_LEAST = 1e-3  # a ratio of 0 and below is drawn here


def draw(report: ComparisonReport) -> Any:
    """Return a figure: loss and gradient norm by update, norm ratio and range by layer.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which chooses a backend for everyone
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`ComparisonReport.plot()` needs matplotlib, which is not installed. Write"
            " `pip install 'lightning-amp-guard[report]'`."
        ) from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_curves(axes[0], report)
    layers = [layer for layer in report.layers if layer.agreement][:_LAYERS_SHOWN]
    _draw_ratios(axes[1][0], layers)
    _draw_ranges(axes[1][1], layers)
    figure.suptitle(report.verdict, fontsize=9, wrap=True)
    return figure


def _draw_curves(axes: Any, report: ComparisonReport) -> None:
    for rung in report.rungs:
        updates = range(len(rung.losses))
        axes[0].plot(updates, rung.losses, marker=".", label=rung.name)
        axes[1].plot(updates, rung.grad_norms, marker=".", label=rung.name)
    for ax, title in zip(axes, ("loss", "gradient norm"), strict=True):
        ax.set(xlabel="updates", title=title)
        ax.legend(fontsize=8)
    if any(norm > 0 for rung in report.rungs for norm in rung.grad_norms):
        axes[1].set_yscale("log")


def _draw_ratios(ax: Any, layers: list[Any]) -> None:
    names = [layer.name or "(root)" for layer in layers]
    for rung in dict.fromkeys([rung for layer in layers for rung in layer.agreement]):
        found = [
            layer.agreement[rung].ratio if rung in layer.agreement else 1.0 for layer in layers
        ]
        drawn = [min(max(r, _LEAST), 1 / _LEAST) if not math.isnan(r) else math.nan for r in found]
        ax.plot(range(len(layers)), drawn, ".", label=rung)
    ax.axhspan(0.1, 10.0, alpha=0.1)
    ax.set(title="gradient norm / float32's", yscale="log", ylim=(_LEAST / 2, 2 / _LEAST))
    ax.set_xticks(range(len(layers)), names, rotation=90, fontsize=7)
    if layers:
        ax.legend(fontsize=8)


def _draw_ranges(ax: Any, layers: list[Any]) -> None:
    at = range(len(layers))
    zero = [100 * layer.underflow.zero_share for layer in layers]
    subnormal = [100 * layer.underflow.subnormal_share for layer in layers]
    ax.bar(at, zero, label="zero in float16")
    ax.bar(at, subnormal, bottom=zero, label="subnormal in float16")
    ax.set(title="unscaled gradients below float16's range, %", ylim=(0, 100))
    ax.set_xticks(at, [layer.name or "(root)" for layer in layers], rotation=90, fontsize=7)
    for x, layer in zip(at, layers, strict=True):
        if layer.underflow.recover_log2:
            height = min(zero[x] + subnormal[x], 93)
            ax.text(x, height, f"2^{layer.underflow.recover_log2}", ha="center", fontsize=7)
    ax.legend(fontsize=8)
