# SPDX-License-Identifier: Apache-2.0
"""Long runs with random overflows: memory stays flat, host and device agree, every count is exact."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_amp_guard import AmpMonitor, SafeAMP, SkipAwareGradScaler, SkipReason, StepTally
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.monitor.ledger.file import read_ledger
from lightning_amp_guard.step.attempt import AttemptEngine
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, PlantedOverflow, batches, make_trainer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

# AMP_GUARD_SOAK shortens these runs, to 2,000 attempts at least: fewer would show nothing
SHORT = os.environ.get("AMP_GUARD_SOAK")
MONITORED = 20_000 if SHORT is None else max(2000, min(20_000, int(SHORT)))
BARE = 50_000 if SHORT is None else max(2000, min(50_000, int(SHORT)))
WARM_UP = 1000
FLAT_MIB, FLAT_OBJECTS = 5.0, 300
MAX_SCALE = 2.0**12


def plan(n: int, seed: int) -> list[str]:
    """Draw faults: a few alone, some in bursts that take the scale down to its lower bound."""
    draw, faults = random.Random(seed), []
    while len(faults) < n:
        bad = draw.choices((GOOD, BAD, NAN_LOSS), (8, 2, 1))[0]
        faults += [bad] * (draw.randint(1, 25) if bad == GOOD or draw.random() < 0.1 else 1)
    return faults[:n]


@dataclass
class Rule:
    """Torch's rule for the scale between bounds, in whole powers of two; a bad loss moves nothing."""

    interval: int
    scale: float
    clean: int = 0

    def see(self, fault: str) -> float:
        """Return the scale that the attempt's gradients carry, and move it for the next."""
        carried = self.scale
        if fault == BAD:
            self.scale, self.clean = max(self.scale / 2, 1.0), 0
        elif fault == GOOD:
            self.clean += 1
            if self.clean == self.interval:
                self.scale, self.clean = min(self.scale * 2, MAX_SCALE), 0
        return carried


REASONS = {GOOD: None, BAD: SkipReason.NONFINITE_GRADIENTS, NAN_LOSS: SkipReason.NONFINITE_LOSS}


def tally_of(faults: list[str]) -> StepTally:
    """Count by hand."""
    tail = next((i for i, fault in enumerate(reversed(faults)) if fault == GOOD), len(faults))
    good = faults.count(GOOD)
    return StepTally(len(faults), good, len(faults) - good, tail)


class Memory:
    """Resident memory and living objects, now and then; the first look is what is allowed."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, float, int, Counter[str]]] = []

    def look(self, attempt: int) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        alive = gc.get_objects()
        kinds = Counter(type(one).__name__ for one in alive)
        self.looks.append((attempt, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(alive), kinds))

    def assert_flat(self) -> None:
        _, mib, objects, kinds = self.looks[0]
        grown = self.looks[-1][1] - mib
        more = self.looks[-1][3] - kinds
        told = [(attempt, round(size, 1), count) for attempt, size, count, _ in self.looks]
        assert grown < FLAT_MIB, told
        assert self.looks[-1][2] - objects < FLAT_OBJECTS, (told, more.most_common(8))


# ---------------------------------------------------------------------- the engine by itself


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused adamw, read late"])
def test_host_and_device_agree_over_random_overflows(kind):
    fused = kind.startswith("fused")
    rule, faults = Rule(3, 2.0**6), plan(BARE, seed=len(kind))
    scaler = SkipAwareGradScaler("cpu", rule.scale, growth_interval=3, max_scale=MAX_SCALE)
    weight = torch.nn.Parameter(torch.ones(16))
    if kind == "sgd":
        optimizer = torch.optim.SGD([weight], lr=2.0**-20, momentum=0.5)
    else:
        optimizer = torch.optim.AdamW([weight], lr=2.0**-20, fused=fused)
    tallies: list[StepTally] = []
    settings = AmpSettings(max_consecutive_skips=None)
    engine, known = AttemptEngine(settings, scaler, [optimizer], tallies), []
    scaler.watcher = engine

    def settle():
        for outcome in engine.late.settle():
            idx = outcome.optimizer_idx
            engine.tallies[idx] = engine.tallies[idx].after(outcome)
            known.append(outcome)

    scaler.settle = engine.windows.settle = settle
    lane, memory, seen, waited = engine.lane(optimizer), Memory(), 0, 0

    def check() -> None:
        """Compare what has become known with the rule; then nothing more is kept."""
        nonlocal seen
        for outcome in known:
            fault = faults[seen]
            got = (outcome.attempt, outcome.reason, outcome.scale, outcome.micro_batches)
            assert got == (seen, REASONS[fault], rule.see(fault), 1)
            seen += 1
        known.clear()

    for attempt, fault in enumerate(faults):
        optimizer.zero_grad()
        loss = PlantedOverflow.apply(weight.sum(), fault == BAD)
        scaler.scale(loss * float("nan") if fault == NAN_LOSS else loss).backward()
        engine.after_backward()
        outcome = engine.attempt(lane, lambda: None, {}, patient=fused)
        waited = max(waited, len(engine.late.waiting))
        if outcome is not None:
            known.append(outcome)
        if outcome is not None or len(engine.late.waiting) == 32:
            engine.movement.end_batch(None)
            assert scaler.get_scale() == float(scaler.device_scale)
            check()
            assert scaler.get_scale() == rule.scale
        if attempt + 1 in (WARM_UP, BARE // 2, BARE):
            memory.look(attempt + 1)
    scaler.get_scale()
    check()
    assert seen == BARE
    assert tallies == [tally_of(faults)]
    assert float(scaler.device_scale) == scaler.get_scale() == rule.scale
    assert scaler.state_dict()["_growth_tracker"] == rule.clean
    assert weight.isfinite().all()
    assert (waited > 1) == fused
    memory.assert_flat()


# ---------------------------------------------------------------------- a whole run


class Looks(Callback):
    """Looks at memory after the warm-up, half-way and at the end."""

    def __init__(self) -> None:
        self.memory = Memory()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 in (WARM_UP, MONITORED // 2, MONITORED):
            self.memory.look(batch_idx + 1)


class Silent(Line):
    """Keeps no outcomes."""

    on_step_outcome = None


@pytest.mark.filterwarnings("ignore::lightning_amp_guard.AmpGuardWarning")  # that so many skip
def test_monitored_run_with_a_ledger_keeps_its_memory(tmp_path):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    faults, looks = plan(MONITORED, seed=5), Looks()
    model = Silent(faults, make_optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-20))
    amp = SafeAMP(
        init_scale=64.0, growth_interval=3, max_scale=MAX_SCALE, max_consecutive_skips=None
    )
    ledger = tmp_path / "ledger.jsonl"
    trainer = make_trainer(
        amp, callbacks=[AmpMonitor(ledger=ledger), looks], default_root_dir=tmp_path
    )
    trainer.fit(model, batches(MONITORED, size=1))
    assert amp.tallies == [tally_of(faults)]
    rule = Rule(3, 64.0)
    rows = read_ledger(ledger)
    assert len(rows) == MONITORED
    for number, (row, fault) in enumerate(zip(rows, faults, strict=True)):
        reason = REASONS[fault] and REASONS[fault].name
        carried = rule.see(fault)
        assert (row.attempt, row.batch_idx, row.reason, row.scale) == (
            *(number, number, reason),
            carried,
        )
    assert amp.scaler.get_scale() == rule.scale
    looks.memory.assert_flat()
