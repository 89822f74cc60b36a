# SPDX-License-Identifier: Apache-2.0
"""Memory by purpose, against hand work and against what torch really allocates."""

import gc
import weakref

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp_guard.diagnosis.memory.memory import estimate_memory

GB = 1000**3
# 16 * 32 + 32 + 32 * 8 + 8 = 808 parameters
PARAMS = 808


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def loss(module, batch):
    return module(batch).float().square().mean()


def batch():
    return torch.randn(4, 16)


def state_of(optimizer):
    """Bytes of an optimizer's state after one real step, scalars left out."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


# --- counts worked by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "state"),
    [  # Adam and 100e9 parameters, in GB
        ("32-true", 400, 400, 800),
        ("16-mixed", 400, 400, 800),
        ("bf16-mixed", 400, 400, 800),
        ("16-true", 200, 200, 400),
        ("bf16-true", 200, 200, 400),
        ("64-true", 800, 800, 1600),
    ],
)
def test_a_hundred_billion_parameters(precision, weights, gradients, state):
    report = estimate_memory(100_000_000_000, optimizer="adam", precision=precision)
    assert report.to_dict() == {
        "weights": weights * GB,
        "master_weights": 0,
        "gradients": gradients * GB,
        "optimizer_state": state * GB,
        "total": (weights + gradients + state) * GB,
    }
    assert report.total == sum(report.to_dict().values()) - report.total
    assert (report.activations, report.casts, report.buffers) == (None, None, 0)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("momentum", 4),
        ("adagrad", 4),
        ("rmsprop", 4),
        ("lion", 4),
        ("Adam", 8),
        ("AdamW", 8),
        ("NAdam", 8),
        ("amsgrad", 12),
        ("lbfgs", 808),
        ("adam-8bit", 2 + 2 * 4 / 256),
        ("8-bit Adam", 2 + 2 * 4 / 256),
        ("AdamW8bit", 2 + 2 * 4 / 256),
        ("lion_8bit", 1 + 4 / 256),
        ("sgd8bit", 1 + 4 / 256),
        (torch.optim.AdamW, 8),
        (torch.optim.SGD, 0),
    ],
)
def test_optimizer_state_per_parameter(optimizer, state):
    assert estimate_memory(2**20, optimizer=optimizer).optimizer_state == state * 2**20


def test_adafactor_takes_a_count_for_a_square_matrix():
    assert estimate_memory(10_000, optimizer="adafactor").optimizer_state == 4 * (100 + 100)


def test_small_parameters_keep_32_bit_state_under_8_bit_optimizers():
    assert estimate_memory(net(), optimizer="adam8bit").optimizer_state == 8 * PARAMS
    assert estimate_memory(nn.Linear(64, 64), optimizer="adam8bit").optimizer_state == (
        2 * (4096 + 4 * 16) + 2 * 4 * 64
    )


# --- modules ------------------------------------------------------------------------------------


def test_module_is_counted_as_its_parameters():
    by_module, by_count = estimate_memory(net()), estimate_memory(PARAMS)
    assert by_module.to_dict() == by_count.to_dict()
    assert (by_module.parameters, by_module.trained) == (PARAMS, PARAMS)
    assert by_module.weights == 4 * PARAMS


def test_frozen_parameters_have_neither_gradient_nor_state():
    module = net()
    module[0].requires_grad_(False)
    report = estimate_memory(module)
    assert (report.parameters, report.trained) == (808, 264)
    assert (report.weights, report.gradients, report.optimizer_state) == (3232, 1056, 2112)


def test_shared_parameters_count_once():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    assert estimate_memory(module).weights == 4 * 64


def test_buffers_are_part_of_the_weights():
    module = nn.BatchNorm1d(10)
    # Weight and bias, mean and variance, and one int64 count that no precision converts.
    mixed, half = estimate_memory(module), estimate_memory(module, precision="16-true")
    assert (mixed.weights, mixed.buffers, mixed.gradients) == (80 + 88, 88, 80)
    assert (half.weights, half.buffers, half.gradients) == (40 + 48, 48, 40)


def test_mixed_precision_takes_the_weights_as_they_are():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).half())
    module[1].requires_grad_(False)
    assert estimate_memory(module).weights == 16 * 4 + 16 * 2
    assert estimate_memory(module, precision="32-true").weights == 16 * 4 + 16 * 2
    assert estimate_memory(module, precision="16-true").weights == 32 * 2


def test_meta_device_is_enough_without_a_batch():
    with torch.device("meta"):
        module = nn.Linear(100_000, 100_000, bias=False)
    assert estimate_memory(module, precision="32-true").total == 160 * GB


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("Adafactor", {}),
        ("ASGD", {}),
        ("Rprop", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_an_optimizer_that_has_not_stepped_is_told_by_kind_and_settings(name, settings):
    module = net()
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=1e-3, **settings)
    told = estimate_memory(module, optimizer=optimizer)
    assert told.optimizer == name
    assert told.optimizer_state == state_of(optimizer)


def test_adagrad_has_its_state_from_the_start():
    module = net()
    optimizer = torch.optim.Adagrad(module.parameters())
    scalars = 4 * 4
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == 4 * PARAMS + scalars
    assert state_of(optimizer) == 4 * PARAMS


def test_muon_keeps_one_copy():
    module = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Muon(module.parameters())
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == 4 * 64
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == state_of(optimizer)


def test_the_state_of_an_optimizer_that_has_stepped_is_measured():
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    kept = state_of(optimizer)
    scalars = 4 * 4  # one float32 `step` for each of the four parameters
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == kept + scalars


def test_groups_have_their_own_settings():
    module = net()
    groups = [
        {"params": module[0].parameters(), "momentum": 0.9},
        {"params": module[2].parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == 4 * 544


def test_parameters_that_the_optimizer_does_not_have_get_no_state():
    module = net()
    optimizer = torch.optim.Adam(module[2].parameters())
    report = estimate_memory(module, optimizer=optimizer)
    assert (report.gradients, report.optimizer_state) == (4 * 808, 8 * 264)
    assert estimate_memory(module, optimizer=optimizer, precision="16-true").optimizer_state == (
        4 * 264
    )


def test_frozen_parameters_of_an_optimizer_get_no_state():
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    module[0].requires_grad_(False)
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == 8 * 264


def test_a_subclass_counts_as_what_it_is_made_from():
    class Mine(torch.optim.AdamW):
        pass

    module = net()
    assert estimate_memory(module, optimizer=Mine(module.parameters())).optimizer_state == 8 * 808
    assert estimate_memory(module, optimizer=Mine).optimizer_state == 8 * 808


def test_an_unknown_optimizer_that_has_stepped_is_measured():
    class Odd(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["a"] = torch.zeros(5, *p.shape)

    module = net()
    optimizer = Odd(module.parameters())
    with pytest.raises(ValueError, match=r"`optimizer='Odd'`.*'adam'.*has stepped once"):
        estimate_memory(module, optimizer=optimizer)
    optimizer.step()
    assert estimate_memory(module, optimizer=optimizer).optimizer_state == 20 * 808


# --- activations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "activations", "casts"),
    [
        # Saved: the ReLU's output (4 x 32), which the second layer's input is too, and, by `square`,
        # the output (4 x 8), in float32 as the loss makes it. The batch itself is not counted.
        ("32-true", {"float32": 512 + 128}, 0),
        # Under autocast also the cast batch (4 x 16), and the second layer's cast weight (32 x 8);
        # the first one's is not needed, as the batch has no gradient.
        ("16-mixed", {"float16": 256 + 128, "float32": 128}, 512),
        ("bf16-mixed", {"bfloat16": 256 + 128, "float32": 128}, 512),
        ("16-true", {"float16": 256, "float32": 128}, 0),
        ("bf16-true", {"bfloat16": 256, "float32": 128}, 0),
        ("64-true", {"float64": 1024, "float32": 128}, 0),
    ],
)
def test_saved_activations_by_dtype(precision, activations, casts):
    report = estimate_memory(net(), precision=precision, batch=batch(), loss_fn=loss)
    without = estimate_memory(net(), precision=precision)
    assert report.activations_by_dtype == activations
    assert (report.activations, report.casts) == (sum(activations.values()), casts)
    assert report.total == without.total + report.activations + casts
    assert report.to_dict() == {
        **without.to_dict(),
        "activations": report.activations,
        "casts": casts,
        **{f"activations_{name}": size for name, size in activations.items()},
        "total": report.total,
    }


def test_memory_that_is_saved_several_times_counts_once():
    def step(module, x):
        h = module[0](x)  # 4 x 32 in float32: saved by `sin`, by `cos` and as a view
        return (h.sin() + h.cos() + h.view(-1).exp().view(4, 32) * 0).sum()

    report = estimate_memory(net(), precision="32-true", batch=batch(), loss_fn=step)
    # h once, and exp's result.
    assert report.activations == 2 * 512


def test_integer_and_bool_tensors_that_are_saved_have_their_own_dtype():
    def step(module, x):
        h = module(x)  # 4 x 8, pooled in pairs: 4 x 4 indices
        return torch.where(h > 0, nn.functional.max_pool1d(h, 2).repeat(1, 2), h).sum()

    report = estimate_memory(net(), precision="32-true", batch=batch(), loss_fn=step)
    assert report.activations_by_dtype["bool"] == 4 * 8
    assert report.activations_by_dtype["int64"] == 4 * 4 * 8


def test_a_complex_weight_is_not_cast_by_its_magnitude():
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.ones(8, dtype=torch.complex64))

        def forward(self, x):
            return x[:, :8] * self.z.abs()

    report = estimate_memory(Phase(), precision="32-true", batch=batch(), loss_fn=loss)
    assert (report.weights, report.casts) == (8 * 8, 0)


def test_a_batch_that_is_a_view_of_a_data_set_is_not_counted():
    everything = torch.randn(1000, 16)
    report = estimate_memory(net(), precision="32-true", batch=everything[:4], loss_fn=loss)
    assert report.activations == 640
    nested = {"x": [everything[:4]], "i": torch.arange(4)}
    report = estimate_memory(
        net(), precision="32-true", batch=nested, loss_fn=lambda m, b: loss(m, b["x"][0])
    )
    assert report.activations == 640


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_saves_less(reentrant):
    def plain(module, x):
        return loss(module[1], module[0](x))

    def checkpointed(module, x):
        return checkpoint(lambda h: loss(module[1], h), module[0](x), use_reentrant=reentrant)

    module = nn.Sequential(nn.Linear(16, 16), net())
    kept = [
        estimate_memory(module, precision="32-true", batch=batch(), loss_fn=f).activations
        for f in (plain, checkpointed)
    ]
    assert kept == [256 + 640, 256]  # the checkpoint keeps its input (4 x 16) alone


def test_gradient_penalties_inside_the_step_work():
    def step(module, x):
        h = module(x).square().sum()
        grads = torch.autograd.grad(h, list(module.parameters()), create_graph=True)
        return h + sum(g.square().sum() for g in grads)

    report = estimate_memory(net(), batch=batch(), loss_fn=step)
    assert report.activations > 0


def test_a_lightning_module_brings_its_own_loss():
    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = net(), 0

        def training_step(self, x, batch_idx):
            self.seen += 1
            self.log("loss", 1.0)
            return loss(self.net, x)

    model = Model()
    report = estimate_memory(model, precision="16-true", batch=batch())
    assert report.activations_by_dtype == {"float16": 256, "float32": 128}
    assert model.seen == 0


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "64-true"])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(precision, fails):
    module = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    module[2].eval()
    loss(module, batch()).backward()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = [(p, p.data_ptr(), p.grad, p.grad.clone()) for p in module.parameters()]
    buffers = [(b, b.dtype) for b in module.buffers()]
    random = torch.get_rng_state()

    def step(module, x):
        if fails:
            module(x)
            raise RuntimeError("planted")
        return loss(module, x)

    x = torch.ones(4, 16)
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            estimate_memory(module, precision=precision, batch=x, loss_fn=step)
    else:
        estimate_memory(module, precision=precision, batch=x, loss_fn=step)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert [part.training for part in module] == [True, True, False]
    for name, value in module.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name])
    for (p, place, grad, values), now in zip(tensors, module.parameters(), strict=True):
        assert now is p
        assert now.data_ptr() == place
        assert now.grad is grad
        assert grad.dtype is torch.float32
        assert torch.equal(grad, values)
    assert all(a is b and b.dtype is t for (a, t), b in zip(buffers, module.buffers(), strict=True))
    assert torch.equal(x, torch.ones(4, 16))


def test_no_tensor_of_the_run_is_kept():
    alive = []

    def step(module, x):
        h = module(x)
        alive.append(weakref.ref(h))
        return h.float().square().mean()

    report = estimate_memory(net(), batch=batch(), loss_fn=step)
    gc.collect()
    assert report.activations
    assert alive[0]() is None


# --- text and mistakes --------------------------------------------------------------------------


def test_text_is_in_decimal_units():
    assert str(estimate_memory(100e9, precision="32-true")) == (
        "100,000,000,000 parameters, 100,000,000,000 of them trained, adam, 32-true:\n"
        "  weights                     400.00 GB\n"
        "  master_weights                0.00 GB\n"
        "  gradients                   400.00 GB\n"
        "  optimizer_state             800.00 GB\n"
        "  activations           not measured\n"
        "  -------------------------------------\n"
        "  total                     1,600.00 GB"
    )
    assert "  total                        12.93 kB" in str(estimate_memory(net()))
    assert "  weights                         40 bytes" in str(estimate_memory(10))
    assert str(estimate_memory(0)).endswith("0 bytes")


def test_rows_of_the_text_add_up_to_the_total_and_parts_of_a_row_are_marked():
    report = estimate_memory(net(), batch=torch.ones(2, 16), loss_fn=lambda m, x: m(x).sum())
    _, *rows, rule, total = str(report).splitlines()
    parts = [row for row in rows if row.startswith("    of it ")]
    own = [row for row in rows if row not in parts]
    assert set(rule.strip()) == {"-"}
    assert [row.split()[0] for row in own] == [
        "weights",
        "master_weights",
        "gradients",
        "optimizer_state",
        "activations",
        "casts",
    ]
    # 100 bytes would show in the rounded figures
    assert sum(float(row.split()[1]) for row in own) == pytest.approx(
        float(total.split()[1]), abs=0.05
    )
    assert rows.index(parts[0]) == rows.index(own[4]) + 1
    sizes = [float(row.split()[3]) for row in parts]
    assert sum(sizes) == pytest.approx(float(own[4].split()[1]), abs=0.02)
    assert [row.split()[2] for row in parts] == [*report.activations_by_dtype]
    assert "not measured" not in str(report)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(16, "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("64", "64-true")],
)
def test_short_names_mean_what_the_trainer_takes_them_for(given, meant):
    assert estimate_memory(10, precision=given).precision == meant


@pytest.mark.parametrize("precision", ["16", 16, "fp8", None, "auto", True])
def test_unknown_precision_is_refused(precision):
    if str(precision) == "16":
        assert estimate_memory(1, precision=precision).precision == "16-mixed"
        return
    with pytest.raises(ValueError, match=r"`precision=.*'16-mixed', 'bf16-mixed', '32-true'"):
        estimate_memory(1, precision=precision)


@pytest.mark.parametrize("optimizer", ["adamx", "", "8bit", "adam 16bit"])
def test_unknown_optimizer_is_refused_with_the_known_ones(optimizer):
    with pytest.raises(ValueError, match=r"`optimizer='.*expected one of 'sgd'.*'adam8bit'"):
        estimate_memory(1, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [None, 3, nn.Linear, object()])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"`optimizer=.*expected a name"):
        estimate_memory(1, optimizer=optimizer)


@pytest.mark.parametrize("count", [True, "7e9", None, 1.5, float("nan"), float("inf")])
def test_what_is_no_count_is_refused(count):
    with pytest.raises(TypeError, match=r"`module_or_count=.*whole number of parameters"):
        estimate_memory(count)


@pytest.mark.parametrize("count", [-1, -2.0])
def test_negative_counts_are_refused(count):
    with pytest.raises(ValueError, match=r"`module_or_count=-.*>= 0"):
        estimate_memory(count)


def test_a_batch_needs_the_module():
    with pytest.raises(TypeError, match=r"estimate_memory\(module, batch=batch\)"):
        estimate_memory(10, batch=batch())


def test_a_lazy_parameter_is_named():
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet"):
        estimate_memory(module)


def test_a_module_without_a_loss_is_refused():
    with pytest.raises(TypeError, match="loss_fn="):
        estimate_memory(net(), batch=batch())
