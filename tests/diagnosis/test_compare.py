# SPDX-License-Identifier: Apache-2.0
"""compare_precisions: where low precision computes something else than float32."""

import gc
import json
import math
import sys
import threading
import warnings
import weakref
from dataclasses import FrozenInstanceError

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard.diagnosis.compare.compare import compare_precisions
from lightning_amp_guard.diagnosis.compare.judgement import nonfinite_problems, problems_of
from lightning_amp_guard.diagnosis.compare.layers import (
    Agreement,
    Underflow,
    agreement_of,
    relative_error,
    underflow_of,
)
from lightning_amp_guard.diagnosis.compare.noise import SameNoise
from tests.helpers import PlantedOverflow, make_trainer

NAMES = ["32-true", "bf16-mixed", "16-mixed without scaler", "16-mixed"]
LOW = NAMES[1:]


def mean_square(module, batch):
    return module(batch).float().square().mean()


def compared(module, batch=None, steps=2, **kwargs):
    batch = torch.randn(8, 16) if batch is None else batch
    return compare_precisions(module, batch, steps=steps, **{"loss_fn": mean_square, **kwargs})


def layer(report, name):
    return next(found for found in report.layers if found.name == name)


class Wrapped(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, between, width=16):
        super().__init__()
        self.first = nn.Linear(width, 16)
        self.between = between
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Planted(torch.autograd.Function):
    """Identity whose gradient is multiplied, in one dtype only."""

    @staticmethod
    def forward(ctx, x, factor, dtype):
        ctx.factor, ctx.armed = factor, x.dtype is dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.factor if ctx.armed else grad), None, None


# ---------------------------------------------------------------------- the ladder


def test_ladder_has_four_rungs_with_curves_of_the_steps():
    report = compared(nn.Linear(16, 4), steps=3)
    assert [rung.name for rung in report.rungs] == NAMES
    for rung in report.rungs:
        assert (len(rung.losses), len(rung.grad_norms)) == (3, 3)
        assert (rung.losses[0], rung.grad_norms[0]) == (rung.loss, rung.grad_norm)
        assert rung.losses[2] < rung.losses[1] < rung.losses[0]
    assert report.rung("16-mixed").scale == 2.0**16
    assert report.rung("bf16-mixed").scale == 1.0
    with pytest.raises(KeyError, match="'16-true'"):
        report.rung("16-true")


def test_numbers_of_one_weight_worked_out_by_hand():
    # loss = mean((w x)^2) with w = 3 and x = 2: 36, gradient 2 w x^2 = 24; all exact in each dtype.
    # SGD with lr 0.125: w = 3 - 3 = 0, loss 0
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    report = compared(net, torch.full((2, 1), 2.0), lr=0.125, scale=64.0)
    for rung in report.rungs:
        assert rung.losses == (36.0, 0.0)
        assert rung.grad_norms == (24.0, 0.0)
        assert rung.output_error == 0.0
    [only] = report.layers
    assert only.activation_share == 6 / 65504
    assert only.gradient_norm == 24.0
    assert only.agreement == {name: Agreement(24.0, 1.0, 1.0) for name in LOW}
    assert report.output == ""
    assert report.lr == 0.125


def test_default_learning_rate_moves_no_parameter_by_more_than_a_hundredth():
    # gradients 24 of the weight 3 and 0 of the bias 0, which is left out: 0.01 * 3 / 24
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    report = compared(net, torch.full((2, 1), 2.0))
    assert report.lr == pytest.approx(0.01 * 3 / 24)
    assert report.rung("32-true").losses[1] == pytest.approx(4 * (3 * 0.99) ** 2)


def test_an_optimizer_of_the_callers_makes_the_updates():
    made = []

    def adam(params):
        made.append(torch.optim.Adam(params, lr=0.5))
        return made[-1]

    report = compared(nn.Linear(1, 1, bias=False), torch.ones(2, 1), optimizer=adam)
    assert len(made) == 4
    assert math.isnan(report.lr)
    first, second = report.rung("32-true").losses
    assert second == pytest.approx((abs(math.sqrt(first)) - 0.5) ** 2, rel=1e-4)


def test_an_overflow_under_the_scaler_halves_the_scale_and_counts():
    # gradient 24 at scale 2**16 is 1.6e6; float16 holds it at 2**11: 49152
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    report = compared(net, torch.full((2, 1), 2.0))
    scaled = report.rung("16-mixed")
    assert scaled.scale == 2.0**11
    assert scaled.skipped == 5
    assert scaled.healthy
    assert scaled.grad_norm == 24.0


def test_output_is_the_named_submodules_or_the_last_leafs():
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    assert compared(net).output == "2"
    report = compared(net, output="0")
    assert report.output == "0"
    assert 0 < report.rung("bf16-mixed").output_error < 0.02
    assert report.rung("16-mixed").output_error < report.rung("bf16-mixed").output_error / 4


def test_a_loss_module_is_not_taken_for_the_output():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = nn.Linear(16, 4), nn.MSELoss()

        def forward(self, x):
            return self.loss(self.net(x), torch.zeros(8, 4))

    assert compared(WithLoss(), loss_fn=lambda m, x: m(x)).output == "net"


# ---------------------------------------------------------------------- healthy


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def dead_relu():
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(net[0].bias, -100.0)
    return net


def zero_head():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    nn.init.zeros_(net[1].weight)
    return net


def frozen():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    net[0].requires_grad_(False)
    return net


def batch_norm():
    # the first bias has a gradient of exactly zero in exact arithmetic, and noise in each precision
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def no_grad_part():
    def detached(h):
        with torch.no_grad():
            return h.relu()

    return Wrapped(detached)


HEALTHY = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
    "batch norm": batch_norm,
    "dropout": lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)),
    "dead relu": dead_relu,
    "zero head": zero_head,
    "frozen layer": frozen,
    "no_grad part": no_grad_part,
    "layer norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
    "noise": lambda: Wrapped(lambda h: h + torch.randn_like(h)),
    "checkpointed": lambda: Wrapped(lambda h: checkpoint(torch.tanh, h, use_reentrant=False)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_modules_are_healthy(name):
    report = compared(HEALTHY[name]())
    assert report.healthy, report.verdict
    assert report.verdict.startswith("Healthy: bf16-mixed and 16-mixed (scale ")
    assert all(math.isfinite(loss) for rung in report.rungs for loss in rung.losses)


def test_attention_with_a_key_bias_whose_gradient_is_noise_is_healthy():
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    report = compared(net, torch.randn(2, 6, 16), loss_fn=lambda m, x: m(x).float()[:, 0, 0].sum())
    assert report.healthy, report.verdict


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_and_tied_weights_are_healthy(sparse):
    net = Tied()
    if sparse:
        net = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 4))
    tokens = torch.tensor([[1, 2, 2, 5]])
    report = compared(net, tokens, loss_fn=lambda m, x: m(x).float().square().mean())
    assert report.healthy, report.verdict
    names = {found.name for found in report.layers if found.agreement}
    assert names == ({"0", "1"} if sparse else {"embed"})


def test_zero_gradients_of_a_dead_layer_agree_exactly():
    report = compared(dead_relu())
    dead = layer(report, "0")
    assert dead.gradient_norm == 0.0
    assert dead.agreement == {name: Agreement(0.0, 1.0, 1.0) for name in LOW}
    assert dead.underflow == Underflow(0.0, 0.0, 0)


def test_layers_without_gradient_have_no_agreement():
    report = compared(frozen())
    assert layer(report, "0").agreement == {}
    assert math.isnan(layer(report, "0").gradient_norm)
    assert layer(report, "0").activation_share > 0


def test_dropout_masks_are_equal_in_each_precision():
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    for rung in compared(net).rungs:
        assert rung.output_error < 0.02  # another mask of half the units is off by about 1


def test_noise_drawn_in_low_precision_is_float32s():
    # seventeen normal numbers in a row differ between dtypes, sixteen do not
    report = compared(Wrapped(lambda h: h + 10 * torch.randn(17, dtype=h.dtype)[:16]))
    assert report.rung("16-mixed").output_error < 0.02
    assert report.healthy


def test_an_attempt_that_overflows_is_repeated_with_the_same_noise():
    # loss = mean((2 w)^2) plus noise, gradient 8 w; lr 1 makes w = 3 to -21, its gradient 7 times
    # as large: 24 and 168 at the scale 2^11 are 49152, and 344064, which overflows
    def noisy(module, x):
        return mean_square(module, x) + 100 * torch.rand(())

    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 3.0)
    report = compared(net, torch.full((2, 1), 2.0), loss_fn=noisy, lr=1.0, scale=2.0**11)
    scaled = report.rung("16-mixed")
    assert (scaled.scale, scaled.skipped) == (2.0**11, 3)
    assert scaled.losses == pytest.approx(report.rung("32-true").losses, rel=1e-6)


# ---------------------------------------------------------------------- not healthy


@pytest.mark.parametrize(
    ("dtype", "broken", "advice"),
    [
        (torch.float16, "16-mixed", 'precision="bf16-mixed"'),
        (torch.bfloat16, "bf16-mixed", 'precision="16-mixed"'),
    ],
)
@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_layer_that_is_off_by_more_than_ten_is_named(dtype, broken, advice, factor):
    report = compared(Wrapped(lambda h: Planted.apply(h, factor, dtype)))
    assert not report.healthy
    assert [rung.name for rung in report.rungs if not rung.healthy] in (
        [broken],
        ["16-mixed without scaler", broken],
    )
    assert f"in {broken}, the gradient norm of 'first' is" in report.verdict
    assert f"use `{advice}`, or `SafeAMP(fp32_modules=['first'])`" in report.verdict
    assert layer(report, "first").agreement[broken].ratio == pytest.approx(factor, rel=0.05)
    assert layer(report, "last").agreement[broken].ratio == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("factor", "healthy"), [(9.0, True), (12.0, False), (1 / 12, False)])
def test_tenfold_is_the_bound(factor, healthy):
    report = compared(Wrapped(lambda h: Planted.apply(h, factor, torch.bfloat16)))
    assert report.rung("bf16-mixed").healthy is healthy


def test_a_gradient_turned_around_is_named():
    report = compared(Wrapped(lambda h: Planted.apply(h, -1.0, torch.float16)))
    assert "in 16-mixed, the gradient of 'first' is turned, at cosine -1.00" in report.verdict


def test_an_output_that_is_off_is_told():
    def off(h):
        return h * 3 if h.dtype is torch.float16 else h

    report = compared(Wrapped(off))
    assert any("the output differs" in p.sentence for p in report.rung("16-mixed").problems)


def test_a_forward_overflow_names_operator_and_module():
    class Big(nn.Module):
        def forward(self, x):
            return (x * 1e6).relu() * 1e-6

    report = compared(Wrapped(Big()))
    for name in ("16-mixed", "16-mixed without scaler"):
        assert "mul" in report.rung(name).nonfinite
    assert report.rung("bf16-mixed").healthy
    assert "in 16-mixed, the loss is nan: aten.mul" in report.verdict
    assert "SafeAMP(fp32_modules=['between'])" in report.verdict
    assert report.rung("16-mixed").skipped == 0  # the scale is not to blame


def test_a_backward_fault_names_the_gradients_and_ends_at_scale_one():
    report = compared(Wrapped(lambda h: PlantedOverflow.apply(h, h.dtype is torch.float16)))
    scaled = report.rung("16-mixed")
    assert scaled.scale == 1.0
    assert scaled.nonfinite
    assert "in 16-mixed, the gradient of 'first' is not finite" in report.verdict
    assert math.isnan(layer(report, "first").agreement["16-mixed"].ratio)


def test_a_fault_in_float32_is_told_first():
    report = compared(Wrapped(lambda h: (h - h).log()))
    assert not report.healthy
    assert report.verdict.startswith("Not healthy: already in float32, the loss is")
    assert "log" in report.rung("32-true").nonfinite


def test_underflow_is_the_business_of_the_scaler():
    # activations' gradients of about 2^-27 are 0 in float16, and normal at the scale 2^16
    class Small(nn.Module):
        def forward(self, x):
            return x * 1e-7

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.main = Wrapped(nn.Identity()), nn.Linear(16, 4)
            self.small = Small()

        def forward(self, x):
            return self.small(self.side(x)) + self.main(x)

    report = compared(Two())
    assert report.healthy, report.verdict
    first = layer(report, "side.first")
    assert first.underflow.zero_share > 0.9
    assert 13 <= first.underflow.recover_log2 <= 30
    assert first.agreement["16-mixed without scaler"].ratio < 0.1
    assert first.agreement["16-mixed"].ratio == pytest.approx(1.0, rel=0.1)
    assert "without a scaler, the gradient norm" in report.verdict


def test_a_precision_in_which_the_step_raises_is_told_and_the_others_go_on():
    def lacking(h):
        if h.dtype is torch.float16:
            raise NotImplementedError('"op" not implemented for Half\nmore')
        return h

    report = compared(Wrapped(lacking))
    scaled = report.rung("16-mixed")
    assert (scaled.runs, report.rung("bf16-mixed").runs) == (False, True)
    assert math.isnan(scaled.loss)
    told = 'in 16-mixed, the step raises NotImplementedError: "op" not implemented for Half;'
    assert told in report.verdict
    assert layer(report, "first").agreement.keys() == {"bf16-mixed"}
    assert json.dumps(report.to_dict())
    assert "16-mixed" in str(report)


def test_an_error_in_float32_goes_on_to_the_caller():
    def broken(h):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        compared(Wrapped(broken))


def test_complex_parameters_are_compared():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    report = compared(Spectral())
    assert report.healthy, report.verdict
    assert report.lr > 0


# ---------------------------------------------------------------------- the arithmetic


def test_agreement_worked_out_by_hand():
    # (3, 4) against (4, 3) over two parameters: norms 5, cosine 24 / 25
    pair = [torch.tensor([3.0]), torch.tensor([4.0])]
    other = [torch.tensor([4.0]), torch.tensor([3.0])]
    assert agreement_of(pair, other) == (5.0, 1.0, 0.96)
    assert agreement_of(pair, [2 * x for x in other]) == (5.0, 0.5, 0.96)
    assert agreement_of([torch.full((2,), 3e38)], [torch.full((2,), 1e38)]) == pytest.approx(
        (math.sqrt(2) * 3e38, 3.0, 1.0), rel=1e-6
    )


def test_agreement_divides_by_no_zero():
    zero, one = [torch.zeros(2)], [torch.tensor([1.0, 0.0])]
    assert agreement_of(zero, zero) == (0.0, 1.0, 1.0)
    assert agreement_of(one, zero) == (1.0, math.inf, 0.0)
    assert agreement_of(zero, one) == (0.0, 0.0, 0.0)
    bad = agreement_of([torch.tensor([math.inf, 0.0])], one)
    assert (bad.norm, math.isnan(bad.ratio), math.isnan(bad.cosine)) == (math.inf, True, True)


def test_underflow_worked_out_by_hand():
    # of four non-zero values 2^-30 becomes 0 and 2^-20 subnormal; 2^-30 is normal at 2^16
    values = torch.tensor([0.0, 2.0**-30, 2.0**-20, 0.5, 2.0**-14])
    assert underflow_of([values[:2], values[2:]]) == (0.25, 0.25, 16)
    # 2^15 leaves no room to double: nothing is to be gained; 2^10 leaves 2^5
    assert underflow_of([torch.tensor([2.0**15, 2.0**-30])]) == (0.5, 0.0, 0)
    assert underflow_of([torch.tensor([2.0**10, 2.0**-30])]) == (0.5, 0.0, 5)
    assert underflow_of([]) == underflow_of([torch.zeros(3)]) == (0.0, 0.0, 0)


def test_one_straggler_in_a_thousand_does_not_decide_the_power():
    values = torch.full((2000,), 2.0**-18)
    values[0] = 2.0**-60
    assert underflow_of([values]).recover_log2 == 4
    values[:3] = 2.0**-60
    assert underflow_of([values]).recover_log2 == 33  # 46 would take 2^-18 beyond 65504


def test_relative_error_divides_by_no_zero():
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0.0
    assert relative_error(2 * one, one) == 1.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(one, torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(one, torch.zeros(3)))
    assert math.isnan(relative_error(None, one))


def test_noise_in_a_gradient_that_is_zero_is_no_problem():
    # eps of bfloat16 is 2^-7: below 2^-7 of the whole, growth is rounding
    reference = {"main": 1.0, "bias": 1e-9}
    noisy = {"main": Agreement(1.0, 1.0, 1.0), "bias": Agreement(0.007, 7e6, -0.3)}
    assert problems_of("bf16-mixed", noisy, reference, 0.0) == []
    [grown] = problems_of("16-mixed", noisy, reference, 0.0)
    assert grown.layers == ("bias",)
    lost = {"main": Agreement(1.0, 1.0, 1.0), "bias": Agreement(0.0, 0.0, 0.0)}
    assert problems_of("16-mixed", lost, reference, 0.0) == []
    assert problems_of("16-mixed", lost, {"main": 1.0, "bias": 1e-7}, 0.0)[0].layers == ("bias",)


def test_many_layers_are_counted_and_the_worst_is_first():
    agreements = {f"l{i}": Agreement(1.0, 11.0 + i, 1.0) for i in range(5)}
    [problem] = problems_of("16-mixed", agreements, dict.fromkeys(agreements, 1.0), 0.0)
    assert problem.sentence == (
        "the gradient norms of 'l4', 'l3', 'l2' and 2 more are off, the first is 15 times float32's"
    )


def test_nonfinite_problems_name_the_loss_or_the_layers():
    [loss] = nonfinite_problems(math.inf, {"a": math.nan}, "aten.exp in 'net'", "net")
    assert loss == ("the loss is inf: aten.exp in 'net'", ("net",))
    [grads] = nonfinite_problems(1.0, {"a": math.nan, "b": 1.0, "": math.inf}, "", None)
    assert grads == ("the gradients of 'a', the module itself are not finite", ("a", ""))
    assert nonfinite_problems(1.0, {"a": 1.0}, "", None) == []


# ---------------------------------------------------------------------- equal noise


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "draw",
    [
        lambda dtype: torch.randn(17, dtype=dtype),
        lambda dtype: torch.rand(1000, dtype=dtype),
        lambda dtype: torch.rand_like(torch.ones(1000, dtype=dtype)),
        lambda dtype: torch.randn_like(torch.ones(1000), dtype=dtype),
        lambda dtype: torch.empty(1000, dtype=dtype).normal_(),
        lambda dtype: torch.dropout(torch.ones(1000, dtype=dtype), 0.5, True),
        lambda dtype: torch.bernoulli(torch.full((1000,), 0.5, dtype=dtype)),
    ],
)
def test_random_operators_draw_the_same_in_each_dtype(draw, dtype):
    def drawn(dtype):
        torch.manual_seed(0)
        with SameNoise():
            return draw(dtype)

    low = drawn(dtype)
    assert low.dtype is dtype
    assert torch.equal(low, drawn(torch.float32).to(dtype))


def test_other_operators_and_other_dtypes_are_left_alone():
    torch.manual_seed(0)
    expected = torch.randn(17), torch.randn(17, dtype=torch.float64), torch.randperm(5)
    torch.manual_seed(0)
    with SameNoise():
        found = torch.randn(17), torch.randn(17, dtype=torch.float64), torch.randperm(5)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------------- TF32


def test_float32_products_are_no_tf32_and_the_flags_come_back():
    seen = {}

    def look(h):
        kind = str(h.dtype)
        seen.setdefault(
            kind, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        )
        return h

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        compared(Wrapped(look))
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen["torch.float32"] == ("highest", False)
    assert seen["torch.float16"] == ("medium", True)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("kwargs", "error", "parts"),
    [
        ({"steps": 0}, ValueError, ["`steps=0`", "at least 1"]),
        ({"steps": True}, TypeError, ["`steps=True`", "bool"]),
        ({"steps": 2.0}, TypeError, ["`steps=2.0`", "float"]),
        ({"lr": 0.0}, ValueError, ["`lr=0.0`"]),
        ({"lr": math.nan}, ValueError, ["`lr=nan`"]),
        ({"lr": "small"}, TypeError, ["`lr='small'`"]),
        ({"scale": -1.0}, ValueError, ["`scale=-1.0`"]),
        ({"scale": None}, TypeError, ["`scale=None`"]),
        ({"output": "heads"}, ValueError, ["`output='heads'`", "'0'"]),
        ({"output": "2"}, ValueError, ["`output='2'`", "gave no floating point tensor"]),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, parts):
    class Unused(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    net = Unused(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(error) as caught:
        compared(net, **{"output": None, **kwargs})
    assert all(part in str(caught.value) for part in parts)


def test_a_module_that_cannot_be_copied_is_refused_with_the_attribute():
    net = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    net[1].kept = threading.Lock()
    with pytest.raises(ValueError, match=r"`Sequential` cannot be deep-copied") as caught:
        compared(net)
    assert "the attribute 'kept' of '1' cannot" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_scripted_module_is_refused():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        net = nn.Sequential(torch.jit.script(nn.Linear(16, 4)))
    with pytest.raises(ValueError, match="holds a scripted module"):
        compared(net)


def test_a_kept_tensor_with_a_graph_is_copied_without_it():
    net = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    net[1].kept = {"loss": [net[0].weight * 2]}
    assert compared(net).healthy
    assert net[1].kept["loss"][0].grad_fn is not None


def test_a_weight_normalized_layer_is_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old form keeps a tensor with a graph
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 4))
    report = compared(net)
    assert report.healthy, report.verdict
    assert layer(report, "0").gradient_norm > 0


# ---------------------------------------------------------------------- Lightning


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_lightning_module_with_a_trainer_attached():
    model, batch = Classifier(), {"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 0])}
    data = torch.utils.data.DataLoader([batch], batch_size=None)
    trainer = make_trainer()
    trainer.fit(model, data)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    report = compare_precisions(model, batch, steps=2)
    assert report.healthy, report.verdict
    assert report.output == "net.2"
    assert model.seen == 1
    assert model.trainer is trainer
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_batch_is_not_changed_by_a_step_that_writes_to_it():
    def step(module, batch):
        batch["x"].mul_(0.5)
        return module(batch["x"]).square().mean()

    batch = {"x": torch.ones(4, 16)}
    report = compared(nn.Linear(16, 4), batch, loss_fn=step)
    assert torch.equal(batch["x"], torch.ones(4, 16))
    assert report.healthy


def test_a_compiled_module_is_compared_like_another():
    net = torch.compile(
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), backend="eager"
    )
    report = compared(net)
    assert report.healthy, report.verdict


# ---------------------------------------------------------------------- the report


def test_report_is_frozen_and_its_dict_flat():
    report = compared(nn.Sequential(nn.Linear(16, 4), nn.ReLU()))
    with pytest.raises(FrozenInstanceError):
        report.output = ""
    flat = json.loads(json.dumps(report.to_dict()))
    assert flat["healthy"] is True
    assert [key.removesuffix("/scale") for key in flat if key.endswith("/scale")] == NAMES
    assert flat["32-true/losses/1"] == report.rung("32-true").losses[1]
    assert flat["0/16-mixed/ratio"] == pytest.approx(1.0, rel=0.01)
    assert (flat["0/kind"], flat["1/kind"]) == ("Linear", "ReLU")


def test_text_fits_a_terminal():
    report = compared(nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)]))
    lines = str(report).splitlines()
    assert lines[0] == report.verdict
    assert [line.split("  ")[0] for line in lines[2:6]] == NAMES
    assert len(lines) == 1 + 5 + 1 + 10 + 1
    assert lines[-1] == "... and 2 more layers"
    assert max(map(len, lines[1:])) <= 92


def test_plot_draws_and_saves_without_touching_pyplot(tmp_path):
    pytest.importorskip("matplotlib")
    report = compared(nn.Sequential(nn.Linear(16, 4), nn.ReLU()))
    before = "matplotlib.pyplot" in sys.modules
    figure = report.plot(tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert ("matplotlib.pyplot" in sys.modules) is before
    loss = figure.axes[0]
    assert [line.get_label() for line in loss.lines] == NAMES
    assert list(loss.lines[0].get_ydata()) == list(report.rung("32-true").losses)


def test_plot_of_a_broken_run_draws_what_there_is():
    pytest.importorskip("matplotlib")
    report = compared(Wrapped(lambda h: (h - h).log()))
    assert len(report.plot().axes) == 4


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-amp-guard\[report\]"):
        compared(nn.Linear(16, 4)).plot()


def test_no_tensor_of_the_run_is_kept():
    seen = []

    def remember(h):
        seen.append(weakref.ref(h))
        return h

    report = compared(Wrapped(remember))
    gc.collect()
    assert len(seen) >= 8
    assert all(ref() is None for ref in seen)
    assert report.layers
