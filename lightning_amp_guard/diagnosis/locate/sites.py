# SPDX-License-Identifier: Apache-2.0
"""Which module and line an operator belongs to, in the forward and in the backward pass."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.frames import (
    Line,
    Place,
    forward_codes,
    module_names,
    place_of_call,
)

__all__ = ["Site", "Sites"]


@dataclass(frozen=True)
class Site:
    """Says which operator runs, and where.

    Args:
        module: The module's name as in `named_modules()`; "" is the root.
        op: What the user called: the operator, or the `autograd.Function` or custom operator it is
            part of; in the backward pass the forward operator whose gradient is computed.
        kernel: The operator that runs.
        direction: "forward" or "backward".
        line: The user's line; in the backward pass the one of the forward operator.
        autocast: "off", or the dtype of the enclosing scope.
        node: In the backward pass the autograd node, as "ExpBackward0"; else "".
    """

    module: str = ""
    op: str = ""
    kernel: str = ""
    direction: str = "forward"
    line: Line | None = None
    autocast: str = "off"
    node: str = ""


class Sites:
    """Maps the operators of a step to modules and lines; autograd nodes by their number.

    Autograd numbers its nodes, and makes an operator's node before it runs the kernel. So the newest
    number, when an operator is dispatched, is that of its own node, and the same number is found
    again when the node runs. Nodes that are made later (of views that were written to) belong to the
    operator before them.

    Args:
        root: The module whose submodules give the places their names.
        device: The device type whose autocast state is looked at.
    """

    def __init__(self, root: Module, device: str) -> None:
        self.names = module_names(root)
        self._forwards = forward_codes()
        self._params = {id(param): name for name, param in root.named_parameters()}
        self._device = device
        self._autocast = "off"
        self._made: dict[int, Site] = {}
        self._numbers: list[int] = []

    def see_autocast(self) -> None:
        """Note the autocast scope: below a torch function it is hidden from operators."""
        on = torch.is_autocast_enabled(self._device)
        dtype = str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")
        self._autocast = dtype if on else "off"

    def of_call(self, kernel: str, inputs: list[Tensor]) -> Site:
        """Return the site of the operator that is being dispatched. Host sync: none."""
        node = _upstream.current_node()
        place = place_of_call(self.names, self._forwards, in_backward=node is not None)
        site = self._forward(kernel, place) if node is None else self._backward(kernel, place, node)
        makes_node = torch.is_grad_enabled() or place.in_function
        if makes_node and any([tensor.requires_grad for tensor in inputs]):
            self._remember(_upstream.newest_node_number(), site)
        return site

    def of_maker(self, tensor: Tensor) -> Site | None:
        """Return the site of the `autograd.Function` that made a tensor; `None` for others."""
        node = tensor.grad_fn
        kind = _upstream.function_of(node)
        return None if kind is None else replace(self._of_node(node), op=kind.__name__, kernel="")

    def _forward(self, kernel: str, place: Place) -> Site:
        op = place.function or kernel
        return Site(place.module or "", op, kernel, "forward", place.line, self._autocast)

    def _backward(self, kernel: str, place: Place, node: Any) -> Site:
        base = self._of_node(node)
        module = base.module if place.module is None else place.module
        if place.recomputed:
            return replace(self._forward(kernel, place), module=module)
        kind = _upstream.function_of(node)
        return replace(
            base,
            op=base.op or kernel if kind is None or _is_of_torch(kind) else kind.__name__,
            kernel=kernel,
            direction="backward",
            line=place.line or base.line,
            node=node.name().rpartition("::")[2],
        )

    def _of_node(self, node: Any) -> Site:
        if (param := self._params.get(id(getattr(node, "variable", None)))) is not None:
            return Site(param.rpartition(".")[0])
        index = bisect_right(self._numbers, _upstream.node_number(node))
        return self._made[self._numbers[index - 1]] if index else Site()

    def _remember(self, number: int, site: Site) -> None:
        if number not in self._made:
            self._made[number] = site
            insort(self._numbers, number)


def _is_of_torch(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "torch"
