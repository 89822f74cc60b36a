# SPDX-License-Identifier: Apache-2.0
"""The only place that touches private names of torch or Lightning, one function each.

Every function here has a test of its name in `tests/test_upstream.py`, which says in a sentence
what has moved when a new release breaks it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "GradMark",
    "all_params",
    "any_nonfinite_and_multiply_",
    "as_plain",
    "batch_number",
    "comm_hook_names",
    "count_as_stepped",
    "grad_marks",
    "has_float16_autocast",
    "has_gradients",
    "inside_batch",
    "is_compiled",
    "is_fitting",
    "is_fully_sharded",
    "is_log_step",
    "keep_unit_in_float32",
    "magnitudes",
    "map_tensors",
    "modules_of_unit",
    "moved_since",
    "native_low_precision",
    "needs_closure",
    "plain_ddp",
    "plain_name",
    "reduced_by_ddp",
    "rest_logged",
    "sharded_grads",
    "sharded_like",
    "sparse_values",
    "tensors_in",
    "total_norm",
    "unwrap_optimizer",
    "whole",
]

_STRIDED = torch.strided
GradMark: TypeAlias = "tuple[weakref.ref[Tensor], int] | None"


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside Lightning's `LightningOptimizer`, or the argument itself.

    `LightningOptimizer` poses as a subclass of the wrapped class, so `isinstance` cannot tell them
    apart and their `id()` differs.
    """
    inner = getattr(optimizer, "__dict__", {}).get("_optimizer")
    if isinstance(inner, Optimizer) and hasattr(type(optimizer), "toggle_model"):
        return inner
    return cast("Optimizer", optimizer)


def any_nonfinite_and_multiply_(grads: list[Tensor], found: Tensor, factor: Tensor) -> None:
    """Multiply `grads` by `factor` in place and set `found` to 1.0 if one held inf or NaN.

    Non-finite elements keep their value. Version counters do not move. Host sync: none.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)


def magnitudes(tensors: list[Tensor]) -> list[float]:
    """Return max |x| of each tensor (NaN if it holds one). Host sync: one."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return [0.0] * len(tensors)
    norms = [norm.float() for norm in torch._foreach_norm(filled, float("inf"))]
    sizes = iter(torch.stack([norm.to(norms[0].device) for norm in norms]).tolist())
    return [float(next(sizes)) if tensor.numel() else 0.0 for tensor in tensors]


def count_as_stepped(optimizer: Optimizer) -> None:
    """Let torch's schedulers believe that the optimizer has stepped, where they ask about it.

    They warn of a scheduler that is stepped first; a skipped update is not the caller's mistake.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def checkpoints_reentrantly(loss: Tensor) -> bool:
    """Return whether a backward pass of `loss` recomputes with `checkpoint(use_reentrant=True)`.

    Such a node hides the parameters behind it from `torch.autograd.grad`, which then passes it by.
    """
    known, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        known.add(node)
        todo += [parent for parent, _ in node.next_functions]
    return False


def sparse_values(grad: Tensor) -> Tensor:
    """Return the stored values of a sparse gradient, which may be uncoalesced."""
    return grad._values()


def as_plain(grads: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors whose memory holds the values of sparse, complex and sharded gradients.

    A `DTensor` gives its local shard; without this, collectives would run inside the check.
    """
    return [
        g
        if g.__class__ is Tensor and g.layout is _STRIDED and not g.dtype.is_complex
        else _memory_of(g)
        for g in grads
    ]


def whole(value: Tensor) -> Tensor:
    """Return a sharded scalar (the norm of sharded gradients) as a plain tensor on every rank.

    Host sync: none; a collective where `value` is a `DTensor`.
    """
    full = getattr(value, "full_tensor", None)
    return value if full is None else cast("Tensor", full())


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm over `grads`, plain and sharded ones together, as a plain tensor.

    Torch's own function takes one kind at a time, and one device mesh. Host sync: none; a collective
    for each mesh.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        if grad.is_sparse:
            grad = grad.coalesce().values()  # torch's function refuses sparse ones
        kinds.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
    norms = [whole(torch.nn.utils.get_total_norm(alike)) for alike in kinds.values()]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def sharded_like(value: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of `value`, which all ranks hold, where `param` is a `DTensor`."""
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the parts that wrappers add to it."""
    return clean_tensor_name(f"{name}.")[:-1]


def keep_unit_in_float32(unit: FullyShardedDataParallel) -> None:
    """Keep an FSDP1 unit's parameters, gradients and buffers as they are: before its first forward.

    FSDP's wrap policies take no precision for a single module, only for whole classes.
    """
    cast("Any", unit).mixed_precision = MixedPrecision()
    if unit._handle is not None:
        unit._handle._init_param_reduce_dtypes(None, None)


def modules_of_unit(unit: FullyShardedDataParallel) -> list[Module]:
    """Return the modules whose own parameters an FSDP1 unit gathers and casts together."""
    handle = unit._handle
    return [] if handle is None else [info.module for info in handle.flat_param._param_infos]


def sharded_grads(model: Module) -> list[Tensor]:
    """Return the gradients of which this rank holds a part under FSDP1."""
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model)]
    flat = [h.flat_param for h in handles if h is not None and h.uses_sharded_strategy]
    params = [p for f in flat for p in (f._params or [f])]
    return [p.grad for p in params if p.grad is not None]


def plain_ddp(strategy: Any, automatic: bool) -> bool:
    """Return whether the gradient all-reduce spreads an inf to every rank by itself.

    So it is under DDP in automatic optimization, unless parameters are ignored or a communication
    hook (or a model averager) replaces the all-reduce.
    """
    ddp = getattr(strategy, "model", None)
    return (
        automatic
        and isinstance(ddp, DistributedDataParallel)
        and not getattr(ddp, "_comm_hooks", [])
        and not getattr(ddp, "parameters_to_ignore", set())
        and getattr(strategy, "_model_averager", None) is None
    )


def comm_hook_names(strategy: Any) -> list[str]:
    """Return the names of the communication hooks that are registered with DDP."""
    hooks = getattr(getattr(strategy, "model", None), "_comm_hooks", [])
    return [getattr(hook, "__qualname__", repr(hook)) for hook, _ in hooks]


def reduced_by_ddp(strategy: Any) -> list[Tensor]:
    """Return the parameters whose gradients DDP reduces, if asked right after it has wrapped.

    Neither those that it was told to ignore nor those that were frozen then; empty without DDP.
    """
    ddp = getattr(strategy, "model", None)
    if not isinstance(ddp, DistributedDataParallel):
        return []
    return [p for p in ddp._module_parameters if p.requires_grad]


def _memory_of(grad: Tensor) -> Tensor:
    if hasattr(grad, "_local_tensor"):
        grad = cast("Any", grad).to_local()
    if grad.layout is not _STRIDED:
        grad = sparse_values(grad)
    return torch.view_as_real(grad) if grad.is_complex() else grad


def grad_marks(params: Sequence[Tensor]) -> list[GradMark]:
    """Return, per parameter, identity and version counter of its gradient (None without one).

    Identity is held weakly: a strong reference would keep memory, and `id()` is reused.
    """
    return [None if (g := p.grad) is None else (weakref.ref(g), g._version) for p in params]


def moved_since(params: Sequence[Tensor], marks: Sequence[GradMark]) -> list[tuple[int, bool]]:
    """Return `(position, same_tensor)` for each gradient made, replaced or written since `marks`.

    Gradients that are None now are left out. Writes through `.data` and by the unscale kernel do
    not move the version counter. Host sync: none.
    """
    moved = []
    for i, (p, mark) in enumerate(zip(params, marks, strict=True)):
        grad = p.grad
        if grad is None:
            continue
        same = mark is not None and mark[0]() is grad
        if not same or mark is None or mark[1] != grad._version:
            moved.append((i, same))
    return moved


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether a parameter of the optimizer has a gradient. Host sync: none."""
    return any([p.grad is not None for p in all_params(optimizer.param_groups)])


def is_fully_sharded(module: Module) -> bool:
    """Return whether FSDP2 manages parameters of the module, which are then no part of its graph."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def is_fitting(trainer: Any) -> bool:
    """Return whether the Trainer runs `fit` (not validate, test or predict)."""
    fn = trainer.state.fn
    return fn is not None and fn.value == "fit"


def batch_number(trainer: Any) -> int:
    """Return the running number of the training batch, across epochs; plain attributes only."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def inside_batch(trainer: Any) -> bool:
    """Return whether the training loop is between a batch's start and the end of its step."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return bool(total.ready != total.processed)


def is_log_step(trainer: Any) -> bool:
    """Return whether the training window that this batch belongs to is logged.

    True in each of its micro-batches; loggers take the values of the last one.
    """
    every, loop = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop
    due = every and ((loop._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
    return bool(due or trainer.fast_dev_run)


def rest_logged(trainer: Any, hook: str, keys: Iterable[str]) -> None:
    """Take logged values out of what Lightning goes through, and reads, after every batch.

    Loggers, progress bar and `callback_metrics` keep what they were given; without this each key
    costs a tensor operation and a read per batch until it is logged again.
    """
    for key in keys:
        if (metric := trainer._results.get(f"{hook}.{key}")) is not None:
            metric.has_reset = True


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's `step` cannot work without a closure (LBFGS and its kind)."""
    if isinstance(optimizer, LBFGS):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_compiled(module: Module) -> bool:
    """Return whether `torch.compile` or `module.compile()` has already taken hold of the module."""
    compiled_type = torch._dynamo.eval_frame.OptimizedModule
    return (
        isinstance(module, compiled_type)
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None
    )


def has_float16_autocast(device: str) -> bool:
    """Return whether torch's autocast computes in float16 on this device type."""
    if not torch.amp.is_autocast_available(device):
        return False
    if device != torch._C._get_privateuse1_backend_name():
        return True
    backend = getattr(torch, device, None)  # a plug-in backend says itself what it supports
    return torch.float16 in getattr(backend, "get_amp_supported_dtype", list)()


def native_low_precision(device: str) -> tuple[bool, bool]:
    """Return whether the device computes bfloat16 and float16 natively (not by emulation)."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False), True
    if device == "cpu":
        mkldnn = torch.ops.mkldnn
        return mkldnn._is_mkldnn_bf16_supported(), mkldnn._is_mkldnn_fp16_supported()
    if device == "xpu":
        return torch.xpu.is_bf16_supported(), True
    return False, device == "mps"


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and dataclasses."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, f.name) for f in fields(leaf)])
    return found


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` (nested lists, tuples, dicts and dataclasses) with its tensors mapped."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy(leaf)
        for f in fields(leaf):
            object.__setattr__(made, f.name, map_tensors(function, getattr(leaf, f.name)))
        return made

    return tree_map(visit, tree)


def all_params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in groups for p in group["params"]]
