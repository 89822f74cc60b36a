# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked once, named in the error, and kept as plain values."""

import dataclasses
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from lightning_amp_guard.arguments.checks import refuse
from lightning_amp_guard.arguments.settings import AmpSettings, ScaleSettings

NAN, INF = float("nan"), float("inf")
PRECISIONS = ("16-mixed", "bf16-mixed", "auto")

POSITIVE = "a finite number above 0"
GROWTH = "a finite number above 1"
BACKOFF = "a number between 0 and 1"
COUNT = "a whole number above 0"
BOUND = "a finite number above 0, or None for no bound"

# argument, legal values as the message states them, then what is refused
RANGES = {
    "init_scale": (POSITIVE, [0, 0.0, -1.0, NAN, INF, -INF]),
    "growth_factor": (GROWTH, [1, 1.0, 0.5, 0, -2.0, NAN, INF]),
    "backoff_factor": (BACKOFF, [1, 1.0, 2.0, 0, -0.5, NAN, INF]),
    "growth_interval": (COUNT, [0, -1]),
    "hysteresis": (COUNT, [0, -3]),
    "min_scale": (BOUND, [0, 0.0, -1.0, NAN, INF]),
    "max_scale": (BOUND, [0, 0.0, -1.0, NAN, INF]),
}
TYPES = {
    "init_scale": (POSITIVE, [True, False, "65536", None, [8.0], 1j, np.bool_(True)]),
    "growth_factor": (GROWTH, [True, "2", None, (2.0,), np.bool_(True)]),
    "backoff_factor": (BACKOFF, [False, "0.5", None, 0.5j]),
    "growth_interval": (COUNT, [True, 2000.0, "2000", None, np.float32(3)]),
    "dynamic": ("True or False", [1, 0, "yes", None, np.bool_(True)]),
    "hysteresis": (COUNT, [True, 1.0, "1", None]),
    "min_scale": (BOUND, [True, "1", [1.0]]),
    "max_scale": (BOUND, [True, "1e6", {}]),
}


def scale_settings(**given):
    ScaleSettings(**given).checked("Owner")


def settings(precision="16-mixed", **given):
    AmpSettings(precision, **given).checked("Owner", PRECISIONS)


def line_of(error, owner):
    """Run the line to write that a message ends in, with `owner` in place of `Owner`."""
    line = re.search(r"Write `(Owner\(.+\))`\.$", str(error))
    return eval(line[1], {"Owner": owner})


def cases(table):
    return [(name, bad, legal) for name, (legal, values) in table.items() for bad in values]


@pytest.mark.parametrize(("name", "bad", "legal"), cases(RANGES))
def test_scale_argument_out_of_range_is_named_with_its_legal_values(name, bad, legal):
    with pytest.raises(ValueError, match=r"^`Owner") as caught:
        ScaleSettings(**{name: bad}).checked("Owner")
    assert str(caught.value).startswith(f"`Owner({name}={bad!r})`: expected {legal}. ")
    assert line_of(caught.value, scale_settings) is None


@pytest.mark.parametrize(("name", "bad", "legal"), cases(TYPES))
def test_scale_argument_of_wrong_type_is_named_with_its_legal_values(name, bad, legal):
    with pytest.raises(TypeError) as caught:
        ScaleSettings(**{name: bad}).checked("Owner")
    assert str(caught.value).startswith(f"`Owner({name}={bad!r})`: expected {legal}. ")
    assert line_of(caught.value, scale_settings) is None


def test_every_scale_argument_is_among_the_cases():
    assert {f.name for f in dataclasses.fields(ScaleSettings)} == TYPES.keys()
    assert RANGES.keys() == TYPES.keys() - {"dynamic"}


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "min_scale", "max_scale"])
def test_number_too_large_for_a_float_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"`Owner\({name}=1000"):
        ScaleSettings(**{name: 10**400}).checked("Owner")


# A scale tensor is float32: beyond these bounds the scale or its reciprocal would be inf or 0.
@pytest.mark.parametrize("init_scale", [1e39, 1e300, 1e-45, 1e-50])
def test_init_scale_that_float32_cannot_hold_is_refused(init_scale):
    with pytest.raises(ValueError, match=r"`Owner\(init_scale="):
        ScaleSettings(init_scale, min_scale=None, max_scale=None).checked("Owner")


def test_bounds_in_the_wrong_order_name_both():
    with pytest.raises(ValueError, match=r"^`Owner") as caught:
        ScaleSettings(init_scale=4.0, min_scale=8.0, max_scale=2.0).checked("Owner")
    assert str(caught.value) == (
        "`Owner(min_scale=8.0)`: expected at most `max_scale`, which is 2.0."
        " Write `Owner(min_scale=2.0, max_scale=8.0)`."
    )


@pytest.mark.parametrize(
    ("init_scale", "min_scale", "max_scale", "bound"),
    [
        (0.5, 1.0, 16.0, "min"),
        (32.0, 1.0, 16.0, "max"),
        (2.0, None, 1.0, "max"),
        (2.0, 4.0, None, "min"),
    ],
)
def test_start_outside_the_bounds_names_all_three(init_scale, min_scale, max_scale, bound):
    with pytest.raises(ValueError, match=r"^`Owner") as caught:
        ScaleSettings(init_scale, min_scale=min_scale, max_scale=max_scale).checked("Owner")
    assert str(caught.value) == (
        f"`Owner(init_scale={init_scale!r})`: expected a value between `min_scale={min_scale!r}`"
        f" and `max_scale={max_scale!r}`. Move the bound as well, or pass None for no bound."
        f" Write `Owner(init_scale={init_scale!r}, {bound}_scale=None)`."
    )
    assert line_of(caught.value, scale_settings) is None


@pytest.mark.parametrize(
    "settings",
    [
        ScaleSettings(),
        ScaleSettings(init_scale=1.0, min_scale=1.0, max_scale=1.0),
        ScaleSettings(init_scale=3.5, min_scale=None, max_scale=None),
        ScaleSettings(growth_factor=1.0001, backoff_factor=0.9999, growth_interval=1),
        ScaleSettings(dynamic=False, hysteresis=100),
    ],
)
def test_legal_settings_come_back_equal(settings):
    assert settings.checked("Owner") == settings


def test_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(ScaleSettings()) == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "dynamic": True,
        "hysteresis": 1,
        "min_scale": 1.0,
        "max_scale": 16777216.0,
    }
    assert dataclasses.asdict(AmpSettings()) == {
        "precision": "16-mixed",
        "backoff_on_nonfinite_loss": False,
        "max_consecutive_skips": 32,
        "on_limit": "raise",
        "error_if_nonfinite": False,
        "bf16_guard": True,
        "fp32_modules": (),
        "weight_cache": False,
        "sync_found_inf": "auto",
    }


def test_numbers_of_any_library_become_plain_ones():
    given = ScaleSettings(
        init_scale=np.float32(1024),
        growth_factor=4,
        backoff_factor=Fraction(1, 4),
        growth_interval=np.int64(7),
        hysteresis=np.uint8(2),
        min_scale=np.float64(2),
        max_scale=2048,
    )
    checked = given.checked("Owner")
    assert checked == ScaleSettings(1024.0, 4.0, 0.25, 7, True, 2, 2.0, 2048.0)
    assert [type(v) for v in dataclasses.astuple(checked)] == [
        float,
        float,
        float,
        int,
        bool,
        int,
        float,
        float,
    ]


# ---------------------------------------------------------------- the plugin's other arguments

BAD_VALUES = [
    ("precision", "16-true", "one of '16-mixed', 'bf16-mixed', 'auto'"),
    ("precision", "fp16", "one of '16-mixed', 'bf16-mixed', 'auto'"),
    ("on_limit", "16-mixed", "one of 'raise', 'bf16-mixed', '32-true'"),
    ("on_limit", "stop", "one of 'raise', 'bf16-mixed', '32-true'"),
    ("sync_found_inf", "always", "one of 'auto', True, False"),
    ("max_consecutive_skips", 0, "a whole number above 0, or None for no limit"),
    ("max_consecutive_skips", -1, "a whole number above 0, or None for no limit"),
    ("fp32_modules", ("net", ""), 'a list of module names or patterns, such as ["head",'),
    ("fp32_modules", ["!"], 'a list of module names or patterns, such as ["head",'),
]
BAD_TYPES = [
    ("precision", 16, "one of '16-mixed', 'bf16-mixed', 'auto'"),
    ("precision", None, "one of '16-mixed', 'bf16-mixed', 'auto'"),
    ("on_limit", None, "one of 'raise', 'bf16-mixed', '32-true'"),
    ("sync_found_inf", 1, "one of 'auto', True, False"),
    ("sync_found_inf", None, "one of 'auto', True, False"),
    ("max_consecutive_skips", True, "a whole number above 0, or None for no limit"),
    ("max_consecutive_skips", 3.0, "a whole number above 0, or None for no limit"),
    ("max_consecutive_skips", "32", "a whole number above 0, or None for no limit"),
    *[
        (name, bad, "True or False")
        for name in (
            "backoff_on_nonfinite_loss",
            "error_if_nonfinite",
            "bf16_guard",
            "weight_cache",
        )
        for bad in (1, 0, None, "True", np.bool_(False))
    ],
    *[
        ("fp32_modules", bad, 'a list of module names or patterns, such as ["head",')
        for bad in ("net", b"net", None, {"net"}, [1], ["net", None], 7)
    ],
]


@pytest.mark.parametrize(
    ("name", "bad", "legal", "kind"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_bad_argument_is_named_with_its_legal_values(name, bad, legal, kind):
    with pytest.raises(kind) as caught:
        AmpSettings(**{name: bad}).checked("Owner", PRECISIONS)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"`Owner({name}={bad!r})`: expected {legal}")
    if "A pattern is empty" not in str(caught.value):
        assert line_of(caught.value, settings) is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("16", "Owner(precision='16-mixed')"),
        ("fp16", "Owner(precision='16-mixed')"),
        (16, "Owner(precision='16-mixed')"),
        ("16-true", "Owner(precision='16-mixed')"),
        ("16-Mixed", "Owner(precision='16-mixed')"),
        (torch.float16, "Owner(precision='16-mixed')"),
        ("bf16", "Owner(precision='bf16-mixed')"),
        (torch.bfloat16, "Owner(precision='bf16-mixed')"),
        ("bf16-true", "Owner(precision='bf16-mixed')"),
        ("AUTO", "Owner(precision='auto')"),
    ],
)
def test_precision_as_it_is_written_elsewhere_is_understood(given, line):
    with pytest.raises((TypeError, ValueError)) as caught:
        settings(given)
    assert str(caught.value).endswith(f" Write `{line}`.")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("16-true", "16-true"),
        ("bf16-true", "bf16-true"),
        (32, "32-true"),
        ("32-true", "32-true"),
        (torch.float32, "32-true"),
        ("64", "64-true"),
    ],
)
def test_a_precision_without_autocast_needs_no_plugin(given, name):
    with pytest.raises((TypeError, ValueError)) as caught:
        settings(given)
    assert f"For '{name}' leave the plugin out: `Trainer(precision='{name}')`." in str(caught.value)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"fp32_modules": "head"}, "fp32_modules=['head']"),
        ({"fp32_modules": {"b", "a"}}, "fp32_modules=['a', 'b']"),
        ({"fp32_modules": None}, "fp32_modules=[]"),
        ({"fp32_modules": [torch.nn.LayerNorm]}, "fp32_modules=['head']"),
        ({"fp32_modules": torch.nn.Linear(1, 1)}, "fp32_modules=['head']"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=None"),
        ({"max_consecutive_skips": "8"}, "max_consecutive_skips=8"),
        ({"max_consecutive_skips": 8.0}, "max_consecutive_skips=8"),
        ({"max_consecutive_skips": -1}, "max_consecutive_skips=32"),
        ({"on_limit": "fp32"}, "on_limit='32-true'"),
        ({"on_limit": "bf16"}, "on_limit='bf16-mixed'"),
        ({"on_limit": "error"}, "on_limit='raise'"),
        ({"sync_found_inf": "no"}, "sync_found_inf=False"),
        ({"bf16_guard": 0}, "bf16_guard=False"),
        ({"weight_cache": "yes"}, "weight_cache=True"),
    ],
    ids=str,
)
def test_what_was_meant_is_the_line_to_write(given, line):
    with pytest.raises((TypeError, ValueError)) as caught:
        settings(**given)
    assert str(caught.value).endswith(f" Write `Owner({line})`.")


def test_a_long_value_is_shown_in_one_short_line():
    net = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    with pytest.raises(TypeError) as caught:
        settings(fp32_modules=net)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).startswith("`Owner(fp32_modules=Sequential( (0): Linear(")


def test_every_argument_is_among_the_cases():
    assert {f.name for f in dataclasses.fields(AmpSettings)} == {c[0] for c in BAD_TYPES}


def test_empty_pattern_is_called_one():
    with pytest.raises(ValueError, match=r"A pattern is empty\.$"):
        AmpSettings(fp32_modules=("net", "!")).checked("Owner", PRECISIONS)


def test_going_on_in_the_precision_that_failed_is_refused():
    with pytest.raises(ValueError, match=r"on_limit='bf16-mixed'.*another precision"):
        AmpSettings("bf16-mixed", on_limit="bf16-mixed").checked("Owner", PRECISIONS)


@pytest.mark.parametrize("patterns", [["net", "!net.head"], ("*",), []])
def test_patterns_of_any_sequence_become_a_tuple(patterns):
    checked = AmpSettings(fp32_modules=patterns).checked("Owner", PRECISIONS)
    assert checked.fp32_modules == tuple(patterns)
    assert isinstance(checked.fp32_modules, tuple)


@pytest.mark.parametrize("sync", ["auto", True, False])
def test_synchronisation_keeps_its_value(sync):
    assert AmpSettings(sync_found_inf=sync).checked("Owner", PRECISIONS).sync_found_inf is sync


def test_limit_becomes_a_plain_number():
    checked = AmpSettings(max_consecutive_skips=np.int64(5)).checked("Owner", PRECISIONS)
    assert checked.max_consecutive_skips == 5
    assert type(checked.max_consecutive_skips) is int
    unlimited = AmpSettings(max_consecutive_skips=None).checked("Owner", PRECISIONS)
    assert unlimited.max_consecutive_skips is None


@pytest.mark.parametrize("settings", [ScaleSettings(init_scale=8.0), AmpSettings("auto")])
def test_settings_are_frozen_and_picklable(settings):
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(settings)[0].name, None)


def test_refusal_says_what_was_seen_what_was_expected_and_why():
    assert refuse("Owner", "size", "big", "a number", "Measure it.") == (
        "`Owner(size='big')`: expected a number. Measure it."
    )
    assert refuse("Owner", "size", 0, "more") == "`Owner(size=0)`: expected more."
