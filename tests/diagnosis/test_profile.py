# SPDX-License-Identifier: Apache-2.0
"""profile_dtypes: what every operator computes in, and what autocast does not reach."""

import gc
import inspect
import json
import weakref
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard.diagnosis.profile.dtype_report import DtypeReport
from lightning_amp_guard.diagnosis.profile.profile import _seconds, profile_dtypes
from tests.helpers import Line

HERE = Path(__file__).name
X = torch.ones(4, 8)


def mean_square(module, batch):
    return module(batch).float().square().mean()


def line_of(function, text):
    """Where a piece of a function's source stands, as a report writes it."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{HERE}:{first + offset}"


class Weighted(nn.Module):
    """A module with one weight, whose forward is given as a function of both."""

    def __init__(self, compute):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.compute = compute

    def forward(self, x):
        return self.compute(x, self.weight)


def profiled(compute, batch=X, **kwargs):
    return profile_dtypes(Weighted(compute), batch, loss_fn=mean_square, **kwargs)


def calls(report, op):
    return {row.dtype: row.calls for row in report.rows if row.op == op}


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", "float16"), ("bf16-mixed", "bfloat16"), ("32-true", "float32")],
)
def test_products_are_counted_in_the_dtype_they_ran_in(precision, dtype):
    # forward: one mm; backward: one for the weight, none for the input, which requires no grad
    report = profiled(lambda x, w: x @ w, precision=precision)
    assert calls(report, "aten::mm") == {dtype: 2}
    assert report.precision == precision
    assert report.device == "cpu"
    assert report.missed_matmuls == ()


def test_casts_are_counted_by_both_dtypes():
    # forward: input and weight down, the result up; backward: the reverse of the two with a gradient
    casts = calls(profiled(lambda x, w: x @ w), "aten::_to_copy")
    assert casts == {"float32->float16": 3, "float16->float32": 2}


def test_shares_add_up_to_one():
    report = profiled(lambda x, w: (x @ w).relu())
    assert sum(row.share for row in report.rows) == pytest.approx(1.0)
    assert sum(row.seconds for row in report.rows) == pytest.approx(report.seconds)
    assert 0 < report.cast_share < 1
    casts = sum(row.share for row in report.rows if "->" in row.dtype)
    assert report.cast_share == pytest.approx(casts)
    assert 0 < report.low_precision_share < 1 - report.cast_share


def test_rows_come_with_the_largest_share_first():
    shares = [row.share for row in profiled(lambda x, w: x @ w).rows]
    assert shares == sorted(shares, reverse=True)


def test_one_operator_in_two_dtypes_gives_two_rows():
    # in float32: the two of the forward pass, and the sum of the weight's two gradients
    report = profiled(lambda x, w: (x @ w).float() + 1.0 + (x @ w + 1.0).float())
    assert calls(report, "aten::add") == {"float32": 3, "float16": 1}


def test_a_step_without_casts_spends_no_share_casting():
    report = profiled(lambda x, w: x @ w, precision="32-true")
    assert report.cast_share == 0.0
    assert report.low_precision_share == 0.0
    assert report.findings == ()


class _Event:
    def __init__(self, name, start, micros, parent=None):
        self.name, self.cpu_time_total, self.cpu_parent = name, micros, parent
        self.device_time_total = 10 * micros
        self.time_range = type("Range", (), {"start": start})


def _call(name):
    return type("FakeCall", (), {"name": name})()


def test_the_kth_call_gets_the_kth_event_of_its_name_and_inner_events_none():
    outer = _Event("aten::_to_copy", 0, 5.0)
    inner = _Event("aten::copy_", 1, 2.0, parent=_Event("other", 0, 9.0, parent=outer))
    events = [_Event("aten::copy_", 9, 7.0), outer, inner, _Event("aten::copy_", 4, 3.0)]
    made = [_call("aten::copy_"), _call("aten::_to_copy"), _call("aten::copy_")]
    assert _seconds(made, events, "cpu") == pytest.approx([3e-6, 5e-6, 7e-6])
    assert _seconds(made, events, "cuda") == pytest.approx([3e-5, 5e-5, 7e-5])


def test_where_the_counts_differ_calls_share_the_time_evenly():
    events = [_Event("aten::mm", 0, 5.0), _Event("aten::mm", 2, 7.0), _Event("aten::mm", 4, 6.0)]
    assert _seconds([_call("aten::mm")] * 2, events, "cpu") == pytest.approx([9e-6, 9e-6])
    assert _seconds([_call("aten::mm")], [], "cpu") == [0.0]


# ---------------------------------------------------------------------- products that stay wide


def double(x, w):
    return (x.double() @ w.double()).float()


def switched_off(x, w):
    with torch.autocast("cpu", enabled=False):
        return x @ w


def with_out(x, w):
    out = torch.empty(4, 8)
    torch.mm(x, w.detach(), out=out)
    return out + w.sum()


def in_place(x, w):
    return torch.zeros(4, 8).addmm_(x, w)


@pytest.mark.parametrize(
    ("compute", "text", "op", "dtype", "reason"),
    [
        (double, "double()", "aten::mm", "float64", "convert them with `.float()`"),
        (switched_off, "return x", "aten::mm", "float32", "autocast is off here"),
        (with_out, "torch.mm", "aten::mm.out", "float32", "no in-place or `out=` variant"),
        (in_place, "addmm_", "aten::addmm_", "float32", "no in-place or `out=` variant"),
    ],
)
def test_a_product_that_autocast_missed_comes_with_its_line_and_reason(
    compute, text, op, dtype, reason
):
    [missed] = profiled(compute).missed_matmuls
    assert (missed.op, missed.dtype, missed.calls) == (op, dtype, 1)
    assert missed.source == line_of(compute, text)
    assert missed.module == ""
    assert reason in missed.reason
    assert 0 < missed.share < 1


def test_calls_of_one_line_are_one_finding():
    def three(x, w):
        for _ in range(3):
            x = switched_off(x, w)
        return x

    [missed] = profiled(three).missed_matmuls
    assert missed.calls == 3


def test_the_module_around_a_missed_product_is_named():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.net[0](x)
            return self.net[1](x)

    [missed] = profile_dtypes(Careful(), X, loss_fn=mean_square).missed_matmuls
    assert missed.module == "net.0"
    assert missed.source == line_of(Careful, "self.net[0](x)")
    assert "in 'net.0'" in str(missed)


def test_float32_convolutions_and_attention_are_products_too():
    def attention(x, w):
        with torch.autocast("cpu", enabled=False):
            q = (x @ w).view(1, 1, 4, 8)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    ops = [missed.op for missed in profiled(attention).missed_matmuls]
    assert ops[0] == "aten::mm"
    assert "scaled_dot_product" in ops[1]

    def convolution(x, w):
        with torch.autocast("cpu", enabled=False):
            return torch.conv1d(x[None], w[:4, :4, None])

    assert [m.op for m in profiled(convolution).missed_matmuls] == ["aten::convolution"]


def test_float32_is_no_finding_where_float32_was_asked_for():
    report = profiled(switched_off, precision="32-true")
    assert report.missed_matmuls == ()
    assert report.without_rule == ()


@pytest.mark.parametrize(("reentrant", "times"), [(True, 2), (False, 1)])
def test_a_product_recomputed_by_checkpointing_keeps_its_line(reentrant, times):
    def recomputed(x, w):
        return checkpoint(switched_off, x.requires_grad_(), w, use_reentrant=reentrant)

    # without reentrance torch stops once it has the inputs of the product again
    [missed] = profiled(recomputed).missed_matmuls
    assert missed.source == line_of(switched_off, "return x")
    assert missed.calls == times


# ---------------------------------------------------------------------- Functions


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad.float() @ w.t(), x.t() @ grad.float()


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return 2 * grad


class Casting(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_functions_without_custom_fwd_are_named_and_decorated_ones_are_not():
    report = profiled(lambda x, w: NewStyle.apply(Casting.apply(Decorated.apply(x @ w))))
    [found] = report.functions
    assert found.name == "NewStyle"
    assert found.source == f"{HERE}:{inspect.getsourcelines(NewStyle.forward)[1]}"
    assert "`torch.amp.custom_fwd`" in str(found)


def test_float32_products_of_a_handwritten_backward_are_named():
    report = profiled(Plain.apply)
    assert [found.name for found in report.functions] == ["Plain"]
    [missed] = report.missed_matmuls  # both stand on one line
    assert missed.source == line_of(Plain, "grad.float() @")
    assert "custom_bwd" in missed.reason
    assert missed.calls == 2
    assert calls(report, "aten::mm") == {"float16": 1, "float32": 2}


def test_a_function_hidden_in_a_checkpoint_or_under_no_grad_is_seen():
    def hidden(x, w):
        with torch.no_grad():
            y = NewStyle.apply(x)
            z = Plain.apply(x, w)
        x = checkpoint(lambda a: Other.apply(a) + z, x.requires_grad_(), use_reentrant=True)
        return x + y + w.sum()

    # a Function of the new style has no `ctx` in its forward, and no graph under no_grad
    assert {found.name for found in profiled(hidden).functions} == {"Plain", "Other"}


# ---------------------------------------------------------------------- no rule


@torch.library.custom_op("amp_guard_tests::exp", mutates_args=())
def custom_exp(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


custom_exp.register_autograd(
    lambda ctx, grad: grad * ctx.y,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "y", output),
)


def test_a_custom_operator_in_low_precision_is_a_finding():
    report = profiled(lambda x, w: custom_exp(x @ w))
    [found] = report.without_rule
    assert (found.op, found.dtype, found.calls) == ("amp_guard_tests::exp", "float16", 1)
    assert "register_autocast" in found.note
    assert report.findings[0].startswith(f"{HERE}:")


def test_a_custom_operator_in_float32_is_none():
    assert profiled(lambda x, w: custom_exp(x) @ w).without_rule == ()


def test_operators_that_run_in_what_they_get_are_listed_without_a_finding():
    report = profiled(lambda x, w: torch.relu(x @ w).clone() + 1)
    assert [op.op for op in report.without_rule] == ["aten::relu", "aten::add.Tensor"]
    assert [op.note for op in report.without_rule] == ["", ""]
    assert not any("relu" in finding for finding in report.findings)


def test_operators_of_torchs_float32_list_are_findings_where_the_device_has_no_rule():
    # autocast on the CPU has rules for neither exp nor sum; CUDA's runs both in float32
    report = profiled(lambda x, w: (x @ w).exp().sum())
    noted = {op.op: op.note for op in report.without_rule if op.note}
    assert noted.keys() == {"aten::exp", "aten::sum"}
    assert all("`x.float()`" in note for note in noted.values())


def test_softmax_and_layer_norm_accumulate_in_float32_and_are_no_finding():
    def healthy(x, w):
        return torch.nn.functional.layer_norm(torch.softmax(x @ w, -1), (8,))

    report = profiled(healthy)
    assert {op.op for op in report.without_rule} == {"aten::_softmax", "aten::native_layer_norm"}
    assert [op.note for op in report.without_rule] == ["", ""]


# ---------------------------------------------------------------------- the report


def make_report(**kwargs):
    return DtypeReport("16-mixed", "cpu", 1.0, rows=(), **{"cast_share": 0.0, **kwargs})


def test_many_casts_are_a_finding_above_a_quarter():
    assert make_report(cast_share=0.25).findings == ()
    [finding] = make_report(cast_share=0.26).findings
    assert "26 % of the time" in finding


def test_report_is_frozen_truthy_and_flat():
    report = profiled(switched_off)
    assert report
    with pytest.raises(FrozenInstanceError):
        report.seconds = 0.0
    flat = json.loads(json.dumps(report.to_dict()))
    assert flat["missed_matmuls"] == len(report.missed_matmuls) > 0
    assert flat["missed_matmuls/0/op"] == "aten::mm"
    for row in report.rows:
        assert flat[f"{row.op}/{row.dtype}/calls"] == row.calls
    assert flat["findings"] == len(report.findings)
    assert flat["findings/0"] == report.findings[0]


def test_text_shows_the_head_the_table_and_the_findings():
    report = profiled(switched_off)
    text = str(report).splitlines()
    assert text[0].startswith("16-mixed on cpu: ")
    assert text[1].split() == ["operator", "dtype", "calls", "time"]
    assert text[2].split()[0] == report.rows[0].op
    assert text[-1] == f"- {report.findings[-1]}"
    assert max(len(line) for line in text if not line.startswith("- ")) <= 80
    more = len(report.rows) - 12
    assert (f"... and {more} more" in text) is (more > 0)


# ---------------------------------------------------------------------- the module


def test_a_lightning_module_needs_no_loss_fn():
    model = Line()
    report = profile_dtypes(model, [torch.ones(4, 4)])
    assert calls(report, "aten::mm") == {"float16": 2}
    assert model.lin.weight.grad is None


def test_no_tensor_of_the_run_is_kept():
    seen = []

    def remember(x, w):
        y = x @ w
        seen.extend([weakref.ref(x), weakref.ref(y)])
        return y

    report = profiled(remember)
    gc.collect()
    assert len(seen) == 6
    assert all(ref() is None for ref in seen)
    assert report.rows


def test_modes_are_gone_after_an_error():
    def broken(x, w):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        profiled(broken)
    with pytest.raises(ValueError, match="'16-true'"):
        profiled(double, precision="16-true")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.overrides._get_current_function_mode() is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_profile_may_run_inside_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = profiled(lambda x, w: x @ w)
        assert torch.is_autocast_enabled("cpu")
    assert calls(report, "aten::mm") == {"float16": 2}
