# SPDX-License-Identifier: Apache-2.0
"""Mixed precision training in PyTorch Lightning that is correct, and says so when it is not."""

from lightning_amp_guard.diagnosis import (
    classify_range,
    compare_precisions,
    estimate_memory,
    locate_nonfinite,
    profile_dtypes,
    recommend_precision,
    scan_batch,
)
from lightning_amp_guard.errors import (
    AmpGuardError,
    AmpGuardWarning,
    NonFiniteGradientError,
    ScaledGradientError,
    ScalerStateError,
    SkipLimitError,
)
from lightning_amp_guard.fsdp import SafeFSDP
from lightning_amp_guard.guards import (
    AveragingGate,
    DtypeGuard,
    NonFiniteLocator,
    ScalerCheckpoint,
    SchedulerGate,
    UnscaleGuard,
    WindowGuard,
)
from lightning_amp_guard.monitor import AmpMonitor, Finding
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.precision import SafeAMP
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.tokens import TokenClock

__all__ = [
    "AmpGuardError",
    "AmpGuardWarning",
    "AmpMonitor",
    "AveragingGate",
    "DtypeGuard",
    "Finding",
    "NonFiniteGradientError",
    "NonFiniteLocator",
    "SafeAMP",
    "SafeFSDP",
    "ScaledGradientError",
    "ScalerCheckpoint",
    "ScalerStateError",
    "SchedulerGate",
    "SkipAwareGradScaler",
    "SkipLimitError",
    "SkipReason",
    "StepOutcome",
    "StepTally",
    "TokenClock",
    "UnscaleGuard",
    "WindowGuard",
    "classify_range",
    "compare_precisions",
    "estimate_memory",
    "locate_nonfinite",
    "profile_dtypes",
    "recommend_precision",
    "scan_batch",
]
