# SPDX-License-Identifier: Apache-2.0
"""A model whose gradients are exact by hand, faults planted by batch number, and short fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import StepOutcome

GOOD, BAD, NAN_LOSS, NONE = "good", "bad", "nan loss", "none"


class PlantedOverflow(torch.autograd.Function):
    """Identity in the forward pass; the gradient becomes inf in the backward pass if armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * float("inf") if ctx.armed else grad), None


class Line(L.LightningModule):
    """loss = mean(w.x) with x = 1: every element of the weight has the gradient 1, in float16 too.

    `plan[i]` says what batch i does: GOOD, BAD (inf gradient), NAN_LOSS or NONE (no loss returned);
    beyond the plan all is GOOD. The weight starts at 8; SGD with lr 0.5 moves it by 0.5 per update.
    """

    def __init__(
        self,
        plan: Sequence[str] = (),
        make_optimizer: Callable[[Any], Any] | None = None,
        make_scheduler: Callable[[Any], Any] | None = None,
        width: int = 4,
        start: float = 8.0,
        **scheduler_config: Any,
    ) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(width, 1, bias=False)
        torch.nn.init.constant_(self.lin.weight, start)
        self.plan = list(plan)
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.5))
        self.make_scheduler = make_scheduler
        self.scheduler_config = {"interval": "step", **scheduler_config}
        self.seen = 0
        self.outcomes: list[StepOutcome] = []

    def loss(self, batch: Any) -> Tensor | None:
        fault = self.plan[self.seen] if self.seen < len(self.plan) else GOOD
        if fault == NONE:
            return None
        loss = PlantedOverflow.apply(self.lin(batch[0]).float().mean(), fault == BAD)
        return loss * float("nan") if fault == NAN_LOSS else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1

    def on_step_outcome(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    @property
    def weight(self) -> float:
        return float(self.lin.weight.detach()[0, 0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), **self.scheduler_config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class ManualLine(Line):
    """`Line` in manual optimization: zero_grad, backward, step in every batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if loss is not None:
            self.manual_backward(loss)
        self.between(optimizer)
        optimizer.step()

    def between(self, optimizer: Any) -> None:
        """What happens between backward and step; for subclasses."""


class WantsNorm:
    """Asks the engine for the gradient norm of every attempt; for its `witnesses`."""

    def looks(self) -> bool:
        return False

    def wants_norm(self) -> bool:
        return True

    def show(self, lane: Any) -> None:
        """Look at nothing."""


def identical(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and plain values are equal bit for bit, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


def batches(n: int, width: int = 4, size: int = 4) -> DataLoader[Any]:
    """Return a loader of `n` batches of ones."""
    return DataLoader(TensorDataset(torch.ones(n * size, width)), batch_size=size)


def make_trainer(plugin: Any = None, **kwargs: Any) -> L.Trainer:
    """Return a quiet one-device CPU Trainer."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [] if plugin is None else [plugin]
    return L.Trainer(plugins=plugins, **{**quiet, **kwargs})


def fit(
    model: L.LightningModule,
    plugin: Any = None,
    n: int = 4,
    *,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.Trainer:
    """Fit `model` on `n` batches of ones (or on `data`) and return the Trainer."""
    loader = kwargs.pop("data", None) or batches(
        n, getattr(model, "lin", torch.nn.Linear(4, 1)).in_features
    )
    trainer = make_trainer(plugin, **kwargs)
    with warnings.catch_warnings():
        # a plain DataLoader cannot resume inside an epoch; these batches are all alike
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def stock_plugin(**scaler_kwargs: Any) -> MixedPrecision:
    """Return Lightning's own plugin in real FP16 on the CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler_kwargs))
