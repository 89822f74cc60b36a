# SPDX-License-Identifier: Apache-2.0
"""AveragingGate: averages take their samples from applied updates only."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.swa_utils import AveragedModel

from lightning_amp_guard import AveragingGate, SafeAMP
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, ManualLine, fit

G, B, N, O = GOOD, BAD, NAN_LOSS, NONE  # noqa: E741


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, **kwargs})


def samples(callback):
    """How many samples the average has taken."""
    return int(callback._average_model.n_averaged)


def average(callback):
    """The averaged weight, before it is copied into the module."""
    return float(callback._average_model.module.lin.weight.detach()[0, 0])


# ---------------------------------------------------------------------- by step


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(
    ("plan", "accumulate", "weights"),
    [
        ([G, G, G], 1, [7.5, 7.0, 6.5]),
        ([B, B, G, B, G, G], 1, [7.5, 7.0, 6.5]),
        ([G, N, B, G], 1, [7.5, 7.0]),
        ([G, O, G], 1, [7.5, 7.0]),
        # windows of two: applied, skipped, applied; the callback asks again after batch 5
        ([G, G, B, G, G, G], 2, [7.5, 7.0]),
        ([B, G, G, G, G, N, G, G], 2, [7.5, 7.0]),
        # windows of three: skipped, applied
        ([G, G, B, G, G, G], 3, [7.5]),
    ],
)
def test_average_takes_one_sample_per_applied_update(plan, accumulate, weights):
    callback, model = WeightAveraging(), Line(plan)
    fit(model, plugin(), n=len(plan), callbacks=[callback], accumulate_grad_batches=accumulate)
    assert samples(callback) == len(weights)
    tolerance = 0.0 if accumulate != 3 else 1e-3  # a third is not exact
    torch.testing.assert_close(
        average(callback), sum(weights) / len(weights), rtol=0, atol=tolerance or 1e-6
    )
    assert model.weight == average(callback)


@pytest.mark.parametrize("plan", [[G, G, G], [B, G, B, O, G, N, G]])
def test_average_takes_one_sample_per_applied_update_of_manual_optimization(plan):
    callback, model = WeightAveraging(), ManualLine(plan)
    fit(model, plugin(), n=len(plan), callbacks=[callback])
    assert samples(callback) == 3
    # the mean of 7.5, 7.0 and 6.5
    assert model.weight == average(callback) == 7.0


def test_run_without_an_applied_update_leaves_the_average_at_the_initial_weights():
    callback, model = WeightAveraging(), Line([B, B, N])
    fit(model, plugin(), n=3, callbacks=[callback])
    assert samples(callback) == 0
    assert model.weight == 8.0


def test_ema_moves_with_applied_updates_only():
    callback = EMAWeightAveraging(decay=0.5)
    fit(Line([G, B, G, B, G]), plugin(), n=5, callbacks=[callback])
    assert samples(callback) == 3
    # the first sample is taken as it is: 7.5, then half way to 7 and to 6.5
    assert average(callback) == (7.5 / 2 + 7.0 / 2) / 2 + 6.5 / 2


@pytest.mark.parametrize(
    ("plan", "weights"),
    [
        # asked at arrivals 0, 2, 4
        ([G, G, G, G, G], [7.5, 6.5, 5.5]),
        ([G, G, B, G, G], [7.5, 6.0]),
        ([B, G, G, G, B], [7.0]),
    ],
)
def test_ema_every_second_step_takes_none_from_a_skipped_one(plan, weights):
    callback = EMAWeightAveraging(decay=0.5, update_every_n_steps=2)
    fit(Line(plan), plugin(), n=5, callbacks=[callback])
    assert samples(callback) == len(weights)
    want = weights[0]
    for weight in weights[1:]:
        want = want / 2 + weight / 2
    assert average(callback) == want


def test_ema_with_accumulation_moves_with_applied_windows_only():
    callback = EMAWeightAveraging(decay=0.5)
    plan = [G, G, B, G, G, G, G, N]
    fit(Line(plan), plugin(), n=8, callbacks=[callback], accumulate_grad_batches=2)
    assert samples(callback) == 2
    assert average(callback) == 7.5 / 2 + 7.0 / 2


def test_ema_from_a_later_step_on_counts_arrivals_as_lightning_does():
    callback = EMAWeightAveraging(decay=0.5, update_starting_at_step=2)
    fit(Line([G, B, B, G, G]), plugin(), n=5, callbacks=[callback])
    # arrivals 2, 3, 4 are asked, 3 and 4 are applied: 7.0 and 6.5
    assert samples(callback) == 2
    assert average(callback) == 6.75


def test_disabled_gate_lets_the_average_vote_for_skipped_steps_as_in_stock():
    callback = WeightAveraging()
    guard = AveragingGate(enabled=False)
    fit(Line([B, B, G]), plugin(), n=3, callbacks=[callback, guard])
    assert samples(callback) == 3
    torch.testing.assert_close(average(callback), (8 + 8 + 7.5) / 3, rtol=0, atol=1e-6)


def test_bf16_average_waits_as_well():
    callback = WeightAveraging()
    fit(Line([G, B, G]), plugin(precision="bf16-mixed"), n=3, callbacks=[callback])
    assert samples(callback) == 2


def test_order_of_callbacks_does_not_matter():
    for callbacks in ([WeightAveraging(), AveragingGate()], [AveragingGate(), WeightAveraging()]):
        fit(Line([G, B, G]), plugin(), n=3, callbacks=callbacks)
        averaging = next(c for c in callbacks if isinstance(c, WeightAveraging))
        assert samples(averaging) == 2


# ---------------------------------------------------------------------- a user's own rule


class Asked(WeightAveraging):
    """Samples by a rule of its own, and notes what it is asked."""

    def __init__(self, by_step=None, by_epoch=None):
        super().__init__()
        self.by_step, self.by_epoch, self.asked = by_step, by_epoch, []

    def should_update(self, step_idx=None, epoch_idx=None):
        self.asked.append((step_idx, epoch_idx))
        if step_idx is not None:
            return self.by_step is not None and self.by_step(step_idx)
        return self.by_epoch is not None and self.by_epoch(epoch_idx)


def test_own_rule_by_step_is_asked_at_every_arrival_and_obeyed():
    callback = Asked(by_step=lambda step: step != 3)
    fit(Line([G, B, G, G, G]), plugin(), n=5, callbacks=[callback])
    assert [step for step, epoch in callback.asked if epoch is None] == [0, 1, 2, 3, 4]
    # 7.5, 7.0 and, after 6.5 was left out, 6.0
    assert samples(callback) == 3
    torch.testing.assert_close(average(callback), (7.5 + 7.0 + 6.0) / 3, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("epochs", "weights"),
    [
        ([[G, G], [G, G]], [7.0, 6.0]),
        ([[G, B], [B, B], [B, G]], [7.5, 7.0]),
        ([[B, B], [B, N], [B, B]], []),
    ],
)
def test_own_rule_by_epoch_takes_none_from_an_epoch_without_an_update(epochs, weights):
    callback = Asked(by_epoch=lambda epoch: True)
    plan = [fault for epoch in epochs for fault in epoch]
    fit(Line(plan), plugin(), n=2, max_epochs=len(epochs), callbacks=[callback])
    assert samples(callback) == len(weights)
    if weights:
        assert average(callback) == sum(weights) / len(weights)


def test_samples_by_step_and_by_epoch_do_not_use_each_other_up():
    callback = Asked(by_step=lambda step: True, by_epoch=lambda epoch: True)
    fit(Line([G, B, B, B]), plugin(), n=2, max_epochs=2, callbacks=[callback])
    # after step 0, and at the end of its epoch
    assert samples(callback) == 2


def test_two_averages_each_take_their_samples():
    plain, ema = WeightAveraging(), EMAWeightAveraging(decay=0.5)
    fit(Line([G, B, G]), plugin(), n=3, callbacks=[plain, ema])
    assert (samples(plain), samples(ema)) == (2, 2)


def test_average_and_swa_each_take_their_samples():
    plain, swa = WeightAveraging(), StochasticWeightAveraging(0.5, swa_epoch_start=1)
    model = Line([G, G, G], interval="epoch")
    fit(model, plugin(), n=1, max_epochs=3, callbacks=[plain, swa])
    assert samples(plain) == 3
    assert int(swa.n_averaged) == 3


# ---------------------------------------------------------------------- SWA


class NotesSWA(StochasticWeightAveraging):
    """Notes the weight of each sample."""

    def __init__(self, **kwargs):
        super().__init__(swa_lrs=0.5, swa_epoch_start=1, avg_fn=self.note, **kwargs)
        self.later = []

    def note(self, mean, new, count):
        self.later.append(float(new.flatten()[0]))
        return StochasticWeightAveraging.avg_fn(mean, new, count)


@pytest.mark.parametrize(
    ("epochs", "later"),
    [
        # sampled at each epoch's start; the first sample is the initial weight, 8.0
        ([[G, G], [G, G], [G, G]], [7.0, 6.0]),
        ([[G, B], [B, B], [G, B]], [7.5]),
        ([[B, N], [B, G], [B, B]], [7.5]),
        ([[B, B], [B, B], [B, B]], []),
    ],
)
def test_swa_takes_no_sample_from_an_epoch_without_an_update(epochs, later):
    callback = NotesSWA()
    model = Line([fault for epoch in epochs for fault in epoch])
    fit(model, plugin(), n=2, max_epochs=len(epochs), callbacks=[callback])
    assert int(callback.n_averaged) == 1 + len(later)
    assert callback.later == later
    # SWA puts the average into the module at the end
    want = (8.0 + sum(later)) / (1 + len(later))
    torch.testing.assert_close(model.weight, want, rtol=0, atol=1e-6)


def test_swa_with_accumulation_and_a_skip():
    callback = NotesSWA()
    # windows of two, two windows an epoch: (skip, applied), (skip, skip), (applied, applied)
    plan = [B, G, G, G, B, G, G, B, G, G, G, G]
    fit(Line(plan), plugin(), n=4, max_epochs=3, callbacks=[callback], accumulate_grad_batches=2)
    assert callback.later == [7.5]
    assert int(callback.n_averaged) == 2


def test_disabled_gate_lets_swa_sample_every_epoch():
    callback = NotesSWA()
    guards = [AveragingGate(enabled=False)]
    fit(Line([B, B, B]), plugin(), n=1, max_epochs=3, callbacks=[callback, *guards])
    assert callback.later == [8.0, 8.0]


def test_swa_subclass_may_sample_by_keyword():
    class Subclass(StochasticWeightAveraging):
        def on_train_epoch_end(self, trainer, *args):
            super().on_train_epoch_end(trainer, *args)
            self.update_parameters(
                average_model=self._average_model,
                model=trainer.lightning_module,
                n_averaged=self.n_averaged,
                avg_fn=self._avg_fn,
            )

    callback = Subclass(swa_lrs=0.5, swa_epoch_start=1)
    fit(Line([G, B, G]), plugin(), n=1, max_epochs=3, callbacks=[callback])
    # at each epoch's end if it had an update; at its start the sample is taken already
    assert int(callback.n_averaged) == 1 + 2


# ---------------------------------------------------------------------- left as it was


CALLBACKS = [
    pytest.param(WeightAveraging, "should_update", id="WeightAveraging"),
    pytest.param(EMAWeightAveraging, "should_update", id="EMAWeightAveraging"),
    pytest.param(NotesSWA, "update_parameters", id="StochasticWeightAveraging"),
]


@pytest.mark.parametrize(("kind", "name"), CALLBACKS)
@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_callback_has_its_method_back_after_the_fit(kind, name, fails):
    seen = []

    class Looks(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            seen.append(name in vars(callback))
            if fails:
                raise RuntimeError("planted")

    callback = kind()
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            fit(Looks(), plugin(), n=1, callbacks=[callback])
    else:
        fit(Looks(), plugin(), n=1, callbacks=[callback])
    assert seen == [True]
    assert name not in vars(callback)


@pytest.mark.parametrize(("kind", "name"), CALLBACKS)
def test_copy_of_the_callback_made_during_the_fit_is_a_plain_one(kind, name):
    twins = []

    class Copies(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            twins.append(copy.deepcopy(callback))

    callback = kind()
    fit(Copies([B]), plugin(), n=1, callbacks=[callback])
    twin = twins[0]
    # nothing was applied, which a copy does not know
    if name == "should_update":
        assert twin.should_update(step_idx=0) is True
    else:
        count = torch.tensor(1)
        layer = torch.nn.Linear(1, 1)
        twin.update_parameters(layer, layer, count, StochasticWeightAveraging.avg_fn)
        assert int(count) == 2


class Unaveraged(WeightAveraging):
    """Asks, but has no averaged module, which could not be pickled here."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.should_update(step_idx=batch_idx)

    def on_train_end(self, trainer, pl_module):
        pass


def test_pickle_of_the_callback_made_during_the_fit_is_a_plain_one():
    twins = []

    class Pickles(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            assert "should_update" in vars(callback)
            del callback.log, callback.log_dict  # Lightning's, bound to the module
            callback._average_model = None
            twins.append(pickle.loads(pickle.dumps(callback)))

    callback = Unaveraged()
    fit(Pickles([B]), plugin(), n=1, callbacks=[callback])
    assert twins[0].should_update(step_idx=0) is True


def test_own_should_update_of_the_instance_comes_back():
    callback = WeightAveraging()
    mine = callback.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 0
    fit(Line([G, G]), plugin(), n=2, callbacks=[callback])
    assert samples(callback) == 1
    assert callback.should_update is mine


def test_next_fit_starts_with_nothing_to_sample():
    guard, callback = AveragingGate(), Asked(by_epoch=lambda epoch: True)
    fit(Line([G]), plugin(), n=1, callbacks=[guard])
    fit(Line([B]), plugin(), n=1, callbacks=[guard, callback])
    assert samples(callback) == 0


# ---------------------------------------------------------------------- kept by the module itself


class KeepsAverage(Line):
    """Updates an average of torch's after every batch, or every second one."""

    every = 1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.averages = torch.nn.ModuleList([AveragedModel(self.lin)])

    def configure_optimizers(self):
        return self.make_optimizer(self.lin.parameters())

    @property
    def average(self):
        return self.averages[0]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.seen % self.every == 0:
            self.average.update_parameters(self.lin)

    def averaged(self):
        return int(self.average.n_averaged), float(self.average.module.weight.detach()[0, 0])


def adamw(params):
    return torch.optim.AdamW(params, lr=0.5, betas=(0.0, 0.0), weight_decay=0.0, fused=True)


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["plain", "late"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_average_that_the_module_keeps_takes_none_from_a_skipped_step(precision, optimizer):
    class Silent(KeepsAverage):
        on_step_outcome = None

    model = Silent([B, G, N, B, G], optimizer)
    safe = plugin() if precision == "16-mixed" else SafeAMP(precision=precision)
    fit(model, safe, n=6)
    # 7.5, 7 and 6.5; Adam's epsilon makes its steps of 0.5 a trifle smaller
    assert model.averaged() == (3, pytest.approx(7.0, abs=1e-4))
    assert "update_parameters" not in vars(model.average)


def test_average_that_the_module_keeps_is_asked_about_all_since_the_last_time():
    class EverySecond(KeepsAverage):
        every = 2

    model = EverySecond([B, G, B, B, G, B])
    fit(model, plugin(), n=6)
    assert model.averaged() == (2, 7.25)  # 7.5 and 7


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_average_that_the_module_keeps_samples_where_there_was_no_attempt():
    model = KeepsAverage([G, O, B])
    fit(model, plugin(), n=3)
    assert model.averaged() == (2, 7.5)


def test_average_that_the_module_keeps_votes_with_the_gate_disabled():
    model = KeepsAverage([G, B, B])
    fit(model, plugin(), n=3, callbacks=[AveragingGate(enabled=False)])
    assert model.averaged() == (3, 7.5)


def test_copy_of_a_kept_average_made_during_the_fit_is_a_plain_one():
    class Copies(KeepsAverage):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.copied = copy.deepcopy(self.average)
            pickle.dumps(self.average.state_dict())

    model = Copies([G, B])
    fit(model, plugin(), n=2)
    model.copied.update_parameters(model.lin)
    assert (int(model.copied.n_averaged), int(model.average.n_averaged)) == (2, 1)


def test_flags_of_a_kept_average_survive_a_resume(tmp_path):
    class EverySecond(KeepsAverage):
        every = 2

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 2 and not self.trainer.ckpt_path:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")

    # batch 2 is applied, 3 is skipped: the sample after 3 is due to what was before the checkpoint
    whole, resumed = EverySecond([G, G, G, B]), EverySecond([O, B])
    fit(whole, plugin(), n=4)
    resumed.seen = 1
    fit(resumed, plugin(), n=4, ckpt_path=tmp_path / "x.ckpt")
    assert whole.averaged() == resumed.averaged() == (2, 6.75)  # 7 and 6.5


class MakesItInTime(KeepsAverage):
    """The average comes only when training, or the second epoch, starts."""

    at = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.averages = torch.nn.ModuleList()

    def on_train_epoch_start(self):
        if self.current_epoch == self.at:
            self.averages.append(AveragedModel(self.lin))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.averages:
            super().on_train_batch_end(outputs, batch, batch_idx)
        else:
            self.seen += 1


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["plain", "late"])
@pytest.mark.parametrize(
    ("at", "plan", "averaged"), [(0, [B, G, B, G], (2, 7.25)), (1, [B, G, B, G], (1, 7.0))]
)
def test_average_that_the_module_makes_in_time_is_found(at, plan, averaged, optimizer):
    class Silent(MakesItInTime):
        on_step_outcome = None

    model = Silent(plan, optimizer)
    model.at = at
    fit(model, plugin(), n=2, max_epochs=2)
    n, weight = model.averaged()
    assert (n, weight) == (averaged[0], pytest.approx(averaged[1], abs=1e-4))
    assert "update_parameters" not in vars(model.average)


def test_flags_of_an_average_that_is_made_in_time_survive_a_resume(tmp_path):
    class EverySecond(MakesItInTime):
        every = 2

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self.seen == 1 and not self.trainer.ckpt_path:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")

    # batch 0 is skipped before the checkpoint, 1 has no loss: nothing new for the sample after 1
    whole, resumed = EverySecond([B, O, G, G]), EverySecond([O, O, G, G])
    fit(whole, plugin(), n=4)
    resumed.seen = 1
    resumed.averages = torch.nn.ModuleList()
    resumed.on_load_checkpoint = lambda checkpoint: [
        checkpoint["state_dict"].pop(key)
        for key in list(checkpoint["state_dict"])
        if key.startswith("averages")
    ]
    resumed.on_train_epoch_start = lambda: None
    resumed.on_train_start = lambda: resumed.averages.append(AveragedModel(resumed.lin))
    fit(resumed, plugin(), n=4, ckpt_path=tmp_path / "x.ckpt")
    assert whole.averaged() == resumed.averaged() == (1, 7.0)


class Pair(Line):
    """Two optimizers; the average is of the first one's model alone, or of both."""

    def __init__(self, plan, of_both=False):
        super().__init__(plan)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 1, bias=False)
        self.both = torch.nn.ModuleList([self.lin, self.other])
        self.model = self.both if of_both else self.lin
        self.average = AveragedModel(self.model)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.zero_grad()
        self.manual_backward(self.other(batch[0]).float().mean())
        second.step()
        self.average.update_parameters(self.model)

    def configure_optimizers(self):
        return [torch.optim.SGD(x.parameters(), lr=0.5) for x in (self.lin, self.other)]


@pytest.mark.parametrize(("of_both", "count"), [(False, 2), (True, 4)])
def test_average_that_the_module_keeps_follows_the_optimizers_of_its_model(of_both, count):
    # a generator's average takes none from its skipped step though the discriminator's was applied
    model = Pair([B, G, B, G], of_both)
    fit(model, plugin(), n=4)
    assert int(model.average.n_averaged) == count
    if not of_both:
        assert model.average.module.weight[0, 0] == 7.25  # of 7.5 and 7


def test_flags_of_an_average_are_kept_for_each_optimizer(tmp_path):
    class Saves(Pair):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            gates = self.trainer.precision_plugin.state_dict()["gates"]
            self.flags = gates["AveragingGate"]

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            optimizer = self.optimizers()[1]
            optimizer.step()  # a second time, after the average was asked

    model = Saves([B])
    fit(model, plugin(), n=1)
    assert model.flags == [[False, False], [True, True]]
