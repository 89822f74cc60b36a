# SPDX-License-Identifier: Apache-2.0
"""Arguments that a class does not take are refused with the class's own name."""

import contextlib
import inspect
import pydoc

import pytest

import lightning_amp_guard as root
from lightning_amp_guard import AmpMonitor, SafeAMP, SkipAwareGradScaler, UnscaleGuard, WindowGuard

NAMES = [
    "AmpMonitor",
    "AveragingGate",
    "DtypeGuard",
    "NonFiniteLocator",
    "SafeAMP",
    "SafeFSDP",
    "ScalerCheckpoint",
    "SchedulerGate",
    "TokenClock",
    "UnscaleGuard",
    "WindowGuard",
]
KINDS = [getattr(root, name) for name in NAMES] + [SkipAwareGradScaler]
with contextlib.suppress(ImportError):
    from lightning_amp_guard import pytorch_lightning as mirror

    KINDS += [getattr(mirror, name) for name in NAMES]


class Mine(SafeAMP):
    """A user's own variant, which passes on what it does not know."""

    def __init__(self, extra: int = 0, **kwargs):
        super().__init__(**kwargs)


each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}")


@each_kind
def test_an_unknown_argument_names_the_class_that_was_written(kind):
    with pytest.raises(TypeError) as caught:
        kind(foo=1)
    said = str(caught.value)
    name = kind.__name__
    assert said.startswith(f"`{name}(foo=1)`: `{name}` has no argument `foo`. Expected one of `")
    for argument in list(inspect.signature(kind).parameters):
        assert f"`{argument}`" in said
    assert "__init__" not in said
    assert "Core" not in said


@each_kind
def test_the_true_arguments_are_shown(kind):
    shown = inspect.signature(kind)
    assert not {"args", "kwargs"} & set(shown.parameters)
    assert all(p.default is not p.empty for p in shown.parameters.values())
    assert f"__init__(self, {str(shown)[1:10]}" in pydoc.plain(pydoc.render_doc(kind))


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (SafeAMP, {"growth_intervall": 100}, "SafeAMP(growth_interval=100)"),
        (SafeAMP, {"fp32_module": ["head"]}, "SafeAMP(fp32_modules=['head'])"),
        (AmpMonitor, {"progress_bar": False}, "AmpMonitor(prog_bar=False)"),
        (UnscaleGuard, {"on_violations": "warn"}, "UnscaleGuard(on_violation='warn')"),
        (Mine, {"init_scal": 8.0}, "Mine(init_scale=8.0)"),
    ],
)
def test_the_nearest_argument_is_offered(kind, given, meant):
    with pytest.raises(TypeError) as caught:
        kind(**given)
    assert str(caught.value).endswith(f"Did you mean `{meant}`?")


def test_a_name_that_resembles_none_offers_none():
    with pytest.raises(TypeError, match=r"has no argument `zzz`\. Expected one of .*`enabled`\.$"):
        WindowGuard(zzz=1)


def test_arguments_by_place_beyond_the_last_are_refused_with_the_line_to_write():
    with pytest.raises(TypeError) as caught:
        SafeAMP("16-mixed", None, None, 1024)
    assert str(caught.value) == (
        "`SafeAMP('16-mixed', None, None, 1024)`: 4 arguments were given by place. Expected at most 3,"
        " `precision`, `device`, `scaler`. Write the others by name, such as"
        " `SafeAMP(init_scale=1024)`."
    )
    with pytest.raises(
        TypeError, match=r"Expected all of them by name.*`AmpMonitor\(ledger=True\)`"
    ):
        AmpMonitor(True)
    with pytest.raises(TypeError) as caught:
        WindowGuard(True, False)
    assert str(caught.value) == (
        "`WindowGuard(True, False)`: 2 arguments were given by place. Expected at most 1, `enabled`."
    )


def test_an_argument_given_twice_is_refused_by_name():
    with pytest.raises(TypeError) as caught:
        SafeAMP("16-mixed", precision="bf16-mixed")
    assert str(caught.value) == (
        "`SafeAMP('16-mixed', precision='bf16-mixed')`: the argument `precision` was given twice, by"
        " place and by name. Expected it once. Keep `SafeAMP(precision='bf16-mixed')`."
    )
