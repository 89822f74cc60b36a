# SPDX-License-Identifier: Apache-2.0
"""How many valid tokens a window's gradients hold; free of Lightning."""
