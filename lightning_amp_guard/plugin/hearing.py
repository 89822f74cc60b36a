# SPDX-License-Identifier: Apache-2.0
"""Who hears of an attempt, how soon, and whether anybody looks at its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from lightning_amp_guard import _upstream
from lightning_amp_guard.errors import AmpGuardError, SkipLimitError
from lightning_amp_guard.outcome import SkipReason, StepOutcome
from lightning_amp_guard.plugin.saved_entry import SavedEntry
from lightning_amp_guard.step.alarm import alarm
from lightning_amp_guard.step.late import LONGEST_WAIT

__all__ = ["Hearing"]

# What of a plugin's own methods a subclass may replace, so that it sees or clips the gradients.
_CLIPPING = ("clip_grad_by_norm", "clip_gradients", "_clip", _upstream.HOOKS_AND_CLIP)
_KNOWN = ("lightning_amp_guard", "lightning", "pytorch_lightning")


class Hearing(SavedEntry):
    """Tells guards, callbacks and module what became of attempts, and ends a run that only skips.

    Whom it tells is found out again only when the Trainer's list of callbacks changes.
    """

    clips_locally: ClassVar[bool] = True  # is the norm of this rank's gradients the total norm?

    def _listen(self) -> None:
        """Find out who hears outcomes and who looks at gradients, if callbacks have changed."""
        callbacks = self.trainer.callbacks
        if self._heard[0] is callbacks and self._heard[1] == len(callbacks):
            return
        self._heard = callbacks, len(callbacks)
        heard = [callback for callback in callbacks if _hears(callback)]
        self._hooks = [partial(cb.on_step_outcome, self.trainer, self.module) for cb in heard]
        self._patient = all([getattr(cb, "takes_late_outcomes", False) for cb in heard])
        if _hears(self.module):
            self._hooks.append(self.module.on_step_outcome)
            self._patient = False
        late = [g.takes_late_outcomes for g in self.guards if g.after_outcome in self._after]
        # whoever looks at losses watches a step at a time: it has to know what became of each
        self._patient = self._patient and all(late) and not self._see_loss
        self._unseen = self._nobody_looks(callbacks)

    def _nobody_looks(self, callbacks: list[Any]) -> bool:
        """Return whether nothing but Lightning's clipping comes between unscaling and the step."""
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients")
        seen = [_upstream.is_overridden(hook, self.module) for hook in hooks]
        seen += [_upstream.is_overridden(hooks[0], callback) for callback in callbacks]
        own = [
            _upstream.home_of(getattr(self, name)).partition(".")[0] in _KNOWN for name in _CLIPPING
        ]
        patched = [name in vars(self) for name in _CLIPPING]
        return self.clips_locally and all(own) and not any(seen + patched)

    def _conclude(self, outcome: StepOutcome, closure: Any = None, *, late: bool = False) -> None:
        self._last = outcome
        if not outcome.applied:
            for skipped in self._after_skip:
                skipped(outcome, self._batch if closure is None else _upstream.batch_of(closure))
        for after in self._after:
            after(outcome)
        self._listen()
        for hook in self._hooks:
            hook(outcome)
        if not outcome.applied:
            self._sound_alarm(outcome, late=late)
        if self._held is not None and not late:  # the attempt after the limit was applied
            held, self._held = self._held, None
            self._end_or_go_on(held)

    def settle(self) -> None:
        """Read the attempts that nobody has read yet, and tell of them.

        An error that one of them ends the run with is raised at the next step, not at whoever asks.
        Host sync: one; none if none is waiting.
        """
        engine = self.engine
        if engine is None or not engine.late.waiting:
            return
        outcomes = engine.late.settle()
        applied = [i for i, outcome in enumerate(outcomes) if outcome.applied]
        self.telling_late = True
        try:
            for i, outcome in enumerate(outcomes):
                idx = outcome.optimizer_idx
                self._tallies[idx] = self._tallies[idx].after(outcome)
                # skips that go on: the next attempt is watched, and its alarm can name the module
                self._hold_alarm = i > max(applied, default=-1) and self._locator_may_tell()
                self._conclude_late(outcome)
        finally:
            self.telling_late = self._hold_alarm = False
        # the next bad batch is to be looked at while it is there
        bad = [outcome.reason is SkipReason.NONFINITE_LOSS for outcome in outcomes]
        self._hurried = self._hurried or any(bad)

    def _locator_may_tell(self) -> bool:
        return any([g.name == "NonFiniteLocator" and not g.finding for g in self.guards])

    def _conclude_late(self, outcome: StepOutcome) -> None:
        try:
            self._conclude(outcome, late=True)
        except AmpGuardError as error:
            self._overdue = self._overdue or error

    def _raise_overdue(self) -> None:
        error, self._overdue = self._overdue, None
        if error is not None:
            self._end_or_go_on(error)

    def _may_be_late(self) -> bool:
        """Return whether the outcome of the attempt ahead may wait: it is not the last for now."""
        return self._patient and not self._hurried and not _upstream.steps_last(self.trainer)

    def _settle_if_long(self) -> None:
        engine = self.engine
        if engine is not None and len(engine.late.waiting) >= LONGEST_WAIT:
            self.settle()

    def _sound_alarm(self, outcome: StepOutcome, *, late: bool = False) -> None:
        assert self.engine is not None
        idx = outcome.optimizer_idx
        if self._overdue is not None:  # the limit was reached before this attempt
            self._tallies[idx] = self._tallies[idx].forgiven()
            return
        finder = next((guard for guard in self.guards if guard.finding), None)
        error = alarm(
            outcome,
            self._tallies[idx],
            self.settings,
            self._name(),
            self.engine.windows.lanes[idx],
            self.parameter_names(),
            None if finder is None else finder.fp32_path,
            finding="" if finder is None else finder.finding,
            remedy="" if finder is None else finder.remedy,
            scaling=self.scaler is not None,
        )
        if error is None:
            return
        if self._hold_alarm:
            self._held = self._held or error
            return
        self._held = None
        # a checkpoint written because of the error must not end the resumed run at once
        self._tallies[idx] = self._tallies[idx].forgiven()
        if late:  # to fall back within a step would leave its gradients scaled
            raise error
        self._end_or_go_on(error)

    def _end_or_go_on(self, error: AmpGuardError) -> None:
        go_on_in = self.settings.on_limit
        ends = self.switched is not None or go_on_in in ("raise", self.precision)
        if ends or not isinstance(error, SkipLimitError):
            raise error
        self.fall_back(go_on_in)
        said = str(error).rstrip(".")
        self.warn(f"{said}. As `on_limit={go_on_in!r}` asks, the run goes on in {go_on_in!r}.")


def _hears(listener: Any) -> bool:
    return callable(getattr(listener, "on_step_outcome", None))
