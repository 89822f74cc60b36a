# SPDX-License-Identifier: Apache-2.0
"""Gradients are made true and checked, once per window, and nobody touches them before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_amp_guard.step.given_up import GivenUp
from lightning_amp_guard.step.lanes import Cell, Lane, Stage
from lightning_amp_guard.step.ranks import RankAgreement
from lightning_amp_guard.step.roles import Verifier, Witness
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["Inspection"]


class Inspection:
    """Unscales and checks an optimizer's gradients, and lets those look who have to.

    Args:
        windows: The optimizers' windows.
        given_up: What answers overflows that no attempt comes of.
        checking: Whether gradients are checked; without it every attempt is applied.
        manual: Whether the user steps by hand, and may step again without a backward pass.
    """

    def __init__(
        self, windows: GradientWindows, given_up: GivenUp, *, checking: bool, manual: bool
    ) -> None:
        self.windows, self.given_up = windows, given_up
        self.checking, self.manual = checking, manual
        self.verifier: Verifier | None = None
        self.ranks: RankAgreement | None = None
        # given a lane with its true gradients, and whether its attempt follows at once
        self.adjusters: list[Callable[[Lane, bool], None]] = []

    # ------------------------------------------------------------------ before the attempt

    def close_backward(self, *, verify: bool) -> None:
        """Close a backward pass that an exception (or a user's own `backward`) left open.

        Args:
            verify: Whether gradients that were left alone since may not have been touched.

        Host sync: none.
        """
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

    def unscale(self, lane: Lane) -> None:
        """Unscale and check the lane's gradients, once per window. Host sync: none."""
        self.windows.refresh()
        if self.checking:
            self._unscale(lane)
        for adjust in self.adjusters:
            adjust(lane, False)
        self.approve(lane)

    @staticmethod
    def approve(lane: Lane) -> None:
        """Take the lane's gradients, as they are, for checked. Host sync: none."""
        if lane.stage is Stage.UNSCALED:
            for cell in lane.cells:
                cell.mark()

    def _unscale(self, lane: Lane) -> None:
        if lane.stage is not Stage.UNSCALED:
            self.verify(lane)
            self.windows.unscale_(lane)
        elif not lane.shared and (self.ranks is None or self.ranks.on_every_attempt()):
            # where no rank asks the others, all of them have to go by the same check
            self.windows.check_edits(lane)

    def verify(self, lane: Lane) -> None:
        """Let the verifier object to gradients that were touched while they carried the scale.

        Host sync: none; one where something was touched.
        """
        self.close_backward(verify=False)
        for cell in lane.cells:
            self._verify(cell)

    # ------------------------------------------------------------------ for the attempt

    def check(self, lane: Lane, shown: Iterable[Witness] = (), *, attempt: bool = True) -> bool:
        """Unscale and check the lane; return whether there is a gradient, here or on another rank.

        Args:
            lane: The optimizer's lane.
            shown: Who looks at the true gradients.
            attempt: Whether the attempt follows at once.

        Host sync: none; one all-reduce where ranks agree on every attempt.
        """
        self.windows.refresh()
        present = lane.has_gradients()
        if self.checking and present:
            self._unscale(lane)
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
