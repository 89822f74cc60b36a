# SPDX-License-Identifier: Apache-2.0
"""Runs that were built to have one fault each: the monitor finds it, it alone, and says it once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import (
    AmpMonitor,
    DtypeGuard,
    NonFiniteLocator,
    SafeAMP,
    ScalerCheckpoint,
    SchedulerGate,
    SkipLimitError,
    UnscaleGuard,
)
from lightning_amp_guard.monitor import throughput
from lightning_amp_guard.monitor.ledger.file import read_run
from tests.helpers import BAD, GOOD, Line, ManualLine, fit, stock_plugin
from tests.monitor.runs import CONDITIONS, monitored, under

SCALED = ("SafeAMP", "stock")
EVERY = tuple(CONDITIONS)
BY_LOG_STEPS_OR_LEDGER = pytest.mark.parametrize("ledger", [False, True])


def watching(tmp_path, ledger):
    return AmpMonitor(ledger=tmp_path / "ledger.jsonl" if ledger else False)


def rows_of(x: Tensor, size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x), batch_size=size)


def says(finding, *parts):
    for part in parts:
        assert part in finding.evidence


# ---------------------------------------------------------------------- AMP101


class ClipsEarly(Line):
    """Clips in `on_after_backward`, where the gradients still carry the scale."""

    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class ClipsValuesEarly(Line):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)


class ClipsByHandEarly(ManualLine):
    def between(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


UNGUARDED = [UnscaleGuard(enabled=False)]
CLIPPING = {
    "stock": lambda: {"plugin": stock_plugin(init_scale=1024.0)},
    "SafeAMP without UnscaleGuard": lambda: {
        "plugin": SafeAMP(init_scale=1024.0),
        "callbacks": [UnscaleGuard(enabled=False)],
    },
}


@pytest.mark.parametrize("kind", [ClipsEarly, ClipsByHandEarly])
@pytest.mark.parametrize("condition", CLIPPING)
def test_clip_of_scaled_gradients_is_told_in_one_log_step_of_a_run(condition, kind):
    # four gradients of 1 at a scale of 1024: a norm of 2048 is cut to 0.5, which is 0.0244 % of it
    told = monitored(kind(), 4, log_every_n_steps=4, **CLIPPING[condition]())
    finding = told.only("AMP101")
    says(finding, "attempt 3 of optimizer 0", "the norm was 0.5 while", "the scale of 1024")
    says(finding, "asked to clip to 0.5, the optimizer got 0.0004883", "0.0244 %", "(1 log steps")


@pytest.mark.parametrize("condition", CLIPPING)
def test_clip_by_value_of_scaled_gradients_is_told(condition):
    # five gradients of 1024 are cut to 0.5 each; their norm, 1.118, is no number that people write
    told = monitored(ClipsValuesEarly(width=5), 4, log_every_n_steps=1, **CLIPPING[condition]())
    says(told.only("AMP101"), "attempt 0", "the largest element was 0.5", "got 0.0004883")


@pytest.mark.parametrize("condition", CLIPPING)
def test_clip_of_scaled_gradients_is_told_in_accumulation_and_with_fused_optimizers(condition):
    # each micro-batch adds 1024 / 2 per element to what the last clip left
    model = ClipsEarly(make_optimizer=lambda p: torch.optim.Adam(p, lr=0.5, fused=True))
    told = monitored(
        model, 8, log_every_n_steps=4, accumulate_grad_batches=2, **CLIPPING[condition]()
    )
    says(told.only("AMP101"), "attempt 3", "the norm was 0.5", "got 0.0004883")


class Pair(L.LightningModule):
    """Two weights of 4 with an optimizer each; `clipped` names whose scaled gradients are cut."""

    def __init__(self, clipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(2))
        self.clipped = clipped

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for idx, (optimizer, net) in enumerate(zip(self.optimizers(), self.nets, strict=True)):
            optimizer.zero_grad()
            self.manual_backward(net(batch[0]).float().mean())
            if idx in self.clipped:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.5) for net in self.nets]


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", CLIPPING)
@pytest.mark.parametrize("clipped", [0, 1])
def test_clip_of_scaled_gradients_is_told_of_the_optimizer_among_two(
    tmp_path, condition, clipped, ledger
):
    monitor = watching(tmp_path, ledger)
    told = monitored(
        Pair((clipped,)), 4, monitor=monitor, log_every_n_steps=4, **CLIPPING[condition]()
    )
    finding = told.only("AMP101")
    says(finding, f"of optimizer {clipped} the norm was 0.5 while", "0.0244 %", "(1 log steps")


class StepsTogether(Pair):
    """Both backward passes come before both steps: the first step moves the scale of the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        for net in self.nets:
            self.manual_backward(net(batch[0]).float().mean())
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("kind", [Pair, StepsTogether])
@pytest.mark.parametrize("condition", CLIPPING)
def test_gradients_of_two_optimizers_that_nobody_touched_kept_all_of_their_norm(
    tmp_path, condition, kind
):
    arguments = CLIPPING[condition]()
    if condition != "stock":
        # a growth at each applied update, so that the scale moves under the held gradients
        arguments["plugin"] = SafeAMP(init_scale=1024.0, growth_interval=1)
    path = tmp_path / "ledger.jsonl"
    monitored(kind(), 3, monitor=AmpMonitor(ledger=path), log_every_n_steps=1, **arguments)
    kept = [(row.optimizer, row.stats.kept) for row in read_run(path).rows]
    assert kept == [(0, 1.0), (1, 1.0)] * 3


# ---------------------------------------------------------------------- AMP102


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)


SCHEDULING = {
    "stock": lambda: {"plugin": stock_plugin(init_scale=8.0)},
    "SafeAMP without SchedulerGate": lambda: {
        "plugin": SafeAMP(init_scale=8.0),
        "callbacks": [SchedulerGate(enabled=False)],
    },
}


@pytest.mark.parametrize(("make", "name"), [(halving, "StepLR"), (one_cycle, "OneCycleLR")])
@pytest.mark.parametrize("condition", SCHEDULING)
def test_schedule_that_skips_advanced_is_told_at_the_end(condition, make, name):
    model = Line([GOOD, BAD, GOOD, BAD], make_scheduler=make)
    finding = monitored(model, 6, **SCHEDULING[condition]()).only("AMP102")
    says(finding, f"{name} of optimizer 0 advanced 6 times where 4 were due, 2 ahead; 2 of")


@pytest.mark.parametrize("condition", SCHEDULING)
def test_schedule_that_one_skip_advanced_is_told_at_the_next_log_step(condition):
    model = Line([GOOD, BAD], make_scheduler=halving)
    told = monitored(model, 6, log_every_n_steps=3, **SCHEDULING[condition]())
    says(told.only("AMP102"), "advanced 3 times where 2 were due, 1 ahead; 1 of")


@pytest.mark.parametrize("condition", SCHEDULING)
def test_schedule_with_accumulation_is_counted_in_attempts(condition):
    # windows of two; the second one overflows in its last micro-batch
    model = Line([GOOD, GOOD, GOOD, BAD], make_scheduler=halving)
    told = monitored(model, 8, accumulate_grad_batches=2, **SCHEDULING[condition]())
    says(told.only("AMP102"), "advanced 4 times where 3 were due, 1 ahead; 1 of")


# ---------------------------------------------------------------------- AMP103


class Net(L.LightningModule):
    """A line of 4 weights into a head that returns the loss."""

    def __init__(self, head: nn.Module, start: float = 8.0, lr: float = 0.01) -> None:
        super().__init__()
        self.lin, self.head, self.lr = nn.Linear(4, 1, bias=False), head, lr
        nn.init.constant_(self.lin.weight, start)

    def training_step(self, batch, batch_idx):
        return self.head(self.lin(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Loud(nn.Module):
    """Its output of 40000 fits float16; the gradient of its square, 80000 over 4 samples, does not
    survive the factor of 200 behind it, at any scale."""

    def forward(self, x):
        return (x * 200.0).float().pow(2).mean()


class TooLoud(nn.Module):
    """200 times 1000 exceeds 65504 in the forward pass."""

    def forward(self, x):
        return (x * 1000.0).pow(2).mean().float()


class Divides(nn.Module):
    """0 / 0 in any precision."""

    def forward(self, x):
        x = x * 0
        return (x / x).sum()


class Spread(nn.Module):
    """The root of a variance of zero: a slope of inf, times zero."""

    def forward(self, x):
        x = x.float()
        return (x - x.mean()).pow(2).mean().sqrt()


@pytest.mark.parametrize("condition", SCALED)
def test_gradients_that_no_scale_saves_are_told_with_their_module(condition):
    # from 16 on every scale is too low to be a matter of calibration: the eighth skip is attempt 7
    told = monitored(Net(Loud(), 50.0), 12, log_every_n_steps=1, **under(condition, 16.0))
    finding = told.only("AMP103")
    last = {"SafeAMP": "1", "stock": "0.125"}[condition]
    says(finding, "optimizer 0 skipped 8 of 8 (100 %) attempts from attempt 0 on")
    says(finding, f"the last was attempt 7, at scale {last}", "'head' (Loud)")
    assert finding.title == "overflows go on"
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(fp32_modules=["head"])])`')


@pytest.mark.parametrize("condition", SCALED)
def test_forward_pass_that_leaves_float16_is_told_with_its_module(condition):
    told = monitored(Net(TooLoud(), 50.0), 12, log_every_n_steps=1, **under(condition, 16.0))
    finding = told.only("AMP103")
    says(finding, "8 of 8 (100 %) attempts of optimizer 0 from attempt 0 on had a loss known")
    says(finding, "(8 were skipped)", "attempt 7", "'head' (TooLoud)")
    assert "the forward pass leaves float16's range" in finding.cause
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(fp32_modules=["head"])])`')


def test_module_that_computes_in_float32_already_is_not_sent_there_again():
    plugin = SafeAMP(init_scale=16.0, fp32_modules=["head"], max_consecutive_skips=None)
    told = monitored(Net(Divides()), 12, log_every_n_steps=1, plugin=plugin)
    finding = told.only("AMP103")
    assert "it computes in float32 already" in finding.cause
    assert finding.remedy == "Keep its inputs away from there: `x.clamp(min=1e-6)`"


def test_weights_that_hold_inf_are_told_as_the_cause():
    model = Net(Loud())
    torch.nn.init.constant_(model.lin.weight, float("inf"))
    plugin = SafeAMP(init_scale=16.0, max_consecutive_skips=None)
    finding = monitored(model, 12, log_every_n_steps=1, plugin=plugin).only("AMP103")
    assert "from a checkpoint" in finding.cause
    assert finding.remedy.endswith('`trainer.fit(model, ckpt_path="last-good.ckpt")`')


def test_overflows_here_and_there_are_told_by_their_share():
    # a third of 36 attempts; each backs off, and at a growth interval of 2000 none comes of growth
    for condition in SCALED:
        plan = [GOOD, GOOD, BAD] * 12
        told = monitored(Line(plan), 36, log_every_n_steps=36, **under(condition, 16.0))
        finding = told.only("AMP103")
        # at attempts 2, 5, ... 35, all below 16 but none in calibration
        says(finding, "skipped 12 of 34 (35.3 %) attempts from attempt 2 on", "attempt 35")


def test_bfloat16_run_that_only_skips_is_told_with_its_module():
    told = monitored(Net(Spread()), 10, log_every_n_steps=1, **under("SafeAMP in bfloat16"))
    finding = told.only("AMP103")
    says(finding, "skipped 8 of 8 (100 %)", "attempt 7, at scale 1", "'head' (Spread)")
    assert finding.title == "non-finite gradients go on"
    fix = 'SafeAMP(precision="bf16-mixed", fp32_modules=["head"])'
    assert finding.remedy.endswith(f"`Trainer(plugins=[{fix}])`")


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", ["stock in bfloat16", "32-true"])
def test_run_that_nan_gradients_have_ruined_is_told_at_the_third_bad_loss(
    condition, ledger, tmp_path
):
    # nothing holds the NaN gradient of attempt 0 back: the weights, so the losses from attempt 1 on
    told = monitored(
        Net(Spread()),
        8,
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition),
    )
    finding = told.only("AMP103")
    says(finding, "3 of 3 (100 %) attempts of optimizer 0 from attempt 1 on", "(0 were skipped)")
    says(finding, "attempt 3", "'lin' (Linear)", "its own parameters 'weight' hold inf or NaN")
    assert finding.title == "non-finite losses go on"
    fix = 'SafeAMP(precision="bf16-mixed", error_if_nonfinite=True)'
    assert finding.remedy.endswith(f"`Trainer(plugins=[{fix}])`")


def test_skip_limit_ends_the_run_with_the_finding():
    plugin = SafeAMP(init_scale=16.0, max_consecutive_skips=9)
    told = monitored(Net(Loud(), 50.0), 12, plugin=plugin, raises=SkipLimitError)
    # the eighth unexplained skip was seen by nobody until the error
    assert told.codes == ["AMP103"]
    says(told.findings[0], "skipped 9 of 9 (100 %)")


# ---------------------------------------------------------------------- AMP104


class Vanishing(nn.Module):
    """A loss so small that the gradient of float16's output is zero at scales below 2**4."""

    def forward(self, x):
        return x.float().mean() * 2.0**-28


def varied(n, width=4):
    return rows_of(torch.rand(4 * n, width, generator=torch.Generator().manual_seed(0)) + 0.5)


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", SCALED)
def test_updates_by_gradients_that_underflow_are_told(condition, ledger, tmp_path):
    told = monitored(
        Net(Vanishing()),
        data=varied(20),
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition, 1.0),
    )
    finding = told.only("AMP104")
    says(finding, "16 updates from attempt 1 to 16", "learning rates up to 0.01")
    says(finding, "4 of 4 (100 %) gradient elements are exactly zero")
    assert finding.remedy.endswith("`Trainer(plugins=[SafeAMP(init_scale=2.0**24)])`")


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", EVERY)
def test_updates_below_the_weights_rounding_step_are_told(condition, ledger, tmp_path):
    # float32 numbers at 8 are 2**-20 apart; a step of about 1e-7 rounds away
    model = Net(nn.Flatten(0), lr=1e-7)
    model.head = Mean()
    told = monitored(
        model,
        data=varied(18),
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition),
    )
    finding = told.only("AMP104")
    says(finding, "16 updates from attempt 1 to 16", "learning rates up to 1e-07")
    says(finding, "0 of 4 (0 %) gradient elements")
    assert "smaller than their rounding step" in finding.cause


class Mean(nn.Module):
    def forward(self, x):
        return x.float().mean()


class RootOfNothing(nn.Module):
    """Adds nothing to the mean, and to its gradient NaN: the slope of a root at zero, times zero."""

    def forward(self, x):
        return x.float().mean() + (0.0 * x.float()).sqrt().sum()


@pytest.mark.parametrize("condition", ["SafeAMP", "SafeAMP in bfloat16", "stock"])
def test_run_that_skips_every_step_is_told_twice_of_its_two_faults(condition):
    model = Net(RootOfNothing())
    told = monitored(model, data=varied(18), log_every_n_steps=1, **under(condition, 16.0))
    assert told.codes == ["AMP103", "AMP104"]
    assert told.warned == [str(finding) for finding in told.findings]
    assert told.summary.split(maxsplit=1) == ["findings", "AMP103, AMP104"]
    says(told.findings[1], "the last 16 attempts, 0 to 15, were all skipped")


# ---------------------------------------------------------------------- AMP105


class LogOfRest(torch.autograd.Function):
    """log(1 - x), written without a word to autocast; straight through in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (1.0 - x).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Squash(nn.Module):
    def forward(self, x):
        return LogOfRest.apply(x)


class Custom(L.LightningModule):
    """0.9999 is 1 in float16 and bfloat16, but not in float32, where the batch holds 1 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.squash = nn.Linear(4, 4, bias=False), Squash()
        self.head = nn.Linear(4, 1, bias=False)
        nn.init.eye_(self.embed.weight)

    def training_step(self, batch, batch_idx):
        return self.head(self.squash(self.embed(batch[0]))).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def close_to_one(n, condition):
    return rows_of(torch.full((4 * n, 4), 1.0 if condition == "32-true" else 0.9999))


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", EVERY)
def test_custom_operator_that_makes_inf_is_told(condition, ledger, tmp_path):
    told = monitored(
        Custom(),
        data=close_to_one(6, condition),
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition),
    )
    finding = told.only("AMP105")
    # the first bad loss arms, the second shows
    says(finding, "'squash' (Squash)", "2 of 2 (100 %)", "the last attempt 1")
    assert "LogOfRest`" in finding.cause
    if condition == "32-true":
        assert "in 32-true already" in finding.cause
    else:
        assert finding.remedy.endswith(
            '`@torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)`'
        )


# ---------------------------------------------------------------------- with baseline=


def baseline(tmp_path, model, n=4, **kwargs):
    """Run `model` in float32 and return the path of its ledger."""
    path = tmp_path / "float32.jsonl"
    told = monitored(model, n, monitor=AmpMonitor(ledger=path), precision="32-true", **kwargs)
    told.nothing()
    return path


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


SLOW = ("SafeAMP", "SafeAMP in bfloat16", "stock", "stock in bfloat16")


class Sleepless(L.Callback):
    """Stands for a device without fast 16-bit arithmetic: the time of a step is its own doing."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 0.0, seconds
        kind = throughput.Throughput
        monkeypatch.setattr(kind.__init__, "__defaults__", (2, lambda: self.now))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += self.seconds


@pytest.mark.parametrize("condition", SLOW)
def test_run_that_is_no_faster_than_float32_is_told(condition, tmp_path, monkeypatch):
    # 4 samples in 10 ms, and in 16 ms
    fast = [Sleepless(monkeypatch, 0.010)]
    path = baseline(tmp_path, Wide(), 20, callbacks=fast, log_every_n_steps=5)
    told = monitored(
        Wide(),
        20,
        monitor=AmpMonitor(baseline=path),
        callbacks=[Sleepless(monkeypatch, 0.016)],
        log_every_n_steps=5,
        **under(condition),
    )
    says(told.only("AMP106"), "250 samples/s in ", "400 in the float32 baseline: 0.625 times")


@pytest.mark.parametrize("condition", SLOW)
def test_memory_that_weights_and_state_dominate_is_told(condition, tmp_path, monkeypatch):
    # as a device's allocator counts: what the interpreter takes is left out
    monkeypatch.setattr(throughput, "_rss", lambda: Table.running.mib())
    path = baseline(tmp_path, Table(), 4, log_every_n_steps=2)
    monitor = AmpMonitor(baseline=path)
    told = monitored(Table(), 4, monitor=monitor, log_every_n_steps=2, **under(condition))
    finding = told.only("AMP110")
    # 2**18 weights of 4 bytes, a gradient and a momentum for each
    says(finding, "weights take 1 MiB, gradients and optimizer state 2 MiB")
    assert read_run(path).facts.peak_mib == 3.0
    says(finding, "3 MiB in the float32 baseline", "together 100 % of the peak")


class Table(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**18))
        Table.running = self

    def mib(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        held = [self.weight, self.weight.grad, optimizer.state[self.weight]["momentum_buffer"]]
        return sum(x.nbytes for x in held) / 2**20

    def training_step(self, batch, batch_idx):
        return self.weight.mean() * batch[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Detour(torch.autograd.Function):
    """Identity whose gradient takes a way past 2**-40 and back, in whatever dtype it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0**-40 * 2.0**40


class Lossy(L.LightningModule):
    """One of two equal branches loses its gradient in float16: of a norm of 1.414 a norm of 1 stays,
    and the layer behind the detour gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.behind = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        for layer in (self.plain, self.behind):
            nn.init.constant_(layer.weight, 8.0)

    def training_step(self, batch, batch_idx):
        one, other = self.plain(batch[0]), Detour.apply(self.behind(batch[0]))
        return (one.float() + other.float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("condition", SCALED)
def test_layer_whose_gradient_norm_parts_from_float32_is_told(condition, tmp_path):
    path = baseline(tmp_path, Lossy(), 6, log_every_n_steps=1)
    monitor = AmpMonitor(baseline=path)
    told = monitored(Lossy(), 6, monitor=monitor, log_every_n_steps=1, **under(condition))
    finding = told.only("AMP113")
    # four gradients of 1: a norm of 2
    says(finding, "the gradient norm of 'behind' was 0 at attempt 0 and 2 in the float32 baseline")
    says(finding, "at 3 of 3 (100 %) comparable attempts")
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(fp32_modules=["behind"])])`')


# ---------------------------------------------------------------------- AMP107


class Renamed(MixedPrecision):
    """The stock plugin under another name, which is the key of its state in a checkpoint."""


def renamed():
    return Renamed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))


def foreign(kind):
    """Keyword arguments of a run whose checkpoint holds no state for another run's scaler."""
    return {
        "32-true": lambda: {"precision": "32-true"},
        "bf16-mixed": lambda: {"precision": "bf16-mixed"},
        "another class": lambda: {"plugin": renamed()},
        "SafeAMP without ScalerCheckpoint": lambda: {
            "plugin": SafeAMP(init_scale=64.0),
            "callbacks": [ScalerCheckpoint(enabled=False)],
        },
    }[kind]()


FOREIGN = ("32-true", "bf16-mixed", "another class", "SafeAMP without ScalerCheckpoint")


def resumed(tmp_path, first, then, **kwargs):
    """Fit two batches, write a checkpoint, and return what a monitor says of two more."""
    model = Line()
    path = tmp_path / "last.ckpt"
    callbacks = first.pop("callbacks", [])
    monitor = AmpMonitor()
    fit(model, n=4, max_steps=2, callbacks=[monitor, *callbacks], **first).save_checkpoint(path)
    return monitored(Line(), 4, ckpt_path=path, max_epochs=2, **then, **kwargs)


@pytest.mark.parametrize("kind", FOREIGN)
def test_resume_without_the_scaler_is_told_under_stock(kind, tmp_path):
    told = resumed(tmp_path, foreign(kind), under("stock", 1024.0))
    finding = told.only("AMP107")
    scale = 64 if kind in FOREIGN[2:] else 1
    says(finding, f"`MixedPrecision`, where it was {scale} when", "the scale is 1024 at attempt")
    says(finding, "0 of 4 (0 %) attempts since were skipped")


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed"])
def test_resume_without_the_scaler_is_told_under_safeamp(kind, tmp_path):
    told = resumed(tmp_path, foreign(kind), under("SafeAMP", 1024.0))
    says(told.only("AMP107"), "`SafeAMP`, where it was 1 when", "the scale is 1024 at attempt 0")


def test_resume_under_the_same_class_is_silent_without_its_guard_too(tmp_path):
    guards = {"callbacks": [ScalerCheckpoint(enabled=False)]}
    told = resumed(
        tmp_path, {"plugin": SafeAMP(init_scale=64.0), **guards}, under("SafeAMP"), **guards
    )
    told.nothing()


# ---------------------------------------------------------------------- AMP108


def spoiled(n, at, value=float("nan")):
    """Return `n` batches of ones, one of which holds a bad value."""
    x = torch.ones(4 * n, 4)
    x[4 * at + 2, 3] = value
    return rows_of(x)


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", EVERY)
def test_bad_batch_is_told_with_its_field(condition, ledger, tmp_path):
    told = monitored(
        Line(),
        data=spoiled(8, 3),
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition),
    )
    finding = told.only("AMP108")
    says(finding, "1 of 4 (25 %) attempts seen had a non-finite loss")
    says(finding, "attempt 3 (epoch 0, batch 3)", "batch[0] holds 1 NaN in 16 values")
    says(finding, "first at sample 2")


@pytest.mark.parametrize("condition", ["SafeAMP", "SafeAMP in bfloat16", "stock"])
def test_bad_batch_between_log_steps_is_told_where_its_skip_shows(condition):
    # and a skip for another reason after it takes nothing away
    model = Line([GOOD] * 5 + [BAD])
    told = monitored(model, data=spoiled(8, 3), log_every_n_steps=8, **under(condition))
    says(told.only("AMP108"), "1 of 8 (12.5 %)", "attempt 3 (epoch 0, batch 3)")


@pytest.mark.parametrize("condition", ["stock in bfloat16", "32-true"])
def test_bad_batch_between_log_steps_is_told_by_a_ledger_where_nothing_is_skipped(
    condition, tmp_path
):
    # all later losses are NaN too, and come from this one
    told = monitored(
        Line(),
        data=spoiled(12, 3, float("inf")),
        monitor=watching(tmp_path, True),
        **under(condition),
    )
    says(told.only("AMP108"), "1 of 12", "attempt 3 (epoch 0, batch 3)", "holds 1 inf in 16")


def test_bad_batch_is_told_without_a_locator_too():
    told = monitored(
        Line(), data=spoiled(8, 3), callbacks=[NonFiniteLocator(enabled=False)], **under("SafeAMP")
    )
    says(told.only("AMP108"), "attempt 3 (epoch 0, batch 3)", "batch[0] holds 1 NaN")


# ---------------------------------------------------------------------- AMP109


class Uneven(L.LightningModule):
    """Two of 16 gradients are subnormal in float16, the others too small for it, at a scale of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 1, bias=False)
        nn.init.constant_(self.lin.weight, 1e-3)

    def training_step(self, batch, batch_idx):
        return self.lin(batch[0]).float().mean() * 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def uneven(n):
    x = torch.full((4 * n, 16), 0.01)
    x[:, :2] = 1.0
    return rows_of(x)


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", SCALED)
def test_loss_that_stays_while_gradients_underflow_is_told(condition, ledger, tmp_path):
    told = monitored(
        Uneven(),
        data=uneven(26),
        monitor=watching(tmp_path, ledger),
        log_every_n_steps=1,
        **under(condition, 1.0),
    )
    finding = told.only("AMP109")
    # 1e-6 times 2e-3 and 14 times 1e-5; then float16's next smaller number
    says(finding, "of optimizer 0 went from 2.14e-09 to 2.138e-09 over 24 attempts")
    says(finding, "14 of 16 (87.5 %) gradient elements are exactly zero and 2 of the other 2")
    says(finding, "24 of 24 log steps")


class Half(Line):
    """Trains weights in bfloat16; at 8 a step of 0.005 is less than half of their spacing, but the
    bias, at 0, moves."""

    def __init__(self):
        super().__init__(make_optimizer=lambda p: torch.optim.SGD(p, lr=0.005))
        self.lin = nn.Linear(4, 1)
        nn.init.constant_(self.lin.weight, 8.0)
        nn.init.constant_(self.lin.bias, 0.0)
        self.bfloat16()

    def training_step(self, batch, batch_idx):
        return self.lin(batch[0].bfloat16()).float().mean()


@BY_LOG_STEPS_OR_LEDGER
@pytest.mark.parametrize("condition", EVERY)
def test_loss_that_stays_on_half_weights_is_told(condition, ledger, tmp_path):
    told = monitored(
        Half(),
        26,
        monitor=watching(tmp_path, ledger),
        callbacks=[DtypeGuard(enabled=False)] if condition.startswith("Safe") else [],
        log_every_n_steps=1,
        **under(condition),
    )
    finding = told.only("AMP109")
    says(finding, "2 trained parameters are not float32: 'lin.weight', 'lin.bias'", "24 attempts")
    assert finding.remedy.endswith("`model.float()`")


# ---------------------------------------------------------------------- AMP112


class NeverUpdates(torch.amp.GradScaler):
    def update(self, new_scale=None):
        super().update(self.get_scale())


class ForgetsUpdate(MixedPrecision):
    """Steps by the scaler and never calls its `update`."""

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        result = closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer)
        self.scaler._per_optimizer_states.clear()
        return result


def standing():
    scaler = NeverUpdates("cpu", init_scale=64.0, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


def forgetting():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    return ForgetsUpdate("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("make", [standing, forgetting])
def test_scale_that_never_moves_is_told_after_three_intervals(make):
    told = monitored(Line(), 10, plugin=make(), log_every_n_steps=1)
    finding = told.only("AMP112")
    says(finding, "6 updates in a row were applied at scale 64", "growth_interval=2", "at least 3")


def test_every_code_but_the_one_of_several_ranks_has_a_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    codes = set(re.findall(r'only\("(AMP\d+)"\)', text))
    assert codes == {f"AMP{n}" for n in range(101, 114)} - {"AMP111"}
