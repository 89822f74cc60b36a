# SPDX-License-Identifier: Apache-2.0
"""SafeAMP: the precision plugin for one device, DDP and FSDP2."""

from __future__ import annotations

from typing import ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from lightning_amp_guard.guards import GUARD_TYPES
from lightning_amp_guard.plugin.plugin import AmpPlugin

__all__ = ["SafeAMP", "SafeAMPCore"]


class SafeAMPCore(AmpPlugin):
    """`SafeAMP` without its Lightning base class; see there."""

    namespace: ClassVar[str] = "lightning_amp_guard"
    trainer_name: ClassVar[str] = "lightning.pytorch.Trainer"

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the total L2 norm and keep the norm for the outcome. Host sync: none."""
        norm = torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)
        self._keep_norm(optimizer, norm)

    def __repr__(self) -> str:
        """Return the call that makes the plugin, and where it belongs."""
        return (
            f"SafeAMP(precision={self.settings.precision!r}) [`from {self.namespace} import SafeAMP`,"
            f" for `{self.trainer_name}(plugins=[SafeAMP()])` without `precision=`; for FSDPStrategy"
            f" take `SafeFSDP`, for the other Lightning namespace `from {self._other()} import"
            " SafeAMP`]"
        )

    def _other(self) -> str:
        return (
            "lightning_amp_guard.pytorch_lightning"
            if self.namespace == "lightning_amp_guard"
            else "lightning_amp_guard"
        )


class SafeAMP(SafeAMPCore, MixedPrecision):  # type: ignore[misc]  # the mixin takes any model
    """Trains in FP16 or BF16 autocast so that no AMP fault passes in silence.

    `Trainer(plugins=[SafeAMP()])` in place of `Trainer(precision="16-mixed")`. Gradients are
    unscaled before hooks, clipping or anybody else looks; one scale holds within an accumulation
    window; schedules, weight averages and counts move with applied updates only; the scaler's state
    survives a resume; a run that only skips stops and says why. It does not choose a model's
    precision, replace Lightning's loops, or change an update that is finite: with a power-of-two
    scale and no overflow the weights equal those of stock `MixedPrecision` bit for bit.

    Args:
        precision: "16-mixed", "bf16-mixed" or "auto" (native bfloat16 if the device has it, else
            native float16, else bfloat16; rank 0 decides for all).
        device: Device type for autocast; `None` for the strategy's.
        scaler: A `torch.amp.GradScaler` whose settings and state are copied; the arguments from
            `init_scale` to `max_scale` then stay at their defaults.
        init_scale: Scale at the start.
        growth_factor: Factor at growth, above 1.
        backoff_factor: Factor at an overflow, between 0 and 1.
        growth_interval: Batches in a row with an applied update and no overflow before growth.
        dynamic: `False` keeps the scale at `init_scale`.
        hysteresis: The n-th overflow since the last growth backs off, and each further one until
            growth refills it (Megatron-LM's rule).
        min_scale: Lower bound of the scale; `None` for none.
        max_scale: Upper bound of the scale; `None` for none.
        backoff_on_nonfinite_loss: Back off also when the loss itself was inf or NaN. Such a loss does
            not depend on the scale, so by default it leaves the scale alone.
        max_consecutive_skips: `SkipLimitError` at the n-th skip in a row of one optimizer; `None`
            for never.
        on_limit: What happens at `max_consecutive_skips`: "raise" ends the run; "bf16-mixed" or
            "32-true" lets the rest of it go on in that precision, with one warning. Checkpoints keep
            this, so a resumed run goes on in it whatever `precision` says; as many skips in a row
            once more end it.
        error_if_nonfinite: Debugging: the first skip raises `NonFiniteGradientError`.
        bf16_guard: Under bfloat16 skip an update with a non-finite gradient instead of applying it.
            Costs one host read per step, and one walk over the gradients where clipping by norm does
            not read them anyway.
        fp32_modules: Names or `fnmatch` patterns of modules that run in float32 with autocast off;
            "!" takes names away again: `["*", "!encoder.*"]`. Forward only.
        weight_cache: Let autocast keep each weight's cast within one forward pass. Saves casts when
            a weight is used several times, but sums its gradient in float16 on the cast: 4096 ones
            gave 2048, and 16 times 8192 gave inf. Casts are made anew after each optimizer step; an
            edit of a weight by hand between two forward passes of one training step needs
            `torch.clear_autocast_cache()` after it.
        sync_found_inf: Whether ranks agree by an all-reduce of their own. "auto" adds one of two
            numbers per attempt, except under plain DDP in automatic optimization (no communication
            hook, no ignored or later-thawed parameters), where the gradients spread an inf; after a
            skip one more agrees the blame. False: no collective at all, and ranks may part (under
            plain DDP at a NaN loss on one of them).

    Raises:
        ValueError: An argument is out of range; the message names it.
        TypeError: An argument has the wrong type; the message names it.
        MisconfigurationException: At set-up, when the combination cannot work.

    Host sync: one scalar per attempt, after a skip one more for the losses. None for torch's fused
        Adam and AdamW in automatic optimization on one process, unless clipping by norm reads it or
        somebody needs the outcome at once: attempts are then read at log steps, schedules,
        validation, checkpoints, the end of an epoch, and every 32 attempts.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", plugins=[SafeAMP()], logger=False)
        >>> trainer.precision
        '16-mixed'
    """

    guard_types = GUARD_TYPES

    misconfiguration = MisconfigurationException
    lightning_base = MixedPrecision
