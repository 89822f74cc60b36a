# SPDX-License-Identifier: Apache-2.0
"""When a precision computes something else than float32, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from lightning_amp_guard.diagnosis.compare.layers import Agreement

__all__ = ["Problem", "error_problem", "nonfinite_problems", "problems_of"]

TENFOLD = 10.0  # the bound of finding AMP113
_TURNED = 0.5  # cosine: the gradients are more than 60 degrees apart
_OUTPUT_OFF = 0.5
_FLOAT32_NOISE = 2.0**-24
_SHOWN = 3


class Problem(NamedTuple):
    """Something that a precision computes otherwise than float32.

    Args:
        sentence: What, with numbers.
        layers: The names of the layers concerned, the worst first.
    """

    sentence: str
    layers: tuple[str, ...] = ()


def problems_of(
    precision: str,
    agreements: Mapping[str, Agreement],
    reference: Mapping[str, float],
    output_error: float,
) -> list[Problem]:
    """Return what is wrong with the gradients and the output of one precision.

    Rounding makes noise of about eps times the whole gradient in every layer, so that a gradient
    that is zero in exact arithmetic (a bias before BatchNorm, a key's bias in attention) is that
    noise in each precision. A norm below eps of the whole gradient's is therefore no growth, and one
    that is below 2^-24 of it in float32 is no loss.

    Args:
        precision: "bf16-mixed" or "16-mixed".
        agreements: By layer, how its gradient compares with the one in float32.
        reference: By layer, the gradient's norm in float32.
        output_error: Relative error of the output.
    """
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    total = math.hypot(*reference.values())
    noise = torch.finfo(dtype).eps * total
    grown, lost, turned = {}, {}, {}
    for name, (norm, ratio, cosine) in agreements.items():
        if ratio > TENFOLD and norm > noise:
            grown[name] = ratio
        elif ratio < 1 / TENFOLD and reference[name] > _FLOAT32_NOISE * total:
            lost[name] = ratio
        elif cosine < _TURNED and min(norm, reference[name]) > noise:
            turned[name] = cosine
    problems = []
    if grown or lost:
        found = {**grown, **lost}
        problems.append(_told("gradient norm", found, "{:.2g} times float32's"))
    if turned:
        problems.append(_told("gradient", turned, "turned, at cosine {:.2f} to float32's"))
    if output_error > _OUTPUT_OFF:
        off = f"the output differs from float32's by {100 * output_error:.0f} %"
        problems.append(Problem(off))
    return problems


def nonfinite_problems(
    loss: float, norms: Mapping[str, float], place: str, module: str | None
) -> list[Problem]:
    """Return what is non-finite in the first step, and where it began.

    Args:
        loss: The loss.
        norms: By layer, the norm of its gradient.
        place: The first operator with a non-finite result, "" if it is not known.
        module: The name of the module it is in.
    """
    began = f": {place}" if place else ""
    culprit = (module,) if module else ()
    if not math.isfinite(loss):
        return [Problem(f"the loss is {loss}{began}", culprit)]
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if not bad:
        return []
    many, verb = ("s", "are") if len(bad) > 1 else ("", "is")
    sentence = f"the gradient{many} of {_names(bad)} {verb} not finite{began}"
    return [Problem(sentence, culprit or tuple(bad))]


def error_problem(error: Exception) -> Problem:
    """Return what to tell of a step that raises in one precision and not in float32."""
    first = str(error).partition("\n")[0]
    return Problem(f"the step raises {type(error).__name__}: {first:.100}")


def _told(what: str, found: Mapping[str, float], how: str) -> Problem:
    worst = sorted(found, key=lambda name: -abs(math.log(max(abs(found[name]), 1e-300))))
    names, value = _names(worst), how.format(found[worst[0]])
    if len(found) == 1:
        return Problem(f"the {what} of {names} is {value}", tuple(worst))
    return Problem(f"the {what}s of {names} are off, the first is {value}", tuple(worst))


def _names(names: Iterable[str]) -> str:
    listed = [repr(name) if name else "the module itself" for name in names]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
