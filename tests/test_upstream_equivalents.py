# SPDX-License-Identifier: Apache-2.0
"""What torch tests of its GradScaler, and Lightning of its AMP plugin, held by our classes.

Where we differ on purpose, a test beside says so and why.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import SafeAMP, ScalerStateError, SkipAwareGradScaler
from tests.helpers import Line, ManualLine, batches, fit, make_trainer, stock_plugin

INF, NAN = float("inf"), float("nan")
UNBOUNDED = {"min_scale": None, "max_scale": None}
TORCH, OURS = torch.amp.GradScaler, SkipAwareGradScaler


def ours(scale=4.0, **kwargs):
    return OURS("cpu", scale, **{**UNBOUNDED, **kwargs})


def param(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values or (1.0, 2.0), dtype=dtype))


def sgd(*params, lr=1.0, **kwargs):
    return torch.optim.SGD(params, lr=lr, **kwargs)


# ====================================================================== torch: one training loop

OPTIMIZERS = {
    f"{make.__name__}{''.join(f'-{k}' for k in kwargs)}": (make, kwargs)
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    for kwargs in ({}, {"foreach": True}, {"fused": True})
}


def nets(make, kwargs, n=2):
    """`n` equal nets with equal optimizers."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    modules = [first, *(copy.deepcopy(first) for _ in range(n - 1))]
    return [(m, make(m.parameters(), lr=0.25, **kwargs)) for m in modules]


def data(n=4):
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(n)]


def loss_of(module, x, y, *, autocast):
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = module(x)
    return torch.nn.functional.mse_loss(out.float(), y)


def loop(module, optimizer, scaler, *, autocast=False, bad=2, each=None):
    """Four steps, the gradient of the one numbered `bad` being inf; return whether each ran."""
    ran = []
    for i, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        before = next(module.parameters()).detach().clone()
        scaler.scale(loss_of(module, x, y, autocast=autocast)).backward()
        if i == bad:
            module[1].weight.grad[0, 0] = INF
        if each is not None:
            each(scaler, optimizer, module)
        scaler.step(optimizer)
        scaler.update()
        ran.append(not torch.equal(before, next(module.parameters())))
    return ran


def assert_equal(a, b, **tolerance):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **{"rtol": 0, "atol": 0, **tolerance})


def clip(scaler, optimizer, module):
    """Clip to the scaled limit, as one does without `unscale_`."""
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5 * scaler.get_scale())


def unscale_and_clip(scaler, optimizer, module):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)


@pytest.mark.parametrize("each", [None, unscale_and_clip], ids=["plain", "unscale"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch_s_scaler_and_a_loop_without_one(name, autocast, each):
    (a, opt_a), (b, opt_b), (c, opt_c) = nets(*OPTIMIZERS[name], n=3)
    kwargs = {"growth_interval": 2, "growth_factor": 2.0, "backoff_factor": 0.25}
    theirs, mine = TORCH("cpu", 128.0, **kwargs), OURS("cpu", 128.0, **kwargs)
    assert loop(a, opt_a, theirs, autocast=autocast, each=each)[2] is False
    assert loop(b, opt_b, mine, autocast=autocast, each=each) == [True, True, False, True]
    # two clean steps grow, the overflow backs off, one clean step
    assert mine.get_scale() == theirs.get_scale() == 128.0 * 2 * 0.25
    assert mine.state_dict() == theirs.state_dict()
    # fused and with an early unscale too: what torch leaves to the kernel is done before it here
    assert_equal(a, b, atol=0 if "fused" not in name or each else 1e-6)
    for i, (x, y) in enumerate(data()):
        opt_c.zero_grad()
        loss_of(c, x, y, autocast=False).backward()
        if each is not None:
            torch.nn.utils.clip_grad_norm_(c.parameters(), 0.5)
        if i != 2:
            opt_c.step()
    if not autocast:
        assert_equal(b, c, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_the_first_step_leaves_no_trace(name):
    ((module, optimizer),) = nets(*OPTIMIZERS[name], n=1)
    before = copy.deepcopy(module)
    x, y = data(1)[0]
    scaler = ours()
    scaler.scale(loss_of(module, x, y, autocast=False)).backward()
    module[0].bias.grad[0] = NAN
    scaler.step(optimizer)
    scaler.update()
    assert_equal(module, before)
    # no entry, or nothing but zeros: Adagrad makes its sums at construction
    state = [v for s in optimizer.state.values() for v in s.values()]
    assert not any(torch.as_tensor(v).any() for v in state)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("each", [clip, unscale_and_clip])
def test_clipping_scaled_by_hand_or_after_unscale_is_the_same(each):
    (a, opt_a), (b, opt_b) = nets(torch.optim.SGD, {})
    loop(a, opt_a, TORCH("cpu", 128.0), each=unscale_and_clip)
    loop(b, opt_b, ours(128.0), each=each)
    assert_equal(a, b, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_accumulated_gradients_are_those_of_torch(autocast):
    (a, opt_a), (b, opt_b) = nets(torch.optim.SGD, {})
    for module, optimizer, scaler in ((a, opt_a, TORCH("cpu", 64.0)), (b, opt_b, ours(64.0))):
        for i, (x, y) in enumerate(data(6)):
            scaler.scale(loss_of(module, x, y, autocast=autocast) / 2).backward()
            if i % 2 == 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert_equal(a, b)


@pytest.mark.parametrize("bad", [None, 2])
def test_gradient_penalty_with_a_double_backward_equals_torch(bad):
    def penalize(module, optimizer, scaler):
        for i, (x, y) in enumerate(data()):
            optimizer.zero_grad()
            loss = loss_of(module, x, y, autocast=True)
            grads = torch.autograd.grad(
                scaler.scale(loss), list(module.parameters()), create_graph=True
            )
            true = [g / scaler.get_scale() for g in grads]
            with torch.autocast("cpu", torch.float16):
                loss = loss + sum(g.pow(2).sum() for g in true).sqrt()
            scaler.scale(loss).backward()
            if i == bad:
                module[1].weight.grad[0, 0] = INF
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    (a, opt_a), (b, opt_b) = nets(torch.optim.SGD, {})
    theirs, mine = TORCH("cpu", 128.0), ours(128.0)
    penalize(a, opt_a, theirs)
    penalize(b, opt_b, mine)
    assert_equal(a, b)
    assert mine.state_dict() == theirs.state_dict()
    assert mine.get_scale() == (128.0 if bad is None else 64.0)


@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3])
def test_two_models_two_losses_two_optimizers_equal_torch(bad):
    def run(scaler):
        (a, opt_a), (b, opt_b) = nets(torch.optim.SGD, {})
        for i, (x, y) in enumerate(data()):
            opt_a.zero_grad()
            opt_b.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out_a, out_b = a(x), b(x)
                loss_a = torch.nn.functional.mse_loss(0.7 * out_a + 0.3 * out_b, y)
                loss_b = torch.nn.functional.l1_loss(0.6 * out_a - 0.4 * out_b, y)
            scaler.scale(loss_a).backward(retain_graph=True)
            scaler.scale(loss_b).backward()
            if i == bad:
                a[1].weight.grad[0, 0] = INF
            scaler.unscale_(opt_a)  # one is unscaled early, the other by its step
            scaler.step(opt_a)
            scaler.step(opt_b)
            scaler.update()
        return a, b, scaler

    a, b, theirs = run(TORCH("cpu", 128.0, growth_interval=2))
    c, d, mine = run(ours(128.0, growth_interval=2))
    assert_equal(a, c)
    assert_equal(b, d)  # the partner of a skipped optimizer steps
    assert mine.state_dict() == theirs.state_dict()


def test_two_scalers_keep_to_their_own_losses():
    p, q = param(), param()
    first, second = ours(4.0), ours(16.0)
    opts = sgd(p), sgd(q)
    first.scale(p.sum()).backward()
    second.scale(q.sum()).backward()
    p.grad[0] = INF
    for scaler, optimizer in zip((first, second), opts, strict=True):
        scaler.step(optimizer)
        scaler.update()
    assert p.tolist() == [1.0, 2.0]
    assert q.tolist() == [0.0, 1.0]
    assert (first.get_scale(), second.get_scale()) == (2.0, 16.0)


# ====================================================================== torch: scale


def test_outputs_of_any_nesting_are_scaled():
    scaler = ours(4.0)
    one = torch.ones((), dtype=torch.float32)
    assert scaler.scale(one).item() == 4.0
    assert scaler.scale([one, (one, [one * 2])]) == [4.0, (4.0, [8.0])]
    assert scaler.scale((one,)) == (4.0,)
    assert [t.item() for t in scaler.scale(t for t in (one, one * 3))] == [4.0, 12.0]
    assert scaler.scale([]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_outputs_keep_their_dtype_but_for_small_ones(dtype):
    """Torch multiplies by a float32 scalar tensor: a 0-dimensional half loss comes out float32."""
    theirs, mine = TORCH("cpu", 4.0), ours(4.0)
    for shape in ((), (2,)):
        x = torch.ones(shape, dtype=dtype)
        assert mine.scale(x).dtype == theirs.scale(x).dtype
        assert torch.equal(mine.scale(x), theirs.scale(x))


@pytest.mark.parametrize("what", [1.0, None, 3, [torch.ones(()), 1.0], object()])
def test_outputs_that_are_no_tensors_are_refused(what):
    with pytest.raises(ValueError, match="Tensor"):
        tree_leaves(ours().scale(what))


def test_the_scale_stays_finite_when_growth_would_overflow():
    scaler = ours(2.0**127, growth_interval=1)
    p = param(2.0**-126, 2.0**-126)
    optimizer = sgd(p)
    scaler.scale((p * 2.0**-100).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


# ====================================================================== torch: unscale and checks


@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)])
@pytest.mark.parametrize("layout", ["dense", "strided", "transposed", "empty beside", "scalar"])
def test_every_layout_and_mix_of_dtypes_is_unscaled_and_checked(layout, dtypes, bad):
    params = []
    for dtype in dtypes:
        full = torch.full((6, 6), 8.0, dtype=dtype)
        grad = {
            "strided": full[::2, ::3],
            "transposed": full.t(),
            "scalar": torch.tensor(8.0, dtype=dtype),
        }.get(layout, full)
        p = torch.nn.Parameter(torch.zeros_like(grad))
        p.grad = grad
        params.append(p)
    if layout == "empty beside":
        params.append(param())
        params[-1].data, params[-1].grad = torch.zeros(0), torch.zeros(0)
    if bad is not None:
        last = params[len(dtypes) - 1].grad
        last[... if layout == "scalar" else (-1, -1)] = bad
    optimizer = sgd(*params)
    scaler = ours(4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    for p in params:
        good = p.grad[p.grad.isfinite()]
        assert torch.equal(good, torch.full_like(good, 2.0))
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is (bad is not None)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_sparse_gradients_equal_torch_s(coalesced, bad):
    def run(scaler):
        p = torch.nn.Parameter(torch.ones(4, 2))
        values = torch.tensor([[8.0, 8.0], [4.0, 4.0], [2.0, 2.0]])
        if bad is not None:
            values[1, 1] = bad
        # a row appears twice
        grad = torch.sparse_coo_tensor(
            torch.tensor([[0, 2, 0]]), values, (4, 2), check_invariants=True
        )
        p.grad = grad.coalesce() if coalesced else grad
        optimizer = sgd(p)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return p, scaler

    (p, theirs), (q, mine) = run(TORCH("cpu", 4.0)), run(ours(4.0))
    assert torch.equal(p, q)
    if bad is None:
        # (8 + 2) / 4 off the first row, 4 / 4 off the third
        assert q.tolist() == [[-1.5, -1.5], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert mine.get_scale() == theirs.get_scale() == (4.0 if bad is None else 2.0)


def test_half_precision_gradients_are_refused_as_in_torch():
    for scaler in (TORCH("cpu", 4.0), ours(4.0)):
        p = param(dtype=torch.float16)
        scaler.scale(p.float().sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(sgd(p))


@pytest.mark.parametrize("fused", [False, True])
def test_the_verdict_is_that_of_the_unscaling(fused):
    """Gradients spoiled between unscale and step are the user's own edit, and are applied."""
    p = param()
    optimizer, scaler = sgd(p, fused=fused), ours()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    p.grad.fill_(NAN)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is False
    assert p.isnan().all()


def test_flags_are_kept_by_device_where_torch_keeps_them():
    p = param()
    optimizer, scaler = sgd(p), ours()
    scaler.scale(p.sum()).backward()
    p.grad[1] = INF
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    assert {str(device): flag.item() for device, flag in flags.items()} == {"cpu": 1.0}
    # a device made anew, equal and not the same, finds its flag
    assert flags[torch.device("cpu")].item() == 1.0
    scaler.update()
    assert scaler._found_inf_per_device(optimizer) == {}


# ====================================================================== torch: calls and their order


def test_second_unscale_does_nothing_on_purpose():
    """Torch raises; but whoever looks first need not know whether somebody has looked before."""
    p = param()
    optimizer, scaler = sgd(p), ours(4.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [1.0, 1.0]


def test_update_without_a_step_moves_nothing_on_purpose():
    """Torch fails an assertion; but a batch whose optimizer had no gradient is no mistake."""
    scaler = ours(4.0, growth_interval=1)
    scaler.update()
    scaler.scale(torch.ones(()))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_step_without_gradients_does_nothing_on_purpose():
    """Torch fails an assertion; in float32 such a step does nothing."""
    p = param()
    optimizer, scaler = sgd(p), ours()
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer) is None
    scaler.update()
    assert p.tolist() == [1.0, 2.0]
    assert scaler.was_skipped(optimizer) is None


def test_unscaling_before_any_loss_was_scaled_is_refused_with_the_line_to_write():
    p = param()
    p.grad = torch.ones(2)
    for call in ("unscale_", "step"):
        with pytest.raises(RuntimeError, match=r"scaler\.scale\(loss\)\.backward\(\)"):
            getattr(ours(), call)(sgd(p))


def test_stepping_or_unscaling_after_a_step_waits_for_update_as_in_torch():
    for scaler in (TORCH("cpu", 4.0), ours(4.0)):
        p = param()
        optimizer = sgd(p)
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\)"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"after step\(\)"):
            scaler.unscale_(optimizer)
        scaler.update()
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("positional", [False, True])
def test_a_closure_is_refused_also_where_torch_lets_it_run_too_late(positional):
    p = param()
    optimizer, scaler = sgd(p), ours()
    scaler.scale(p.sum()).backward()
    args, kwargs = ([lambda: 1], {}) if positional else ([], {"closure": lambda: 1})
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, *args, **kwargs)


def test_an_optimizer_that_would_take_the_scaler_gets_true_gradients_instead():
    """Torch passes the scaler, warns that it will not for long, and leaves the rest to it."""

    class Takes(torch.optim.SGD):
        _step_supports_amp_scaling = True
        seen = "nothing"

        def step(self, closure=None, grad_scaler=None):
            self.seen = grad_scaler, self.param_groups[0]["params"][0].grad.tolist()
            return super().step(closure)

    p = param()
    optimizer, scaler = Takes([p], lr=1.0), ours()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.seen == (None, [1.0, 1.0])
    assert p.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_grad_scale_that_the_user_set_divides_as_well(make, early):
    def run(scaler):
        p = param()
        optimizer = make([p], lr=1.0, fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        scaler.scale(p.pow(2).sum()).backward()
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return p

    torch.testing.assert_close(run(ours()), run(TORCH("cpu", 4.0)))


# ====================================================================== torch: update


@pytest.mark.parametrize(
    "asked",
    [3.0, 3, torch.tensor(3.0), torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64)],
)
def test_a_new_scale_is_taken_over(asked):
    scaler = ours(4.0)
    scaler.scale(torch.ones(()))
    scaler.update(asked)
    assert scaler.get_scale() == 3.0
    assert scaler.scale(torch.ones(())).item() == 3.0


def test_a_new_scale_with_a_gradient_is_taken_over_without_its_gradient():
    """Torch refuses it; the number is clear all the same."""
    scaler = ours(4.0)
    scaler.update(torch.tensor(3.0, requires_grad=True))
    assert scaler.get_scale() == 3.0


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (torch.tensor([3.0, 4.0]), ValueError),
        (torch.ones(0), ValueError),
        (torch.tensor(NAN), ValueError),
        (NAN, ValueError),
        ("3", TypeError),
        (True, TypeError),
        (torch.tensor(True), TypeError),
        ([3.0], TypeError),
        (3j, TypeError),
    ],
)
def test_a_new_scale_that_is_no_number_is_refused_by_name(asked, kind):
    scaler = ours(4.0)
    with pytest.raises(kind, match=r"new_scale.*expected a number above 0"):
        scaler.update(asked)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("plan", ["ggggg", "gbgbg", "bbggg", "gggbb", "bgggb"])
def test_the_scale_and_its_counter_move_as_torch_s(plan):
    def run(scaler):
        p, rows = param(), []
        optimizer = sgd(p)
        for step in plan:
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            if step == "b":
                p.grad[0] = INF
            scaler.step(optimizer)
            scaler.update()
            rows.append(dict(scaler.state_dict()))
        return rows

    kwargs = {"growth_interval": 2, "growth_factor": 3.0, "backoff_factor": 0.75}
    assert run(OURS("cpu", 4.0, **kwargs, **UNBOUNDED)) == run(TORCH("cpu", 4.0, **kwargs))


# ====================================================================== torch: state


@pytest.mark.parametrize("lazy", [False, True], ids=["used", "unused"])
def test_state_goes_from_torch_to_us_and_back(lazy):
    theirs = TORCH("cpu", 4.0, 3.0, 0.25, 7)
    if not lazy:
        theirs.scale(torch.ones(()))
        theirs._growth_tracker.fill_(3)
    mine, back = ours(2.0), TORCH("cpu", 1.0)
    mine.load_state_dict(theirs.state_dict())
    back.load_state_dict(mine.state_dict())
    assert back.state_dict() == mine.state_dict() == theirs.state_dict()
    assert back.get_growth_factor() == mine.get_growth_factor() == 3.0
    assert mine.scale(torch.ones(())).item() == 4.0


def test_pickled_scaler_goes_on_where_it_was():
    scaler = ours(4.0, growth_factor=3.0, growth_interval=2)
    p = param()
    optimizer = sgd(p)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict()
    assert again.state_dict()["_growth_tracker"] == 1
    optimizer.zero_grad()
    again.scale(p.sum()).backward()
    again.step(optimizer)
    again.update()
    assert p.tolist() == [-1.0, 0.0]
    assert again.get_scale() == 12.0


def test_state_of_a_disabled_scaler_is_empty_and_an_enabled_one_refuses_it():
    disabled = OURS("cpu", enabled=False)
    assert disabled.state_dict() == {}
    disabled.load_state_dict(ours(8.0).state_dict())
    assert disabled.get_scale() == 1.0
    with pytest.raises(RuntimeError):  # torch's class of error
        ours().load_state_dict(disabled.state_dict())
    with pytest.raises(ScalerStateError, match='"scale"'):
        ours().load_state_dict({})


def test_disabled_scaler_is_transparent():
    p = param()
    optimizer, scaler = sgd(p), OURS("cpu", enabled=False)
    loss = p.sum()
    assert scaler.scale(loss) is loss
    assert scaler.scale("anything") == "anything"
    loss.backward()
    p.grad[0] = INF
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(new_scale=3.0)
    assert p.tolist() == [-INF, 1.0]
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()


def test_cuda_scaler_without_cuda_disables_itself_with_torch_s_warning():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = OURS("cuda")
    assert not scaler.is_enabled()


# ====================================================================== Lightning: the plugin


class Everywhere(L.LightningModule):
    """Notes the dtype that autocast computes in, in each kind of step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.seen = {}

    def step(self, batch, batch_idx):
        out = self.layer(batch[0])
        self.seen[self.trainer.state.stage.value] = (
            out.dtype,
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )
        return out.float().mean()

    training_step = validation_step = test_step = predict_step = step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_every_kind_of_step_runs_in_autocast(precision, dtype):
    model, trainer = Everywhere(), make_trainer(SafeAMP(precision))
    loader = batches(2, 8)
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader, verbose=False)
    trainer.test(model, loader, verbose=False)
    trainer.predict(model, loader)
    assert set(model.seen) == {"train", "sanity_check", "validate", "test", "predict"}
    assert set(model.seen.values()) == {(dtype, True, dtype)}
    assert not torch.is_autocast_enabled("cpu")
    assert model.layer.weight.dtype is torch.float32


def test_contexts_of_the_plugin_nest_and_end():
    plugin = SafeAMP("bf16-mixed", device="cpu")
    for context in (plugin.forward_context, plugin.train_step_context, plugin.predict_step_context):
        with context():
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["16", "16-true", "32-true", 16, "mixed"])
def test_unknown_precisions_are_refused(precision):
    with pytest.raises((ValueError, TypeError), match="precision"):
        SafeAMP(precision)


def test_scaler_beside_bfloat16_is_refused():
    with pytest.raises(ValueError, match="bf16-mixed"):
        SafeAMP("bf16-mixed", scaler=TORCH("cpu"))


def test_settings_and_state_of_a_passed_scaler_are_taken_over():
    plugin = SafeAMP(scaler=TORCH("cpu", 8.0, 3.0, 0.25, 7))
    assert plugin.scaler.state_dict() == TORCH("cpu", 8.0, 3.0, 0.25, 7).state_dict()


def test_precision_beside_the_plugin_is_refused_by_lightning():
    with pytest.raises(ValueError, match="SafeAMP"):
        make_trainer(SafeAMP(), precision="16-mixed")


@pytest.mark.parametrize("value", [0, 0.0, -1])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_no_clip_value_means_no_clipping(value, algorithm, monkeypatch):
    plugin, called = SafeAMP(), []
    monkeypatch.setattr(plugin, "clip_grad_by_norm", lambda *a: called.append("norm"))
    monkeypatch.setattr(plugin, "clip_grad_by_value", lambda *a: called.append("value"))
    optimizer = sgd(param())
    plugin.clip_gradients(optimizer, value, algorithm)
    assert called == []
    plugin.clip_gradients(optimizer, 1.0, algorithm)
    assert called == [algorithm]


# ====================================================================== Lightning: hooks and clipping


class Norms(Callback):
    """What the gradients are right after the backward pass, and before the step."""

    def __init__(self):
        self.after, self.before = [], []

    def on_after_backward(self, trainer, pl_module):
        self.after.append(float(pl_module.lin.weight.grad[0, 0]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append(float(pl_module.lin.weight.grad[0, 0]))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_scaled_after_backward_and_true_before_the_step(accumulate, fused):
    norms = Norms()
    model = Line(make_optimizer=lambda p: torch.optim.SGD(p, 0.5, fused=fused))
    fit(model, SafeAMP(init_scale=8.0), 4, callbacks=[norms], accumulate_grad_batches=accumulate)
    assert norms.after == ([8.0] * 4 if accumulate == 1 else [4.0, 8.0] * 2)
    assert norms.before == [1.0] * (4 // accumulate)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fused_optimizers_may_be_clipped_on_purpose(make, algorithm):
    """Lightning refuses, since its fused step unscales; here the gradients are true by then."""

    class Clipped(Line):
        def on_before_optimizer_step(self, optimizer):
            assert self.lin.weight.grad.norm() == 2.0

        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val, gradient_clip_algorithm
        ):
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
            grad = self.lin.weight.grad
            self.clipped = grad.norm() if algorithm == "norm" else grad.max()

    def optimizer(p):
        return make(p, lr=0.5, fused=True)

    settings = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Line(make_optimizer=optimizer), stock_plugin(init_scale=8.0), 1, **settings)
    model = Clipped(make_optimizer=optimizer)
    fit(model, SafeAMP(init_scale=8.0), 2, **settings)
    assert abs(float(model.clipped) - 0.05) < 1e-6


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_stock(algorithm):
    settings = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    a, b = Line(), Line()
    fit(a, SafeAMP(init_scale=8.0), 3, **settings)
    fit(b, stock_plugin(init_scale=8.0), 3, **settings)
    assert torch.equal(a.lin.weight, b.lin.weight)
    # value: 3 * 0.5 * 0.05; norm: each of four elements has half of that
    want = 8.0 - (0.075 if algorithm == "value" else 0.0375)
    torch.testing.assert_close(a.weight, want, rtol=0, atol=1e-5)


# ====================================================================== Lightning: loops


def test_parameters_that_get_no_gradient_are_no_error():
    class Detached(Line):
        """Its loss reaches a parameter of no optimizer, as upstream's model does."""

        def training_step(self, batch, batch_idx):
            return self.other * 2

        def configure_optimizers(self):
            return torch.optim.SGD([self.lin.weight], lr=0.5)

    model, plugin = Detached(), SafeAMP()
    model.other = torch.nn.Parameter(torch.ones(()))
    fit(model, plugin, 2)
    assert model.weight == 8.0
    assert plugin.tally.attempted == 0


def test_a_manual_batch_may_step_neither_or_either_of_two_optimizers():
    class Takes(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = param(4.0), param(4.0)

        def training_step(self, batch, batch_idx):
            for i, optimizer in enumerate(self.optimizers()):
                if batch_idx & (i + 1):
                    optimizer.zero_grad()
                    self.manual_backward((self.a, self.b)[i].sum())
                    optimizer.step()

        def configure_optimizers(self):
            return [sgd(self.a, lr=0.5), sgd(self.b, lr=0.5)]

    ours_, stock = Takes(), Takes()
    plugin = SafeAMP(init_scale=8.0)
    trainer = fit(ours_, plugin, 4, data=batches(4))
    fit(stock, None, 4, data=batches(4))  # float32: stock fails where it has stepped nothing
    assert (ours_.a.item(), ours_.b.item()) == (stock.a.item(), stock.b.item()) == (3.0, 3.0)
    assert [t.applied for t in plugin.tallies] == [2, 2]
    assert trainer.global_step == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_manual_step_with_a_closure_runs_it_once_and_zeroes_inside(accumulate):
    class Closure(ManualLine):
        calls = 0

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                self.calls += 1
                loss = self.lin(batch[0]).float().mean()
                if batch_idx % accumulate == 0:
                    optimizer.zero_grad()
                self.manual_backward(loss / accumulate)
                return loss

            if (batch_idx + 1) % accumulate == 0:
                loss = optimizer.step(closure=closure)
                assert loss is not None
            else:
                with optimizer.toggle_model(sync_grad=False):
                    closure()

    model, plugin = Closure(), SafeAMP(init_scale=8.0)
    fit(model, plugin, 4)
    assert model.calls == 4
    assert model.weight == 8.0 - 0.5 * 4 / accumulate
    assert plugin.tally.applied == 4 // accumulate


def test_extra_arguments_of_a_step_reach_the_optimizer():
    class Extra(torch.optim.SGD):
        seen = ()

        def step(self, closure=None, extra=None):
            Extra.seen = (*Extra.seen, extra)
            return super().step(closure)

    class Passes(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step(extra=batch_idx)

    model = Passes(["good", "bad", "good"], make_optimizer=lambda p: Extra(p, lr=0.5))
    fit(model, SafeAMP(init_scale=8.0), 3)
    assert Extra.seen == (0, 2)
    assert model.weight == 7.0


def test_hooks_come_in_lightning_s_order():
    def order(plugin):
        calls = []

        class Notes(Line):
            def backward(self, loss, *args, **kwargs):
                calls.append("backward")
                super().backward(loss, *args, **kwargs)

            def configure_gradient_clipping(self, *args, **kwargs):
                calls.append("clip")

            def optimizer_step(self, epoch, batch_idx, optimizer, closure):
                calls.append("optimizer_step")
                super().optimizer_step(epoch, batch_idx, optimizer, closure)

            def lr_scheduler_step(self, scheduler, metric):
                calls.append("schedule")
                super().lr_scheduler_step(scheduler, metric)

        def note(name):
            return lambda self, *args: calls.append(name)

        hooks = (
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
        )
        kind = type("Notes", (Notes,), {name: note(name) for name in hooks})
        kind.training_step = lambda self, b, i: (calls.append("training_step"), self.loss(b))[1]
        model = kind(make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
        fit(model, plugin, 2)
        return calls

    calls = order(SafeAMP(init_scale=8.0))
    assert calls == order(stock_plugin(init_scale=8.0))
    assert calls == 2 * [
        "on_train_batch_start",
        "optimizer_step",
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "clip",
        "schedule",
    ]


def test_schedule_does_not_move_at_a_skipped_step_on_purpose():
    """Lightning's moves with the arrival, whatever became of it."""

    def rate(plugin):
        model = Line(
            ["bad", "good"], make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)
        )
        trainer = fit(model, plugin, 2)
        return trainer.optimizers[0].param_groups[0]["lr"]

    assert rate(SafeAMP(init_scale=8.0)) == pytest.approx(0.05)
    with warnings.catch_warnings():
        # stock's schedule moves before the first update
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        assert rate(stock_plugin(init_scale=8.0)) == pytest.approx(0.005)


def test_gradients_may_be_tracked_and_logged_before_the_step():
    class Tracks(Line):
        def on_before_optimizer_step(self, optimizer):
            self.log_dict({"norm": self.lin.weight.grad.norm(2)})

    trainer = fit(Tracks(), SafeAMP(init_scale=8.0), 2)
    assert trainer.callback_metrics["norm"] == 2.0


# ====================================================================== Lightning: checkpoints


@pytest.mark.parametrize("there", ["stock", "ours"])
@pytest.mark.parametrize("here", ["stock", "ours"])
def test_scaler_state_goes_from_plugin_to_plugin(there, here, tmp_path):
    def plugin(which, scale):
        return (SafeAMP if which == "ours" else stock_plugin)(init_scale=scale)

    trainer = fit(Line(["good", "bad", "good"]), plugin(there, 64.0), 3)
    trainer.save_checkpoint(tmp_path / "at.ckpt")
    saved = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 32.0
    resumed = plugin(here, 8.0)
    fit(Line(), resumed, 3, ckpt_path=tmp_path / "at.ckpt", max_epochs=2)
    assert resumed.scaler.get_scale() == 32.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == 4


def test_state_of_older_lightnings_is_read(tmp_path):
    trainer = fit(Line(["good", "bad"]), stock_plugin(init_scale=64.0), 2)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    saved = torch.load(tmp_path / "new.ckpt", weights_only=True)
    saved["native_amp_scaling_state"] = saved.pop("MixedPrecision")
    torch.save(saved, tmp_path / "old.ckpt")
    resumed = SafeAMP(init_scale=8.0)
    fit(Line(), resumed, 2, ckpt_path=tmp_path / "old.ckpt", max_epochs=2)
    assert resumed.scaler.get_scale() == 32.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == 2
    assert isinstance(resumed, MixedPrecision)


def test_a_loss_kept_from_the_forward_pass_is_the_unscaled_one():
    class Keeps(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kept = float(outputs["loss"])

    model = Keeps()
    loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4)
    fit(model, SafeAMP(init_scale=8.0), data=loader)
    assert model.kept == 32.0
