# SPDX-License-Identifier: Apache-2.0
"""What a replayed step may touch outside its module: logs, random states, autocast."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module

__all__ = ["Mute", "autocast_scope", "leave_autocast", "random_states", "silenced", "trainer_of"]

_LOGGING = ("log", "log_dict")


class Mute:
    """Stands in for a logger: whatever is asked of it, or told to it, comes to nothing."""

    def __getattr__(self, name: str) -> Mute:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Mute:
        """Do nothing."""
        return self


def trainer_of(module: Module) -> Any:
    """Return the Trainer that a LightningModule is attached to, or `None`."""
    return vars(module).get("_trainer")


@contextmanager
def silenced(module: Module) -> Iterator[None]:
    """Let `self.log` and the loggers of an attached Trainer come to nothing meanwhile."""
    with ExitStack() as undo:
        for part in module.modules():
            for name in _LOGGING if hasattr(part, "training_step") else ():
                undo.callback(_put, vars(part), name, vars(part).get(name))
                vars(part)[name] = Mute()
        trainer = trainer_of(module)
        if trainer is not None and hasattr(trainer, "loggers"):
            undo.callback(setattr, trainer, "loggers", trainer.loggers)
            trainer.loggers = [Mute() for _ in trainer.loggers]
        yield


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def random_states(devices: set[torch.device]) -> list[Callable[[], object]]:
    """Return what puts the random states of torch, Python and numpy back. Host sync: one a device.

    Args:
        devices: Further devices than the CPU and the CUDA devices in use.
    """
    cpu, python = torch.get_rng_state(), random.getstate()
    undo: list[Callable[[], object]] = [
        lambda: torch.set_rng_state(cpu),
        lambda: random.setstate(python),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state()
        undo.append(lambda: numpy.random.set_state(legacy))
    for device in _accelerators(devices):
        backend = torch.get_device_module(device)
        state = backend.get_rng_state(device)
        undo.append(lambda set_=backend.set_rng_state, s=state, d=device: set_(s, d))  # type: ignore[misc]
    return undo


def _accelerators(devices: set[torch.device]) -> set[torch.device]:
    found = {device for device in devices if device.type not in ("cpu", "meta")}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {torch.device("cuda", i) for i in range(torch.cuda.device_count())}
    return found


def autocast_scope(devices: set[torch.device]) -> Callable[[], None]:
    """Return what puts autocast's state for these devices, the CPU and CUDA back."""
    cache = torch.is_autocast_cache_enabled()
    before = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _autocast_kinds(devices)
    ]

    def undo() -> None:
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    return undo


def leave_autocast(devices: set[torch.device]) -> None:
    """Switch autocast off: in the caller's scope a backward pass would cast again."""
    for kind in _autocast_kinds(devices):
        torch.set_autocast_enabled(kind, False)


def _autocast_kinds(devices: set[torch.device]) -> list[str]:
    kinds = {"cpu", "cuda"} | {device.type for device in devices}
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
