# SPDX-License-Identifier: Apache-2.0
"""The text at the end of a fit."""

import importlib.util
from dataclasses import replace

import pytest

from lightning_amp_guard import SkipReason, StepTally
from lightning_amp_guard.monitor import summary as module
from lightning_amp_guard.monitor.summary import (
    FitSummary,
    ScheduleEnd,
    as_table,
    as_text,
    scale_text,
    show,
)

GRADIENTS, LOSS = SkipReason.NONFINITE_GRADIENTS, SkipReason.NONFINITE_LOSS


def summary(**changes):
    told = {
        "tally": StepTally(40, 36, 4, 0),
        "run": StepTally(40, 36, 4, 0),
        "reasons": {LOSS: 1, GRADIENTS: 3},
        "expected": 1 / 2001,
        "scales": (2.0**20, 2.0**24, 2.0**21),
        "schedules": [ScheduleEnd("LinearLR", 40, 36)],
        "searched": 4,
    }
    return FitSummary(**{**told, **changes})


FULL = """\
Mixed precision in this fit:
  attempts           40
  applied            36
  skipped            4 (3 for non-finite gradients, 1 for non-finite loss)
  skip share         10 %, high: 2.5 % for the loss, which no scale explains
  scale              2**20 to 2**24, now 2**21
  schedule LinearLR  ends 4 short of 40 attempts
  findings           none"""


def test_text_says_counts_reasons_share_scale_and_schedule():
    assert as_text(summary().rows()) == FULL


def test_nothing_scaled_and_nothing_skipped_is_said_in_short():
    quiet = summary(
        tally=StepTally(3, 3, 0, 0),
        run=StepTally(3, 3, 0, 0),
        reasons={},
        expected=0.0,
        scales=None,
        schedules=[],
    )
    assert quiet.rows() == [
        ("attempts", "3"),
        ("applied", "3"),
        ("skipped", "0"),
        ("skip share", "0 %, normal (none is expected)"),
        ("findings", "none"),
    ]


def test_a_fit_without_attempts_has_a_summary():
    none = summary(tally=StepTally(), run=StepTally(), reasons={})
    assert ("skip share", "0 %, normal (about 0.05 % is expected)") in none.rows()


def test_a_resumed_run_is_told_apart_from_the_fit():
    assert ("whole run", "86 applied of 100 attempts") in summary(
        run=StepTally(100, 86, 14, 0)
    ).rows()


def test_a_schedule_that_nothing_held_back_is_ahead():
    end = ScheduleEnd("LinearLR", 40, 36, gated=False)
    assert end.sentence == "not gated: ran through 40 attempts, 4 ahead of the updates"


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        # 40 attempts, 36 applied, a turn at every fourth: ten were planned, nine are due
        (ScheduleEnd("S", 40, 36, True, 4, 8), "ends 2 short of 10 turns"),
        (ScheduleEnd("S", 40, 36, True, 4, None), "ends 1 short of 10 turns"),
        (ScheduleEnd("S", 40, 36, True, 4, 11), "ends 0 short of 10 turns"),
        (ScheduleEnd("S", 7, 7, True, 4, 1), "ends 0 short of 1 turn"),
        (ScheduleEnd("S", 3, 3, True, 4, 0), "ends 0 short of 0 turns"),
        (
            ScheduleEnd("S", 40, 36, False, 4, 10),
            "not gated: made 10 turns, 1 ahead of the updates",
        ),
        (ScheduleEnd("S", 40, 36, False, 4, 8), "not gated: made 8 turns, 0 ahead of the updates"),
        (ScheduleEnd("S", 40, 36, False, 4), "not gated: made 10 turns, 1 ahead of the updates"),
        (ScheduleEnd("S", 20, 18, True, 0, 18), "18 turns in 20 attempts"),
        (ScheduleEnd("S", 1, 1, False, 0, 1), "1 turn in 1 attempt"),
    ],
)
def test_a_schedule_of_rare_turns_or_stepped_by_hand_is_told_in_turns(end, sentence):
    assert end.sentence == sentence


def test_findings_are_the_last_line_by_code():
    found = summary(findings=["AMP103", "AMP108"])
    assert found.rows()[-1] == ("findings", "AMP103, AMP108")


@pytest.mark.parametrize(
    ("count", "end"), [(7, "AMP106, AMP107"), (8, "AMP105, AMP106, and 2 more")]
)
def test_findings_that_no_line_holds_are_counted(count, end):
    found = summary(findings=[f"AMP{101 + i}" for i in range(count)])
    assert found.rows()[-1][1].endswith(end)
    assert found.rows()[-1][1].startswith("AMP101, AMP102, ")


def test_schedules_beyond_two_lines_are_counted():
    ends = [ScheduleEnd(name, 4, 3) for name in "ABCDE"]
    labels = [row for row in summary(schedules=ends).rows() if row[0].startswith("schedule")]
    assert labels == [
        ("schedule A", "ends 1 short of 4 attempts"),
        ("schedules", "and 4 more"),
    ]


@pytest.mark.parametrize(
    ("scale", "text"),
    [(2.0**24, "2**24"), (1024.0, "2**10"), (512.0, "512"), (1.0, "1"), (3000.0, "3000")],
)
def test_scale_text_is_readable(scale, text):
    assert scale_text(scale) == text


def longest():
    return summary(
        run=StepTally(10**6, 10**6 - 5, 5, 0),
        reasons=dict.fromkeys(SkipReason, 1000),
        schedules=[ScheduleEnd("CosineAnnealingWarmRestarts", 10**6, 10**5, False)] * 9,
        findings=[f"AMP{code}" for code in range(101, 114)],
    )


def test_reasons_that_no_line_holds_are_said_in_short():
    # 66 columns are left beside the label
    for size, text in (
        (65, "1234567 (1234567 for non-finite gradients, 1 for non-finite loss)"),
        (67, "12345678 (12345678 for gradients, 1 for loss)"),
    ):
        count = int(text.split()[0])
        told = summary(tally=StepTally(count, 0, count, 0), reasons={GRADIENTS: count, LOSS: 1})
        long = f"{count} ({count} for non-finite gradients, 1 for non-finite loss)"
        assert len(long) == size
        assert ("skipped", text) in told.rows()


@pytest.mark.parametrize(
    ("attempted", "skipped", "searched", "expected", "text"),
    [
        # growth explains one skip, and two for each 2000 applied updates
        (2001, 0, 0, 1 / 2001, "0 %, normal (about 0.05 % is expected)"),
        (2003, 3, 0, 1 / 2001, "0.15 %, normal (about 0.05 % is expected)"),
        (
            2002,
            3,
            0,
            1 / 2001,
            "0.15 %, high (about 0.05 % is expected once the scale has settled)",
        ),
        (20, 1, 0, 1 / 2001, "5 %, normal (about 0.05 % is expected)"),
        # the way from 2**24 to 2**14 explains ten more
        (32, 11, 10, 1 / 501, "34.4 %, normal while the scale settles (then about 0.2 %)"),
        (32, 12, 10, 1 / 501, "37.5 %, high (about 0.2 % is expected once the scale has settled)"),
        # the scale grows after every applied update, and after none it does not
        (20, 10, 0, 1 / 2, "50 %, normal (about 50 % is expected)"),
        (20, 13, 0, 1 / 2, "65 %, normal (about 50 % is expected)"),
        (20, 14, 0, 1 / 2, "70 %, high (about 50 % is expected once the scale has settled)"),
        (20, 20, 0, 1 / 2, "100 %, high (about 50 % is expected once the scale has settled)"),
        # nothing grows: nothing is to be skipped
        (32, 1, 0, 0.0, "3.12 %, high (none is expected once the scale has settled)"),
    ],
)
def test_share_of_skips_is_judged(attempted, skipped, searched, expected, text):
    told = summary(
        tally=StepTally(attempted, attempted - skipped, skipped, 0),
        reasons={GRADIENTS: skipped},
        searched=searched,
        expected=expected,
    )
    assert ("skip share", text) in told.rows()
    assert len(text) <= 66


@pytest.mark.parametrize("expected", [0.0, 1 / 2001, 1 / 2])
def test_no_scale_explains_a_loss_that_is_not_finite(expected):
    told = summary(
        tally=StepTally(32, 26, 6, 0),
        reasons={LOSS: 1, GRADIENTS: 5},
        searched=10,
        expected=expected,
    )
    text = "18.8 %, high: 3.12 % for the loss, which no scale explains"
    assert ("skip share", text) in told.rows()


@pytest.mark.parametrize("schedules", [2, 9])
def test_the_longest_summary_takes_at_most_twelve_lines_of_80_columns(schedules):
    told = longest()
    lines = as_text(replace(told, schedules=told.schedules[:schedules]).rows()).splitlines()
    assert sum(-(-len(line) // 80) for line in lines) <= 12  # as a terminal breaks them
    assert lines[-1] == ("  findings    AMP101, AMP102, AMP103, AMP104, AMP105, AMP106, and 7 more")


def test_the_table_of_the_longest_summary_has_at_most_twelve_lines():
    pytest.importorskip("rich")
    lines = as_table(longest().rows()).splitlines()
    assert len(lines) <= 12
    assert "AMP106, and 7 more" in lines[-2]


@pytest.fixture
def printed(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


class Terminal:
    def __init__(self, tty=True, encoding="utf-8"):
        self.isatty = lambda: tty
        self.encoding = encoding


def test_a_file_gets_plain_text(printed, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal(tty=False))
    show(summary())
    assert printed == [FULL]


def test_a_terminal_without_rich_gets_plain_text(printed, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    show(summary())
    assert printed == [FULL]


@pytest.mark.parametrize(("encoding", "corner"), [("utf-8", "╭"), ("latin-1", "+"), (None, "+")])
def test_a_terminal_gets_a_table_it_can_show(printed, monkeypatch, encoding, corner):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", Terminal(encoding=encoding))
    show(summary())
    (table,) = printed
    assert table.splitlines()[1].startswith(corner)
    assert "\x1b" not in table  # no colours: the line may end in a log file
    for label, text in summary().rows():
        assert any(label in line and text in line for line in table.splitlines())


def test_a_terminal_narrower_than_the_table_gets_plain_text(printed, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr", Terminal())
    widest = max(map(len, as_table(summary().rows()).splitlines()))
    for columns in (widest, widest - 1):
        monkeypatch.setenv("COLUMNS", str(columns))
        show(summary())
    assert printed == [as_table(summary().rows()), FULL]
