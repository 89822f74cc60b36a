# SPDX-License-Identifier: Apache-2.0
"""Faults of torch and Lightning that this package works around, by the versions they were seen in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FAULTS", "UpstreamFault", "known_faults", "release"]


@dataclass(frozen=True)
class UpstreamFault:
    """Describes one fault and what becomes of it under this package.

    Args:
        package: "lightning" or "torch".
        issue: Where it is reported, e.g. "Lightning #5558".
        fault: What goes wrong, as a clause.
        answer: What this package does about it, as a clause.
        oldest: Oldest version in which it was seen.
        newest: Newest version in which it was seen.
    """

    package: str
    issue: str
    fault: str
    answer: str
    oldest: str
    newest: str

    def status(self, version: str) -> str:
        """Return "seen" within the versions it was seen in, else "not examined"."""
        seen = release(self.oldest) <= release(version) <= release(self.newest)
        return "seen" if seen else "not examined"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without build and pre-release marks.

    Example:
        >>> release("2.13.0+cpu"), release("2.14.0.dev20260101") > release("2.13.1")
        ((2, 13, 0), True)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _lightning(number: int, fault: str, answer: str) -> UpstreamFault:
    return UpstreamFault("lightning", f"Lightning #{number}", fault, answer, "2.6.6", "2.6.6")


def _torch(number: int, fault: str, answer: str) -> UpstreamFault:
    return UpstreamFault("torch", f"PyTorch #{number}", fault, answer, "2.13.0", "2.13.0")


FAULTS = (
    _lightning(
        5558,
        "a skipped step still advances the learning rate schedule",
        "`SchedulerGate` lets schedules advance with applied updates only",
    ),
    _lightning(
        11688,
        "a skipped step gives the old weights one more vote in the weight average",
        "`AveragingGate` takes no sample from a skipped step",
    ),
    _lightning(
        18089,
        "`clip_gradients` in manual optimization clips gradients that carry the scale",
        "they are unscaled first",
    ),
    _lightning(
        15501,
        "with a fused optimizer, `on_before_optimizer_step` sees scaled gradients",
        "they are unscaled before",
    ),
    _lightning(
        19695,
        "`loss.backward()` in place of `manual_backward` makes gradients without the scale",
        "`UnscaleGuard` raises `ScaledGradientError`",
    ),
    _lightning(
        17407,
        "a window whose last `training_step` returned None loses its gradients",
        "it is stepped with those that it has",
    ),
    _lightning(
        20116,
        "a step of an optimizer without any gradient stops with an assertion",
        "it is no attempt, and nothing happens",
    ),
    _lightning(
        11885,
        "the scaler's state is looked up by the plugin's class name, and lost if that changes",
        "`ScalerCheckpoint` finds it under any name",
    ),
    _lightning(
        4956,
        "BF16 applies an update with an inf gradient",
        "`SafeAMP(bf16_guard=True)` skips it",
    ),
    _torch(
        36601,
        "the scale moves between the steps of several optimizers, and inside their windows",
        "`WindowGuard` keeps one scale per window",
    ),
    _torch(
        40497,
        "a batch with a NaN loss halves the scale, which is not to blame",
        "only non-finite gradients under a finite loss back off",
    ),
    _torch(
        99640,
        "after many overflows the scale's reciprocal is inf, and NaN reaches the weights",
        "`SafeAMP(min_scale=1.0)` bounds the scale",
    ),
    _torch(
        136009,
        "ranks decide for themselves where DDP does not reduce a gradient",
        '`SafeAMP(sync_found_inf="auto")` lets all apply or all skip',
    ),
)


def known_faults(versions: Mapping[str, str]) -> list[tuple[UpstreamFault, str]]:
    """Return the faults of the packages that are installed, each with its status there.

    Args:
        versions: Installed versions by package, e.g. `{"torch": "2.13.0+cpu"}`.

    Example:
        >>> (fault, status), *_ = known_faults({"lightning": "2.7.0"})
        >>> fault.issue, status
        ('Lightning #5558', 'not examined')
    """
    return [(f, f.status(versions[f.package])) for f in FAULTS if f.package in versions]
