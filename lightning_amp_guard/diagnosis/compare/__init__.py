# SPDX-License-Identifier: Apache-2.0
"""Float32, bfloat16 and float16 on one batch, side by side."""

from lightning_amp_guard.diagnosis.compare.compare import compare_precisions
from lightning_amp_guard.diagnosis.compare.comparison import (
    ComparisonReport,
    LayerReport,
    RungReport,
)

__all__ = ["ComparisonReport", "LayerReport", "RungReport", "compare_precisions"]
