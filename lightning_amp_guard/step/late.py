# SPDX-License-Identifier: Apache-2.0
"""Attempts whose outcome nobody needs at once: decided on the device, read many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason, StepOutcome
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.lanes import Lane, Stage
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["LONGEST_WAIT", "LateAttempts"]

LONGEST_WAIT = 32  # attempts; then they are read


@dataclass(frozen=True)
class _Waiting:
    """An attempt that nobody has read yet; its numbers: found, bad loss, scale and norm if any."""

    attempt: int
    micro_batches: int
    has_norm: bool
    numbers: Tensor


class LateAttempts:
    """Lets a fused Adam or AdamW skip on the device, while the host goes on without waiting.

    Torch's fused optimizers take a flag and leave everything as it was where it is set. The scale
    moves on the device by torch's own kernel, so that a backoff never waits. When somebody asks (a
    log step, a schedule, a checkpoint), and after 32 attempts, all of them are read in one transfer
    and the host follows what the device did.

    Args:
        settings: The plugin's checked settings.
        scaler: The scaler in force.
        windows: The window of the one optimizer.
    """

    def __init__(
        self, settings: AmpSettings, scaler: SkipAwareGradScaler, windows: GradientWindows
    ) -> None:
        self.settings, self.scaler, self.windows = settings, scaler, windows
        self.waiting: list[_Waiting] = []
        self._tracker: Tensor | None = None

    def may_wait(self, lane: Lane) -> bool:
        """Return whether the lane's attempt can be decided on the device. Host sync: none."""
        policy = self.scaler.policy
        return (
            len(self.windows.lanes) == 1
            and policy.settings.hysteresis == 1
            and policy.growth_tracker < policy.settings.growth_interval
            and not self.settings.error_if_nonfinite
            and _upstream.skips_on_device(lane.optimizer)
        )

    def step(self, lane: Lane, attempt: int, kwargs: dict[str, Any]) -> None:
        """Step or skip on the device, and let the scale follow. Host sync: none."""
        (found,) = lane.flags.values()
        with _upstream.found_inf_for(lane.optimizer, found):
            lane.optimizer.step(**kwargs)
        bad = self._bad_loss(lane, found)
        scale = self.scaler.device_scale if self.windows.scaling else None
        norm = None if lane.norm is None else _upstream.whole(lane.norm.detach()).float()
        parts = [part.to(found.device) for part in (found, bad, scale, norm) if part is not None]
        self.waiting.append(
            _Waiting(attempt, lane.micro_batches, norm is not None, torch.stack(parts))
        )
        if scale is not None and self.scaler.policy.settings.dynamic:
            self._move(scale, found, bad)
        lane.stage, lane.norm = Stage.STEPPED, None
        for cell in lane.cells:
            cell.consumed, cell.spoiled = True, False

    def _bad_loss(self, lane: Lane, found: Tensor) -> Tensor:
        """Return the flag again where a loss of the window was inf or NaN as well, else zero."""
        losses = [loss.to(found.device) for cell in lane.cells for loss in cell.losses]
        if any([cell.nonfinite_loss for cell in lane.cells]):
            return found
        if not losses:
            return torch.zeros_like(found)
        finite = losses[0].isfinite()
        if len(losses) > 1 or finite.ndim:
            finite = torch.stack([loss.isfinite().all() for loss in losses]).all()
        return torch.where(finite, 0.0, found)

    def _move(self, scale: Tensor, found: Tensor, bad: Tensor) -> None:
        policy = self.scaler.policy
        if self._tracker is None:
            self._tracker = torch.zeros((), dtype=torch.int32, device=scale.device)
        if len(self.waiting) == 1:
            self._tracker.fill_(policy.growth_tracker)
        if not self.settings.backoff_on_nonfinite_loss:
            # a loss that was bad by itself neither backs off nor counts: -1 here, +1 by the kernel
            self._tracker.sub_(bad.int())
            found = found - bad
        self.scaler.move_on_device(self._tracker, found)

    def settle(self) -> list[StepOutcome]:
        """Read what is waiting, let the host's scale follow, and return the outcomes in order.

        Host sync: one, none if nothing is waiting.
        """
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return []
        numbers = iter(torch.cat([one.numbers for one in waiting]).tolist())
        outcomes = [self._follow(one, numbers) for one in waiting]
        lane, applied = self.windows.lanes[0], outcomes[-1].applied
        for cell in self.windows.cells:
            cell.spoiled = cell.consumed and not applied
        if lane.stage is Stage.STEPPED and not applied:  # its gradients are still there
            lane.note_finite()
        return outcomes

    def _follow(self, one: _Waiting, numbers: Iterator[float]) -> StepOutcome:
        found, bad = next(numbers), next(numbers)
        scale = next(numbers) if self.windows.scaling else 1.0
        norm = next(numbers) if one.has_norm else None
        reason = None
        if found:
            reason = SkipReason.NONFINITE_LOSS if bad else SkipReason.NONFINITE_GRADIENTS
        if self.windows.scaling:
            assert scale == self.scaler.policy.scale, "the device's scale has left the host's"
            self._move_host(reason)
        return StepOutcome(
            self.windows.lanes[0].idx,
            one.attempt,
            reason is None,
            reason,
            scale,
            # growth shows in the next outcome's scale
            scale if reason is None else self.scaler.policy.scale if self.windows.scaling else 1.0,
            one.micro_batches,
            norm if reason is None else None,
        )

    def _move_host(self, reason: SkipReason | None) -> None:
        if reason is None:
            self.scaler.policy.clean_batch()
        elif self.settings.backs_off(reason):
            self.windows.overflows += 1
            self.scaler.policy.overflow()
