# SPDX-License-Identifier: Apache-2.0
"""The floating point numbers in a batch of any build, and the Python path to each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset

__all__ = ["Path", "as_text", "ends_of", "is_array", "leaves_of"]

# The path to the container (`None` for the batch itself), and what leads on from there.
Path: TypeAlias = "tuple[Path | None, str]"
_PASSED = (
    *(type(None), int, str, bytes, bytearray, range, type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, Module, Dataset, DataLoader),
)
_ENDS = (Tensor, float, complex, *_PASSED)
_NUMBERS = {float, complex, int, bool}
_READABLE = (str, int, float, bytes, tuple)  # keys that are shown as they are written


def leaves_of(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of all floating point numbers in the batch, in its order.

    Values are tensors, numpy arrays, Python numbers, and lists or tuples of these alone. A container
    that is met again is passed over.

    Args:
        batch: Anything that a data loader yields.

    Example:
        >>> [(as_text(path), value) for path, value in leaves_of({"x": [1.0, 2], "y": (3, "a")})]
        [("batch['x']", [1.0, 2])]
    """
    for path, value in ends_of(batch):
        if isinstance(value, Tensor):
            if _has_numbers(value):
                yield path, value
        elif isinstance(value, (float, complex)) or _is_row(value) or _is_float_array(value):
            yield path, value


def ends_of(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of all that is not searched any further: numbers, strings, data sets, ...

    Args:
        batch: Anything that a data loader yields.
    """
    known: dict[int, Any] = {}  # the values too, so that no `id` is used again
    todo: list[tuple[Path, Any]] = [((None, "batch"), batch)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, _ENDS) or _is_row(value) or _is_plain_array(value):
            yield path, value
        elif id(value) not in known:
            known[id(value)] = value
            parts = [((path, step), part) for step, part in _parts(value)]
            todo += reversed(parts)


def as_text(path: Path) -> str:
    """Return a path as Python writes it: "batch['image'][0].x"."""
    steps: list[str] = []
    rest: Path | None = path
    while rest is not None:
        rest, step = rest
        steps.append(step)
    return "".join(reversed(steps))


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_numbers(tensor: Tensor) -> bool:
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.device.type != "meta"
        and not str(tensor.dtype).startswith("torch.float4")  # packed, and has neither inf nor NaN
    )


def _is_row(value: Any) -> bool:
    if type(value) not in (list, tuple):
        return False
    kinds = {type(number) for number in value}
    return kinds <= _NUMBERS and bool(kinds & {float, complex})


def _is_plain_array(value: Any) -> bool:
    return is_array(value) and not (value.dtype.names or value.dtype.hasobject)


def _is_float_array(value: Any) -> bool:
    return is_array(value) and value.dtype.kind in "fc"


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{_key(key)}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if is_array(value):
        return _parts_of_array(value)
    if isinstance(value, Sequence) or type(value).__name__ == "deque":
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, Set):
        return [("[*]", part) for part in value]
    if "numpy" in sys.modules and hasattr(type(value), "__array__"):
        return [("", sys.modules["numpy"].asarray(value))]  # pandas, numpy's scalars, images
    return [(f".{name}", part) for name, part in _attributes(value).items()]


def _parts_of_array(array: Any) -> Iterable[tuple[str, Any]]:
    if array.dtype.names:
        return [(f"[{name!r}]", array[name]) for name in array.dtype.names]
    return [(f".flat[{i}]", x) for i, x in enumerate(array.flat)] if array.dtype.hasobject else []


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, _READABLE) else f"<{type(key).__name__}>"


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    attributes = dict(found) if isinstance(found, dict) else {}
    names = [slot for kind in type(value).__mro__ for slot in _slots(kind)]
    if is_dataclass(value):
        names = [field.name for field in fields(value)] + names
    absent = object()
    read = {name: getattr(value, name, absent) for name in names if name not in attributes}
    return attributes | {name: part for name, part in read.items() if part is not absent}


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]
