# SPDX-License-Identifier: Apache-2.0
"""Modules that run in float32 with autocast off, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_amp_guard import _upstream

__all__ = ["Float32Scopes", "select", "with_module"]

_HALF = (torch.float16, torch.bfloat16)


def select(names: Sequence[str], patterns: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the names that `patterns` select, and the patterns that match nothing.

    Args:
        names: Module names as `named_modules()` gives them.
        patterns: Names or `fnmatch` patterns; one that begins with "!" takes names away again.

    Example:
        >>> sorted(select(["encoder", "encoder.a", "head"], ["*", "!encoder.*"])[0])
        ['encoder', 'head']
    """
    kept: set[str] = set()
    gone: set[str] = set()
    idle: list[str] = []
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        (gone if pattern.startswith("!") else kept).update(hits)
        if not hits:
            idle.append(pattern)
    return kept - gone, idle


def with_module(patterns: Sequence[str], name: str) -> list[str]:
    """Return the patterns that select the module too, beside what they select so far.

    Patterns that take the module out are left out.

    Example:
        >>> with_module(["encoder"], "head"), with_module(["*", "!head"], "head")
        (['encoder', 'head'], ['*'])
    """
    kept = [p for p in patterns if not (p.startswith("!") and fnmatchcase(name, p[1:]))]
    return kept if name in select([name], kept)[0] else [*kept, name]


class _Scope:
    """Enters an autocast context around each call of one module; calls may nest."""

    def __init__(
        self,
        context: Callable[[], AbstractContextManager[Any]],
        device: str,
        was_on: _Calls,
        cast: bool,
    ) -> None:
        self.context, self.device, self.was_on, self.cast = context, device, was_on, cast
        self.entered: list[AbstractContextManager[Any]] = []

    def before(self, module: Module, args: Any, kwargs: Any) -> Any:
        if self.cast:
            self.was_on.append(torch.is_autocast_enabled(self.device))
        # "again" only where the chosen module around it has switched it off
        back = self.cast or (any(self.was_on) and not torch.is_autocast_enabled(self.device))
        context = self.context() if back else nullcontext()
        context.__enter__()
        self.entered.append(context)
        return _upstream.map_tensors(_to_float32, (args, kwargs)) if self.cast else None

    def after(self, module: Module, args: Any, output: Any) -> None:
        if self.entered:
            self._leave()

    def _leave(self) -> None:
        self.entered.pop().__exit__(None, None, None)
        if self.cast:
            self.was_on.pop()

    def abandon(self) -> None:
        """Leave what a KeyboardInterrupt left entered: torch calls no hooks then."""
        with torch.autocast(self.device, enabled=False):  # gives back the state of now
            while self.entered:
                self._leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "entered": []}


class _Calls(list[bool]):
    """What the calls under way found, shared by all scopes of a module; copies start empty."""

    def __reduce__(self) -> tuple[type[_Calls], tuple[()]]:
        return _Calls, ()


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


class Float32Scopes:
    """Runs chosen modules in float32: autocast off, half precision inputs cast, in forward only.

    Hooks rather than replaced methods, so that copies of the module work on their own weights.
    A module that a "!" pattern takes out of a chosen one runs under autocast again.

    Args:
        module: The module to search.
        patterns: See `select`.
        device: Device type of the autocast to switch off.
        autocast: Makes the context to return to.

    Raises:
        ValueError: A pattern matches no module, or a chosen module is compiled already.
    """

    def __init__(
        self,
        module: Module,
        patterns: Sequence[str],
        device: str,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._handles: list[RemovableHandle] = []
        self._installed: list[_Scope] = []
        self.chosen: dict[str, Module] = {}
        if not patterns:
            return
        modules = {_upstream.plain_name(n): m for n, m in module.named_modules() if n}
        chosen, idle = select(list(modules), patterns)
        if idle:
            near = get_close_matches(idle[0].removeprefix("!"), list(modules), 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"the pattern {idle[0]!r} matches no module. Expected names as in"
                f" `model.named_modules()`, such as {', '.join(map(repr, list(modules)[:4]))}.{meant}"
            )
        self._refuse_compiled(module, modules, chosen)
        self.chosen = {name: modules[name] for name in sorted(chosen)}
        excluded = select(list(modules), [p[1:] for p in patterns if p.startswith("!")])[0]
        off = _AutocastOff(device)
        was_on = _Calls()  # was autocast on where a chosen module was entered?
        for name, part in modules.items():
            if name in chosen:
                self._install(part, _Scope(off, device, was_on, cast=True))
            elif name in excluded and any(name.startswith(f"{parent}.") for parent in chosen):
                self._install(part, _Scope(autocast, device, was_on, cast=False))

    @staticmethod
    def _refuse_compiled(root: Module, modules: dict[str, Module], chosen: set[str]) -> None:
        compiled = {name for name, m in modules.items() if _upstream.is_compiled(m)}
        if _upstream.is_compiled(root):
            compiled |= chosen
        for name in sorted(chosen):
            inside = next((c for c in compiled if f"{name}.".startswith(f"{c}.")), None)
            if inside is not None:
                raise ValueError(
                    f"the module {name!r} is compiled already ({inside!r}): its graph would keep the"
                    " precision it was traced with. Choose it before compiling, or write"
                    " `with torch.autocast(device, enabled=False):` inside its forward."
                )

    def _install(self, part: Module, scope: _Scope) -> None:
        self._installed.append(scope)
        self._handles += [
            part.register_forward_pre_hook(scope.before, prepend=True, with_kwargs=True),
            part.register_forward_hook(scope.after, always_call=True),
        ]

    def remove(self) -> None:
        """Take every hook out again."""
        for handle in self._handles:
            handle.remove()
        for scope in self._installed:
            scope.abandon()
        self._handles, self._installed = [], []


class _AutocastOff:
    """Makes contexts with autocast off."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, enabled=False)
