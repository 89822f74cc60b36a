# SPDX-License-Identifier: Apache-2.0
"""One battery over all diagnosis functions: afterwards everything is as it was before."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_amp_guard.diagnosis import (
    classify_range,
    compare_precisions,
    estimate_memory,
    locate_nonfinite,
    profile_dtypes,
    recommend_precision,
    scan_batch,
)
from tests.diagnosis.test_replay import Busy, portrait, world
from tests.helpers import make_trainer

RUN_A_STEP = {
    "locate_nonfinite": locate_nonfinite,
    "locate_nonfinite, bf16": lambda m, b: locate_nonfinite(m, b, precision="bf16-mixed"),
    "compare_precisions": lambda m, b: compare_precisions(m, b, steps=2),
    "profile_dtypes": profile_dtypes,
    "profile_dtypes, float32": lambda m, b: profile_dtypes(m, b, precision="32-true"),
    "recommend_precision": lambda m, b: recommend_precision(
        m, [b], steps=2, metric_fn=lambda copy: float(copy.net(b).mean())
    ),
    "estimate_memory": lambda m, b: estimate_memory(m, batch=b),
}
READ_ONLY = {
    "estimate_memory, no batch": lambda m, b: estimate_memory(m),
    "classify_range": lambda m, b: classify_range(p.grad for p in m.parameters()),
    "scan_batch": lambda m, b: scan_batch({"x": b, "module": m}),
}
run_a_step = pytest.mark.parametrize("name", RUN_A_STEP)
every = pytest.mark.parametrize("name", [*RUN_A_STEP, *READ_ONLY])


class Repeating(Busy):
    """`Busy` for several steps: new parameters, hooks and modules come in the first alone."""

    def change_modules(self):
        if self.seen == 1:
            super().change_modules()


def prepared(kind=Repeating):
    """A module with gradients and hooks of its own, one of each kind."""
    module = kind()
    for i, p in enumerate(module.net.parameters()):
        p.grad = None if i == 1 else torch.full_like(p, float(i + 1))
    module.net[0].weight.register_hook(lambda grad: grad)
    module.net[1].register_forward_pre_hook(lambda m, args: None)
    return module


def surroundings():
    """The state of torch outside of the module."""
    backends = [
        (backend, op, torch._C._get_fp32_precision_getter(backend, op))
        for backend in ("cuda", "mkldnn")
        for op in ("all", "matmul", "conv", "rnn")
    ]
    modes = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )
    hooks = torch.nn.modules.module
    everywhere = [
        len(getattr(hooks, name))
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    ]
    return world(), backends, modes, everywhere


def both(name):
    return {**RUN_A_STEP, **READ_ONLY}[name]


def batch():
    return torch.randn(3, 4)


@every
def test_everything_is_as_before(name):
    module, data = prepared(), batch()
    values = data.clone()
    before = portrait(module), surroundings()
    assert both(name)(module, data) is not None
    assert portrait(module) == before[0]
    assert surroundings() == before[1]
    assert torch.equal(data, values)
    assert data.grad is None


@run_a_step
def test_everything_is_as_before_within_autocast_and_no_grad(name):
    module, data = prepared(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = portrait(module), surroundings()
        RUN_A_STEP[name](module, data)
        assert portrait(module) == before[0]
        assert surroundings() == before[1]


@run_a_step
@pytest.mark.parametrize("calls", [1, 2])
def test_everything_is_as_before_when_the_step_raises(name, calls):
    class Failing(Repeating):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append(None)
            if len(seen) == calls:
                raise KeyboardInterrupt
            return loss

    if name.startswith(("locate", "estimate")):
        calls = 1  # they run the step once
    seen, module, data = [], prepared(Failing), batch()
    before = portrait(module), surroundings()
    with pytest.raises(KeyboardInterrupt):
        RUN_A_STEP[name](module, data)
    assert portrait(module) == before[0]
    assert surroundings() == before[1]


@run_a_step
def test_two_calls_report_the_same_step(name):
    """Random states included: the second call draws what the first one drew."""
    drawn = []

    class Drawing(Repeating):
        def training_step(self, batch, batch_idx):
            drawn.append((torch.rand(1).item(), self.seen))
            return super().training_step(batch, batch_idx)

    module, data = Drawing(), batch()
    RUN_A_STEP[name](module, data)
    first = drawn.copy()
    drawn.clear()
    RUN_A_STEP[name](module, data)
    assert drawn == first
    assert first[0][1] == 0


@run_a_step
def test_a_trainer_that_is_attached_is_not_told_of_the_step(name, tmp_path):
    module, data = Repeating(), batch()
    module.frozen.train()  # Lightning warns of parts in eval mode
    trainer = make_trainer(default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader([data], batch_size=None)
    trainer.fit(module, loader)
    told = {**trainer.logged_metrics}, {**trainer.callback_metrics}, trainer.global_step
    before = portrait(module), surroundings()
    state = {k: str(v) for k, v in trainer.optimizers[0].state_dict().items()}
    RUN_A_STEP[name](module, data)
    assert portrait(module) == before[0]
    assert surroundings() == before[1]
    assert module.trainer is trainer
    now = {**trainer.logged_metrics}, {**trainer.callback_metrics}, trainer.global_step
    assert now == told
    assert {k: str(v) for k, v in trainer.optimizers[0].state_dict().items()} == state


@run_a_step
def test_no_tensor_of_the_run_is_kept(name):
    seen = []

    class Watched(Repeating):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.extend([weakref.ref(loss), weakref.ref(batch), weakref.ref(self.pointer)])
            return loss

    module = Watched()
    report = RUN_A_STEP[name](module, batch())
    gc.collect()
    assert len(seen) >= 3
    assert all(ref() is None for ref in seen)
    assert str(report)


@run_a_step
def test_a_plain_module_keeps_its_mode_and_gradients(name):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].eval()
    net[0].weight.requires_grad_(False)
    net[3].weight.grad = torch.ones(2, 4)
    before = portrait(net)
    calls = {
        "locate_nonfinite": locate_nonfinite,
        "compare_precisions": compare_precisions,
        "profile_dtypes": profile_dtypes,
        "recommend_precision": lambda m, b, loss_fn: recommend_precision(
            m, [b], steps=2, loss_fn=loss_fn
        ),
        "estimate_memory": lambda m, b, loss_fn: estimate_memory(m, batch=b, loss_fn=loss_fn),
    }
    calls[name.partition(",")[0]](net, batch(), loss_fn=lambda m, x: m(x).float().sum())
    assert portrait(net) == before
