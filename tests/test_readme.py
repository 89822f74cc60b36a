# SPDX-License-Identifier: Apache-2.0
"""The README tells the truth: its code runs, its output is real, what it names exists."""

import ast
import re
from pathlib import Path

import pytest

from lightning_amp_guard import SafeAMP

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def section(title):
    """Return the text below a heading of the second level, without its subsections' end."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(kind, text=README):
    return [match[2] for match in FENCE.finditer(text) if match[1] == kind]


def programs():
    """Yield `(line, code, printed)`; a text block right below a program is what it prints."""
    found = list(FENCE.finditer(README))
    for match, below in zip(found, [*found[1:], None], strict=True):
        if match[1] != "python":
            continue
        prints = below and below[1] == "text" and not README[match.end() : below.start()].strip()
        line = README[: match.start()].count("\n") + 2
        yield pytest.param(match[2], below[2] if prints else "", id=f"line-{line}")


def flat(text):
    return " ".join(text.split())


@pytest.mark.timeout(60)
# Lightning says so of every summary of a model in mixed precision, its own plugin included.
@pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported by the model summary")
@pytest.mark.parametrize(("code", "printed"), [*programs()])
def test_program_runs_and_prints_what_stands_below_it(code, printed, tmp_path, monkeypatch):
    said = []  # by the program itself; the progress bar goes past this
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"print": lambda *values: said.extend(values)})
    if printed:  # long lines are wrapped in the README
        assert flat(" ".join(map(str, said))) == flat(printed)


def test_every_block_is_of_a_known_kind():
    kinds = {match[1] for match in FENCE.finditer(README)}
    assert kinds == {"diff", "text", "python", "bash"}
    assert README.count("```") == 2 * len(FENCE.findall(README))


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
    headings = {
        "#" + re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^## (.+)$", README, re.MULTILINE)
    }
    for _, target in LINK.findall(README):
        if target.startswith("#"):
            assert target in headings
        elif not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_commands_are_those_of_the_checks():
    main_job, tests = blocks("bash", section("Install"))
    assert "pip install 'torch==2.13.0'" in main_job
    assert "pip install --quiet --no-input 'torch==2.13.0'" in CI
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
