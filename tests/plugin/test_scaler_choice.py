# SPDX-License-Identifier: Apache-2.0
"""A plugin's scaler comes from its arguments, or is copied from one that was passed."""

import pytest
import torch

from lightning_amp_guard import SkipAwareGradScaler
from lightning_amp_guard.arguments.settings import ScaleSettings
from lightning_amp_guard.plugin.scaler_choice import choose_scaler

DEFAULTS = ScaleSettings()


def chosen(scaler, scale=DEFAULTS, precision="16-mixed"):
    return choose_scaler("SafeAMP", precision, scale, scaler)


def used(scaler, attempts=3):
    """Let a scaler work, so that its tensors exist and its counter has moved."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for _ in range(attempts):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_arguments_make_a_scaler():
    settings = ScaleSettings(8.0, 4.0, 0.25, 7, False, 2, 2.0, 64.0)
    made = chosen(None, settings)
    assert type(made) is SkipAwareGradScaler
    assert made.is_enabled()
    assert made.policy.settings == settings
    assert made.state_dict() == {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize("attempts", [0, 3])
def test_settings_and_state_of_torchs_scaler_are_copied(attempts):
    given = used(torch.amp.GradScaler("cpu", 8.0, 4.0, 0.25, 7), attempts)
    made = chosen(given)
    assert type(made) is SkipAwareGradScaler
    assert made.state_dict() == given.state_dict()
    assert made.state_dict()["_growth_tracker"] == attempts
    assert (made.policy.settings.min_scale, made.policy.settings.max_scale) == (1.0, 2.0**24)


# torch hands out the initial scale as given until the first use, then as a float32
@pytest.mark.parametrize("attempts", [0, 1])
@pytest.mark.parametrize("scale", [3.3, 1000.1, 65536.0 / 3])
def test_scale_that_float32_rounds_is_copied_as_torch_stores_it(scale, attempts):
    given = used(torch.amp.GradScaler("cpu", scale), attempts)
    assert chosen(given).get_scale() == torch.tensor(scale).item()


def test_everything_of_our_own_scaler_is_copied():
    given = SkipAwareGradScaler(
        "cpu", 2.0**30, 4.0, 0.25, 7, hysteresis=3, min_scale=None, max_scale=None
    )
    given.count_clean_batch()
    given.back_off()  # borne
    given.count_clean_batch()
    made = chosen(given)
    assert made.policy == given.policy
    assert (made.policy.hysteresis_left, made.policy.growth_tracker) == (2, 1)
    assert made.get_scale() == 2.0**30


def test_static_scaler_stays_static():
    assert not chosen(SkipAwareGradScaler("cpu", dynamic=False)).policy.settings.dynamic


def test_copy_goes_its_own_way():
    given = SkipAwareGradScaler("cpu", 8.0)
    made = chosen(given)
    made.back_off()
    assert (made.get_scale(), given.get_scale()) == (4.0, 8.0)
    assert made is not given


@pytest.mark.parametrize("bad", ["dynamic", 1.0, torch.amp.GradScaler, object()])
def test_something_else_is_refused(bad):
    with pytest.raises(TypeError) as caught:
        chosen(bad)
    line = "init_scale=1.0" if bad == 1.0 else "init_scale=65536.0"
    line = 'scaler=GradScaler("cpu")' if bad is torch.amp.GradScaler else line
    assert str(caught.value) == (
        f"`SafeAMP(scaler={bad!r})`: expected a torch.amp.GradScaler or None."
        f" Write `SafeAMP({line})`."
    )


def test_scaler_under_bf16_is_refused():
    with pytest.raises(ValueError, match=r"`SafeAMP\(scaler=.*expected None for precision=\"bf16-"):
        chosen(SkipAwareGradScaler("cpu"), precision="bf16-mixed")
    assert chosen(None, precision="bf16-mixed").is_enabled()  # at hand should "auto" need it


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, SkipAwareGradScaler])
def test_disabled_scaler_is_refused_with_the_likely_cause(kind):
    with pytest.raises(ValueError, match=r"`SafeAMP\(scaler=.*expected an enabled scaler.*no CUDA"):
        chosen(kind("cpu", enabled=False))


@pytest.mark.parametrize(
    "scale",
    [ScaleSettings(init_scale=8.0), ScaleSettings(dynamic=False), ScaleSettings(min_scale=None)],
)
def test_scale_arguments_beside_a_scaler_are_refused(scale):
    with pytest.raises(ValueError, match=r"`SafeAMP\(scaler=.*at their defaults.*Set them on the"):
        chosen(torch.amp.GradScaler("cpu"), scale)


@pytest.mark.parametrize("scale", [0.5, 2.0**25])
def test_torchs_scaler_outside_our_bounds_is_refused_with_the_way_out(scale):
    with pytest.raises(ValueError, match=r"^`SafeAMP") as caught:
        chosen(torch.amp.GradScaler("cpu", scale))
    message = str(caught.value)
    assert message.startswith("`SafeAMP(scaler=")
    assert f"It is {scale!r}. Pass a SkipAwareGradScaler with other bounds." in message
    ours = SkipAwareGradScaler("cpu", scale, min_scale=None, max_scale=None)
    assert chosen(ours).get_scale() == scale


# torch itself takes all of these; nothing that came out of a checkpoint is to blame
@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0.0},
        {"init_scale": -8.0},
        {"init_scale": float("nan")},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"backoff_factor": -1.0},
        {"growth_factor": float("inf")},
    ],
)
def test_torchs_scaler_with_impossible_settings_is_refused_as_an_argument(arguments):
    with pytest.raises(ValueError, match=r"^`SafeAMP\(scaler="):
        chosen(torch.amp.GradScaler("cpu", **arguments))
