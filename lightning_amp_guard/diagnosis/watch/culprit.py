# SPDX-License-Identifier: Apache-2.0
"""The module that turned finite values into inf or NaN, and what is known of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_amp_guard.diagnosis.watch.seen import Seen

__all__ = ["HALF", "Culprit", "from_seen"]

HALF = (torch.float16, torch.bfloat16)

# Above the largest finite float16 divided by this, an inf beside it may well be an overflow.
_GAP = 256.0
_LARGEST = 65504.0  # the largest finite float16
_STEEP = 8.0  # a slope above this is suspicious where a slope may be infinite
_STEEPER = 32.0  # and above this anywhere
_UNBOUNDED = ("Sqrt", "Div", "Reciprocal", "Pow", "Log", "Norm", "Std", "Acos", "Asin", "Prod")
_MEANS = ("CrossEntropyLoss", "NLLLoss")  # over the targets that are not to be ignored
_LARGE = 2.0**64  # nothing that a scale up to 2**24 makes of an ordinary gradient


@dataclass(frozen=True)
class Culprit:
    """The module whose inputs were finite and whose output, or gradient, was not.

    Args:
        module: The name as in `named_modules()`; "" for the step itself, outside of any submodule.
        kind: The module's class name.
        direction: "forward" or "backward".
        dtype: Of the values that are not finite.
        max_abs: The largest finite |x| among them; gradients carry the scale.
        finite_share: The share of finite ones among them, 0 to 1.
        what: "inf", "nan" or "inf and nan"; "inf" stands for -inf too.
        max_abs_in: The largest |x| that went in (in the backward pass: of the incoming gradient).
        operator: The operator of the backward pass, as autograd names it; "" in the forward pass.
        custom: The `torch.autograd.Function` or custom operator that the module runs, if any.
        parameters: The module's own parameters that hold inf or NaN.
        left_alone: Modules inside that were not watched since they are compiled.
        masked: Whether some -inf went in, as in an attention mask, and nothing worse.
        composite: Whether `operator` consists of others, as a checkpointed block does.
        computes_in: What the module computes in: autocast's dtype, or float32 where autocast is off.
        buffers: The module's own buffers that hold NaN.
    """

    module: str
    kind: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    max_abs: float
    finite_share: float
    what: Literal["inf", "nan", "inf and nan"]
    max_abs_in: float = 0.0
    operator: str = ""
    custom: str | None = None
    parameters: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    masked: bool = False
    composite: bool = False
    computes_in: torch.dtype = torch.float16
    buffers: tuple[str, ...] = ()

    @property
    def path(self) -> str | None:
        """What to write into `fp32_modules`; `None` where float32 would not help.

        So it is for what is no submodule, for weights that hold inf or NaN, for a module that computes
        in float32 already or converts to another half precision by itself, and for a mean over nothing.
        """
        hopeless = self.parameters or self.buffers or self._averages_nothing or self._converts
        return None if hopeless or self.computes_in is torch.float32 else self.module or None

    @property
    def _averages_nothing(self) -> bool:
        # the logarithm of a softmax over finite float16 is finite in float32, in which these compute
        seen = self.what == "nan" and self.dtype is torch.float32 and self.direction == "forward"
        return seen and not self.masked and self.kind in _MEANS

    @property
    def _converts(self) -> bool:
        # half precision of the module's own making, which no autocast scope takes away
        return self.dtype in HALF and self.dtype is not self.computes_in

    @property
    def may_be_overflow(self) -> bool:
        """Whether a smaller scale may end it: an inf in a gradient that may exceed float16.

        A NaN that one operator makes of small finite gradients does not depend on the scale, nor does
        an inf far above both what went in and the largest finite value beside it, or one in a dtype
        with float32's range, or one that an operator with an unbounded slope (a root, a division, one
        of the user's own) makes of a gradient that is far from overflowing, with nothing finite beside
        it. What consists of several operators may have overflowed between them.
        """
        if self.direction == "forward":
            return False
        if self.composite:
            return True
        if self.dtype is not torch.float16:
            return self.what != "nan" and self.max_abs_in > _LARGE
        if self.max_abs_in >= _LARGEST / _STEEP and (self.max_abs or "nan" in self.what):
            return True  # within an operator inf - inf and 0 * inf make NaN of an overflow
        if self.what != "inf":
            return False
        if self.max_abs:  # a long tail of gradients looks like a gap: only a steep one is none
            gap, small = self.max_abs < _LARGEST / _GAP, self.max_abs_in < _LARGEST / _STEEPER
            return not (gap and small)
        names = _UNBOUNDED if self.custom is None else (*_UNBOUNDED, self.custom.rpartition(".")[2])
        steep = any(name in self.operator for name in names)
        return not (steep and self.max_abs_in < _LARGEST / _STEEP)

    @property
    def sentence(self) -> str:
        """What was seen, in one sentence with its numbers."""
        dtype = _name(self.dtype)
        values = "nothing finite"
        if self.finite_share > 0:
            share = f"{100 * self.finite_share:.3g} % finite"
            values = f"{share}, largest finite |x| {self.max_abs:.3g}"
        if self.direction == "forward":
            seen = f"returned {self.what} ({dtype}, {values}), although "
            inputs = f"its inputs were finite (largest |x| {self.max_abs_in:.3g})"
            inputs = "its inputs held nothing worse than -inf" if self.masked else inputs
            seen += inputs if self.module else "no submodule did so with finite inputs"
        else:
            seen = f"made {self.what} of a finite gradient (largest |x| {self.max_abs_in:.3g}) in"
            seen += f" its backward pass ({self.operator}, {dtype}, {values})"
        return f"{self._who()} {seen}{self._notes()}."

    @property
    def remedy(self) -> str:
        """What was expected, the likely cause, and the change to make."""
        return self.remedy_by(f'SafeAMP(fp32_modules=["{self.module}"])')

    def remedy_by(self, line: str) -> str:
        """Return the remedy with `line` as what runs the module in float32."""
        expected = "weights" if self.parameters or self.buffers else "values"
        change = f"Run it in float32: `{line}`." if self.path else self.change
        return f"Expected finite {expected}. Most likely {self.cause}. {change}"

    @property
    def cause(self) -> str:
        """What most likely lies behind it, as a clause."""
        if self.parameters:
            return "they came from a checkpoint, or from an update made without this plugin"
        if self.buffers:
            return "an earlier step, or a checkpoint, left it there"
        if self._averages_nothing:
            return "every target is to be ignored, and the mean over nothing is NaN"
        if not self.module:
            formula = "the loss divides by zero, takes the logarithm or root of zero"
            return formula + {
                torch.float16: ", or exceeds 65504 in float16",
                torch.bfloat16: ", or of a difference that bfloat16, with its 8 bits, makes zero",
            }.get(self.computes_in, ", or exceeds the range")
        if self._converts:
            return f"its own code converts to {_name(self.dtype)}, not {_name(self.computes_in)}"
        domain = "an operation is undefined for its inputs (division by zero, logarithm or root of"
        domain += " zero), which needs an `eps` of its own"
        if self.computes_in is torch.float16:
            return f"they exceed 65504, the largest float16, or {domain}"
        if self.computes_in is torch.float32:
            return f"{domain}, or a softmax sees -inf alone: it computes in float32 already"
        return f"bfloat16, with its 8 bits, makes a difference zero, or {domain}"

    @property
    def change(self) -> str:
        """What to do where `path` is `None`; ends in the line to write."""
        if self.parameters or self.buffers:
            return (
                "Load a checkpoint from before that:"
                ' `trainer.fit(model, ckpt_path="last-good.ckpt")`.'
            )
        if self._averages_nothing:
            return (
                "Leave such batches out, or write"
                ' `cross_entropy(x, y, reduction="sum") / (y != -100).sum().clamp(min=1)`.'
            )
        if self._converts:
            return "Leave the conversion out: `x.float()`."
        if self.computes_in is torch.float32:
            return "Keep its inputs away from there: `x.clamp(min=1e-6)`."
        return (
            "Keep what is divided by, and logarithms and roots, away from zero:"
            " `x.clamp(min=1e-6)`; and compute it in float32: `loss_fn(x.float())`."
        )

    def _who(self) -> str:
        if self.module:
            return f"the module {self.module!r} ({self.kind})"
        return f"the step of {self.kind}, outside of any submodule,"

    def _notes(self) -> str:
        notes = ""
        if self.parameters:
            shown = ", ".join(map(repr, self.parameters[:3]))
            notes += f"; its own parameters {shown} hold inf or NaN"
        if self.buffers:
            notes += f"; its own buffers {', '.join(map(repr, self.buffers[:3]))} hold NaN"
        if self.custom:
            notes += f"; it runs the custom operator {self.custom}, whose safe dtype autocast does"
            notes += " not know"
        if self.left_alone:
            shown = ", ".join(map(repr, self.left_alone[:3]))
            notes += f"; compiled modules inside were not watched: {shown}"
        return notes

    def __str__(self) -> str:
        return self.sentence


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def from_seen(
    seen: Seen,
    custom: str | None,
    parameters: tuple[str, ...],
    left_alone: tuple[str, ...],
    computes_in: torch.dtype,
    buffers: tuple[str, ...],
) -> Culprit:
    """Return the culprit that a watched call is."""
    n = seen.numbers
    sizes = [abs(x) for x in (n.lowest_in, n.highest_in) if math.isfinite(x)]
    return Culprit(
        seen.module,
        seen.kind,
        seen.direction,
        seen.dtype,
        n.largest,
        max(0.0, 1.0 - n.bad / max(seen.elements, 1)),
        "inf" if not math.isnan(n.lowest) else "inf and nan" if n.inf else "nan",
        max(sizes, default=0.0),
        seen.operator,
        custom,
        parameters,
        left_alone,
        seen.masked_in,
        seen.composite,
        computes_in,
        buffers,
    )
