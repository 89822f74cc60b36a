# SPDX-License-Identifier: Apache-2.0
"""One attempt, from the unscaled gradients to its outcome; free of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.step.all_or_none import AllOrNone
from lightning_amp_guard.step.given_up import GivenUp
from lightning_amp_guard.step.lanes import Cell, Lane, Stage
from lightning_amp_guard.step.late import LateAttempts
from lightning_amp_guard.step.movement import ScaleMovement
from lightning_amp_guard.step.one_walk import clip_and_step
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.verdict import blame, read_verdict
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["AttemptEngine", "Verifier"]


class Verifier(Protocol):
    """Who objects to gradients that were touched while they carried the scale."""

    def verify(self, lanes: Iterable[Lane], cell: Cell) -> None:
        """Raise or warn if gradients of `cell` were changed behind the scaler's back."""


class Reopens(Protocol):
    """An open window from a checkpoint."""

    saved: dict[str, Any]

    def open(self) -> None:
        """Give the parameters their gradients back."""


class Witness(Protocol):
    """Who looks at true gradients before hooks and clipping do."""

    def looks(self) -> bool:
        """Return whether this attempt's gradients are to be shown."""

    def wants_norm(self) -> bool:
        """Return whether the norm of an attempt that is not shown is wanted."""

    def show(self, lane: Lane) -> None:
        """Look at the gradients of `lane`."""


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
        self.checking = checking
        self.manual = manual
        self.windows = GradientWindows(optimizers, scaler, scaling=scaling)
        self.tallies = tallies
        self._last: Lane | None = None
        self._extend_tallies()
        self.verifier: Verifier | None = None
        self.movement = ScaleMovement(scaler, self.windows)
        self.given_up = GivenUp(settings, self.windows, self.movement, manual)
        self.windows.thrown_away = self.given_up.thrown_away
        self.block: AllOrNone | None = None
        self.ranks: RankAgreement | None = None
        self.reopen: Reopens | None = None
        self.optimizers_now: Callable[[], list[Any]] = lambda: [
            x.optimizer for x in self.windows.lanes
        ]
        self.witnesses: list[Witness] = []
        self.late = LateAttempts(settings, scaler, self.windows)
        # given a lane with its true gradients, and whether its attempt follows at once
        self.adjusters: list[Callable[[Lane, bool], None]] = []
        self.total_norm: Callable[[list[Tensor]], Tensor] = _upstream.total_norm

    def lane(self, optimizer: Any) -> Lane:
        """Return the optimizer's lane, following the Trainer's optimizers when it is a new one."""
        if self._last is not None and self._last.optimizer is optimizer:
            return self._last
        lane = self.windows.lane(optimizer)
        if lane is None:
            self.windows.follow([*self.optimizers_now(), optimizer])
            self._extend_tallies()
            lane = self.windows.lane(optimizer)
        assert lane is not None
        self._last = lane
        return lane

    def _extend_tallies(self) -> None:
        while len(self.tallies) < len(self.windows.lanes):
            self.tallies.append(StepTally())

    # ------------------------------------------------------------------ backward

    def before_backward(self, outputs: Tensor | Iterable[Tensor]) -> None:
        """Prepare every window for the backward pass of `outputs`. Host sync: none."""
        if self.block is not None:
            raise self.block.refuse_backward()
        self._settle(verify=True)
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

    def _settle(self, *, verify: bool) -> None:
        """Close a backward pass that an exception (or a user's own `backward`) left open."""
        if self.windows.pending is not None:
            self.windows.after_backward()
            for cell in self.windows.cells:
                cell.mark()
        elif verify:
            for cell in self.windows.cells:
                if cell.scaled or (self.manual and self._untouched(cell)):
                    self._verify(cell)

    def _untouched(self, cell: Cell) -> bool:
        """Return whether nobody has been given the cell's true gradients to edit at will."""
        lanes = [lane for lane in self.windows.lanes if cell in lane.cells]
        return all([lane.stage is not Stage.UNSCALED for lane in lanes])

    def _verify(self, cell: Cell) -> None:
        if self.windows.scaling and self.verifier is not None:
            self.verifier.verify(self.windows.lanes, cell)

    # ------------------------------------------------------------------ the attempt

    def unscale_(self, optimizer: Any) -> None:
        """Unscale and check the optimizer's gradients, once per window. Host sync: none."""
        lane = self.lane(optimizer)
        self.windows.refresh()
        if self.checking:
            self._unscale_lane(lane)
        for adjust in self.adjusters:
            adjust(lane, False)
        self.approve(lane)

    def approve(self, lane: Lane) -> None:
        """Take the lane's gradients, as they are, for checked. Host sync: none."""
        if lane.stage is Stage.UNSCALED:
            for cell in lane.cells:
                cell.mark()

    def _unscale_lane(self, lane: Lane) -> None:
        if lane.stage is not Stage.UNSCALED:
            self._verify_lane(lane)
            self.windows.unscale_(lane)
        elif not lane.shared and (self.ranks is None or self.ranks.on_every_attempt()):
            # where no rank asks the others, all of them have to go by the same check
            self.windows.check_edits(lane)

    def _verify_lane(self, lane: Lane) -> None:
        """Let the verifier object to gradients that were touched while they carried the scale."""
        self._settle(verify=False)
        for cell in lane.cells:
            self._verify(cell)

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
        self.given_up.watching = False
        shown = [witness for witness in self.witnesses if witness.looks()]
        wanted = bool(shown) or any([witness.wants_norm() for witness in self.witnesses])
        waits = patient and not wanted and self._may_wait(lane)
        if not waits:
            self._catch_up()
        if clip is not None and not shown:
            norm = self._in_one_walk(lane, clip, kwargs)
            if norm is not None:
                return self._conclude(lane, None, norm, False)
        if not self._check(lane, shown):
            look()
            lane.norm, lane.flags = None, {}
            return None
        if self._next_skip_raises(lane):
            lane.note_finite()
        if wanted:
            lane.norm = self.total_norm(lane.gradients())
        look()
        if waits and len(lane.flags) == 1:
            self.late.step(lane, self.tallies[lane.idx].attempted + len(self.late.waiting), kwargs)
            return None
        return self._decide(lane, kwargs, read=self.checking or wanted)

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
        if not alone or not self.checking or self.adjusters or self._next_skip_raises(lane):
            return None
        self.windows.refresh()
        self._verify_lane(lane)
        return clip_and_step(lane, self.windows, clip, kwargs)

    def _may_wait(self, lane: Lane) -> bool:
        alone = self.checking and self.block is None and self.ranks is None and not self.manual
        steady = not self.tallies[lane.idx].consecutive_skips
        return alone and steady and self.late.may_wait(lane)

    def _next_skip_raises(self, lane: Lane) -> bool:
        limit = self.settings.max_consecutive_skips
        if self.settings.error_if_nonfinite:
            return True
        return limit is not None and self.tallies[lane.idx].consecutive_skips + 1 >= limit

    def _check(self, lane: Lane, shown: Iterable[Witness] = (), *, attempt: bool = True) -> bool:
        """Unscale and check the lane; return whether there is a gradient, here or on another rank."""
        self.windows.refresh()
        present = lane.has_gradients()
        if self.checking and present:
            self._unscale_lane(lane)
            if not lane.flags:  # assigned after an explicit unscale, which found none
                lane.stage = Stage.STEPPED
                self.windows.unscale_(lane)
        elif self.checking and not lane.shared:
            for cell in lane.cells:
                self.given_up.thrown_away(cell)
            self.windows.clear(lane)
        if present:
            for witness in shown:
                witness.show(lane)
        for adjust in self.adjusters:
            adjust(lane, attempt)
        if not self.checking:
            return present
        if self.ranks is not None and self.ranks.on_every_attempt():
            return self._share(lane, self.ranks, present)
        return present

    @staticmethod
    def _share(lane: Lane, ranks: RankAgreement, present: bool) -> bool:
        if not lane.shared:
            nonfinite, lane.present = ranks.share(lane.flags.values(), present)
            lane.flags, lane.shared = {ranks.device: nonfinite}, True
            for cell in lane.cells:
                cell.unanswered, cell.agreed = [nonfinite], True
        return present or (lane.present is not None and bool(lane.present))

    def _conclude(
        self, lane: Lane, reason: SkipReason | None, norm: float | None, answered: bool
    ) -> StepOutcome:
        scale, micro_batches = lane.scale, lane.micro_batches
        lane.stage, lane.norm, lane.shared = Stage.STEPPED, None, False
        for cell in lane.cells:
            cell.consumed, cell.spoiled = True, reason is not None
            cell.scaled = cell.scaled and self.checking  # without checking nobody unscaled it
            if self.manual:
                cell.mark()
        if reason is None:
            self.movement.applied()
        elif self.settings.backs_off(reason):
            self.movement.overflowed(answered=answered)
        outcome = StepOutcome(
            lane.idx,
            self.tallies[lane.idx].attempted,
            reason is None,
            reason,
            scale,
            self.scaler.get_scale(),
            micro_batches,
            norm if reason is None else None,
        )
        self.tallies[lane.idx] = self.tallies[lane.idx].after(outcome)
        return outcome

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
        self.windows.scaling, self.checking = False, True

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
        if self.checking:
            for lane in lanes:
                lane.shared = False
                self._check(lane, attempt=False)
                self.approve(lane)
        self.block = AllOrNone(lanes)
        try:
            yield
        finally:
            self.block = None
