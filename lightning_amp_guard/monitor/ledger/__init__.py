# SPDX-License-Identifier: Apache-2.0
"""The record of a run, one line per attempt: kept, written, read back and compared."""
