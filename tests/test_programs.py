# SPDX-License-Identifier: Apache-2.0
"""Random programs of several optimizers equal a float32 interpreter that leaves out the skips."""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass, replace
from functools import partial

import lightning.pytorch as L
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_amp_guard import SafeAMP, SkipReason
from tests.helpers import PlantedOverflow, batches, make_trainer

MAX_SCALE = 2.0**10  # keeps every scaled gradient of these programs far inside float16's range
LOADER = batches(16, width=2, size=2)
SOAK = int(os.environ.get("AMP_GUARD_SOAK", "5000"))  # programs per shape in the long test
FINITE, NAN, NAN_VALUE = "finite", "nan", "nan value"
OPTIMIZERS = {
    "sgd 1/2": partial(torch.optim.SGD, lr=0.5),
    "sgd 1/8": partial(torch.optim.SGD, lr=0.125),
    # inexact arithmetic, but the same arithmetic on the same gradients: equal bit for bit as well
    "adamw": partial(torch.optim.AdamW, lr=0.125),
}


# ---------------------------------------------------------------------- what a program consists of


@dataclass(frozen=True)
class Backward:
    """A loss of the sum of gain * net for every net that it reaches: the gradient is the gain.

    `gains`: log2 of each net's gain, or None; `overflow`: nets whose gradient becomes inf; `loss`:
    NAN makes loss and gradients NaN, NAN_VALUE the loss alone; `toggled`: the only optimizer on.
    """

    gains: tuple
    overflow: tuple = ()
    loss: str = FINITE
    toggled: int | None = None


@dataclass(frozen=True)
class Zero:
    optimizer: int
    set_to_none: bool = True


@dataclass(frozen=True)
class Step:
    optimizer: int
    closure: tuple = ()


@dataclass(frozen=True)
class Unscale:
    """An early `plugin.unscale_`, as before a clip: nothing comes of it."""

    optimizer: int


@dataclass(frozen=True)
class Together:
    """`all_or_none` over `named` (empty: all), with some steps and zero_grads inside."""

    named: tuple
    inside: tuple


@dataclass(frozen=True)
class Program:
    """Net i belongs to optimizer i; with `shared`, one more net belongs to optimizers 0 and 1."""

    optimizers: tuple
    shared: bool
    init_scale: float
    growth_interval: int
    backoff_on_nonfinite_loss: bool
    batches: tuple = ()

    @property
    def n(self):
        return len(self.optimizers)

    @property
    def nets(self):
        return self.n + self.shared

    @property
    def owned(self):
        """Per optimizer the nets that it trains."""
        return [(i, self.n) if self.shared and i < 2 else (i,) for i in range(self.n)]


# ---------------------------------------------------------------------- under SafeAMP, in FP16


class Run(L.LightningModule):
    """Does what the program says, in manual optimization."""

    def __init__(self, program):
        super().__init__()
        self.automatic_optimization = False
        self.program = program
        self.net = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(program.nets))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 8.0)
        self.outcomes = []

    def training_step(self, batch, batch_idx):
        for op in self.program.batches[batch_idx]:
            self.do(op, batch[0])

    def do(self, op, x):
        if isinstance(op, Backward):
            self.run_backward(op, x)
        elif isinstance(op, Zero):
            self.optimizers()[op.optimizer].zero_grad(set_to_none=op.set_to_none)
        elif isinstance(op, Step):
            self.run_step(self.optimizers()[op.optimizer], op.closure, x)
        elif isinstance(op, Unscale):
            self.trainer.precision_plugin.unscale_(self.optimizers()[op.optimizer])
        else:
            named = [self.optimizers()[i] for i in op.named]
            with self.trainer.precision_plugin.all_or_none(*named):
                for inner in op.inside:
                    self.do(inner, x)

    def run_step(self, optimizer, closure, x):
        if not closure:
            optimizer.step()
            return

        def run():
            for op in closure:
                self.do(op, x)
            return torch.tensor(3.0)

        assert optimizer.step(closure=run) == 3.0

    def run_backward(self, op, x):
        toggled = None if op.toggled is None else self.optimizers()[op.toggled]
        if toggled is not None:
            self.toggle_optimizer(toggled)
        terms = [
            PlantedOverflow.apply(self.net[i](x).float().mean() * 2.0**gain, i in op.overflow)
            for i, gain in enumerate(op.gains)
            if gain is not None
        ]
        loss = torch.stack(terms).sum()
        if op.loss != FINITE:
            loss = loss * float("nan") if op.loss == NAN else loss + float("nan")
        self.manual_backward(loss)
        if toggled is not None:
            self.untoggle_optimizer(toggled)

    def on_step_outcome(self, outcome):
        self.outcomes.append(outcome)

    def configure_optimizers(self):
        return [
            OPTIMIZERS[kind]([p for i in nets for p in self.net[i].parameters()])
            for kind, nets in zip(self.program.optimizers, self.program.owned, strict=True)
        ]


def run_under_safe_amp(program):
    plugin = SafeAMP(
        init_scale=program.init_scale,
        growth_interval=program.growth_interval,
        max_scale=MAX_SCALE,
        backoff_on_nonfinite_loss=program.backoff_on_nonfinite_loss,
        max_consecutive_skips=None,
    )
    run = Run(program)
    trainer = make_trainer(plugin, limit_train_batches=len(program.batches))
    trainer.fit(run, LOADER)
    return run, plugin, trainer.optimizers


# ---------------------------------------------------------------------- the reference, in float32


class Reference:
    """Runs a program in plain float32 and leaves out the updates that must be skipped.

    Knows no scaled gradient. Of the scale it knows the rules alone: an overflow backs off at once,
    unless all its non-finite gradients were there when the scale last answered one; a batch with an
    applied attempt and without an overflow counts towards growth; growth waits while a gradient is
    there that no step has seen, for one more interval at most.
    """

    def __init__(self, program):
        self.program = program
        self.nets = [
            [torch.nn.Parameter(torch.full(shape, 8.0)) for shape in ((1, 2), (1,))]
            for _ in range(program.nets)
        ]
        self.optimizers = [
            OPTIMIZERS[kind]([p for i in nets for p in self.nets[i]])
            for kind, nets in zip(program.optimizers, program.owned, strict=True)
        ]
        self.scale, self.tracker, self.answers = program.init_scale, 0, 0
        self.applied = self.overflowed = False
        # nets whose gradient: no step has seen; was not finite when the scale last backed off; comes
        # from a loss that was itself not finite, and was not applied
        self.unseen, self.answered, self.blamed = set(), set(), set()
        self.carried = {}  # the scale at which a net's gradients were unscaled last
        self.outcomes = []

    def run(self):
        for ops in self.program.batches:
            for op in ops:
                self.do(op)
            self.end_batch()
        return self

    def do(self, op):
        if isinstance(op, Backward):
            self.backward(op)
        elif isinstance(op, Zero):
            self.zero(op)
        elif isinstance(op, Step):
            for inner in op.closure:
                self.do(inner)
            self.attempt(op.optimizer)
        elif isinstance(op, Unscale):
            self.carry(op.optimizer)
        else:
            self.together(op)

    def backward(self, op):
        self.carried.clear()
        for net, gain in enumerate(op.gains):
            on = op.toggled is None or net in self.program.owned[op.toggled]
            if gain is None or not on:
                continue
            value = float("inf") if net in op.overflow else 2.0**gain
            value = float("nan") if op.loss == NAN else value
            for parameter in self.nets[net]:
                made = torch.full_like(parameter, value)
                parameter.grad = made if parameter.grad is None else parameter.grad + made
            self.unseen.add(net)
            if op.loss != FINITE:
                self.blamed.add(net)

    def zero(self, op):
        nets = self.program.owned[op.optimizer]
        self.optimizers[op.optimizer].zero_grad(set_to_none=op.set_to_none)
        for known in (self.unseen, self.answered, self.blamed):
            known.difference_update(nets)

    def carry(self, optimizer):
        """Unscale the optimizer's gradients; return the scale that they carried."""
        nets = self.program.owned[optimizer]
        there = [i for i in nets if any(p.grad is not None for p in self.nets[i])]
        return max((self.carried.setdefault(i, self.scale) for i in there), default=self.scale)

    def nonfinite(self, nets):
        return {i for i in nets if any(not _finite(p.grad) for p in self.nets[i])}

    def judge(self, optimizer):
        """Return why to skip, whether that was answered already, and the answers up to now."""
        bad = self.nonfinite(self.program.owned[optimizer])
        blamed = self.blamed.intersection(self.program.owned[optimizer])
        reason = SkipReason.NONFINITE_LOSS if blamed else SkipReason.NONFINITE_GRADIENTS
        return (reason if bad else None), bad <= self.answered, self.answers

    def together(self, op):
        named = op.named or range(len(self.optimizers))
        verdicts = {i: self.judge(i) for i in named}
        for i in named:
            self.carry(i)
        doomed = any(reason is not None for reason, _, _ in verdicts.values())
        for inner in op.inside:
            if isinstance(inner, Zero):
                self.zero(inner)
                continue
            reason, answered, answers = verdicts[inner.optimizer]
            if reason is None and doomed:
                reason = SkipReason.PARTNER_SKIPPED
            self.attempt(inner.optimizer, (reason, answered, answers))

    def attempt(self, optimizer, verdict=None):
        nets = self.program.owned[optimizer]
        if all(p.grad is None for i in nets for p in self.nets[i]):
            return
        reason, answered, answers = verdict or self.judge(optimizer)
        if reason is None:
            self.optimizers[optimizer].step()
            self.applied = True
            self.blamed.difference_update(nets)
        carried = self.carry(optimizer)
        backs_off = {SkipReason.NONFINITE_GRADIENTS}
        if self.program.backoff_on_nonfinite_loss:
            backs_off.add(SkipReason.NONFINITE_LOSS)
        if reason in backs_off:
            self.overflow(answered or answers != self.answers)
        self.unseen.difference_update(nets)
        self.outcomes.append((optimizer, reason is None, reason, carried, self.scale))

    def overflow(self, answered):
        self.overflowed = True
        if answered:
            return
        self.scale, self.tracker = max(self.scale / 2, 1.0), 0
        self.answers += 1
        self.answered |= self.nonfinite(range(self.program.nets))

    def end_batch(self):
        counts = self.applied and not self.overflowed
        self.applied = self.overflowed = False
        if not counts:
            return
        self.tracker += 1
        due = self.program.growth_interval * (2 if self.unseen else 1)
        if self.tracker >= due:
            self.scale, self.tracker = min(self.scale * 2, MAX_SCALE), 0

    def tally(self, optimizer):
        """Return attempted, applied, skipped and consecutive skips."""
        applied = [a for i, a, *_ in self.outcomes if i == optimizer]
        tail = len(list(itertools.takewhile(lambda a: not a, reversed(applied))))
        return len(applied), sum(applied), len(applied) - sum(applied), tail


def _finite(grad):
    return grad is None or bool(grad.isfinite().all())


# ---------------------------------------------------------------------- drawing programs


@st.composite
def backwards(draw, program, optimizer=None, toggled=None):
    """A loss of some nets, one of the optimizer's among them."""
    must = range(program.nets) if optimizer is None else program.owned[optimizer]
    gains = [draw(st.sampled_from((None, None, -2, -1, 0, 1))) for _ in range(program.nets)]
    if all(gains[i] is None for i in must):
        gains[draw(st.sampled_from(must))] = 0
    reached = tuple(i for i, gain in enumerate(gains) if gain is not None)
    overflow = draw(st.sampled_from(((),) * 4 + tuple((i,) for i in reached) + (reached,)))
    # which steps a finite gradient of a shared net ends the window of is nobody's to say
    losses = (FINITE,) * 6 + ((NAN,) if program.shared else (NAN, NAN_VALUE))
    return Backward(tuple(gains), overflow, draw(st.sampled_from(losses)), toggled)


@st.composite
def zeros(draw, optimizer):
    """No zero_grad, or one of either kind."""
    kind = draw(st.sampled_from((None, True, True, False, False)))
    return () if kind is None else (Zero(optimizer, kind),)


@st.composite
def updates(draw, program):
    """One optimizer's backward and step, up to three times, with zero_grad before, after, never."""
    i = draw(st.integers(0, program.n - 1))
    ops = ()
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        toggled = draw(st.sampled_from((None, None, i)))
        made = (*draw(zeros(i)), draw(backwards(program, i, toggled)))
        kind = draw(st.sampled_from(("step", "step", "closure", "accumulate")))
        ops += {"step": (*made, Step(i)), "closure": (Step(i, made),), "accumulate": made}[kind]
    return ops + draw(zeros(i))


@st.composite
def joints(draw, program):
    """One backward for all, then some steps in some order."""
    ops = (draw(backwards(program)),)
    for i in draw(st.permutations(range(program.n)))[: draw(st.integers(1, program.n))]:
        ops += (Step(i), *draw(zeros(i)))
    return ops


@st.composite
def loose_ends(draw, program):
    """A backward, a step or a zero_grad on its own."""
    i = draw(st.integers(0, program.n - 1))
    alone = (st.just(Step(i)), st.builds(Zero, st.just(i), st.booleans()), backwards(program))
    return (draw(st.one_of(*alone)),)


@st.composite
def early_unscales(draw, program):
    """One optimizer's gradients are unscaled, another one takes its turn, then the first steps."""
    i, j = draw(st.permutations(range(program.n)))[:2]
    ops = (draw(backwards(program)), Unscale(i))
    if draw(st.booleans()):
        ops += (draw(backwards(program, j)), Unscale(i))
    return (*ops, Step(j), *(() if program.shared else draw(zeros(j))), Step(i), *draw(zeros(i)))


@st.composite
def blocks(draw, program):
    """Backwards, then some of the optimizers step together or not at all."""
    order = draw(st.permutations(range(program.n)))
    some = tuple(order[: draw(st.integers(1, program.n))])
    inside = ()
    for i in some:
        inside += (Step(i), *draw(zeros(i)))
    named = () if len(some) == program.n and draw(st.booleans()) else some
    made = tuple(draw(backwards(program)) for _ in range(draw(st.integers(0, 2))))
    return (*made, Together(named, inside))


@st.composite
def programs(draw, n, shared):
    program = Program(
        optimizers=tuple(draw(st.sampled_from(sorted(OPTIMIZERS))) for _ in range(n)),
        shared=shared,
        init_scale=2.0 ** draw(st.integers(1, 6)),
        growth_interval=draw(st.integers(1, 3)),
        backoff_on_nonfinite_loss=draw(st.sampled_from((False, False, True))),
    )
    parts = [updates, updates, joints, loose_ends, early_unscales]
    if hasattr(SafeAMP, "all_or_none"):
        parts.append(blocks)
    done = []
    for _ in range(draw(st.integers(3, 8))):
        drawn = [
            draw(draw(st.sampled_from(parts))(program)) for _ in range(draw(st.integers(0, 3)))
        ]
        done.append(tuple(op for part in drawn for op in part))
    done.append(tuple(Step(i) for i in range(n)))  # shows what gradients are left
    return replace(program, batches=tuple(done))


# ---------------------------------------------------------------------- the two are equal


def assert_equal_to_reference(program):
    run, plugin, optimizers = run_under_safe_amp(program)
    reference = Reference(program).run()
    made = [(o.optimizer_idx, o.applied, o.reason, o.scale, o.next_scale) for o in run.outcomes]
    assert made == reference.outcomes
    assert plugin.scaler.get_scale() == reference.scale
    assert plugin.scaler.state_dict()["_growth_tracker"] == reference.tracker
    for i, tally in enumerate(plugin.tallies):
        counts = (tally.attempted, tally.applied, tally.skipped, tally.consecutive_skips)
        assert counts == reference.tally(i)
        assert tally.attempted == tally.applied + tally.skipped
    for net, expected in zip(run.net, reference.nets, strict=True):
        for parameter, exact in zip(net.parameters(), expected, strict=True):
            assert torch.equal(parameter, exact)
    for optimizer, exact in zip(optimizers, reference.optimizers, strict=True):
        assert_same_state(optimizer.state_dict()["state"], exact.state_dict()["state"])


def assert_same_state(state, exact):
    assert state.keys() == exact.keys()
    for i, entries in exact.items():
        assert state[i].keys() == entries.keys()
        assert all(torch.equal(state[i][name], value) for name, value in entries.items())


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "lightning.pytorch")  # five lines from each of many fits


PROGRAMS = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SHAPES = pytest.mark.parametrize(("n", "shared"), [(2, False), (3, False), (2, True)])


@pytest.mark.timeout(300)  # a failure takes its time to shrink
@SHAPES
@settings(PROGRAMS, max_examples=60, derandomize=True)
@given(data=st.data())
def test_program_equals_float32_without_the_skipped_updates(n, shared, data):
    assert_equal_to_reference(data.draw(programs(n, shared)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@SHAPES
@settings(PROGRAMS, max_examples=SOAK)
@given(data=st.data())
def test_many_programs_equal_float32_without_the_skipped_updates(n, shared, data):
    assert_equal_to_reference(data.draw(programs(n, shared)))
