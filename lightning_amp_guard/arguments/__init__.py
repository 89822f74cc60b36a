# SPDX-License-Identifier: Apache-2.0
"""Arguments of classes: checked once, refused under the name that the user wrote."""
