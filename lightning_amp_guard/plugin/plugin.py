# SPDX-License-Identifier: Apache-2.0
"""The path of a step through a precision plugin, whichever Lightning base class stands behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import AmpGuardError
from lightning_amp_guard.plugin.hearing import Hearing
from lightning_amp_guard.scaler import outside_autocast

__all__ = ["AmpPlugin"]


class AmpPlugin(Hearing):
    """The part of a precision plugin that does not depend on its Lightning base class.

    A shell class derives from this and from Lightning's plugin, in this order, names its guards and
    says how set-ups are refused.
    """

    lightning_base: ClassVar[Any]
    main_params: Callable[[Any], Any]

    # ------------------------------------------------------------------ backward

    def convert_input(self, data: Any) -> Any:
        """At the first training batch, open a saved window and let guards look; or of an epoch."""
        if self.active and self.engine is not None and self.engine.manual:
            self._batch = data
        if self._see_batch and self.active and self.trainer.training and self.engine is not None:
            looks, self._see_batch = self._see_batch, []
            self.engine.begin_batch()
            for look in looks:
                look(data)
        if self.active and (not self._begun or _upstream.begins_epoch(self.trainer)):
            self._begun = self._begun or self.trainer.training
            for see in self._see_epoch:
                see()
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
            self._batch = None

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Autocast around a validation step, where the host waits for the device anyway."""
        self.settle()
        with self.forward_context():  # type: ignore[attr-defined]
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss; every open window is made ready for the gradients to come."""
        if self.active and self.engine is not None:
            for look in self._see_loss:
                look(tensor)
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
        if self.active and self.engine is not None:
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
            return self._step_unguarded(optimizer, model, closure, kwargs)
        result = closure()
        self._listen()
        look, clip = self._between(model, lane.optimizer)
        if engine.manual:
            with outside_autocast(self.device):  # `training_step` goes on around this
                outcome = engine.attempt(lane, look, kwargs, clip=clip)
        else:
            outcome = engine.attempt(lane, look, kwargs, clip=clip, patient=self._may_be_late())
        if outcome is not None:
            self._conclude(outcome, closure)
        else:
            self._settle_if_long()
        if self._overdue is not None:
            self._raise_overdue()
        if not engine.manual:
            engine.movement.end_batch(_upstream.batch_number(self.trainer))
        self._forget_casts()
        return result

    def _step_unguarded(self, optimizer: Any, model: Any, closure: Any, kwargs: Any) -> Any:
        """Step as stock does, except that by hand the closure alone runs under autocast."""
        region = self.forward_context if torch.is_autocast_enabled(self.device) else nullcontext  # type: ignore[attr-defined]
        forward = partial(self._with_fresh_casts, closure, region)
        with outside_autocast(self.device):
            result = super().optimizer_step(optimizer, model=model, closure=forward, **kwargs)  # type: ignore[misc]
        self._forget_casts()
        return result

    def _with_fresh_casts(self, closure: Callable[[], Any], region: Callable[[], Any]) -> Any:
        self._forget_casts()
        with region():
            return closure()

    def _forget_casts(self) -> None:
        # By hand, a training step goes on after its optimizer's, in the same autocast region, and
        # torch does not notice that the weights have moved on from their kept casts.
        if self.settings.weight_cache:
            torch.clear_autocast_cache()

    def _between(self, model: Any, optimizer: Any) -> tuple[Callable[[], object], float | None]:
        """Return what happens between unscaling and stepping, and the norm to clip to if only that."""
        clip = self.trainer.gradient_clip_val if model.automatic_optimization else None
        if not self._unseen:
            return partial(self._after_closure, model, optimizer), None  # type: ignore[attr-defined]
        if not clip or clip <= 0:
            return _nothing, None
        kind = self.trainer.gradient_clip_algorithm or "norm"
        look = partial(self.clip_gradients, optimizer, clip, kind)
        return look, float(clip) if kind == "norm" else None

    def clip_gradients(
        self, optimizer: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Clip true gradients: unscales first where that has not been done."""
        if clip_val > 0:
            optimizer = _upstream.unwrap_optimizer(optimizer)
            self.unscale_(optimizer)
            self._clip(optimizer, clip_val, *args, **kwargs)
            if self.active and self.engine is not None and self.engine.manual:
                self.engine.inspection.approve(self.engine.lane(optimizer))

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


def _nothing() -> None:
    """Stand for hooks and clipping where nobody has any."""
