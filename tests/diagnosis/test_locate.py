# SPDX-License-Identifier: Apache-2.0
"""locate_nonfinite names module, operator, direction and line, and blames no healthy model."""

import gc
import json
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_amp_guard.diagnosis.locate.locate import locate_nonfinite
from tests.diagnosis import planted
from tests.diagnosis.planted import FAULTS, HEALTHY, Apply, Case, chain, mean_loss, ones, through

INF, NAN = float("inf"), float("nan")


def locate(case: Case, **kwargs):
    return locate_nonfinite(case.module, case.batch, loss_fn=case.loss_fn, **kwargs)


def culprit(function, x=2.0, **kwargs):
    """The report on a chain whose middle applies `function` to `x / 2`."""
    return locate(through(function, x)(), **kwargs)


# ---------------------------------------------------------------- the tables


def test_the_table_has_more_than_25_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_module_operator_and_direction_of_a_planted_fault(fault):
    report = locate(fault.make(), scale=fault.scale)
    assert report
    found = (report.module, report.direction, report.subject)
    assert found == (fault.module, fault.direction, fault.subject)
    assert report.op in fault.ops


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report_reads_well(fault):
    report = locate(fault.make(), scale=fault.scale)
    text = str(report)
    assert report.cause in text
    assert report.remedy in text
    assert "`" in report.remedy  # the line to write
    assert max(len(line) for line in text.splitlines()) <= 150
    assert len(text.splitlines()) <= 15
    flat = json.loads(json.dumps(report.to_dict()))
    assert all(value is None or isinstance(value, (str, int, float)) for value in flat.values())
    assert flat["found"] is True
    assert flat["module"] == fault.module


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_model_gives_an_empty_report(name):
    report = locate(HEALTHY[name](), scale=2.0**8)
    assert not report, report
    assert str(report) == "Loss and gradients of one step in '16-mixed' at scale 256 are finite."
    assert (report.op, report.kind, report.direction) == (None, "", "")
    assert report.to_dict()["found"] is False


# ---------------------------------------------------------------- what the report says


def test_numbers_of_an_overflowing_exponential():
    report = culprit(lambda x: (x * torch.tensor([1.0, 2.0, 100.0, 100.0])).exp())
    assert (report.dtype, report.shape, report.kind) == ("float32", (2, 4), "inf")
    assert report.finite_share == 0.5  # e and e^2 are finite
    assert report.max_abs == pytest.approx(7.389, abs=0.01)
    assert report.input_max_abs == 100.0
    assert report.inputs == ("float32 (2, 4), 1 to 100",)


def test_source_is_the_users_line():
    def grow(x):
        y = x * 100
        return y.exp()  # the line

    report = culprit(grow)
    line = grow.__code__.co_firstlineno + 2
    assert report.source == f"test_locate.py:{line} in grow: return y.exp()  # the line"


def test_source_of_a_backward_fault_is_the_forward_line():
    def root(x):
        return (x - 1).sqrt()

    report = culprit(root)
    line = root.__code__.co_firstlineno + 1
    assert report.direction == "backward"
    assert report.source == f"test_locate.py:{line} in root: return (x - 1).sqrt()"
    assert report.kernel == "aten.div.Tensor"


def test_scope_tells_nested_autocast():
    def inside(x):
        with torch.autocast("cpu", enabled=False):
            return (x.float() * 0).log()

    assert culprit(inside).scope == "autocast off"
    assert culprit(lambda x: (x * 0).log()).scope == "autocast float16"
    assert culprit(lambda x: (x * 0).log(), precision="bf16-mixed").scope == "autocast bfloat16"
    assert culprit(lambda x: (x * 0).log(), precision="32-true").scope == "autocast off"


def test_scope_within_a_function_of_ones_own():
    assert culprit(planted.ForwardFault.apply).scope == "autocast float16"


class Reciprocal(torch.autograd.Function):
    """In the style without a `ctx` in the forward."""

    @staticmethod
    def forward(x):
        return (x * 0).reciprocal()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return (x * 0).reciprocal()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad


class Inherits(Decorated):
    pass


def test_function_of_any_style_is_named():
    local = type("Local", (Reciprocal,), {"forward": staticmethod(lambda x: (x * 0).reciprocal())})
    for kind in (Reciprocal, Decorated, Inherits, local):
        report = culprit(kind.apply)
        assert (report.module, report.op) == ("culprit", kind.__name__)
        assert report.kernel == "aten.reciprocal.default"


def test_shared_module_is_given_with_all_its_names():
    report = locate(Case(planted.Twice(), ones(), mean_loss))
    assert (report.module, report.also) == ("shared", ("again",))
    assert "(also 'again')" in str(report)


def test_row_that_is_masked_out_whole_is_explained():
    report = locate(planted.attention(3))
    assert "a row of its input is -inf throughout" in report.cause
    assert "torch.finfo(scores.dtype).min" in report.remedy
    assert any("aten.masked_fill.Scalar" in note for note in report.notes)


def test_hand_written_softmax_of_a_masked_row_is_blamed_where_nan_appears():
    def softmax(x):
        x = x.masked_fill(x > 0, -INF)
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)

    assert culprit(softmax).op == "aten.sub.Tensor"


# ---------------------------------------------------------------- causes


def test_overflow_of_the_scale_alone_is_no_fault_and_gives_the_largest_safe_power():
    # loss = mean over 8 values, so d loss / d out = scale / 8 in float16: 2**18 / 8 fits, 2**19 / 8
    # is 65536 and does not
    report = locate(Case(chain(nn.ReLU()), ones(), mean_loss), scale=2.0**30)
    assert "Nothing is wrong" in report.cause
    assert report.remedy.endswith("`SafeAMP(init_scale=2.0**18)`.")


@pytest.mark.parametrize("power", [2.0**18, 2.0**18 - 1, 1.0, 0.5, 3.7])
def test_smaller_scales_are_fine_where_the_largest_safe_power_is_18(power):
    assert not locate(Case(chain(nn.ReLU()), ones(), mean_loss), scale=power)


def test_what_only_float16_cannot_hold_is_the_precisions_fault():
    report = locate(Case(planted.Tied(), ones(), mean_loss))
    assert "in float32 the same step is finite; float16 ends at 65504" in report.cause
    assert report.remedy.endswith('`SafeAMP(fp32_modules=["last"])`.')


def test_gradient_that_no_ordinary_scale_saves_is_the_precisions_fault():
    # d loss / d out = 1e5 / 8 x scale in float16: a scale of 4 is the largest that fits
    case = Case(chain(nn.ReLU()), ones(), lambda m, x: (m(x).float() * 1e5).mean())
    report = locate(case)
    assert report.direction == "backward"
    assert "Nothing is wrong" not in report.cause
    assert "in float32 the same step is finite; float16 ends at 65504" in report.cause


def test_report_without_an_ordinary_scale_is_on_what_fails_at_the_smallest_power():
    class Steep(nn.Module):
        def forward(self, x):
            return x * 1e4

    def loss_fn(module, x):
        return (module(x).float() * 4.0).mean()

    # over one row of 4 the gradient is 1 x scale behind the module and 1e4 x scale before it: finite
    # in float16 at 4, not at 8; at 2**18 it is inf behind the module already
    model = nn.Sequential(OrderedDict(first=planted.linear(1.0), steep=Steep()))
    report = locate(Case(model, torch.ones(1, 4), loss_fn), scale=2.0**18)
    assert (report.module, report.op, report.scale) == ("steep", "aten.mul.Tensor", 8.0)
    assert report.direction == "backward"
    assert "in float32 the same step is finite" in report.cause


class Grows(nn.Module):
    """`grow` leaves float16; so does what comes out of it in float32, where `read` casts it."""

    def __init__(self, again):
        super().__init__()
        self.grow, self.read = planted.linear(300.0), planted.linear(1.0)
        self.again = again

    def forward(self, x):
        x = self.grow(x * 256)
        return (self.read(x) if self.again else x).float() / 1e5


def test_modules_that_have_to_run_in_float32_together_are_named_together():
    # 256 x 300 = 76800 in each element
    alone = locate(Case(Grows(again=False), ones(), mean_loss), scale=1.0)
    assert alone.remedy.endswith('`SafeAMP(fp32_modules=["grow"])`.')
    both = locate(Case(Grows(again=True), ones(), mean_loss), scale=1.0)
    assert both.module == "grow"
    assert both.remedy.endswith('`SafeAMP(fp32_modules=["grow", "read"])`.')


def nesting():
    """How many autocast scopes torch believes to be open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def test_interrupt_within_a_module_in_float32_leaves_no_scope_open():
    scopes = []

    def interrupts(x):
        scopes.append(torch.is_autocast_enabled("cpu"))
        if len(scopes) == 3:  # after float16's and float32's replay: this module alone in float32
            raise KeyboardInterrupt
        return x * 1e6

    case = Case(chain(Apply(interrupts)), ones(), lambda m, x: m(x).float().mean() / 1e6)
    before = nesting()
    with pytest.raises(KeyboardInterrupt):
        locate(case, scale=1.0)
    assert scopes == [True, False, False]
    assert nesting() == before
    assert not torch.is_autocast_enabled("cpu")


def test_every_module_is_named_where_it_cannot_be_told_which_ones_help():
    class Cubed(nn.Module):
        def forward(self, x):
            return x * x * x

    # 1024 cubed in float32 is 2**30; the gradient that goes back to `first` is 3 x 2**20 x 2**10
    # a unit of scale, which its float16 result cannot hold, and the cast is made in `cube`
    model = nn.Sequential(OrderedDict(first=planted.linear(1.0), cube=Cubed()))
    case = Case(model, torch.full((1, 4), 1024.0), lambda m, x: m(x).float().mul(256).sum())
    report = locate(case)
    assert (report.module, report.op) == ("cube", "aten.mul.Tensor")
    assert report.remedy.endswith(
        'give back what can be, in float32: `SafeAMP(fp32_modules=["*"])`.'
    )


def read_by_the_step(module, x):
    return module.grow(x * 256) @ torch.eye(4)  # 76800, which float16 does not hold


def without_differences(module, x):
    y = read_by_the_step(module, x)
    return (y * (1 + 2.0**-12) - y).log().mean()  # bfloat16 has 76800 and 77312, not 76818.75


def without_slopes(module, x):
    y = read_by_the_step(module, x)
    return (y * (1 + 2.0**-12) - y).sqrt().mean()  # zero in bfloat16, with an infinite slope


@pytest.mark.parametrize(
    ("loss_fn", "line"),
    [
        (lambda m, x: read_by_the_step(m, x).mean() / 1e5, 'SafeAMP(precision="bf16-mixed")'),
        (without_differences, 'Trainer(precision="32-true")'),
        (without_slopes, 'Trainer(precision="32-true")'),
    ],
)
def test_another_precision_is_named_where_no_module_in_float32_helps(loss_fn, line):
    report = locate(Case(Grows(again=True), ones(), loss_fn), scale=1.0)
    assert report.module == "grow"
    assert report.remedy.endswith(f"run the whole step otherwise: `{line}`.")


def test_deep_models_run_every_module_in_float32_where_a_list_would_be_long():
    # 256 x 300 = 76800, which all the layers behind hand on
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.grow = planted.linear(300.0)
            self.rest = nn.Sequential(*[planted.linear(1.0) for _ in range(9)])

        def forward(self, x):
            return self.rest(self.grow(x * 256)).float() / 1e5

    report = locate(Case(Deep(), ones(), mean_loss), scale=1.0)
    assert report.module == "grow"
    assert report.remedy.endswith('in float32: `SafeAMP(fp32_modules=["*"])`.')


class Converts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.half() * 6e4

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_module_that_makes_float16_itself_is_not_sent_to_float32(precision):
    report = culprit(Converts.apply, 4.0, precision=precision)
    assert report.cause == "the precision: float16 ends at 65504."
    assert (report.module, report.op) == ("culprit", "Converts")
    assert report.remedy.endswith('`with torch.autocast("cpu", enabled=False): ...`.')


def test_scope_of_the_caller_does_not_reach_the_backward_pass():
    case = through(lambda x: (x - x.roll(1, 0)).square().sqrt())()  # equal rows: a root of zero
    before = locate(case)
    assert (before.module, before.direction) == ("culprit", "backward")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert str(locate(case)) == str(before)


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(lin=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))


def rows():
    return torch.arange(12.0).view(3, 4)


def test_running_statistics_are_not_blamed_for_what_they_only_take_in():
    model = normalized()
    nn.init.constant_(model.lin.weight[0, 0].detach(), INF)
    report = locate(Case(model, rows(), mean_loss))
    assert report.subject == "parameter 'lin.weight'"


def test_running_statistics_that_hold_nan_are_not_blamed_while_they_are_not_read():
    model = normalized()
    model.norm.running_mean.fill_(NAN)  # as a bad batch leaves them
    assert not locate(Case(model, rows(), mean_loss), scale=1.0)
    report = locate(Case(model, rows() / 0, mean_loss))
    assert report.subject == "batch"
    report = locate(Case(model, rows(), lambda m, x: m(x).float().sub(9).log().mean()))
    assert report.op == "aten.log.default"
    model.eval()
    report = locate(Case(model, rows(), mean_loss))
    assert report.subject == "buffer 'norm.running_mean'"


def test_norm_of_a_weight_that_is_zero_is_explained():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    nn.init.zeros_(model.parametrizations.weight.original1)
    report = locate(Case(nn.Sequential(model), ones(), mean_loss))
    assert report.cause.startswith("the formula: it divides by the norm of a weight that is zero")


def test_eps_that_float16_rounds_to_zero_is_told():
    fault = next(f for f in FAULTS if f.name == "cosine similarity of zero")
    assert "rounds what is below 3e-8 to zero" in locate(fault.make()).cause


def test_range_fault_outside_of_modules_gets_a_scope_as_its_remedy():
    report = locate(Case(chain(nn.ReLU()), ones(), lambda m, x: (m(x) * 6e4 * 10).mean()))
    assert report.module == ""
    assert '`with torch.autocast("cpu", enabled=False): ...`' in report.remedy


def test_overflow_is_told_where_the_step_cannot_run_in_float32():
    def needs_half(x):
        return torch.ones(2, 4, dtype=torch.float16) @ x.new_full((4, 4), 3e4)  # 4 x 3e4 > 65504

    report = culprit(needs_half)
    assert report.cause == "the precision: float16 ends at 65504."


def test_mean_over_ignored_targets_is_explained():
    case = Case(
        planted.linear(1.0),
        ones(),
        lambda m, x: nn.functional.cross_entropy(m(x), torch.tensor([-100, -100])),
    )
    assert "every target is ignored" in locate(case).cause


def test_mask_of_the_batch_is_meant():
    def loss_fn(module, batch):
        return (module(batch["x"]) + batch["mask"]).softmax(-1).square().sum()

    partly = {"x": ones(), "mask": torch.tensor([0.0, -INF, 0.0, -INF])}
    assert not locate_nonfinite(chain(nn.ReLU()), partly, loss_fn=loss_fn, scale=1.0)
    wholly = {"x": ones(), "mask": torch.full((4,), -INF)}
    report = locate_nonfinite(chain(nn.ReLU()), wholly, loss_fn=loss_fn, scale=1.0)
    assert report.op == "aten._softmax.default"
    assert report.notes == ("the infinite values were meant: batch['mask']",)


def test_formula_is_to_blame_where_float32_fails_too():
    report = culprit(lambda x: (x - 1).log())
    assert report.cause.startswith("the formula: the logarithm ends at zero")
    assert "in float32, too" in report.cause


def test_formula_of_the_forward_operator_is_told_for_its_backward():
    assert "an infinite slope at zero" in culprit(lambda x: (x - 1).sqrt()).cause


def test_32_true_needs_no_further_replay():
    report = culprit(lambda x: (x - 1).log(), precision="32-true")
    assert report.scale == 1.0
    assert "`x.clamp(min=1e-6).log()`" in report.remedy


def test_data_are_to_blame_for_themselves():
    batch = {"x": ones(), "y": ones(NAN)}
    report = locate_nonfinite(chain(nn.ReLU()), batch, loss_fn=planted.squared)
    assert report.op is None
    assert report.subject == "batch['y']"
    assert "batch['y'] is not finite" in str(report)
    assert "scan_batch(batch)" in report.remedy


def test_unused_field_is_not_blamed():
    batch = {"x": ones(), "y": ones(), "path": ones(NAN)}
    assert not locate_nonfinite(chain(nn.ReLU()), batch, loss_fn=planted.squared, scale=1.0)


def test_plain_tensor_attribute_is_named():
    net = chain(Apply(torch.tanh))
    net.culprit.bias = torch.tensor([NAN])
    net.culprit.function = lambda x: x + net.culprit.bias
    report = locate(Case(net, ones(), mean_loss))
    assert (report.subject, report.module) == ("attribute 'culprit.bias'", "culprit")


# ---------------------------------------------------------------- whose fault: the rule


def test_first_of_two_faults_is_named():
    report = culprit(lambda x: (x * 0).log() + (x * 0).reciprocal())
    assert report.op == "aten.log.default"


def test_fault_that_reaches_nothing_does_not_hide_the_one_that_does():
    def both(x):
        unused = (x * 0).log()
        return torch.where(unused > 0, unused.detach(), x) / (x * 0)

    assert culprit(both).op == "aten.div.Tensor"


def test_harmful_value_wins_over_a_mask_that_was_there_before():
    def both(x):
        masked = x.masked_fill(torch.tensor([True, False, False, False]), -INF)
        return masked.softmax(-1) * (x * 100).exp()

    assert culprit(both).op == "aten.exp.default"


def test_hidden_value_is_named_with_what_read_it_again():
    report = culprit(planted.masked_exp)
    assert report.direction == "backward"
    assert report.op == "aten.exp.default"
    assert any("hidden in the forward pass" in note for note in report.notes)


def test_fault_in_one_branch_of_backward_does_not_blame_the_other():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = planted.linear(1.0), planted.linear(1.0)

        def forward(self, x):
            return self.good(x) + (self.bad(x) - 1).sqrt()

    report = locate(Case(Two(), ones(), mean_loss))
    assert (report.module, report.op) == ("", "aten.sqrt.default")


def test_gradient_hook_on_a_parameter_is_found_by_its_parameter():
    net = chain(nn.ReLU())
    net.body.weight.register_hook(lambda grad: grad / 0)
    report = locate(Case(net, ones(), mean_loss), scale=1.0)
    assert (report.module, report.kernel, report.direction) == (
        "body",
        "aten.div.Tensor",
        "backward",
    )


def test_memory_that_nobody_wrote_is_named_at_its_allocation():
    def forget(x):
        room = torch.empty_like(x)
        room.data.view(-1)[0:0].fill_(0)  # writes nothing
        return x * poisoned(room)

    def poisoned(room):
        torch.from_numpy(room.detach().numpy()).numpy()[...] = NAN  # as a kernel of its own would
        return room

    report = culprit(forget)
    assert report.op == "aten.empty_like.default"
    assert "never written to" in report.cause


def test_out_argument_and_slices_written_in_place_are_followed():
    def slices(x):
        room = torch.zeros(2, 4)
        room[0] = x[0].detach() / 0
        room[1] = x[1].detach()
        return x * room

    assert culprit(slices).op == "aten.div.Tensor"


def test_overwritten_value_is_forgotten():
    def repaired(x):
        room = x.detach() / 0
        room.copy_(torch.ones(2, 4))
        return x * room

    assert not culprit(repaired, scale=1.0)


def test_value_that_was_written_over_is_not_blamed_for_the_next():
    def overwritten(x):
        room = (x.detach() - 1).log()
        room.copy_(x.detach() / 0)
        return x * room

    assert culprit(overwritten).op == "aten.div.Tensor"


def test_mask_is_blamed_last_where_both_reach_the_loss():
    def both(x):
        masked = x.masked_fill(torch.tensor([True, False, False, False]), -INF)
        return masked + (x * 100).exp()

    assert culprit(both).op == "aten.exp.default"


def test_error_of_the_step_does_not_hide_the_finding():
    def strict(x):
        y = (x - 1).log()
        if not torch.isfinite(y).all():
            raise ValueError("loss is not finite")
        return y

    report = culprit(strict)
    assert report.op == "aten.log.default"
    assert any("ValueError: loss is not finite" in note for note in report.notes)


def test_error_of_a_finite_step_is_raised():
    with pytest.raises(RuntimeError, match="shapes"):
        culprit(lambda x: x @ torch.ones(3, 3))


# ---------------------------------------------------------------- kinds of modules


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_module_is_left_alone_with_one_line(in_place):
    net = chain(Apply(lambda x: (x - 1).log()))
    if in_place:
        net.culprit.compile(backend="aot_eager")
    else:
        net = nn.Sequential(OrderedDict(part=torch.compile(net, backend="aot_eager")))
    report = locate(Case(net, ones(2.0), mean_loss))
    assert report.op == "aten.log.default"
    assert report.module == ("culprit" if in_place else "part.culprit")
    assert len(report.notes) == 1
    assert "compiled and left alone" in report.notes[0]


def test_compiled_loss_function_runs():
    loss_fn = torch.compile(lambda m, x: (m(x) - 1).log().mean(), backend="eager")
    net = planted.linear(1.0)
    assert locate_nonfinite(net, ones(), loss_fn=loss_fn).op == "aten.log.default"


def test_modules_on_several_devices_are_left_where_they_are():
    net = chain(Apply(lambda x: (x - 1).log()))
    net.spare = nn.Linear(2, 2, device="meta")
    report = locate(Case(net, ones(2.0), mean_loss))
    assert (report.module, report.op) == ("culprit", "aten.log.default")
    assert net.spare.weight.device.type == "meta"


ON_ANY_DEVICE = ["exp", "log of zero", "sqrt at zero, backward", "scale overflow"]
ON_ANY_DEVICE += ["checkpointed block, backward, reentrant=False", "conv", "NaN in data"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_fault_is_found_on_another_device_and_the_module_stays(name):
    fault = next(fault for fault in FAULTS if fault.name == name)
    case = fault.make()
    report = locate(case, device="cuda", scale=fault.scale)
    assert (report.module, report.direction) == (fault.module, fault.direction)
    assert {p.device.type for p in case.module.parameters()} == {"cpu"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_function_called_in_a_checkpoint_belongs_to_the_module_around_it(reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = planted.linear(1.0)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(
                lambda y: (self.lin(y) - 1).sqrt(), x, use_reentrant=reentrant
            )

    net = nn.Sequential(OrderedDict(body=planted.linear(1.0), block=Block()))
    report = locate(Case(net, ones(), mean_loss))
    assert (report.module, report.op, report.direction) == (
        "block",
        "aten.sqrt.default",
        "backward",
    )


def test_method_other_than_forward_belongs_to_its_module():
    class Coder(nn.Module):
        def encode(self, x):
            return (x - 1).log()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.coder = planted.linear(1.0), Coder()

        def forward(self, x):
            return self.coder.encode(self.lin(x))

    assert locate(Case(Net(), ones(), mean_loss)).module == "coder"


def test_double_backward_is_followed():
    class Penalty(planted.Penalized):
        def training_step(self, batch):
            x = batch.requires_grad_()
            (slope,) = torch.autograd.grad((self.net(x) * 0).sqrt().sum(), x, create_graph=True)
            return slope.float().square().sum()

    report = locate_nonfinite(Penalty(), ones())
    assert (report.op, report.direction) == ("aten.sqrt.default", "forward")


# ---------------------------------------------------------------- arguments, and what is left behind


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN])
def test_bad_scale_is_refused(scale):
    with pytest.raises(ValueError, match="expected a positive finite number"):
        culprit(torch.tanh, scale=scale)


@pytest.mark.parametrize("scale", ["a", None, True])
def test_scale_that_is_no_number_is_refused_by_name(scale):
    with pytest.raises(TypeError, match=f"`scale={scale!r}`: expected a number"):
        culprit(torch.tanh, scale=scale)


def test_unknown_precision_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="'16-mixed', 'bf16-mixed', '32-true'"):
        culprit(torch.tanh, precision="16")


def test_same_step_gives_the_same_report():
    net = chain(nn.Dropout(0.5))
    batch = torch.randn(2, 4)

    def loss_fn(module, x):
        return (module(x).float() / (torch.rand(2, 4) > 0.5)).mean()

    reports = [str(locate_nonfinite(net, batch, loss_fn=loss_fn)) for _ in range(2)]
    assert reports[0] == reports[1]


def test_batch_is_not_changed_by_the_step():
    batch = {"x": ones(), "rest": [ones()]}

    def loss_fn(module, b):
        b["x"].mul_(3)
        b.pop("rest")
        return module(b["x"]).float().mean()

    locate_nonfinite(chain(nn.ReLU()), batch, loss_fn=loss_fn)
    assert batch["x"].eq(1).all()
    assert list(batch) == ["x", "rest"]


@pytest.mark.parametrize("name", ["exp", "sqrt at zero, backward"])
def test_no_tensor_of_the_run_is_kept(name):
    fault = next(f for f in FAULTS if f.name == name)
    case = fault.make()
    seen = []
    for module in case.module:
        module.register_forward_hook(lambda m, i, o: seen.append(weakref.ref(o)))
    report = locate(case)
    gc.collect()
    assert report
    assert seen
    assert [ref for ref in seen if ref() is not None] == []


def test_state_and_hooks_are_as_before():
    net = chain(nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_state = torch.get_rng_state()
    locate_nonfinite(net, ones(), loss_fn=lambda m, x: (m(x) * torch.rand(4)).log().mean())
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_works_under_no_grad_and_inference_mode():
    case = through(lambda x: (x - 1).sqrt())()
    with torch.no_grad():
        assert locate(case).op == "aten.sqrt.default"
    with torch.inference_mode():
        assert locate(case).op == "aten.sqrt.default"
