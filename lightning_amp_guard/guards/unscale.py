# SPDX-License-Identifier: Apache-2.0
"""UnscaleGuard: nobody touches gradients while they carry the scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import choice
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.errors import ScaledGradientError
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.step.lanes import Cell, Lane

__all__ = ["UnscaleGuard"]


class UnscaleGuardCore(GuardCore):
    """See `UnscaleGuard`."""

    name = "UnscaleGuard"

    @names_its_class
    def __init__(
        self,
        on_violation: Literal["error", "warn", "ignore"] = "error",
        enabled: bool = True,
    ) -> None:
        super().__init__(enabled)
        choice(type(self).__name__, "on_violation", on_violation, ("error", "warn", "ignore"))
        self.on_violation = on_violation
        self._handles: list[Any] = []
        self._inner: list[tuple[Optimizer, Optimizer]] = []  # with the wrapper around it

    def attach(self, host: Host) -> None:
        """Watch the fit's gradients, where there is a scale to carry."""
        super().attach(host)
        engine = host.running()
        engine.inspection.verifier = self
        self._unhook()
        if engine.windows.scaling:
            own = [lane.optimizer for lane in engine.windows.lanes]
            self._inner = [(i, o) for o in own for i in _upstream.inner_optimizers(o)]
            self._handles = [
                optimizer.register_step_pre_hook(self._at_any_step)
                for optimizer in (*own, *(inner for inner, _ in self._inner))
                if isinstance(optimizer, Optimizer)
            ]

    def detach(self) -> None:
        """Take the hooks off the optimizers."""
        self._unhook()
        super().detach()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        return {**super().__getstate__(), "_handles": [], "_inner": []}

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._inner = [], []

    def _at_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Object to a step that comes past Lightning, while the gradients carry the scale."""
        if self.host is None or self.on_violation == "ignore":
            return
        around = [outer for inner, outer in self._inner if inner is optimizer]
        lane = self.host.running().lane(around[0] if around else optimizer)
        if not any([cell.scaled and cell.has_gradients() for cell in lane.cells]):
            return
        message = _PAST.format(optimizer=lane.idx)
        if self.on_violation == "error":
            raise ScaledGradientError(message)
        self.host.warn(message)

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
            if self.host is not None:
                self.host.running().windows.thrown_away(cell)
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


_PAST = (
    "`UnscaleGuard`: optimizer {optimizer} was stepped past Lightning, with gradients that are still"
    " multiplied by the scale. Expected the step to come through the plugin, which unscales and checks"
    " them. Most likely the raw optimizer was used: `self.optimizers(use_pl_optimizer=False)`, or"
    " `optimizer.optimizer.step()`, or a method of its own stepped the one inside (`second_step` of a"
    " SAM). Write `self.optimizers().step()`, or call"
    " `self.trainer.precision_plugin.unscale_(optimizer)` first."
)
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
    gradient hooks, DDP, and edits that leave exact zeros are fine. An optimizer that is stepped past
    Lightning while its gradients carry the scale is named too. Edits through `.data` are not seen.

    Args:
        on_violation: "error" raises `ScaledGradientError`, "warn" warns each time, "ignore" is silent.
        enabled: `False` compares nothing.

    Runs: before a backward pass and before unscaling.
    Keeps: nothing.
    Host sync: none, except one per changed gradient, to see whether it is zero.
    """
