# SPDX-License-Identifier: Apache-2.0
"""The report of `locate_nonfinite`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["NonFiniteReport"]


@dataclass(frozen=True)
class NonFiniteReport:
    """Names the operator that made the first harmful non-finite value. Falsy if there is none.

    Args:
        precision: The precision of the replayed step.
        scale: The factor that multiplied the loss.
        module: The module's name as in `named_modules()`; "" is the root itself, or none.
        also: Further names of the same module, where it is shared.
        op: The operator: "aten.exp.default", or the name of an `autograd.Function` or custom
            operator; for `direction="backward"` the forward operator whose gradient is not finite.
            `None` where something was not finite before the step: see `subject`.
        kernel: The operator that ran: differs from `op` inside of functions and in backward.
        subject: What was not finite before the step: "batch['x']", "parameter 'net.0.weight'".
        direction: "forward" if the loss is not finite, "backward" if only gradients are not.
        kind: "inf", "nan", or "inf and nan".
        dtype: The result's dtype, as "float16".
        shape: The result's shape.
        max_abs: Largest finite |x| of the result; `None` without one.
        finite_share: Share of the result's elements that are finite, from 0 to 1.
        inputs: A line for each input: dtype, shape, range, zeros.
        input_max_abs: Largest finite |x| of the inputs; `None` without one.
        source: The user's line, as "model.py:12 in forward: x.exp()"; "" if there is none.
        scope: The autocast scope around the operator: "autocast float16" or "autocast off".
        cause: The likely cause.
        remedy: What to do; it ends in a line of code.
        notes: What else to know: compiled modules, masks, an error that the step raised.
    """

    precision: str
    scale: float
    module: str = ""
    also: tuple[str, ...] = ()
    op: str | None = None
    kernel: str = ""
    subject: str = ""
    direction: str = ""
    kind: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    max_abs: float | None = None
    finite_share: float = 1.0
    inputs: tuple[str, ...] = ()
    input_max_abs: float | None = None
    source: str = ""
    scope: str = ""
    cause: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kind)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as flat values that JSON can hold; tuples become strings."""
        flat = {
            name: "; ".join(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name != "shape"
        }
        return {**flat, "shape": "x".join([str(size) for size in self.shape]), "found": bool(self)}

    def __str__(self) -> str:
        step = f"one step in {self.precision!r}"
        step += f" at scale {self.scale:g}" if self.scale != 1.0 else ""
        if not self:
            return "\n".join([f"Loss and gradients of {step} are finite.", *self._notes()])
        lines = [f"{self._what()} ({self.direction} pass, {step})"]
        lines.append(f"  result  {self._result()}")
        lines += [f"  input   {text}" for text in self.inputs]
        lines += [f"  line    {self.source}"] if self.source else []
        lines += [f"  scope   {self.scope}"] if self.scope else []
        return "\n".join(
            [*lines, f"  cause   {self.cause}", f"  remedy  {self.remedy}", *self._notes()]
        )

    def _what(self) -> str:
        if self.op is None:
            return f"{self.subject} is not finite"
        inside = f" ({self.kernel})" if self.kernel and self.kernel != self.op else ""
        where = f"module {self.module!r}" if self.module else "the module itself"
        where += f" (also {', '.join(map(repr, self.also))})" if self.also else ""
        return f"{self.op}{inside} in {where} made {self.kind}"

    def _result(self) -> str:
        largest = "" if self.max_abs is None else f", largest finite |x| {self.max_abs:.4g}"
        share = f"{100 * self.finite_share:.4g} % finite"
        return f"{self.dtype} {self.shape}, {self.kind}, {share}{largest}"

    def _notes(self) -> list[str]:
        return [f"  note    {text}" for text in self.notes]
