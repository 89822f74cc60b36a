# SPDX-License-Identifier: Apache-2.0
"""The arms of the benchmarks: Trainers with one plugin or another, hand-written loops, Accelerate."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import AmpMonitor, SafeAMP
from tests.benchmarks.models import Model

__all__ = ["SCALE", "Accelerate", "Arm", "Bare", "Floor", "Job", "Lightning"]

SCALE = 2.0**8  # far from an overflow, and below torch's growth interval in number of steps


@dataclass
class Job:
    """What an arm has to run, and whom it tells that a step is over.

    A step begins where its first batch is fetched and ends where the next step's is, so it holds all
    of a loop's overhead, and nothing is added to a Trainer for measuring it.

    Args:
        model: The module to train.
        batch: What every micro-batch is.
        device: "cpu" or "cuda".
        steps: Optimizer steps to run; one more batch is fetched and run after the last.
        border: Called at each border between steps with the optimizers; `steps + 1` times.
        window: Micro-batches per step.
        clip: Total norm to clip to; `None` for no clipping.
        precision: "16-mixed" or "bf16-mixed".
    """

    model: Model
    batch: Tensor
    device: str
    steps: int
    border: Callable[[Sequence[Optimizer]], None]
    window: int = 1
    clip: float | None = None
    precision: str = "16-mixed"
    optimizers: Callable[[], Sequence[Optimizer]] = field(default=tuple)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.precision == "16-mixed" else torch.bfloat16

    def __len__(self) -> int:
        return self.steps * self.window + 1

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(len(self)):
            if i % self.window == 0:
                self.border(self.optimizers())
            yield self.batch


@dataclass(frozen=True)
class Arm:
    """One way to run a workload; the first arm of a workload is the one others are compared with."""

    name: str
    fused: bool = False

    def why_not(self, device: str, precision: str) -> str | None:
        """Return why this arm cannot run here, or `None`."""
        return None

    def run(self, job: Job) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Lightning(Arm):
    """A real Trainer. `plugin(precision)` makes SafeAMP; stock `MixedPrecision` without one."""

    options: dict[str, Any] | None = None
    monitor: bool = False

    def plugin(self, job: Job) -> Any:
        fp16 = job.precision == "16-mixed"
        if self.options is None:
            scaler = torch.amp.GradScaler(job.device, init_scale=SCALE) if fp16 else None
            return MixedPrecision(job.precision, job.device, scaler)
        scale = {"init_scale": SCALE} if fp16 else {}
        return SafeAMP(job.precision, **scale, **self.options)

    def run(self, job: Job) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                accelerator="gpu" if job.device == "cuda" else "cpu",
                devices=1,
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                plugins=[self.plugin(job)],
                callbacks=[AmpMonitor()] if self.monitor else [],
                accumulate_grad_batches=job.window,
                gradient_clip_val=job.clip,
            )
            job.optimizers = lambda: trainer.optimizers
            trainer.fit(job.model, job)


@dataclass(frozen=True)
class Bare(Arm):
    """A loop by hand with torch's GradScaler, as torch's documentation writes it."""

    cache: bool = False  # as both plugins have it; torch's own default is True

    def run(self, job: Job) -> None:
        model, optimizers = _begin(job)
        fp16 = job.precision == "16-mixed"
        scaler = torch.amp.GradScaler(job.device, init_scale=SCALE, enabled=fp16)
        autocast = torch.autocast(job.device, dtype=job.dtype, cache_enabled=self.cache)

        def step(optimizer: Optimizer) -> None:
            if job.clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            scaler.step(optimizer)

        def backward(loss: Tensor) -> None:
            scaler.scale(loss).backward()

        for i, batch in enumerate(job):
            if _ahead(job, batch, i, autocast, optimizers, backward, step):
                scaler.update()


@dataclass(frozen=True)
class Floor(Arm):
    """The least that clipping by norm can cost: one norm, read, and the bare fused step."""

    def run(self, job: Job) -> None:
        model, optimizers = _begin(job)

        def step(optimizer: Optimizer) -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if float(torch.nn.utils.get_total_norm(grads)) < float("inf"):
                optimizer.step()

        for i, batch in enumerate(job):
            _ahead(job, batch, i, nullcontext(), optimizers, Tensor.backward, step)


@dataclass(frozen=True)
class Accelerate(Arm):
    """The loop of Hugging Face Accelerate's documentation."""

    def why_not(self, device: str, precision: str) -> str | None:
        if importlib.util.find_spec("accelerate") is None:
            return "not installed"
        if device == "cpu" and precision == "16-mixed":
            return "refuses fp16 on the CPU"
        return None

    def run(self, job: Job) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import GradScalerKwargs

        AcceleratorState._reset_state(True)  # else the first precision holds for the whole process
        accelerator = Accelerator(
            cpu=job.device == "cpu",
            mixed_precision={"16-mixed": "fp16", "bf16-mixed": "bf16"}[job.precision],
            gradient_accumulation_steps=1,  # windows are counted by `_ahead`
            kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)],
        )
        model, raw = _begin(job)
        optimizers = [accelerator.prepare(optimizer) for optimizer in raw]

        def step(optimizer: Any) -> None:
            if job.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()

        for i, batch in enumerate(job):
            autocast = accelerator.autocast()
            _ahead(job, batch, i, autocast, optimizers, accelerator.backward, step)


def _begin(job: Job) -> tuple[Model, list[Optimizer]]:
    model = job.model.to(job.device).train()
    made = model.configure_optimizers()
    optimizers = made if isinstance(made, list) else [made]
    job.optimizers = lambda: optimizers
    return model, optimizers


def _ahead(
    job: Job,
    batch: Tensor,
    i: int,
    autocast: AbstractContextManager[Any],
    optimizers: Sequence[Any],
    backward: Callable[[Tensor], object],
    step: Callable[[Any], object],
) -> bool:
    """Run micro-batch `i`; return whether it ended a step."""
    if not job.model.automatic_optimization:
        with autocast:
            job.model.play(batch, optimizers, lambda *what: _turn(*what, backward, step))
        return True
    with autocast:
        loss = job.model.training_step(batch, i)
    backward(loss / job.window if job.window > 1 else loss)
    if (i + 1) % job.window:
        return False
    step(optimizers[0])
    optimizers[0].zero_grad()
    return True


def _turn(
    loss: Tensor,
    optimizer: Any,
    backward: Callable[[Tensor], object],
    step: Callable[[Any], object],
) -> None:
    optimizer.zero_grad()
    backward(loss)
    step(optimizer)
