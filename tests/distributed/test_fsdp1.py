# SPDX-License-Identifier: Apache-2.0
"""FSDP1 on two ranks under SafeFSDP."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp_guard import AmpGuardWarning, SafeAMP, SafeFSDP, SkipLimitError
from tests.distributed.harness import Pair
from tests.distributed.models import (
    CLIPPED,
    LOSS,
    NORM,
    OVERFLOW,
    Rows,
    SavesInsideWindow,
    alike,
    fused,
    joint_data,
    momentum,
    own_data,
)
from tests.helpers import BAD, GOOD, NAN_LOSS, WantsNorm, fit, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

LINEAR, SEQUENTIAL = torch.nn.Linear, torch.nn.Sequential
HALF, FLOAT = torch.float16, torch.float32


class CpuFsdp(FSDPStrategy):
    """FSDP1 on the CPU: Lightning's own strategy names no device.

    It also asks for a full state dict that is moved to the CPU, which frees memory in use where the
    parameters are there already.
    """

    def _setup_model(self, model):
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            return model  # by the user, as far as he likes
        self.kwargs["device_id"] = torch.device("cpu")
        return FullyShardedDataParallel(
            module=model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )

    def lightning_module_state_dict(self):
        if self._state_dict_type != "full":
            return super().lightning_module_state_dict()
        with FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(),
        ):
            return self.model.state_dict()


# ------------------------------------------------------------------ models


class Sharded(Rows):
    """`Rows` with one row on each rank."""

    def rows(self):
        with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model):
            return self.lin.weight.detach()[:, 0].tolist()


class AsksNorm(Sharded):
    """Somebody wants the norm at every attempt, as AmpMonitor does at log steps."""

    def on_train_start(self):
        self.trainer.precision_plugin.running().witnesses.append(WantsNorm())


class FlatParameters(Sharded):
    """For `use_orig_params=False`: the optimizer gets FSDP's own parameters."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.5)


class OneWeight(Sharded):
    """A single weight, so that rank 1 holds nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lin = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.lin.weight, 8.0)

    def training_step(self, batch, batch_idx):
        half = self.lin(batch[0][:, :1]) / 2
        return self.loss(torch.cat([half, half], 1))


class Nested(Sharded):
    """A block of two layers, beside the layer of `Rows`; notes what each layer computes in."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.dtypes = {}

    def training_step(self, batch, batch_idx):
        layers = {"lin": self.lin, "0": self.block[0], "1": self.block[1]}
        noting = [
            # within the unit, where its weight is whole
            getattr(layer, "module", layer).register_forward_hook(partial(self.note, name))
            for name, layer in layers.items()
        ]
        loss = super().training_step(batch, batch_idx) + self.block(batch[0]).float().mean()
        for handle in noting:
            handle.remove()
        return loss

    def note(self, name, layer, args, out):
        self.dtypes[name] = (layer.weight.dtype, out.dtype)


def wrap(trainer, layer):
    return FullyShardedDataParallel(
        layer,
        mixed_precision=trainer.strategy.mixed_precision_config,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


class WrappedByHand(Nested):
    """The block is a unit, and its first layer one of its own."""

    def configure_model(self):
        self.block[0] = wrap(self.trainer, self.block[0])
        self.block, self.lin = wrap(self.trainer, self.block), wrap(self.trainer, self.lin)


class TwoOptimizers(Sharded):
    """Manual optimization of two weights, clipped each for itself; the plan is the second one's.

    They are wrapped here, since Lightning's wrapper around everything allows no manual backward.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 2, bias=False)
        torch.nn.init.constant_(self.other.weight, 8.0)

    def configure_model(self):
        if not isinstance(self.lin, FullyShardedDataParallel):
            self.lin, self.other = (wrap(self.trainer, layer) for layer in (self.lin, self.other))

    def rows(self):
        with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model):
            return [*self.lin.weight[:, 0].tolist(), *self.other.weight[:, 0].tolist()]

    def training_step(self, batch, batch_idx):
        out = self.lin(batch[0])
        self.manual_backward(out.float().mean(0).sum() + self.loss(self.other(batch[0])))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (self.lin, self.other)]


class SeesInputs(Sharded):
    def training_step(self, batch, batch_idx):
        self.largest = float(batch[0].max())
        return super().training_step((torch.ones_like(batch[0]),), batch_idx)


def plugin_of(**kwargs):
    return SafeFSDP(**{"init_scale": 8.0, "growth_interval": 2, **kwargs})


@contextlib.contextmanager
def torch_s_own_warnings():
    """Leave out what FSDP1 warns of whoever uses it, and Lightning's of the plain DataLoader."""
    with warnings.catch_warnings():
        for message in (
            "FSDP.state_dict_type",
            "`_get_pg_default_device`",
            "Multiple backends are registered",
            "Called FSDP.clip_grad_norm_.* with no gradients",
            "Please use DTensor",
            "`load_state_dict` is deprecated",
            ".*resuming from a checkpoint that ended before.*",
        ):
            warnings.filterwarnings("ignore", message)
        yield


def two_ranks(
    model, rank, n=4, *, plugin=None, ckpt_path=None, fsdp=None, data=None, save=None, **kwargs
):
    """Fit `model` on this rank's own batches."""
    trainer = make_trainer(
        plugin or plugin_of(),
        devices=2,
        strategy=CpuFsdp(process_group_backend="gloo", **(fsdp or {})),
        use_distributed_sampler=False,
        **kwargs,
    )
    with torch_s_own_warnings():
        trainer.fit(model, data or own_data(rank, n), ckpt_path=ckpt_path)
        if save is not None:
            trainer.save_checkpoint(save)
    return trainer


def one_process(model, n=4, *, plugin=None, **kwargs):
    """Fit `model` on the joint batches under SafeAMP."""
    plugin = plugin or SafeAMP(init_scale=8.0, growth_interval=2)
    return fit(model, plugin, data=joint_data(n), **kwargs)


# ------------------------------------------------------------------ checks, run on both ranks


def told(model, rank, *args, **kwargs):
    two_ranks(model, rank, *args, **kwargs)
    return model.told()


def overflow_in_one_shard(rank, folder):
    return told(Sharded([GOOD, BAD]), rank)


def overflow_in_one_shard_of_a_unit(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, fsdp={"auto_wrap_policy": {LINEAR}})


def overflow_in_flat_parameters(rank, folder):
    return told(FlatParameters([GOOD, BAD]), rank, fsdp={"use_orig_params": False})


def overflow_with_gradients_sharded_only(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, fsdp={"sharding_strategy": "SHARD_GRAD_OP"})


def nan_loss_on_one_rank(rank, folder):
    return told(Sharded([GOOD, NAN_LOSS] if rank else []), rank)


def overflow_with_fused_adam(rank, folder):
    return told(Sharded([GOOD, BAD], fused), rank)


def clipped_by_norm(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, gradient_clip_val=1.0)


def clipped_with_fused_adam(rank, folder):
    return told(Sharded([GOOD, BAD], fused), rank, gradient_clip_val=1.0)


def clipped_by_value(rank, folder):
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    return told(Sharded([GOOD, BAD]), rank, **clip)


def accumulated(rank, folder):
    units = {"auto_wrap_policy": {LINEAR}}
    return told(Sharded([GOOD, GOOD, BAD]), rank, 6, accumulate_grad_batches=2, fsdp=units)


def accumulated_with_gradients_sharded_only(rank, folder):
    fsdp = {"sharding_strategy": "SHARD_GRAD_OP"}
    return told(Sharded([GOOD, GOOD, BAD]), rank, 6, accumulate_grad_batches=2, fsdp=fsdp)


def bfloat16(rank, folder):
    return told(Sharded([GOOD, BAD]), rank, plugin=SafeFSDP("bf16-mixed"))


def norm_asked_for(rank, folder):
    return told(AsksNorm([GOOD, BAD]), rank)


def rank_without_a_shard(rank, folder):
    return told(OneWeight([GOOD, BAD]), rank, gradient_clip_val=1.0)


def nan_loss_on_a_rank_without_a_shard(rank, folder):
    return told(OneWeight([GOOD, NAN_LOSS] if rank else []), rank)


def two_optimizers(rank, folder):
    return told(TwoOptimizers([GOOD, BAD]), rank)


def sum_that_float16_would_round(rank, folder):
    x = torch.full((4, 4), 0.125 if rank else 256.0)
    data = DataLoader(TensorDataset(x), batch_size=4)
    return told(Sharded(), rank, plugin=plugin_of(init_scale=1.0), data=data)


def input_beyond_float16(rank, folder):
    model = SeesInputs()
    data = DataLoader(TensorDataset(torch.full((4, 4), 1e5)), batch_size=4)
    two_ranks(model, rank, data=data)
    return model.largest


def scaler_settings(rank, folder):
    scaler = torch.amp.GradScaler("cpu", 4.0, growth_factor=4.0, growth_interval=1)
    return told(Sharded([GOOD, GOOD, BAD]), rank, plugin=SafeFSDP(scaler=scaler))


def anomaly_mode(rank, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        answer = told(Sharded([GOOD, BAD]), rank, detect_anomaly=True)
    return answer, [str(w.message) for w in caught if w.category is AmpGuardWarning]


def skip_limit(rank, folder):
    with pytest.raises(SkipLimitError) as caught:
        two_ranks(Sharded([BAD, BAD]), rank, plugin=plugin_of(max_consecutive_skips=2))
    return str(caught.value)


def kept_in_float32(rank, folder):
    answers = {}
    for name, patterns, units in KEPT:
        model = Nested()
        plugin, fsdp = plugin_of(fp32_modules=patterns), {"auto_wrap_policy": units}
        try:
            two_ranks(model, rank, 1, plugin=plugin, fsdp=fsdp)
        except MisconfigurationException as error:
            answers[name] = str(error)
        else:
            answers[name] = model.dtypes
    model = WrappedByHand()
    two_ranks(model, rank, 1, plugin=plugin_of(fp32_modules=["block.0"]))
    answers["wrapped by hand"] = model.dtypes
    return answers


KEPT = [
    ("one layer", ["block.0"], {LINEAR}),
    ("a block that is one unit", ["block"], {SEQUENTIAL}),
    ("a block of units", ["block", "block.*"], {SEQUENTIAL, LINEAR}),
    ("all of a block but one unit", ["block", "block.0", "!block.1"], {SEQUENTIAL, LINEAR}),
    ("a layer that is no unit", ["block.0"], {SEQUENTIAL}),
]


def saved_in_parts(rank, folder):
    parts, path = {"state_dict_type": "sharded"}, folder / "two"
    two_ranks(Sharded([GOOD, BAD], momentum), rank, fsdp=parts, save=path)
    return told(Sharded([BAD], momentum), rank, max_epochs=2, ckpt_path=path, fsdp=parts)


def saved_in_one_file(rank, folder):
    return told(Sharded([GOOD, BAD], momentum), rank, save=folder / "two.ckpt")


def resumed_from_one_process(rank, folder):
    return told(Sharded([BAD], momentum), rank, max_epochs=2, ckpt_path=folder / "one.ckpt")


def resumed_inside_a_window(rank, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmpGuardWarning)
        model, path = Sharded([], momentum), folder / "inside.ckpt"
        answer = told(model, rank, ckpt_path=path, accumulate_grad_batches=2)
    return answer, [str(w.message) for w in caught if w.category is AmpGuardWarning]


CHECKS = [
    overflow_in_one_shard,
    overflow_in_one_shard_of_a_unit,
    overflow_in_flat_parameters,
    overflow_with_gradients_sharded_only,
    nan_loss_on_one_rank,
    overflow_with_fused_adam,
    clipped_by_norm,
    clipped_with_fused_adam,
    clipped_by_value,
    accumulated,
    accumulated_with_gradients_sharded_only,
    bfloat16,
    norm_asked_for,
    rank_without_a_shard,
    nan_loss_on_a_rank_without_a_shard,
    two_optimizers,
    sum_that_float16_would_round,
    input_beyond_float16,
    scaler_settings,
    anomaly_mode,
    skip_limit,
    kept_in_float32,
    saved_in_parts,
    saved_in_one_file,
    resumed_from_one_process,
    resumed_inside_a_window,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp1")


@pytest.fixture(scope="module")
def pair(folder):
    one_process(Rows([GOOD, BAD], momentum)).save_checkpoint(folder / "one.ckpt")
    inside = SavesInsideWindow(folder / "inside.ckpt", [], momentum)
    one_process(inside, accumulate_grad_batches=2)
    return Pair(folder, CHECKS)


# ------------------------------------------------------------------ what the checks have to give


@pytest.mark.parametrize(
    ("check", "fault", "scales", "rows"),
    [
        (overflow_in_one_shard, BAD, [8, 4, 4, 8], [7, 7, 6, 5]),
        (overflow_in_one_shard_of_a_unit, BAD, [8, 4, 4, 8], [7, 7, 6, 5]),
        (overflow_in_flat_parameters, BAD, [8, 4, 4, 8], [7, 7, 6, 5]),
        (overflow_with_gradients_sharded_only, BAD, [8, 4, 4, 8], [7, 7, 6, 5]),
        (nan_loss_on_one_rank, NAN_LOSS, [8, 8, 16, 16], [7, 7, 6, 5]),
        (clipped_by_value, BAD, [8, 4, 4, 8], [7.5, 7.5, 7, 6.5]),
    ],
)
def test_two_ranks_equal_one_process_on_the_joint_batch(pair, check, fault, scales, rows):
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    reference = Rows([GOOD, fault])
    one_process(reference, **(clip if check is clipped_by_value else {}))
    first, second = pair(check)
    alike(first, second, reference.told())
    assert first["scales"] == scales
    assert first["weights"] == [[row, row] for row in rows]
    assert first["reasons"] == [None, LOSS if fault == NAN_LOSS else OVERFLOW, None, None]
    assert first["tallies"][-1] == [(4, 3, 1)]


@pytest.mark.parametrize("check", [accumulated, accumulated_with_gradients_sharded_only])
def test_accumulated_gradients_are_shards_too(pair, check):
    reference = Rows([GOOD, GOOD, BAD])
    one_process(reference, 6, accumulate_grad_batches=2)
    first, second = pair(check)
    alike(first, second, reference.told())
    assert first["scales"] == [8, 8, 8, 4, 4, 4]
    assert first["weights"] == [[row, row] for row in (8, 7, 7, 7, 7, 6)]


def test_bfloat16_guard_skips_on_both(pair):
    first, second = pair(bfloat16)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"] == [[row, row] for row in (7, 7, 6, 5)]


@pytest.mark.parametrize(
    ("check", "optimizer", "clip"),
    [
        (clipped_by_norm, None, 1.0),
        (overflow_with_fused_adam, fused, None),
        (clipped_with_fused_adam, fused, 1.0),
    ],
)
def test_clipping_and_fused_steps_equal_one_process(pair, check, optimizer, clip):
    reference = Rows([GOOD, BAD], optimizer)
    one_process(reference, gradient_clip_val=clip)
    first, second = pair(check)
    alike(first, second, reference.told(), rtol=1e-6)
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert first["weights"][1] == first["weights"][0]


@pytest.mark.parametrize("check", [clipped_by_norm, norm_asked_for])
def test_norm_is_that_of_all_shards(pair, check):
    for answer in pair(check):
        assert answer["norms"] == [
            pytest.approx(NORM),
            None,
            pytest.approx(NORM),
            pytest.approx(NORM),
        ]


def test_rank_without_a_shard_takes_part(pair):
    first, second = pair(rank_without_a_shard)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    # One gradient of 2, clipped to 1.
    expected = torch.tensor([7.5, 7.5, 7, 6.5]).reshape(4, 1)
    torch.testing.assert_close(torch.tensor(first["weights"]), expected, rtol=1e-6, atol=0)


def test_loss_of_a_rank_without_a_shard_is_blamed(pair):
    first, second = pair(nan_loss_on_a_rank_without_a_shard)
    assert first == second
    assert first["reasons"] == [None, LOSS, None, None]
    assert first["scales"] == [8, 8, 16, 16]


def test_each_of_two_optimizers_is_clipped_by_the_norm_of_its_own_shards(pair):
    first, second = pair(two_optimizers)
    assert first == second
    assert first["reasons"] == [None, None, None, OVERFLOW, None, None, None, None]
    step = CLIPPED / 2
    expected = [
        [8 - step * i] * 2 + [8 - step * j] * 2 for i, j in ((1, 1), (2, 1), (3, 2), (4, 3))
    ]
    torch.testing.assert_close(
        torch.tensor(first["weights"]), torch.tensor(expected), rtol=1e-6, atol=0
    )


def test_gradients_are_reduced_in_float32(pair):
    # The mean of 256 and 0.125 is 128.0625; near 128 float16 knows only multiples of 0.125.
    for answer in pair(sum_that_float16_would_round):
        assert answer["weights"] == [[8 - 64.03125] * 2]


def test_inputs_are_not_cast_to_float16(pair):
    assert pair(input_beyond_float16) == [1e5, 1e5]


def test_scaler_settings_are_taken(pair):
    first, second = pair(scaler_settings)
    assert first == second
    assert first["scales"] == [16, 64, 32, 128]


def test_anomaly_mode_says_that_it_is_off(pair):
    (first, told_by_first), (second, told_by_second) = pair(anomaly_mode)
    assert first == second
    assert first["reasons"] == [None, OVERFLOW, None, None]
    assert len(told_by_first) == 1
    assert "gradients are sharded" in told_by_first[0]
    assert not told_by_second


def test_skip_limit_names_parameters_without_fsdps_additions(pair):
    messages = pair(skip_limit)
    assert any("'lin.weight'" in message for message in messages)  # by the rank that holds the row
    for message in messages:
        assert "skipped 2 updates in a row" in message
        assert "_fsdp_wrapped_module" not in message


UNDER_AUTOCAST, IN_FLOAT32 = (HALF, HALF), (FLOAT, FLOAT)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("one layer", IN_FLOAT32, UNDER_AUTOCAST),
        ("a block that is one unit", IN_FLOAT32, IN_FLOAT32),
        ("a block of units", IN_FLOAT32, IN_FLOAT32),
        ("all of a block but one unit", IN_FLOAT32, UNDER_AUTOCAST),
        ("wrapped by hand", IN_FLOAT32, UNDER_AUTOCAST),
    ],
)
def test_unit_of_fp32_modules_keeps_weights_and_results_in_float32(pair, name, first, second):
    for answers in pair(kept_in_float32):
        assert answers[name] == {"lin": UNDER_AUTOCAST, "0": first, "1": second}


def test_module_that_is_no_unit_is_refused_in_fp32_modules(pair):
    for answers in pair(kept_in_float32):
        message = answers["a layer that is no unit"]
        for part in ("SafeFSDP(fp32_modules=", "'block.0'", "unit", "auto_wrap_policy"):
            assert part in message


def test_safe_amp_under_fsdp1_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="FSDPPrecision") as caught:
        make_trainer(SafeAMP(), devices=2, strategy=CpuFsdp())
    assert "SafeFSDP" in str(caught.value)


def test_model_without_units_is_refused_at_setup():
    with pytest.raises(MisconfigurationException, match="no FSDP1 unit") as caught:
        fit(Rows(), SafeFSDP(), data=joint_data(1))
    for part in ("SingleDeviceStrategy", "FSDPStrategy", "SafeAMP()"):
        assert part in str(caught.value)


# ------------------------------------------------------------------ checkpoints
#
# Momentum 0.5 on a gradient of 2: buffers 2, 3, 3.5 take the weight from 8 to 7, 5.5, 3.75 in the
# first epoch, with the second batch skipped. 3.75, 3.875, 3.9375 go on in the second.

FIRST_EPOCH = [7, 7, 5.5, 3.75]
AFTER_RESUME = {
    "scales": [4, 4, 8, 8],
    "tallies": [[(5, 3, 2)], [(6, 4, 2)], [(7, 5, 2)], [(8, 6, 2)]],
    "weights": [[row, row] for row in (3.75, 1.875, -0.0625, -2.03125)],
    "reasons": [OVERFLOW, None, None, None],
    "norms": [None] * 4,
    "carried": [(8, 4), (4, 4), (4, 4), (8, 8)],
}


@pytest.mark.parametrize("check", [saved_in_parts, resumed_from_one_process])
def test_resume_on_two_ranks(pair, check):
    first, second = pair(check)
    assert first == AFTER_RESUME
    assert second == AFTER_RESUME


def test_checkpoint_of_two_ranks_resumes_on_one(pair, folder):
    first, second = pair(saved_in_one_file)
    assert first == second
    assert first["weights"] == [[row, row] for row in FIRST_EPOCH]
    model = Rows([BAD], momentum)
    one_process(model, max_epochs=2, ckpt_path=folder / "two.ckpt")
    assert model.told() == AFTER_RESUME


def test_window_of_one_process_begins_anew_and_says_so(pair):
    (first, told_by_first), (second, told_by_second) = pair(resumed_inside_a_window)
    assert first == second
    # The fourth batch's half of the gradient is all there is: 1 on a momentum of 2 * 0.5.
    assert first["weights"] == [[6, 6]]
    (warning,) = told_by_first
    assert "the window begins anew" in warning
    assert not told_by_second
