# SPDX-License-Identifier: Apache-2.0
"""The registry of rules: from what is known of a run to what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import RunView
from lightning_amp_guard.monitor.rules.baseline import (
    memory_hardly_drops,
    no_faster,
    norms_differ,
)
from lightning_amp_guard.monitor.rules.clipping import clipped_while_scaled
from lightning_amp_guard.monitor.rules.loss import custom_op_makes_nan, the_batch_itself
from lightning_amp_guard.monitor.rules.progress import loss_does_not_fall, weights_stand_still
from lightning_amp_guard.monitor.rules.steps import (
    overflows_go_on,
    ranks_differ,
    scale_never_moves,
    scaler_state_missing,
    schedule_ahead,
)

__all__ = ["RULES", "find"]

RULES: dict[str, Callable[[RunView], Finding | None]] = {
    "AMP101": clipped_while_scaled,
    "AMP102": schedule_ahead,
    "AMP103": overflows_go_on,
    "AMP104": weights_stand_still,
    "AMP105": custom_op_makes_nan,
    "AMP106": no_faster,
    "AMP107": scaler_state_missing,
    "AMP108": the_batch_itself,
    "AMP109": loss_does_not_fall,
    "AMP110": memory_hardly_drops,
    "AMP111": ranks_differ,
    "AMP112": scale_never_moves,
    "AMP113": norms_differ,
}


def find(view: RunView, known: Collection[str] = ()) -> list[Finding]:
    """Return what the rules find, by code, leaving out the codes in `known`.

    Each rule looks at the view alone and keeps nothing, so a fault is found again for as long as it
    shows: who wants each told once adds the codes to `known`, which stays as it is here.

    Args:
        view: What is known of the run at this moment.
        known: Codes that need no looking for.

    Host sync: none.

    Example:
        >>> from lightning_amp_guard.monitor.records import RunFacts, ScheduleLead, Row
        >>> skip = Row(0, 0, 0, 0, False, "NONFINITE_GRADIENTS", 65536.0, 32768.0)
        >>> lead = ScheduleLead("StepLR", optimizer=0, advanced=1, due=0)
        >>> view = RunView(RunFacts("MixedPrecision", "16-mixed", "cpu", True), [skip], [lead])
        >>> [finding.code for finding in find(view)], find(view, {"AMP102"})
        (['AMP102'], [])
    """
    found = (rule(view) for code, rule in RULES.items() if code not in known)
    return [finding for finding in found if finding is not None]
