# SPDX-License-Identifier: Apache-2.0
"""Overflows that the script throws away before an attempt judges them: the scale answers them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from lightning.pytorch import Callback

from lightning_amp_guard import AmpGuardWarning, SafeAMP
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, ManualLine, fit

LR = 2.0**-9  # times the gradient of 256: an update takes 0.5 off the weight
OPTIMIZERS = {
    "plain": lambda p: torch.optim.SGD(p, lr=LR),
    "fused": lambda p: torch.optim.SGD(p, lr=LR, fused=True),
}
plain_and_fused = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Steep:
    """Four samples with a gradient of 64 each: 256 in all, finite in float16 up to a scale of 128."""

    def loss(self, batch):
        return self.lin(batch[0]).sum() * 64

    def spoiled(self):
        return any(not p.grad.isfinite().all() for p in self.parameters() if p.grad is not None)


class ZeroesToNone(Steep, Line):
    """Lightning issue 4956, as it goes round."""

    def on_after_backward(self):
        if self.spoiled():
            self.zero_grad()


class ZeroesInPlace(Steep, Line):
    def on_after_backward(self):
        if self.spoiled():
            for parameter in self.parameters():
                parameter.grad.zero_()


class ZeroesSpoiled(Line):
    """`ZeroesToNone`, of planted overflows."""

    spoiled, on_after_backward = Steep.spoiled, ZeroesToNone.on_after_backward


class RaisesAtTheClip(Line):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e6, error_if_nonfinite=True)

    def optimizer_step(self, *args, **kwargs):
        with suppress(RuntimeError):
            super().optimizer_step(*args, **kwargs)


class SteepAtTheClip(Steep, RaisesAtTheClip):
    pass


class LooksByHand(ManualLine):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.trainer.precision_plugin.unscale_(optimizer)
        if all(p.grad.isfinite().all() for p in self.parameters()):
            optimizer.step()


class ZeroesByHand(ManualLine):
    """Steps with nothing where the true gradients were not finite."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.trainer.precision_plugin.unscale_(optimizer)
        if any(not p.grad.isfinite().all() for p in self.parameters()):
            optimizer.zero_grad()
        optimizer.step()


class SteepByHand(Steep, LooksByHand):
    pass


class SteepZeroedByHand(Steep, ZeroesByHand):
    pass


@plain_and_fused
@pytest.mark.parametrize("kind", [SteepAtTheClip, SteepByHand, SteepZeroedByHand])
def test_scale_answers_what_was_unscaled_and_given_up(kind, make_optimizer):
    model, plugin = kind(make_optimizer=make_optimizer), SafeAMP(init_scale=1024.0)
    fit(model, plugin, n=6)
    assert plugin.scaler.get_scale() == 128.0  # overflows at 1024, 512 and 256
    assert plugin.tally.applied == 3
    assert model.weight == 6.5


@plain_and_fused
@pytest.mark.parametrize(("kind", "attempted"), [(ZeroesToNone, 2), (ZeroesInPlace, 6)])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_scale_answers_what_was_zeroed_after_the_backward_pass(
    kind, attempted, clip, make_optimizer
):
    model, plugin = kind(make_optimizer=make_optimizer), SafeAMP(init_scale=1024.0)
    fit(model, plugin, n=6, gradient_clip_val=clip)
    assert plugin.scaler.get_scale() == 128.0  # the first overflow went by unseen
    assert (plugin.tally.attempted, plugin.tally.skipped) == (attempted, 0)
    assert model.weight == 7.0


def test_scale_answers_late_attempts_whose_gradients_were_zeroed():
    class Silent(ZeroesInPlace):
        on_step_outcome = None

    def adamw(params):
        return torch.optim.AdamW(params, lr=0.5, betas=(0.0, 0.0), weight_decay=0.0, fused=True)

    model, plugin = Silent(make_optimizer=adamw), SafeAMP(init_scale=1024.0)
    fit(model, plugin, n=6)
    assert plugin.scaler.get_scale() == 128.0
    assert model.weight == pytest.approx(7.0, abs=1e-4)  # each of the last two takes off its rate


@pytest.mark.parametrize("kind", [RaisesAtTheClip, LooksByHand, ZeroesByHand])
def test_a_bad_loss_that_was_given_up_leaves_the_scale(kind):
    model, plugin = kind([GOOD, NAN_LOSS, NAN_LOSS]), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=4)
    assert plugin.scaler.get_scale() == 64.0
    assert model.weight == 7.0


@pytest.mark.parametrize("kind", [RaisesAtTheClip, LooksByHand, ZeroesByHand])
def test_each_overflow_that_was_given_up_backs_off_once(kind):
    model, plugin = kind([BAD, GOOD, BAD, BAD]), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=6)
    assert plugin.scaler.get_scale() == 8.0
    assert model.weight == 6.5


def test_growth_counts_the_batch_after_one_that_was_given_up():
    # good 1, given up 0, good 1, good 2: torch's counter, with its `update` after each batch
    model = RaisesAtTheClip([GOOD, BAD])
    plugin = SafeAMP(init_scale=64.0, growth_interval=3)
    fit(model, plugin, n=4)
    assert plugin.scaler.state_dict()["_growth_tracker"] == 2
    assert plugin.scaler.get_scale() == 32.0


def test_overflow_after_a_loop_for_torchs_scaler_backs_off_once():
    class ByHand(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            scaler = self.trainer.precision_plugin.scaler
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            scaler.unscale_(optimizer)
            if all(p.grad.isfinite().all() for p in self.parameters()):
                scaler.step(optimizer)
            scaler.update()

    model, plugin = ByHand([GOOD, BAD, BAD]), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=4)
    assert plugin.scaler.get_scale() == 16.0
    assert model.weight == 7.0


def test_gradients_are_checked_again_only_where_some_were_thrown_away():
    class Counts(ZeroesToNone):
        def on_train_start(self):
            given_up, self.checked = self.trainer.precision_plugin.engine.given_up, []
            check = given_up.check
            given_up.check = lambda cells: (self.checked.append(self.seen), check(cells))

    model, plugin = Counts(make_optimizer=OPTIMIZERS["plain"]), SafeAMP(init_scale=512.0)
    fit(model, plugin, n=6)
    # batch 0 is thrown away unseen; 1 and 2 are seen to overflow, 3 is fine, and 4 ends the watch
    assert model.checked == [1, 2, 3, 4]
    assert plugin.scaler.get_scale() == 128.0


def test_overflow_in_the_first_micro_batch_of_windows_is_answered():
    # 0 is zeroed unseen and the window goes on with 1; the watch lasts until 2, which overflows too
    model, plugin = ZeroesSpoiled([BAD, GOOD, BAD, GOOD]), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=6, accumulate_grad_batches=2)
    assert plugin.scaler.get_scale() == 32.0
    assert [(outcome.applied, outcome.micro_batches) for outcome in model.outcomes] == [
        (True, 1),
        (True, 1),
        (True, 2),
    ]
    assert model.weight == 7.0  # by a quarter, a quarter and a half


def test_by_products_that_are_zeroed_by_hand_are_not_checked():
    class Pair(ManualLine):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.optimizers().zero_grad()  # as a generator's pass leaves them in a discriminator
            self.watching = self.trainer.precision_plugin.engine.given_up.watching

    model, plugin = Pair([BAD] * 4), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=4)
    assert model.watching == 0
    assert plugin.scaler.get_scale() == 64.0


def test_bfloat16_has_no_scale_to_answer_with():
    model, plugin = RaisesAtTheClip([GOOD, BAD]), SafeAMP(precision="bf16-mixed")
    fit(model, plugin, n=4)
    assert model.weight == 6.5
    assert plugin.engine.given_up.watching == 0


# ---------------------------------------------------------------------- resume


class SavesAfter(Callback):
    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


class ThrowsAwayByHand(LooksByHand):
    """`LooksByHand`, which leaves nothing behind."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.optimizers().zero_grad()


def end(model, plugin):
    return model.weight, plugin.tally, plugin.scaler.state_dict()


@pytest.mark.parametrize("done", range(1, 6))
@pytest.mark.parametrize("kind", [ZeroesToNone, ZeroesInPlace])
def test_the_watch_goes_on_after_a_resume(kind, done, tmp_path):
    def run(**kwargs):
        model = kind(make_optimizer=OPTIMIZERS["plain"])
        plugin = SafeAMP(init_scale=1024.0, growth_interval=3)
        fit(model, plugin, n=6, **kwargs)
        return end(model, plugin)

    whole = run(callbacks=[SavesAfter(tmp_path / "x.ckpt", done - 1)])
    assert whole[2]["scale"] == 128.0  # the overflow at 1024 went by unseen, 512 and 256 did not
    assert run(ckpt_path=tmp_path / "x.ckpt") == whole


@pytest.mark.parametrize("done", range(1, 5))
@pytest.mark.parametrize("kind", [LooksByHand, ThrowsAwayByHand, ZeroesByHand, RaisesAtTheClip])
def test_an_answer_that_is_due_is_given_after_a_resume(kind, done, tmp_path):
    plan = [GOOD, BAD, GOOD, NAN_LOSS, GOOD]

    def run(plan, **kwargs):
        model, plugin = kind(plan), SafeAMP(init_scale=64.0, growth_interval=3)
        fit(model, plugin, n=5, **kwargs)
        return end(model, plugin)

    whole = run(plan, callbacks=[SavesAfter(tmp_path / "x.ckpt", done - 1)])
    assert (whole[0], whole[2]["scale"]) == (6.5, 32.0)
    assert run(plan[done:], ckpt_path=tmp_path / "x.ckpt") == whole


def test_an_overflow_in_the_middle_of_a_batch_is_answered_when_the_batch_comes_again(tmp_path):
    class Saves(ThrowsAwayByHand):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if self.plan:
                with pytest.warns(
                    AmpGuardWarning, match="the open accumulation window begins anew"
                ):
                    self.trainer.save_checkpoint(tmp_path / "x.ckpt")

    fit(Saves([BAD]), SafeAMP(init_scale=64.0), n=1)
    entry = torch.load(tmp_path / "x.ckpt", weights_only=True)["SafeAMP"]
    assert "given_up" not in entry
    assert entry["scaler"]["scale"] == 64.0


def test_a_run_that_gives_nothing_up_saves_nothing_of_it():
    model, plugin = Line([GOOD, BAD]), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=3)
    assert "given_up" not in plugin.state_dict()


def test_an_overflow_on_the_device_is_none_of_those_that_were_seen_after_it():
    class ThrowsAway(Line):
        on_step_outcome = None

        def on_after_backward(self):
            if 0 < self.seen < 4:
                given_up = self.trainer.precision_plugin.engine.given_up
                self.watched = [*getattr(self, "watched", []), given_up.watching > 0]
                self.zero_grad()

    def adamw(params):
        return torch.optim.AdamW(params, lr=0.5, betas=(0.0, 0.0), weight_decay=0.0, fused=True)

    # 0 is skipped on the device; 1 is thrown away unseen, 2 and 3 are seen to overflow
    model, plugin = ThrowsAway([BAD, BAD, BAD, BAD], adamw), SafeAMP(init_scale=64.0)
    fit(model, plugin, n=5)
    assert model.watched == [False, True, True]
    assert plugin.scaler.get_scale() == 8.0
    assert (plugin.tally.attempted, plugin.tally.skipped) == (2, 1)
