# SPDX-License-Identifier: Apache-2.0
"""How much memory training takes, and for what."""

from lightning_amp_guard.diagnosis.memory.memory import MemoryReport, estimate_memory

__all__ = ["MemoryReport", "estimate_memory"]
