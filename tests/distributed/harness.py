# SPDX-License-Identifier: Apache-2.0
"""Runs checks in two gloo processes on the loopback, and hands each rank's results back.

The processes are forked from the one that runs the tests, where torch and Lightning are imported
already; importing them anew takes seconds. One pair of processes runs all checks of a test file, one
after the other, and each test looks at the results of one check.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

BOUND = 60.0  # seconds; then the processes are killed

Check = Callable[[int, Path], Any]


class RankError(AssertionError):
    """A rank raised, or never came so far; carries its traceback as text."""


class Pair:
    """What two ranks made of some checks.

    Lightning is told by environment variables that the processes were started for it, as `torchrun`
    does, so that every strategy can be used. After a check that raised, the rank goes no further:
    its partner may wait for it in vain.

    Args:
        folder: Shared by both ranks, and by all checks.
        checks: Functions of `(rank, folder)`; what they return is pickled.
        bound: After so many seconds both processes are killed.
    """

    def __init__(self, folder: Path, checks: Sequence[Check], bound: float = BOUND) -> None:
        fork, port = multiprocessing.get_context("fork"), _free_port()
        ranks = [fork.Process(target=_run, args=(r, port, folder, checks, bound)) for r in (0, 1)]
        started = time.perf_counter()
        with warnings.catch_warnings():
            # newer Pythons warn of every fork of a process that has threads (OpenBLAS's here)
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            for process in ranks:
                process.start()
        self.killed = self._wait(ranks, started + bound)
        self.seconds = time.perf_counter() - started
        self.codes = [process.exitcode for process in ranks]
        self.printed = [(folder / f"{r}.out").read_text() for r in (0, 1)]
        self.results = [_read(folder / f"{r}.pickle") for r in (0, 1)]

    @staticmethod
    def _wait(ranks: Sequence[Any], until: float) -> bool:
        try:
            for process in ranks:
                process.join(max(until - time.perf_counter(), 0.0))
        finally:
            alive = [process for process in ranks if process.is_alive()]
            for process in alive:
                process.kill()
                process.join()
        return bool(alive)

    def __call__(self, check: Check) -> list[Any]:
        """Return what `check` returned on rank 0 and on rank 1.

        Raises:
            RankError: A rank raised in it, or never reached it.
        """
        answers = [results.get(check.__name__) for results in self.results]
        done = [answer for answer in answers if answer is not None and not answer[0]]
        if len(done) < len(answers):
            raise RankError(f"{check.__name__} was not completed by both ranks.\n{self._why()}")
        return [value for _, value in done]

    def _why(self) -> str:
        told = [
            f"rank {rank} in {name}: {trouble}"
            for rank, results in enumerate(self.results)
            for name, (trouble, _) in results.items()
            if trouble
        ]
        # a rank that lost its partner says less than the one that raised
        told.sort(key=lambda text: "closed by peer" in text or "Connection reset" in text)
        end = "killed at the bound" if self.killed else f"exit codes {self.codes}"
        last = [list(results)[-1:] for results in self.results]
        waits = [text.partition("Timeout (")[2][:2500] for text in self.printed]
        return "\n".join([*told, f"({end}; last results, by rank: {last})", *waits])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> dict[str, tuple[str, Any]]:
    results = {}
    if path.exists():
        with path.open("rb") as file, contextlib.suppress(EOFError):
            while True:
                name, trouble, value = pickle.load(file)
                results[name] = (trouble, value)
    return results


def _run(rank: int, port: int, folder: Path, checks: Sequence[Check], bound: float) -> None:
    """Run the checks in one of the two processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_RUN_ID="pair",
    )
    out = (folder / f"{rank}.out").open("w", buffering=1)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = out
    faulthandler.dump_traceback_later(0.9 * bound, file=out)  # where does it wait?
    with (folder / f"{rank}.pickle").open("ab", buffering=0) as results:
        for check in checks:
            started = time.perf_counter()
            random.seed(0)
            torch.manual_seed(0)
            try:
                answer = (check.__name__, "", check(rank, folder))
            except BaseException:
                results.write(pickle.dumps((check.__name__, traceback.format_exc(), None)))
                raise  # printed, and the connection closes: so the partner learns of it
            results.write(pickle.dumps(answer))
            out.write(f"[{time.perf_counter() - started:.2f} s] {check.__name__}\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
