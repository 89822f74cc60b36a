# SPDX-License-Identifier: Apache-2.0
"""Any order of good, overflowing, NaN-loss and missing micro-batches, against a float32 reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import SafeAMP, SkipReason, StepOutcome, StepTally
from tests.helpers import BAD, GOOD, NAN_LOSS, NONE, Line, ManualLine, fit

pytestmark = pytest.mark.filterwarnings(
    # Lightning says so once per fit; missing losses are what half of these sequences are about.
    "ignore:`training_step` returned `None`:UserWarning"
)

KINDS = {"g": GOOD, "b": BAD, "n": NAN_LOSS, "-": NONE}
# The gradient of batch i: every element, exactly, in float16 too.
GRADIENTS = (1.0, 2.0, 0.5, 4.0, 1.0, 0.25, 2.0, 1.0)
WIDTH, START, LR, INIT_SCALE, GROWTH_INTERVAL = 4, 8.0, 0.5, 2.0**6, 2

SEQUENCES = (
    "bbgggggg",  # calibration at the start, then growth
    "gggggb",  # an overflow in the last, short window
    "gnbggg--",  # a NaN loss and an overflow in one window; a window that ends without a loss
    "-----gb-",  # a window without any loss; an overflow in a window that ends without one
    "nnnnnbgg",  # bad batches leave the scale alone; then an overflow beside a NaN loss
    "g-b-g-g",  # an overflow between missing losses
)


def _drawn(count, seed=20250706):
    draw = random.Random(seed)
    return tuple("".join(draw.choices("ggbn-", k=draw.randint(5, 8))) for _ in range(count))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
}
CLIPS = {
    "no-clip": {},
    "norm": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@dataclass
class Expected:
    """What the rules say, from the plan alone: no scaler, no autocast, no Lightning."""

    outcomes: list[StepOutcome] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)  # after every batch
    tally: StepTally = field(default_factory=StepTally)
    scale: float = INIT_SCALE
    clean: int = 0
    arrivals: int = 0
    average: Any = None
    optimizer: Any = None
    scheduler: Any = None


def reference(sequence, accumulate, make_optimizer, clip):
    """Train float32 weights on the known gradients and leave the skipped updates out."""
    net = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.constant_(net.weight, START)
    want = Expected(average=torch.optim.swa_utils.AveragedModel(net))
    want.optimizer = make_optimizer(net.parameters())
    want.scheduler = make_scheduler(want.optimizer)
    for start in range(0, len(sequence), accumulate):
        window = sequence[start : start + accumulate]
        before = net.weight.detach().clone()
        want.arrivals += 1
        if set(window) != {"-"}:
            terms = [GRADIENTS[start + i] for i, kind in enumerate(window) if kind == "g"]
            take_attempt(want, net, window, sum(terms) / accumulate, clip)
        after = net.weight.detach().clone()
        want.weights += [before] * (len(window) - 1) + [after]
    return want


def take_attempt(want, net, window, gradient, clip):
    scale, reason, norm = want.scale, None, None
    if "n" in window:
        reason = SkipReason.NONFINITE_LOSS
    elif "b" in window:
        reason = SkipReason.NONFINITE_GRADIENTS
        want.scale, want.clean = scale / 2, 0
    else:
        net.weight.grad = torch.full((1, WIDTH), gradient)
        if clip.get("gradient_clip_algorithm") == "norm":
            norm = 2 * gradient  # the root of four equal squares
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip["gradient_clip_val"])
        elif clip:
            net.weight.grad.clamp_(max=clip["gradient_clip_val"])
        want.optimizer.step()
        want.scheduler.step()
        want.average.update_parameters(net)
    passes = len(window) - window.count("-")
    outcome = StepOutcome(
        0, len(want.outcomes), reason is None, reason, scale, want.scale, passes, norm
    )
    want.outcomes.append(outcome)
    want.tally = StepTally(
        len(want.outcomes),
        want.tally.applied + (reason is None),
        want.tally.skipped + (reason is not None),
        0 if reason is None else want.tally.consecutive_skips + 1,
    )
    if reason is None:
        want.clean += 1
        if want.clean == GROWTH_INTERVAL:
            want.scale, want.clean = scale * 2, 0


class Watched(Line):
    """`Line` that keeps its weights after every batch and its optimizer beyond the fit."""

    def __init__(self, sequence, make_optimizer):
        super().__init__([KINDS[k] for k in sequence], make_optimizer, make_scheduler, WIDTH, START)
        self.weights = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.weights.append(self.lin.weight.detach().clone())


class WatchedManual(Watched, ManualLine):
    """The same by hand: windows of `accumulate` batches, the last one short."""

    accumulate, total, clip = 1, 0, None

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if loss is not None:
            self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate and batch_idx + 1 < self.total:
            return
        arrived = self.lin.weight.grad is not None
        if self.clip:
            self.clip_gradients(optimizer, **self.clip)
        optimizer.step()
        optimizer.zero_grad()
        if arrived:
            self.lr_schedulers().step()


def data(sequence):
    rows = torch.tensor(GRADIENTS[: len(sequence)]).repeat_interleave(4)
    return DataLoader(TensorDataset(rows[:, None].expand(-1, WIDTH)), batch_size=4)


def check(model, sequence, want, *, tolerance=0.0, **trainer_kwargs):
    plugin = SafeAMP(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    average = WeightAveraging()
    trainer = fit(model, plugin, data=data(sequence), callbacks=[average], **trainer_kwargs)
    assert model.outcomes == want.outcomes
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(torch.stack(model.weights), torch.stack(want.weights))
    assert plugin.tally == want.tally
    assert plugin.last_outcome == (want.outcomes[-1] if want.outcomes else None)
    assert plugin.scaler.get_scale() == want.scale
    assert plugin.scaler.state_dict()["_growth_tracker"] == want.clean
    assert trainer.global_step == want.arrivals
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.state_dict() == want.scheduler.state_dict()
    assert int(average._average_model.n_averaged) == want.tally.applied
    close(average._average_model.module.lin.weight, want.average.module.weight)
    check_optimizer_state(trainer.optimizers[0], want.optimizer, close)


def check_optimizer_state(optimizer, wanted, close):
    """Entries equal the reference's; where that has none yet, they are at their initial zero."""
    state = optimizer.state_dict()["state"].get(0, {})
    want = wanted.state_dict()["state"].get(0, {})
    assert set(want) <= set(state)
    for name, value in state.items():
        if value is not None:
            initial = want.get(name)
            close(value, torch.zeros_like(value) if initial is None else initial, msg=name)


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_overflow_costs_exactly_its_own_window(make_optimizer, accumulate, clip):
    fused = make_optimizer(Line().parameters()).param_groups[0].get("fused")
    for sequence in (*SEQUENCES, *_drawn(2)):
        want = reference(sequence, accumulate, make_optimizer, clip)
        model = Watched(sequence, make_optimizer)
        # a fused optimizer that clips divides by one combined factor
        tolerance = 1e-6 if fused and clip.get("gradient_clip_algorithm") == "norm" else 0.0
        check(
            model,
            sequence,
            want,
            tolerance=tolerance,
            accumulate_grad_batches=accumulate,
            **clip,
        )


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_manual_windows_follow_the_same_table(name, accumulate, clip):
    for sequence in (*SEQUENCES[:4], *_drawn(1, seed=8)):
        want = reference(sequence, accumulate, OPTIMIZERS[name], clip)
        model = WatchedManual(sequence, OPTIMIZERS[name])
        model.accumulate, model.total, model.clip = accumulate, len(sequence), clip
        check(model, sequence, want)
