# SPDX-License-Identifier: Apache-2.0
"""The picture of a run."""

from lightning_amp_guard.monitor.plot.plot import build_figure, draw_report

__all__ = ["build_figure", "draw_report"]
