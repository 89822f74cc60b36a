# SPDX-License-Identifier: Apache-2.0
"""Accumulation windows: it is always known which scale a gradient carries."""

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_guard import SkipAwareGradScaler
from lightning_amp_guard.arguments.settings import AmpSettings
from lightning_amp_guard.scaler import read_flags
from lightning_amp_guard.step.attempt import AttemptEngine
from lightning_amp_guard.step.lanes import Cell, Stage
from lightning_amp_guard.step.windows import GradientWindows

INF, NAN = float("inf"), float("nan")


class Run:
    """Named parameters at 8, one SGD optimizer (lr 0.5) per string of names, and their windows.

    An engine drives the windows, as it does for a plugin; nobody moves the scale but the test.
    """

    def __init__(self, *owners, scale=8.0, scaling=True):
        self.p = {
            name: torch.nn.Parameter(torch.full((2,), 8.0)) for name in sorted(set("".join(owners)))
        }
        self.optimizers = [
            torch.optim.SGD([self.p[name] for name in names], lr=0.5) for names in owners
        ]
        self.scaler = SkipAwareGradScaler("cpu", scale)
        self.engine = AttemptEngine(
            AmpSettings(), self.scaler, self.optimizers, [], scaling=scaling, manual=True
        )
        self.windows = self.engine.windows

    def backward(self, names, bad_loss=False):
        """Add a true gradient of 1 to the parameters named."""
        loss = sum(self.p[name].sum() for name in names)
        self.engine.before_backward(loss.detach() * (NAN if bad_loss else 1.0))
        (self.scaler.scale(loss) if self.windows.scaling else loss).backward()
        self.engine.after_backward()

    def step(self, idx):
        return self.engine.attempt(self.windows.lanes[idx], lambda: None, {})

    def grad(self, name):
        grad = self.p[name].grad
        return None if grad is None else grad[0].item()

    def cell(self, name):
        found = [c for c in self.windows.cells if any(q is self.p[name] for q in c.params)]
        assert len(found) == 1
        return found[0]


class Reads(TorchDispatchMode):
    """Counts the times that the host reads a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- whose gradients


def test_parameters_of_the_same_optimizers_share_a_cell():
    run = Run("abs", "cds", "e")
    a, b, s, c, e = (run.cell(name) for name in "absce")
    assert a is b
    assert len(run.windows.cells) == 4
    assert [len(lane.cells) for lane in run.windows.lanes] == [2, 2, 1]
    assert run.windows.lanes[0].cells == [a, s]
    assert run.windows.lanes[1].cells == [s, c]
    assert run.windows.lanes[2].cells == [e]


def test_lane_is_found_by_the_optimizer_or_its_lightning_wrapper():
    run = Run("a", "b")
    for i, optimizer in enumerate(run.optimizers):
        assert run.windows.lane(optimizer) is run.windows.lanes[i]
        assert run.windows.lane(LightningOptimizer(optimizer)) is run.windows.lanes[i]
    assert len(run.windows.lanes) == 2


def bad_loss(lane):
    return any(cell.had_nonfinite_loss() for cell in lane.cells)


def answered(lane):
    return any(read_flags(cell.tainted) for cell in lane.cells)


def test_wrapped_optimizers_are_taken_at_the_start_too():
    run = Run("a")
    windows = GradientWindows([LightningOptimizer(run.optimizers[0])], run.scaler)
    assert windows.lanes[0].optimizer is run.optimizers[0]


def test_optimizer_that_comes_up_during_the_fit_gets_a_lane():
    run = Run("a")
    late = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert run.windows.lane(late) is None
    lane = run.engine.lane(late)
    assert (lane.idx, lane.optimizer) == (1, late)
    assert run.engine.lane(LightningOptimizer(late)) is lane
    assert len(lane.cells) == 1
    assert len(run.engine.tallies) == 2


@pytest.mark.parametrize("names", ["a", "b", "ab"])
def test_optimizer_that_comes_up_inside_a_window_finds_the_scale_of_its_gradients(names):
    run = Run("ab")
    run.backward("ab")
    late = torch.optim.SGD([run.p[name] for name in names], lr=0.5)
    lane = run.engine.lane(late)
    run.windows.unscale_(lane)
    assert [run.grad(name) for name in names] == [1.0] * len(names)
    assert lane.micro_batches == 1
    run.windows.unscale_(run.windows.lanes[0])
    assert [run.grad("a"), run.grad("b")] == [1.0, 1.0]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_optimizer_in_the_place_of_another_takes_over_its_window(names):
    run = Run("ab")
    run.p["c"] = torch.nn.Parameter(torch.full((2,), 8.0))
    run.backward("ab")
    late = torch.optim.SGD([run.p[name] for name in names], lr=0.5)
    run.windows.follow([late])
    assert [lane.optimizer for lane in run.windows.lanes] == [late]
    lane = run.windows.lanes[0]
    assert lane.has_gradients()
    run.windows.unscale_(lane)
    assert (run.grad("a"), lane.micro_batches) == (1.0, 1)


def test_optimizer_in_the_place_of_another_has_one_lane():
    run = Run("a")
    late = torch.optim.SGD([run.p["a"]], lr=0.5)
    run.engine.optimizers_now = lambda: [late]  # what the Trainer has
    assert run.engine.lane(late).idx == 0
    assert [lane.optimizer for lane in run.windows.lanes] == [late]


def test_parameter_group_that_is_added_inside_a_window_joins_it():
    run = Run("a")
    run.backward("a", bad_loss=True)
    run.p["new"] = torch.nn.Parameter(torch.full((2,), 8.0))
    run.optimizers[0].add_param_group({"params": [run.p["new"]]})
    run.windows.refresh()
    cell = run.cell("new")
    assert cell is run.cell("a")
    assert (cell.scaled, cell.micro_batches, cell.had_nonfinite_loss()) == (True, 1, True)


def test_refresh_without_a_new_group_keeps_the_cells():
    run = Run("a", "ab")
    before = run.windows.cells
    run.windows.refresh()
    assert run.windows.cells is before


# ---------------------------------------------------------------- which scale


def test_backward_makes_scaled_gradients_and_unscale_makes_them_true():
    run = Run("a")
    assert not run.windows.lanes[0].has_gradients()
    run.backward("a")
    lane = run.windows.lanes[0]
    assert (run.grad("a"), lane.stage, lane.micro_batches) == (8.0, Stage.OPEN, 1)
    assert run.windows.held() == [run.cell("a")]
    run.windows.unscale_(lane)
    assert (run.grad("a"), lane.stage) == (1.0, Stage.UNSCALED)
    assert [flag.item() for flag in lane.flags.values()] == [0.0]
    assert run.windows.held() == []


def test_micro_batches_add_up_within_a_window():
    run = Run("a")
    for _ in range(3):
        run.backward("a")
    assert (run.grad("a"), run.windows.lanes[0].micro_batches) == (24.0, 3)
    run.windows.unscale_(run.windows.lanes[0])
    assert run.grad("a") == 3.0


@pytest.mark.parametrize("fault", [INF, -INF, NAN])
def test_unscale_finds_what_is_not_finite(fault):
    run = Run("ab")
    run.backward("ab")
    run.p["b"].grad[1] = fault
    lane = run.windows.lanes[0]
    run.windows.unscale_(lane)
    assert [flag.item() for flag in lane.flags.values()] == [1.0]
    assert (
        run.scaler._per_optimizer_states[id(lane.optimizer)]["found_inf_per_device"] == lane.flags
    )


def test_flags_of_shared_parameters_reach_every_owner():
    run = Run("as", "bs")
    run.backward("abs")
    run.p["s"].grad[0] = NAN
    for lane in run.windows.lanes:
        run.windows.unscale_(lane)
        assert [flag.item() for flag in lane.flags.values()] == [1.0]
    assert (run.grad("a"), run.grad("b")) == (1.0, 1.0)


def test_shared_gradients_are_unscaled_once():
    run = Run("as", "bs")
    run.backward("abs")
    for lane in run.windows.lanes:
        run.windows.unscale_(lane)
    assert [run.grad(name) for name in "abs"] == [1.0] * 3


def test_without_gradients_there_is_nothing_to_flag():
    run = Run("a", "b")
    run.backward("a")
    run.windows.unscale_(run.windows.lanes[1])
    assert run.windows.lanes[1].flags == {}
    assert run.grad("a") == 8.0


def test_gradient_that_outlives_its_step_adds_at_its_true_value():
    run = Run("a")
    run.backward("a")
    run.step(0)
    run.backward("a")  # no zero_grad: 1 + 1
    assert run.grad("a") == 16.0
    assert run.windows.lanes[0].micro_batches == 1  # the window is a new one
    run.step(0)
    assert run.grad("a") == 2.0
    assert run.p["a"].tolist() == [8.0 - 0.5 - 1.0] * 2


def test_step_given_up_after_unscaling_adds_at_its_true_value():
    run = Run("a", scale=4.0)
    run.backward("a")
    run.windows.unscale_(run.windows.lanes[0])
    run.scaler.set_scale(64.0)
    run.backward("a")
    assert run.grad("a") == 128.0
    run.windows.unscale_(run.windows.lanes[0])
    assert run.grad("a") == 2.0
    assert run.windows.lanes[0].micro_batches == 2  # nothing was consumed: the window goes on


def test_second_step_without_a_backward_sees_the_true_value():
    run = Run("a")
    run.backward("a")
    run.step(0)
    run.step(0)
    assert run.grad("a") == 1.0
    assert run.p["a"].tolist() == [7.0] * 2
    assert run.windows.lanes[0].micro_batches == 0


def test_window_begins_anew_once_gradients_are_gone():
    run = Run("a")
    run.backward("a", bad_loss=True)
    run.optimizers[0].zero_grad()
    run.backward("a")
    lane = run.windows.lanes[0]
    assert (run.grad("a"), lane.micro_batches) == (8.0, 1)
    assert not bad_loss(lane)


def test_backward_for_another_optimizer_reopens_an_unscaled_window():
    run = Run("a", "b")
    run.backward("a")
    run.windows.unscale_(run.windows.lanes[0])
    run.backward("b")
    assert (run.grad("a"), run.grad("b")) == (8.0, 8.0)
    assert [lane.stage for lane in run.windows.lanes] == [Stage.OPEN] * 2
    run.step(0)
    run.step(1)
    assert (run.grad("a"), run.grad("b")) == (1.0, 1.0)


def test_unscaled_losses_are_checked_only():
    run = Run("a", scaling=False)
    run.backward("a")
    assert run.grad("a") == 1.0
    run.windows.unscale_(run.windows.lanes[0])
    assert run.grad("a") == 1.0
    run.p["a"].grad[1] = INF
    run.windows.unscale_(run.windows.lanes[0])
    assert [flag.item() for flag in run.windows.lanes[0].flags.values()] == [1.0]


# ---------------------------------------------------------------- the scale moves


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_held_gradients_follow_the_scale_and_true_ones_stay(ratio):
    run = Run("a", "b")
    run.backward("ab")
    run.windows.unscale_(run.windows.lanes[0])
    run.scaler.set_scale(8.0 * ratio)
    run.windows.move(ratio)
    assert (run.grad("a"), run.grad("b")) == (1.0, 8.0 * ratio)
    run.windows.unscale_(run.windows.lanes[1])
    assert run.grad("b") == 1.0


@pytest.mark.parametrize(("ratio", "tainted"), [(0.5, True), (1.0, True), (2.0, False)])
def test_held_gradients_that_overflowed_already_are_remembered_at_a_backoff(ratio, tainted):
    run = Run("a", "b", "c")
    run.backward("abc")
    run.p["b"].grad[0] = INF
    run.windows.move(ratio)
    assert [answered(lane) for lane in run.windows.lanes] == [False, tainted, False]
    run.optimizers[1].zero_grad()
    run.backward("b")
    assert not answered(run.windows.lanes[1])


def test_growth_looks_before_it_pushes_a_held_gradient_to_inf():
    run = Run("a", "b")
    run.backward("ab")
    largest = torch.finfo(torch.float32).max
    for value, fine in ((largest / 2, True), (largest * 0.75, False), (-largest, False)):
        run.p["b"].grad[1] = value
        assert run.windows.can_grow(2.0) is fine
    for lost in (INF, NAN):  # nothing to lose any more
        run.p["b"].grad[1] = lost
        assert run.windows.can_grow(2.0)
    run.p["b"].grad[1] = largest
    run.windows.unscale_(run.windows.lanes[1])  # consumed: not held
    assert run.windows.can_grow(2.0)


def test_growth_may_come_where_a_held_gradient_has_no_elements():
    table = torch.nn.Embedding(4, 2, sparse=True)
    scaler = SkipAwareGradScaler("cpu", 8.0)
    windows = GradientWindows([torch.optim.SGD(table.parameters())], scaler)
    loss = table(torch.tensor([], dtype=torch.long)).sum()
    windows.before_backward(loss.detach())
    scaler.scale(loss).backward()
    windows.after_backward()
    assert windows.held()
    assert windows.can_grow(2.0)


# ---------------------------------------------------------------- which loss


def test_losses_count_for_the_optimizers_that_they_reach():
    run = Run("a", "b")
    run.backward("a")
    run.backward("a", bad_loss=True)
    run.backward("b")
    assert [lane.micro_batches for lane in run.windows.lanes] == [2, 1]
    assert [bad_loss(lane) for lane in run.windows.lanes] == [True, False]


def test_loss_counts_for_other_optimizers_that_it_reaches_as_well():
    run = Run("a", "b")
    run.backward("b")
    run.backward("ab", bad_loss=True)  # a generator's loss leaves gradients on the discriminator
    assert [lane.micro_batches for lane in run.windows.lanes] == [1, 2]
    assert [bad_loss(lane) for lane in run.windows.lanes] == [True, True]


def test_loss_counts_once_for_shared_parameters():
    run = Run("as", "bs")
    run.backward("as")
    run.backward("bs")
    assert [lane.micro_batches for lane in run.windows.lanes] == [2, 2]


@pytest.mark.parametrize("bad", [0, 63, 64, 65, 199])
def test_long_window_keeps_few_losses_and_forgets_none(bad):
    cell = Cell([])
    for i in range(200):
        cell.add_loss(torch.tensor(NAN if i == bad else 1.0))
        assert len(cell.losses) <= 64
    assert cell.micro_batches == 200
    assert cell.had_nonfinite_loss()


def test_long_window_of_finite_losses_stays_finite():
    cell = Cell([])
    for _ in range(200):
        cell.add_loss(torch.tensor([1.0, 2.0]))
    assert not cell.had_nonfinite_loss()


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_element_of_a_loss_suffices(value):
    cell = Cell([])
    cell.add_loss(torch.tensor([1.0, value]))
    assert cell.had_nonfinite_loss()
    assert cell.had_nonfinite_loss()  # and it stays known
    cell.restart()
    assert not cell.had_nonfinite_loss()


# ---------------------------------------------------------------- what it costs


def test_a_healthy_window_reads_nothing():
    run = Run("as", "bs")
    with Reads() as reads:
        for _ in range(2):
            run.backward("abs")
            for lane in run.windows.lanes:
                run.windows.unscale_(lane)
                lane.optimizer.zero_grad()
            for cell in run.windows.cells:
                cell.consumed = True
        run.backward("abs")
        run.windows.move(0.5)
        run.windows.held()
    assert reads.count == 0
