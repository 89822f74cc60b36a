# SPDX-License-Identifier: Apache-2.0
"""What is known of a scaler of another make, and of the windows of optimizers that it steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["KnownScale", "OpenWindow"]

_KEPT_LOSSES = 64


class KnownScale:
    """Follows a scaler of another make, and reads it only when its scale may have moved.

    Torch's scaler moves its scale at an overflow, and after `growth_interval` updates in a row
    without one; so in between the host knows the scale without asking the device.

    Args:
        scaler: The scaler; without one the scale is 1.0.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler, self.value = scaler, 1.0
        self._until_growth = 0
        self._follows_torch = type(scaler).__module__.partition(".")[0] == "torch"
        self.read()

    def read(self) -> float:
        """Return the scale as the scaler has it. Host sync: two."""
        if self.scaler is not None:
            state = self.scaler.state_dict()
            self.value = float(state["scale"])
            self._until_growth = state["growth_interval"] - state["_growth_tracker"]
        return self.value

    def updated(self, *, surely: bool) -> None:
        """Learn that the scaler has updated its scale, `surely` with a skip or on request."""
        self._until_growth -= 1
        if surely or self._until_growth <= 0 or not self._follows_torch:
            self.read()


@dataclass
class OpenWindow:
    """The backward passes since an optimizer's last attempt."""

    micro_batches: int = 0
    losses: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor) -> bool:
        """Keep a loss, to be looked at only after a skip; return whether it is the first.

        Host sync: none; every 64 losses are folded into one number, for long windows.
        """
        self.micro_batches += 1
        if self.losses:  # the newest keeps its graph, as Lightning does: detaching is an operator
            self.losses[-1] = self.losses[-1].detach()
        self.losses.append(loss)
        if len(self.losses) > _KEPT_LOSSES:  # a sum is finite if its parts are
            self.losses = [torch.stack([_sum(x) for x in self.losses]).sum()]
        return self.micro_batches == 1

    def had_nonfinite_loss(self) -> bool:
        """Return whether a loss was inf or NaN. Host sync: one per loss kept."""
        return not all([bool(loss.isfinite().all()) for loss in self.losses])


def _sum(loss: Tensor) -> Tensor:
    return loss.detach().sum().cpu().double()
