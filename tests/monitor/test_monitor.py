# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor in real fits: what is logged and when, what it costs, what it leaves behind."""

import copy
import csv
import importlib.util
import logging
import math
import pickle
import re
import sys
import warnings
from collections import Counter

import lightning.pytorch as L
import lightning_utilities.core.rank_zero as rank_zero
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_guard import AmpGuardWarning, SafeAMP, SchedulerGate, SkipLimitError, TokenClock
from lightning_amp_guard.monitor import AmpMonitor
from lightning_amp_guard.monitor.metrics import KEYS, LOG_KEYS
from tests.costs import Meter
from tests.helpers import (
    BAD,
    GOOD,
    NAN_LOSS,
    NONE,
    Line,
    ManualLine,
    batches,
    fit,
    make_trainer,
    stock_plugin,
)


def safe(**kwargs):
    return SafeAMP(**{"init_scale": 8.0, "growth_interval": 1000, **kwargs})


# What a CPU without a `TokenClock` shows, besides what no test can know.
SHOWN = [k for k in LOG_KEYS if not k.startswith(("amp/peak", "amp/tokens"))]
MEASURED = ("samples_per_s", "process_rss_mib")
HALF_MAX = math.log2(65504)  # doublings from a gradient of 1 to the end of float16


def amp(metrics):
    """The monitor's part of a dict of metrics, with "amp/" left out and nan as a word."""
    values = {k.removeprefix("amp/"): float(v) for k, v in metrics.items() if k.startswith("amp/")}
    values = {k: v for k, v in values.items() if k not in MEASURED}
    return {k: "nan" if math.isnan(v) else v for k, v in values.items()}


class Recorder(L.Callback):
    """What `callback_metrics` hold after each batch of a log step, and after which batches."""

    def __init__(self):
        self.rows = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.callback_metrics.clear()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if row := amp(trainer.callback_metrics):
            self.rows[batch_idx] = row


def logged(tmp_path, *args, **kwargs):
    """Fit and return the rows of the CSV file that hold values of the monitor, by step."""
    fit(*args, logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1), **kwargs)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return {int(row["step"]): amp(row) for row in rows if amp(row)}


@pytest.fixture
def said():
    """Messages that went through Lightning's `rank_zero_info`."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    rank_zero.log.addHandler(handler)
    yield messages
    rank_zero.log.removeHandler(handler)


# ---------------------------------------------------------------------- what is logged


def test_log_steps_show_scale_counts_and_norm(tmp_path):
    # the weight's 4 gradients are 1, so the norm is 2; a skipped batch has none
    model = Line([GOOD, BAD, GOOD, NAN_LOSS, GOOD, GOOD])
    rows = logged(tmp_path, model, safe(), 6, callbacks=[AmpMonitor()], log_every_n_steps=2)
    keys = [key.removeprefix("amp/") for key in LOG_KEYS[:10]]
    overflow, nothing_finite = (0.0, 0.0, -math.inf), (0.0, 0.0, "nan")
    healthy = (0.0, 0.0, HALF_MAX - 2)  # 1, times a scale of 4
    assert rows == {
        1: dict(zip(keys, (4.0, 1.0, 1.0, 1.0, 1.0, 1 / 2, "nan", *overflow), strict=True)),
        3: dict(zip(keys, (4.0, 1.0, 2.0, 2.0, 1.0, 2 / 4, "nan", *nothing_finite), strict=True)),
        5: dict(zip(keys, (4.0, 0.0, 4.0, 2.0, 0.0, 2 / 6, 2.0, *healthy), strict=True)),
    }


class Tagger(Line):
    """`Line` whose batches a `TokenClock` can count."""

    def count(self, batch):
        return batch[0].shape[0] * 3


def test_docstring_table_is_the_emitted_set():
    table = re.findall(r"^ +\| `(amp/\w+)` \| \S", AmpMonitor.__doc__, re.MULTILINE)
    trainer = fit(Line(), safe(), 1, callbacks=[AmpMonitor()], log_every_n_steps=1)
    emitted = [key for key in trainer.callback_metrics if key.startswith("amp/")]
    assert emitted == SHOWN
    clock = TokenClock(count=Tagger().count)
    trainer = fit(Line(), safe(), 1, callbacks=[AmpMonitor(), clock], log_every_n_steps=1)
    counted = [key for key in trainer.callback_metrics if key.startswith("amp/")]
    assert set(counted) - set(emitted) == {"amp/tokens_per_s"}
    on_cuda = [key for key in table if key.startswith("amp/peak_")]
    assert len(on_cuda) == 2
    assert table == list(LOG_KEYS)
    assert set(table) == {*counted, *on_cuda}


def test_tokens_go_with_samples():
    clock = TokenClock(count=Tagger().count)
    trainer = fit(Line(), safe(), 6, callbacks=[AmpMonitor(), clock], log_every_n_steps=6)
    metrics = trainer.callback_metrics
    # three tokens a sample; both are counted from the start of the third batch
    torch.testing.assert_close(
        metrics["amp/tokens_per_s"], 3 * metrics["amp/samples_per_s"], rtol=1e-6, atol=0
    )


@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))),
    reason="needs a TensorBoard writer",
)
def test_tensorboard_takes_the_values(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    fit(Line(), safe(), 1, callbacks=[AmpMonitor()], log_every_n_steps=1, logger=logger)
    (file,) = tmp_path.rglob("events*")
    assert all(key.encode() in file.read_bytes() for key in SHOWN)


def test_csv_shows_every_key_as_a_column(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(Line(), safe(), 3, callbacks=[AmpMonitor()], log_every_n_steps=3, logger=logger)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        (row,) = csv.DictReader(lines)
    assert {key for key in row if key.startswith("amp/")} == set(SHOWN)
    assert all(row[key] for key in SHOWN)
    assert float(row["amp/samples_per_s"]) > 0
    assert 50 < float(row["amp/process_rss_mib"]) < 2**17


@pytest.mark.parametrize("prog_bar", [True, False])
def test_progress_bar_shows_the_values_on_request(prog_bar):
    monitor = AmpMonitor(prog_bar=prog_bar)
    trainer = fit(Line([BAD]), safe(), 2, callbacks=[monitor], log_every_n_steps=1)
    shown = trainer.progress_bar_metrics
    assert set(shown) == (set(SHOWN) if prog_bar else set())
    assert shown.get("amp/skipped_steps", 1.0) == 1.0


@pytest.mark.parametrize("names", [["scale", "skipped_steps"], ("amp/skipped_steps", "scale")])
def test_progress_bar_shows_the_named_values_and_loggers_get_all(names, tmp_path):
    logger = CSVLogger(tmp_path)
    monitor = AmpMonitor(prog_bar=names)
    trainer = fit(Line([BAD]), safe(), 2, callbacks=[monitor], log_every_n_steps=1, logger=logger)
    assert set(trainer.progress_bar_metrics) == {"amp/scale", "amp/skipped_steps"}
    assert trainer.progress_bar_metrics["amp/skipped_steps"] == 1.0
    assert set(SHOWN) <= set(trainer.logged_metrics)


def test_an_empty_list_of_names_shows_none():
    trainer = fit(Line(), safe(), 2, callbacks=[AmpMonitor(prog_bar=[])], log_every_n_steps=1)
    assert trainer.progress_bar_metrics == {}
    assert set(SHOWN) <= set(trainer.logged_metrics)


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"prog_bar=\['scael'\]") as caught:
        AmpMonitor(prog_bar=["scael"])
    assert "no value 'amp/scael'" in str(caught.value)
    for key in LOG_KEYS:
        assert repr(key.removeprefix("amp/")) in str(caught.value)


def test_growth_at_the_end_of_the_batch_shows_in_its_scale():
    plugin = SafeAMP(init_scale=8.0, growth_interval=1)
    trainer = fit(Line(), plugin, 2, callbacks=[AmpMonitor()], log_every_n_steps=1)
    assert trainer.callback_metrics["amp/scale"] == 32.0


def test_bf16_has_scale_one_and_counts_skips():
    plugin = SafeAMP("bf16-mixed")
    trainer = fit(Line([BAD]), plugin, 2, callbacks=[AmpMonitor()], log_every_n_steps=2)
    assert amp(trainer.callback_metrics) == {
        "scale": 1.0,
        "skipped": 1.0,
        "applied_steps": 1.0,
        "skipped_steps": 1.0,
        "consecutive_skips": 0.0,
        "skip_rate": 0.5,
        "grad_norm": 2.0,
        "zero_grad_fraction": 0.0,
        "subnormal_grad_fraction": 0.0,
        "headroom_bits": HALF_MAX,
    }


def test_float64_keeps_counts_and_rates_exact():
    trainer = fit(Line([BAD]), safe(), 3, callbacks=[AmpMonitor()], log_every_n_steps=3)
    rate = trainer.callback_metrics["amp/skip_rate"]
    assert (rate.item(), rate.device.type) == (1 / 3, "cpu")


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("n", "accumulate", "every", "expected"),
    [
        (4, 1, 2, [1, 3]),
        (8, 2, 1, [1, 3, 5, 7]),
        (8, 2, 2, [3, 7]),
        (5, 2, 1, [1, 3, 4]),  # the last window is short
        (4, 1, 50, []),
        (4, 1, 0, []),
    ],
)
def test_values_are_logged_where_the_loggers_listen(n, accumulate, every, expected):
    recorder = Recorder()
    fit(
        Line(),
        safe(),
        n,
        # the recorder looks after the monitor, before Lightning goes on
        callbacks=[AmpMonitor(), recorder],
        accumulate_grad_batches=accumulate,
        log_every_n_steps=every,
    )
    assert list(recorder.rows) == expected


class Endless(torch.utils.data.IterableDataset):
    """Three batches of one sample each, whose number nobody can know beforehand."""

    def __iter__(self):
        return iter(torch.ones(3, 1, 4))


@pytest.mark.parametrize(
    ("loader", "limit"),
    [(batches(8), 3), (torch.utils.data.DataLoader(Endless(), batch_size=None), None)],
)
def test_a_last_window_that_is_short_is_logged(loader, limit):
    class Bare(Line):
        def training_step(self, batch, batch_idx):
            return self.loss(batch if isinstance(batch, list) else [batch])

    recorder = Recorder()
    make_trainer(
        safe(),
        callbacks=[AmpMonitor(), recorder],
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        limit_train_batches=limit,
    ).fit(Bare(), loader)
    assert list(recorder.rows) == [1, 2]


def test_skipped_covers_the_interval_under_accumulation(tmp_path):
    # windows of 2: bad, good, bad, good; log steps after windows 2 and 4
    plan = [BAD, GOOD, GOOD, GOOD] * 2
    rows = logged(
        tmp_path,
        Line(plan),
        safe(),
        8,
        callbacks=[AmpMonitor()],
        accumulate_grad_batches=2,
        log_every_n_steps=2,
    )
    assert [row["skipped"] for row in rows.values()] == [1.0, 1.0]
    assert [row["skipped_steps"] for row in rows.values()] == [1.0, 2.0]


@pytest.mark.parametrize("stopper_first", [True, False])
def test_no_skip_is_shown_twice_when_the_fit_stops_between_log_steps(tmp_path, stopper_first):
    class Stopper(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 2

    class Loud(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    callbacks = [Stopper(), AmpMonitor()] if stopper_first else [AmpMonitor(), Stopper()]
    rows = logged(
        tmp_path, Loud([BAD]), safe(), 6, callbacks=callbacks, log_every_n_steps=2, min_epochs=0
    )
    assert {step: row["skipped"] for step, row in rows.items()} == (
        {1: 1.0, 2: 0.0} if stopper_first else {1: 1.0}
    )


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # what this is about
def test_a_batch_without_an_attempt_has_values_and_no_norm():
    trainer = fit(Line([GOOD, NONE]), safe(), 2, callbacks=[AmpMonitor()], log_every_n_steps=2)
    values = amp(trainer.callback_metrics)
    assert (values["applied_steps"], values["grad_norm"]) == (1.0, "nan")


def test_validation_in_between_disturbs_nothing():
    class Validated(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.lin(batch[0]).float().mean())

        def val_dataloader(self):
            return batches(2)

    recorder = Recorder()
    fit(
        Validated([BAD]),
        safe(),
        4,
        callbacks=[AmpMonitor(), recorder],
        log_every_n_steps=2,
        val_check_interval=1,
        num_sanity_val_steps=1,
    )
    assert {i: row["skipped"] for i, row in recorder.rows.items()} == {1: 1.0, 3: 0.0}


@pytest.mark.parametrize("log", [{"barebones": True}, {"logger": False}, {"fast_dev_run": 2}])
def test_runs_wherever_a_trainer_logs_or_not(log, said, tmp_path):
    if "fast_dev_run" in log:
        log = {**log, "logger": CSVLogger(tmp_path)}  # Lightning puts a dummy in its place
    trainer = fit(Line([BAD]), safe(), 2, callbacks=[AmpMonitor()], **log)
    # only a development run takes values before the 50th step
    assert bool(amp(trainer.callback_metrics)) == ("fast_dev_run" in log)
    assert sum("Mixed precision in this fit" in line for line in said) == 1


# Lightning says both whenever this flavour is used
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_takes_the_loader_itself_is_logged():
    class Iterating(Line):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen += 1

    trainer = fit(Iterating([BAD]), safe(), 2, callbacks=[AmpMonitor()], log_every_n_steps=2)
    assert amp(trainer.callback_metrics)["skipped"] == 1.0


# ---------------------------------------------------------------------- the gradient norm


def test_the_norm_is_computed_at_log_steps_only():
    model = Line()
    fit(model, safe(), 4, callbacks=[AmpMonitor()], log_every_n_steps=2)
    assert [o.grad_norm for o in model.outcomes] == [None, 2.0, None, 2.0]


@pytest.mark.parametrize(
    "clip",
    [
        {},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ],
)
@pytest.mark.parametrize("plugin", [safe, lambda: SafeAMP("bf16-mixed", bf16_guard=False)])
def test_the_norm_is_unscaled_and_taken_before_clipping(clip, plugin):
    trainer = fit(Line(), plugin(), 1, callbacks=[AmpMonitor()], log_every_n_steps=1, **clip)
    assert trainer.callback_metrics["amp/grad_norm"] == 2.0


def test_a_skipped_log_step_does_not_show_an_earlier_norm():
    trainer = fit(
        Line([GOOD, BAD]),
        safe(),
        2,
        callbacks=[AmpMonitor()],
        log_every_n_steps=2,
        gradient_clip_val=1.0,
    )
    assert amp(trainer.callback_metrics)["grad_norm"] == "nan"


# ---------------------------------------------------------------------- several optimizers


class Pair(Line):
    """Two weights with an optimizer each; the second one's plan is `second`."""

    def __init__(self, first, second):
        super().__init__()
        self.automatic_optimization = False
        self.parts = torch.nn.ModuleList([Line(first), Line(second)])

    def training_step(self, batch, batch_idx):
        for part, optimizer in zip(self.parts, self.optimizers(), strict=True):
            part.seen = batch_idx
            optimizer.zero_grad()
            self.manual_backward(part.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in self.parts]


@pytest.mark.filterwarnings("ignore:AMP1")  # found, and rightly
def test_counts_are_sums_over_optimizers_and_the_row_is_the_longest():
    model = Pair([BAD, GOOD, GOOD, GOOD], [GOOD, GOOD, NAN_LOSS, NAN_LOSS])
    trainer = fit(model, safe(), 4, callbacks=[AmpMonitor()], log_every_n_steps=4)
    assert amp(trainer.callback_metrics) == {
        "scale": 4.0,
        "skipped": 3.0,
        "applied_steps": 5.0,
        "skipped_steps": 3.0,
        "consecutive_skips": 2.0,
        "skip_rate": 3 / 8,
        "grad_norm": 2.0,
        # of the second optimizer, whose loss was nan, there is no largest gradient
        "zero_grad_fraction": 0.0,
        "subnormal_grad_fraction": 0.0,
        "headroom_bits": "nan",
    }


# ---------------------------------------------------------------------- over several fits


def test_counts_go_on_after_a_resume(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(Line([BAD, GOOD, BAD, GOOD]), safe(), 4, callbacks=[AmpMonitor()]).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["callbacks"] == {"AmpMonitor": {"scale": 2.0}}

    trainer = fit(
        Line([BAD]),
        safe(),
        4,
        ckpt_path=path,
        max_epochs=2,
        callbacks=[AmpMonitor()],
        log_every_n_steps=4,
    )
    assert amp(trainer.callback_metrics) == {
        "scale": 1.0,  # 8, halved by three overflows
        "skipped": 1.0,  # of the resumed fit
        "applied_steps": 5.0,
        "skipped_steps": 3.0,
        "consecutive_skips": 0.0,
        "skip_rate": 3 / 8,
        "grad_norm": 2.0,
        "zero_grad_fraction": 0.0,
        "subnormal_grad_fraction": 0.0,
        "headroom_bits": HALF_MAX,
    }


def test_one_monitor_serves_several_fits(said):
    monitor, plugin = AmpMonitor(), safe()
    for skipped in (1.0, 2.0):
        trainer = fit(Line([BAD]), plugin, 2, callbacks=[monitor], log_every_n_steps=2)
        values = amp(trainer.callback_metrics)
        assert (values["skipped"], values["skipped_steps"]) == (1.0, skipped)
    summaries = [line for line in said if "Mixed precision" in line]
    assert ["whole run" in text for text in summaries] == [False, True]
    assert "2 applied of 4 attempts" in summaries[1]


def explode(*args, **kwargs):
    raise RuntimeError("boom")


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_train_end"])
def test_an_exception_leaves_nothing_behind(hook):
    bomb = L.Callback()
    setattr(bomb, hook, explode)
    monitor, plugin = AmpMonitor(), safe()
    model, plain = Line(), Line()
    fit(plain, safe(), 1)
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, plugin, 2, callbacks=[monitor, bomb], log_every_n_steps=1)
    assert plugin.engine.witnesses == []
    assert monitor._run is None
    assert vars(model).keys() == vars(plain).keys()
    trainer = fit(model, plugin, 2, callbacks=[monitor], log_every_n_steps=1)
    assert amp(trainer.callback_metrics)["grad_norm"] == 2.0
    assert plugin.engine.witnesses == []


def test_a_run_stopped_by_the_skip_limit_leaves_nothing_behind():
    monitor, plugin = AmpMonitor(), safe(max_consecutive_skips=2)
    with pytest.raises(SkipLimitError):
        fit(Line([BAD] * 3), plugin, 3, callbacks=[monitor])
    assert plugin.engine.witnesses == []
    assert monitor._run is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_made_during_a_fit_keep_settings_alone(duplicate):
    class Copier(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copies.append(duplicate(monitor))

    monitor, copies = AmpMonitor(prog_bar=False, warn_after=3), []
    fit(Line(), safe(), 1, callbacks=[monitor, Copier()], log_every_n_steps=1)
    (made,) = copies
    assert (made.prog_bar, made.warn_after, made._run) == (False, 3, None)
    trainer = fit(Line(), safe(), 1, callbacks=[made], log_every_n_steps=1)
    assert set(SHOWN) <= set(trainer.callback_metrics)


def test_a_monitor_that_joins_in_the_middle_of_a_fit_waits_for_the_next():
    class Latecomer(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                trainer.callbacks.append(monitor)

    monitor = AmpMonitor()
    trainer = fit(Line(), safe(), 3, callbacks=[Latecomer()], log_every_n_steps=1)
    assert amp(trainer.callback_metrics) == {}
    assert monitor._run is None
    trainer = fit(Line(), safe(), 1, callbacks=[monitor], log_every_n_steps=1)
    assert set(SHOWN) <= set(trainer.callback_metrics)


# ---------------------------------------------------------------------- other plugins


@pytest.mark.parametrize(
    ("kwargs", "values"),
    [
        ({"plugin": stock_plugin(init_scale=8.0)}, (4.0, 1.0, 1.0, 1.0, 0.0, 1 / 2, 2.0)),
        ({"precision": "bf16-mixed"}, (1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0)),
        ({"precision": "32-true"}, (1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0)),
    ],
)
def test_a_foreign_plugin_is_audited(kwargs, values, said):
    # nothing but a scaler skips, so elsewhere the inf is applied
    trainer = fit(Line([BAD]), n=2, callbacks=[AmpMonitor()], log_every_n_steps=2, **kwargs)
    keys = [key.removeprefix("amp/") for key in KEYS]
    found = amp(trainer.callback_metrics)
    assert {key: found[key] for key in keys} == dict(zip(keys, values, strict=True))
    assert found["headroom_bits"] == HALF_MAX - math.log2(values[0])
    assert sum("Mixed precision in this fit" in line for line in said) == 1


# ---------------------------------------------------------------------- the warning


def test_skips_that_go_on_are_warned_of_once_in_each_fit():
    monitor = AmpMonitor(warn_after=3)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Line([NAN_LOSS] * 7), safe(), 8, callbacks=[monitor])
        told = [str(w.message) for w in caught if w.category is AmpGuardWarning]
        (message,) = [text for text in told if "AmpMonitor(warn_after=3)" in text]
        assert "optimizer 0 skipped 3 updates in a row, the last (attempt 2)" in message


@pytest.mark.parametrize(
    ("plan", "scale", "monitor"),
    [
        ([BAD] * 20, 2.0**24, AmpMonitor()),  # down to 2**4
        ([NAN_LOSS] * 7, 8.0, AmpMonitor()),
        ([NAN_LOSS] * 20, 8.0, AmpMonitor(warn_after=None)),
    ],
)
def test_no_warning_without_reason(plan, scale, monitor):
    plugin = SafeAMP(init_scale=scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Line(plan), plugin, len(plan) + 1, callbacks=[monitor])
    assert plugin.tally.skipped == len(plan)
    assert not any("AmpMonitor(warn_after=" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"prog_bar": 1}, TypeError),
        ({"prog_bar": "scale"}, TypeError),
        ({"prog_bar": [1]}, TypeError),
        ({"prog_bar": {"scale": True}}, TypeError),
        ({"warn_after": 0}, ValueError),
        ({"warn_after": True}, TypeError),
        ({"warn_after": 2.5}, TypeError),
        ({"ledger": 1}, TypeError),
        ({"ledger": ""}, TypeError),
        ({"ledger": None}, TypeError),
        ({"checksum_every": 0}, ValueError),
        ({"checksum_every": True}, TypeError),
        ({"baseline": True}, TypeError),
        ({"baseline": ""}, TypeError),
    ],
)
def test_bad_arguments_are_named(kwargs, error):
    (name,) = kwargs
    with pytest.raises(error, match=rf"`AmpMonitor\({name}="):
        AmpMonitor(**kwargs)


# ---------------------------------------------------------------------- the summary


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


@pytest.mark.parametrize(
    ("gate", "interval", "ends", "ahead"),
    [
        (True, "step", ["  schedule LinearLR  ends 3 short of 6 attempts"], False),
        (
            False,
            "step",
            ["  schedule LinearLR  not gated: ran through 6 attempts, 3 ahead of the updates"],
            True,
        ),
        (True, "epoch", [], False),
    ],
)
def test_the_summary_tells_the_fit(said, gate, interval, ends, ahead):
    monitor, model = (
        AmpMonitor(),
        Line([BAD, GOOD, NAN_LOSS, BAD], make_scheduler=warm_up, interval=interval),
    )
    plugin = SafeAMP(init_scale=8.0, growth_interval=3)
    with warnings.catch_warnings():
        # torch's own, when an ungated schedule moves before the first update
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        warnings.filterwarnings("ignore", "AMP10")
        fit(model, plugin, 6, callbacks=[monitor, SchedulerGate(enabled=gate)])
    (text,) = [line for line in said if "Mixed precision" in line]
    found = [finding.code for finding in monitor.findings]
    assert ("AMP102" in found) == ahead
    lines = text.splitlines()
    lines = [re.sub(r"^(  (?!schedule)\S+( share)?) +", r"\1: ", line) for line in lines]
    assert lines == [
        "Mixed precision in this fit:",
        "  attempts: 6",
        "  applied: 3",
        "  skipped: 3 (2 for non-finite gradients, 1 for non-finite loss)",
        "  skip share: 50 %, high: 16.7 % for the loss, which no scale explains",
        "  scale: 2 to 8, now 2",
        *ends,
        "  findings: " + (", ".join(found) or "none"),
    ]


def test_the_summary_comes_in_manual_optimization_too(said):
    fit(ManualLine([BAD]), safe(), 2, callbacks=[AmpMonitor()])
    assert sum("skipped     1 (1 for non-finite gradients)" in line for line in said) == 1


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (True, "ends 1 short of 4 turns"),
        (False, "not gated: made 4 turns, 1 ahead of the updates"),
    ],
)
def test_the_summary_counts_the_turns_of_a_schedule_with_a_frequency(said, gate, line):
    # turns are planned at the batches 2, 4, 6 and 8; no update was applied before the first
    model = Line([BAD, BAD], make_scheduler=warm_up, frequency=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        warnings.filterwarnings("ignore", "AMP10")
        fit(model, safe(), 8, callbacks=[AmpMonitor(), SchedulerGate(enabled=gate)])
    (text,) = [line for line in said if "Mixed precision" in line]
    assert f"  schedule LinearLR  {line}" in text.splitlines()


class StepsSchedule(ManualLine):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.calls:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [warm_up(optimizer)]


@pytest.mark.parametrize(("calls", "line"), [(True, "4 turns in 5 attempts"), (False, "")])
def test_the_summary_counts_the_turns_that_the_module_takes_by_hand(said, calls, line):
    model = StepsSchedule([GOOD, BAD])
    model.calls = calls
    fit(model, safe(), 5, callbacks=[AmpMonitor()])
    (text,) = [line for line in said if "Mixed precision" in line]
    shown = [text for text in text.splitlines() if "schedule" in text]
    assert shown == ([f"  schedule LinearLR  {line}"] if line else [])


# ---------------------------------------------------------------------- cost


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Between(L.Callback):
    """Counts what happens from the start of batch 6 to the start of batch 7."""

    def __init__(self, what):
        self.what, self.ops, self.calls = what, Ops(), 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 6:
            self.ops.__enter__() if self.what == "ops" else sys.setprofile(self.count)
        elif batch_idx == 7:
            self.ops.__exit__(None, None, None) if self.what == "ops" else sys.setprofile(None)

    def count(self, frame, event, arg):
        self.calls += event == "call"


def between_log_steps(what, plugin, callbacks):
    counter = Between(what)
    fit(Line(), plugin(), 8, callbacks=[counter, *callbacks], log_every_n_steps=5)
    return counter.ops.seen if what == "ops" else counter.calls


@pytest.mark.parametrize("plugin", [safe, stock_plugin])
def test_between_log_steps_it_costs_few_calls(plugin):
    without = between_log_steps("calls", plugin, [])
    empty = between_log_steps("calls", plugin, [L.Callback()]) - without
    own = between_log_steps("calls", plugin, [AmpMonitor()]) - without
    assert 50 < empty < own <= 120


@pytest.mark.parametrize("plugin", [safe, stock_plugin])
def test_between_log_steps_no_tensor_is_touched_and_nothing_read(plugin):
    # values were logged at batch 4: Lightning must not go through them again
    without = between_log_steps("ops", plugin, [])
    assert without
    assert between_log_steps("ops", plugin, [AmpMonitor()]) == without


class Quiet(Line):
    """`Line` that hears of no outcome, so that outcomes may come late."""

    on_step_outcome = None


def reads_of_a_batch(make_optimizer, callbacks, every, plugin=safe):
    """Host reads of batch 6, from its start to the end of the callbacks' turn."""
    meter = Meter(ops=True)
    fit(Quiet(make_optimizer=make_optimizer), plugin(), 9, callbacks=[*callbacks, meter],
        log_every_n_steps=every)  # fmt: skip
    return meter.reads


def fused(params):
    return torch.optim.AdamW(params, lr=0.5, fused=True)


@pytest.mark.parametrize(("optimizer", "own"), [(None, 1), (fused, 0)], ids=["plain", "fused"])
def test_between_log_steps_the_host_waits_as_often_as_without(optimizer, own):
    assert reads_of_a_batch(optimizer, [], 5) == own
    assert reads_of_a_batch(optimizer, [AmpMonitor()], 5) == own


@pytest.mark.parametrize(("optimizer", "own"), [(None, 1), (fused, 2)], ids=["plain", "fused"])
def test_a_log_step_reads_once_for_statistics_and_twice_for_loss_and_parameters(optimizer, own):
    # besides the attempt's own, and one for attempts that waited; batch 6 is the seventh
    assert reads_of_a_batch(optimizer, [AmpMonitor()], 7) == own + 1 + 2


@pytest.mark.parametrize("optimizer", [None, fused], ids=["plain", "fused"])
def test_a_ledger_is_one_transfer_per_attempt_besides_its_own(tmp_path, optimizer):
    monitor = AmpMonitor(ledger=tmp_path / "run.jsonl")
    # on the host itself the loss is made of its eight bytes: one more that is none on a device
    assert reads_of_a_batch(optimizer, [monitor], 5) - 1 == 1 + 1


# ---------------------------------------------------------------------- odd modules and runs


class Odd(L.LightningModule):
    """The sum of whatever parameters `make` returns, times `factor`."""

    def __init__(self, make, optimizer=torch.optim.SGD):
        super().__init__()
        self.part, self.optimizer = make(), optimizer

    def training_step(self, batch, batch_idx):
        total = 0.0
        for p in self.part.parameters():
            total = total + (p.abs() if p.is_complex() else p).float().sum() * p.requires_grad
        return total if torch.is_tensor(total) and total.requires_grad else None

    def configure_optimizers(self):
        return self.optimizer(self.part.parameters(), lr=0.1)


class Bag(Odd):
    """A sparse gradient: of two rows of five."""

    def __init__(self):
        super().__init__(lambda: torch.nn.EmbeddingBag(5, 3, sparse=True, mode="sum"))

    def training_step(self, batch, batch_idx):
        return self.part(torch.tensor([[0, 3, 3]])).float().sum()


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([3.0 + 4.0j, 4.0 + 3.0j]))


def half_frozen():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    return layers


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("plugin", [safe, lambda: None, lambda: stock_plugin(init_scale=8.0)])
@pytest.mark.parametrize(
    "make",
    [
        Bag,
        lambda: Odd(Complex),
        lambda: Odd(half_frozen),
        lambda: Odd(lambda: torch.nn.Linear(2, 2).double()),
        lambda: Odd(lambda: torch.nn.Linear(0, 2)),
    ],
    ids=["sparse", "complex", "frozen", "float64", "empty"],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.filterwarnings("ignore:AMP10[49]")  # an odd loss falls as it likes
def test_odd_modules_are_watched(tmp_path, make, plugin, ledger):
    model = make()
    if any(p.is_complex() for p in model.parameters()) and type(plugin()) is MixedPrecision:
        pytest.skip("torch's own scaler takes no complex gradients")
    monitor = AmpMonitor(ledger=tmp_path / "x.jsonl" if ledger else False)
    trainer = fit(model, plugin(), 3, callbacks=[monitor], log_every_n_steps=1)
    values = trainer.callback_metrics
    assert (values["amp/applied_steps"], values["amp/skipped_steps"]) == (3, 0)
    assert values["amp/zero_grad_fraction"] == 0.0
    assert (tmp_path / "x.jsonl").exists() == ledger


def test_a_module_without_optimizers_is_watched():
    class Idle(Line):
        def configure_optimizers(self):
            return None

    for plugin in (safe(), None):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*`LightningModule.configure_optimizers` returned `None`"
            )
            trainer = fit(Idle(), plugin, 2, callbacks=[AmpMonitor()], log_every_n_steps=1)
        assert trainer.callback_metrics.get("amp/applied_steps", 0) == 0


def test_what_a_checkpoint_lacked_is_forgotten_with_the_next_fit(tmp_path):
    path = tmp_path / "plain.ckpt"
    fit(Line(), n=1, precision="32-true").save_checkpoint(path)
    monitor = AmpMonitor()
    with pytest.warns(AmpGuardWarning, match="AMP107"):
        fit(Line(), stock_plugin(), 1, callbacks=[monitor], ckpt_path=path, max_epochs=2)
    assert [finding.code for finding in monitor.findings] == ["AMP107"]
    fit(Line(), stock_plugin(), 1, callbacks=[monitor])
    assert monitor.findings == []


def test_scale_at_the_checkpoint_is_told_where_a_monitor_was_there(tmp_path):
    path = tmp_path / "run.ckpt"
    first = AmpMonitor()
    fit(Line(), stock_plugin(init_scale=8.0), 1, callbacks=[first]).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["MixedPrecision"]
    torch.save(checkpoint, path)
    with pytest.warns(AmpGuardWarning, match="where it was 8 when the checkpoint was written"):
        fit(Line(), stock_plugin(), 1, callbacks=[AmpMonitor()], ckpt_path=path, max_epochs=2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_finding_that_is_raised_leaves_nothing_behind(tmp_path):
    plugin, monitor = safe(), AmpMonitor()
    model = Line(make_scheduler=warm_up)
    # warnings are errors here: the finding ends the run, and is told again on the way out
    model.plan = [BAD, GOOD, BAD, GOOD]
    with pytest.raises(AmpGuardWarning, match="AMP102"):
        fit(model, plugin, 4, callbacks=[monitor, SchedulerGate(enabled=False)])
    assert monitor._run is None
    assert plugin.engine is None or plugin.engine.witnesses == []
