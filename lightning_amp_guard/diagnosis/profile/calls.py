# SPDX-License-Identifier: Apache-2.0
"""Which operators a step calls: in which dtype, from which line, and what autocast made of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.frames import first_argument, is_users

__all__ = ["Call", "CallLog", "Place", "recorded", "short"]

_CASTS = {"aten::_to_copy", "aten::copy_"}


@dataclass(frozen=True)
class Place:
    """Says where in the user's program something happens.

    Args:
        source: `file.py:12`; empty where no line of the user's is on the stack.
        module: The innermost module's name as in `named_modules()`; `None` outside of any.
    """

    source: str = ""
    module: str | None = None

    def __str__(self) -> str:
        inside = f" in {self.module!r}" if self.module else ""
        return f"{self.source or 'an unknown line'}{inside}"


@dataclass(frozen=True)
class Call:
    """One call of one operator.

    Args:
        op: The operator with its overload, as `aten::mm.out`.
        dtype: What it computes in, as `float16`; `float32->float16` for a cast.
        takes: The dtypes of its floating inputs.
        device: The device type of its tensors.
        place: Where it was called; empty in torch's own backward pass.
        function: The torch function that the user called, as `linear`; empty where none was.
        autocast: Whether autocast was on for the device of the run when that function was called.
        backward: Whether it ran in the backward pass.
        view: Whether it only looks at its input's memory.
    """

    op: str
    dtype: str
    takes: tuple[torch.dtype, ...]
    device: str
    place: Place
    function: str
    autocast: bool
    backward: bool
    view: bool

    @property
    def name(self) -> str:
        """The operator without its overload, as the profiler calls it."""
        return self.op.partition(".")[0]

    @property
    def is_cast(self) -> bool:
        """Whether it converts between floating dtypes."""
        return "->" in self.dtype


@dataclass
class CallLog:
    """Collects the calls of one step; it keeps no tensors.

    Args:
        module: Whose submodules give the places their names.
        device: The device type whose autocast state is looked at.
    """

    module: Module
    device: str
    calls: list[Call] = field(default_factory=list)
    functions: dict[type, Place] = field(default_factory=dict)
    backward: bool = False
    function: str = ""
    autocast: bool = False

    def __post_init__(self) -> None:
        self._names = {id(part): name for name, part in self.module.named_modules()}

    def see(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Note one call. Host sync: none."""
        takes, gives = _upstream.tensors_in(inputs), _upstream.tensors_in(outputs)
        call = Call(
            op=func.name(),
            dtype=_dtype(func.name().partition(".")[0], takes, gives),
            takes=tuple(dict.fromkeys(t.dtype for t in takes if t.is_floating_point())),
            device=next((t.device.type for t in [*takes, *gives]), self.device),
            place=self._place(),
            function=self.function,
            autocast=self.autocast,
            backward=self.backward,
            view=func.is_view,
        )
        self.calls.append(call)

    def _place(self) -> Place:
        source, module = "", None
        frame = inspect.currentframe()
        while frame is not None and not _is_driver(frame):
            value = first_argument(frame)
            if module is None and id(value) in self._names:
                module = self._names[id(value)]
            if (function := _upstream.function_of(value)) is not None:
                self.functions.setdefault(function, _written(function))
            if not source and is_users(str(frame.f_globals.get("__name__"))):
                source = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return Place(source, module)

    def see_graph(self, loss: Tensor) -> None:
        """Note the `autograd.Function` classes in the graph of a loss."""
        known, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in known:
                continue
            known.add(node)
            if (function := _upstream.function_of(node)) is not None:
                self.functions.setdefault(function, _written(function))
            todo += [parent for parent, _ in node.next_functions]


class _Functions(TorchFunctionMode):
    """Remembers what the user called, since autocast's state is hidden from operators below it."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        before = log.function, log.autocast
        log.function = str(getattr(func, "__name__", ""))
        log.autocast = torch.is_autocast_enabled(log.device)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            log.function, log.autocast = before


class _Operators(_upstream.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator that is run to the log."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.log.see(func, (args, kwargs), outputs)
        return outputs


@contextmanager
def recorded(log: CallLog) -> Iterator[None]:
    """Let `log` see every operator that runs inside, forward and backward."""
    with _Functions(log), _Operators(log):
        yield


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str, takes: list[Tensor], gives: list[Tensor]) -> str:
    if name in _CASTS and takes and gives:
        before, after = takes[-1].dtype, gives[0].dtype
        if before != after and before.is_floating_point and after.is_floating_point:
            return f"{short(before)}->{short(after)}"
    floating = [t for t in [*gives, *takes] if t.is_floating_point()]
    found = floating or gives or takes
    return short(found[0].dtype) if found else "-"


def _is_driver(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("lightning_amp_guard.diagnosis") and name != __name__


def _written(function: Any) -> Place:
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    return Place(f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "")
