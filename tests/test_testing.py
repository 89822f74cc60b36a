# SPDX-License-Identifier: Apache-2.0
"""Planted faults stand where and when they were asked for, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard import SafeAMP
from lightning_amp_guard.testing import Plant, plant
from tests.helpers import Line, fit

INF = float("inf")


def twins():
    """Two layers that pass on what they get."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for part in net:
        nn.init.eye_(part.weight)
    return net


def ones():
    return torch.ones(3, 2, requires_grad=True)


def finite(tensor):
    return bool(tensor.isfinite().all())


# ---------------------------------------------------------------------- what


@pytest.mark.parametrize(("fault", "value"), [("inf", INF), ("overflow", 2.0**17)])
def test_forward_fault_is_the_first_element_of_the_output(fault, value):
    net = twins()
    with plant(net, "0", fault):
        out = net[0](ones())
    expected = torch.ones(3, 2)
    expected[0, 0] = value
    assert torch.equal(out, expected)


def test_nan_is_the_first_element_of_the_output():
    net = twins()
    with plant(net, "0", "nan"):
        out = net[0](ones())
    assert out.isnan().tolist() == [[True, False], [False, False], [False, False]]


@pytest.mark.parametrize(
    ("dtype", "there"), [(torch.float16, INF), (torch.bfloat16, 2.0**17), (torch.float32, 2.0**17)]
)
def test_overflow_is_inf_in_float16_only(dtype, there):
    net = twins().to(dtype)
    with plant(net, "1", "overflow"):
        assert net(ones().to(dtype))[0, 0] == there


@pytest.mark.parametrize("value", [1.0, 60000.0])
@pytest.mark.parametrize(
    ("dtype", "zero"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)]
)
def test_underflow_vanishes_in_float16_only(dtype, zero, value):
    net = twins().to(dtype)
    with plant(net, "1", "underflow"):
        out = net(torch.full((1, 2), value, dtype=dtype))
    assert bool((out == 0).all()) is zero
    assert bool((out.half() == 0).all())
    if not zero:
        torch.testing.assert_close(
            out.float(), torch.full((1, 2), value).to(dtype).float() * 2.0**-42
        )


@pytest.mark.parametrize(("fault", "value"), [("inf", INF), ("overflow", 2.0**17)])
def test_backward_fault_is_the_first_element_of_the_gradient(fault, value):
    net, x = twins(), ones()
    with plant(net, "1", fault, direction="backward"):
        out = net[1](x)
        out.sum().backward()
    assert torch.equal(out, torch.ones(3, 2))
    assert x.grad[0, 0] == value
    assert x.grad[1:].eq(1.0).all()
    # of the first sample's gradient, each weight of the first row takes its part
    assert net[1].weight.grad[0, 0] == value + 2
    assert torch.equal(net[1].weight.grad[1], torch.full((2,), 3.0))


def test_backward_underflow_scales_the_whole_gradient():
    net, x = twins(), ones()
    with plant(net, "1", "underflow", direction="backward"):
        net(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 2.0**-42))


def test_forward_fault_lets_the_gradient_through():
    net, x = twins(), ones()
    with plant(net, "0", "overflow"):
        net(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("at", "hit"),
    [
        (0, [0]),
        (3, [3]),
        ({1, 4}, [1, 4]),
        ([2], [2]),
        (range(2, 4), [2, 3]),
        (range(0, 100, 2), [0, 2, 4]),
        (lambda call: call >= 3, [3, 4]),
        (lambda call: False, []),
    ],
    ids=["int", "later", "set", "list", "range", "steps", "predicate", "never"],
)
def test_calls_are_chosen_by_number(at, hit):
    net = twins()
    with plant(net, "0", "nan", at=at) as planted:
        found = [call for call in range(5) if not finite(net(ones()))]
    assert found == hit
    assert (planted.calls, planted.planted) == (5, len(hit))


def test_first_call_is_the_default():
    net = twins()
    with plant(net, "0", "nan"):
        assert [finite(net(ones())) for _ in range(3)] == [False, True, True]


def test_calls_in_evaluation_mode_neither_count_nor_fail():
    net = twins()
    with plant(net, "0", "nan", at=1) as planted:
        net(ones())
        assert all(finite(net.eval()(ones())) for _ in range(3))
        assert not finite(net.train()(ones()))
    assert planted.calls == 2


def test_each_call_of_a_shared_module_counts():
    net = twins()
    with plant(net, "0", "nan", direction="backward", at=1):
        first, second = ones(), ones()
        (net[0](first) + net[0](second)).sum().backward()
    assert (finite(first.grad), finite(second.grad)) == (True, False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_recomputation_of_a_checkpointed_block_repeats_its_call(reentrant, direction):
    net = nn.Sequential(*twins(), nn.Tanh())
    bad = []
    with plant(net, "1", "inf", direction=direction, at={1, 2}) as planted:
        for _ in range(5):
            x = ones()
            out = checkpoint(net, x, use_reentrant=reentrant)
            out.sum().backward()
            # tanh(inf) is 1 and flat; the gradient there is exactly 0
            spoiled = x.grad[0, 0] == 0 if direction == "forward" else not finite(x.grad)
            bad.append(bool(spoiled))
    assert bad == [False, True, True, False, False]
    assert (planted.calls, planted.planted) == (5, 2)


def test_recomputed_blocks_of_one_step_get_their_own_decision():
    net = twins()
    with plant(net, "0", "nan", direction="backward", at=1):
        first, second = ones(), ones()
        out = checkpoint(net, first, use_reentrant=True).sum()
        (out + checkpoint(net, second, use_reentrant=True).sum()).backward()
    assert (finite(first.grad), finite(second.grad)) == (True, False)


def test_steps_without_gradients_are_fine():
    net = twins()
    with torch.no_grad(), plant(net, "0", "nan", direction="backward") as planted:
        assert finite(net(ones()))
    assert planted.planted == 1


# ---------------------------------------------------------------------- where


@pytest.mark.parametrize("where", ["0.1", lambda net: net[0][1]], ids=["name", "module"])
def test_module_is_chosen_by_name_or_itself(where):
    net = nn.Sequential(twins())
    with plant(net, where if isinstance(where, str) else where(net), "nan"):
        seen = []
        net[0][0].register_forward_hook(lambda m, a, out: seen.append(finite(out)))
        net[0][1].register_forward_hook(lambda m, a, out: seen.append(finite(out)))
        net(ones())
    assert seen == [True, False]


def test_empty_name_is_the_model_itself():
    net = twins()
    with plant(net, "", "nan"):
        assert not finite(net(ones()))


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda x: (x.long(), x, x + 1), lambda out: out[1:]),
        (lambda x: {"n": 3, "a": x, "b": x + 1}, lambda out: (out["a"], out["b"])),
        (lambda x: [None, ({"deep": x}, x + 1)], lambda out: (out[1][0]["deep"], out[1][1])),
    ],
    ids=["tuple", "dict", "nested"],
)
def test_first_floating_tensor_of_a_nested_output_is_chosen(wrap, get):
    net = Returns(wrap)
    with plant(net, "", "nan"):
        first, second = get(net(ones()))
    assert (finite(first), finite(second)) == (False, True)


def test_rnn_output():
    net = nn.LSTM(2, 3)
    with plant(net, "", "nan"):
        out, (hidden, cell) = net(torch.ones(4, 1, 2))
    assert [finite(t) for t in (out, hidden, cell)] == [False, True, True]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_in_place_activation_may_follow(direction):
    net, x = nn.Sequential(*twins(), nn.ReLU(inplace=True)), ones()
    with plant(net, "1", "inf", direction=direction):
        out = net(x)
        out.sum().backward()
    assert finite(out) is (direction == "backward")
    assert finite(x.grad) is (direction == "forward")


def test_scalar_and_strided_outputs():
    for wrap in (torch.sum, torch.t, lambda x: x[:, :1]):
        net = Returns(wrap)
        with plant(net, "", "nan"):
            assert int(net(ones()).isnan().sum()) == 1


# ---------------------------------------------------------------------- nothing is left


def test_hook_is_gone_after_the_block_and_after_an_exception():
    net = twins()
    with plant(net, "0", "nan"):
        assert len(net[0]._forward_hooks) == 1
    assert not net[0]._forward_hooks

    def fails():
        with plant(net, "0", "nan"):
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fails()
    assert not net[0]._forward_hooks


def test_removed_by_hand_and_twice():
    net = twins()
    planted = plant(net, "0", "nan", at=range(9))
    assert isinstance(planted, Plant)
    assert not finite(net(ones()))
    planted.remove()
    planted.remove()
    assert finite(net(ones()))


def test_weights_and_random_state_stay():
    net = twins()
    before = torch.get_rng_state()
    with plant(net, "0", "nan", direction="backward", at=range(3)):
        for _ in range(3):
            net(ones()).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(net[0].weight, torch.eye(2))


def test_two_faults_may_stand_together():
    net, x = twins(), ones()
    with plant(net, "0", "nan", at=1), plant(net, "0", "inf", at=0):
        assert net(x)[0, 0] == INF
        assert net(x).isnan().any()


def test_planted_steps_are_skipped_in_training():
    model = Line()
    with plant(model, "lin", "inf", direction="backward", at={1, 2}):
        fit(model, SafeAMP(init_scale=2.0**10), n=4)
    assert [o.applied for o in model.outcomes] == [True, False, False, True]
    assert model.weight == 7.0


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"where": "2"}, ValueError, "such as '0', '1'"),
        ({"where": nn.Linear(1, 1)}, ValueError, "Linear"),
        ({"fault": "zero"}, ValueError, "'inf', 'nan', 'overflow', 'underflow'"),
        ({"direction": "up"}, ValueError, "'forward', 'backward'"),
        ({"at": True}, TypeError, "at=True"),
        ({"at": None}, TypeError, "range(3, 6)"),
        ({"at": 1.5}, TypeError, "at=1.5"),
        ({"at": "a"}, TypeError, "at='a'"),
        ({"at": b"\x03"}, TypeError, "at=b"),
        ({"at": -1}, ValueError, "at=-1"),
    ],
    ids=repr,
)
def test_mistakes_are_named(change, error, said):
    net = twins()
    arguments = {"where": "0", "fault": "nan", **change}
    with pytest.raises(error) as caught:
        plant(net, arguments.pop("where"), arguments.pop("fault"), **arguments)
    assert said in str(caught.value)
    assert not any(m._forward_hooks for m in net.modules())


def test_module_without_floating_output_is_named():
    net = Returns(lambda x: x.long())
    with plant(net, "", "nan"), pytest.raises(ValueError, match="Returns returned no floating"):
        net(ones())


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_compiled_module_is_refused():
    net = twins()
    net[0].compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled"):
        plant(net, "0", "nan")
