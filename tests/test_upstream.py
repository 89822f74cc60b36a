# SPDX-License-Identifier: Apache-2.0
"""Private names and unwritten behaviour of torch and Lightning that the package relies on.

One test each, named for the fact. When one fails after an upgrade, its message says what has moved;
`lightning_amp_guard/_upstream.py` is the first place to look.
"""

import collections
import copy
import functools
import gc
import inspect
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.compile import from_compiled
from torch.amp.grad_scaler import OptState
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import MixedPrecision as ShardPrecision
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_amp_guard import _upstream
from tests.helpers import Line, ManualLine, batches, fit, make_trainer

# Lightning says so each time; returning None is what those tests are about
NONE_WARNING = "`training_step` returned `None`"

INF, NAN = float("inf"), float("nan")


def param(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values or (8.0, 8.0), dtype=dtype))


def sgd(*params, **kwargs):
    return torch.optim.SGD(params, lr=0.5, **kwargs)


def flag():
    return torch.zeros(())


@pytest.fixture
def one_process():
    """A process group of one, for what needs a group to exist."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bf16(MixedPrecision):
    """Stock's plugin without a scaler: quick on any CPU."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")


def test_every_function_of_upstream_has_a_test_of_its_name():
    functions = [n for n in _upstream.__all__ if inspect.isfunction(getattr(_upstream, n))]
    tests = "\n".join(name for name in globals() if name.startswith("test_"))
    assert [name for name in functions if f"test_{name.rstrip('_')}_" not in tests] == []


# ---------------------------------------------------------------- torch: gradients and kernels


def test_any_nonfinite_and_multiply_flags_and_multiplies_in_one_pass():
    grads, found = [torch.tensor([1.0, 3.0]), torch.tensor([5.0])], flag()
    _upstream.any_nonfinite_and_multiply_(grads, found, torch.tensor(0.5))
    assert [g.tolist() for g in grads] == [[0.5, 1.5], [2.5]], (
        "torch's unscale kernel no longer multiplies in place."
    )
    assert found == 0.0, "torch's unscale kernel flags finite gradients."
    grads[1][0] = NAN
    _upstream.any_nonfinite_and_multiply_(grads, found, torch.tensor(0.5))
    assert found == 1.0, "torch's unscale kernel no longer sets the flag to 1.0."
    _upstream.any_nonfinite_and_multiply_([torch.ones(1)], found, torch.tensor(0.5))
    assert found == 1.0, "torch's unscale kernel now clears a flag that was set."


@pytest.mark.parametrize("fault", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_nonfinite_and_multiply_keeps_what_is_not_finite(fault, dtype):
    grads = [torch.tensor([1.0, fault], dtype=dtype)]
    _upstream.any_nonfinite_and_multiply_(grads, flag(), torch.tensor(0.0))
    assert not grads[0][1].isfinite(), (
        "torch's unscale kernel hides an overflow when it multiplies."
    )


def test_unscale_kernel_does_not_move_version_counters():
    grad = torch.ones(2)
    before = grad._version
    _upstream.any_nonfinite_and_multiply_([grad], flag(), torch.tensor(0.5))
    assert grad._version == before, (
        "torch's unscale kernel moves version counters now, so that unscaling looks like an edit:"
        " mark the cells after it."
    )


def test_halving_and_doubling_is_exact_down_to_the_smallest_normals():
    values = [2.0**-125, 1.5, -(2.0**120) * 1.2345]
    grad = torch.tensor(values)
    for factor in (0.5, 2.0):
        _upstream.any_nonfinite_and_multiply_([grad], flag(), torch.tensor(factor))
    assert grad.tolist() == torch.tensor(values).tolist(), (
        "torch's unscale kernel rounds products with powers of two."
    )


def test_magnitudes_are_the_largest_absolute_values():
    tensors = [torch.tensor([1.0, -4.0]), torch.tensor([2.0, INF]), torch.tensor([NAN, 1.0])]
    sizes = _upstream.magnitudes([*tensors, torch.tensor([3.0], dtype=torch.float64)])
    assert [sizes[0], sizes[1], sizes[3]] == [4.0, INF, 3.0], "`torch._foreach_norm` has moved."
    assert sizes[2] != sizes[2], "`torch._foreach_norm` hides NaN from the inf norm now."
    assert _upstream.magnitudes([]) == []


def test_magnitudes_of_no_elements_are_zero():
    # a sparse gradient of an empty batch, or the empty shard of a small parameter
    assert _upstream.magnitudes([torch.zeros(0, 2), torch.ones(1)]) == [0.0, 1.0], (
        "`torch._foreach_norm` refuses empty tensors, and nothing keeps them from it."
    )


def test_sparse_values_share_the_gradients_memory():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    grad = table.weight.grad
    values = _upstream.sparse_values(grad)
    assert values.shape == (3, 2), "Embedding's sparse gradient comes coalesced now."
    values.mul_(4.0)
    assert grad.to_dense()[1].tolist() == [8.0, 8.0], (
        "`Tensor._values()` is a copy now: sparse gradients would not be unscaled."
    )


def test_as_plain_shares_memory_with_gradients_of_every_kind():
    dense = torch.ones(2)
    complex_ = torch.ones(2, dtype=torch.complex64)
    sparse = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=True)
    plain = _upstream.as_plain([dense, complex_, sparse])
    assert plain[0] is dense
    assert [p.is_complex() for p in plain] == [False] * 3
    for each in plain:
        each.mul_(2.0)
    assert (dense[0], complex_[0], sparse.to_dense()[1]) == (2.0, 2.0, 2.0), (
        "A plain view of a gradient is a copy now: such gradients would not be unscaled."
    )


def test_as_plain_takes_the_local_shard_of_a_dtensor(one_process):
    mesh = init_device_mesh("cpu", (1,))
    local = torch.ones(2)
    shard = DTensor.from_local(local, mesh, run_check=False)
    plain = _upstream.as_plain([shard])[0]
    assert type(plain) is torch.Tensor, (
        "`DTensor._local_tensor` has moved: sharded gradients go through collectives in the check."
    )
    plain.mul_(2.0)
    assert shard.to_local().tolist() == [2.0, 2.0], "`DTensor.to_local()` is a copy now."


def test_whole_gathers_a_sharded_scalar(one_process):
    shard = DTensor.from_local(torch.tensor(3.0), init_device_mesh("cpu", (1,)), run_check=False)
    whole = _upstream.whole(shard)
    assert type(whole) is torch.Tensor, "`DTensor.full_tensor()` has moved."
    assert whole == 3.0
    scalar = torch.tensor(3.0)
    assert _upstream.whole(scalar) is scalar


def test_total_norm_takes_plain_and_sharded_gradients_together(one_process):
    mesh = init_device_mesh("cpu", (1,))
    shard = DTensor.from_local(torch.tensor([4.0]), mesh, run_check=False)
    norm = _upstream.total_norm([torch.tensor([3.0]), shard])
    assert type(norm) is torch.Tensor, "The norm of sharded gradients stays sharded."
    assert norm == 5.0
    assert _upstream.total_norm([shard]) == 4.0
    assert _upstream.total_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0


def test_total_norm_takes_sparse_gradients():
    table = torch.nn.Embedding(4, 1, sparse=True)
    (table(torch.tensor([1, 1, 3])) * 2.0).sum().backward()  # rows: 0, 4, 0, 2
    norm = _upstream.total_norm([table.weight.grad, torch.tensor([4.0])])
    assert norm == 6.0, "`torch.nn.utils.get_total_norm` refuses sparse gradients."


# ---------------------------------------------------------------- torch: who touched a gradient


def test_weak_reference_to_a_gradient_lives_as_long_as_the_gradient():
    p = param()
    p.sum().backward()
    mark = weakref.ref(p.grad)
    gc.collect(0)
    assert mark() is p.grad, (
        "A weak reference to `.grad` dies while the gradient lives: its identity cannot be held."
    )
    p.grad = None
    assert mark() is None, "A weak reference to `.grad` keeps the gradient alive."


def test_grad_marks_hold_identity_and_version():
    used, unused = param(), param()
    used.sum().backward()
    marks = _upstream.grad_marks([used, unused])
    assert marks[1] is None
    assert marks[0] == (weakref.ref(used.grad), used.grad._version)
    assert _upstream.moved_since([used, unused], marks) == []


def writes():
    """Ways to touch a gradient, with what `moved_since` says of it (None: it does not see it)."""
    return {
        "another backward pass": (lambda p: p.sum().backward(), True),
        "clip": (lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1), True),
        "edit in place": (lambda p: p.grad.mul_(2.0), True),
        "copy of the same values": (lambda p: setattr(p, "grad", p.grad.clone()), False),
        "zero in place": (lambda p: sgd(p).zero_grad(set_to_none=False), True),
        "zero to none": (lambda p: sgd(p).zero_grad(set_to_none=True), None),
        "new after none": (
            lambda p: (sgd(p).zero_grad(set_to_none=True), p.sum().backward()),
            False,
        ),
        "edit through .data": (lambda p: p.grad.data.mul_(2.0), None),
        "optimizer step": (lambda p: sgd(p).step(), None),
        "fused optimizer step": (lambda p: sgd(p, fused=True).step(), None),
        "reading": (lambda p: p.grad.norm().item(), None),
    }


@pytest.mark.parametrize("how", writes())
def test_moved_since_sees_who_touched_a_gradient(how):
    touch, same_tensor = writes()[how]
    other, p = param(), param()
    (p.sum() + other.sum()).backward()
    marks = _upstream.grad_marks([other, p])
    touch(p)
    expected = [] if same_tensor is None else [(1, same_tensor)]
    assert _upstream.moved_since([other, p], marks) == expected, (
        f"Gradients and version counters behave differently under: {how}."
    )


def test_moved_since_sees_a_gradient_that_was_not_there():
    p = param()
    marks = _upstream.grad_marks([p])
    p.sum().backward()
    assert _upstream.moved_since([p], marks) == [(0, False)]


def test_gradient_of_a_second_backward_is_added_in_place():
    p = param()
    p.sum().backward()
    grad = p.grad
    p.sum().backward()
    assert p.grad is grad, (
        "Autograd replaces `.grad` when it accumulates: every micro-batch looks like a replacement."
    )


def test_has_gradients_looks_at_every_group():
    optimizer = torch.optim.SGD([{"params": [param()]}, {"params": [late := param()]}], lr=0.5)
    assert not _upstream.has_gradients(optimizer)
    late.grad = torch.zeros(2)
    assert _upstream.has_gradients(optimizer)


def test_all_params_come_in_order():
    params = [param() for _ in range(3)]
    groups = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.5).param_groups
    assert all(a is b for a, b in zip(_upstream.all_params(groups), params, strict=True)), (
        '`param_groups` no longer hold their parameters under "params" in order.'
    )


# ---------------------------------------------------------------- torch: GradScaler


def test_scaler_keeps_its_state_in_the_attributes_that_the_subclass_sets():
    scaler = torch.amp.GradScaler("cpu", 8.0)
    assert vars(scaler) == {
        "_device": "cpu",
        "_enabled": True,
        "_init_scale": 8.0,
        "_scale": None,
        "_growth_factor": 2.0,
        "_backoff_factor": 0.5,
        "_growth_interval": 2000,
        "_init_growth_tracker": 0,
        "_growth_tracker": None,
        "_per_optimizer_states": {},
    }, "`GradScaler` keeps its state elsewhere: `BoundedGradScaler` sets these attributes."
    assert isinstance(scaler._per_optimizer_states, collections.defaultdict)


def test_scaler_makes_its_tensors_at_the_first_scale_from_the_initial_values():
    scaler = torch.amp.GradScaler("cpu", 8.0)
    scaler._init_scale, scaler._init_growth_tracker = 4.0, 3
    assert scaler.scale(torch.ones(())) == 4.0, "`GradScaler.scale` no longer reads `_init_scale`."
    assert scaler._scale.dtype is torch.float32, "`GradScaler` keeps its scale in another dtype."
    assert scaler._scale.ndim == 0
    scaler._scale.fill_(16.0)
    assert scaler.scale(torch.ones(())) == 16.0, "`GradScaler.scale` no longer reads `_scale`."
    assert scaler._get_growth_tracker() == 3, "`GradScaler._get_growth_tracker` has moved."


def test_scaler_reports_its_state_through_methods_that_the_subclass_overrides():
    class Told(torch.amp.GradScaler):
        def get_scale(self):
            return 32.0

        def _get_growth_tracker(self):
            return 7

    state = Told("cpu").state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (32.0, 7), (
        "`GradScaler.state_dict` no longer asks `get_scale` and `_get_growth_tracker`."
    )


def test_scaler_state_of_an_optimizer_begins_ready_and_without_flags():
    state = torch.amp.GradScaler("cpu")._per_optimizer_states[0]
    assert state == {"stage": OptState.READY, "found_inf_per_device": {}}, (
        "`GradScaler` keeps other things per optimizer: see `note_unscaled`."
    )
    assert [stage.name for stage in OptState] == ["READY", "UNSCALED", "STEPPED"]


def test_is_unscaled_tells_between_unscale_and_update():
    scaler, p = torch.amp.GradScaler("cpu", 8.0), param()
    optimizer = sgd(p)
    told = [_upstream.is_unscaled(scaler, optimizer)]
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    told.append(_upstream.is_unscaled(scaler, optimizer))
    scaler.step(optimizer)
    scaler.update()
    told.append(_upstream.is_unscaled(scaler, optimizer))
    assert told == [False, True, False], "`GradScaler` keeps its flags elsewhere."


def test_scaler_unscales_through_the_method_that_the_subclass_overrides():
    signature = inspect.signature(torch.amp.GradScaler._unscale_grads_)
    assert list(signature.parameters) == [
        "self",
        "optimizer",
        "inv_scale",
        "found_inf",
        "allow_fp16",
    ], "`GradScaler._unscale_grads_` takes other arguments."


def test_scaler_inverts_its_scale_in_double_precision():
    scaler, p = torch.amp.GradScaler("cpu", 3.0), param(1.0)
    scaler.scale(p.sum()).backward()
    p.grad.fill_(12345.0)
    scaler.unscale_(sgd(p))
    inverse = torch.tensor(3.0).double().reciprocal().float()
    assert p.grad == torch.tensor(12345.0) * inverse, "`GradScaler` inverts its scale differently."


def test_scaler_state_keys_are_the_five_that_checkpoints_hold():
    assert list(torch.amp.GradScaler("cpu").state_dict()) == [
        "scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
    ], "`GradScaler.state_dict` has other keys: checkpoints for stock Lightning lack or add some."


def test_scale_update_of_torch_grows_at_the_interval_exactly():
    scale, tracker = torch.tensor(8.0), torch.tensor(5, dtype=torch.int32)
    torch._amp_update_scale_(scale, tracker, torch.zeros(()), 2.0, 0.5, 3)
    assert (scale.item(), tracker.item()) == (8.0, 6), (
        "torch grows beyond the interval as well: the counter in stock's entry need not be capped."
    )


def test_stock_scale_reaches_zero():
    scale = torch.tensor(2.0**-149)
    torch._amp_update_scale_(scale, torch.zeros((), dtype=torch.int32), flag() + 1, 2.0, 0.5, 1)
    assert scale == 0.0, "torch keeps its scale above 0 itself now: say so in the documentation."


def test_fused_sgd_leaves_momentum_uninitialised_when_its_first_step_is_skipped(monkeypatch):
    # memory that nobody wrote to may hold anything: let it hold NaN
    monkeypatch.setattr(torch, "empty_like", lambda t, **kwargs: torch.full_like(t, NAN))
    scaler, p = torch.amp.GradScaler("cpu", 8.0), param()
    optimizer = sgd(p, momentum=0.5, fused=True)
    scaler.scale(p.sum()).backward()
    p.grad[0] = INF
    scaler.step(optimizer)
    assert p.tolist() == [8.0, 8.0]
    assert optimizer.state[p]["momentum_buffer"].isnan().all(), (
        "Fused SGD leaves its momentum buffer initialised when found_inf skips its first step: the"
        " reason why skips are decided on the host has gone."
    )


def test_fused_sgd_skips_by_found_inf_and_divides_by_grad_scale():
    p = param()
    optimizer = sgd(p, fused=True)
    for found, expected in ((1.0, 8.0), (0.0, 7.5)):
        p.grad = torch.full((2,), 4.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
        optimizer.step()
        assert p.tolist() == [expected] * 2, "Fused optimizers take scale or skip flag elsewhere."


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_take_true_gradients_when_told_nothing(kind):
    values = []
    for fused in (False, True):
        p = param()
        optimizer = kind([p], lr=0.25, fused=fused)
        p.grad = torch.ones(2)
        optimizer.step()
        values.append(p.tolist())
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)
    assert values[0] != [8.0, 8.0], "A fused optimizer needs `grad_scale` now."


# ---------------------------------------------------------------- torch: modules and trees


def test_is_compiled_tells_both_ways_of_compiling():
    plain, called, in_place = (torch.nn.Linear(2, 2) for _ in range(3))
    in_place.compile(backend="eager")
    assert _upstream.is_compiled(torch.compile(called, backend="eager")), (
        "`torch._dynamo.eval_frame.OptimizedModule` is no longer what `torch.compile` returns."
    )
    assert _upstream.is_compiled(in_place), (
        "`Module._compiled_call_impl` no longer tells of `module.compile()`."
    )
    assert not _upstream.is_compiled(plain)


def test_is_compiled_tells_a_lightning_module_that_lightning_unwrapped():
    module = Line()
    from_compiled(torch.compile(module, backend="eager"))
    assert _upstream.is_compiled(module), (
        "`LightningModule._compiler_ctx` no longer tells that `torch.compile` was taken over."
    )


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_forward_hooks_that_are_always_called_run_after_an_exception(error):
    module, called = torch.nn.Identity(), []
    module.forward = lambda x: (_ for _ in ()).throw(error("planted"))
    module.register_forward_hook(lambda *args: called.append("after"), always_call=True)
    with pytest.raises(error):
        module(1)
    assert called == ["after"], (
        "`always_call=True` hooks no longer run after an exception: autocast stays switched off."
    )


def test_checkpoint_stops_recomputing_with_an_exception_that_hooks_see():
    assert issubclass(torch.utils.checkpoint._StopRecomputationError, Exception), (
        "Activation checkpointing ends its recomputation with something that forward hooks do not"
        " see: autocast stays switched off after a backward pass."
    )


@pytest.mark.filterwarnings("ignore:.*CheckpointFunction.*:UserWarning")
def test_reentrant_checkpoint_refuses_a_probe_by_name():
    x = torch.ones(1, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(out, x, retain_graph=True)
    assert "use_reentrant" in str(caught.value), (
        "Reentrant checkpointing refuses `torch.autograd.grad` in other words: the anomaly probe"
        " takes it for an anomaly."
    )


def test_map_tensors_keeps_the_structure():
    pair = collections.namedtuple("pair", "x y")
    tree = {"a": [torch.ones(1), 2], "b": (pair(torch.ones(1), None),), "c": "text"}
    mapped = _upstream.map_tensors(lambda t: t * 3, tree)
    assert mapped == {"a": [3.0, 2], "b": (pair(3.0, None),), "c": "text"}, (
        "torch's pytrees treat containers differently."
    )
    assert type(mapped["b"][0]) is pair


def test_tensors_in_finds_nested_ones():
    @dataclass
    class Batch:
        x: torch.Tensor
        y: list

    x, y = torch.ones(1), torch.zeros(1)
    trees = ({"x": [x, (None, y)], "z": 3}, [x, [[y]]], Batch(x, [y]), [Batch(x, [y])])
    for tree in trees:
        found = _upstream.tensors_in(tree)
        assert len(found) == 2, "torch's pytrees treat containers differently."
        assert (found[0] is x, found[1] is y) == (True, True)


class Layer(torch.nn.Linear):
    """A linear layer that writes down the dtype of its weight in the forward pass."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        self.seen = self.weight.dtype
        return super().forward(x.to(self.weight.dtype))


POLICIES = {
    "classes": ModuleWrapPolicy({Layer}),  # what Lightning makes of a set of classes
    "custom": CustomPolicy(lambda module: isinstance(module, Layer)),
    "function": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Layer),
}


def fsdp(policy="classes", use_orig_params=True):
    """A root that holds a layer of its own and two that are units."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Layer(), Layer())
    root = FullyShardedDataParallel(
        net,
        auto_wrap_policy=POLICIES[policy],
        mixed_precision=ShardPrecision(torch.float16),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    return root, net


one_rank = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")


@one_rank
@pytest.mark.parametrize("policy", POLICIES)
def test_keep_unit_in_float32_undoes_the_cast_of_one_unit(one_process, policy):
    root, net = fsdp(policy)
    _upstream.keep_unit_in_float32(net[2])
    root(torch.ones(1, 2)).sum().backward()
    assert (net[1].module.seen, net[2].module.seen) == (torch.float16, torch.float32), (
        "An FSDP1 unit keeps what it casts to elsewhere than in `mixed_precision` and its handle."
    )
    assert net[2].weight.grad.dtype is torch.float32


@one_rank
def test_modules_of_unit_are_those_whose_parameters_it_gathers(one_process):
    root, net = fsdp()
    for unit, modules in ((root, [net[0]]), (net[1], [net[1].module])):
        found = _upstream.modules_of_unit(unit)
        assert {id(m) for m in found} == {id(m) for m in modules}, (
            "`FlatParameter._param_infos` no longer names the modules of an FSDP1 unit."
        )
    empty = FullyShardedDataParallel(torch.nn.ReLU(), device_id=torch.device("cpu"))
    assert _upstream.modules_of_unit(empty) == []


@one_rank
def test_plain_name_leaves_out_what_wrappers_add(one_process):
    root, _ = fsdp()
    names = [_upstream.plain_name(name) for name, _ in root.named_modules()]
    assert names == ["", "", "0", "1", "1", "2", "2"], (
        "FSDP1 adds other parts to the names of what it wraps than `clean_tensor_name` takes away."
    )
    parameters = {_upstream.plain_name(name) for name, _ in root.named_parameters()}
    assert parameters == {f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    assert _upstream.plain_name("net._checkpoint_wrapped_module.weight") == "net.weight"
    assert _upstream.plain_name("net.weight") == "net.weight"


@one_rank
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_sharded_grads_are_those_of_units_that_shard(one_process, use_orig_params, monkeypatch):
    root, _ = fsdp(use_orig_params=use_orig_params)
    root(torch.ones(1, 2)).sum().backward()
    assert _upstream.sharded_grads(root) == []  # one rank shards nothing
    monkeypatch.setattr(FlatParamHandle, "uses_sharded_strategy", True)
    found = {id(grad) for grad in _upstream.sharded_grads(root)}
    assert found == {id(p.grad) for p in root.parameters()}, (
        "`FlatParamHandle` keeps the parameters that the optimizer sees elsewhere."
    )


def test_sharded_like_takes_the_part_that_a_dtensor_parameter_holds(one_process):
    mesh = init_device_mesh("cpu", (1,))
    shard = distribute_tensor(torch.zeros(2), mesh, [Shard(0)])
    value = torch.ones(2)
    part = _upstream.sharded_like(value, shard)
    assert (part.placements, part.device_mesh) == (shard.placements, mesh), (
        "`distribute_tensor` no longer takes `src_data_rank`, or ignores placements."
    )
    assert part.to_local().tolist() == [1.0, 1.0]
    assert _upstream.sharded_like(value, torch.zeros(2)) is value


# ---------------------------------------------------------------- torch: operators and nodes


class SeenOperators(_upstream.TorchDispatchMode):
    """Calls `look(name, func, args, kwargs)` before each operator."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look(str(func), func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def test_tensor_hooks_are_found_in_the_dicts_that_handles_refer_to():
    weight, calls = param(1.0), []
    first = weight.register_hook(lambda grad: grad * 2)
    found = _upstream.tensor_hooks(weight)
    weight.register_hook(lambda grad: grad * 3)
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    _upstream.put_tensor_hooks(weight, found)
    weight.sum().backward()
    assert weight.grad.item() == 2.0
    first.remove()
    weight.sum().backward()
    assert (weight.grad.item(), calls) == (3.0, [])


def test_put_tensor_hooks_takes_every_hook_away_where_there_was_none():
    weight, calls = param(1.0), []
    found = _upstream.tensor_hooks(weight)
    weight.register_hook(lambda grad: grad * 3)
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    _upstream.put_tensor_hooks(weight, found)
    weight.sum().backward()
    assert weight.grad.item() == 1.0
    weight.register_hook(lambda grad: grad * 5)  # and new ones can be registered
    weight.sum().backward()
    assert (weight.grad.item(), calls) == (6.0, [])


def test_newest_node_number_is_the_operators_own_when_it_is_dispatched():
    weight, numbers = param(1.0), {}
    with SeenOperators(lambda name, *_: numbers.update({name: _upstream.newest_node_number()})):
        made = weight.exp()
        total = made.sum()
    assert numbers["aten.exp.default"] == _upstream.node_number(made.grad_fn)
    assert numbers["aten.sum.default"] == _upstream.node_number(total.grad_fn)


def test_node_number_grows_and_is_largest_for_what_collects_gradients():
    weight = param(1.0)
    made = weight.exp()
    later = made.exp()
    (leaf, _), *_ = made.grad_fn.next_functions
    numbers = [_upstream.node_number(n) for n in (made.grad_fn, later.grad_fn, leaf)]
    assert numbers == sorted(set(numbers))
    assert leaf.variable is weight


def test_current_node_is_the_one_whose_backward_runs():
    weight, found = param(1.0), {}
    total = weight.exp().sum()
    assert _upstream.current_node() is None
    with SeenOperators(lambda name, *_: found.update({name: _upstream.current_node()})):
        total.backward()
    assert found["aten.mul.Tensor"] is total.grad_fn.next_functions[0][0]
    assert found["aten.ones_like.default"] is None  # before the engine starts


def test_runs_backward_tells_the_frame_that_calls_the_engine():
    seen = []

    def look(grad):
        frame = inspect.currentframe()
        while frame is not None:
            seen.append(_upstream.runs_backward(frame.f_code))
            frame = frame.f_back

    weight = param(1.0)
    weight.register_hook(look)
    weight.sum().backward()
    torch.autograd.grad(weight.sum(), weight)
    assert sum(seen) == 2


def test_written_arguments_are_those_that_change_in_place():
    found = {}

    def look(name, func, args, kwargs):
        found[name] = _upstream.written_arguments(func, args, kwargs)

    x, out = torch.ones(2), torch.empty(2)
    with SeenOperators(look):
        x.add_(x)
        torch.exp(x, out=out)
        torch._foreach_mul_([x, out], 2.0)
        x.exp()
    assert found["aten.add_.Tensor"] == [x]
    assert found["aten.exp.out"][0] is out
    assert [any(t is s for s in (x, out)) for t in found["aten._foreach_mul_.Scalar"]] == [True] * 2
    assert found["aten.exp.default"] == []


@pytest.mark.parametrize("training", [True, False])
def test_unread_statistics_are_those_of_training_alone(training):
    found = {}

    def look(name, func, args, kwargs):
        given = _upstream.unread_statistics(func, args, kwargs)
        found[name.split(".")[1]] = [t.tolist() for t in given]

    norm = torch.nn.BatchNorm1d(2).train(training)
    norm.running_mean.fill_(3.0)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    with SeenOperators(look):
        norm(x).sum().backward()
    forward, backward = [v for k, v in found.items() if "batch_norm" in k]
    assert len(forward) == len(backward) == (2 if training else 0)
    assert found["ones_like"] == []


def test_leaves_in_goes_through_nested_containers():
    assert _upstream.leaves_in(([1.0, {"a": 2}], None)) == [1.0, 2, None]


# ---------------------------------------------------------------- torch: devices and ranks


def test_native_low_precision_asks_for_the_device_at_hand():
    bf16, fp16 = _upstream.native_low_precision("cpu")
    assert isinstance(bf16, bool), "`torch.ops.mkldnn._is_mkldnn_bf16_supported` has moved."
    assert isinstance(fp16, bool), "`torch.ops.mkldnn._is_mkldnn_fp16_supported` has moved."
    assert _upstream.native_low_precision("mps") == (False, True)
    assert _upstream.native_low_precision("hpu") == (False, False)


def test_native_low_precision_leaves_emulation_out(monkeypatch):
    def supported(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert _upstream.native_low_precision("cuda") == (False, True)


def test_cuda_tells_emulated_bfloat16_apart():
    assert "including_emulation" in inspect.signature(torch.cuda.is_bf16_supported).parameters, (
        '`torch.cuda.is_bf16_supported` lost `including_emulation`: "auto" cannot tell old GPUs.'
    )


def test_has_float16_autocast_of_devices(monkeypatch):
    assert _upstream.has_float16_autocast("cpu"), "torch's autocast lost float16 on the CPU."
    assert _upstream.has_float16_autocast("cuda")
    assert not _upstream.has_float16_autocast("meta")
    assert not _upstream.has_float16_autocast("privateuseone")
    for dtypes, expected in (([torch.bfloat16], False), ([torch.float16], True)):
        backend = SimpleNamespace(get_amp_supported_dtype=lambda dtypes=dtypes: dtypes)
        monkeypatch.setattr(torch, "privateuseone", backend, raising=False)
        assert _upstream.has_float16_autocast("privateuseone") is expected, (
            "A plug-in backend says elsewhere which dtypes its autocast supports."
        )


def test_is_fully_sharded_tells_what_fsdp2_manages(one_process):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert not _upstream.is_fully_sharded(net)
    fully_shard(net[0], mesh=init_device_mesh("cpu", (1,)))
    assert _upstream.is_fully_sharded(net), "`fully_shard` no longer makes an `FSDPModule`."
    assert not _upstream.is_fully_sharded(net[1])


class FakeStrategy:
    def __init__(self, model):
        self.model = model


def test_plain_ddp_tells_when_the_all_reduce_spreads_an_inf(one_process):
    net = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(net)
    assert _upstream.plain_ddp(FakeStrategy(ddp), True)
    assert not _upstream.plain_ddp(FakeStrategy(ddp), False)  # manual: steps without a sync
    assert not _upstream.plain_ddp(FakeStrategy(net), True)
    averaging = FakeStrategy(ddp)
    averaging._model_averager = object()
    assert not _upstream.plain_ddp(averaging, True)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    assert not _upstream.plain_ddp(FakeStrategy(ddp), True), (
        "`DistributedDataParallel._comm_hooks` no longer lists communication hooks."
    )


def test_plain_ddp_tells_ignored_parameters(one_process):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, {"1.weight"})
    assert not _upstream.plain_ddp(FakeStrategy(DistributedDataParallel(net)), True), (
        "`DistributedDataParallel.parameters_to_ignore` no longer lists ignored parameters."
    )


def test_comm_hook_names_tell_what_stands_in_for_the_all_reduce(one_process):
    net = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(net)
    assert _upstream.comm_hook_names(FakeStrategy(net)) == []
    assert _upstream.comm_hook_names(FakeStrategy(ddp)) == []
    ddp.register_comm_hook(None, fp16_compress_hook)
    assert _upstream.comm_hook_names(FakeStrategy(ddp)) == ["fp16_compress_hook"], (
        "`DistributedDataParallel._comm_hooks` no longer lists pairs of hook and state."
    )


def test_reduced_by_ddp_leaves_out_what_ddp_ignores(one_process):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[0].bias.requires_grad_(False)
    assert _upstream.reduced_by_ddp(FakeStrategy(net)) == []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, {"1.weight"})
    reduced = _upstream.reduced_by_ddp(FakeStrategy(DistributedDataParallel(net)))
    assert {id(p) for p in reduced} == {id(net[0].weight), id(net[1].bias)}, (
        "`DistributedDataParallel._module_parameters` no longer lists what the all-reduce covers."
    )


def test_ddp_gradients_in_one_bucket_share_a_version_counter(one_process):
    net = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    ddp(torch.ones(1, 2)).sum().backward()
    before = net.weight.grad._version
    net.bias.grad.mul_(2.0)
    assert net.weight.grad._version > before, (
        "Gradients in one DDP bucket have version counters of their own: an edit can be told apart."
    )


# ---------------------------------------------------------------- Lightning: optimizers


def test_unwrap_optimizer_finds_the_wrapped_one():
    optimizer = sgd(param())
    assert _upstream.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer, (
        "`LightningOptimizer` keeps the optimizer elsewhere than in `_optimizer`."
    )
    assert _upstream.unwrap_optimizer(optimizer) is optimizer


def test_unwrap_optimizer_leaves_other_wrappers_alone():
    class Mine(torch.optim.SGD):  # a user's own wrapper, which does more than hand on
        pass

    mine = Mine([param()], lr=0.5)
    mine._optimizer = sgd(param())
    assert _upstream.unwrap_optimizer(mine) is mine


def test_lightning_optimizer_hides_from_isinstance():
    wrapper = LightningOptimizer(sgd(param()))
    assert isinstance(wrapper, torch.optim.SGD), (
        "`LightningOptimizer` no longer poses as the class it wraps: `isinstance` would do."
    )
    assert hasattr(type(wrapper), "toggle_model")


def test_needs_closure_tells_by_the_signature():
    class Line(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    assert _upstream.needs_closure(torch.optim.LBFGS([param()]))
    assert _upstream.needs_closure(Line([param()], lr=0.5))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        optimizer = kind([param()], lr=0.5)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the instance's `step`
        assert not _upstream.needs_closure(optimizer), (
            f"The closure of `{kind.__name__}.step` has no default any more."
        )


def _asserts(self, closure=None):
    assert closure is not None, "give me a closure"


def _raises(self, closure=None):
    if closure is None:
        raise RuntimeError("give me a closure")
    return closure()


def _calls(self, closure=None):
    return closure()


def _asks(self, closure=None):
    loss = None
    if closure is not None:
        loss = closure()
    return loss


def _makes_one(self, closure=None):
    closure = closure or (lambda: 1.0)
    return closure()


def _asks_in_the_expression(self, closure=None):
    return closure() if closure is not None else None


def _gives_up(self, closure=None):
    if closure is None:
        return None
    return closure()


@pytest.mark.parametrize(
    ("step", "needs"),
    [
        (_asserts, True),
        (_raises, True),
        (_calls, True),
        (_asks, False),
        (_makes_one, False),
        (_asks_in_the_expression, False),
        (_gives_up, False),
    ],
)
def test_needs_closure_reads_the_source_of_a_step(step, needs):
    made = type("Made", (torch.optim.SGD,), {"step": torch.no_grad()(step)})
    assert _upstream.needs_closure(made([param()], lr=0.5)) is needs


def test_needs_closure_without_source_goes_by_the_signature():
    scope = {}
    exec("def step(self, closure=None): assert closure", scope)
    made = type("Made", (torch.optim.SGD,), {"step": scope["step"]})
    assert not _upstream.needs_closure(made([param()], lr=0.5))


def test_schedulers_are_found_among_attributes_once_each():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    one, two, three = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(3))
    module = torch.nn.Linear(1, 1)
    module.one, module.again, module.pair, module.named = one, one, (two, 5), {"x": three, "y": []}
    assert _upstream.schedulers_of(module) == [one, two, three]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, [one, two], [1])
    assert _upstream.schedulers_of(outer) == [one, two]
    assert isinstance(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), LRScheduler)
    assert _upstream.schedulers_of(object()) == []


def test_inner_optimizers_finds_those_that_a_wrapper_steps():
    class Wraps(torch.optim.SGD):
        pass

    outer, inner, deep = Wraps([param()], lr=0.5), Wraps([param()], lr=0.5), sgd(param())
    outer.base, inner.many, outer.by_name = inner, [deep], {"again": deep}
    assert _upstream.inner_optimizers(outer) == [inner, deep]
    assert _upstream.inner_optimizers(deep) == []
    inner.back = outer
    assert _upstream.inner_optimizers(outer) == [inner, deep]
    deep.lbfgs = torch.optim.LBFGS([param()])
    assert _upstream.needs_closure(deep)


# ---------------------------------------------------------------- Lightning: where a batch is


class Watching(L.Callback):
    """Asks a question at the stages of a batch."""

    def __init__(self, ask):
        self.ask, self.answers = ask, []

    def look(self, stage):
        self.answers.append((stage, self.ask(self.trainer)))

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer

    def on_train_batch_start(self, *args):
        self.look("start")

    def on_before_optimizer_step(self, *args):
        self.look("step")

    def on_train_batch_end(self, *args):
        self.look("end")

    def on_validation_start(self, *args):
        self.look("validation")


def answers(ask, module=None, n=2, **kwargs):
    watching = Watching(ask)
    fit(module or Line(), Bf16(), n, callbacks=[watching], **kwargs)
    return watching.answers


def test_is_fitting_holds_for_fit_alone():
    seen = {}

    class Asking(L.Callback):
        def setup(self, trainer, pl_module, stage):
            seen[stage] = _upstream.is_fitting(trainer)

    class Model(Line):
        def validation_step(self, batch, batch_idx):
            return self.loss(batch)

        test_step = predict_step = validation_step

    trainer = make_trainer(Bf16(), callbacks=[Asking()])
    assert not _upstream.is_fitting(trainer), "`Trainer.state.fn` is set before anything runs."
    model = Model()
    trainer.fit(model, batches(1), batches(1))
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(model, batches(1))
    assert seen == {"fit": True, "validate": False, "test": False, "predict": False}, (
        "`Trainer.state.fn` no longer tells what the Trainer is doing at set-up."
    )


def test_batch_number_counts_across_epochs():
    numbers = answers(_upstream.batch_number, max_epochs=2)
    expected = [(s, n) for n in (1, 2, 3, 4) for s in ("start", "step", "end")]
    assert numbers == expected, (
        "`batch_progress.total.ready` is no longer the running number of the batch under way."
    )


def test_begins_epoch_at_its_first_batch_alone():
    seen = []

    class Model(Line):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(("batch", _upstream.begins_epoch(self.trainer)))
            return batch

        def training_step(self, batch, batch_idx):
            seen.append(("step", _upstream.begins_epoch(self.trainer)))
            return super().training_step(batch, batch_idx)

    fit(Model(), n=2, max_epochs=2)
    first, later = [("batch", True), ("step", False)], [("batch", False), ("step", False)]
    assert seen == [*first, *later] * 2, (
        "`batch_progress.current.ready` no longer counts the batches of an epoch from 0."
    )


def test_inside_batch_lasts_until_the_step_is_over():
    class Model(Line):
        def validation_step(self, batch, batch_idx):
            return None

        def val_dataloader(self):
            return batches(1)

    inside = answers(_upstream.inside_batch, Model(), n=1, num_sanity_val_steps=0)
    assert inside == [("start", True), ("step", True), ("end", False), ("validation", False)], (
        "`batch_progress.total.processed` no longer moves between the step and the batch's end."
    )


def test_loader_keeps_its_place_if_it_has_a_state_of_its_own():
    class Keeps(list):
        state = None

        def state_dict(self):
            return {"at": 1}

        def load_state_dict(self, state):
            self.state = state

    class Model(Line):
        def training_step(self, batch, batch_idx):
            return self.loss(batch["a"])

    trainer = make_trainer(Bf16())
    assert not _upstream.loader_keeps_its_place(trainer)
    for loader, keeps in ((batches(1), False), (Keeps(batches(1)), True)):
        trainer = make_trainer(Bf16())
        trainer.fit(Model(), {"a": batches(1), "b": loader})
        said = "`FitLoop._combined_loader` no longer holds the training loaders in `flattened`."
        assert _upstream.loader_keeps_its_place(trainer) == keeps, said
        trainer.fit_loop._combined_loader._load_state_dicts([{"at": 2}] * keeps)
        assert getattr(loader, "state", None) == ({"at": 2} if keeps else None), (
            "Lightning no longer restores a loader that has `state_dict` and `load_state_dict`."
        )


@pytest.mark.parametrize("module", [Line, ManualLine])
def test_is_log_step_follows_the_loggers(module, tmp_path):
    def ask(trainer):
        return _upstream.is_log_step(trainer), trainer._logger_connector.should_update_logs

    logger = CSVLogger(tmp_path)
    logged = answers(ask, module(), n=4, log_every_n_steps=2, logger=logger)
    assert [both for stage, both in logged if stage == "end"] == [
        (False, False),
        (True, True),
        (False, False),
        (True, True),
    ], "`_batches_that_stepped` no longer tells whether Lightning logs this batch."


def test_is_log_step_holds_in_every_micro_batch_of_a_window(tmp_path):
    logged = answers(
        _upstream.is_log_step,
        n=8,
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path),
    )
    assert [answer for stage, answer in logged if stage == "start"] == [
        False,
        False,
        True,
        True,
    ] * 2


def test_rest_logged_takes_values_out_of_the_loop_and_keeps_them(tmp_path):
    key, going_through, kept = "on_train_batch_end.k", [], []

    class Logging(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            going_through.append(key in dict(trainer._results.valid_items()))
            _upstream.rest_logged(trainer, "on_train_batch_end", ["k", "absent"])
            going_through.append(key in dict(trainer._results.valid_items()))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (0, 2):
                self.log("k", float(batch_idx + 1))
            kept.append(float(trainer.callback_metrics["k"]))

    trainer = fit(
        Line(), Bf16(), 4, callbacks=[Logging()], logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    assert going_through == [False, False, True, False, False, False, True, False], (
        "`_ResultMetric.has_reset` no longer takes a value out of what is read after every batch."
    )
    assert kept == [1.0, 1.0, 3.0, 3.0], "`callback_metrics` forgets values that rest."
    assert float(trainer.callback_metrics["k"]) == 3.0


# ---------------------------------------------------------------- Lightning: the life cycle


class TracingPlugin(Bf16):
    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def convert_module(self, module):
        self.trace.append(f"plugin.convert_module {type(module).__name__}")
        return super().convert_module(module)

    def connect(self, model, optimizers, lr_schedulers):
        self.trace.append(f"plugin.connect {len(optimizers)}")
        return super().connect(model, optimizers, lr_schedulers)

    def on_load_checkpoint(self, checkpoint):
        self.trace.append("plugin.on_load_checkpoint")

    def load_state_dict(self, state_dict):
        self.trace.append("plugin.load_state_dict")

    def state_dict(self):
        return {"here": 1}

    def teardown(self):
        self.trace.append("plugin.teardown")
        super().teardown()


class TracingCallback(L.Callback):
    def __init__(self, trace):
        self.trace = trace

    def state_dict(self):
        return {"here": 1}

    def load_state_dict(self, state_dict):
        self.trace.append("cb.load_state_dict")


def traced(name):
    return lambda self, *args, **kwargs: self.trace.append(f"cb.{name}")


for hook in (
    "setup",
    "on_load_checkpoint",
    "on_fit_start",
    "on_train_start",
    "on_train_end",
    "on_fit_end",
    "on_test_start",
    "on_exception",
    "teardown",
):
    setattr(TracingCallback, hook, traced(hook))


@pytest.fixture
def saved(tmp_path):
    """The path of a checkpoint after two batches, written under the tracing plugin."""
    trainer = fit(Line(), TracingPlugin([]), 2, callbacks=[TracingCallback([])], max_steps=2)
    path = tmp_path / "two.ckpt"
    trainer.save_checkpoint(path)
    return path


def test_life_cycle_of_plugin_and_callbacks_in_a_resumed_fit(saved):
    trace = []
    model = Line()
    fit(
        model,
        TracingPlugin(trace),
        2,
        callbacks=[TracingCallback(trace)],
        max_epochs=2,
        ckpt_path=saved,
    )
    assert trace == [
        "cb.setup",
        "cb.on_load_checkpoint",
        "cb.load_state_dict",
        "plugin.convert_module Line",
        "plugin.connect 1",
        "cb.on_fit_start",
        "plugin.on_load_checkpoint",
        "plugin.load_state_dict",
        "cb.on_train_start",
        "cb.on_train_end",
        "plugin.teardown",
        "cb.on_fit_end",
        "cb.teardown",
    ], "Lightning runs the life cycle of plugins and callbacks in another order."


def test_life_cycle_after_an_exception_tears_the_plugin_down_but_no_callback():
    class Failing(Line):
        def training_step(self, batch, batch_idx):
            raise ValueError("planted")

    trace = []
    with pytest.raises(ValueError, match="planted"):
        fit(Failing(), TracingPlugin(trace), 1, callbacks=[TracingCallback(trace)])
    assert trace == [
        "cb.setup",
        "plugin.convert_module Failing",
        "plugin.connect 1",
        "cb.on_fit_start",
        "cb.on_train_start",
        "cb.on_exception",
        "plugin.teardown",
    ], "Lightning cleans up after an exception in another way."


def test_life_cycle_of_a_test_run_connects_and_loads_the_plugin_too(saved):
    class Tested(Line):
        def test_step(self, batch, batch_idx):
            return None

    trace = []
    trainer = make_trainer(TracingPlugin(trace), callbacks=[TracingCallback(trace)])
    trainer.test(Tested(), batches(1), ckpt_path=saved, verbose=False)
    assert trace == [
        "cb.setup",
        "cb.on_load_checkpoint",
        "cb.load_state_dict",
        "plugin.convert_module Tested",
        "plugin.connect 0",
        "plugin.on_load_checkpoint",
        "plugin.load_state_dict",
        "cb.on_test_start",
        "plugin.teardown",
        "cb.teardown",
    ], "Lightning treats the plugin differently in a test run."


def test_plugin_state_is_kept_under_the_class_qualname(saved):
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["TracingPlugin"] == {"here": 1}, (
        "Lightning keeps a precision plugin's state under another key than its `__qualname__`."
    )


def test_plugin_may_add_entries_to_the_whole_checkpoint(tmp_path):
    class Adding(TracingPlugin):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["MixedPrecision"] = {
                "scale": checkpoint["state_dict"]["lin.weight"].shape[1]
            }

    trainer = fit(Line(), Adding([]), 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert checkpoint["MixedPrecision"] == {"scale": 4}, (
        "Lightning no longer calls `on_save_checkpoint` of the precision plugin."
    )


def test_old_scaler_entry_is_handed_to_every_mixed_precision_plugin(saved, tmp_path):
    checkpoint = torch.load(saved, weights_only=True)
    old = tmp_path / "old.ckpt"
    del checkpoint["TracingPlugin"]
    checkpoint["native_amp_scaling_state"] = {"scale": 1.0}
    torch.save(checkpoint, old)
    trace = []
    fit(
        Line(),
        TracingPlugin(trace),
        2,
        callbacks=[TracingCallback(trace)],
        max_epochs=2,
        ckpt_path=old,
    )
    assert trace.count("plugin.load_state_dict") == 1, (
        "Lightning no longer hands `native_amp_scaling_state` to `MixedPrecision` plugins."
    )


def test_gradients_are_cleared_after_the_training_state_is_restored(saved):
    trace = []

    class Model(Line):
        def zero_grad(self, *args, **kwargs):
            trace.append("zero_grad")
            super().zero_grad(*args, **kwargs)

        def on_train_start(self):
            trace.append(f"start, gradient {self.lin.weight.grad}")

    class Giving(TracingPlugin):
        def on_load_checkpoint(self, checkpoint):
            super().on_load_checkpoint(checkpoint)
            weight = model.lin.weight
            weight.grad = torch.ones_like(weight)

    model = Model()
    fit(
        model,
        Giving(trace),
        2,
        callbacks=[TracingCallback([])],
        max_epochs=2,
        ckpt_path=saved,
    )
    begin = trace.index("plugin.on_load_checkpoint")
    assert trace[begin : begin + 3] == [
        "plugin.on_load_checkpoint",
        "zero_grad",
        "start, gradient None",
    ], (
        "`Trainer._run_stage` no longer clears gradients after the training state is restored: a"
        " saved window may be opened at once."
    )


# ---------------------------------------------------------------- Lightning: the path of a step


def traced_step(module, **kwargs):
    trace = []

    class Plugin(Bf16):
        def convert_input(self, data):
            trace.append("convert_input")
            return super().convert_input(data)

        def forward_context(self):
            trace.append("forward_context")
            return super().forward_context()

        def pre_backward(self, tensor, module):
            trace.append("pre_backward")
            return super().pre_backward(tensor, module)

        def post_backward(self, tensor, module):
            trace.append("post_backward")
            return super().post_backward(tensor, module)

        def optimizer_step(self, optimizer, model, closure, **kwargs):
            trace.append(f"optimizer_step {type(optimizer).__name__} {sorted(kwargs)}")
            result = closure()
            trace.append("closure over")
            self._after_closure(model, optimizer)
            optimizer.step(**kwargs)
            trace.append("stepped")
            return result

        def clip_gradients(self, optimizer, *args, **kwargs):
            trace.append(f"clip_gradients {type(optimizer).__name__}")

    class Callback(L.Callback):
        pass

    for name in ("on_before_backward", "on_after_backward", "on_before_optimizer_step"):
        setattr(Callback, name, lambda self, *args, name=name: trace.append(name))
    fit(module, Plugin(), 1, callbacks=[Callback()], **kwargs)
    return trace


def test_step_of_automatic_optimization_passes_the_plugin_in_this_order():
    assert traced_step(Line(), gradient_clip_val=1.0) == [
        "convert_input",
        "optimizer_step SGD []",
        "forward_context",
        "pre_backward",
        "on_before_backward",
        "post_backward",
        "on_after_backward",
        "closure over",
        "on_before_optimizer_step",
        "clip_gradients SGD",
        "stepped",
    ], "Lightning takes an automatic step along another path."


def test_step_of_manual_optimization_passes_the_plugin_in_this_order():
    assert traced_step(ManualLine()) == [
        "convert_input",
        "forward_context",  # around all of `training_step`, steps included
        "pre_backward",
        "on_before_backward",
        "post_backward",
        "on_after_backward",
        "optimizer_step SGD []",
        "closure over",
        "on_before_optimizer_step",
        "stepped",
    ], "Lightning takes a manual step along another path."


def test_after_closure_runs_hooks_and_then_clips():
    assert list(inspect.signature(Precision._after_closure).parameters) == [
        "self",
        "model",
        "optimizer",
    ], "`Precision._after_closure` has moved: it runs the hooks before a step and clips."


def test_clipping_of_the_base_class_takes_the_arguments_that_are_handed_on():
    assert list(inspect.signature(Precision.clip_gradients).parameters) == [
        "self",
        "optimizer",
        "clip_val",
        "gradient_clip_algorithm",
    ], "`Precision.clip_gradients` takes other arguments."
    with pytest.raises(RuntimeError, match="fused"):
        Bf16().clip_gradients(sgd(param(), fused=True), 1.0)  # why it is passed over


def test_mixed_precision_scales_the_loss_before_the_hook():
    seen = []

    class Seeing(Line):
        def on_before_backward(self, loss):
            seen.append(float(loss.detach()))

    fit(Seeing(start=1.0), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 8.0)), 1)
    assert seen == [32.0], "`MixedPrecision.pre_backward` no longer scales before the hooks."


@pytest.mark.filterwarnings(f"ignore:{NONE_WARNING}:UserWarning")
def test_step_is_reached_without_a_gradient_when_training_step_returns_none():
    trace = traced_step(Line(["none"]))
    assert "pre_backward" not in trace
    assert "stepped" in trace, (
        "Lightning no longer calls `optimizer_step` for a `training_step` that returned None."
    )


# ---------------------------------------------------------------- Lightning: schedules, averages


def test_lr_scheduler_step_is_looked_up_on_the_instance():
    calls = []
    model = Line(make_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    model.lr_scheduler_step = lambda scheduler, metric: calls.append(metric)
    fit(model, Bf16(), 3)
    assert calls == [None] * 3, (
        "Lightning no longer looks `lr_scheduler_step` up on the module instance: the schedule"
        " gate's wrapper is passed by."
    )


def test_scheduler_state_holds_instance_attributes():
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(param()), 1)
    before = scheduler.state_dict().keys()
    scheduler.mark = 1
    assert scheduler.state_dict().keys() - before == {"mark"}, (
        "A scheduler's `state_dict` leaves instance attributes out: no need to swap the class."
    )


def test_scheduler_state_does_not_notice_a_swapped_class():
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(param()), 1)
    before = copy.deepcopy(scheduler.state_dict())
    scheduler.__class__ = type("StepLR", (type(scheduler),), {"step": lambda self: None})
    assert scheduler.state_dict() == before
    scheduler.step()
    assert scheduler.last_epoch == 0, (
        "`LRScheduler` puts its own `step` on the instance: a swapped class is not asked."
    )


def test_weight_averaging_asks_again_in_the_next_windows_first_micro_batch():
    asked = []

    class Refusing(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            if step_idx is not None:
                asked.append((self.batch_idx, step_idx))
            return False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.batch_idx = batch_idx
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    fit(Line(), Bf16(), 4, callbacks=[Refusing()], accumulate_grad_batches=2)
    assert asked == [(1, 0), (2, 0), (3, 1)], (
        "`WeightAveraging` asks `should_update` at other times, by keyword `step_idx`."
    )


def test_stochastic_weight_averaging_samples_through_the_method_that_is_wrapped():
    parameters = list(inspect.signature(StochasticWeightAveraging.update_parameters).parameters)
    assert parameters == ["average_model", "model", "n_averaged", "avg_fn"], (
        "`StochasticWeightAveraging.update_parameters` takes other arguments."
    )
    calls = []
    swa = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2)
    swa.update_parameters = lambda *args: calls.append(len(args))
    fit(Line(), Bf16(), 1, callbacks=[swa], max_epochs=3)
    assert calls == [4, 4], (
        "`StochasticWeightAveraging` no longer samples through `self.update_parameters`."
    )


@pytest.mark.filterwarnings(f"ignore:{NONE_WARNING}:UserWarning")
def test_global_step_counts_arrivals_without_a_backward_too():
    trainer = fit(Line(["none", "good", "none"]), Bf16(), 3)
    assert trainer.global_step == 3, "`Trainer.global_step` has another meaning."


def test_count_as_stepped_silences_the_order_warning():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _upstream.count_as_stepped(optimizer)
    scheduler.step()  # torch's warning about the order would be an error here
    assert scheduler.last_epoch == 1, "Torch remembers a step elsewhere than in `_opt_called`."


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_reentrantly_finds_the_node(reentrant):
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum()
    assert _upstream.checkpoints_reentrantly(loss) is reentrant, (
        "Torch's node of reentrant checkpointing has another name."
    )


def test_torch_dispatch_mode_sees_operators_below_autocast_forward_and_backward():
    seen = []

    class Mode(_upstream.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.name(), str(getattr((*args, None)[0], "dtype", ""))))
            return func(*args, **(kwargs or {}))

    weight = torch.nn.Parameter(torch.ones(2, 2))
    with Mode():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (torch.ones(2, 2) @ weight).sum()
        loss.backward()
    products = [dtype for name, dtype in seen if name == "aten::mm"]
    assert products == ["torch.float16"] * 2, (
        "`TorchDispatchMode` no longer sees what autocast made of an operator, in both passes."
    )


def test_has_autocast_rule_asks_the_dispatcher():
    found = [
        _upstream.has_autocast_rule(*question)
        for question in [
            ("aten::mm", "cpu"),
            ("aten::mm.out", "cpu"),
            ("aten::exp", "cpu"),
            ("aten::exp", "cuda"),
            ("aten::no_such_operator", "cpu"),
            ("aten::mm", "meta"),
        ]
    ]
    assert found == [True, False, False, True, False, False], (
        "`torch._C._dispatch_has_kernel_for_dispatch_key` answers otherwise, or autocast has other"
        " rules: `diagnosis/profile/autocast_rules.py` tells users of them."
    )


class PlainTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert _upstream.function_of(ctx) is type(ctx)._forward_cls
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class DecoratedTwice(PlainTwice):
    forward = staticmethod(torch.amp.custom_fwd(PlainTwice.forward, device_type="cpu"))


class WrappedTwice(PlainTwice):
    forward = staticmethod(functools.wraps(DecoratedTwice.forward)(lambda ctx, x: 2 * x))


def test_function_of_is_the_class_of_a_node_and_of_a_ctx():
    y = PlainTwice.apply(torch.ones(1, requires_grad=True))
    assert _upstream.function_of(y.grad_fn) is PlainTwice, (
        "The node of an `autograd.Function` no longer names its class in `_forward_cls`."
    )
    assert _upstream.function_of((y * 2).grad_fn) is None


def test_uses_custom_fwd_sees_the_decorator_through_other_wrappers():
    found = [_upstream.uses_custom_fwd(f) for f in (PlainTwice, DecoratedTwice, WrappedTwice)]
    assert found == [False, True, True], (
        "`torch.amp.custom_fwd` no longer returns a function of `torch/amp/autocast_mode.py`."
    )


def precision_flags():
    places = [("generic", "all")]
    places += [(b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]
    return [torch._C._get_fp32_precision_getter(*place) for place in places]


@pytest.mark.parametrize("legacy", ["highest", "medium"])
def test_full_float32_puts_both_sets_of_flags_back(legacy):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(legacy)
        flags = precision_flags()
        with _upstream.full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
            assert not {"tf32", "bf16"} & set(precision_flags()), "A flag still allows TF32."
        assert precision_flags() == flags, "The new set of precision flags does not come back."
        assert torch.get_float32_matmul_precision() == legacy
    finally:
        torch.set_float32_matmul_precision(before)


def test_full_float32_works_where_only_the_new_flags_were_written():
    flags, before = precision_flags(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        written = precision_flags()
        with pytest.raises(RuntimeError, match="legacy"):
            _ = torch.backends.cuda.matmul.allow_tf32
        with _upstream.full_float32():
            assert not {"tf32", "bf16"} & set(precision_flags()), "A flag still allows TF32."
        assert precision_flags() == written, "The new set of precision flags does not come back."
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert precision_flags() == flags


# ---------------------------------------------------------------------- watching for inf and NaN


def test_batch_of_gives_what_training_step_was_given():
    seen = []

    class Looks(Line):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            seen.append((_upstream.batch_of(closure), self.given))

        def training_step(self, batch, batch_idx):
            self.given = batch
            return super().training_step(batch, batch_idx)

    fit(Looks(), n=2)
    assert len(seen) == 2
    assert all(found is given for found, given in seen)
    assert _upstream.batch_of(lambda: None) is None
    assert _upstream.batch_of(functools.partial(max, 1)) is None


def test_inside_backward_is_true_in_a_recomputation_only():
    seen = []

    def block(x):
        seen.append(_upstream.inside_backward())
        return x.tanh()

    for reentrant in (False, True):
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True, False, True]


def test_inside_transform_is_true_under_vmap_and_grad_only():
    seen = []

    def look(x):
        seen.append(_upstream.inside_transform())
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, True, True, False]


def test_node_keeps_its_metadata_while_the_graph_lives():
    y = torch.ones(2, requires_grad=True).exp()
    y.grad_fn.metadata["mark"] = 1
    gc.collect()
    assert y.grad_fn.metadata == {"mark": 1}


def test_node_hook_sees_what_goes_out_and_what_comes_in_before_saved_tensors_go():
    x = torch.full((2,), 3.0, requires_grad=True)
    y, seen = x.square(), []
    y.grad_fn.register_hook(lambda made, given: seen.append((made[0].tolist(), given[0].tolist())))
    (2 * y).sum().backward()
    assert seen == [([12.0, 12.0], [2.0, 2.0])]


# ---------------------------------------------------------------- torch: fused optimizers


FUSED = {
    "adam": lambda p: torch.optim.Adam([p], lr=0.5, fused=True),
    "adamw": lambda p: torch.optim.AdamW([p], lr=0.5, fused=True),
    "sgd": lambda p: torch.optim.SGD([p], lr=0.5, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad([p], lr=0.5, fused=True),
}


def with_gradient(*values):
    p = param()
    p.grad = torch.tensor(values or (4.0, 8.0))
    return p


@pytest.mark.parametrize("name", FUSED)
def test_steps_with_scale_marks_torch_s_fused_optimizers(name):
    assert _upstream.steps_with_scale(FUSED[name](param()))
    assert not _upstream.steps_with_scale(torch.optim.AdamW([param()]))


@pytest.mark.parametrize("name", FUSED)
def test_skips_on_device_knows_fused_adam_and_adamw(name):
    assert _upstream.skips_on_device(FUSED[name](param())) is (name in ("adam", "adamw"))


@pytest.mark.parametrize("name", FUSED)
def test_takes_grad_scale_knows_torch_s_own_fused_optimizers_without_hooks_of_others(name):
    optimizer = FUSED[name](param())
    assert _upstream.takes_grad_scale(optimizer)
    own = type("Own", (type(optimizer),), {})([param()], lr=0.5, fused=True)
    assert not _upstream.takes_grad_scale(own)
    handle = optimizer.register_step_pre_hook(lambda *args: None)
    assert not _upstream.takes_grad_scale(optimizer)
    handle.remove()
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *args: None)  # for every optimizer there is
        seen = _upstream.takes_grad_scale(optimizer)
        handle.remove()
        assert not seen, "torch keeps its global step hooks elsewhere"
    optimizer.grad_scale = torch.tensor(2.0)  # a user's own
    assert not _upstream.takes_grad_scale(optimizer)
    optimizer.grad_scale = None
    assert _upstream.takes_grad_scale(optimizer)
    optimizer.add_param_group({"params": [param()], "fused": False})
    assert not _upstream.takes_grad_scale(optimizer)


@pytest.mark.parametrize("name", FUSED)
def test_grad_scale_divides_the_gradients_while_a_fused_optimizer_steps(name):
    scaled, plain = with_gradient(4.0, 8.0), with_gradient(1.0, 2.0)
    optimizer = FUSED[name](scaled)
    with _upstream.grad_scale(optimizer, 4.0, scaled.device):
        optimizer.step()
    FUSED[name](plain).step()
    assert torch.equal(scaled, plain), "fused optimizers no longer divide by `grad_scale`"
    assert torch.equal(scaled.grad, plain.grad), "nor leave the gradients divided"
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_found_inf_for_makes_a_fused_adam_leave_everything_as_it_was(name):
    p = with_gradient(INF, 1.0)
    optimizer = FUSED[name](p)
    with _upstream.found_inf_for(optimizer, torch.ones(())):
        optimizer.step()
    assert p.tolist() == [8.0, 8.0]
    assert not any(value.any() for value in optimizer.state[p].values())
    with _upstream.found_inf_for(optimizer, torch.zeros(())):
        p.grad = torch.ones(2)
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1.0
    assert not hasattr(optimizer, "found_inf")


def test_multiply_multiplies_all_in_one_operation():
    grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    _upstream.multiply_(grads, 0.5)
    assert [g.tolist() for g in grads] == [[0.5, 1.0], [1.5]]


def test_update_scale_backs_off_counts_and_grows_on_the_device():
    scale, tracker = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    seen = []
    for found in (1.0, 0.0, 0.0, 0.0):
        _upstream.update_scale_(scale, tracker, torch.tensor(found), 2.0, 0.5, 2)
        seen.append((float(scale), int(tracker)))
    assert seen == [(4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1)]


@pytest.mark.parametrize("fused", [False, True])
def test_found_inf_tells_what_torch_s_scaler_has_flagged(fused):
    p = param()
    optimizer = torch.optim.AdamW([p], lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert not _upstream.found_inf(scaler, optimizer)
    scaler.scale((p * INF).sum()).backward()
    scaler.step(optimizer)
    assert _upstream.found_inf(scaler, optimizer)
    scaler.update()
    assert not _upstream.found_inf(scaler, optimizer)


# ---------------------------------------------------------------- Lightning: hooks and the last step


def test_hooks_and_clip_names_the_method_that_calls_the_hooks_and_clips():
    called = []

    class Looks(Line):
        def on_before_optimizer_step(self, optimizer):
            called.append("hook")

        def configure_gradient_clipping(self, *args, **kwargs):
            called.append("clip")

    model = Looks()
    plugin = MixedPrecision("bf16-mixed", "cpu")
    original = getattr(plugin, _upstream.HOOKS_AND_CLIP)

    def wrapped(*args):
        called.append("before")
        original(*args)
        called.append("after")

    setattr(plugin, _upstream.HOOKS_AND_CLIP, wrapped)
    fit(model, plugin, n=1)
    assert called == ["before", "hook", "clip", "after"]


def test_home_of_is_where_a_function_was_written_whatever_wraps_copies():
    inherited = L.LightningModule.on_before_optimizer_step

    @functools.wraps(inherited)
    def instrumented(*args):
        return inherited(*args)

    assert instrumented.__module__ == inherited.__module__ == "lightning.pytorch.core.hooks"
    assert _upstream.home_of(inherited) == "lightning.pytorch.core.hooks"
    assert _upstream.home_of(instrumented) == __name__
    assert _upstream.home_of(None) == _upstream.home_of(functools.partial(inherited)) == ""

    class Instrumented(Line):
        on_before_optimizer_step = instrumented

    assert _upstream.is_overridden("on_before_optimizer_step", Instrumented())


def test_is_overridden_tells_lightning_s_empty_hooks_from_a_user_s():
    class Looks(Line):
        def on_before_optimizer_step(self, optimizer):
            """Look."""

    class Callback(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            """Look."""

    hook = "on_before_optimizer_step"
    assert [_upstream.is_overridden(hook, x) for x in (Looks(), Callback())] == [True, True]
    assert not _upstream.is_overridden(hook, Line())
    assert not _upstream.is_overridden(hook, L.Callback())
    for name in ("configure_gradient_clipping", "clip_gradients"):
        assert not _upstream.is_overridden(name, Line())
    callback = L.Callback()
    callback.on_before_optimizer_step = lambda *args: None
    assert _upstream.is_overridden(hook, callback)


@pytest.mark.parametrize(
    ("kwargs", "last"),
    [
        ({}, [2, 5]),
        ({"max_steps": 4}, [2, 3]),
        ({"limit_train_batches": 2}, [1, 3]),
    ],
    ids=str,
)
def test_steps_last_is_true_at_the_last_step_of_an_epoch_and_of_the_fit(kwargs, last):
    seen = []

    class Looks(Line):
        def optimizer_step(self, *args):
            seen.append(_upstream.steps_last(self.trainer))
            super().optimizer_step(*args)

    fit(Looks(), n=3, max_epochs=2, **kwargs)
    assert [i for i, is_last in enumerate(seen) if is_last] == last


def test_averaging_node_is_read_off_the_graph_of_a_loss():
    scores, labels = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
    loss = torch.nn.functional.cross_entropy
    found = [
        _upstream.averaging_node(made, divided=False)
        for made in (
            loss(scores, labels),
            loss(scores, labels, reduction="sum"),
            scores.mean(),
            scores.sum() / 2,
        )
    ]
    assert found == ["NllLossBackward0", "", "MeanBackward0", ""], (
        "Autograd's nodes no longer tell how a loss was reduced (`_saved_reduction`, names, sizes)."
    )
    assert scores.mean().grad_fn._saved_self_sym_numel == 6
    assert _upstream.averaging_node(scores.mean() / 4, divided=True) == "MeanBackward0"
