# SPDX-License-Identifier: Apache-2.0
"""Arguments that a class does not take, told with the name of the class that the user wrote."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any, TypeVar

__all__ = ["names_its_class"]

_Init = TypeVar("_Init", bound=Callable[..., None])


def names_its_class(init: _Init) -> _Init:
    """Return the constructor such that arguments it does not take are refused by name.

    Python's own error names the base class that happens to define `__init__`, and no argument that
    was meant. The signature stays as it is.

    Raises:
        TypeError: When called: an argument is unknown, given twice, or has to be passed by name.

    Example:
        >>> class Base:
        ...     @names_its_class
        ...     def __init__(self, *, growth_interval: int = 2000) -> None: ...
        >>> class Scale(Base): ...
        >>> Scale(growth_intervall=100)
        Traceback (most recent call last):
        TypeError: `Scale(growth_intervall=100)`: `Scale` has no argument `growth_intervall`. Expected
        one of `growth_interval`. Did you mean `Scale(growth_interval=100)`?
    """
    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError:
            raise TypeError(_refusal(type(self).__name__, parameters, args, kwargs)) from None
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def _refusal(
    owner: str,
    parameters: Sequence[inspect.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    names = [parameter.name for parameter in parameters]
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        return _unknown(owner, unknown[0], kwargs[unknown[0]], names)
    if len(args) > len(by_place):
        return _too_many(owner, args, by_place, names)
    twice = next(name for name in by_place[: len(args)] if name in kwargs)
    first, second = short(args[by_place.index(twice)]), short(kwargs[twice])
    return (
        f"`{owner}({first}, {twice}={second})`: the argument `{twice}` was given twice, by place and"
        f" by name. Expected it once. Keep `{owner}({twice}={second})`."
    )


def _unknown(owner: str, name: str, value: Any, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 1)
    meant = f" Did you mean `{owner}({near[0]}={short(value)})`?" if near else ""
    return (
        f"`{owner}({name}={short(value)})`: `{owner}` has no argument `{name}`. Expected one of"
        f" {_listed(names)}.{meant}"
    )


def _too_many(
    owner: str, args: Sequence[Any], by_place: Sequence[str], names: Sequence[str]
) -> str:
    most = len(by_place)
    legal = f"at most {most}, {_listed(by_place)}" if most else "all of them by name"
    count = "1 argument was" if len(args) == 1 else f"{len(args)} arguments were"
    seen = f"`{owner}({', '.join(map(short, args))})`: {count} given by place."
    if len(names) == most:
        return f"{seen} Expected {legal}."
    line = f"{owner}({names[most]}={short(args[most])})"
    return f"{seen} Expected {legal}. Write the others by name, such as `{line}`."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
