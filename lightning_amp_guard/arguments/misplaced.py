# SPDX-License-Identifier: Apache-2.0
"""What Lightning shows of a callback that stands among the plugins."""

from __future__ import annotations

__all__ = ["as_callback"]


def as_callback(callback: object, plugins: str = "") -> str:
    """Return the `repr` of a callback, which Lightning prints where it stands among the plugins.

    Args:
        callback: The callback.
        plugins: What else the line to write needs, such as "plugins=[SafeAMP()], ".
    """
    name = type(callback).__name__
    return f"<{name}, a callback: write `Trainer({plugins}callbacks=[{name}()])`>"
