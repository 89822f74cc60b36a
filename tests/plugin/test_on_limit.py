# SPDX-License-Identifier: Apache-2.0
"""`on_limit`: a run that only skips goes on in another precision instead of ending."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_amp_guard import (
    AmpGuardWarning,
    AmpMonitor,
    SafeAMP,
    SafeFSDP,
    ScalerStateError,
    SkipLimitError,
    StepTally,
)
from tests.helpers import BAD, GOOD, Line, ManualLine, fit

OTHERS = ["bf16-mixed", "32-true"]
DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Seeing(Line):
    """Notes the dtype that each forward pass computes in."""

    def loss(self, batch):
        self.dtypes = [*getattr(self, "dtypes", []), self.lin(batch[0]).dtype]
        return super().loss(batch)


def limited(on_limit, **settings):
    return SafeAMP(init_scale=64.0, max_consecutive_skips=3, on_limit=on_limit, **settings)


@pytest.mark.parametrize("other", OTHERS)
def test_the_run_goes_on_in_the_other_precision_with_one_warning(other):
    model, plugin = Seeing([GOOD, BAD, BAD, BAD]), limited(other)
    with pytest.warns(AmpGuardWarning, match="skipped 3 updates in a row") as caught:
        trainer = fit(model, plugin, 6)
    assert len([w for w in caught if "on_limit" in str(w.message)]) == 1
    assert f"the run goes on in '{other}'" in str(caught[-1].message)
    assert model.dtypes == [torch.float16] * 4 + [DTYPES[other]] * 2
    assert (plugin.precision, trainer.precision, plugin.scaler) == (other, other, None)
    assert plugin.tally == StepTally(6, 3, 3, 0)
    assert [o.scale for o in model.outcomes] == [64.0, 64.0, 32.0, 16.0, 1.0, 1.0]
    # three updates of lr 0.5 on a gradient of 1
    assert model.weight == 8.0 - 3 * 0.5


@pytest.mark.parametrize("other", OTHERS)
def test_as_many_skips_again_end_it(other):
    plugin = limited(other)
    with (
        pytest.warns(AmpGuardWarning, match="on_limit"),
        pytest.raises(SkipLimitError, match="skipped 3 updates in a row") as error,
    ):
        fit(Line([BAD] * 10), plugin, 10)
    assert error.value.outcome.attempt == 5
    assert plugin.tally == StepTally(6, 0, 6, 0)


def test_bf16_may_fall_back_to_float32_and_skips_without_its_guard_then():
    plugin = SafeAMP("bf16-mixed", max_consecutive_skips=2, on_limit="32-true")
    model = Line([BAD, BAD, GOOD])
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(model, plugin, 3)
    assert plugin.precision == "32-true"
    assert plugin.tally == StepTally(3, 1, 2, 0)


@pytest.mark.parametrize("other", OTHERS)
def test_optimizer_state_and_schedule_go_on(other):
    def momentum(params):
        return torch.optim.SGD(params, lr=1.0, momentum=0.5)

    model = Line([GOOD, BAD, BAD, BAD, GOOD], momentum, schedule)
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        trainer = fit(model, limited(other), 5)
    # buffers 1 and 1.5; learning rates 1 and 0.5
    assert model.weight == 8.0 - 1.0 - 0.75
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


class Two(ManualLine):
    """The second optimizer holds a gradient of its own while the first one only skips."""

    def __init__(self, plan):
        super().__init__(plan)
        self.other = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        if batch_idx == 0:
            self.manual_backward(self.other(batch[0]).float().mean())
        one.zero_grad()
        self.manual_backward(self.loss(batch))
        one.step()
        self.seen_autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        if batch_idx == 3:
            two.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.lin.parameters(), lr=0.5),
            torch.optim.SGD(self.other.parameters(), lr=0.5),
        ]


@pytest.mark.parametrize("other", OTHERS)
def test_gradients_that_others_hold_are_unscaled_first(other):
    model, plugin = Two([BAD, BAD, BAD, GOOD]), limited(other)
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(model, plugin, 4)
    assert float(model.other.weight.detach()[0, 0]) == 7.5
    assert plugin.tallies[1] == StepTally(1, 1, 0, 0)


@pytest.mark.parametrize("other", OTHERS)
def test_an_open_training_step_computes_in_the_new_precision_at_once(other):
    class Stops(Two):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.history = [*getattr(self, "history", []), self.seen_autocast]

    model = Stops([BAD, BAD, BAD, GOOD])
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(model, limited(other), 4)
    on = other != "32-true"
    assert model.history[1] == (torch.float16, True)
    assert model.history[2][1] is on
    assert model.history[3][1] is on
    assert not on or model.history[2][0] is model.history[3][0] is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("other", OTHERS)
def test_the_mark_in_the_checkpoint_beats_the_constructor(other, tmp_path):
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        trainer = fit(Line([BAD] * 3), limited(other), 4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    entry = torch.load(tmp_path / "a.ckpt", weights_only=True)["SafeAMP"]
    assert entry["switched"] == other
    model, plugin = Seeing(), SafeAMP(init_scale=64.0, max_consecutive_skips=2, on_limit=other)
    resumed = fit(model, plugin, 4, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
    assert set(model.dtypes) == {DTYPES[other]}
    assert (plugin.precision, plugin.scaler) == (other, None)
    assert plugin.tally == StepTally(8, 5, 3, 0)
    # and it is kept on
    resumed.save_checkpoint(tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt", weights_only=True)["SafeAMP"]["switched"] == other


def test_a_resumed_run_that_skips_again_ends(tmp_path):
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        trainer = fit(Line([BAD] * 3), limited("bf16-mixed"), 4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(SkipLimitError):
        fit(Line([BAD] * 9), limited("32-true"), 4, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)


@pytest.mark.parametrize("mark", ["16-mixed", "fp8", 1, True, ["bf16-mixed"]], ids=repr)
def test_a_damaged_mark_is_refused_by_name(mark):
    plugin = SafeAMP()
    entry = {**plugin.state_dict(), "switched": mark}
    with pytest.raises(ScalerStateError, match='"switched"'):
        plugin.load_state_dict(entry)
    assert plugin.precision == "16-mixed"


def test_runs_that_never_switched_have_no_mark():
    assert "switched" not in SafeAMP().state_dict()


def test_going_on_in_the_precision_that_failed_is_refused():
    with pytest.raises(ValueError, match=r"on_limit='bf16-mixed'"):
        SafeAMP("bf16-mixed", on_limit="bf16-mixed")


@pytest.mark.parametrize("other", OTHERS)
def test_fsdp_cannot_change_its_units_and_says_so(other):
    with pytest.raises(ValueError, match="FSDP1 fixes the dtype"):
        SafeFSDP(on_limit=other)


def test_fsdp_refuses_a_checkpoint_that_had_gone_over():
    plugin = SafeFSDP()
    with pytest.raises(MisconfigurationException, match='precision="bf16-mixed"'):
        plugin.load_state_dict({**SafeAMP("bf16-mixed").state_dict(), "switched": "bf16-mixed"})


def test_the_summary_shows_the_scales_up_to_the_switch(caplog):
    with pytest.warns(AmpGuardWarning, match="on_limit"), caplog.at_level("INFO"):
        fit(Line([BAD] * 3), limited("bf16-mixed"), 5, callbacks=[AmpMonitor()])
    assert "scale       8 to 64, then bf16-mixed by `on_limit`" in caplog.text


def test_a_second_fit_stays_in_the_new_precision():
    plugin = limited("bf16-mixed")
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(Line([BAD] * 3), plugin, 4)
    model = Seeing()
    fit(model, plugin, 2)
    assert set(model.dtypes) == {torch.bfloat16}


def test_fused_attempts_that_were_decided_late_switch_too():
    class Silent(Line):
        on_step_outcome = None

    def fused(params):
        return torch.optim.AdamW(params, lr=0.5, fused=True)

    plugin = SafeAMP(init_scale=2.0**20, max_consecutive_skips=3, on_limit="32-true")
    model = Silent([BAD] * 5, fused)
    with pytest.warns(AmpGuardWarning, match="on_limit"):
        fit(model, plugin, 40)
    assert plugin.precision == "32-true"
    assert (plugin.tally.attempted, plugin.tally.skipped) == (40, 5)
