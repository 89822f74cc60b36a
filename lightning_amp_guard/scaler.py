# SPDX-License-Identifier: Apache-2.0
"""A GradScaler that says what became of each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.scaler_base import BoundedGradScaler, one_number

__all__ = ["SkipAwareGradScaler", "outside_autocast", "read_flags"]


class SkipAwareGradScaler(BoundedGradScaler):
    """Scales losses like `torch.amp.GradScaler`, within bounds, and knows whether a step ran.

    Whether a step is skipped is decided by the non-finite check of its gradients and by nothing
    else, so a scale that stands still (static, at its bound, held by hysteresis) is never mistaken
    for an applied step. Skips are decided on the host for every optimizer, fused ones included, so a
    skipped step leaves optimizer state as it was (torch 2.13 leaves the momentum buffer of a fused
    SGD uninitialised when its first step is skipped). With hysteresis 1 and no bound hit, the scale
    equals torch's bit for bit.

    Args:
        device: Device type of the losses, as in torch.
        init_scale: Scale at the start; a finite number above 0 between the bounds.
        growth_factor: Above 1; factor at growth.
        backoff_factor: Between 0 and 1; factor at an overflow.
        growth_interval: Clean batches in a row before growth.
        enabled: `False` makes every method pass through, as in torch.
        dynamic: `False` keeps the scale at `init_scale`; steps are still skipped.
        hysteresis: The n-th overflow since the last growth backs off, and each further one until
            growth refills it (the rule of Megatron-LM's `DynamicGradScaler`).
        min_scale: Lower bound, `None` for none (the scale still never reaches 0).
        max_scale: Upper bound, `None` for none (the scale still never reaches inf).

    Raises:
        ValueError: A number is out of range; the message names the argument.
        TypeError: An argument has the wrong type.

    Host sync: `step` reads one flag per device; `unscale_`, `get_scale` and `update` read nothing
    (torch's `get_scale` does).

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> scaler = SkipAwareGradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.was_skipped(optimizer)
        False
        >>> scaler.update()
    """

    # ------------------------------------------------------------------ scale and unscale

    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the scale. Host sync: none."""
        if self.watcher is not None:
            if isinstance(outputs, Iterator):
                outputs = list(outputs)
            self.watcher.before_backward(outputs)
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale and check them, once per window.

        A second call in the same window does nothing (torch raises), and Lightning's
        `LightningOptimizer` is accepted in place of the optimizer it wraps. Host sync: none.

        Raises:
            RuntimeError: After `step()` and before `update()`, or before any `scale()`.
        """
        if not self.is_enabled():
            return
        optimizer = _upstream.unwrap_optimizer(optimizer)
        if self.watcher is not None:
            self.watcher.unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            return
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step(). Call update() first.")
        self.note_unscaled(optimizer, self.check_(optimizer))

    def check_(self, holder: Any, *, scaled: bool = True) -> dict[torch.device, Tensor]:
        """Divide the gradients of `holder.param_groups` by the scale and flag non-finite ones.

        Args:
            holder: An optimizer, or anything with `param_groups`.
            scaled: `False` for gradients that carry no scale: they are checked only.

        Returns:
            Per device a 0-dimensional float32 flag, 1.0 where a gradient is inf or NaN; empty if
            no parameter has a gradient.

        Host sync: none.
        """
        if not scaled:
            return self.multiply_held_(holder, 1.0)
        if self._scale is None and self.watcher is not None:
            # a window from a checkpoint may be stepped before a loss is scaled
            self._lazy_init_scale_growth_tracker(holder.param_groups[0]["params"][0].device)
        if self._scale is None:
            raise RuntimeError(
                "Gradients are to be unscaled, but no loss was scaled. Scale the loss first:"
                " `scaler.scale(loss).backward()`, or `self.manual_backward(loss)` in Lightning."
            )
        if self._inverse is None:
            # in double precision, as torch does: a float32 reciprocal may be off by one place
            self._inverse = self._scale.double().reciprocal().float()
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        return self._unscale_grads_(holder, self._inverse, found, allow_fp16=False)

    def multiply_held_(self, holder: Any, ratio: float) -> dict[torch.device, Tensor]:
        """Multiply gradients by `ratio` and flag non-finite ones; exact for powers of two."""
        first = holder.param_groups[0]["params"][0]
        factor = torch.full((), ratio, dtype=torch.float32, device=first.device)
        return self._unscale_grads_(holder, factor, torch.zeros_like(factor), allow_fp16=True)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        flags: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for grad in _gradients(optimizer, allow_fp16):
                buckets[grad.device, grad.dtype].append(grad)
            for (device, _), grads in buckets.items():
                flag = flags.setdefault(device, found_inf.to(device))
                _upstream.any_nonfinite_and_multiply_(grads, flag, inv_scale.to(device))
        return flags

    # ------------------------------------------------------------------ step

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, then step unless a gradient is non-finite; return what `optimizer.step` returns.

        A step of an optimizer without gradients does nothing. Host sync: one flag per device.
        """
        optimizer = _upstream.unwrap_optimizer(optimizer)
        if not self.is_enabled():
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or args:
            raise RuntimeError(
                "A closure would run after the gradients were checked: call it first."
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED and self.watcher is None:
            raise RuntimeError("step() has already been called since the last update().")
        self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            return None
        skipped = state["skipped"] = read_flags(state["found_inf_per_device"].values())
        with outside_autocast(self._device):
            result = None if skipped else optimizer.step(**kwargs)
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def was_skipped(self, optimizer: Optimizer) -> bool | None:
        """Return whether the last `step` since `update` was skipped; `None` if there was none."""
        if not self.is_enabled():
            return None
        state = self._per_optimizer_states.get(id(_upstream.unwrap_optimizer(optimizer)), {})
        return cast("bool | None", state.get("skipped"))

    def note_unscaled(self, optimizer: Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Record the flags of a check, where torch keeps them too."""
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = flags
        state["stage"] = OptState.UNSCALED

    # ------------------------------------------------------------------ the scale moves

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back off if a step since the last update was skipped, else count towards growth.

        Args:
            new_scale: Sets the scale instead, moved to the nearest bound.

        Raises:
            ValueError: `new_scale` is NaN, or a tensor of several elements.
            TypeError: `new_scale` is no number.

        Host sync: one flag per device for optimizers that were unscaled but not stepped.
        """
        if not self.is_enabled():
            return
        if new_scale is not None:
            self.set_scale(one_number(new_scale))
        elif checked := [
            s for s in self._per_optimizer_states.values() if s["found_inf_per_device"]
        ]:
            bad = any(
                s["skipped"] if "skipped" in s else read_flags(s["found_inf_per_device"].values())
                for s in checked
            )
            self.back_off() if bad else self.count_clean_batch()
        if self.watcher is not None:
            self.watcher.updated()
        self._per_optimizer_states.clear()

    def back_off(self) -> None:
        """Take an overflow into account at once. Host sync: none."""
        self._moved(self.policy.overflow())

    def count_clean_batch(self, *, wait: bool = False) -> None:
        """Count a batch without overflow; see `ScalePolicy.clean_batch`. Host sync: none."""
        self._moved(self.policy.clean_batch(wait=wait))


def read_flags(flags: Iterable[Tensor]) -> bool:
    """Return whether a flag is set. Host sync: one per flag."""
    return any([flag.item() for flag in flags])


def outside_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast, so that an optimizer's own products stay in float32.

    In manual optimization Lightning's autocast region is around the whole `training_step`, steps
    included: the matrix products of Muon and Adafactor would be computed in half precision.

    Args:
        device: Device type.
    """
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _gradients(holder: Any, allow_fp16: bool) -> list[Tensor]:
    params = _upstream.all_params(holder.param_groups)
    grads = _upstream.as_plain([p.grad for p in params if p.grad is not None])
    if not allow_fp16 and any([g.dtype is torch.float16 for g in grads]):
        raise ValueError(
            "Attempting to unscale FP16 gradients: parameters that are trained must be float32."
            " Keep the model in float32 (no `.half()`); autocast casts what is safe."
        )
    return grads
