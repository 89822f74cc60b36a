# SPDX-License-Identifier: Apache-2.0
"""Small real tasks that train as they should: nothing is found, whatever kind of run it is."""

from __future__ import annotations

import functools
import itertools
import warnings
from pydoc_data.topics import topics
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import AmpMonitor, SafeAMP
from tests.helpers import fit, make_trainer, stock_plugin
from tests.monitor.runs import monitored, under

STEPS = 26  # the slowest rule waits for 24 losses
sklearn_datasets = pytest.importorskip("sklearn.datasets")


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    x, y = sklearn_datasets.load_digits(return_X_y=True)
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)


def images(n: int = STEPS, size: int = 16) -> DataLoader[Any]:
    x, y = digits()
    return DataLoader(TensorDataset(x[: n * size], y[: n * size]), batch_size=size)


def text(n: int = STEPS, length: int = 16) -> DataLoader[Any]:
    """Return batches of 8 rows of characters."""
    raw = torch.tensor(list(topics["assert"].encode("ascii") * 9))
    return DataLoader(TensorDataset(raw[: n * 8 * length].view(-1, length)), batch_size=8)


def mlp(*between: nn.Module, width: int = 32, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, width, bias=bias), nn.ReLU(), *between, nn.Linear(width, 10, bias=bias)
    )


class Digits(L.LightningModule):
    """Classifies 8 x 8 pictures of digits."""

    def __init__(self, net=None, make=None, factor=1.0, scheduler=None, check=None):
        super().__init__()
        torch.manual_seed(1)
        self.net = mlp() if net is None else net()
        self.make = make or (lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.factor, self.scheduler = factor, scheduler

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y) * self.factor

    def configure_optimizers(self):
        optimizer = self.make([p for p in self.parameters() if p.requires_grad])
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Letters(L.LightningModule):
    """Predicts each next character; the embedding may be sparse, or tied to the head."""

    def __init__(self, sparse=False, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(128, 32, sparse=sparse)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 128, bias=False)
        if tied:
            nn.init.normal_(self.embed.weight, std=0.1)
            self.head.weight = self.embed.weight
        self.sparse = sparse

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        out = self.head(self.norm(self.embed(rows[:, :-1])))
        return F.cross_entropy(out.flatten(0, 1).float(), rows[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5 if self.sparse else 0.1)


class Attention(Letters):
    """With a causal mask of -inf."""

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        x = self.embed(rows[:, :-1])
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        x = torch.softmax((x @ x.mT) * 32**-0.5 + mask, -1) @ x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), rows[:, 1:].flatten())


class Gan(L.LightningModule):
    """Learns a column of the pictures; two optimizers, one scaler, by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        judge, maker = self.optimizers()
        made = self.maker(torch.randn(len(x), 4))
        loss = F.softplus(-self.judge(x).float()) + F.softplus(self.judge(made.detach()).float())
        judge.zero_grad()
        self.manual_backward(loss.mean())
        judge.step()
        loss = F.softplus(-self.judge(made).float())
        maker.zero_grad()
        self.manual_backward(loss.mean())
        maker.step()

    def configure_optimizers(self):
        kwargs = {"lr": 2e-3, "betas": (0.5, 0.99)}
        return [torch.optim.Adam(net.parameters(), **kwargs) for net in (self.judge, self.maker)]


class Validated(Digits):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))

    def val_dataloader(self):
        return images(2)


class ClipsByHand(Digits):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Masked(Digits):
    """Trains 2 % of the first layer's weights; the others' gradients are made exactly zero."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        mask = (torch.rand_like(self.net[0].weight) < 0.02).float()
        self.net[0].weight.register_hook(lambda grad: grad * mask)


class Forgetful(Digits):
    """Gives no loss for every fourth batch."""

    def training_step(self, batch, batch_idx):
        warnings.filterwarnings("ignore", ".*`training_step` returned `None`")
        return None if batch_idx % 4 == 3 else super().training_step(batch, batch_idx)


class Rising(Digits):
    """The labels change all the time, and harder ones come later."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], batch[1].roll(batch_idx)), batch_idx) * (
            1 + batch_idx
        )


class Mending(Digits):
    """Holes in the pictures, filled in by the step."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone()
        x[0, :8] = float("nan")
        assert not x.isfinite().all()
        return super().training_step((x.nan_to_num(0.0), batch[1]), batch_idx)


class Converged(Digits):
    """A loss that stays where it is: a single class, known from the first step on."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], torch.zeros_like(batch[1])), batch_idx)


def dead():
    net = mlp()
    with torch.no_grad():
        net[0].bias[:28] = -100.0  # 28 of 32 units never fire
    return net


def frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def zero_head():
    net = mlp()
    nn.init.zeros_(net[-1].weight)  # the first layer's gradients begin at zero
    return net


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


class Squared(nn.Module):
    """Gradients of about 1e4, which a scale of 2**24 takes out of float16."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 10)

    def forward(self, x):
        return self.lin(x) * 4.0


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(i / 24, 1.0))


def groups(params):
    return torch.optim.Adam([{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)])


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def muon(params):
    return torch.optim.Muon(params, lr=1e-2)


OPTIMIZERS = {
    "SGD": sgd,
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = muon

SAFE = {"plugin": lambda: SafeAMP()}
STOCK = {"plugin": lambda: stock_plugin()}
BF16, SAFE_BF16 = {"precision": "bf16-mixed"}, {"plugin": lambda: SafeAMP("bf16-mixed")}
FP32 = {"precision": "32-true"}
ALL = {"SafeAMP": SAFE, "stock": STOCK, "bf16": BF16, "SafeAMP bf16": SAFE_BF16, "32": FP32}


def safe(**kwargs):
    return {"plugin": lambda: SafeAMP(**kwargs)}


def stock(**kwargs):
    return {"plugin": lambda: stock_plugin(**kwargs)}


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"{name}, {how}": (
            functools.partial(Digits, functools.partial(mlp, bias=name != "Muon"), make),
            kwargs,
        )
        for (name, make), (how, kwargs) in zip(
            OPTIMIZERS.items(),
            itertools.cycle(ALL.items()),
            strict=False,
        )
    },
    "accumulation, a short last window": (Digits, {**SAFE, "accumulate_grad_batches": 3}),
    "dead units": (lambda: Digits(dead), SAFE),
    "sparse embedding": (lambda: Letters(sparse=True), SAFE),
    "sparse embedding, 32": (lambda: Letters(sparse=True), FP32),
    "tied weights": (lambda: Letters(tied=True), SAFE),
    "tied weights, bf16": (lambda: Letters(tied=True), BF16),
    "a mask of -inf": (Attention, SAFE),
    "frozen layer": (lambda: Digits(frozen), SAFE),
    "zero initialisation of the head": (lambda: Digits(zero_head), SAFE),
    "tiny loss": (lambda: Digits(factor=1e-6), SAFE),
    "tiny loss, stock": (lambda: Digits(factor=1e-6), STOCK),
    "large loss": (lambda: Digits(factor=1e4), SAFE),
    "start at 2**24": (lambda: Digits(Squared, factor=100.0), safe(init_scale=2.0**24)),
    "start at 2**24, stock": (
        lambda: Digits(Squared, factor=100.0),
        stock(init_scale=2.0**24),
    ),
    "growth in every step": (
        lambda: Digits(factor=100.0),
        safe(init_scale=2.0**14, growth_interval=1),
    ),
    "growth in every step, stock": (
        lambda: Digits(factor=100.0),
        stock(init_scale=2.0**14, growth_interval=1),
    ),
    "growth with hysteresis": (
        lambda: Digits(factor=100.0),
        safe(init_scale=2.0**14, growth_interval=4, hysteresis=2),
    ),
    "GAN": (Gan, SAFE),
    "GAN, stock": (Gan, STOCK),
    "GAN, 32": (Gan, FP32),
    "clip by norm": (Digits, {**SAFE, "gradient_clip_val": 0.01}),
    "clip by norm, stock": (Digits, {**STOCK, "gradient_clip_val": 0.01}),
    "clip by value": (
        Digits,
        {**SAFE, "gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
    ),
    "clip by hand": (ClipsByHand, SAFE),
    "warm-up from 0": (lambda: Digits(scheduler=warm_up), SAFE),
    "one cycle": (lambda: Digits(scheduler=one_cycle), SAFE),
    "one cycle, stock": (lambda: Digits(scheduler=one_cycle), stock(init_scale=1024.0)),
    "one cycle with overflows": (
        lambda: Digits(Squared, factor=100.0, scheduler=one_cycle),
        safe(init_scale=2.0**24),
    ),
    "convolution, batch norm, dropout": (lambda: Digits(convolution), SAFE),
    "masked gradients": (Masked, SAFE),
    "masked gradients, stock": (Masked, STOCK),
    "average": (
        Digits,
        {**SAFE, "callbacks": lambda: [EMAWeightAveraging(decay=0.9, update_every_n_steps=1)]},
    ),
    "static scale": (Digits, safe(init_scale=256.0, dynamic=False)),
    "static scale, stock": (Digits, stock(init_scale=256.0, growth_interval=10**9)),
    "three batches": (Digits, {**SAFE, "limit_train_batches": 3}),
    "a loss that rises": (lambda: Rising(make=lambda p: torch.optim.SGD(p, lr=1e-4)), SAFE),
    "a loss that rises, stock": (lambda: Rising(make=lambda p: torch.optim.SGD(p, lr=1e-4)), STOCK),
    "batches without a loss": (Forgetful, SAFE),
    "batches without a loss, 32": (Forgetful, FP32),
    "holes in the data that the step fills": (Mending, SAFE),
    "a learning rate of 0": (lambda: Digits(make=lambda p: torch.optim.SGD(p, lr=0.0)), SAFE),
    "nothing left to learn": (Converged, SAFE),
    "parameter groups": (lambda: Digits(make=groups), SAFE),
    "LBFGS, 32": (lambda: Digits(make=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)), FP32),
    "several epochs and validation": (
        Validated,
        {**SAFE, "max_epochs": 2, "limit_train_batches": 12, "val_check_interval": 5},
    ),
    "no logging": (Digits, {**SAFE, "log_every_n_steps": 0}),
    "logging now and then": (Digits, {**STOCK, "log_every_n_steps": 10}),
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found_in_a_healthy_run(name, tmp_path):
    make, kwargs = RUNS[name]
    model = make()
    data = text() if isinstance(model, Letters) else images()
    # every other run has a ledger, which knows each loss; the others know those of log steps
    ledger = list(RUNS).index(name) % 2 == 0
    kwargs = {"log_every_n_steps": 5 if ledger else 1, "data": data, **kwargs}
    for key in ("plugin", "callbacks"):
        if key in kwargs:
            kwargs[key] = kwargs[key]()
    monitor = AmpMonitor(ledger=tmp_path / "ledger.jsonl" if ledger else False)
    monitored(model, monitor=monitor, **kwargs).nothing()


def overflows_of(name):
    make, kwargs = RUNS[name]
    trainer = fit(make(), kwargs["plugin"](), data=images())
    return trainer.precision_plugin.tally


def test_runs_that_are_meant_to_overflow_do():
    assert overflows_of("start at 2**24").skipped >= 4
    assert overflows_of("growth in every step").skipped >= 8
    assert overflows_of("growth with hysteresis").skipped >= 4


class Stops(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 7:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("condition", ["SafeAMP", "stock"])
def test_nothing_is_found_in_a_resumed_run(condition, tmp_path):
    stops = Stops()
    stops.path = tmp_path / "x.ckpt"
    monitor = AmpMonitor(ledger=tmp_path / "first.jsonl")
    told = monitored(
        Digits(), data=images(), monitor=monitor, callbacks=[stops], min_steps=1, **under(condition)
    )
    told.nothing()
    monitor = AmpMonitor(ledger=tmp_path / "second.jsonl")
    monitored(
        Digits(),
        data=images(),
        monitor=monitor,
        log_every_n_steps=1,
        ckpt_path=stops.path,
        **under(condition),
    ).nothing()


def test_nothing_is_found_beside_a_float32_run_that_is_as_good(tmp_path):
    # fewer attempts than a comparison of speeds takes: the CPU is no faster in float16
    path = tmp_path / "float32.jsonl"
    monitored(
        Digits(), data=images(12), monitor=AmpMonitor(ledger=path), log_every_n_steps=1, **FP32
    ).nothing()
    for condition in ("SafeAMP", "stock in bfloat16", "32-true"):
        monitor = AmpMonitor(baseline=path)
        monitored(
            Digits(), data=images(12), monitor=monitor, log_every_n_steps=1, **under(condition)
        ).nothing()


def test_nothing_is_found_when_one_monitor_sees_several_fits():
    monitor = AmpMonitor()
    for condition in ("SafeAMP", "32-true", "stock"):
        monitored(Digits(), data=images(8), monitor=monitor, **under(condition)).nothing()


def test_nothing_is_found_in_one_trainer_that_fits_twice():
    monitor, model = AmpMonitor(), Digits()
    trainer = make_trainer(SafeAMP(), callbacks=[monitor], log_every_n_steps=1)
    for _ in range(2):
        trainer.fit(model, images(8))
        trainer.fit_loop.max_epochs += 1
        assert monitor.findings == []
