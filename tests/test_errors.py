# SPDX-License-Identifier: Apache-2.0
"""Errors carry the attempt that led to them, across processes too."""

import copy
import pickle

import pytest

from lightning_amp_guard import (
    AmpGuardError,
    AmpGuardWarning,
    NonFiniteGradientError,
    ScaledGradientError,
    ScalerStateError,
    SkipLimitError,
    SkipReason,
    StepOutcome,
)

OUTCOME = StepOutcome(1, 7, False, SkipReason.NONFINITE_GRADIENTS, 8.0, 4.0, 2)
ERRORS = [
    AmpGuardError,
    NonFiniteGradientError,
    ScaledGradientError,
    ScalerStateError,
    SkipLimitError,
]


@pytest.mark.parametrize("kind", ERRORS)
def test_one_except_clause_catches_every_error_of_a_run(kind):
    assert issubclass(kind, AmpGuardError)
    assert issubclass(kind, RuntimeError)  # code written for torch's errors goes on working


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("outcome", [None, OUTCOME])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_error_survives_the_way_to_another_process(kind, outcome, copied):
    made = copied(kind("seven skips", outcome))
    assert type(made) is kind
    assert str(made) == "seven skips"
    assert made.outcome == outcome


def test_error_outside_an_attempt_has_no_outcome():
    assert AmpGuardError("damaged").outcome is None


def test_warning_can_be_filtered_apart_from_errors():
    assert issubclass(AmpGuardWarning, UserWarning)
    assert not issubclass(AmpGuardWarning, AmpGuardError)
