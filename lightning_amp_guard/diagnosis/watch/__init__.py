# SPDX-License-Identifier: Apache-2.0
"""Which module made the first non-finite value, watched while training goes on."""

from lightning_amp_guard.diagnosis.watch.culprit import Culprit
from lightning_amp_guard.diagnosis.watch.watch import NonFiniteWatch

__all__ = ["Culprit", "NonFiniteWatch"]
