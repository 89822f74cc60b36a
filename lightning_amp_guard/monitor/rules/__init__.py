# SPDX-License-Identifier: Apache-2.0
"""The rules: from what is known of a run to what is wrong with it, one pure function each."""
