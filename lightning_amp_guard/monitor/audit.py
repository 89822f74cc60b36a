# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a run under a precision plugin of another make, which tells none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.guards._base import InstancePatch
from lightning_amp_guard.monitor.foreign import KnownScale, OpenWindow
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally

__all__ = ["Audit"]

_Witness = Callable[[int, list[Tensor], float, float], Any]


class Audit:
    """Watches stock `MixedPrecision` (or plain float32) and makes the outcomes that it does not.

    An attempt is a call of the scaler's step, or of the optimizer's where nothing is scaled; whether
    it was applied is read off torch's own flags. Nothing in the run is changed; the two methods that
    are listened to are put back by `close`.

    Args:
        trainer: A Trainer that fits.
        hear: Receives each outcome.
        witness: Called before hooks and clipping with the optimizer's position, its gradients, the
            scale of the window, and the factor that the gradients still carry.
        wants_norm: Whether the gradient norm of the present batch is wanted.
        tallies: Counts to go on from, those of a checkpoint.

    Host sync: none for optimizers that torch unscales and checks anyway; one per step for fused
        ones under a scaler, one where the norm is wanted, two where the scale may have moved.
    """

    def __init__(
        self,
        trainer: Any,
        hear: Callable[[StepOutcome], None],
        witness: _Witness,
        wants_norm: Callable[[], bool],
        tallies: list[StepTally],
    ) -> None:
        self.trainer, self.hear, self.witness, self.wants_norm = trainer, hear, witness, wants_norm
        plugin = trainer.precision_plugin
        self.scaler = _scaler_of(plugin)
        self.known_scale = KnownScale(self.scaler)
        self.optimizers: list[Optimizer] = []
        self.tallies = list(tallies)
        self._windows: list[OpenWindow] = []
        self._positions: dict[int, int] = {}
        self._fused: set[int] = set()
        self._handles: list[Any] = []
        self._pending: tuple[Tensor, list[list[_upstream.GradMark]]] | None = None
        self._norms: dict[int, Tensor] = {}
        self._ran: set[int] = set()
        self._waiting: dict[int, tuple[bool, float]] = {}
        self._patches = [InstancePatch(plugin, _upstream.HOOKS_AND_CLIP, self._look)]
        if self.scaler is not None:
            self._patches.append(InstancePatch(self.scaler, "step", self._scaled_step))
            self._patches.append(InstancePatch(self.scaler, "update", self._scale_moves))
        self._follow()

    def _follow(self) -> None:
        """Listen to the Trainer's optimizers of now; a callback may have replaced them."""
        for handle in self._handles:
            handle.remove()
        windows = dict(zip(map(id, self.optimizers), self._windows, strict=True))
        self.optimizers = [_upstream.unwrap_optimizer(o) for o in self.trainer.optimizers]
        self._positions = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
        self._fused = {i for i, o in enumerate(self.optimizers) if _upstream.steps_with_scale(o)}
        self._windows = [windows.get(id(o)) or OpenWindow() for o in self.optimizers]
        self._handles = [o.register_step_post_hook(self._stepped) for o in self.optimizers]
        self.tallies += [StepTally() for _ in self.optimizers[len(self.tallies) :]]

    def close(self) -> None:
        """Listen no more."""
        for patch in self._patches:
            patch.undo()
        for handle in self._handles:
            handle.remove()

    @property
    def scale(self) -> float:
        """The scale in force. Host sync: one with a scaler, two more if it is another than known."""
        if self.scaler is not None and self.scaler.get_scale() != self.known_scale.value:
            self.known_scale.read()
        return self.known_scale.value

    # ------------------------------------------------------------------ backward

    def before_backward(self, loss: Tensor) -> None:
        """Take down the loss of a backward pass, scaled or not. Host sync: none."""
        for idx, optimizer in enumerate(self.optimizers):
            if self._windows[idx].micro_batches and not _upstream.has_gradients(optimizer):
                self._windows[idx] = OpenWindow()  # zeroed without a step
        several = len(self.optimizers) > 1  # of a single one nobody asks what the pass reaches
        marks = [_upstream.grad_marks(p) for p in self._parameters()] if several else []
        self._pending = loss, marks

    def after_backward(self) -> list[tuple[int, bool]]:
        """Return the optimizers that the pass has reached, each with whether its window is new.

        Host sync: none.
        """
        if self._pending is None:
            return []
        (loss, marks), self._pending = self._pending, None
        if len(self.optimizers) == 1:
            return [(0, self._windows[0].add(loss))]
        moved = map(_upstream.moved_since, self._parameters(), marks)
        return [(i, self._windows[i].add(loss)) for i, found in enumerate(moved) if found]

    def _parameters(self) -> list[list[Tensor]]:
        return [_upstream.all_params(o.param_groups) for o in self.optimizers]

    # ------------------------------------------------------------------ the path of a step

    def _idx(self, optimizer: Any) -> int | None:
        if (idx := self._positions.get(id(optimizer))) is not None:
            return idx
        optimizer = _upstream.unwrap_optimizer(optimizer)
        if id(optimizer) not in self._positions:
            self._follow()
        return self._positions.get(id(optimizer))

    def _look(self, original: Any, model: Any, optimizer: Any) -> Any:
        idx = self._idx(optimizer)
        if (self.scaler is None or idx not in self._fused) and self.wants_norm():
            self._show(idx, optimizer, 1.0)
        return original(model, optimizer)

    def _show(self, idx: int | None, optimizer: Any, carried: float) -> None:
        grads = [p.grad for p in _upstream.all_params(optimizer.param_groups)]
        present = [g for g in grads if g is not None]
        if idx is not None and present:
            self.witness(idx, present, self.known_scale.value, carried)
            self._norms[idx] = _upstream.total_norm(present) / carried

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        idx = self._idx(optimizer)
        if idx is None:
            return
        if self.scaler is None:
            if _upstream.has_gradients(optimizer):
                self._conclude(idx, applied=True, scale=1.0, next_scale=1.0)
        else:
            self._ran.add(idx)

    def _scaled_step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        idx, scale = self._idx(optimizer), self.known_scale.value
        if idx in self._waiting:
            self._conclude_all(scale)  # nobody calls `update`
        if idx in self._fused and self.wants_norm():
            # nobody sees its gradients without the scale, unless they are unscaled by hand
            unscaled = _upstream.is_unscaled(self.scaler, optimizer)
            self._show(idx, optimizer, 1.0 if unscaled else scale)
        self._ran.clear()
        result = original(optimizer, *args, **kwargs)
        if idx is not None:
            applied = idx in self._ran
            if applied and idx in self._fused:
                applied = not _upstream.found_inf(self.scaler, optimizer)
            self._waiting[idx] = applied, scale
        return result

    def _scale_moves(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        skipped = not all([applied for applied, _ in self._waiting.values()])
        sure = skipped or not self._waiting or bool(args or kwargs)
        self.known_scale.updated(surely=sure)
        self._conclude_all(self.known_scale.value)
        return result

    def _conclude_all(self, after: float) -> None:
        waiting, self._waiting = self._waiting, {}
        for idx, (applied, scale) in waiting.items():
            self._conclude(idx, applied=applied, scale=scale, next_scale=after)

    def _conclude(self, idx: int, *, applied: bool, scale: float, next_scale: float) -> None:
        norm = self._norms.pop(idx, None)
        window, self._windows[idx] = self._windows[idx], OpenWindow()
        outcome = StepOutcome(
            idx,
            self.tallies[idx].attempted,
            applied,
            None if applied else _blame(window),
            scale,
            next_scale,
            max(window.micro_batches, 1),
            None if norm is None or not applied else float(norm),
        )
        self.tallies[idx] = self.tallies[idx].after(outcome)
        self.hear(outcome)


def _blame(window: OpenWindow) -> SkipReason:
    """Return why the window was skipped. Host sync: one per loss."""
    if window.had_nonfinite_loss():
        return SkipReason.NONFINITE_LOSS
    return SkipReason.NONFINITE_GRADIENTS


def _scaler_of(plugin: Any) -> torch.amp.GradScaler | None:
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        return scaler
    return None
