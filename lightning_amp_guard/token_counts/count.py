# SPDX-License-Identifier: Apache-2.0
"""How many valid tokens a batch holds, where nobody says how to count them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["AVERAGED", "IGNORED", "count_labels", "count_meant", "is_whole"]

IGNORED = -100  # the `ignore_index` that torch.nn.CrossEntropyLoss has by default
AVERAGED = (
    "`{owner}(normalize_gradients=True)`: the loss of `training_step` is a mean (its last operation"
    " is `{node}`), so its gradients, divided by the window's tokens as well, are too small by the"
    " number of tokens. Expected the sum over the valid tokens. Write"
    ' `cross_entropy(..., reduction="sum")`, or multiply the mean by the batch\'s number of valid'
    " tokens before it is returned."
)


def count_labels(batch: Any) -> Tensor | int | None:
    """Return how many labels are not -100, or `None` where a batch holds no integer labels.

    `batch["labels"]`, `batch.labels`, or the second element of a tuple or list. Host sync: none.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if labels is None and isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[1]
    if not isinstance(labels, Tensor) or not is_whole(labels):
        return None
    if not labels.dtype.is_signed:  # holds no -100, and comparing with it would wrap around
        return labels.numel()
    return (labels != IGNORED).sum()


def count_meant(count: Any) -> str:
    """Return the argument that was probably meant by a `count` that is no function."""
    if isinstance(count, bool):
        return f"normalize_gradients={count}"
    key = count if isinstance(count, str) else "labels"
    return f"count=lambda batch: (batch[{key!r}] != {IGNORED}).sum()"


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor holds whole numbers."""
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
