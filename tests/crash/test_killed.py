# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, terminated or run out of disk, and the runs resumed from what is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_amp_guard.monitor.ledger.file import read_ledger
from tests.crash import killed
from tests.crash.breaking import assert_resumes
from tests.crash.runs import SETUPS, build, final, fit, newest

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

WITH_LEDGER = [name for name, setup in SETUPS.items() if setup.ledger]


def struck(name: str, folder: Path, how: str, draw: random.Random, after: int = 0):
    """Start the process, wait for its end, and return how it ended and what it said."""
    batch, delay = draw.randint(after, 17), draw.uniform(0.0, 0.06)
    command = [sys.executable, killed.__file__, name, str(folder), how, str(batch), f"{delay:.4f}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def whole(tmp_path):
    """Returns the end and the trail of the uninterrupted run."""

    def run(name):
        parts = fit(build(SETUPS[name], tmp_path / "whole"))
        return final(parts), dict(parts.model.trail)

    return run


def assert_goes_on(name, folder, whole):
    """The ledger parses, and the resumed run's is the uninterrupted one's, line by line."""
    ledger, ckpt = folder / "ledger.jsonl", newest(folder)
    if SETUPS[name].ledger and ledger.exists():
        lines = whole[0]["ledger"]
        read = read_ledger(ledger)
        written = ledger.read_text().splitlines()[: len(read)]
        assert written == lines[: len(read)]
    resumed = build(SETUPS[name], folder, seed=1 if ckpt is None else 2)
    if ckpt is None:
        assert final(fit(resumed))["ledger"] == whole[0]["ledger"]
    else:
        assert_resumes(resumed, ckpt, *whole)


@pytest.mark.parametrize("seed", range(10))
def test_killed_run_resumes_with_the_uninterrupted_ones_ledger(seed, tmp_path, whole):
    name, draw = WITH_LEDGER[seed % len(WITH_LEDGER)], random.Random(seed)
    code, said = struck(name, tmp_path / "killed", "KILL", draw)
    assert code == -signal.SIGKILL, said
    assert_goes_on(name, tmp_path / "killed", whole(name))


@pytest.mark.parametrize("seed", range(5))
def test_terminated_run_stops_between_batches_and_resumes(seed, tmp_path, whole):
    name, draw = list(SETUPS)[2 * seed], random.Random(100 + seed)
    code, said = struck(name, tmp_path / "killed", "TERM", draw, after=2)
    if code:  # else the signal came when nothing was left to do
        # Lightning's handler raises where a batch ends; before and after the fit it is not there
        assert "SIGTERMException" in said or code == -signal.SIGTERM
    assert_goes_on(name, tmp_path / "killed", whole(name))


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_process_that_ends_by_itself_resumes(how, tmp_path, whole):
    name = "manual, two" if how == "raise" else "fused, ledger, clock"
    code, said = struck(name, tmp_path / "killed", how, random.Random(7), after=3)
    assert code == (1 if how == "raise" else 3), said
    assert ("OutOfMemoryError" in said) == (how == "raise")
    assert_goes_on(name, tmp_path / "killed", whole(name))


@pytest.mark.parametrize("seed", range(3))
def test_full_disk_is_an_error_and_no_checkpoint_is_half_read(seed, tmp_path, whole):
    name = WITH_LEDGER[3 * seed]
    code, said = struck(name, tmp_path / "killed", "disk", random.Random(200 + seed), after=4)
    assert code == 1
    assert "File too large" in said
    assert_goes_on(name, tmp_path / "killed", whole(name))
