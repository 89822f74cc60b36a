# SPDX-License-Identifier: Apache-2.0
"""The monitor's arithmetic: logged values, and when skips are no calibration any more."""

import math

import pytest

from lightning_amp_guard import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.monitor.metrics import (
    KEYS,
    FitMetrics,
    SkipWatch,
    expected_share,
    tallies_since,
)
from lightning_amp_guard.scale_policy import ScalePolicy

GRADIENTS, LOSS, PARTNER = (
    SkipReason.NONFINITE_GRADIENTS,
    SkipReason.NONFINITE_LOSS,
    SkipReason.PARTNER_SKIPPED,
)


def outcome(attempt, reason=None, scale=4.0, next_scale=None, idx=0, norm=None):
    after = scale if next_scale is None else next_scale
    return StepOutcome(idx, attempt, reason is None, reason, scale, after, 1, norm)


# ---------------------------------------------------------------------- values


def test_values_hold_exactly_the_documented_keys_as_floats():
    values = FitMetrics([]).values(StepTally(), 1.0)
    assert tuple(values) == KEYS
    assert {type(value) for value in values.values()} == {float}


def test_values_of_a_run_without_attempts_are_zero_and_the_norm_is_nan():
    values = FitMetrics([]).values(StepTally(), 1.0)
    assert math.isnan(values.pop("amp/grad_norm"))
    assert values == {
        "amp/scale": 1.0,
        "amp/skipped": 0.0,
        "amp/applied_steps": 0.0,
        "amp/skipped_steps": 0.0,
        "amp/consecutive_skips": 0.0,
        "amp/skip_rate": 0.0,
    }


def test_counts_come_from_the_tally_and_skipped_begins_anew_at_each_log():
    metrics = FitMetrics([StepTally(10, 8, 2, 0), StepTally(4, 4, 0, 0)])
    # since the fit began: 3 skips, then 1, then none
    first = metrics.values(StepTally(20, 15, 5, 3), 8.0)
    second = metrics.values(StepTally(24, 18, 6, 0), 16.0)
    third = metrics.values(StepTally(24, 18, 6, 0), 16.0)
    assert [v["amp/skipped"] for v in (first, second, third)] == [3.0, 1.0, 0.0]
    assert [v["amp/skip_rate"] for v in (first, second)] == [0.25, 0.25]
    assert first["amp/consecutive_skips"] == 3.0
    assert (second["amp/applied_steps"], second["amp/skipped_steps"]) == (18.0, 6.0)
    assert (first["amp/scale"], second["amp/scale"]) == (8.0, 16.0)


def test_grad_norm_is_that_of_the_last_applied_attempt():
    metrics = FitMetrics([])
    for seen in (outcome(0, norm=3.0), outcome(1, norm=5.0), outcome(2, GRADIENTS)):
        metrics.see(seen)
    assert metrics.values(StepTally(), 1.0)["amp/grad_norm"] == 5.0


def test_scale_range_holds_what_gradients_carried_and_what_a_skip_left():
    metrics = FitMetrics([])
    metrics.see(outcome(0, scale=8.0))
    metrics.see(outcome(1, scale=16.0))  # grew in between
    metrics.see(outcome(2, GRADIENTS, 16.0, 4.0))
    assert (metrics.lowest, metrics.highest) == (4.0, 16.0)


def test_reasons_are_counted():
    metrics = FitMetrics([])
    for i, reason in enumerate((None, LOSS, GRADIENTS, LOSS, PARTNER)):
        metrics.see(outcome(i, reason))
    assert metrics.reasons == {LOSS: 2, GRADIENTS: 1, PARTNER: 1}


def test_tallies_since_subtracts_per_optimizer_also_for_one_that_came_later():
    now = [StepTally(10, 7, 3, 2), StepTally(5, 5, 0, 0)]
    assert tallies_since(now, [StepTally(4, 2, 2, 2)]) == [
        StepTally(6, 5, 1, 2),
        StepTally(5, 5, 0, 0),
    ]
    assert tallies_since([], [StepTally(4, 2, 2, 2)]) == []


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        (None, 0.0),
        (ScaleSettings(dynamic=False), 0.0),
        (ScaleSettings(growth_interval=3), 1 / 4),
        (ScaleSettings(growth_interval=2000), 1 / 2001),
        (ScaleSettings(growth_interval=6, hysteresis=2), 2 / 8),
    ],
)
def test_expected_share_is_what_growth_causes(settings, share):
    assert expected_share(settings) == share


# ---------------------------------------------------------------------- the watch


def trained(settings, n, *, overflows_above, idx=0):
    """The outcomes of `n` attempts whose gradients overflow at scales above a limit."""
    policy, seen = ScalePolicy.start(settings), []
    for attempt in range(n):
        scale, reason = policy.scale, None
        if scale > overflows_above:
            policy.overflow()
            reason = GRADIENTS
        seen.append(outcome(attempt, reason, scale, policy.scale, idx))
        if reason is None:
            policy.clean_batch()
    return seen


def warned_at(watch, outcomes):
    return [o.attempt for o in outcomes if watch.see(o) is not None]


@pytest.mark.parametrize("limit", [2.0**16, 2.0**10, 2.0**4])
@pytest.mark.parametrize("interval", [1, 2, 20, 2000])
@pytest.mark.parametrize("hysteresis", [1, 16])
def test_calibration_from_the_highest_scale_never_warns(limit, interval, hysteresis):
    settings = ScaleSettings(2.0**24, growth_interval=interval, hysteresis=hysteresis)
    outcomes = trained(settings, 400, overflows_above=limit)
    # 8 to 20 backoffs, the first one at the overflow number `hysteresis`
    assert sum(not o.applied for o in outcomes) >= 8 + hysteresis - 1
    assert warned_at(SkipWatch(8, settings), outcomes) == []


def test_calibration_that_an_applied_update_interrupts_never_warns():
    watch, scale = SkipWatch(8, ScaleSettings(2.0**24)), 2.0**24
    for attempt in range(40):
        skip = attempt < 9 or attempt in (11, 12, 14, 17, 18, 25)
        seen = outcome(attempt, GRADIENTS if skip else None, scale, scale / 2 if skip else scale)
        scale = seen.next_scale
        assert watch.see(seen) is None
    assert scale == 2.0**9


def test_a_second_optimizer_whose_backoffs_the_first_one_made_never_warns():
    # both overflow at the same scales; the first one's outcome already moved it
    watch = SkipWatch(8, ScaleSettings(2.0**24))
    for attempt, scale in enumerate(2.0**e for e in range(24, 6, -1)):
        assert watch.see(outcome(attempt, GRADIENTS, scale, scale / 2, idx=0)) is None
        assert watch.see(outcome(attempt, PARTNER, scale / 2, scale / 2, idx=1)) is None


@pytest.mark.parametrize(
    ("settings", "reason", "scale"),
    [
        (None, GRADIENTS, 1.0),  # bfloat16
        (ScaleSettings(), LOSS, 2.0**16),
        (ScaleSettings(dynamic=False), GRADIENTS, 2.0**16),
        (ScaleSettings(min_scale=64.0), GRADIENTS, 64.0),
    ],
)
@pytest.mark.parametrize("patience", [1, 8])
def test_skips_that_move_no_scale_warn_at_the_patience(settings, reason, scale, patience):
    outcomes = [outcome(i, reason if i >= 2 else None, scale) for i in range(20)]
    assert warned_at(SkipWatch(patience, settings), outcomes) == [2 + patience - 1]


def test_an_applied_update_ends_the_row():
    outcomes = [outcome(i, None if i % 8 == 7 else LOSS) for i in range(9)]  # 7 skips, 1 applied, 1
    assert warned_at(SkipWatch(8, None), outcomes) == []


def test_an_overflow_that_no_scale_can_end_warns_before_the_run_is_stopped():
    # from 2**24 to 2**4 are 20 skips of calibration; the 8th after that is attempt 27 of 32
    outcomes = trained(ScaleSettings(2.0**24), 32, overflows_above=0.0)
    assert warned_at(SkipWatch(8, ScaleSettings(2.0**24)), outcomes) == [27]


def test_optimizers_are_counted_apart():
    watch = SkipWatch(4, None)
    for attempt in range(3):
        assert watch.see(outcome(attempt, LOSS, idx=0)) is None
        assert watch.see(outcome(attempt, LOSS, idx=1)) is None
    assert watch.see(outcome(3, LOSS, idx=1)) is not None


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (9, [90]),  # the 11th skip, all 11 within the last 100 attempts
        (10, []),  # exactly 10 %
    ],
)
def test_a_share_above_ten_percent_of_the_last_hundred_warns(every, expected):
    outcomes = [outcome(i, LOSS if i % every == 0 else None) for i in range(500)]
    assert warned_at(SkipWatch(8, ScaleSettings()), outcomes) == expected


def test_share_counts_the_last_hundred_attempts_only():
    # 10 skips, 100 attempts without, 10 skips: never 11 within 100
    early, late = set(range(0, 20, 2)), set(range(119, 139, 2))
    outcomes = [outcome(i, LOSS if i in early | late else None) for i in range(150)]
    assert warned_at(SkipWatch(8, ScaleSettings()), outcomes) == []


def test_share_allows_twice_what_growth_causes():
    # growth_interval 4: one in five expected, so up to 40 of 100 pass; every other is the 41st at 80
    outcomes = [outcome(i, LOSS if i % 2 == 0 else None) for i in range(200)]
    assert warned_at(SkipWatch(8, ScaleSettings(growth_interval=4)), outcomes) == [80]


def test_no_patience_never_warns():
    assert warned_at(SkipWatch(None, None), [outcome(i, LOSS) for i in range(200)]) == []


@pytest.mark.parametrize(
    ("outcomes", "seen"),
    [
        ([outcome(i, LOSS, 32.0) for i in range(8)], "8 updates in a row"),
        ([outcome(i, LOSS if i % 2 else None, 32.0) for i in range(22)], "11 of its last 100"),
    ],
)
def test_warning_says_what_where_and_what_to_do(outcomes, seen):
    watch = SkipWatch(8, ScaleSettings(growth_interval=99))
    (message,) = filter(None, map(watch.see, outcomes))
    assert f"`AmpMonitor(warn_after=8)`: optimizer 0 skipped {seen}" in message
    assert f"(attempt {outcomes[-1].attempt}) at scale 32" in message
    assert "Expected 1 % of attempts" in message  # 1 / (99 + 1)
    assert message.endswith(LOSS.sentence)
