# SPDX-License-Identifier: Apache-2.0
"""The README tells the truth: its code runs, its output is real, what it names exists."""

import ast
import math
import re
import warnings
from pathlib import Path

import pytest

from lightning_amp_guard import AmpGuardWarning, AmpMonitor, SafeAMP, TokenClock
from lightning_amp_guard.cli import main as amp_guard
from lightning_amp_guard.monitor.ledger.file import read_run
from lightning_amp_guard.monitor.ledger.line import COLUMNS
from lightning_amp_guard.monitor.plot.histogram import exponent_histogram
from lightning_amp_guard.monitor.rules.registry import RULES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]\d+")
MEASURED = re.compile(r"(throughput|peak memory) +[\d.,e+]+")  # by the clock, or of this process
TITLES = re.findall(r"^## (.+)$", README, re.MULTILINE)


def section(title):
    """Return the text below a heading of the second level, without its subsections' end."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(kind, text=README):
    return [match[2] for match in FENCE.finditer(text) if match[1] == kind]


def table(title):
    """Return the cells of the table below a heading, without its head."""
    rows = README.split(f"# {title}\n", 1)[1].split("\n#", 1)[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row[:1] == "|"]
    return cells[2:]


def programs(text):
    """Yield `(kind, code, printed)`; a text block right below a program is what it prints."""
    found = list(FENCE.finditer(text))
    for match, below in zip(found, [*found[1:], None], strict=False):
        if match[1] == "python":
            prints = below and below[1] == "text" and not text[match.end() : below.start()].strip()
            yield "python", match[2], below[2] if prints else ""
        elif match[1] == "console":
            for command, printed in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", match[2], re.M):
                yield "console", command, printed


def assert_same(seen, shown):
    """Words and whole numbers are equal, decimals within 2 %: another CPU rounds float16 otherwise."""
    seen, shown = (MEASURED.sub(r"\1", text) for text in (seen, shown))
    seen, shown = (" ".join(text.split()) for text in (seen, shown))  # long lines are wrapped
    assert DECIMAL.sub("#", seen) == DECIMAL.sub("#", shown), seen
    for a, b in zip(DECIMAL.findall(seen), DECIMAL.findall(shown), strict=True):
        assert math.isclose(float(a), float(b), rel_tol=0.02), f"{a} is shown as {b}"


@pytest.mark.timeout(120)
# Lightning says so of every summary of a model in mixed precision, its own plugin included.
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
# Lightning says so of a first run with `ckpt_path="last"`.
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
# The second run of a block goes on with the first one's checkpoints.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("title", [title for title in TITLES if [*programs(section(title))]])
def test_programs_of_a_section_run_and_print_what_stands_below_them(
    title, tmp_path, monkeypatch, capsys
):
    said = []  # by the programs themselves; the progress bar goes past this
    names = {"print": lambda *values: said.append(" ".join(map(str, values)))}
    monkeypatch.chdir(tmp_path)
    for i, (kind, code, printed) in enumerate(programs(section(title))):
        said.clear()
        if kind == "console":
            capsys.readouterr()
            words = code.split()
            assert words[0] == "amp-guard"
            amp_guard(words[1:])
            said.append(capsys.readouterr().out)
        else:
            place = tmp_path / (f"block_{i}.py" if i else "model.py")
            place.write_text(code, encoding="utf-8")  # reports quote lines of it
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", AmpGuardWarning)
                exec(compile(code, place, "exec"), names)
            said[:0] = [f"{w.category.__name__}: {w.message}" for w in caught]
        if kind == "console" or printed:
            assert_same("\n".join(said), printed)
        else:
            assert said == [] or title == "Use"  # where the reader's own run prints


def test_every_block_is_of_a_known_kind():
    kinds = {match[1] for match in FENCE.finditer(README)}
    assert kinds == {"diff", "text", "python", "bash", "console"}
    assert README.count("```") == 2 * len(FENCE.findall(README))


def test_contents_name_every_section_in_order():
    contents = next(line for line in README.splitlines() if line.startswith("Contents: "))
    named = [name[0].upper() + name[1:] for name, _ in LINK.findall(contents)]
    assert named == TITLES


def test_every_fault_names_its_report_and_a_test_that_exists():
    rows = [line for line in section("Silent faults").splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        *_, reports, proofs = (cell.strip() for cell in row.strip("|").split("|"))
        assert re.search(r"\[#\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/\w+/\d+\)", reports), row
        links = LINK.findall(proofs)
        assert links, row
        for name, path in links:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name.strip("`") in defined, f"{path} has no {name}"


def test_links_to_reports_carry_the_number_they_show():
    for shown, target in LINK.findall(README):
        if shown.startswith("#"):
            assert target.endswith("/" + shown[1:]), (shown, target)


def test_links_within_the_repository_lead_somewhere():
    headings = {"#" + re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in TITLES}
    for _, target in LINK.findall(README):
        if target.startswith("#"):
            assert target in headings
        elif not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_commands_are_those_of_the_checks():
    main_job, tests = blocks("bash", section("Install"))
    assert "pip install 'torch==2.13.0'" in main_job
    assert "pip install --quiet --no-input --no-compile 'torch==2.13.0'" in CI
    extras, of_ci = (re.search(r"-e '\.\[(.+)\]'", text)[1] for text in (tests, CI))
    assert extras == of_ci.replace("dev", "test")  # which it contains
    last_check = [line for line in CI.splitlines() if "pytest" in line][-1]
    assert last_check == f"{tests.splitlines()[-1]} || status=$?"


def test_path_of_a_step_names_every_guard_that_the_plugin_supplies():
    path, costs = section("The path of one step"), section("Guards and their cost")
    for guard in SafeAMP.guard_types:
        assert f"**`{guard.__name__}`**" in costs
        # the one guard that looks at the set-up and not at the step
        assert guard.__name__ in path or guard.__name__ == "DtypeGuard"
    assert TokenClock.__name__ in path
    assert AmpMonitor.__name__ in path


def test_drill_shows_the_facts_that_the_example_prints():
    source = ast.parse((ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8"))
    facts = next(
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FACTS"
    )
    shown = blocks("text", section("The overflow drill"))[0].splitlines()
    assert [line[:18].strip() for line in shown[1 : 1 + len(facts)]] == list(facts)
    assert shown[-1].endswith("equal in every bit")


def test_table_of_metrics_is_that_of_the_docstring():
    documented = re.findall(r"^ *(\| `amp/.+ \|)$", AmpMonitor.__doc__, re.MULTILINE)
    shown = re.findall(r"^(\| `amp/.+ \|)$", section("Reference"), re.MULTILINE)
    assert len(shown) > 10
    assert shown == documented


def test_table_of_columns_holds_each_of_the_ledger_once_and_in_order():
    named = [name for row in table("Columns of the ledger") for name in row[0].split(", ")]
    assert [name.strip("`") for name in named] == list(COLUMNS)


def test_table_of_findings_has_a_row_for_each_rule():
    assert [row[0] for row in table("Findings")] == list(RULES)
    assert all(all(row) for row in table("Findings"))


# Lightning says so of every summary of a model in mixed precision, its own plugin included.
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
def test_the_run_that_is_drawn_has_gradients_to_draw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python", section("The command line"))[0], {})
    histogram = exponent_histogram(read_run("run.jsonl").rows)
    assert histogram.log_steps == 4  # of 16 attempts
    assert sum(histogram.before.values()) > 0


def test_doctor_still_shows_what_is_shown_of_it(capsys):
    labels = [
        line.split("  ")[1].strip()
        for line in blocks("text", section("The command line"))[-1].splitlines()[1:]
    ]
    assert amp_guard(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert {"torch", "lightning", "cpu", "TF32"} <= set(labels)
    for label in labels:  # their values are this machine's
        assert re.search(rf"^  {re.escape(label)} {{2,}}\S", printed, re.MULTILINE), label


def test_decimals_are_compared_loosely_and_all_else_exactly():
    assert_same("7 of 8, 1.01 wide,\n  done", "7 of 8, 1.00 wide, done")
    assert_same("throughput  1.5 samples/s", "throughput  3,000 samples/s")
    for seen in ("8 of 8, 1.00 wide, done", "7 of 8, 1.10 wide, done", "7 of 8, 1.00 wide"):
        with pytest.raises(AssertionError):
            assert_same(seen, "7 of 8, 1.00 wide, done")
