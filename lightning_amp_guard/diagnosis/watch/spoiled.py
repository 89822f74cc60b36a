# SPDX-License-Identifier: Apache-2.0
"""What a module itself holds that is not finite."""

from __future__ import annotations

from torch import nn

from lightning_amp_guard import _upstream

__all__ = ["nan_buffers", "nonfinite_parameters"]

_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def nonfinite_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the module's own parameters that hold inf or NaN. Host sync: one for each."""
    own = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
    return tuple(n for n, p in own.items() if not _upstream.as_plain([p])[0].isfinite().all())


def nan_buffers(module: nn.Module) -> tuple[str, ...]:
    """Return the module's own buffers that hold NaN; inf may be meant, as in a mask.

    Statistics that batch normalization only writes to while it trains are not looked at.
    Host sync: one for each.
    """
    if module.training and isinstance(module, _STATISTICS):
        return ()
    own = {n: b.detach() for n, b in module.named_buffers(recurse=False) if b.is_floating_point()}
    return tuple(n for n, b in own.items() if _upstream.as_plain([b])[0].isnan().any())
