# SPDX-License-Identifier: Apache-2.0
"""What stands behind a node of the autograd graph."""

from __future__ import annotations

from typing import Any

from lightning_amp_guard import _upstream

__all__ = ["custom_name", "is_composite"]

_OWN = ("torch.", "lightning_amp_guard.")
_GENERATED = "GeneratedBackwardFor_"
_COMPOSITE = ("ScaledDotProduct", "Rnn", "RNN")  # parts of names of operators made of many


def custom_name(node: Any) -> str | None:
    """Return the user's `autograd.Function` or custom operator that made a node, if one did."""
    if node.name().startswith(_GENERATED):
        return str(node.name()).removeprefix(_GENERATED).removesuffix("_defaultBackward")
    function = _upstream.function_of(node)
    if function is None or f"{function.__module__}.".startswith(_OWN):
        return None
    return str(function.__qualname__)


def is_composite(node: Any) -> bool:
    """Return whether a node of torch's own runs several operators, such as a checkpointed block."""
    name, function = node.name(), _upstream.function_of(node)
    own = function is not None and f"{function.__module__}.".startswith("torch.")
    return (own and not name.startswith(_GENERATED)) or any(part in name for part in _COMPOSITE)
