# SPDX-License-Identifier: Apache-2.0
"""recommend_precision: the order of the decision, with times and devices made up."""

import gc
import itertools
import json
import math
import weakref
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.recommend import trial
from lightning_amp_guard.diagnosis.recommend.recommend import recommend_precision
from lightning_amp_guard.diagnosis.recommend.trial import Timing, Trial
from tests.helpers import Line, PlantedOverflow

STEPS = 4
ALIKE = (1.0, 1.0, 1.0)


def mean_square(module, batch):
    return module(batch).float().square().mean()


def small():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count=2):
    return [torch.randn(8, 16) for _ in range(count)]


@pytest.fixture
def world(monkeypatch):
    """Sets what the device does natively, and how many seconds a step takes in each precision."""

    def make(native=(True, True), seconds=ALIKE, spread=0.0):
        # two readings a step, one step to warm up beside the first; every other step is slower
        steps = [second * (1.0 + spread * (i % 2)) for second in seconds for i in range(1 + STEPS)]
        readings = itertools.accumulate(itertools.chain([0.0], *[(s, 0.0) for s in steps]))
        monkeypatch.setattr(trial, "clock", lambda: next(readings))
        monkeypatch.setattr(_upstream, "native_low_precision", lambda device: native)

    return make


def recommended(module=None, **kwargs):
    kwargs = {"loss_fn": mean_square, "steps": STEPS, **kwargs}
    return recommend_precision(module or small(), kwargs.pop("data", batches()), **kwargs)


# ---------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("native", "seconds", "expected"),
    [
        ((True, True), (2.0, 1.0, 0.5), "bf16-mixed"),  # float16 is faster, bfloat16 comes first
        ((False, True), (2.0, 1.0, 1.0), "16-mixed"),
        ((False, False), (2.0, 1.0, 1.0), "32-true"),
        ((True, False), (2.0, 4.0, 1.0), "32-true"),  # slower, though it saves memory
        ((True, True), (2.0, 4.0, 1.0), "16-mixed"),
    ],
)
def test_native_and_faster_decide_in_this_order(world, native, seconds, expected):
    world(native, seconds)
    assert recommended().precision == expected


def test_a_cpu_without_native_low_precision_gets_float32_with_the_reason(world):
    world((False, False), (2.0, 1.0, 1.0))
    found = recommended()
    assert found.precision == "32-true"
    assert found.device == "cpu"
    assert found.native == (False, False)
    assert found.reasons == (
        "bf16-mixed: this cpu device has no native arithmetic for it",
        "16-mixed: this cpu device has no native arithmetic for it",
        "32-true: what remains",
    )


def test_differences_within_the_spread_do_not_count(world):
    # medians 1.5 and 1.35, middle halves 1 to 2 and 0.9 to 1.8; nor does memory differ
    world(seconds=(1.0, 0.9, 0.9), spread=1.0)
    # autocast has no rule for a product of elements: all stays in float32
    found = recommended(nn.Linear(16, 1), loss_fn=lambda m, x: (x * m.weight).square().mean())
    assert found.precision == "32-true"
    assert "not faster than float32 beyond the noise (1.11 times as fast)" in found.reasons[0]


def test_less_memory_is_enough_where_time_is_the_same(world):
    world(seconds=ALIKE)
    found = recommended()
    share = found.trial("bf16-mixed").memory / found.trial("32-true").memory
    assert share < 0.9
    assert found.precision == "bf16-mixed"
    assert found.reasons == (f"bf16-mixed: {100 * share:.0f} % of its memory",)


def test_the_gain_is_told_with_its_factor(world):
    world(seconds=(3.0, 2.0, 2.0))
    assert "bf16-mixed: 1.50 times as fast as float32" in recommended().reasons[0]


# ---------------------------------------------------------------------- what speaks against


class Low(nn.Module):
    """A layer whose output is made wrong in one dtype, from its n-th call in that dtype on."""

    def __init__(self, wrong, dtype, first=0):
        super().__init__()
        self.lin, self.calls = nn.Linear(16, 4), 0
        self.wrong, self.dtype, self.first = wrong, dtype, first

    def forward(self, x):
        y = self.lin(x)
        if y.dtype is not self.dtype:
            return y
        self.calls += 1
        return self.wrong(y) if self.calls > self.first else y


def test_a_fault_that_compare_precisions_finds_rules_a_precision_out(world):
    world(seconds=(2.0, 1.0, 1.0))
    found = recommended(Low(lambda y: y * 100, torch.bfloat16))
    assert found.precision == "16-mixed"
    assert found.reasons[0].startswith("bf16-mixed: the gradient norm of 'lin' is")


def test_a_precision_that_is_often_not_finite_is_ruled_out(world):
    world(seconds=(2.0, 1.0, 1.0))
    bad = Low(lambda y: PlantedOverflow.apply(y, True), torch.bfloat16, first=2)
    found = recommended(bad)
    assert found.trial("bf16-mixed").nonfinite_rate == 0.5  # two of four
    assert found.reasons[0] == "bf16-mixed: 50 % of the steps are not finite"
    assert len(found.trial("bf16-mixed").losses) == 2
    assert found.precision == "16-mixed"


def test_a_precision_in_which_the_step_raises_is_left_out(world):
    def lacking(y):
        raise NotImplementedError("not in bfloat16")

    world(seconds=(2.0, 1.0, 1.0))
    found = recommended(Low(lacking, torch.bfloat16))
    assert found.precision == "16-mixed"
    assert found.reasons[0] == ("bf16-mixed: the step raises NotImplementedError: not in bfloat16")
    assert [t.precision for t in found.trials] == ["32-true", "16-mixed"]
    assert len(str(found).splitlines()) == 7


def test_a_loss_that_drifts_rules_a_precision_out(world):
    world(seconds=(2.0, 1.0, 1.0))
    found = recommended(Low(lambda y: y * 1.2, torch.bfloat16, first=2))
    assert "bf16-mixed: the loss drifts" in found.reasons[0]
    assert found.drift("bf16-mixed") > 0.05 > found.drift("16-mixed")


def test_a_lower_metric_rules_a_precision_out(world):
    world(seconds=(2.0, 1.0, 1.0))
    values = iter([0.9, 0.8, 0.895])
    found = recommended(metric_fn=lambda module: next(values))
    assert found.precision == "16-mixed"  # 0.895 is within 1 % of 0.9
    assert found.reasons[0] == "bf16-mixed: the metric is 0.8, float32's 0.9"
    assert [t.metric for t in found.trials] == [0.9, 0.8, 0.895]


def test_a_nan_metric_rules_a_precision_out(world):
    world(seconds=(2.0, 1.0, 1.0))
    values = iter([0.9, math.nan, 0.9])
    assert recommended(metric_fn=lambda module: next(values)).precision == "16-mixed"


def test_a_model_that_fails_in_float32_is_to_be_mended_first(world):
    world(seconds=(2.0, 1.0, 1.0))
    found = recommended(loss_fn=lambda m, x: (m(x) * 0).log().sum())
    assert found.precision == "32-true"
    [reason] = found.reasons
    assert reason.startswith("float32 itself is not healthy: the loss is ")


# ---------------------------------------------------------------------- the trials


def test_trials_train_copies_alike(world):
    world()
    found = recommended(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    assert [t.precision for t in found.trials] == ["32-true", "bf16-mixed", "16-mixed"]
    base, _, scaled = found.trials
    assert len(base.losses) == STEPS
    assert scaled.losses == pytest.approx(base.losses, rel=0.02)
    assert found.drift("32-true") == 0.0


def test_the_metric_sees_the_trained_copy_in_eval_mode_without_gradients(world):
    world()
    net, seen = small(), []

    def metric(module):
        out = module(torch.ones(1, 16))
        seen.append((module is net, module.training, torch.is_grad_enabled(), out.dtype))
        assert not torch.equal(module[0].weight, net[0].weight)
        return torch.tensor(1.0)

    recommended(net, metric_fn=metric)
    assert net.training
    assert seen == [
        (False, False, False, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]


def test_memory_is_what_a_forward_pass_saves():
    # input 8 x 16 and ReLU's output 8 x 16 in 4 bytes; in low precision both in 2, and the cast
    # of the weight that the input's gradient needs: none for the first layer, 16 x 4 for the last
    found = recommended(nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)))
    saved = {t.precision: t.memory for t in found.trials}
    output = 8 * 4 * 4  # the mean's input, squared in float32
    assert saved["32-true"] == 2 * 8 * 16 * 4 + output
    assert saved["bf16-mixed"] == 2 * 8 * 16 * 2 + 16 * 4 * 2 + output
    assert found.memory_kind == "saved for backward by one forward pass"


def test_overflows_after_the_calibration_count_as_not_finite(world):
    world()
    net = nn.Linear(16, 4)
    data = [torch.ones(8, 16), 64 * torch.ones(8, 16)]
    scaled = recommended(net, data=data, lr=1e-6).trial("16-mixed")
    assert 0 < scaled.nonfinite_rate < 1
    assert scaled.scale < 2.0**16
    assert len(scaled.losses) == STEPS  # an overflow repeats its batch


def test_batches_are_taken_in_turn_and_a_loader_is_not_exhausted(world):
    world()
    given = []

    def endless():
        for i in itertools.count():
            given.append(i)
            yield torch.ones(8, 16)

    recommended(data=endless())
    assert len(given) == STEPS


def test_a_lightning_module_needs_no_loss_fn(world):
    world(seconds=(2.0, 1.0, 1.0))
    model = Line()
    found = recommend_precision(model, [[torch.ones(4, 4)]], steps=STEPS)
    assert found.precision == "bf16-mixed"
    assert model.weight == 8.0


# ---------------------------------------------------------------------- the arithmetic


def test_timing_gives_quartiles_worked_out_by_hand():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == (1.0, 2.0, 3.0, 4.0)
    assert Timing.of([7.0]) == (7.0, 7.0, 7.0, 7.0)


@pytest.mark.parametrize(("high", "faster"), [(1.9, True), (2.0, False), (2.5, False)])
def test_faster_means_that_the_middle_halves_do_not_overlap(high, faster):
    assert Timing(1.0, 1.0, 1.5, high).beats(Timing(1.0, 2.0, 2.5, 3.0)) is faster


def test_drift_worked_out_by_hand():
    base = Trial("32-true", Timing.of([1.0]), 1, 0.0, (8.0, 6.0, 4.0, 2.0), 1.0, None)
    # second halves 4, 2 and 5, 3: means 3 and 4, of the largest loss 8
    assert replace(base, losses=(8.0, 6.0, 5.0, 3.0)).drift_from(base) == 1 / 8
    assert math.isnan(replace(base, losses=()).drift_from(base))
    zero = replace(base, losses=(0.0, 0.0))
    assert zero.drift_from(zero) == 0.0


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("kwargs", "error", "part"),
    [
        ({"data": []}, ValueError, "`batches` is empty"),
        ({"data": torch.ones(4, 16)}, TypeError, "write `recommend_precision(module, [batch])`"),
        ({"data": {"x": torch.ones(4, 16)}}, TypeError, "`batches` is a `dict`"),
        ({"data": 3}, TypeError, "`batches` is a `int`"),
        ({"steps": 1}, ValueError, "`steps=1`: expected at least 2"),
        ({"lr": -1.0}, ValueError, "`lr=-1.0`"),
        ({"scale": math.inf}, ValueError, "`scale=inf`"),
        ({"metric_fn": lambda m: "good"}, TypeError, "`metric_fn` returned 'good'"),
        ({"metric_fn": lambda m: torch.ones(2)}, TypeError, "Expected one number"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, part):
    with pytest.raises(error) as caught:
        recommended(**kwargs)
    assert part in str(caught.value)


# ---------------------------------------------------------------------- the report


def test_report_is_frozen_and_its_dict_flat(world):
    world((False, True), (2.0, 1.0, 1.0))
    found = recommended(metric_fn=lambda m: 0.5)
    with pytest.raises(FrozenInstanceError):
        found.precision = ""
    with pytest.raises(KeyError, match="'16-true'"):
        found.trial("16-true")
    flat = json.loads(json.dumps(found.to_dict()))
    assert flat["precision"] == "16-mixed"
    assert (flat["native_bf16"], flat["native_fp16"]) == (False, True)
    assert flat["16-mixed/median"] == 1.0
    assert flat["32-true/metric"] == 0.5
    assert (flat["reasons/0"], "reasons" in flat) == (found.reasons[0], False)


@pytest.mark.parametrize("metric", [None, lambda m: 0.5])
def test_text_gives_the_precision_the_reasons_and_a_table(world, metric):
    world((False, True), (2.0, 1.0, 1.0), spread=0.5)
    found = recommended(metric_fn=metric)
    lines = str(found).splitlines()
    assert lines[0] == "16-mixed on cpu"
    assert lines[1:3] == [f"- {reason}" for reason in found.reasons]
    assert ("metric" in lines[3]) is (metric is not None)
    assert [line.split()[0] for line in lines[4:7]] == ["32-true", "bf16-mixed", "16-mixed"]
    # steps of 2 and 3 seconds in turn
    assert "2.5e+03 (2e+03 to 3e+03)" in lines[4]
    assert max(map(len, lines)) <= 100


def test_no_tensor_of_the_run_is_kept(world):
    world()
    seen = []

    def step(module, batch):
        loss = mean_square(module, batch)
        seen.append(weakref.ref(loss))
        return loss

    found = recommended(loss_fn=step)
    gc.collect()
    assert seen
    assert all(ref() is None for ref in seen)
    assert found.trials
