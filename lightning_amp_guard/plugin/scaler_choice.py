# SPDX-License-Identifier: Apache-2.0
"""Which scaler a plugin starts with: from its arguments, or copied from one that was passed."""

from __future__ import annotations

import torch

from lightning_amp_guard.arguments.checks import refuse
from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.errors import ScalerStateError
from lightning_amp_guard.scale_policy import float32
from lightning_amp_guard.scaler import SkipAwareGradScaler

__all__ = ["choose_scaler"]


def choose_scaler(
    owner: str, precision: str, scale: ScaleSettings, scaler: object
) -> SkipAwareGradScaler:
    """Return a new scaler with the settings of `scale`, or with those and the state of `scaler`.

    Raises:
        TypeError: `scaler` is no `torch.amp.GradScaler`.
        ValueError: It is disabled or out of bounds, or a scale argument was given as well.
    """
    if scaler is None:
        return _make(scale)
    if not isinstance(scaler, torch.amp.GradScaler):
        usual = ScaleSettings.init_scale
        number = isinstance(scaler, (int, float)) and not isinstance(scaler, bool) and scaler > 0
        line = f"Write `{owner}(init_scale={float(scaler) if number else usual!r})`."  # type: ignore[arg-type]
        if isinstance(scaler, type) and issubclass(scaler, torch.amp.GradScaler):
            line = f'Write `{owner}(scaler={scaler.__name__}("cpu"))`.'
        raise TypeError(refuse(owner, "scaler", scaler, "a torch.amp.GradScaler or None", line))
    if precision == "bf16-mixed":
        raise ValueError(
            refuse(
                owner,
                "scaler",
                scaler,
                'None for precision="bf16-mixed", which needs no scale',
                f'Write `{owner}("bf16-mixed")`.',
            )
        )
    if not scaler.is_enabled():
        raise ValueError(
            refuse(
                owner,
                "scaler",
                scaler,
                "an enabled scaler",
                'A GradScaler("cuda") disables itself where there is no CUDA device. Write'
                f" `{owner}(init_scale={ScaleSettings.init_scale!r})`, which needs none.",
            )
        )
    if scale != ScaleSettings():
        raise ValueError(
            refuse(
                owner,
                "scaler",
                scaler,
                "the scale arguments at their defaults beside it",
                "Set them on the scaler instead. Write"
                f' `{owner}(scaler=torch.amp.GradScaler("cpu", init_scale={scale.init_scale!r}))`.',
            )
        )
    return _copy(owner, scaler)


def _make(scale: ScaleSettings) -> SkipAwareGradScaler:
    return SkipAwareGradScaler(
        "cpu",
        scale.init_scale,
        scale.growth_factor,
        scale.backoff_factor,
        scale.growth_interval,
        dynamic=scale.dynamic,
        hysteresis=scale.hysteresis,
        min_scale=scale.min_scale,
        max_scale=scale.max_scale,
    )


def _copy(owner: str, scaler: torch.amp.GradScaler) -> SkipAwareGradScaler:
    state = scaler.state_dict()
    if isinstance(scaler, SkipAwareGradScaler):
        made = _make(scaler.policy.settings)
        made.load_state_dict(state)
        made.policy.hysteresis_left = scaler.policy.hysteresis_left
        return made
    made = _make(ScaleSettings())
    try:
        made.load_state_dict(state)
    except ScalerStateError:
        raise ValueError(
            refuse(
                owner,
                "scaler",
                scaler,
                "settings within torch's documented ranges",
                f"They are {state!r}.",
            )
        ) from None
    if made.get_scale() != float32(state["scale"]):
        raise ValueError(
            refuse(
                owner,
                "scaler",
                scaler,
                "a scale between 1.0 and 2.0**24",
                f"It is {state['scale']!r}. Pass a SkipAwareGradScaler with other bounds.",
            )
        )
    return made
