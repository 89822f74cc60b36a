# SPDX-License-Identifier: Apache-2.0
"""Counting what a step costs: tensor ops, host reads, walks over gradients, Python calls, memory."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CAST", "WALK", "WARM", "Meter", "Ops", "PeakBytes", "PythonCalls", "host_reads"]

WARM = 6  # the batch that is counted: caches are filled, optimizer state exists
WALK = "aten._amp_foreach_non_finite_check_and_unscale_.default"
CAST = "aten._to_copy.default"
# What makes the host wait for a device; `tolist` and `numpy` do not pass the dispatcher.
READING_OPS = (
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten.nonzero.default",
)
READING_METHODS = ("tolist", "numpy")


class Ops(TorchDispatchMode):
    """Counts the tensor operations that pass the dispatcher, and those that walk over gradients.

    `walks` adds up, over the operator calls that take gradients, the share of all trainable elements
    that they touch: 1.0 is one pass over every gradient, whether one foreach call makes it or one
    call per tensor. Left out are the backward pass, views, and the update itself, which is an
    operator that writes to a parameter or to optimizer state.

    Args:
        optimizers: Whose gradients count; none for no walks. Their state has to exist already.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.copies_to_host = 0
        self.walks = 0.0
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._params = list({p: None for group in groups for p in group["params"]})
        self._elements = sum(p.numel() for p in self._params)
        state = [v for o in optimizers for s in o.state.values() for v in s.values()]
        self._updated = {x.data_ptr() for x in [*self._params, *state] if isinstance(x, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        self.count[str(func)] += 1
        if self._params and torch._C._current_graph_task_id() == -1:
            self.walks += self._touched(func, args, kwargs) / self._elements
        out = func(*args, **kwargs)
        self.copies_to_host += _to_host(out, args, kwargs)
        return out

    def _touched(self, func: Any, args: Any, kwargs: Any) -> int:
        """Number of gradient elements among the inputs of an operator that is no view or update."""
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return 0
        written = {
            x.data_ptr()
            for spec, given in zip(schema.arguments, args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
            for x in tree_leaves(given)
        }
        if written & self._updated:
            return 0
        grads = {p.grad.data_ptr(): p.numel() for p in self._params if p.grad is not None}
        inputs = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return sum(size for pointer, size in grads.items() if pointer in inputs)


def _to_host(out: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a copy made the host wait: from a device to the CPU, and not asynchronously."""
    if not isinstance(out, Tensor) or out.device.type != "cpu" or kwargs.get("non_blocking"):
        return False
    return any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args)


class PythonCalls:
    """Counts the calls of Python and C functions of this thread, between `start` and `stop`.

    Garbage is not collected meanwhile: finalizers of what earlier tests left would count.
    """

    def __init__(self) -> None:
        self.total = 0
        self.methods: Counter[str] = Counter()
        self._collecting = False

    def start(self) -> None:
        self._collecting = gc.isenabled()
        gc.disable()
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)
        if self._collecting:
            gc.enable()

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            self.total += 1
            if event == "c_call":
                self.methods[arg.__name__] += 1


def host_reads(ops: Ops, calls: PythonCalls) -> int:
    """Number of times that the host waited for a value, or would have if it were on a device."""
    # on a device `tolist` copies to the host first, which is seen as a copy
    methods = 0 if ops.copies_to_host else sum(calls.methods[name] for name in READING_METHODS)
    return sum(ops.count[name] for name in READING_OPS) + ops.copies_to_host + methods


class PeakBytes:
    """Records the peak of allocated bytes beyond what was there at `start`.

    On CUDA the caching allocator's own peak. On the CPU the running sum of torch's allocator events
    (`profile_memory`), which also holds what is allocated inside an operator.
    """

    def __init__(self, device: str) -> None:
        self.device, self.peak = device, 0
        self._profile: Any = None
        self._before = 0

    def start(self) -> None:
        if self.device == "cpu":
            self._profile = profile(profile_memory=True).__enter__()
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def stop(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._before
            return
        self._profile.__exit__(None, None, None)
        events = [e for e in self._profile.kineto_results.events() if e.name() == "[memory]"]
        level = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            self.peak = max(self.peak, level)


class Meter(L.Callback):
    """Counts training batches, from the first callback hook of one to the last of another."""

    def __init__(self, batches: int = 1, ops: bool = False) -> None:
        self.first, self.last, self.ops = WARM, WARM + batches - 1, Ops() if ops else None
        self.calls = PythonCalls()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first:
            if self.ops:
                self.ops.__enter__()
            self.calls.start()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.last:
            self.calls.stop()
            if self.ops:
                self.ops.__exit__(None, None, None)

    @property
    def python(self) -> int:
        return self.calls.total

    @property
    def reads(self) -> int:
        return host_reads(self.ops, self.calls)
