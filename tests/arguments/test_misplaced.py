# SPDX-License-Identifier: Apache-2.0
"""A callback that stands among the plugins is shown with the line to write."""

import inspect
from unittest import mock

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_amp_guard import AmpMonitor, SafeAMP, TokenClock, UnscaleGuard
from tests.helpers import make_trainer


@pytest.mark.parametrize("kind", [*SafeAMP.guard_types, TokenClock, AmpMonitor])
def test_a_callback_among_the_plugins_is_shown_with_the_line_to_write(kind):
    name = kind.__name__
    with pytest.raises(MisconfigurationException, match="Found invalid type for plugin") as caught:
        make_trainer(kind())
    plugins = "" if kind is AmpMonitor else "plugins=[SafeAMP()], "
    line = f"<{name}, a callback: write `Trainer({plugins}callbacks=[{name}()])`>"
    assert line in str(caught.value)
    assert repr(kind()) == line


def test_a_subclass_is_shown_under_its_own_name():
    class Mine(UnscaleGuard):
        pass

    assert repr(Mine()).startswith("<Mine, a callback")


def test_a_plugin_among_the_callbacks_is_refused_with_the_line_to_write():
    with pytest.raises(
        MisconfigurationException, match=r"Write `Trainer\(plugins=\[SafeAMP\(\)\]\)`"
    ):
        make_trainer(callbacks=[SafeAMP()])


def test_who_only_asks_for_the_attributes_of_a_plugin_is_answered():
    plugin = SafeAMP()
    assert not hasattr(plugin, "state_key")
    assert "settings" in dict(inspect.getmembers(plugin))
    assert mock.create_autospec(plugin).settings
