# SPDX-License-Identifier: Apache-2.0
"""A replayed step needs no Trainer, and leaves the module and the world around it as they were."""

import gc
import random
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_amp_guard.diagnosis.replay.replay import (
    autocast,
    device_of,
    on_device,
    training_loss,
    undisturbed,
)


class Average:
    """A plain object that a module owns: an average of its weights."""

    def __init__(self, module):
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.updates = 0

    def update(self, module):
        self.updates += 1
        for name, p in module.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.5)


class Busy(L.LightningModule):
    """Changes everything that a step can change in its module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.frozen = nn.Linear(4, 4).requires_grad_(False).eval()
        self.accuracy = torchmetrics.MeanMetric()
        self.hidden = [nn.BatchNorm1d(4)]  # no submodule
        self.average = Average(self.net)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.plain = torch.zeros(2)
        self.array = np.zeros(2)
        self.seen, self.history, self.recent = 0, [], deque(maxlen=2)
        self.names, self.table = {"a"}, defaultdict(list, x=[1])
        self.counts, self.order = Counter(a=1), OrderedDict(a=1, b=2)
        self.nested = ({"deep": [torch.zeros(1)]},)
        self.generator, self.dice = torch.Generator(), random.Random(1)
        self.numpy_dice, self.old_dice = np.random.default_rng(1), np.random.RandomState(1)

    def training_step(self, batch, batch_idx):
        self.change_containers(batch)
        self.change_modules()
        torch.rand(1, generator=self.generator), self.dice.random()
        self.numpy_dice.random(), self.old_dice.rand(), np.random.rand(), random.random()
        out = self.net(self.frozen(batch))
        self.hidden[0](out)
        self.accuracy(out.mean())
        loss = out.float().square().mean()
        self.last_loss = loss
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"a": loss, "accuracy": self.accuracy})
        return loss

    def change_containers(self, batch):
        self.seen += 1
        self.history.append(batch)
        self.recent.append(batch)
        self.names.add("b")
        self.table["y"].append(2)
        self.table["x"].append(2)
        self.counts["a"] += 1
        self.order.move_to_end("a")
        self.nested[0]["deep"][0].add_(1)
        self.nested[0]["deep"].append(batch)
        self.array += 1
        self.plain.add_(1)
        self.plain.note = batch
        self.queue[: len(batch)] = batch.detach()
        self.pointer = self.pointer + 1
        self.register_buffer("late", batch.detach())

    def change_modules(self):
        self.average.update(self.net)
        self.net[1].eval()
        self.frozen.train()
        self.frozen.weight.requires_grad_(True)
        self.net[0].weight.data = self.net[0].weight.data * 2
        with torch.no_grad():
            self.net[0].bias.add_(1)
        self.net[0].register_forward_hook(lambda *args: None)
        self.net[0].weight.register_hook(lambda grad: grad)
        self.net[0].bias.register_post_accumulate_grad_hook(lambda p: None)
        self.net.add_module("more", nn.Identity())
        self.net[0].extra = nn.Parameter(torch.ones(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def prepared():
    """A module with gradients and hooks of its own, one of each kind."""
    module = Busy()
    for i, p in enumerate(module.net.parameters()):
        p.grad = None if i == 1 else torch.full_like(p, float(i + 1))
    module.net[0].weight.register_hook(lambda grad: grad)
    module.net[1].register_forward_pre_hook(lambda m, args: None)
    return module


STATES = {
    np.ndarray: lambda value: (id(value), value.tolist()),
    torch.Generator: lambda value: value.get_state().tolist(),
    random.Random: lambda value: value.getstate(),
    np.random.Generator: lambda value: str(value.bit_generator.state),
    np.random.RandomState: lambda value: str(value.get_state()),
}


def portrait(value, known=None):
    """Nested plain data with every identity and value that must not change."""
    known = {} if known is None else known
    if id(value) in known:
        return id(value)
    known[id(value)] = value
    if isinstance(value, torch.Tensor):
        grad = value.grad if value.is_leaf else None
        hooks = [
            list(getattr(value, name) or {})
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        rest = value.requires_grad, value.grad_fn, value.data_ptr(), str(vars(value).keys())
        return (id(value), value.tolist(), portrait(grad, known), hooks, rest)
    if (kind := next((kind for kind in STATES if isinstance(value, kind)), None)) is not None:
        return STATES[kind](value)
    if isinstance(value, dict):
        return (id(value), [(k, portrait(v, known)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (id(value), [portrait(v, known) for v in value])
    if isinstance(value, set):
        return (id(value), sorted(map(repr, value)))
    if isinstance(value, (nn.Module, Average)):
        return (id(value), portrait(vars(value), known))
    return (id(value), repr(value) if isinstance(value, (int, float, str)) else "")


def world():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def step(module):
    loss = training_loss(module, torch.randn(3, 4))
    loss.backward()
    return loss


def test_portrait_sees_what_the_step_changes():
    module = prepared()
    before = portrait(module), world()
    with autocast("16-mixed", "cpu"):
        step(module)
    assert portrait(module) != before[0]
    assert world() != before[1]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_everything_is_as_before(precision):
    module = prepared()
    before = portrait(module), world()
    with undisturbed(module), autocast(precision, "cpu"):
        step(module)
    assert portrait(module) == before[0]
    assert world() == before[1]


def test_everything_is_as_before_when_the_body_raises():
    module = prepared()
    before = portrait(module), world()

    def interrupted():
        with undisturbed(module), autocast("16-mixed", "cpu"):
            step(module)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert portrait(module) == before[0]
    assert world() == before[1]


def test_nested_and_repeated_calls_see_the_same_state():
    module = prepared()
    losses = []
    with undisturbed(module):
        for _ in range(2):
            with undisturbed(module):
                losses.append(step(module).item())
    with undisturbed(module):
        losses.append(step(module).item())
    assert losses[0] == losses[1] == losses[2]


def test_state_set_globally_by_the_body_is_put_back():
    module = nn.Linear(2, 2)
    before = world()
    with undisturbed(module):
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
    assert world() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_recorded_inside_whatever_the_mode_outside(mode):
    module = prepared()
    before = portrait(module)
    with mode():
        outside = world()
        with undisturbed(module):
            step(module)
        assert world() == outside
    assert portrait(module) == before


def test_graph_from_before_is_still_good():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = module(torch.ones(1, 2)).square().sum()
    with undisturbed(module):
        training_loss(module, torch.ones(1, 2), lambda m, x: m(x).sum()).backward()
    loss.backward()
    assert module[0].weight.grad is not None


def test_casts_of_an_enclosing_autocast_are_not_shared():
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside = module(x).sum()
        with undisturbed(module), torch.autocast("cpu", dtype=torch.bfloat16):
            module(x).sum().backward()
        again = module(x).sum()
    (outside + again).backward()
    assert module.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_no_tensor_of_the_body_is_kept():
    module = prepared()
    with undisturbed(module):
        loss = step(module)
        refs = [weakref.ref(loss), weakref.ref(module.late), weakref.ref(module.history[0])]
        refs.append(weakref.ref(module.net[0].bias.grad))  # it had none before
        del loss
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * len(refs)


def test_buffer_that_became_part_of_the_graph_is_a_leaf_again():
    module = nn.Module()
    module.lin = nn.Linear(2, 2)
    module.register_buffer("state", torch.zeros(2))
    with undisturbed(module):
        module.state.add_(module.lin(torch.ones(2)))
    assert module.state.is_leaf
    assert module.state.tolist() == [0.0, 0.0]
    assert not module.state.requires_grad


def test_sparse_gradients_and_frozen_parameters_are_kept():
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()
    grad = module.weight.grad
    with undisturbed(module):
        module(torch.tensor([2])).sum().backward()
    assert module.weight.grad is grad
    assert grad.to_dense()[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_module_moved_or_cast_inside_is_back():
    module = prepared()
    before = portrait(module)
    with undisturbed(module):
        module.double()
        module.net.half()
    assert portrait(module) == before


def test_optimizer_data_and_locks_of_the_module_are_left_alone():
    class Owner(nn.Linear):
        pass

    module = Owner(2, 2)
    module.optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    module.lock = threading.Lock()
    module.itself = module
    with undisturbed(module):
        module.optimizer.param_groups[0]["lr"] = 7.0
    assert module.optimizer.param_groups[0]["lr"] == 7.0
    assert module.itself is module


def test_lazy_module_is_refused():
    with (
        pytest.raises(ValueError, match="not initialized yet") as error,
        undisturbed(nn.LazyLinear(2)),
    ):
        pass
    assert "`module(x)`" in str(error.value)


@pytest.mark.cuda
def test_random_state_of_the_device_is_put_back():
    module = nn.Linear(2, 2, device="cuda")
    before = torch.cuda.get_rng_state()
    with undisturbed(module):
        torch.rand(2, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)


# ---------------------------------------------------------------- with a Trainer


class DuringFit(L.Callback):
    """Replays a step within a run, where `self.log` would be heard."""

    def __init__(self):
        self.calls = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        results = dict(trainer._results)
        metrics = dict(trainer.callback_metrics), dict(trainer.logged_metrics)
        with undisturbed(module):
            step(module)
        assert dict(trainer._results) == results
        assert (dict(trainer.callback_metrics), dict(trainer.logged_metrics)) == metrics
        assert not trainer.should_stop
        self.calls += 1


class Talks(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        self.logger.log_metrics({"direct": 1.0}, step=self.global_step)
        self.logger.experiment.log_metrics({"more": 1.0})
        if not self.trainer.training:
            raise AssertionError
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def run(tmp_path, callbacks):
    torch.manual_seed(0)
    module = Talks()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(tmp_path),
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
    log = next(tmp_path.rglob("metrics.csv")).read_text()
    return module.state_dict(), trainer.callback_metrics, log


def test_run_is_the_same_bit_for_bit_with_a_replay_before_each_batch(tmp_path):
    replays = DuringFit()
    with_it = run(tmp_path / "a", [replays])
    without = run(tmp_path / "b", [])
    assert replays.calls == 3
    assert with_it[2] == without[2]
    assert {k: v.item() for k, v in with_it[1].items()} == {
        k: v.item() for k, v in without[1].items()
    }
    for name, value in without[0].items():
        assert torch.equal(with_it[0][name], value)


def test_attributes_of_the_trainer_are_put_back():
    class Stops(Talks):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            self.trainer.note = batch
            return self.net(batch).mean()

    module = Stops()
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module.trainer = trainer
    with undisturbed(module):
        step(module)
    assert not trainer.should_stop
    assert not hasattr(trainer, "note")


# ---------------------------------------------------------------- training_loss


class Plain(L.LightningModule):
    def __init__(self, result=None):
        super().__init__()
        self.lin, self.result = nn.Linear(2, 1), result

    def training_step(self, batch, batch_idx):
        assert batch_idx == 0
        loss = self.lin(batch).mean()
        return loss if self.result is None else self.result(loss)


X = torch.ones(3, 2)


def test_loss_of_a_lightning_module_needs_no_trainer_and_does_not_warn():
    class Logs(Plain):
        def training_step(self, batch, batch_idx):
            loss = self.lin(batch).mean()
            self.log("loss", loss)
            return loss

    module = Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = training_loss(module, X)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(module.lin(X).mean().item())
    assert "log" not in vars(module)


def test_loss_out_of_a_dict_and_of_one_element():
    assert training_loss(Plain(lambda loss: {"loss": loss, "other": 1}), X).requires_grad
    assert training_loss(Plain(lambda loss: loss.reshape(1, 1)), X).shape == ()


def test_loss_function_comes_first():
    assert training_loss(Plain(), X, lambda m, x: m.lin.weight.sum() * 0 + 5).item() == 5.0


def test_step_without_batch_index():
    class Short(Plain):
        def training_step(self, batch):
            return self.lin(batch).mean()

    class Variadic(Plain):
        def training_step(self, *args):
            return self.lin(args[0]).mean() + args[1]

    assert training_loss(Short(), X).requires_grad
    assert training_loss(Variadic(), X).requires_grad


def test_step_that_fetches_its_batches_is_refused():
    class Iterates(Plain):
        def training_step(self, dataloader_iter):
            raise AssertionError

    with pytest.raises(ValueError, match="fetches its batches itself"):
        training_loss(Iterates(), X)


def test_manual_optimization_is_refused():
    module = Plain()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="manual optimization") as error:
        training_loss(module, X)
    assert "`loss_fn=lambda module, batch: module.loss(batch)`" in str(error.value)


def test_module_without_step_or_loss_function_is_refused():
    with pytest.raises(TypeError, match="`Linear` has no `training_step`"):
        training_loss(nn.Linear(2, 2), X)


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        (lambda loss: {"no": loss}, TypeError, "returned dict"),
        (lambda loss: {"loss": None}, ValueError, "returned None"),
        (lambda loss: 1.0, TypeError, "returned float"),
        (lambda loss: loss.expand(3), ValueError, r"shape \(3,\)"),
        (lambda loss: loss.detach(), ValueError, "without a graph"),
        (lambda loss: loss.to(torch.complex64), ValueError, "one real number"),
    ],
)
def test_what_is_no_scalar_loss_is_refused(result, error, match):
    with pytest.raises(error, match=match):
        training_loss(Plain(result), X)


def test_none_is_refused_from_a_loss_function():
    with pytest.raises(ValueError, match="skips this batch"):
        training_loss(nn.Linear(2, 2), X, lambda m, x: None)


def test_missing_trainer_is_lightnings_own_error():
    class Asks(Plain):
        def training_step(self, batch, batch_idx):
            return self.lin(batch).mean() * self.trainer.world_size

    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        training_loss(Asks(), X)


# ---------------------------------------------------------------- on_device, device_of, autocast


@dataclass
class Item:
    x: torch.Tensor
    label: str = "a"


Pair = namedtuple("Pair", "a b")


def test_batch_is_copied_with_all_its_containers():
    batch = {"x": [torch.ones(2)], "pair": Pair(torch.ones(1), "b"), "item": Item(torch.ones(1))}
    made = on_device(batch, None)
    made["x"][0].add_(1)
    made["pair"].a.add_(1)
    made["item"].x.add_(1)
    made["x"].append(3)
    assert batch["x"][0].tolist() == [1.0, 1.0]
    assert len(batch["x"]) == 1
    assert batch["pair"].a.item() == batch["item"].x.item() == 1.0
    assert made["pair"].b == "b"
    assert type(made["pair"]) is Pair


def test_batch_keeps_requires_grad_and_loses_its_graph():
    x = torch.ones(2, requires_grad=True)
    made = on_device([x, x * 2, torch.ones(1, dtype=torch.long)], None)
    assert [t.requires_grad for t in made] == [True, True, False]
    assert all(t.is_leaf for t in made)


def test_batch_moves():
    made = on_device({"x": torch.ones(2)}, "meta")
    assert made["x"].device.type == "meta"


def test_object_that_moves_itself_is_asked_to_and_stays_as_it_is():
    class Encoding(UserDict):
        def to(self, device):
            self.data = {key: value.to(device) for key, value in self.data.items()}
            return self

    batch = Encoding(x=torch.ones(2))
    assert on_device(batch, "meta")["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"


class Moves:
    """A batch that moves itself, as graphs and tokenizers' batches do."""

    def __init__(self, x, *rest):
        self.x, self.rest = x, list(rest)

    def to(self, device):
        self.x = self.x.to(device)
        return self


@pytest.mark.parametrize("device", [None, "cpu"])
def test_object_that_moves_itself_is_copied_with_all_its_tensors(device):
    x = torch.ones(2, requires_grad=True)
    batch = Moves(x * 2, torch.zeros(1), [torch.zeros(1)])
    made = on_device(batch, device)
    with torch.no_grad():
        made.x.mul_(3)
        made.rest[0].add_(1)
        made.rest[1][0].add_(1)
    made.rest.append(4)
    assert made.x.is_leaf
    assert made.x.requires_grad
    assert batch.x.tolist() == [2.0, 2.0]
    assert batch.rest == [torch.zeros(1), [torch.zeros(1)]]


def test_object_that_refuses_a_deep_copy_is_asked_to_move_all_the_same():
    batch = Moves(torch.ones(2), threading.Lock())
    assert on_device(batch, "meta").x.device.type == "meta"
    assert batch.x.device.type == "cpu"


def test_device_of_a_module():
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Identity()) is None
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert device_of(both) is None


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)],
)
def test_autocast_of_a_precision(precision, dtype):
    with autocast(precision, "cpu"):
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == dtype


def test_float32_is_float32_within_another_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast("32-true", "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_casts_are_not_cached():
    with autocast("16-mixed", torch.device("cpu")):
        assert not torch.is_autocast_cache_enabled()


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'16-mixed', 'bf16-mixed', '32-true'"):
        autocast("fp16")
