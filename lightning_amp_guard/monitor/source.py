# SPDX-License-Identifier: Apache-2.0
"""Where the counts and the scale of a fit come from: this package's plugin, or an audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.monitor.audit import Audit
from lightning_amp_guard.monitor.metrics import expected_share
from lightning_amp_guard.outcome import StepOutcome, StepTally
from lightning_amp_guard.plugin.plugin import AmpPlugin
from lightning_amp_guard.step.roles import Witness

__all__ = ["Source"]


class Source:
    """Answers what the precision plugin of a fit knows, whatever its make.

    A plugin of this package (`native`) tells outcomes and counts by itself; one of another make is
    watched by an `audit`, which makes them.

    Args:
        trainer: The Trainer, about to train.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        plugin = trainer.precision_plugin
        self.native = plugin if isinstance(plugin, AmpPlugin) else None
        self.audit: Audit | None = None
        #: The scaler in force when the fit began.
        self.scaler: torch.amp.GradScaler | None = None
        self._witness: Witness | None = None

    def listen(
        self,
        hear: Callable[[StepOutcome], None],
        witness: Witness,
        look: Callable[[int, list[Tensor], float, float], None],
        saved: Sequence[Mapping[str, Any]],
    ) -> None:
        """Begin to listen; without it there are no counts.

        Args:
            hear: Receives each outcome; only used under a foreign plugin.
            witness: Looks at true gradients before hooks and clipping.
            look: The same under a foreign plugin; see `Audit`.
            saved: Counts to go on from under a foreign plugin, as `state` returned them.
        """
        self._witness = witness
        if self.native is None:
            counted = [StepTally(**tally) for tally in saved]
            self.audit = Audit(self.trainer, hear, look, witness.wants_norm, counted)
            self.scaler = self.audit.scaler
        else:
            self.scaler = self.native.scaler
            self.native.running().witnesses.append(witness)

    def close(self) -> None:
        """Listen no more."""
        if self.audit is not None:
            self.audit.close()
        elif self.native is not None and self.native.engine is not None:
            witnesses = self.native.engine.witnesses
            if self._witness in witnesses:
                witnesses.remove(self._witness)

    def state(self) -> dict[str, Any]:
        """Return the scale, and the counts that no plugin saves, as plain values.

        Host sync: as `scale`.
        """
        state: dict[str, Any] = {"scale": self.scale}
        if self.audit is not None:
            state["tallies"] = [vars(tally).copy() for tally in self.tallies]
        return state

    @property
    def settings(self) -> ScaleSettings | None:
        """How the scale moves, where this package moves it."""
        return getattr(getattr(self.scaler, "policy", None), "settings", None)

    @property
    def tallies(self) -> list[StepTally]:
        """The counts per optimizer, over the whole run."""
        source = self.native if self.native is not None else self.audit
        return [] if source is None else list(source.tallies)

    @property
    def scale(self) -> float:
        """The scale in force; 1.0 without one. Host sync: one under a foreign scaler."""
        if self.audit is not None:
            return self.audit.scale
        scaler = None if self.native is None else self.native.scaler  # `on_limit` may end scaling
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def switched(self) -> str | None:
        """The precision that the run has gone over to by `on_limit`."""
        return None if self.native is None else self.native.switched

    @property
    def expected_share(self) -> float:
        """The share of attempts that growth makes a settled run skip."""
        if self.settings is None and self.scaler is not None:
            return 1.0 / (self.scaler.get_growth_interval() + 1)
        return expected_share(self.settings)

    @property
    def backoff_factor(self) -> float:
        """What an overflow multiplies the scale by; 0.5 without one."""
        return 0.5 if self.scaler is None else float(self.scaler.get_backoff_factor())

    @property
    def guards(self) -> Sequence[Any]:
        """The plugin's guards; a foreign plugin has none."""
        return () if self.native is None else self.native.guards

    def present_attempt(self, idx: int) -> int:
        """Return the number of the attempt that the optimizer is in. Host sync: none."""
        counting: Any = self.audit if self.native is None else self.native.running()
        return int(counting.tallies[idx].attempted)
