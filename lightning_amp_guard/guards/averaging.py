# SPDX-License-Identifier: Apache-2.0
"""AveragingGate: weight averages take their samples from applied updates only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import callbacks as lightning_callbacks

from lightning_amp_guard.errors import ScalerStateError
from lightning_amp_guard.guards._base import Guard, GuardCore, Host, InstancePatch
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["AveragingGate"]


class AveragingGateCore(GuardCore):
    """See `AveragingGate`."""

    name = "AveragingGate"

    averaging: tuple[type, ...] = ()
    swa: tuple[type, ...] = ()

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._patches: list[InstancePatch] = []
        self.applied_since_step = False
        self.applied_since_epoch = False
        self.applied_since_swa = False

    def attach(self, host: Host) -> None:
        """Stand before the averaging callbacks of this fit."""
        super().attach(host)
        self.applied_since_step = self.applied_since_epoch = self.applied_since_swa = False
        for callback in host.trainer.callbacks:
            if isinstance(callback, self.averaging):
                self._patches.append(InstancePatch(callback, "should_update", self._should_update))
            elif isinstance(callback, self.swa):
                self._patches.append(InstancePatch(callback, "update_parameters", self._sample))

    def detach(self) -> None:
        """Give the callbacks their methods back."""
        for patch in self._patches:
            patch.undo()
        self._patches = []
        super().detach()

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Remember whether there is anything new to sample."""
        if outcome.applied:
            self.applied_since_step = self.applied_since_epoch = self.applied_since_swa = True

    def _should_update(
        self,
        asked: Callable[..., bool],
        step_idx: int | None = None,
        epoch_idx: int | None = None,
    ) -> bool:
        if step_idx is not None:
            fresh, self.applied_since_step = self.applied_since_step, False
        else:
            fresh, self.applied_since_epoch = self.applied_since_epoch, False
        # asked even when nothing is new: a user's `should_update` may count the questions
        return asked(step_idx=step_idx, epoch_idx=epoch_idx) and fresh

    def _sample(
        self, update: Callable[..., None], average: Any, model: Any, n_averaged: Any, avg_fn: Any
    ) -> None:
        # the first sample replaces the average, which would be the initial weights without it
        if self.applied_since_swa or int(n_averaged) == 0:
            self.applied_since_swa = False
            update(average, model, n_averaged, avg_fn)

    def save(self) -> list[bool]:
        """Return the flags: anything applied since the last step, epoch and SWA sample?"""
        return [self.applied_since_step, self.applied_since_epoch, self.applied_since_swa]

    def load(self, saved: Any) -> None:
        """Take up the flags that `save` returned."""
        legal = isinstance(saved, list) and len(saved) == 3
        if not legal or not all(isinstance(f, bool) for f in saved):
            raise ScalerStateError(
                f'The checkpoint\'s scaler state is damaged: "gates" holds {saved!r} for weight'
                " averages, expected a list of three flags."
            )
        self.applied_since_step, self.applied_since_epoch, self.applied_since_swa = saved

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        return {**super().__getstate__(), "_patches": []}


def averaging_callbacks(namespace: Any) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Return the averaging callbacks, and the SWA ones, that a `callbacks` namespace has."""
    names = ("WeightAveraging", "EMAWeightAveraging")
    found = tuple(getattr(namespace, name) for name in names if hasattr(namespace, name))
    return found, (namespace.StochasticWeightAveraging,)


class AveragingGate(AveragingGateCore, Guard):
    """Keeps skipped steps out of weight averages.

    Lightning's averaging callbacks go by `trainer.global_step`, which counts arrivals: each skipped
    step gives the old weights one more vote (Lightning issue 11688, pull request 20545).
    `WeightAveraging` and `EMAWeightAveraging` take no sample from a skipped step (nor from an epoch
    without an applied update, where they sample by epoch), `StochasticWeightAveraging` none from an
    epoch without one, its first sample excepted.

    Args:
        enabled: `False` lets them sample as in stock Lightning.

    Runs: after each attempt, and when a callback is about to sample.
    Keeps: three flags in the plugin's checkpoint entry.
    Host sync: none; one per SWA sample.
    """

    averaging, swa = averaging_callbacks(lightning_callbacks)
