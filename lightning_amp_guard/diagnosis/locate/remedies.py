# SPDX-License-Identifier: Apache-2.0
"""Why an operator's result was not finite, and the line of code to write."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lightning_amp_guard.diagnosis.counts import LEAST_ORDINARY_SCALE
from lightning_amp_guard.diagnosis.locate.trace import Origin

__all__ = ["Facts", "explain", "is_ordinary"]

# What each family of operators does at the edge of its domain, and how it is written safely.
_FORMULAS = {
    ("div", "reciprocal", "true_divide", "floor_divide", "remainder", "fmod"): (
        "it divides by zero or by something too small",
        "x / y.clamp(min=1e-6)",
    ),
    ("rsqrt",): ("it divides by the root of zero", "(x + 1e-6).rsqrt()"),
    ("log", "log2", "log10", "log1p", "xlogy", "logit"): (
        "the logarithm ends at zero",
        "x.clamp(min=1e-6).log()",
    ),
    ("sqrt", "pow", "norm", "linalg_vector_norm", "std", "cdist", "_cdist_forward"): (
        "a root has no value below zero and an infinite slope at zero",
        "(x + 1e-6).sqrt()",
    ),
    ("exp", "exp2", "expm1", "cosh", "sinh"): (
        "the exponential of a large number leaves the range",
        "(x - x.amax(-1, keepdim=True)).exp()",
    ),
    ("nll_loss_forward", "nll_loss2d_forward"): (
        "it averages over nothing: every target is ignored",
        'cross_entropy(x, y, reduction="sum") / (y != -100).sum().clamp(min=1)',
    ),
    ("_weight_norm_interface", "_weight_norm"): (
        "it divides by the norm of a weight that is zero",
        "nn.init.normal_(layer.parametrizations.weight.original1)",
    ),
    ("acos", "asin", "atanh", "acosh"): (
        "its domain ends at 1, where its slope is infinite",
        "x.clamp(-1 + 1e-6, 1 - 1e-6)",
    ),
}
_NEAR_ZERO = {
    f"aten.{name}" for name in ("div.Tensor", "rsqrt.default", "reciprocal.default", "log.default")
}
_MASKED = "scores.masked_fill(mask, torch.finfo(scores.dtype).min)"


@dataclass(frozen=True)
class Facts:
    """What further replays of the same step have shown.

    Args:
        precision: The precision of the replay that found the fault.
        scale: The factor that multiplied the loss.
        safe_scale: The largest power of two at which the gradients are finite; `None` if there is
            none, or if it was not looked for.
        finite_in_float32: Whether the step is finite in float32; `None` if that is not known.
        modules: What has to run in float32 together, as replays have shown; begins with the module
            at fault. Empty if that was not looked for, or if not even every module helps.
        instead: The precision in which the step is finite, where no module in float32 helps; or "".
        device: The device type.
    """

    precision: str
    scale: float
    safe_scale: float | None = None
    finite_in_float32: bool | None = None
    device: str = "cpu"
    modules: tuple[str, ...] = ()
    instead: str = ""

    @property
    def is_calibration(self) -> bool:
        """Whether a smaller scale is all that is needed, as it happens in every run."""
        return is_ordinary(self.safe_scale)


def is_ordinary(safe_scale: float | None) -> bool:
    """Return whether a step that is finite at this scale needs no more than that."""
    return safe_scale is not None and safe_scale >= LEAST_ORDINARY_SCALE


def explain(origin: Origin, because: Origin | None, facts: Facts) -> tuple[str, str]:
    """Return the likely cause and the remedy, which ends in a line of code.

    Args:
        origin: What is to blame.
        because: What was there before and harmless by itself (a mask), or what came of it.
        facts: What further replays have shown.
    """
    if origin.subject:
        return _outside(origin)
    if facts.is_calibration:
        return _scale(facts)
    if origin.intended and not origin.causes:
        return _meant(origin)
    if because is not None and because.intended and "softmax" in origin.site.kernel:
        return (
            "a row of its input is -inf throughout (a mask that leaves nothing), and softmax makes"
            " NaN of that.",
            f"Leave one element of each row, or mask with a finite value: `{_MASKED}`.",
        )
    float16_inf = origin.result.dtype == "float16" and origin.result.kind == "inf"
    if facts.finite_in_float32 or (facts.finite_in_float32 is None and float16_inf):
        return _range(origin, facts)
    return _formula(origin, facts)


def _outside(origin: Origin) -> tuple[str, str]:
    if origin.subject.startswith("batch"):
        return (
            "the data: it was not finite before the model saw it.",
            "Mend or drop the sample; `print(scan_batch(batch))` lists every such field.",
        )
    if origin.subject.startswith(("parameter", "buffer")):
        return (
            "an earlier step wrote it; this step only reads it.",
            'Go on from a checkpoint before that: `trainer.fit(model, ckpt_path="last-good.ckpt")`.',
        )
    return (
        "it was made outside of torch's operators, or before the step.",
        "Look at where it comes from: `assert torch.isfinite(x).all()`.",
    )


def _scale(facts: Facts) -> tuple[str, str]:
    power = f"2.0**{_exponent(facts.safe_scale or 1.0)}"
    return (
        f"the scale alone: times {facts.scale:g} the gradients leave float16's range, times {power}"
        " they do not. Nothing is wrong.",
        f"`SafeAMP` lowers the scale by itself; to begin there: `SafeAMP(init_scale={power})`.",
    )


def _meant(origin: Origin) -> tuple[str, str]:
    if "empty" in origin.site.kernel:
        return (
            "its memory was never written to, or by something outside of torch's operators.",
            "Begin with zeros: `torch.zeros(shape)`.",
        )
    return (
        "the program writes inf there, and nothing takes it away again before the loss.",
        f"Write a finite value: `{_MASKED}`.",
    )


def _range(origin: Origin, facts: Facts) -> tuple[str, str]:
    finite = "in float32 the same step is finite; " if facts.finite_in_float32 else ""
    cause = f"the precision: {finite}{_limit(origin, facts)}."
    if modules := facts.modules:
        what = "the module" if len(modules) == 1 else "it and what reads its large results"
        what = "every module, and give back what can be," if modules == ("*",) else what
        line = f"SafeAMP(fp32_modules={json.dumps(modules)})"
        return cause, f"Run {what} in float32: `{line}`."
    if facts.instead:
        line = (
            f'{"Trainer" if facts.instead == "32-true" else "SafeAMP"}(precision="{facts.instead}")'
        )
        return cause, f"No module in float32 helps, so run the whole step otherwise: `{line}`."
    scope = f'with torch.autocast("{facts.device}", enabled=False): ...'
    return cause, f"Run that line in float32, on `.float()` inputs: `{scope}`."


def _limit(origin: Origin, facts: Facts) -> str:
    if facts.precision != "16-mixed" and origin.result.dtype != "float16":
        return "bfloat16 keeps 8 bits of each number"
    if any([values.zeros for values in origin.inputs]) and origin.site.kernel in _NEAR_ZERO:
        return "float16 rounds what is below 3e-8 to zero, an `eps` of 1e-8 too"
    return "float16 ends at 65504"


def _formula(origin: Origin, facts: Facts) -> tuple[str, str]:
    names = [name.split(".")[1] for name in (origin.site.op, origin.site.kernel) if "." in name]
    everywhere = facts.precision == "32-true" or facts.finite_in_float32 is False
    tail = " It is so in float32, too." if everywhere else ""
    for name in names:
        for family, (cause, line) in _FORMULAS.items():
            if name.rstrip("_") in family:
                return f"the formula: {cause}.{tail}", f"Keep away from the edge: `{line}`."
    return (
        f"the operator itself, on these inputs.{tail}",
        "Look at the inputs, or bound them: `x.clamp(-1e4, 1e4)`.",
    )


def _exponent(power: float) -> int:
    return int(power).bit_length() - 1
