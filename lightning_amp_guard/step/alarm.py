# SPDX-License-Identifier: Apache-2.0
"""Trouble stops with a name: the errors that end a run which only skips."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.errors import AmpGuardError, NonFiniteGradientError, SkipLimitError
from lightning_amp_guard.outcome import SkipReason, StepOutcome, StepTally
from lightning_amp_guard.plugin.fp32_scope import with_module
from lightning_amp_guard.step.lanes import Lane

__all__ = ["alarm", "nonfinite_parameters"]


def nonfinite_parameters(lane: Lane, names: dict[int, str]) -> list[str]:
    """Return the names of parameters whose gradient was inf or NaN. Host sync: one for each."""
    return [names.get(id(p), "?") for p, finite in lane.finite if not finite]


def alarm(
    outcome: StepOutcome,
    tally: StepTally,
    settings: AmpSettings,
    owner: str,
    lane: Lane,
    names: dict[int, str],
    culprit: str | None = None,
    *,
    finding: str = "",
    remedy: str = "",
    scaling: bool = True,
) -> AmpGuardError | None:
    """Return the error that a skip ends the run with, or `None` to go on. Host sync: one if so.

    Args:
        outcome: The skipped attempt.
        tally: The optimizer's counts, this attempt included.
        settings: `max_consecutive_skips` and `error_if_nonfinite` decide.
        owner: The plugin's class name, for the message.
        lane: The optimizer's lane, which noted the gradients before they were clipped.
        names: Parameter names by `id`.
        culprit: The module to blame, where something located it.
        finding: What located it, in a sentence.
        remedy: What mends a fault that neither a smaller scale nor float32 for the module would
            mend, with what was expected.
        scaling: Whether losses are scaled (FP16); under bfloat16 no scale can help.
    """
    limit = settings.max_consecutive_skips
    found = f" {finding}" if finding else ""
    advice = _remedy(outcome, owner, culprit, settings.fp32_modules, scaling)
    expected = f" {_expected(outcome, scaling)}"
    if remedy and outcome.reason is not SkipReason.PARTNER_SKIPPED:
        # it says itself what was expected; the message ends in the line to write
        advice, expected = remedy[:-1] if remedy.endswith("`.") else remedy, ""
    if settings.error_if_nonfinite:
        shown = _listed(nonfinite_parameters(lane, names))
        return NonFiniteGradientError(
            f"`{owner}(error_if_nonfinite=True)`: attempt {outcome.attempt} of optimizer"
            f" {outcome.optimizer_idx} was skipped at scale {outcome.scale:g}: {_what(outcome)}, with"
            f" non-finite gradients in {shown}.{found} {advice}",
            outcome,
        )
    if limit is None or tally.consecutive_skips < limit:
        return None
    shown = _listed(nonfinite_parameters(lane, names))
    return SkipLimitError(
        f"`{owner}(max_consecutive_skips={limit})`: optimizer {outcome.optimizer_idx} skipped"
        f" {tally.consecutive_skips} updates in a row, the last (attempt {outcome.attempt}) at scale"
        f" {outcome.scale:g}: {_what(outcome)}, with non-finite gradients in {shown}."
        f"{found}{expected} {advice}",
        outcome,
    )


def _what(outcome: StepOutcome) -> str:
    return {
        SkipReason.NONFINITE_LOSS: "the loss itself was inf or NaN",
        SkipReason.NONFINITE_GRADIENTS: "the loss was finite and a gradient was inf or NaN",
        SkipReason.PARTNER_SKIPPED: "its partner's gradients were inf or NaN",
        None: "",
    }[outcome.reason]


def _expected(outcome: StepOutcome, scaling: bool) -> str:
    if scaling and outcome.reason is SkipReason.NONFINITE_GRADIENTS:
        return "Expected overflows to end once the scale has backed off."
    return "Expected finite values: they do not depend on the scale."


def _remedy(
    outcome: StepOutcome, owner: str, culprit: str | None, chosen: Sequence[str], scaling: bool
) -> str:
    if outcome.reason is SkipReason.PARTNER_SKIPPED:
        return "Look at the outcomes of the optimizers it is held together with."
    first = {
        SkipReason.NONFINITE_LOSS: "Look for inf or NaN in the batch, or run",
        SkipReason.NONFINITE_GRADIENTS: (
            'Use `precision="bf16-mixed"`, or run' if scaling else "Run"
        ),
    }[outcome.reason or SkipReason.NONFINITE_GRADIENTS]
    modules = json.dumps(with_module(chosen, culprit or "name.of.module"))
    return f"{first} the module at fault in float32: `{owner}(fp32_modules={modules})`"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return "no parameter of its own"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(repr, names[:4])) + more
