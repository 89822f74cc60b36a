# SPDX-License-Identifier: Apache-2.0
"""The looks that are taken at the gradients of a log step's attempts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.monitor.ledger.journal import Journal
from lightning_amp_guard.monitor.source import Source
from lightning_amp_guard.monitor.statistics import GradientLook, local_norm
from lightning_amp_guard.step.lanes import Lane

__all__ = ["GradientLooks"]


class GradientLooks:
    """Looks at true gradients before hooks and clipping, at log steps, and reads none of them.

    It is a witness of the plugin's engine; under a foreign plugin the audit calls `witness`.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        source: The scale and the counts.
        journal: The optimizers of now.
        always: Whether the gradient norm is wanted between log steps, too: there is a ledger.
        layers: Whether norms by layer are wanted.

    Host sync: none.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        source: Source,
        journal: Journal,
        *,
        always: bool,
        layers: bool,
    ) -> None:
        self.trainer, self.source, self.journal, self.always = trainer, source, journal, always
        #: Whether the present batch belongs to a log step.
        self.at_log_step = False
        #: By optimizer and attempt, what nobody has read yet.
        self.taken: dict[tuple[int, int], GradientLook] = {}
        self._made: dict[int, Tensor] = {}
        self._by_layer = layers
        self._layers = {id(p): name.rpartition(".")[0] for name, p in module.named_parameters()}

    def looks(self) -> bool:
        """Return whether gradients are looked at: at log steps."""
        return self.at_log_step

    def wants_norm(self) -> bool:
        """Return whether the gradient norm is wanted: at log steps, and for a ledger always."""
        return self.at_log_step or self.always

    def show(self, lane: Lane) -> None:
        """Take down what the true gradients of `lane` look like."""
        self._take(lane.idx, lane.gradients(), lane.scale, 1.0)

    def witness(self, idx: int, grads: list[Tensor], scale: float, carried: float) -> None:
        """Take down what the gradients under a foreign plugin look like; see `Audit`."""
        if self.at_log_step:
            self._take(idx, grads, scale, carried)

    def _take(self, idx: int, grads: list[Tensor], scale: float, carried: float) -> None:
        layers: list[str] = []
        self.journal.follow(self.trainer.optimizers)
        if self._by_layer:
            owner = self.journal.optimizers[idx]
            held = [p for p in _upstream.all_params(owner.param_groups) if p.grad is not None]
            layers = [self._layers.get(id(p), "") for p in held]
        made = self._made.get(idx)
        if made is not None and self.source.native is not None:
            made = made * scale
        look = GradientLook(grads, scale, carried, made, layers)
        # one that evaluates its closure several times is looked at each time: the last look counts
        self.taken[idx, self.source.present_attempt(idx)] = look

    def note_made(self, idx: int, optimizer: Any) -> None:
        """Take down the norm of the optimizer's gradients as the last backward pass left them."""
        params = _upstream.all_params(optimizer.param_groups)
        grads = [p.grad for p in params if p.grad is not None]
        self._made.pop(idx, None)
        if grads:
            # the plugin makes held gradients follow a scale that others move; stock leaves them
            carried = 1.0 if self.source.native is None else self.source.scale
            self._made[idx] = local_norm(grads) / carried

    def hand_over(self) -> dict[tuple[int, int], GradientLook]:
        """Return what has been taken, and begin anew."""
        taken, self.taken, self._made = self.taken, {}, {}
        return taken
