# SPDX-License-Identifier: Apache-2.0
"""LightningCLI builds plugin, guards and monitor from YAML."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_amp_guard import AmpMonitor, SafeAMP, ScalerCheckpoint, UnscaleGuard

pytest.importorskip("jsonargparse", reason="needs the extra `cli`")
EXAMPLE = Path(__file__).parent.parent / "examples" / "cli"
CONFIG = str(EXAMPLE / "config.yaml")


@pytest.fixture(autouse=True)
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def run(*args: str) -> Any:
    spec = importlib.util.spec_from_file_location("cli_example", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        # LightningCLI passes on a mask that jsonargparse and Lightning complain about themselves
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        return module.main(["fit", "--config", CONFIG, *args])


def test_yaml_builds_plugin_guards_and_monitor() -> None:
    trainer = run().trainer
    plugin = trainer.precision_plugin
    assert type(plugin) is SafeAMP
    assert plugin.settings.fp32_modules == ("net.2",)
    assert plugin.scaler.get_growth_interval() == 500
    assert plugin.tally.attempted == 32
    kinds = {type(callback): callback for callback in trainer.callbacks}
    assert kinds[UnscaleGuard].on_violation == "warn"
    assert kinds[ScalerCheckpoint].window_gradients is False
    assert kinds[AmpMonitor].prog_bar is False
    assert kinds[UnscaleGuard] in plugin.guards


def test_yaml_names_values_of_the_progress_bar(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_amp_guard.AmpMonitor\n"
        "      init_args:\n        prog_bar: [scale, skipped_steps]\n"
    )
    trainer = run("--config", str(more), "--trainer.log_every_n_steps=1").trainer
    (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, AmpMonitor)]
    assert monitor.prog_bar == ("amp/scale", "amp/skipped_steps")
    assert {"amp/scale", "amp/skipped_steps"} <= set(trainer.progress_bar_metrics)
    assert "amp/grad_norm" not in trainer.progress_bar_metrics


def test_command_line_wins_over_the_file() -> None:
    plugin = run("--trainer.plugins.init_args.init_scale", "1024").trainer.precision_plugin
    assert plugin.tally.skipped == 0
    assert plugin.scaler.get_scale() == 1024.0


def test_print_config_shows_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--print_config")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name in (
        "hysteresis: 1",
        "max_scale: 16777216.0",
        "sync_found_inf: auto",
        "on_limit: raise",
    ):
        assert name in printed


def test_a_bad_value_in_yaml_names_the_argument() -> None:
    with pytest.raises(ValueError, match=r"init_scale=-1\.0.*expected a finite number above 0"):
        run("--trainer.plugins.init_args.init_scale", "-1")
