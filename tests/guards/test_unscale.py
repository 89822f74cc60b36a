# SPDX-License-Identifier: Apache-2.0
"""UnscaleGuard: gradients touched or made behind the scaler's back are named, others never are."""

import pickle
import warnings
from contextlib import suppress

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from lightning_amp_guard import AmpGuardWarning, SafeAMP, ScaledGradientError, UnscaleGuard
from tests.helpers import BAD, GOOD, NONE, Line, ManualLine, batches, fit

SCALE = 64.0
both_zeros = pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])


def plugin(**kwargs):
    return SafeAMP(**{"init_scale": SCALE, **kwargs})


# ---------------------------------------------------------------------- violations


def clip(model, optimizer):
    clip_grad_norm_(model.parameters(), 0.5)


def halve(model, optimizer):
    model.lin.weight.grad.mul_(0.5)


def add_plain_backward(model, optimizer):
    model.loss(model.batch).backward()


def replace(model, optimizer):
    model.lin.weight.grad = model.lin.weight.grad * 0.5


def zero_and_plain_backward(model, optimizer):
    optimizer.zero_grad(set_to_none=True)
    model.loss(model.batch).backward()


def zero_in_place_and_plain_backward(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    model.loss(model.batch).backward()


class Between(ManualLine):
    """Does `act(model, optimizer)` between `manual_backward` and the step."""

    def __init__(self, act=lambda model, optimizer: None, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.act = act

    def training_step(self, batch, batch_idx):
        self.batch = batch
        super().training_step(batch, batch_idx)

    def between(self, optimizer):
        self.act(self, optimizer)


class PlainBackward(ManualLine):
    """`loss.backward()` in the place of `self.manual_backward(loss)`."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class ClipsAfterBackward(Line):
    def on_after_backward(self):
        clip_grad_norm_(self.parameters(), 0.5)


EDITED = ("were changed in place or replaced", "still multiplied by the scale", "clip_grad_norm_")
MADE = ("were not made by `self.manual_backward`", "`loss.backward()` was called in its place")

VIOLATIONS = [
    pytest.param(lambda: Between(clip), EDITED, id="clip_grad_norm_ in training_step"),
    pytest.param(lambda: Between(halve), EDITED, id="edit in place"),
    pytest.param(
        lambda: Between(add_plain_backward), EDITED, id="loss.backward after manual_backward"
    ),
    pytest.param(
        lambda: Between(zero_in_place_and_plain_backward),
        EDITED,
        id="loss.backward after zero_grad to zero",
    ),
    pytest.param(ClipsAfterBackward, EDITED, id="clip in on_after_backward"),
    pytest.param(lambda: Between(replace), MADE, id="grad replaced"),
    pytest.param(PlainBackward, MADE, id="loss.backward alone"),
    pytest.param(
        lambda: Between(zero_and_plain_backward), MADE, id="loss.backward after zero_grad to none"
    ),
]
each_violation = pytest.mark.parametrize(("make_model", "parts"), VIOLATIONS)


@each_violation
def test_violation_is_an_error_before_the_update(make_model, parts):
    model = make_model()
    with pytest.raises(ScaledGradientError) as error:
        fit(model, plugin())
    for part in (*parts, "'lin.weight'", "optimizer 0", "unscale_(optimizer)"):
        assert part in str(error.value)
    assert model.weight == 8.0
    assert model.outcomes == []


@each_violation
def test_error_says_the_line_to_write(make_model, parts):
    with pytest.raises(ScaledGradientError) as error:
        fit(make_model(), plugin())
    line = "`on_before_optimizer_step`" if parts is EDITED else "`self.manual_backward(loss)`"
    assert line in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@each_violation
def test_violation_warns_each_time_on_request(make_model, parts):
    model = make_model()
    with pytest.warns(AmpGuardWarning) as caught:
        fit(model, plugin(), n=3, callbacks=[UnscaleGuard(on_violation="warn")])
    said = [str(w.message) for w in caught if w.category is AmpGuardWarning]
    assert len(said) == 3
    assert all(part in message for message in said for part in parts)
    assert [o.applied for o in model.outcomes] == [True] * 3


@each_violation
@pytest.mark.parametrize(
    "guard", [UnscaleGuard(on_violation="ignore"), UnscaleGuard(enabled=False)]
)
def test_violation_is_ignored_on_request(make_model, parts, guard):
    model = make_model()
    fit(model, plugin(), n=3, callbacks=[guard])  # a warning would be an error here
    assert [o.applied for o in model.outcomes] == [True] * 3


@pytest.mark.parametrize("choice", ["warn", "ignore"])
def test_tolerated_clip_acts_on_scaled_gradients_as_in_stock(choice):
    model = Between(clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpGuardWarning)
        fit(model, plugin(), n=1, callbacks=[UnscaleGuard(on_violation=choice)])
    # 4 gradients of 64 have the norm 128: clipped to 0.5 they are 0.25 each, unscaled 1/256
    torch.testing.assert_close(model.weight, 8 - 0.5 / 256, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", ["raise", "Error", "", 1, None, True], ids=repr)
def test_unknown_reaction_is_refused_by_name(bad):
    kind = ValueError if isinstance(bad, str) else TypeError
    with pytest.raises(kind) as error:
        UnscaleGuard(on_violation=bad)
    assert f"UnscaleGuard(on_violation={bad!r})" in str(error.value)
    assert "'error', 'warn', 'ignore'" in str(error.value)


def test_clip_between_micro_batches_is_seen_at_the_next_backward():
    class ClipsOnce(Line):
        def on_after_backward(self):
            if self.seen == 0:
                clip_grad_norm_(self.parameters(), 0.5)

        def on_before_backward(self, loss):
            assert self.seen == 0, "the second backward pass must not be reached"

    with pytest.raises(ScaledGradientError, match="changed in place"):
        fit(ClipsOnce(), plugin(), accumulate_grad_batches=2)


def test_only_touched_parameters_are_named_and_a_long_list_is_cut():
    class Wide(Between):
        def __init__(self, touched):
            super().__init__(self.touch)
            self.more = torch.nn.ModuleList(torch.nn.Linear(4, 1, bias=False) for _ in range(5))
            self.touched = touched

        def loss(self, batch):
            return sum(layer(batch[0]).float().mean() for layer in (self.lin, *self.more))

        def touch(self, model, optimizer):
            for layer in self.more[: self.touched]:
                layer.weight.grad.mul_(0.5)

    with pytest.raises(ScaledGradientError) as error:
        fit(Wide(2), plugin())
    assert "gradients of 'more.0.weight', 'more.1.weight' (optimizer 0)" in str(error.value)
    with pytest.raises(ScaledGradientError) as error:
        fit(Wide(5), plugin())
    assert "'more.0.weight', 'more.1.weight', 'more.2.weight' and 2 more" in str(error.value)
    assert "lin.weight" not in str(error.value)


def test_same_trainer_module_and_plugin_fit_again_after_the_error():
    model, amp = Between(clip), plugin()
    with pytest.raises(ScaledGradientError):
        fit(model, amp)
    model.act = lambda model, optimizer: None
    fit(model, amp, n=3)
    # 8 - 3 * 0.5
    assert model.weight == 6.5
    assert amp.tally.applied == 3


# ---------------------------------------------------------------------- no false alarm


@both_zeros
def test_zero_grad_between_two_backwards_starts_the_window_anew(to_none):
    def begin_again(model, optimizer):
        optimizer.zero_grad(set_to_none=to_none)
        model.manual_backward(model.loss(model.batch))

    model = Between(begin_again)
    fit(model, plugin(), n=3)
    # gradient 1 each time, not 2
    assert model.weight == 6.5
    assert [o.micro_batches for o in model.outcomes] == [1, 1, 1]


# without a gradient there is no attempt, but zero gradients are gradients
@pytest.mark.parametrize(("to_none", "attempts"), [(True, []), (False, [True] * 4)])
def test_zero_grad_before_the_step_leaves_what_float32_has(to_none, attempts):
    model = Between(lambda model, optimizer: optimizer.zero_grad(set_to_none=to_none))
    fit(model, plugin())
    assert model.weight == 8.0
    assert [o.applied for o in model.outcomes] == attempts


@both_zeros
@pytest.mark.parametrize("accumulate", [1, 2])
def test_overridden_zero_grad_of_automatic_optimization_is_fine(to_none, accumulate):
    class ZeroesItsWay(Line):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=to_none)

    model = ZeroesItsWay()
    fit(model, plugin(), n=4, accumulate_grad_batches=accumulate)
    # mean gradient 1 per update
    assert model.weight == 8 - 0.5 * (4 // accumulate)


@both_zeros
def test_overflow_followed_by_zero_grad_is_no_violation(to_none):
    class Zeroes(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    model = Zeroes([GOOD, BAD, GOOD])
    fit(model, plugin(), n=3)
    assert [o.applied for o in model.outcomes] == [True, False, True]
    assert model.weight == 7.0


@pytest.mark.parametrize("model_type", [Line, ManualLine])
@pytest.mark.parametrize("factor", [2.0, 0.0, -1.0])
def test_gradient_hook_is_part_of_the_backward_pass(model_type, factor):
    model = model_type()
    model.lin.weight.register_hook(lambda grad: grad * factor)
    fit(model, plugin(), n=2, accumulate_grad_batches=1)
    assert model.weight == 8 - 2 * 0.5 * factor


def zero_in_place(model, optimizer):
    model.lin.weight.grad.mul_(0.0)


def replace_by_zeros(model, optimizer):
    model.lin.weight.grad = torch.zeros_like(model.lin.weight)


@pytest.mark.parametrize("act", [zero_in_place, replace_by_zeros])
def test_edit_that_leaves_exact_zeros_is_fine(act):
    model = Between(act)
    fit(model, plugin(), n=2)
    assert model.weight == 8.0
    assert [o.applied for o in model.outcomes] == [True, True]


def test_zeroing_one_of_two_parameters_leaves_the_other_alone():
    class Pair(Between):
        def __init__(self):
            super().__init__(lambda model, optimizer: model.other.weight.grad.zero_())
            self.other = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.constant_(self.other.weight, 4.0)

        def loss(self, batch):
            return self.lin(batch[0]).float().mean() + self.other(batch[0]).float().mean()

    model = Pair()
    fit(model, plugin(), n=2)
    assert model.weight == 7.0
    assert torch.equal(model.other.weight, torch.full((1, 4), 4.0))
    assert [o.micro_batches for o in model.outcomes] == [1, 1]


class SparseLine(ManualLine):
    """Sums rows 0, 0 and 1 of a sparse embedding: gradients 2, 1 and none at all."""

    def __init__(self, to_none=True, twice=False):
        super().__init__()
        self.lin = torch.nn.Embedding(3, 2, sparse=True)
        torch.nn.init.constant_(self.lin.weight, 8.0)
        self.to_none, self.twice = to_none, twice

    def loss(self, batch):
        return self.lin(torch.tensor([0, 0, 1])).sum()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=self.to_none)
        if self.twice:
            self.manual_backward(self.loss(batch))
            optimizer.zero_grad(set_to_none=self.to_none)
        self.manual_backward(self.loss(batch))
        optimizer.step()


@both_zeros
@pytest.mark.parametrize("twice", [False, True], ids=["once", "zeroed within the window"])
def test_sparse_embedding_is_no_violation(to_none, twice):
    model = SparseLine(to_none, twice)
    fit(model, plugin(), n=2, data=batches(2))
    # two updates with lr 0.5: row 0 by 2 each, row 1 by 1 each
    want = torch.tensor([[6.0, 6.0], [7.0, 7.0], [8.0, 8.0]])
    assert torch.equal(model.lin.weight.detach(), want)


def test_sparse_embedding_accumulates_in_automatic_optimization():
    class Automatic(SparseLine):
        training_step = Line.training_step

        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    model = Automatic()
    fit(model, plugin(), data=batches(4), accumulate_grad_batches=2)
    # each of two windows averages two equal micro-batches: the same as two plain updates
    want = torch.tensor([[6.0, 6.0], [7.0, 7.0], [8.0, 8.0]])
    assert torch.equal(model.lin.weight.detach(), want)


@both_zeros
def test_parameter_without_elements_is_no_violation(to_none):
    class Empty(Between):
        def __init__(self):
            super().__init__(self.begin_again)
            self.none = torch.nn.Parameter(torch.zeros(0))

        def loss(self, batch):
            return super().loss(batch) + self.none.sum()

        def begin_again(self, model, optimizer):
            optimizer.zero_grad(set_to_none=to_none)
            self.manual_backward(self.loss(self.batch))

    model = Empty()
    fit(model, plugin(), n=2)
    assert model.weight == 7.0


@pytest.mark.parametrize("model_type", [Line, ManualLine])
def test_frozen_and_unused_layers_are_no_violation(model_type):
    class Frozen(model_type):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
            torch.nn.init.eye_(self.frozen.weight)
            self.unused = torch.nn.Linear(4, 4)

        def loss(self, batch):
            return super().loss([self.frozen(batch[0])])

    model = Frozen()
    fit(model, plugin(), n=3)
    assert model.weight == 6.5


def test_layer_unfrozen_during_the_fit_is_no_violation():
    class Unfreezes(Line):
        def __init__(self):
            super().__init__()
            self.late = torch.nn.Linear(4, 1, bias=False).requires_grad_(False)
            torch.nn.init.constant_(self.late.weight, 4.0)
            self.make_optimizer = lambda params: torch.optim.SGD(self.lin.parameters(), lr=0.5)

        def loss(self, batch):
            return super().loss(batch) + self.late(batch[0]).float().mean()

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.late.requires_grad_(True)
                group = {"params": list(self.late.parameters()), "lr": 0.25}
                self.optimizers().add_param_group(group)

    model = Unfreezes()
    fit(model, plugin(), n=4)
    assert model.weight == 6.0
    # two updates of gradient 1 with lr 0.25
    assert torch.equal(model.late.weight.detach(), torch.full((1, 4), 3.5))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("keep", ["retain_graph", "create_graph"])
def test_two_backwards_through_one_graph_are_fine(keep):
    class Twice(ManualLine):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss, **{keep: True})
            self.manual_backward(loss, **{keep: True})
            optimizer.step()
            optimizer.zero_grad()  # breaks the reference cycle of create_graph

    model = Twice()
    fit(model, plugin(), n=2)
    # gradient 1 + 1
    assert model.weight == 6.0
    assert [o.micro_batches for o in model.outcomes] == [2, 2]


def test_gradient_penalty_by_autograd_grad_is_fine():
    class Penalty(Between):
        def loss(self, batch):
            x = batch[0].clone().requires_grad_(True)
            with torch.autocast("cpu", enabled=False):
                value = self.lin(x).mean()
                (slope,) = torch.autograd.grad(value, x, create_graph=True)
            # slope is w / 4 in each of 16 elements: the sum has the gradient 1 per weight
            return slope.sum()

    model = Penalty()
    fit(model, plugin(), n=2)
    assert model.weight == 7.0


# ---------------------------------------------------------------------- true gradients are free


def unscale_and(act):
    def between(model, optimizer):
        model.trainer.precision_plugin.unscale_(optimizer)
        act(model, optimizer)

    return between


@pytest.mark.parametrize("act", [halve, replace])
def test_gradients_may_be_changed_after_an_explicit_unscale(act):
    model = Between(unscale_and(act))
    fit(model, plugin(), n=2)
    assert model.weight == 7.5  # half of gradient 1, twice


def test_clip_after_an_explicit_unscale_sees_true_gradients():
    model = Between(unscale_and(clip))
    fit(model, plugin(), n=1)
    # norm 2 clipped to 0.5: gradients of 0.25
    torch.testing.assert_close(model.weight, 8 - 0.125, rtol=0, atol=1e-6)


@pytest.mark.parametrize("act", [halve, replace])
def test_backward_may_add_to_gradients_changed_after_an_explicit_unscale(act):
    def then_add(model, optimizer):
        act(model, optimizer)
        model.manual_backward(model.loss(model.batch))

    model = Between(unscale_and(then_add))
    fit(model, plugin(), n=2)
    # 0.5 + 1 in each window
    assert model.weight == 8 - 2 * 0.5 * 1.5


def test_gradients_of_ones_own_may_be_assigned_after_an_explicit_unscale():
    def assign(model, optimizer):
        model.lin.weight.grad = torch.full_like(model.lin.weight, 3.0)

    model = Between(unscale_and(assign), [NONE, NONE])
    fit(model, plugin(), n=2)
    # no backward pass at all: 8 - 2 * 0.5 * 3
    assert model.weight == 5.0


@pytest.mark.parametrize("model_type", [Line, ManualLine])
@pytest.mark.parametrize("act", [halve, replace])
def test_hook_before_the_step_may_change_gradients(model_type, act):
    class Hooked(model_type):
        def on_before_optimizer_step(self, optimizer):
            act(self, optimizer)

    model = Hooked()
    fit(model, plugin(), n=2)
    assert model.weight == 7.5


def test_gradients_that_outlive_a_step_may_be_changed_after_it():
    class Keeps(ManualLine):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            halve(self, None)

    model = Keeps()
    fit(model, plugin(), n=2)
    # 1, then 0.5 + 1
    assert model.weight == 8 - 0.5 - 0.75


def test_bf16_has_no_scale_to_respect():
    model = Between(replace)
    fit(model, plugin(precision="bf16-mixed"), n=2)
    assert model.weight == 7.5
    plain = PlainBackward()
    fit(plain, plugin(precision="bf16-mixed"), n=2)
    assert plain.weight == 7.0


def test_edits_through_data_are_not_seen():
    """A stated limit: torch keeps no version of what `.data` writes."""
    model = Between(lambda model, optimizer: model.lin.weight.grad.data.mul_(0.5))
    fit(model, plugin(), n=1)
    assert model.weight == 7.75


# ---------------------------------------------------------------------- several optimizers


class Pair(ManualLine):
    """Two weights with an optimizer each; the first loss leaves gradients on both."""

    def __init__(self, clear=None):
        super().__init__()
        self.other = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)
        self.clear = clear

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.5) for m in (self.lin, self.other)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        joint = self.lin(batch[0]).float().mean() + self.other(batch[0]).float().mean()
        self.manual_backward(joint)
        first.step()
        if self.clear is not None:
            second.zero_grad(set_to_none=self.clear)
        self.manual_backward(self.other(batch[0]).float().mean())
        second.step()
        second.zero_grad()


@pytest.mark.parametrize("clear", [True, False, None], ids=["to none", "to zero", "never"])
def test_by_product_gradients_are_no_violation(clear):
    model = Pair(clear)
    fit(model, plugin(), n=2)
    assert model.weight == 7.0
    # the by-product counts where it is not cleared: gradient 2 instead of 1
    want = 6.0 if clear is None else 7.0
    assert torch.equal(model.other.weight.detach(), torch.full((1, 4), want))


def test_violation_names_the_optimizer_whose_gradients_were_touched():
    class Touches(Pair):
        def manual_backward(self, loss, *args, **kwargs):
            super().manual_backward(loss, *args, **kwargs)
            self.other.weight.grad.mul_(0.5)

    with pytest.raises(ScaledGradientError) as error:
        fit(Touches(True), plugin())
    assert "gradients of 'other.weight' (optimizer 1) were changed" in str(error.value)


# ---------------------------------------------------------------------- steps past Lightning


class StepsRaw(ManualLine):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.between(optimizer)
        optimizer.step()


def test_a_raw_step_on_scaled_gradients_is_named():
    model = StepsRaw()
    with pytest.raises(ScaledGradientError, match=r"optimizer 0 was stepped past Lightning"):
        fit(model, SafeAMP(init_scale=64.0), 1)
    assert model.weight == 8.0


def test_a_raw_step_on_true_gradients_is_fine():
    class Unscales(StepsRaw):
        def between(self, optimizer):
            self.trainer.precision_plugin.unscale_(optimizer)

    model = Unscales()
    fit(model, SafeAMP(init_scale=64.0), 2)
    assert model.weight == 7.0


def test_no_hook_is_left_on_the_optimizer_after_a_fit():
    for model in (Line(), StepsRaw()):
        with suppress(ScaledGradientError):
            fit(model, SafeAMP(init_scale=64.0), 1)
        optimizer = model.trainer.optimizers[0]
        assert not optimizer._optimizer_step_pre_hooks
