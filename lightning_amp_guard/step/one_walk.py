# SPDX-License-Identifier: Apache-2.0
"""Check, true norm and clipping in one walk over the gradients, for when nobody looks at them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.scale_policy import float32
from lightning_amp_guard.step.lanes import Lane, Stage
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["clip_and_step", "combined_factor", "walkable"]

_EPSILON = float32(1e-6)  # as in torch.nn.utils.clip_grad_norm_
_LEAST_FACTOR = 2.0**-126  # the smallest normal float32: below, bits are lost, then all of it


def walkable(lane: Lane, windows: GradientWindows) -> list[Tensor] | None:
    """Return the lane's gradients if one walk is enough for them, else `None`. Host sync: none.

    They have to carry one state, made by backward passes alone, and be plain float32 tensors:
    whatever is unscaled already, left over from a step, sparse, sharded or complex takes the long way.
    """
    if lane.stage is not Stage.OPEN:
        return None
    if windows.scaling and not all([c.scaled for c in lane.cells if c.has_gradients()]):
        return None
    grads = lane.gradients()
    plain = [g.__class__ is Tensor and g.dtype is torch.float32 for g in grads]
    layouts = [g.layout is torch.strided for g in grads]
    return grads if grads and all(plain) and all(layouts) else None


def combined_factor(norm: float, scale: float, clip: float) -> tuple[float, float]:
    """Return the true norm, and the factor that unscales and clips at once.

    Rounded to float32 wherever torch's `unscale_` and `clip_grad_norm_` round, so that with a power
    of two for a scale the result equals theirs bit for bit.

    Args:
        norm: Total L2 norm of the scaled gradients; finite.
        scale: The scale that they carry.
        clip: Largest true norm; inf for none.

    Example:
        >>> combined_factor(8.0, 4.0, 1.0)
        (2.0, 0.12499994039535522)
    """
    inverse = float32(1.0 / scale)
    true = float32(norm * inverse)
    over = float32(true + _EPSILON)
    coefficient = float32(float32(1.0 / over) * float32(clip))
    return true, float32(min(coefficient, 1.0) * inverse)


def clip_and_step(
    lane: Lane, windows: GradientWindows, clip: float, kwargs: dict[str, Any]
) -> float | None:
    """Unscale, check, clip and step; return the true norm, or `None` if nothing was done.

    The norm of the scaled gradients is the check, the true norm and the factor in one read. A fused
    optimizer of torch's takes the factor as its `grad_scale`; others get one multiply, none if the
    factor is 1. A norm that is not finite decides nothing here: a finite gradient's norm may overflow.
    Nor does a factor too small for float32, where unscaling first and clipping then loses nothing.

    Args:
        lane: The optimizer's lane.
        windows: The windows that the lane belongs to.
        clip: Largest true L2 norm.
        kwargs: For `optimizer.step`.

    Host sync: one.
    """
    grads = walkable(lane, windows)
    if grads is None:
        return None
    norm = torch.nn.utils.get_total_norm(grads).item()
    if not math.isfinite(norm):
        return None
    scale = windows.scaler.get_scale() if windows.scaling else 1.0
    true, factor = combined_factor(norm, scale, clip)
    if factor < _LEAST_FACTOR:
        return None
    windows.note_unscaled(lane)
    if factor != 1.0 and _upstream.takes_grad_scale(lane.optimizer):
        with _upstream.grad_scale(lane.optimizer, 1.0 / factor, grads[0].device):
            lane.optimizer.step(**kwargs)
        return true
    if factor != 1.0:
        _upstream.multiply_(grads, factor)
    lane.optimizer.step(**kwargs)
    return true
