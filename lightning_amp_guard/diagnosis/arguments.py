# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several functions have, with one wording."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_amp_guard.diagnosis.leaves import ends_of, is_array

__all__ = ["check_batch", "check_module", "check_positive", "check_step", "check_whole", "kind_of"]


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


def check_step(function: str, module: Any, batch: Any) -> None:
    """Raise unless `function(module, batch)` was called with a module and what may be one batch.

    Raises:
        TypeError: it was not; the message names the argument and the line to write.
    """
    check_module(function, module, batch)
    check_batch(function, batch, f"{function}(module, {{}})")


def check_module(function: str, module: Any, other: Any, name: str = "batch") -> None:
    """Raise unless `module` is one; `other` is the argument that follows, called `name`.

    Raises:
        TypeError: it is not; the message names the argument and the line to write.
    """
    if isinstance(module, Module):
        return
    seen = f"`{function}(module={_shown(module)})`: `module` is {kind_of(module)}"
    if isinstance(other, Module):
        raise TypeError(
            f"{seen}, and `{name}` is the module {_shown(other)}. Expected them the other way round."
            f" Write `{function}(module, {name})`."
        )
    made = f"{module.__name__}(...)" if isinstance(module, type) else "module"
    raise TypeError(f"{seen}. Expected a `torch.nn.Module`. Write `{function}({made}, {name})`.")


def check_batch(function: str, batch: Any, line: str, name: str = "batch") -> None:
    """Raise where `batch` is surely no batch: a loader, a data set, an iterator, a module or a class.

    An object of any other class is taken for a batch, also one that can be iterated over, if there
    are tensors or arrays in it. Nothing is iterated over.

    Args:
        function: Whose argument it is.
        batch: What was given.
        line: The call to write, with `{}` where the batch belongs.
        name: The argument.

    Raises:
        TypeError: it is; the message names the argument and the line to write.
    """
    instead = _instead_of(batch)
    if instead:
        raise TypeError(
            f"`{function}({name}={_shown(batch)})`: `{name}` is {kind_of(batch)}. Expected one batch,"
            f" as `training_step` gets it. Write `{line.format(instead)}`."
        )


def kind_of(value: Any) -> str:
    """Return what a value is, for a message: "a `DataLoader`", "the class `Net`"."""
    return f"the class `{value.__name__}`" if isinstance(value, type) else f"a `{_kind(value)}`"


def _shown(value: Any) -> str:
    # tensors, modules and loaders have a long `repr`, or none of use
    short = value is None or isinstance(value, (bool, int, float))
    return (
        value.__name__ if isinstance(value, type) else repr(value) if short else f"<{_kind(value)}>"
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def _instead_of(batch: Any) -> str:
    """Return what to write in place of something that is no batch, "" where it may be one."""
    if isinstance(batch, (Tensor, Mapping, Sequence, Set)) or is_array(batch):
        return ""
    if isinstance(batch, type):
        return f"{batch.__name__}(...)"
    if isinstance(batch, Module):
        return "batch"
    if isinstance(batch, Dataset):
        return "next(iter(DataLoader(dataset, batch_size=4)))"
    if callable(getattr(type(batch), "train_dataloader", None)):  # a data module of Lightning
        return "next(iter(datamodule.train_dataloader()))"
    if isinstance(batch, (DataLoader, Sampler)):
        return "next(iter(loader))"
    if isinstance(batch, Iterable) and _only_leads_to_batches(batch):
        plain = isinstance(batch, Iterator) and not hasattr(batch, "__len__")
        return "next(iterator)" if plain else "next(iter(loader))"
    return ""


def _only_leads_to_batches(source: Iterable[Any]) -> bool:
    """Return whether what can be iterated over holds no data itself, as loaders and iterators do."""
    if isinstance(source, Iterator) and type(source).__module__.startswith("torch.utils.data"):
        return True  # the loader's own, which may hold batches that its workers sent ahead
    ends = list(ends_of(source))
    if any([isinstance(value, Tensor) or is_array(value) for _, value in ends]):
        return False
    leads = any([isinstance(value, (DataLoader, Dataset)) for _, value in ends])
    if leads or isinstance(source, Iterator):
        return True
    deep = [
        value for (before, _), value in ends if before and before[0]
    ]  # not attributes of its own
    opaque = not isinstance(getattr(source, "__dict__", None), dict)  # of another language, perhaps
    return not opaque and not any([isinstance(v, (str, bytes, int, float, list)) for v in deep])
