# SPDX-License-Identifier: Apache-2.0
"""The monitor: what the run did, as metrics, one warning and a summary."""

from lightning_amp_guard.monitor.findings import Finding
from lightning_amp_guard.monitor.monitor import AmpMonitor

__all__ = ["AmpMonitor", "Finding"]
