# SPDX-License-Identifier: Apache-2.0
"""A finding: shown in four lines, stored as strings, never changed."""

import copy
import dataclasses
import json
import pickle

import pytest

import lightning_amp_guard
from lightning_amp_guard.monitor.findings import Finding

PARTS = {
    "code": "AMP102",
    "title": "the schedule is ahead of the updates",
    "evidence": "StepLR advanced 6 times for 4 updates",
    "cause": "skipped updates advanced it",
    "remedy": "Hold it back: `Trainer(plugins=[SafeAMP()])`",
}


def test_text_says_code_symptom_evidence_cause_and_change():
    assert str(Finding(**PARTS)) == (
        "AMP102: the schedule is ahead of the updates\n"
        "  seen: StepLR advanced 6 times for 4 updates\n"
        "  likely cause: skipped updates advanced it\n"
        "  change: Hold it back: `Trainer(plugins=[SafeAMP()])`"
    )


@pytest.mark.parametrize("name", ["title", "evidence", "cause", "remedy"])
def test_text_has_four_lines_whatever_the_parts_hold(name):
    text = str(Finding(**{**PARTS, name: "first\n  second\r\n\n third\t."}))
    assert len(text.splitlines()) == 4
    assert "first second third ." in text


def test_dict_is_flat_and_survives_json():
    finding = Finding(**PARTS)
    assert finding.to_dict() == PARTS
    assert Finding(**json.loads(json.dumps(finding.to_dict()))) == finding


def test_finding_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Finding(**PARTS).code = "AMP103"


def test_equal_findings_are_one_in_a_set_and_survive_copy_and_pickle():
    one = Finding(**PARTS)
    assert {one, Finding(**PARTS), copy.deepcopy(one), pickle.loads(pickle.dumps(one))} == {one}


def test_finding_comes_from_the_package_root():
    assert lightning_amp_guard.Finding is Finding
    assert "Finding" in lightning_amp_guard.__all__
