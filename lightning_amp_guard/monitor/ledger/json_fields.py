# SPDX-License-Identifier: Apache-2.0
"""Values out of a JSON object, checked one by one, with errors that say where they stand."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

__all__ = ["Fields", "LedgerError", "parse_object"]

_MOST = 2**63
_LEAST_EXPONENT = sys.float_info.min_exp - sys.float_info.mant_dig  # of the smallest subnormal
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class LedgerError(ValueError):
    """Says which file and line is not what a ledger holds, which key, and what was expected."""


def parse_object(text: str | bytes, place: str) -> dict[str, Any]:
    """Return the one JSON object that `text` is.

    Args:
        text: Strict JSON.
        place: The file (and line number), for the error.

    Raises:
        LedgerError: It is none.
    """
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _error(place, f"{_short(text)} is no strict JSON", "one JSON object") from None
    if type(record) is not dict:
        raise _error(place, f"found {_short(record)}", "one JSON object")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _error(place: str, seen: str, expected: str) -> LedgerError:
    return LedgerError(
        f"{place}: {seen}. Expected {expected}. Is this another kind of file, or was it edited?"
        " Ledgers are written by `AmpMonitor(ledger=True)`."
    )


class Fields:
    """Takes values out of one JSON object, and says where one is missing or wrong.

    Args:
        record: The object.
        place: The file (and line number), for the error.
        prefix: What stands before a key's name in the error.
        nonfinite: Which of its nulls stand for inf or NaN; by default its key of that name.
    """

    def __init__(
        self, record: dict[str, Any], place: str, prefix: str = "", nonfinite: Any = None
    ) -> None:
        self.record, self.place, self.prefix = record, place, prefix
        told = record.get("nonfinite") if nonfinite is None else nonfinite
        self.nonfinite: dict[str, Any] = told if type(told) is dict else {}

    def wrong(self, name: str, expected: str) -> LedgerError:
        """Return the error for the value of a key."""
        seen = _short(self.record[name])
        return _error(self.place, f"key {self.prefix + name!r} is {seen}", expected)

    def take(self, name: str, kinds: tuple[type, ...], expected: str) -> Any:
        """Return the value if it is there and of one of the types, else raise."""
        if name not in self.record:
            raise _error(self.place, f"key {self.prefix + name!r} is missing", expected)
        if type(self.record[name]) not in kinds:  # a bool is no number here
            raise self.wrong(name, expected)
        return self.record[name]

    def flag(self, name: str) -> bool:
        """Return true or false."""
        return bool(self.take(name, (bool,), "true or false"))

    def whole(self, name: str) -> int:
        """Return a whole number."""
        value = int(self.take(name, (int,), "a whole number"))
        if abs(value) >= _MOST:
            raise self.wrong(name, "a whole number below 2**63")
        return value

    def whole_or_none(self, name: str) -> int | None:
        """Return a whole number or `None`."""
        value = self.take(name, (int, type(None)), "a whole number or null")
        return None if value is None else self.whole(name)

    def number(self, name: str) -> float:
        """Return a number, which may be inf or NaN."""
        if (value := self.number_or_none(name)) is None:
            raise self.wrong(name, "a number")
        return value

    def number_or_none(self, name: str) -> float | None:
        """Return a number, which may be inf or NaN, or `None`."""
        value = self.take(name, (float, int, type(None)), "a number or null")
        if value is None and name in self.nonfinite:
            if (number := _NONFINITE.get(str(self.nonfinite[name]))) is None:
                raise self.wrong(name, 'one of "nan", "inf" and "-inf" beside it in "nonfinite"')
            return number
        if value is None:
            return None
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond every float
            number = math.inf
        if math.isinf(number) or name in self.nonfinite:
            raise self.wrong(name, 'a finite number, or null beside "nonfinite"')
        return number

    def text(self, name: str) -> str:
        """Return a string."""
        return str(self.take(name, (str,), "a string"))

    def text_or_none(self, name: str) -> str | None:
        """Return a string or `None`."""
        value = self.take(name, (str, type(None)), "a string or null")
        return None if value is None else str(value)

    def inner(self, name: str) -> Fields:
        """Return the fields of an object within this one."""
        record = self.take(name, (dict,), "an object")
        return Fields(record, self.place, f"{self.prefix}{name}.", self.nonfinite.get(name))

    def name_as_exponent(self, name: str) -> int:
        """Return the key itself as an exponent of 2 that a float can have."""
        try:
            exponent = int(name)
        except ValueError:
            exponent = _LEAST_EXPONENT - 1
        if not _LEAST_EXPONENT <= exponent <= sys.float_info.max_exp:
            raise self.wrong(name, "exponents of 2 as keys, such as -14")
        return exponent
