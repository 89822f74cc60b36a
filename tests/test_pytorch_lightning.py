# SPDX-License-Identifier: Apache-2.0
"""The same rules and guards for `pytorch_lightning.Trainer`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import PlantedOverflow, batches

pl = pytest.importorskip("pytorch_lightning")

import lightning_amp_guard as root  # noqa: E402
from lightning_amp_guard import ScaledGradientError, SkipLimitError, SkipReason  # noqa: E402
from lightning_amp_guard import pytorch_lightning as mirror  # noqa: E402


class Line(pl.LightningModule):
    """As `tests.helpers.Line`, for the other namespace."""

    def __init__(self, bad: Any = (), lr: float = 0.5, scheduled: bool = False) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.lin.weight, 8.0)
        self.bad, self.lr, self.scheduled, self.seen = set(bad), lr, scheduled, 0
        self.outcomes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        bad = self.seen in self.bad
        self.seen += 1
        return PlantedOverflow.apply(self.lin(batch[0]).float().mean(), bad)

    def on_step_outcome(self, outcome: Any) -> None:
        self.outcomes.append(outcome)

    @property
    def weight(self) -> float:
        return float(self.lin.weight.detach()[0, 0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if not self.scheduled:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(plugin: Any, **kwargs: Any) -> Any:
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "logger"), False)
    kwargs = {"max_epochs": 1, **quiet, "enable_model_summary": False, **kwargs}
    return pl.Trainer(accelerator="cpu", devices=1, plugins=[plugin], **kwargs)


def fit(model: Any, plugin: Any, n: int = 4, **kwargs: Any) -> Any:
    made = trainer(plugin, **kwargs)
    made.fit(model, batches(n))
    return made


def test_every_public_shell_has_its_namesake() -> None:
    for name in mirror.__all__:
        assert hasattr(root, name), name
        assert getattr(mirror, name) is not getattr(root, name)
    assert issubclass(mirror.SafeAMP, pl.plugins.precision.MixedPrecision)
    assert all(issubclass(kind, pl.Callback) for kind in mirror.SafeAMP.guard_types)
    here, there = (
        [kind.name for kind in plugin.guard_types] for plugin in (mirror.SafeAMP, root.SafeAMP)
    )
    assert here == there


def test_skips_move_neither_schedule_nor_average() -> None:
    model, plugin = Line(bad={1, 3}, scheduled=True), mirror.SafeAMP(init_scale=1024.0)
    average = pl.callbacks.WeightAveraging()
    run = fit(model, plugin, n=6, callbacks=[average, mirror.AmpMonitor()])
    assert run.precision == "16-mixed"
    assert [outcome.applied for outcome in model.outcomes] == [True, False, True, False, True, True]
    assert model.lr_schedulers().last_epoch == 4
    assert int(average._average_model.n_averaged) == 4
    assert plugin.scaler.get_scale() == 256.0


@pytest.mark.parametrize("fused", [False, True])
def test_clips_true_gradients(fused: bool) -> None:
    class Fused(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, fused=fused)

    model = Fused()
    fit(model, mirror.SafeAMP(init_scale=1024.0), n=1, gradient_clip_val=0.5)
    assert model.weight == pytest.approx(7.875, abs=1e-5)
    assert model.outcomes[0].grad_norm == 2.0


@pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")  # says where, too
def test_blames_the_loss() -> None:
    class Bad(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

    model, plugin = Bad(), mirror.SafeAMP(init_scale=64.0, max_consecutive_skips=2)
    with pytest.raises(SkipLimitError, match="the loss itself was inf or NaN"):
        fit(model, plugin, n=3)
    assert model.outcomes[0].reason is SkipReason.NONFINITE_LOSS
    assert plugin.scaler.get_scale() == 64.0


def test_notices_gradients_clipped_while_scaled() -> None:
    class Clips(Line):
        def on_after_backward(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    with pytest.raises(ScaledGradientError, match="on_before_optimizer_step"):
        fit(Clips(), mirror.SafeAMP(init_scale=64.0), n=1)


def test_refuses_half_precision_parameters() -> None:
    model = Line()
    model.lin.half()
    with pytest.raises(mirror.SafeAMP.misconfiguration, match=r"lin\.weight"):
        fit(model, mirror.SafeAMP(), n=1)


def test_resumes_exactly(tmp_path: Any) -> None:
    whole, plugin = Line(bad={1}), mirror.SafeAMP(init_scale=64.0, growth_interval=3)
    fit(whole, plugin, n=3, max_epochs=2)
    first = fit(Line(bad={1}), mirror.SafeAMP(init_scale=64.0, growth_interval=3), n=3)
    first.save_checkpoint(tmp_path / "x.ckpt")
    resumed, again = Line(), mirror.SafeAMP(init_scale=64.0)
    made = trainer(again, max_epochs=2)
    made.fit(resumed, batches(3), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert resumed.weight == whole.weight
    assert again.state_dict() == plugin.state_dict()


def test_bf16_guard_skips_a_nonfinite_gradient() -> None:
    model = Line(bad={0})
    fit(model, mirror.SafeAMP("bf16-mixed"), n=2)
    assert model.weight == 7.5


def test_several_optimizers_keep_one_scale_per_window() -> None:
    class Pair(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.constant_(self.other.weight, 8.0)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            parts = (self.lin, self.other)
            self.manual_backward(sum(part(batch[0]).float().mean() for part in parts))
            with self.trainer.precision_plugin.all_or_none():
                first.step()
                second.step()
            first.zero_grad()
            second.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(p.parameters(), lr=0.5) for p in (self.lin, self.other)]

    model = Pair()
    fit(model, mirror.SafeAMP(init_scale=64.0, growth_interval=1), n=3)
    assert model.weight == float(model.other.weight.detach()[0, 0]) == 6.5


def test_the_wrong_namespace_leads_to_the_right_import() -> None:
    with pytest.raises(Exception, match=r"from lightning_amp_guard\.pytorch_lightning import"):
        trainer(root.SafeAMP())
    with pytest.raises(mirror.SafeAMP.misconfiguration, match="pytorch_lightning import SafeAMP"):
        fit(Line(), root_plugin_free(), callbacks=[mirror.UnscaleGuard()])


def root_plugin_free() -> Any:
    """Stock's own plugin, which drives no guards."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)


def test_closing_none_steps_the_window_and_no_gradient_is_no_attempt() -> None:
    class Holes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx == 0 else None

    model, plugin = Holes(), mirror.SafeAMP(init_scale=64.0)
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(model, plugin, n=4, accumulate_grad_batches=2)
    assert model.weight == 7.75  # half of one gradient; the second window has none
    assert plugin.tally.attempted == 1


def test_growth_follows_torch_with_one_optimizer() -> None:
    plugin = mirror.SafeAMP(init_scale=64.0, growth_interval=2)
    fit(Line(bad={2}), plugin, n=6)
    # 64 64 -> 128, overflow -> 64, then two clean batches of three -> 128
    assert plugin.scaler.state_dict()["scale"] == 128.0
    assert plugin.scaler.state_dict()["_growth_tracker"] == 1


def test_closure_result_comes_back_and_an_exception_leaves_everything_ready() -> None:
    class Closes(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.fails, self.returned = False, True, []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> float:
                self.optimizers().zero_grad()
                self.manual_backward(self.lin(batch[0]).float().mean())
                return 3.0

            self.returned.append(self.optimizers().step(closure=closure))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.fails:
                raise RuntimeError("planted")

    model, plugin = Closes(), mirror.SafeAMP(init_scale=64.0)
    run = trainer(plugin)
    with pytest.raises(RuntimeError, match="planted"):
        run.fit(model, batches(1))
    model.fails = False
    run.fit(model, batches(2))
    assert model.returned == [3.0, 3.0]
    assert model.weight == 7.0


def test_anomaly_detection_passes_an_overflow_by() -> None:
    model, plugin = Line(), mirror.SafeAMP(init_scale=2.0**24)
    fit(model, plugin, n=2, detect_anomaly=True)
    # a quarter of 2**24 is beyond float16: both batches overflow, and neither raises
    assert plugin.tally.skipped == 2
    assert model.weight == 8.0


def test_swa_takes_no_sample_from_an_epoch_without_an_update() -> None:
    swa = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)
    model = Line(bad={1, 2})
    fit(model, mirror.SafeAMP(init_scale=64.0), n=1, max_epochs=4, callbacks=[swa])
    # samples at the start of epochs 0 and 1; nothing new at those of 2 and 3
    assert int(swa.n_averaged) == 2


def test_a_guard_switched_off_is_not_active() -> None:
    assert mirror.WindowGuard(enabled=False).enabled is False
    plugin = mirror.SafeAMP(init_scale=64.0)
    fit(Line(), plugin, n=1, callbacks=[mirror.WindowGuard(enabled=False)])
    assert [guard.name for guard in plugin.guards].count("WindowGuard") == 0
