# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor on two ranks: gradients that travel in half precision, and ranks that part."""

from __future__ import annotations

import warnings

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_amp_guard import AmpGuardWarning, AmpMonitor, SafeAMP
from tests.distributed.harness import Pair
from tests.distributed.models import Rows, own_data
from tests.helpers import BAD, make_trainer, stock_plugin
from tests.monitor.runs import FINDING

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

PLUGINS = {
    "SafeAMP": lambda: {"plugin": SafeAMP(init_scale=64.0)},
    "stock": lambda: {"plugin": stock_plugin(init_scale=64.0)},
    "float32": lambda: {"precision": "32-true"},
}


class Compressed(L.Callback):
    """Lightning registers communication hooks on CUDA alone."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


class Model(Rows):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1


class Parting(Model):
    """Rank 1 changes a weight by itself in its second batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1 and self.trainer.global_rank == 1:
            with torch.no_grad():
                self.lin.weight[0, 0] += 1.0


def told(model, rank, plugin, *callbacks, ledger=False):
    """Return the findings of a run of four batches, and what was warned of, on this rank."""
    monitor = AmpMonitor(ledger=ledger)
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        callbacks=[monitor, *callbacks],
        log_every_n_steps=2,
        **PLUGINS[plugin](),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        trainer.fit(model, own_data(rank, 4))
    said = [str(w.message) for w in caught if FINDING.match(str(w.message))]
    return [finding.to_dict() for finding in monitor.findings], said


def compressing(plugin):
    def check(rank, folder):
        return told(Model(), rank, plugin, Compressed())

    check.__name__ = f"compressing under {plugin}"
    return check


def parting(plugin, ledger=False):
    def check(rank, folder):
        path = folder / f"{plugin}.jsonl" if ledger else False
        return told(Parting(), rank, plugin, ledger=path)

    check.__name__ = f"parting under {plugin}, {ledger=}"
    return check


def healthy(plugin, ledger=False):
    def check(rank, folder):
        path = folder / f"healthy {plugin}.jsonl" if ledger else False
        plan = [] if plugin == "float32" else [BAD]
        return told(Model(plan), rank, plugin, ledger=path)

    check.__name__ = f"healthy under {plugin}, {ledger=}"
    return check


COMPRESSING = [compressing(plugin) for plugin in PLUGINS]
PARTING = [*[parting(plugin) for plugin in PLUGINS], parting("SafeAMP", True)]
HEALTHY = [healthy("SafeAMP"), healthy("SafeAMP", True), healthy("stock", True), healthy("float32")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"), [*COMPRESSING, *PARTING, *HEALTHY])


def only(answers, code):
    """Return the one finding; rank 0 alone warns."""
    (found, said), (others, silent) = answers
    assert [finding["code"] for finding in found] == [code]
    assert [line.partition(":")[0] for line in said] == [code]
    assert silent == []
    assert [finding["code"] for finding in others] == [code]
    return found[0]


@pytest.mark.parametrize("check", COMPRESSING, ids=lambda check: check.__name__)
def test_gradients_reduced_in_half_precision_are_told(pair, check):
    finding = only(pair(check), "AMP111")
    scale = 1 if "float32" in check.__name__ else 64
    assert "hook `fp16_compress_hook` reduces gradients of 2 ranks" in finding["evidence"]
    assert f"at scale {scale}: true gradients above {65504 / scale:.3g}" in finding["evidence"]
    assert finding["title"] == "gradients are reduced in half precision"


@pytest.mark.parametrize("check", PARTING, ids=lambda check: check.__name__)
def test_ranks_that_part_are_told(pair, check):
    finding = only(pair(check), "AMP111")
    expected = "2 different parameter checksums on 2 ranks; rank 1 parted from rank 0"
    assert finding["evidence"] == expected
    assert finding["title"] == "ranks differ"


@pytest.mark.parametrize("check", HEALTHY, ids=lambda check: check.__name__)
def test_ranks_that_agree_are_silent(pair, check):
    assert pair(check) == [([], []), ([], [])]
