# SPDX-License-Identifier: Apache-2.0
"""Reports as dictionaries that strict JSON can hold."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["strict"]


def strict(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the dictionary with `None` for each inf and NaN, which JSON does not have.

    Example:
        >>> strict({"loss": float("nan"), "steps": 2})
        {'loss': None, 'steps': 2}
    """
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in flat.items()
    }
