# SPDX-License-Identifier: Apache-2.0
"""Rules about losses that are inf or NaN: who made them."""

from __future__ import annotations

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.records import RunView
from lightning_amp_guard.monitor.rules.reading import (
    by_optimizer,
    first_nonfinite,
    fraction_text,
    has_bad_loss,
    is_low,
    persistent_skips,
    unexplained_losses,
)

__all__ = ["custom_op_makes_nan", "the_batch_itself"]

_LONGEST_QUOTE = 300


def custom_op_makes_nan(view: RunView) -> Finding | None:
    """AMP105: a custom operator made the first inf or NaN, and the loss shows it or skips go on.

    Overflows of its gradients while the scale is searched for are ordinary and stay silent, and a bad
    batch explains a bad loss without it.
    """
    if not view.custom_op:
        return None
    bad = unexplained_losses(view)
    for rows in by_optimizer(view.rows).values():
        bad = bad or persistent_skips(rows, view.facts)
    if not bad:
        return None
    return Finding(
        "AMP105",
        "NaN out of a custom operator",
        f"`{view.custom_op}` made the first non-finite value;"
        f" {fraction_text(len(bad), len(view.rows))} attempts seen had a non-finite loss or"
        f" unexplained overflow, the last attempt {bad[-1].attempt} at scale {bad[-1].scale:g}"
        + first_nonfinite(view),
        *_why_custom(view),
    )


def _why_custom(view: RunView) -> tuple[str, str]:
    if not is_low(view.facts) or view.culprit_help is not None:
        where = "float32" if is_low(view.facts) else view.facts.precision
        return (
            f"`{view.custom_op}` makes inf or NaN of finite values, in {where} already",
            "Keep its inputs away from where it is undefined, by an `eps` of its own:"
            " `x.clamp(min=1e-6)`",
        )
    return (
        f"autocast has no rule for `{view.custom_op}`, so it receives whatever dtype comes and"
        " computes in low precision what needs float32",
        f"Cast its inputs: above the `forward` of `{view.custom_op}` write"
        " `@torch.amp.custom_fwd(device_type="
        f'"{view.facts.device}", cast_inputs=torch.float32)`',
    )


def the_batch_itself(view: RunView) -> Finding | None:
    """AMP108: the loss was inf or NaN, and so was something in that batch."""
    known = set(view.bad_attempts)
    bad = [row for row in view.rows if has_bad_loss(row)]
    if known:
        bad = [row for row in bad if (row.optimizer, row.attempt) in known]
    if not bad or not view.bad_batch:
        return None
    quote = " ".join(view.bad_batch.split())
    if len(quote) > _LONGEST_QUOTE:
        quote = quote[:_LONGEST_QUOTE] + " ..."
    last = bad[-1]
    return Finding(
        "AMP108",
        "the loss is NaN or inf because the batch is",
        f"{fraction_text(len(bad), len(view.rows))} attempts seen had a non-finite loss, the last"
        f" attempt {last.attempt} (epoch {last.epoch}, batch {last.batch_idx}), whose batch held:"
        f" {quote}",
        "inf or NaN in the data itself: no precision and no scale can help",
        "Drop or mend such samples in the dataset:"
        " `x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`",
    )
