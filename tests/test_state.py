# SPDX-License-Identifier: Apache-2.0
"""Saved state is checked value by value, and an error names the key."""

import numpy as np
import pytest
import torch

from lightning_amp_guard import AmpGuardError, ScalerStateError
from lightning_amp_guard.state import SCALER_KEYS, damaged, read, read_scaler_state, read_tally

NAN, INF = float("nan"), float("inf")
GOOD = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 17,
}
TALLY = {"attempted": 5, "applied": 3, "skipped": 2, "consecutive_skips": 1}
MISSING = object()
HUGE = 10**400  # an honest whole number, but no float

EXPECTED = {
    "scale": "a finite number above 0",
    "growth_factor": "a finite number above 1",
    "backoff_factor": "a number between 0 and 1",
    "growth_interval": "a whole number above 0",
    "_growth_tracker": "a whole number of at least 0",
}
BAD = [MISSING, None, NAN, INF, -1, True, False, "8", [8.0], {}, HUGE, 1j, torch.ones(2)]
BEYOND = {
    "scale": [0, 0.0],
    "growth_factor": [1, 1.0, 0.5, 0],
    "backoff_factor": [1, 1.0, 2.0, 0],
    "growth_interval": [0, 1.5, 2.0],
    "_growth_tracker": [0.0, 1.5],
}
DAMAGE = [
    (key, bad)
    for key, more in BEYOND.items()
    for bad in BAD + more
    if bad is not HUGE or key not in ("growth_interval", "_growth_tracker")
]


def shown(value):
    return "missing" if value is MISSING else repr(value)[:12]


@pytest.mark.parametrize(("key", "bad"), DAMAGE, ids=[f"{k}-{shown(b)}" for k, b in DAMAGE])
def test_damaged_value_is_named_in_quotes_with_what_was_expected(key, bad):
    state = {**GOOD, key: bad}
    if bad is MISSING:
        del state[key]
    with pytest.raises(ScalerStateError) as caught:
        read_scaler_state(state)
    message = str(caught.value)
    assert f'"{key}"' in message
    assert f"expected {EXPECTED[key]}" in message
    if bad is MISSING:
        assert f'the key "{key}" is missing' in message
    else:
        assert f'"{key}" is {repr(bad)[:12]}' in message
        assert "Resume from another checkpoint" in message


@pytest.mark.parametrize("state", [None, 7, "scale", [1.0], torch.ones(1)])
def test_state_that_is_no_dict_is_damaged(state):
    with pytest.raises(ScalerStateError, match=r'expected a dict with the key "scale"'):
        read_scaler_state(state)


def test_damage_is_an_error_of_this_package():
    assert issubclass(ScalerStateError, AmpGuardError)
    error = damaged("scale", "x" * 1000, "a number")
    assert "x" * 70 in str(error)
    assert "x" * 100 not in str(error)  # a whole tensor printed would bury the message


def test_good_state_comes_back_equal():
    assert read_scaler_state(GOOD) == GOOD


def test_keys_are_those_of_torch():
    assert tuple(torch.amp.GradScaler("cpu").state_dict()) == SCALER_KEYS


def test_numbers_of_any_library_become_plain_ones():
    read_back = read_scaler_state(
        {
            "scale": torch.tensor(1024.0),
            "growth_factor": np.float32(2),
            "backoff_factor": np.float64(0.5),
            "growth_interval": torch.tensor([2000]),
            "_growth_tracker": np.int32(17),
        }
    )
    assert read_back == GOOD
    assert [type(v) for v in read_back.values()] == [float, float, float, int, int]


def test_foreign_keys_are_left_alone():
    assert read_scaler_state({**GOOD, "note": object()}) == GOOD


def test_counter_beyond_the_interval_is_legal():  # growth may have been waiting
    assert read_scaler_state({**GOOD, "_growth_tracker": 3999})["_growth_tracker"] == 3999


@pytest.mark.parametrize("tally", [TALLY, dict.fromkeys(TALLY, 0)])
def test_good_tally_comes_back_equal(tally):
    assert read_tally(tally) == tally


@pytest.mark.parametrize("key", TALLY)
@pytest.mark.parametrize("bad", [MISSING, None, NAN, -1, True, "2", 1.0], ids=shown)
def test_damaged_count_is_named_in_quotes(key, bad):
    tally = {**TALLY, key: bad}
    if bad is MISSING:
        del tally[key]
    with pytest.raises(ScalerStateError) as caught:
        read_tally(tally)
    assert f'"{key}"' in str(caught.value)
    assert "expected a whole number of at least 0" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"attempted": 6}, "attempted", 'the sum of "applied" and "skipped"'),
        ({"skipped": 1, "applied": 3}, "attempted", 'the sum of "applied" and "skipped"'),
        ({"consecutive_skips": 3}, "consecutive_skips", 'at most "skipped"'),
    ],
)
def test_counts_that_contradict_each_other_are_damaged(change, key, expected):
    with pytest.raises(ScalerStateError) as caught:
        read_tally({**TALLY, **change})
    assert f'"{key}" is {({**TALLY, **change})[key]}, expected {expected}' in str(caught.value)


def test_read_hands_out_what_is_legal_and_nothing_else():
    state = {"factor": torch.tensor(2.5), "name": "x"}
    assert read(state, "factor", lambda v: v > 1, "above 1") == 2.5
    assert read(state, "name", lambda v: v == "x", "x") == "x"
    with pytest.raises(ScalerStateError, match=r'"factor" is 2\.5, expected above 3'):
        read(state, "factor", lambda v: v > 3, "above 3")
