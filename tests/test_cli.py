# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit status, and one line for a user's mistake."""

import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_amp_guard import _upstream, cli
from lightning_amp_guard.diagnosis.doctor import doctor
from lightning_amp_guard.diagnosis.doctor.upstream_faults import FAULTS, known_faults, release
from lightning_amp_guard.monitor.ledger.file import LedgerWriter, write_facts
from lightning_amp_guard.monitor.records import Row, RunFacts

pytest.importorskip("jsonargparse", reason="needs the extra `cli`")
ROOT = Path(__file__).parent.parent
ROWS = [
    Row(0, 0, 0, 0, False, "NONFINITE_GRADIENTS", 2048.0, 1024.0, 0.1, 2.0, float("inf"), 1, "b0"),
    Row(1, 0, 1, 0, True, None, 1024.0, 1024.0, 0.1, 1.5, 3.0, 1, "b1", "p1"),
    Row(2, 0, 2, 0, True, None, 1024.0, 1024.0, 0.1, 1.0, 2.5, 1, "b2", "p2"),
]
FACTS = RunFacts("SafeAMP", "16-mixed", "cpu", True, 2000, 1, 512.0, 300.0)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ledger(name, rows=ROWS, facts=None):
    writer = LedgerWriter(name)
    for row in rows:
        writer.write(row)
    writer.close()
    if facts:
        write_facts(name, facts)
    return name


def run(capsys, *argv):
    """Return exit status, standard output and standard error."""
    try:
        status = cli.main([str(arg) for arg in argv])
    except SystemExit as ended:  # of the parser
        status = ended.code
    said = capsys.readouterr()
    return status, said.out, said.err


# ----------------------------------------------------------------------- report


def test_report_draws_the_picture_and_prints_a_table(capsys):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    status, out, err = run(capsys, "report", ledger("a.jsonl", facts=FACTS), "-o", "x.png")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "Run a.jsonl:",
        "  run            SafeAMP, 16-mixed on cpu",
        "  throughput     512 samples/s",
        "  peak memory    300 MiB",
        "  attempts       3: 2 applied, 1 skipped (1 for non-finite gradients)",
        "  scale          2**10 to 2**11, then 2**10",
        "  loss           first 2, last 1",
        "  gradient norm  first inf, last 2.5; 1 inf or NaN",
        "drawn to x.png",
    ]
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_report_says_where_the_picture_is_and_refuses_no_name(capsys):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    a = ledger("a.jsonl")
    assert run(capsys, "report", a, "-o", "plain")[1].endswith("drawn to plain.png\n")
    assert Path("plain.png").exists()
    status, out, err = run(capsys, "report", a, "-o", "")
    assert (status, out) == (2, "")
    assert err == "amp-guard: -o: expected the name of the picture to write, such as run.png\n"


def test_report_of_several_optimizers_counts_each(capsys, monkeypatch):
    monkeypatch.setattr(cli, "draw_report", lambda run, path: None)
    rows = [*ROWS, *(replace(row, optimizer=1, applied=True, reason=None) for row in ROWS)]
    _, out, _ = run(capsys, "report", ledger("a.jsonl", rows))
    assert "  optimizer 0    3: 2 applied, 1 skipped (1 for non-finite gradients)\n" in out
    assert "  optimizer 1    3: 3 applied, 0 skipped\n" in out
    assert "drawn to amp_report.png" in out


def test_a_table_on_a_terminal_is_drawn_by_rich(capsys, monkeypatch):
    pytest.importorskip("rich", reason="needs the extra `report`")
    monkeypatch.setattr(cli, "draw_report", lambda run, path: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = run(capsys, "report", ledger("[b].jsonl"))
    assert "Run [b].jsonl" in out  # no markup of rich's
    assert re.search(r"[│|] scale +[│|] 2\*\*10 to 2\*\*11", out)


# ---------------------------------------------------------------------- compare


def test_equal_ledgers_exit_0_and_say_what_was_compared(capsys):
    status, out, _ = run(capsys, "compare", ledger("a.jsonl"), ledger("b.jsonl"))
    assert status == 0
    assert out.startswith("equal over 3 attempts; compared: epoch, ")
    assert "param_checksum" in out


def test_ledgers_that_part_exit_1_and_say_where(capsys):
    other = [*ROWS[:2], replace(ROWS[2], loss=1.25)]
    status, out, _ = run(capsys, "compare", ledger("a.jsonl"), ledger("b.jsonl", other))
    assert (status, out) == (
        1,
        "a.jsonl (first) and b.jsonl (second) part: attempt 2 of optimizer 0 differs in loss:"
        " 1.0 (line 3 of the first) and 1.25 (line 3 of the second)\n",
    )


@pytest.mark.parametrize(("rtol", "status"), [("0.1", 1), ("0.2", 0)])
def test_tolerance_decides(capsys, rtol, status):
    other = [*ROWS[:2], replace(ROWS[2], loss=1.25, scale=8.0)]
    got, out, _ = run(
        capsys, "compare", ledger("a.jsonl"), ledger("b.jsonl", other), "--rtol", rtol
    )
    assert got == status
    if not status:
        expected = (
            "equal over 3 attempts within 0.2; compared: batch_id, lr, loss, grad_norm, applied"
        )
        assert out.strip() == expected


def test_columns_that_one_ledger_does_not_know_do_not_pass_for_compared(capsys):
    blind = [replace(row, lr=None, param_checksum=None) for row in ROWS]
    status, out, _ = run(capsys, "compare", ledger("a.jsonl"), ledger("b.jsonl", blind))
    assert status == 0
    compared, unknown = out.strip().split("; not known in both: ")
    assert unknown == "lr, param_checksum"
    assert {"loss", "reason", "batch_id"} <= set(compared.split(": ")[1].split(", "))
    assert "param_checksum" not in compared


def test_runs_on_another_number_of_processes_see_other_batches(capsys):
    other = [replace(row, batch_id="x", loss=7.0) for row in ROWS]
    a, b = ledger("a.jsonl", facts=FACTS), ledger("b.jsonl", other, replace(FACTS, world_size=2))
    status, out, _ = run(capsys, "compare", a, b, "--rtol", "0.01")
    assert (status, out) == (
        0,
        "equal over 3 attempts within 0.01; compared: lr, grad_norm, applied\n",
    )
    assert run(capsys, "compare", a, b)[0] == 1  # without a tolerance everything counts


# ----------------------------------------------------------------------- memory


def test_memory_is_that_of_the_worked_example(capsys):
    # Adam in float32: 4 bytes a parameter, as much again for gradients, twice as much for moments
    status, out, _ = run(capsys, "memory", "100e9", "--precision", "32-true")
    assert status == 0
    for key, amount in {
        "weights": "400",
        "gradients": "400",
        "optimizer_state": "800",
        "total": "1,600",
    }.items():
        assert re.search(rf"^ *{key} +{amount}(\.0+)? GB$", out, re.MULTILINE), key


def test_memory_takes_another_optimizer(capsys):
    _, adam, _ = run(capsys, "memory", "1.5B")
    _, sgd, _ = run(capsys, "memory", "1.5B", "--optimizer", "sgd")
    assert "optimizer_state" in adam
    assert adam != sgd


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7e9", 7 * 10**9),
        ("1.5B", 15 * 10**8),
        ("350M", 350 * 10**6),
        ("124k", 124_000),
        ("0.1t", 10**11),
        ("1_000", 1000),
        ("1e18", 10**18),
        ("4.1e3", 4100),
    ],
)
def test_counts_are_read_exactly_as_people_write_them(text, count):
    assert cli.parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "B", "x", "0", "-5", "0.5", "1.23456k", "nan", "inf", "snan", "2e18", "1e999999999B"],
)
def test_what_is_no_count_is_refused_in_one_line(capsys, text):
    status, out, err = run(capsys, "memory", f" {text}")
    assert (status, out) == (2, "")
    assert err.startswith("amp-guard: ")
    assert err.count("\n") == 1
    assert repr(f" {text}") in err
    assert "7e9 or 1.5B" in err


# ----------------------------------------------------------------------- doctor


def test_doctor_shows_versions_devices_and_faults(capsys):
    status, out, err = run(capsys, "doctor")
    assert (status, err) == (0, "")
    versions = {name: metadata.version(name) for name in ("lightning", "torchmetrics")}
    for name, version in {**versions, "torch": torch.__version__}.items():
        assert re.search(rf"^  {name} +{re.escape(version)}$", out, re.MULTILINE)
    for part in ("  python ", "  lightning_amp_guard ", "  cpu ", '"auto" is ', "  TF32 ", "#5558"):
        assert part in out


def test_doctor_shows_each_gpu_with_its_own_capability(monkeypatch):
    native = {0: (True, True), 1: (False, True)}
    current = []

    class Device:
        def __init__(self, idx):
            self.idx = idx

        def __enter__(self):
            current.append(self.idx)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda idx: ["NVIDIA H200", "Tesla T4"][idx])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda idx: [(9, 0), (7, 5)][idx])
    monkeypatch.setattr(
        _upstream,
        "native_low_precision",
        lambda device: native[current[-1]] if device == "cuda" else (False, False),
    )
    rows = dict(doctor.examine().rows())
    assert rows["cuda:0"] == (
        'NVIDIA H200, compute capability 9.0: BF16 native, FP16 native; "auto" is bf16-mixed'
    )
    assert rows["cuda:1"] == (
        "Tesla T4, compute capability 7.5: BF16 emulated or missing, FP16 native;"
        ' "auto" is 16-mixed'
    )
    assert rows["cpu"].endswith('"auto" is bf16-mixed (32-true is faster here)')


def test_doctors_auto_is_what_the_plugin_chooses():
    from lightning_amp_guard import SafeAMP

    for native in [(True, True), (True, False), (False, True), (False, False)]:
        plugin = SafeAMP("auto")
        plugin.device = "cpu"
        plugin.settle_precision(*native)
        assert doctor.DeviceReport("cpu", "", *native).auto == plugin.precision


def test_tf32_is_read_through_either_of_torchs_interfaces(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert dict(doctor.examine().rows())["TF32"].startswith("on in float32 matmuls ('high')")

    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    before = torch.backends.cuda.matmul.fp32_precision
    assert dict(doctor.examine().rows())["TF32"].startswith(f"off in float32 matmuls ({before!r})")


def test_faults_are_seen_in_the_versions_examined_and_doubtful_in_others():
    first = FAULTS[0]
    statuses = [first.status(v) for v in ("2.6.5", "2.6.6", "2.6.6.post1", "2.7.0", "2.10.1")]
    assert statuses == ["not examined", "seen", "seen", "not examined", "not examined"]
    assert {f.package for f, _ in known_faults({"torch": "2.13.0+cpu"})} == {"torch"}
    assert {status for _, status in known_faults({"torch": "2.13.0+cpu"})} == {"seen"}
    newer = doctor.DoctorReport({}, [], "", known_faults({"lightning": "2.7.0"}))
    assert "(seen in 2.6.6, not examined here)" in newer.fault_rows()[0][1]
    assert release("2.10.0") > release("2.9.1")


def test_every_fault_is_one_that_the_readme_reports():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len({fault.issue for fault in FAULTS}) == len(FAULTS) >= 10
    for fault in FAULTS:
        name, number = fault.issue.split(" #")
        repository = {"Lightning": "Lightning-AI/pytorch-lightning", "PyTorch": "pytorch/pytorch"}
        assert re.search(rf"github\.com/{repository[name]}/(issues|pull)/{number}\)", readme), fault


def test_doctors_report_is_text_and_a_flat_dictionary():
    report = doctor.examine()
    flat = report.to_dict()
    assert flat["version.torch"] == torch.__version__
    assert flat["cpu.auto"] in ("16-mixed", "bf16-mixed")
    assert flat["Lightning #5558"] in ("seen", "not examined")
    assert all(isinstance(value, str | bool) for value in flat.values())
    for _, text in report.rows() + report.fault_rows():
        assert text in str(report)


# ----------------------------------------------------------------------- errors


def broken(name):
    Path(name).write_text("no ledger\n")
    return name


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["report", "gone.jsonl"], ["gone.jsonl", "No such file"]),
        (["report", "."], [".", "directory"]),
        (["report", "broken"], ["broken, line 1", "AmpMonitor(ledger=True)"]),
        (["report", "empty"], ["empty", "no attempt"]),
        (["compare", "good", "gone"], ["gone", "No such file"]),
        (["compare", "good", "broken"], ["broken, line 1"]),
        (["compare", "good", "good", "--rtol", "-1"], ["--rtol -1.0", "0 or above"]),
        (["report", "good", "-o", "x.xyz"], ["x.xyz", "png"]),
        (["report", "good", "-o", "gone/x.png"], ["gone/x.png", "No such file"]),
        (["memory", "1e9", "--optimizer", "abacus"], ["'abacus'", "'adam'"]),
        (["memory", "1e9", "--precision", "8-mixed"], ["'8-mixed'", "'16-mixed'"]),
    ],
    ids=" ".join,
)
def test_a_users_mistake_is_one_line_and_exit_2(capsys, argv, parts):
    ledger("good")
    broken("broken")
    Path("empty").write_text("")
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("amp-guard: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["report"],
        ["compare", "a"],
        ["compare", "a", "b", "--rtol", "nan"],
        ["compare", "a", "b", "--rtol", "much"],
        ["abacus"],
        ["doctor", "x"],
    ],
)
def test_wrong_usage_exits_2(capsys, argv):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert "amp-guard" in err


@pytest.mark.parametrize(
    ("missing", "argv", "extra"),
    [("jsonargparse", ["doctor"], "cli"), ("matplotlib", ["report", "good"], "report")],
)
def test_a_missing_extra_is_named(capsys, monkeypatch, missing, argv, extra):
    ledger("good")
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert f"pip install 'lightning-amp-guard[{extra}]'" in err
    assert err.count("\n") == 1


def test_help_lists_the_commands(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for name in ("report", "compare", "memory", "doctor"):
        assert name in out
    status, out, _ = run(capsys, "compare", "--help")
    assert status == 0
    assert "--rtol" in out


def test_the_console_script_is_this_function():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\n[project.scripts]\namp-guard = "lightning_amp_guard.cli:main"\n' in pyproject
    assert callable(cli.main)


# ---------------------------------------------------------------------- version


@pytest.mark.parametrize(
    ("installed", "shown"), [("1.2.3", "1.2.3"), (None, "a source tree, not installed")]
)
def test_version_is_that_of_the_package(capsys, monkeypatch, installed, shown):
    monkeypatch.setattr(doctor, "_version", lambda name: installed)
    status, out, err = run(capsys, "--version")
    assert (status, err) == (0, "")
    assert out.split(maxsplit=1) == ["amp-guard", shown + "\n"]


def test_version_is_among_the_options(capsys):
    assert "--version" in run(capsys, "--help")[1]
