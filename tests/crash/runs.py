# SPDX-License-Identifier: Apache-2.0
"""Short runs that are bit for bit the same each time, save as they go, and can be broken anywhere."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_amp_guard import AmpMonitor, SafeAMP, TokenClock
from lightning_amp_guard.monitor.ledger.content import content_hash
from tests.helpers import BAD, GOOD, NAN_LOSS, PlantedOverflow, make_trainer

__all__ = ["SETUPS", "Parts", "Setup", "build", "final", "fit", "newest", "trail"]

BATCHES, EPOCHS, LR = 8, 3, 0.0625
FAULTS = {3: BAD, 6: NAN_LOSS, 10: BAD, 11: BAD, 16: NAN_LOSS, 19: BAD}  # by number in the run


@dataclass(frozen=True)
class Setup:
    """What a run is made of.

    `average` is "", "ema" or "swa"; `saver` is who saves: a callback that comes "first" or "last" in
    the Trainer's list, or the "module"; without `schedule` nobody needs a fused attempt's outcome at
    once, so that attempts wait on the device.
    """

    manual: bool = False
    optimizers: int = 1
    kind: str = "sgd"
    accumulate: int = 1
    clip: float | None = 0.5
    schedule: str = "step"
    average: str = ""
    clock: bool = False
    ledger: bool = True
    save_every: int = 2
    saver: str = "last"
    log_every: int = 5
    hysteresis: int = 1


SETUPS = {
    "sgd": Setup(clock=True),
    "adamw, accumulation": Setup(kind="adamw", accumulate=3, log_every=2, saver="first"),
    "fused, late": Setup(kind="fused", schedule="", ledger=False),
    "fused, late, accumulation, EMA": Setup(
        kind="fused", schedule="epoch", ledger=False, accumulate=2, average="ema", clip=None
    ),
    "fused, ledger, clock": Setup(kind="fused", clock=True, accumulate=2, saver="module"),
    "EMA, clock": Setup(kind="adamw", average="ema", clock=True, accumulate=2, save_every=3),
    "SWA": Setup(average="swa", schedule="", saver="first", save_every=3),
    "SWA, accumulation": Setup(
        average="swa", schedule="", accumulate=2, kind="adamw", save_every=3
    ),
    "hysteresis": Setup(hysteresis=2, accumulate=2, schedule="epoch", log_every=1),
    "manual": Setup(manual=True, clip=None, clock=True),
    "manual, accumulation": Setup(manual=True, accumulate=3, kind="adamw", clip=None),
    "manual, two": Setup(manual=True, optimizers=2, accumulate=2, clip=None, log_every=1),
    "manual, two, clock, EMA": Setup(
        manual=True, optimizers=2, accumulate=3, kind="fused", clip=None, clock=True, average="ema"
    ),
}


class Walk:
    """A loader that goes on where it stood: `(batch id, inputs, targets)`, the same every epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.position = n, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for i in range(self.position, self.n):
            self.position = (i + 1) % self.n
            numbers = torch.randn(4, 9, generator=torch.Generator().manual_seed(i))
            yield i, numbers[:, :8], numbers[:, 8:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Fuse(torch.autograd.Function):
    """Identity; calls `bomb` in the backward pass, when the second layer has its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Any) -> Tensor:
        ctx.bomb = bomb
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.bomb is not None:
            ctx.bomb()
        return grad, None


class Learner(L.LightningModule):
    """Two small layers, a loss for each optimizer; no randomness, faults by the batch's number."""

    def __init__(self, setup: Setup, folder: Path, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = not setup.manual
        torch.manual_seed(seed)
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
        self.second = torch.nn.Linear(16, 1)
        self.setting, self.folder = setup, folder
        self.fuse: Any = None
        self.trail: dict[int, int] = {}  # content of all weights after each batch

    def number(self, batch_id: int) -> int:
        return self.trainer.current_epoch * BATCHES + batch_id

    def losses(self, batch: Any) -> Iterator[Tensor]:
        number, x, y = batch
        fault = FAULTS.get(self.number(number), GOOD)
        for _ in range(self.setting.optimizers):
            out = self.second(Fuse.apply(self.first(x), self.fuse)).float()
            loss = torch.nn.functional.mse_loss(out, y)
            loss = PlantedOverflow.apply(loss, fault == BAD)
            yield loss * float("nan") if fault == NAN_LOSS else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if not self.setting.manual:
            return next(self.losses(batch))
        optimizers, schedulers = self.optimizers(), self.lr_schedulers() or []
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
        pairs = itertools.zip_longest(optimizers, schedulers)
        number = self.number(batch[0]) + 1
        for i, ((optimizer, scheduler), loss) in enumerate(
            zip(pairs, self.losses(batch), strict=True)
        ):
            self.manual_backward(loss / self.setting.accumulate)
            # the second optimizer's windows are one batch longer, across the first one's steps
            if number % (self.setting.accumulate + i) == 0:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.second(self.first(batch[1]))

    def on_validation_model_zero_grad(self) -> None:
        """Keep a window open across a validation, which a resumed run does not repeat."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trail[self.number(batch[0])] = int(content_hash(list(self.parameters())))
        if self.setting.saver == "module":
            save(self.trainer, self, batch)

    def configure_optimizers(self) -> Any:
        layers = [self.first, self.second]
        groups = layers if self.setting.optimizers == 2 else [self]
        made = [_make(self.setting.kind, list(group.parameters())) for group in groups]
        if not self.setting.schedule:
            return made
        interval = {"interval": self.setting.schedule}
        return made, [{"scheduler": LambdaLR(o, lambda n: 1 / (1 + n)), **interval} for o in made]


def _make(kind: str, params: list[Tensor]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.9)
    return torch.optim.AdamW(params, lr=LR, fused=kind == "fused")


def save(trainer: L.Trainer, module: Learner, batch: Any) -> None:
    """Save after every so many batches, under the number of batches done."""
    done = module.number(batch[0]) + 1
    if done % module.setting.save_every == 0:
        trainer.save_checkpoint(module.folder / f"{done:02}.ckpt")


class Saver(Callback):
    """Saves between batches."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        save(trainer, pl_module, batch)


@dataclass
class Parts:
    """The objects of one run."""

    setup: Setup
    folder: Path
    model: Learner
    amp: SafeAMP
    trainer: L.Trainer
    callbacks: list[Any]
    said: list[str] = field(default_factory=list)

    def callback(self, kind: type) -> Any:
        return next((cb for cb in self.callbacks if isinstance(cb, kind)), None)


def build(
    setup: Setup,
    folder: Path,
    *,
    seed: int = 1,
    module: type[Learner] = Learner,
    callbacks: tuple[Any, ...] = (),
    plugin: type[SafeAMP] = SafeAMP,
    **trainer: Any,
) -> Parts:
    """Return model, plugin and Trainer; another `seed` for weights that a checkpoint replaces."""
    folder.mkdir(parents=True, exist_ok=True)
    saver = [Saver()] if setup.saver != "module" else []
    made: list[Any] = [*saver] if setup.saver == "first" else []
    made += callbacks
    made += [AmpMonitor(ledger=folder / "ledger.jsonl" if setup.ledger else False)]
    made += [TokenClock(count=lambda batch: 3 + batch[0])] if setup.clock else []
    if setup.average == "ema":
        made.append(EMAWeightAveraging(decay=0.9))
    elif setup.average == "swa":
        made.append(StochasticWeightAveraging(LR, swa_epoch_start=1))
    made += saver if setup.saver == "last" else []
    model = module(setup, folder, seed)
    amp = plugin(init_scale=256.0, growth_interval=3, hysteresis=setup.hysteresis)
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 1 if setup.manual else setup.accumulate,
        "gradient_clip_val": setup.clip,
        "log_every_n_steps": setup.log_every,
        "callbacks": made,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return Parts(setup, folder, model, amp, make_trainer(amp, **{**options, **trainer}), made)


def fit(parts: Parts, ckpt_path: Path | None = None) -> Parts:
    """Fit, or go on from a checkpoint, which holds nothing that would be executed.

    What the run warns of is kept in `said`.
    """
    only = None if ckpt_path is None else True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parts.trainer.fit(
                parts.model, Walk(BATCHES), Walk(1), ckpt_path=ckpt_path, weights_only=only
            )
        finally:
            parts.said += [str(warning.message) for warning in caught]
    return parts


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole."""
    for path in sorted(folder.glob("*.ckpt"), reverse=True):
        try:
            torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, OSError):
            continue
        return path
    return None


def trail(parts: Parts) -> dict[int, int]:
    """Return the content of all weights after each batch."""
    return parts.model.trail


def final(parts: Parts) -> dict[str, Any]:
    """Return everything that would decide the next step, and the ledger's lines."""
    trainer, amp = parts.trainer, parts.amp
    clock, ema = parts.callback(TokenClock), parts.callback(EMAWeightAveraging)
    swa = parts.callback(StochasticWeightAveraging)
    state: dict[str, Any] = {
        "weights": parts.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "plugin": amp.state_dict(),
        "tallies": [asdict(tally) for tally in amp.tallies],
        "clock": None if clock is None else clock.total,
        "average": None if ema is None else ema._average_model.state_dict(),
        "samples": None if swa is None or swa.n_averaged is None else int(swa.n_averaged),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
    }
    if parts.setup.ledger:
        state["ledger"] = (parts.folder / "ledger.jsonl").read_text().splitlines()
    return state
