# SPDX-License-Identifier: Apache-2.0
"""NonFiniteLocator: names the module behind skipped updates."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.diagnosis.batch import bad_fields
from lightning_amp_guard.diagnosis.watch import Culprit, NonFiniteWatch
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.guards.trouble import Trouble, outlasts
from lightning_amp_guard.outcome import SkipReason, StepOutcome
from lightning_amp_guard.plugin.fp32_scope import with_module

__all__ = ["NonFiniteLocator"]

_OTHERS = 100  # attempts of others, while the optimizer in trouble is not stepped any more


class NonFiniteLocatorCore(GuardCore):
    """See `NonFiniteLocator`."""

    name = "NonFiniteLocator"

    @names_its_class
    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        #: What the last watched step has found, if anything.
        self.culprit: Culprit | None = None
        #: What is not finite in the batch itself, "" if nothing or unknown.
        self.bad_batch = ""
        self._told: set[tuple[str, str]] = set()
        self._reason: SkipReason | None = None  # of the last skip
        self._trouble: Trouble | None = None

    def attach(self, host: Host) -> None:
        """Wait for a skip."""
        self._disarm()
        super().attach(host)
        self.culprit, self.bad_batch, self._told = None, "", set()

    def detach(self) -> None:
        """Take every hook away."""
        self._disarm()
        super().detach()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what belongs to a running fit stays behind."""
        fresh: dict[str, Any] = {"culprit": None, "bad_batch": "", "_told": set(), "_trouble": None}
        return {**super().__getstate__(), **fresh}

    def after_skip(self, outcome: StepOutcome, batch: Any) -> None:
        """Begin to watch; or, watching, read what was found and say what has to be said.

        Host sync: one per device while watching.
        """
        if self.host is None or outcome.reason is SkipReason.PARTNER_SKIPPED:
            return
        trouble = self._trouble
        if trouble is None:
            self._trouble = trouble = self._arm(self.host)
        else:
            self._read(self.host, trouble)
        trouble.count(outcome)
        self._reason = outcome.reason
        if outcome.reason is SkipReason.NONFINITE_LOSS:
            self._judge_batch(self.host, trouble, batch)
        self._report(self.host, trouble, outcome)

    def _arm(self, host: Host) -> Trouble:
        self.culprit, self.bad_batch = None, ""
        watch = NonFiniteWatch(host.module, host.precision).install()
        host.hear("outcome", self._after_any)
        host.hear("loss", watch.see_loss)
        if watch.left_alone and self._first(("left alone", "")):
            shown = ", ".join(repr(name or "the whole module") for name in watch.left_alone[:3])
            host.info(f"`{self.name}`: compiled modules are not watched: {shown}.")
        return Trouble(watch)

    def _disarm(self) -> None:
        if self._trouble is None:
            return
        watch, self._trouble = self._trouble.watch, None
        watch.remove()
        if self.host is not None:
            for call in (self._after_any, watch.see_loss, self._see_next_batch):
                self.host.unhear(call)

    def _after_any(self, outcome: StepOutcome) -> None:
        """End the watch at the first clean step of whoever was in trouble."""
        trouble = self._trouble
        if not outcome.applied or trouble is None:
            return
        trouble.others += 1
        trouble.optimizers.discard(outcome.optimizer_idx)
        if not trouble.optimizers or trouble.others > _OTHERS:
            self._disarm()

    def _read(self, host: Host, trouble: Trouble) -> None:
        found, last = _first_known(host, trouble.watch.culprit()), self.culprit
        trouble.watch.reset()
        if found is None:
            return
        same = last is not None and (last.module, last.direction) == (found.module, found.direction)
        trouble.alike = trouble.alike + 1 if same else 1
        self.culprit = found

    def _judge_batch(self, host: Host, trouble: Trouble, batch: Any) -> None:
        """Look into the batches of the window that has just been skipped, and of the next."""
        self.bad_batch = _first_known(host, trouble.scanned or bad_fields(batch))
        trouble.scanned = ""
        if not trouble.scanning:
            trouble.scanning = True
            host.hear("batch", self._see_next_batch)

    def _see_next_batch(self, batch: Any) -> None:
        if self._trouble is not None and self.host is not None:
            self._trouble.scanned = self._trouble.scanned or bad_fields(batch)
            self.host.hear("batch", self._see_next_batch)  # the plugin asks once

    # ------------------------------------------------------------------ what is said

    def _blamed(self) -> Culprit | None:
        """Return the culprit; a bad batch leaves the step outside of its modules no blame."""
        culprit = self.culprit
        return None if culprit is None or (self.bad_batch and not culprit.module) else culprit

    @property
    def finding(self) -> str:
        """What to add to an error, "" if nothing was found."""
        culprit = self._blamed()
        parts = [culprit.sentence] if culprit else []
        parts += [_in_batch(self.bad_batch)] if self.bad_batch else []
        return " ".join(f"`{self.name}`: {part}" for part in parts)

    @property
    def fp32_path(self) -> str | None:
        """The module to write into `fp32_modules`."""
        culprit = self._blamed()
        return None if culprit is None else culprit.path

    @property
    def remedy(self) -> str:
        """What mends a fault that neither a smaller scale nor float32 for a module would mend.

        Of a backward pass also what float32 would mend, where no smaller scale does; else "".
        """
        culprit = self._blamed()
        if culprit is None:
            return _CLEAN if self.bad_batch and self._reason is SkipReason.NONFINITE_LOSS else ""
        named = culprit.direction == "forward" and culprit.path is not None
        return "" if named or culprit.may_be_overflow else self._remedy_of(culprit)

    def _remedy_of(self, culprit: Culprit) -> str:
        assert self.host is not None
        chosen = with_module(self.host.settings.fp32_modules, culprit.module)
        return culprit.remedy_by(f"SafeAMP(fp32_modules={json.dumps(chosen)})")

    def _report(self, host: Host, trouble: Trouble, outcome: StepOutcome) -> None:
        culprit, loss = self._blamed(), outcome.reason is SkipReason.NONFINITE_LOSS
        parts = []
        if loss and self.bad_batch and self._first(("the batch", "")):
            parts.append(f"{_in_batch(self.bad_batch)} {_CLEAN}")
        if culprit is not None and not trouble.told:
            at_once = loss and culprit.direction == "forward"
            due = at_once or (not loss and outlasts(host, trouble, culprit, outcome))
            trouble.told = due
            if due and self._first((culprit.module, culprit.direction)):
                parts.append(f"{culprit.sentence} {self._remedy_of(culprit)}")
        if parts:
            host.warn(f"`{self.name}`: {' '.join(parts)}")

    def _first(self, key: tuple[str, str]) -> bool:
        told = key in self._told
        self._told.add(key)
        return not told


def _in_batch(report: str) -> str:
    return f"the loss is inf or NaN, and the batch itself is not finite: {report}."


_CLEAN = (
    "Expected finite inputs. Most likely the data set holds such values, or a transform makes them."
    " Leave those samples out, or write `torch.nan_to_num(x)` where the batch is made."
)


def _first_known(host: Host, found: Any) -> Any:
    """Return what the first rank that has found something found, on every rank.

    Skips and reasons are the same on all ranks, so all of them come here together.
    """
    if host.running().ranks is None:
        return found
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return next((known for known in everywhere if known), found)


class NonFiniteLocator(NonFiniteLocatorCore, Guard):
    """Names the module that makes inf or NaN when updates are skipped.

    Without it a run that only skips says that something is not finite, and not where. A skip arms
    it: hooks on every module and on each operator of the backward pass then measure on the device
    what goes in and what comes out, and are gone after the first applied update. `training_step` is
    never called again, and the values, the random state and the buffers of the run stay as they are.
    It warns at once where the forward pass is to blame (`NONFINITE_LOSS`), with what `scan_batch`
    finds in the batch; for gradients only when the search for a scale does not explain the skips:
    the scale has fallen to 16 or cannot fall, more than 24 updates were skipped in a row, or two
    watched steps show the same module with what no smaller scale mends (a NaN made from a finite
    gradient, an inf far above everything beside it). Each finding is told once a fit; the last one
    goes into `SkipLimitError` too. Modules that are compiled, or scripted, are left alone. Over
    several ranks the finding of the first that has one is told on all (where `sync_found_inf` lets
    ranks agree).

    Args:
        enabled: `False` watches nothing.

    Runs: after a skipped attempt; while armed also in each forward and backward pass.
    Keeps: nothing.
    Host sync: none until a skip; then one per device and skip, and one for each batch after a
        non-finite loss. An armed step adds about 40 small tensor operations per module call and
        per operator of the backward pass: ten times the time of a small step on a CPU. Over
        several ranks each skip while armed takes one exchange of objects, or two.
    """
