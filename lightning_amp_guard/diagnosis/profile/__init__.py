# SPDX-License-Identifier: Apache-2.0
"""Which operators run in which dtype, and what autocast does not reach."""

from lightning_amp_guard.diagnosis.profile.dtype_report import DtypeReport
from lightning_amp_guard.diagnosis.profile.profile import profile_dtypes

__all__ = ["DtypeReport", "profile_dtypes"]
