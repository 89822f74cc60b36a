# SPDX-License-Identifier: Apache-2.0
"""A training process that is struck in the middle: `python killed.py SETUP FOLDER HOW BATCH DELAY`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.crash.runs import SETUPS, build, fit  # noqa: E402 the path comes first

__all__ = ["Struck", "main"]


class Struck(Callback):
    """At a batch, has another process send a signal a little later; never outlives it by much.

    `how` is a signal's name without SIG, "raise" for an exception, "exit" for `os._exit`, or "disk"
    for a limit on the size of files, which the ledger meets soon and the checkpoints at once.
    """

    def __init__(self, how: str, batch: int, delay: float) -> None:
        self.how, self.batch, self.delay = how, batch, delay

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        number = pl_module.number(batch[0])
        if number == self.batch:
            self.strike()
        elif number == self.batch + 6 and self.how == "KILL":
            time.sleep(60)  # the signal is on its way

    def strike(self) -> None:
        if self.how == "raise":
            raise torch.OutOfMemoryError("planted")
        if self.how == "exit":
            os._exit(3)
        if self.how == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
            return
        order = f"sleep {self.delay}; kill -{self.how} {os.getpid()}"
        subprocess.Popen(["sh", "-c", order])


def main() -> None:
    """Run until struck."""
    torch.set_num_threads(1)
    setup, folder, how, batch, delay = sys.argv[1:]
    struck = Struck(how, int(batch), float(delay))
    parts = build(SETUPS[setup], Path(folder), callbacks=(struck,))
    try:
        fit(parts)
    finally:
        sys.stderr.writelines(f"{line}\n" for line in parts.said)


if __name__ == "__main__":
    main()
