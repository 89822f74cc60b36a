# SPDX-License-Identifier: Apache-2.0
"""Monitored fits, and what a monitor says of them: in warnings, in `findings`, in the summary."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning_utilities.core.rank_zero as rank_zero

from lightning_amp_guard import AmpGuardWarning, AmpMonitor, Finding, SafeAMP
from tests.helpers import fit, stock_plugin

__all__ = ["CONDITIONS", "Told", "monitored", "under"]

FINDING = re.compile(r"AMP1\d\d: ")

#: Arguments for the Trainer by the name of a condition; a scaler begins at `scale`.
CONDITIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    "SafeAMP": lambda scale: {"plugin": SafeAMP(init_scale=scale)},
    "SafeAMP in bfloat16": lambda scale: {"plugin": SafeAMP("bf16-mixed")},
    "stock": lambda scale: {"plugin": stock_plugin(init_scale=scale)},
    "stock in bfloat16": lambda scale: {"precision": "bf16-mixed"},
    "32-true": lambda scale: {"precision": "32-true"},
}


def under(condition: str, scale: float = 1024.0) -> dict[str, Any]:
    """Return the Trainer's arguments for a condition of the table."""
    return CONDITIONS[condition](scale)


@dataclass
class Told:
    """What was said in one fit.

    Args:
        findings: The monitor's list after the fit.
        warned: Findings among the warnings, as text.
        summary: The last line of the summary, "" if there was none.
        error: What ended the fit early, if anything.
    """

    findings: list[Finding] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    summary: str = ""
    error: BaseException | None = None

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]

    def only(self, code: str) -> Finding:
        """Return the one finding, said once in each of the three places."""
        (finding,) = self.findings
        assert finding.code == code, str(finding)
        assert self.warned == [str(finding)]
        assert self.summary.split() == ["findings", code]
        return finding

    def nothing(self) -> None:
        """Assert that nothing was found, and that the summary says so."""
        assert [str(finding) for finding in self.findings] == []
        assert self.warned == []
        assert self.summary.split() == ["findings", "none"]


@contextmanager
def _infos() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        yield messages
    finally:
        rank_zero.log.removeHandler(handler)


def monitored(
    model: Any,
    n: int = 4,
    *,
    monitor: AmpMonitor | None = None,
    callbacks: Any = (),
    raises: type[BaseException] | None = None,
    **kwargs: Any,
) -> Told:
    """Fit `model` under an AmpMonitor and return what was said; other warnings stay errors.

    Args:
        model: The LightningModule.
        n: Batches of ones, unless `data` is given.
        monitor: The monitor, a plain one by default.
        callbacks: Further callbacks.
        raises: What the fit ends with.
        kwargs: For `fit`.
    """
    monitor = AmpMonitor() if monitor is None else monitor
    told = Told()
    with _infos() as infos, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        # torch's own, where a schedule moves before the first update
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        try:
            fit(model, n=n, callbacks=[monitor, *callbacks], **kwargs)
        except BaseException as error:
            if raises is None or not isinstance(error, raises):
                raise
            told.error = error
    assert (told.error is None) == (raises is None)
    told.findings = list(monitor.findings)
    told.warned = [str(w.message) for w in caught if FINDING.match(str(w.message))]
    summaries = [text for text in infos if text.startswith("Mixed precision in this fit")]
    told.summary = summaries[-1].splitlines()[-1] if summaries else ""
    return told
