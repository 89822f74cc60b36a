# SPDX-License-Identifier: Apache-2.0
"""Chosen modules run in float32 with autocast off, in forward only, and leave nothing behind."""

import copy
import functools
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard import SafeAMP
from lightning_amp_guard.plugin.fp32_scope import Float32Scopes, select
from tests.helpers import Line, fit

AUTOCAST = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
HALF = (torch.bfloat16, torch.float16)

Pair = namedtuple("Pair", "first second")


@dataclass
class Mutable:
    tensor: torch.Tensor
    scale: int = 2


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    scale: int = 2


class Seeing(torch.nn.Linear):
    """A linear layer that writes down the dtype of its input and whether autocast is on."""

    def __init__(self, size=4):
        super().__init__(size, size)
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return super().forward(x)


IN_FLOAT32 = (torch.float32, False)
FIRST_UNDER_AUTOCAST = (torch.float32, True)  # what it hands on is bfloat16
UNDER_AUTOCAST = (torch.bfloat16, True)


class Net(torch.nn.Module):
    """Three layers in a row; the first turns float32 into bfloat16 under autocast."""

    def __init__(self):
        super().__init__()
        self.stem = Seeing()
        self.body = torch.nn.Sequential(OrderedDict(a=Seeing(), b=Seeing()))
        self.head = Seeing()

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def scoped(module, *patterns):
    return Float32Scopes(module, patterns, "cpu", AUTOCAST)


def run(module, *args, **kwargs):
    with AUTOCAST():
        return module(*args, **kwargs)


def hooks_of(module):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())


def nesting():
    """How many autocast contexts are entered; above 0 the cache of casts is never cleared."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def autocast_is_as_it_was():
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting()
    yield
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting()
    while nesting() > before[2]:  # a leak must not spread to other tests
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", before[0])
    assert after == before


# ---------------------------------------------------------------- which modules

NAMES = ["encoder", "encoder.a", "encoder.b", "head", "head.norm", "Head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["head"], {"head"}),
        (["enc*"], {"encoder", "encoder.a", "encoder.b"}),
        (["*.norm", "encoder.?"], {"head.norm", "encoder.a", "encoder.b"}),
        (["encoder.[ab]"], {"encoder.a", "encoder.b"}),
        (["*", "!encoder*"], {"head", "head.norm", "Head"}),
        (["!encoder*", "*"], {"head", "head.norm", "Head"}),  # the order does not matter
        (["*", "!*"], set()),
        (["!head"], set()),
        ([], set()),
    ],
)
def test_patterns_select_by_hand(patterns, expected):
    assert select(NAMES, patterns) == (expected, [])


@pytest.mark.parametrize("idle", ["tail", "!tail", "hea", "*.dropout", "HEAD"])
def test_pattern_that_matches_nothing_is_told(idle):
    assert select(NAMES, ["head", idle]) == ({"head"}, [idle])


@pytest.mark.parametrize("idle", ["tail", "!tail.*"])
def test_pattern_that_matches_nothing_is_an_error_that_offers_names(idle):
    net = Net()
    with pytest.raises(ValueError, match=r"^the ") as caught:
        scoped(net, "head", idle)
    assert str(caught.value) == (
        f"the pattern {idle!r} matches no module. Expected names as in `model.named_modules()`,"
        " such as 'stem', 'body', 'body.a', 'body.b'."
    )
    assert hooks_of(net) == 0


def test_without_patterns_nothing_is_installed():
    net = Net()
    scoped(net).remove()
    assert hooks_of(net) == 0


# ---------------------------------------------------------------- what they compute in


def test_chosen_module_computes_in_float32_and_the_others_under_autocast():
    net = Net()
    scoped(net, "body.b")
    run(net, torch.ones(2, 4))
    assert net.stem.seen == [FIRST_UNDER_AUTOCAST]
    assert net.body.a.seen == [UNDER_AUTOCAST]
    assert net.body.b.seen == [IN_FLOAT32]
    assert net.head.seen == [FIRST_UNDER_AUTOCAST]  # it got the float32 that came before


def test_chosen_module_takes_its_submodules_along():
    net = Net()
    scoped(net, "body")
    run(net, torch.ones(2, 4))
    assert net.body.a.seen + net.body.b.seen == [IN_FLOAT32] * 2


def test_excluded_submodule_runs_under_autocast_again():
    net = Net()
    scoped(net, "*", "!body.b")
    run(net, torch.ones(2, 4))
    assert net.stem.seen + net.body.a.seen == [IN_FLOAT32] * 2
    assert net.body.b.seen == [FIRST_UNDER_AUTOCAST]
    assert net.head.seen == [IN_FLOAT32]


def test_chosen_submodule_of_an_excluded_one_computes_in_float32():
    net = torch.nn.Module()
    net.outer = Net()
    net.forward = lambda x: net.outer(x)
    scoped(net, "outer", "outer.body.b", "!outer.body")
    run(net, torch.ones(2, 4))
    assert net.outer.body.a.seen == [FIRST_UNDER_AUTOCAST]
    assert net.outer.body.b.seen == [IN_FLOAT32]


def test_without_autocast_nothing_changes():
    net = Net()
    scoped(net, "*", "!body.b")
    net(torch.ones(2, 4))
    with AUTOCAST(), torch.autocast("cpu", enabled=False):
        net(torch.ones(2, 4))
    for layer in (net.stem, net.body.a, net.body.b, net.head):
        assert layer.seen == [IN_FLOAT32] * 2


def test_results_equal_those_of_plain_float32():
    net = Net()
    plain = copy.deepcopy(net)
    scoped(net, "*")
    x = torch.randn(3, 4)
    out, expected = run(net, x), plain(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for name, param in net.named_parameters():
        assert torch.equal(param.grad, plain.get_parameter(name).grad), name


def test_scope_holds_for_the_forward_only():
    class Head(torch.nn.Linear):
        def score(self, x):
            return torch.nn.functional.linear(x, self.weight).dtype

    net = torch.nn.Sequential(Head(4, 4))
    keys, dtypes = list(net.state_dict()), {p.dtype for p in net.parameters()}
    scoped(net, "0")
    with AUTOCAST():
        assert net[0](torch.ones(1, 4)).dtype is torch.float32
        assert net[0].score(torch.ones(1, 4)) is torch.bfloat16
    assert list(net.state_dict()) == keys
    assert {p.dtype for p in net.parameters()} == dtypes


# ---------------------------------------------------------------- inputs of every form


class Taking(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


def half(dtype=torch.bfloat16):
    return torch.tensor([1.5, -2.25], dtype=dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "form",
    [
        lambda t: t,
        lambda t: [t, t],
        lambda t: (t, [t]),
        lambda t: {"x": t, "y": {"z": (t,)}},
        lambda t: OrderedDict(x=t),
        lambda t: Pair(t, 7),
        lambda t: [None, "text", 3, t],
    ],
    ids=["tensor", "list", "tuple", "dict", "OrderedDict", "namedtuple", "mixed"],
)
def test_inputs_are_cast_wherever_they_are(dtype, form):
    net = torch.nn.Sequential(Taking())
    scoped(net, "0")
    with AUTOCAST():
        args, kwargs = net[0](form(half(dtype)), key=form(half(dtype)))
    expected = form(half(torch.float32))
    for seen in (args[0], kwargs["key"]):
        assert type(seen) is type(expected)
        assert repr(seen) == repr(expected)  # float32 is torch's default, which repr leaves out


@pytest.mark.parametrize("kind", [Mutable, Frozen])
def test_inputs_in_dataclasses_are_cast_as_well(kind):
    net = torch.nn.Sequential(Taking())
    scoped(net, "0")
    given = kind(half(), 5)
    with AUTOCAST():
        (seen,), _ = net[0](given)
    assert type(seen) is kind
    assert (seen.tensor.dtype, seen.scale) == (torch.float32, 5)
    assert given.tensor.dtype is torch.bfloat16  # the caller's own is left alone


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_inputs_of_other_dtypes_are_handed_on_untouched(dtype):
    net = torch.nn.Sequential(Taking())
    scoped(net, "0")
    given = torch.ones(2, dtype=dtype)
    with AUTOCAST():
        (seen,), kwargs = net[0](given, key=given)
    assert seen is given
    assert kwargs["key"] is given


def test_packed_sequences_reach_a_recurrent_module():
    net = torch.nn.ModuleDict({"rnn": torch.nn.GRU(2, 2, batch_first=True)})
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]])
    packed = pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True)
    expected, _ = net["rnn"](packed)
    scoped(net, "rnn")
    with AUTOCAST():
        out, _ = net["rnn"](packed.to(torch.bfloat16))
    assert torch.equal(out.data, expected.data)
    assert type(out) is type(expected)


def test_gradients_flow_through_the_cast():
    net = torch.nn.Sequential(Seeing())
    scoped(net, "0")
    x = half().repeat(2).requires_grad_()
    with AUTOCAST():
        net[0](x).sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert net[0].weight.grad.dtype is torch.float32


# ---------------------------------------------------------------- undone, whatever happens


class Failing(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, x):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return x @ x


@pytest.mark.parametrize("patterns", [("0",), ("0", "0.0"), ("0", "!0.0")])
@pytest.mark.parametrize("error", [ValueError("planted"), torch.OutOfMemoryError("planted")])
def test_autocast_is_as_before_after_an_exception(error, patterns):
    net = torch.nn.Sequential(torch.nn.Sequential(Failing(error)))
    scopes = scoped(net, *patterns)
    with AUTOCAST():
        for _ in range(2):
            with pytest.raises(type(error), match="planted"):
                net(torch.ones(2, 2))
            assert torch.is_autocast_enabled("cpu")
            assert nesting() == 1
        net[0][0].error = None
        assert net(torch.ones(2, 2)).dtype is (
            torch.bfloat16 if "!0.0" in patterns else torch.float32
        )
    scopes.remove()
    assert hooks_of(net) == 0


@pytest.mark.parametrize("when", ["before ours", "after ours", "forward hook"])
def test_autocast_is_as_before_after_an_exception_in_a_users_hook(when):
    net = torch.nn.Sequential(Seeing())

    def fail(*args):
        raise ValueError("planted")

    scoped(net, "0")
    if when == "forward hook":
        net[0].register_forward_hook(fail, prepend=True)
    else:
        net[0].register_forward_pre_hook(fail, prepend=when == "before ours")
    with AUTOCAST():
        with pytest.raises(ValueError, match="planted"):
            net(torch.ones(1, 4))
        assert torch.is_autocast_enabled("cpu")
        assert nesting() == 1


# torch calls no hooks for exceptions of this kind; Ctrl-C in a notebook ends in `remove` all the same
@pytest.mark.parametrize("patterns", [("0",), ("0", "!0.0")])
def test_autocast_is_as_before_after_an_interrupt(patterns):
    net = torch.nn.Sequential(torch.nn.Sequential(Failing(KeyboardInterrupt())))
    scopes = scoped(net, *patterns)
    with pytest.raises(KeyboardInterrupt), AUTOCAST():
        net(torch.ones(2, 2))
    scopes.remove()
    assert not torch.is_autocast_enabled("cpu")
    assert nesting() == 0


def test_remove_gives_the_module_back_as_it_was():
    net = Net()
    marker = net.head.register_forward_hook(lambda *args: None)
    scopes = scoped(net, "*", "!head")
    assert hooks_of(net) > 1
    scopes.remove()
    scopes.remove()
    assert hooks_of(net) == 1  # the user's own
    run(net, torch.ones(2, 4))
    assert net.body.b.seen == [UNDER_AUTOCAST]
    marker.remove()


def test_module_may_call_itself():
    class Nested(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.seen = []

        def forward(self, x, depth):
            if depth:
                x = self(x, depth - 1)
            y = super().forward(x)
            self.seen.append((y.dtype, torch.is_autocast_enabled("cpu"), nesting()))
            return y

    net = torch.nn.ModuleList([Nested()])
    scoped(net, "0")
    with AUTOCAST():
        net[0](torch.ones(1, 2), depth=2)
        assert torch.is_autocast_enabled("cpu")
    assert net[0].seen == [(torch.float32, False, depth) for depth in (4, 3, 2)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_recomputes_in_float32(use_reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.stem(x)
            x = checkpoint(self.body, x, use_reentrant=use_reentrant)
            return self.head(x)

    net, plain = Checkpointed(), Net()
    plain.load_state_dict(net.state_dict())
    for each in (net, plain):
        scoped(each, "body.b")
    x = torch.randn(3, 4)
    for each in (net, plain):
        with AUTOCAST():
            loss = each(x).float().sum()
        loss.backward()
    assert net.body.b.seen == [IN_FLOAT32] * 2  # forward, and again in the backward pass
    assert net.body.a.seen == [UNDER_AUTOCAST] * 2
    for name, param in net.named_parameters():
        assert torch.equal(param.grad, plain.get_parameter(name).grad), name


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_works_on_its_own_weights_and_in_float32(copied):
    net = Net()
    scopes = scoped(net, "body", "body.b", "!body.a")
    made = copied(net)
    with torch.no_grad():
        for param in made.body.b.parameters():
            param.fill_(0.0)
    x = torch.ones(2, 4)
    with AUTOCAST():
        assert made.body(x).abs().sum() == 0
        assert net.body(x).abs().sum() > 0
    for each in (net, made):
        assert each.body.a.seen == [FIRST_UNDER_AUTOCAST]
        assert each.body.b.seen == [IN_FLOAT32]
    scopes.remove()
    assert hooks_of(net) == 0


def test_copy_made_inside_a_call_starts_outside_of_it():
    class Copying(torch.nn.Module):
        def forward(self, x):
            self.made = copy.deepcopy(self)
            return x

    net = torch.nn.Sequential(Copying())
    scoped(net, "0")
    run(net, torch.ones(1))
    with AUTOCAST():
        net[0].made(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- compiled modules


# the eager backend: nothing is run, and inductor warns of torch.jit when it is imported


def compiled_by_call(net):
    net.body = torch.compile(net.body, backend="eager")
    return net


def compiled_in_place(net):
    net.body.compile(backend="eager")
    return net


def compiled_as_a_whole(net):
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("compiled", "patterns", "name", "inside"),
    [
        (compiled_by_call, ["body"], "body", "body"),
        (compiled_by_call, ["*.b"], "body._orig_mod.b", "body"),
        (compiled_in_place, ["body"], "body", "body"),
        (compiled_in_place, ["head", "body.b"], "body.b", "body"),
        (compiled_as_a_whole, ["head"], "head", "head"),
    ],
)
def test_compiled_module_is_refused_with_the_way_out(compiled, patterns, name, inside):
    net = compiled(Net())
    with pytest.raises(ValueError, match=r"^the ") as caught:
        scoped(net, *patterns)
    message = str(caught.value)
    assert message.startswith(f"the module {name!r} is compiled already ({inside!r})")
    assert "Choose it before compiling" in message
    assert "torch.autocast(device, enabled=False)" in message
    assert hooks_of(net) == 0


def test_compiled_neighbours_do_not_matter():
    net = Net()
    net.stem.compile(backend="eager")
    scoped(net, "body").remove()
    assert hooks_of(net) == 0


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    with pytest.raises(MisconfigurationException, match=r"'lon' matches no module.*mean 'lin'\?$"):
        fit(Line(), SafeAMP(fp32_modules=["lon"]))
