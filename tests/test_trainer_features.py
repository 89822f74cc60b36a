# SPDX-License-Identifier: Apache-2.0
"""SafeAMP under the features of Lightning's Trainer: weights, schedule, tallies and scale by hand."""

from __future__ import annotations

import csv
import functools
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import callbacks as cbs
from lightning.pytorch.tuner import Tuner, batch_size_scaling
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_amp_guard import AmpMonitor, SafeAMP, SkipLimitError, StepTally
from lightning_amp_guard.monitor.ledger.file import read_run
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, PlantedOverflow, batches, make_trainer

G, B, N = GOOD, BAD, NAN_LOSS
SCALE = 64.0


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Automatic(Line):
    """`Line` whose rate halves with each update: n updates bring the weight to 7 + 2**-n exactly.

    A schedule that ran ahead, an update too many, a gradient that is clipped or still scaled: each
    shows in the weight.
    """

    def __init__(self, plan=(), **kwargs):
        super().__init__(plan, **{"make_scheduler": halving, **kwargs})


class Manual(Automatic):
    """The same by hand; `every` batches make a window."""

    every = 1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if loss is not None:
            self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


@functools.cache
def evaluating(kind):
    """The same model, which can be validated, tested and asked for predictions as well."""

    class Evaluates(kind):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.lin(batch[0]).float().mean())

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self.lin(batch[0])

    return Evaluates


def global_state():
    hooks = torch.nn.modules.module
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "filters": list(warnings.filters),
        "sigterm": signal.getsignal(signal.SIGTERM),
        "module hooks": (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)),
        "optimizer hooks": len(optimizer_hooks),
    }


@pytest.fixture(autouse=True)
def global_state_is_restored():
    before = global_state()
    yield
    assert global_state() == before


def left_on(thing):
    """What could be left on a module or callback: hooks, and methods in the place of its own."""
    hooks = {k: len(v) for k, v in vars(thing).items() if "hooks" in k and hasattr(v, "__len__")}
    own = {name for name in vars(thing) if callable(getattr(type(thing), name, None))}
    return own, hooks, type(thing)


@dataclass
class Rig:
    """What is fitted (automatic or manual), and who looks on."""

    kind: type[Automatic]
    monitored: bool
    root: Path
    plugin: SafeAMP = field(default_factory=lambda: SafeAMP(init_scale=SCALE))
    monitor: AmpMonitor | None = None

    @property
    def manual(self):
        return self.kind is Manual

    def trainer(self, *callbacks, **kwargs):
        callbacks = list(callbacks)
        if self.monitored:
            self.monitor = AmpMonitor(ledger=self.root / "ledger.jsonl", warn_after=None)
            callbacks.append(self.monitor)
        kwargs = {"callbacks": callbacks, "default_root_dir": str(self.root), **kwargs}
        return make_trainer(kwargs.pop("plugin", self.plugin), **kwargs)

    def fit(self, model, data, *callbacks, trainer=None, fit=None, **kwargs):
        if self.manual:
            model.every = kwargs.pop("accumulate_grad_batches", model.every)
        trainer = self.trainer(*callbacks, **kwargs) if trainer is None else trainer
        data = batches(data) if isinstance(data, int) else data
        before = [left_on(thing) for thing in (model.lin, *callbacks)]
        fit = fit or {}
        if is_overridden("validation_step", model):
            fit = {"val_dataloaders": batches(1), **fit}
        trainer.fit(model, data, **fit)
        assert [left_on(thing) for thing in (model.lin, *callbacks)] == before
        return trainer

    def check(self, model, trainer, plan, *, rate=True):
        """Compare all there is with what follows from the outcomes in `plan`."""
        applied = plan.count(G)
        assert [o.applied for o in model.outcomes] == [fault == G for fault in plan]
        assert model.weight == 7.0 + 0.5**applied
        assert self.plugin.tally == tally(plan)
        assert self.plugin.scaler.get_scale() == SCALE / 2 ** plan.count(B)
        if rate:
            (group,) = trainer.optimizers[0].param_groups
            assert group["lr"] == 0.5 ** (1 + applied)
        self.check_ledger(model.outcomes)

    def check_ledger(self, outcomes):
        if not self.monitored or not self.monitor.ledger_path:
            return
        rows = read_run(self.monitor.ledger_path).rows
        assert [(r.attempt, r.applied, r.scale) for r in rows] == [
            (o.attempt, o.applied, o.scale) for o in outcomes
        ]
        assert self.monitor.findings == []


def tally(plan):
    skips = 0
    for fault in plan:
        skips = 0 if fault == G else skips + 1
    return StepTally(len(plan), plan.count(G), len(plan) - plan.count(G), skips)


def ids(value):
    return {Automatic: "automatic", Manual: "manual", True: "monitored", False: "alone"}.get(value)


@pytest.fixture(
    params=[(k, m) for k in (Automatic, Manual) for m in (False, True)],
    ids=lambda p: "-".join(map(ids, p)),
)
def rig(request, tmp_path):
    return Rig(*request.param, tmp_path)


@pytest.fixture(params=[False, True], ids=ids)
def auto(request, tmp_path):
    """Only automatic optimization: Lightning has the feature for no other."""
    return Rig(Automatic, request.param, tmp_path)


# ---------------------------------------------------------------------- how much is trained


@pytest.mark.parametrize("kwargs", [{"overfit_batches": 2}, {"limit_train_batches": 2}])
def test_fewer_batches_an_epoch(rig, kwargs):
    plan = [G, B, G, G, N, G]
    model = rig.kind(plan)
    trainer = rig.fit(model, 5, max_epochs=3, **kwargs)
    rig.check(model, trainer, plan)
    assert trainer.global_step == 6


def test_overfit_batches_with_validation_on_the_same_data(rig):
    model = evaluating(rig.kind)([B, G, G, G])
    trainer = rig.fit(
        model, 5, overfit_batches=2, max_epochs=2, fit={"val_dataloaders": batches(5)}
    )
    rig.check(model, trainer, [B, G, G, G])
    assert trainer.callback_metrics["val"] == 4 * (7.0 + 0.125)


def test_fast_dev_run(rig):
    model = evaluating(rig.kind)([G, B, G])
    trainer = rig.fit(model, 9, fast_dev_run=3, fit={"val_dataloaders": batches(9)})
    rig.check(model, trainer, [G, B, G])


def test_max_steps_ends_in_the_middle_of_an_epoch(rig):
    model = rig.kind([G, B, G, G, G])
    trainer = rig.fit(model, 5, max_epochs=-1, max_steps=3)
    rig.check(model, trainer, [G, B, G])


def test_max_time_ends_in_the_middle_of_an_epoch(rig):
    class TimeFlies(rig.kind):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                (timer,) = [c for c in self.trainer.callbacks if isinstance(c, cbs.Timer)]
                timer.load_state_dict({"time_elapsed": {"train": 1e9}})

    model = TimeFlies([G, B, G, G, G])
    trainer = rig.fit(model, 5, max_time="00:01:00:00")
    rig.check(model, trainer, [G, B, G])


class StopsAt(cbs.Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == self.batch


def test_should_stop_in_the_middle_of_an_epoch_and_the_next_fit_goes_on(rig):
    model = rig.kind([G, B, G, G])
    trainer = rig.fit(model, 9, StopsAt(2), max_epochs=3)
    rig.check(model, trainer, [G, B, G])


def test_should_stop_within_a_window_leaves_its_gradients_unstepped(rig):
    model = rig.kind([G, G, B, G])
    trainer = rig.fit(model, 9, StopsAt(2), accumulate_grad_batches=2)
    # the third batch is the first half of the second window
    rig.check(model, trainer, [G])


@pytest.mark.parametrize("monitor", ["val", "loss"])
def test_early_stopping(rig, monitor):
    class Logs(evaluating(rig.kind)):
        def loss(self, batch):
            loss = super().loss(batch)
            self.log("loss", loss)
            return loss

    model = Logs([G, B, B, B])
    stop = cbs.EarlyStopping(monitor, patience=2, min_delta=0.01, check_on_train_epoch_end=True)
    trainer = rig.fit(model, 1, stop, max_epochs=9)
    epochs = 3 if monitor == "val" else 4  # the loss is that of before the update
    rig.check(model, trainer, [G, B, B, B][:epochs])


# ---------------------------------------------------------------------- windows


# Lightning's own advice for such checkpoints
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
def test_validation_and_checkpoints_inside_a_window_leave_it_alone(rig):
    """Windows of four; validation after every third batch, a checkpoint after every step."""

    class KeepsGradients(evaluating(rig.kind)):
        def on_validation_model_zero_grad(self):
            """By hand Lightning knows of no window, and would throw the gradients away."""
            if not rig.manual:
                super().on_validation_model_zero_grad()

    model = KeepsGradients([G, G, G, G, G, B, G, G, G, G, G, G])
    saves = cbs.ModelCheckpoint(rig.root / "at", every_n_train_steps=1, save_top_k=-1)
    trainer = rig.fit(
        model,
        12,
        saves,
        accumulate_grad_batches=4,
        val_check_interval=3,
        enable_checkpointing=True,
        fit={"val_dataloaders": batches(2)},
    )
    rig.check(model, trainer, [G, B, G])
    assert [o.micro_batches for o in model.outcomes] == [4, 4, 4]


def test_validation_inside_a_manual_window_drops_gradients_as_lightning_does(tmp_path):
    rig = Rig(Manual, True, tmp_path)
    model = evaluating(Manual)([G, G, G, B])
    # each window of two is cut in half: the bad half goes with the second window's first batch
    rig.fit(model, 4, val_check_interval=1, accumulate_grad_batches=2)
    assert [o.micro_batches for o in model.outcomes] == [1, 1]
    assert [o.applied for o in model.outcomes] == [True, False]
    assert model.weight == 7.75  # half a window's gradient at the rate of 0.5
    rig.check_ledger(model.outcomes)


def test_checkpoints_taken_inside_a_window_resume_to_the_same_end(rig):
    plan = [G, G, G, B, G, G, G, G]
    whole = rig.kind(plan)

    class Mid(cbs.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(rig.root / f"batch{batch_idx}.ckpt")

    rig.fit(whole, 8, Mid(), accumulate_grad_batches=2)
    assert [o.applied for o in whole.outcomes] == [True, False, True, True]
    assert whole.weight == 7.125
    for at in range(7):
        model = rig.kind(plan)
        model.seen = at + 1
        rig.plugin = SafeAMP()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
            trainer = rig.fit(
                model, 8, accumulate_grad_batches=2, fit={"ckpt_path": rig.root / f"batch{at}.ckpt"}
            )
        assert model.weight == 7.125
        assert rig.plugin.tally == StepTally(4, 3, 1, 0)
        assert rig.plugin.scaler.get_scale() == SCALE / 2
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**4


def test_gradient_accumulation_scheduler(auto):
    # windows of one, then of two, then of four
    plan = [G, B, G, G, *[B, G, G, G], *[G, G, G, G], *[G, G, N, G]]
    grow = cbs.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    model = Automatic(plan)
    trainer = auto.fit(model, 4, grow, max_epochs=4)
    auto.check(model, trainer, [G, B, G, G, B, G, G, N])
    assert [o.micro_batches for o in model.outcomes] == [1] * 4 + [2] * 2 + [4] * 2


def test_short_last_window_is_stepped(auto):
    model = Automatic([G, G, G, B, G, G, B])
    trainer = auto.fit(model, 7, accumulate_grad_batches=2)
    assert [o.micro_batches for o in model.outcomes] == [2, 2, 2, 1]
    auto.check(model, trainer, [G, B, G, B])


# ---------------------------------------------------------------------- data


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.ones(self.n, 4, 4).unbind())


class TakesStreams(Automatic):
    def loss(self, batch):
        return super().loss([batch])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_without_a_length(auto, accumulate):
    plan = [G, B, G, G, G, N]
    model = TakesStreams(plan)
    trainer = auto.fit(
        model, DataLoader(Stream(6), batch_size=None), accumulate_grad_batches=accumulate
    )
    auto.check(model, trainer, plan if accumulate == 1 else [B, G, N])


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders(rig, mode):
    class Takes(rig.kind):
        def loss(self, batch):
            return super().loss(batch["a"] or batch["b"])

    plan = [G, B, G][: 2 if mode == "min_size" else 3]
    model = Takes(plan)
    trainer = rig.fit(model, CombinedLoader({"a": batches(2), "b": batches(3)}, mode))
    rig.check(model, trainer, plan)


def test_loaders_made_anew_every_epoch(rig):
    class Loads(rig.kind):
        loads = 0

        def train_dataloader(self):
            self.loads += 1
            return batches(2)

    plan = [G, B, G, G, N, G]
    model = Loads(plan)
    trainer = rig.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model)
    rig.check(model, trainer, plan)
    assert model.loads == 3


# ---------------------------------------------------------------------- progress, logs, profilers


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers_change_nothing(rig, profiler):
    if profiler == "pytorch":
        from lightning.pytorch.profilers import PyTorchProfiler

        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        profiler = PyTorchProfiler(
            str(rig.root), "profile", export_to_chrome=False, schedule=schedule
        )
    model = rig.kind([G, B, G, G])
    trainer = rig.fit(model, 4, profiler=profiler)
    rig.check(model, trainer, [G, B, G, G])


def test_barebones(rig):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    model = rig.kind([G, B, G, G])
    trainer = rig.fit(model, 4, barebones=True, **dict.fromkeys(off))
    rig.check(model, trainer, [G, B, G, G])


def logged(logger, key):
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return [float(row[key]) for row in csv.DictReader(file) if row.get(key)]


@pytest.mark.parametrize("bar", [cbs.RichProgressBar, cbs.TQDMProgressBar])
def test_progress_bars_and_monitoring_callbacks(rig, bar):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(rig.root)
    model = rig.kind([G, B, G, G])
    trainer = rig.fit(
        model,
        4,
        bar(),
        cbs.LearningRateMonitor("step"),
        cbs.DeviceStatsMonitor(cpu_stats=False),
        cbs.Timer(),
        enable_progress_bar=True,
        logger=logger,
        log_every_n_steps=1,
    )
    rig.check(model, trainer, [G, B, G, G])
    assert logged(logger, "lr-SGD") == [0.5, 0.25, 0.25, 0.125]


def test_throughput_monitor(rig):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(rig.root)
    model = rig.kind([G, B, G, G])
    model.flops_per_batch = 8
    speed = cbs.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = rig.fit(model, 4, speed, logger=logger, log_every_n_steps=1)
    rig.check(model, trainer, [G, B, G, G])
    assert logged(logger, "train/device/samples_per_sec")


# ---------------------------------------------------------------------- weight averages


@pytest.mark.parametrize("make", [cbs.WeightAveraging, cbs.EMAWeightAveraging])
def test_weight_averages_and_validation_with_the_average(rig, make):
    average = make() if make is cbs.WeightAveraging else make(decay=0.5)
    model = evaluating(rig.kind)([G, B, G, G])
    trainer = rig.fit(model, 4, average)
    # applied updates left 7.5, 7.25 and 7.125
    mean = (7.5 + 7.25 + 7.125) / 3
    ema = ((7.5 + 7.25) / 2 + 7.125) / 2
    want = mean if make is cbs.WeightAveraging else ema
    torch.testing.assert_close(model.weight, want, rtol=0, atol=1e-6)
    assert rig.plugin.tally == tally([G, B, G, G])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**4
    # in float16: near 29 its steps are 1/64
    assert abs(float(trainer.callback_metrics["val"]) - 4 * want) <= 2**-6


def test_stochastic_weight_averaging(auto):
    plan = [G, G, *[B, G], *[B, B], *[G, B]]
    swa = cbs.StochasticWeightAveraging(0.5, swa_epoch_start=1, annealing_epochs=1)
    model = Automatic(plan, make_scheduler=None)
    trainer = auto.fit(model, 2, swa, max_epochs=4)
    # 7.0 at first; SWA samples at each epoch's start: of 7.0, after that of 6.5, none of the third
    assert [o.applied for o in model.outcomes] == [fault == G for fault in plan]
    assert auto.plugin.tally == tally(plan)
    assert int(swa.n_averaged) == 3  # with the initial weight
    torch.testing.assert_close(model.weight, (8.0 + 7.0 + 6.5) / 3, rtol=0, atol=1e-6)
    auto.check_ledger(model.outcomes)
    assert trainer.global_step == 8


# ---------------------------------------------------------------------- parameters that come later


class TwoParts(L.LightningModule):
    """backbone(1) + head(1): both see a gradient of 1; the backbone begins frozen."""

    on_step_outcome = Line.on_step_outcome
    make = torch.optim.SGD

    def __init__(self, plan=()):
        super().__init__()
        self.backbone = torch.nn.Linear(1, 1, bias=False)
        self.lin = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.backbone.weight, 2.0)
        torch.nn.init.constant_(self.lin.weight, 4.0)
        self.plan, self.seen, self.outcomes = list(plan), 0, []

    def training_step(self, batch, batch_idx):
        fault = self.plan[self.seen]
        self.seen += 1
        out = self.lin(torch.ones(1, 1)) + self.backbone(torch.ones(1, 1))
        return PlantedOverflow.apply(out.float().mean(), fault == B)

    def configure_optimizers(self):
        return self.make([p for p in self.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_backbone_finetuning_adds_parameters_that_are_unscaled_and_checked(auto, make):
    plan = [G, B, *[G, G], *[B, G], *[G, B]]
    model = TwoParts(plan)
    if make is torch.optim.AdamW:
        # its outcomes wait on the device while the parameters come
        model.make, model.on_step_outcome = functools.partial(make, fused=True), None
    fine = cbs.BackboneFinetuning(
        unfreeze_backbone_at_epoch=2,
        lambda_func=lambda epoch: 1.0,
        backbone_initial_lr=0.25,
        should_align=False,
        train_bn=True,
    )
    trainer = auto.fit(model, 2, fine, max_epochs=4)
    lin, backbone = (torch.nn.Parameter(torch.tensor(value)) for value in (4.0, 2.0))
    plain = make([lin], lr=0.5)
    for update in range(5):  # of which the last two are of the later epochs
        if update == 3:
            plain.add_param_group({"params": [backbone], "lr": 0.25})
        lin.grad = backbone.grad = torch.tensor(1.0)
        plain.step()
    for ours, theirs in ((model.lin, lin), (model.backbone, backbone)):
        torch.testing.assert_close(ours.weight.item(), theirs.item(), rtol=0, atol=1e-6)
    assert auto.plugin.tally == tally(plan)
    assert auto.plugin.scaler.get_scale() == SCALE / 8
    assert len(trainer.optimizers[0].param_groups) == 2
    if make is torch.optim.SGD:
        assert [o.applied for o in model.outcomes] == [fault == G for fault in plan]
        auto.check_ledger(model.outcomes)


# ---------------------------------------------------------------------- exceptions


# Lightning looks for an earlier checkpoint at every fit with an `OnExceptionCheckpoint`, and says so
NO_MODEL = pytest.mark.filterwarnings(
    "ignore:.*was called without a model:UserWarning",
    "ignore:.*there is no last checkpoint available:UserWarning",
)


class Fails(cbs.Callback):
    def __init__(self, batch, hook="on_train_batch_end"):
        self.batch = batch
        setattr(self, hook, self.fail)

    def fail(self, trainer, pl_module, *args):
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            raise RuntimeError("planted")


@NO_MODEL
def test_checkpoint_on_exception_resumes_to_the_same_end(rig):
    plan = [G, B, G, G, N, G]
    model = rig.kind(plan)
    saves = cbs.OnExceptionCheckpoint(rig.root, "failed")
    with pytest.raises(RuntimeError, match="planted"):
        rig.fit(model, 6, saves, Fails(3), enable_checkpointing=True)
    assert model.weight == 7.125
    resumed = rig.kind(plan)
    resumed.seen = 4
    rig.plugin = SafeAMP()
    again = cbs.OnExceptionCheckpoint(rig.root, "again")
    trainer = rig.trainer(again, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
        trainer.fit(resumed, batches(6), ckpt_path=rig.root / "failed.ckpt")
    assert [o.applied for o in resumed.outcomes] == [False, True]
    assert rig.plugin.tally == tally(plan)
    assert resumed.weight == 7.0 + 0.5**4
    assert rig.plugin.scaler.get_scale() == SCALE / 2
    rig.check_ledger([*model.outcomes, *resumed.outcomes])


def test_model_checkpoint_on_exception_holds_what_was_counted(rig):
    model = rig.kind([G, B, G, G])
    saves = cbs.ModelCheckpoint(rig.root / "at", save_on_exception=True)
    with pytest.raises(RuntimeError, match="planted"):
        rig.fit(model, 4, saves, Fails(2), enable_checkpointing=True)
    (path,) = (rig.root / "at").iterdir()
    entry = torch.load(path, weights_only=True)["SafeAMP"]
    assert entry["scaler"]["scale"] == SCALE / 2
    assert entry["scaler"]["_growth_tracker"] == 1
    (row,) = entry["tallies"]
    assert row == {"attempted": 3, "applied": 2, "skipped": 1, "consecutive_skips": 0}
    assert entry["window"] is None


@NO_MODEL
def test_checkpoint_on_the_skip_limit_holds_no_skips_in_a_row(rig):
    rig.plugin = SafeAMP(init_scale=SCALE, max_consecutive_skips=2)
    saves = cbs.OnExceptionCheckpoint(rig.root, "failed")
    with pytest.raises(SkipLimitError):
        rig.fit(rig.kind([G, B, B]), 6, saves, enable_checkpointing=True)
    entry = torch.load(rig.root / "failed.ckpt", weights_only=True)["SafeAMP"]
    assert entry["scaler"]["scale"] == SCALE / 4
    (row,) = entry["tallies"]
    assert (row["attempted"], row["applied"], row["consecutive_skips"]) == (3, 1, 0)


# ---------------------------------------------------------------------- fits in a row


def test_fits_in_a_row_with_one_trainer(rig):
    plan = [G, B, G, G, N, G]
    model = evaluating(rig.kind)(plan)
    trainer = rig.fit(model, 2)
    for ask in (trainer.validate, trainer.test, trainer.predict):
        ask(model, batches(1), **({} if ask == trainer.predict else {"verbose": False}))
    assert rig.plugin.tally == tally(plan[:2])
    trainer.fit_loop.max_epochs = 3
    # the optimizer is made anew with each fit, and its schedule begins at 0.5 again
    trainer.fit(model, batches(2), val_dataloaders=batches(1))
    assert [o.applied for o in model.outcomes] == [fault == G for fault in plan]
    assert [o.attempt for o in model.outcomes] == list(range(6))
    assert rig.plugin.tally == tally(plan)
    assert rig.plugin.scaler.get_scale() == SCALE / 2
    assert model.weight == 7.5 - 0.875


def test_several_trainers_with_one_plugin(rig):
    plan = [G, B, G, G]
    first, second = rig.kind(plan), rig.kind(plan)
    rig.fit(first, 4)
    rig.check_ledger(first.outcomes)
    trainer = rig.fit(second, 4)
    assert first.weight == second.weight == 7.125
    assert [o.attempt for o in second.outcomes] == [4, 5, 6, 7]
    assert rig.plugin.tally == StepTally(8, 6, 2, 0)
    assert rig.plugin.scaler.get_scale() == SCALE / 4
    assert trainer.precision_plugin is rig.plugin
    rig.check_ledger(second.outcomes)


@pytest.mark.parametrize("ask", ["validate", "test", "predict"])
def test_evaluation_with_a_checkpoint_touches_no_training_state(rig, ask):
    model = evaluating(rig.kind)([G, B, G])
    trainer = rig.fit(model, 3)
    trainer.save_checkpoint(rig.root / "at.ckpt")
    other, plugin = evaluating(rig.kind)(), SafeAMP(init_scale=8.0)
    fresh = rig.trainer(plugin=plugin)
    getattr(fresh, ask)(other, batches(1), ckpt_path=rig.root / "at.ckpt")
    assert other.weight == 7.25
    assert plugin.scaler.get_scale() == 8.0
    assert plugin.tally == StepTally()
    getattr(trainer, ask)(model, batches(1), ckpt_path=rig.root / "at.ckpt")
    assert rig.plugin.tally == tally([G, B, G])
    assert rig.plugin.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("inference_mode", [False, True])
def test_evaluation_with_gradients_inside_does_not_disturb_the_fit(rig, inference_mode):
    class WithGradients(rig.kind):
        """Its validation asks for gradients of its input, as an attack or a saliency map does."""

        def validation_step(self, batch, batch_idx):
            if inference_mode:
                return
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                (grad,) = torch.autograd.grad(self.lin(x).float().mean(), x)
            self.log("val", grad.sum())

    model = WithGradients([G, B, G, G])
    trainer = rig.fit(
        model,
        4,
        inference_mode=inference_mode,
        val_check_interval=1,
    )
    rig.check(model, trainer, [G, B, G, G])
    if not inference_mode:
        # the mean over four rows of four weights
        assert abs(float(trainer.callback_metrics["val"]) - 4 * 7.125) <= 2**-6


def test_weights_only_checkpoints_and_lax_loading(rig):
    model = evaluating(rig.kind)([G, B, G])
    saves = cbs.ModelCheckpoint(rig.root / "at", save_weights_only=True, filename="w")
    trainer = rig.fit(model, 3, saves, enable_checkpointing=True)
    rig.check(model, trainer, [G, B, G])
    assert "SafeAMP" not in torch.load(rig.root / "at" / "w.ckpt", weights_only=True)
    other = evaluating(rig.kind)()
    other.extra = torch.nn.Linear(1, 1)
    other.strict_loading = False
    plugin = SafeAMP(init_scale=8.0)
    rig.trainer(plugin=plugin).test(
        other, batches(1), ckpt_path=rig.root / "at" / "w.ckpt", verbose=False
    )
    assert other.weight == 7.25
    assert plugin.scaler.get_scale() == 8.0


def test_lax_loading_resumes_the_scaler(rig):
    model = rig.kind([G, B, G])
    trainer = rig.fit(model, 3)
    trainer.save_checkpoint(rig.root / "at.ckpt")
    rig.plugin, other = SafeAMP(init_scale=8.0), rig.kind([G, G, G])
    other.register_buffer("extra", torch.zeros(1))
    other.strict_loading = False
    trainer = rig.fit(other, 3, max_epochs=2, fit={"ckpt_path": rig.root / "at.ckpt"})
    assert other.weight == 7.0 + 0.5**5
    assert rig.plugin.tally == StepTally(6, 5, 1, 0)
    assert rig.plugin.scaler.get_scale() == SCALE / 2


# ---------------------------------------------------------------------- tuner


def fused(params):
    return torch.optim.AdamW(params, lr=0.5, fused=True)


class Silent(Line):
    """Nobody hears its outcomes: with a fused AdamW they wait on the device."""

    on_step_outcome = None


@pytest.mark.parametrize("model_type", [Automatic, Silent])
@pytest.mark.parametrize("as_callback", [False, True])
def test_learning_rate_finder_leaves_scale_counts_and_what_waits(auto, model_type, as_callback):
    fit_plan = [G, B, G, G, N, G, G]
    make = fused if model_type is Silent else None
    auto.plugin = SafeAMP(init_scale=SCALE, growth_interval=2)
    used = Line([G, G, G, B, G], make)
    used.on_step_outcome = None
    auto.fit(used, 5)  # 128, one clean batch, the skip, one clean batch
    before = dict(auto.plugin.scaler.state_dict())
    assert (before["scale"], before["_growth_tracker"]) == (SCALE, 1)
    find = {"num_training": 6, "early_stop_threshold": None, "update_attr": False}
    model = model_type([G, G, B, G, B, G, *fit_plan], make_optimizer=make)
    if as_callback:
        find["num_training_steps"] = find.pop("num_training")
        trainer = auto.fit(model, 7, cbs.LearningRateFinder(**find))
    else:
        trainer = auto.trainer()
        assert len(Tuner(trainer).lr_find(model, batches(8), **find).results["lr"]) == 6
        assert dict(auto.plugin.scaler.state_dict()) == before
        assert auto.plugin.tally == StepTally(5, 4, 1, 0)
        assert auto.plugin.engine.late.waiting == []
        assert model.weight == 8.0
        auto.fit(model, 7, trainer=trainer)
    assert auto.plugin.tally == StepTally(12, 9, 3, 0)
    # grown after the first batch, halved, grown after two, the bad loss counts for nothing, grown
    assert auto.plugin.scaler.get_scale() == SCALE * 2 / 2 * 2 * 2
    assert auto.plugin.scaler.state_dict()["_growth_tracker"] == 0
    if model_type is Automatic:
        assert model.weight == 7.0 + 0.5**5
        assert [o.attempt for o in model.outcomes[-7:]] == list(range(5, 12))
        auto.check_ledger(model.outcomes[-7:])
    else:
        torch.testing.assert_close(model.weight, adamw_weight(5), rtol=0, atol=1e-5)
    assert trainer.global_step == 7


def adamw_weight(n, clip=None):
    """The weight after n updates of a float32 AdamW with the gradients of `Line`."""
    weight = torch.nn.Parameter(torch.full((1, 4), 8.0))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    for _ in range(n):
        weight.grad = torch.ones(1, 4)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([weight], clip)
        optimizer.step()
    return float(weight.detach()[0, 0])


class Sized(Automatic):
    """Loads batches of its own `batch_size`, of which more than eight rows do not fit."""

    batch_size = 2

    def train_dataloader(self):
        return DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)), self.batch_size)

    def loss(self, batch):
        if len(batch[0]) > 8:
            raise RuntimeError("CUDA out of memory. Planted.")
        return super().loss(batch)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("as_callback", [False, True])
def test_batch_size_finder_leaves_scale_and_counts(auto, mode, as_callback, monkeypatch):
    # it collects garbage before each trial, which takes a second where many modules are loaded
    monkeypatch.setattr(batch_size_scaling, "garbage_collection_cuda", lambda: None)
    find = {"mode": mode, "steps_per_trial": 2, "max_trials": 4, "margin": 0.0}
    # two batches of each size that fits: 2, 4, 8, then 16 fails (and 12 and so on in between)
    model = Sized([G, B, G, G, B, B])
    if as_callback:
        trainer = auto.trainer(cbs.BatchSizeFinder(**find), max_steps=3)
    else:
        trainer = auto.trainer(max_steps=3)
        Tuner(trainer).scale_batch_size(model, **find)
        assert auto.plugin.tally == StepTally()
        assert auto.plugin.scaler.get_scale() == SCALE
        assert model.weight == 8.0
    trainer.fit(model)
    assert model.batch_size == 8
    assert model.weight == 7.0 + 0.5**3
    assert auto.plugin.tally == StepTally(3, 3, 0, 0)
    assert auto.plugin.scaler.get_scale() == SCALE
    assert [o.applied for o in model.outcomes[:6]] == [True, False, True, True, False, False]
    assert [o.attempt for o in model.outcomes[-3:]] == [0, 1, 2]
    auto.check_ledger(model.outcomes[-3:])


class SizedByHand(Manual):
    """Windows of two; what does not fit fails in a window's second batch."""

    batch_size, every = 2, 2
    train_dataloader = Sized.train_dataloader

    def loss(self, batch):
        if len(batch[0]) > 8 and self.seen % 2 == 1:
            raise RuntimeError("CUDA out of memory. Planted.")
        return super().loss(batch)


@pytest.mark.parametrize("monitored", [False, True], ids=ids)
def test_batch_size_finder_that_fails_inside_a_window_leaves_no_gradients(
    monitored, tmp_path, monkeypatch
):
    monkeypatch.setattr(batch_size_scaling, "garbage_collection_cuda", lambda: None)
    find = {"mode": "power", "steps_per_trial": 3, "max_trials": 4}
    model, rig = SizedByHand([G, G, B]), Rig(Manual, monitored, tmp_path)
    trainer = rig.trainer(cbs.BatchSizeFinder(**find), max_steps=3)
    trainer.fit(model)
    assert model.batch_size == 8
    assert not model.outcomes[1].applied  # in a trial
    model.outcomes = model.outcomes[-3:]
    rig.check(model, trainer, [G, G, G])


# ---------------------------------------------------------------------- outcomes that wait


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"accumulate_grad_batches": 2},
        {"max_steps": 5},
        {"val_check_interval": 3},
        {"overfit_batches": 4, "max_epochs": 2},
        {"callbacks": [cbs.GradientAccumulationScheduler({0: 2, 1: 1})], "max_epochs": 2},
        {"fast_dev_run": 7},
        {"profiler": "simple"},
        {"detect_anomaly": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_outcomes_that_wait_come_out_right_under(kwargs, clip, tmp_path):
    class Model(Silent):
        def validation_step(self, batch, batch_idx):
            return self.lin(batch[0])

    # a NaN that is there without the scale is what `detect_anomaly` raises for
    plan = [G, B, G, G, G, B if "detect_anomaly" in kwargs else N, G, G, B, G, G]
    model, plugin = Model(plan, fused), SafeAMP(init_scale=SCALE)
    trainer = make_trainer(plugin, gradient_clip_val=clip, default_root_dir=str(tmp_path), **kwargs)
    trainer.fit(model, batches(8), batches(1))
    windows = {
        "accumulate_grad_batches": [B, G, N, G],
        "max_steps": plan[:5],
        "val_check_interval": plan[:8],
        "overfit_batches": plan[:8],
        "callbacks": [B, G, N, G, *plan[8:], G, G, G, G, G],
        "fast_dev_run": plan[:7],
        "profiler": plan[:8],
        "detect_anomaly": plan[:8],
    }[next(iter(kwargs))]
    assert plugin.tally == tally(windows)
    assert plugin.scaler.get_scale() == SCALE / 2 ** windows.count(B)
    want = adamw_weight(windows.count(G), clip)
    torch.testing.assert_close(model.weight, want, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- how the step is computed


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_activation_checkpointing(rig, reentrant, accumulate):
    class Checkpoints(rig.kind):
        def loss(self, batch):
            fault = self.plan[self.seen]
            x = batch[0].clone().requires_grad_()
            out = checkpoint(self.lin, x, use_reentrant=reentrant)
            loss = PlantedOverflow.apply(out.float().mean(), fault == B)
            return loss * float("nan") if fault == N else loss

    plan = [G, G, G, N, G, G, B, G]
    model = Checkpoints(plan)
    trainer = rig.fit(model, 8, accumulate_grad_batches=accumulate)
    rig.check(model, trainer, plan if accumulate == 1 else [G, N, G, B])


@pytest.mark.parametrize("reentrant", [False, True])
def test_detect_anomaly_and_activation_checkpointing(rig, reentrant):
    class Checkpoints(rig.kind):
        def loss(self, batch):
            x = batch[0].clone().requires_grad_()
            out = checkpoint(self.lin, x, use_reentrant=reentrant)
            return PlantedOverflow.apply(out.float().mean(), self.plan[self.seen] == B)

    plan = [G, B, G, G]
    model = Checkpoints(plan)
    said = pytest.warns(UserWarning, match="reentrant") if reentrant else warnings.catch_warnings()
    with said:
        trainer = rig.fit(model, 4, detect_anomaly=True)
    rig.check(model, trainer, plan)


def test_deterministic(rig):
    model = rig.kind([G, B, G, N, G])
    try:
        trainer = rig.fit(model, 5, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)  # Lightning leaves it on
    rig.check(model, trainer, [G, B, G, N, G])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("make", [None, fused], ids=["sgd", "fused"])
def test_clip_value_changed_during_the_fit(auto, algorithm, make):
    """Clipping comes up in the third batch, is halved in the fourth, and goes in the fifth."""

    class Changes(Line):
        def on_train_batch_start(self, batch, batch_idx):
            at = {0: None, 2: 1.0, 3: 0.5, 4: None}
            self.trainer.gradient_clip_val = at.get(batch_idx, self.trainer.gradient_clip_val)

    model = Changes([G, B, G, G, G], make)
    auto.fit(model, 5, gradient_clip_algorithm=algorithm)
    weight = torch.nn.Parameter(torch.full((1, 4), 8.0))
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.5)))([weight])
    # the norm of four ones is 2
    for grad in [1.0, 0.5, 0.25, 1.0] if algorithm == "norm" else [1.0, 1.0, 0.5, 1.0]:
        weight.grad = torch.full((1, 4), grad)
        optimizer.step()
    torch.testing.assert_close(model.lin.weight.detach(), weight.detach(), rtol=0, atol=1e-5)
    assert auto.plugin.tally == tally([G, B, G, G, G])
    auto.check_ledger(model.outcomes)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_step_divides_by_a_grad_scale_of_the_users_own(make, clip):
    class Divides(Silent):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.optimizers[0].grad_scale = torch.tensor(2.0)

    def optimizer(params):
        return make(params, lr=0.5, fused=True)

    model, plugin = Divides([G, B, G], optimizer), SafeAMP(init_scale=SCALE)
    trainer = make_trainer(plugin, gradient_clip_val=clip)
    trainer.fit(model, batches(3))
    weight = torch.nn.Parameter(torch.full((1, 4), 8.0))
    plain = make([weight], lr=0.5)
    for _ in range(2):
        # the norm of four ones is 2
        weight.grad = torch.full((1, 4), 0.25 if clip else 1.0) / 2
        plain.step()
    torch.testing.assert_close(model.lin.weight.detach(), weight.detach(), rtol=0, atol=1e-5)
    assert plugin.tally == StepTally(3, 2, 1, 0)


def test_configure_model_and_parameters_made_there(rig):
    class Late(rig.kind):
        def configure_model(self):
            if not hasattr(self, "second"):
                self.second = torch.nn.Linear(4, 1, bias=False)
                torch.nn.init.constant_(self.second.weight, 8.0)

        def loss(self, batch):
            self.kept, self.lin = self.lin, self.second
            try:
                return super().loss(batch)
            finally:
                self.lin = self.kept

    plan = [G, B, G]
    model = Late(plan)
    trainer = rig.fit(model, 3)
    assert model.weight == 8.0
    assert float(model.second.weight.detach()[0, 0]) == 7.25
    assert rig.plugin.tally == tally(plan)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125
    rig.check_ledger(model.outcomes)


@pytest.mark.parametrize("monitored", [False, True], ids=ids)
def test_toggled_optimizers_step_alone(monitored, tmp_path):
    class Toggles(L.LightningModule):
        """Each loss reaches both parts; only the toggled one gets a gradient."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = (
                torch.nn.Parameter(torch.tensor(4.0)),
                torch.nn.Parameter(torch.tensor(4.0)),
            )
            self.outcomes = []

        on_step_outcome = Line.on_step_outcome

        def training_step(self, batch, batch_idx):
            for i, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                loss = PlantedOverflow.apply(self.a + self.b, (i, batch_idx) == (0, 1))
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.5) for p in (self.a, self.b)]

    model, rig = Toggles(), Rig(Manual, monitored, tmp_path)
    trainer = rig.trainer()
    trainer.fit(model, batches(3))
    assert float(model.a.detach()) == 4.0 - 2 * 0.5
    assert float(model.b.detach()) == 4.0 - 3 * 0.5
    assert rig.plugin.tallies == [StepTally(3, 2, 1, 0), StepTally(3, 3, 0, 0)]
    assert rig.plugin.scaler.get_scale() == SCALE / 2
    assert model.a.requires_grad
    assert model.b.requires_grad
    rig.check_ledger(model.outcomes)


# ---------------------------------------------------------------------- torch.compile


class FaultByData(torch.autograd.Function):
    """Identity; the gradient is multiplied by what the batch says: 1 or inf."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def planned(plan):
    """A loader whose second field plants an overflow and whose third spoils the loss."""
    bad = torch.tensor([float("inf") if fault == B else 1.0 for fault in plan])
    nan = torch.tensor([0.0 if fault == N else 1.0 for fault in plan])
    data = torch.utils.data.TensorDataset(torch.ones(len(plan), 4, 4), bad, nan)
    return DataLoader(data, batch_size=None)


def compiles(kind):
    class Compiles(kind):
        def loss(self, batch):
            x, bad, nan = batch
            return FaultByData.apply(self.lin(x).float().mean(), bad) * (nan / nan)

    return Compiles


# Dynamo instantiates the user's autograd Function, and looks at what it traces through
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
)
@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("submodule", "eager"),
        ("submodule", "aot_eager"),
        ("in place", "aot_eager"),
        ("module", "eager"),
        ("module in place", "aot_eager"),
    ],
)
def test_compiled_modules(rig, what, backend):
    plan = [G, B, G, N, G, G]
    model = compiles(rig.kind)(plan)
    compiled = model
    if what == "submodule":
        model.lin = torch.compile(model.lin, backend=backend)
    elif what == "in place":
        model.lin.compile(backend=backend)
    elif what == "module in place":
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    trainer = rig.trainer()
    trainer.fit(compiled, planned(plan))
    rig.check(model, trainer, plan)
