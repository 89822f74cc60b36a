# SPDX-License-Identifier: Apache-2.0
"""Set-ups that cannot work are refused before the first batch, with what to do instead."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_amp_guard import SafeAMP, SafeFSDP
from tests.helpers import Line, fit


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Of Lightning's strategy it has the name, which is all that is looked at."""


class Derived(DeepSpeedStrategy):
    """A user's own variant."""


def trainer_on(device):
    strategy = SimpleNamespace(root_device=torch.device(device), broadcast=lambda value: value)
    return SimpleNamespace(strategy=strategy)


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, Derived])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_deepspeed_is_refused_before_the_first_batch(strategy, precision):
    model = Line()
    with pytest.raises(MisconfigurationException, match="DeepSpeed") as caught:
        fit(model, SafeAMP(precision), strategy=strategy("cpu"))
    for part in ("own engine", '"ddp"', "ModelParallelStrategy", 'precision="16-mixed"'):
        assert part in str(caught.value)
    assert model.seen == 0


def test_strategy_of_another_name_is_not_refused():
    model = Line()
    fit(model, SafeAMP(), n=1, strategy=SingleDeviceStrategy("cpu"))
    assert model.seen == 1


@pytest.mark.parametrize("plugin", [SafeAMP, SafeFSDP])
def test_float16_is_refused_on_a_device_without_float16_autocast(plugin):
    with pytest.raises(MisconfigurationException, match="no float16 autocast on 'meta'") as caught:
        plugin().resolve(trainer_on("meta"))
    name = plugin.__name__
    assert f"`{name}(precision='16-mixed')`" in str(caught.value)
    assert f'Write `{name}(precision="bf16-mixed")`' in str(caught.value)


@pytest.mark.parametrize("precision", ["bf16-mixed", "auto"])
def test_bfloat16_asks_for_no_float16_autocast(precision):
    plugin = SafeAMP(precision)
    plugin.resolve(trainer_on("meta"))
    assert plugin.precision == "bf16-mixed"
    assert plugin.scaler is None


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_float16_is_taken_where_autocast_has_it(device):
    plugin = SafeAMP()
    plugin.resolve(trainer_on(device))
    assert plugin.device == device


def test_device_other_than_the_trainers_is_refused():
    with pytest.raises(MisconfigurationException, match="the Trainer runs on 'cpu'") as caught:
        SafeAMP(device="cuda").resolve(trainer_on("cpu"))
    assert "Leave `device` out" in str(caught.value)


@pytest.mark.parametrize("device", ["nope", ""])
def test_device_that_torch_does_not_know_is_named(device):
    with pytest.raises(ValueError, match=r"SafeAMP\(device="):
        SafeAMP(device=device)


@pytest.mark.parametrize("kind", [SafeAMP, SafeFSDP])
def test_plugin_among_the_callbacks_is_refused_with_the_line_to_write(kind):
    with pytest.raises(MisconfigurationException, match=r"Trainer\(plugins=\[") as error:
        Trainer(callbacks=[kind()], accelerator="cpu", logger=False)
    assert f"`Trainer(callbacks=[{kind.__name__}()])`" in str(error.value)


def test_fabric_is_refused_with_the_reason():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[SafeAMP()])
    model = torch.nn.Linear(4, 1)
    with pytest.raises(MisconfigurationException) as caught:
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for part in (
        "the module Linear is no `LightningModule`",
        "Fabric has no loop",
        "Write `Trainer(",
    ):
        assert part in str(caught.value)
