# SPDX-License-Identifier: Apache-2.0
"""A module hook that stays with the one module it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["InertHook"]


class InertHook:
    """A hook that copies and pickles of its module do not take along: theirs does nothing.

    Args:
        call: What the hook does; its result is dropped, so that no value changes.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        """Run the hook and return nothing."""
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return InertHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """Stand in for a hook in a copy."""
