# SPDX-License-Identifier: Apache-2.0
"""The text at the end of a fit."""

import importlib.util

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
    }
    return FitSummary(**{**told, **changes})


FULL = """\
Mixed precision in this fit:
  attempts           40
  applied            36
  skipped            4 (3 non-finite gradients, 1 non-finite loss)
  skip share         10 % (expected about 0.05 %)
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
        ("skip share", "0 % (expected about 0 %)"),
        ("findings", "none"),
    ]


def test_a_fit_without_attempts_has_a_summary():
    none = summary(tally=StepTally(), run=StepTally(), reasons={})
    assert ("skip share", "0 % (expected about 0.05 %)") in none.rows()


def test_a_resumed_run_is_told_apart_from_the_fit():
    assert ("whole run", "86 applied of 100 attempts") in summary(
        run=StepTally(100, 86, 14, 0)
    ).rows()


def test_a_schedule_that_nothing_held_back_is_ahead():
    end = ScheduleEnd("LinearLR", 40, 36, gated=False)
    assert end.sentence == "not gated: ran through 40 attempts, 4 ahead of the updates"


def test_findings_are_the_last_line_by_code():
    found = summary(findings=["AMP103", "AMP108"])
    assert found.rows()[-1] == ("findings", "AMP103, AMP108")


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


@pytest.mark.parametrize("render", [as_text, as_table])
def test_the_longest_summary_has_at_most_twelve_lines(render):
    if render is as_table:
        pytest.importorskip("rich")
    lines = render(longest().rows()).splitlines()
    assert len(lines) <= 12
    assert "AMP113" in lines[-2 if render is as_table else -1]


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
    monkeypatch.setattr("sys.stderr", Terminal(encoding=encoding))
    show(summary())
    (table,) = printed
    assert table.splitlines()[1].startswith(corner)
    assert "\x1b" not in table  # no colours: the line may end in a log file
    for label, text in summary().rows():
        assert any(label in line and text in line for line in table.splitlines())
