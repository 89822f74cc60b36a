# SPDX-License-Identifier: Apache-2.0
"""What makes inf or NaN in a run whose precision plugin does not look for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_amp_guard.diagnosis.batch import bad_fields
from lightning_amp_guard.diagnosis.watch import Culprit, NonFiniteWatch
from lightning_amp_guard.monitor.records import WINDOW
from lightning_amp_guard.outcome import SkipReason, StepOutcome

__all__ = ["Suspicion"]

_PATIENCE = 32  # watched attempts in a row; what they did not show, others will not


class Suspicion:
    """Watches a module from the first sign of trouble to the next clean step.

    A skip, or a loss or gradient norm that is known to be inf or NaN, arms it: hooks then measure
    what goes in and comes out of every module. It watches the attempt after the one that gave the
    sign, for an operation of the past cannot be measured any more; so where nothing was skipped the
    weights may hold the NaN by then, and are named. The batch of a bad loss is looked into at once.
    Unarmed, nothing is hooked and nothing read. Where the plugin has a locator, skips are its.

    Args:
        module: The LightningModule.
        locator: The plugin's `NonFiniteLocator`, if it has one.
        precision: The run's, as Lightning names it.

    Host sync: none unless armed; then one per device and attempt, and one per batch of a bad loss.

    Example:
        >>> import torch
        >>> from lightning_amp_guard.outcome import StepOutcome
        >>> suspicion = Suspicion(torch.nn.Linear(2, 1))
        >>> applied = StepOutcome(0, 7, True, None, 1.0, 1.0, 1)
        >>> suspicion.hear(applied, math.nan, torch.tensor([[1.0, math.inf]]))
        >>> suspicion.armed, suspicion.bad_batch, list(suspicion.bad_attempts)
        (True, 'batch holds 1 inf in 2 values (float32, shape (1, 2)), first at sample 0', [(0, 7)])
        >>> suspicion.close()
    """

    def __init__(self, module: Module, locator: Any = None, precision: Any = "16-mixed") -> None:
        self.module, self.locator, self.precision = module, locator, precision
        self._culprit: Culprit | None = None
        #: What was not finite in the batch of the latest bad loss whose batch was not finite.
        self.bad_batch = ""
        self._bad_attempts: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._watch: NonFiniteWatch | None = None
        self._troubled: set[int] = set()
        self._patience = _PATIENCE
        self._scanned = ""

    @property
    def armed(self) -> bool:
        """Whether the module is being watched."""
        return self._watch is not None

    @property
    def culprit(self) -> Culprit | None:
        """What the last watched attempt with trouble has found, if anything."""
        return self._culprit or getattr(self.locator, "culprit", None)

    @property
    def bad_attempts(self) -> Collection[tuple[int, int]]:
        """Optimizer and attempt of each bad loss whose batch was not finite, the newest ones."""
        return tuple(self._bad_attempts)

    def close(self) -> None:
        """Take every hook away; what was found stays."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def see_batch(self, batch: Any) -> None:
        """Look into a micro-batch before its step, if armed: a window has several."""
        if self._watch is not None and not self._scanned:
            self._scanned = bad_fields(batch)

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass, if armed. Host sync: none."""
        if self._watch is not None:
            self._watch.see_loss(loss)

    def hear(self, outcome: StepOutcome, loss: float | None, batch: Any) -> None:
        """Take an attempt into account: arm, read or disarm.

        Args:
            outcome: What became of it.
            loss: Its loss, `None` where nobody has looked.
            batch: Its last micro-batch.
        """
        if outcome.reason is SkipReason.PARTNER_SKIPPED:
            return
        located = self.locator is not None and not outcome.applied
        known = (self.locator.bad_batch or None) if located else None  # by hand it has no batch
        bad_loss = outcome.reason is SkipReason.NONFINITE_LOSS or _is_bad(loss)
        if bad_loss:
            self._look_into(batch, outcome.optimizer_idx, outcome.attempt, known)
        self._scanned = ""
        bad = bad_loss or not outcome.applied or _is_bad(outcome.grad_norm)
        if located:
            self._culprit = None  # the locator's is newer
            bad = False
        if self._watch is not None:
            bad = self._read(self._watch) or bad
        self._follow(outcome.optimizer_idx, bad)

    def note(
        self, optimizer_idx: int, attempt: int, loss: float | None, batch: Any, *, applied: bool
    ) -> None:
        """Take into account that an attempt's loss has become known after it was heard of."""
        if not _is_bad(loss):
            return
        self._look_into(batch, optimizer_idx, attempt, None)
        if applied or self.locator is None:  # skips are the locator's
            self._follow(optimizer_idx, True)

    def _look_into(self, batch: Any, idx: int, attempt: int, known: str | None) -> None:
        found = known if known is not None else self._scanned or bad_fields(batch)
        if found:
            self.bad_batch = found
            if (idx, attempt) not in self._bad_attempts:
                self._bad_attempts.append((idx, attempt))

    def _read(self, watch: NonFiniteWatch) -> bool:
        """Return whether the watched attempt had trouble, and keep whom to blame."""
        found = watch.culprit()
        watch.reset()
        if found is not None and found.parameters:
            self._patience = 0  # weights that hold inf or NaN do not recover
            found = self._culprit or found  # and are the consequence of what was found before
        self._culprit = found or self._culprit
        return found is not None

    def _follow(self, idx: int, bad: bool) -> None:
        """Arm at trouble; end the watch once whoever was in trouble is out of it, or for good."""
        if not bad:
            self._troubled.discard(idx)
            if not self._troubled:
                self.close()
                self._patience = _PATIENCE
            return
        self._troubled.add(idx)
        self._patience -= 1
        if self._patience < 0:
            self.close()
        elif self._watch is None:
            self._culprit = None
            self._watch = NonFiniteWatch(self.module, self.precision).install()


def _is_bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
