# SPDX-License-Identifier: Apache-2.0
"""Without an overflow, weights equal those of stock `MixedPrecision` bit for bit."""

from __future__ import annotations

from functools import cache

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import SafeAMP, StepTally
from tests.helpers import make_trainer, stock_plugin

STEPS, WIDTH = 50, 8
GROWTH = {"init_scale": 2.0**10, "growth_interval": 20}  # grows twice in 50 updates

OPTIMIZERS = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.05, **kw),
    "momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.05, momentum=0.9, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.01, **kw),
}
CLIPS = {
    "no-clip": {},
    "norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


class TinyMLP(L.LightningModule):
    """Random weights, random data, a regression loss that is nowhere near float16's limits."""

    def __init__(self, make_optimizer, fused=False):
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )
        self.make_optimizer, self.fused = make_optimizer, fused

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), fused=self.fused)


def train(plugin, name, accumulate=1, *, fused=False, **clip):
    model = TinyMLP(OPTIMIZERS[name], fused)
    start = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(11)
    n = STEPS * accumulate
    data = TensorDataset(torch.randn(n, 4, WIDTH), torch.randn(n, 4, 1))
    trainer = make_trainer(plugin, accumulate_grad_batches=accumulate, **clip)
    trainer.fit(model, DataLoader(data, batch_size=None))
    weights = [p.detach().clone() for p in model.parameters()]
    assert trainer.global_step == STEPS
    assert not any(torch.equal(a, b) for a, b in zip(start, weights, strict=True))
    return weights, trainer


@cache
def plain_run(name, accumulate, clip):
    """Train under SafeAMP with a non-fused optimizer; compared in more than one test."""
    plugin = SafeAMP(**GROWTH)
    return *train(plugin, name, accumulate, **CLIPS[clip]), plugin


def assert_same(ours, stock):
    for a, b in zip(ours, stock, strict=True):
        assert torch.equal(a, b)


def same_optimizer_state(ours, stock):
    a, b = (t.optimizers[0].state_dict()["state"] for t in (ours, stock))
    assert a.keys() == b.keys()
    for key, entries in a.items():
        assert entries.keys() == b[key].keys()
        for name, value in entries.items():
            assert value is b[key][name] is None or torch.equal(value, b[key][name])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp16_weights_equal_stock_bit_for_bit(name, clip, accumulate):
    stock = stock_plugin(**GROWTH)
    ours, trainer, plugin = plain_run(name, accumulate, clip)
    theirs, stock_trainer = train(stock, name, accumulate, **CLIPS[clip])
    assert_equal_runs(plugin, stock)
    assert_same(ours, theirs)
    same_optimizer_state(trainer, stock_trainer)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_fp16_weights_equal_stock_bit_for_bit(name, accumulate):
    plugin, stock = SafeAMP(**GROWTH), stock_plugin(**GROWTH)
    ours, trainer = train(plugin, name, accumulate, fused=True)
    theirs, stock_trainer = train(stock, name, accumulate, fused=True)
    assert_equal_runs(plugin, stock)
    assert_same(ours, theirs)
    same_optimizer_state(trainer, stock_trainer)


def assert_equal_runs(plugin, stock):
    assert plugin.tally == StepTally(STEPS, STEPS, 0, 0)
    assert plugin.scaler.state_dict() == stock.scaler.state_dict()
    assert plugin.scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_with_clipping_equals_the_plain_path(name, clip, accumulate):
    fused, _ = train(SafeAMP(**GROWTH), name, accumulate, fused=True, **CLIPS[clip])
    plain = plain_run(name, accumulate, clip)[0]
    unclipped = plain_run(name, accumulate, "no-clip")[0]
    for a, b, c in zip(fused, plain, unclipped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert (b - c).abs().max() > 1e-4  # the clip was in force


@pytest.mark.parametrize(
    ("clip", "fused"),
    [("no-clip", False), ("no-clip", True), ("norm", False), ("value", False)],
)
@pytest.mark.parametrize(
    ("name", "accumulate", "guard"),
    [("momentum", 3, True), ("adamw", 1, True), ("adamw", 3, False)],
)
def test_bf16_weights_equal_stock_bit_for_bit(name, accumulate, guard, clip, fused):
    plugin = SafeAMP("bf16-mixed", bf16_guard=guard)
    stock = MixedPrecision("bf16-mixed", "cpu")
    ours, trainer = train(plugin, name, accumulate, fused=fused, **CLIPS[clip])
    theirs, stock_trainer = train(stock, name, accumulate, fused=fused, **CLIPS[clip])
    assert plugin.scaler is None
    assert plugin.tally == StepTally(STEPS, STEPS, 0, 0)
    assert plugin.last_outcome.scale == 1.0
    assert_same(ours, theirs)
    same_optimizer_state(trainer, stock_trainer)


def test_trainer_sees_stock_plugin_and_torch_scaler():
    plugin = SafeAMP()
    trainer = make_trainer(plugin)
    assert trainer.precision_plugin is plugin
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert isinstance(trainer.precision_plugin.scaler, torch.amp.GradScaler)
    assert trainer.precision == "16-mixed"
