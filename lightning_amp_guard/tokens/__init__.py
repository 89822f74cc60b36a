# SPDX-License-Identifier: Apache-2.0
"""Time in valid tokens, and gradients per token."""

from lightning_amp_guard.tokens.clock import TokenClock

__all__ = ["TokenClock"]
