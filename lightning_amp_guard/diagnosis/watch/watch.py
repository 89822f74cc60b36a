# SPDX-License-Identifier: Apache-2.0
"""Watches a module's training steps for the first inf or NaN, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.watch.culprit import HALF, Culprit, from_seen
from lightning_amp_guard.diagnosis.watch.extremes import extremes, floats, measured
from lightning_amp_guard.diagnosis.watch.inert import InertHook
from lightning_amp_guard.diagnosis.watch.nodes import custom_name, is_composite
from lightning_amp_guard.diagnosis.watch.seen import Seen, choose
from lightning_amp_guard.diagnosis.watch.spoiled import nan_buffers, nonfinite_parameters
from lightning_amp_guard.diagnosis.watch.table import Table

__all__ = ["NonFiniteWatch"]

_LOW = {"16": torch.float16, "bf16": torch.bfloat16}  # beginnings of Lightning's precisions


@dataclass(frozen=True)
class _Open:
    """A call that has begun."""

    name: str
    begin: int
    measured: Tensor | None


class NonFiniteWatch:
    """Notes of every module and backward operator whether finite values went in and came out.

    Forward hooks measure inputs and outputs. Each operator of the autograd graph is claimed by the
    innermost module that ran it, and gets a hook that measures the gradient that comes in and the
    ones that go out; full backward hooks would break in-place activations, and a hook on an input
    tensor cannot tell apart the modules that share it. Seven numbers a call stay on the device until
    `culprit` reads them; no tensor of the run is kept and no value changes.

    Left alone are compiled and scripted modules with all inside, torchmetrics (whose values reach no
    loss) and calls in evaluation mode without gradients. Copies of the module made meanwhile are
    not watched.

    Args:
        root: The LightningModule, or any module; `install` begins to watch it.
        precision: The run's, as Lightning names it, for what runs outside of submodules.

    Memory: about 30 bytes per module call and operator of the backward pass, and for a moment a
        copy of the largest activation.
    Host sync: none while the run goes on; `culprit` reads once per device.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> watch = NonFiniteWatch(net).install()
        >>> torch.nn.init.constant_(net[0].weight, float("inf")).shape
        torch.Size([2, 2])
        >>> watch.see_loss(net(torch.ones(1, 2)).sum())
        >>> watch.culprit().module, watch.culprit().parameters
        ('0', ('weight',))
        >>> watch.remove()
    """

    def __init__(self, root: Module, precision: Any = "16-mixed") -> None:
        self.root = root
        self._low = next(
            (d for p, d in _LOW.items() if str(precision).startswith(p)), torch.float32
        )
        self._computes_in: dict[str, torch.dtype] = {}
        kinds = [p.device.type for p in root.parameters()]
        self._device = next((k for k in kinds if torch.amp.is_autocast_available(k)), "cpu")
        modules = {_upstream.plain_name(n): m for n, m in root.named_modules()}
        sealed = [n for n, m in modules.items() if _sealed(m)]
        #: Names of the modules that are not watched, with all inside, since they are compiled.
        self.left_alone = tuple(n for n in sealed if not _inside(n, [s for s in sealed if s != n]))
        apart = [*sealed, *[n for n, m in modules.items() if isinstance(m, Metric)]]
        self._modules = {n: m for n, m in modules.items() if not _inside(n, apart)}
        self._handles: list[RemovableHandle] = []
        self._custom: dict[str, str] = {}
        self._open: list[_Open] = []
        self._table = Table()
        self._clock = count(1)

    # ------------------------------------------------------------------ what the owner calls

    def install(self) -> NonFiniteWatch:
        """Put the hooks on every module and return the watch; harmless when they are there."""
        if not self._handles:
            for name, module in self._modules.items():
                self._handles += self._hooks(name, module)
        return self

    def remove(self) -> None:
        """Take the hooks away and forget everything; harmless when there is nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    def reset(self) -> None:
        """Forget what was seen, and go on. Host sync: none."""
        self._open, self._table, self._computes_in = [], Table(), {}

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass: what no module did, the step itself did.

        Host sync: none.
        """
        self._open = []  # calls that an exception left open
        if not self._handles or "" not in self._modules:
            return
        self._claim([loss], "")
        self._note("", "forward", next(self._clock), None, [loss], is_loss=True)
        self._table.pack()

    def culprit(self) -> Culprit | None:
        """Return the module to blame for what was seen since `reset`, or `None`.

        The rule is that of `choose`. Host sync: one per device, and one for each parameter of the
        culprit's own.
        """
        found = choose(sorted(self._table.read(), key=lambda s: s.end))
        if found is None:
            return None
        module = self._modules[found.module]
        prefix = f"{found.module}." if found.module else ""
        within = tuple(name for name in self.left_alone if name.startswith(prefix))
        return from_seen(
            found,
            self._custom.get(found.module),
            nonfinite_parameters(module),
            within,
            self._computes_in.get(found.module, self._low),
            nan_buffers(module),
        )

    # ------------------------------------------------------------------ hooks

    def _hooks(self, name: str, module: Module) -> list[RemovableHandle]:
        def before(module: Module, args: Any, kwargs: Any) -> None:
            if self._looking():
                self._begin(name, floats((args, kwargs)))

        def after(module: Module, args: Any, output: Any) -> None:
            if self._looking():
                self._end(name, floats(output))

        return [
            module.register_forward_pre_hook(InertHook(before), with_kwargs=True),
            module.register_forward_hook(InertHook(after)),
        ]

    def _looking(self) -> bool:
        """Return whether this is a call of a training step, with real tensors."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return False
        graded = torch.is_grad_enabled() or self.root.training
        return graded and not _upstream.inside_transform()

    def _begin(self, name: str, tensors: list[Tensor]) -> None:
        self._claim(tensors, self._open[-1].name if self._open else "")
        if self._computes_in.get(name, torch.float32) is torch.float32:  # of several calls the low
            self._computes_in[name] = self._dtype_of_call(tensors)
        self._open.append(_Open(name, next(self._clock), extremes(tensors)))

    def _dtype_of_call(self, tensors: list[Tensor]) -> torch.dtype:
        """Return autocast's dtype, or, where it is off, the half precision that goes in, if any."""
        if torch.is_autocast_enabled(self._device):
            return torch.get_autocast_dtype(self._device)
        return next((t.dtype for t in tensors if t.dtype in HALF), torch.float32)

    def _end(self, name: str, tensors: list[Tensor]) -> None:
        at = max((i for i, call in enumerate(self._open) if call.name == name), default=None)
        if at is None:
            return
        call = self._open[at]
        del self._open[at:]  # with those inside that an exception left open
        self._claim(tensors, name)
        self._note(name, "forward", call.begin, call.measured, tensors)

    def _claim(self, tensors: Iterable[Tensor], owner: str) -> None:
        """Let `owner` have the operators behind `tensors` that nobody has claimed."""
        todo: list[Any] = [tensor.grad_fn for tensor in tensors]
        while todo:
            node = todo.pop()
            # each watch marks for itself: several may look at one step
            if node is None or not node.next_functions or self in node.metadata:
                continue
            node.metadata[self] = True
            node.register_hook(self._hook_of(owner, node.name(), is_composite(node)))
            if (custom := custom_name(node)) is not None:
                self._custom.setdefault(owner, custom)
            todo += [before for before, _ in node.next_functions]

    def _hook_of(self, owner: str, operator: str, made_of: bool) -> Callable[[Any, Any], None]:
        def after(outgoing: Any, incoming: Any) -> None:
            if self._handles and not _upstream.inside_transform():
                now, made = next(self._clock), floats(outgoing)
                self._note(
                    owner, "backward", now, extremes(floats(incoming)), made, operator, made_of
                )

        return after

    # ------------------------------------------------------------------ numbers

    def _note(
        self,
        name: str,
        direction: Literal["forward", "backward"],
        begin: int,
        before: Tensor | None,
        tensors: list[Tensor],
        operator: str = "",
        composite: bool = False,
        *,
        is_loss: bool = False,
    ) -> None:
        found = measured(tensors)
        if found is None:
            return
        entered = found.new_zeros(2) if before is None else before.to(found.device)
        kind = type(self._modules.get(name, self.root)).__name__
        dtype = min((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
        now = begin if direction == "backward" or is_loss else next(self._clock)
        graded = torch.is_grad_enabled() or direction == "backward"
        elements = sum(t.numel() for t in tensors)
        seen = Seen(
            name, kind, direction, begin, now, dtype, elements, before is not None, graded, operator,
            is_loss, composite,
        )  # fmt: skip
        self._table.add(seen, torch.cat((entered, found)))


def _sealed(module: Module) -> bool:
    return _upstream.is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


def _inside(name: str, others: Iterable[str]) -> bool:
    return any(not other or f"{name}.".startswith(f"{other}.") for other in others)
