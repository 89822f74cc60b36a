# SPDX-License-Identifier: Apache-2.0
"""The scaler's own five values out of a checkpoint."""

from __future__ import annotations

from typing import Any

from lightning_amp_guard.guards._base import Host
from lightning_amp_guard.scale_policy import float32
from lightning_amp_guard.state import SCALER_KEYS, read_scaler_state

__all__ = ["restore_scaler"]


def restore_scaler(host: Host, five: Any) -> None:
    """Take up torch's five values, and say in one line what they change.

    Args:
        host: The plugin.
        five: What was saved; `None` if the run had no scale.

    Raises:
        ScalerStateError: A value is damaged; the message names the key.

    Host sync: none.
    """
    if five is None or host.scaler is None:
        have, need = ("a scale", "none") if five else ("no scale", "one")
        if bool(five) != (host.scaler is not None):
            host.info(
                f"The checkpoint holds {have} and this run's precision needs {need}:"
                " weights, optimizers and schedules resume, the scale does not."
            )
        return
    state = read_scaler_state(five)
    before = host.scaler.state_dict()
    host.scaler.load_state_dict(state)
    differ = [
        f"{k}={state[k]} (not {before[k]})" for k in SCALER_KEYS[1:4] if state[k] != before[k]
    ]
    settings = host.scaler.policy.settings
    if not settings.dynamic and state["scale"] != settings.init_scale:
        differ.append(f"scale={state['scale']}, where it stays (not {settings.init_scale})")
    if host.scaler.get_scale() != float32(state["scale"]):
        differ.append(f"scale={state['scale']} moved to the bound {host.scaler.get_scale()}")
    if differ:
        host.info("Resumed with the checkpoint's scaler settings: " + ", ".join(differ) + ".")
