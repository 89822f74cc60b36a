# SPDX-License-Identifier: Apache-2.0
"""The path of a step through a precision plugin, whichever Lightning base class stands behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.alarm import alarm
from lightning_amp_guard.errors import AmpGuardError
from lightning_amp_guard.life_cycle import LifeCycle
from lightning_amp_guard.outcome import StepOutcome

__all__ = ["AmpPlugin"]


class AmpPlugin(LifeCycle):
    """The part of a precision plugin that does not depend on its Lightning base class.

    A shell class derives from this and from Lightning's plugin, in this order, names its guards and
    says how set-ups are refused.
    """

    lightning_base: ClassVar[Any]
    main_params: Callable[[Any], Any]

    # ------------------------------------------------------------------ backward

    def convert_input(self, data: Any) -> Any:
        """At the first training batch, open a saved window and let guards look."""
        if self._see_batch and self.active and self.trainer.training and self.engine is not None:
            looks, self._see_batch = self._see_batch, []
            self.engine.begin_batch()
            for look in looks:
                look(data)
        return super().convert_input(data)  # type: ignore[misc]

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Autocast around the training step; in manual optimization also the batch's begin and end."""
        engine = self.engine if self.active else None
        if engine is not None:
            engine.begin_batch()
        with self.forward_context():  # type: ignore[attr-defined]
            yield
        if engine is not None and engine.manual:
            engine.movement.end_batch(None)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss; every open window is made ready for the gradients to come."""
        if self.active and self.engine is not None:
            if self.scaler is None:
                self.engine.before_backward(tensor)
            elif self._probe.on():
                self._probe.loss = tensor
        return super().pre_backward(tensor, module)  # type: ignore[misc,no-any-return]

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass; under `detect_anomaly` judge it without the scale."""
        run = partial(super().backward, tensor, model, optimizer, *args, **kwargs)  # type: ignore[misc]
        if self._probe.loss is not None:
            self._run_backward(model, run)
        else:
            run()

    def _run_backward(self, model: Any, run: Callable[[], Any]) -> None:
        self._probe.run(model, run, sharded=_upstream.is_fully_sharded(model))

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Note the gradients before any hook can touch them."""
        if self.active and self.engine is not None:
            self.engine.after_backward()
        return super().post_backward(tensor, module)  # type: ignore[misc,no-any-return]

    # ------------------------------------------------------------------ step

    def unscale_(self, optimizer: Any) -> None:
        """Unscale and check the optimizer's gradients, once per window.

        Call it before looking at gradients, or changing them, earlier than
        `on_before_optimizer_step`. A second call does nothing; the `LightningOptimizer` that
        `self.optimizers()` returns is accepted. Host sync: none.
        """
        if self.active and self.engine is not None and self.engine.checking:
            self.engine.unscale_(optimizer)

    def all_or_none(self, *optimizers: Any) -> AbstractContextManager[None]:
        """Let several optimizers apply their updates together, or none of them.

        Manual optimization. Unscales and checks all of them on entry; inside, each `step()` runs at
        once with hooks and clipping, or is skipped: with its own reason where its own gradients are
        non-finite, with `PARTNER_SKIPPED` where another's are. `zero_grad` may be called anywhere.

        Args:
            optimizers: Those that belong together; none for all.

        Raises:
            AmpGuardError: Inside, at a backward pass, a nested block or a step of another optimizer;
                on entry, outside of a fit or in automatic optimization.

        Host sync: one on entry, besides the one of each attempt.
        """
        if self.engine is None or not self.active or not self.engine.manual:
            raise AmpGuardError(
                f"`{self._name()}.all_or_none(...)`: there is nothing to hold together here. Expected"
                " a call from `training_step` in manual optimization. Set"
                " `self.automatic_optimization = False` and step the optimizers inside the block."
            )
        return self.engine.all_or_none(optimizers)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, hooks, clip, step or skip; return the closure's result."""
        engine = self.engine if self.active else None
        lane = None if engine is None else engine.lane(optimizer)
        if engine is None or lane is None or lane.idx in self._unguarded:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        look = partial(self._after_closure, model, lane.optimizer)  # type: ignore[attr-defined]
        outcome = engine.attempt(lane, look, kwargs)
        if outcome is not None:
            self._conclude(outcome)
        if not engine.manual:
            engine.movement.end_batch(_upstream.batch_number(self.trainer))
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Clip true gradients: unscales first where that has not been done."""
        if clip_val > 0:
            optimizer = _upstream.unwrap_optimizer(optimizer)
            self.unscale_(optimizer)
            self._clip(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_value(self, optimizer: Any, clip_val: Any) -> None:
        """Clip each element; torch's own function fails where there is no gradient at all."""
        if _upstream.has_gradients(optimizer):
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]

    def _clip(self, optimizer: Any, clip_val: Any, *args: Any, **kwargs: Any) -> None:
        # past MixedPrecision, which refuses fused optimizers: their gradients are unscaled by now
        clip = super(self.lightning_base, self).clip_gradients  # type: ignore[misc]
        clip(optimizer, clip_val, *args, **kwargs)

    def _keep_norm(self, optimizer: Any, norm: Tensor) -> None:
        if self.active and self.engine is not None:
            self.engine.lane(optimizer).norm = norm

    def _conclude(self, outcome: StepOutcome) -> None:
        self.last_outcome = outcome
        for after in self._after:
            after(outcome)
        callbacks = self.trainer.callbacks
        if self._heard[0] is not callbacks or self._heard[1] != len(callbacks):
            self._heard, self._hooks = (callbacks, len(callbacks)), self._find_hooks(callbacks)
        for hook in self._hooks:
            hook(outcome)
        if not outcome.applied:
            self._sound_alarm(outcome)

    def _find_hooks(self, callbacks: list[Any]) -> list[Callable[[StepOutcome], Any]]:
        heard = [getattr(callback, "on_step_outcome", None) for callback in callbacks]
        hooks = [partial(h, self.trainer, self.module) for h in heard if callable(h)]
        own = getattr(self.module, "on_step_outcome", None)
        return [*hooks, own] if callable(own) else list(hooks)

    def _sound_alarm(self, outcome: StepOutcome) -> None:
        assert self.engine is not None
        idx = outcome.optimizer_idx
        error = alarm(
            outcome,
            self.tallies[idx],
            self.settings,
            self._name(),
            self.engine.windows.lanes[idx],
            self.parameter_names(),
            scaling=self.scaler is not None,
        )
        if error is not None:
            # a checkpoint written because of the error must not end the resumed run at once
            self.tallies[idx] = self.tallies[idx].forgiven()
            raise error
