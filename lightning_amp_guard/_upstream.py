# SPDX-License-Identifier: Apache-2.0
"""The only place that touches private names of torch or Lightning, one function each.

Every function here has a test of its name in `tests/test_upstream.py`, which says in a sentence
what has moved when a new release breaks it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "GradMark",
    "TorchDispatchMode",
    "all_params",
    "any_nonfinite_and_multiply_",
    "as_plain",
    "averaging_node",
    "batch_number",
    "batch_of",
    "begins_epoch",
    "comm_hook_names",
    "count_as_stepped",
    "current_node",
    "found_inf",
    "found_inf_for",
    "full_float32",
    "function_of",
    "grad_marks",
    "grad_scale",
    "has_autocast_rule",
    "has_float16_autocast",
    "has_gradients",
    "home_of",
    "inner_optimizers",
    "inside_backward",
    "inside_batch",
    "inside_transform",
    "is_compiled",
    "is_fitting",
    "is_fully_sharded",
    "is_log_step",
    "is_overridden",
    "is_unscaled",
    "keep_unit_in_float32",
    "leaves_in",
    "loader_keeps_its_place",
    "magnitudes",
    "map_tensors",
    "modules_of_unit",
    "moved_since",
    "multiply_",
    "native_low_precision",
    "needs_closure",
    "newest_node_number",
    "node_number",
    "plain_ddp",
    "plain_name",
    "put_tensor_hooks",
    "reduced_by_ddp",
    "rest_logged",
    "runs_backward",
    "sharded_grads",
    "sharded_like",
    "skips_on_device",
    "sparse_values",
    "steps_last",
    "steps_with_scale",
    "takes_grad_scale",
    "tensor_hooks",
    "tensors_in",
    "total_norm",
    "unread_statistics",
    "unwrap_optimizer",
    "update_scale_",
    "uses_custom_fwd",
    "whole",
    "written_arguments",
]

_STRIDED = torch.strided
_PACKAGE = __name__.partition(".")[0]
# The method of a precision plugin in which hooks and clipping get to see the gradients.
HOOKS_AND_CLIP = "_after_closure"
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


def begins_epoch(trainer: Any) -> bool:
    """Return whether no training batch of this epoch has come so far; plain attributes only."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0)


def inside_batch(trainer: Any) -> bool:
    """Return whether the training loop is between a batch's start and the end of its step."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return bool(total.ready != total.processed)


def loader_keeps_its_place(trainer: Any) -> bool:
    """Return whether a training loader has a state of its own, which Lightning restores."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return any([hasattr(x, "state_dict") and hasattr(x, "load_state_dict") for x in loaders])


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
    """Return whether the optimizer's `step` cannot work without a closure: LBFGS, SAM and their kind.

    Told by the signature, by the source where it insists on a closure that is optional there, and by
    the optimizers inside a wrapper.
    """
    return any([_steps_by_closure(o) for o in (optimizer, *inner_optimizers(optimizer))])


def _steps_by_closure(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, LBFGS):
        return True
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and (closure.default is inspect.Parameter.empty or _insists(step))


def _insists(step: Any) -> bool:
    """Return whether `step` asserts that it was given a closure, or calls it without having asked."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step)))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # without source, the signature decides
        return False
    for statement in getattr(function, "body", []):
        if isinstance(statement, ast.Assert) and _names(statement.test, "closure"):
            return True
        if isinstance(statement, ast.If) and _names(statement.test, "closure"):
            return any([isinstance(s, ast.Raise) for s in (*statement.body, *statement.orelse)])
        calls = [n.func for n in ast.walk(statement) if isinstance(n, ast.Call)]
        asks = [n for n in ast.walk(statement) if isinstance(n, (ast.IfExp, ast.BoolOp, ast.If))]
        if asks and isinstance(statement, ast.Assign) and _names(statement.targets[0], "closure"):
            return False  # it makes one of its own
        if not asks and any([isinstance(f, ast.Name) and f.id == "closure" for f in calls]):
            return True
    return False


def _names(expression: ast.expr, name: str) -> bool:
    return any([isinstance(n, ast.Name) and n.id == name for n in ast.walk(expression)])


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that a wrapper (Lookahead, SAM, ZeroRedundancyOptimizer) steps inside.

    Those among its attributes, also in lists and dicts, and theirs in turn.
    """
    found: list[Optimizer] = []
    todo = list(getattr(optimizer, "__dict__", {}).values())
    while todo:
        value = todo.pop(0)
        if isinstance(value, Optimizer) and value is not optimizer:
            if all([value is not known for known in found]):
                found.append(value)
                todo += vars(value).values()
        elif type(value) in (list, tuple) and all([isinstance(v, Optimizer) for v in value]):
            todo += value
        elif type(value) is dict and all([isinstance(v, Optimizer) for v in value.values()]):
            todo += value.values()
    return found


def schedulers_of(holder: Any) -> list[LRScheduler]:
    """Return the schedulers among an object's attributes, also in lists, tuples and dicts."""
    found: list[LRScheduler] = []
    for value in getattr(holder, "__dict__", {}).values():
        values = value.values() if type(value) is dict else value
        several = values if type(value) in (list, tuple, dict) else (value,)
        found += [v for v in several if isinstance(v, LRScheduler)]
    return [s for i, s in enumerate(found) if all([s is not known for known in found[:i]])]


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


def tensor_hooks(tensor: Tensor) -> list[tuple[str, Any, dict[Any, Any]]]:
    """Return the gradient hooks that are registered with a tensor, for `put_tensor_hooks`."""
    names = ["_backward_hooks", *(["_post_accumulate_grad_hooks"] if tensor.is_leaf else [])]
    found = [(name, getattr(tensor, name)) for name in names]
    return [(name, hooks, dict(hooks or {})) for name, hooks in found]


def put_tensor_hooks(tensor: Tensor, saved: list[tuple[str, Any, dict[Any, Any]]]) -> None:
    """Let a tensor have the gradient hooks that `tensor_hooks` found, in the same dicts.

    Where there were none the new dict is emptied: torch goes on to call what it holds even after the
    attribute is None again.
    """
    for name, hooks, items in saved:
        now = getattr(tensor, name) if hooks is None else hooks
        if now is not None and dict(now) != items:
            now.clear()
            now.update(items)


def current_node() -> Any:
    """Return the autograd node that this thread is running; `None` outside a backward pass."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """Return the number that autograd has given a node: a later node of a thread has a larger one."""
    return int(node._sequence_nr())


def newest_node_number() -> int:
    """Return the number of the node that this thread's autograd has made last.

    When an operator is dispatched below autograd, that is the operator's own node, if it has one.
    """
    return int(torch._C._autograd._get_sequence_nr()) - 1


def runs_backward(code: CodeType) -> bool:
    """Return whether this is the code of the function in which torch calls its autograd engine."""
    return code is torch.autograd.graph._engine_run_backward.__code__


def written_arguments(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments that it writes to."""
    found: list[Any] = []
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return tensors_in(found)


def unread_statistics(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the running statistics that batch normalization gets but does not compute with.

    In training it only updates them (some schemas do not say so), and its backward pass ignores them.
    """
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("training", given.get("train", True)):
        return []
    return tensors_in([given.get("running_mean"), given.get("running_var")])


def leaves_in(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts."""
    return tree_leaves(tree)


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


def home_of(hook: Any) -> str:
    """Return the module that a function was written in, "" for anything else.

    Not by `__module__`: `functools.wraps` copies that, so a wrapper of a hook would pass for it.
    """
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def is_overridden(name: str, instance: Any) -> bool:
    """Return whether a callback or module has another hook `name` than Lightning's own."""
    hook = getattr(instance, name, None)
    parts = home_of(hook).split(".")
    empty = parts[0] in ("lightning", "pytorch_lightning") and parts[-2:] in (
        ["callbacks", "callback"],
        ["core", "hooks"],
        ["core", "module"],
    )
    return hook is not None and not empty


def steps_last(trainer: Any) -> bool:
    """Return whether no further step may follow the one ahead, in this epoch or at all.

    Plain attributes only.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.is_last_batch or trainer.should_stop:
        return True
    return bool(trainer.max_steps > 0 and trainer.global_step + 1 >= trainer.max_steps)


def steps_with_scale(optimizer: Any) -> bool:
    """Return whether the optimizer unscales and skips inside of its own `step` (fused ones do)."""
    return bool(getattr(unwrap_optimizer(optimizer), "_step_supports_amp_scaling", False))


def _is_fused(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> bool:
    return (
        type(optimizer) in kinds
        and steps_with_scale(optimizer)
        and all([group.get("fused") for group in optimizer.param_groups])
        and not _step_hooks_of_others(optimizer)
        and not _is_preset(optimizer)
    )


def _is_preset(optimizer: Optimizer) -> bool:
    """Return whether the user has set what a fused step takes beside its gradients."""
    preset = vars(optimizer)
    return preset.get("grad_scale") is not None or preset.get("found_inf") is not None


def _step_hooks_of_others(optimizer: Optimizer) -> list[Any]:
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks = [*before.values(), *after.values()]
    hooks += _global_optimizer_pre_hooks.values()
    hooks += _global_optimizer_post_hooks.values()
    return [h for h in hooks if getattr(h, "__module__", "").partition(".")[0] != _PACKAGE]


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Return whether the optimizer divides its gradients by a `grad_scale` while it steps.

    Torch's own fused ones do; not with step hooks, which would see the scaled gradients, nor where
    the user has set one himself.
    """
    return _is_fused(optimizer, (Adam, AdamW, SGD, Adagrad))


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether a set `found_inf` makes the optimizer's step leave everything as it was.

    Torch's fused Adam and AdamW do; fused SGD leaves its first momentum buffer uninitialised.
    """
    return _is_fused(optimizer, (Adam, AdamW))


@contextmanager
def grad_scale(optimizer: Optimizer, value: float, device: torch.device) -> Iterator[None]:
    """Let a fused optimizer divide its gradients by `value` while it steps. Host sync: none."""
    fused = cast("Any", optimizer)
    fused.grad_scale = torch.full((), value, dtype=torch.float32, device=device)
    try:
        yield
    finally:
        del fused.grad_scale


@contextmanager
def found_inf_for(optimizer: Optimizer, found: Tensor) -> Iterator[None]:
    """Let a fused optimizer skip on the device if `found` is not 0 there. Host sync: none."""
    fused = cast("Any", optimizer)
    fused.found_inf = found
    try:
        yield
    finally:
        del fused.found_inf


def multiply_(grads: list[Tensor], factor: float) -> None:
    """Multiply `grads` by `factor` in place. Host sync: none."""
    torch._foreach_mul_(grads, factor)


def update_scale_(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Move a scale on the device as torch's scaler does. Host sync: none."""
    torch._amp_update_scale_(scale, tracker, found, growth, backoff, interval)


def found_inf(scaler: Any, optimizer: Any) -> bool:
    """Return whether torch's scaler has flagged the optimizer's gradients since its last update.

    Host sync: one per device.
    """
    state = scaler._per_optimizer_states.get(id(unwrap_optimizer(optimizer)), {})
    return any([flag.item() for flag in state.get("found_inf_per_device", {}).values()])


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Return whether torch's scaler has unscaled the optimizer's gradients since its last update."""
    state = scaler._per_optimizer_states.get(id(unwrap_optimizer(optimizer)), {})
    return bool(state.get("found_inf_per_device"))


def all_params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in groups for p in group["params"]]


def batch_of(closure: Any) -> Any:
    """Return the batch that an optimizer's closure was made for; `None` where it is not known.

    Lightning's own closure keeps the arguments of `training_step` until the batch is over.
    """
    found = getattr(getattr(closure, "_step_fn", None), "args", ())
    arguments = found[0] if found and isinstance(found[0], dict) else {}
    return next(iter(arguments.values()), None)


def inside_backward() -> bool:
    """Return whether this thread runs a backward pass (a checkpointed block is then recomputed)."""
    return torch._C._current_graph_task_id() != -1


def inside_transform() -> bool:
    """Return whether a transform of `torch.func` (`vmap`, `grad`) is at work: tensors are not real."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_autocast_rule(operator: str, device: str) -> bool:
    """Return whether autocast chooses the dtype of an operator ("aten::mm") on a device type."""
    key = f"Autocast{device.upper()}"
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    except RuntimeError:  # an unknown operator, or a device type without autocast
        return False


def function_of(node: Any) -> Any:
    """Return the `autograd.Function` class that made a node or is its `ctx`; `None` for others."""
    return getattr(type(node), "_forward_cls", None)


def uses_custom_fwd(function: Any) -> bool:
    """Return whether an `autograd.Function`'s forward is decorated with `torch.amp.custom_fwd`."""
    forward = getattr(function, "forward", None)
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and code.co_filename == torch.amp.autocast_mode.__file__:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in float32 meanwhile (no TF32, no bfloat16), as set before after.

    Torch keeps two sets of flags. It refuses to read the old one where only the new one was
    written, so both are set, and both put back.
    """
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    backends, ops = ("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")
    places = [("generic", "all"), *[(backend, op) for backend in backends for op in ops]]
    new = [get(*place) for place in places]
    try:
        old = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the user has written to the new set
        old = None
    try:
        if old is None:
            for place in places:
                put(*place, "ieee")
        else:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old[0])
            torch.backends.cudnn.allow_tf32 = old[1]
        for place, value in zip(places, new, strict=True):
            put(*place, value)


# Between a loss and its reduction these change nothing; a sum of means is one as well, or their mean.
_BESIDE_REDUCTION = ("Add", "Alias", "Clone", "Squeeze", "Stack", "ToCopy", "Unsqueeze", "View")
_MEAN = 1  # `torch.nn.functional`'s number of reduction="mean"


def averaging_node(loss: Tensor, *, divided: bool) -> str:
    """Return the name of the autograd node that made the loss a mean of several values.

    Told by the graph, without a look at any value: "" where it ends in a sum, in a product or
    quotient (which may undo the mean), or in anything else.

    Args:
        loss: As it is about to be scaled for its backward pass.
        divided: Whether Lightning has divided it by `accumulate_grad_batches`.
    """
    node = loss.grad_fn
    if divided and node is not None and node.name() == "DivBackward0":
        node = node.next_functions[0][0]
    todo, found = [node], ""
    while todo:
        node = todo.pop()
        name = "" if node is None else node.name()
        of_terms = name.startswith("MeanBackward") and _averages_terms(node)
        if node is not None and (of_terms or name.startswith(_BESIDE_REDUCTION)):
            todo += [before for before, _ in node.next_functions]
        elif name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
            found = name
        else:
            return ""
    return found


def _averages_terms(node: Any) -> bool:
    """Return whether a mean is one over whole losses, one or several that were stacked."""
    of = node.next_functions[0][0]
    stacked = of is not None and of.name().startswith("StackBackward")
    return stacked or getattr(node, "_saved_self_sym_numel", 0) == 1
