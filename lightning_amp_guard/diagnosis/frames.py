# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program an operator was called, read off the Python stack."""

from __future__ import annotations

import inspect
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch.utils.checkpoint
from torch.nn import Module

from lightning_amp_guard import _upstream

__all__ = [
    "Line",
    "Place",
    "first_argument",
    "forward_codes",
    "is_users",
    "module_names",
    "place_of_call",
    "short_name",
]

_SKIPPED = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_amp_guard"}
_LONGEST = 72  # of a line of the program, in characters
_CHECKPOINT = torch.utils.checkpoint.__name__
_FORWARDS = {"forward", "decorate_fwd"}  # the second is `torch.amp.custom_fwd`'s
_DIAGNOSIS = __name__.rpartition(".")[0]
_OWN = {__name__, *[f"{_DIAGNOSIS}.locate.{name}" for name in ("sites", "trace", "modes")]}


class Line(NamedTuple):
    """A line of the user's program: `str()` gives "model.py:12 in forward: x.exp()"."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        return f"{self.where}: {short}" if text else self.where

    @property
    def where(self) -> str:
        """The line without its text: "model.py:12 in forward"."""
        return f"{Path(self.file).name}:{self.number} in {self.function}"


class Place(NamedTuple):
    """Says what is on the Python stack around a call of an operator.

    Args:
        module: The innermost known module's name; `None` where no module is on the stack.
        line: The innermost line of the user's; `None` where there is none.
        function: The name of the user's `autograd.Function` whose forward this is, or "".
        in_function: Whether this is the forward of an `autograd.Function`, torch's own included.
        recomputed: Whether activation checkpointing runs the forward pass again here.
    """

    module: str | None
    line: Line | None
    function: str
    in_function: bool
    recomputed: bool


def module_names(root: Module) -> dict[int, list[str]]:
    """Return every submodule's names by its `id`; shared modules have several.

    The parts that `torch.compile` adds to a name are left out.
    """
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        found = names.setdefault(id(module), [])
        if (short := short_name(name)) not in found:
            found.append(short)
    return names


def short_name(name: str) -> str:
    """Return a name of `named_modules()` without what `torch.compile` adds to it."""
    return ".".join([part for part in name.split(".") if part != "_orig_mod"])


def forward_codes() -> dict[CodeType, type]:
    """Return the `autograd.Function` that each known forward belongs to.

    Without the wrappers that several share, such as `torch.amp.custom_fwd`.
    """
    kinds: list[type] = [torch.autograd.Function]
    found: dict[CodeType, type] = {}
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if codes := _codes_of_forward(kind):
            found[codes[-1]] = kind
    return found


def place_of_call(
    names: dict[int, list[str]], forwards: dict[CodeType, type], *, in_backward: bool
) -> Place:
    """Return the place of the operator that is being dispatched. Host sync: none.

    The stack is read outwards, up to the code of this package that runs the step, or, in a backward
    pass, to the call of the engine.

    Args:
        names: What `module_names` returned.
        forwards: What `forward_codes` returned.
        in_backward: Whether the autograd engine runs.
    """
    module: str | None = None
    line: Line | None = None
    function, in_function, recomputed = "", False, False
    frame = inspect.currentframe()
    while frame is not None and not _is_end(frame, in_backward):
        home = str(frame.f_globals.get("__name__"))
        if module is None:
            module = _module_of(frame, names)
        if line is None and is_users(home):
            code = frame.f_code
            line = Line(code.co_filename, frame.f_lineno, code.co_name)
        if (kind := _function_run_by(frame, forwards)) is not None:
            in_function = True
            function = function or _name_of_function(kind)
        recomputed |= in_backward and home == _CHECKPOINT
        frame = frame.f_back
    return Place(module, line, function, in_function, recomputed)


def _is_end(frame: FrameType, in_backward: bool) -> bool:
    if in_backward and _upstream.runs_backward(frame.f_code):
        return True
    home = str(frame.f_globals.get("__name__"))
    return home.startswith(_DIAGNOSIS) and home not in _OWN


def is_users(home: str) -> bool:
    """Return whether a module of that name is the user's: of no library that a step runs through."""
    root = home.partition(".")[0]
    return root not in _SKIPPED and (root not in sys.stdlib_module_names or root == "__main__")


def _module_of(frame: FrameType, names: dict[int, list[str]]) -> str | None:
    code = frame.f_code
    if code.co_varnames[:1] != ("self",) and "self" not in code.co_freevars + code.co_cellvars:
        return None
    found = names.get(id(frame.f_locals.get("self")))
    return found[0] if found else None


def first_argument(frame: FrameType) -> Any:
    """Return the value of a call's first argument, also among `*args`; `None` without one."""
    code = frame.f_code
    if not (code.co_argcount or code.co_flags & inspect.CO_VARARGS):
        return None
    name = code.co_varnames[0 if code.co_argcount else code.co_kwonlyargcount]
    value = frame.f_locals.get(name)
    return value if code.co_argcount else next(iter(value or ()), None)


def _function_run_by(frame: FrameType, forwards: dict[CodeType, type]) -> type | None:
    """Return the `autograd.Function` whose forward this frame runs, a wrapper of it included.

    A `ctx` tells which class it is. Functions with `setup_context` have none: they are found by their
    code, which classes that inherit a forward share.
    """
    code = frame.f_code
    kind: type | None = forwards.get(code)
    if kind is None and code.co_name not in _FORWARDS:
        return None
    made_for: type | None = _upstream.function_of(first_argument(frame))
    return made_for if code in _codes_of_forward(made_for) else kind


def _codes_of_forward(kind: type | None) -> list[CodeType]:
    """Return the code of a function's forward, wrappers first."""
    forward, codes = getattr(kind, "forward", None), []
    while forward is not None:
        codes += [forward.__code__] if hasattr(forward, "__code__") else []
        forward = getattr(forward, "__wrapped__", None)
    return codes


def _name_of_function(kind: Any) -> str:
    home = str(getattr(kind, "__module__", "torch")).partition(".")[0]
    return "" if home in _SKIPPED else str(getattr(kind, "__name__", ""))
