# SPDX-License-Identifier: Apache-2.0
"""Breaking a run at a chosen moment, and what must be true of the run that is resumed from it."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR

from lightning_amp_guard import SafeAMP, _upstream
from lightning_amp_guard.monitor.ledger.file import read_ledger
from lightning_amp_guard.monitor.ledger.writer import LedgerWriter
from tests.crash.runs import BATCHES, EPOCHS, Learner, Parts, Setup, build, final, fit
from tests.helpers import identical

__all__ = [
    "Bomb",
    "Break",
    "PlantedError",
    "assert_left_clean",
    "assert_resumes",
    "built",
    "differences",
    "disk_full",
    "identical",
    "interrupted",
    "out_of_memory",
    "plain",
    "terminated",
]


class PlantedError(RuntimeError):
    """What a user's hook raises."""


def plain() -> None:
    raise PlantedError("planted")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted() -> None:
    raise KeyboardInterrupt


def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass
class Bomb:
    """Counts arrivals, and calls `act` once, at the arrival number `at`; never while that is 0."""

    act: Callable[[], None] = plain
    at: int = 0
    seen: int = 0
    gone_off: bool = False

    def __call__(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.at, self.gone_off = 0, True
            self.act()


@dataclass(frozen=True)
class Break:
    """Where a run breaks: `owner` is "module", "callback", "plugin", "backward", "function"."""

    owner: str
    name: str
    act: Callable[[], None] = plain
    late: bool = False  # after what stands there has been done

    def __str__(self) -> str:
        where = "after" if self.late else "in"
        return f"{self.act.__name__} {where} {self.owner}.{self.name}"


def mined(kind: type, name: str, bomb: Bomb, late: bool) -> type:
    """Return the class with a bomb in one of its methods."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def with_bomb(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not late:
            bomb()
        result = method(self, *args, **kwargs)
        if late:
            bomb()
        return result

    # Lightning looks through `__wrapped__`, finds its own empty hook and would not call it
    del with_bomb.__wrapped__
    with_bomb.__signature__ = inspect.signature(method)
    return type(kind.__name__, (kind,), {name: with_bomb, "__module__": kind.__module__})


FUNCTIONS = {
    "unscale": (_upstream, "any_nonfinite_and_multiply_"),
    "norm": (_upstream, "total_norm"),
    "clip": (_upstream, "multiply_"),
    "clip by torch": (torch.nn.utils, "clip_grad_norm_"),
    "step of SGD": (torch.optim.SGD, "step"),
    "step of AdamW": (torch.optim.AdamW, "step"),
    "checkpoint file": (torch_io, "_atomic_save"),
    "ledger line": (LedgerWriter, "_put"),
}


@contextmanager
def mined_function(name: str, bomb: Bomb, late: bool) -> Iterator[None]:
    """Put a bomb into a function; where files are written, half of it is written before."""
    holder, attribute = FUNCTIONS[name]
    function = getattr(holder, attribute)

    def with_bomb(*args: Any, **kwargs: Any) -> Any:
        if name == "ledger line":
            writer, line = args
            bomb_at(lambda: writer._file.write(line[: len(line) // 2]))
        elif name == "checkpoint file":
            bomb_at(lambda: Path(args[1]).write_bytes(b"PK\x03\x04 half a file"))
        elif not late:
            bomb()
        result = function(*args, **kwargs)
        if late:
            bomb()
        return result

    def bomb_at(half: Callable[[], object]) -> None:
        if bomb.seen + 1 == bomb.at:
            half()
        bomb()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, attribute, with_bomb)
        yield


@contextmanager
def built(setup: Setup, folder: Path, place: Break, bomb: Bomb, seed: int = 1) -> Iterator[Parts]:
    """A run with a bomb in it; all bombs of a place are alike to Lightning, live or not."""
    kinds: dict[str, type] = {"module": Learner, "callback": Callback, "plugin": SafeAMP}
    if place.owner in kinds:
        kinds[place.owner] = mined(kinds[place.owner], place.name, bomb, place.late)
    options: dict[str, Any] = {"module": kinds["module"], "plugin": kinds["plugin"]}
    parts = build(setup, folder, seed=seed, callbacks=(kinds["callback"](),), **options)
    if place.owner == "backward":
        parts.model.fuse = bomb
    if place.owner == "function":
        with mined_function(place.name, bomb, place.late):
            yield parts
    else:
        yield parts


# ---------------------------------------------------------------------- what must be true


def differences(parts: Parts, whole: dict[str, Any], *, from_batch: int = 0) -> list[str]:
    """Return in what a run's end differs from that of the uninterrupted one."""
    end = final(parts)
    ignored = set()
    if parts.setup.average == "swa":
        # Lightning itself restores neither SWA's schedule nor, within its last epoch, its average,
        # which replaces the weights at the very end; batch by batch the trail is compared
        ignored = {"schedules", "samples", "weights"}
    if from_batch == BATCHES * EPOCHS or parts.setup.average == "swa":
        # nothing is left to do, and Lightning does not repeat the epoch's end
        end["plugin"] = {**end["plugin"], "gates": whole["plugin"]["gates"]}
    return [key for key in whole if key not in ignored and not identical(end[key], whole[key])]


def assert_resumes(parts: Parts, ckpt: Path, whole: dict[str, Any], trail: dict[int, int]) -> None:
    """Resume and compare with the uninterrupted run, batch by batch and at the end."""
    done = int(ckpt.stem)
    parts.model.trail.clear()
    fit(parts, ckpt)
    assert parts.model.trail == {n: seen for n, seen in trail.items() if n >= done}
    assert differences(parts, whole, from_batch=done) == []
    if parts.setup.ledger:
        read_ledger(parts.folder / "ledger.jsonl")


def assert_left_clean(parts: Parts) -> None:
    """After an exception nothing of the plugin is left in Trainer, module, schedulers, torch."""
    amp, model = parts.amp, parts.model
    assert amp.active is False
    assert amp.scaler.watcher is None
    assert amp.scaler.settle is None
    left = {"lr_scheduler_step", "on_validation_model_zero_grad"} & model.__dict__.keys()
    assert not left
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for config in parts.trainer.lr_scheduler_configs or ():
        assert type(config.scheduler).step in (LambdaLR.step, SWALR.step)
    for callback in parts.callbacks:
        assert not {"should_update", "update_parameters"} & callback.__dict__.keys()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
