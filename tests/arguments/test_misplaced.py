# SPDX-License-Identifier: Apache-2.0
"""What stands in a place that is not its own is refused with the line to write."""

import copy
import pickle
import traceback
from abc import ABC
from typing import ClassVar

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_amp_guard import AmpMonitor, SafeAMP, SafeFSDP, TokenClock, UnscaleGuard
from tests.helpers import Line, fit, make_trainer

CALLBACKS = [*SafeAMP.guard_types, TokenClock, AmpMonitor]
each_callback = pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)


@each_callback
def test_a_callback_among_the_plugins_is_shown_with_the_line_to_write(kind):
    name = kind.__name__
    with pytest.raises(MisconfigurationException, match="Found invalid type for plugin") as caught:
        make_trainer(kind())
    plugins = "" if kind is AmpMonitor else "plugins=[SafeAMP()], "
    line = f"<{name}, a callback: write `Trainer({plugins}callbacks=[{name}()])`>"
    assert line in str(caught.value)
    assert repr(kind()) == line


@pytest.mark.parametrize("kind", [SafeAMP, SafeFSDP])
def test_the_class_of_a_plugin_is_shown_with_the_line_to_write(kind):
    with pytest.raises(MisconfigurationException) as caught:
        make_trainer(kind)
    assert f"[a class: write `Trainer(plugins=[{kind.__name__}()])`]" in str(caught.value)


@each_callback
def test_the_class_of_a_callback_is_refused_with_the_line_to_write(kind):
    trainer, model = make_trainer(SafeAMP(), callbacks=[kind]), Line()
    with pytest.raises(TypeError) as caught:
        trainer.fit(model, [])
    assert str(caught.value) == (
        f"`Trainer(callbacks=[{kind.__name__}])`: `{kind.__name__}` is a class. Expected an instance."
        f" Write `Trainer(callbacks=[{kind.__name__}()])`."
    )
    said = "".join(traceback.format_exception(caught.value))
    assert "During handling" not in said  # no second error hides it
    assert not {"log", "log_dict"} & set(vars(kind))  # which Lightning has hung on the class


def test_hooks_called_by_way_of_the_class_run_on_the_instance():
    trainer, monitor = make_trainer(), AmpMonitor()
    monitor._lost_scaler = "left"
    AmpMonitor.setup(monitor, trainer, None, "fit")
    assert monitor._lost_scaler == ""
    monitor._run = None
    AmpMonitor.on_exception(monitor, trainer, None, ValueError())
    assert UnscaleGuard.on_exception(UnscaleGuard(), trainer, None, ValueError()) is None


def test_a_subclass_reaches_hooks_by_super_and_keeps_its_name():
    class Mine(UnscaleGuard):
        heard: ClassVar[list[str]] = []

        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            self.heard.append(stage)

        def on_exception(self, trainer, pl_module, exception):
            super().on_exception(trainer, pl_module, exception)
            self.heard.append(str(exception))

    class Broken(Callback):
        def on_train_start(self, trainer, pl_module):
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(Line(), SafeAMP(), callbacks=[Mine(), Broken()])
    assert Mine.heard == ["fit", "planted"]
    assert repr(Mine()).startswith("<Mine, a callback")


def test_a_plugin_class_stays_an_ordinary_one():
    class Mine(SafeAMP, ABC):
        """With an abstract base class beside it."""

    assert isinstance(Mine(), SafeAMP)
    assert pickle.loads(pickle.dumps(SafeAMP)) is SafeAMP
    assert isinstance(copy.deepcopy(SafeAMP()), SafeAMP)
    assert str(SafeAMP).startswith("<class 'lightning_amp_guard.precision.SafeAMP'>")
