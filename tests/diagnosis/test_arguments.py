# SPDX-License-Identifier: Apache-2.0
"""What is no batch is refused with the line to write, and what may be one is not."""

import dataclasses
from collections import UserDict, UserList, namedtuple
from types import SimpleNamespace

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lightning_amp_guard import (
    compare_precisions,
    estimate_memory,
    locate_nonfinite,
    profile_dtypes,
    recommend_precision,
    scan_batch,
)
from lightning_amp_guard.diagnosis.arguments import check_batch
from lightning_amp_guard.diagnosis.batch import scan

NET = torch.nn.Linear(2, 1)
X = torch.ones(3, 2)
NAN_SET = TensorDataset(torch.full((4, 2), float("nan")))
LOADER = DataLoader(NAN_SET, batch_size=2)


def loss(module, batch):
    return module(X).sum()


STEPS = {
    "locate_nonfinite": lambda m, b: locate_nonfinite(m, b, loss_fn=loss),
    "compare_precisions": lambda m, b: compare_precisions(m, b, loss_fn=loss, steps=1),
    "profile_dtypes": lambda m, b: profile_dtypes(m, b, loss_fn=loss),
}
CALLS = {
    **{name: (call, f"{name}(module, {{}})") for name, call in STEPS.items()},
    "estimate_memory": (
        lambda m, b: estimate_memory(m, batch=b, loss_fn=loss),
        "estimate_memory(module, batch={})",
    ),
    "scan_batch": (lambda m, b: scan_batch(b), "scan_batch({})"),
}


class Endless(IterableDataset):
    def __iter__(self):
        raise AssertionError("iterated")


class Prefetcher:
    """A loader around a loader."""

    def __init__(self, loader):
        self.loader, self.stream = loader, None

    def __iter__(self):
        raise AssertionError("iterated")


class OwnLoader:
    """A loader that makes its batches as it goes."""

    def __init__(self, batch_size=4):
        self.batch_size = batch_size

    def __iter__(self):
        raise AssertionError("iterated")


class Data(L.LightningDataModule):
    def train_dataloader(self):
        raise AssertionError("called")


def generator():
    yield X


LOADERS = {
    "loader": (LOADER, "next(iter(loader))"),
    "combined": (CombinedLoader({"a": LOADER}), "next(iter(loader))"),
    "prefetcher": (Prefetcher(LOADER), "next(iter(loader))"),
    "own loader": (OwnLoader(), "next(iter(loader))"),
    "sampler": (BatchSampler([0, 1], 1, False), "next(iter(loader))"),
    "data set": (NAN_SET, "next(iter(DataLoader(dataset, batch_size=4)))"),
    "iterable data set": (Endless(), "next(iter(DataLoader(dataset, batch_size=4)))"),
    "loader's iterator": (iter(LOADER), "next(iter(loader))"),
    "generator": (generator(), "next(iterator)"),
    "zip": (zip([X], [X], strict=True), "next(iterator)"),
    "list's iterator": (iter([X]), "next(iterator)"),
    "data module": (Data(), "next(iter(datamodule.train_dataloader()))"),
    "module": (NET, "batch"),
    "class": (SimpleNamespace, "SimpleNamespace(...)"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", LOADERS)
def test_what_is_no_batch_is_refused_with_the_line_to_write(name, given):
    (call, line), (value, instead) = CALLS[name], LOADERS[given]
    with pytest.raises(TypeError) as caught:
        call(NET, value)
    said = str(caught.value)
    kind = "SimpleNamespace" if given == "class" else f"<{type(value).__name__}>"
    assert said.startswith(f"`{name}(batch={kind})`: `batch` is ")
    assert said.endswith(
        f"Expected one batch, as `training_step` gets it. Write `{line.format(instead)}`."
    )


def test_refused_iterators_are_not_used_up():
    rows = iter([X])
    with pytest.raises(TypeError):
        scan_batch(rows)
    assert next(rows) is X


@pytest.mark.parametrize("name", STEPS)
def test_module_and_batch_swapped_are_named_both(name):
    for batch, kind in ((X, "Tensor"), (LOADER, "DataLoader")):
        with pytest.raises(TypeError) as caught:
            STEPS[name](batch, NET)
        assert str(caught.value) == (
            f"`{name}(module=<{kind}>)`: `module` is a `{kind}`, and `batch` is the module <Linear>."
            f" Expected them the other way round. Write `{name}(module, batch)`."
        )


@pytest.mark.parametrize("name", STEPS)
def test_the_class_of_a_module_is_refused(name):
    with pytest.raises(TypeError) as caught:
        STEPS[name](torch.nn.Linear, X)
    assert str(caught.value) == (
        f"`{name}(module=Linear)`: `module` is the class `Linear`. Expected a `torch.nn.Module`."
        f" Write `{name}(Linear(...), batch)`."
    )


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("wrong", [None, 3, "net", X])
def test_what_is_no_module_is_refused(name, wrong):
    with pytest.raises(TypeError, match=rf"^`{name}\(module=.*Expected a `torch.nn.Module`"):
        STEPS[name](wrong, X)


def test_memory_of_a_class_or_of_a_swapped_pair_is_refused():
    with pytest.raises(
        TypeError, match=r"`estimate_memory\(module=Linear\)`: `module` is the class"
    ):
        estimate_memory(torch.nn.Linear)
    with pytest.raises(TypeError, match="`batch` is the module <Linear>"):
        estimate_memory(X, batch=NET)
    with pytest.raises(TypeError, match=r"expected a module or a whole number.*got DataLoader"):
        estimate_memory(LOADER)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (NAN_SET, "recommend_precision(module, DataLoader(dataset, batch_size=4))"),
        (Data(), "recommend_precision(module, datamodule.train_dataloader())"),
        (torch.nn.Sequential(NET), "recommend_precision(module, [batch])"),
        ([LOADER], "recommend_precision(module, loader)"),
    ],
)
def test_recommendation_from_what_yields_no_batches_is_refused(given, part):
    with pytest.raises(TypeError) as caught:
        recommend_precision(NET, given, loss_fn=loss, steps=2)
    assert f"rite `{part}`" in str(caught.value)


def test_recommendation_of_a_swapped_pair_is_refused():
    with pytest.raises(
        TypeError, match=r"other way round.*`recommend_precision\(module, batches\)`"
    ):
        recommend_precision(LOADER, NET, loss_fn=loss)


# ---------------------------------------------------------------------- what may be a batch


@dataclasses.dataclass
class Sample:
    x: torch.Tensor


@dataclasses.dataclass
class Texts:
    texts: list[str]

    def __iter__(self):
        return iter(self.texts)


class Iterated:
    """As batches of graphs: can be iterated over, and holds its tensors in a store."""

    def __init__(self, **fields):
        self._store = UserDict(fields)
        self._dataset = NAN_SET

    def __iter__(self):
        return iter(self._store.items())


class ItsOwnIterator(Iterated):
    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


class Opaque(UserDict):
    pass


BATCHES = [
    X,
    X.long(),
    [X, X],
    (X, {"y": X}),
    {"x": X},
    UserDict(x=X),
    UserList([X]),
    {1, 2},
    namedtuple("Pair", "x y")(X, X),
    Sample(X),
    Texts(["a", "b"]),
    SimpleNamespace(x=X),
    Iterated(x=X),
    Iterated(x=X.long()),
    Iterated(x=np.arange(3)),
    ItsOwnIterator(x=X.long()),
    Opaque(x=X),
    pack_sequence([X]),
    np.ones(3),
    np.arange(3),
    memoryview(b"12"),
    ["text"],
    "text",
    None,
    1.0,
    [],
    [LOADER],
    {"loader": iter([X])},
    object(),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_what_may_be_a_batch_is_taken_for_one(batch):
    check_batch("scan_batch", batch, "scan_batch({})")
    scan_batch(batch)


@pytest.mark.parametrize("batch", [Sample(X), Iterated(x=X), [X, X], {"x": X}])
def test_batches_of_any_build_reach_the_loss(batch):
    seen = []
    locate_nonfinite(NET, batch, loss_fn=lambda m, b: (seen.append(type(b)), m(X).sum())[1])
    assert set(seen) == {type(batch)}


def test_loaders_and_iterators_of_batches_are_right_for_a_recommendation():
    loader = DataLoader(TensorDataset(X), batch_size=3)
    for batches in (loader, iter([X, X]), [X], Prefetched([X])):
        assert recommend_precision(NET, batches, loss_fn=loss, steps=2).precision


class Prefetched(Prefetcher):
    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize("given", LOADERS)
def test_what_a_training_step_was_given_is_scanned_whatever_it_is(given):
    assert not scan(LOADERS[given][0])  # guards and monitor must not fail in the middle of a run
