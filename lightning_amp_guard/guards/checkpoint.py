# SPDX-License-Identifier: Apache-2.0
"""ScalerCheckpoint: everything that decides the next step survives a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import flag
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.errors import ScalerStateError
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.guards.saved_scaler import restore_scaler
from lightning_amp_guard.outcome import StepTally
from lightning_amp_guard.state import (
    damaged,
    is_count,
    is_dict,
    read,
    read_tally,
)
from lightning_amp_guard.step.attempt import AttemptEngine
from lightning_amp_guard.step.given_up import read_given_up
from lightning_amp_guard.step.window_state import SavedWindow, lost_in_batch, save_window

__all__ = ["ScalerCheckpoint"]

FORMAT = 1
_SWITCHED = ("bf16-mixed", "32-true")
_PARTS = ("scaler", "tallies", "gates", "window")
_STOCK = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")


class ScalerCheckpointCore(GuardCore):
    """See `ScalerCheckpoint`."""

    name = "ScalerCheckpoint"

    @names_its_class
    def __init__(self, window_gradients: bool = True, enabled: bool = True) -> None:
        super().__init__(enabled)
        self.window_gradients = flag(type(self).__name__, "window_gradients", window_gradients)
        self._warned = False

    # ------------------------------------------------------------------ save

    def entry(self, host: Host) -> dict[str, Any]:
        """Return the plugin's checkpoint entry: plain values, and gradients inside a window."""
        scaler = None if host.scaler is None else host.scaler.state_dict()
        entry: dict[str, Any] = {
            "format": FORMAT,
            "scaler": scaler,
            "tallies": [asdict(tally) for tally in host.tallies],
            "gates": host.saved_gates(),
            "window": self._window(host),
        }
        if host.switched is not None:
            entry["switched"] = host.switched
        if host.scaler is not None and host.scaler.policy.settings.hysteresis > 1:
            entry["hysteresis_left"] = host.scaler.policy.hysteresis_left
        if host.engine is not None:
            given_up = host.engine.given_up.save(inside_batch=_inside_batch(host))
            entry |= {} if given_up is None else {"given_up": given_up}
        return entry

    def _window(self, host: Host) -> dict[str, Any] | None:
        engine, trainer = host.engine, host.trainer
        if engine is None:
            return None
        inside = _inside_batch(host)
        if inside:
            self._warn_of_batch(host, trainer, engine)
        if self.window_gradients and engine.reopen is not None:
            return engine.reopen.saved
        if inside or not self.window_gradients:
            return None
        if trainer is None or trainer.world_size == 1:
            return save_window(engine, host.parameter_names())
        if engine.windows.unstepped():
            self._warn_once(
                host,
                "a checkpoint is written inside an accumulation window on several processes, which"
                " hold different gradients, so the gradients accumulated so far are not in it. A run"
                " resumed from it begins the window anew, with fewer micro-batches. Save after a"
                " step to keep windows whole.",
            )
        return None

    def _warn_of_batch(self, host: Host, trainer: Any, engine: AttemptEngine) -> None:
        moved_on = _upstream.loader_keeps_its_place(trainer)
        if lost := lost_in_batch(engine, _upstream.batch_number(trainer), moved_on):
            at = f"batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
            self._warn_once(
                host,
                f"a checkpoint is written in the middle of a batch ({at}). In a run that is resumed"
                f" from it {', and '.join(lost)}. Save between batches, or resume from a"
                " checkpoint that was written there, to go on exactly.",
            )

    def _warn_once(self, host: Host, text: str) -> None:
        if not self._warned:
            self._warned = True
            host.warn(f"`ScalerCheckpoint`: {text}")

    def stock_entry(self, host: Host) -> dict[str, Any] | None:
        """Return torch's five values as stock Lightning reads them, so that it can resume."""
        if not self.enabled or host.scaler is None:
            return None
        five = host.scaler.state_dict()
        # torch grows when the counter *equals* the interval; ours may wait beyond it
        five["_growth_tracker"] = min(five["_growth_tracker"], five["growth_interval"] - 1)
        return five

    # ------------------------------------------------------------------ load

    def find(self, checkpoint: Mapping[str, Any], own: str) -> Any:
        """Return the entry in a whole checkpoint: ours under any name, else stock's, else `None`."""
        for key, value in checkpoint.items():
            ours = isinstance(value, Mapping) and "format" in value
            if ours and (key == own or sum(part in value for part in _PARTS) > 1):
                return value
        names = (own, *_STOCK)
        return next((checkpoint[name] for name in names if _is_there(checkpoint.get(name))), None)

    def restore(self, host: Host, found: Any) -> None:
        """Take up an entry of ours, or torch's five values.

        Raises:
            ScalerStateError: The entry is damaged; the message names the key.
        """
        if found is None:
            host.info(
                "The checkpoint holds no scaler state (it comes from a bf16 or 32-bit run): "
                + ("the scale starts anew." if host.scaler else "none is needed.")
            )
            return
        if not isinstance(found, Mapping):
            raise damaged("scaler", found, "a dict")
        if "format" not in found and not any(part in found for part in _PARTS):
            restore_scaler(host, found)
            return
        version = read(found, "format", is_count, f"the format's number, {FORMAT}")
        if version != FORMAT:
            raise damaged("format", version, f"{FORMAT}; a newer release wrote this checkpoint")
        self._restore_parts(host, found)

    def _restore_parts(self, host: Host, entry: Mapping[str, Any]) -> None:
        scaler = read(entry, "scaler", _is_dict_or_none, "a dict or None")
        tallies = read(entry, "tallies", lambda v: isinstance(v, list), "a list")
        counted = [StepTally(**read_tally(tally)) for tally in tallies]
        gates = read(entry, "gates", is_dict, "a dict")
        window = read(entry, "window", _is_dict_or_none, "a dict or None")
        left = None
        if "hysteresis_left" in entry:
            left = read(entry, "hysteresis_left", is_count, "a whole number of at least 0")
        switched = entry.get("switched")
        if switched is not None:
            read(entry, "switched", lambda v: v in _SWITCHED, f"one of {_SWITCHED}")
        given_up = read_given_up(entry)
        reopen = None
        if window is not None and host.engine is not None:
            reopen = SavedWindow(host.engine, window, host.parameter_names())
        before = host.saved_gates()
        try:
            self._load_gates(host, gates)
            if switched is not None:
                self._restore_switch(host, switched)
            else:
                restore_scaler(host, scaler)
        except ScalerStateError:
            self._load_gates(host, before)  # those that were sound were taken up by then
            raise
        if left is not None and host.scaler is not None:
            policy = host.scaler.policy
            policy.hysteresis_left = min(left, policy.settings.hysteresis)
        host.tallies[:] = counted
        # written before the first fit, or with fewer optimizers: the others begin at zero
        lanes = 0 if host.engine is None else len(host.engine.windows.lanes)
        host.tallies.extend(StepTally() for _ in range(lanes - len(counted)))
        if host.engine is not None:
            host.engine.reopen = reopen
            host.engine.given_up.load(*given_up)

    @staticmethod
    def _load_gates(host: Host, gates: Mapping[str, Any]) -> None:
        for guard in host.guards:
            if guard.name in gates:
                guard.load(gates[guard.name])

    @staticmethod
    def _restore_switch(host: Host, precision: str) -> None:
        if host.precision != precision:
            host.info(
                f"The checkpoint's run had gone over to {precision!r} because it only skipped"
                f" (`on_limit`): this run goes on in it, not in {host.precision!r}."
            )
        host.fall_back(precision)


def _inside_batch(host: Host) -> bool:
    """Return whether a training batch is begun and not done."""
    trainer = host.trainer
    return bool(
        trainer is not None and _upstream.is_fitting(trainer) and _upstream.inside_batch(trainer)
    )


def _is_there(entry: object) -> bool:
    """Return whether there is an entry to judge: without a scaler, stock's is an empty dict."""
    return not (entry is None or (is_dict(entry) and not entry))


def _is_dict_or_none(value: object) -> bool:
    return value is None or is_dict(value)


class ScalerCheckpoint(ScalerCheckpointCore, Guard):
    """Saves and restores everything that decides the next step, bit for bit.

    Stock Lightning finds the scaler's state by the plugin's class name, and loses it silently when
    the name changes (Lightning issue 11885): a scale of 256 becomes 65536 and the resumed run parts
    from the original. The entry here is found by its format mark; scaler, tallies, the gates' flags
    and, between batches on one process, the gradients of an open accumulation window survive. A
    second entry under the name `MixedPrecision` lets stock Lightning resume, and its entries (and
    `native_amp_scaling_state`) are read. Scale, counters and growth settings come from the checkpoint,
    everything else from the constructor. Only Python values and tensors: loads with
    `weights_only=True`. Validate, test and predict neither read nor judge it.

    Args:
        window_gradients: `False` leaves the gradients of an open window out; a run resumed from
            inside a window then begins it anew.
        enabled: `False` saves torch's five values under the plugin's class name, as stock does.

    Runs: when a checkpoint is saved, and when one is loaded for a fit.
    Keeps: the plugin's entry.
    Host sync: when saving inside a window, one per gradient.
    """
