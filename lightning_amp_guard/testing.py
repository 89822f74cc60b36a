# SPDX-License-Identifier: Apache-2.0
"""Plants inf, NaN, overflow and underflow on purpose, to test how training copes."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_amp_guard import _upstream

__all__ = ["Direction", "Fault", "Plant", "plant"]

Fault: TypeAlias = Literal["inf", "nan", "overflow", "underflow"]
Direction: TypeAlias = Literal["forward", "backward"]
When: TypeAlias = "int | Container[int] | Callable[[int], bool]"

_VALUES = {"inf": float("inf"), "nan": float("nan"), "overflow": 2.0**17}
# The largest float16, below 2**16, times this is below 2**-25, half of the smallest one.
_VANISHING = 2.0**-42


class _PlantedFault(torch.autograd.Function):
    """Identity, but for one direction."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, fault: str, direction: str) -> Tensor:
        ctx.fault = fault if direction == "backward" else None
        return _spoiled(values, fault) if direction == "forward" else values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.fault is None else _spoiled(grad, ctx.fault)), None, None


def _spoiled(values: Tensor, fault: str) -> Tensor:
    """Return a copy that underflows as a whole, or whose first element is the fault."""
    if fault == "underflow":
        return values * _VANISHING
    first = torch.zeros_like(values, dtype=torch.bool, memory_format=torch.contiguous_format)
    first.view(-1)[:1] = True
    # through a tensor: `masked_fill` refuses a Python number that float16 cannot hold
    value = torch.tensor(_VALUES[fault], dtype=torch.float32, device=values.device)
    return torch.where(first, value.to(values.dtype), values)


class Plant:
    """A planted fault; see `plant`, which makes it.

    Attributes:
        calls: Calls of the module in training mode so far; a recomputation is not another call.
        planted: How many of them were given the fault.
    """

    def __init__(self, module: Module, fault: Fault, direction: Direction, at: When) -> None:
        self.calls = 0
        self.planted = 0
        self._fault, self._direction, self._at = fault, direction, at
        self._step: list[bool] = []  # decisions that a recomputation may ask for again
        self._recomputing = False
        # first of all hooks: what else looks at the module's output sees the fault as its own
        self._handle: RemovableHandle | None = module.register_forward_hook(
            self._after, prepend=True
        )

    def remove(self) -> None:
        """Take the fault away; harmless when it is gone."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _after(self, module: Module, args: Any, output: Any) -> Any:
        if not module.training or not self._due():
            return output
        spoil = _First(self._fault, self._direction)
        output = _upstream.map_tensors(spoil, output)
        if not spoil.found:
            raise ValueError(
                f"`plant(...)`: the module {type(module).__name__} returned no floating point tensor."
                " Expected one, to plant the fault in. Choose the module that makes the values."
            )
        return output

    def _due(self) -> bool:
        """Return whether this call gets the fault, the same as before where it is recomputed."""
        if _upstream.inside_backward():
            self._recomputing = True
            return self._step.pop() if self._step else False
        if self._recomputing:
            self._step, self._recomputing = [], False
        due = _is_due(self._at, self.calls)
        self.calls += 1
        self.planted += due
        self._step = [*self._step[-_KEPT:], due]
        return due


_KEPT = 1023  # calls within one step that a recomputation can tell apart


class _First:
    """Plants the fault in the first floating point tensor that it is given."""

    def __init__(self, fault: str, direction: str) -> None:
        self.fault, self.direction, self.found = fault, direction, False

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.found or not tensor.is_floating_point():
            return tensor
        self.found = True
        planted: Tensor = _PlantedFault.apply(tensor, self.fault, self.direction)  # type: ignore[no-untyped-call]
        return planted


def _is_due(at: When, call: int) -> bool:
    if isinstance(at, int):
        return call == at
    return bool(at(call)) if callable(at) else call in at


def plant(
    model: Module,
    where: str | Module,
    fault: Fault,
    *,
    direction: Direction = "forward",
    at: When = 0,
) -> Plant:
    """Make a module of `model` go wrong on purpose, until `remove()` or the end of the `with` block.

    To test alarms, skips and resumes without absurd learning rates. The module's first floating
    point output (in the backward pass: the gradient of it) is replaced by a copy with the fault; its
    weights, the random state and other modules stay as they are. In evaluation mode nothing
    is planted. With checkpointed blocks the recomputation repeats the fault of its call (the last
    call of a step is recomputed first).

    Args:
        model: The module or LightningModule that is trained.
        where: The name as in `model.named_modules()`, "" for the model itself; or the module.
        fault: "inf" and "nan" stand in the first element; "overflow" puts 2**17 there, which is
            inf in float16 and finite in bfloat16 and float32; "underflow" multiplies every element by
            2**-42, which makes 0 of everything in float16, and of nothing in float32.
        direction: "forward" plants it in what the module returns, "backward" in the gradient that
            its backward pass makes (a scaled one, where losses are scaled).
        at: Which of the module's calls in training mode, from 0: a number, a collection such as
            `{3, 5}` or `range(3, 6)`, or a function of the number.

    Returns:
        The `Plant`, a context manager. `calls` counts the module's calls, `planted` the faults.

    Raises:
        ValueError: No such module, fault or direction, a negative `at`; or, at the call, the module
            returns no floating point tensor.
        TypeError: `at` is no number, collection or function.

    Host sync: none.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with plant(model, "0", "nan", at=1) as planted:
        ...     [bool(model[0](torch.ones(2)).isfinite().all()) for _ in range(3)]
        [True, False, True]
        >>> planted.planted
        1
    """
    for name, value, legal in (
        ("fault", fault, get_args(Fault)),
        ("direction", direction, get_args(Direction)),
    ):
        if value not in legal:
            expected = ", ".join(map(repr, legal))
            raise ValueError(f"`plant({name}={value!r})`: expected one of {expected}.")
    _check_at(at)
    return Plant(_find(model, where), fault, direction, at)


def _check_at(at: Any) -> None:
    expected = (
        "expected a number of a call from 0, a collection of numbers such as `range(3, 6)`, or a"
        " function of the number."
    )
    legal = isinstance(at, int) or callable(at) or hasattr(at, "__contains__")
    if isinstance(at, (bool, str, bytes)) or not legal:
        raise TypeError(f"`plant(at={at!r})`: {expected}")
    if isinstance(at, int) and at < 0:
        raise ValueError(f"`plant(at={at!r})`: {expected} Calls are not counted from the end.")


def _find(model: Module, where: str | Module) -> Module:
    modules = {_upstream.plain_name(name): module for name, module in model.named_modules()}
    found = modules.get(where) if isinstance(where, str) else where
    if found is None or not any(found is module for module in modules.values()):
        shown = ", ".join(repr(name) for name in list(modules)[1:5])
        wanted = repr(where) if isinstance(where, str) else type(where).__name__
        raise ValueError(
            f"`plant(where={wanted})`: the model has no such module. Expected a name as in"
            f" `model.named_modules()`, such as {shown}, or one of its modules."
        )
    if _upstream.is_compiled(found):
        raise ValueError(
            f"`plant(where=...)`: the module {type(found).__name__} is compiled. Expected one that is"
            " not: hooks do not reach into its graph. Plant the fault before compiling."
        )
    return found
