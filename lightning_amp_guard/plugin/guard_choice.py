# SPDX-License-Identifier: Apache-2.0
"""Which guards a fit has: those that the user passed, and one of each other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_amp_guard.guards._base import GuardCore

__all__ = ["choose_guards"]


def choose_guards(
    callbacks: Iterable[object],
    kinds: tuple[type[GuardCore], ...],
    fail: Callable[[str], Exception],
) -> list[GuardCore]:
    """Return one guard of each kind, in their order, and then those of other kinds.

    Args:
        callbacks: The Trainer's callbacks.
        kinds: The guards that the plugin supplies where the user passed none.
        fail: Makes the error.

    Raises:
        MisconfigurationException: Two guards of one kind were passed.
    """
    passed = [cb for cb in callbacks if isinstance(cb, GuardCore)]
    chosen: list[GuardCore] = []
    for kind in kinds:
        own = [cb for cb in passed if isinstance(cb, kind)]
        chosen += _at_most_one(own, fail) or [kind()]
    others = [cb for cb in passed if not isinstance(cb, kinds)]
    for name in dict.fromkeys(cb.name for cb in others):
        chosen += _at_most_one([cb for cb in others if cb.name == name], fail)
    return chosen


def _at_most_one(own: list[GuardCore], fail: Callable[[str], Exception]) -> list[GuardCore]:
    if len(own) > 1:
        raise fail(
            f"`Trainer(callbacks=...)` holds {len(own)} guards of the kind `{own[0].name}`."
            " Expected at most one, since a rule is enforced once. Keep the one you mean."
        )
    return own
