# SPDX-License-Identifier: Apache-2.0
"""What is installed, what the devices can do, and which upstream faults to expect."""

from lightning_amp_guard.diagnosis.doctor.doctor import DeviceReport, DoctorReport, examine

__all__ = ["DeviceReport", "DoctorReport", "examine"]
