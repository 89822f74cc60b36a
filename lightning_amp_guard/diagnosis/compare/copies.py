# SPDX-License-Identifier: Apache-2.0
"""Copies of a module to train, and which of its parts holds which parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.nn import Module, Parameter

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.replay.surroundings import trainer_of

__all__ = ["copy_of", "own_params"]


def copy_of(module: Module, device: torch.device | None) -> Module:
    """Return a deep copy without gradients and graphs; an attached Trainer is shared, not copied.

    Args:
        module: The module.
        device: Where the copy goes; `None` leaves it.

    Raises:
        ValueError: something in the module cannot be copied; the message names it.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(
            f"`{type(module).__name__}` holds a scripted module, whose copies torch cannot train."
            " Expected a plain one. Pass the module as it was before `torch.jit.script`."
        )
    trainers = [trainer_of(part) for part in module.modules()]
    memo: dict[int, Any] = {id(trainer): trainer for trainer in trainers if trainer is not None}
    # A loss or an activation that was kept: torch copies no tensor with a graph.
    kept = [t for part in module.modules() for t in _upstream.tensors_in(vars(part))]
    memo |= {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}
    try:
        made = deepcopy(module, memo)
    except Exception as error:  # whatever a foreign `__deepcopy__` or `__reduce__` may raise
        raise ValueError(
            f"`{type(module).__name__}` cannot be deep-copied: {_uncopied(module)}"
            f" {type(error).__name__}: {error} Expected a module that `copy.deepcopy` copies, since"
            " every precision trains its own copy. Most likely it keeps a lock, a file, a"
            " process group or a loader's iterator as an attribute. Remove it before the call:"
            " `del module.x`."
        ) from error
    made.zero_grad(set_to_none=True)
    return made if device is None else made.to(device)


def own_params(module: Module) -> dict[str, list[Parameter]]:
    """Return the trainable parameters by the module that holds them; shared ones once."""
    known: set[int] = set()
    found: dict[str, list[Parameter]] = {}
    for name, part in module.named_modules():
        params = [p for p in part.parameters(recurse=False) if p.requires_grad]
        new = [p for p in params if id(p) not in known]
        known |= {id(p) for p in new}
        if new:
            found[name] = new
    return found


def _uncopied(module: Module) -> str:
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key == "_modules" or key == "_trainer":
                continue
            try:
                deepcopy(value)
            except Exception:  # noqa: BLE001  (as above)
                return f"the attribute {key!r} of {name or type(module).__name__!r} cannot."
    return ""
