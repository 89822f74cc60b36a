# SPDX-License-Identifier: Apache-2.0
"""What every precision plugin of this package is made of, whichever Lightning class it extends."""
