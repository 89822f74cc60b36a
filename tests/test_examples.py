# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, and print what they claim."""

import importlib.util
import re
import time
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart_shows_stock_schedule_ahead_and_safe_amp_in_step(
    capsys: pytest.CaptureFixture[str],
):
    quickstart = load_example("quickstart")
    started = time.perf_counter()
    results = quickstart.main()
    assert time.perf_counter() - started < 90

    stock, safe = ({fact: pair[arm] for fact, pair in results["table"].items()} for arm in (0, 1))
    for column in (stock, safe):
        assert column["attempts"] == quickstart.BATCHES // 2
        assert column["attempts"] == column["updates applied"] + column["skipped"]
        assert column["skipped"] > 0
        # Only overflows moved the scale: one halving each.
        assert column["final scale"] == quickstart.INIT_SCALE / 2 ** column["skipped"]
        assert column["loss"] < 4.0  # it began at about 4.9
    assert stock["scheduler position"] == stock["attempts"] > stock["updates applied"]
    assert safe["scheduler position"] == safe["updates applied"] == results["moved"]

    rest, resumed = results["rest"], results["resumed"]
    assert len(rest) == quickstart.BATCHES // 2 - quickstart.RESUME_AT
    assert resumed == rest
    # The resumed attempts shown include a skip: the point of the checkpoint's place.
    assert any(skipped for _, _, _, skipped, _ in rest[: quickstart.SHOWN])

    printed = capsys.readouterr().out
    assert re.search(r"^scheduler position +48 +\d+$", printed, re.MULTILINE)
    assert printed.count("uninterrupted ") == printed.count("resumed  ") == quickstart.SHOWN
