# SPDX-License-Identifier: Apache-2.0
"""WindowGuard: one scale per accumulation window."""

from __future__ import annotations

from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.step.windows import GradientWindows

__all__ = ["WindowGuard"]


class WindowGuardCore(GuardCore):
    """See `WindowGuard`."""

    name = "WindowGuard"

    def attach(self, host: Host) -> None:
        """Keep the fit's windows."""
        super().attach(host)
        host.running().movement.keeper = self

    def must_wait(self, windows: GradientWindows) -> bool:
        """Return whether an optimizer holds gradients that no step has consumed.

        What a step left behind and another's backward pass rescaled is no window of anybody's, nor
        is what `zero_grad(set_to_none=False)` leaves.
        """
        open_cells = [cell for cell in windows.held() if cell.micro_batches > 0]
        return not all([cell.was_zeroed() for cell in open_cells])

    def may_grow(self, windows: GradientWindows, factor: float) -> bool:
        """Return whether held gradients stay finite when multiplied by `factor`."""
        return windows.can_grow(factor)

    def scale_moved(self, windows: GradientWindows, ratio: float) -> None:
        """Multiply held gradients by `ratio`."""
        windows.move(ratio)


class WindowGuard(WindowGuardCore, Guard):
    """Keeps one scale per accumulation window, whatever the optimizers' pattern.

    Stock Lightning updates the scale after each optimizer's step, so with several optimizers a
    gradient made at one scale is divided by another (1.0 arrives as 2.0). Here growth waits while an
    optimizer holds gradients, but at most one further `growth_interval`; and whenever the scale
    moves, gradients still held are multiplied by the ratio at once, which is exact for powers of two.

    Args:
        enabled: `False` lets the scale move without regard to held gradients, as in stock Lightning.

    Runs: when the scale moves, and at the end of a training batch.
    Keeps: nothing; the open window itself is kept by `ScalerCheckpoint`.
    Host sync: none; one when growth is due while gradients are held.
    """
