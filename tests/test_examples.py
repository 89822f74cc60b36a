# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, and print what they claim."""

import importlib.util
import re
import socket
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


# AmpMonitor says so of stock, whose table shows it in full.
@pytest.mark.filterwarnings("ignore:AMP102")
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


def test_gan_gradients_arrive_whole_under_safe_amp_and_mixed_under_stock(
    capsys: pytest.CaptureFixture[str],
):
    gan = load_example("gan")
    started = time.perf_counter()
    safe, stock = gan.main(), gan.main(stock=True)
    assert time.perf_counter() - started < 90

    batches = gan.EPOCHS * gan.BATCHES
    attempts = {"discriminator": batches, "generator": batches // gan.WINDOW}
    for results in (safe, stock):
        for name, attempted in attempts.items():
            tally = results[name]["tally"]
            assert tally.attempted == attempted == tally.applied + tally.skipped
            # Counted inside of the optimizer: SafeAMP's tally is not its own witness.
            assert tally.applied == len(results[name]["received"])
        # Half a logit's gradient, over 16 samples, is beyond 65504 at 2**24, 2**23 and 2**22.
        assert results["discriminator"]["tally"].skipped >= 3
        # One that tells nothing apart has the loss 2 ln 2.
        assert results["discriminator"]["loss"] < 1.386
    for name in attempts:
        assert set(safe[name]["received"]) == {1.0}
        assert safe[name]["schedule"] == safe[name]["tally"].applied
        assert stock[name]["schedule"] == stock[name]["tally"].attempted
    # Windows of one batch hold one scale anyway; those of four are mixed by growth and by backoff.
    assert set(stock["discriminator"]["received"]) == {1.0}
    assert min(stock["generator"]["received"]) < 1.0 < max(stock["generator"]["received"])

    printed = capsys.readouterr().out
    assert re.search(r"^generator +56 .* 1 to 1 +0$", printed, re.MULTILINE)
    assert re.search(r"^final scale [\d,]+$", printed, re.MULTILINE)


def test_the_planted_fault_is_found_in_three_ways_and_mended(capsys: pytest.CaptureFixture[str]):
    example = load_example("find_the_culprit")
    started = time.perf_counter()
    results = example.main()
    assert time.perf_counter() - started < 30

    healthy, batches = example.HEALTHY_BATCHES, example.BATCHES
    tally = results["run"]["tally"]
    assert (tally.attempted, tally.applied) == (batches, healthy)
    assert tally.consecutive_skips == batches - healthy
    assert [text.count(example.CULPRIT) for text in results["run"]["warnings"]] == [2]
    assert results["run"]["culprit"].module == example.CULPRIT
    assert results["replay"].module == example.CULPRIT
    assert "precision" in results["replay"].cause
    ladder = results["ladder"]
    assert [rung.healthy for rung in ladder.rungs] == [True, True, False, False]
    assert results["worst"].name == example.CULPRIT
    assert results["worst"].activation_share == pytest.approx(2.0**17 / 65504)
    assert example.CULPRIT in ladder.verdict
    # the fault went on being planted, and harms nobody in float32
    assert results["mended"]["tally"].applied == batches
    assert results["mended"]["culprit"] is None

    printed = capsys.readouterr().out
    ways = ("NonFiniteLocator", "locate_nonfinite", "compare_precisions", "fp32_modules")
    for way in ways:
        assert re.search(rf"^{way}\S* +{re.escape(example.CULPRIT)} +\S", printed, re.MULTILINE)


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_two_ranks_part_under_stock_and_stay_together_under_safe_amp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Lightning leaves the port it chose in the environment; so the environment is restored.
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    two_ranks = load_example("two_ranks")
    started = time.perf_counter()
    results = two_ranks.main()
    assert time.perf_counter() - started < 40

    facts = ("final scale", "attempted", "applied", "skipped")
    table = {name: [[seen[f] for f in facts] for seen in pair] for name, pair in results.items()}
    batches, loud = two_ranks.BATCHES, len(two_ranks.LOUD)
    untouched, halved = [2**16, batches, batches, 0], [2**14, batches, batches - loud, loud]
    assert table == {"stock": [untouched, halved], "SafeAMP": [halved, halved]}

    heads = {name: [seen["head"] for seen in pair] for name, pair in results.items()}
    assert heads["SafeAMP"][0] == heads["SafeAMP"][1]
    assert heads["stock"][0] != heads["stock"][1]

    printed = capsys.readouterr().out
    assert re.search(r"^final scale +65,536 +16,384 +16,384 +16,384$", printed, re.MULTILINE)
    assert re.search(r"^skipped +0 +2 +2 +2$", printed, re.MULTILINE)
    assert re.search(r"^shared weights differ by +0\.\d+ +0$", printed, re.MULTILINE)
