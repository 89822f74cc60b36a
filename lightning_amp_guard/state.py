# SPDX-License-Identifier: Apache-2.0
"""Reading saved state: every value is checked, and an error names the key."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_amp_guard.errors import ScalerStateError

__all__ = ["damaged", "is_flag_pair", "read", "read_flag_pairs", "read_scaler_state", "read_tally"]

SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def damaged(key: str, value: object, expected: str) -> ScalerStateError:
    """Return the error for a damaged value under `key`."""
    shown = repr(value)
    return ScalerStateError(
        f'The checkpoint\'s scaler state is damaged: "{key}" is {shown[:80]}, expected {expected}.'
        " Resume from another checkpoint, or remove the entry from this one to start with the"
        " constructor's scale."
    )


def read(state: object, key: str, legal: Callable[[Any], bool], expected: str) -> Any:
    """Return `state[key]` if it is there and `legal`, else raise `ScalerStateError`."""
    if not isinstance(state, Mapping):
        raise damaged(key, state, f'a dict with the key "{key}"')
    if key not in state:
        raise ScalerStateError(
            f'The checkpoint\'s scaler state is damaged: the key "{key}" is missing, expected'
            f" {expected}. The file may come from another tool or an interrupted write."
        )
    value = state[key]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not legal(value):
        raise damaged(key, value, expected)
    return value


def is_count(value: object) -> bool:
    """Return whether `value` is a whole number of at least 0."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= 0  # type: ignore[call-overload]


def is_dict(value: object) -> bool:
    """Return whether `value` is a dict."""
    return isinstance(value, Mapping)


def is_positive(value: object) -> bool:
    """Return whether `value` is a finite number above 0."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return real and 0 < float(value) < math.inf  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond every float
        return False


def is_flag_pair(value: object) -> bool:
    """Return whether `value` is a list of two bools."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(f, bool) for f in value)


def read_flag_pairs(saved: object, whose: str) -> list[list[bool]]:
    """Return a gate's saved flags, a pair for each of `whose`.

    Raises:
        ScalerStateError: They are no list of pairs.
    """
    pairs: list[Any] = saved if isinstance(saved, list) else [saved]
    if not all(is_flag_pair(pair) for pair in pairs):
        raise ScalerStateError(
            f'The checkpoint\'s scaler state is damaged: "gates" holds {saved!r} for {whose},'
            " expected a list of two flags for each."
        )
    return pairs


def read_scaler_state(state: object) -> dict[str, Any]:
    """Return torch's five values, checked.

    Raises:
        ScalerStateError: A key is missing or its value impossible; the message names it.
    """
    return {
        "scale": float(read(state, "scale", is_positive, "a finite number above 0")),
        "growth_factor": float(
            read(
                state,
                "growth_factor",
                lambda v: is_positive(v) and v > 1,
                "a finite number above 1",
            )
        ),
        "backoff_factor": float(
            read(
                state,
                "backoff_factor",
                lambda v: is_positive(v) and v < 1,
                "a number between 0 and 1",
            )
        ),
        "growth_interval": int(
            read(
                state, "growth_interval", lambda v: is_count(v) and v > 0, "a whole number above 0"
            )
        ),
        "_growth_tracker": int(
            read(state, "_growth_tracker", is_count, "a whole number of at least 0")
        ),
    }


def read_tally(state: object) -> dict[str, int]:
    """Return the four counts of a tally, checked against each other."""
    keys = ("attempted", "applied", "skipped", "consecutive_skips")
    tally = {k: int(read(state, k, is_count, "a whole number of at least 0")) for k in keys}
    if tally["attempted"] != tally["applied"] + tally["skipped"]:
        raise damaged("attempted", tally["attempted"], 'the sum of "applied" and "skipped"')
    if tally["consecutive_skips"] > tally["skipped"]:
        raise damaged("consecutive_skips", tally["consecutive_skips"], 'at most "skipped"')
    return tally
