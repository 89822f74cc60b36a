# SPDX-License-Identifier: Apache-2.0
"""The scale moves as torch's does, with hysteresis as in Megatron-LM, and within its bounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.scale_policy import ScalePolicy, float32

SMALLEST = 2.0**-126  # the smallest normal float32: its reciprocal is finite

PLANS = st.lists(st.booleans(), max_size=60)  # True: a clean batch, False: an overflow
FACTORS = {
    "init_scale": st.floats(2.0**-20, 2.0**30),
    "growth_factor": st.floats(1.0, 64.0, exclude_min=True),
    "backoff_factor": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    "growth_interval": st.integers(1, 5),
}
UNBOUNDED = st.builds(ScaleSettings, **FACTORS, min_scale=st.none(), max_scale=st.none())


@st.composite
def bounded(draw):
    """Any legal settings: bounds or none, hysteresis, static or dynamic."""
    drawn = draw(st.builds(ScaleSettings, **FACTORS, hysteresis=st.integers(1, 4)))
    low = draw(st.none() | st.floats(SMALLEST, drawn.init_scale))
    high = draw(st.none() | st.floats(drawn.init_scale, 2.0**127))
    return ScaleSettings(
        drawn.init_scale,
        drawn.growth_factor,
        drawn.backoff_factor,
        drawn.growth_interval,
        draw(st.booleans()),
        drawn.hysteresis,
        low,
        high,
    ).checked("Test")


def moved(policy, good):
    return policy.clean_batch() if good else policy.overflow()


class MegatronRule:
    """`DynamicGradScaler.update` of Megatron-LM (megatron/core/optimizer/grad_scaler.py), by hand.

    The upper bound is ours; Megatron has the lower one only.
    """

    def __init__(self, s):
        self.s, self.scale, self.tracker, self.left = s, np.float32(s.init_scale), 0, s.hysteresis

    def update(self, good):
        with np.errstate(over="ignore", under="ignore"):
            if good:
                self.tracker += 1
                if self.tracker == self.s.growth_interval:
                    self.tracker, self.left = 0, self.s.hysteresis
                    grown = np.float32(np.float64(self.scale) * self.s.growth_factor)
                    self.scale = grown if np.isfinite(grown) else self.scale
            else:
                self.tracker = 0
                self.left -= 1
                if self.left <= 0:
                    self.scale = np.float32(np.float64(self.scale) * self.s.backoff_factor)
            low = max(self.s.min_scale or 0.0, SMALLEST)
            self.scale = np.float32(min(max(float(self.scale), low), self.s.max_scale or math.inf))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(UNBOUNDED, PLANS)
def test_unbounded_scale_and_counter_equal_torch_bit_for_bit(drawn, plan):
    policy = ScalePolicy.start(drawn.checked("Test"))
    scale = torch.full((), drawn.init_scale, dtype=torch.float32)
    tracker = torch.zeros((), dtype=torch.int32)
    for good in plan:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(0.0 if good else 1.0),
            drawn.growth_factor,
            drawn.backoff_factor,
            drawn.growth_interval,
        )
        moved(policy, good)
        if scale.item() < SMALLEST:  # torch goes on to 0, from where nothing grows again
            assert policy.scale == SMALLEST
            return
        assert policy.scale == scale.item()
        assert policy.growth_tracker == tracker.item()


@settings(deadline=None, derandomize=True, max_examples=300)
@given(bounded(), PLANS)
def test_scale_follows_the_rule_of_megatron_within_bounds(drawn, plan):
    policy, rule = ScalePolicy.start(drawn), MegatronRule(drawn)
    for good in plan:
        before = policy.scale
        ratio = moved(policy, good)
        if drawn.dynamic:
            rule.update(good)
        assert policy.scale == rule.scale
        assert policy.growth_tracker == rule.tracker
        assert ratio == policy.scale / before
        assert float32(drawn.min_scale or SMALLEST) <= policy.scale
        assert policy.scale <= float32(drawn.max_scale or 2.0**128 - 2.0**104)


@pytest.mark.parametrize(
    ("hysteresis", "plan", "scales"),
    [
        # growth_interval 2, every factor 2; "+" clean, "-" overflow
        (1, "+--+", [8, 4, 2, 2]),
        (2, "--+--", [8, 4, 4, 2, 1]),  # not refilled: growth never came
        (2, "--++--", [8, 4, 4, 8, 8, 4]),  # growth refilled it
        (3, "--+---", [8, 8, 8, 4, 2, 1]),  # a clean batch alone refills nothing
        (3, "-++--++-", [8, 8, 16, 16, 16, 16, 32, 32]),
    ],
)
def test_hysteresis_by_hand(hysteresis, plan, scales):
    policy = ScalePolicy.start(
        ScaleSettings(8.0, growth_interval=2, hysteresis=hysteresis, min_scale=None)
    )
    seen = []
    for sign in plan:
        moved(policy, sign == "+")
        seen.append(policy.scale)
    assert seen == scales


@pytest.mark.parametrize("bounds", [(None, None), (1.0, 2.0**24)])
@pytest.mark.parametrize("backoff_factor", [0.5, 0.001, 1e-300])
def test_scale_never_reaches_zero(bounds, backoff_factor):
    policy = ScalePolicy.start(ScaleSettings(backoff_factor=backoff_factor, min_scale=bounds[0]))
    for _ in range(5000):
        policy.overflow()
    assert policy.scale == (bounds[0] or SMALLEST)
    assert float32(1.0 / policy.scale) < math.inf  # what gradients are multiplied by


@pytest.mark.parametrize("growth_factor", [2.0, 1e6, 1e300])
def test_scale_never_reaches_inf(growth_factor):
    policy = ScalePolicy.start(
        ScaleSettings(growth_factor=growth_factor, growth_interval=1, max_scale=None)
    )
    for _ in range(5000):
        policy.clean_batch()
    assert math.isfinite(policy.scale)
    assert policy.scale * growth_factor >= 2.0**128  # as far as it goes
    assert policy.growth_tracker == 0  # torch resets the counter where it cannot grow, too


def test_scale_comes_back_from_the_smallest():
    policy = ScalePolicy.start(ScaleSettings(8.0, growth_interval=1, min_scale=None))
    for _ in range(5000):
        policy.overflow()
    assert policy.clean_batch() == 2.0
    assert policy.scale == 2.0**-125


def test_ratio_tells_how_far_the_bound_let_the_scale_move():
    policy = ScalePolicy.start(
        ScaleSettings(12.0, growth_interval=1, min_scale=3.0, max_scale=16.0)
    )
    assert (policy.clean_batch(), policy.scale) == (16 / 12, 16.0)
    assert (policy.clean_batch(), policy.scale) == (1.0, 16.0)
    assert (policy.overflow(), policy.scale) == (0.5, 8.0)
    assert (policy.overflow(), policy.scale) == (0.5, 4.0)
    assert (policy.overflow(), policy.scale) == (0.75, 3.0)
    assert (policy.overflow(), policy.scale) == (1.0, 3.0)


def test_static_scale_moves_neither_scale_nor_counters():
    policy = ScalePolicy.start(ScaleSettings(8.0, growth_interval=1, dynamic=False, hysteresis=2))
    assert [moved(policy, good) for good in (True, False, False, True, False)] == [1.0] * 5
    assert (policy.scale, policy.growth_tracker, policy.hysteresis_left) == (8.0, 0, 2)
    assert not policy.would_grow(ahead=99)


def test_growth_waits_for_held_gradients_one_further_interval_at_most():
    policy = ScalePolicy.start(ScaleSettings(8.0, growth_interval=3))
    assert [policy.clean_batch(wait=True) for _ in range(6)] == [1.0] * 5 + [2.0]
    assert policy.growth_tracker == 0


def test_growth_that_waited_comes_as_soon_as_nothing_is_held():
    policy = ScalePolicy.start(ScaleSettings(8.0, growth_interval=3))
    assert [policy.clean_batch(wait=i < 4) for i in range(5)] == [1.0] * 4 + [2.0]


def test_overflow_ends_the_wait():
    policy = ScalePolicy.start(ScaleSettings(8.0, growth_interval=2))
    for _ in range(3):
        policy.clean_batch(wait=True)
    policy.overflow()
    assert [policy.clean_batch() for _ in range(2)] == [1.0, 2.0]
    assert policy.scale == 8.0


@pytest.mark.parametrize(
    ("counted", "wait", "ahead", "due"),
    [
        (2, False, 0, False),
        (2, False, 1, True),
        (3, False, 0, True),
        (3, True, 1, False),
        (5, True, 0, False),
        (5, True, 1, True),
    ],
)
def test_growth_is_foreseen(counted, wait, ahead, due):
    policy = ScalePolicy(ScaleSettings(8.0, growth_interval=3), 8.0, counted, 1)
    assert policy.would_grow(wait=wait, ahead=ahead) is due
    assert policy.growth_tracker == counted


@pytest.mark.parametrize(
    ("bounds", "given_scale", "expected"),
    [
        ((1.0, 16.0), 8.0, 8.0),
        ((1.0, 16.0), 0.25, 1.0),
        ((1.0, 16.0), 64.0, 16.0),
        ((1.0, 16.0), math.inf, 16.0),
        ((None, None), 0.0, SMALLEST),
        ((None, None), 2.0**-140, SMALLEST),
        ((None, None), 1e39, 2.0**128 - 2.0**104),
        ((None, None), math.inf, 2.0**128 - 2.0**104),  # the largest float32
        ((None, 1e300), 1e200, 2.0**128 - 2.0**104),
    ],
)
def test_scale_outside_moves_to_the_nearest_bound(bounds, given_scale, expected):
    low, high = bounds
    policy = ScalePolicy.start(ScaleSettings(8.0, min_scale=low, max_scale=high))
    assert policy.clamp(given_scale) == expected


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=False))
def test_float32_rounds_as_a_store_into_a_tensor_does(value):
    assert float32(value) == torch.tensor(value, dtype=torch.float64).float().item()
