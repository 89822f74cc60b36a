# SPDX-License-Identifier: Apache-2.0
"""`AmpMonitor(ledger=...)` in short fits: what is in the lines, where they go, what resumes."""

from __future__ import annotations

import copy
import json
import pickle

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_amp_guard import AmpGuardWarning, SafeAMP
from lightning_amp_guard.monitor import AmpMonitor, log_step
from lightning_amp_guard.monitor.ledger.file import COLUMNS, LedgerError, read_facts, read_ledger
from tests.helpers import (
    BAD,
    GOOD,
    NAN_LOSS,
    NONE,
    Line,
    ManualLine,
    fit,
    make_trainer,
    stock_plugin,
)

# Planted faults are found, and rightly.
pytestmark = pytest.mark.filterwarnings("ignore:AMP1")


def safe(**kwargs):
    return SafeAMP(**{"init_scale": 8.0, "growth_interval": 1000, **kwargs})


def kept(path, *args, every=1, callbacks=(), **kwargs):
    """Fit with a ledger at `path` and return its rows."""
    monitor = AmpMonitor(ledger=path, checksum_every=every, warn_after=None)
    fit(*args, callbacks=[monitor, *callbacks], **kwargs)
    return read_ledger(path)


def columns(rows, *names):
    return [tuple(getattr(row, name) for name in names) for row in rows]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


# ---------------------------------------------------------------------- lines


def test_lines_are_strict_json_in_the_order_of_the_contract(path):
    kept(path, Line([GOOD, NAN_LOSS]), safe(), 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(line)[:14] for line in lines] == [list(COLUMNS)] * 3
    assert ", ".join(COLUMNS) == (
        "attempt, epoch, batch_idx, optimizer, applied, reason, scale, next_scale, lr, loss,"
        " grad_norm, micro_batches, batch_id, param_checksum"
    )
    assert (lines[1]["loss"], lines[1]["nonfinite"]) == (None, {"loss": "nan"})
    assert lines[1]["reason"] == "NONFINITE_LOSS"
    assert "NaN" not in path.read_text()


def test_attempts_are_told_with_loss_norm_and_scales(path):
    # four weights of 8, less 0.5 each per applied update
    rows = kept(path, Line([GOOD, BAD, GOOD]), safe(), 3)
    assert columns(rows, "attempt", "applied", "scale", "next_scale", "loss", "grad_norm") == [
        (0, True, 8.0, 8.0, 32.0, 2.0),
        (1, False, 8.0, 4.0, 30.0, None),
        (2, True, 4.0, 4.0, 30.0, 2.0),
    ]
    assert {row.lr for row in rows} == {0.5}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_fused_optimizers_and_clipping_change_no_column(path, fused, clip):
    def adamw(params):
        return AdamW(params, lr=0.5, fused=fused, weight_decay=0.0)

    rows = kept(path, Line([GOOD, BAD], adamw), safe(), 3, gradient_clip_val=clip)
    assert columns(rows, "batch_idx", "applied", "grad_norm") == [
        (0, True, 2.0),
        (1, False, None),
        (2, True, 2.0),
    ]
    assert [row.loss for row in rows] == pytest.approx([32.0, 30.0, 30.0], rel=1e-3)


def test_epochs_count_and_batches_begin_anew(path):
    rows = kept(path, Line(), safe(), 2, max_epochs=2)
    assert columns(rows, "attempt", "epoch", "batch_idx") == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]


class Uneven(Line):
    """Micro-batch i has the loss 32 * (i + 1)."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (batch_idx + 1)


def test_with_accumulation_loss_is_the_mean_over_the_window(path):
    # windows of two, two and a short one; their losses are w * 4 * (i + 1)
    rows = kept(path, Uneven(make_optimizer=lambda p: SGD(p, lr=0.0)), safe(), 5,
                accumulate_grad_batches=2)  # fmt: skip
    assert columns(rows, "batch_idx", "micro_batches", "loss") == [
        (1, 2, 32 * 1.5),
        (3, 2, 32 * 3.5),
        (4, 1, 32 * 5.0),
    ]
    assert len({row.batch_id for row in rows}) == 1  # of ones, all


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # what this is about
def test_micro_batches_without_a_loss_are_left_out_of_the_mean(path):
    rows = kept(path, Line([GOOD, NONE, NONE, GOOD]), safe(), 4, accumulate_grad_batches=2)
    assert columns(rows, "batch_idx", "micro_batches", "loss") == [(1, 1, 32.0), (3, 1, 31.0)]


class Gan(L.LightningModule):
    """Two optimizers; the first one's loss reaches both parts."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.parts = torch.nn.ModuleList([Line(), Line(start=2.0)])

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        one.zero_grad()
        self.manual_backward(sum(part.lin(batch[0]).float().mean() for part in self.parts))
        one.step()
        other.zero_grad()
        self.manual_backward(self.parts[1].lin(batch[0]).float().mean())
        other.step()

    def configure_optimizers(self):
        return [SGD(part.parameters(), lr=0.5) for part in self.parts]


def test_each_optimizer_has_lines_and_losses_of_its_own(path):
    rows = kept(path, Gan(), safe(), 2)
    assert columns(rows, "optimizer", "attempt", "loss") == [
        (0, 0, 40.0),
        (1, 0, 8.0),
        (0, 1, 36.0),
        (1, 1, 6.0),
    ]


def test_batches_have_ids_by_content(path):
    data = [[torch.full((4, 4), value)] for value in (1.0, 2.0, 1.0)]
    rows = kept(path, Line(), safe(), data=DataLoader(data, batch_size=None))
    one, two, three = (row.batch_id for row in rows)
    assert one == three != two


@pytest.mark.parametrize("every", [1, 2])
def test_checksum_tells_whether_a_parameter_changed(path, every):
    rows = kept(path, Line([GOOD, BAD, BAD]), safe(), 4, every=every)
    sums = [row.param_checksum for row in rows]
    if every == 2:
        assert (sums[1], sums[3]) == (None, None)
        assert sums[0] == sums[2]
    else:
        assert sums[0] == sums[1] == sums[2] != sums[3]


def test_equal_runs_have_equal_ledgers(tmp_path):
    def run(name, model):
        kept(tmp_path / name, model, safe(), 4, log_every_n_steps=2)
        return (tmp_path / name).read_bytes()

    assert run("a", Line([GOOD, BAD])) == run("b", Line([GOOD, BAD])) != run("c", Line())


def test_lines_are_there_before_the_next_batch(path):
    seen = []

    class Reader(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(len(path.read_bytes().splitlines()))

    kept(path, Line(), safe(), 3, callbacks=[Reader()], log_every_n_steps=2)
    assert seen == [0, 1, 2]


def test_facts_of_the_run_are_beside_it(path):
    kept(path, Line(), safe(), 4, log_every_n_steps=1)
    facts = read_facts(path)
    assert (facts.plugin, facts.precision, facts.device, facts.scaling) == (
        "SafeAMP",
        "16-mixed",
        "cpu",
        True,
    )
    assert facts.growth_interval == 1000
    assert facts.samples_per_s > 0
    assert facts.peak_mib > 50


def test_facts_leave_out_a_peak_from_before_the_fit(path, monkeypatch):
    # a device's allocator as a stand-in: 500 MiB at the start, then two log steps below and above
    key, peaks = "amp/peak_allocated_mib", [500.0, 500.0, 620.0]
    monkeypatch.setattr(log_step, "lifetime_peaks", lambda device: {key: peaks.pop(0)})
    monkeypatch.setattr(log_step, "memory", lambda device: {key: peaks.pop(0)})
    told = []

    class Reader(L.Callback):
        def on_train_batch_end(self, *args):
            told.append(read_facts(path).peak_mib)

    callbacks = [AmpMonitor(ledger=path), Reader()]
    fit(Line(), safe(), 2, callbacks=callbacks, log_every_n_steps=1)
    assert told == [None, 620.0]
    assert peaks == []


def test_facts_that_cannot_be_written_end_no_run(path):
    path.with_name("run.run.json").mkdir()
    with pytest.warns(AmpGuardWarning, match="goes on without them") as told:
        rows = kept(path, Line(), safe(), 4, log_every_n_steps=1)
    assert len(rows) == 4
    assert sum("goes on without them" in str(w.message) for w in told) == 1


# ---------------------------------------------------------------------- where


def test_true_writes_into_the_loggers_directory(tmp_path):
    logger, monitor = CSVLogger(tmp_path, name="a", version="b"), AmpMonitor(ledger=True)
    fit(Line(), safe(), 1, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    assert monitor.ledger_path == tmp_path / "a" / "b" / "amp_ledger.jsonl"
    assert len(read_ledger(monitor.ledger_path)) == 1


@pytest.mark.parametrize("kwargs", [{}, {"barebones": True}])
def test_true_without_a_logger_writes_into_the_default_directory(tmp_path, kwargs):
    monitor = AmpMonitor(ledger=True)
    fit(Line(), safe(), 1, callbacks=[monitor], default_root_dir=tmp_path, **kwargs)
    assert len(read_ledger(tmp_path / "amp_ledger.jsonl")) == 1


def test_a_path_makes_its_folders(tmp_path):
    place = tmp_path / "new" / "one" / "x.jsonl"
    assert len(kept(str(place), Line(), safe(), 1)) == 1


def test_a_former_file_is_renamed_and_never_cut(path):
    path.write_text("mine\n")
    kept(path, Line(), safe(), 1)
    assert path.with_name("run.1.jsonl").read_text() == "mine\n"
    kept(path, Line(), safe(), 2)
    assert len(read_ledger(path.with_name("run.2.jsonl"))) == 1
    assert len(read_ledger(path)) == 2


def test_a_ledger_that_cannot_be_made_stops_the_run_before_its_first_batch(path):
    path.mkdir()
    model, plugin = Line(), safe()
    with pytest.raises(OSError, match=r"such as `AmpMonitor\(ledger="):
        kept(path, model, plugin, 2)
    assert model.seen == 0
    assert plugin.engine.witnesses == []


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [(None, FileNotFoundError, r"AmpMonitor\(baseline="), ("{}\n", LedgerError, "line 1")],
)
def test_a_baseline_that_cannot_be_read_stops_the_run_before_its_first_batch(
    path, content, error, says
):
    if content is not None:
        path.write_text(content)
    model = Line()
    with pytest.raises(error, match=says) as caught:
        fit(model, safe(), 2, callbacks=[AmpMonitor(baseline=path)])
    assert str(path) in str(caught.value)
    assert model.seen == 0


# ---------------------------------------------------------------------- several fits


class Resumable(DataLoader):
    """`n` batches, which differ; after a resume it goes on where it was."""

    def __init__(self, n):
        self.items = [[torch.full((4, 4), 1.0 + i % 3)] for i in range(n)]
        super().__init__(self.items, batch_size=None)
        self.begin = self.at = 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for at in range(begin, len(self.items)):
            self.at = at
            yield self.items[at]

    def state_dict(self):
        return {"begin": self.at + 1}

    def load_state_dict(self, state):
        self.begin = state["begin"]


class Saver(L.Callback):
    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.at:
            trainer.save_checkpoint(self.path)


class Later(Line):
    """`Line` that knows which batch comes next after a resume, and whose losses differ."""

    def training_step(self, batch, batch_idx):
        self.seen = batch_idx
        return self.loss(batch)


@pytest.mark.parametrize("saved_at", [2, 3, 4, 5])
@pytest.mark.parametrize("saver_first", [True, False])
@pytest.mark.parametrize(
    "make", [safe, lambda: stock_plugin(init_scale=8.0)], ids=["safe", "stock"]
)
def test_a_resumed_ledger_equals_the_uninterrupted_one(tmp_path, saved_at, saver_first, make):
    def run(name, saver=None, **kwargs):
        monitor = AmpMonitor(ledger=tmp_path / name / "x.jsonl", warn_after=None)
        extra = [] if saver is None else [saver]
        trainer = make_trainer(
            make(),
            callbacks=[*extra, monitor] if saver_first else [monitor, *extra],
            accumulate_grad_batches=2 if make is safe else 1,
            log_every_n_steps=2,
        )
        trainer.fit(Later([GOOD, BAD, BAD, GOOD, GOOD]), Resumable(9), **kwargs)
        return (tmp_path / name / "x.jsonl").read_bytes().splitlines()

    whole = run("whole", Saver(tmp_path / "at.ckpt", saved_at))
    checkpoint = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["AmpMonitor"]["ledger"][0] == str(tmp_path / "whole/x.jsonl")
    assert run("resumed", ckpt_path=tmp_path / "at.ckpt") == whole
    assert read_ledger(tmp_path / "whole" / "x.jsonl")[-1].batch_idx == 8


def test_a_former_ledger_that_is_gone_is_told_of(tmp_path, path):
    kept(path, Line(), safe(), 3, callbacks=[Saver(tmp_path / "at.ckpt", 1)])
    path.unlink()
    with pytest.warns(AmpGuardWarning, match="begins at the resumed attempt: the 2 lines"):
        rows = kept(path, Line(), safe(), 3, ckpt_path=tmp_path / "at.ckpt", max_epochs=2)
    assert rows[0].attempt == 2


def test_the_same_trainer_goes_on_in_its_ledger(path):
    monitor = AmpMonitor(ledger=path)
    data = DataLoader([[torch.ones(4, 4)]] * 2, batch_size=None)
    trainer = make_trainer(safe(), callbacks=[monitor])
    trainer.fit(model := Line(), data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    assert [row.attempt for row in read_ledger(path)] == [0, 1, 2, 3]
    assert len(read_ledger(path.with_name("run.1.jsonl"))) == 2


def test_a_new_trainer_begins_its_ledger_at_nothing(path):
    monitor = AmpMonitor(ledger=path)
    for _ in range(2):
        fit(Line(), safe(), 2, callbacks=[monitor])
    assert [row.attempt for row in read_ledger(path)] == [0, 1]
    assert monitor.findings == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_in_a_fit_keeps_a_ledger_of_its_own(tmp_path, duplicate):
    class Copier(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copies.append(duplicate(monitor))

    monitor, copies = AmpMonitor(ledger=True, checksum_every=5), []
    fit(Line(), safe(), 1, callbacks=[monitor, Copier()], default_root_dir=tmp_path / "a")
    (made,) = copies
    assert (made.ledger, made.checksum_every, made._run) == (True, 5, None)
    fit(Line(), safe(), 2, callbacks=[made], default_root_dir=tmp_path / "b")
    assert len(read_ledger(tmp_path / "a" / "amp_ledger.jsonl")) == 1
    assert len(read_ledger(tmp_path / "b" / "amp_ledger.jsonl")) == 2


def test_an_exception_leaves_the_lines_up_to_it(path):
    class Bomb(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        kept(path, Line(), safe(), 4, callbacks=[Bomb()], log_every_n_steps=1)
    assert [row.attempt for row in read_ledger(path)] == [0, 1]


@pytest.mark.parametrize(
    ("kwargs", "attempts"),
    [
        ({"limit_train_batches": 2}, 2),
        ({"max_steps": 3}, 3),
        ({"fast_dev_run": 2}, 2),
        ({"max_epochs": 0}, 0),
        ({"limit_train_batches": 0}, None),
    ],
)
def test_short_runs_have_short_ledgers(tmp_path, path, kwargs, attempts):
    monitor = AmpMonitor(ledger=path)
    fit(Line(), safe(), 4, callbacks=[monitor], default_root_dir=tmp_path, **kwargs)
    if path.exists():
        assert len(read_ledger(path)) == (attempts or 0)
    else:
        assert attempts in (None, 0)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(4, 4), None, "text"],
        [torch.ones(4, 4), torch.tensor(3.0), torch.empty(0)],
        [torch.ones(4, 4), torch.ones(4, 1, dtype=torch.bool), {"n": 3}],
        [torch.ones(4, 4), torch.eye(3).to_sparse()],
    ],
)
def test_odd_batches_are_taken(path, batch):
    data = DataLoader([batch] * 2, batch_size=None)
    one, two = kept(path, Line(), safe(), data=data)
    assert one.batch_id == two.batch_id is not None


def test_manual_optimization_has_its_losses_as_they_were_given(path):
    rows = kept(path, ManualLine([GOOD, BAD]), safe(), 3)
    assert columns(rows, "loss", "applied") == [(32.0, True), (30.0, False), (30.0, True)]
