# SPDX-License-Identifier: Apache-2.0
"""NonFiniteLocator: names the module behind skips, is quiet in calibration, and disturbs nothing."""

from __future__ import annotations

import gc
import logging
import math
import warnings
import weakref

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_amp_guard import (
    AmpGuardWarning,
    NonFiniteLocator,
    SafeAMP,
    SkipLimitError,
    SkipReason,
)
from lightning_amp_guard.testing import plant
from tests.diagnosis.planted import FAULTS, HEALTHY
from tests.helpers import BAD, GOOD, NAN_LOSS, Line, ManualLine, PlantedOverflow, fit, make_trainer

INF, NAN = float("inf"), float("nan")


class Net(L.LightningModule):
    """Three layers with all that must not be disturbed: BatchNorm, dropout, a queue."""

    def __init__(self, lr=0.01):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(8, 1),
        )
        self.register_buffer("queue", torch.zeros(6, 8))
        self.lr, self.hooks, self.outcomes = lr, [], []

    def training_step(self, batch, batch_idx):
        hidden = self.net[:3](batch["x"])
        self.queue.copy_(torch.cat((self.queue[1:], hidden.detach().float().mean(0)[None])))
        return (self.net[3:](hidden).float() - batch["y"]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hooks.append(hooks_on(self))

    def on_step_outcome(self, outcome):
        self.outcomes.append(outcome)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def batches(n, spoil=None, at=()):
    """`n` batches; in those of `at` one element is `spoil`."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(n):
        x, y = (torch.randn(4, size, generator=generator) for size in (4, 1))
        if i in at:
            x[2, 1] = spoil
        made.append({"x": x, "y": y})
    return torch.utils.data.DataLoader(made, batch_size=None)


def run(model, data, plugin=None, **kwargs):
    """The messages of the package's warnings in one fit, and the plugin."""
    plugin = plugin or SafeAMP(init_scale=2.0**8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(plugin, **kwargs).fit(model, data)
    return [str(w.message) for w in caught if w.category is AmpGuardWarning], plugin


def find(trainer):
    return next(g for g in trainer.precision_plugin.guards if isinstance(g, NonFiniteLocator))


# ---------------------------------------------------------------------- the table of faults


class Wrapped(L.LightningModule):
    def __init__(self, case):
        super().__init__()
        self.net, self.loss_fn = case.module, case.loss_fn
        self.spare = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return self.loss_fn(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def repeated(batch, n):
    return torch.utils.data.DataLoader([batch] * n, batch_size=None)


@pytest.mark.parametrize("row", [r for r in FAULTS if r.persists], ids=lambda row: row.name)
def test_fault_that_persists_for_three_steps_is_named_in_one_warning(row):
    case = row.make()
    said, plugin = run(Wrapped(case), repeated(case.batch, 3), SafeAMP(init_scale=row.scale))
    assert plugin.tally.skipped == 3
    assert len(said) == 1
    assert f"'net.{row.module}'" in said[0]
    assert said[0].startswith("`NonFiniteLocator`: ")
    assert said[0].endswith(f'`SafeAMP(fp32_modules=["net.{row.module}"])`.')


@pytest.mark.parametrize("name", [n for n in HEALTHY if n != "gradient penalty"])
def test_calibration_from_the_largest_scale_is_quiet(name):
    case = HEALTHY[name]()
    said, plugin = run(Wrapped(case), repeated(case.batch, 14), SafeAMP(init_scale=2.0**24))
    assert plugin.tally.applied > 0
    assert said == []


# ---------------------------------------------------------------------- when it speaks


def test_forward_fault_is_named_at_the_first_watched_step():
    model = Net()
    with plant(model, "net.4", "nan", at=range(2)):
        said, _ = run(model, batches(2))
    assert len(said) == 1
    assert "the module 'net.4' (Linear) returned nan" in said[0]


def test_single_bad_step_is_not_named():
    model = Net()
    with plant(model, "net.4", "nan", at=1):
        said, plugin = run(model, batches(4))
    assert (plugin.tally.skipped, said) == (1, [])


def test_backward_nan_is_named_by_the_third_step():
    model = Net()
    with plant(model, "net.0", "nan", direction="backward", at=range(3)):
        said, _ = run(model, batches(3))
    assert len(said) == 1
    assert "the module 'net.0' (Linear) made nan of a finite gradient" in said[0]


def test_backward_nan_of_two_steps_is_not_named():
    model = Net()
    with plant(model, "net.0", "nan", direction="backward", at=range(2)):
        assert run(model, batches(3))[0] == []


def gradient_of(value):
    """`Line` whose gradient, the scale, is `value` times as large in float16."""

    class Steep(Line):
        def loss(self, batch):
            return (self.lin(batch[0]) * value).float().mean()

    model = Steep()
    nn.init.constant_(model.lin.weight, 0.01)
    return model


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**20, 2.0**24])
def test_overflow_that_ends_with_the_scale_is_quiet(init_scale):
    # the weight's gradient is 512 times the scale: from 64 on it is below 65504
    said, plugin = run(gradient_of(512.0), fit_data(20), SafeAMP(init_scale=init_scale))
    assert plugin.scaler.get_scale() == 64.0
    assert plugin.tally.skipped == round(math.log2(init_scale)) - 6
    assert said == []


def fit_data(n):
    return repeated([torch.ones(4, 4)], n)


def test_overflow_that_goes_on_below_a_scale_of_16_is_named():
    # the weight's gradient is 60000 times the scale: it needs a scale of 1
    for steps, told in ((2, 0), (3, 1), (8, 1)):
        said, plugin = run(gradient_of(6e4), fit_data(steps), SafeAMP(init_scale=64.0))
        assert len(said) == told
    assert "made inf of a finite gradient" in said[0]
    assert plugin.scaler.get_scale() == 1.0


def test_late_outcomes_are_read_at_once_while_armed():
    class Fused(Net):
        on_step_outcome = None  # nobody hears: outcomes of a fused optimizer come late

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    model = Fused()
    with plant(model, "net.4", "nan", direction="backward", at=range(2, 99)):
        plugin = SafeAMP(init_scale=2.0**8, max_consecutive_skips=None)
        said, _ = run(model, batches(40), plugin)
    assert plugin.tally.skipped == 38
    assert len(said) == 1
    assert "'net.4'" in said[0]


def test_static_scale_cannot_fall():
    said, _ = run(gradient_of(4096.0), fit_data(3), SafeAMP(init_scale=2.0**16, dynamic=False))
    assert len(said) == 1


def test_hysteresis_may_leave_the_scale_alone_for_a_while():
    plugin = SafeAMP(init_scale=2.0**12, hysteresis=3)
    said, _ = run(gradient_of(128.0), fit_data(12), plugin)
    assert plugin.tally.applied > 0
    assert said == []


def test_bf16_names_a_backward_fault_at_the_first_watched_step():
    model = Net()
    with plant(model, "net.4", "inf", direction="backward", at=range(2)):
        said, _ = run(model, batches(2), SafeAMP("bf16-mixed"))
    assert len(said) == 1
    assert "'net.4'" in said[0]


def test_each_culprit_is_named_once_a_fit():
    model = Net()
    with (
        plant(model, "net.4", "nan", at={0, 1, 2, 4, 5}),
        plant(model, "net.0", "nan", at={7, 8}),
    ):
        said, _ = run(model, batches(9))
    assert [("'net.4'" in m, "'net.0'" in m) for m in said] == [(True, False), (False, True)]


# ---------------------------------------------------------------------- the error


@pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_skip_limit_error_holds_the_finding_of_the_last_watched_step(direction):
    model = Net()
    plugin = SafeAMP(init_scale=2.0**8, max_consecutive_skips=2)
    with (
        plant(model, "net.4", "inf", direction=direction, at=range(2)),
        pytest.raises(SkipLimitError) as caught,
    ):
        make_trainer(plugin).fit(model, batches(3))
    message = str(caught.value)
    assert "`NonFiniteLocator`: the module 'net.4' (Linear)" in message
    assert message.endswith('`SafeAMP(fp32_modules=["net.4"])`')
    assert hooks_on(model) == 0


class Rooted(Line):
    """No gradient is finite, as the root of 0 has an infinite slope: no scale mends that."""

    def __init__(self, inside):
        super().__init__()
        self.inside = Root() if inside else None

    def loss(self, batch):
        zero = self.lin(batch[0]).float() * 0
        return (zero.sqrt() if self.inside is None else self.inside(zero)).sum()


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


@pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")
@pytest.mark.parametrize(
    ("precision", "inside", "ending"),
    [
        (
            "16-mixed",
            False,
            "root of zero, or exceeds 65504 in float16. Keep what is divided by, and logarithms and"
            " roots, away from zero: `x.clamp(min=1e-6)`; and compute it in float32:"
            " `loss_fn(x.float())`",
        ),
        (
            "bf16-mixed",
            False,
            "with its 8 bits, makes zero. Keep what is divided by, and logarithms and roots, away"
            " from zero: `x.clamp(min=1e-6)`; and compute it in float32: `loss_fn(x.float())`",
        ),
        *[
            (
                precision,
                True,
                'an `eps` of its own. Run it in float32: `SafeAMP(fp32_modules=["inside"])`',
            )
            for precision in ("16-mixed", "bf16-mixed")
        ],
    ],
)
def test_error_of_what_no_scale_mends_ends_in_the_culprits_own_remedy(precision, inside, ending):
    plugin = SafeAMP(precision, max_consecutive_skips=3)
    with pytest.raises(SkipLimitError) as caught:
        fit(Rooted(inside), plugin, 4)
    message = str(caught.value).removesuffix(".")
    assert "made inf of a finite gradient" in message
    assert message.endswith(ending)
    assert message.count("Expected") == 1
    for unsaid in ("backed off", 'precision="bf16-mixed"', "name.of.module"):
        assert unsaid not in message


@pytest.mark.filterwarnings("ignore:`NonFiniteLocator`")
def test_error_of_a_possible_overflow_still_waits_for_the_scale():
    plugin = SafeAMP(init_scale=2.0**16, max_consecutive_skips=3)
    with pytest.raises(SkipLimitError, match="once the scale has backed off") as caught:
        make_trainer(plugin).fit(gradient_of(4096.0), fit_data(4))
    assert "`NonFiniteLocator`: the step of Steep" in str(caught.value)
    assert str(caught.value).endswith('`SafeAMP(fp32_modules=["name.of.module"])`')


def ended(model, data, plugin):
    """The messages of the package's warnings in a fit that ends, and the error that ended it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SkipLimitError) as error:
            make_trainer(plugin).fit(model, data)
    said = [str(w.message) for w in caught if w.category is AmpGuardWarning]
    return said, str(error.value)


class Contrast(L.LightningModule):
    """Normalizes vectors of about 0.1 by hand: the division makes gradients 10 times as large."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 8)

    def training_step(self, batch, batch_idx):
        z = self.lin(batch["x"]) * 0.1
        z = z / z.square().sum(-1, keepdim=True).sqrt()
        return nn.functional.cross_entropy(z @ z.t() / 0.07, torch.arange(len(z)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_division_that_overflows_while_the_scale_is_searched_is_not_told(seed):
    torch.manual_seed(seed)
    said, plugin = run(Contrast(), batches(16), SafeAMP(init_scale=2.0**24))
    assert plugin.tally.skipped > 4
    assert plugin.tally.applied
    assert said == []


class Divides(Line):
    """The loss is 0 / 0 in `ratio`, in any precision."""

    def __init__(self):
        super().__init__()
        self.ratio = Ratio()

    def loss(self, batch):
        return self.ratio(self.lin(batch[0]) * 0).sum()


class Ratio(nn.Module):
    def forward(self, x):
        return x / x


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ([], 'SafeAMP(fp32_modules=["ratio"])'),
        (["lin"], 'SafeAMP(fp32_modules=["lin", "ratio"])'),
        (["*", "!ratio"], 'SafeAMP(fp32_modules=["*"])'),
        (["lin", "ratio"], "x.clamp(min=1e-6)"),  # done already, and it was no use
    ],
)
def test_advice_counts_what_runs_in_float32_already(chosen, line):
    plugin = SafeAMP(max_consecutive_skips=3, fp32_modules=chosen)
    said, error = ended(Divides(), fit_data(4), plugin)
    assert ["'ratio'" in text for text in said] == [True]
    assert said[0].endswith(f"`{line}`.")
    assert error.endswith(f"`{line}`")
    assert error.count("Expected") == 1


def test_error_of_weights_that_hold_inf_ends_in_the_checkpoint_to_load():
    model = Net()
    nn.init.constant_(model.net[4].weight, INF)
    said, error = ended(model, batches(4), SafeAMP(max_consecutive_skips=3))
    assert said[0].endswith('`trainer.fit(model, ckpt_path="last-good.ckpt")`.')
    assert error.endswith('`trainer.fit(model, ckpt_path="last-good.ckpt")`')
    assert "fp32_modules" not in error


def test_error_of_a_bad_batch_ends_in_what_mends_the_batch():
    bad = batches(4, NAN, at=range(4))
    said, error = ended(Net(), bad, SafeAMP(max_consecutive_skips=3))
    assert "the batch itself is not finite" in said[0]
    assert error.endswith("write `torch.nan_to_num(x)` where the batch is made.")
    assert "fp32_modules" not in error


def test_error_at_the_first_skip_has_nothing_to_add():
    plugin = SafeAMP(init_scale=64.0, max_consecutive_skips=1)
    with pytest.raises(SkipLimitError) as caught:
        fit(Line([BAD]), plugin, 2)
    assert "NonFiniteLocator" not in str(caught.value)
    assert str(caught.value).endswith('`SafeAMP(fp32_modules=["name.of.module"])`')


def test_old_finding_is_not_that_of_a_new_trouble():
    model = Net()
    plugin = SafeAMP(init_scale=2.0**8, max_consecutive_skips=3)
    with (
        plant(model, "net.4", "nan", at={0, 1}),
        plant(model, "net.0", "nan", at={3, 4, 5}),
        pytest.warns(AmpGuardWarning),
        pytest.raises(SkipLimitError) as caught,
    ):
        make_trainer(plugin).fit(model, batches(8))
    assert "'net.0'" in str(caught.value)
    assert "'net.4'" not in str(caught.value)


# ---------------------------------------------------------------------- the batch


def test_bad_batch_is_named_at_the_first_skip():
    said, plugin = run(Net(), batches(3, NAN, at=[1]))
    assert plugin.tally.skipped == 1
    assert len(said) == 1
    assert "batch['x'] holds 1 NaN in 16 values" in said[0]
    assert "first at sample 2" in said[0]
    assert "Leave those samples out" in said[0]


def test_stream_of_bad_batches_is_told_once_and_blames_no_module():
    said, plugin = run(Net(), batches(6, INF, at=range(6)))
    assert plugin.tally.skipped == 6
    assert len(said) == 1
    assert "the batch itself is not finite" in said[0]
    assert "the module" not in said[0]


def test_bad_batch_is_in_the_error():
    plugin = SafeAMP(init_scale=64.0, max_consecutive_skips=3)
    with pytest.warns(AmpGuardWarning), pytest.raises(SkipLimitError) as caught:
        make_trainer(plugin).fit(Net(), batches(4, NAN, at=range(4)))
    assert "batch['x'] holds 1 NaN" in str(caught.value)


def test_bad_micro_batch_anywhere_in_a_watched_window_is_named():
    seen = []

    class Looks(Net):
        def on_step_outcome(self, outcome):
            seen.append((outcome.applied, find(self.trainer).bad_batch))

    # windows of 2: the first of each is bad, and only the second is the closure's own
    said, _ = run(Looks(), batches(6, NAN, at=[0, 2, 4]), accumulate_grad_batches=2)
    assert [applied for applied, _ in seen] == [False] * 3
    assert seen[0][1] == ""
    assert all("batch['x'] holds 1 NaN" in bad for _, bad in seen[1:])
    assert len(said) == 1


def test_finite_batches_are_not_blamed_for_a_fault_of_the_model():
    model = Net()
    with plant(model, "net.4", "nan", at=range(3)):
        said, _ = run(model, batches(3))
    assert "batch" not in said[0]


def test_batch_is_not_kept_alive_beyond_its_step():
    kept = []

    class Keeps(Net):
        def training_step(self, batch, batch_idx):
            gc.collect()
            assert [ref() for ref in kept] == [None] * len(kept)
            kept.append(weakref.ref(batch["x"]))
            return super().training_step(batch, batch_idx)

    class Fresh(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return {"x": torch.full((4, 4), NAN), "y": torch.ones(4, 1)}

    said, plugin = run(Keeps(), torch.utils.data.DataLoader(Fresh(), batch_size=None))
    assert plugin.tally.skipped == len(kept) == 4
    assert len(said) == 1


def test_manual_optimization_names_the_batch_of_a_watched_step():
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    said, _ = run(Manual(), batches(3, NAN, at=[0, 1]))
    assert len(said) == 1
    assert "batch['x'] holds 1 NaN" in said[0]


# ---------------------------------------------------------------------- hooks


def test_hooks_are_there_from_a_skip_to_the_first_clean_step():
    model = Net()
    modules = len(list(model.modules()))
    with plant(model, "net.4", "nan", at={1, 2}) as planted:
        run(model, batches(6))
    assert planted.planted == 2
    # the planted fault's own hook, and two for each module while watching
    assert model.hooks == [1, 1 + 2 * modules, 1 + 2 * modules, 1, 1, 1]


def test_hooks_stay_over_the_micro_batches_of_a_window():
    model = Net()
    with plant(model, "net.4", "nan", at=1):
        run(model, batches(6), accumulate_grad_batches=2)
    assert [n > 1 for n in model.hooks] == [False, True, True, False, False, False]


def test_nothing_is_heard_after_a_clean_step():
    class Looks(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            plugin = self.trainer.precision_plugin
            heard.append((len(plugin._after), len(plugin._see_loss), len(plugin._see_batch)))

    heard = []
    model = Looks([GOOD, NAN_LOSS, GOOD, GOOD])
    fit(model, SafeAMP(init_scale=64.0), n=4)
    idle = heard[0]
    assert idle[1:] == (0, 0)
    assert heard == [idle, (idle[0] + 1, 1, 1), idle, idle]


@pytest.mark.parametrize("how", ["end", "exception"])
def test_hooks_are_gone_after_the_fit(how):
    class Ends(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if how == "exception" and batch_idx == 1:
                raise RuntimeError("planted")

    model, guard = Ends(), NonFiniteLocator()
    trainer = make_trainer(SafeAMP(init_scale=2.0**8), callbacks=[guard])
    with plant(model, "net.4", "nan", direction="backward", at=range(2)):
        if how == "end":
            trainer.fit(model, batches(2))
        else:
            with pytest.raises(RuntimeError, match="planted"):
                trainer.fit(model, batches(2))
    assert model.hooks[-1] > 1
    assert hooks_on(model) == 0
    assert guard._trouble is None
    plugin = trainer.precision_plugin
    assert plugin._see_loss == []
    assert guard._after_any not in plugin._after


def test_another_optimizer_does_not_end_the_watch():
    class Two(ManualLine):
        def __init__(self, bad):
            super().__init__()
            self.other, self.bad, self.hooked = nn.Linear(4, 1, bias=False), bad, []

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.lin, self.other)]

        def training_step(self, batch, batch_idx):
            for i, part in enumerate((self.lin, self.other)):
                optimizer = self.optimizers()[i]
                optimizer.zero_grad()
                loss = part(batch[0]).float().mean()
                self.manual_backward(PlantedOverflow.apply(loss, i == 0 and batch_idx in self.bad))
                optimizer.step()
            self.hooked.append(hooks_on(self) > 0)

    model = Two({0, 1})
    fit(model, SafeAMP(init_scale=2.0**10), n=4)
    assert model.hooked == [True, True, False, False]


def test_optimizer_that_is_given_up_does_not_keep_the_watch():
    class Gives(ManualLine):
        def __init__(self):
            super().__init__()
            self.other, self.hooked = nn.Linear(4, 1, bias=False), []

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (self.lin, self.other)]

        def training_step(self, batch, batch_idx):
            i = min(batch_idx, 1)
            optimizer = self.optimizers()[i]
            optimizer.zero_grad()
            loss = (self.lin, self.other)[i](batch[0]).float().mean()
            self.manual_backward(PlantedOverflow.apply(loss, batch_idx == 0))
            optimizer.step()
            self.hooked.append(hooks_on(self) > 0)

    model = Gives()
    fit(model, SafeAMP(init_scale=64.0), n=103)
    assert model.hooked == [*[True] * 101, *[False] * 2]


def test_disabled_locator_watches_nothing():
    model = Net()
    with plant(model, "net.4", "nan", at=range(3)):
        said, _ = run(model, batches(3), callbacks=[NonFiniteLocator(enabled=False)])
    assert said == []
    assert model.hooks == [1, 1, 1]


# ---------------------------------------------------------------------- the run is the same


def final_state(enabled, direction):
    torch.manual_seed(3)
    model = Net()
    average = EMAWeightAveraging(decay=0.9)
    guard = NonFiniteLocator(enabled=enabled)
    calls = []
    model.training_step = counted(model.training_step, calls)
    with plant(model, "net.4", "nan", direction=direction, at={1, 2, 3, 6, 7}):
        said, plugin = run(model, batches(10), callbacks=[average, guard])
    assert plugin.tally.skipped == 5
    assert len(calls) == 10
    tensors = [*model.state_dict().values(), *average._average_model.state_dict().values()]
    state = model.optimizers(use_pl_optimizer=False).state
    tensors += [s["momentum_buffer"] for s in state.values()]
    return [*tensors, torch.get_rng_state()], model.outcomes, said


def counted(function, calls):
    def wrapper(*args):
        calls.append(1)
        return function(*args)

    return wrapper


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_armed_run_equals_the_one_without_bit_for_bit(direction):
    bare, outcomes, nothing = final_state(False, direction)
    watched, same, said = final_state(True, direction)
    assert len(bare) == len(watched) > 15
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert outcomes == same
    assert (nothing, len(said)) == ([], 1)


def test_compiled_modules_are_left_alone_with_one_line(caplog):
    model = Net()
    model.net[0].compile(backend="eager")
    with (
        caplog.at_level(logging.INFO),
        plant(model, "net.4", "nan", direction="backward", at={0, 2}),
    ):
        run(model, batches(4))
    told = [r.getMessage() for r in caplog.records if "NonFiniteLocator" in r.getMessage()]
    assert told == ["`NonFiniteLocator`: compiled modules are not watched: 'net.0'."]


# ---------------------------------------------------------------------- for the monitor


def test_latest_culprit_is_there_when_callbacks_hear_of_the_skip():
    seen = []

    class Hears(L.Callback):
        def on_step_outcome(self, trainer, pl_module, outcome):
            culprit = find(trainer).culprit
            seen.append((outcome.reason, culprit and culprit.module))

    model = Net()
    with plant(model, "net.4", "nan", at=range(2)):
        run(model, batches(3), callbacks=[Hears()])
    loss = SkipReason.NONFINITE_LOSS
    assert seen == [(loss, None), (loss, "net.4"), (None, "net.4")]
