# SPDX-License-Identifier: Apache-2.0
"""What is hooked, when, and for how long, in runs whose plugin looks for no culprit itself."""

from __future__ import annotations

import math

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_amp_guard import AmpMonitor, SafeAMP
from lightning_amp_guard.monitor.suspicion import Suspicion
from lightning_amp_guard.outcome import SkipReason, StepOutcome
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, fit, stock_plugin
from tests.monitor.runs import monitored, under

GOOD_BATCH, BAD_BATCH = torch.ones(2), torch.tensor([1.0, math.nan])


def hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def applied(attempt=0, idx=0, norm=None):
    return StepOutcome(idx, attempt, True, None, 8.0, 8.0, 1, norm)


def skipped(attempt=0, idx=0, reason=SkipReason.NONFINITE_GRADIENTS):
    return StepOutcome(idx, attempt, False, reason, 8.0, 4.0, 1)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.fixture
def suspicion(net):
    made = Suspicion(net)
    yield made
    made.close()
    assert hooks(net) == 0


@pytest.mark.parametrize(
    ("outcome", "loss", "armed"),
    [
        (applied(), None, False),
        (applied(norm=2.0), 1.0, False),
        (applied(norm=math.inf), 1.0, True),
        (applied(norm=math.nan), None, True),
        (applied(), math.inf, True),
        (skipped(), None, True),
        (skipped(reason=SkipReason.NONFINITE_LOSS), None, True),
        (skipped(reason=SkipReason.PARTNER_SKIPPED), None, False),
    ],
)
def test_any_sign_of_trouble_arms(suspicion, net, outcome, loss, armed):
    suspicion.hear(outcome, loss, GOOD_BATCH)
    assert suspicion.armed is armed
    assert (hooks(net) > 0) is armed
    assert (suspicion.bad_batch, suspicion.bad_attempts) == ("", ())


def test_clean_step_of_whoever_was_in_trouble_disarms(suspicion):
    suspicion.hear(skipped(0), None, GOOD_BATCH)
    suspicion.hear(applied(0, idx=1), None, GOOD_BATCH)
    assert suspicion.armed
    suspicion.hear(applied(1), None, GOOD_BATCH)
    assert not suspicion.armed


def test_bad_batches_are_told_with_their_attempts(suspicion):
    suspicion.hear(applied(3), math.nan, BAD_BATCH)
    first = suspicion.bad_batch
    suspicion.hear(skipped(4, reason=SkipReason.NONFINITE_LOSS), None, GOOD_BATCH)
    assert "1 NaN in 2 values" in first
    assert (suspicion.bad_batch, suspicion.bad_attempts) == (first, ((0, 3),))
    suspicion.note(0, 7, math.inf, {"x": BAD_BATCH}, applied=True)
    assert "batch['x'] holds 1 NaN" in suspicion.bad_batch
    assert suspicion.bad_attempts == ((0, 3), (0, 7))


def test_bad_batch_of_a_good_loss_is_nobodys_business(suspicion):
    suspicion.hear(skipped(0), 1.0, BAD_BATCH)
    suspicion.note(0, 1, 1.0, BAD_BATCH, applied=True)
    assert suspicion.bad_batch == ""


def test_earlier_micro_batch_of_an_armed_window_counts(suspicion):
    suspicion.see_batch(BAD_BATCH)  # not armed: not looked at
    suspicion.hear(skipped(0, reason=SkipReason.NONFINITE_LOSS), None, GOOD_BATCH)
    assert suspicion.bad_batch == ""
    suspicion.see_batch(BAD_BATCH)
    suspicion.see_batch(GOOD_BATCH)
    suspicion.hear(skipped(1, reason=SkipReason.NONFINITE_LOSS), None, GOOD_BATCH)
    assert "1 NaN" in suspicion.bad_batch
    assert suspicion.bad_attempts == ((0, 1),)


def step(suspicion, net, x):
    loss = net(x).sum()
    suspicion.see_loss(loss)
    loss.backward()


def test_module_is_named_from_the_attempt_after_the_sign(suspicion, net):
    nn.init.constant_(net[0].weight, 3e38)
    suspicion.hear(skipped(0), None, GOOD_BATCH)
    assert suspicion.culprit is None
    step(suspicion, net, torch.full((1, 2), 2.0))
    suspicion.hear(skipped(1), None, GOOD_BATCH)
    assert (suspicion.culprit.module, suspicion.culprit.what) == ("0", "inf")


def test_weights_that_hold_nan_end_the_watch_and_do_not_hide_what_was_found_before(suspicion, net):
    nn.init.constant_(net[0].weight, 3e38)
    suspicion.hear(skipped(0), None, GOOD_BATCH)
    step(suspicion, net, torch.full((1, 2), 2.0))
    suspicion.hear(skipped(1), None, GOOD_BATCH)
    found = suspicion.culprit
    nn.init.constant_(net[0].weight, math.nan)
    step(suspicion, net, torch.full((1, 2), 2.0))
    suspicion.hear(skipped(2), None, GOOD_BATCH)
    assert suspicion.culprit is found
    assert not suspicion.armed
    suspicion.hear(skipped(3), None, GOOD_BATCH)
    assert not suspicion.armed


def test_trouble_without_end_is_watched_for_32_attempts(suspicion):
    armed = []
    for attempt in range(40):
        suspicion.hear(skipped(attempt), None, GOOD_BATCH)
        armed.append(suspicion.armed)
    assert armed == [True] * 32 + [False] * 8
    suspicion.hear(applied(40), None, GOOD_BATCH)
    suspicion.hear(skipped(41), None, GOOD_BATCH)
    assert suspicion.armed


class Locator:
    """As much of `NonFiniteLocator` as matters."""

    bad_batch, culprit = "batch holds 9 NaN", "the locator's"


def test_skips_are_left_to_a_locator(net):
    suspicion = Suspicion(net, Locator())
    suspicion.hear(skipped(5, reason=SkipReason.NONFINITE_LOSS), None, GOOD_BATCH)
    assert not suspicion.armed
    assert (suspicion.bad_batch, suspicion.bad_attempts) == ("batch holds 9 NaN", ((0, 5),))
    assert suspicion.culprit == "the locator's"
    suspicion.note(0, 5, math.nan, GOOD_BATCH, applied=False)
    assert not suspicion.armed
    suspicion.hear(applied(6), math.nan, GOOD_BATCH)  # no skip: no locator is armed
    assert suspicion.armed
    suspicion.close()


# ---------------------------------------------------------------------- in fits


class Hooks(L.Callback):
    """Notes at each batch's start how many forward hooks the module has."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(hooks(pl_module) > 0)


@pytest.mark.parametrize("fault", [BAD, NAN_LOSS])
def test_stock_run_is_hooked_from_a_skip_to_the_next_clean_step_alone(fault):
    noted, model = Hooks(), Line([GOOD, fault, fault, GOOD])
    plugin = stock_plugin(init_scale=64.0)
    monitored(model, 7, plugin=plugin, callbacks=[noted])
    assert noted.seen == [False, False, True, True, False, False, False]


def test_float32_run_is_hooked_when_its_ledger_knows_a_bad_loss(tmp_path):
    # a loss of NaN times a constant: the gradient is NaN, so the weights are from then on
    noted, model = Hooks(), Line([GOOD, GOOD, NAN_LOSS])
    monitored(
        model,
        6,
        monitor=AmpMonitor(ledger=tmp_path / "x.jsonl"),
        callbacks=[noted],
        log_every_n_steps=100,
        **under("32-true"),
    )
    # nothing recovers from weights of NaN, so the watch ends with them
    assert noted.seen == [False, False, False, True, False, False]
    assert hooks(model) == 0


def test_float32_run_without_a_ledger_is_looked_at_in_log_steps_alone():
    noted = Hooks()
    monitored(
        Line([GOOD, GOOD, NAN_LOSS]), 6, callbacks=[noted], log_every_n_steps=4, **under("32-true")
    )
    assert noted.seen == [False, False, False, False, True, False]


class CountedHooks(Hooks):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(hooks(pl_module))


@pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")
@pytest.mark.parametrize("fault", [BAD, NAN_LOSS])
@pytest.mark.parametrize("every", [1, 100])
def test_safeamp_run_has_no_hooks_of_the_monitor_for_a_skip(fault, every):
    noted = CountedHooks()
    callbacks = [AmpMonitor(warn_after=None), noted]
    fit(
        Line([GOOD, fault, fault]),
        SafeAMP(init_scale=64.0),
        5,
        callbacks=callbacks,
        log_every_n_steps=every,
    )
    # the locator's own: two for the model and two for its one layer
    assert noted.seen == [0, 0, 4, 4, 0]


def test_an_exception_takes_the_hooks_away():
    class Explodes(Line):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                assert hooks(self) > 0
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    model = Explodes([GOOD, BAD])
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, stock_plugin(init_scale=64.0), 4, callbacks=[AmpMonitor()])
    assert hooks(model) == 0
