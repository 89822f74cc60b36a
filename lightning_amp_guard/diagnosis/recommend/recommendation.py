# SPDX-License-Identifier: Apache-2.0
"""What `recommend_precision` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_amp_guard.diagnosis.flat import strict
from lightning_amp_guard.diagnosis.recommend.trial import Trial

__all__ = ["Recommendation"]


@dataclass(frozen=True)
class Recommendation:
    """Names the precision to train in, with what was measured.

    Args:
        precision: "16-mixed", "bf16-mixed" or "32-true".
        reasons: Why, a sentence each, in the order of the decision.
        trials: What each precision showed, float32 first.
        device: The device type.
        native: Whether the device computes bfloat16 and float16 natively.
        memory_kind: What `Trial.memory` counts.
    """

    precision: str
    reasons: tuple[str, ...]
    trials: tuple[Trial, ...]
    device: str
    native: tuple[bool, bool]
    memory_kind: str

    def trial(self, precision: str) -> Trial:
        """Return what one precision showed.

        Args:
            precision: "32-true", "bf16-mixed" or "16-mixed".

        Raises:
            KeyError: there is no trial of it.
        """
        for trial in self.trials:
            if trial.precision == precision:
                return trial
        raise KeyError(f"no {precision!r}: expected one of {[t.precision for t in self.trials]}")

    def drift(self, precision: str) -> float:
        """Return how far a precision's losses lie off float32's, relative to float32's largest."""
        return self.trial(precision).drift_from(self.trials[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values: one flat level, `PRECISION/KEY` for what was measured.

        The sentences are `reasons/0`, `reasons/1`, ... Inf and NaN become `None`, as in strict JSON.
        """
        flat: dict[str, Any] = {
            "precision": self.precision,
            **{f"reasons/{i}": reason for i, reason in enumerate(self.reasons)},
            "device": self.device,
            "native_bf16": self.native[0],
            "native_fp16": self.native[1],
            "memory_kind": self.memory_kind,
        }
        for trial in self.trials:
            values = {
                **trial.timing._asdict(),
                "memory": trial.memory,
                "nonfinite_rate": trial.nonfinite_rate,
                "drift": self.drift(trial.precision),
                "scale": trial.scale,
                "metric": trial.metric,
            }
            flat |= {f"{trial.precision}/{key}": value for key, value in values.items()}
        return strict(flat)

    def __str__(self) -> str:
        with_metric = any(trial.metric is not None for trial in self.trials)
        head = (
            f"{'precision':<11} {'ms/step (quartiles)':>24} {'fastest':>8} {'MiB':>9}"
            f" {'non-finite':>10} {'drift':>8}{' metric' if with_metric else '':>9}"
        ).rstrip()
        rows = [self._row(trial, with_metric) for trial in self.trials]
        note = f"MiB: {self.memory_kind}; drift: loss against float32's"
        reasons = [f"- {reason}" for reason in self.reasons]
        return "\n".join([f"{self.precision} on {self.device}", *reasons, head, *rows, note])

    def _row(self, trial: Trial, with_metric: bool) -> str:
        fastest, low, median, high = [1000 * value for value in trial.timing]
        drift = self.drift(trial.precision)
        row = (
            f"{trial.precision:<11} {f'{median:.3g} ({low:.3g} to {high:.3g})':>24} {fastest:>8.3g}"
            f" {trial.memory / 2**20:>9.3g} {100 * trial.nonfinite_rate:>8.3g} %"
            f" {'-' if math.isnan(drift) else f'{100 * drift:.2g} %':>8}"
        )
        return f"{row} {trial.metric:>8.4g}" if with_metric else row
