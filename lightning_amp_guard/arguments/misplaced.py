# SPDX-License-Identifier: Apache-2.0
"""What Lightning shows or calls where a class, or an object, stands in a place that is not its own."""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

__all__ = ["PluginClass", "RefusedOnClass", "SilentOnClass", "as_callback"]


def as_callback(callback: object, plugins: str = "") -> str:
    """Return the `repr` of a callback, which Lightning prints where it stands among the plugins.

    Args:
        callback: The callback.
        plugins: What else the line to write needs, such as "plugins=[SafeAMP()], ".
    """
    name = type(callback).__name__
    return f"<{name}, a callback: write `Trainer({plugins}callbacks=[{name}()])`>"


class PluginClass(ABCMeta):
    """The class of plugin classes, whose `repr` Lightning prints where one stands for its instance.

    Beside an `ABC` it can be a base class, as an ordinary class can.
    """

    def __repr__(cls) -> str:
        name = cls.__name__
        return f"{super().__repr__()} [a class: write `Trainer(plugins=[{name}()])`]"


class _OnInstances:
    """A Lightning hook of instances, and what happens where Lightning calls it on the class.

    It does so, without a look at what it calls, where the class itself stands among the callbacks.

    Args:
        hook: The hook; without one, on instances, that of the next base class.
    """

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        self.hook = hook

    def __set_name__(self, owner: type, name: str) -> None:
        self.home, self.name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        if self.hook is not None:
            found = self.hook.__get__(instance, owner)
        else:
            found = getattr(super(self.home, owner if instance is None else instance), self.name)
        if instance is not None:
            return found

        @functools.wraps(found)
        def called(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], owner):
                return found(*args, **kwargs)
            return self.on_class(owner)

        return called

    def on_class(self, owner: type) -> None:
        """Act on a call without an instance."""


class RefusedOnClass(_OnInstances):
    """A hook that says what is wrong where Python would name a missing `pl_module`."""

    def on_class(self, owner: type) -> None:
        """Refuse the class.

        Raises:
            TypeError: Always.
        """
        for name in ("log", "log_dict"):  # Lightning hangs the module's own on every callback
            if name in vars(owner):
                delattr(owner, name)
        raise TypeError(
            f"`Trainer(callbacks=[{owner.__name__}])`: `{owner.__name__}` is a class. Expected an"
            f" instance. Write `Trainer(callbacks=[{owner.__name__}()])`."
        )


class SilentOnClass(_OnInstances):
    """A hook that is passed over on the class: `on_exception`, after the refusal."""
