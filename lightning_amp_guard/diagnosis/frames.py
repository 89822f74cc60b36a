# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program an operator was called, read off the Python stack."""

from __future__ import annotations

import inspect
import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.utils.checkpoint
from torch.nn import Module

from lightning_amp_guard import _upstream

__all__ = ["Line", "Place", "is_users", "module_names", "place_of_call", "short_name"]

_SKIPPED = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_amp_guard"}
_LONGEST = 72  # of a line of the program, in characters
_CHECKPOINT = torch.utils.checkpoint.__name__
_FUNCTION = torch.autograd.function.__name__
_DIAGNOSIS = __name__.rpartition(".")[0]
_OWN = {__name__, f"{_DIAGNOSIS}.locate.sites", f"{_DIAGNOSIS}.locate.trace"}


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


def place_of_call(names: dict[int, list[str]], *, in_backward: bool) -> Place:
    """Return the place of the operator that is being dispatched. Host sync: none.

    The stack is read outwards, up to the code of this package that runs the step, or, in a backward
    pass, to the call of the engine.
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
        if home == _FUNCTION and frame.f_code.co_name == "apply":
            in_function = True
            function = function or _name_of_function(frame.f_locals.get("cls"))
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


def _name_of_function(kind: Any) -> str:
    home = str(getattr(kind, "__module__", "torch")).partition(".")[0]
    return "" if home in _SKIPPED else str(getattr(kind, "__name__", ""))
