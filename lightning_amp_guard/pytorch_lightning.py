# SPDX-License-Identifier: Apache-2.0
"""The plugins and callbacks for `pytorch_lightning.Trainer`.

`lightning.pytorch` and `pytorch_lightning` are two copies of one code: classes of one are strangers
to the other. So these are thin shells, each over the same core as its namesake in the package root.
One class inheriting from both namespaces would not do: Lightning looks hooks up by class, and
clipping would be dropped without a word. Both packages have to be installed.
"""

from __future__ import annotations

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Callback
from pytorch_lightning import callbacks as lightning_callbacks
from pytorch_lightning.plugins.precision import FSDPPrecision, MixedPrecision

from lightning_amp_guard.fsdp import SafeFSDPCore
from lightning_amp_guard.guards._base import GuardSetup
from lightning_amp_guard.guards.averaging import AveragingGateCore, averaging_callbacks
from lightning_amp_guard.guards.checkpoint import ScalerCheckpointCore
from lightning_amp_guard.guards.dtypes import DtypeGuardCore
from lightning_amp_guard.guards.locate import NonFiniteLocatorCore
from lightning_amp_guard.guards.schedule import SchedulerGateCore
from lightning_amp_guard.guards.unscale import UnscaleGuardCore
from lightning_amp_guard.guards.window import WindowGuardCore
from lightning_amp_guard.monitor.monitor import AmpMonitorCore
from lightning_amp_guard.precision import SafeAMPCore
from lightning_amp_guard.tokens import TokenClockCore

__all__ = [
    "AmpMonitor",
    "AveragingGate",
    "DtypeGuard",
    "NonFiniteLocator",
    "SafeAMP",
    "SafeFSDP",
    "ScalerCheckpoint",
    "SchedulerGate",
    "TokenClock",
    "UnscaleGuard",
    "WindowGuard",
]

_HERE = "lightning_amp_guard.pytorch_lightning"


class Guard(GuardSetup, Callback):
    """A guard as a callback of this namespace."""

    misconfiguration = MisconfigurationException
    namespace = _HERE


class UnscaleGuard(UnscaleGuardCore, Guard):
    """`lightning_amp_guard.UnscaleGuard` for `pytorch_lightning.Trainer`."""


class WindowGuard(WindowGuardCore, Guard):
    """`lightning_amp_guard.WindowGuard` for `pytorch_lightning.Trainer`."""


class SchedulerGate(SchedulerGateCore, Guard):
    """`lightning_amp_guard.SchedulerGate` for `pytorch_lightning.Trainer`."""


class AveragingGate(AveragingGateCore, Guard):
    """`lightning_amp_guard.AveragingGate` for `pytorch_lightning.Trainer`."""

    averaging, swa = averaging_callbacks(lightning_callbacks)


class ScalerCheckpoint(ScalerCheckpointCore, Guard):
    """`lightning_amp_guard.ScalerCheckpoint` for `pytorch_lightning.Trainer`."""


class DtypeGuard(DtypeGuardCore, Guard):
    """`lightning_amp_guard.DtypeGuard` for `pytorch_lightning.Trainer`."""


class NonFiniteLocator(NonFiniteLocatorCore, Guard):
    """`lightning_amp_guard.NonFiniteLocator` for `pytorch_lightning.Trainer`."""


_GUARDS = (
    UnscaleGuard,
    WindowGuard,
    SchedulerGate,
    AveragingGate,
    ScalerCheckpoint,
    DtypeGuard,
    NonFiniteLocator,
)


class SafeAMP(SafeAMPCore, MixedPrecision):  # type: ignore[misc]  # the mixin takes any model
    """`lightning_amp_guard.SafeAMP` for `pytorch_lightning.Trainer`: same arguments and rules."""

    guard_types = _GUARDS
    misconfiguration = MisconfigurationException
    lightning_base = MixedPrecision
    namespace = _HERE
    trainer_name = "pytorch_lightning.Trainer"


class SafeFSDP(SafeFSDPCore, FSDPPrecision):  # type: ignore[misc]  # the mixin takes any model
    """`lightning_amp_guard.SafeFSDP` for `pytorch_lightning.Trainer`: same arguments and rules."""

    guard_types = _GUARDS
    misconfiguration = MisconfigurationException
    lightning_base = FSDPPrecision
    namespace = _HERE
    trainer_name = "pytorch_lightning.Trainer"


class TokenClock(TokenClockCore, Guard):
    """`lightning_amp_guard.TokenClock` for `pytorch_lightning.Trainer`."""


class AmpMonitor(AmpMonitorCore, Callback):
    """`lightning_amp_guard.AmpMonitor` for `pytorch_lightning.Trainer`."""
