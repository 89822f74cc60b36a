# SPDX-License-Identifier: Apache-2.0
"""AveragingGate: weight averages take their samples from applied updates only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import callbacks as lightning_callbacks
from torch.optim.swa_utils import AveragedModel

from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.guards._base import Guard, GuardCore, Host, InstancePatch
from lightning_amp_guard.outcome import StepOutcome
from lightning_amp_guard.state import read_flag_pairs

__all__ = ["AveragingGate"]


class AveragingGateCore(GuardCore):
    """See `AveragingGate`."""

    name = "AveragingGate"
    takes_late_outcomes = True

    averaging: tuple[type, ...] = ()
    swa: tuple[type, ...] = ()

    @names_its_class
    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._patches: list[InstancePatch] = []
        self._fresh: list[Fresh] = []

    def attach(self, host: Host) -> None:
        """Stand before the averaging callbacks of this fit."""
        self.detach()
        super().attach(host)
        self._fresh = []
        for callback in host.trainer.callbacks:
            if isinstance(callback, self.averaging):
                self._stand_before(callback, "should_update", _should_update)
            elif isinstance(callback, self.swa):
                self._stand_before(callback, "update_parameters", _sample)
        for module in host.module.modules():
            if isinstance(module, AveragedModel):
                self._stand_before(module, "update_parameters", _update, Kept())

    def _stand_before(
        self, callback: Any, name: str, wrapper: Callable[..., Any], fresh: Fresh | None = None
    ) -> None:
        fresh = fresh or Fresh()

        def ask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.host is not None:
                self.host.settle()
            return wrapper(fresh, original, *args, **kwargs)

        self._fresh.append(fresh)
        self._patches.append(InstancePatch(callback, name, ask))

    def detach(self) -> None:
        """Give the callbacks their methods back."""
        for patch in self._patches:
            patch.undo()
        self._patches = []
        super().detach()

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Remember whether there is anything new to sample."""
        for fresh in self._fresh:
            fresh.note(outcome.applied)

    def save(self) -> list[list[bool]]:
        """Return, per callback: anything applied since it was last asked by step, by epoch?"""
        return [[fresh.by_step, fresh.by_epoch] for fresh in self._fresh]

    def load(self, saved: Any) -> None:
        """Take up the flags that `save` returned."""
        flags = read_flag_pairs(saved, "weight averages")
        for fresh, (by_step, by_epoch) in zip(self._fresh, flags, strict=False):
            fresh.by_step, fresh.by_epoch = by_step, by_epoch

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        return {**super().__getstate__(), "_patches": [], "_fresh": []}


@dataclass
class Fresh:
    """Whether an update was applied since one callback was last asked, by step and by epoch."""

    by_step: bool = False
    by_epoch: bool = False

    def note(self, applied: bool) -> None:
        """Take down what became of an attempt."""
        self.by_step |= applied
        self.by_epoch |= applied


class Kept(Fresh):
    """Likewise for an average that the module keeps: `by_epoch` stands for attempts of any outcome."""

    def note(self, applied: bool) -> None:
        """Take down what became of an attempt."""
        self.by_step |= applied
        self.by_epoch = True


def _should_update(
    fresh: Fresh,
    asked: Callable[..., bool],
    step_idx: int | None = None,
    epoch_idx: int | None = None,
) -> bool:
    if step_idx is not None:
        new, fresh.by_step = fresh.by_step, False
    else:
        new, fresh.by_epoch = fresh.by_epoch, False
    # asked even when nothing is new: a user's `should_update` may count the questions
    return asked(step_idx=step_idx, epoch_idx=epoch_idx) and new


def _sample(
    fresh: Fresh,
    update: Callable[..., None],
    average_model: Any,
    model: Any,
    n_averaged: Any,
    avg_fn: Any,
) -> None:
    # the first sample replaces the average, which would be the initial weights without it
    if fresh.by_epoch or int(n_averaged) == 0:
        fresh.by_epoch = False
        update(average_model, model, n_averaged, avg_fn)


def _update(fresh: Fresh, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    applied, attempted = fresh.by_step, fresh.by_epoch
    fresh.by_step = fresh.by_epoch = False
    if applied or not attempted:
        update(*args, **kwargs)


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
    epoch without one, its first sample excepted. Torch's `AveragedModel` as a part of the module
    leaves out your call of `update_parameters` if every attempt since the previous call was skipped.

    Args:
        enabled: `False` lets them sample as in stock Lightning.

    Runs: after each attempt, and when a callback, or the module, is about to sample.
    Keeps: two flags per average in the plugin's checkpoint entry.
    Host sync: none; one per SWA sample.
    """

    averaging, swa = averaging_callbacks(lightning_callbacks)
