# SPDX-License-Identifier: Apache-2.0
"""What is taken down of backward passes: their losses, and what they made of gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_amp_guard.monitor.gradient_looks import GradientLooks
from lightning_amp_guard.monitor.ledger.journal import Journal
from lightning_amp_guard.monitor.source import Source
from lightning_amp_guard.monitor.statistics import wide
from lightning_amp_guard.monitor.suspicion import Suspicion
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["BackwardPasses"]


class BackwardPasses:
    """Takes down losses for a ledger, and at log steps the norms of gradients nobody has touched.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        source: Who knows which optimizers a pass has reached.
        journal: Where losses go.
        looks: Where norms go.
        suspicion: Who looks at losses when there is trouble.

    Host sync: none.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        source: Source,
        journal: Journal,
        looks: GradientLooks,
        suspicion: Suspicion,
    ) -> None:
        self.trainer, self.module, self.source = trainer, module, source
        self.journal, self.looks, self.suspicion = journal, looks, suspicion
        self._loss: Tensor | None = None

    def before(self, loss: Tensor) -> None:
        """Take down the loss of a backward pass."""
        self.suspicion.see_loss(loss)
        if (audit := self.source.audit) is not None:
            audit.before_backward(loss)
            if self.journal.looks:
                self._loss = self._as_returned(loss) / audit.known_scale.value

    def after(self) -> None:
        """Take down what a backward pass made."""
        audit, native = self.source.audit, self.source.native
        if audit is not None:
            reached, loss = audit.after_backward(), self._loss
            optimizers, self._loss = audit.optimizers, None
        elif native is not None and (self.journal.looks or self.looks.at_log_step):
            windows = native.running().windows
            reached, loss = _reached(windows), windows.loss
            optimizers = [lane.optimizer for lane in windows.lanes]
            loss = None if loss is None or not self.journal.looks else self._as_returned(loss)
        else:
            return
        if loss is not None:
            for idx, first in reached:
                self.journal.losses.add(idx, loss, first=first)
        if self.looks.at_log_step and self._may_be_touched():
            for idx, _ in reached:
                self.looks.note_made(idx, optimizers[idx])

    def _as_returned(self, loss: Tensor) -> Tensor:
        return loss.detach().to(wide(loss.device)) * self.divisor()

    def divisor(self) -> int:
        """Return what Lightning has divided the loss by."""
        return self.trainer.accumulate_grad_batches if self.module.automatic_optimization else 1

    def _may_be_touched(self) -> bool:
        if self.source.scaler is None:
            return False
        return not any(guard.name == "UnscaleGuard" for guard in self.source.guards)


def _reached(windows: GradientWindows) -> list[tuple[int, bool]]:
    """Return the optimizers that the last pass has reached, each with whether its window is new."""
    return [
        (lane.idx, max(cell.micro_batches for cell in lane.cells) == 1)
        for lane in windows.lanes
        if any(cell in windows.reached for cell in lane.cells)
    ]
