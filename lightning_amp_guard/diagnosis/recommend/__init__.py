# SPDX-License-Identifier: Apache-2.0
"""Which precision to train in on this device, tried out."""

from lightning_amp_guard.diagnosis.recommend.recommend import recommend_precision
from lightning_amp_guard.diagnosis.recommend.recommendation import Recommendation

__all__ = ["Recommendation", "recommend_precision"]
