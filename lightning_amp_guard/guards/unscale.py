# SPDX-License-Identifier: Apache-2.0
"""UnscaleGuard: nobody touches gradients while they carry the scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import ScaledGradientError
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.lanes import Cell, Lane
from lightning_amp_guard.settings import choice

__all__ = ["UnscaleGuard"]


class UnscaleGuardCore(GuardCore):
    """See `UnscaleGuard`."""

    name = "UnscaleGuard"

    def __init__(
        self,
        on_violation: Literal["error", "warn", "ignore"] = "error",
        enabled: bool = True,
    ) -> None:
        super().__init__(enabled)
        choice(type(self).__name__, "on_violation", on_violation, ("error", "warn", "ignore"))
        self.on_violation = on_violation

    def attach(self, host: Host) -> None:
        """Watch the fit's gradients, where there is a scale to carry."""
        super().attach(host)
        host.running().verifier = self

    def verify(self, lanes: Iterable[Lane], cell: Cell) -> None:
        """Raise, or warn, if gradients changed since the last backward pass of the plugin.

        Raises:
            ScaledGradientError: They did; the message says how and what to write instead.
        """
        moved = _upstream.moved_since(cell.params, cell.marks)
        if not cell.scaled:
            moved = [m for m in moved if not m[1]]  # true gradients may be edited at will
        if not moved:
            return
        grads = [g for i, _ in moved if (g := cell.params[i].grad) is not None]
        sizes = _upstream.magnitudes(_upstream.as_plain(grads))
        touched = [m for m, size in zip(moved, sizes, strict=True) if size != 0]
        if touched:
            made = not cell.scaled or not any(same for _, same in touched)
            self._object(lanes, cell, [i for i, _ in touched], made)
        elif len(moved) == sum(p.grad is not None for p in cell.params):
            cell.restart()  # zeroed: whatever was accumulated is gone
        cell.mark()

    def _object(self, lanes: Iterable[Lane], cell: Cell, where: list[int], made: bool) -> None:
        if self.on_violation == "ignore" or self.host is None:
            return
        names = self.host.parameter_names()
        shown = ", ".join(repr(names.get(id(cell.params[i]), "?")) for i in where[:3])
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        idxs = " and ".join(str(lane.idx) for lane in lanes if cell in lane.cells)
        message = (_MADE if made else _EDITED).format(params=shown + more, optimizer=idxs)
        if self.on_violation == "error":
            raise ScaledGradientError(message)
        self.host.warn(message)


_MADE = (
    "`UnscaleGuard`: the gradients of {params} (optimizer {optimizer}) were not made by"
    " `self.manual_backward`, so they do not carry the scale that they are about to be divided by."
    " Expected every gradient to come from `self.manual_backward(loss)`. Most likely"
    " `loss.backward()` was called in its place, or `.grad` was assigned. Write"
    " `self.manual_backward(loss)`; to assign gradients of your own, call"
    " `self.trainer.precision_plugin.unscale_(optimizer)` first."
)
_EDITED = (
    "`UnscaleGuard`: the gradients of {params} (optimizer {optimizer}) were changed in place or"
    " replaced between the backward pass and the optimizer step, while they were still multiplied by"
    " the scale. Expected only true (unscaled) gradients to be edited. Most likely they were clipped"
    " in `on_after_backward`, or by `torch.nn.utils.clip_grad_norm_` in a manual `training_step`, or"
    " a `loss.backward()` added to them. Move the edit to `on_before_optimizer_step`, use"
    " `self.clip_gradients(optimizer, ...)`, or call"
    " `self.trainer.precision_plugin.unscale_(optimizer)` first."
)


class UnscaleGuard(UnscaleGuardCore, Guard):
    """Notices gradients that were touched, or made, behind the scaler's back.

    The plugin unscales once per window before hooks and clipping look; what is done to gradients
    earlier acts on values multiplied by the scale (a clip to 0.5 then leaves 0.00049 at a scale of
    1024, Lightning issues 18089 and 9694), and gradients that `loss.backward()` made are divided by
    a scale they never had (Lightning issue 19695). Compares identity and version counter of every
    gradient after each backward pass and before it is unscaled. `zero_grad` of either kind,
    gradient hooks, DDP, and edits that leave exact zeros are fine. Edits through `.data` are not seen.

    Args:
        on_violation: "error" raises `ScaledGradientError`, "warn" warns each time, "ignore" is silent.
        enabled: `False` compares nothing.

    Runs: before a backward pass and before unscaling.
    Keeps: nothing.
    Host sync: none, except one per changed gradient, to see whether it is zero.
    """
