# SPDX-License-Identifier: Apache-2.0
"""Follows non-finite values through one step, operator by operator, from where they were made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.locate.sites import Site, Sites
from lightning_amp_guard.diagnosis.locate.values import (
    Values,
    covers_its_memory,
    has_nan,
    is_finite,
    values_of,
)

__all__ = ["Origin", "Tracer"]

# Operators that hand out memory with whatever was in it.
_UNWRITTEN = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("resize_", "resize"),
}
# Operators that write to a tensor without reading it.
_PURE_WRITES = {
    *("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_"),
    *("exponential_", "geometric_", "log_normal_", "cauchy_"),
}
# Where a mask of -inf ends: a row that is -inf throughout becomes NaN here, or, where softmax is
# written by hand, in `x - x.max()`.
_SOFTMAX = ("softmax", "logsumexp", "attention")
_BY_HAND = ("aten.sub.", "aten.sub_.")


@dataclass(frozen=True)
class Origin:
    """Says where a non-finite value came into being.

    Args:
        site: The operator that made it of finite inputs.
        result: What it wrote.
        inputs: What it read.
        subject: What was not finite before the step: "batch['x']", "parameter 'net.weight'"; or "".
        intended: Whether it was meant: a literal such as `masked_fill(mask, -inf)`, memory not yet
            written to, or a mask. It is to blame only if nothing else is.
        causes: The origins (by number) of what was hidden before and is harmful only here.
    """

    site: Site
    result: Values
    inputs: tuple[Values, ...] = ()
    subject: str = ""
    intended: bool = False
    causes: frozenset[int] = frozenset()


class _Read(NamedTuple):
    numbers: frozenset[int]
    holds_nan: bool
    values: tuple[Values, ...]


class Tracer:
    """Finds the origins of every non-finite value of a step. It keeps no tensors.

    An origin is an operator that made a non-finite value of finite inputs. What reads a non-finite
    value hands its origins on. Two exceptions make a new origin: NaN made of inf that was meant (a
    row masked out whole, in softmax), and a backward operator that reads what the forward pass had
    made and hidden (the branch of a `torch.where` that was not taken).

    Args:
        sites: Says where each operator was called.
    """

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.origins: list[Origin] = []
        self._made_by: dict[StorageWeakRef, frozenset[int]] = {}  # only what is not finite

    def add_input(self, tensor: Tensor, subject: str, module: str = "") -> None:
        """Take note of a tensor from outside of the step, if it is not finite. Host sync: one."""
        if not is_finite(tensor):
            values = values_of(tensor)
            self._put(tensor, self._add(Origin(Site(module), values, (), subject, not values.nan)))

    def origins_of(self, tensor: Tensor) -> frozenset[int]:
        """Return the numbers of the origins of what is not finite in a tensor. Host sync: one."""
        if is_finite(tensor):
            return frozenset()
        return self._look_up(tensor) or self._unseen(tensor, Site())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and follow what is not finite in it. Host sync: one, or a few."""
        inputs = _upstream.tensors_in((args, kwargs))
        site = self.sites.of_call(str(func), inputs)
        statistics = _upstream.unread_statistics(func, args, kwargs)
        inputs = [t for t in inputs if not _among(t, statistics)]
        if func.is_view:
            return func(*args, **kwargs)
        name = site.kernel.split(".")[1]
        written = _upstream.written_arguments(func, args, kwargs)
        written = [t for t in written if not _among(t, statistics)]
        before = self._read(inputs, written, site, name) if written else None
        result = func(*args, **kwargs)
        fresh = [t for t in _upstream.tensors_in(result) if not _among(t, written)]
        if name in _UNWRITTEN:
            for tensor in [*fresh, *written]:
                self._put(tensor, self._add(Origin(site, values_of(tensor), intended=True)))
            return result
        bad = [t for t in [*written, *fresh] if not is_finite(t)]
        numbers: frozenset[int] = frozenset()
        if bad:
            read = self._read(inputs, written, site, name) if before is None else before
            numbers = self._origins(bad, read, site, has_literal=_has_literal((args, kwargs)))
        self._note_written(written, bad, numbers)
        self._note_fresh(fresh, bad, numbers, inputs)
        return result

    def _read(self, inputs: list[Tensor], written: list[Tensor], site: Site, name: str) -> _Read:
        numbers: frozenset[int] = frozenset()
        holds_nan, values = False, []
        for tensor in inputs:
            overwritten = name in _PURE_WRITES or self._is_unwritten(tensor)
            if _among(tensor, written) and overwritten:
                continue
            if not is_finite(tensor):
                constant = name == "lift_fresh"  # `torch.tensor(float("-inf"))`
                numbers |= self._look_up(tensor) or self._unseen(tensor, site, constant=constant)
                holds_nan |= has_nan(tensor)
            values.append(values_of(tensor))
        return _Read(numbers, holds_nan, tuple(values))

    def _origins(
        self, bad: list[Tensor], read: _Read, site: Site, *, has_literal: bool
    ) -> frozenset[int]:
        new = Origin(site, values_of(bad[0]), read.values)
        if not read.numbers:
            return self._add(replace(new, intended=has_literal))
        causes = [self.origins[i] for i in read.numbers]
        made_before = all([cause.site.direction == "forward" for cause in causes])
        hidden = site.direction == "backward" and made_before
        in_softmax = any([part in site.kernel for part in _SOFTMAX]) or (
            site.kernel.startswith(_BY_HAND) and not any([cause.subject for cause in causes])
        )
        meant = all([cause.intended for cause in causes])
        made_nan = not read.holds_nan and any([has_nan(tensor) for tensor in bad])
        if hidden or (meant and made_nan and in_softmax):
            return self._add(replace(new, causes=read.numbers))
        return read.numbers

    # -------------------------------------------------------------------- who made which memory

    def _note_written(
        self, written: list[Tensor], bad: list[Tensor], numbers: frozenset[int]
    ) -> None:
        for tensor in written:
            whole = covers_its_memory(tensor)
            if _among(tensor, bad):
                self._put(tensor, numbers if whole else numbers | self._look_up(tensor))
            elif whole and (key := _key(tensor)) is not None:
                self._made_by.pop(key, None)

    def _note_fresh(
        self,
        fresh: list[Tensor],
        bad: list[Tensor],
        numbers: frozenset[int],
        inputs: list[Tensor],
    ) -> None:
        known = {_key(tensor) for tensor in inputs} if bad else set()
        for tensor in fresh:
            if _among(tensor, bad) and _key(tensor) not in known:
                self._put(tensor, numbers)

    def _unseen(self, tensor: Tensor, site: Site, *, constant: bool = False) -> frozenset[int]:
        values, maker = values_of(tensor), self.sites.of_maker(tensor)
        subject = "" if constant or maker else "a tensor that no operator of this step made"
        meant = not maker and (constant or not values.nan)
        numbers = self._add(Origin(maker or site, values, (), subject, meant))
        self._put(tensor, numbers)
        return numbers

    def _is_unwritten(self, tensor: Tensor) -> bool:
        kernels = [self.origins[i].site.kernel for i in self._look_up(tensor)]
        return bool(kernels) and all([f"{k}..".split(".")[1] in _UNWRITTEN for k in kernels])

    def _add(self, origin: Origin) -> frozenset[int]:
        self.origins.append(origin)
        return frozenset({len(self.origins) - 1})

    def _put(self, tensor: Tensor, numbers: frozenset[int]) -> None:
        if (key := _key(tensor)) is not None:
            self._made_by[key] = numbers

    def _look_up(self, tensor: Tensor) -> frozenset[int]:
        key = _key(tensor)
        return frozenset() if key is None else self._made_by.get(key, frozenset())


def _key(tensor: Tensor) -> StorageWeakRef | None:
    try:
        (plain,) = _upstream.as_plain([tensor.values() if tensor.is_nested else tensor.detach()])
        return StorageWeakRef(plain.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # a layout without memory of its own
        return None


def _among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any([tensor is other for other in tensors])


def _has_literal(arguments: Any) -> bool:
    numbers = [leaf for leaf in _upstream.leaves_in(arguments) if isinstance(leaf, float)]
    return not all([math.isfinite(number) for number in numbers])
