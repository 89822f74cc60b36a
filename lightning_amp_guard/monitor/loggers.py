# SPDX-License-Identifier: Apache-2.0
"""What goes to loggers and progress bar, and at which batch they take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp_guard import _upstream
from lightning_amp_guard.monitor.metrics import LOG_KEYS

__all__ = ["closes_window", "emit", "forget"]

_HOOK = "on_train_batch_end"


def closes_window(trainer: Any) -> bool:
    """Return whether the batch ends an accumulation window; loggers take no other batch's values."""
    done = trainer.fit_loop.epoch_loop.batch_progress
    ready = done.current.ready
    last = ready == trainer.num_training_batches or done.is_last_batch
    return bool(last or ready % trainer.accumulate_grad_batches == 0)


def emit(pl_module: Any, values: Mapping[str, float], prog_bar: bool | tuple[str, ...]) -> None:
    """Log the values, from within `on_train_batch_end`.

    Args:
        pl_module: The LightningModule, whose `log_dict` reaches loggers and bar.
        values: By metric key.
        prog_bar: Which of them the progress bar shows too, by key; `True` for all.
    """
    # On the host, in float64: a plain number would be moved to the module's device and be
    # read back for each logger and bar, and the host would wait every time.
    made = {k: torch.tensor(v, dtype=torch.float64, device="cpu") for k, v in values.items()}
    in_bar = prog_bar if isinstance(prog_bar, tuple) else LOG_KEYS * prog_bar
    for bar in (True, False):
        some = {key: value for key, value in made.items() if (key in in_bar) is bar}
        if some:
            pl_module.log_dict(some, prog_bar=bar, batch_size=1)


def forget(trainer: Any) -> None:
    """Take what `emit` has logged out of what Lightning goes through after every batch."""
    _upstream.rest_logged(trainer, _HOOK, LOG_KEYS)
