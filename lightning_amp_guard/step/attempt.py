# SPDX-License-Identifier: Apache-2.0
"""One attempt, from the unscaled gradients to its outcome; free of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.all_or_none import AllOrNone
from lightning_amp_guard.step.given_up import GivenUp
from lightning_amp_guard.step.inspection import Inspection
from lightning_amp_guard.step.lanes import Lane, Stage
from lightning_amp_guard.step.late import LateAttempts
from lightning_amp_guard.step.movement import ScaleMovement
from lightning_amp_guard.step.one_walk import clip_and_step
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.record import Record
from lightning_amp_guard.step.roles import Reopens, Witness
from lightning_amp_guard.step.verdict import blame, read_verdict
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["AttemptEngine"]


class AttemptEngine:
    """Takes attempts along the path unscale, look, step or skip, move the scale, outcome.

    Holds no reference to a Trainer: a plugin hands in what has to happen between unscaling and
    stepping, and receives the outcome. One host read per attempt, in `read_verdict`;
    after a skip one more for the losses.

    Args:
        settings: The plugin's checked settings.
        scaler: The scaler in force, or one that stays at 1.0 where losses are not scaled.
        optimizers: The Trainer's optimizers, in order.
        tallies: Running counts per optimizer, extended and updated in place.
        scaling: Whether losses are scaled (FP16).
        checking: Whether gradients are checked; without it every attempt is applied.
        manual: Whether the user steps by hand, and may step again without a backward pass.
    """

    def __init__(
        self,
        settings: AmpSettings,
        scaler: SkipAwareGradScaler,
        optimizers: list[Any],
        tallies: list[StepTally],
        *,
        scaling: bool = True,
        checking: bool = True,
        manual: bool = False,
    ) -> None:
        self.settings = settings
        self.scaler = scaler
        self.manual = manual
        self.windows = GradientWindows(optimizers, scaler, scaling=scaling)
        self.tallies, self.record = tallies, Record(settings, tallies)
        self._last: Lane | None = None
        self.record.follow(self.windows.lanes)
        self.movement = ScaleMovement(scaler, self.windows)
        self.given_up = GivenUp(settings, self.windows, self.movement, manual)
        self.windows.thrown_away = self.given_up.thrown_away
        self.inspection = Inspection(self.windows, self.given_up, checking=checking, manual=manual)
        self.block: AllOrNone | None = None
        self.ranks: RankAgreement | None = None
        self.reopen: Reopens | None = None
        self.optimizers_now: Callable[[], list[Any]] = lambda: [
            x.optimizer for x in self.windows.lanes
        ]
        self.witnesses: list[Witness] = []
        self.late = LateAttempts(settings, scaler, self.windows)
        self.total_norm: Callable[[list[Tensor]], Tensor] = _upstream.total_norm

    def lane(self, optimizer: Any) -> Lane:
        """Return the optimizer's lane, following the Trainer's optimizers when it is a new one."""
        if self._last is not None and self._last.optimizer is optimizer:
            return self._last
        lane = self.windows.lane(optimizer)
        if lane is None:
            self.windows.follow([*self.optimizers_now(), optimizer])
            self.record.follow(self.windows.lanes)
            lane = self.windows.lane(optimizer)
        assert lane is not None
        self._last = lane
        return lane

    # ------------------------------------------------------------------ backward

    def before_backward(self, outputs: Tensor | Iterable[Tensor]) -> None:
        """Prepare every window for the backward pass of `outputs`. Host sync: none."""
        if self.block is not None:
            raise self.block.refuse_backward()
        self.inspection.close_backward(verify=True)
        losses = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        detached = [loss.detach() for loss in losses]
        loss = detached[0] if len(detached) == 1 else torch.stack([d.sum() for d in detached])
        overflowed = self.movement.overflowed_in_batch
        self.windows.before_backward(loss)
        if not self.manual:  # what turns out to be thrown away here was made in an earlier batch
            self.movement.overflowed_in_batch = overflowed

    def after_backward(self) -> None:
        """Note what the backward pass made. Host sync: none."""
        self.windows.after_backward()
        if self.given_up.watching:
            self.given_up.check(self.windows.reached)

    # ------------------------------------------------------------------ the attempt

    def unscale_(self, optimizer: Any) -> None:
        """Unscale and check the optimizer's gradients, once per window. Host sync: none."""
        self.inspection.unscale(self.lane(optimizer))

    def attempt(
        self,
        lane: Lane,
        look: Callable[[], object],
        kwargs: dict[str, Any],
        *,
        clip: float | None = None,
        patient: bool = False,
    ) -> StepOutcome | None:
        """Unscale, let hooks and clipping look, step or skip; `None` if there is no gradient.

        Args:
            lane: The optimizer's lane.
            look: What may look at and change the true gradients before the step.
            kwargs: For `optimizer.step`.
            clip: Largest L2 norm, where `look` does nothing but clip to it: one walk may be enough.
            patient: Whether the outcome may come later, out of `late`; then `None` comes now.

        Host sync: one, plus one after a skip; none if it waits.
        """
        self._admit(lane)
        self.given_up.arrived()
        shown = [witness for witness in self.witnesses if witness.looks()]
        wanted = bool(shown) or any([witness.wants_norm() for witness in self.witnesses])
        waits = patient and not wanted and self._may_wait(lane)
        if not waits:
            self._catch_up()
        if clip is not None and not shown:
            norm = self._in_one_walk(lane, clip, kwargs)
            if norm is not None:
                return self._conclude(lane, None, norm, False)
        if not self.inspection.check(lane, shown):
            look()
            lane.norm, lane.flags = None, {}
            return None
        if self.record.next_skip_raises(lane):
            lane.note_finite()
        if wanted:
            lane.norm = self.total_norm(lane.gradients())
        look()
        if waits and len(lane.flags) == 1:
            attempt = self.tallies[lane.idx].attempted + len(self.late.waiting)
            self.late.step(lane, attempt, kwargs)
            return None
        return self._decide(lane, kwargs, read=self.inspection.checking or wanted)

    def _admit(self, lane: Lane) -> None:
        if self.block is not None:
            self.block.admit(lane)
        else:
            lane.shared = False

    def _catch_up(self) -> None:
        """Have the attempts read that are waiting: this one builds on them. Host sync: one if so."""
        if self.late.waiting and self.windows.settle is not None:
            self.windows.settle()

    def _decide(self, lane: Lane, kwargs: dict[str, Any], *, read: bool) -> StepOutcome:
        """Step or skip. Host sync: one if `read`, plus one after a skip."""
        nonfinite, norm = read_verdict(lane) if read else (False, None)
        reason, answered = None, False
        if nonfinite:
            reason, answered = blame(lane, self.windows, self.ranks)
        elif self.block is not None and self.block.doomed:
            reason = SkipReason.PARTNER_SKIPPED
        if reason is None:
            lane.optimizer.step(**kwargs)
        return self._conclude(lane, reason, norm, answered)

    def _in_one_walk(self, lane: Lane, clip: float, kwargs: dict[str, Any]) -> float | None:
        """Return the true norm if one walk was enough to clip and step, else `None`."""
        alone = self.block is None and (self.ranks is None or not self.ranks.on_every_attempt())
        plain = self.inspection.checking and not self.inspection.adjusters
        if not alone or not plain or self.record.next_skip_raises(lane):
            return None
        self.windows.refresh()
        self.inspection.verify(lane)
        return clip_and_step(lane, self.windows, clip, kwargs)

    def _may_wait(self, lane: Lane) -> bool:
        alone = self.block is None and self.ranks is None and not self.manual
        steady = not self.tallies[lane.idx].consecutive_skips
        return self.inspection.checking and alone and steady and self.late.may_wait(lane)

    def _conclude(
        self, lane: Lane, reason: SkipReason | None, norm: float | None, answered: bool
    ) -> StepOutcome:
        scale = lane.scale
        lane.stage, lane.norm, lane.shared = Stage.STEPPED, None, False
        for cell in lane.cells:
            cell.consumed, cell.spoiled = True, reason is not None
            cell.scaled &= self.inspection.checking  # without checking nobody unscaled it
            if self.manual:
                cell.mark()
        if reason is None:
            self.movement.applied()
        elif self.settings.backs_off(reason):
            self.movement.overflowed(answered=answered)
        return self.record.conclude(lane, reason, (scale, self.scaler.get_scale()), norm)

    # ------------------------------------------------------------------ batches and blocks

    def scale_moved(self, ratio: float) -> None:
        """Bring held gradients to the new scale. Host sync: none."""
        self.movement.scale_moved(ratio)

    def updated(self) -> None:
        """Learn that a loop written against torch's scaler has called `update`."""
        self.given_up.answered()

    def stop_scaling(self) -> None:
        """Unscale what gradients are held, and scale no more; they are still checked.

        Host sync: none.
        """
        if self.windows.scaling:
            self.windows.move(1.0 / self.scaler.get_scale())
        neutral = SkipAwareGradScaler("cpu", 1.0, dynamic=False)
        self.scaler = self.windows.scaler = self.movement.scaler = self.late.scaler = neutral
        self.windows.scaling, self.inspection.checking = False, True

    def begin_batch(self) -> None:
        """Open a saved window; count attempts made outside of any training step."""
        if self.reopen is not None:
            self.reopen.open()
            self.reopen = None
        if self.movement.applied_in_batch or self.movement.overflowed_in_batch:
            self.movement.end_batch(None)

    @contextmanager
    def all_or_none(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Let the optimizers' attempts inside apply together, or none. Host sync: one on entry."""
        if self.block is not None:
            raise self.block.refuse_nesting()
        lanes = [self.lane(optimizer) for optimizer in optimizers] or list(self.windows.lanes)
        lanes = list(dict.fromkeys(lanes))
        if self.inspection.checking:
            for lane in lanes:
                lane.shared = False
                self.inspection.check(lane, attempt=False)
                self.inspection.approve(lane)
        self.block = AllOrNone(lanes)
        try:
            yield
        finally:
            self.block = None
