# SPDX-License-Identifier: Apache-2.0
"""SafeFSDP: the precision plugin for FSDP1, Lightning's `FSDPStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as ShardPrecision
from torch.nn import Module
from torch.optim import Optimizer

from lightning_amp_guard import _upstream
from lightning_amp_guard.guards import GUARD_TYPES
from lightning_amp_guard.plugin.plugin import AmpPlugin

__all__ = ["SafeFSDP", "SafeFSDPCore"]


class SafeFSDPCore(AmpPlugin):
    """`SafeFSDP` without its Lightning base class; see there."""

    namespace: ClassVar[str] = "lightning_amp_guard"
    trainer_name: ClassVar[str] = "lightning.pytorch.Trainer"
    _desired_input_dtype = torch.float32
    clips_locally = False

    @property
    def mixed_precision_config(self) -> ShardPrecision:
        """What FSDP casts: parameters in forward, while gradients are reduced in float32.

        Inputs stay as they are: autocast casts what is safe, while FSDP would cast the whole batch,
        where values above 65504 become inf.
        """
        if self.precision == "auto":
            # asked before `resolve` where there is a `configure_model`; rank 0 chooses for all
            native = [_upstream.native_low_precision(self.device)]
            if dist.is_initialized():
                dist.broadcast_object_list(native)
            self.settle_precision(*native[0])
        half = self.autocast_dtype()
        return ShardPrecision(
            param_dtype=half,
            reduce_dtype=torch.float32,
            buffer_dtype=half,
            cast_root_forward_inputs=False,
        )

    def _prepare(self) -> None:
        if self.settings.on_limit != "raise":
            raise ValueError(
                f"`{self._name()}(on_limit={self.settings.on_limit!r})`: FSDP1 fixes the dtype of its"
                ' units when they are made. Expected "raise". Restart from the last checkpoint with'
                f' `{self._name()}(precision="bf16-mixed")`, or use `SafeAMP` with'
                " `ModelParallelStrategy` (FSDP2)."
            )
        super()._prepare()

    def fall_back(self, precision: str) -> None:
        """Stay in the precision of the units; only a checkpoint can ask for another.

        Raises:
            MisconfigurationException: The units were made for another precision.
        """
        if precision != self.precision:
            raise self.fail(
                f"`{self._name()}(precision={self.settings.precision!r})`: the checkpoint's run had"
                f" gone over to {precision!r}, and FSDP1 fixes the dtype of its units when they are"
                f" made. Expected the same precision. Write"
                f' `{self._name()}(precision="bf16-mixed")`.'
            )
        self.switched = precision

    def connect(self, model: Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Begin a fit; every module of `fp32_modules` has to be an FSDP unit by now.

        Raises:
            MisconfigurationException: One is not, and the message names it; or nothing is sharded.
        """
        units = [unit for unit in model.modules() if isinstance(unit, FullyShardedDataParallel)]
        if not units:
            raise self.fail(
                f"`{self._name()}`: the model holds no FSDP1 unit; the strategy is"
                f" `{type(self.trainer.strategy).__name__}`. Expected `FSDPStrategy`. Everywhere else"
                " write `plugins=[SafeAMP()]`."
            )
        self._keep_in_float32(units, {m: _upstream.plain_name(n) for n, m in model.named_modules()})
        result = super().connect(model, optimizers, lr_schedulers)
        if self.engine is not None:
            self.engine.total_norm = self._norm_over_shards
        return result

    def _keep_in_float32(
        self, units: list[FullyShardedDataParallel], names: dict[Module, str]
    ) -> None:
        for unit in units:
            if self._runs_in_float32(names[unit]):
                _upstream.keep_unit_in_float32(unit)
                continue
            for name in [names[part] for part in _upstream.modules_of_unit(unit)]:
                if self._runs_in_float32(name):
                    raise self.fail(
                        f"`{self._name()}(fp32_modules=...)`: the module {name!r} is not an FSDP unit"
                        " of its own, so its parameters are cast together with its neighbours'."
                        " Expected a unit. Name its class in"
                        " `FSDPStrategy(auto_wrap_policy={...})`."
                    )

    def _runs_in_float32(self, name: str) -> bool:
        """Return whether `fp32_modules` chose the module, or the nearest one around that it names."""
        chosen = {} if self._scopes is None else self._scopes.chosen
        without = [p[1:] for p in self.settings.fp32_modules if p.startswith("!")]
        while name and name not in chosen:
            if any(fnmatchcase(name, pattern) for pattern in without):
                return False
            name = name.rpartition(".")[0]
        return bool(name)

    def _norm_over_shards(self, grads: list[Tensor]) -> Tensor:
        """Return the total L2 norm, this rank's shards and the others' together."""
        strategy = self.trainer.strategy
        sharded = {id(grad) for grad in _upstream.sharded_grads(strategy.model)}
        parts = [[g for g in grads if (id(g) in sharded) is here] for here in (True, False)]
        ours, whole = [
            _upstream.total_norm(part).float().to(strategy.root_device) ** 2 for part in parts
        ]
        units = FullyShardedDataParallel.fsdp_modules(strategy.model)
        dist.all_reduce(ours, group=units[0].process_group)
        return (ours + whole).sqrt()

    def _adapted(self, entry: Any) -> Any:
        if not isinstance(entry, Mapping) or not entry.get("window"):
            return entry
        self.warn(
            "The checkpoint was written inside an accumulation window by a run that was not sharded,"
            " and FSDP1's shards cannot take its gradients: the window begins anew, with fewer"
            " micro-batches. Resume from a checkpoint that was saved after a step to keep windows"
            " whole."
        )
        return {**entry, "window": None}

    def parameter_names(self) -> dict[int, str]:
        """Return the module's parameter names by `id(parameter)`, without the parts FSDP adds."""
        return {key: _upstream.plain_name(name) for key, name in super().parameter_names().items()}

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward pass, on the strategy's device."""
        return self.autocast_context_manager()

    def convert_input(self, data: Any) -> Any:
        """Leave inputs in float32; FSDP and autocast cast what is safe."""
        return super().convert_input(data)

    def _run_backward(self, model: Any, run: Callable[[], Any]) -> None:
        self._probe.run(model, run, sharded=True)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the total L2 norm over all shards. Host sync: none; one all-reduce.

        Through FSDP's own method, which clips all parameters together; with several optimizers, or
        a model that is not wrapped as a whole, in the same way but each optimizer for itself.
        """
        root = self.trainer.strategy.model
        if isinstance(root, FullyShardedDataParallel) and len(self.trainer.optimizers) == 1:
            norm = root.clip_grad_norm_(clip_val)
        else:
            params = [p for p in self.main_params(optimizer) if p.grad is not None]
            norm = self._norm_over_shards([p.grad for p in params if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, norm)
        self._keep_norm(optimizer, norm)

    def __repr__(self) -> str:
        """Return the call that makes the plugin, and where it belongs."""
        return (
            f"SafeFSDP(precision={self.settings.precision!r}) [`from {self.namespace} import"
            f" SafeFSDP`, for `{self.trainer_name}(strategy=FSDPStrategy(...), plugins=[SafeFSDP()])`"
            " without `precision=`; everywhere else take `SafeAMP`]"
        )


class SafeFSDP(SafeFSDPCore, FSDPPrecision):  # type: ignore[misc]  # the mixin takes any model
    """Trains under FSDP1 with the rules, arguments and guards of `SafeAMP`.

    `Trainer(strategy=FSDPStrategy(...), plugins=[SafeFSDP()])`. Beyond `SafeAMP`: gradients are
    reduced over ranks in float32 (stock reduces them in float16, where a sum overflows that no rank's
    gradient does); clipping by norm goes through FSDP's own method, which knows the shards (stock
    refuses it); autocast runs on the strategy's device (stock hard-codes "cuda"); and the scaler's
    settings are taken (stock raises on any scaler). FSDP2 (`ModelParallelStrategy`) takes `SafeAMP`.

    Args:
        args: As for `SafeAMP`. `fp32_modules` may only choose modules that are FSDP units of their own.

    Raises:
        ValueError: An argument is out of range; the message names it.
        TypeError: An argument has the wrong type; the message names it.
        MisconfigurationException: At set-up, when the combination cannot work.

    Host sync: as for `SafeAMP`; one all-reduce of two numbers per attempt.

    Example:
        >>> SafeFSDP(precision="bf16-mixed").precision
        'bf16-mixed'
    """

    guard_types = GUARD_TYPES
    misconfiguration = MisconfigurationException
    lightning_base = FSDPPrecision
