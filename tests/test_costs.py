# SPDX-License-Identifier: Apache-2.0
"""What a healthy step costs beside stock Lightning: host reads, tensor ops, walks, Python calls."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import SafeAMP
from tests.costs import WALK, WARM, Meter
from tests.helpers import make_trainer, stock_plugin

SCALE = 2.0**8  # far from an overflow

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
CLIPS = {
    "no-clip": {},
    "norm": {"gradient_clip_val": 1.0},
    "value": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
}
PLAIN = [(name, clip) for name in ("sgd", "adamw") for clip in CLIPS]


class TinyMLP(L.LightningModule):
    def __init__(self, name, scheduler=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.make_optimizer, self.scheduler = OPTIMIZERS[name], scheduler

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def measure(plugin, name, *, ops=False, window=1, scheduler=False, **kwargs):
    meter = Meter(window, ops)
    n = WARM + 2 * window
    trainer = make_trainer(plugin, callbacks=[meter], accumulate_grad_batches=window, **kwargs)
    loader = DataLoader(TensorDataset(torch.randn(n, 4, 16)), batch_size=None)
    trainer.fit(TinyMLP(name, scheduler), loader)
    assert meter.python > 0
    if isinstance(plugin, SafeAMP):
        assert (plugin.tally.applied, plugin.tally.skipped) == (n // window, 0)
    return meter


def safe():
    return SafeAMP(init_scale=SCALE)


def stock_bf16():
    return MixedPrecision("bf16-mixed", "cpu")


@pytest.mark.parametrize("clip", CLIPS)
def test_an_sgd_step_costs_one_host_read(clip):
    assert measure(safe(), "sgd", ops=True, **CLIPS[clip]).reads == 1


@pytest.mark.parametrize("clip", CLIPS)
def test_an_adamw_step_costs_no_read_beyond_stock(clip):
    # torch's for-loop AdamW reads its own step counter once per parameter
    ours = measure(safe(), "adamw", ops=True, **CLIPS[clip]).reads
    stock = measure(stock_plugin(init_scale=SCALE), "adamw", ops=True, **CLIPS[clip]).reads
    assert ours == stock == 1 + 4


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_costs_one_host_read_whatever_its_length(window):
    # batches 6.. are a whole window for both lengths
    assert measure(safe(), "sgd", ops=True, window=window).reads == 1


def test_the_meter_sees_reads_of_every_kind():
    tensor = torch.ones(2)
    meter = Meter(ops=True)
    meter.on_train_batch_start(None, None, None, WARM)
    tensor[0].item(), tensor.tolist(), tensor.numpy(), bool(tensor[0]), tensor.equal(tensor)
    meter.on_train_batch_end(None, None, None, None, WARM)
    assert meter.reads == 5


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" not in name])
def test_a_step_without_clipping_takes_no_more_tensor_ops_than_stock(name, window):
    ours = measure(safe(), name, ops=True, window=window).ops.count
    stock = measure(stock_plugin(init_scale=SCALE), name, ops=True, window=window).ops.count
    assert ours.total() <= stock.total()
    assert ours["aten.linear.default"] == stock["aten.linear.default"]
    assert ours[WALK] == stock[WALK] == 1


@pytest.mark.parametrize("window", [1, 3])
def test_a_fused_step_reads_nothing_and_pays_with_operations_on_single_numbers(window):
    ours = measure(safe(), "adamw-fused", ops=True, window=window)
    stock = measure(stock_plugin(init_scale=SCALE), "adamw-fused", ops=True, window=window)
    assert ours.reads == stock.reads == 0
    assert ours.ops.count[WALK] == stock.ops.count[WALK] == 1
    assert ours.ops.count.total() <= stock.ops.count.total() + 20 + 6 * (window - 1)


@pytest.mark.parametrize("scheduler", [False, True], ids=["constant-lr", "scheduler"])
@pytest.mark.parametrize(
    ("name", "clip"), [*PLAIN, ("adamw-fused", "no-clip")], ids=lambda value: value
)
def test_python_calls_per_fp16_step_stay_within_a_tenth_of_stock(name, clip, scheduler):
    kwargs = {"scheduler": scheduler, **CLIPS[clip]}
    ours = measure(safe(), name, **kwargs).python
    stock = measure(stock_plugin(init_scale=SCALE), name, **kwargs).python
    assert ours <= 1.10 * stock


@pytest.mark.parametrize("clip", CLIPS)
def test_python_calls_per_bf16_step_stay_within_a_tenth_of_stock(clip):
    ours = measure(SafeAMP("bf16-mixed"), "adamw", **CLIPS[clip]).python
    stock = measure(stock_bf16(), "adamw", **CLIPS[clip]).python
    assert ours <= 1.10 * stock


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_guard_costs_one_read_and_one_walk(name):
    ours = measure(SafeAMP("bf16-mixed"), name, ops=True)
    stock = measure(stock_bf16(), name, ops=True)
    assert ours.reads == stock.reads + (0 if "fused" in name else 1)
    assert ours.ops.count[WALK] == stock.ops.count[WALK] + 1
    # beside the walk and the read: its flag and factor, and the loss kept for the blame
    more = ours.ops.count - stock.ops.count
    assert more.total() <= (12 if "fused" in name else 5)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_bf16_guard_costs_one_read_also_where_gradients_are_clipped(clip):
    ours = measure(SafeAMP("bf16-mixed"), "sgd", ops=True, **CLIPS[clip])
    stock = measure(stock_bf16(), "sgd", ops=True, **CLIPS[clip])
    assert ours.reads == stock.reads + 1


def test_bf16_without_its_guard_costs_no_read_and_no_walk():
    ours = measure(SafeAMP("bf16-mixed", bf16_guard=False), "sgd", ops=True)
    assert ours.reads == 0
    assert ours.ops.count[WALK] == 0
