# SPDX-License-Identifier: Apache-2.0
"""The README's tables of optimizers and schedulers, out of what the tests find."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.helpers import BAD, GOOD, NAN_LOSS
from tests.optimizer_zoo import (
    AS_IN_FLOAT32,
    TORCH_REFUSES,
    holds,
    judged,
    maker,
    optimizers_of_torch,
    switches,
    variants,
)
from tests.scheduler_zoo import (
    ManualScheduled,
    Scheduled,
    by_hand,
    deviations,
    fit,
    schedulers_of_torch,
)

KINDS = {kind.__name__: kind for kind in optimizers_of_torch()}


def spelled(arguments: dict[str, Any]) -> str:
    """Return arguments as short text, which names a test and a cell."""
    shown = {k: "tensor" if hasattr(v, "numel") else v for k, v in arguments.items()}
    return ", ".join(k if v is True else f"{k}={v}" for k, v in shown.items()) or "defaults"


VARIANTS = {(name, spelled(a)): a for name, kind in KINDS.items() for a in variants(kind)}


@functools.cache
def verdict(name: str, variant: str = "defaults", *how: str) -> str:
    """Return what the plugin makes of an optimizer of torch's; how: precision, way, parameters."""
    kind = KINDS[name]
    precision, way, kinds = (*how, *("16-mixed", "heard", holds(kind))[len(how) :])
    return judged(maker(kind, VARIANTS[name, variant]), precision, way, kinds)


def optimizers_table() -> str:
    """Return the README's table of optimizers; what was not judged so far is judged here."""
    rows = [
        "| optimizer | FP16 | BF16 | with | torch refuses | sparse |",
        "|---|---|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        found = {spelled(a): verdict(name, spelled(a)) for a in switches(kind) if a}
        works = [f"`{v}`" for v, said in found.items() if said == AS_IN_FLOAT32]
        not_by_torch = [f"`{v}`" for v, said in found.items() if said == TORCH_REFUSES]
        sparse = verdict(name, "defaults", "16-mixed", "heard", "s")
        cells = (
            f"`{name}`",
            verdict(name),
            verdict(name, "defaults", "bf16-mixed"),
            ", ".join(works) or "-",
            ", ".join(not_by_torch) or "-",
            "yes" if sparse == AS_IN_FLOAT32 else "-",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


SCHEDULERS = schedulers_of_torch()
PLAN = (BAD, GOOD, GOOD, BAD, NAN_LOSS, GOOD, BAD, GOOD, GOOD, GOOD, BAD, GOOD)
# how a scheduler is stepped, the batches between its turns, and the batches of an epoch
CASES: dict[str, tuple[type[Scheduled], dict[str, Any], int, int]] = {
    "every step": (Scheduled, {}, 1, 12),
    "every second step": (Scheduled, {"frequency": 2}, 2, 12),
    "every epoch": (Scheduled, {"interval": "epoch"}, 2, 2),
    "every second epoch": (Scheduled, {"interval": "epoch", "frequency": 2}, 4, 2),
    "by hand": (ManualScheduled, {}, 1, 12),
    "by hand, every second step": (ManualScheduled, {"frequency": 2}, 2, 12),
    "resumed": (Scheduled, {"interval": "epoch"}, 1, 1),
    "by hand, resumed": (ManualScheduled, {"frequency": 2}, 2, 1),
}


@functools.cache
def strays(name: str, case: str, precision: str = "16-mixed") -> tuple[str, ...]:
    """Return where a scheduler parts from one that is stepped once per applied update by hand."""
    kind, config, every, n = CASES[case]
    model, epochs = kind(PLAN, SCHEDULERS[name], **config), len(PLAN) // n
    if "resumed" not in case:
        trainer, used = fit(model, n, epochs, precision), model.rates
    else:
        trainer, used = _resumed(kind, config, name, epochs, precision)
    return tuple(deviations(used, trainer, by_hand(PLAN, SCHEDULERS[name], every=every)))


def _resumed(kind: Any, config: Any, name: str, epochs: int, precision: str) -> tuple[Any, Any]:
    cut = 5  # after a skip: the flags since the last turn count too
    first, second = (kind(PLAN, SCHEDULERS[name], **config) for _ in range(2))
    second.seen = cut
    with TemporaryDirectory() as folder:
        path = Path(folder) / "at.ckpt"
        fit(first, 1, cut, precision).save_checkpoint(path)
        trainer = fit(second, 1, epochs, precision, ckpt_path=path, weights_only=False)
    return trainer, first.rates + second.rates


def schedulers_table() -> str:
    """Return the README's table of schedulers; what was not run so far is run here."""
    rows = ["| scheduler | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    for name in SCHEDULERS:
        said = ["strays" if strays(name, case) else "yes" for case in CASES]
        rows.append(f"| `{name}` | " + " | ".join(said) + " |")
    return "\n".join(rows) + "\n"
