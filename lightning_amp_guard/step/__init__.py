# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: windows of gradients, the attempt, its verdict, and when the scale moves."""
