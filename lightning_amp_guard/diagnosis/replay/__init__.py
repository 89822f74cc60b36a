# SPDX-License-Identifier: Apache-2.0
"""One step run again outside a Trainer, with everything put back afterwards."""
