# SPDX-License-Identifier: Apache-2.0
"""One battery over every guard: what holds for all of them, whatever rule they enforce."""

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_amp_guard import (
    AveragingGate,
    DtypeGuard,
    NonFiniteLocator,
    SafeAMP,
    ScalerCheckpoint,
    SchedulerGate,
    UnscaleGuard,
    WindowGuard,
)
from tests.helpers import BAD, GOOD, Line, ManualLine, batches, fit, make_trainer, stock_plugin


@dataclass(frozen=True)
class Row:
    """A guard, another value for each of its settings, and whether it has something to keep."""

    kind: type
    settings: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False  # flags that survive a resume through `save` and `load`


REGISTRY = [
    Row(UnscaleGuard, {"on_violation": "warn"}),
    Row(WindowGuard),
    Row(SchedulerGate, keeps=True),
    Row(AveragingGate, keeps=True),
    Row(ScalerCheckpoint, {"window_gradients": False}),
    Row(DtypeGuard),
    Row(NonFiniteLocator),
]

each_guard = pytest.mark.parametrize("row", REGISTRY, ids=lambda row: row.kind.__name__)
each_keeper = pytest.mark.parametrize(
    "row", [r for r in REGISTRY if r.keeps], ids=lambda row: row.kind.__name__
)
both_modes = pytest.mark.parametrize("model_type", [Line, ManualLine])


def a_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def find(plugin, kind):
    return next(guard for guard in plugin.guards if isinstance(guard, kind))


def settings_of(guard, row):
    return {name: getattr(guard, name) for name in (*row.settings, "enabled")}


def footprint(model, trainer):
    """What a guard could leave behind: instance attributes and classes of what it stands before."""
    touched = [model, *trainer.callbacks, *trainer.optimizers]
    touched += [config.scheduler for config in trainer.lr_scheduler_configs]
    return [(type(thing), sorted(vars(thing))) for thing in touched]


class During(Line):
    """Calls `act(model)` after the first batch."""

    act = staticmethod(lambda model: None)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.act(self)
        super().on_train_batch_end(outputs, batch, batch_idx)


class ManualDuring(ManualLine, During):
    """The same in manual optimization."""


def run_during(act, plugin=None, model_type=During, **kwargs):
    """Fit two batches, the second of which overflows, with `act` in between."""
    model = model_type([GOOD, BAD], make_scheduler=a_scheduler, interval="epoch")
    model.act = act
    return model, fit(model, plugin or SafeAMP(init_scale=64.0), n=2, **kwargs)


def test_registry_names_every_guard_that_the_plugin_supplies():
    assert [row.kind for row in REGISTRY] == list(SafeAMP.guard_types)


# ---------------------------------------------------------------------- build


@each_guard
def test_guard_is_enabled_by_default_and_keeps_its_settings(row):
    assert row.kind().enabled is True
    chosen = row.kind(**row.settings, enabled=False)
    assert settings_of(chosen, row) == {**row.settings, "enabled": False}
    assert settings_of(row.kind(), row) != settings_of(chosen, row)


@each_guard
@pytest.mark.parametrize("bad", [1, 0, None, "yes", 1.0, [True]], ids=repr)
def test_enabled_of_a_wrong_type_is_refused_by_name(row, bad):
    with pytest.raises(TypeError) as error:
        row.kind(enabled=bad)
    assert f"{row.kind.__name__}(enabled={bad!r})" in str(error.value)
    assert "True or False" in str(error.value)


# ---------------------------------------------------------------------- Lightning's side


@each_guard
def test_guard_overrides_no_lightning_hook_but_setup(row):
    hooks = [n for n in vars(Callback) if not n.startswith("_")]
    assert len(hooks) > 30
    own = [n for n in hooks if getattr(row.kind, n) is not getattr(Callback, n)]
    assert own == ["setup"]


@each_guard
@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_wrong_plugin_is_refused_at_setup(row, run):
    def no_batch_may_be_reached(self, batch, batch_idx):
        raise AssertionError(run)

    step = {"fit": "training_step", "validate": "validation_step"}.get(run, f"{run}_step")
    model = type("Unreached", (Line,), {step: no_batch_may_be_reached})()
    trainer = make_trainer(stock_plugin(), callbacks=[row.kind()])
    with pytest.raises(MisconfigurationException) as error:
        getattr(trainer, run)(model, [torch.ones(1, 4)])
    for part in (f"`{row.kind.__name__}()`", "MixedPrecision", "Trainer(plugins=[SafeAMP()])"):
        assert part in str(error.value)


@each_guard
def test_guard_keeps_nothing_under_callbacks(row):
    trainer = fit(Line([GOOD, BAD]), SafeAMP(init_scale=64.0), n=2, callbacks=[row.kind()])
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert checkpoint["callbacks"] == {}
    assert checkpoint["SafeAMP"]["format"] == 1


# ---------------------------------------------------------------------- supplied or passed


@each_guard
def test_guard_is_supplied_where_the_user_passes_none(row):
    plugin = SafeAMP(init_scale=64.0)
    seen = []
    run_during(lambda model: seen.extend(plugin.guards), plugin)
    assert [type(g) for g in seen] == [r.kind for r in REGISTRY]
    assert settings_of(next(g for g in seen if type(g) is row.kind), row) == settings_of(
        row.kind(), row
    )


@each_guard
def test_passed_guard_is_the_one_in_use(row):
    class Mine(row.kind):
        """A user's own subclass counts as well."""

    for mine in (row.kind(**row.settings), Mine(**row.settings)):
        plugin, seen = SafeAMP(init_scale=64.0), []
        run_during(lambda model, p=plugin, s=seen: s.extend(p.guards), plugin, callbacks=[mine])
        assert [g for g in seen if isinstance(g, row.kind)] == [mine]
        assert len(seen) == len(REGISTRY)


@each_guard
def test_disabled_guard_is_not_active(row):
    plugin, seen = SafeAMP(init_scale=64.0), []
    run_during(
        lambda model: seen.extend(plugin.guards), plugin, callbacks=[row.kind(enabled=False)]
    )
    assert [type(g) for g in seen] == [r.kind for r in REGISTRY if r.kind is not row.kind]


@each_guard
@pytest.mark.parametrize("passed", [False, True], ids=["supplied", "passed"])
def test_guard_is_driven_once_supplied_or_passed(row, passed, monkeypatch):
    calls = []

    def counted(name):
        original = getattr(row.kind, name)

        def wrapper(self, *args):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(row.kind, name, wrapper)

    for name in ("attach", "after_outcome", "see_batch"):
        counted(name)
    model = Line([GOOD, BAD, GOOD])
    fit(model, SafeAMP(init_scale=64.0), n=3, callbacks=[row.kind()] if passed else [])
    # 3 attempts; the first batch alone is looked at
    assert calls == ["attach", "see_batch", *["after_outcome"] * 3]
    assert [o.applied for o in model.outcomes] == [True, False, True]


@each_guard
def test_passed_guard_serves_fits_in_a_row_and_is_driven_in_each(row):
    guard = row.kind()
    for _ in range(2):
        plugin, seen = SafeAMP(init_scale=64.0), []
        model, _ = run_during(
            lambda model, p=plugin, s=seen: s.append(find(p, row.kind)), plugin, callbacks=[guard]
        )
        assert seen == [guard]
        assert guard.host is None
        # start 8, lr 0.5, one applied update of gradient 1
        assert model.weight == 7.5


# ---------------------------------------------------------------------- set up, tear down


@each_guard
@both_modes
def test_set_up_twice_and_torn_down_twice_leaves_nothing_behind(row, model_type):
    plugin = SafeAMP(init_scale=64.0)
    before = []

    def twice(model):
        guard = find(plugin, row.kind)
        guard.setup(model.trainer, model, "fit")
        guard.setup(model.trainer, model, "fit")
        guard.detach()
        guard.detach()
        before.append(footprint_without_other_guards(model))
        guard.attach(plugin)
        guard.attach(plugin)

    def footprint_without_other_guards(model):
        others = [g for g in plugin.guards if type(g) is not row.kind]
        for guard in others:
            guard.detach()
        bare = footprint(model, model.trainer)
        for guard in others:
            guard.attach(plugin)
        return bare

    kind = ManualDuring if model_type is ManualLine else During
    model, trainer = run_during(twice, plugin, kind, callbacks=averages())
    assert find(plugin, row.kind).host is None
    # `configure_optimizers` and the loops write nothing more after the first batch
    assert footprint(model, trainer) == before[0]
    for guard in plugin.guards:
        guard.detach()
    plugin.teardown()
    assert footprint(model, trainer) == before[0]


@both_modes
def test_nothing_is_left_on_module_scheduler_and_callbacks_after_an_exception(model_type):
    class Fails(model_type):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise RuntimeError("planted")

    callback = WeightAveraging()
    model = Fails([GOOD], make_scheduler=a_scheduler)
    trainer = make_trainer(SafeAMP(init_scale=64.0), callbacks=[callback])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(model, batches(1))
    assert "lr_scheduler_step" not in vars(model)
    assert "should_update" not in vars(callback)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is torch.optim.lr_scheduler.LambdaLR
    assert "step" not in vars(scheduler)


# ---------------------------------------------------------------------- copies


def deep(thing):
    return copy.deepcopy(thing)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@each_guard
@pytest.mark.parametrize("copied", [deep, pickled])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_copy_has_the_settings_and_no_part_in_the_fit(row, copied, when):
    guard, copies = row.kind(**row.settings), []

    def take():
        copies.append(copied(guard))

    if when == "before":
        take()
    model, _ = run_during(lambda model: take() if when == "during" else None, callbacks=[guard])
    if when == "after":
        take()
    mine = copies[0]
    assert type(mine) is row.kind
    assert settings_of(mine, row) == settings_of(guard, row)
    assert mine.host is None
    # Lightning hangs the module's `log` and `log_dict` on every callback that it holds
    assert not any(getattr(value, "__self__", None) is not None for value in vars(mine).values())
    mine.detach()  # owns nothing of the fit that it could undo

    # and it works in a fit of its own: 8 - 0.5, the overflow is left out
    second, _ = run_during(lambda model: None, callbacks=[mine])
    assert (model.weight, second.weight) == (7.5, 7.5)


@each_guard
def test_copy_of_a_users_subclass_keeps_its_own_settings(row):
    class Mine(row.kind):
        def __init__(self, mine):
            super().__init__()
            self.mine = mine

    guard, copies = Mine("kept"), []
    run_during(lambda model: copies.append(deep(guard)), callbacks=[guard])
    assert (type(copies[0]), copies[0].mine) == (Mine, "kept")


# ---------------------------------------------------------------------- state


def averages():
    return [WeightAveraging(), StochasticWeightAveraging(0.5, swa_epoch_start=1)]


def leaves(saved):
    """The paths to the flags in nested lists."""
    if isinstance(saved, list):
        return [(i, *path) for i, part in enumerate(saved) for path in leaves(part)]
    return [()]


def flip(saved, paths):
    """A copy of nested flags with those at `paths` turned over."""
    if isinstance(saved, list):
        return [flip(p, [q[1:] for q in paths if q[0] == i]) for i, p in enumerate(saved)]
    return (not saved) if paths else saved


def trips(row, choose):
    """What `save` returned, and what was loaded and saved again, in the middle of a fit."""
    seen = []

    def take(model):
        guard = find(model.trainer.precision_plugin, row.kind)
        before = guard.save()
        for paths in choose(before):
            there = flip(before, paths)
            guard.load(copy.deepcopy(there))
            seen.append((before, there, guard.save()))

    run_during(take, callbacks=averages())
    return seen


@each_keeper
def test_saved_state_comes_back_whole(row):
    ((before, there, back),) = trips(row, lambda saved: [leaves(saved)])
    assert back == there != before


@each_keeper
def test_each_saved_flag_comes_back_on_its_own(row):
    all_trips = trips(row, lambda saved: [[path] for path in leaves(saved)])
    assert len(all_trips) >= 2
    assert all(back == there for _, there, back in all_trips)
    assert len({repr(back) for *_, back in all_trips}) == len(all_trips)


@each_guard
def test_guard_saves_none_or_plain_flags(row):
    saves = []

    def take(model):
        saves.append(find(model.trainer.precision_plugin, row.kind).save())

    run_during(take, callbacks=averages())
    if not row.keeps:
        assert saves == [None]
        return
    for path in leaves(saves[0]):
        flag = saves[0]
        for i in path:
            flag = flag[i]
        assert isinstance(flag, bool)


@each_keeper
def test_state_survives_from_one_plugin_to_the_next_through_the_entry(row):
    first, second, entries = SafeAMP(init_scale=64.0), SafeAMP(init_scale=64.0), []

    def keep(model):
        guard = find(first, row.kind)
        there = flip(guard.save(), leaves(guard.save()))
        guard.load(there)
        entries.append((there, first.state_dict()))

    def restore(model):
        second.load_state_dict(entries[0][1])
        entries.append(find(second, row.kind).save())

    run_during(keep, first, callbacks=averages())
    (there, entry) = entries[0]
    assert entry["gates"][row.kind.__name__] == there
    run_during(restore, second, callbacks=averages())
    assert entries[1] == there


def test_two_guards_of_one_kind_are_refused():
    guards = [SchedulerGate(), SchedulerGate(enabled=False)]
    trainer = make_trainer(SafeAMP())
    trainer.callbacks += guards
    with pytest.raises(MisconfigurationException, match="2 guards of the kind `SchedulerGate`"):
        trainer.fit(Line(), batches(1))
