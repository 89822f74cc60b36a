# SPDX-License-Identifier: Apache-2.0
"""Guards: one rule of the optimizer step each."""

from lightning_amp_guard.guards.averaging import AveragingGate
from lightning_amp_guard.guards.checkpoint import ScalerCheckpoint
from lightning_amp_guard.guards.dtypes import DtypeGuard
from lightning_amp_guard.guards.locate import NonFiniteLocator
from lightning_amp_guard.guards.schedule import SchedulerGate
from lightning_amp_guard.guards.unscale import UnscaleGuard
from lightning_amp_guard.guards.window import WindowGuard

GUARD_TYPES = (
    UnscaleGuard,
    WindowGuard,
    SchedulerGate,
    AveragingGate,
    ScalerCheckpoint,
    DtypeGuard,
    NonFiniteLocator,
)

__all__ = [
    "GUARD_TYPES",
    "AveragingGate",
    "DtypeGuard",
    "NonFiniteLocator",
    "ScalerCheckpoint",
    "SchedulerGate",
    "UnscaleGuard",
    "WindowGuard",
]
