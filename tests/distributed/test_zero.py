# SPDX-License-Identifier: Apache-2.0
"""ZeroRedundancyOptimizer: each rank steps its part of the parameters, and all skip together."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_amp_guard import SafeAMP
from tests.distributed.harness import Pair
from tests.distributed.models import Rows, alike, joint_data, own_data
from tests.helpers import BAD, GOOD, NAN_LOSS, fit

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

PLAN = [BAD, GOOD, GOOD, NAN_LOSS, GOOD, BAD, GOOD]

KINDS = {
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5}),
    "fused": (torch.optim.AdamW, {"lr": 0.5, "fused": True}),
}


class Parts(Rows):
    """`Rows` with a second parameter for the second rank; its gradient is that of the rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.side = torch.nn.Linear(4, 2, bias=False)
        torch.nn.init.constant_(self.side.weight, 8.0)

    def training_step(self, batch, batch_idx):
        return self.loss(self.lin(batch[0]) + self.side(batch[0]))

    def rows(self):
        return [float(p.detach()[i, 0]) for p in self.parameters() for i in (0, 1)]


def run(rank, precision, name):
    kind, arguments = KINDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch compiles something in there
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(params):
        return ZeroRedundancyOptimizer(params, optimizer_class=kind, **arguments)

    model = Parts(PLAN, make)
    plugin = SafeAMP(precision, init_scale=64.0, growth_interval=2)
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = fit(
        model,
        plugin,
        data=own_data(rank, 7),
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
    )
    held = len(trainer.optimizers[0].optim.state)
    return {**model.told(), "held": held}


def fp16_momentum(rank, folder):
    return run(rank, "16-mixed", "momentum")


def fp16_fused(rank, folder):
    return run(rank, "16-mixed", "fused")


def bf16_momentum(rank, folder):
    return run(rank, "bf16-mixed", "momentum")


def bf16_fused(rank, folder):
    return run(rank, "bf16-mixed", "fused")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    return Pair(folder, [fp16_momentum, fp16_fused, bf16_momentum, bf16_fused])


@pytest.mark.parametrize("check", [fp16_momentum, fp16_fused, bf16_momentum, bf16_fused])
def test_parts_of_an_optimizer_step_or_skip_together(pair, check):
    first, second = pair(check)
    precision, name = check.__name__.split("_")
    kind, arguments = KINDS[name]
    model = Parts(PLAN, lambda params: kind(params, **arguments))
    plugin = SafeAMP(
        {"fp16": "16-mixed", "bf16": "bf16-mixed"}[precision], init_scale=64.0, growth_interval=2
    )
    fit(model, plugin, data=joint_data(7))
    assert first.pop("held") == second.pop("held") == 1  # one of two parameters on each rank
    assert [o is None for o in first["reasons"]] == [f == GOOD for f in PLAN]
    alike(first, second, model.told())
