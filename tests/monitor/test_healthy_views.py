# SPDX-License-Identifier: Apache-2.0
"""No rule speaks of a healthy run, whatever it looks like, nor fails on an odd one."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.monitor.records import (
    WINDOW,
    Baseline,
    GradientStats,
    Row,
    RunFacts,
    RunView,
    ScheduleLead,
)
from lightning_amp_guard.monitor.rules.registry import find
from lightning_amp_guard.scale_policy import ScalePolicy

PRECISIONS = {"16-mixed": True, "bf16-mixed": False, "32-true": False}


@dataclasses.dataclass(frozen=True)
class Program:
    """A healthy run to imitate."""

    seed: int
    attempts: int
    precision: str
    stock: bool
    init_scale: float
    growth_interval: int
    hysteresis: int
    dynamic: bool
    optimizers: int
    fits: float  # log2 of the largest scale at which typical gradients fit
    noise: float  # bits by which gradients scatter
    loss: float
    schedule: str
    log_every: int
    ledger: bool
    zeros: float  # share of exact zeros: dead units, unused embeddings
    frozen: bool


PROGRAMS = st.builds(
    Program,
    seed=st.integers(0, 2**32),
    attempts=st.sampled_from([1, 3, 30, 100, 256, 400]),
    precision=st.sampled_from(list(PRECISIONS)),
    stock=st.booleans(),
    init_scale=st.integers(6, 24).map(lambda e: 2.0**e),
    growth_interval=st.sampled_from([1, 2, 3, 10, 50, 2000]),
    hysteresis=st.sampled_from([1, 1, 2, 3]),
    dynamic=st.booleans(),
    optimizers=st.sampled_from([1, 1, 2, 3]),
    fits=st.floats(6, 24),
    noise=st.floats(0, 1.5),
    loss=st.sampled_from([1e-8, 1e-3, 1.0, 40.0, 1e8]),
    schedule=st.sampled_from(["constant", "warm-up", "cosine", "step"]),
    log_every=st.sampled_from([1, 5, 10, 50]),
    ledger=st.booleans(),
    zeros=st.floats(0, 0.99),
    frozen=st.booleans(),
)


def rate(program, i):
    peak, last = 1e-3, max(program.attempts - 1, 1)
    return {
        "constant": peak,
        "warm-up": peak * min(i / 100, 1.0),
        "cosine": peak * 0.5 * (1 + math.cos(math.pi * i / last)),
        "step": peak * 0.1 ** (i // 100),
    }[program.schedule]


def look(program, scale, norm, rng):
    """Statistics whose non-zero elements lie well inside float16's range once scaled."""
    total = 1000
    zero = int(total * program.zeros)
    exponent = math.floor(math.log2(norm)) - 5
    if PRECISIONS[program.precision]:  # scaled, at most a few of them are subnormal
        exponent = max(exponent, -14 - math.floor(math.log2(scale)) + 1)
    low = rng.randrange((total - zero) // 3 + 1)
    below = exponent - rng.randrange(8)
    subnormal = low if below + math.log2(scale) < -14 else 0
    bins = {exponent: total - zero - low}
    bins[below] = bins.get(below, 0) + low
    kept = rng.choice([None, 1.0, 1.0 - 1e-7])
    return GradientStats(
        zero, subnormal, total - zero - subnormal, 0, 2.0**exponent * 1.9, bins, kept, {"net": norm}
    )


def imitate(program):
    """The rows of a healthy run, oldest first, and what else the monitor would know."""
    rng = random.Random(program.seed)
    scaling = PRECISIONS[program.precision]
    fits = max(program.fits, math.log2(program.init_scale)) if not program.dynamic else program.fits
    fits += 0 if program.dynamic else 2 * program.noise
    policy = ScalePolicy.start(
        ScaleSettings(
            init_scale=program.init_scale,
            growth_interval=program.growth_interval,
            hysteresis=program.hysteresis,
            dynamic=program.dynamic,
        )
    )
    rows, weights, still = [], rng.getrandbits(64), 0
    applied = [0] * program.optimizers
    for i in range(program.attempts):
        clean = True
        for optimizer in range(program.optimizers):
            scale = policy.scale if scaling else 1.0
            # the gradients' peak in bits beside what fits, cut at the scatter's triple
            peak = max(-3.0, min(3.0, rng.gauss(0, 1))) * program.noise
            over = scaling and math.log2(scale) + peak > fits
            lr, norm = rate(program, i), 2.0 ** (16 - fits) * rng.uniform(0.5, 2)
            if over:
                clean = False
                policy.overflow()
            elif lr > 0:
                weights = rng.getrandbits(64)
            next_scale = policy.scale if scaling else 1.0
            still = still + 1 if not over and next_scale == scale else 0
            applied[optimizer] += not over
            falls = math.exp(-3 * applied[optimizer] / 400) if not program.frozen else 1.0
            loss = program.loss * (falls + 0.1 * rng.gauss(0, 1))
            logged = i % program.log_every == 0
            seen = program.ledger or logged
            rows.append(
                Row(
                    i,
                    0,
                    i,
                    optimizer,
                    not over,
                    "NONFINITE_GRADIENTS" if over else None,
                    scale,
                    next_scale,
                    lr=lr,
                    loss=loss if seen else None,
                    grad_norm=norm if seen and not over else None,
                    batch_id=f"{i:016x}" if program.ledger else None,
                    param_checksum=f"{weights:016x}" if seen else None,
                    stats=look(program, scale, norm, rng) if logged and not over else None,
                )
            )
        if clean and scaling and policy.clean_batch() != 1.0:
            still = 0
    return rows, applied, still


def facts(program):
    scaling = PRECISIONS[program.precision]
    plugin = "SafeAMP" if program.precision != "32-true" else "Precision"
    stock = program.stock and program.hysteresis == 1 and program.dynamic and scaling
    return RunFacts(
        "MixedPrecision" if stock else plugin,
        program.precision,
        "cpu",
        scaling,
        program.growth_interval if scaling and program.dynamic else None,
    )


def told(program, at=None):
    rows, applied, still = imitate(dataclasses.replace(program, attempts=at or program.attempts))
    schedules = [ScheduleLead("LambdaLR", i, n, n) for i, n in enumerate(applied)]
    # one counter over all optimizers at the present scale
    return find(
        RunView(facts(program), rows[-WINDOW:], schedules=schedules, updates_at_scale=still)
    )


@settings(deadline=None, derandomize=True, max_examples=150)
@given(PROGRAMS, st.floats(0, 1))
def test_healthy_runs_are_silent_at_every_moment(program, moment):
    assert told(program) == []
    assert told(program, max(1, int(moment * program.attempts))) == []


@pytest.mark.soak
@settings(deadline=None, max_examples=5000)
@given(PROGRAMS, st.floats(0, 1))
def test_many_healthy_runs_are_silent_at_every_moment(program, moment):
    assert told(program) == []
    assert told(program, max(1, int(moment * program.attempts))) == []


@settings(deadline=None, derandomize=True, max_examples=60)
@given(PROGRAMS, st.sampled_from([1e-3, 1e-2]))
def test_healthy_runs_beside_their_float32_baseline_are_silent(program, wobble):
    rng = random.Random(program.seed + 1)
    rows, _, _ = imitate(dataclasses.replace(program, ledger=True))
    base = [
        dataclasses.replace(
            row,
            applied=True,
            reason=None,
            scale=1.0,
            next_scale=1.0,
            loss=row.loss * (1 + wobble * rng.uniform(-1, 1)),
            grad_norm=(row.grad_norm or 1.0) * (1 + wobble * rng.uniform(-1, 1)),
        )
        for row in rows
    ]
    fp32 = RunFacts("Precision", "32-true", "cpu", False, samples_per_s=100.0, peak_mib=1000.0)
    mine = dataclasses.replace(facts(program), samples_per_s=170.0, peak_mib=700.0)
    seen = RunView(
        mine,
        rows[-WINDOW:],
        baseline=Baseline(base, fp32),
        weight_bytes=300 * 2**20,
        state_bytes=300 * 2**20,
    )
    assert find(seen) == []


# ---------------------------------------------------------------------- odd views

NUMBERS = st.one_of(
    st.none(),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308]),
    st.floats(0, 1e5),
)
LOOKS = st.builds(
    GradientStats,
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    NUMBERS.map(lambda x: x or 0.0),
    st.dictionaries(st.integers(-149, 127), st.integers(1, 9), max_size=3),
    NUMBERS,
    st.dictionaries(st.sampled_from(["net", "net.0.weight", ""]), NUMBERS.map(lambda x: x or 0.0)),
)
SCALES = st.sampled_from([0.0, 2.0**-149, 1.0, 16.0, 65536.0, 2.0**127, math.inf])
ODD_ROWS = st.builds(
    Row,
    st.integers(0, 300),
    st.just(0),
    st.just(0),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, "NONFINITE_LOSS", "NONFINITE_GRADIENTS", "PARTNER_SKIPPED", "NEW"]),
    SCALES,
    SCALES,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.integers(0, 3),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, "a", "b"]),
    st.none() | LOOKS,
)
ODD_FACTS = st.builds(
    RunFacts,
    st.sampled_from(["SafeAMP", "MixedPrecision", "Precision"]),
    st.sampled_from(["16-mixed", "bf16-mixed", "32-true", "16-true", ""]),
    st.just("cpu"),
    st.booleans(),
    st.sampled_from([None, 0, 1, 2000]),
    st.integers(1, 3),
    NUMBERS,
    NUMBERS,
)
TEXTS = st.sampled_from(["", "x: 1 nan of 4\ny: 2 inf", "{}%s"])
ODD_VIEWS = st.builds(
    RunView,
    ODD_FACTS,
    st.lists(ODD_ROWS, max_size=60),
    st.lists(st.builds(ScheduleLead, st.just("S"), *[st.integers(0, 3)] * 3), max_size=3),
    culprit=st.none() | TEXTS,
    culprit_path=st.none() | TEXTS,
    culprit_help=st.none() | st.tuples(TEXTS.filter(bool), TEXTS.filter(bool)),
    fp32_modules=st.lists(st.sampled_from(["net", "*", "!a"]), max_size=3),
    custom_op=st.none() | TEXTS,
    bad_batch=TEXTS,
    resumed_without_scaler=TEXTS,
    half_parameters=st.lists(st.just("net.weight"), max_size=5),
    half_reduction=TEXTS,
    rank_checksums=st.lists(st.sampled_from(["a", "b"]), max_size=3),
    baseline=st.none()
    | st.builds(Baseline, st.lists(ODD_ROWS, max_size=60), st.none() | ODD_FACTS),
    updates_at_scale=st.integers(0, 10**7),
    weight_bytes=st.integers(0, 10**10),
    state_bytes=st.integers(0, 10**10),
    bad_attempts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=3),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(ODD_VIEWS)
def test_no_view_is_too_odd_to_be_read(view):
    for finding in find(view):
        assert len(str(finding).splitlines()) == 4
        assert all(isinstance(part, str) and part for part in finding.to_dict().values())
