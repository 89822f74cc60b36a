# SPDX-License-Identifier: Apache-2.0
"""Checks of plain arguments, whose messages end in a line that works."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "choice",
    "choice_meant",
    "flag",
    "flag_meant",
    "names_meant",
    "number_meant",
    "other_precision",
    "real",
    "refuse",
    "whole",
]

_NOTHING = object()  # there is no line to write
_LONGEST = 200  # characters of a value that a message shows

_NO = ("false", "no", "off", "0", "none", "")


def refuse(
    owner: str, name: str, value: object, expected: str, why: str = "", write: object = _NOTHING
) -> str:
    """Return the message for a bad argument: what was seen, what was expected, why, what to write."""
    line = "" if write is _NOTHING else f" Write `{owner}({name}={write!r})`."
    return (
        f"`{owner}({name}={_shown(value)})`: expected {expected}.{' ' + why if why else ''}{line}"
    )


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())  # that of a module has many lines
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def real(
    owner: str,
    name: str,
    value: object,
    expected: str = "a finite number above 0",
    default: object = _NOTHING,
) -> float:
    """Return `value` as a float if it is a finite number above zero, else raise."""
    write = number_meant(value, float, default)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(refuse(owner, name, value, expected, write=write))
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond every float
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(refuse(owner, name, value, expected, write=write))
    return number


def whole(
    owner: str,
    name: str,
    value: object,
    expected: str = "a whole number above 0",
    default: object = _NOTHING,
) -> int:
    """Return `value` as an int if it is a whole number above zero, else raise."""
    write = number_meant(value, int, default)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(refuse(owner, name, value, expected, write=write))
    if value <= 0:
        raise ValueError(refuse(owner, name, value, expected, write=write))
    return int(value)


def flag(owner: str, name: str, value: object) -> bool:
    """Return `value` if it is a bool, else raise."""
    if not isinstance(value, bool):
        raise TypeError(refuse(owner, name, value, "True or False", write=flag_meant(value)))
    return value


def choice(owner: str, name: str, value: object, legal: Sequence[object], why: str = "") -> None:
    """Raise unless `value` is one of `legal` (1 is not True here)."""
    if not any(value is x or (value == x and type(value) is type(x)) for x in legal):
        kind = ValueError if any(isinstance(value, type(x)) for x in legal) else TypeError
        expected = "one of " + ", ".join(map(repr, legal))
        raise kind(refuse(owner, name, value, expected, why, choice_meant(value, legal)))


def number_meant(value: object, kind: type[float] | type[int], default: Any) -> Any:
    """Return the positive number that a value spells, else `default`.

    Example:
        >>> number_meant("1024", float, 8.0), number_meant(2000.0, int, 1), number_meant(-1, int, 1)
        (1024.0, 2000, 1)
    """
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        return default
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return default
    spelled = isinstance(value, str) or kind is int
    if not spelled or not 0 < number < math.inf or (kind is int and not number.is_integer()):
        return default
    return kind(number)


def flag_meant(value: object) -> bool:
    """Return the bool that a value spells.

    Example:
        >>> flag_meant("no"), flag_meant(1), flag_meant(None)
        (False, True, False)
    """
    if isinstance(value, str):
        return value.strip().lower() not in _NO
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError):  # a tensor of several
        return True


def choice_meant(value: object, legal: Sequence[object]) -> object:
    """Return the legal value that resembles `value` most; the first of them where none does.

    Example:
        >>> precisions = ("16-mixed", "bf16-mixed", "auto")
        >>> [choice_meant(x, precisions) for x in ("fp16", 16, "bfloat16", "AUTO", "tf32")]
        ['16-mixed', '16-mixed', 'bf16-mixed', 'auto', '16-mixed']
    """
    text = str(value).lower()
    for part, name in (
        ("bf", "bf16-mixed"),
        ("16", "16-mixed"),
        ("half", "16-mixed"),
        ("32", "32-true"),
    ):
        if part in text and name in legal:
            return name
    near = get_close_matches(text, [name for name in legal if isinstance(name, str)], 1)
    if near:
        return near[0]
    return flag_meant(value) if True in legal and value is not None else legal[0]


def names_meant(value: object) -> list[str] | None:
    """Return the list of names that a value stands for: one name, or a collection of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (set, frozenset, dict)) and all([isinstance(v, str) for v in value]):
        return sorted(value)
    return [] if value is None else None


def other_precision(precision: object) -> str:
    """Return what to know of a precision of Lightning's that no autocast is for."""
    text = str(precision).removeprefix("torch.")
    if "true" not in text and "32" not in text and "64" not in text:
        return ""
    name = {"float32": "32-true", "float64": "64-true", "32": "32-true", "64": "64-true"}.get(
        text, text
    )
    return f"For {name!r} leave the plugin out: `Trainer(precision={name!r})`."
