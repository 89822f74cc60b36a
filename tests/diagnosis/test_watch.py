# SPDX-License-Identifier: Apache-2.0
"""The watch names the module, changes nothing, keeps nothing, and reads only when asked."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_amp_guard.diagnosis.watch.culprit import Culprit
from lightning_amp_guard.diagnosis.watch.watch import NonFiniteWatch
from tests.diagnosis.planted import FAULTS, HEALTHY

INF, NAN = float("inf"), float("nan")
# the compiler's first import, and scripting, warn of their own future
uses_jit = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class SpoiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.value, None


def spoil(x):
    return SpoiledBackward.apply(x, NAN)


def layer(value=1.0):
    made = nn.Linear(2, 2, bias=False)
    nn.init.eye_(made.weight)
    with torch.no_grad():
        made.weight.mul_(value)
    return made


def net(culprit, **more):
    return nn.Sequential(OrderedDict(body=layer(), culprit=culprit, **more, head=layer()))


def watched(model, *inputs, loss=None, scale=1.0, backward=True):
    """The culprit of one step, with the hooks gone again."""
    watch = NonFiniteWatch(model).install()
    out = (loss or (lambda m, *x: m(*x).float().sum()))(model, *inputs)
    watch.see_loss(out)
    if backward:
        (out * scale).backward()
    found = watch.culprit()
    watch.remove()
    return found


def ones():
    return torch.ones(1, 2)


# ---------------------------------------------------------------------- the table of faults


@pytest.mark.parametrize("row", [r for r in FAULTS if r.persists], ids=lambda row: row.name)
def test_module_of_each_planted_fault_is_named(row):
    case = row.make()
    watch = NonFiniteWatch(case.module).install()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = case.loss_fn(case.module, case.batch)
    watch.see_loss(loss)
    (loss * row.scale).backward()
    found = watch.culprit()
    watch.remove()
    assert (found.module, found.direction) == (row.module, row.direction)
    assert repr(row.module) in str(found)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_step_has_no_culprit(name):
    case = HEALTHY[name]()
    watch = NonFiniteWatch(case.module).install()
    with torch.autocast("cpu", dtype=torch.float16):
        run = case.loss_fn or (lambda module, batch: module.training_step(batch))
        loss = run(case.module, case.batch)
    watch.see_loss(loss)
    (loss * 16.0).backward()
    assert watch.culprit() is None
    watch.remove()


class Squashed(nn.Module):
    """A sum that leaves float16, a layer that reads it, and a `tanh` that hides it from the loss."""

    def __init__(self):
        super().__init__()
        self.pool, self.head = Apply(lambda x: x.sum(-1, keepdim=True)), nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.pool(x)).tanh()


def half_loss(model, x):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(x).float().mean()


def test_gradient_of_what_the_forward_pass_had_hidden_is_blamed_on_the_forward_pass():
    # 2 x 40000 is inf in float16; the gradient of the weight is 0 times that
    model, x = Squashed(), torch.full((1, 2), 40000.0, dtype=torch.float16)
    found = watched(model, x, loss=half_loss)
    assert (found.module, found.direction, found.what) == ("pool", "forward", "inf")
    # in float32 the sum is finite, and the layer behind it makes inf of it
    assert watched(model, x.float(), loss=half_loss).module == "head"


# ---------------------------------------------------------------------- numbers


def test_numbers_of_a_forward_fault_are_those_of_the_output():
    x = torch.tensor([[3.0, -7.0]])
    found = watched(net(Apply(lambda x: x * torch.tensor([2.0, INF]))), x)
    assert found.module == "culprit"
    assert found.kind == "Apply"
    assert found.dtype is torch.float32
    assert (found.max_abs, found.max_abs_in, found.finite_share) == (6.0, 7.0, 0.5)
    assert found.what == "inf"
    assert str(found) == (
        "the module 'culprit' (Apply) returned inf (float32, 50 % finite, largest finite |x| 6),"
        " although its inputs were finite (largest |x| 7)."
    )


def under(dtype):
    """A loss function whose module runs under autocast to `dtype`, or with autocast off."""

    def loss(model, x):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return model(x).float().sum()

    return loss


@pytest.mark.parametrize(
    ("dtype", "computes_in", "path", "said", "unsaid", "ending"),
    [
        (
            torch.float16,
            torch.float16,
            "culprit",
            "65504",
            "already",
            'SafeAMP(fp32_modules=["x"])',
        ),
        (
            torch.bfloat16,
            torch.bfloat16,
            "culprit",
            "8 bits",
            "65504",
            'SafeAMP(fp32_modules=["x"])',
        ),
        (None, torch.float32, None, "in float32 already", "65504", "x.clamp(min=1e-6)"),
    ],
)
def test_float32_is_advised_only_where_it_is_not_there_yet(
    dtype, computes_in, path, said, unsaid, ending
):
    found = watched(net(Apply(lambda x: (x - x) / (x - x))), ones(), loss=under(dtype))
    assert (found.module, found.computes_in, found.path) == ("culprit", computes_in, path)
    text = found.remedy_by('SafeAMP(fp32_modules=["x"])')
    assert said in text
    assert unsaid not in text
    assert text.endswith(f"`{ending}`.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_module_that_converts_by_itself_is_not_sent_to_float32_where_it_runs(dtype):
    model = net(Apply(lambda x: x.to(dtype) / 0))
    found = watched(model, ones(), loss=lambda m, x: m[:2](x).float().sum())
    assert (found.module, found.computes_in, found.path) == ("culprit", torch.float32, None)
    assert f"converts to {str(dtype)[6:]}" in found.remedy
    assert found.remedy.endswith("Leave the conversion out: `x.float()`.")
    # so it is where autocast runs the module in the other half precision
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    found = watched(model, ones(), loss=under(other))
    assert (found.module, found.computes_in, found.path) == ("culprit", other, None)
    # where half precision comes in, float32 may help, since it casts what comes in
    found = watched(model, ones(), loss=lambda m, x: m.culprit(m.body(x).to(dtype)).float().sum())
    assert (found.module, found.computes_in, found.path) == ("culprit", dtype, "culprit")


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_mean_over_targets_that_are_all_ignored_is_told_as_such(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.crit = layer(), kind()

        def forward(self, x):
            return self.crit(self.lin(x).float(), torch.tensor([-100]))

    found = watched(Model(), ones(), loss=under(torch.float16))
    assert (found.module, found.path) == ("crit", None)
    assert "Most likely every target is to be ignored" in found.remedy
    assert found.remedy.endswith("(y != -100).sum().clamp(min=1)`.")


def test_module_that_is_called_under_autocast_and_without_may_be_helped_by_float32():
    model = net(Apply(lambda x: x / 0))

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            model.culprit(x * 0 + 1)
        return model(x).sum()

    assert watched(model, ones(), loss=loss).path == "culprit"


def test_nan_in_a_buffer_is_told_and_a_mask_of_inf_is_not():
    class Shifted(nn.Module):
        def __init__(self, value, extra):
            super().__init__()
            self.register_buffer("shift", torch.tensor([0.0, value]))
            self.register_buffer("mask", torch.tensor([0.0, -INF]))
            self.factor = extra

        def forward(self, x):
            return (x + self.shift) * self.factor

    found = watched(net(Shifted(NAN, 1.0)), ones())
    assert (found.module, found.buffers, found.path) == ("culprit", ("shift",), None)
    assert "its own buffers 'shift' hold NaN" in str(found)
    assert found.remedy.startswith("Expected finite weights.")
    assert found.remedy.endswith('`trainer.fit(model, ckpt_path="last-good.ckpt")`.')
    assert watched(net(Shifted(0.0, NAN)), ones()).buffers == ()


def test_statistics_of_batch_normalization_are_no_cause_while_it_trains():
    model = net(nn.BatchNorm1d(2))
    model.culprit.running_mean.fill_(NAN)
    nn.init.constant_(model.culprit.weight, 3e38)
    x = torch.tensor([[1.0, -1.0], [-9.0, 4.0], [0.0, 0.0]])
    assert watched(model, x, loss=lambda m, x: (m(x) * 4).sum()).buffers == ()
    model.culprit.eval()
    assert watched(model, x).buffers == ("running_mean",)


@pytest.mark.parametrize(
    ("values", "what"),
    [((1.0, INF), "inf"), ((1.0, -INF), "inf"), ((1.0, NAN), "nan"), ((INF, NAN), "inf and nan")],
)
def test_inf_and_nan_are_told_apart(values, what):
    found = watched(net(Apply(lambda x: x * torch.tensor(values))), ones())
    assert found.what == what


def test_numbers_of_a_backward_fault_carry_the_scale():
    model = net(Apply(lambda x: SpoiledBackward.apply(x, torch.tensor([1.0, INF]))))
    found = watched(model, ones(), scale=8.0)
    assert (found.module, found.direction, found.what) == ("culprit", "backward", "inf")
    # sum(head(x)) has the gradient 1, times 8
    assert (found.max_abs_in, found.max_abs, found.finite_share) == (8.0, 8.0, 0.5)
    assert found.operator == "SpoiledBackwardBackward"
    assert "of a finite gradient (largest |x| 8)" in str(found)


def test_float16_overflow_is_named_with_its_dtype():
    with torch.autocast("cpu", dtype=torch.float16):
        found = watched(net(layer(6e4)), ones() * 4)
    assert (found.module, found.kind, found.dtype) == ("culprit", "Linear", torch.float16)
    assert found.max_abs_in == 4.0


def test_huge_float64_values_count_as_finite():
    model = nn.Sequential(layer().double(), Apply(lambda x: x * 1e200), Apply(lambda x: x * INF))
    found = watched(model, torch.full((1, 2), 1e100, dtype=torch.float64), backward=False)
    assert found.module == "2"


def test_one_nan_among_many_is_found():
    # more elements than float32 can count one by one
    size = 2**24 + 2
    found = watched(
        nn.Sequential(Apply(lambda x: torch.cat((x.half().expand(size), x.half() * NAN)))),
        torch.ones(1, requires_grad=True),
        backward=False,
    )
    assert found.what == "nan"


# ---------------------------------------------------------------------- forward


def test_the_innermost_module_is_named():
    model = nn.Sequential(nn.Sequential(nn.Sequential(Apply(torch.exp))))
    assert watched(model, (ones() * 1000).requires_grad_()).module == "0.0.0"


def test_functional_fault_belongs_to_the_module_around_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = layer(), layer()

        def forward(self, x):
            return self.last((self.first(x) * 1000).exp())

    assert watched(nn.Sequential(Outer()), ones()).module == "0"


def test_fault_outside_of_modules_belongs_to_the_step():
    found = watched(net(nn.ReLU()), ones(), loss=lambda m, x: (m(x) * 0).log().sum())
    assert (found.module, found.direction, found.path) == ("", "forward", None)
    assert "the step of Sequential, outside of any submodule" in str(found)


def test_shared_module_called_twice():
    model = net(layer(1e20))
    found = watched(model, ones(), loss=lambda m, x: m.culprit(m.culprit(x)).sum())
    assert (found.module, found.max_abs_in) == ("culprit", pytest.approx(1e20))


@dataclass
class Output:
    name: str
    logits: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x.detach().long(), x),
        lambda x: {"a": None, "b": [x]},
        lambda x: Output("name", x),
        lambda x: [({"deep": (x,)},)],
    ],
)
def test_nested_outputs_are_looked_into(wrap):
    class Wraps(nn.Module):
        def forward(self, x):
            return wrap(x * INF)

    def loss(model, x):
        model.culprit(model.body(x))
        return model.head(x).sum()

    watch = NonFiniteWatch(model := net(Wraps())).install()
    loss(model, ones())
    assert watch.culprit().module == "culprit"


def test_modules_without_tensors_are_fine():
    class Words(nn.Module):
        def forward(self, x):
            return "word", None, torch.tensor(3), torch.ones(0)

    model = net(Apply(lambda x: x), words=Words())
    assert watched(model, ones(), loss=lambda m, x: (m.words("a"), m.body(x).sum())[1]) is None


def test_own_nonfinite_parameters_are_named():
    model = net(layer())
    with torch.no_grad():
        model.culprit.weight[0, 0] = NAN
    found = watched(model, ones())
    assert (found.module, found.parameters) == ("culprit", ("weight",))
    assert "its own parameters 'weight' hold inf or NaN" in str(found)


def masked_attention(x, mask):
    return (x @ x.transpose(-1, -2) + mask).softmax(-1) @ x


class Attends(nn.Module):
    def forward(self, x, mask):
        return masked_attention(x, mask)


@pytest.mark.parametrize("blocked", [1, 2])
def test_minus_inf_in_a_mask_is_a_fault_only_where_it_makes_one(blocked):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.attend, self.later = Apply(self.make), Attends(), layer()

        def make(self, n):
            mask = torch.zeros(2, 2)
            mask[0, :n] = -INF
            return mask

        def forward(self, x):
            return self.later(self.attend(x, self.mask(blocked)))

    found = watched(Model(), torch.ones(1, 2, 2))
    if blocked == 1:
        assert found is None
    else:
        assert (found.module, found.masked) == ("attend", True)
        assert "nothing worse than -inf" in str(found)


def test_mask_maker_is_not_blamed_for_a_fault_elsewhere():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = Apply(lambda n: torch.full((n, n), -INF).triu(1))
            self.attend, self.culprit = Attends(), Apply(lambda x: x * INF)

        def forward(self, x):
            return self.culprit(self.attend(x, self.mask(2)))

    assert watched(Model(), torch.ones(1, 2, 2, requires_grad=True)).module == "culprit"


def test_overflow_to_minus_inf_is_a_fault_of_the_one_that_made_it():
    found = watched(net(layer(-3e38), norm=nn.LayerNorm(2)), ones() * 2)
    assert found.module == "culprit"


def test_inf_that_the_module_around_heals_is_no_fault():
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Apply(lambda x: x * INF)

        def forward(self, x):
            return self.inner(x).clamp(max=1.0)

    later = Apply(lambda x: x * NAN)
    model = nn.Sequential(OrderedDict(clamps=Clamps(), culprit=later))
    assert watched(model, ones().requires_grad_()).module == "culprit"


# ---------------------------------------------------------------------- backward


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_fault_before_an_activation(inplace):
    found = watched(net(Apply(spoil), act=nn.ReLU(inplace=inplace)), ones())
    assert (found.module, found.direction, found.what) == ("culprit", "backward", "nan")


def test_first_layer_whose_input_needs_no_gradient():
    class First(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, spoil(self.weight))

    model = nn.Sequential(OrderedDict(culprit=First(2, 2), head=layer()))
    assert watched(model, ones()).module == "culprit"


def test_modules_that_share_an_input_are_told_apart():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.culprit, self.right = layer(), Apply(spoil), layer()

        def forward(self, x):
            return self.left(x) + self.culprit(x) + self.right(x) + x

    assert watched(nn.Sequential(layer(), Branches()), ones()).module == "1.culprit"


def test_functional_backward_fault_between_modules_belongs_to_the_module_around():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = layer(), layer()

        def forward(self, x):
            return self.last(spoil(self.first(x)))

    assert watched(nn.Sequential(layer(), Outer()), ones()).module == "1"


def test_backward_fault_in_the_loss_belongs_to_the_step():
    found = watched(net(nn.ReLU()), ones(), loss=lambda m, x: spoil(m(x)).sum())
    assert (found.module, found.direction) == ("", "backward")
    assert found.custom == "SpoiledBackward"


def test_frozen_modules_pass_the_blame_by():
    model = net(Apply(spoil))
    model.head.requires_grad_(False)
    assert watched(model, ones()).module == "culprit"
    model.requires_grad_(False)
    assert watched(model, ones().requires_grad_()).module == "culprit"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_checkpointed_block(reentrant, direction):
    function = spoil if direction == "backward" else (lambda x: x * NAN)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(layer(), Apply(function), nn.ReLU(inplace=True))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    found = watched(nn.Sequential(layer(), Block(), layer()), ones())
    assert (found.module, found.direction) == ("1.inner.1", direction)


def test_custom_function_and_custom_operator_are_named():
    assert watched(net(Apply(spoil)), ones()).custom == "SpoiledBackward"
    assert watched(net(Apply(lambda x: x * INF)), ones()).custom is None


def culprit(**changes):
    """One that a smaller scale may end: float16, all inf, of a gradient near the largest float16."""
    settings = {
        "module": "net",
        "kind": "Linear",
        "direction": "backward",
        "dtype": torch.float16,
        "max_abs": 0.0,
        "finite_share": 0.0,
        "what": "inf",
        "max_abs_in": 1024.0,
        "operator": "AddmmBackward0",
    }
    return Culprit(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "overflow"),
    [
        ({}, True),
        ({"direction": "forward"}, False),
        ({"what": "nan"}, False),  # one operator makes it of finite gradients, at any scale
        ({"what": "nan", "composite": True}, True),
        ({"max_abs": 60000.0, "finite_share": 0.5}, True),
        ({"max_abs": 3.0, "finite_share": 0.5}, False),  # far below 65504, yet inf beside it
        # gradients with a long tail: what went in is not far from overflowing itself
        ({"max_abs": 3.0, "finite_share": 0.5, "max_abs_in": 20000.0}, True),
        ({"operator": "ToCopyBackward0", "max_abs": 3.0, "max_abs_in": 1e6}, True),
        ({"operator": "DivBackward0", "what": "inf and nan", "max_abs_in": 5e4}, True),
        ({"operator": "DivBackward0", "what": "inf and nan"}, False),
        ({"dtype": torch.float32, "what": "nan", "max_abs_in": 1e30}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float32, "max_abs_in": 1e30}, True),
        ({"operator": "SqrtBackward0"}, False),  # 1024 x 64 is beyond float16: too steep
        ({"operator": "SqrtBackward0", "max_abs_in": 30000.0}, True),
        ({"operator": "DivBackward0", "max_abs": 26000.0, "finite_share": 0.5}, True),
        ({"operator": "MineBackward", "custom": "test.<locals>.Mine"}, False),
        ({"custom": "test.<locals>.Mine"}, True),
    ],
    ids=repr,
)
def test_what_a_smaller_scale_may_end(changes, overflow):
    assert culprit(**changes).may_be_overflow is overflow


def test_watches_of_one_step_do_not_claim_each_others_operators():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model = net(Apply(Doubled.apply))
    model.head.weight.data.mul_(INF)
    pair = [NonFiniteWatch(model).install() for _ in range(2)]
    out = model(ones()).sum()
    for watch in pair:
        found = watch.culprit()
        assert (found.module, found.direction, found.custom) == ("head", "forward", None)
        watch.remove()
    assert torch.isnan(out)


# ---------------------------------------------------------------------- who is watched


@uses_jit
def test_compiled_module_is_left_alone():
    model = net(Apply(lambda x: x * INF))
    model.culprit.compile(backend="eager")
    model.head = torch.compile(model.head, backend="eager")
    watch = NonFiniteWatch(model).install()
    assert watch.left_alone == ("culprit", "head")
    assert not model.culprit._forward_hooks
    assert not model.head._forward_hooks
    watch.see_loss(model.culprit.forward(model.body(ones())).sum())
    found = watch.culprit()
    assert (found.module, found.left_alone) == ("", ("culprit", "head"))
    assert "compiled modules inside were not watched: 'culprit', 'head'" in str(found)
    watch.remove()


@uses_jit
def test_compiled_root_is_left_alone():
    model = net(nn.ReLU())
    model.compile(backend="eager")
    watch = NonFiniteWatch(model).install()
    assert watch.left_alone == ("",)
    watch.see_loss(torch.tensor(NAN))
    assert watch.culprit() is None
    assert not any(m._forward_hooks for m in model.modules())


@uses_jit
def test_scripted_module_is_left_alone():
    assert NonFiniteWatch(net(torch.jit.script(layer()))).install().left_alone == ("culprit",)


def test_metrics_are_left_alone():
    model = net(Apply(lambda x: x), metric=MeanMetric(nan_strategy="disable"))

    def loss(m, x):
        m.metric(torch.tensor(NAN))
        return m.culprit(m.body(x)).sum()

    assert watched(model, ones(), loss=loss) is None


def test_evaluation_without_gradients_is_not_looked_at():
    model = net(Apply(lambda x: x * INF))
    watch = NonFiniteWatch(model).install()
    model.eval()
    with torch.no_grad():
        model(ones())
    with torch.inference_mode():
        model.train()(ones())
    assert watch.culprit() is None


def test_teacher_without_gradients_stands_back():
    model = nn.Sequential(
        OrderedDict(teacher=Apply(lambda x: x * INF), culprit=Apply(lambda x: x * NAN))
    )

    def both(m, x):
        with torch.no_grad():
            m.teacher(x)
        return m.culprit(x).sum()

    assert watched(model, ones().requires_grad_(), loss=both).module == "culprit"


def test_vmapped_modules_are_passed_by():
    model = net(nn.ReLU())
    watch = NonFiniteWatch(model).install()
    torch.func.vmap(model)(torch.ones(3, 1, 2)).sum().backward()
    assert watch.culprit() is None
    watch.remove()


# ---------------------------------------------------------------------- nothing is changed, or kept


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += str(func) in ("aten._local_scalar_dense.default", "aten.equal.default")
        return func(*args, **(kwargs or {}))


def test_host_waits_only_when_asked():
    model = net(nn.ReLU())
    watch = NonFiniteWatch(model).install()
    with Counts() as counts:
        loss = model(ones()).sum()
        watch.see_loss(loss)
        loss.backward()
        watch.reset()
    assert counts.reads == 0


def test_no_tensor_of_the_run_is_kept():
    kept = []
    model = net(Apply(lambda x: (kept.append(weakref.ref(x)), x * 2.0)[1]))
    watch = NonFiniteWatch(model).install()
    x = ones().requires_grad_()
    kept.append(weakref.ref(x))
    loss = model(x).sum()
    kept.append(weakref.ref(loss))
    watch.see_loss(loss)
    loss.backward()
    del x, loss
    gc.collect()
    assert len(kept) == 3
    assert [ref() for ref in kept] == [None] * 3
    # seven numbers for each of four calls, the loss, and each operator of the backward pass
    table = [seen for part, _ in watch._table._packed for seen in part] + [
        s for s, _ in watch._table._seen
    ]
    assert len(table) < 20
    assert all(numbers.shape == (7,) for _, numbers in watch._table._seen)


def test_abandoned_call_does_not_confuse_the_next():
    calls = []

    def fails_once(x):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return x * NAN

    model = nn.Sequential(nn.Sequential(Apply(fails_once)))
    watch = NonFiniteWatch(model).install()
    with pytest.raises(RuntimeError, match="planted"):
        model(ones())
    model(ones().requires_grad_())
    assert watch.culprit().module == "0.0"


def test_hooks_are_gone_after_remove():
    model = net(nn.ReLU())
    watch = NonFiniteWatch(model).install()
    watch.install()
    assert all(len(m._forward_hooks) == 1 for m in model.modules())
    loss = model(ones()).sum()
    watch.remove()
    watch.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    loss.backward()  # hooks of a graph that outlives the watch do nothing
    assert (watch._table._seen, watch._table._packed) == ([], [])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_the_module_are_not_watched(copied):
    model = nn.Sequential(layer(), nn.ReLU())
    watch = NonFiniteWatch(model).install()
    twin = copied(model)
    with torch.no_grad():
        twin[0].weight.fill_(NAN)
    twin(ones()).sum().backward()
    assert watch.culprit() is None
    watch.remove()


def test_reset_forgets_the_last_step():
    model = net(Apply(lambda x: x * INF))
    watch = NonFiniteWatch(model).install()
    model(ones())
    watch.reset()
    assert watch.culprit() is None


def test_gradients_and_buffers_are_those_of_the_unwatched_step():
    def run(watched):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
        )
        watch = NonFiniteWatch(model)
        if watched:
            watch.install()
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            watch.see_loss(loss)
            loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
