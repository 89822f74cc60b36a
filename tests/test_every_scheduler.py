# SPDX-License-Identifier: Apache-2.0
"""Every scheduler advances once per applied update, and is the same after a resume."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from tests.helpers import BAD, GOOD, NAN_LOSS
from tests.optimizer_zoo import differences
from tests.scheduler_zoo import (
    ManualScheduled,
    Scheduled,
    TimmStyle,
    by_hand,
    chained,
    deviations,
    fit,
    momentum,
    plain,
)
from tests.tables import CASES, PLAN, SCHEDULERS, schedulers_table, strays
from tests.wrapping_optimizers import Lookahead

G, B, N = GOOD, BAD, NAN_LOSS
EVERY = pytest.mark.parametrize("name", SCHEDULERS)


def same(model: Any, trainer: Any, want: tuple[list[Any], list[Any]]) -> None:
    assert deviations(model.rates, trainer, want) == []


# ---------------------------------------------------------------------- torch's


def test_introspection_finds_what_is_known_to_be_there():
    known = {"ChainedScheduler", "CyclicLR", "OneCycleLR", "ReduceLROnPlateau", "SWALR", "StepLR"}
    assert known < set(SCHEDULERS)
    assert "LRScheduler" not in SCHEDULERS


# Lightning's remark on a schedule that is meant for steps
@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'")
@pytest.mark.parametrize("case", CASES)
@EVERY
def test_scheduler_advances_once_per_turn_with_an_applied_update(name, case):
    assert strays(name, case) == ()


@pytest.mark.parametrize("case", ["every step", "by hand"])
@EVERY
def test_scheduler_advances_once_per_applied_update_under_bfloat16(name, case):
    assert strays(name, case, "bf16-mixed") == ()


@pytest.mark.parametrize("model_type", [Scheduled, ManualScheduled])
def test_several_schedulers_of_one_optimizer_advance_together(model_type):
    makes = SCHEDULERS["StepLR"], SCHEDULERS["MultiplicativeLR"], chained
    model = model_type(PLAN, *makes)
    same(model, fit(model, len(PLAN)), by_hand(PLAN, *makes))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_asks_for_outcomes_that_were_waiting(name):
    def make(params):
        return torch.optim.AdamW(params, lr=0.5, fused=True)

    model = Scheduled(PLAN, SCHEDULERS[name], make=make, heard=False, frequency=3)
    same(model, fit(model, len(PLAN)), by_hand(PLAN, SCHEDULERS[name], every=3, make=make))


@pytest.mark.parametrize("model_type", [Scheduled, ManualScheduled])
def test_one_cycle_comes_to_its_very_end_and_not_beyond(model_type):
    plan = [B, G, B, B, G, N, G, G, B, G, G, B]  # six updates, and six steps in the cycle
    model = model_type(plan, lambda o: OneCycleLR(o, max_lr=1.0, total_steps=6))
    trainer = fit(model, len(plan))
    (scheduler,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert scheduler.last_epoch == 6
    with pytest.raises(ValueError, match="Tried to step 7 times"):
        scheduler.step()


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_momentum_is_cycled_with_the_rate(name):
    model = Scheduled(PLAN, SCHEDULERS[name])
    fit(model, len(PLAN))
    cycled = [groups[0][1] for groups in model.rates]
    assert len(set(cycled)) >= 3
    assert [b == a for a, b in pairwise(cycled)] == [f != G for f in PLAN[:-1]]


# ---------------------------------------------------------------------- resume


@EVERY
def test_checkpoint_in_the_middle_of_a_fit_holds_the_scheduler_and_nothing_else(name, tmp_path):
    class Saves(ManualScheduled):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.trainer.save_checkpoint(self.file)

    model = Saves(PLAN, SCHEDULERS[name])
    model.file = tmp_path / "last.ckpt"
    fit(model, len(PLAN))
    saved = torch.load(model.file, weights_only=False)["lr_schedulers"]
    _, made = by_hand(PLAN, SCHEDULERS[name])
    assert not [*differences(plain(saved), plain([s.state_dict() for s in made]))]


# ---------------------------------------------------------------------- users' own


class TimmAutomatic(Scheduled):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step_update(
            num_updates=self.trainer.precision_plugin.tally.applied, metric=metric
        )


def test_timm_scheduler_counts_applied_updates():
    model = TimmAutomatic(PLAN, TimmStyle)
    trainer = fit(model, len(PLAN))
    applied = PLAN.count(G)
    assert trainer.lr_scheduler_configs[0].scheduler.updates == [*range(1, applied + 1)]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 / (1 + applied)


class TimmManual(ManualScheduled):
    def training_step(self, batch, batch_idx):
        loss = Scheduled.training_step(self, batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step_update(self.seen)

    def on_train_epoch_end(self):
        self.lr_schedulers().step(self.current_epoch)


def test_manual_timm_scheduler_has_turns_for_each_of_its_methods():
    plan = [B, G, G, B, B, N, N, G]  # two batches an epoch: the third has no update
    model = TimmManual(plan, TimmStyle)
    scheduler = fit(model, 2, epochs=4).lr_scheduler_configs[0].scheduler
    assert scheduler.updates == [1, 2, 7]
    assert scheduler.epochs == [0, 1, 3]
    assert type(scheduler) is TimmStyle
    assert set(scheduler.state_dict()) == {"base", "epochs", "updates"}


@pytest.mark.parametrize("model_type", [Scheduled, ManualScheduled])
def test_scheduler_of_a_wrapping_optimizer_is_gated(model_type):
    def make(params):
        return Lookahead(momentum(params))

    model = model_type(PLAN, SCHEDULERS["CosineAnnealingLR"], make=make)
    same(model, fit(model, len(PLAN)), by_hand(PLAN, SCHEDULERS["CosineAnnealingLR"], make=make))


# ---------------------------------------------------------------------- the README's table


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'")
def test_readme_holds_the_table_of_schedulers():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- schedulers -->\n(.*?)<!-- /schedulers -->\n", readme, re.DOTALL)
    assert found is not None, "README.md has no block <!-- schedulers --> ... <!-- /schedulers -->"
    assert found[1] == schedulers_table()
