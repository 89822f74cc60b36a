# SPDX-License-Identifier: Apache-2.0
"""A run that breaks anywhere resumes as the uninterrupted one, bit for bit, and fits again."""

from __future__ import annotations

import logging
import random
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.crash.breaking import (
    Bomb,
    Break,
    PlantedError,
    assert_left_clean,
    assert_resumes,
    built,
    differences,
    disk_full,
    interrupted,
    out_of_memory,
    plain,
    terminated,
)
from tests.crash.runs import SETUPS, build, final, fit, newest

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

RAISED = {
    plain: PlantedError,
    out_of_memory: torch.OutOfMemoryError,
    disk_full: OSError,
    interrupted: SystemExit,  # Lightning's answer to Ctrl+C
    terminated: SIGTERMException,
}


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "lightning.pytorch")


def break_and_resume(setup, folder, place, choose):
    """Break a run, see that it left nothing behind, resume it twice; return what it said.

    `choose` names the arrival to break at, given how often the uninterrupted run arrives. Returns
    `None` where it never does.
    """
    counter = Bomb()
    with built(setup, folder / "whole", place, counter) as parts:
        fit(parts)
        reached, whole, trail = counter.seen, final(parts), dict(parts.model.trail)
    if reached == 0:
        return None
    bomb = Bomb(place.act, choose(reached))
    with built(setup, folder / "broken", place, bomb) as parts:
        before = signal.getsignal(signal.SIGTERM)
        try:
            fit(parts)
        except RAISED[place.act]:
            pass
        else:
            # the signal came when nothing was left to do, or a full disk ended the ledger alone
            assert place.act is terminated or place.name == "ledger line"
            assert set(differences(parts, whole)) <= {"ledger"}
            return parts.said
        assert bomb.gone_off
        assert signal.getsignal(signal.SIGTERM) is before
        assert_left_clean(parts)
        ckpt = newest(folder / "broken")
        if ckpt is None:  # broken before the first checkpoint: to fit again is all that is left
            fit(parts)
            assert len(parts.model.trail) > 0
        else:
            assert_resumes(parts, ckpt, whole, trail)
    with built(setup, folder / "broken", place, Bomb(), seed=1 if ckpt is None else 2) as parts:
        if ckpt is None:
            assert fit(parts).model.trail == trail
            assert differences(parts, whole) == []
        else:
            assert_resumes(parts, ckpt, whole, trail)
    return parts.said


# ---------------------------------------------------------------------- the set-ups by themselves


@pytest.mark.parametrize("name", SETUPS)
def test_every_checkpoint_of_a_run_resumes_to_its_end(name, tmp_path):
    parts = fit(build(SETUPS[name], tmp_path / "whole"))
    whole, trail = final(parts), dict(parts.model.trail)
    assert 0 < parts.amp.tally.skipped < parts.amp.tally.attempted
    found = sorted((tmp_path / "whole").glob("*.ckpt"))
    assert len(found) == 24 // SETUPS[name].save_every
    for ckpt in found:
        assert_resumes(build(SETUPS[name], tmp_path / ckpt.stem, seed=2), ckpt, whole, trail)


# ---------------------------------------------------------------------- every hook

MODULE = sorted(
    {
        *(name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)),
        *("training_step", "validation_step", "backward", "configure_callbacks"),
        *("configure_optimizers", "configure_gradient_clipping", "optimizer_step"),
        *("optimizer_zero_grad", "lr_scheduler_step", "state_dict", "load_state_dict"),
    }
)
CALLBACK = [name for name in vars(Callback) if name != "state_key"]


def of_a_fit(names):
    foreign = ("_", "on_test", "on_predict", "test_", "predict_")
    return [name for name in names if not name.startswith(foreign)]


HOOKS = [Break("module", name) for name in of_a_fit(MODULE)]
HOOKS += [Break("callback", name) for name in of_a_fit(CALLBACK)]
# what no fit of these set-ups calls
UNREACHED = {
    *("module.on_load_checkpoint", "callback.on_load_checkpoint", "callback.load_state_dict"),
    *("module.load_state_dict", "module.train_dataloader", "module.val_dataloader"),
    *("callback.on_sanity_check_start", "callback.on_sanity_check_end", "callback.on_exception"),
}


@pytest.mark.parametrize("place", HOOKS, ids=str)
def test_exception_in_a_hook_leaves_everything_ready(place, tmp_path):
    setup = SETUPS["adamw, accumulation"]
    late = Break(place.owner, place.name, late=True)
    said = break_and_resume(setup, tmp_path / "in", place, lambda seen: 1 + seen // 2)
    assert (said is None) == (f"{place.owner}.{place.name}" in UNREACHED)
    if said is not None:
        break_and_resume(setup, tmp_path / "after", late, lambda seen: seen)


# ---------------------------------------------------------------------- saved as it broke

MIDDLE = [
    Break("callback", "on_train_batch_start"),
    Break("module", "training_step"),
    Break("backward", "the first layer's", out_of_memory),
    Break("module", "on_before_optimizer_step"),
    Break("plugin", "optimizer_step", late=True),
    Break("callback", "on_train_batch_end"),
    Break("module", "training_step", terminated),
    Break("module", "validation_step"),
    Break("callback", "on_train_epoch_end"),
]


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.parametrize("name", ["sgd", "adamw, accumulation", "manual, two"])
@pytest.mark.parametrize("place", MIDDLE, ids=str)
def test_checkpoint_of_the_exception_itself_is_exact_or_says_what_it_lost(name, place, tmp_path):
    counter = Bomb()
    with built(SETUPS[name], tmp_path / "whole", place, counter) as parts:
        trail = dict(fit(parts).model.trail)
    for at in (counter.seen // 2, counter.seen // 2 + 1):
        folder = tmp_path / str(at)
        with built(SETUPS[name], folder, place, Bomb(place.act, at)) as parts:
            parts.trainer.callbacks.append(OnExceptionCheckpoint(folder, "broken"))
            with pytest.raises(RAISED[place.act]):
                fit(parts)
            done, said = max(parts.model.trail, default=-1) + 1, " ".join(parts.said)
        with built(SETUPS[name], folder, place, Bomb(), seed=2) as parts:
            resumed = fit(parts, folder / "broken.ckpt").model.trail
        lost = resumed != {number: seen for number, seen in trail.items() if number >= done}
        # a batch whose callback failed at its end is done, and only the trail has not seen it
        lost &= place.name != "on_train_batch_end"
        assert ("this batch is not seen again" in said) == lost


# ---------------------------------------------------------------------- seeded breaks

SOMEWHERE: list[Any] = [
    *(Break("module", "training_step", act) for act in (plain, out_of_memory, interrupted)),
    *(Break("backward", "the first layer's", act) for act in (plain, out_of_memory, terminated)),
    *(Break("function", name, out_of_memory) for name in ("unscale", "norm", "clip")),
    *(Break("function", name, out_of_memory, late=True) for name in ("unscale", "norm", "clip")),
    Break("function", "clip by torch", out_of_memory),
    *(Break("function", f"step of {kind}", out_of_memory) for kind in ("SGD", "AdamW")),
    *(Break("function", f"step of {kind}", out_of_memory, late=True) for kind in ("SGD", "AdamW")),
    *(Break("function", name, disk_full) for name in ("checkpoint file", "ledger line")),
    *(Break("plugin", name, plain) for name in ("optimizer_step", "pre_backward", "post_backward")),
    *(Break("plugin", name, plain, late=True) for name in ("optimizer_step", "post_backward")),
    *(Break("module", "training_step", terminated, late) for late in (False, True)),
    *(Break("callback", "on_train_batch_end", act) for act in (plain, terminated, interrupted)),
    Break("callback", "on_before_optimizer_step", terminated),
    Break("callback", "on_train_epoch_end", terminated),
    Break("module", "validation_step", terminated),
    Break("module", "validation_step", out_of_memory),
]
SEEDS = 180


@pytest.mark.parametrize("number", range(SEEDS))
def test_broken_run_resumes_as_the_uninterrupted_one(number, tmp_path):
    draw = random.Random(number)
    setup = list(SETUPS.values())[number % len(SETUPS)]
    for place in draw.sample(SOMEWHERE, len(SOMEWHERE)):
        said = break_and_resume(
            setup, tmp_path / str(place), place, lambda seen: draw.randint(1, seen)
        )
        if said is not None:
            return
    pytest.fail("the set-up reaches no place")
