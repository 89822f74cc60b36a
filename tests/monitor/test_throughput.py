# SPDX-License-Identifier: Apache-2.0
"""Rates by an injected clock, sizes of batches, and memory."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch

from lightning_amp_guard.monitor import throughput
from lightning_amp_guard.monitor.throughput import Throughput, memory, samples_in


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
