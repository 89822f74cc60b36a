# SPDX-License-Identifier: Apache-2.0
"""Checkpoint entries and ledgers that were damaged in any way: refused by name, or read cleanly."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch.optim.lr_scheduler import LambdaLR

from lightning_amp_guard import (
    AmpGuardWarning,
    AmpMonitor,
    SafeAMP,
    ScalerStateError,
    StepTally,
    TokenClock,
)
from lightning_amp_guard.monitor.ledger.file import (
    COLUMNS,
    LedgerError,
    encode,
    facts_path,
    read_ledger,
    read_run,
)
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from lightning_amp_guard.monitor.records import GradientStats, Row
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, batches, make_trainer

MANY = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    phases=(Phase.explicit, Phase.generate),  # small as they are; shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
NAN, INF = float("nan"), float("inf")
CALLED = []


class Trap:
    """Notes when somebody executes it; a pickle of it is a call."""

    def __reduce__(self):
        return CALLED.append, ("executed",)

    def __call__(self):
        CALLED.append("called")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from((2**31, 2**63, -(2**63), 10**400, 2**1023)),
    st.sampled_from((NAN, INF, -INF, 0.0, -0.0, 5e-324, 1e308, 2.0**-149, 0.5, 1.0, 3.0)),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.sampled_from((1j, np.float32(2.0), np.int64(-1), np.float64("nan"), np.bool_(True))),
    st.builds(
        torch.full,
        st.sampled_from(((), (1,), (2,), (1, 4), (0,))),
        st.sampled_from((0.0, 2.0, NAN, -1.0)),
    ),
    st.sampled_from((torch.ones(1, 4, dtype=torch.int64), torch.ones((), dtype=torch.bool))),
    st.sampled_from((torch.ones(1, 4).to_sparse(), torch.ones(1, 4, device="meta"))),
    st.builds(Trap),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 2), inner, max_size=3)
    ),
    max_leaves=5,
)


# ---------------------------------------------------------------------- what is there to damage


class Learner(Line):
    """A line under a schedule by epochs, so that no gate's turn ends the window."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, lambda n: 1.0)]


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, "growth_interval": 2, "hysteresis": 2, **kwargs})


def callbacks():
    return [EMAWeightAveraging(), TokenClock(count=lambda batch: 4)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A whole checkpoint from inside a window, with every part that an entry can have."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    path = tmp_path_factory.mktemp("sound") / "x.ckpt"

    class Saves(Learner):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 4:
                self.trainer.save_checkpoint(path)

    trainer = make_trainer(plugin(), accumulate_grad_batches=2, callbacks=callbacks())
    trainer.fit(Saves([BAD, GOOD, GOOD, NAN_LOSS]), batches(6))
    found = torch.load(path, weights_only=True)
    assert found["SafeAMP"]["window"]["gradients"]
    assert found["SafeAMP"]["gates"]["TokenClock"]["total"] == 0
    return found


def during_a_fit(check):
    """Call `check(plugin)` at the start of a fit."""

    class Holds(Learner):
        def on_train_start(self):
            check(self.trainer.precision_plugin)
            self.trainer.should_stop = True

    trainer = make_trainer(plugin(), accumulate_grad_batches=2, callbacks=callbacks())
    trainer.fit(Holds(), batches(2))


def kept(amp):
    """Return all that a load may change, as comparable text."""
    policy = amp.scaler.policy
    gates = {guard.name: repr(guard.save()) for guard in amp.guards}
    return (
        repr(amp.scaler.state_dict()),
        repr(policy),
        repr(amp.tallies),
        repr(gates),
        amp.precision,
        amp.switched,
        id(amp.engine.reopen),
    )


def is_sound(amp):
    """The scale is one that the bounds and float32 allow, and the counts add up."""
    scale, state = amp.scaler.get_scale(), amp.scaler.state_dict()
    low, high = amp.scaler.policy.bounds
    assert math.isfinite(scale)
    assert low <= scale <= high
    assert np.float32(scale) == scale
    assert state["growth_factor"] > 1 > state["backoff_factor"] > 0
    assert state["growth_interval"] >= 1
    assert state["_growth_tracker"] >= 0
    for tally in amp.tallies:
        assert tally.attempted == tally.applied + tally.skipped >= 0
        assert 0 <= tally.consecutive_skips <= tally.skipped


def load(amp, entry):
    """Load; return the error's text, or `None` after a clean read. Another error goes through."""
    before = kept(amp)
    try:
        amp.load_state_dict(entry)
    except ScalerStateError as error:
        message = str(error)
    else:
        is_sound(amp)
        return None
    assert re.search(r'"[^"]+"', message), message
    assert kept(amp) == before
    return message


def paths_in(value, path=()):
    """Return the path of every value inside, not of those inside a tensor or what was planted."""
    yield path
    inner = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, part in inner:
        yield from paths_in(part, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def damage(draw, entry):
    """Change a few places: another value, a missing one, one too many, doubled, swapped."""
    entry = copy.deepcopy(entry)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([p for p in paths_in(entry) if p]))
        parent, key = at(entry, path[:-1]), path[-1]
        kind = draw(st.sampled_from(("value", "value", "value", "missing", "extra", "swap")))
        if kind == "value":
            parent[key] = draw(VALUES)
        elif kind == "missing":
            del parent[key]
        elif kind == "swap":
            parent[key] = copy.deepcopy(at(entry, draw(st.sampled_from(list(paths_in(entry))))))
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=3) | st.integers(0, 3))] = draw(VALUES)
        else:
            parent.append(draw(VALUES))
    return entry


# ---------------------------------------------------------------------- the checkpoint entry


def test_damaged_entry_is_refused_by_key_or_read_cleanly(sound):
    refused = []

    def check(amp):
        start = copy.deepcopy(amp.state_dict())

        @MANY
        @given(st.data())
        def load_any(data):
            CALLED.clear()
            amp.load_state_dict(copy.deepcopy(start))
            refused.append(load(amp, damage(data.draw, sound["SafeAMP"])) is not None)
            assert CALLED == []

        load_any()
        amp.load_state_dict(start)

    during_a_fit(check)
    # both ways of it were tried
    assert sum(refused) > 50
    assert sum(not one for one in refused) > 3


def test_anything_for_an_entry_is_refused_or_read_cleanly(sound):
    def check(amp):
        start = copy.deepcopy(amp.state_dict())

        @MANY
        @given(VALUES)
        def load_any(entry):
            CALLED.clear()
            amp.load_state_dict(copy.deepcopy(start))
            load(amp, entry)
            assert CALLED == []

        load_any()
        amp.load_state_dict(start)

    during_a_fit(check)


FIVE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@settings(MANY, max_examples=300)
@given(st.sampled_from(FIVE), SCALARS)
def test_scaler_state_is_refused_by_its_own_key_or_taken_up_to_the_bounds(key, value):
    amp = SafeAMP(init_scale=64.0, growth_interval=2)
    state = {**amp.scaler.state_dict(), key: value}
    before = amp.scaler.state_dict()
    message = None
    try:
        amp.scaler.load_state_dict(state)
    except ScalerStateError as error:
        message = str(error)
    if message is not None:
        assert f'"{key}"' in message
        assert amp.scaler.state_dict() == before
        return
    taken, wanted = amp.scaler.state_dict(), value if isinstance(value, int) else float(value)
    if key == "scale":
        wanted = float(np.float32(min(max(wanted, 1.0), 2.0**24)))
    assert taken == {**before, key: wanted}


@pytest.mark.parametrize("version", [0, 2, 3, 10**400, -1, "1", 1.0, True, None, NAN, [1], {}])
def test_other_versions_are_refused(sound, version):
    entry = {**sound["SafeAMP"], "format": version}

    def check(amp):
        message = load(amp, entry)
        assert message is not None
        assert '"format"' in message

    during_a_fit(check)


def test_checkpoint_with_any_top_level_is_searched_without_an_accident(sound):
    @MANY
    @given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), VALUES)
    def find_any(others, ours, stock):
        amp = plugin()
        checkpoint = {**others, "MixedPrecision": stock}
        if ours:
            checkpoint["Renamed"] = sound["SafeAMP"]
        found = amp.saved_entry(checkpoint)
        if ours and "SafeAMP" not in others:
            claims = [o for o in others.values() if isinstance(o, dict) and "format" in o]
            assert found is sound["SafeAMP"] or found in claims

    find_any()


# ---------------------------------------------------------------------- files


def test_truncated_checkpoint_is_no_checkpoint(sound, tmp_path):
    whole = io.BytesIO()
    torch.save(sound, whole)
    content, path = whole.getvalue(), tmp_path / "x.ckpt"

    @settings(MANY, max_examples=60)
    @given(st.integers(0, len(content) - 1))
    def cut(length):
        path.write_bytes(content[:length])
        amp = plugin()
        trainer = make_trainer(amp, callbacks=callbacks())
        with pytest.raises((RuntimeError, EOFError, OSError)):
            trainer.fit(Learner(), batches(1), ckpt_path=path, weights_only=True)
        assert amp.scaler.get_scale() == 64.0
        assert amp.tally == StepTally()
        assert amp.active is False

    cut()


def test_checkpoint_with_code_in_it_is_not_executed(sound, tmp_path):
    for place in ("SafeAMP", "MixedPrecision", "callbacks"):
        CALLED.clear()
        torch.save({**sound, place: {"format": 1, "scaler": Trap()}}, tmp_path / "x.ckpt")
        amp = plugin()
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            make_trainer(amp).fit(
                Learner(), batches(1), ckpt_path=tmp_path / "x.ckpt", weights_only=True
            )
        assert CALLED == []
        assert amp.scaler.get_scale() == 64.0


@pytest.mark.filterwarnings("ignore:`SafeAMP.max_consecutive_skips:UserWarning")
@pytest.mark.parametrize(
    ("amp", "plan", "accumulate"),
    [
        ({}, [GOOD], 1),
        ({"hysteresis": 3}, [BAD, GOOD], 4),
        ({"precision": "bf16-mixed"}, [NAN_LOSS], 4),
        ({"max_consecutive_skips": 2, "on_limit": "bf16-mixed"}, [BAD] * 2, 1),
        ({"max_consecutive_skips": 1, "on_limit": "32-true"}, [BAD] * 2, 2),
    ],
    ids=["whole", "inside a window", "bf16", "switched to bf16", "switched to 32-true"],
)
def test_everything_that_is_written_loads_as_plain_values(tmp_path, amp, plan, accumulate):
    path, made = tmp_path / "x.ckpt", plugin(**amp)

    class Saves(Learner):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 2:
                self.trainer.save_checkpoint(path)

    def run(model, plugin, **kwargs):
        more = [AmpMonitor(ledger=tmp_path / "l.jsonl", warn_after=None), *callbacks()]
        options = {"accumulate_grad_batches": accumulate, "callbacks": more, "log_every_n_steps": 1}
        make_trainer(plugin, **options).fit(model, batches(4), **kwargs)

    run(Saves(plan), made)
    found = torch.load(path, weights_only=True)
    # after batch 2 a window of four is open; of those of two, the second one is
    assert (found["SafeAMP"]["window"] is None) == (accumulate == 1)
    assert found["SafeAMP"].get("switched") == amp.get("on_limit")
    assert any("ledger" in state for state in found["callbacks"].values() if state)


# ---------------------------------------------------------------------- the ledger

ROWS = [
    Row(0, 0, 0, 0, True, None, 64.0, 64.0, 0.1, 0.5, 2.0, 1, "00ff", "ab"),
    Row(1, 0, 1, 0, False, "NONFINITE_LOSS", 64.0, 64.0, 0.1, NAN, None, 1, "00fe", "ab"),
    Row(
        *(2, 0, 2, 1, False, "NONFINITE_GRADIENTS", 64.0, 32.0, 0.1, 0.25, None, 1, "00fd", "ab"),
        GradientStats(1, 2, 3, 4, INF, {-3: 5, 0: 1}, NAN, {"a.b": NAN, "c": 1.0}),
    ),
]
LINES = [encode(row) for row in ROWS]
CONTENT = "".join(f"{line}\n" for line in LINES).encode()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((0, -1, 2**63, 10**400, 0.5, 1e308, NAN, INF, "nan", "inf", "", "x")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from((*COLUMNS, "nonfinite", "stats", "1", "x")), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def read_or_refuse(path, *parts):
    """Return the rows, or `None` where the file is refused with its place."""
    try:
        return read_run(path).rows
    except LedgerError as error:
        message = str(error)
    for part in (str(path), "Expected", *parts):
        assert part in message
    return None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger") / "l.jsonl"


@settings(MANY, max_examples=200)
@given(data=st.data())
def test_damaged_line_is_refused_with_its_number_or_read(place, data):
    number = data.draw(st.integers(0, 2))
    record = json.loads(LINES[number])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([p for p in paths_in(record) if p]))
        parent, key = at(record, path[:-1]), path[-1]
        if data.draw(st.booleans()):
            parent[key] = data.draw(JSON)
        else:
            del parent[key]
        assume(record)
    lines = [*LINES]
    lines[number] = json.dumps(record)
    place.write_text("".join(f"{line}\n" for line in lines))
    rows = read_or_refuse(place, f"line {number + 1}: ")
    if rows is not None:
        assert len(rows) == 3
        assert [r for i, r in enumerate(rows) if i not in (1, number)] == [
            r for i, r in enumerate(ROWS) if i not in (1, number)
        ] or number != 2  # NaN is equal to nothing
        scales = [x for r in rows for x in (r.scale, r.next_scale)]
        assert all(type(x) is float for x in scales)


@settings(MANY, max_examples=200)
@given(st.integers(0, len(CONTENT)))
def test_cut_ledger_is_read_up_to_the_cut(place, length):
    place.write_bytes(CONTENT[:length])
    complete = CONTENT[:length].count(b"\n")
    rows = read_ledger(place)
    # a line that lacks nothing but its end is whole
    assert len(rows) - complete == (CONTENT[length : length + 1] == b"\n" and length > 0)
    assert repr(rows) == repr(ROWS[: len(rows)])


@settings(MANY, max_examples=200)
@given(st.integers(0, len(CONTENT) - 1), st.binary(min_size=1, max_size=3), st.booleans())
def test_overwritten_bytes_are_refused_or_read(place, position, junk, longer):
    end = position if longer else position + len(junk)
    place.write_bytes(CONTENT[:position] + junk + CONTENT[end:])
    rows = read_or_refuse(place, "line ")
    assert rows is None or len(rows) <= 3 + junk.count(b"\n")


@settings(MANY, max_examples=100)
@given(st.binary(max_size=40) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_file_of_facts_is_refused_or_read(place, content):
    place.write_bytes(CONTENT)
    facts_path(place).write_bytes(content)
    message = None
    try:
        read_run(place)
    except LedgerError as error:
        message = str(error)
    facts_path(place).unlink()
    assert message is None or str(place.parent) in message


# ---------------------------------------------------------------------- what could not be written


def test_gap_of_a_full_disk_is_told_by_both_runs(tmp_path, monkeypatch):
    path, ledger, put = tmp_path / "x.ckpt", tmp_path / "l.jsonl", LedgerWriter._put

    def full(self, line):
        if self.lines == 2:
            self._file.write(line[:20])
            raise OSError(28, "No space left on device")
        put(self, line)

    class Saves(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 3 and not path.exists():
                self.trainer.save_checkpoint(path)

    def run(model, **kwargs):
        options = {"callbacks": [AmpMonitor(ledger=ledger)], "max_epochs": 2}
        make_trainer(plugin(), **options).fit(model, batches(4), **kwargs)
        return [row.attempt for row in read_ledger(ledger)]

    with monkeypatch.context() as patch:
        patch.setattr(LedgerWriter, "_put", full)
        with pytest.warns(AmpGuardWarning, match="ends at line 2: No space left on device"):
            assert run(Saves()) == [0, 1]
    with pytest.warns(AmpGuardWarning, match="has a gap after line 2"):
        # attempts 2 and 3 were made between the full disk and the checkpoint
        assert run(Line(), ckpt_path=path) == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("first", [True, False])
def test_checkpoint_of_anybody_at_a_log_step_counts_its_line(tmp_path, first):
    path, ledger = tmp_path / "x.ckpt", tmp_path / "l.jsonl"

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(path.with_suffix(f".{trainer.global_step}"))

    def run(folder, **kwargs):
        others = [AmpMonitor(ledger=folder / "l.jsonl")]
        others = [Saves(), *others] if first else [*others, Saves()]
        options = {"callbacks": others, "max_epochs": 2, "log_every_n_steps": 1}
        make_trainer(plugin(), **options).fit(Learner(), batches(4), **kwargs)
        return (folder / "l.jsonl").read_text()

    whole = run(ledger.parent)
    # the end of the first epoch: its last attempt's line waited for the log step's statistics
    assert run(tmp_path / "resumed", ckpt_path=path.with_suffix(".4")) == whole
    assert whole.count('"stats"') == 8
