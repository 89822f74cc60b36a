# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor on two ranks: one ledger, values of both, checksums compared."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_amp_guard import AmpGuardWarning, AmpMonitor, SafeAMP
from tests.distributed.harness import Pair
from tests.distributed.models import Rows, own_data
from tests.helpers import BAD, GOOD, make_trainer, stock_plugin

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


def watched(rank, folder, name, model, plugin, n=2, strategy=None, **kwargs):
    """Fit with a ledger of rank 0; return what is logged, the lines, and what was found."""
    place = folder / f"{name}.{rank}.jsonl"
    monitor = AmpMonitor(ledger=place, warn_after=None)
    trainer = make_trainer(
        plugin,
        devices=2,
        strategy=strategy or DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        callbacks=[monitor],
        log_every_n_steps=2,
        **kwargs,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpGuardWarning)
        trainer.fit(model, own_data(rank, n))
    values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("amp/")}
    lines = place.read_text().splitlines() if place.exists() else None
    return values, lines, [finding.code for finding in monitor.findings]


class Plain(Rows):
    """`Rows` that asks the plugin nothing."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1


def safe():
    return SafeAMP(init_scale=8.0)


def native(rank, folder):
    return watched(rank, folder, "native", Plain([BAD, GOOD]), safe())


def stock(rank, folder):
    return watched(rank, folder, "stock", Plain([BAD, GOOD]), stock_plugin(init_scale=8.0))


class Apart(Plain):
    """Rank 1's weights move on their own after the backward pass."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.global_rank:
            with torch.no_grad():
                self.lin.weight += 1.0


def apart(rank, folder):
    return watched(rank, folder, "apart", Apart(), safe(), n=4)


def sharded(rank, folder):
    class Sharded(Plain):
        def configure_model(self):
            fully_shard(self.lin, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            with torch.autocast("cpu", enabled=False):
                return self.loss(self.lin(batch[0]))

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return watched(rank, folder, "sharded", Sharded(), safe(), strategy=strategy)


CHECKS = [native, stock, apart, sharded]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("monitor"), CHECKS)


@pytest.mark.parametrize("check", [native, stock], ids=lambda check: check.__name__)
def test_rank_0_alone_keeps_a_ledger(pair, check):
    (_, lines, found), (_, nothing, same) = pair(check)
    assert nothing is None
    first, second = map(json.loads, lines)
    assert (first["applied"], first["reason"]) == (False, "NONFINITE_GRADIENTS")
    assert (first["scale"], first["next_scale"], second["applied"]) == (8.0, 4.0, True)
    # rank 0 sees ones: two rows of four weights of 8
    assert second["loss"] == 64.0
    assert second["grad_norm"] == pytest.approx(math.sqrt(32), rel=1e-6)
    assert found == same == []


@pytest.mark.parametrize("check", [native, stock, sharded], ids=lambda check: check.__name__)
def test_logged_values_are_those_of_both_ranks(pair, check):
    (one, _, _), (other, _, _) = pair(check)
    assert one.keys() == other.keys()
    assert {k: v for k, v in one.items() if not math.isnan(v)} == {
        k: v for k, v in other.items() if not math.isnan(v)
    }
    # every gradient is 2
    scale = 8.0 if check is sharded else 4.0
    assert one["amp/headroom_bits"] == math.log2(65504 / (2 * scale))
    assert (one["amp/zero_grad_fraction"], one["amp/subnormal_grad_fraction"]) == (0.0, 0.0)
    assert one["amp/grad_norm"] == pytest.approx(math.sqrt(32), rel=1e-6)
    assert one["amp/process_rss_mib"] > 50


def test_statistics_of_a_shard_are_added_up_over_ranks(pair):
    (_, lines, _), _ = pair(sharded)
    stats = json.loads(lines[-1])["stats"]
    assert stats["normal"] == 4  # rank 0's row of two
    assert stats["largest"] == 2.0


def test_ranks_that_part_are_found_on_both(pair):
    (_, _, found), (_, _, same) = pair(apart)
    assert found == same == ["AMP111"]
