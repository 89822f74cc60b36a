# SPDX-License-Identifier: Apache-2.0
"""Rates by an injected clock, sizes of batches, and memory."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch

from lightning_amp_guard.monitor import throughput
from lightning_amp_guard.monitor.throughput import (
    FitTotals,
    Throughput,
    lifetime_peaks,
    memory,
    samples_in,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_two_batches_warm_up_and_the_third_starts_the_clock(clock):
    speed = Throughput(clock=clock)
    for _ in range(2):
        speed.batch(1000)
        clock.now += 50.0
        assert all(map(math.isnan, speed.rates()))
    for _ in range(3):  # 8 samples in 2 s each
        speed.batch(8)
        clock.now += 2.0
    assert speed.rates() == (4.0, 0.0)


def test_rates_are_those_since_the_last_call(clock):
    speed = Throughput(warm_up=0, clock=clock)
    speed.batch(10)
    clock.now += 5.0
    assert speed.rates()[0] == 2.0
    clock.now += 10.0
    speed.batch(5)
    assert speed.rates()[0] == 0.5
    clock.now += 1.0
    assert speed.rates()[0] == 0.0


def test_validation_is_no_time(clock):
    speed = Throughput(warm_up=0, clock=clock)
    speed.batch(10)
    clock.now += 3.0
    speed.pause()
    clock.now += 1000.0
    speed.go_on()
    clock.now += 2.0
    assert speed.rates()[0] == 2.0


def test_validation_before_the_warm_up_is_over_disturbs_nothing(clock):
    speed = Throughput(warm_up=1, clock=clock)
    speed.batch(10)
    speed.pause()
    clock.now += 7.0
    speed.go_on()
    speed.go_on()  # without a pause
    speed.batch(6)
    clock.now += 2.0
    assert speed.rates()[0] == 3.0


def test_the_seconds_of_a_rate_are_those_without_validation(clock):
    speed = Throughput(warm_up=0, clock=clock)
    speed.rates()
    assert speed.seconds == 0.0
    speed.batch(10)
    clock.now += 3.0
    speed.pause()
    clock.now += 1000.0
    speed.go_on()
    clock.now += 2.0
    speed.rates()
    assert speed.seconds == 5.0
    speed.rates()  # no time has passed
    assert speed.seconds == 0.0


ALLOCATED = "amp/peak_allocated_mib"


def test_a_fits_speed_is_all_samples_over_all_seconds():
    totals = FitTotals({})
    assert totals.samples_per_s is None
    for rate, seconds in ((math.nan, 0.0), (100.0, 1.0), (20.0, 3.0), (math.nan, 0.0)):
        totals.see({"amp/samples_per_s": rate}, seconds)
    assert totals.samples_per_s == 40.0  # 100 and 60 in four seconds; not the fastest's 100


def test_a_peak_from_before_the_fit_is_none_of_the_fits():
    totals = FitTotals({ALLOCATED: 500.0, "amp/peak_reserved_mib": 600.0})
    told = []
    for peak in (500.0, 500.0, 501.0, 700.0):
        totals.see({"amp/samples_per_s": 1.0, ALLOCATED: peak, "amp/peak_reserved_mib": 800.0}, 1.0)
        told.append(totals.peak_mib)
    assert told == [None, None, 501.0, 700.0]


def test_only_the_allocators_peaks_outlive_what_made_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**20)
    peaks = {ALLOCATED: 3.0, "amp/peak_reserved_mib": 5.0}
    assert lifetime_peaks(torch.device("cuda")) == peaks
    assert lifetime_peaks(torch.device("cpu")) == {}


def test_resident_memory_of_the_fit_is_its_largest_whatever_came_before():
    totals = FitTotals({"amp/process_rss_mib": 900.0})
    told = []
    for mib in (math.nan, 300.0, 200.0):
        totals.see({"amp/samples_per_s": 1.0, "amp/process_rss_mib": mib}, 1.0)
        told.append(totals.peak_mib)
    assert told == [None, 300.0, 300.0]


def test_no_time_has_no_rate(clock):
    speed = Throughput(warm_up=0, clock=clock)
    speed.batch(10)
    assert all(map(math.isnan, speed.rates()))
    clock.now += 2.0
    assert speed.rates()[0] == 5.0  # nothing was lost


def test_tokens_of_the_warm_up_and_of_a_former_run_do_not_count(clock):
    speed = Throughput(warm_up=1, clock=clock)
    speed.tokens(5000)
    speed.batch(1)
    speed.tokens(5100)
    speed.batch(1)
    clock.now += 4.0
    speed.tokens(5120)
    assert speed.rates() == (0.25, 5.0)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 4), 3),
        ([torch.ones(5), torch.ones(2)], 5),
        ({"x": (torch.ones(7, 1), 0)}, 7),
        (UserDict(x=torch.ones(6)), 6),
        (torch.tensor(1.0), 1),
        (torch.empty(0, 4), 0),
        (None, 1),
        ([], 1),
        ({}, 1),
        ("text", 1),
        (np.ones(4), 1),
    ],
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch, size):
    assert samples_in(batch) == size


def test_memory_of_the_process_is_its_resident_set():
    (found,) = memory(torch.device("cpu")).items()
    key, mib = found
    assert key == "amp/process_rss_mib"
    assert 50 < mib < 2**17
    held = torch.ones(2**25)  # 128 MiB, written to
    more = memory(torch.device("cpu"))[key]
    assert 100 < more - mib < 200
    del held


def test_memory_elsewhere_is_not_guessed():
    assert memory(torch.device("mps")) == {}


def test_memory_without_proc_is_the_peak_of_the_process(monkeypatch):
    class Nowhere:
        def __init__(self, path):
            self.exists = lambda: False

    monkeypatch.setattr(throughput, "Path", Nowhere)
    assert 50 < memory(torch.device("cpu"))["amp/process_rss_mib"] < 2**17


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_cuda_is_the_allocators_peak():
    torch.cuda.reset_peak_memory_stats()
    torch.ones(2**22, device="cuda")
    found = memory(torch.device("cuda"))
    assert set(found) == {"amp/peak_allocated_mib", "amp/peak_reserved_mib"}
    assert 16.0 <= found["amp/peak_allocated_mib"] <= found["amp/peak_reserved_mib"]
