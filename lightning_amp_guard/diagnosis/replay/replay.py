# SPDX-License-Identifier: Apache-2.0
"""One step run again outside a Trainer, and the module as it was before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from pickle import PicklingError
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.leaves import ends_of
from lightning_amp_guard.diagnosis.replay.snapshot import Snapshot, items_of
from lightning_amp_guard.diagnosis.replay.surroundings import (
    autocast_scope,
    leave_autocast,
    random_states,
    silenced,
    trainer_of,
)

__all__ = ["LossFn", "autocast", "device_of", "on_device", "training_loss", "undisturbed"]

LossFn: TypeAlias = "Callable[[Any, Any], Tensor]"
_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


@contextmanager
def undisturbed(module: Module) -> Iterator[None]:
    """Leave the module, the random state and the global state of torch as they were before.

    Put back are weights, buffers (rebound, added or written to), `.grad` (the same tensors with the
    same values), hooks of modules and tensors, train/eval mode, `requires_grad`, every attribute of
    the module and of what it holds, random states (torch on every device, Python, numpy and
    generators that the module owns), autocast, grad mode, and what the step has changed in the
    attributes of an attached Trainer. What `self.log` and the Trainer's loggers are told inside is
    dropped. Optimizers and data sets are not looked at. Holds when the body raises, too. Inside,
    gradients are recorded, also when called under `no_grad` or `inference_mode`, and autocast is off
    until the body enters a scope of its own.

    Memory: one copy of the module's tensors on their devices while the body runs.

    Args:
        module: The module, or LightningModule, with all that it holds.

    Raises:
        ValueError: a parameter or buffer is not initialized yet (`LazyLinear` and its kind).

    Host sync: one per device, for its random state.

    Example:
        >>> net = torch.nn.BatchNorm1d(2)
        >>> with undisturbed(net):
        ...     loss = net(torch.randn(4, 2)).sum()
        >>> int(net.num_batches_tracked)
        0
    """
    trainer = trainer_of(module)
    undo_trainer = items_of({} if trainer is None else vars(trainer))
    snapshot = Snapshot(module)
    states = random_states(snapshot.devices)
    scope = autocast_scope(snapshot.devices)
    grad_mode = torch.is_grad_enabled()
    torch.clear_autocast_cache()  # an enclosing autocast must not share its casts with the replay
    try:
        with torch.inference_mode(False), torch.enable_grad(), silenced(module):
            leave_autocast(snapshot.devices)
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_grad_enabled(grad_mode)
        undo_trainer()
        with torch.no_grad():
            snapshot.restore()
        scope()
        for put_back in states:
            put_back()


def training_loss(module: Module, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """Return the scalar loss of one step, with its graph.

    `loss_fn(module, batch)`, or, without one, what `training_step(batch, 0)` of a LightningModule
    returns (a tensor, or a dict with the key "loss"); no Trainer is needed. `self.log` inside has no
    effect. Call it within `undisturbed(module)` and `autocast(...)`.

    Args:
        module: The module, or a LightningModule in automatic optimization.
        batch: The batch as the step gets it: on the module's device, after batch transfer hooks.
        loss_fn: Computes the loss; needed where the module has no `training_step`.

    Returns:
        A 0-dim tensor that requires grad.

    Raises:
        TypeError: there is neither `loss_fn` nor `training_step`, or it returns no tensor.
        ValueError: manual optimization, a `dataloader_iter` step, or no scalar loss with a graph.

    Host sync: none of its own.
    """
    with silenced(module):
        if loss_fn is not None:
            return _checked(loss_fn(module, batch), "loss_fn(module, batch)")
        step = getattr(module, "training_step", None)
        if step is None:
            raise TypeError(
                f"`{type(module).__name__}` has no `training_step`. Expected a LightningModule, or"
                " `loss_fn=`, which computes a scalar loss:"
                " `loss_fn=lambda module, batch: module(batch).square().mean()`."
            )
        if not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"`{type(module).__name__}` uses manual optimization, so that its `training_step`"
                " would step the optimizers. Expected automatic optimization, or `loss_fn=`, which"
                " computes the loss alone: `loss_fn=lambda module, batch: module.loss(batch)`."
            )
        found = step(batch, 0) if _takes_index(step) else step(batch)
        return _checked(found["loss"] if _has_loss(found) else found, "training_step")


def on_device(batch: Any, device: torch.device | str | None) -> Any:
    """Return a copy of the batch with its tensors on `device`, so that a step cannot change it.

    Args:
        batch: Tensors in nested lists, tuples, dicts and dataclasses, or an object with `.to`.
        device: The target; `None` copies each tensor where it is.
    """

    def moved(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone() if device is None else tensor.detach().to(device, copy=True)
        return made.requires_grad_(tensor.requires_grad)

    if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):
        twin = _twin(batch, moved)  # tokenizers' batches and graphs know themselves how to move
        return twin if device is None else twin.to(device)
    return _upstream.map_tensors(moved, batch)


def _twin(batch: Any, moved: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of an object, with copies of the tensors in it; flat where it refuses that."""
    tensors = [value for _, value in ends_of(batch) if isinstance(value, Tensor)]
    try:
        return deepcopy(batch, {id(tensor): moved(tensor) for tensor in tensors})
    except (TypeError, RuntimeError, PicklingError):  # a lock, a handle, a tensor with a graph
        return copy(batch)


def device_of(module: Module) -> torch.device | None:
    """Return the device of the module's parameters and buffers; `None` for several or none."""
    found = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    return found.pop() if len(found) == 1 else None


def autocast(
    precision: str, device: torch.device | str | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast scope in which Lightning's Trainer would run a step.

    Args:
        precision: "16-mixed", "bf16-mixed", or "32-true" (autocast is off then).
        device: Where the module computes; `None` is the accelerator if there is one, else the CPU.

    Raises:
        ValueError: another precision.

    Example:
        >>> with autocast("16-mixed", "cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float16
    """
    if precision not in _DTYPES:
        raise ValueError(
            f"`precision={precision!r}`: expected one of {', '.join(map(repr, _DTYPES))}."
        )
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    kind = torch.device(device).type
    if precision == "32-true":
        return torch.autocast(kind, enabled=False)
    return torch.autocast(kind, dtype=_DTYPES[precision], cache_enabled=False)


def _takes_index(step: Callable[..., Any]) -> bool:
    params = inspect.signature(step).parameters
    if "dataloader_iter" in params:
        raise ValueError(
            "`training_step(dataloader_iter)` fetches its batches itself. Expected"
            " `training_step(batch, batch_idx)`, or `loss_fn=lambda module, batch: ...`."
        )
    positional = [
        p for p in params.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) > 1 or any([p.kind is p.VAR_POSITIONAL for p in params.values()])


def _has_loss(found: Any) -> bool:
    return isinstance(found, dict) and "loss" in found


def _checked(loss: Any, source: str) -> Tensor:
    if loss is None:
        raise ValueError(f"`{source}` returned None: it skips this batch. Expected a scalar loss.")
    if not isinstance(loss, Tensor):
        raise TypeError(f"`{source}` returned {type(loss).__name__}. Expected a scalar tensor.")
    if loss.numel() != 1 or loss.is_complex():
        raise ValueError(
            f"`{source}` returned a loss of shape {tuple(loss.shape)} and {loss.dtype}. Expected one"
            " real number. Most likely the loss was not reduced: return `loss.mean()`."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"`{source}` returned a loss without a graph. Expected one that depends on a parameter"
            " that requires grad. Most likely it was detached, made by `.item()` or under"
            " `torch.no_grad()`, or every parameter is frozen."
        )
    return loss if loss.dim() == 0 else loss.reshape(())
