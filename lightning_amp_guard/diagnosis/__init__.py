# SPDX-License-Identifier: Apache-2.0
"""Plain functions that say what is not finite, where, and why; each returns a frozen report."""

from __future__ import annotations

from lightning_amp_guard.diagnosis.batch import BadField, BatchReport, scan_batch
from lightning_amp_guard.diagnosis.compare import (
    ComparisonReport,
    LayerReport,
    RungReport,
    compare_precisions,
)
from lightning_amp_guard.diagnosis.locate import NonFiniteReport, locate_nonfinite
from lightning_amp_guard.diagnosis.memory import MemoryReport, estimate_memory
from lightning_amp_guard.diagnosis.profile import DtypeReport, profile_dtypes
from lightning_amp_guard.diagnosis.range import RangeReport, classify_range
from lightning_amp_guard.diagnosis.recommend import Recommendation, recommend_precision
from lightning_amp_guard.diagnosis.watch import Culprit, NonFiniteWatch

__all__ = [
    "BadField",
    "BatchReport",
    "ComparisonReport",
    "Culprit",
    "DtypeReport",
    "LayerReport",
    "MemoryReport",
    "NonFiniteReport",
    "NonFiniteWatch",
    "RangeReport",
    "Recommendation",
    "RungReport",
    "classify_range",
    "compare_precisions",
    "estimate_memory",
    "locate_nonfinite",
    "profile_dtypes",
    "recommend_precision",
    "scan_batch",
]
