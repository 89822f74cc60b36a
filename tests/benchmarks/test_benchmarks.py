# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and count what can be worked out by hand; times only with `--benchmark-only`.

python -m pytest -n 0 --benchmark-only tests/benchmarks
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.__main__ import measure
from tests.benchmarks.conditions import quiet
from tests.benchmarks.models import ManyParameters, TinyMLP
from tests.benchmarks.turns import Runner
from tests.benchmarks.workloads import WORKLOADS

SMALL = WORKLOADS | {
    "optimizer": replace(
        WORKLOADS["optimizer"], model=lambda fused: ManyParameters(fused, count=1000, tensors=4)
    )
}
FEW = 2
# a for-loop AdamW reads its own step counter once per parameter: tiny MLP 4, GAN 4 + 4, many 4 + 1
OWN_READS = {"optimizer": 5, "sharing": 0, "gan": 8}
# what torch's own loop cannot do without: the scaler's check, a norm, its multiply
WALKS = {"tiny-mlp-clip": 3, "optimizer": 3, "bf16": 0, "bf16-clip": 2}
SCALER_READS = {"gan": 2, "bf16": 0, "bf16-clip": 0}


@pytest.fixture(scope="module")
def measured():
    """Rows by workload, measured once when first asked for."""
    known = {}

    def rows(name):
        if name not in known:
            known[name] = {row.arm: row for row in measure(SMALL[name], "cpu", FEW)}
        return known[name]

    return rows


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_arm_is_measured_or_says_why_not(measured, name):
    rows = measured(name)
    assert list(rows) == [arm.name for arm in WORKLOADS[name].arms]
    for row in rows.values():
        if row.skipped is not None:
            assert row.arm.startswith("Accelerate")
            assert row.counts is row.times is None
        else:
            assert 0 < row.times.fastest <= row.times.low <= row.times.median <= row.times.high
            assert row.counts.ops > 0
            assert row.counts.python > 0
            assert row.counts.peak > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_stock_and_the_loop_by_hand_read_and_walk_as_torch_does(measured, name):
    rows = measured(name)
    loop = next(row for arm, row in rows.items() if arm.startswith("bare PyTorch"))
    own = 0 if "fused" in loop.arm else OWN_READS.get(name, 4)
    scaler = 0 if "fused" in loop.arm else SCALER_READS.get(name, 1)
    assert loop.counts.reads == own + scaler
    assert loop.counts.walks == WALKS.get(name, 1)
    stock = rows["stock MixedPrecision"]
    assert stock.counts.reads == OWN_READS.get(name, 4) + SCALER_READS.get(name, 1)
    assert stock.counts.walks == loop.counts.walks
    assert stock.counts.python > loop.counts.python


@pytest.mark.parametrize("name", ["tiny-mlp", "tiny-mlp-clip", "optimizer", "accumulation"])
def test_safeamp_reads_and_walks_no_more_than_stock(measured, name):
    rows = measured(name)
    stock = rows["stock MixedPrecision"].counts
    for arm, row in rows.items():
        if arm.startswith("SafeAMP"):
            assert row.counts.reads <= stock.reads
            assert row.counts.walks <= stock.walks
            assert row.counts.peak <= stock.peak + 1024  # a few scalars kept


def test_the_floor_is_one_norm_and_one_read(measured):
    counts = measured("optimizer")["floor: norm + fused step"].counts
    assert (counts.walks, counts.reads) == (1, 1)


def test_the_bf16_guard_is_one_walk_and_one_read(measured):
    rows = measured("bf16")
    on, off = rows["SafeAMP, guard on"].counts, rows["SafeAMP, guard off"].counts
    assert (on.walks - off.walks, on.reads - off.reads) == (1, 1)


def test_the_weight_cache_saves_casts_and_costs_accuracy(measured):
    rows = measured("sharing")
    plain, cached = rows["SafeAMP"], rows["SafeAMP, weight_cache=True"]
    # 15 of 16 casts of weight and bias, and as many of their gradients
    assert plain.counts.casts - cached.counts.casts == 15 * 2 * 2
    assert 0 < plain.gradient_error < cached.gradient_error < 0.01
    loop = rows["bare PyTorch, cached"]
    assert loop.gradient_error == pytest.approx(cached.gradient_error, rel=1e-3)


def test_a_step_is_a_whole_window(measured):
    plain, window = measured("tiny-mlp")["SafeAMP"], measured("accumulation")["SafeAMP"]
    assert window.counts.reads == plain.counts.reads
    assert 2 < window.counts.ops / plain.counts.ops < 4  # four forward passes, one update


# ---------------------------------------------------------------------- times


@pytest.fixture
def asked_for(request):
    """Skips where times were not asked for, before pytest-benchmark's fixture is set up."""
    if not request.config.getoption("benchmark_only"):
        pytest.skip("times: `python -m pytest -n 0 --benchmark-only tests/benchmarks`")


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        pytest.param(name, arm, id=f"{name}-{arm.name}")
        for name in ("tiny-mlp", "optimizer")
        for arm in WORKLOADS[name].arms
        if arm.why_not("cpu", WORKLOADS[name].precision) is None
    ],
)
def test_time_of_a_step(asked_for, benchmark, name, arm):
    workload, rounds = replace(WORKLOADS[name], turn=1), 20
    benchmark.group = name
    with quiet():
        runner = Runner(workload, arm, "cpu", rounds)
        runner.start()
        try:
            runner.advance()
            benchmark.pedantic(runner.advance, rounds=rounds)
        finally:
            runner.abandon()
    assert len(runner.samples) == rounds


def test_tiny_models_are_alike_in_every_arm():
    first, second = TinyMLP(), TinyMLP(fused=True)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
