# SPDX-License-Identifier: Apache-2.0
"""Which of the origins that reach the loss or a gradient is to blame."""

from __future__ import annotations

from dataclasses import replace

from lightning_amp_guard.diagnosis.locate.finding import NonFiniteReport
from lightning_amp_guard.diagnosis.locate.trace import Origin

__all__ = ["blamed", "described"]


def blamed(origins: list[Origin], numbers: frozenset[int]) -> tuple[Origin, Origin | None]:
    """Return the origin to blame, and what it came of or what came of it, if anything."""
    first = origins[min(numbers, key=lambda i: (origins[i].intended, i))]
    hidden = [i for i in first.causes if not origins[i].intended]
    if hidden:
        return origins[min(hidden)], first
    return first, origins[min(first.causes)] if first.causes else None


def described(
    empty: NonFiniteReport,
    origin: Origin,
    other: Origin | None,
    direction: str,
    names: dict[int, list[str]],
) -> NonFiniteReport:
    """Return the report with what an origin says; cause and remedy come later.

    Args:
        empty: The report without a finding.
        origin: What is to blame.
        other: What it came of, or what came of it, if anything.
        direction: Where the harm is done.
        names: Every module's names, by its `id`.
    """
    site, result = origin.site, origin.result
    largest = [v.max_abs for v in origin.inputs if v.max_abs is not None]
    also = next((found[1:] for found in names.values() if found[0] == site.module), [])
    return replace(
        empty,
        module=site.module,
        also=tuple(also),
        op=None if origin.subject else site.op,
        kernel=site.kernel,
        subject=origin.subject,
        direction=direction,
        kind=result.kind,
        dtype=result.dtype,
        shape=result.shape,
        max_abs=result.max_abs,
        finite_share=result.finite_share,
        inputs=tuple([str(values) for values in origin.inputs]),
        input_max_abs=max(largest, default=None),
        source=str(site.line) if site.line else "",
        scope="" if origin.subject else f"autocast {site.autocast}",
        notes=(*empty.notes, *_relation(origin, other)),
    )


def _relation(origin: Origin, other: Origin | None) -> list[str]:
    if other is None:
        return []
    where = f" at {other.site.line.where}" if other.site.line else ""
    if other.site.direction == "backward" and origin.site.direction == "forward":
        what = other.site.kernel
        return [f"hidden in the forward pass; the backward pass reads it again: {what}{where}"]
    return [f"the infinite values were meant: {other.subject or other.site.op}{where}"]
