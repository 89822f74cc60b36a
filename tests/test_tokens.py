# SPDX-License-Identifier: Apache-2.0
"""TokenClock: tokens of applied updates, and gradients like those of one big batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import (
    AmpGuardError,
    AmpGuardWarning,
    SafeAMP,
    ScalerCheckpoint,
    ScalerStateError,
    SkipAwareGradScaler,
    TokenClock,
    UnscaleGuard,
    _upstream,
)
from lightning_amp_guard.step.lanes import Stage
from lightning_amp_guard.step.windows import GradientWindows
from lightning_amp_guard.token_counts.count import count_labels
from lightning_amp_guard.token_counts.windows import TokenWindows
from tests.costs import Meter
from tests.helpers import BAD, GOOD, NONE, PlantedOverflow, fit, make_trainer, stock_plugin

WIDTH, CLASSES, LENGTH = 8, 5, 6


def batch_of(valid, seed):
    """A batch of 12 positions, `valid` of which have a label."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (2, LENGTH), generator=made)
    labels.view(-1)[valid:] = -100
    return {"x": torch.randn(2, LENGTH, WIDTH, generator=made), "labels": labels}


def loading(batches):
    return DataLoader(batches, batch_size=None)


def loader_of(*valid):
    return loading([batch_of(n, i) for i, n in enumerate(valid)])


def summed_loss(lin, batch):
    return cross_entropy(lin(batch["x"].flatten(0, 1)), batch["labels"].flatten(), reduction="sum")


class Tagger(L.LightningModule):
    """A linear tagger with a summed loss; `plan[i]` says what batch i does."""

    def __init__(self, plan=(), make_optimizer=None, make_lambda=None):
        super().__init__()
        torch.manual_seed(0)
        self.lin = torch.nn.Linear(WIDTH, CLASSES)
        self.plan, self.seen = list(plan), 0
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.0))
        self.make_lambda = make_lambda
        self.grads, self.norms, self.totals, self.lrs, self.outcomes = [], [], [], [], []

    def loss(self, batch):
        fault = self.plan[self.seen] if self.seen < len(self.plan) else GOOD
        if fault == NONE:
            return None
        return PlantedOverflow.apply(summed_loss(self.lin, batch), fault == BAD)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(self.grad())

    def grad(self):
        return torch.cat([p.grad.flatten() for p in self.parameters()]).clone()

    def on_step_outcome(self, outcome):
        self.outcomes.append(outcome)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1
        clock = next((c for c in self.trainer.callbacks if isinstance(c, TokenClock)), None)
        if clock is not None:
            self.totals.append(clock.total)
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lambda is None:
            return optimizer
        schedule = LambdaLR(optimizer, self.make_lambda)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ManualTagger(Tagger):
    """Calls `act(model, optimizer, batch)` in every batch."""

    def __init__(self, act, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.act = act

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", enabled=False):  # it reaches into backward passes made here
            self.act(self, self.optimizers(), batch)


def big_batch(*parts):
    """The gradient of the mean loss over the valid tokens of `(valid, seed)` batches, by hand."""
    lin = Tagger().lin
    batches = [batch_of(*part) for part in parts]
    loss = sum(summed_loss(lin, batch) for batch in batches)
    (loss / sum(valid for valid, _ in parts)).backward()
    return torch.cat([p.grad.flatten() for p in lin.parameters()])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def plugin(precision="16-mixed", **kwargs):
    # the layer computes in float32, so that the way of the gradients alone is seen
    scale = {} if precision == "bf16-mixed" else {"init_scale": 64.0, "growth_interval": 1000}
    return SafeAMP(precision, fp32_modules=["lin"], **{**scale, **kwargs})


def normalized(model, *valid, use=None, **kwargs):
    clock = TokenClock(normalize_gradients=True)
    callbacks = [clock, *kwargs.pop("callbacks", [])]
    fit(model, use or plugin(), data=loader_of(*valid), callbacks=callbacks, **kwargs)
    return clock


PLUGINS = {
    "fp16": plugin,
    "bf16": lambda: plugin("bf16-mixed"),
    "bf16-unguarded": lambda: plugin("bf16-mixed", bf16_guard=False),
}
OPTIMIZERS = {
    "sgd": None,
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.0, fused=True),
}
each_plugin = pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)


# ---------------------------------------------------------------------- gradients per token


@each_plugin
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradients_equal_those_of_one_big_batch_also_in_a_short_last_window(
    make_plugin, make_optimizer
):
    model = Tagger(make_optimizer=make_optimizer)
    clock = normalized(model, 12, 1, 5, 3, 7, use=make_plugin(), accumulate_grad_batches=3)
    assert len(model.grads) == 2
    close(model.grads[0], big_batch((12, 0), (1, 1), (5, 2)))
    close(model.grads[1], big_batch((3, 3), (7, 4)))
    assert (clock.total, clock.seen) == (28, 28)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_and_the_norm_see_gradients_per_token(fused):
    model = Tagger(make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, fused=fused))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    normalized(model, 12, 1, accumulate_grad_batches=2, gradient_clip_val=0.1)
    expected = big_batch((12, 0), (1, 1))
    norm = float(expected.norm())
    assert norm > 0.1
    assert model.outcomes[0].grad_norm == pytest.approx(norm, rel=1e-6)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(before - after, expected * 0.1 / norm, rtol=1e-4, atol=1e-6)


def test_without_normalizing_gradients_are_left_alone():
    model, other = Tagger(), Tagger()
    fit(model, plugin(), data=loader_of(12, 1), callbacks=[TokenClock()], accumulate_grad_batches=2)
    fit(other, plugin(), data=loader_of(12, 1), accumulate_grad_batches=2)
    assert torch.equal(model.grads[0], other.grads[0])


def test_micro_batch_without_a_loss_has_no_tokens():
    model = Tagger([GOOD, NONE])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`.*")
        clock = normalized(model, 12, 5, 3, accumulate_grad_batches=3)
    close(model.grads[0], big_batch((12, 0), (3, 2)))
    assert (clock.total, clock.seen) == (15, 20)


def test_window_without_valid_tokens_has_zero_gradients():
    model = Tagger()
    clock = normalized(model, 0, 0, 4, accumulate_grad_batches=2)
    assert torch.equal(model.grads[0], torch.zeros_like(model.grads[0]))
    close(model.grads[1], big_batch((4, 2)))
    assert clock.total == 4


def test_accumulation_may_change_between_epochs():
    model = Tagger()
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    normalized(model, 12, 3, callbacks=[schedule], max_epochs=2)
    close(model.grads[0], big_batch((12, 0)))
    close(model.grads[1], big_batch((3, 1)))
    close(model.grads[2], big_batch((12, 0), (3, 1)))


def test_accumulation_may_change_inside_a_window():
    class Changes(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.accumulate_grad_batches = 3  # was 4: the window ends with the third batch

    model = Tagger()
    normalized(model, 12, 3, 1, callbacks=[Changes()], accumulate_grad_batches=4)
    close(model.grads[0], big_batch((12, 0), (3, 1), (1, 2)))


def test_gradients_zeroed_in_place_hold_no_tokens():
    class ZeroesInPlace(Tagger):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    model = ZeroesInPlace()
    clock = normalized(model, 12, 3, 5, 1, accumulate_grad_batches=2)
    close(model.grads[0], big_batch((12, 0), (3, 1)))
    close(model.grads[1], big_batch((5, 2), (1, 3)))
    assert clock.total == 21


# ---------------------------------------------------------------------- applied updates only


def test_total_advances_with_applied_updates_only():
    model = Tagger([GOOD, BAD, GOOD])
    clock = TokenClock()
    fit(model, plugin(), data=loader_of(12, 1, 5), callbacks=[clock])
    assert model.totals == [12, 12, 17]
    assert clock.seen == 18


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_skipped_window_leaves_nothing_to_the_next(precision):
    model = Tagger([GOOD, BAD, GOOD, GOOD])
    clock = normalized(model, 12, 1, 5, 3, use=plugin(precision), accumulate_grad_batches=2)
    close(model.grads[1], big_batch((5, 2), (3, 3)))
    assert clock.total == 8


def test_total_drives_a_schedule_through_the_gate():
    clock = TokenClock()
    model = Tagger([GOOD, BAD, GOOD, GOOD], make_lambda=lambda _: 1.0 - clock.total / 20)
    model.make_optimizer = lambda p: torch.optim.SGD(p, lr=1.0)
    fit(model, plugin(), data=loader_of(5, 3, 4, 1), callbacks=[clock])
    # seen at each batch's end, where the scheduler has had its turn
    assert model.lrs == [0.75, 0.75, pytest.approx(0.55), pytest.approx(0.5)]


def test_total_goes_on_in_a_second_fit():
    clock = TokenClock()
    for expected in (12, 24):
        fit(Tagger(), plugin(), data=loader_of(12), callbacks=[clock])
        assert clock.total == expected


# ---------------------------------------------------------------------- manual optimization


def in_manual(act, *valid, use=None, **kwargs):
    model = ManualTagger(act, **kwargs)
    return model, normalized(model, *valid, use=use)


@each_plugin
def test_manual_windows_end_where_the_user_steps(make_plugin):
    def act(model, optimizer, batch):
        model.manual_backward(model.loss(batch))
        if model.seen in (0, 2):
            optimizer.step()
            optimizer.zero_grad()

    model, clock = in_manual(act, 12, 3, 1, use=make_plugin())
    close(model.grads[0], big_batch((12, 0)))
    close(model.grads[1], big_batch((3, 1), (1, 2)))
    assert model.totals == [12, 12, 16]
    assert clock.total == 16


def test_window_unscaled_ahead_of_its_step_is_divided_once():
    seen = []

    def act(model, optimizer, batch):
        model.manual_backward(model.loss(batch))
        model.trainer.precision_plugin.unscale_(optimizer)
        seen.append(model.grad())
        model.trainer.precision_plugin.scaler.unscale_(optimizer)
        if model.seen == 1:  # the first look was in the middle of the window
            optimizer.step()

    model, _ = in_manual(act, 12, 3)
    close(seen[0], big_batch((12, 0)))
    close(seen[1], big_batch((12, 0), (3, 1)))
    assert torch.equal(model.grads[0], seen[1])


@each_plugin
def test_clip_gradients_sees_gradients_per_token(make_plugin):
    def act(model, optimizer, batch):
        optimizer.zero_grad()
        model.manual_backward(model.loss(batch))
        model.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    model, _ = in_manual(act, 12, use=make_plugin())
    expected = big_batch((12, 0))
    assert float(expected.norm()) > 0.1
    torch.testing.assert_close(
        model.grads[0], expected * 0.1 / expected.norm(), rtol=1e-4, atol=1e-6
    )


@each_plugin
def test_gradients_that_outlive_a_step_are_not_divided_twice(make_plugin):
    def act(model, optimizer, batch):
        model.manual_backward(model.loss(batch))
        optimizer.step()
        optimizer.step()

    model, clock = in_manual(act, 12, 3, use=make_plugin())
    assert torch.equal(model.grads[0], model.grads[1])
    close(model.grads[0], big_batch((12, 0)))
    close(model.grads[2], big_batch((12, 0), (3, 1)))
    assert torch.equal(model.grads[2], model.grads[3])
    assert clock.total == 15  # each token once, though it was stepped on four times


def test_two_backward_passes_of_one_batch_count_its_tokens_once():
    def act(model, optimizer, batch):
        optimizer.zero_grad()
        half = model.loss(batch) / 2
        model.manual_backward(half, retain_graph=True)
        model.manual_backward(half)
        optimizer.step()

    model, clock = in_manual(act, 12)
    close(model.grads[0], big_batch((12, 0)))
    assert clock.total == 12


class TwoTaggers(ManualTagger):
    """A second layer with an optimizer of its own."""

    def __init__(self, act, **kwargs):
        super().__init__(act, **kwargs)
        self.other = copy.deepcopy(self.lin)

    def on_before_optimizer_step(self, optimizer):
        params = optimizer.param_groups[0]["params"]
        self.grads.append(torch.cat([p.grad.flatten() for p in params]))

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.0) for part in (self.lin, self.other)]


def both_layers(**kwargs):
    return SafeAMP(init_scale=64.0, fp32_modules=["lin", "other"], **kwargs)


def test_each_optimizer_has_its_own_window_and_the_total_follows_the_first():
    def act(model, optimizers, batch):
        first, second = optimizers
        first.zero_grad()
        model.manual_backward(summed_loss(model.lin, batch))
        first.step()
        model.manual_backward(summed_loss(model.other, batch))
        if model.seen == 1:
            second.step()

    model = TwoTaggers(act)
    clock = normalized(model, 12, 3, use=both_layers())
    close(model.grads[0], big_batch((12, 0)))
    close(model.grads[1], big_batch((3, 1)))
    close(model.grads[2], big_batch((12, 0), (3, 1)))
    assert clock.total == 15


@pytest.mark.parametrize("set_to_none", [True, False])
def test_byproducts_of_anothers_backward_pass_are_not_counted(set_to_none):
    def act(model, optimizers, batch):
        first, second = optimizers
        # both layers get gradients, as a discriminator does from its generator's loss
        model.manual_backward(summed_loss(model.lin, batch) + summed_loss(model.other, batch))
        first.step()
        first.zero_grad()
        second.zero_grad(set_to_none=set_to_none)
        model.manual_backward(summed_loss(model.other, batch))
        second.step()
        second.zero_grad(set_to_none=set_to_none)

    model = TwoTaggers(act)
    normalized(model, 12, 3, use=both_layers())
    for i, part in enumerate([(12, 0), (12, 0), (3, 1), (3, 1)]):
        close(model.grads[i], big_batch(part))


def test_gradients_inside_all_or_none_are_divided_once():
    def act(model, optimizers, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        bad = model.seen == 1
        model.manual_backward(summed_loss(model.lin, batch))
        model.manual_backward(PlantedOverflow.apply(summed_loss(model.other, batch), bad))
        with model.trainer.precision_plugin.all_or_none():
            for optimizer in optimizers:
                optimizer.step()

    model = TwoTaggers(act)
    clock = normalized(model, 12, 5, 3, use=both_layers())
    for i, part in ((0, (12, 0)), (1, (12, 0)), (2, (5, 1)), (4, (3, 2)), (5, (3, 2))):
        close(model.grads[i], big_batch(part))
    assert model.totals == [12, 12, 15]
    assert clock.total == 15


@pytest.mark.parametrize(
    ("precision", "after"), [("16-mixed", 0), ("bf16-mixed", 0), ("bf16-mixed", 1)]
)
def test_gradients_of_unknown_origin_are_refused(precision, after):
    def act(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model.loss(batch)
        model.manual_backward(loss) if model.seen < after else loss.backward()
        optimizer.step()

    quiet = [UnscaleGuard(on_violation="ignore")]
    model = ManualTagger(act)
    with pytest.raises(AmpGuardError, match=r"`self\.manual_backward\(loss\)` instead of"):
        normalized(model, 12, 3, use=plugin(precision), callbacks=quiet)
    assert len(model.outcomes) == after


def test_parameters_added_inside_a_window_keep_its_tokens():
    def act(model, optimizer, batch):
        if model.seen == 1:
            model.extra = torch.nn.Parameter(torch.zeros(1))
            optimizer.add_param_group({"params": [model.extra]})
        model.manual_backward(model.loss(batch))
        if model.seen == 1:
            model.grads.append(None)
            optimizer.step()

    class Grows(ManualTagger):
        def on_before_optimizer_step(self, optimizer):
            self.grads = [torch.cat([p.grad.flatten() for p in self.lin.parameters()])]

    model = Grows(act)
    normalized(model, 12, 3)
    close(model.grads[0], big_batch((12, 0), (3, 1)))


# ---------------------------------------------------------------------- checkpoints


class SavesAfter(L.Callback):
    def __init__(self, path, batch, hook="on_train_batch_end"):
        self.path, self.batch = path, batch
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch + 1:
            trainer.save_checkpoint(self.path)


VALID = (12, 3, 5, 1, 7, 2)


class Resumable(DataLoader):
    """Goes on after `done` batches, once."""

    def __init__(self, done=0):
        self.items = [batch_of(n, i) for i, n in enumerate(VALID)]
        super().__init__(self.items, batch_size=None)
        self.done = self.at = done

    def __iter__(self):
        for at in range(self.done, len(self.items)):
            self.at = at
            yield self.items[at]
        self.done = 0

    def state_dict(self):
        return {"done": self.at + 1}

    def load_state_dict(self, state):
        self.done = state["done"]


def run(clock, *, ckpt_path=None, use=None, callbacks=(), accumulate=3):
    model = Tagger(make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    fit(
        model,
        use or plugin(),
        data=Resumable(),
        callbacks=[clock, *callbacks],
        ckpt_path=ckpt_path,
        accumulate_grad_batches=accumulate,
    )
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, after, make_plugin):
    whole, path = TokenClock(normalize_gradients=True), tmp_path / "x.ckpt"
    model = run(whole, use=make_plugin(), callbacks=[SavesAfter(path, after)])
    clock = TokenClock(normalize_gradients=True)
    again = run(clock, ckpt_path=path, use=make_plugin())
    assert torch.equal(weights(again), weights(model))
    assert (clock.total, whole.total) == (30, 30)
    assert again.totals == model.totals[after + 1 :]


def test_window_divided_ahead_of_its_step_resumes_exactly(tmp_path):
    def looks(trainer, *args):
        trainer.precision_plugin.unscale_(trainer.optimizers[0])

    path = tmp_path / "x.ckpt"
    look = L.Callback()
    look.on_train_batch_end = looks
    model = run(TokenClock(normalize_gradients=True), callbacks=[look, SavesAfter(path, 1)])
    again = run(TokenClock(normalize_gradients=True), callbacks=[look], ckpt_path=path)
    assert torch.equal(weights(again), weights(model))


def test_resume_with_another_accumulation_is_still_one_big_batch(tmp_path):
    path = tmp_path / "x.ckpt"
    run(TokenClock(normalize_gradients=True), callbacks=[SavesAfter(path, 0)], accumulate=4)
    model = run(TokenClock(normalize_gradients=True), ckpt_path=path, accumulate=2)
    close(model.grads[0], big_batch((12, 0), (3, 1)))


def test_window_whose_gradients_are_not_kept_begins_anew_with_its_tokens(tmp_path):
    path, clock = tmp_path / "x.ckpt", TokenClock(normalize_gradients=True)
    run(TokenClock(normalize_gradients=True), callbacks=[SavesAfter(path, 3)])
    saved = torch.load(path, weights_only=True)
    saved["SafeAMP"]["window"] = None  # as `ScalerCheckpoint(window_gradients=False)` writes it
    torch.save(saved, path)
    model = run(clock, ckpt_path=path)
    # the window of batches 3 to 5 restarts with batch 4
    assert clock.total == 20 + 7 + 2
    assert len(model.grads) == 1


def test_checkpoint_without_window_gradients_counts_only_what_the_new_window_holds(tmp_path):
    path, clock = tmp_path / "x.ckpt", TokenClock(normalize_gradients=True)
    keeps_not = [ScalerCheckpoint(window_gradients=False), SavesAfter(path, 1)]
    run(TokenClock(normalize_gradients=True), callbacks=keeps_not)
    model = run(clock, ckpt_path=path)
    close(model.grads[0], big_batch((5, 2)))
    assert clock.total == 5 + 10


def test_checkpoint_in_the_middle_of_a_batch_restarts_the_window(tmp_path):
    path, clock = tmp_path / "x.ckpt", TokenClock(normalize_gradients=True)
    with pytest.warns(UserWarning, match="in the middle of a batch"):
        run(TokenClock(), callbacks=[SavesAfter(path, 1, "on_after_backward")])
    entry = torch.load(path, weights_only=True)["SafeAMP"]
    assert entry["window"] is None
    assert entry["gates"]["TokenClock"] == {"total": 0, "window": [[15, 15, 3, None]]}
    run(clock, ckpt_path=path)
    # batches 0 and 1 are lost; which batches follow is the loader's affair
    assert clock.total < 30 - 12


def test_other_optimizers_after_a_resume_need_no_window(tmp_path):
    path, clock = tmp_path / "x.ckpt", TokenClock()
    run(TokenClock(), callbacks=[SavesAfter(path, 2)])
    saved = torch.load(path, weights_only=True)
    saved["SafeAMP"]["gates"]["TokenClock"]["window"] *= 3
    torch.save(saved, path)
    run(clock, ckpt_path=path)
    assert clock.total == 30


def test_checkpoint_of_a_run_without_a_clock_starts_it_at_zero(tmp_path):
    path, clock = tmp_path / "x.ckpt", TokenClock()
    run(L.Callback(), callbacks=[SavesAfter(path, 2)])
    run(clock, ckpt_path=path)
    assert clock.total == 10


DAMAGE = [
    ({"window": []}, "total"),
    ({"total": -1, "window": []}, "total"),
    ({"total": 1.5, "window": []}, "total"),
    ({"total": True, "window": []}, "total"),
    ({"total": 1}, "window"),
    ({"total": 1, "window": {}}, "window"),
    ({"total": 1, "window": [[1, 2, 1, None]]}, "window"),
    ({"total": 1, "window": [[1, 1, 0, None]]}, "window"),
    ({"total": 1, "window": [[1, 1, 1]]}, "window"),
    ({"total": 1, "window": [[1, 1, 1, float("nan")]]}, "window"),
    ({"total": 1, "window": [[-1, -1, 1, None]]}, "window"),
    ({"total": 1, "window": [3]}, "window"),
    ([], "total"),
    (None, "total"),
]


@pytest.mark.parametrize(("saved", "key"), DAMAGE, ids=repr)
def test_damaged_state_is_refused_by_key_and_changes_nothing(saved, key):
    clock = TokenClock()
    clock.load({"total": 7, "window": []})
    with pytest.raises(ScalerStateError, match=f'"{key}"'):
        clock.load(saved)
    assert clock.total == 7


def test_damaged_entry_stops_the_resume(tmp_path):
    path = tmp_path / "x.ckpt"
    run(TokenClock(), callbacks=[SavesAfter(path, 2)])
    saved = torch.load(path, weights_only=True)
    saved["SafeAMP"]["gates"]["TokenClock"]["total"] = "many"
    torch.save(saved, path)
    with pytest.raises(ScalerStateError, match="\"total\" is 'many'"):
        run(TokenClock(), ckpt_path=path)


def test_clock_keeps_nothing_under_callbacks(tmp_path):
    path = tmp_path / "x.ckpt"
    run(TokenClock(), callbacks=[SavesAfter(path, 2)])
    assert torch.load(path, weights_only=True)["callbacks"] == {}


def test_learning_rate_finder_leaves_the_total_as_it_was(tmp_path):
    clock, model = TokenClock(), Tagger()
    model.lr = 0.1
    trainer = make_trainer(plugin(), callbacks=[clock], default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, loader_of(12, 3, 5), num_training=3)
    assert clock.total == 0


# ---------------------------------------------------------------------- counting


def test_labels_are_found_where_they_usually_are():
    labels = torch.tensor([[1, -100], [0, -100]])
    Batch = namedtuple("Batch", "labels other")

    @dataclass
    class Fields:
        labels: torch.Tensor

    places = [{"labels": labels}, Batch(labels, 0), Fields(labels), (0, labels), [0, labels, 0]]
    assert [int(count_labels(batch)) for batch in places] == [2] * 5


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_signed_labels_of_every_width_are_counted(dtype):
    assert int(count_labels((0, torch.tensor([-100, 3, 0], dtype=dtype)))) == 2


def test_unsigned_labels_are_all_valid():
    assert count_labels((0, torch.tensor([156, 3], dtype=torch.uint8))) == 2  # 156 = -100 mod 256


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": torch.ones(1, WIDTH), "y": 3}, r"a `dict` with the keys \['x', 'y'\]"),
        ({"labels": torch.ones(2)}, r"with the keys \['labels'\]"),
        ([torch.ones(2), torch.ones(2)], "a `list` of Tensor, Tensor, in which"),
        ([torch.ones(2)], "a `list` of Tensor"),
        ([torch.ones(2), torch.tensor([True, False])], "a `list` of Tensor, Tensor"),
        (torch.ones(2), "a `Tensor`, in which"),
    ],
    ids=["keys", "float-labels", "float-targets", "no-targets", "bools", "tensor"],
)
def test_batch_without_labels_is_refused_and_count_asked_for(batch, told):
    model = Tagger()
    with pytest.raises(MisconfigurationException, match=told) as error:
        fit(model, plugin(), data=loading([batch]), callbacks=[TokenClock()])
    assert "TokenClock(count=lambda batch:" in str(error.value)
    assert not model.outcomes


@pytest.mark.parametrize(
    "count", [lambda batch: 7, lambda batch: torch.tensor(7), lambda batch: torch.tensor(7).short()]
)
def test_count_may_return_a_number_or_a_tensor(count):
    clock = TokenClock(count)
    fit(Tagger(), plugin(), data=loader_of(12, 3), callbacks=[clock])
    assert clock.total == 14


@pytest.mark.parametrize(
    "value", [None, True, -1, 1.0, torch.tensor(1.0), torch.tensor([1]), "3", torch.tensor(True)]
)
def test_count_that_returns_anything_else_is_refused(value):
    with pytest.raises(MisconfigurationException) as error:
        fit(Tagger(), plugin(), data=loader_of(12), callbacks=[TokenClock(lambda batch: value)])
    assert f"returned {value!r}" in str(error.value)


@pytest.mark.parametrize("kwargs", [{"count": 3}, {"normalize_gradients": 1}], ids=str)
def test_wrong_arguments_are_refused_by_name(kwargs):
    (name,) = kwargs
    with pytest.raises(TypeError, match=f"TokenClock\\({name}="):
        TokenClock(**kwargs)


# ---------------------------------------------------------------------- set-up


def test_clock_without_this_packages_plugin_is_refused():
    with pytest.raises(MisconfigurationException, match=r"`TokenClock\(\)` was passed"):
        make_trainer(stock_plugin(), callbacks=[TokenClock()]).fit(Tagger(), loader_of(12))


def test_clock_of_the_other_namespace_is_refused():
    pytest.importorskip("pytorch_lightning")
    from lightning_amp_guard.pytorch_lightning import TokenClock as Other

    trainer = make_trainer(plugin())
    trainer.callbacks.append(Other())
    with pytest.raises(Other.misconfiguration, match="from lightning_amp_guard import TokenClock"):
        trainer.fit(Tagger(), loader_of(12))


def test_two_clocks_are_refused():
    class Mine(TokenClock):
        pass

    class Yours(TokenClock):
        pass

    trainer = make_trainer(plugin(), callbacks=[Mine(), Yours()])
    with pytest.raises(MisconfigurationException, match="2 guards of the kind `TokenClock`"):
        trainer.fit(Tagger(), loader_of(12))


def test_optimizer_that_needs_its_closure_is_refused():
    model = Tagger(make_optimizer=lambda p: torch.optim.LBFGS(p))
    with pytest.raises(MisconfigurationException, match="optimizer 0 needs its closure"):
        fit(model, SafeAMP("bf16-mixed"), data=loader_of(12), callbacks=[TokenClock()])


def test_training_step_that_draws_its_own_batches_is_refused():
    class Draws(Tagger):
        def training_step(self, dataloader_iter):
            raise AssertionError

    with (
        pytest.raises(MisconfigurationException, match="draws its batches itself"),
        pytest.warns(UserWarning, match="`dataloader_iter` step flavor"),
    ):
        fit(Draws(), plugin(), data=loader_of(12), callbacks=[TokenClock()])


def test_nothing_is_left_in_the_engine_after_an_exception():
    class Fails(Tagger):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise RuntimeError("planted")

    use, clock = plugin(), TokenClock(normalize_gradients=True)
    with pytest.raises(RuntimeError, match="planted"):
        fit(Fails(), use, data=loader_of(12), callbacks=[clock])
    assert (use.engine.inspection.adjusters, use.engine.windows.listener) == ([], None)
    assert clock.host is None
    model = Tagger()
    fit(model, use, data=loader_of(12), callbacks=[clock])
    close(model.grads[0], big_batch((12, 0)))
    assert clock.total == 24


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copy_in_the_middle_of_a_fit_has_settings_and_total_alone(copied):
    copies = []

    class Copies(Tagger):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            copies.append(copied(clock))

    clock = TokenClock(normalize_gradients=True)
    fit(Copies(), plugin(), data=loader_of(12), callbacks=[clock])
    (mine,) = copies
    assert (mine.total, mine.normalize_gradients, mine.host) == (12, True, None)
    model = Tagger()
    fit(model, plugin(), data=loader_of(3), callbacks=[mine])
    assert (mine.total, clock.total) == (15, 12)


# ---------------------------------------------------------------------- without a Trainer


class Loop:
    """Gradients of ones times the batch's number, with no scale; outcomes come when they are told."""

    def __init__(self, **kwargs):
        self.weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([self.weight], lr=0.0)
        scaler = SkipAwareGradScaler("cpu", 1.0, dynamic=False)
        self.windows = GradientWindows([optimizer], scaler, scaling=False)
        (self.lane,) = self.windows.lanes
        self.tokens = TokenWindows(lambda: 1, torch.device("cpu"), **kwargs)
        self.windows.listener = self.tokens

    def backward(self, tokens):
        self.tokens.batch = torch.tensor(tokens)
        loss = tokens * self.weight.sum()
        self.windows.before_backward(loss.detach())
        loss.backward()
        self.windows.after_backward()

    def step(self):
        self.windows.unscale_(self.lane)
        self.tokens.adjust(self.lane, True)
        for cell in self.lane.cells:
            cell.consumed = True
        self.lane.stage = Stage.STEPPED


def test_outcomes_that_come_late_bring_the_tokens_of_their_own_attempts():
    loop = Loop(settle=lambda: lambda: None)
    for tokens in (12, 3, 5):
        loop.backward(tokens)
        loop.step()
        loop.weight.grad = None
    told = [loop.tokens.conclude(loop.lane, counted=applied) for applied in (True, False, True)]
    assert [int(n) for n in told] == [12, 3, 5]
    assert loop.tokens.conclude(loop.lane, counted=True) is None
    assert loop.tokens.rows(loop.windows.cells) == [[5, 0, 1, None]]


def test_outcomes_are_asked_for_before_gradients_that_outlive_a_step_are_counted_again():
    told = []

    def settle():
        while (tokens := loop.tokens.conclude(loop.lane, counted=True)) is not None:
            told.append(int(tokens))

    loop = Loop(settle=lambda: settle, normalize=True)
    loop.backward(12)
    loop.step()
    loop.step()
    assert told == [12]
    assert torch.equal(loop.weight.grad, torch.ones(2))
    loop.backward(3)
    loop.step()
    settle()
    assert told == [12, 0, 3]
    torch.testing.assert_close(loop.weight.grad, torch.ones(2))
    assert loop.tokens.rows(loop.windows.cells) == [[15, 0, 1, pytest.approx(1 / 15)]]


def test_attempt_that_was_given_up_brings_nothing():
    loop = Loop()
    loop.backward(12)
    loop.step()  # and raised before there was an outcome
    loop.weight.grad = None
    loop.backward(3)
    loop.step()
    assert int(loop.tokens.conclude(loop.lane, counted=True)) == 3
    assert loop.tokens.conclude(loop.lane, counted=True) is None


# ---------------------------------------------------------------------- costs


@pytest.mark.parametrize("normalize", [False, True])
def test_clock_makes_the_host_wait_for_nothing(normalize):
    reads = []
    for clocks in ([], [TokenClock(normalize_gradients=normalize)]):
        meter = Meter(2, ops=True)
        fit(
            QuietTagger(),
            plugin(),
            data=loader_of(*[12] * 8),
            callbacks=[meter, *clocks],
            accumulate_grad_batches=2,
        )
        reads.append(meter.reads)
    assert reads == [1, 1]


@pytest.mark.parametrize("normalize", [False, True])
def test_clock_does_not_wait_for_outcomes_that_are_decided_on_the_device(normalize):
    clock, meter = TokenClock(normalize_gradients=normalize), Meter(2, ops=True)
    plan = [GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, BAD, GOOD]
    model = QuietTagger(plan, make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.0, fused=True))
    use = plugin()
    data = loader_of(12, 1, 5, 3, 7, 2, 4, 6, 8, 1)
    fit(model, use, data=data, callbacks=[meter, clock])
    assert meter.reads == 0
    assert clock.total == 12 + 5 + 3 + 7 + 2 + 4 + 8 + 1
    assert (use.tally.applied, use.tally.skipped) == (8, 2)


class QuietTagger(Tagger):
    """Reads nothing itself, and hears and looks at nothing."""

    on_step_outcome = None

    def on_before_optimizer_step(self, optimizer):
        """Nobody looks."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (True, "TokenClock(normalize_gradients=True)"),
        ("mask", "TokenClock(count=lambda batch: (batch['mask'] != -100).sum())"),
        (3, "TokenClock(count=lambda batch: (batch['labels'] != -100).sum())"),
    ],
)
def test_what_is_no_function_is_refused_with_the_line_to_write(count, line):
    with pytest.raises(TypeError) as caught:
        TokenClock(count)
    assert str(caught.value).endswith(f" Write `{line}`.")


# ---------------------------------------------------------------------- a loss that is a mean


def scores_of(loss, scores, labels):
    cross_entropy = torch.nn.functional.cross_entropy
    return {
        "cross entropy": lambda: cross_entropy(scores, labels),
        "mean()": lambda: cross_entropy(scores, labels, reduction="none").mean(),
        "mean of the mean": lambda: cross_entropy(scores, labels).mean(),
        "two means": lambda: cross_entropy(scores, labels) + scores.square().mean(),
        "squared error": lambda: torch.nn.functional.mse_loss(scores, torch.zeros(6, 4)),
        "in float32": lambda: cross_entropy(scores.half(), labels).float(),
        "mean of stacked means": lambda: torch.stack(
            [cross_entropy(scores, labels), cross_entropy(scores, labels)]
        ).mean(),
        "mean of stacked sums": lambda: torch.stack([scores.sum(), scores.sum()]).mean(),
        "sum": lambda: cross_entropy(scores, labels, reduction="sum"),
        "sum()": lambda: cross_entropy(scores, labels, reduction="none").sum(),
        "mean times count": lambda: cross_entropy(scores, labels) * 6,
        "mean times tensor": lambda: cross_entropy(scores, labels) * (labels >= 0).sum(),
        "sum beside a mean": lambda: scores.sum() + scores.mean(),
        "mean of one": lambda: scores.sum().mean(),
        "no reduction": lambda: scores[0, 0],
        "no graph": lambda: torch.zeros(()),
    }[loss]()


MEANS = {
    "cross entropy": "NllLossBackward0",
    "mean()": "MeanBackward0",
    "mean of the mean": "NllLossBackward0",
    "two means": "NllLossBackward0",
    "squared error": "MseLossBackward0",
    "in float32": "NllLossBackward0",
    "mean of stacked means": "NllLossBackward0",
}
SUMS = [
    "sum",
    "sum()",
    "mean times count",
    "mean times tensor",
    "sum beside a mean",
    "mean of one",
    "mean of stacked sums",
    "no reduction",
    "no graph",
]


@pytest.mark.parametrize("loss", [*MEANS, *SUMS])
def test_a_mean_is_told_by_its_graph(loss):
    scores, labels = torch.randn(6, 4, requires_grad=True), torch.zeros(6, dtype=torch.long)
    made = scores_of(loss, scores, labels)
    for divided, value in ((False, made), (True, made), (True, made / 2)):
        assert _upstream.averaging_node(value, divided=divided) == MEANS.get(loss, "")
    assert _upstream.averaging_node(made / 2, divided=False) == ""


class Classifier(L.LightningModule):
    def __init__(self, loss, automatic=True):
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(2, 4), loss
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        loss = scores_of(self.kind, self.layer(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def warned_of_means(loss, clock, *, automatic=True, **kwargs):
    data = TensorDataset(torch.randn(24, 2), torch.zeros(24, dtype=torch.long))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        fit(
            Classifier(loss, automatic),
            SafeAMP(init_scale=8.0),
            data=DataLoader(data, batch_size=6),
            callbacks=[clock],
            **kwargs,
        )
    return [str(w.message) for w in caught if "is a mean" in str(w.message)]


@pytest.mark.parametrize("automatic", [True, False])
def test_a_loss_that_is_a_mean_is_warned_of_once_a_fit(automatic):
    (said,) = warned_of_means(
        "cross entropy", TokenClock(normalize_gradients=True), automatic=automatic
    )
    assert said.startswith(
        "`TokenClock(normalize_gradients=True)`: the loss of `training_step` is a mean"
    )
    assert "`NllLossBackward0`" in said
    assert 'Write `cross_entropy(..., reduction="sum")`' in said


def test_a_loss_that_is_a_mean_is_seen_in_windows_too():
    clock = TokenClock(normalize_gradients=True)
    assert len(warned_of_means("mean()", clock, accumulate_grad_batches=2)) == 1


@pytest.mark.parametrize("loss", ["sum", "mean times count"])
def test_a_sum_is_not_warned_of(loss):
    assert warned_of_means(loss, TokenClock(normalize_gradients=True)) == []


def test_a_mean_is_right_where_nothing_is_divided():
    assert warned_of_means("cross entropy", TokenClock()) == []
