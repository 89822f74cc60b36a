# SPDX-License-Identifier: Apache-2.0
"""SkipAwareGradScaler by itself, in a plain PyTorch loop, beside torch's own scaler."""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_guard import ScalerStateError, SkipAwareGradScaler

INF, NAN = float("inf"), float("nan")
SMALLEST = 2.0**-126
UNBOUNDED = {"min_scale": None, "max_scale": None}


SGD = functools.partial(torch.optim.SGD, lr=0.5)


class Weights:
    """One parameter whose gradient is 1 everywhere, an optimizer, and faults planted in `.grad`."""

    def __init__(self, make=SGD, dtype=torch.float32):
        self.param = torch.nn.Parameter(torch.full((3,), 8.0, dtype=dtype))
        self.optimizer = make([self.param])

    def backward(self, scaler, fault=None):
        self.optimizer.zero_grad()
        scaler.scale(self.param.sum()).backward()
        if fault is not None:
            self.param.grad[1] = fault

    def attempt(self, scaler, fault=None):
        """Run the whole standalone loop once."""
        self.backward(scaler, fault)
        result = scaler.step(self.optimizer)
        skipped = scaler.was_skipped(self.optimizer)
        scaler.update()
        return skipped, result

    @property
    def values(self):
        return self.param.detach().tolist()


def scaler_at(scale=8.0, **kwargs):
    return SkipAwareGradScaler("cpu", scale, **{"growth_interval": 1, **kwargs})


class Reads(TorchDispatchMode):
    """Counts the times that the host reads a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- how the scale moves


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    init_scale=st.floats(2.0**-10, 2.0**30),
    growth_factor=st.floats(1.0, 16.0, exclude_min=True),
    backoff_factor=st.floats(0.01, 1.0, exclude_max=True),
    growth_interval=st.integers(1, 4),
    plan=st.lists(st.sampled_from([None, INF, -INF, NAN]), max_size=25),
)
def test_unbounded_run_equals_torch_bit_for_bit(
    init_scale, growth_factor, backoff_factor, growth_interval, plan
):
    torchs = torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, growth_interval)
    ours = SkipAwareGradScaler(
        "cpu", init_scale, growth_factor, backoff_factor, growth_interval, **UNBOUNDED
    )
    theirs_w, ours_w = Weights(), Weights()
    for fault in plan:
        theirs_w.backward(torchs, fault)
        torchs.step(theirs_w.optimizer)
        torchs.update()
        skipped, _ = ours_w.attempt(ours, fault)
        assert skipped is (fault is not None)
        if torchs.get_scale() < SMALLEST:
            assert ours.get_scale() == SMALLEST
            return
        assert ours.state_dict() == torchs.state_dict()
        assert ours_w.values == theirs_w.values


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    low=st.floats(1.0, 8.0),
    high=st.floats(8.0, 64.0),
    hysteresis=st.integers(1, 3),
    plan=st.lists(st.booleans(), max_size=25),
)
def test_bounded_run_stays_within_bounds_and_counts_add_up(low, high, hysteresis, plan):
    scaler = scaler_at(8.0, hysteresis=hysteresis, min_scale=low, max_scale=high)
    weights = Weights()
    skips = [weights.attempt(scaler, None if good else INF)[0] for good in plan]
    assert skips == [not good for good in plan]
    assert weights.values == [8.0 - 0.5 * sum(plan)] * 3
    assert float(np.float32(low)) <= scaler.get_scale() <= float(np.float32(high))


@pytest.mark.parametrize("fault", [INF, -INF, NAN])
def test_truth_table(fault):
    scaler, weights = scaler_at(), Weights()
    table = []
    for planted in (None, fault, fault, None):
        skipped, _ = weights.attempt(scaler, planted)
        table.append((skipped, scaler.get_scale(), weights.values[0]))
    assert table == [
        (False, 16.0, 7.5),
        (True, 8.0, 7.5),
        (True, 4.0, 7.5),
        (False, 8.0, 7.0),
    ]


@pytest.mark.parametrize("standing", [{"dynamic": False}, {"min_scale": 8.0}, {"hysteresis": 9}])
def test_skip_is_known_although_the_scale_stands_still(standing):
    scaler, weights = scaler_at(8.0, **standing), Weights()
    assert weights.attempt(scaler, INF)[0] is True
    assert scaler.get_scale() == 8.0
    assert weights.values == [8.0] * 3


def test_ceiling_holds_and_applied_steps_are_not_mistaken_for_skips():
    scaler, weights = scaler_at(8.0, max_scale=16.0), Weights()
    assert [weights.attempt(scaler)[0] for _ in range(3)] == [False] * 3
    assert scaler.get_scale() == 16.0
    assert weights.values == [6.5] * 3


@pytest.mark.parametrize("bounds", [{}, UNBOUNDED])
def test_scale_survives_five_thousand_overflows(bounds):
    scaler, weights = scaler_at(2.0**16, **bounds), Weights()
    weights.attempt(scaler)
    weights.backward(scaler, INF)
    for _ in range(5000):
        scaler.step(weights.optimizer)
        scaler.update()
    assert scaler.get_scale() == (SMALLEST if bounds else 1.0)
    assert weights.attempt(scaler)[0] is False  # a finite gradient is still recovered exactly
    assert weights.values == [7.0] * 3
    assert scaler.get_scale() == (2 * SMALLEST if bounds else 2.0)


def test_unscaled_gradients_equal_torchs_bit_for_bit_at_any_scale():
    grads = torch.linspace(-3.7, 9.1, 101)
    for scale in (3.0, 1e-3, 12345.678, 7.0 / 3.0, 2.0**20 + 1):
        unscaled = []
        for scaler in (torch.amp.GradScaler("cpu", scale), scaler_at(scale, **UNBOUNDED)):
            param = torch.nn.Parameter(torch.zeros(101))
            scaler.scale((param * grads).sum()).backward()
            scaler.unscale_(torch.optim.SGD([param]))
            unscaled.append(param.grad)
        assert torch.equal(*unscaled)


@pytest.mark.parametrize(
    ("asked", "set_to"),
    [
        (4, 4.0),
        (0.25, 1.0),
        (64.0, 16.0),
        (math.inf, 16.0),
        (torch.tensor(2.0), 2.0),
        (np.float32(2), 2.0),
    ],
)
def test_a_scale_that_is_set_moves_to_the_nearest_bound(asked, set_to):
    scaler, weights = scaler_at(8.0, max_scale=16.0, growth_interval=5), Weights()
    weights.attempt(scaler)
    scaler.update(asked)
    assert scaler.get_scale() == set_to
    assert scaler.state_dict()["_growth_tracker"] == 1  # as in torch
    assert scaler.scale(torch.ones(())).item() == set_to
    weights.attempt(scaler)
    assert weights.values == [7.0] * 3


@pytest.mark.parametrize("asked", [math.inf, 1e39])
def test_a_scale_that_is_set_stays_finite_without_a_bound(asked):
    scaler = scaler_at(8.0, **UNBOUNDED)
    scaler.update(asked)
    assert math.isfinite(scaler.get_scale())


def test_nan_is_refused_as_a_scale():
    scaler = scaler_at()
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(NAN)
    assert scaler.get_scale() == 8.0


def test_update_without_an_attempt_moves_nothing():
    scaler = scaler_at()
    scaler.update()
    assert scaler.state_dict()["scale"] == 8.0
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_unscaled_but_not_stepped_gradients_count_as_in_torch():
    scaler, weights = scaler_at(), Weights()
    weights.backward(scaler, INF)
    scaler.unscale_(weights.optimizer)
    assert scaler.was_skipped(weights.optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_calls_of_a_precision_plugin_move_the_scale_at_once():
    scaler, weights = scaler_at(growth_interval=2), Weights()
    scaler.back_off()
    assert scaler.get_scale() == 4.0
    scaler.count_clean_batch()
    scaler.count_clean_batch(wait=True)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (4.0, 2)
    scaler.count_clean_batch()
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (8.0, 0)
    weights.attempt(scaler)
    assert weights.values == [7.5] * 3


# ---------------------------------------------------------------- a skip changes nothing

OPTIMIZERS = {
    f"{name}-{kind}": functools.partial(cls, lr=0.25, **kwargs, **how)
    for name, cls, kwargs, kinds in [
        ("sgd", torch.optim.SGD, {"momentum": 0.5}, "loop foreach fused"),
        ("nesterov", torch.optim.SGD, {"momentum": 0.5, "nesterov": True}, "loop foreach fused"),
        ("adamw", torch.optim.AdamW, {}, "loop foreach fused"),
        ("amsgrad", torch.optim.AdamW, {"amsgrad": True}, "loop foreach fused"),
        ("adagrad", torch.optim.Adagrad, {}, "loop foreach fused"),
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, "loop foreach"),
    ]
    for kind, how in {
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }.items()
    if kind in kinds.split()
}


def state_of(weights):
    return copy.deepcopy(weights.optimizer.state_dict()["state"])


def assert_untouched(state, before):
    """No entry, an entry at its initial zero, or the entry of before."""
    for key, value in state.get(0, {}).items():
        if value is not None:
            value = torch.as_tensor(value)
            initial = before.get(0, {}).get(key, torch.zeros_like(value))
            assert torch.equal(value, initial), key


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_skip_at_the_first_step_leaves_parameters_and_state_untouched(make):
    scaler, weights = scaler_at(growth_interval=100), Weights(make)
    before = state_of(weights)
    assert weights.attempt(scaler, INF) == (True, None)
    assert weights.values == [8.0] * 3
    assert_untouched(state_of(weights), before)
    fresh = Weights(make)
    for each in (weights, fresh):
        assert each.attempt(scaler)[0] is False
    assert weights.values == fresh.values
    torch.testing.assert_close(state_of(weights), state_of(fresh), rtol=0, atol=0)


@pytest.mark.parametrize("fault", [INF, NAN])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_skip_in_the_middle_leaves_parameters_and_state_untouched(make, fault):
    scaler, weights = scaler_at(growth_interval=100), Weights(make)
    for _ in range(2):
        weights.attempt(scaler)
    values, state = weights.values, state_of(weights)
    assert weights.attempt(scaler, fault)[0] is True
    assert weights.values == values
    torch.testing.assert_close(state_of(weights), state, rtol=0, atol=0)
    weights.attempt(scaler)
    assert weights.values != values


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_applied_steps_equal_those_without_a_scaler(make):
    scaler, weights, plain = scaler_at(growth_interval=2), Weights(make), Weights(make)
    for _ in range(5):
        weights.attempt(scaler)
        plain.optimizer.zero_grad()
        plain.param.sum().backward()
        plain.optimizer.step()
    assert weights.values == plain.values


# ---------------------------------------------------------------- unscale_ and step


@pytest.mark.parametrize("fused", [False, True])
def test_unscale_is_idempotent_within_a_window(fused):
    scaler = scaler_at()
    weights = Weights(functools.partial(SGD, fused=fused))
    weights.backward(scaler)
    assert weights.param.grad.tolist() == [8.0] * 3
    for _ in range(3):
        scaler.unscale_(weights.optimizer)
        assert weights.param.grad.tolist() == [1.0] * 3
    torch.nn.utils.clip_grad_value_([weights.param], 0.5)
    scaler.step(weights.optimizer)
    assert weights.values == [7.75] * 3
    scaler.update()
    weights.backward(scaler)
    assert weights.param.grad.tolist() == [16.0] * 3
    scaler.unscale_(weights.optimizer)  # the next window is unscaled anew
    assert weights.param.grad.tolist() == [1.0] * 3


def test_gradients_of_several_backwards_are_unscaled_together():
    scaler, weights = scaler_at(), Weights()
    for _ in range(3):
        scaler.scale(weights.param.sum()).backward()
    scaler.step(weights.optimizer)
    assert weights.values == [6.5] * 3


def test_lightning_wrapper_is_accepted_everywhere():
    scaler, weights = scaler_at(), Weights()
    wrapper = LightningOptimizer(weights.optimizer)
    weights.backward(scaler)
    scaler.unscale_(wrapper)
    scaler.unscale_(weights.optimizer)  # the same window
    assert weights.param.grad.tolist() == [1.0] * 3
    scaler.step(wrapper)
    assert scaler.was_skipped(wrapper) is False
    assert scaler.was_skipped(weights.optimizer) is False
    scaler.update()
    assert weights.values == [7.5] * 3
    weights.backward(scaler, INF)
    scaler.step(wrapper)
    assert scaler.was_skipped(weights.optimizer) is True


def test_step_returns_what_the_optimizer_returns():
    class Telling(torch.optim.SGD):
        def step(self, factor=1.0):
            super().step()
            return 2.5 * factor

    scaler, weights = scaler_at(), Weights(functools.partial(Telling, lr=0.5))
    weights.backward(scaler)
    assert scaler.step(weights.optimizer, factor=2.0) == 5.0
    scaler.update()
    assert weights.attempt(scaler, NAN) == (True, None)


@pytest.mark.parametrize(("args", "kwargs"), [((), {"closure": print}), ((print,), {})])
def test_closure_is_refused_because_it_would_run_too_late(args, kwargs):
    scaler, weights = scaler_at(), Weights()
    weights.backward(scaler)
    with pytest.raises(RuntimeError, match="after the gradients were checked: call it first"):
        scaler.step(weights.optimizer, *args, **kwargs)
    assert weights.values == [8.0] * 3


def test_step_without_gradients_is_no_attempt():
    scaler, weights, idle = scaler_at(growth_interval=2), Weights(), Weights()
    weights.attempt(scaler)
    assert scaler.step(idle.optimizer) is None
    assert scaler.was_skipped(idle.optimizer) is None
    scaler.update()
    assert idle.values == [8.0] * 3
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (8.0, 1)


def test_zero_gradients_are_an_attempt():
    scaler, weights = scaler_at(), Weights()
    weights.backward(scaler)
    weights.param.grad.zero_()
    scaler.step(weights.optimizer)
    assert scaler.was_skipped(weights.optimizer) is False


def test_two_optimizers_step_and_skip_independently():
    scaler, good, bad = scaler_at(), Weights(), Weights()
    for _ in range(2):
        good.backward(scaler)
        bad.backward(scaler, INF)
        scaler.step(good.optimizer)
        scaler.step(bad.optimizer)
        assert scaler.was_skipped(good.optimizer) is False
        assert scaler.was_skipped(bad.optimizer) is True
        scaler.update()
    assert scaler.get_scale() == 2.0  # one backoff an update, as in torch
    assert (good.values, bad.values) == ([7.0] * 3, [8.0] * 3)


def test_window_is_over_after_update():
    scaler, weights = scaler_at(), Weights()
    weights.attempt(scaler)
    assert scaler.was_skipped(weights.optimizer) is None


def test_calls_in_the_wrong_order_are_refused_as_in_torch():
    scaler, weights = scaler_at(), Weights()
    weights.param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"no loss was scaled.*`scaler\.scale\(loss\)"):
        scaler.unscale_(weights.optimizer)
    weights.backward(scaler)
    scaler.step(weights.optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(weights.optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(weights.optimizer)


# ---------------------------------------------------------------- gradients of every kind


@pytest.mark.parametrize("fault", [None, INF, NAN])
def test_sparse_gradients(fault):
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.constant_(table.weight, 8.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    scaler = scaler_at()
    scaler.scale(table(torch.tensor([0, 0, 2])).sum()).backward()
    assert table.weight.grad.is_sparse
    if fault is not None:
        table.weight.grad._values()[1, 0] = fault
    scaler.unscale_(optimizer)
    if fault is None:
        assert table.weight.grad.to_dense().tolist() == [[2, 2], [0, 0], [1, 1], [0, 0]]
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is (fault is not None)
    expected = [7.0, 8.0, 7.5, 8.0] if fault is None else [8.0] * 4
    assert table.weight.detach()[:, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("fault", [None, complex(INF, 0), complex(0, NAN)])
def test_complex_parameters(dtype, fault):
    weights = Weights(dtype=dtype)
    scaler = scaler_at()
    scaler.scale((weights.param.real + 2 * weights.param.imag).sum()).backward()
    if fault is not None:
        weights.param.grad[2] = fault
    scaler.unscale_(weights.optimizer)
    assert weights.param.grad[0] == 1 + 2j
    scaler.step(weights.optimizer)
    assert scaler.was_skipped(weights.optimizer) is (fault is not None)
    assert weights.values == ([7.5 - 1j] * 3 if fault is None else [8.0] * 3)


def test_double_precision_parameters_keep_their_precision():
    scaler, weights = scaler_at(), Weights(dtype=torch.float64)
    tiny = 1.0 + 2.0**-50
    scaler.scale((weights.param * tiny).sum()).backward()
    scaler.unscale_(weights.optimizer)
    assert weights.param.grad.tolist() == [tiny] * 3
    weights.param.grad[0] = 1e300  # finite in float64
    scaler.step(weights.optimizer)
    assert scaler.was_skipped(weights.optimizer) is False


@pytest.mark.parametrize("bad", [torch.float32, torch.float64, torch.complex64])
def test_one_bad_gradient_of_any_dtype_skips_the_whole_optimizer(bad):
    scaler = scaler_at()
    params = {
        dtype: torch.nn.Parameter(torch.full((2,), 8.0, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.complex64)
    }
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    scaler.scale(sum(p.abs().sum().float() for p in params.values())).backward()
    params[bad].grad[1] = INF
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is True
    assert all(p.detach().tolist() == [8.0, 8.0] for p in params.values())


def test_half_precision_parameters_are_refused_before_anything_changes():
    scaler, weights = scaler_at(), Weights(dtype=torch.float16)
    weights.backward(scaler)
    with pytest.raises(ValueError, match=r"FP16 gradients.*must be float32.*no `\.half\(\)`"):
        scaler.step(weights.optimizer)
    assert weights.param.grad.tolist() == [8.0] * 3


def test_frozen_and_unused_parameters_are_passed_over():
    scaler, used = scaler_at(), torch.nn.Parameter(torch.full((2,), 8.0))
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [frozen, unused]}, {"params": [used]}], lr=0.5)
    scaler.scale(used.sum()).backward()
    scaler.step(optimizer)
    assert used.detach().tolist() == [7.5, 7.5]
    assert unused.tolist() == [1.0, 1.0]


def test_gradients_without_a_scale_are_checked_but_not_changed():
    scaler, weights = scaler_at(), Weights()
    for fault, found in ((None, 0.0), (NAN, 1.0)):
        weights.param.grad = torch.ones(3)
        if fault is not None:
            weights.param.grad[1] = fault
        flags = scaler.check_(weights.optimizer, scaled=False)
        assert [flag.item() for flag in flags.values()] == [found]
        assert weights.param.grad[0] == 1.0


def test_scaled_outputs_keep_their_structure():
    scaler = scaler_at()
    one = torch.ones(())
    assert scaler.scale(one) == 8.0
    assert scaler.scale([one, 2 * one]) == [8.0, 16.0]
    assert scaler.scale((one, [one])) == (8.0, [8.0])
    assert list(scaler.scale(x for x in (one, one))) == [8.0, 8.0]


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_costs_one_host_read_and_nothing_else_costs_any(fused):
    scaler = scaler_at()
    weights = Weights(functools.partial(SGD, fused=fused))
    weights.attempt(scaler)
    for fault in (None, INF):
        weights.backward(scaler, fault)
        with Reads() as free:
            scaler.unscale_(weights.optimizer)
            scaler.get_scale()
        with Reads() as paid:
            scaler.step(weights.optimizer)
        with Reads() as after:
            scaler.was_skipped(weights.optimizer)
            scaler.update()
            scaler.state_dict()
        assert (free.count, paid.count, after.count) == (0, 1, 0)


# ---------------------------------------------------------------- whoever keeps the windows


class Watcher:
    """Keeps windows as a precision plugin does, and writes down what it hears."""

    def __init__(self, scaler):
        self.scaler, self.heard = scaler, []
        scaler.watcher = self

    def before_backward(self, outputs):
        values = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        self.heard.append(("backward", [v.item() for v in values]))

    def unscale_(self, optimizer):
        self.heard.append(("unscale", type(optimizer).__name__))
        self.scaler.note_unscaled(optimizer, self.scaler.check_(optimizer))

    def scale_moved(self, ratio):
        self.heard.append(("moved", ratio))

    def updated(self):
        self.heard.append(("updated", self.scaler.get_scale()))


def test_watcher_hears_of_every_move_in_order():
    scaler, weights = scaler_at(), Weights()
    watcher = Watcher(scaler)
    weights.backward(scaler, INF)
    scaler.unscale_(LightningOptimizer(weights.optimizer))
    scaler.update()
    scaler.set_scale(16.0)
    scaler.set_scale(16.0)  # no move
    scaler.count_clean_batch()
    assert watcher.heard == [
        ("backward", [24.0]),  # the loss as it was: 3 times 8
        ("unscale", "SGD"),
        ("moved", 0.5),
        ("updated", 4.0),
        ("moved", 4.0),
        ("moved", 2.0),
    ]


def test_losses_from_an_iterator_reach_watcher_and_caller_alike():
    scaler = scaler_at()
    watcher = Watcher(scaler)
    scaled = scaler.scale(torch.tensor(x) for x in (1.0, 2.0))
    assert [float(x) for x in scaled] == [8.0, 16.0]
    assert watcher.heard == [("backward", [1.0, 2.0])]


def test_watcher_may_let_an_optimizer_step_again():
    scaler, weights = scaler_at(), Weights()
    Watcher(scaler)
    weights.backward(scaler)
    scaler.step(weights.optimizer)
    weights.backward(scaler)
    scaler.step(weights.optimizer)
    assert weights.values == [7.0] * 3


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "bad", "kind", "legal"),
    [
        ("init_scale", -1.0, ValueError, "a finite number above 0"),
        ("init_scale", NAN, ValueError, "a finite number above 0"),
        ("init_scale", True, TypeError, "a finite number above 0"),
        ("growth_factor", 1.0, ValueError, "a finite number above 1"),
        ("growth_factor", "2", TypeError, "a finite number above 1"),
        ("backoff_factor", 1.0, ValueError, "a number between 0 and 1"),
        ("backoff_factor", None, TypeError, "a number between 0 and 1"),
        ("growth_interval", 0, ValueError, "a whole number above 0"),
        ("growth_interval", 1.5, TypeError, "a whole number above 0"),
        ("dynamic", 1, TypeError, "True or False"),
        ("hysteresis", 0, ValueError, "a whole number above 0"),
        ("hysteresis", True, TypeError, "a whole number above 0"),
        ("min_scale", INF, ValueError, "a finite number above 0, or None for no bound"),
        ("min_scale", True, TypeError, "a finite number above 0, or None for no bound"),
        ("max_scale", 0.0, ValueError, "a finite number above 0, or None for no bound"),
        ("max_scale", "1", TypeError, "a finite number above 0, or None for no bound"),
        ("min_scale", 2.0**25, ValueError, "at most `max_scale`, which is 16777216.0"),
        ("max_scale", 2.0, ValueError, "a value between `min_scale=1.0` and `max_scale=2.0`"),
        ("enabled", 1, TypeError, "True or False"),
        ("enabled", "no", TypeError, "True or False"),
    ],
)
def test_bad_argument_is_named_with_its_legal_values(name, bad, kind, legal):
    with pytest.raises(kind) as caught:
        SkipAwareGradScaler("cpu", **{name: bad})
    named = "init_scale=65536.0" if "between `min" in legal else f"{name}={bad!r}"
    assert str(caught.value).startswith(f"`SkipAwareGradScaler({named})`: expected {legal}.")


def test_arguments_are_torchs_in_torchs_order():
    scaler = SkipAwareGradScaler("cpu", 1024.0, 4.0, 0.25, 7, True)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", 1024.0, 4.0, 0.25, 7).state_dict()
    assert SkipAwareGradScaler("cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()
    assert isinstance(scaler, torch.amp.GradScaler)


def test_numpy_numbers_become_plain_ones():
    scaler = SkipAwareGradScaler(
        "cpu", np.float32(1024), np.int64(4), np.float64(0.25), np.int32(7), hysteresis=np.uint8(2)
    )
    assert [type(v) for v in scaler.state_dict().values()] == [float, float, float, int, int]
    assert list(scaler.state_dict().values()) == [1024.0, 4.0, 0.25, 7, 0]


@pytest.mark.parametrize(
    ("setter", "getter", "good", "bad"),
    [
        ("set_growth_factor", "get_growth_factor", 4.0, 1.0),
        ("set_backoff_factor", "get_backoff_factor", 0.25, 1.0),
        ("set_growth_interval", "get_growth_interval", 3, 0),
    ],
)
def test_setters_take_effect_and_refuse_what_the_constructor_refuses(setter, getter, good, bad):
    scaler = scaler_at()
    getattr(scaler, setter)(good)
    assert getattr(scaler, getter)() == good
    with pytest.raises(
        ValueError, match=f"SkipAwareGradScaler.{setter.removeprefix('set_')}={bad}"
    ):
        getattr(scaler, setter)(bad)
    assert getattr(scaler, getter)() == good


def test_setters_change_how_the_scale_moves():
    scaler, weights = scaler_at(), Weights()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.125)
    weights.attempt(scaler)
    assert scaler.get_scale() == 32.0
    weights.attempt(scaler, INF)
    assert scaler.get_scale() == 4.0


# ---------------------------------------------------------------- state

STATES = st.fixed_dictionaries(
    {
        "scale": st.floats(1.0, 2.0**24, width=32),
        "growth_factor": st.floats(1.0, 16.0, exclude_min=True),
        "backoff_factor": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
        "growth_interval": st.integers(1, 10_000),
        "_growth_tracker": st.integers(0, 20_000),
    }
)


@settings(deadline=None, derandomize=True)
@given(STATES)
def test_state_round_trip_is_the_identity(state):
    scaler = SkipAwareGradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    again = SkipAwareGradScaler("cpu")
    again.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
    assert again.state_dict() == state


@pytest.mark.parametrize("used", [False, True])
def test_restored_run_goes_on_as_the_uninterrupted_one(used):
    plan = [None, None, INF, None, NAN, None, None, None]
    whole, whole_w = scaler_at(3.0, growth_interval=2), Weights()
    seen = []
    for fault in plan:
        whole_w.attempt(whole, fault)
        seen.append((whole.state_dict(), whole_w.values))
    first, weights = scaler_at(3.0, growth_interval=2), Weights()
    for fault in plan[:4]:
        weights.attempt(first, fault)
    resumed = SkipAwareGradScaler("cpu")
    if used:
        Weights().attempt(resumed)  # its tensors exist already
    resumed.load_state_dict(first.state_dict())
    for fault, expected in zip(plan[4:], seen[4:], strict=True):
        weights.attempt(resumed, fault)
        assert (resumed.state_dict(), weights.values) == expected


def test_state_goes_to_torch_and_comes_from_it():
    ours = SkipAwareGradScaler("cpu")
    ours.load_state_dict(
        {**ours.state_dict(), "scale": 256.0, "growth_interval": 9, "_growth_tracker": 5}
    )
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    back = SkipAwareGradScaler("cpu")
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == ours.state_dict()


@pytest.mark.parametrize(("saved", "restored"), [(0.25, 1.0), (2.0**30, 2.0**24), (512.0, 512.0)])
def test_restored_scale_outside_the_bounds_moves_to_the_bound(saved, restored):
    scaler = SkipAwareGradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": saved})
    assert scaler.get_scale() == restored


def test_restoring_leaves_the_constructors_own_arguments_alone():
    scaler = SkipAwareGradScaler("cpu", 32.0, hysteresis=3, min_scale=2.0, max_scale=64.0)
    scaler.load_state_dict(SkipAwareGradScaler("cpu", 16.0, 4.0).state_dict())
    kept = scaler.policy.settings
    assert (kept.hysteresis, kept.min_scale, kept.max_scale, kept.dynamic) == (3, 2.0, 64.0, True)
    assert (scaler.get_growth_factor(), scaler.get_scale()) == (4.0, 16.0)


@pytest.mark.parametrize("key", SkipAwareGradScaler("cpu").state_dict())
@pytest.mark.parametrize("bad", ["missing", None, NAN, -1, True, "8"])
def test_damaged_state_names_the_key_and_changes_nothing(key, bad):
    scaler, weights = scaler_at(growth_interval=5), Weights()
    weights.attempt(scaler)
    before = scaler.state_dict()
    state = {**SkipAwareGradScaler("cpu", 64.0, 4.0, 0.25, 9).state_dict(), key: bad}
    if bad == "missing":
        del state[key]
    with pytest.raises(ScalerStateError, match=f'"{key}"'):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    weights.attempt(scaler)
    assert weights.values == [7.0] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("moment", ["new", "before step", "before update", "after update"])
def test_copy_keeps_settings_and_state_and_goes_its_own_way(copied, moment):
    scaler = scaler_at(32.0, growth_interval=2, hysteresis=2, min_scale=2.0, max_scale=64.0)
    weights = Weights()
    if moment != "new":
        weights.attempt(scaler)
        weights.attempt(scaler, INF)  # borne by hysteresis
        weights.backward(scaler)
    if moment in ("before update", "after update"):
        scaler.step(weights.optimizer)
    if moment == "after update":
        scaler.update()
    made = copied(scaler)
    assert type(made) is SkipAwareGradScaler
    assert made.state_dict() == scaler.state_dict()
    assert made.policy == scaler.policy
    assert made.policy is not scaler.policy
    fresh, before = Weights(), scaler.get_scale()
    left = made.policy.hysteresis_left
    assert [fresh.attempt(made, INF)[0] for _ in range(left)] == [True] * left
    assert made.get_scale() == before / 2
    assert fresh.attempt(made)[0] is False
    assert fresh.values == [7.5] * 3
    assert scaler.get_scale() == before


def test_copy_leaves_the_watcher_behind():
    scaler = scaler_at()
    watcher = Watcher(scaler)
    made = copy.deepcopy(scaler)
    made.set_scale(2.0)
    assert made.watcher is None
    assert scaler.watcher is watcher
    assert watcher.heard == []


# ---------------------------------------------------------------- disabled


@pytest.fixture
def disabled():
    return SkipAwareGradScaler("cpu", enabled=False)


def test_disabled_scaler_passes_everything_through(disabled):
    weights, loss = Weights(), torch.ones(())
    assert disabled.scale(loss) is loss
    weights.backward(disabled)
    disabled.unscale_(weights.optimizer)
    disabled.step(LightningOptimizer(weights.optimizer))
    disabled.update()
    disabled.update(4.0)
    disabled.load_state_dict({})
    assert weights.values == [7.5] * 3
    assert (disabled.get_scale(), disabled.state_dict()) == (1.0, {})


def test_disabled_scaler_knows_of_no_skip(disabled):
    weights = Weights()
    weights.backward(disabled, INF)
    disabled.step(weights.optimizer)
    assert disabled.was_skipped(weights.optimizer) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_disabled_scaler_can_be_copied(disabled, copied):
    made = copied(disabled)
    assert not made.is_enabled()
    assert made.get_scale() == 1.0
