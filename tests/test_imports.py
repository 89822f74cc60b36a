# SPDX-License-Identifier: Apache-2.0
"""The import order and the border to upstream, read off the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "lightning_amp_guard"

# A unit (a module or a subpackage, by its name below the root) imports from earlier rows only.
LAYERS = (
    {"errors"},
    {"outcome", "arguments.checks"},
    {"_upstream", "arguments.settings", "state", "arguments.named", "arguments.misplaced"},
    {"testing"},
    {"scale_policy", "plugin.fp32_scope", "step.anomaly", "step.ranks"},
    {"scaler_base"},
    {"scaler"},
    {"plugin.scaler_choice", "step.lanes"},
    {"step.roles"},
    {"step.windows"},
    {"step.movement", "step.all_or_none", "step.alarm", "step.verdict", "step.late"}
    | {"step.one_walk"},
    {"step.given_up", "step.record"},
    {"step.inspection"},
    {"step.attempt"},
    {"step.window_state"},
    {"guards"},
    {"plugin.configuration", "plugin.guard_choice"},
    {"plugin.life_cycle"},
    {"plugin.saved_entry"},
    {"plugin.hearing"},
    {"plugin.plugin"},
    {"precision", "fsdp"},
    {"token_counts.contents", "token_counts.count"},
    {"token_counts.windows"},
    {"monitor", "tokens"},
    {"cli", "pytorch_lightning"},
)
# These packages are names for what lies in them, and import nothing.
INITS = {f"{name}.__init__" for name in ("arguments", "step", "plugin", "token_counts")}
# `diagnosis` stands aside of the rows: it sees these alone.
ASIDE = {"diagnosis": {"errors", "_upstream", "diagnosis"}}
# What a module, or all of a unit, may import beyond the earlier rows.
BEYOND = {
    "guards": {"guards._base"},
    "guards.__init__": {"guards"},
    "guards.locate": {"diagnosis", "guards.trouble"},
    "guards.trouble": {"diagnosis"},
    "guards.checkpoint": {"guards.saved_scaler"},
    "monitor": {"monitor", "diagnosis"},
    "cli": {"diagnosis"},
    "pytorch_lightning": {"pytorch_lightning"},
}
# Imports for annotations only, under `if TYPE_CHECKING:`, that may point upwards.
FOR_ANNOTATIONS = {("errors", "outcome")}

# Whose names with a leading underscore belong behind `_upstream.py`.
UPSTREAM = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"}


class Import(NamedTuple):
    target: str  # the module's dotted name below the root, "" for the root itself
    line: int
    typing_only: bool


def modules(root: Path) -> dict[str, ast.Module]:
    """Syntax trees by dotted name below the root ("guards.unscale", "guards.__init__")."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def typing_only_nodes(tree: ast.Module) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    return {node for block in blocks for part in block.body for node in ast.walk(part)}


def internal_imports(name: str, trees: dict[str, ast.Module]) -> Iterator[Import]:
    """Every import of a module of this package, also inside functions."""
    typing_only = typing_only_nodes(trees[name])
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.partition(".")[0] == PACKAGE:
                found = resolve(target.partition(".")[2], trees)
                yield Import(found, node.lineno, node in typing_only)


def absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = [PACKAGE, *name.split(".")][: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def resolve(target: str, trees: dict[str, ast.Module]) -> str:
    """The longest prefix of a dotted name that is a module, a subpackage, or the root ("")."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in trees or f"{prefix}.__init__" in trees:
            return prefix
    return ""


def within(target: str, units: set[str]) -> bool:
    return any(target == unit or target.startswith(f"{unit}.") for unit in units)


def unit_of(name: str) -> str:
    """The longest prefix of a module's name that has a place in the tables, or the name itself."""
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in KNOWN), name)


def allowed(name: str) -> set[str]:
    unit = unit_of(name)
    if unit in ASIDE:
        return ASIDE[unit]
    row = next((row for row, units in enumerate(LAYERS) if unit in units), len(LAYERS))
    return set().union(*LAYERS[:row], BEYOND.get(unit, set()), BEYOND.get(name, set()))


def layering_faults(trees: dict[str, ast.Module]) -> list[str]:
    faults = []
    for name in trees.keys() - {"__init__"}:
        for found in internal_imports(name, trees):
            if found.typing_only and (name, found.target) in FOR_ANNOTATIONS:
                continue
            if not found.target:
                faults.append(f"{name}:{found.line} imports the package root")
            elif not within(found.target, allowed(name)):
                faults.append(f"{name}:{found.line} imports {found.target}")
    return sorted(faults)


def import_cycle(trees: dict[str, ast.Module]) -> list[str]:
    """One import cycle as the names along it, or an empty list."""
    graph = {
        name: [
            f"{found.target}.__init__".lstrip(".") if found.target not in trees else found.target
            for found in internal_imports(name, trees)
            if not found.typing_only
        ]
        for name in trees
    }
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in graph.get(name, []):
                if cycle := walk(target, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in graph if (cycle := walk(name, []))), [])


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def private_upstream_names(tree: ast.Module) -> list[str]:
    """Private names imported from upstream, or reached from a name imported from there."""
    names: dict[str, str] = {}  # as bound in the module -> as upstream calls it
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        else:
            continue
        found = {k: v for k, v in found.items() if v.partition(".")[0] in UPSTREAM}
        names |= found
        faults += [f"{node.lineno}: {dotted}" for dotted in found.values() if private(dotted)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            dotted = ast.unparse(node)
            if dotted.partition(".")[0] in names:
                faults.append(f"{node.lineno}: {dotted}")
    return faults


KNOWN = {"__init__", *INITS, *ASIDE}.union(*LAYERS)
TREES = modules(Path(__file__).parents[1] / PACKAGE)


def test_every_module_has_its_place_in_the_table():
    assert {unit_of(name) for name in TREES} <= KNOWN


def test_imports_go_downwards_only():
    assert layering_faults(TREES) == []


def test_no_import_cycle():
    assert import_cycle(TREES) == []


@pytest.mark.parametrize("name", sorted(TREES.keys() - {"_upstream"}))
def test_private_upstream_names_stay_in_upstream(name):
    assert private_upstream_names(TREES[name]) == []


def planted(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__dot__", "."): ast.parse(source) for name, source in sources.items()}


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("scaler", "from lightning_amp_guard import SafeAMP", "scaler:1 imports the package root"),
        ("scaler", "import lightning_amp_guard.precision", "scaler:1 imports precision"),
        ("scaler", "def f():\n from .precision import X", "scaler:2 imports precision"),
        ("errors", "from lightning_amp_guard.outcome import X", "errors:1 imports outcome"),
        ("guards__dot__unscale", "from .window import X", "guards.unscale:1 imports guards.window"),
        ("diagnosis__dot__batch", "from ..outcome import X", "diagnosis.batch:1 imports outcome"),
    ],
)
def test_an_import_against_the_order_is_seen(name, source, fault):
    others = planted(__init__="", outcome="", precision="", guards__dot__window="")
    assert layering_faults(others | planted(**{name: source})) == [fault]


def test_a_cycle_is_seen():
    trees = planted(
        monitor__dot__a="from lightning_amp_guard.monitor.b import X",
        monitor__dot__b="from lightning_amp_guard.monitor import a",
    )
    assert import_cycle(trees) == ["monitor.a", "monitor.b", "monitor.a"]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.amp.grad_scaler import _refresh_per_optimizer_state",
        "from lightning.pytorch.utilities._pytree import _tree_flatten",
        "import torch._dynamo",
        "import torch as t\nt._foreach_mul_([], 1)",
        "from torch.amp import GradScaler\nGradScaler._unscale_grads_",
    ],
)
def test_a_private_upstream_name_is_seen(source):
    assert private_upstream_names(ast.parse(source))


def test_public_and_own_names_pass():
    source = "import torch\ntorch.__version__\nself._x\nfrom lightning_amp_guard import _upstream"
    assert private_upstream_names(ast.parse(source)) == []
