# SPDX-License-Identifier: Apache-2.0
"""What autograd saves of one forward pass for the backward pass, in bytes by dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.counts import stored
from lightning_amp_guard.diagnosis.leaves import leaves_of
from lightning_amp_guard.diagnosis.replay.replay import (
    LossFn,
    autocast,
    device_of,
    on_device,
    training_loss,
    undisturbed,
)

__all__ = ["TRUE_PRECISIONS", "saved_bytes"]

TRUE_PRECISIONS = {
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


class _SavedTensors(_upstream.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what autograd saves; casts of the weights are told from activations.

    Storages are known by weak references, which keep no memory and are never used again.
    """

    def __init__(self, weights: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activations: Counter[torch.dtype] = Counter()
        self.casts = 0
        self._weights = {_storage(weight) for weight in weights}
        self._known = self._weights | {_storage(other) for other in others}
        self._casts: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if args and _is_cast(args[0], out) and _storage(args[0]) in self._weights:
            self._casts.add(_storage(out))
        return out

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor's memory the first time that it is saved."""
        storage = _storage(tensor)
        if storage not in self._known:
            self._known.add(storage)
            size = stored(tensor).untyped_storage().nbytes()
            if storage in self._casts:
                self.casts += size
            else:
                self.activations[tensor.dtype] += size
        return tensor


def saved_bytes(
    module: Module, batch: Any, precision: str, loss_fn: LossFn | None = None
) -> tuple[dict[torch.dtype, int], int]:
    """Measure what autograd saves of one forward pass, and leave the module as it was.

    Parameters, buffers and the batch itself are not counted, memory that several tensors share is
    counted once. What a custom `autograd.Function` keeps as an attribute is not seen.

    Returns:
        Bytes of activations by dtype, and bytes of low precision copies of weights.

    Raises:
        TypeError, ValueError: no loss can be had; see `replay.training_loss`.
    """
    dtype = TRUE_PRECISIONS.get(precision)
    with undisturbed(module):
        batch = on_device(batch, device_of(module))
        if dtype is not None:
            module.zero_grad(set_to_none=True)  # gradients would be converted with their parameters
            module.to(dtype)
            batch = _upstream.map_tensors(lambda t: _cast(t, dtype), batch)
        given = _upstream.tensors_in(batch) + [x for _, x in leaves_of(batch) if _is_tensor(x)]
        saved = _SavedTensors(module.parameters(), [*module.buffers(), *given])
        scope = autocast("32-true" if dtype else precision, device_of(module))
        hooks = saved_tensors_hooks(saved.pack, lambda tensor: tensor)
        eager = torch.compiler.set_stance("force_eager")
        with scope, _default_dtype(dtype), eager, saved, hooks:
            training_loss(module, batch, loss_fn)
    return dict(saved.activations), saved.casts


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(stored(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def _is_cast(source: Any, out: Any) -> bool:
    if not (isinstance(source, Tensor) and isinstance(out, Tensor)):
        return False
    smaller = out.itemsize < source.itemsize and out.shape == source.shape
    return smaller and source.is_floating_point() and out.is_floating_point()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
