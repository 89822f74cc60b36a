# SPDX-License-Identifier: Apache-2.0
"""Ledger files: strict JSON, exact both ways, crash-safe, and nobody's file is lost."""

import errno
import json
import math
import os
import signal
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_guard import AmpGuardWarning
from lightning_amp_guard.monitor.ledger import facts as facts_module
from lightning_amp_guard.monitor.ledger.file import (
    COLUMNS,
    LedgerError,
    LedgerWriter,
    decode,
    encode,
    facts_path,
    read_facts,
    read_ledger,
    read_run,
    write_facts,
)
from lightning_amp_guard.monitor.records import GradientStats, Row, RunFacts

FACTS = RunFacts(
    "SafeAMP", "16-mixed", "cpu", True, 2000, 2, 12.5, 300.0, {"torch": "2.13.0", "lightning": "2"}
)
PLAIN = (
    '{"attempt": 3, "epoch": 1, "batch_idx": 7, "optimizer": 0, "applied": true, "reason": null,'
    ' "scale": 1024.0, "next_scale": 1024.0, "lr": 0.1, "loss": 0.5, "grad_norm": 2.0,'
    ' "micro_batches": 2, "batch_id": "00ff", "param_checksum": null}'
)
ROW = Row(3, 1, 7, 0, True, None, 1024.0, 1024.0, 0.1, 0.5, 2.0, 2, "00ff", None)


def row(attempt=0, **kwargs):
    return Row(attempt, 0, attempt, 0, True, None, 8.0, 8.0, **kwargs)


def write(path, *attempts, **kwargs):
    writer = LedgerWriter(path)
    for attempt in attempts:
        assert writer.write(row(attempt, **kwargs))
    writer.close()
    return writer


def attempts(path):
    return [r.attempt for r in read_ledger(path)]


def same(one, two):
    """Equal dataclasses, NaN equal to NaN (repr shows every bit but NaN's sign)."""
    return repr(one) == repr(two)


# ------------------------------------------------------------------------ lines


def test_line_holds_the_keys_in_the_documented_order():
    assert encode(ROW) == PLAIN
    assert tuple(json.loads(PLAIN)) == COLUMNS
    assert decode(PLAIN) == ROW


def test_nonfinite_numbers_become_null_with_their_names_beside():
    bad = Row(0, 0, 0, 0, False, "NONFINITE_LOSS", 8.0, 4.0, 0.1, math.nan, -math.inf)
    record = json.loads(encode(bad))
    assert (record["loss"], record["grad_norm"]) == (None, None)
    assert list(record)[-1] == "nonfinite"
    assert record["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"}
    assert same(decode(encode(bad)), bad)


def test_statistics_are_one_more_key_with_exponents_as_strings():
    stats = GradientStats(
        1, 2, 3, 4, math.inf, {-3: 5, 0: 1}, math.nan, {"a.b": math.nan, "c": 1.0}
    )
    record = json.loads(encode(row(stats=stats)))
    assert tuple(record) == (*COLUMNS, "stats")
    assert record["stats"] == {
        "zero": 1,
        "subnormal": 2,
        "normal": 3,
        "overflow": 4,
        "largest": None,
        "exponents": {"-3": 5, "0": 1},
        "kept": None,
        "per_layer": {"a.b": None, "c": 1.0},
        "nonfinite": {"largest": "inf", "kept": "nan", "per_layer": {"a.b": "nan"}},
    }
    assert same(decode(encode(row(stats=stats))).stats, stats)


def no_constants(name):
    raise AssertionError(f"{name} is no strict JSON")


whole, number = st.integers(0, 2**63 - 1), st.floats(width=64)
count, text = st.integers(0, 2**40), st.text(max_size=12)
layers = st.dictionaries(text | st.just("nonfinite"), number, max_size=3)
stats = st.builds(
    GradientStats,
    count,
    count,
    count,
    count,
    number,
    st.dictionaries(st.integers(-150, 127), count, max_size=4),
    st.none() | number,
    layers,
)
rows = st.builds(
    Row,
    whole,
    whole,
    whole,
    whole,
    st.booleans(),
    st.none() | text,
    number,
    number,
    *[st.none() | number] * 3,
    whole,
    *[st.none() | text] * 2,
    st.none() | stats,
)


@settings(max_examples=150, deadline=None)
@given(rows)
def test_any_row_comes_back_as_it_was_from_strict_one_line_ascii(any_row):
    line = encode(any_row)
    assert "\n" not in line
    assert line.isascii()
    json.loads(line, parse_constant=no_constants)
    assert same(decode(line), any_row)


def test_unknown_keys_are_passed_over():
    record = {"future": [1], **json.loads(PLAIN), "nonfinite": {"later": "nan"}}
    assert decode(json.dumps(record)) == ROW


def changed(**values):
    return json.dumps({**json.loads(PLAIN), **values})


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{}", ["'attempt'", "missing", "whole number"]),
        (PLAIN.replace('"loss"', '"loos"'), ["'loss'", "missing"]),
        (changed(attempt="3"), ["'attempt'", "'3'", "whole number"]),
        (changed(attempt=True), ["'attempt'", "True"]),
        (changed(attempt=3.0), ["'attempt'", "3.0"]),
        (changed(attempt=2**63), ["'attempt'", str(2**63), "below 2**63"]),
        (changed(epoch=-(10**400)), ["'epoch'", "below 2**63"]),
        (changed(applied=1), ["'applied'", "1", "true or false"]),
        (changed(scale=None), ["'scale'", "None", "number"]),
        (changed(scale="8"), ["'scale'", "'8'"]),
        (changed(lr=True), ["'lr'", "True", "number or null"]),
        (changed(reason=5), ["'reason'", "5", "string or null"]),
        (changed(nonfinite={"loss": "nan"}), ["'loss'", "0.5", "nonfinite"]),
        (changed(loss=None, nonfinite={"loss": "big"}), ["'loss'", "inf"]),
        (PLAIN.replace("0.5", "NaN"), ["no strict JSON"]),
        (PLAIN.replace("0.5", "1e999"), ["'loss'", "inf"]),
        (PLAIN.replace("0.5", "1" + "0" * 400), ["'loss'", "finite"]),
        (changed(stats=[]), ["'stats'", "[]", "object"]),
        (changed(stats={}), ["'stats.exponents'", "missing"]),
        ("[1]", ["[1]", "one JSON object"]),
        ("[" * 100_000, ["no strict JSON"]),
        ("", ["no strict JSON"]),
        (b"\xff\xfe", ["no strict JSON"]),
    ],
)
def test_a_wrong_line_is_named_with_place_key_and_what_was_expected(line, parts):
    with pytest.raises(LedgerError) as error:
        decode(line, "amp_ledger.jsonl, line 3")
    for part in ["amp_ledger.jsonl, line 3", "Expected", "AmpMonitor(ledger=True)", *parts]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bins", [{"x": 1}, {"3": 1.5}, {"3" * 5000: 1}, {"3000": 1}, {"-3000": 1}, {"30": 10**400}]
)
def test_wrong_exponents_are_named(bins):
    record = json.loads(encode(row(stats=GradientStats(0, 0, 1, 0, 1.0, {0: 1}))))
    record["stats"]["exponents"] = bins
    with pytest.raises(LedgerError, match=r"stats\.exponents\.-?[x3]"):
        decode(json.dumps(record))


# --------------------------------------------------------------------- reading


def test_a_cut_last_line_is_left_out_at_every_length(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, 0, 1)
    whole_file = path.read_bytes()
    first = whole_file.index(b"\n") + 1
    for length in range(first, len(whole_file) - 1):
        path.write_bytes(whole_file[:length])
        assert attempts(path) == [0], length
    path.write_bytes(whole_file[:-1])  # the line is whole, only its end is missing
    assert attempts(path) == [0, 1]


@pytest.mark.parametrize("broken", ['{"attempt": 1\n', "\n", "{}\n", "\x00\x00\n"])
@pytest.mark.parametrize("last", [False, True])
def test_a_broken_line_anywhere_else_is_an_error_with_its_number(tmp_path, broken, last):
    path = tmp_path / "l.jsonl"
    path.write_text(encode(row(0)) + "\n" + broken + ("" if last else encode(row(2)) + "\n"))
    with pytest.raises(LedgerError, match=r"l\.jsonl, line 2: "):
        read_ledger(path)


def test_a_last_line_that_is_json_but_no_attempt_is_an_error(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_text('{"a": 1}')
    with pytest.raises(LedgerError, match="line 1: key 'attempt' is missing"):
        read_ledger(path)


def test_line_ends_of_another_system_are_read(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_bytes(f"{encode(row(0))}\r\n{encode(row(1))}\r\n".encode())
    assert attempts(path) == [0, 1]


# ----------------------------------------------------------------------- facts


def test_run_is_read_with_its_facts(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    write(path, 0)
    assert read_run(path).facts is None
    write_facts(path, FACTS)
    assert (tmp_path / "amp_ledger.run.json").exists()
    run = read_run(str(path))
    assert (list(run.rows), run.facts) == ([row(0)], FACTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["amp_ledger.jsonl", "amp_ledger.run.json"]


def test_facts_that_are_not_finite_are_unknown(tmp_path):
    write_facts(
        tmp_path / "l.jsonl", RunFacts("P", "32-true", "cpu", False, samples_per_s=math.nan)
    )
    assert read_facts(tmp_path / "l.jsonl").samples_per_s is None


def test_facts_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "l.jsonl"
    write_facts(path, FACTS)

    def fail(self, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(facts_module.Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_facts(path, RunFacts("Other", "32-true", "cpu", False))
    assert read_facts(path) == FACTS
    assert [p.name for p in tmp_path.iterdir()] == ["l.run.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"plugin": 1}', '{"plugin": "P", "precision": "x"}'])
def test_broken_facts_name_their_file(tmp_path, text):
    write(tmp_path / "l.jsonl", 0)
    (tmp_path / "l.run.json").write_text(text)
    with pytest.raises(LedgerError, match=r"l\.run\.json: "):
        read_run(tmp_path / "l.jsonl")


@pytest.mark.parametrize(
    ("ledger", "facts"),
    [
        ("amp_ledger.jsonl", "amp_ledger.run.json"),
        ("amp_ledger.1.jsonl", "amp_ledger.1.run.json"),
        ("ledger", "ledger.run.json"),
        ("ledger.1", "ledger.1.run.json"),
    ],
)
def test_each_ledger_has_facts_of_its_own(ledger, facts):
    assert facts_path(ledger).name == facts


# --------------------------------------------------------------------- writing


def test_every_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "new" / "folder" / "l.jsonl"
    writer = LedgerWriter(path)
    for attempt in range(3):
        assert writer.write(row(attempt)) is True
        assert path.read_text() == "".join(encode(row(i)) + "\n" for i in range(attempt + 1))
        assert writer.lines == attempt + 1
    writer.close()
    writer.close()


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path):
    path = tmp_path / "l.jsonl"
    with warnings.catch_warnings():
        # of newer Pythons, about locks of other threads: the child takes none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            writer = LedgerWriter(path)
            for attempt in range(5):
                writer.write(row(attempt))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert attempts(path) == [0, 1, 2, 3, 4]


def test_a_former_ledger_and_its_facts_are_renamed_to_the_next_free_number(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    for attempt in (10, 20, 30):
        write(path, attempt)
        write_facts(path, RunFacts(f"run {attempt}", "16-mixed", "cpu", True))
    write(path, 40)
    ledgers = {"amp_ledger.1.jsonl": 10, "amp_ledger.2.jsonl": 20, "amp_ledger.3.jsonl": 30}
    for name, attempt in ledgers.items():
        assert attempts(tmp_path / name) == [attempt]
        assert read_run(tmp_path / name).facts.plugin == f"run {attempt}"
    assert attempts(path) == [40]
    assert read_run(path).facts is None


def test_a_number_is_free_only_if_ledger_and_facts_are(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, 1)
    (tmp_path / "l.1.run.json").write_text("kept")
    write(path, 2)
    assert attempts(tmp_path / "l.2.jsonl") == [1]
    assert (tmp_path / "l.1.run.json").read_text() == "kept"


def test_a_file_that_appears_in_the_meantime_is_not_overwritten(tmp_path, monkeypatch):
    from lightning_amp_guard.monitor.ledger import writer

    path = tmp_path / "l.jsonl"
    path.write_text("another's")
    monkeypatch.setattr(writer, "_set_aside", lambda path: None)
    with pytest.raises(FileExistsError):
        LedgerWriter(path)
    assert path.read_text() == "another's"


def test_a_folder_at_the_path_is_refused_by_name_and_stays(tmp_path):
    with pytest.raises(OSError, match=r"not a regular file.*such as `AmpMonitor\(ledger=") as error:
        LedgerWriter(tmp_path)
    assert error.value.filename == str(tmp_path)
    assert tmp_path.is_dir()


def test_a_path_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"such as `AmpMonitor\(ledger=") as error:
        LedgerWriter(tmp_path / "file" / "l.jsonl")
    assert error.value.filename == str(tmp_path / "file" / "l.jsonl")


class FullDisk:
    """Takes `room` bytes and then no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(data[: self.room])
        self.room -= len(part)
        return self.file.write(part)

    def close(self):
        self.file.close()


def test_a_full_disk_ends_the_ledger_with_one_warning_and_a_readable_file(tmp_path):
    path = tmp_path / "l.jsonl"
    writer = LedgerWriter(path)
    assert writer.write(row(0))
    digest = writer.digest
    writer._file = FullDisk(writer._file, room=10)
    with pytest.warns(AmpGuardWarning, match=r"ends at line 1: No space left.*ledger=PATH") as told:
        assert writer.write(row(1)) is False
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert writer.write(row(2)) is False
    writer.close()
    assert (writer.lines, writer.digest, attempts(path)) == (1, digest, [0])


def test_a_write_that_takes_a_part_is_continued(tmp_path):
    path = tmp_path / "l.jsonl"
    writer = LedgerWriter(path)
    file = writer._file

    class Slow:
        def write(self, data):
            return file.write(bytes(data[:7]))

    writer._file = Slow()
    assert writer.write(row(5))
    file.close()
    assert attempts(path) == [5]


# -------------------------------------------------------------------- resuming


def checkpointed(path, first, then):
    """Write a ledger, and return what a checkpoint after `first` of its lines keeps."""
    writer = LedgerWriter(path)
    for attempt in range(first):
        writer.write(row(attempt))
    kept = writer.lines, writer.digest
    for attempt in range(first, first + then):
        writer.write(row(attempt))
    writer.close()
    return kept


def test_resume_begins_with_the_lines_up_to_the_checkpoint_and_keeps_the_former_file(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    lines, digest = checkpointed(path, 3, 2)
    former = path.read_bytes()
    writer, missing = LedgerWriter.resume(path, path, lines, digest)
    assert (missing, writer.lines, writer.digest) == ("", 3, digest)
    assert writer.write(row(3, loss=0.5))
    writer.close()
    assert read_ledger(path) == [row(0), row(1), row(2), row(3, loss=0.5)]
    assert (tmp_path / "amp_ledger.1.jsonl").read_bytes() == former


def test_a_resumed_ledger_equals_that_of_the_run_that_was_not_interrupted(tmp_path):
    lines, digest = checkpointed(tmp_path / "a.jsonl", 4, 0)
    resumed, _ = LedgerWriter.resume(tmp_path / "b.jsonl", tmp_path / "a.jsonl", lines, digest)
    whole = write(tmp_path / "c.jsonl", *range(6))
    for attempt in (4, 5):
        resumed.write(row(attempt))
    resumed.close()
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()
    assert (resumed.lines, resumed.digest) == (whole.lines, whole.digest)


def test_the_former_ledger_is_found_under_the_number_it_was_renamed_to(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    lines, digest = checkpointed(path, 3, 1)
    write(path, 70, 71, 72, 73)  # another run took the name
    write(path, 80)  # and a third one
    writer, missing = LedgerWriter.resume(path, path, lines, digest)
    writer.close()
    assert missing == ""
    assert attempts(path) == [0, 1, 2]
    assert attempts(tmp_path / "amp_ledger.1.jsonl") == [0, 1, 2, 3]
    assert attempts(tmp_path / "amp_ledger.3.jsonl") == [80]


def test_five_forks_of_one_checkpoint_all_begin_alike(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    lines, digest = checkpointed(path, 2, 3)
    for fork in range(5):
        writer, missing = LedgerWriter.resume(path, path, lines, digest)
        writer.write(row(100 + fork))
        writer.close()
        assert missing == ""
        assert attempts(path) == [0, 1, 100 + fork]
    assert attempts(tmp_path / "amp_ledger.1.jsonl") == [0, 1, 2, 3, 4]


def test_lines_that_are_nowhere_are_said_to_be_missing_and_the_ledger_starts_empty(tmp_path):
    path = tmp_path / "amp_ledger.jsonl"
    lines, digest = checkpointed(path, 3, 0)
    cut = path.read_bytes()[:-1]  # the third line lost its end
    path.write_bytes(cut)
    writer, missing = LedgerWriter.resume(path, path, lines, digest)
    writer.close()
    for part in ("3 lines", digest, "amp_ledger.jsonl", "not found", "resume again"):
        assert part in missing
    assert (writer.lines, path.read_bytes()) == (0, b"")
    assert (tmp_path / "amp_ledger.1.jsonl").read_bytes() == cut


def test_a_former_ledger_in_a_folder_that_is_gone_is_missing(tmp_path):
    writer, missing = LedgerWriter.resume(tmp_path / "l.jsonl", "gone/l.jsonl", 3, "00000000")
    writer.close()
    assert "gone/l.jsonl" in missing
    assert "no file, since there is none" in missing


def test_a_checkpoint_before_the_first_line_needs_no_former_ledger(tmp_path):
    writer, missing = LedgerWriter.resume(tmp_path / "l.jsonl", "gone.jsonl", 0, "00000000")
    writer.close()
    assert (writer.lines, missing) == (0, "")


def test_names_with_the_marks_of_patterns_are_taken_as_they_are(tmp_path):
    path = tmp_path / "run[1]*.jsonl"
    lines, digest = checkpointed(path, 2, 0)
    write(path, 9)
    writer, missing = LedgerWriter.resume(path, path, lines, digest)
    writer.close()
    assert missing == ""
    assert attempts(path) == [0, 1]


def test_large_ledgers_are_copied_whole(tmp_path, monkeypatch):
    from lightning_amp_guard.monitor.ledger import writer

    monkeypatch.setattr(writer, "_CHUNK", 100)
    lines, digest = checkpointed(tmp_path / "a.jsonl", 7, 2)
    writer, missing = LedgerWriter.resume(tmp_path / "b.jsonl", tmp_path / "a.jsonl", lines, digest)
    writer.close()
    assert (missing, writer.digest) == ("", digest)
    assert attempts(tmp_path / "b.jsonl") == list(range(7))
