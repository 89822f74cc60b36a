# SPDX-License-Identifier: Apache-2.0
"""TokenClock: time in valid tokens, and gradients per token however uneven the micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream
from lightning_amp_guard.arguments.checks import flag
from lightning_amp_guard.arguments.named import names_its_class
from lightning_amp_guard.guards._base import Guard, GuardCore, Host
from lightning_amp_guard.outcome import StepOutcome
from lightning_amp_guard.state import is_count, read
from lightning_amp_guard.token_counts.contents import check_rows
from lightning_amp_guard.token_counts.count import (
    AVERAGED,
    IGNORED,
    count_labels,
    count_meant,
    is_whole,
)
from lightning_amp_guard.token_counts.windows import TokenWindows

__all__ = ["TokenClock", "TokenClockCore"]


class TokenClockCore(GuardCore):
    """See `TokenClock`."""

    name = "TokenClock"
    takes_late_outcomes = True

    @names_its_class
    def __init__(
        self,
        count: Callable[[Any], int | Tensor] | None = None,
        normalize_gradients: bool = False,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if count is not None and not callable(count):
            raise TypeError(
                f"`{owner}(count={count!r})`: expected a function of a batch that returns its number"
                " of valid tokens, or None to count the labels that are not -100. Write"
                f" `{owner}({count_meant(count)})`."
            )
        self.count = count
        self.normalize_gradients = flag(owner, "normalize_gradients", normalize_gradients)
        self._total: Tensor | int = 0
        self._seen: Tensor | int = 0
        self._windows: TokenWindows | None = None
        self._replicas = 1

    @property
    def total(self) -> int:
        """Valid tokens of all ranks behind the applied updates of optimizer 0. Host sync: one."""
        if self._windows is not None and (settle := self._windows.settle()) is not None:
            settle()
        return int(self._total)

    @property
    def seen(self) -> int:
        """Valid tokens of this process's batches, skipped or not, for throughput. Host sync: one."""
        return int(self._seen)

    # ------------------------------------------------------------------ life cycle

    def attach(self, host: Host) -> None:
        """Begin to count; the total of an earlier fit goes on.

        Raises:
            MisconfigurationException: Steps or batches of this set-up cannot be followed.
        """
        self.detach()
        self._refuse_untraceable(host)
        super().attach(host)
        trainer, engine = host.trainer, host.running()
        automatic = host.module.automatic_optimization  # by hand, Lightning divides no loss
        self._windows = TokenWindows(
            lambda: int(trainer.accumulate_grad_batches) if automatic else 1,
            trainer.strategy.root_device,
            ranks=trainer.world_size,
            normalize=self.normalize_gradients,
            settle=lambda: engine.windows.settle if engine.late.waiting else None,
            owner=type(self).__name__,
        )
        sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        # ranks that hold parts of one model (tensor parallel) see one batch
        self._replicas = sampling.get("num_replicas", trainer.world_size)
        engine.inspection.adjusters.append(self._windows.adjust)
        engine.windows.listener = self._windows

    def _refuse_untraceable(self, host: Host) -> None:
        owner = f"`{type(self).__name__}()`"
        if host.unguarded():
            raise host.fail(
                f"{owner}: optimizer {min(host.unguarded())} needs its closure, so it makes no"
                " attempts to follow. Expected optimizers whose `step()` works without one, or no"
                " clock."
            )
        if "dataloader_iter" in inspect.signature(host.module.training_step).parameters:
            raise host.fail(
                f"{owner}: `training_step(dataloader_iter)` draws its batches itself, unseen by others."
                " Expected `training_step(batch, batch_idx)`. Change it, or remove the callback."
            )

    def detach(self) -> None:
        """Stop counting; `total` stays."""
        engine = None if self.host is None else self.host.engine
        if engine is not None and engine.windows.listener is self._windows is not None:
            engine.inspection.adjusters.remove(self._windows.adjust)
            engine.windows.listener = None
        self._windows, self._replicas = None, 1
        super().detach()

    # ------------------------------------------------------------------ batches

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's valid tokens. Host sync: none."""
        if self.host is None or self._windows is None:
            return
        n = count_labels(batch) if self.count is None else self.count(batch)
        device = trainer.strategy.root_device
        if isinstance(n, Tensor) and n.dim() == 0 and is_whole(n):
            tokens = _upstream.whole(n.detach()).to(device, torch.int64, non_blocking=True)
        elif n is not None and is_count(n):
            tokens = torch.full((), int(n), dtype=torch.int64, device=device)
        else:
            raise self.host.fail(self._refusal(n, batch))
        self._windows.batch, self._seen = tokens, self._seen + tokens

    def see_batch(self, batch: Any) -> None:
        """Have a look at the first loss, where gradients are to be divided."""
        if self.host is not None and self.normalize_gradients:
            self.host.hear("loss", self._look_at_loss)

    def _look_at_loss(self, loss: Tensor) -> None:
        """Warn of a loss that is a mean over its tokens already, once a fit. Host sync: none."""
        if (host := self.host) is None:
            return
        host.unhear(self._look_at_loss)
        node = _upstream.averaging_node(loss, divided=host.module.automatic_optimization)
        if node:
            host.warn(AVERAGED.format(owner=type(self).__name__, node=node))

    def _refusal(self, n: Any, batch: Any) -> str:
        owner = type(self).__name__
        if self.count is not None:
            return (
                f"`{owner}(count=...)`: `count(batch)` returned {n!r}. Expected the number of valid"
                " tokens: an int of at least 0, or an integer tensor without dimensions. Write for"
                ' example `count=lambda batch: batch["mask"].long().sum()`.'
            )
        keys = f" with the keys {list(batch)!r}" if isinstance(batch, Mapping) else ""
        if isinstance(batch, tuple | list):
            keys = f" of {', '.join(type(part).__name__ for part in batch)}"
        return (
            f"`{owner}()`: the training batch is a `{type(batch).__name__}`{keys}, in which no"
            ' integer labels were found. Expected `batch["labels"]`, `batch.labels`, or class numbers'
            f" as second element, with {IGNORED} where nothing is to be predicted. Say how tokens are"
            f' counted: `{owner}(count=lambda batch: batch["mask"].long().sum())`.'
        )

    # ------------------------------------------------------------------ the attempt

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Advance `total` by an applied update of optimizer 0. Host sync: none."""
        if self.host is None or self._windows is None:
            return
        lane = self.host.running().windows.lanes[outcome.optimizer_idx]
        counted = outcome.applied and outcome.optimizer_idx == 0
        tokens = self._windows.conclude(lane, counted=counted)
        if counted and tokens is not None:
            self._total = self._total + tokens * self._replicas // self._windows.ranks

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> dict[str, Any]:
        """Return the total, and per cell what its gradients hold. Host sync: one per number."""
        rows: list[Any] = []
        if self.host is not None and self._windows is not None:
            rows = self._windows.rows(self.host.running().windows.cells)
        return {"total": self.total, "window": rows}

    def load(self, saved: Any) -> None:
        """Take up what `save` returned, the window only as far as its gradients come back.

        Raises:
            ScalerStateError: A value is impossible; the message names the key.
        """
        total = read(saved, "total", is_count, "a whole number of at least 0")
        rows = read(saved, "window", lambda v: isinstance(v, list), "a list")
        check_rows(rows)
        self._total = int(total)
        if self.host is not None and self._windows is not None:
            self._windows.take_up(self.host.running().windows.cells, rows)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle settings and total; what belongs to a running fit stays behind."""
        counts = {"_total": self.total, "_seen": self.seen}
        return {**super().__getstate__(), **counts, "_windows": None, "_replicas": 1}


class TokenClock(TokenClockCore, Guard):
    """Counts valid tokens, and lets a gradient be the mean over them however uneven the micro-batches.

    Lightning averages over micro-batches and ranks as if each held as many tokens, also in a short
    last window, so a token in a nearly empty micro-batch weighs more than others; and a schedule in
    steps knows nothing of tokens. The clock counts the tokens of each accumulation window over all
    ranks and advances with applied updates of optimizer 0 only. With `normalize_gradients=True` let
    the loss be the *sum* over valid tokens (`reduction="sum"`): its gradients are divided by the
    window's tokens, after unscaling and before hooks and clipping, and Lightning's division by
    `accumulate_grad_batches` and the mean over ranks are undone. So they equal those of one big
    batch. It does not touch the loss that is logged. A loss that is a mean would be divided twice,
    and train with gradients too small by the number of tokens: where the loss's last operation shows
    it (`mean()`, `reduction="mean"`, torch's default), the first batch of a fit warns of it.

    A micro-batch counts in the window of each optimizer that its backward pass reaches, once; not if
    `training_step` returned `None` for it. A window without any valid token is divided by 1. In
    manual optimization each optimizer has its own window, and gradients that outlive a step go
    on as in a longer window: the sum of all in them over all their tokens.

    Args:
        count: Returns a batch's number of valid tokens, an int or an integer tensor without
            dimensions (which may stay on the device). Default: the labels that are not -100, in
            `batch["labels"]`, `batch.labels` or an integer second element. If your model shifts
            labels, count the shifted ones: `lambda b: (b["labels"][:, 1:] != -100).sum()`.
        normalize_gradients: Divide the gradients by the window's tokens.

    Raises:
        TypeError: An argument has the wrong type.
        MisconfigurationException: At set-up, without this package's plugin or with an optimizer that
            needs its closure; at the first batch, if its tokens cannot be counted.
        AmpGuardError: With `normalize_gradients=True`, a gradient comes from no backward pass of
            Lightning's.

    Runs: at each batch's start, around each backward pass, before and after each attempt.
    Keeps: total and running window, in the plugin's checkpoint entry.
    Host sync: none, until somebody reads `total` or `seen`. Over ranks one all-reduce of a few
        counts per attempt, in which every rank takes part (an explicit `plugin.unscale_` has it then).

    Example:
        >>> clock = TokenClock()
        >>> warm_up = lambda step: min(1.0, clock.total / 1_000_000)  # for LambdaLR
        >>> warm_up(0)
        0.0
    """
