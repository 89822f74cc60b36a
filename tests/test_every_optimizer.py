# SPDX-License-Identifier: Apache-2.0
"""Every optimizer works as in float32, or is refused when the fit starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_amp_guard import SafeAMP, ScaledGradientError
from tests.helpers import BAD, GOOD, make_trainer
from tests.optimizer_zoo import (
    AS_IN_FLOAT32,
    PLAN,
    REFUSED,
    TORCH_REFUSES,
    UNGUARDED,
    Bowl,
    ManualBowl,
    by_hand,
    clip_of_sparse,
    differences,
    guarded,
    holds,
    judged,
    loader,
)
from tests.tables import KINDS, VARIANTS, optimizers_table, verdict
from tests.wrapping_optimizers import SAM, EightBitMomentum, Lookahead, SteppableSAM

# torch's own remark, once in a process, wherever a sparse tensor is made first
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

G, B = GOOD, BAD
EVERY = pytest.mark.parametrize("name", KINDS)
PRECISIONS = pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
WAYS = pytest.mark.parametrize("way", ["heard", "late", "clipped", "manual"])
CLOSED = ["LBFGS"]  # evaluate their closure several times in a step
FUSED = [name for name, variant in VARIANTS if variant == "fused"]


# ---------------------------------------------------------------------- torch's


def test_introspection_finds_what_is_known_to_be_there():
    assert {"Adafactor", "Adagrad", "AdamW", "LBFGS", "SGD", "SparseAdam"} < set(KINDS)
    assert "Optimizer" not in KINDS
    assert {"Adam", "AdamW", "SGD", "Adagrad"} <= set(FUSED)
    assert ("Adam", "amsgrad, fused") in VARIANTS


@WAYS
@EVERY
def test_fault_costs_its_own_update_and_nothing_else(name, way):
    want = REFUSED if name in CLOSED else AS_IN_FLOAT32
    if holds(KINDS[name]) == "s" and way == "clipped":
        want = clip_of_sparse()
    assert verdict(name, "defaults", "16-mixed", way) == want


@pytest.mark.parametrize("way", ["heard", "manual"])
@EVERY
def test_fault_costs_its_own_update_under_bfloat16(name, way):
    if name in CLOSED:
        assert verdict(name, "defaults", "bf16-mixed") == UNGUARDED
        return
    assert verdict(name, "defaults", "bf16-mixed", way) == AS_IN_FLOAT32


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_argument_works_where_torch_lets_it(name, variant):
    said = verdict(name, variant)
    by_torch = {"capturable", "differentiable"}
    if name in CLOSED:
        assert said == REFUSED
    elif not by_torch & set(variant.split(", ")) and "lr=tensor" not in variant:
        assert said == AS_IN_FLOAT32
    else:
        assert said in (AS_IN_FLOAT32, TORCH_REFUSES)


@pytest.mark.parametrize("way", ["late", "clipped", "manual"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_step_is_the_same_on_every_way(name, precision, way):
    for variant in ("fused", "weight_decay=0.25, fused", "maximize, fused"):
        assert verdict(name, variant, precision, way) == AS_IN_FLOAT32


@WAYS
@pytest.mark.parametrize("name", ["Adagrad", "SGD", "SparseAdam"])
def test_sparse_gradients_work_as_in_float32(name, way):
    want = clip_of_sparse() if way == "clipped" else AS_IN_FLOAT32
    assert verdict(name, "defaults", "16-mixed", way, "s") == want


@pytest.mark.parametrize("name", [name for name in KINDS if name not in CLOSED])
def test_parameter_groups_keep_their_own_settings(name):
    kind = KINDS[name]

    def make(params):
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
        return kind(groups if len(params) > 1 else groups[:1])

    assert judged(make, kinds=holds(kind)) in (AS_IN_FLOAT32, TORCH_REFUSES)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_and_dense_gradients_share_an_optimizer(kind):
    assert judged(kind, kinds="ms") == AS_IN_FLOAT32


# ---------------------------------------------------------------------- those of others


def lookahead(params):
    return Lookahead(torch.optim.SGD(params, lr=0.25, momentum=0.5))


def lookahead_fused(params):
    return Lookahead(torch.optim.Adam(params, lr=0.25, fused=True))


def sam(params):
    return SAM(params, torch.optim.SGD, lr=0.25)


def steppable(params):
    return SteppableSAM(params, torch.optim.SGD, lr=0.25, momentum=0.5)


@PRECISIONS
@WAYS
@pytest.mark.parametrize("make", [lookahead, lookahead_fused, EightBitMomentum, steppable])
def test_optimizers_of_others_work_as_in_float32(make, way, precision):
    assert judged(make, precision, way) == AS_IN_FLOAT32


def test_eight_bit_state_survives_a_skip_and_a_checkpoint(tmp_path):
    plan = (B, G, G, B, G, G)
    first = Bowl(EightBitMomentum, plan)
    trainer = make_trainer(SafeAMP(init_scale=64.0), max_epochs=3)
    trainer.fit(first, loader(1))
    trainer.save_checkpoint(tmp_path / "at.ckpt")
    second = Bowl(EightBitMomentum, plan)
    second.seen = 3
    resumed = make_trainer(SafeAMP(init_scale=64.0), max_epochs=6)
    resumed.fit(second, loader(1), ckpt_path=tmp_path / "at.ckpt")
    whole = Bowl(EightBitMomentum, plan)
    trainer = make_trainer(SafeAMP(init_scale=64.0), max_epochs=6)
    trainer.fit(whole, loader(1))
    assert resumed.optimizers[0].state_dict()["state"][0]["codes"].dtype is torch.int8
    states = resumed.optimizers[0].state_dict(), trainer.optimizers[0].state_dict()
    assert not [*differences([second.path, states[0]], [whole.path[3:], states[1]])]


@pytest.mark.parametrize(
    "make",
    [sam, lambda p: Lookahead(torch.optim.LBFGS(p, lr=0.25))],
    ids=["SAM", "Lookahead(LBFGS)"],
)
def test_optimizer_that_insists_on_its_closure_is_refused_or_unguarded(make):
    run = guarded(make)
    assert isinstance(run.error, MisconfigurationException)
    assert 'SafeAMP(precision="bf16-mixed")' in str(run.error)
    assert run.path == []  # before the first batch
    assert judged(make, "bf16-mixed") == UNGUARDED


class TwoSteps(ManualBowl):
    """Sharpness-aware minimization by hand: two backward passes, `first_step`, then the step."""

    past_the_plugin = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.faulty_loss(batch))
        self.trainer.precision_plugin.unscale_(optimizer)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.faulty_loss(batch))
        if self.past_the_plugin:
            optimizer.second_step()
        else:
            optimizer.step()
        optimizer.zero_grad()


class TwoStepsAndBack(TwoSteps):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, heard=False, **kwargs)

    def on_step_outcome(self, outcome):
        if not outcome.applied:
            self.optimizers().go_back()


@PRECISIONS
def test_sam_with_two_steps_goes_back_at_a_skip(precision):
    model, optimizer = Bowl(steppable), None
    optimizer, want = steppable(list(model.parameters())), []
    for fault, batch in zip(PLAN, loader(len(PLAN)), strict=True):
        if fault == G:
            model.loss(batch).backward()
            optimizer.first_step(zero_grad=True)
            model.loss(batch).backward()
            optimizer.second_step(zero_grad=True)
        want.append(model.weights())
    sharp = TwoStepsAndBack(steppable, PLAN)
    make_trainer(SafeAMP(precision, init_scale=64.0)).fit(sharp, loader(len(PLAN)))
    assert not [*differences(sharp.path, want)]


def test_step_of_the_optimizer_inside_a_wrapper_is_noticed():
    model = TwoSteps(steppable, (G, G))
    model.past_the_plugin = True
    with pytest.raises(ScaledGradientError, match="optimizer 0 was stepped past Lightning"):
        make_trainer(SafeAMP(init_scale=64.0)).fit(model, loader(2))
    assert not [*differences(model.path, [])]


# ---------------------------------------------------------------------- by hand, outside autocast


class NotesAutocast(torch.optim.SGD):
    where: list[str]

    def step(self, closure=None):
        self.where.append(f"step {torch.is_autocast_enabled('cpu')}")
        return super().step(closure)


class NotesAutocastInClosure(torch.optim.LBFGS):
    def step(self, closure):
        NotesAutocast.where.append(f"step {torch.is_autocast_enabled('cpu')}")
        return super().step(closure)


class WithClosure(ManualBowl):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            NotesAutocast.where.append(f"closure {torch.is_autocast_enabled('cpu')}")
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        NotesAutocast.where.append(f"after {torch.is_autocast_enabled('cpu')}")


@pytest.mark.parametrize(
    ("precision", "make"),
    [
        ("16-mixed", lambda p: NotesAutocast(p, lr=0.5)),
        ("bf16-mixed", lambda p: NotesAutocast(p, lr=0.5)),
        ("bf16-mixed", lambda p: NotesAutocastInClosure(p, max_iter=1)),
    ],
)
def test_manual_step_computes_outside_autocast_and_its_closure_inside(precision, make):
    NotesAutocast.where = []
    make_trainer(SafeAMP(precision, init_scale=64.0)).fit(WithClosure(make, (G,)), loader(1))
    assert sorted(NotesAutocast.where) == ["after True", "closure True", "step False"]


class StepsByTheScaler(ManualBowl):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.faulty_loss(batch))
        self.trainer.precision_plugin.scaler.step(optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_step_by_the_scaler_computes_outside_autocast(name):
    if name not in KINDS:
        pytest.skip(f"this torch has no {name}")
    kind, plan = KINDS[name], (B, G, G)
    model = StepsByTheScaler(kind, plan, kinds="m")
    make_trainer(SafeAMP(init_scale=64.0)).fit(model, loader(3))
    assert not [*differences(model.path, by_hand(kind, plan, kinds="m").path)]


# ---------------------------------------------------------------------- the README's table


def test_readme_holds_the_table_of_optimizers():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- optimizers -->\n(.*?)<!-- /optimizers -->\n", readme, re.DOTALL)
    assert found is not None, "README.md has no block <!-- optimizers --> ... <!-- /optimizers -->"
    assert found[1] == optimizers_table()
