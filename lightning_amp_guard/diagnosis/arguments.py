# SPDX-License-Identifier: Apache-2.0
"""Checks of numeric arguments, with one wording."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["check_positive", "check_whole"]


def check_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a positive finite number.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive and finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}={value!r}`: expected a number, got {type(value).__name__}.")
    if not 0.0 < float(value) < math.inf:
        raise ValueError(f"`{name}={value!r}`: expected a positive finite number.")


def check_whole(name: str, value: Any, *, at_least: int) -> None:
    """Raise unless `value` is a whole number, `at_least` or more.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}={value!r}`: expected a whole number, got {type(value).__name__}.")
    if value < at_least:
        raise ValueError(f"`{name}={value}`: expected at least {at_least}.")
