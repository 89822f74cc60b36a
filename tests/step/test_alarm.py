# SPDX-License-Identifier: Apache-2.0
"""The errors that end a run name the cause that is there, and a remedy that helps."""

from __future__ import annotations

import pytest

from lightning_amp_guard import NonFiniteLocator, SafeAMP, SkipLimitError
from tests.helpers import BAD, NAN_LOSS, Line, fit

BACKOFF = "once the scale has backed off"
ADVICE = 'Use `precision="bf16-mixed"`'


@pytest.mark.parametrize(
    ("precision", "fault", "said", "unsaid"),
    [
        ("16-mixed", BAD, [BACKOFF, ADVICE, "a gradient was inf or NaN"], ["in the batch"]),
        ("16-mixed", NAN_LOSS, ["do not depend on the scale", "in the batch"], [BACKOFF, ADVICE]),
        ("bf16-mixed", BAD, ["do not depend on the scale", "Run the module"], [BACKOFF, ADVICE]),
    ],
)
def test_skip_limit_error_fits_cause_and_precision(precision, fault, said, unsaid):
    plugin = SafeAMP(precision, max_consecutive_skips=2)
    unlocated = NonFiniteLocator(enabled=False)
    with pytest.raises(SkipLimitError) as caught:
        fit(Line([fault, fault]), plugin, 3, callbacks=[unlocated])
    message = str(caught.value)
    assert all(part in message for part in [*said, "'lin.weight'", "skipped 2 updates in a row"])
    assert not any(part in message for part in unsaid)
    assert message.endswith('`SafeAMP(fp32_modules=["name.of.module"])`')
    assert caught.value.outcome.attempt == 1
