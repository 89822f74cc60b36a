# SPDX-License-Identifier: Apache-2.0
"""What a training step costs beside stock Lightning, side by side: `python -m tests.benchmarks`.

    python -m tests.benchmarks                        # every workload, on the CPU within four minutes
    python -m tests.benchmarks --workload optimizer --workload sharing --steps 50
    python -m tests.benchmarks --device cuda --json costs.json

For each workload a table of its arms. Each arm runs twice. Once by itself, for the counts of one
healthy step, which are exact: host reads, operator calls (`ops`), passes over all gradients outside of
the backward pass and the update (`walks`), calls of Python and C functions (`Python`), casts, and the
peak of allocated bytes from the start of a fit through its third step, beyond the module's own
(CUDA: the caching allocator's; CPU: the running sum of torch's allocator events). Then in turns of a
few steps with the others, each in a thread that waits while another runs, for the times: the
fastest step, its ratio to the first arm's, the median and the quartiles.

A step goes from one fetch of a step's first batch to the next, so a Trainer's loop is part of it.
Trainers have no logger, no progress bar and no checkpoint; AmpMonitor is at its defaults. On the CPU
torch runs on one thread, and a time is that thread's time on the processor: other programs' load
lengthens it little, and waiting for a disk is not in it. On CUDA it is a turn's time on the wall,
synchronised at both ends, divided by its steps. The optimizer-bound workload plants its gradients; on
the CPU, writing them is taken out. Python's garbage collector rests while arms are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The memory recorder would write to stderr that it starts, stops, and what was there before.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import lightning
import torch

from tests.benchmarks.conditions import frozen, quiet
from tests.benchmarks.counts import count, gradient_error
from tests.benchmarks.report import Row, say, show
from tests.benchmarks.turns import race
from tests.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["main", "measure"]


def measure(workload: Workload, device: str, steps: int) -> list[Row]:
    """Return a row per arm of the workload, skipped ones included, in the workload's order."""
    reasons = {arm.name: arm.why_not(device, workload.precision) for arm in workload.arms}
    arms = [arm for arm in workload.arms if reasons[arm.name] is None]
    with quiet(), frozen():
        counts = {arm.name: count(workload, arm, device) for arm in arms}
        errors = {}
        if workload.weighs_errors:
            errors = {arm.name: gradient_error(workload, arm, device) for arm in arms}
        times = race(workload, arms, device, steps)
    return [
        Row(name, reason, times.get(name), counts.get(name), errors.get(name))
        for name, reason in reasons.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print what the command line asks for."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    say(f"torch {torch.__version__}, lightning {lightning.__version__}")
    say(_device(options.device))
    results: dict[str, Any] = {}
    for name in options.workload or WORKLOADS:
        workload = WORKLOADS[name]
        rows = measure(workload, options.device, options.steps or workload.steps)
        show(f"{name}: {workload.title}", rows)
        results[name] = [row.to_dict() for row in rows]
    if options.json is not None:
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        about = {**versions, "device": _device(options.device), "python": platform.python_version()}
        options.json.write_text(json.dumps({**about, "workloads": results}, indent=1), "utf-8")


def _device(device: str) -> str:
    if device == "cpu":
        return f"one thread of {platform.processor() or platform.machine()}"
    return torch.cuda.get_device_name()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    parser.add_argument("--steps", type=_positive, help="timed steps per arm; at least 2")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} steps have no spread; give at least 2")
    return number


if __name__ == "__main__":
    main()
