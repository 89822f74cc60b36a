# SPDX-License-Identifier: Apache-2.0
"""What a precision plugin leaves in a checkpoint, and takes up from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_amp_guard import _upstream
from lightning_amp_guard.plugin.life_cycle import LifeCycle

__all__ = ["SavedEntry"]


class SavedEntry(LifeCycle):
    """Saves and restores through `ScalerCheckpoint`, at the moments that Lightning gives a plugin."""

    def state_dict(self) -> dict[str, Any]:
        """Return the plugin's checkpoint entry; see `ScalerCheckpoint`."""
        self.settle()
        if self._checkpoint.enabled:
            return self._checkpoint.entry(self)
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore an entry of this package or of stock Lightning.

        Raises:
            ScalerStateError: The entry is damaged; the message names the key.
        """
        for i, done in enumerate(self._handled):
            if state_dict is done:
                del self._handled[i]
                return
        self._checkpoint.restore(self, self._adapted(state_dict))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add torch's five values under stock's name, so that stock Lightning can resume."""
        five = self._checkpoint.stock_entry(self)
        if five is not None:
            checkpoint.setdefault("MixedPrecision", five)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Find and restore the entry when fitting; otherwise leave everything as it is."""
        found = self.saved_entry(checkpoint)
        # Lightning hands the same entries to `load_state_dict` next: done, or not wanted
        names = (type(self).__qualname__, "native_amp_scaling_state")
        self._handled = [checkpoint[name] for name in names if name in checkpoint]
        if self.trainer is None or _upstream.is_fitting(self.trainer):
            self._checkpoint.restore(self, self._adapted(found))

    def saved_entry(self, checkpoint: Mapping[str, Any]) -> Any:
        """Return the entry of a whole checkpoint that this plugin would restore, or `None`."""
        return self._checkpoint.find(checkpoint, type(self).__qualname__)

    def _adapted(self, entry: Any) -> Any:
        """Return a checkpoint entry as this plugin can restore it."""
        return entry
