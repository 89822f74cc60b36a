# SPDX-License-Identifier: Apache-2.0
"""Outcomes of runs under stock `MixedPrecision`, bfloat16 and float32, as the ledger tells them."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from torch.optim import SGD, AdamW

from lightning_amp_guard.monitor import AmpMonitor
from lightning_amp_guard.monitor.audit import Audit
from lightning_amp_guard.monitor.ledger.file import read_ledger
from tests.costs import Ops
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, ManualLine, fit, stock_plugin

# Planted faults are found, and rightly.
pytestmark = pytest.mark.filterwarnings("ignore:AMP1")

OVERFLOW, LOSS = "NONFINITE_GRADIENTS", "NONFINITE_LOSS"


def fused(params):
    return AdamW(params, lr=0.5, fused=True)


def stock(**kwargs):
    return stock_plugin(**{"init_scale": 8.0, **kwargs})


def audited(path, model, plugin=None, n=4, callbacks=(), **kwargs):
    """Fit with a ledger and return its rows."""
    monitor = AmpMonitor(ledger=path / "run.jsonl", warn_after=None)
    fit(model, plugin, n, callbacks=[monitor, *callbacks], **kwargs)
    return read_ledger(path / "run.jsonl")


def columns(rows, *names):
    return [tuple(getattr(row, name) for name in names) for row in rows]


# ---------------------------------------------------------------------- applied or skipped


@pytest.mark.parametrize("optimizer", [None, fused], ids=["plain", "fused"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_stock_skips_are_told_with_reason_and_scales(tmp_path, optimizer, manual):
    model = (ManualLine if manual else Line)([GOOD, BAD, NAN_LOSS, GOOD], optimizer)
    rows = audited(tmp_path, model, stock())
    # stock's scale backs off for a bad loss too
    assert columns(rows, "attempt", "applied", "reason", "scale", "next_scale") == [
        (0, True, None, 8.0, 8.0),
        (1, False, OVERFLOW, 8.0, 4.0),
        (2, False, LOSS, 4.0, 2.0),
        (3, True, None, 2.0, 2.0),
    ]
    # the loss is w.x with four w = 8, less 0.5 each per update; the norm is that of four ones
    assert rows[0].loss == 32.0
    assert rows[3].loss == pytest.approx(30.0, rel=0.01)
    assert [row.grad_norm for row in rows] == [2.0, None, None, 2.0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "64-true", "16-true"])
def test_where_nothing_is_scaled_every_attempt_is_applied(tmp_path, precision):
    rows = audited(tmp_path, Line(), n=3, precision=precision)
    assert columns(rows, "applied", "reason", "scale", "next_scale", "loss", "grad_norm") == [
        (True, None, 1.0, 1.0, 32.0 - 2.0 * i, 2.0) for i in range(3)
    ]


def test_growth_shows_in_the_attempt_that_caused_it(tmp_path):
    rows = audited(tmp_path, Line([GOOD, GOOD, BAD]), stock(growth_interval=2), 7)
    assert columns(rows, "scale", "next_scale") == [
        (8.0, 8.0),
        (8.0, 16.0),
        (16.0, 8.0),
        (8.0, 8.0),
        (8.0, 16.0),
        (16.0, 16.0),
        (16.0, 32.0),
    ]


def test_scale_is_known_after_a_user_moves_it(tmp_path):
    class Mover(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.precision_plugin.scaler.update(32.0)

    rows = audited(tmp_path, Line(), stock(), callbacks=[Mover()])
    assert [row.scale for row in rows] == [8.0, 8.0, 32.0, 32.0]


# ---------------------------------------------------------------------- windows


def test_a_window_of_three_has_the_mean_loss_and_its_last_batch(tmp_path):
    # the short last window holds two; Lightning divides by 3 all the same
    rows = audited(tmp_path, Line(), stock(), 5, accumulate_grad_batches=3)
    assert columns(rows, "batch_idx", "micro_batches") == [(2, 3), (4, 2)]
    assert rows[0].loss == pytest.approx(32.0, rel=1e-6)
    assert rows[1].loss == pytest.approx(30.0, rel=1e-6)


@pytest.mark.parametrize("plugin", [stock, lambda: None], ids=["stock", "32-true"])
def test_more_micro_batches_than_losses_are_kept_are_counted(tmp_path, plugin):
    plan = [NAN_LOSS, *[GOOD] * 69]
    rows = audited(tmp_path, Line(plan), plugin(), 70, accumulate_grad_batches=70)
    (row,) = rows
    assert row.micro_batches == 70
    assert row.reason == (LOSS if row.scale > 1 else None)  # the first of 70 was bad
    assert row.loss != row.loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # what this is about
@pytest.mark.parametrize("plugin", [stock, lambda: None], ids=["stock", "32-true"])
def test_a_step_without_a_loss_is_no_attempt(tmp_path, plugin):
    rows = audited(tmp_path, Line([GOOD, NONE, GOOD]), plugin(), 3)
    assert columns(rows, "attempt", "batch_idx", "micro_batches") == [(0, 0, 1), (1, 2, 1)]


class Two(L.LightningModule):
    """A GAN's order: both backward passes reach the first part, and only its own step clears it."""

    def __init__(self, first=8.0, second=2.0):
        super().__init__()
        self.automatic_optimization = False
        self.parts = torch.nn.ModuleList([Line(start=first), Line(start=second)])

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        (x,) = batch
        one_out, other_out = (part.lin(x).float().mean() for part in self.parts)
        other.zero_grad()
        self.manual_backward(one_out + other_out)  # reaches both
        other.step()
        one.zero_grad()
        self.manual_backward(self.parts[0].lin(x).float().mean())
        self.manual_backward(2 * self.parts[0].lin(x).float().mean())
        one.step()

    def configure_optimizers(self):
        return [SGD(part.parameters(), lr=0.5) for part in self.parts]


@pytest.mark.parametrize("plugin", [stock, lambda: None], ids=["stock", "32-true"])
def test_each_optimizer_has_the_losses_that_reached_it(tmp_path, plugin):
    rows = audited(tmp_path, Two(), plugin(), 1)
    # 32 + 8 for the second; 32 and 64 for the first, whose share of the joint loss was zeroed
    assert columns(rows, "optimizer", "attempt", "loss", "micro_batches", "grad_norm") == [
        (1, 0, 40.0, 1, 2.0),
        (0, 0, 48.0, 2, 6.0),
    ]


def test_a_closure_that_runs_several_times_is_one_attempt(tmp_path):
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3, tolerance_change=-1, max_eval=9)

    rows = audited(tmp_path, Line(make_optimizer=lbfgs), None, 2, log_every_n_steps=1)
    assert columns(rows, "attempt", "optimizer") == [(0, 0), (1, 0)]
    assert [row.stats.total for row in rows] == [4, 4]


# ---------------------------------------------------------------------- what it hears of


def test_an_optimizer_that_a_callback_puts_in_is_followed(tmp_path):
    class Swap(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.strategy.optimizers = [SGD(pl_module.parameters(), lr=0.25)]

    rows = audited(tmp_path, Line(), stock(), callbacks=[Swap()], log_every_n_steps=1)
    assert columns(rows, "attempt", "lr") == [(0, 0.5), (1, 0.5), (2, 0.25), (3, 0.25)]


def test_two_steps_of_one_scale_update_are_two_attempts():
    heard = []
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [SGD([w], lr=0.5) for w in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = stock_plugin()
    plugin.scaler = scaler

    class FakeTrainer:
        precision_plugin = plugin

    FakeTrainer.optimizers = optimizers
    audit = Audit(FakeTrainer(), heard.append, lambda *a: None, lambda: False, [])
    for weight, factor in zip(weights, (1.0, float("inf")), strict=True):
        loss = scaler.scale((weight * factor).sum())
        audit.before_backward(loss)
        loss.backward()
        audit.after_backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert heard == []
    scaler.update()
    audit.close()
    told = [(o.optimizer_idx, o.applied, o.scale, o.next_scale) for o in heard]
    assert told == [(0, True, 8.0, 4.0), (1, False, 8.0, 4.0)]
    assert heard[1].reason.name == LOSS  # inf * 1 is the loss
    assert "step" not in vars(scaler)
    assert not optimizers[0]._optimizer_step_post_hooks


def test_audit_leaves_plugin_scaler_and_optimizers_as_they_were(tmp_path):
    plugin = stock()
    before = set(vars(plugin)), set(vars(plugin.scaler))
    seen = []

    class Looker(L.Callback):
        def on_fit_end(self, trainer, pl_module):
            seen.append(len(pl_module.optimizers()._optimizer._optimizer_step_post_hooks))

    audited(tmp_path, Line(), plugin, callbacks=[Looker()])
    assert (set(vars(plugin)), set(vars(plugin.scaler))) == before
    assert seen == [0]


def test_weights_are_those_of_a_run_that_nobody_audits(tmp_path):
    plan = [GOOD, BAD, GOOD, NAN_LOSS]
    audited(tmp_path, watched := Line(plan), stock(), 6, log_every_n_steps=1)
    fit(alone := Line(plan), stock(), 6)
    assert torch.equal(watched.lin.weight, alone.lin.weight)


def test_gradients_of_a_fused_optimizer_are_shown_unscaled(tmp_path):
    rows = audited(tmp_path, Line([], fused), stock(), 1, log_every_n_steps=1)
    (row,) = rows
    assert (row.stats.largest, row.stats.normal, row.grad_norm) == (1.0, 4, 2.0)


def test_gradients_of_a_fused_optimizer_that_are_unscaled_by_hand_are_shown_as_they_are(tmp_path):
    class Unscales(ManualLine):
        def between(self, optimizer):
            self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)

    rows = audited(tmp_path, Unscales([], fused), stock(), 1, log_every_n_steps=1)
    (row,) = rows
    assert (row.stats.largest, row.grad_norm) == (1.0, 2.0)


def test_steady_steps_read_no_scale(tmp_path):
    class Counter(L.Callback):
        ops = Ops()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                self.ops.__enter__()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 5:
                self.ops.__exit__(None, None, None)

    reads = []
    for monitors in ([], [AmpMonitor()]):
        counter = Counter()
        counter.ops = Ops()
        fit(Line(), stock(), 8, callbacks=[counter, *monitors])
        reads.append(counter.ops.count["aten._local_scalar_dense.default"])
    assert reads == [3, 3]  # torch's own, one a step
