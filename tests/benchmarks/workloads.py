# SPDX-License-Identifier: Apache-2.0
"""What is measured: each workload with its model, its arms and how long a run takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.benchmarks.arms import Accelerate, Arm, Bare, Floor, Job, Lightning
from tests.benchmarks.models import Adversaries, ManyParameters, Model, Shared, TinyMLP

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A model and the arms that run it, side by side.

    Args:
        title: What it shows, in a line.
        model: Makes the model; called with whether the optimizer is fused.
        arms: In the table's order; the others' times are divided by the first's.
        steps: Timed steps per arm.
        turn: Steps in a row before the next arm's turn. On the CPU each is timed for itself.
        shape: Of one micro-batch.
        weighs_errors: Whether the gradient of `model.lin.weight` is compared with float32's.
    """

    title: str
    model: Callable[[bool], Model]
    arms: tuple[Arm, ...]
    steps: int = 100
    turn: int = 4
    shape: tuple[int, ...] = (4, 16)
    window: int = 1
    clip: float | None = None
    precision: str = "16-mixed"
    weighs_errors: bool = False

    def job(
        self, arm: Arm, device: str, steps: int, border: Callable[..., None], **other: object
    ) -> Job:
        """Return a fresh run of one arm."""
        torch.manual_seed(0)
        batch = torch.randn(self.shape).to(device)
        model = self.model(arm.fused)
        return Job(
            model, batch, device, steps, border, self.window, self.clip, self.precision, **other
        )


STOCK = Lightning("stock MixedPrecision")
SAFE = Lightning("SafeAMP", options={})
MONITOR = Lightning("SafeAMP + AmpMonitor", options={}, monitor=True)
USUAL = (STOCK, SAFE, MONITOR, Bare("bare PyTorch"), Accelerate("Accelerate"))

GUARD = (
    STOCK,
    Lightning("SafeAMP, guard on", options={}),
    Lightning("SafeAMP, guard off", options={"bf16_guard": False}),
    MONITOR,
    Bare("bare PyTorch"),
    Accelerate("Accelerate"),
)

WORKLOADS = {
    "tiny-mlp": Workload("tiny MLP, AdamW: framework-bound", TinyMLP, USUAL),
    "tiny-mlp-clip": Workload(
        "tiny MLP, AdamW, clip by norm: framework-bound", TinyMLP, USUAL, clip=0.01
    ),
    "optimizer": Workload(
        "25 M parameters, AdamW, clip by norm, a forward pass that costs nothing",
        ManyParameters,
        (
            STOCK,
            Lightning("SafeAMP", options={}),
            Lightning("SafeAMP, fused", fused=True, options={}),
            Lightning("SafeAMP, fused + AmpMonitor", fused=True, options={}, monitor=True),
            Bare("bare PyTorch, fused", fused=True),
            Floor("floor: norm + fused step", fused=True),
            Accelerate("Accelerate, fused", fused=True),
        ),
        steps=12,
        turn=1,
        clip=1.0,
    ),
    "sharing": Workload(
        "one Linear called 16 times, SGD",
        lambda fused: Shared(fused),
        (
            STOCK,
            SAFE,
            Lightning("SafeAMP, weight_cache=True", options={"weight_cache": True}),
            MONITOR,
            Bare("bare PyTorch"),
            Bare("bare PyTorch, cached", cache=True),
            Accelerate("Accelerate"),
        ),
        shape=(8, 32),
        weighs_errors=True,
    ),
    "accumulation": Workload(
        "tiny MLP, AdamW, 4 micro-batches a step", TinyMLP, USUAL, steps=40, window=4
    ),
    "gan": Workload("GAN: two optimizers by hand, AdamW", Adversaries, USUAL, steps=60),
    "bf16": Workload("BF16, tiny MLP, AdamW", TinyMLP, GUARD, precision="bf16-mixed"),
    "bf16-clip": Workload(
        "BF16, tiny MLP, AdamW, clip by norm", TinyMLP, GUARD, clip=0.01, precision="bf16-mixed"
    ),
}
