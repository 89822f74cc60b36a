# SPDX-License-Identifier: Apache-2.0
"""ScalerCheckpoint: a resumed run is the uninterrupted one, bit for bit, or says why not."""

import copy
import gc
import logging
import math
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core import rank_zero
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lightning_amp_guard import (
    AmpGuardWarning,
    SafeAMP,
    ScalerCheckpoint,
    ScalerStateError,
    SkipReason,
    StepTally,
)
from tests.helpers import (
    BAD,
    GOOD,
    NAN_LOSS,
    NONE,
    Line,
    ManualLine,
    PlantedOverflow,
    batches,
    fit,
    identical,
    make_trainer,
    stock_plugin,
)

FIVE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
PARTS = {"format", "scaler", "tallies", "gates", "window"}
GRADIENTS, LOSS = SkipReason.NONFINITE_GRADIENTS, SkipReason.NONFINITE_LOSS


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, "growth_interval": 2, **kwargs})


def dump(trainer):
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


@pytest.fixture
def info_lines():
    """Every line about the scale that was printed on rank 0."""

    class Lines(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if "scale" in message and not message.startswith("Restor"):  # which names the path
                lines.append(message)

    lines: list[str] = []
    handler = Lines()
    rank_zero.log.addHandler(handler)
    yield lines
    rank_zero.log.removeHandler(handler)


# ---------------------------------------------------------------------- resume, bit for bit


class Walk:
    """A loader that goes on where it stood: `(batch id, inputs, targets)`, the same every epoch."""

    def __init__(self, n):
        self.n, self.position = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        for i in range(self.position, self.n):
            self.position = (i + 1) % self.n
            numbers = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
            yield i, numbers[:, :4], numbers[:, 4:]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


# attempt -> fault; with two micro-batches in the first of them where the attempt is even
FAULTS = {3: BAD, 5: NAN_LOSS, 8: BAD, 9: BAD}
REASONS = [FAULTS.get(i) and {BAD: GRADIENTS, NAN_LOSS: LOSS}[FAULTS[i]] for i in range(12)]
# with a growth interval of 3: up after attempt 2, down at 3, up after 7, down at 8 and 9
SCALES = [256.0] * 3 + [512.0] + [256.0] * 4 + [512.0, 256.0, 128.0, 128.0]
# with hysteresis 2 the overflow at 3 is borne, growth refills it, the one at 8 is borne, 9 is not
SCALES_2 = [256.0] * 3 + [512.0] * 5 + [1024.0, 1024.0, 512.0, 512.0]


class Learner(L.LightningModule):
    """A small network that saves a checkpoint after every batch and notes every attempt."""

    def __init__(self, optimizer="sgd", interval="step", folder=None, seed=1, accumulate=1):
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.optimizer, self.interval, self.folder = optimizer, interval, folder
        self.accumulate, self.rows = accumulate, []

    def fault(self, batch_id):
        number = self.trainer.current_epoch * self.trainer.num_training_batches + batch_id
        attempt, micro_batch = divmod(number, self.accumulate)
        return FAULTS.get(attempt, GOOD) if micro_batch == attempt % self.accumulate else GOOD

    def training_step(self, batch, batch_idx):
        self.batch_id, x, y = batch
        fault = self.fault(self.batch_id)
        loss = torch.nn.functional.mse_loss(self.net(x).float(), y)
        loss = PlantedOverflow.apply(loss, fault == BAD)
        return loss * float("nan") if fault == NAN_LOSS else loss

    def on_step_outcome(self, outcome):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.rows.append((self.batch_id, rate, outcome))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.folder is not None:
            done = self.trainer.current_epoch * self.trainer.num_training_batches + batch_idx + 1
            self.trainer.save_checkpoint(self.folder / f"{done}.ckpt")

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


SETUPS = {
    "sgd": {},
    "adamw, hysteresis 2": {"optimizer": "adamw", "hysteresis": 2},
    "sgd, accumulation 2, two epochs": {
        "accumulate": 2,
        "epochs": 2,
        "interval": "epoch",
        "hysteresis": 2,
    },
    "adamw, accumulation 2": {"optimizer": "adamw", "accumulate": 2},
}


def learn(setup, folder=None, ckpt_path=None):
    """Run 12 attempts, or what is left of them, and return everything that decides the next one."""
    accumulate, epochs = setup.get("accumulate", 1), setup.get("epochs", 1)
    amp = SafeAMP(init_scale=256.0, growth_interval=3, hysteresis=setup.get("hysteresis", 1))
    model = Learner(
        setup.get("optimizer", "sgd"),
        setup.get("interval", "step"),
        folder,
        seed=1 if ckpt_path is None else 2,
        accumulate=accumulate,
    )
    trainer = make_trainer(amp, max_epochs=epochs, accumulate_grad_batches=accumulate)
    trainer.fit(model, Walk(12 * accumulate // epochs), ckpt_path=ckpt_path, weights_only=True)
    final = {
        "weights": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "plugin": amp.state_dict(),
        "tallies": [asdict(tally) for tally in amp.tallies],
    }
    return model.rows, final


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run without a stop, once per set-up, with a checkpoint after every batch."""
    runs: dict[str, tuple[Path, Any, Any]] = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("run")
            runs[name] = (folder, *learn(SETUPS[name], folder))
        return runs[name]

    return run


@pytest.mark.parametrize("name", SETUPS)
def test_uninterrupted_run_meets_its_faults(name, uninterrupted):
    _, rows, final = uninterrupted(name)
    assert [outcome.reason for *_, outcome in rows] == REASONS
    want = SCALES_2 if SETUPS[name].get("hysteresis") == 2 else SCALES
    assert [outcome.scale for *_, outcome in rows] == want
    assert final["tallies"] == [asdict(StepTally(12, 8, 4, 0))]


AFTER_EACH_BATCH = [
    pytest.param(name, done, id=f"{name}, batch {done}")
    for name, setup in SETUPS.items()
    for done in range(1, 12 * setup.get("accumulate", 1) + 1)
    if name != "adamw, accumulation 2" or done % 2  # inside a window is what it adds
]


@pytest.mark.parametrize(("name", "done"), AFTER_EACH_BATCH)
def test_resumed_run_equals_the_uninterrupted_one(name, done, uninterrupted):
    folder, rows, final = uninterrupted(name)
    resumed_rows, resumed_final = learn(SETUPS[name], ckpt_path=folder / f"{done}.ckpt")
    assert resumed_rows == rows[done // SETUPS[name].get("accumulate", 1) :]
    for part, value in final.items():
        assert identical(resumed_final[part], value), part


# ---------------------------------------------------------------------- the entry


class SavesAt(Line):
    """Saves a checkpoint after batch `at`."""

    at, path = 0, None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == self.at:
            self.trainer.save_checkpoint(self.path)


def save_at(path, at, plan=(), amp=None, n=4, **kwargs):
    """Fit with a checkpoint after batch `at`; return model, plugin and what was saved."""
    model, amp = SavesAt(plan), amp or plugin()
    model.at, model.path = at, path
    fit(model, amp, n=n, **kwargs)
    return model, amp, torch.load(path, weights_only=True)


def resume(path, plan=(), amp=None, n=4, seen=0, **kwargs):
    model, amp = Line(plan), amp or plugin()
    model.seen = seen
    fit(model, amp, n=n, ckpt_path=path, **kwargs)
    return model, amp


def rewrite(path, edit):
    """Change a saved checkpoint by `edit(checkpoint)`."""
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, path)


def counts(saved):
    """Micro-batches of the open window, and whether a loss was non-finite, per optimizer."""
    return [row[:2] for row in saved["SafeAMP"]["window"]["optimizers"]]


def test_entry_has_the_documented_parts(tmp_path):
    *_, saved = save_at(tmp_path / "x.ckpt", 2, [GOOD, BAD, NAN_LOSS])
    entry = saved["SafeAMP"]
    assert set(entry) == PARTS
    assert entry["format"] == 1
    # one applied; backed off from 64; the NaN loss left scale and counter alone
    assert entry["scaler"] == {
        "scale": 32.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 0,
    }
    tally = {"attempted": 3, "applied": 1, "skipped": 2, "consecutive_skips": 2}
    assert entry["tallies"] == [tally]
    assert entry["window"] is None


def test_entry_holds_the_open_window(tmp_path):
    path = tmp_path / "x.ckpt"
    *_, saved = save_at(path, 1, [GOOD, NAN_LOSS], accumulate_grad_batches=4)
    window = saved["SafeAMP"]["window"]
    assert window["scale"] == 64.0
    # a quarter of the loss, times 64; the NaN loss makes its gradient NaN
    assert list(window["gradients"]) == ["lin.weight"]
    assert window["gradients"]["lin.weight"].isnan().all()
    assert counts(saved) == [[2, True]]
    *_, saved = save_at(path, 1, accumulate_grad_batches=4)
    gradient = saved["SafeAMP"]["window"]["gradients"]["lin.weight"]
    assert torch.equal(gradient, torch.full((1, 4), 2 * 16.0))
    assert counts(saved) == [[2, False]]


def kinds_of(value, path=()):
    if isinstance(value, dict):
        for key, part in value.items():
            yield type(key), (*path, "key")
            yield from kinds_of(part, (*path, key))
    elif isinstance(value, list):
        for part in value:
            yield from kinds_of(part, path)
    else:
        yield type(value), path


@pytest.mark.parametrize("accumulate", [1, 4])
def test_entry_is_made_of_plain_values_and_window_gradients(tmp_path, accumulate):
    *_, saved = save_at(
        tmp_path / "x.ckpt",
        1,
        [GOOD, BAD],
        amp=plugin(hysteresis=2),
        accumulate_grad_batches=accumulate,
        callbacks=[WeightAveraging()],
    )
    plain = {int, float, bool, str, type(None)}
    for kind, path in kinds_of(saved["SafeAMP"]):
        assert kind in ({torch.Tensor} if path[:2] == ("window", "gradients") else plain) or (
            path[-1] == "key" and kind is str
        )


def test_second_entry_is_stock_lightnings(tmp_path):
    *_, saved = save_at(tmp_path / "x.ckpt", 0)
    assert set(saved["MixedPrecision"]) == FIVE
    assert saved["MixedPrecision"] == saved["SafeAMP"]["scaler"]


def test_bf16_entry_has_no_scaler_and_no_second_entry(tmp_path):
    *_, saved = save_at(tmp_path / "x.ckpt", 1, [GOOD, BAD], plugin(precision="bf16-mixed"))
    assert set(saved["SafeAMP"]) == PARTS
    assert saved["SafeAMP"]["scaler"] is None
    assert saved["SafeAMP"]["tallies"] == [asdict(StepTally(2, 1, 1, 1))]
    assert "MixedPrecision" not in saved


def test_disabled_guard_saves_what_stock_does(tmp_path):
    guards = [ScalerCheckpoint(enabled=False)]
    *_, saved = save_at(tmp_path / "x.ckpt", 1, [GOOD, BAD], callbacks=guards)
    assert set(saved["SafeAMP"]) == FIVE
    assert saved["SafeAMP"]["scale"] == 32.0
    assert "MixedPrecision" not in saved
    _, amp = resume(tmp_path / "x.ckpt", callbacks=guards, amp=plugin(growth_interval=100))
    # two good batches are left: 32 grows once
    assert amp.scaler.get_scale() == 64.0


class Waiting(ManualLine):
    """Steps the first optimizer in every batch while the second one's window never ends."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(4, 1, bias=False)

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.5) for m in (self.lin, self.other)]

    def training_step(self, batch, batch_idx):
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.lin(batch[0]).float().mean())
        self.manual_backward(self.other(batch[0]).float().mean())
        first.step()


@pytest.mark.parametrize("interval", [1, 3])
def test_stock_never_gets_a_counter_that_has_passed_its_interval(interval):
    amp, trackers = plugin(growth_interval=interval), []

    class Looks(Waiting):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            saved = dump(self.trainer)
            own, stock = saved["SafeAMP"]["scaler"], saved["MixedPrecision"]
            trackers.append((own["_growth_tracker"], stock["_growth_tracker"]))

    fit(Looks(), amp, n=2 * interval)
    # growth waits for the second optimizer from `interval` on, until one interval later
    own = [*range(1, 2 * interval), 0]
    assert trackers == [(t, min(t, interval - 1)) for t in own]


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("plan", "reason", "weight"),
    [
        ([GOOD] * 4, None, 7.5),
        ([BAD, GOOD, GOOD, GOOD], GRADIENTS, 8.0),
        ([NAN_LOSS, GOOD, GOOD, GOOD], LOSS, 8.0),
        ([GOOD, GOOD, GOOD, NAN_LOSS], LOSS, 8.0),
        ([GOOD, GOOD, BAD, GOOD], GRADIENTS, 8.0),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_window_goes_on_where_it_was_saved(tmp_path, plan, reason, weight, at):
    path = tmp_path / "x.ckpt"
    save_at(path, at, plan, accumulate_grad_batches=4)
    model, amp = resume(path, plan, seen=at + 1, accumulate_grad_batches=4)
    assert [(o.reason, o.micro_batches) for o in model.outcomes] == [(reason, 4)]
    assert model.weight == weight
    assert amp.scaler.get_scale() == (32.0 if reason is GRADIENTS else 64.0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("fault", [GOOD, BAD, NAN_LOSS])
def test_window_is_stepped_though_no_backward_comes_after_the_resume(tmp_path, fault):
    plan, path = [fault, NONE], tmp_path / "x.ckpt"
    whole, _, _ = save_at(path, 0, plan, n=2, accumulate_grad_batches=2)
    model, _ = resume(path, plan, n=2, seen=1, accumulate_grad_batches=2)
    assert model.outcomes == whole.outcomes
    # half of gradient 1, unless it was skipped
    assert model.weight == whole.weight == (7.75 if fault == GOOD else 8.0)


@pytest.mark.parametrize(
    ("amp", "scale"),
    [
        (lambda: plugin(init_scale=8.0, max_scale=16.0), 16.0),
        (lambda: plugin(init_scale=256.0, min_scale=256.0), 256.0),
        (lambda: plugin(precision="bf16-mixed"), 1.0),
    ],
)
def test_window_is_taken_over_at_another_scale(tmp_path, amp, scale):
    path = tmp_path / "x.ckpt"
    save_at(path, 1, accumulate_grad_batches=4)
    model, _ = resume(path, amp=amp(), accumulate_grad_batches=4)
    assert [(o.applied, o.scale, o.micro_batches) for o in model.outcomes] == [(True, scale, 4)]
    assert model.weight == 7.5


def test_window_of_a_bf16_run_is_taken_over_by_fp16(tmp_path):
    path = tmp_path / "x.ckpt"
    save_at(path, 1, amp=plugin(precision="bf16-mixed"), accumulate_grad_batches=4)
    model, _ = resume(path, accumulate_grad_batches=4)
    assert [(o.scale, o.micro_batches) for o in model.outcomes] == [(64.0, 4)]
    assert model.weight == 7.5


def test_window_is_taken_over_without_the_other_guards(tmp_path):
    path = tmp_path / "x.ckpt"
    others = [kind(enabled=False) for kind in SafeAMP.guard_types if kind is not ScalerCheckpoint]
    save_at(path, 1, accumulate_grad_batches=4, callbacks=others)
    model, _ = resume(path, accumulate_grad_batches=4, callbacks=others)
    assert (model.weight, model.outcomes[0].micro_batches) == (7.5, 4)


# torch 2.14 says so at each sparse tensor that it loads from a file that may be anybody's
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_window_gradients_survive(tmp_path, sparse):
    class Rows(SavesAt):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Embedding(3, 1, sparse=sparse)
            torch.nn.init.constant_(self.lin.weight, 8.0)

        def loss(self, batch):
            return self.lin(torch.tensor([0, 1, 1])).sum()

    def run(at, **kwargs):
        model = Rows()
        model.at, model.path = at, tmp_path / f"{at}.ckpt"
        fit(model, plugin(), data=batches(4), accumulate_grad_batches=4, **kwargs)
        return model.lin.weight.detach().flatten().tolist()

    # gradients 1, 2 and none, however the window was come by
    assert run(1) == [7.5, 7.0, 8.0]
    assert run(3, ckpt_path=tmp_path / "1.ckpt") == [7.5, 7.0, 8.0]


def test_same_trainer_and_plugin_resume_after_an_exception(tmp_path):
    class FailsOnce(SavesAt):
        at, failed = 1, False

        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    model, amp = FailsOnce([BAD, GOOD, GOOD, GOOD]), plugin()
    model.path = tmp_path / "x.ckpt"
    trainer = make_trainer(amp, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(model, Batches(4))
    trainer.fit(model, Batches(4), ckpt_path=model.path)
    # one window was skipped before the checkpoint, the second is applied once
    assert amp.tally == StepTally(2, 1, 1, 0)
    assert model.weight == 7.5
    assert amp.scaler.get_scale() == 32.0


def test_checkpoint_written_before_the_first_batch_of_a_resumed_fit_keeps_the_window(tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"

    class SavesEarly(Line):
        def on_train_start(self):
            self.trainer.save_checkpoint(second)

    *_, saved = save_at(first, 1, accumulate_grad_batches=4)
    fit(SavesEarly(), plugin(), ckpt_path=first, accumulate_grad_batches=4)
    assert identical(torch.load(second)["SafeAMP"], saved["SafeAMP"])
    model, _ = resume(second, accumulate_grad_batches=4)
    assert (model.weight, model.outcomes[0].micro_batches) == (7.5, 4)


def test_window_gradients_may_be_left_out(tmp_path):
    path = tmp_path / "x.ckpt"
    guards = [ScalerCheckpoint(window_gradients=False)]
    *_, saved = save_at(path, 1, accumulate_grad_batches=4, callbacks=guards)
    assert saved["SafeAMP"]["window"] is None
    model, _ = resume(path, accumulate_grad_batches=4)
    # two quarters of gradient 1
    assert (model.weight, model.outcomes[0].micro_batches) == (7.75, 2)


@pytest.mark.parametrize("bad", [0, 1, None, "no"], ids=repr)
def test_window_gradients_of_a_wrong_type_is_refused_by_name(bad):
    with pytest.raises(TypeError) as error:
        ScalerCheckpoint(window_gradients=bad)
    assert f"ScalerCheckpoint(window_gradients={bad!r})" in str(error.value)


class SavesInside(Line):
    """Saves in the middle of the second and third batch."""

    path = None

    def training_step(self, batch, batch_idx):
        if batch_idx in (1, 2):
            self.trainer.save_checkpoint(self.path.with_suffix(f".{batch_idx}"))
        return super().training_step(batch, batch_idx)


def test_checkpoint_in_the_middle_of_a_batch_warns_once_and_drops_the_window(tmp_path):
    model = SavesInside()
    model.path = tmp_path / "x.ckpt"
    with pytest.warns(AmpGuardWarning) as caught:
        fit(model, plugin(), accumulate_grad_batches=4)
    said = [str(w.message) for w in caught if w.category is AmpGuardWarning]
    assert len(said) == 1
    for part in ("in the middle of a batch (batch 1 of epoch 0)", "fewer micro-batches"):
        assert part in said[0]
    assert torch.load(tmp_path / "x.1")["SafeAMP"]["window"] is None
    # the run itself is not disturbed
    assert model.weight == 7.5

    resumed, _ = resume(tmp_path / "x.1", accumulate_grad_batches=4)
    # the interrupted batch is run again: three of four micro-batches
    assert (resumed.weight, resumed.outcomes[0].micro_batches) == (8 - 0.375, 3)


def test_checkpoint_before_a_batch_has_done_anything_needs_no_warning(tmp_path):
    model = SavesInside()
    model.path = tmp_path / "x.ckpt"
    fit(model, plugin())  # a warning would be an error
    assert model.weight == 6.0
    resumed, _ = resume(tmp_path / "x.1")
    assert resumed.weight == 6.0  # three of four updates, the interrupted batch's among them


def test_checkpoint_in_the_middle_of_a_batch_says_that_a_resumable_loader_has_moved_on(tmp_path):
    model = SavesInside()
    model.path = tmp_path / "x.ckpt"
    with pytest.warns(AmpGuardWarning, match="this batch is not seen again, for the loader has"):
        fit(model, plugin(), data=Batches(4))
    assert model.weight == 6.0
    resumed, _ = resume(tmp_path / "x.1", data=Batches(4))
    assert resumed.weight == 6.5


def test_checkpoint_on_an_exception_after_the_update_says_that_the_batch_comes_again(tmp_path):
    class Fails(Line):
        def optimizer_step(self, *args):
            super().optimizer_step(*args)
            if self.seen == 1:
                raise RuntimeError("planted")

    model = Fails()
    saves = ModelCheckpoint(tmp_path, save_on_exception=True, save_last=True)
    match = r"this batch is seen again, though an update with it is in the weights\. Save between"
    with (
        pytest.warns(AmpGuardWarning, match=match),
        pytest.raises(RuntimeError, match="planted"),
    ):
        fit(model, plugin(), callbacks=[saves], enable_checkpointing=True)
    assert model.weight == 7.0


def test_checkpoint_of_a_validation_within_the_window_is_exact(tmp_path):
    path = tmp_path / "x.ckpt"

    class Validates(Line):
        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_end(self):
            if self.trainer.fit_loop.epoch_loop.batch_idx == 1 and not path.exists():
                self.trainer.save_checkpoint(path)

    def run(ckpt_path=None):
        model = Validates()
        trainer = make_trainer(
            plugin(), accumulate_grad_batches=4, val_check_interval=2, num_sanity_val_steps=0
        )
        trainer.fit(model, Batches(8), batches(1), ckpt_path=ckpt_path)
        return model

    assert run().weight == 7.0
    assert counts(torch.load(path)) == [[2, False]]
    resumed = run(path)
    assert (resumed.weight, [o.micro_batches for o in resumed.outcomes]) == (7.0, [4, 4])


class Batches(Walk):
    """A resumable loader of ones."""

    def __iter__(self):
        for _ in super().__iter__():
            yield [torch.ones(4, 4)]


def test_model_checkpoint_and_last_resume_inside_a_window(tmp_path):
    def run(max_epochs, **kwargs):
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=-1)
        model, amp = Line(), plugin()
        trainer = make_trainer(
            amp,
            callbacks=[saves],
            enable_checkpointing=True,
            accumulate_grad_batches=2,
            max_epochs=max_epochs,
        )
        trainer.fit(model, Batches(4), **kwargs)
        return model, amp

    run(1)
    model, amp = run(2, ckpt_path="last")
    assert amp.tally == StepTally(4, 4, 0, 0)
    assert model.weight == 6.0
    # growth every second batch with an attempt: 64, 128, 256
    assert amp.scaler.get_scale() == 256.0


# ---------------------------------------------------------------------- the gates' flags


@pytest.mark.parametrize(("at", "done"), [(0, 1), (1, 2), (2, 3)])
def test_epoch_schedule_remembers_an_update_from_before_the_checkpoint(tmp_path, at, done):
    path = tmp_path / "x.ckpt"

    class Scheduled(SavesAt):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1)]

    def run(plan, **kwargs):
        model = Scheduled(plan)
        model.at, model.path = at, path if not kwargs else tmp_path / "unused.ckpt"
        model.seen = done if kwargs else 0
        return fit(model, plugin(), **kwargs).lr_scheduler_configs[0].scheduler.last_epoch

    plan = [GOOD, BAD, BAD, BAD]
    assert run(plan) == 1
    assert run(plan, ckpt_path=path) == 1
    # and knows of none where there was none
    plan = [BAD, BAD, BAD, BAD]
    assert run(plan) == 0
    assert run(plan, ckpt_path=path) == 0


class ByEpoch(WeightAveraging):
    """Samples at the end of each epoch."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


@pytest.mark.parametrize(("plan", "count"), [([GOOD, BAD, BAD, BAD], 1), ([BAD, BAD, BAD, BAD], 0)])
def test_average_remembers_an_update_from_before_the_checkpoint(tmp_path, plan, count):
    path = tmp_path / "x.ckpt"
    save_at(path, 1, plan, callbacks=[ByEpoch()])
    average = ByEpoch()
    resume(path, plan, seen=2, callbacks=[average])
    assert int(average._average_model.n_averaged) == count


@pytest.mark.parametrize("at", [2, 3])
def test_swa_resumes_with_the_samples_of_the_uninterrupted_run(tmp_path, at):
    # two batches an epoch; the second epoch has one update, the third none, the fourth one
    plan = [GOOD, GOOD, GOOD, BAD, BAD, BAD, BAD, GOOD]
    path = tmp_path / "x.ckpt"

    class Saves(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self.seen == at + 1 and not path.exists():
                self.trainer.save_checkpoint(path)

    def run(**kwargs):
        swa, model = StochasticWeightAveraging(0.5, swa_epoch_start=1), Saves(plan)
        model.seen = at + 1 if kwargs else 0
        trainer = make_trainer(plugin(), max_epochs=4, callbacks=[swa])
        trainer.fit(model, Batches(2), **kwargs)
        state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
        return int(swa.n_averaged), model.weight, state["_step_count"]

    whole = run()
    # samples of the initial weight, 7.0 and 6.5, none after the third epoch; torch counts the
    # constructor's call besides those after epochs 1, 2 and 4
    assert whole == (3, pytest.approx((8 + 7 + 6.5) / 3, abs=1e-6), 1 + 3)
    assert run(ckpt_path=path) == whole


# ---------------------------------------------------------------------- several optimizers


class Duo(ManualLine):
    """Two weights from 8.0 on, an optimizer each (lr 0.5, gradient 1 per backward).

    `script[i]` are the calls of batch i: "a" or "b" is a backward pass of that weight's loss, "a!"
    one whose gradient overflows, "ab!" one of both losses together, "A" or "B" a step followed by
    `zero_grad`, "u" an `unscale_` of the second optimizer.
    """

    def __init__(self, script, folder=None):
        super().__init__()
        self.other = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)
        self.script, self.folder = script, folder

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.5) for m in (self.lin, self.other)]

    def training_step(self, batch, batch_idx):
        layers = {"a": self.lin, "b": self.other}
        for call in self.script[batch_idx].split():
            if call in ("A", "B"):
                optimizer = self.optimizers()["AB".index(call)]
                optimizer.step()
                optimizer.zero_grad()
            elif call == "u":
                self.trainer.precision_plugin.unscale_(self.optimizers()[1])
            else:
                loss = sum(layers[name].weight.sum() for name in call.rstrip("!"))
                self.manual_backward(PlantedOverflow.apply(loss, call.endswith("!")))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.folder is not None:
            self.trainer.save_checkpoint(self.folder / f"{batch_idx + 1}.ckpt")


SCRIPTS = [
    pytest.param(["a A b", "a A b", "a A b B", "a A b"], id="the second one accumulates"),
    pytest.param(["a A b", "a! A b", "a A B", "a A b B"], id="an overflow while it holds"),
    pytest.param(["a b! A", "a A", "a A B", "b a A B"], id="it holds an overflow"),
    pytest.param(["ab! A", "a A", "a A B", "b B"], id="both overflow at one scale"),
    pytest.param(["a b A", "b", "B", "a A B"], id="batches without attempt"),
    pytest.param(["b u", "b u", "b u B", "a A"], id="unscaled early, stepped later"),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_open_windows_of_several_optimizers_resume_exactly(tmp_path, script):
    def run(folder=None, ckpt_path=None):
        model, amp = Duo(script, folder), plugin()
        trainer = make_trainer(amp)
        trainer.fit(model, Batches(4), ckpt_path=ckpt_path)
        return model.outcomes, (model.state_dict(), amp.state_dict(), amp.tallies)

    outcomes, final = run(tmp_path)
    for done in (1, 2, 3):
        rest, resumed = run(ckpt_path=tmp_path / f"{done}.ckpt")
        assert rest == outcomes[len(outcomes) - len(rest) :]
        assert identical(list(resumed), list(final)), f"after batch {done}"


# ---------------------------------------------------------------------- stock and other names


def test_stock_checkpoint_resumes_here(tmp_path, info_lines):
    path = tmp_path / "x.ckpt"
    stock = stock_plugin(init_scale=64.0, growth_interval=2)
    fit(Line(), stock, n=3).save_checkpoint(path)
    model, amp = resume(path, amp=SafeAMP(init_scale=8.0), n=3, max_epochs=2)
    # scale and counter: 128 and 1, then 256 and 0, 1, 512 and 0
    assert amp.scaler.get_scale() == 512.0
    assert amp.scaler.state_dict()["_growth_tracker"] == 0
    assert model.weight == 5.0
    assert amp.tally == StepTally(3, 3, 0, 0)
    # the growth interval is not the constructor's
    assert len(info_lines) == 1
    assert "growth_interval=2 (not 2000)" in info_lines[0]


def test_checkpoint_resumes_in_stock(tmp_path):
    path = tmp_path / "x.ckpt"
    fit(Line([GOOD, BAD]), plugin(), n=3).save_checkpoint(path)
    model, stock = Line(), stock_plugin()
    fit(model, stock, n=3, max_epochs=2, ckpt_path=path)
    # from 32 with counter 1: 64 and 0, 1, 128 and 0
    assert stock.scaler.state_dict() == {
        "scale": 128.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 0,
    }
    assert model.weight == 8 - 0.5 * 5


def test_oldest_entry_of_stock_is_read(tmp_path):
    path = tmp_path / "x.ckpt"
    save_at(path, 3, [GOOD, BAD, GOOD, NAN_LOSS])

    def age(checkpoint):
        del checkpoint["SafeAMP"]
        checkpoint["native_amp_scaling_state"] = checkpoint.pop("MixedPrecision")

    rewrite(path, age)
    _, amp = resume(path, amp=SafeAMP())
    assert amp.scaler.get_scale() == 32.0
    assert amp.scaler.state_dict()["_growth_tracker"] == 1


class Renamed(SafeAMP):
    """A user's own plugin."""


@pytest.mark.parametrize(("before", "after"), [(SafeAMP, Renamed), (Renamed, SafeAMP)])
def test_entry_is_found_under_another_class_name(tmp_path, before, after):
    path = tmp_path / "x.ckpt"
    kwargs = {"init_scale": 64.0, "growth_interval": 2}
    *_, saved = save_at(path, 1, [GOOD, BAD], before(**kwargs), accumulate_grad_batches=4)
    assert before.__qualname__ in saved
    assert after.__qualname__ not in saved
    model, _ = resume(path, [GOOD, BAD], after(**kwargs), seen=2, accumulate_grad_batches=4)
    # the open window came along: nothing but the whole entry holds it
    assert [(o.reason, o.micro_batches) for o in model.outcomes] == [(GRADIENTS, 4)]


def test_own_entry_goes_before_stocks(tmp_path):
    path = tmp_path / "x.ckpt"
    save_at(path, 3, [GOOD, BAD])

    def differ(checkpoint):
        checkpoint["MixedPrecision"]["scale"] = 2.0
        checkpoint["SomebodyElse"] = {"format": "onnx", "version": 3}

    rewrite(path, differ)
    _, amp = resume(path)
    # 32, then two good batches
    assert amp.scaler.get_scale() == 64.0
    assert amp.tally == StepTally(4, 3, 1, 0)


# ---------------------------------------------------------------------- other precisions


def make_plugin(precision):
    return None if precision == "32-true" else plugin(precision=precision)


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [
        ("16-mixed", "bf16-mixed", None),
        ("bf16-mixed", "16-mixed", 64.0),
        ("32-true", "16-mixed", 64.0),
        ("32-true", "bf16-mixed", None),
    ],
)
def test_other_precision_resumes_with_one_line(tmp_path, before, after, scale, info_lines):
    path = tmp_path / "x.ckpt"
    fit(Line(), make_plugin(before), n=1).save_checkpoint(path)
    model, amp = resume(path, amp=make_plugin(after), n=1, max_epochs=2)
    assert len(info_lines) == 1
    assert "checkpoint" in info_lines[0]
    assert model.weight == 7.0
    assert (amp.scaler and amp.scaler.get_scale()) == scale
    # the counts are known unless the run before had no plugin
    assert amp.tally.attempted == (1 if before == "32-true" else 2)


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_resume_without_a_change_says_nothing(tmp_path, precision, info_lines):
    path = tmp_path / "x.ckpt"
    fit(Line(), make_plugin(precision), n=1).save_checkpoint(path)
    resume(path, amp=make_plugin(precision) or stock_plugin(), n=1, max_epochs=2)
    assert info_lines == []


def test_stock_bf16_checkpoint_resumes_with_one_line(tmp_path, info_lines):
    path = tmp_path / "x.ckpt"
    fit(Line(), precision="bf16-mixed", n=1).save_checkpoint(path)
    _, amp = resume(path, n=1, max_epochs=2)
    assert len(info_lines) == 1
    assert amp.scaler.get_scale() == 64.0


# ---------------------------------------------------------------------- whose settings hold


def test_checkpoint_decides_scale_and_growth_the_constructor_the_rest(tmp_path, info_lines):
    path = tmp_path / "x.ckpt"
    save_at(path, 3, amp=plugin(growth_factor=4.0, backoff_factor=0.25, growth_interval=8))
    amp = SafeAMP(init_scale=2.0, hysteresis=3, min_scale=2.0, max_scale=128.0)
    resume(path, amp=amp)
    assert amp.scaler.state_dict() == {
        "scale": 64.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 8,
        "_growth_tracker": 4,
    }
    settings = amp.scaler.policy.settings
    assert (settings.hysteresis, settings.min_scale, settings.max_scale) == (3, 2.0, 128.0)
    assert len(info_lines) == 1
    for part in ("growth_factor=4.0", "backoff_factor=0.25", "growth_interval=8"):
        assert part in info_lines[0]


@pytest.mark.parametrize(
    ("bounds", "scale"),
    [({"init_scale": 8.0, "max_scale": 16.0}, 16.0), ({"min_scale": 128.0}, 128.0)],
)
def test_restored_scale_outside_the_bounds_moves_to_the_bound(tmp_path, bounds, scale, info_lines):
    path = tmp_path / "x.ckpt"
    save_at(path, 3, amp=plugin(growth_interval=100))  # 64 from beginning to end
    amp = SafeAMP(**{"init_scale": 128.0, "growth_interval": 100, **bounds})
    resume(path, amp=amp)
    assert amp.scaler.get_scale() == scale
    assert len(info_lines) == 1
    assert "64.0" in info_lines[0]
    assert str(scale) in info_lines[0]


def test_static_scale_that_a_checkpoint_changes_is_said(tmp_path, info_lines):
    path = tmp_path / "x.ckpt"
    save_at(path, 3, amp=plugin(growth_interval=100))  # 64 from beginning to end
    amp = SafeAMP(init_scale=128.0, growth_interval=100, dynamic=False)
    resume(path, amp=amp)
    assert amp.scaler.get_scale() == 64.0
    assert len(info_lines) == 1
    assert "scale=64.0, where it stays (not 128.0)" in info_lines[0]


@pytest.mark.parametrize(
    ("saved_with", "resumed_with", "scales"),
    [
        # one overflow is borne before the checkpoint, the next one after it backs off
        (2, 2, [64.0, 32.0]),
        (3, 3, [64.0, 64.0]),
        # the constructor's hysteresis holds, and the checkpoint cannot have more of it
        (3, 1, [64.0, 32.0]),
        (1, 2, [32.0, 32.0]),
    ],
)
def test_hysteresis_goes_on_after_a_resume(tmp_path, saved_with, resumed_with, scales):
    path = tmp_path / "x.ckpt"
    _, before, _ = save_at(path, 0, [BAD], plugin(hysteresis=saved_with), n=1)
    _, after = resume(path, [BAD], plugin(hysteresis=resumed_with), n=1, max_epochs=2)
    assert [p.scaler.get_scale() for p in (before, after)] == scales


# ---------------------------------------------------------------------- inference


class AllLoops(Line):
    def test_step(self, batch, batch_idx):
        return self.lin(batch[0])

    predict_step = test_step

    def validation_step(self, batch, batch_idx):
        pass


def ruin(entry):
    entry["scaler"]["scale"] = float("nan")
    entry["tallies"] = None


RUINS = [
    pytest.param(lambda c: None, id="sound"),
    pytest.param(lambda c: ruin(c["SafeAMP"]), id="damaged parts"),
    pytest.param(lambda c: c.update(SafeAMP={"scale": 0.0}), id="damaged stock entry"),
    pytest.param(lambda c: c.update(SafeAMP=[1, 2]), id="a list"),
    pytest.param(lambda c: c.update(SafeAMP="lost"), id="a string"),
    pytest.param(lambda c: c.update(SafeAMP=None), id="None"),
    pytest.param(lambda c: (c.pop("SafeAMP"), c.pop("MixedPrecision")), id="missing"),
    pytest.param(lambda c: c.update(native_amp_scaling_state={"scale": -1.0}), id="old entry"),
    pytest.param(lambda c: c.update(native_amp_scaling_state=3), id="old entry, a number"),
]


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
@pytest.mark.parametrize("edit", RUINS[:3])
def test_inference_neither_touches_nor_judges_the_entry(tmp_path, run, edit, info_lines):
    inference_leaves_the_plugin_alone(tmp_path, run, edit, info_lines)


@pytest.mark.parametrize("edit", RUINS[3:])
def test_inference_does_not_mind_a_ruined_entry(tmp_path, edit, info_lines):
    inference_leaves_the_plugin_alone(tmp_path, "test", edit, info_lines)


def inference_leaves_the_plugin_alone(tmp_path, run, edit, info_lines):
    path = tmp_path / "x.ckpt"
    save_at(path, 1, [GOOD, BAD], accumulate_grad_batches=4)
    rewrite(path, edit)
    amp = plugin(init_scale=8.0)
    trained = fit(Line([BAD, GOOD]), amp, n=2)
    before = copy.deepcopy(amp.state_dict())
    assert before["scaler"]["scale"] == 4.0
    getattr(trained, run)(AllLoops(), batches(1), ckpt_path=path)
    assert identical(amp.state_dict(), before)
    assert info_lines == []


# ---------------------------------------------------------------------- damage


MISSING = object()


def put(*path, value):
    def edit(checkpoint):
        part = checkpoint["SafeAMP"]
        for key in path[:-1]:
            part = part[key]
        if value is MISSING:
            del part[path[-1]]
        else:
            part[path[-1]] = value

    return edit


COUNT = (-1, 0.5, True, None, MISSING)
WEIGHT = ("window", "gradients", "lin.weight")
HALF, WHOLE = (torch.ones(1, 4, dtype=d) for d in (torch.float16, torch.long))
# where in the entry, the key that the error must name, and what is there instead
DAMAGES = [
    (("format",), "format", ("1", 2, -1, 1.5, True, None, MISSING)),
    (("scaler",), "scaler", (5, "x", [], MISSING)),
    (("scaler",), "scale", ({},)),
    (("scaler", "scale"), "scale", (0.0, -64.0, math.nan, math.inf, "64", True, None, MISSING)),
    (("scaler", "growth_factor"), "growth_factor", (1.0, 0.5, math.inf, "2", None, MISSING)),
    (("scaler", "backoff_factor"), "backoff_factor", (1.0, 0.0, 2.0, math.nan, None, MISSING)),
    (("scaler", "growth_interval"), "growth_interval", (0, -1, 2.5, True, None, MISSING)),
    (("scaler", "_growth_tracker"), "_growth_tracker", (-1, 0.5, "0", None, MISSING)),
    (("tallies",), "tallies", (None, {}, "x", 0, MISSING)),
    (("tallies", 0), "attempted", ({}, 7)),
    (("tallies", 0, "attempted"), "attempted", (*COUNT, 5)),
    (("tallies", 0, "applied"), "applied", COUNT),
    (("tallies", 0, "skipped"), "skipped", COUNT),
    (("tallies", 0, "consecutive_skips"), "consecutive_skips", (*COUNT, 2)),
    (("gates",), "gates", (None, [], "x", MISSING)),
    (("gates", "SchedulerGate"), "gates", ("x", 5, [[True]], [[1, 0]], [True, False], {})),
    (("gates", "AveragingGate"), "gates", ("x", 5, [1, 0, 0], [True], {})),
    (("window",), "window", (5, "x", [], MISSING)),
    (("window", "scale"), "scale", (0.0, -1.0, math.nan, "64", None, MISSING)),
    (("window", "gradients"), "gradients", (None, [], "x", MISSING)),
    (WEIGHT, "gradients.lin.weight", (torch.ones(4), HALF, WHOLE, 5.0, None)),
    (("window", "gradients", "lin.bias"), "gradients.lin.bias", (torch.ones(1),)),
    (("window", "optimizers"), "optimizers", (None, "x", [], [2, False], [[2]], MISSING)),
    (("window", "optimizers"), "optimizers", ([[2, 0]], [[-1, False]], [[1.5, True]])),
    (("window", "batch"), "batch", (None, True, [True], [0, 1], "xx", MISSING)),
    (("hysteresis_left",), "hysteresis_left", (-1, 0.5, "1", None)),
    (("given_up",), "given_up", (None, 5, "x", [])),
    (("given_up",), "watching", ({}, {"watching": -1, "owed": []}, {"watching": True, "owed": []})),
    (("given_up",), "owed", ({"watching": 1}, {"watching": 1, "owed": [True]})),
]


ONE_OF_EACH = [
    pytest.param(put(*path, value=values[0]), key, id=f"{'.'.join(map(str, path))} {values[0]!r}")
    for path, key, values in DAMAGES
]


class Unreached(Line):
    def training_step(self, batch, batch_idx):
        raise AssertionError("no batch may be reached")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint inside a window, after a first window that was skipped."""
    path = tmp_path_factory.mktemp("sound") / "x.ckpt"
    save_at(
        path,
        2,
        [BAD],
        plugin(hysteresis=2),
        accumulate_grad_batches=2,
        n=6,
        callbacks=[WeightAveraging()],
    )
    return path


def fit_refused(path, amp):
    model = Unreached()
    with pytest.raises(ScalerStateError) as error:
        fit(
            model,
            amp,
            n=6,
            ckpt_path=path,
            accumulate_grad_batches=2,
            callbacks=[WeightAveraging()],
        )
    return str(error.value)


@pytest.mark.parametrize(("edit", "key"), ONE_OF_EACH)
def test_damaged_state_is_refused_by_key_before_the_first_batch(tmp_path, sound, edit, key):
    path = tmp_path / "x.ckpt"
    path.write_bytes(sound.read_bytes())
    rewrite(path, edit)
    assert f'"{key}"' in fit_refused(path, plugin(hysteresis=2))


def test_every_impossible_value_is_refused_by_key(sound):
    checkpoint, accepted = torch.load(sound, weights_only=True), []

    class Restores(Line):
        def on_train_start(self):
            for path, key, values in DAMAGES:
                for value in values:
                    damaged = copy.deepcopy(checkpoint)
                    put(*path, value=value)(damaged)
                    try:
                        self.trainer.precision_plugin.load_state_dict(damaged["SafeAMP"])
                    except ScalerStateError as error:
                        if f'"{key}"' in str(error):
                            continue
                    accepted.append((path, value))

    amp = plugin(hysteresis=2)
    fit(Restores(), amp, n=2, accumulate_grad_batches=2, callbacks=[WeightAveraging()])
    assert accepted == []
    assert sum(len(values) for *_, values in DAMAGES) > 100


@pytest.mark.parametrize("entry", [7, "lost", [1, 2], {"scale": 64.0}, {"x": 1}], ids=repr)
def test_entry_that_is_none_is_refused(tmp_path, sound, entry):
    path = tmp_path / "x.ckpt"
    path.write_bytes(sound.read_bytes())
    rewrite(path, lambda checkpoint: checkpoint.update(SafeAMP=entry))
    message = fit_refused(path, plugin(hysteresis=2))
    assert "scaler state is damaged" in message
    assert '"scale' in message or '"growth_factor"' in message


def test_damaged_stock_entry_is_refused_by_key(tmp_path, sound):
    path = tmp_path / "x.ckpt"
    path.write_bytes(sound.read_bytes())

    def edit(checkpoint):
        del checkpoint["SafeAMP"]
        checkpoint["MixedPrecision"]["growth_interval"] = 0

    rewrite(path, edit)
    assert '"growth_interval"' in fit_refused(path, plugin())


@pytest.mark.parametrize(
    "edit",
    [
        put("tallies", 0, "applied", value=-1),
        put("gates", "SchedulerGate", value="x"),
        put("window", "batch", value="x"),
    ],
    ids=["tallies", "gates", "window"],
)
def test_refused_entry_leaves_the_plugin_as_it_was(tmp_path, sound, edit):
    path = tmp_path / "x.ckpt"
    path.write_bytes(sound.read_bytes())
    rewrite(path, edit)
    amp = plugin(init_scale=8.0, growth_interval=5, hysteresis=2)
    before = copy.deepcopy(amp.scaler.state_dict())
    fit_refused(path, amp)
    assert amp.scaler.state_dict() == before
    assert amp.tally == StepTally()
    # and it fits as if nothing had been
    model = Line()
    fit(model, amp, n=2, accumulate_grad_batches=2)
    assert model.weight == 7.5
    assert amp.tally == StepTally(1, 1, 0, 0)


# ---------------------------------------------------------------------- after the fit


@pytest.mark.parametrize("then", [None, "test", "predict"])
def test_checkpoint_saved_after_the_fit_is_whole(tmp_path, then):
    class Model(Line):
        test_step = predict_step = AllLoops.test_step

    path = tmp_path / "x.ckpt"
    plan = [GOOD, BAD, GOOD, NAN_LOSS]
    whole, whole_amp = Line(plan), plugin()
    fit(whole, whole_amp, max_epochs=2)

    amp = plugin()
    trained = Model(plan)
    trainer = fit(trained, amp)
    during = copy.deepcopy(amp.state_dict())
    if then:
        getattr(trainer, then)(trained, batches(1))
    trainer.save_checkpoint(path)
    assert identical(torch.load(path)["SafeAMP"], during)
    model, resumed = resume(path, plan, seen=4, max_epochs=2)
    assert model.outcomes == whole.outcomes[4:]
    assert model.weight == whole.weight
    assert identical(resumed.state_dict(), whole_amp.state_dict())


def test_checkpoint_saved_after_a_fit_that_stopped_within_a_window_keeps_it(tmp_path):
    class Stops(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.trainer.should_stop = batch_idx == 1

    path = tmp_path / "x.ckpt"
    trainer = fit(Stops(), plugin(), accumulate_grad_batches=4)
    trainer.save_checkpoint(path)
    assert counts(torch.load(path)) == [[2, False]]
    # the next epoch begins with cleared gradients, and so with a whole window
    model, _ = resume(path, accumulate_grad_batches=4, max_epochs=2)
    assert (model.weight, [o.micro_batches for o in model.outcomes]) == (7.5, [4])


def test_flags_of_the_gates_are_kept_after_the_fit():
    class Scheduled(Line):
        def __init__(self, plan):
            super().__init__(plan, make_scheduler=lambda o: StepLR(o, 1), frequency=4)

    # the update in batch 3 waits for the scheduler's turn, which the epoch's end came before
    trainer = fit(Scheduled([BAD, BAD, GOOD]), plugin(), n=3)
    assert dump(trainer)["SafeAMP"]["gates"]["SchedulerGate"] == [[True, True]]


def test_tallies_go_on_over_fits_and_resumes(tmp_path):
    amp = plugin()
    fit(Line([GOOD, BAD]), amp, n=2)
    trainer = fit(Line([BAD, BAD]), amp, n=2)
    assert amp.tally == StepTally(4, 1, 3, 3)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    _, resumed = resume(tmp_path / "x.ckpt", [BAD, GOOD], n=2, max_epochs=2)
    assert resumed.tally == StepTally(6, 2, 4, 0)


def test_plugin_alone_restores_its_own_state():
    amp, other = plugin(hysteresis=2), plugin(hysteresis=2)
    fit(Line([BAD, GOOD, BAD]), amp, n=3)
    other.load_state_dict(copy.deepcopy(amp.state_dict()))
    for part in ("scaler", "tallies", "hysteresis_left"):
        assert identical(other.state_dict()[part], amp.state_dict()[part])


def test_resumed_run_does_not_hold_on_to_the_checkpoint(tmp_path):
    path = tmp_path / "x.ckpt"
    save_at(path, 3)
    kept = []

    class Watches(Line):
        def on_load_checkpoint(self, checkpoint):
            kept.append(weakref.ref(checkpoint["state_dict"]["lin.weight"]))

        def on_train_batch_start(self, batch, batch_idx):
            gc.collect()
            kept.append(kept[0]())

    fit(Watches(), plugin(), ckpt_path=path, max_epochs=2)
    # Lightning drops it before the first batch, to give the memory back
    assert kept[1] is None


def test_checkpoint_written_without_a_fit_can_be_resumed(tmp_path):
    class Validates(Line):
        def validation_step(self, batch, batch_idx):
            return self.lin(batch[0]).mean()

    trainer = make_trainer(SafeAMP(init_scale=64.0))
    trainer.validate(Validates(), batches(1), verbose=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    model, plugin = Line(), SafeAMP(init_scale=64.0)
    fit(model, plugin, 2, ckpt_path=tmp_path / "x.ckpt")
    assert model.weight == 7.0
    assert plugin.tally.applied == 2
