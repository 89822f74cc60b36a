# SPDX-License-Identifier: Apache-2.0
"""Everything of a module that one replayed step may change, remembered and put back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import Dataset

from lightning_amp_guard import _upstream

__all__ = ["Snapshot", "items_of"]

# Objects of these packages (a Trainer, an optimizer, a process group) are not a module's state.
_FOREIGN = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "numpy"}
_STATELESS = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, Dataset),
)


class Snapshot:
    """Remembers what a step may change in a module, and puts it back, identities included.

    It follows the attributes of the module and of all it holds: submodules (hidden ones in lists
    too), containers, tensors, arrays, random generators and objects of the user's own classes. Left
    alone are data sets and the objects of installed packages (optimizers, the Trainer, a logger's
    connection), unless they are modules.
    Memory: one copy of every tensor reached, on its device, until the snapshot is dropped.

    Args:
        root: The module.

    Raises:
        ValueError: a parameter or buffer is not initialized yet (`LazyLinear` and its kind).
    """

    def __init__(self, root: Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._known: dict[int, Any] = {}  # the objects too, so that no `id` is used again
        self.devices: set[torch.device] = set()
        todo: list[Any] = [root]
        while todo:
            value = todo.pop()
            if isinstance(value, _STATELESS) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            todo += self._remember(value)

    def restore(self) -> None:
        """Put everything back, gradients before the tensors whose they are (dtypes must agree)."""
        for undo in reversed(self._undo):
            undo()

    def _remember(self, value: Any) -> list[Any]:
        if isinstance(value, Module):
            self._undo.append(items_of(vars(value)))
            return list(vars(value).values())
        if isinstance(value, Tensor):
            return self._remember_tensor(value)
        if isinstance(value, dict):
            self._undo.append(items_of(value))
            return [*value.keys(), *value.values()]
        if isinstance(value, (list, set, deque)):
            self._undo.append(_elements_of(value))
            return list(value)
        if isinstance(value, (tuple, frozenset)):
            return list(value)
        if (undo := _state_of(value)) is not None:
            self._undo.append(undo)
            return []
        if _is_plain_object(value):
            self._undo.append(items_of(vars(value)))
            return list(vars(value).values())
        return []

    def _remember_tensor(self, tensor: Tensor) -> list[Any]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                "A parameter or buffer of the module is not initialized yet. Expected tensors with"
                " a shape. Most likely the module is lazy (`LazyLinear`) and has not seen a batch."
                " Run it once before: `module(x)`."
            )
        self.devices.add(tensor.device)
        grad = tensor.grad if tensor.is_leaf else None
        self._undo.append(_tensor_as_it_is(tensor, grad))
        return [grad, getattr(tensor, "__dict__", None)]


def items_of(found: dict[Any, Any]) -> Callable[[], None]:
    """Return what puts a dict's items back, in the same dict and the same order."""
    saved = dict(found)

    def undo() -> None:
        same = len(found) == len(saved) and all(
            [a is b and found[a] is saved[b] for a, b in zip(found, saved, strict=True)]
        )
        if not same:
            found.clear()
            found.update(saved)

    return undo


def _elements_of(found: list[Any] | set[Any] | deque[Any]) -> Callable[[], None]:
    saved = list(found)

    def undo() -> None:
        if [id(value) for value in found] == [id(value) for value in saved]:
            return
        found.clear()
        if isinstance(found, set):
            found.update(saved)
        else:
            found.extend(saved)

    return undo


def _tensor_as_it_is(tensor: Tensor, grad: Tensor | None) -> Callable[[], None]:
    memory = tensor.data  # shares the memory, not the version counter: graphs of others stay valid
    values, requires_grad, node = tensor.detach().clone(), tensor.requires_grad, tensor.grad_fn
    hooks = _upstream.tensor_hooks(tensor)

    def undo() -> None:
        if tensor.grad_fn is not node:
            tensor.detach_()  # an in-place operation has made it part of the replayed graph
        if tensor.is_sparse:
            tensor.data = values  # sparse tensors grow out of place
        else:
            if _place(tensor) != _place(memory):
                tensor.data = memory
            with torch.inference_mode(tensor.is_inference()):
                memory.copy_(values)
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
        _upstream.put_tensor_hooks(tensor, hooks)

    return undo


def _place(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or hasattr(tensor, "_local_tensor"):
        return None
    where = (tensor.data_ptr(), tensor.storage_offset())
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), where)


def _state_of(value: Any) -> Callable[[], None] | None:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _void(value.set_state(state))
    if isinstance(value, random.Random):
        kept = value.getstate()
        return lambda: value.setstate(kept)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return _array_as_it_is(value)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, numpy.random.RandomState):
        before = value.get_state()
        return lambda: _void(value.set_state(before))
    return None


def _array_as_it_is(array: Any) -> Callable[[], None]:
    values = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = values

    return undo


def _void(_result: object) -> None:
    """Drop a result, for callables that must return nothing."""


def _is_plain_object(value: Any) -> bool:
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    own = type(value).__module__.partition(".")[0]
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not roots & _FOREIGN
        and own not in sys.stdlib_module_names
        and not _is_installed(own)
    )


def _is_installed(package: str) -> bool:
    path = str(getattr(sys.modules.get(package), "__file__", None))
    return "site-packages" in path or "dist-packages" in path
