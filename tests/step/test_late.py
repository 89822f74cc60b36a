# SPDX-License-Identifier: Apache-2.0
"""Attempts of fused Adam and AdamW that are decided on the device and read later."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from lightning_amp_guard import (
    AmpGuardWarning,
    AmpMonitor,
    NonFiniteGradientError,
    SafeAMP,
    SkipLimitError,
    StepTally,
)
from lightning_amp_guard.testing import plant
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, batches, fit

PLAN = [GOOD, BAD, GOOD, GOOD, NAN_LOSS, GOOD, GOOD, BAD, BAD, GOOD, NONE]


def adamw(params):
    return torch.optim.AdamW(params, lr=0.5, fused=True)


def adam(params):
    return torch.optim.Adam(params, lr=0.5, fused=True)


class Silent(Line):
    on_step_outcome = None


class Waiting(Callback):
    """Notes after each batch how many attempts nobody has read."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(len(trainer.precision_plugin.engine.late.waiting))


class Hears(Callback):
    """Hears each outcome at once."""

    def __init__(self):
        self.outcomes = []

    def on_step_outcome(self, trainer, pl_module, outcome):
        self.outcomes.append(outcome)


class HearsLate(Hears):
    takes_late_outcomes = True


def run(callback, make=adamw, plan=PLAN, n=40, settings=None, **kwargs):
    torch.manual_seed(0)
    settings = {"init_scale": 64.0, "growth_interval": 3, **(settings or {})}
    plugin, model, waiting = SafeAMP(**settings), Silent(plan, make), Waiting()
    trainer = fit(model, plugin, n, callbacks=[callback, waiting], **kwargs)
    state = {k: v.clone() for s in trainer.optimizers[0].state.values() for k, v in s.items()}
    return model, plugin, waiting.seen, callback.outcomes, state


def test_attempts_wait_until_thirty_two_are_together_and_none_is_left_at_the_end():
    *_, seen, outcomes, _ = run(HearsLate(), plan=())
    assert seen == [*range(1, 32), 0, *range(1, 8), 0]
    assert len(outcomes) == 40


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"growth_interval": 1},
        {"dynamic": False},
        {"max_scale": 128.0, "min_scale": 64.0},
        {"growth_factor": 3.0, "backoff_factor": 0.3},
        {"backoff_on_nonfinite_loss": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [adam, adamw])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_late_attempts_come_out_as_prompt_ones_bit_for_bit(make, settings):
    model, plugin, seen, late, state = run(HearsLate(), make, settings=settings)
    other, prompt_plugin, never, prompt, prompt_state = run(Hears(), make, settings=settings)
    assert max(seen) > 1
    assert max(never) == 0
    assert late == prompt
    assert plugin.tallies == prompt_plugin.tallies
    assert plugin.scaler.state_dict() == prompt_plugin.scaler.state_dict()
    assert torch.equal(model.lin.weight, other.lin.weight)
    assert all(torch.equal(state[key], prompt_state[key]) for key in prompt_state)


def test_bfloat16_attempts_wait_too():
    def bf16(callback):
        plugin, model = SafeAMP("bf16-mixed"), Silent(PLAN, adamw)
        fit(model, plugin, 20, callbacks=[callback])
        return callback.outcomes, plugin.tallies, model.weight

    assert bf16(HearsLate()) == bf16(Hears())


def test_accumulation_windows_wait_whole():
    _, _, seen, late, _ = run(HearsLate(), plan=PLAN[:-1], accumulate_grad_batches=3)
    _, _, _, prompt, _ = run(Hears(), plan=PLAN[:-1], accumulate_grad_batches=3)
    assert late == prompt
    assert max(seen) > 1


def test_the_scale_backs_off_on_the_device_before_the_next_loss_is_scaled():
    _, _, seen, late, _ = run(HearsLate(), plan=[BAD, GOOD, BAD], n=4)
    assert seen == [1, 2, 3, 0]
    assert [o.scale for o in late] == [64.0, 32.0, 32.0, 16.0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda plugin: plugin.last_outcome,
        lambda plugin: plugin.tally,
        lambda plugin: plugin.tallies,
        lambda plugin: plugin.scaler.get_scale(),
        lambda plugin: plugin.scaler.state_dict(),
        lambda plugin: plugin.state_dict(),
    ],
    ids=["last_outcome", "tally", "tallies", "scale", "scaler state", "checkpoint"],
)
def test_whoever_asks_is_told_of_every_attempt_so_far(ask):
    class Asks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                ask(trainer.precision_plugin)
                assert trainer.precision_plugin._tallies == [StepTally(5, 3, 2, 1)]

    plugin = SafeAMP(init_scale=64.0)
    model = Silent([GOOD, BAD, GOOD, GOOD, BAD], adamw)
    fit(model, plugin, 6, callbacks=[Asks()])
    assert plugin.tally == StepTally(6, 4, 2, 0)


def test_a_step_wise_schedule_reads_at_each_turn_and_waits_on_skipped_steps():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    plugin, model = SafeAMP(init_scale=64.0), Silent([GOOD, BAD, GOOD, BAD], adamw, schedule)
    waiting = Waiting()
    trainer = fit(model, plugin, 6, callbacks=[waiting])
    assert set(waiting.seen) == {0}
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


def test_an_epoch_wise_schedule_lets_attempts_wait():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model = Silent([BAD] * 4, adamw, schedule, interval="epoch")
    waiting = Waiting()
    trainer = fit(model, SafeAMP(init_scale=64.0), 4, callbacks=[waiting], max_epochs=2)
    assert max(waiting.seen) > 1
    # nothing was applied in the first epoch
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_a_weight_average_takes_no_sample_from_a_late_skip():
    def average(callback):
        model, ema = Silent([GOOD, BAD, BAD, GOOD], adamw), EMAWeightAveraging(decay=0.5)
        fit(model, SafeAMP(init_scale=64.0), 6, callbacks=[ema, callback])
        return model.weight

    assert average(HearsLate()) == average(Hears())


def test_a_monitor_without_a_ledger_lets_attempts_wait_between_log_steps(tmp_path):
    waiting = Waiting()
    plugin = SafeAMP(init_scale=64.0)
    kwargs = {"log_every_n_steps": 5, "default_root_dir": tmp_path}
    fit(Silent((), adamw), plugin, 10, callbacks=[AmpMonitor(), waiting], **kwargs)
    assert waiting.seen == [1, 2, 3, 4, 0] * 2
    waiting = Waiting()
    fit(Silent((), adamw), SafeAMP(), 3, callbacks=[AmpMonitor(ledger=True), waiting], **kwargs)
    assert waiting.seen == [0, 0, 0]


def test_the_skip_limit_ends_the_run_late_but_surely():
    plugin = SafeAMP(init_scale=2.0**20, max_consecutive_skips=3)
    model = Silent([BAD] * 64, adamw)
    with pytest.raises(SkipLimitError, match=r"lin\.weight"):
        fit(model, plugin, 64)
    assert model.weight == 8.0
    assert 3 <= plugin.tally.skipped <= 33


def test_the_skip_limit_at_the_end_of_a_fit_is_not_missed():
    with pytest.raises(SkipLimitError):
        fit(Silent([BAD] * 8, adamw), SafeAMP(init_scale=2.0**20, max_consecutive_skips=5), 8)


def test_after_a_known_skip_nothing_waits_until_an_update_is_applied():
    class Looks(Waiting):
        def on_train_batch_end(self, trainer, *args):
            if args[-1] == 1:
                assert trainer.precision_plugin.tally.skipped == 1
            super().on_train_batch_end(trainer, *args)

    looks = Looks()
    fit(Silent([GOOD, BAD, BAD, GOOD], adamw), SafeAMP(init_scale=64.0), 8, callbacks=[looks])
    assert looks.seen == [1, 0, 0, 0, 1, 2, 3, 0]


def test_errors_that_the_first_skip_raises_do_not_wait():
    with pytest.raises(NonFiniteGradientError):
        fit(Silent([GOOD, BAD], adamw), SafeAMP(init_scale=64.0, error_if_nonfinite=True), 8)


@pytest.mark.parametrize("settings", [{"hysteresis": 2}, {"error_if_nonfinite": True}], ids=str)
def test_what_the_device_cannot_decide_is_read_at_once(settings):
    *_, seen, _, _ = run(HearsLate(), plan=(), n=4, settings=settings)
    assert seen == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.5),
        lambda p: type("Own", (torch.optim.AdamW,), {})(p, lr=0.5, fused=True),
    ],
    ids=["fused sgd", "adamw", "subclass"],
)
def test_other_optimizers_are_read_at_once(make):
    *_, seen, _, _ = run(HearsLate(), make, plan=(), n=4)
    assert seen == [0, 0, 0, 0]


def test_gradients_that_outlive_a_late_step_keep_their_true_value():
    class Keeps(Silent):
        """Never zeroes its gradients: 1, then 2, then 3."""

        def optimizer_zero_grad(self, *args):
            pass

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kept = [*getattr(self, "kept", []), float(self.lin.weight.grad[0, 0])]

    model = Keeps((), adamw)
    fit(model, SafeAMP(init_scale=64.0), 3)
    assert model.kept == [1.0, 2.0, 3.0]


def test_a_fit_that_is_interrupted_counts_what_was_waiting():
    class Stops(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("stop")

    plugin = SafeAMP(init_scale=64.0)
    with pytest.raises(RuntimeError, match="stop"):
        fit(Silent([BAD], adamw), plugin, 8, callbacks=[Stops()])
    assert plugin.tally == StepTally(4, 3, 1, 0)
    assert plugin.scaler.get_scale() == 32.0


def test_validation_reads_what_waits():
    class Validates(Silent):
        def validation_step(self, batch, batch_idx):
            assert not self.trainer.precision_plugin.engine.late.waiting

    model, waiting = Validates((), adamw), Waiting()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        val_check_interval=3,
        plugins=[SafeAMP(init_scale=64.0)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[waiting],
    )

    trainer.fit(model, batches(6), batches(1))
    assert waiting.seen == [1, 2, 3, 1, 2, 0]


@pytest.mark.parametrize("limit", [5, 16, 32])
def test_a_limit_read_late_switches_once_and_what_was_made_before_counts_no_second_time(limit):
    plugin = SafeAMP(init_scale=2.0**20, max_consecutive_skips=limit, on_limit="32-true")
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(Silent([BAD] * 33, adamw), plugin, 60)
    assert plugin.precision == "32-true"
    assert plugin.tally.attempted == 60


def test_a_switch_that_is_found_out_between_scaling_and_backward_unscales_the_gradients():
    class Asks(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            trainer.precision_plugin.tally  # noqa: B018  # reads what is waiting

    class Notes(Silent):
        def on_before_optimizer_step(self, optimizer):
            grad = float(self.lin.weight.grad[0, 0])
            self.grads = [*getattr(self, "grads", []), grad]

    plugin = SafeAMP(init_scale=64.0, max_consecutive_skips=1, on_limit="32-true")
    model = Notes([GOOD, BAD], adamw)
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(model, plugin, 5, callbacks=[Asks()])
    assert [g for i, g in enumerate(model.grads) if i != 1] == [1.0] * 4


def test_a_limit_found_out_at_the_very_end_is_told():
    class Stops(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 6

    plugin = SafeAMP(init_scale=2.0**20, max_consecutive_skips=3)
    with pytest.warns(AmpGuardWarning, match="skipped 3 updates in a row"):
        fit(Silent([GOOD, BAD, BAD, BAD, BAD, GOOD], adamw), plugin, 20, callbacks=[Stops()])


def test_a_run_that_skips_from_its_first_step_names_the_module():

    model = Silent((), adamw)
    with (
        plant(model, "lin", "nan", direction="backward", at=range(200)),
        pytest.raises(SkipLimitError, match=r'fp32_modules=\["lin"\]') as error,
    ):
        fit(model, SafeAMP(init_scale=2.0**10), 80)
    assert "NonFiniteLocator" in str(error.value)


def test_after_a_bad_loss_that_was_read_late_the_next_one_is_looked_at_at_once():
    looks = Waiting()
    plan = [GOOD, NAN_LOSS] + [GOOD] * 50
    fit(Silent(plan, adamw), SafeAMP(init_scale=64.0), 50, callbacks=[looks])
    assert max(looks.seen[:32]) == 31
    assert set(looks.seen[32:]) == {0}
