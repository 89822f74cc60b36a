# SPDX-License-Identifier: Apache-2.0
"""AveragingGate: weight averages take their samples from applied updates only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import callbacks as lightning_callbacks
from torch.nn import Module
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
        self._pending: list[list[bool]] = []

    def attach(self, host: Host) -> None:
        """Stand before the averaging callbacks of this fit."""
        self.detach()
        super().attach(host)
        self._fresh, self._pending = [], []
        for callback in host.trainer.callbacks:
            if isinstance(callback, self.averaging):
                self._stand_before(callback, "should_update", partial(_should_update, Fresh()))
            elif isinstance(callback, self.swa):
                self._stand_before(callback, "update_parameters", partial(_sample, Fresh()))
        self.see_epoch()

    def see_epoch(self) -> None:
        """Stand before the averages that the module keeps, also those that it has made since."""
        assert self.host is not None
        known = [patch.instance for patch in self._patches]
        for module in self.host.module.modules():
            if isinstance(module, AveragedModel) and all([module is not one for one in known]):
                each = [Kept(lane.idx) for lane in self.host.running().windows.lanes]
                self._stand_before(module, "update_parameters", partial(self._update, each), each)

    def _stand_before(
        self, sampler: Any, name: str, wrapper: partial[Any], fresh: Sequence[Fresh] = ()
    ) -> None:
        def ask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.host is not None:
                self.host.settle()
            return wrapper(original, *args, **kwargs)

        for one in fresh or wrapper.args:
            if self._pending:  # of one that was made after the checkpoint was loaded
                one.by_step, one.by_epoch = self._pending.pop(0)
            self._fresh.append(one)
        self._patches.append(InstancePatch(sampler, name, ask))

    def _update(
        self, each: Sequence[Kept], update: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Sample unless every attempt of the optimizers that train the model was skipped."""
        asked = self._trained_by(next(iter((*args, *kwargs.values())), None), each)
        applied = any([fresh.by_step for fresh in asked])
        attempted = any([fresh.by_epoch for fresh in asked])
        for fresh in asked:
            fresh.by_step = fresh.by_epoch = False
        if applied or not attempted:
            update(*args, **kwargs)

    def _trained_by(self, model: Any, each: Sequence[Kept]) -> Sequence[Kept]:
        """Return what is known of the optimizers of `model`; of all, where it has none of them."""
        if self.host is None or not isinstance(model, Module) or len(each) == 1:
            return each
        own = {id(p) for p in model.parameters()}
        lanes = self.host.running().windows.lanes
        idxs = {x.idx for x in lanes if own & {id(p) for c in x.cells for p in c.params}}
        return [fresh for fresh in each if fresh.optimizer in idxs] or each

    def detach(self) -> None:
        """Give the callbacks their methods back."""
        for patch in self._patches:
            patch.undo()
        self._patches = []
        super().detach()

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Remember whether there is anything new to sample."""
        for fresh in self._fresh:
            if fresh.optimizer in (None, outcome.optimizer_idx):
                fresh.note(outcome.applied)

    def save(self) -> list[list[bool]]:
        """Return, per callback: anything applied since it was last asked by step, by epoch?

        Of an average that the module keeps, per optimizer: applied, attempted since its last call?
        """
        return [[fresh.by_step, fresh.by_epoch] for fresh in self._fresh]

    def load(self, saved: Any) -> None:
        """Take up the flags that `save` returned."""
        flags = read_flag_pairs(saved, "weight averages")
        for fresh, (by_step, by_epoch) in zip(self._fresh, flags, strict=False):
            fresh.by_step, fresh.by_epoch = by_step, by_epoch
        self._pending = flags[len(self._fresh) :]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        return {**super().__getstate__(), "_patches": [], "_fresh": [], "_pending": []}


@dataclass
class Fresh:
    """Whether an update was applied since one callback was last asked, by step and by epoch."""

    by_step: bool = False
    by_epoch: bool = False
    optimizer: int | None = None  # whose attempts count; `None` for those of all

    def note(self, applied: bool) -> None:
        """Take down what became of an attempt."""
        self.by_step |= applied
        self.by_epoch |= applied


class Kept(Fresh):
    """One optimizer's attempts, for an average that the module keeps: `by_epoch` is any outcome's."""

    def __init__(self, optimizer: int) -> None:
        super().__init__(optimizer=optimizer)

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
    leaves out your call of `update_parameters` if every attempt since the previous call was skipped,
    by the optimizers that train the model it averages.

    Args:
        enabled: `False` lets them sample as in stock Lightning.

    Runs: after each attempt, and when a callback, or the module, is about to sample.
    Keeps: two flags per average, and optimizer for one in the module, in the plugin's entry.
    Host sync: none; one per SWA sample.
    """

    averaging, swa = averaging_callbacks(lightning_callbacks)
