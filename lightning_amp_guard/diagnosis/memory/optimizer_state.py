# SPDX-License-Identifier: Apache-2.0
"""How many bytes an optimizer keeps beside the parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_amp_guard import _upstream

__all__ = ["ParamSize", "kind_of", "state_bytes"]

# Tensors of the parameter's shape and dtype in `optimizer.state` after a step, per parameter, as
# torch.optim makes them (the scalars `step`, `eta`, `mu` are left out); LAMB (arXiv 1904.00962),
# LARS (arXiv 1708.03888) and Lion (arXiv 2302.06675) as published. L-BFGS: twice its history of
# 100, the direction and the last gradient.
_COPIES = {
    **{"sgd": 0, "sgdmomentum": 1, "momentum": 1, "adagrad": 1, "rmsprop": 1, "asgd": 1},
    **{"lion": 1, "muon": 1, "lars": 1, "adam": 2, "adamw": 2, "nadam": 2, "radam": 2},
    **{"adamax": 2, "adadelta": 2, "sparseadam": 2, "lamb": 2, "rprop": 2, "amsgrad": 3},
    "lbfgs": 202,
}
# Of the group's settings: those that add one copy each where they are set.
_ADDING = ("momentum", "amsgrad", "centered")
_EIGHT_BIT = ("adam", "adamw", "lion", "sgd", "adagrad", "rmsprop", "lars", "lamb")
_BLOCK = 256  # 8-bit states carry a float32 maximum per block (arXiv 2110.02861, section 2.1)
_LEAST_8BIT = 4096  # smaller parameters keep float32 state


class ParamSize(NamedTuple):
    """Shape and bytes per element of one trained parameter."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def kind_of(optimizer: Any) -> str:
    """Return the kind of optimizer that a name, a class or an instance stands for.

    Raises:
        ValueError: it is none of the known kinds, which the message lists.
        TypeError: it is neither a string nor an optimizer.
    """
    if isinstance(optimizer, str):
        names = [optimizer]
    else:
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        if not issubclass(cls, Optimizer):
            raise TypeError(
                f"`optimizer={optimizer!r:.80}`: expected a name, or an optimizer of torch's kind."
            )
        names = [base.__name__ for base in cls.__mro__[: cls.__mro__.index(Optimizer)]]
    for name in names:
        kind = re.sub(r"[^a-z0-9]", "", name.lower())
        kind = f"{kind.replace('8bit', '')}8bit" if "8bit" in kind else kind
        if kind in _known():
            return kind
    shown = optimizer if isinstance(optimizer, str) else names[0]
    raise ValueError(
        f"`optimizer={shown!r}`: expected one of {', '.join(map(repr, _known()))}. For another one"
        " pass an instance that has stepped once, so that its state can be measured."
    )


def state_bytes(optimizer: Any, params: list[ParamSize], itemsize: Any) -> int:
    """Return the bytes of an optimizer's state after its first step.

    Args:
        optimizer: A name, an optimizer class, or an instance. The state of an instance that has
            stepped is measured; before that its groups and settings tell.
        params: The trained parameters, for names and classes.
        itemsize: Gives the bytes per element of an instance's parameter.
    """
    if isinstance(optimizer, (str, type)):
        return _by_kind(kind_of(optimizer), params, {})
    optimizer = _upstream.unwrap_optimizer(optimizer)
    if isinstance(optimizer, Optimizer) and (kept := list(optimizer.state.values())):
        return _measured(kept)
    kind, total = kind_of(optimizer), 0
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        sizes = [ParamSize(tuple(p.shape), itemsize(p)) for p in _upstream.as_plain(trained)]
        total += _by_kind(kind, sizes, group)
    return total


def _known() -> list[str]:
    return [*_COPIES, "adafactor", *[f"{kind}8bit" for kind in _EIGHT_BIT]]


def _by_kind(kind: str, params: Iterable[ParamSize], group: Mapping[str, Any]) -> int:
    if kind == "adafactor":
        return sum([_factored(size) for size in params])
    if kind.endswith("8bit"):
        name = kind.removesuffix("8bit")
        copies = max(1, _COPIES[name])  # 8-bit SGD is one with momentum
        return sum([copies * _in_8bit(size.numel) for size in params])
    if kind == "lbfgs" and group:
        copies = 2 * int(group["history_size"]) + 2
    elif kind == "muon":
        copies = 1  # always with momentum
    else:
        copies = _COPIES[kind] + sum([bool(group.get(name)) for name in _ADDING])
    return copies * sum([size.numel * size.itemsize for size in params])


def _factored(size: ParamSize) -> int:
    # A sum per row and one per column of each matrix (arXiv 1804.04235, section 3).
    if len(size.shape) < 2:
        return size.numel * size.itemsize
    *batch, rows, columns = size.shape
    return math.prod(batch) * (rows + columns) * size.itemsize


def _in_8bit(numel: int) -> int:
    return 4 * numel if numel < _LEAST_8BIT else numel + 4 * math.ceil(numel / _BLOCK)


def _measured(states: list[Any]) -> int:
    tensors = _upstream.as_plain(_upstream.tensors_in(states))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
