# SPDX-License-Identifier: Apache-2.0
"""Which operator made the first non-finite value of a step: one step replayed and followed."""

from lightning_amp_guard.diagnosis.locate.finding import NonFiniteReport
from lightning_amp_guard.diagnosis.locate.locate import locate_nonfinite

__all__ = ["NonFiniteReport", "locate_nonfinite"]
