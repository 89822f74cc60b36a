# SPDX-License-Identifier: Apache-2.0
"""Content hashes: equal for equal contents, and different for any other."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_amp_guard.monitor.ledger.content import batch_hash, content_hash, hexadecimal


def told(batch):
    found = batch_hash(batch)
    return None if found is None else hexadecimal(int(found))


def numbers(n, dtype=torch.float32):
    return torch.arange(1, n + 1).to(dtype)


LENGTHS = [1, 7, 2050, 5001]  # a tail only; words and a tail; one summed row and more; several


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.uint8])
def test_equal_contents_have_equal_hashes_wherever_they_lie(n, dtype):
    one = numbers(n, dtype)
    padded = torch.cat([one[:1], one])  # the copy begins one element into its memory
    strided = torch.stack([one, one], dim=1)[:, 0]
    assert told(one) == told(one.clone()) == told(padded[1:]) == told(strided)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int16])
def test_one_bit_more_or_less_is_another_content(n, dtype):
    one = numbers(n, dtype)
    seen = {told(one)}
    for at in {0, n // 2, n - 1}:
        for bit in (0, 7):  # the lowest bit, and the sign
            other = one.clone()
            data = other.view(torch.uint8)
            size = one.element_size()
            data[at * size + (size - 1 if bit else 0)] ^= 1 << bit
            seen.add(told(other))
    assert len(seen) == 1 + 2 * len({0, n // 2, n - 1})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([5, 7, 9]), torch.tensor([6, 5, 10])),  # equal sums, and sums by position
        (numbers(4), numbers(4).flip(0)),
        (numbers(5000), numbers(5000).roll(1)),
        (numbers(4, torch.float64), -numbers(4, torch.float64)),
        (numbers(8192, torch.float64), -numbers(8192, torch.float64)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (numbers(6).view(2, 3), numbers(6).view(6, 1)),
        (numbers(6).view(2, 3), numbers(6).view(3, 2)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3), torch.zeros(4)),
        (torch.empty(0), torch.empty(0, 2)),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        ([torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}),
        (["a", "b"], ["b", "a"]),
        ((torch.ones(1), 1), (torch.ones(1), 2)),
        (np.ones(3), np.ones(3, dtype=np.float32)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()),
    ],
    ids=str,
)
def test_another_content_has_another_hash(one, other):
    assert told(one) != told(other)
    assert None not in (told(one), told(other))


def test_whole_rows_that_trade_places_are_told_apart():
    rows = torch.arange(64.0)[:, None] * torch.ones(64, 2048)
    swapped = rows[[1, 0, *range(2, 64)]]
    assert told(rows) != told(swapped)


def test_keys_of_a_dict_are_in_no_order():
    a, b = torch.ones(2), torch.zeros(3)
    assert told({"a": a, "b": b}) == told({"b": b, "a": a}) == told(UserDict(a=a, b=b))
    assert told({"a": a, "b": b}) != told({"a": b, "b": a})


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_dataclasses_and_what_is_nested_count():
    assert told(Sample(torch.ones(2), "a")) != told(Sample(torch.ones(2), "b"))
    assert told([[{"x": (torch.ones(2),)}]]) != told([[{"x": (torch.zeros(2),)}]])


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to(torch.complex128).conj(),
        lambda x: (x * 1j).conj().imag,
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: x.fliplr().triu().to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.uint16),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.nn.Parameter(x),
        lambda x: x.to_mkldnn(),
    ],
)
def test_every_kind_of_tensor_has_a_hash_of_its_content(make):
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert told(make(one)) == told(make(one.clone())) is not None
    assert told(make(one)) != told(make(one + 1))


@pytest.mark.parametrize("batch", [None, [], {}, [None], object(), torch.empty(2, device="meta")])
def test_nothing_to_hash_is_no_hash(batch):
    assert told(batch) is None


def test_hash_waits_on_the_device_of_its_tensors():
    found = content_hash([torch.ones(3), torch.ones(2)])
    assert (found.shape, found.dtype) == ((), torch.int64)
    assert content_hash([]) is None


def test_contents_of_a_thousand_random_changes_are_all_different():
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 50, (3, 700), generator=generator)
    seen = {told(base)}
    for _ in range(1000):
        base = base.flatten()[torch.randperm(2100, generator=generator)].view(3, 700)
        seen.add(told(base))
    assert len(seen) == 1001


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_hexadecimal_has_sixteen_digits(value):
    text = hexadecimal(value)
    assert len(text) == 16
    assert int(text, 16) >= 0


def test_hexadecimal_tells_neighbours_apart_in_many_digits():
    one, other = hexadecimal(1), hexadecimal(2)
    assert sum(a != b for a, b in zip(one, other, strict=True)) >= 8
