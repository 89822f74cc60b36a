# SPDX-License-Identifier: Apache-2.0
"""Mixed precision training in PyTorch Lightning that is correct, and says so when it is not."""

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
    ScalerCheckpoint,
    SchedulerGate,
    UnscaleGuard,
    WindowGuard,
)
from lightning_amp_guard.monitor import AmpMonitor
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.precision import SafeAMP
from lightning_amp_guard.scaler import SkipAwareGradScaler

__all__ = [
    "AmpGuardError",
    "AmpGuardWarning",
    "AmpMonitor",
    "AveragingGate",
    "DtypeGuard",
    "NonFiniteGradientError",
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
    "UnscaleGuard",
    "WindowGuard",
]
