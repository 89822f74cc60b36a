# SPDX-License-Identifier: Apache-2.0
"""DtypeGuard: master weights are float32, and half precision elsewhere does not go unnoticed."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_amp_guard import AmpGuardWarning, DtypeGuard, SafeAMP
from tests.helpers import BAD, GOOD, Line, ManualLine, PlantedOverflow, batches, fit, make_trainer

halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
precisions = pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": 64.0, **kwargs})


def said(caught):
    return [str(w.message) for w in caught if w.category is AmpGuardWarning]


# ---------------------------------------------------------------------- parameters


class Unreached(Line):
    def training_step(self, batch, batch_idx):
        raise AssertionError("no batch may be reached")


@halves
@precisions
def test_half_model_is_refused_before_the_first_batch(dtype, precision):
    model = Unreached().to(dtype)
    with pytest.raises(MisconfigurationException) as error:
        fit(model, plugin(precision=precision))
    for part in ("`DtypeGuard`", f"'lin.weight' ({dtype})", "float32", "`model.float()`"):
        assert part in str(error.value)


def test_message_names_three_parameters_and_counts_the_rest():
    model = Unreached()
    model.more = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))).half()
    with pytest.raises(MisconfigurationException) as error:
        fit(model, plugin())
    assert "lin.weight" not in str(error.value)
    for name in ("more.0.weight", "more.0.bias", "more.1.weight"):
        assert f"{name!r} (torch.float16)" in str(error.value)
    assert "and 3 more" in str(error.value)


def test_module_trainer_and_plugin_are_ready_after_the_refusal():
    model, amp = (
        Line([GOOD], make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)),
        plugin(),
    )
    model.half()
    with pytest.raises(MisconfigurationException):
        fit(model, amp)
    assert "lr_scheduler_step" not in vars(model)
    model.float()
    fit(model, amp, n=1)
    assert model.weight == 7.5
    assert amp.tally.applied == 1


@halves
def test_frozen_half_parameters_are_fine(dtype):
    class FrozenHalf(Line):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Linear(4, 4, bias=False).requires_grad_(False).to(dtype)
            torch.nn.init.eye_(self.frozen.weight)

        def loss(self, batch):
            return super().loss([self.frozen(batch[0])])

    model = FrozenHalf()
    fit(model, plugin(), n=2)  # a warning would be an error here
    assert model.weight == 7.0


def test_half_buffers_are_fine():
    model = Line()
    model.register_buffer("table", torch.ones(4, dtype=torch.float16))
    fit(model, plugin(), n=2)
    assert model.weight == 7.0


def test_wider_parameters_are_fine():
    class Wide(Line):
        def loss(self, batch):
            return self.lin.weight.sum()  # autocast leaves float64 alone, its matmul refuses it

    model = Wide().double()
    fit(model, plugin(), n=2)
    assert model.lin.weight.dtype is torch.float64
    assert model.weight == 7.0


def test_disabled_guard_leaves_the_model_to_torch():
    model = Line().half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(model, plugin(), callbacks=[DtypeGuard(enabled=False)])


# ---------------------------------------------------------------------- optimizer state


class HalfMomentum(torch.optim.SGD):
    """Keeps its momentum in half precision, as a state loaded from such a run would be."""

    dtype = torch.float16

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["momentum_buffer"] = p.grad.to(self.dtype)
                    self.state[p]["step"] = torch.tensor(1.0)
                    p.add_(p.grad, alpha=-group["lr"])


@halves
@precisions
def test_half_optimizer_state_warns_once(dtype, precision):
    kind = type("Momentum", (HalfMomentum,), {"dtype": dtype})
    model = Line([BAD, GOOD, GOOD, GOOD], make_optimizer=lambda params: kind(params, lr=0.5))
    with pytest.warns(AmpGuardWarning) as caught:
        fit(model, plugin(precision=precision), n=4)
    assert len(said(caught)) == 1
    for part in ("`DtypeGuard`", "optimizer 0", f"'momentum_buffer' ({dtype})", "float32"):
        assert part in said(caught)[0]
    assert "'step'" not in said(caught)[0]
    assert model.weight == 6.5


def test_half_state_is_looked_for_once_per_optimizer():
    class Two(ManualLine):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(4, 1, bias=False)

        def configure_optimizers(self):
            return [HalfMomentum(m.parameters(), lr=0.5) for m in (self.lin, self.other)]

        def training_step(self, batch, batch_idx):
            for i, layer in enumerate((self.lin, self.other)):
                bad = batch_idx == 0 and i == 1
                loss = layer(batch[0]).float().mean()
                self.manual_backward(PlantedOverflow.apply(loss, bad))
                optimizer = self.optimizers()[i]
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(AmpGuardWarning) as caught:
        fit(Two(), plugin(), n=3)
    # the second optimizer's first attempt was skipped: it is looked at after its first update
    assert ["optimizer 0" in m for m in said(caught)] == [True, False]
    assert "optimizer 1" in said(caught)[1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_float32_optimizer_state_is_fine(kind):
    settings = {"lr": 0.5, "momentum": 0.5} if kind is torch.optim.SGD else {"lr": 0.5}
    model = Line(make_optimizer=lambda params: kind(params, **settings))
    fit(model, plugin(), n=2)
    assert len(model.outcomes) == 2


# ---------------------------------------------------------------------- input


class HalfBatches:
    """Batches of which an element is half precision, nested as `wrap` does it."""

    def __init__(self, wrap, dtype=torch.float16, n=3):
        self.wrap, self.dtype, self.n = wrap, dtype, n

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield self.wrap(torch.ones(4, 4, dtype=self.dtype))


class Reads(Line):
    """Uses its own input, whatever the batch looks like."""

    def training_step(self, batch, batch_idx):
        return self.loss([torch.ones(4, 4)])


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: [x], lambda x: {"a": [torch.ones(1), {"b": x}]}, lambda x: (1, x)],
    ids=["bare", "list", "nested", "tuple"],
)
@precisions
def test_float16_batch_warns_once(wrap, precision):
    model = Reads()
    with pytest.warns(AmpGuardWarning) as caught:
        fit(model, plugin(precision=precision), data=HalfBatches(wrap), max_epochs=2)
    assert len(said(caught)) == 1
    for part in ("`DtypeGuard`", "float16", "65504", "`.float()`"):
        assert part in said(caught)[0]
    assert model.weight == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_other_batches_are_fine(dtype):
    model = Reads()
    fit(model, plugin(), data=HalfBatches(lambda x: [x], dtype))
    assert model.weight == 6.5


def test_each_fit_looks_at_its_own_first_batch():
    guard = DtypeGuard()
    for _ in range(2):
        with pytest.warns(AmpGuardWarning) as caught:
            fit(Reads(), plugin(), data=HalfBatches(lambda x: [x]), callbacks=[guard])
        assert len(said(caught)) == 1
    fit(Reads(), plugin(), data=batches(3), callbacks=[guard])


def test_validation_batches_are_not_looked_at():
    class Validates(Reads):
        def validation_step(self, batch, batch_idx):
            pass

    model = Validates()
    # the sanity check comes before the first training batch
    make_trainer(plugin()).fit(model, batches(3), HalfBatches(lambda x: [x]))
    assert model.weight == 6.5


def test_disabled_guard_says_nothing():
    model = Reads([GOOD], make_optimizer=lambda params: HalfMomentum(params, lr=0.5))
    guards = [DtypeGuard(enabled=False)]
    fit(model, plugin(), data=HalfBatches(lambda x: [x]), callbacks=guards)
    assert model.weight == 6.5


def test_optimizer_state_that_is_no_dict_is_passed_by():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["count"] = 1
            return super().step(closure)

    model = Line(make_optimizer=lambda p: Counting(p, lr=0.5))
    fit(model, SafeAMP(init_scale=64.0), 2)
    assert model.weight == 7.0
