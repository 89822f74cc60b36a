# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring runs, and every `Example:` is one that can run."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import lightning_amp_guard

MODULES = sorted(
    {"lightning_amp_guard"}
    | {
        found.name
        for found in pkgutil.walk_packages(lightning_amp_guard.__path__, "lightning_amp_guard.")
    }
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples(module):
    """The docstrings of a module that hold examples, those it imports left out."""
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    told = []
    for test in examples(importlib.import_module(name)):
        runner.run(test, out=told.append)
    assert runner.failures == 0, "".join(told)


@pytest.mark.parametrize("name", MODULES)
def test_every_example_section_is_one_that_runs(name):
    module = importlib.import_module(name)
    own = [
        value
        for value in vars(module).values()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    ]
    running = {test.name for test in examples(module)}
    for value in own:
        if "\n    Example:\n" in (value.__doc__ or ""):
            assert f"{name}.{value.__qualname__}" in running


def test_there_are_examples_to_run():
    count = sum(len(examples(importlib.import_module(name))) for name in MODULES)
    assert count >= 5


def test_a_broken_example_is_seen():
    source = ">>> 1 + 1\n3\n"
    test = doctest.DocTestParser().get_doctest(source, {}, "planted", None, 0)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=lambda text: None)
    assert runner.failures == 1
