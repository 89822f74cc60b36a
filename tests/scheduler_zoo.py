# SPDX-License-Identifier: Apache-2.0
"""Every scheduler that torch has, users' own kinds, and the schedule of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LinearLR, LRScheduler, StepLR

from lightning_amp_guard import SafeAMP
from tests.helpers import GOOD, make_trainer
from tests.optimizer_zoo import Bowl, differences, loader

Make = Callable[[Any], Any]

# What a scheduler cannot be built without, or would do nothing within a few steps.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ConstantLR": {"total_iters": 2},
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.25, "max_lr": 1.0, "step_size_up": 2},
    "ExponentialLR": {"gamma": 0.5},
    "LambdaLR": {"lr_lambda": lambda n: 1 / (1 + n)},
    "LinearLR": {"total_iters": 3},
    "MultiStepLR": {"milestones": [1, 3]},
    "MultiplicativeLR": {"lr_lambda": lambda n: 0.75},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 12},
    "PolynomialLR": {"total_iters": 4},
    "ReduceLROnPlateau": {"patience": 1, "factor": 0.5},
    "SWALR": {"swa_lr": 0.0625, "anneal_epochs": 3},
    "StepLR": {"step_size": 2, "gamma": 0.5},
}


def chained(optimizer: Any) -> Any:
    """A warm-up and a decay at once."""
    return lr_scheduler.ChainedScheduler([LinearLR(optimizer, 0.5), ExponentialLR(optimizer, 0.75)])


def sequential(optimizer: Any) -> Any:
    """A warm-up, then a decay."""
    parts = [ConstantLR(optimizer, 0.5, total_iters=2), StepLR(optimizer, 1, gamma=0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


OF_OTHERS: dict[str, Make] = {"ChainedScheduler": chained, "SequentialLR": sequential}


def schedulers_of_torch() -> dict[str, Make]:
    """Return what builds each scheduler that torch has to offer, new ones too."""
    found = {**vars(lr_scheduler), **vars(swa_utils)}
    kinds = {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and name[0] != "_"
    }
    del kinds["LRScheduler"]
    return {name: OF_OTHERS.get(name) or _maker(kinds[name]) for name in sorted(kinds)}


def _maker(kind: type[Any]) -> Make:
    def make(optimizer: Any) -> Any:
        try:
            return kind(optimizer, **ARGUMENTS.get(kind.__name__, {}))
        except TypeError as error:
            raise AssertionError(
                f"say in ARGUMENTS how {kind.__name__} is built: {error}"
            ) from None

    return make


class TimmStyle:
    """As in timm: the caller counts, `step(epoch)` once an epoch, `step_update(n)` in each update."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.base = optimizer, optimizer.param_groups[0]["lr"]
        self.epochs: list[int] = []
        self.updates: list[int] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.epochs.append(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.updates.append(num_updates)
        self.optimizer.param_groups[0]["lr"] = self.base / (1 + num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def momentum(params: Any) -> Any:
    """The momentum is there to be cycled."""
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def metric(batch: int) -> float:
    """What a plateau scheduler hears of at batch number `batch`: better only every third time."""
    return -float(batch // 3)


def rates(optimizer: Any) -> list[tuple[float, Any]]:
    """Return what schedulers set: rate and momentum of each group."""
    return [(g["lr"], g.get("momentum", g.get("betas"))) for g in optimizer.param_groups]


class Scheduled(Bowl):
    """`Bowl` with schedulers; notes the rates in force after each batch's turns."""

    def __init__(self, plan: Any, *makes: Make, make: Make = momentum, **kwargs: Any) -> None:
        heard = kwargs.pop("heard", True)
        super().__init__(make, plan, heard=heard)
        self.makes, self.config = makes, {"interval": "step", "frequency": 1, **kwargs}
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(rates(self.trainer.optimizers[0]))
        self.log("l", torch.tensor(metric(self.seen)))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        made = [make(optimizer) for make in self.makes]
        if not self.automatic_optimization:
            return [optimizer], made
        return [optimizer], [{"scheduler": s, "monitor": "l", **self.config} for s in made]


class ManualScheduled(Scheduled):
    """`Scheduled` in manual optimization: steps its schedulers in every `frequency`-th batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer, schedulers = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if (self.seen + 1) % self.config["frequency"] == 0:
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(metric(self.seen))
                else:
                    scheduler.step()


def turns(plan: Sequence[str], every: int) -> Iterator[bool]:
    """Yield for each batch whether schedulers advance after it: a turn, and an update before it."""
    applied = False
    for i, fault in enumerate(plan):
        applied |= fault == GOOD
        turn = (i + 1) % every == 0
        yield turn and applied
        applied &= not turn


def by_hand(
    plan: Sequence[str], *makes: Make, every: int = 1, make: Make = momentum
) -> tuple[list[Any], list[Any]]:
    """Return the rates in force in each batch, and the schedulers at the end."""
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    made = [make(optimizer) for make in makes]
    used = []
    for i, (fault, advance) in enumerate(zip(plan, turns(plan, every), strict=True)):
        used.append(rates(optimizer))
        if fault == GOOD:
            optimizer.step()
        for scheduler in made if advance else ():
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(metric(i))
            else:
                scheduler.step()
    return used, made


def fit(model: Any, n: int, epochs: int = 1, precision: str = "16-mixed", **kwargs: Any) -> Any:
    """Fit on `n` batches and return the Trainer; keyword arguments go to `fit`."""
    plugin = SafeAMP(precision, init_scale=1024.0, growth_interval=2)
    trainer = make_trainer(plugin, max_epochs=epochs)
    trainer.fit(model, loader(n), **kwargs)
    return trainer


def plain(state: Any) -> Any:
    """Return a state without what no two schedulers share: functions, and objects inside."""
    if isinstance(state, dict):
        return {k: plain(v) for k, v in state.items() if not callable(v)}
    if isinstance(state, (list, tuple)):
        return [plain(v) for v in state]
    return state if isinstance(state, (int, float, str, Tensor, type(None))) else type(state)


def deviations(used: Any, trainer: Any, want: tuple[list[Any], list[Any]]) -> list[str]:
    """Return where rates and states part from those of a loop by hand."""
    rates_by_hand, made = want
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    one, other = [used, plain(states)], [rates_by_hand, plain([s.state_dict() for s in made])]
    return [*differences(one, other)]
