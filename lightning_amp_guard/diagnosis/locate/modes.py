# SPDX-License-Identifier: Apache-2.0
"""Lets a tracer see every operator of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.locate.sites import Sites
from lightning_amp_guard.diagnosis.locate.trace import Tracer

__all__ = ["traced"]


class _Functions(TorchFunctionMode):
    """Notes the autocast scope before each torch function."""

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sites.see_autocast()
        return func(*args, **(kwargs or {}))


class _Operators(_upstream.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets the tracer run every operator."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.run(func, args, kwargs or {})


@contextmanager
def traced(tracer: Tracer) -> Iterator[None]:
    """Let the tracer see every operator that runs inside, forward and backward."""
    with _Functions(tracer.sites), _Operators(tracer):
        yield
