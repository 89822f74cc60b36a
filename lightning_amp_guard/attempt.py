# SPDX-License-Identifier: Apache-2.0
"""One attempt, from the unscaled gradients to its outcome; free of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.all_or_none import AllOrNone
from lightning_amp_guard.lanes import Cell, Lane, Stage
from lightning_amp_guard.movement import ScaleMovement
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.ranks import RankAgreement
from lightning_amp_guard.scaler import SkipAwareGradScaler
from lightning_amp_guard.settings import AmpSettings
from lightning_amp_guard.verdict import blame, read_verdict
from lightning_amp_guard.windows import GradientWindows

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
        self.block: AllOrNone | None = None
        self.ranks: RankAgreement | None = None
        self.reopen: Reopens | None = None
        self.optimizers_now: Callable[[], list[Any]] = lambda: [
            x.optimizer for x in self.windows.lanes
        ]
        self.wants_norm: list[Callable[[], bool]] = []
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
        self.windows.before_backward(loss)

    def after_backward(self) -> None:
        """Note what the backward pass made. Host sync: none."""
        self.windows.after_backward()

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
        self._unscale_lane(lane)

    def _unscale_lane(self, lane: Lane) -> None:
        if lane.stage is Stage.UNSCALED:
            return
        self._settle(verify=False)
        for cell in lane.cells:
            self._verify(cell)
        self.windows.unscale_(lane)

    def attempt(
        self, lane: Lane, look: Callable[[], object], kwargs: dict[str, Any]
    ) -> StepOutcome | None:
        """Unscale, let hooks and clipping look, step or skip; `None` if there is no gradient.

        Args:
            lane: The optimizer's lane.
            look: What may look at and change the true gradients before the step.
            kwargs: For `optimizer.step`.

        Host sync: one, plus one after a skip.
        """
        if self.block is not None:
            self.block.admit(lane)
        else:
            lane.shared = False
        if not self._check(lane):
            look()
            lane.norm, lane.flags = None, {}
            return None
        if self._next_skip_raises(lane):
            lane.note_finite()
        wanted = any([wants() for wants in self.wants_norm])
        if wanted:
            lane.norm = self.total_norm(lane.gradients())
        look()
        nonfinite, norm = read_verdict(lane) if self.checking or wanted else (False, None)
        reason, answered = None, False
        if nonfinite:
            reason, answered = blame(lane, self.windows, self.ranks)
        elif self.block is not None and self.block.doomed:
            reason = SkipReason.PARTNER_SKIPPED
        if reason is None:
            lane.optimizer.step(**kwargs)
        return self._conclude(lane, reason, norm, answered)

    def _next_skip_raises(self, lane: Lane) -> bool:
        limit = self.settings.max_consecutive_skips
        if self.settings.error_if_nonfinite:
            return True
        return limit is not None and self.tallies[lane.idx].consecutive_skips + 1 >= limit

    def _check(self, lane: Lane) -> bool:
        """Unscale and check the lane; return whether there is a gradient, here or on another rank."""
        self.windows.refresh()
        present = lane.has_gradients()
        if not self.checking:
            return present
        if present:
            self._unscale_lane(lane)
            if not lane.flags:  # assigned after an explicit unscale, which found none
                lane.stage = Stage.STEPPED
                self.windows.unscale_(lane)
        elif not lane.shared:
            self.windows.clear(lane)
        if self.ranks is not None and self.ranks.on_every_attempt():
            return self._share(lane, self.ranks, present)
        return present

    @staticmethod
    def _share(lane: Lane, ranks: RankAgreement, present: bool) -> bool:
        if not lane.shared:
            nonfinite, lane.present = ranks.share(lane.flags.values(), present)
            lane.flags, lane.shared = {ranks.device: nonfinite}, True
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
        elif reason is SkipReason.NONFINITE_GRADIENTS or (
            reason is SkipReason.NONFINITE_LOSS and self.settings.backoff_on_nonfinite_loss
        ):
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
                self._check(lane)
        self.block = AllOrNone(lanes)
        try:
            yield
        finally:
            self.block = None
