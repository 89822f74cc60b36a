# SPDX-License-Identifier: Apache-2.0
"""What all reports have in common: dictionaries of scalars on one level, and a hash."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_amp_guard import (
    classify_range,
    compare_precisions,
    estimate_memory,
    locate_nonfinite,
    profile_dtypes,
    recommend_precision,
    scan_batch,
)
from lightning_amp_guard.diagnosis.doctor.doctor import examine
from lightning_amp_guard.diagnosis.profile.dtype_report import (
    DtypeReport,
    DtypeRow,
    MissedMatmul,
    PlainFunction,
    RulelessOp,
)
from lightning_amp_guard.monitor import Finding

NAN = float("nan")
X = torch.ones(2, 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def loss(module, batch):
    return module(batch).float().square().mean()


def without_loss(module, batch):
    return (module(batch).float() * 0).sqrt().sum()


def every_part():
    return DtypeReport(
        "16-mixed",
        "cpu",
        1.0,
        0.5,
        (DtypeRow("aten::mm", "float16", 3, 0.25, 0.25),),
        (MissedMatmul("aten::mm", "float32", 2, 0.1, "a.py:1", None, "write `x`"),),
        (RulelessOp("aten::foo", "float16", 1, 0.1, "a.py:2", "net", "it loses bits"),),
        (PlainFunction("Own", "a.py:3"),),
    )


REPORTS = {
    "comparison": lambda: compare_precisions(net(), X, loss_fn=loss, steps=2),
    "comparison that finds something": lambda: compare_precisions(
        net(), X, loss_fn=without_loss, steps=2
    ),
    "comparison of what is not finite": lambda: compare_precisions(
        net(), X * NAN, loss_fn=loss, steps=2
    ),
    "recommendation for what is not finite": lambda: recommend_precision(
        net(), [X * NAN], loss_fn=loss, steps=2, metric_fn=lambda module: NAN
    ),
    "dtypes": lambda: profile_dtypes(net(), X, loss_fn=loss),
    "dtypes with every part": every_part,
    "recommendation": lambda: recommend_precision(net(), [X], loss_fn=loss, steps=2),
    "recommendation with a metric": lambda: recommend_precision(
        net(), [X], loss_fn=loss, steps=2, metric_fn=lambda module: 0.5
    ),
    "finite batch": lambda: scan_batch({"x": X}),
    "bad batch": lambda: scan_batch({"x": X * NAN, "y": NAN}),
    "finite step": lambda: locate_nonfinite(net(), X, loss_fn=loss),
    "fault": lambda: locate_nonfinite(net(), X, loss_fn=without_loss),
    "range": lambda: classify_range([1e-30, 1.0, 1e30]),
    "no values": lambda: classify_range([]),
    "memory": lambda: estimate_memory(1000),
    "memory with a batch": lambda: estimate_memory(net(), batch=X, loss_fn=loss),
    "doctor": examine,
    "finding": lambda: Finding("AMP101", "title", "evidence", "cause", "remedy"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_dictionary_holds_scalars_under_text_and_the_report_can_be_hashed(name):
    report = REPORTS[name]()
    flat = report.to_dict()
    assert len(flat) >= 4
    # the very types: what JSON, a logger or a table takes without asking
    odd = {k: v for k, v in flat.items() if type(v) not in (str, int, float, bool, type(None))}
    assert odd == {}
    assert all(type(key) is str for key in flat)
    assert json.loads(json.dumps(flat, allow_nan=False)).keys() == flat.keys()
    assert isinstance(hash(report), int)


def test_what_is_not_finite_is_none_in_the_dictionary():
    comparison = REPORTS["comparison of what is not finite"]().to_dict()
    assert comparison["32-true/loss"] is comparison["16-mixed/grad_norms/0"] is None
    recommendation = REPORTS["recommendation for what is not finite"]()
    assert recommendation.to_dict()["32-true/metric"] is None
    assert "  100 %" in str(recommendation)  # of the steps are not finite


def test_comparison_names_rungs_and_layers_in_its_keys():
    report = REPORTS["comparison"]()
    flat = report.to_dict()
    for rung in report.rungs:
        assert flat[f"{rung.name}/loss"] == rung.loss
        assert flat[f"{rung.name}/grad_norms/1"] == rung.grad_norms[1]
        assert f"{rung.name}/losses/2" not in flat
    for layer in (report.layers[0], report.layers[-1]):
        for rung, agreement in layer.agreement.items():
            assert flat[f"{layer.name}/{rung}/cosine"] == agreement.cosine
        assert flat[f"{layer.name}/gradient_norm"] == layer.gradient_norm
    assert {"rungs", "layers"}.isdisjoint(flat)


def test_dtype_report_loses_no_part():
    assert (
        every_part().to_dict().items()
        >= {
            "aten::mm/float16/calls": 3,
            "aten::mm/float16/seconds": 0.25,
            "missed_matmuls": 1,
            "missed_matmuls/0/dtype": "float32",
            "missed_matmuls/0/module": None,
            "without_rule": 1,
            "without_rule/0/note": "it loses bits",
            "functions": 1,
            "functions/0/name": "Own",
            "findings": 4,
            "findings/0": "a.py:1: `aten::mm` ran in float32; write `x`.",
        }.items()
    )


def test_equal_comparisons_have_one_hash_and_others_differ():
    report = REPORTS["comparison"]()
    same = replace(report, layers=tuple([replace(layer) for layer in report.layers]))
    assert hash(same) == hash(report)
    first = replace(report.layers[0], agreement={})
    assert replace(report, layers=(first, *report.layers[1:])) != report
