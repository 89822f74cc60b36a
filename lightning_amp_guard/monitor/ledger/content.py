# SPDX-License-Identifier: Apache-2.0
"""Content hashes that are computed where the tensors lie and read with everything else."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_amp_guard import _upstream

__all__ = ["batch_hash", "content_hash", "hexadecimal"]

_ROW = 1023  # words of 64 bits summed into one; odd, so that the sign bits of a row do not cancel
_WORD = 8  # bytes
_NEXT = 0x100000001B3  # the prime of FNV-1a: one hash is chained to the next


def content_hash(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a hash of bit patterns, positions, shapes and dtypes: equal contents, equal hashes.

    Long tensors are laid out in rows of 64-bit words and summed by row and by column, and the sums,
    or the words of short ones, are mixed with their positions: a moved, swapped or changed element
    shows. Two reductions a long tensor, no copy of contiguous memory, the same number on every kind
    of device. Made for telling runs apart, not against somebody who wants two contents to look alike.

    Returns:
        A 0-dimensional int64 tensor on the first tensor's device; `None` without tensors.

    Host sync: none.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> bool(content_hash([one]) == content_hash([one.clone()]))
        True
        >>> bool(content_hash([one]) == content_hash([other]))
        False
    """
    words: list[Tensor] = []
    kinds = []
    with torch.no_grad():
        for tensor in tensors:
            for part in _strided(tensor):
                kinds.append(f"{part.dtype} {tuple(part.shape)}")
                words += _words(part)
        if not kinds:
            return None
        crc = zlib.crc32(" ".join(kinds).encode())
        if not words:
            return torch.tensor(crc, device="cpu")
        device = words[0].device
        numbers = torch.cat([part.to(device) for part in words])
        return _mixed(numbers + _noise(len(numbers), device)).sum() + crc


def _strided(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a sparse, quantized, complex or sharded one consists of."""
    if tensor.is_quantized:
        return [tensor.detach().int_repr()]
    if tensor.is_mkldnn:
        return [tensor.detach().to_dense()]
    if tensor.is_nested:
        return [part for one in tensor.detach().unbind() for part in _strided(one)]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [whole.indices(), *_strided(whole.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), *_strided(tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), *_strided(tensor.values())]
    if tensor.is_meta:
        return []
    return _upstream.as_plain([tensor.detach().resolve_conj().resolve_neg()])


def _words(tensor: Tensor) -> list[Tensor]:
    """Return the content as int64 vectors that are short, and known in length from the shape."""
    flat = tensor.contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = data.numel() // _WORD * _WORD
    words, tail = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    summed = words.numel() // _ROW * _ROW
    parts = [words[summed:], tail]
    if summed:
        rows = words[:summed].view(-1, _ROW)
        parts += [rows.sum(0), rows.sum(1)]
    return [part for part in parts if part.numel()]


def _noise(n: int, device: torch.device) -> Tensor:
    """Return `n` numbers without a pattern, one for each position."""
    return _noise_up_to(max(_ROW + 1, 1 << (n - 1).bit_length()), device)[:n]


@lru_cache(maxsize=8)
def _noise_up_to(n: int, device: torch.device) -> Tensor:
    positions = torch.arange(1, n + 1, dtype=torch.int64, device="cpu")
    return _mixed(positions * _signed(0x9E3779B97F4A7C15)).to(device)


def _mixed(x: Tensor) -> Tensor:
    """Return every number mixed so that each of its bits counts (splitmix64, OOPSLA 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # without copies of the sign


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def batch_hash(batch: Any) -> Tensor | None:
    """Return the content hash of a nested batch: tensors, arrays, text, numbers and keys.

    Objects of other kinds do not count. Host sync: none.

    Returns:
        A 0-dimensional int64 tensor; `None` where the batch holds nothing that counts.
    """
    tensors, texts = [], []
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        else:
            texts.append(leaf)
    total = content_hash(tensors)
    if not texts:
        return total
    crc = zlib.crc32(b"".join(texts))
    return torch.tensor(crc, device="cpu") if total is None else total * _NEXT + crc


def _leaves(value: Any) -> Iterator[Tensor | bytes]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (str, bytes, bool, int, float)):
        yield f"{value!r};".encode(errors="surrogatepass")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield f"{key!r}:".encode(errors="surrogatepass")
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _leaves(getattr(value, f.name))
    elif hasattr(value, "__array_interface__"):  # numpy's, or something as close to it
        yield from _leaves_of_array(value)


def _leaves_of_array(array: Any) -> Iterator[Tensor | bytes]:
    if array.dtype.hasobject:
        yield from _leaves(array.tolist())
    else:
        yield f"{array.dtype} {array.shape};".encode()
        yield array.tobytes()


def hexadecimal(value: int) -> str:
    """Return a hash as 16 hexadecimal digits, its bits mixed (MurmurHash3's 64-bit finalizer)."""
    mask = (1 << 64) - 1
    value &= mask
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = ((value ^ value >> 33) * factor) & mask
    return f"{value ^ value >> 33:016x}"
