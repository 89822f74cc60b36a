# SPDX-License-Identifier: Apache-2.0
"""Gradient statistics: hand-worked fractions and headroom, and what is logged of them."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_amp_guard import SafeAMP
from lightning_amp_guard.monitor import AmpMonitor
from lightning_amp_guard.monitor.ledger.file import read_ledger
from lightning_amp_guard.monitor.statistics import Aggregates, GradientLook, local_norm, wide
from tests.costs import Ops, PythonCalls, host_reads
from tests.helpers import Line, ManualLine, fit, stock_plugin

CPU = torch.device("cpu")
NAN = math.nan
ZERO, SUBNORMAL, HEADROOM = (
    f"amp/{name}" for name in ("zero_grad_fraction", "subnormal_grad_fraction", "headroom_bits")
)


def looked(grads, scale=1.0, carried=1.0, made=None, layers=()):
    look = GradientLook(grads, scale, carried, made, layers)
    aggregates = Aggregates(CPU)
    values, (stats,) = aggregates.read((NAN, NAN), {}, [look])
    return values, stats


def test_fractions_and_headroom_are_those_of_the_scaled_gradients_in_float16():
    # times 2**10: 2**-26 is zero (below 2**-25, half the smallest), 2**-15 is subnormal, 2**-14 not
    grads = [torch.tensor([0.0, 2.0**-36, 2.0**-25, 2.0**-24]), torch.tensor([1.0, -4.0, 2.0, 3.0])]
    values, stats = looked(grads, scale=2.0**10)
    assert values[ZERO] == 2 / 8
    assert values[SUBNORMAL] == 1 / 8
    assert values[HEADROOM] == math.log2(65504 / (4 * 2.0**10))
    assert (stats.zero, stats.subnormal, stats.normal, stats.overflow) == (2, 1, 5, 0)
    assert (stats.largest, stats.kept) == (4.0, None)
    assert stats.exponents == {-36: 1, -25: 1, -24: 1, 0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize("carried", [1.0, 2.0**10])
def test_gradients_that_still_carry_the_scale_are_shown_by_their_true_values(carried):
    grads = [torch.tensor([2.0**-25, 1.0, 3.0]) * carried]
    values, stats = looked(grads, scale=2.0**10, carried=carried)
    assert (values[SUBNORMAL], values[HEADROOM]) == (1 / 3, math.log2(65504 / (3 * 2.0**10)))
    assert (stats.largest, stats.exponents) == (3.0, {-25: 1, 0: 1, 1: 1})


@pytest.mark.parametrize(
    ("values", "headroom"),
    [
        ([0.0, 0.0], math.inf),
        ([1.0, math.inf], -math.inf),
        ([1.0, -math.inf], -math.inf),
        ([65504.0 * 2], -1.0),
        ([2.0**-100], 100 + math.log2(65504)),
    ],
)
def test_headroom_tells_how_far_off_an_overflow_is(values, headroom):
    found, _ = looked([torch.tensor(values, dtype=torch.float64)])
    assert found[HEADROOM] == headroom


def test_inf_and_nan_are_counted_as_overflow():
    values, stats = looked([torch.tensor([1.0, math.inf, math.nan, 70000.0])])
    assert (stats.normal, stats.overflow, stats.total) == (1, 3, 4)
    assert math.isnan(values[HEADROOM])
    assert (values[ZERO], values[SUBNORMAL]) == (0.0, 0.0)


@pytest.mark.parametrize("grads", [[], [torch.empty(0)]])
def test_no_gradient_has_no_fraction(grads):
    values, stats = looked(grads)
    assert all(math.isnan(values[key]) for key in (ZERO, SUBNORMAL, HEADROOM))
    assert (stats.total, stats.largest, stats.exponents) == (0, 0.0, {})


@pytest.mark.parametrize(
    "grad",
    [
        torch.tensor([3.0, 4.0]).to_sparse(),
        torch.tensor([3.0 + 4.0j]),
        torch.tensor([3.0, 4.0], dtype=torch.float64),
        torch.tensor([3.0, 4.0], dtype=torch.float16),
        torch.tensor([3.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([[3.0], [4.0]]).t(),
    ],
    ids=["sparse", "complex", "double", "half", "bfloat16", "strided"],
)
def test_every_kind_of_gradient_is_counted(grad):
    values, stats = looked([grad], layers=["net"])
    assert (stats.total, stats.largest, stats.exponents) == (2, 4.0, {1: 1, 2: 1})
    assert stats.per_layer == {"net": 5.0}
    assert local_norm([grad]) == 5.0
    assert values[HEADROOM] == math.log2(65504 / 4)


def test_norms_of_a_layers_parameters_are_one_norm():
    grads = [torch.tensor([24.0]), torch.tensor([32.0]), torch.tensor([8.0])]
    _, stats = looked(grads, scale=8.0, carried=8.0, layers=["a", "a", "b"])
    assert stats.per_layer == {"a": 5.0, "b": 1.0}


@pytest.mark.parametrize("carried", [1.0, 8.0])
def test_what_was_kept_of_the_backward_passs_norm(carried):
    # the backward pass made a scaled norm of 5 * 8; half of it is left
    grads = [torch.tensor([1.5, 2.0]) * carried]
    _, stats = looked(grads, scale=8.0, carried=carried, made=torch.tensor(40.0))
    assert stats.kept == 0.5


def test_attempts_of_one_batch_are_added_up_and_the_next_begins_anew():
    aggregates = Aggregates(CPU)
    looks = [
        GradientLook([torch.tensor([0.0, 1.0])], 2.0, 1.0, None),
        GradientLook([torch.tensor([0.0, 0.0, 2.0**-20, 8.0])], 1.0, 1.0, None),
    ]
    values, stats = aggregates.read((3.0, 5.0), {"amp/process_rss_mib": 7.0}, looks)
    assert values == {
        ZERO: 3 / 6,
        SUBNORMAL: 1 / 6,
        HEADROOM: math.log2(65504 / 8),
        "amp/samples_per_s": 3.0,
        "amp/tokens_per_s": 5.0,
        "amp/process_rss_mib": 7.0,
    }
    assert [one.total for one in stats] == [2, 4]
    values, stats = aggregates.read((1.0, 2.0), {"amp/process_rss_mib": 6.0}, [])
    assert math.isnan(values[ZERO])
    assert math.isnan(values[HEADROOM])
    assert values["amp/process_rss_mib"] == 6.0
    assert stats == []


def test_reading_everything_is_one_transfer():
    aggregates = Aggregates(CPU)
    ops, calls = Ops(), PythonCalls()
    with ops:
        calls.start()
        looks = [GradientLook([torch.ones(4), torch.ones(3)], 8.0, 1.0, None, ["a", "b"])] * 2
        aggregates.read((NAN, NAN), {"amp/process_rss_mib": 1.0}, looks)
        calls.stop()
    assert host_reads(ops, calls) == 1


def test_device_without_float64_is_served_in_float32():
    assert wide(torch.device("mps")) is torch.float32
    assert wide(CPU) is torch.float64


# ---------------------------------------------------------------------- in a fit


class Steep(Line):
    """`Line` with a gradient of `slope` for each of its inputs."""

    def __init__(self, slopes, **kwargs):
        super().__init__(width=len(slopes), **kwargs)
        self.register_buffer("slopes", torch.tensor(slopes))

    def training_step(self, batch, batch_idx):
        return (self.lin.weight * self.slopes).sum()


# in float16 times 8: zero, zero (2**-26 rounds to it), subnormal, normal
SLOPES = [0.0, 2.0**-29, 2.0**-20, 2.0]


@pytest.mark.parametrize(
    ("plugin", "scale"),
    [
        (lambda: SafeAMP(init_scale=8.0), 8.0),
        (lambda: stock_plugin(init_scale=8.0), 8.0),
        (lambda: SafeAMP("bf16-mixed"), 1.0),
        (lambda: SafeAMP("bf16-mixed", bf16_guard=False), 1.0),
        (lambda: None, 1.0),
    ],
    ids=["safe", "stock", "safe bf16", "safe bf16 unguarded", "32-true"],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_fit_logs_the_range_of_unclipped_gradients(plugin, scale, clip):
    trainer = fit(
        Steep(SLOPES),
        plugin(),
        2,
        callbacks=[AmpMonitor()],
        log_every_n_steps=2,
        gradient_clip_val=clip,
    )
    metrics = trainer.callback_metrics
    # without a scale 2**-20 is subnormal as well
    assert metrics[ZERO] == 2 / 4
    assert metrics[SUBNORMAL] == 1 / 4
    assert metrics[HEADROOM] == math.log2(65504 / (2 * scale))
    expected = math.sqrt(4 + 2.0**-40 + 2.0**-58)
    assert metrics["amp/grad_norm"].item() == pytest.approx(expected, rel=1e-6)


def test_parameters_without_a_gradient_and_frozen_ones_do_not_count():
    class Partly(Steep):
        def __init__(self):
            super().__init__(SLOPES)
            self.unused = torch.nn.Linear(3, 3)
            self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    trainer = fit(
        Partly(), SafeAMP(init_scale=8.0), 1, callbacks=[AmpMonitor()], log_every_n_steps=1
    )
    assert trainer.callback_metrics[ZERO] == 2 / 4


def test_manual_attempts_of_one_batch_are_taken_together(tmp_path):
    class Twice(ManualLine):
        def training_step(self, batch, batch_idx):
            for factor in (1.0, 2.0**-20):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch) * factor)
                optimizer.step()

    monitor = AmpMonitor(ledger=tmp_path / "run.jsonl")
    plugin = SafeAMP(init_scale=8.0)
    trainer = fit(Twice(), plugin, 2, callbacks=[monitor], log_every_n_steps=2)
    assert trainer.callback_metrics[SUBNORMAL] == 4 / 8
    assert trainer.callback_metrics[HEADROOM] == math.log2(65504 / 8)
    rows = read_ledger(tmp_path / "run.jsonl")
    assert [row.stats and row.stats.largest for row in rows] == [None, None, 1.0, 2.0**-20]


def test_a_step_by_name_of_layer_is_in_the_ledger(tmp_path):
    monitor = AmpMonitor(ledger=tmp_path / "run.jsonl")
    fit(Line(), SafeAMP(init_scale=8.0), 2, callbacks=[monitor], log_every_n_steps=2)
    rows = read_ledger(tmp_path / "run.jsonl")
    assert rows[0].stats is None
    assert rows[1].stats.per_layer == {"lin": 2.0}
