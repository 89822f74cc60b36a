# SPDX-License-Identifier: Apache-2.0
"""Inf and NaN found in batches of every build, with path, counts and first bad sample."""

import dataclasses
import math
from collections import UserDict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_guard.diagnosis import batch as module
from lightning_amp_guard.diagnosis.batch import BadField, scan_batch
from lightning_amp_guard.diagnosis.leaves import as_text, leaves_of

INF, NAN = math.inf, math.nan
BAD = torch.tensor([[1.0, 2.0], [NAN, 3.0], [INF, -INF]])
Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Sample:
    image: Any
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x",)
    x: Any


class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class WithSlots:
    __slots__ = ("empty", "x")

    def __init__(self, x):
        self.x = x


class Graph:
    """As graph libraries build them: attributes live in a store that is a mapping."""

    def __init__(self, **fields):
        self._store = UserDict(fields)

    def __getattr__(self, name):
        if name == "_store" or name not in self._store:
            raise AttributeError(name)
        return self._store[name]


class Frame:
    """As tables of other libraries: they turn into arrays."""

    def __init__(self, values):
        self.values = values
        self.reached = ["other", "attributes", NAN]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype=dtype)


def found(batch):
    """Counts by path: inf, -inf, NaN, first bad sample."""
    return {f.path: (f.inf, f.negative_inf, f.nan, f.first) for f in scan_batch(batch).fields}


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (BAD, "batch"),
        ({"image": BAD}, "batch['image']"),
        ({7: BAD}, "batch[7]"),
        ({("a", 1): BAD}, "batch[('a', 1)]"),
        ([torch.ones(2), BAD], "batch[1]"),
        ((torch.ones(2), {"y": [BAD]}), "batch[1]['y'][0]"),
        (Pair(torch.ones(1), BAD), "batch.right"),
        (Typed(BAD), "batch.x"),
        (Sample(BAD), "batch.image"),
        ([0, 1, Sample(1, extra=Pair(BAD, 0))], "batch[2].extra.left"),
        (Slotted(BAD), "batch.x"),
        (Plain(x=BAD), "batch.x"),
        (WithSlots(BAD), "batch.x"),
        (UserDict(x=BAD), "batch['x']"),
        (deque([BAD]), "batch[0]"),
        (Graph(x=BAD, edge_index=torch.ones(2, 3, dtype=torch.long)), "batch._store['x']"),
        (torch.nn.Parameter(BAD.clone()), "batch"),
    ],
)
def test_path_leads_to_the_field(batch, path):
    assert found(batch) == {path: (2, 1, 1, 1)}
    assert eval(path, {"batch": batch}).tolist()[0] == [1.0, 2.0]  # the path is Python


def test_elements_of_sets_and_odd_keys_have_a_readable_path():
    assert found({"s": {NAN, 1.0}}) == {"batch['s'][*]": (0, 0, 1, None)}
    assert found({Plain(): BAD}) == {"batch[<Plain>]": (2, 1, 1, 1)}


def test_fields_come_in_the_order_of_the_batch():
    batch = {"z": BAD, "a": [BAD, {"k": BAD}], "m": BAD}
    paths = [f.path for f in scan_batch(batch).fields]
    assert paths == ["batch['z']", "batch['a'][0]", "batch['a'][1]['k']", "batch['m']"]


def test_packed_sequences_are_seen_through_their_fields():
    packed = pack_sequence([torch.tensor([1.0, NAN]), torch.tensor([INF])])
    # The time steps in turn: [1, inf], [NaN].
    assert found({"x": packed}) == {"batch['x'].data": (1, 0, 1, 1)}


# --- kinds of values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]
)
def test_every_float_dtype_is_scanned(dtype):
    (field,) = scan_batch(BAD.to(dtype)).fields
    assert (field.inf, field.negative_inf, field.nan, field.first) == (2, 1, 1, 1)
    assert field.dtype == str(dtype).removeprefix("torch.")
    assert field.shape == (3, 2)


def test_float8_formats_without_inf_are_scanned_for_nan():
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        assert found(torch.tensor([1.0, NAN]).to(dtype)) == {"batch": (0, 0, 1, 1)}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_number_counts_once(dtype):
    values = torch.tensor([1 + 1j, complex(NAN, INF), complex(0, -INF)], dtype=dtype)
    assert found(values) == {"batch": (2, 0, 1, 1)}
    assert found(values.numpy()) == {"batch": (2, 0, 1, 1)}
    assert found(values.tolist()) == {"batch": (2, 0, 1, 1)}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_half_complex_numbers_are_scanned():
    values = torch.tensor([1 + 1j, complex(NAN, 0)]).to(torch.complex32)
    assert found(values) == {"batch": (0, 0, 1, 1)}


def test_integers_strings_and_the_rest_are_passed_over():
    batch = {
        "labels": torch.tensor([1, 2]),
        "mask": torch.tensor([True]),
        "array": np.arange(3),
        "text": ["nan", b"inf"],
        "large": [10**400, None, ...],
        "model": torch.nn.Linear(1, 1),
        "type": Sample,
        "meta": torch.full((2,), NAN, device="meta"),
        "rows": iter([NAN]),
    }
    report = scan_batch(batch)
    assert not report
    assert report.scanned == 0
    assert next(batch["rows"]) is NAN  # iterators are not used up


def test_data_sets_and_models_that_a_batch_refers_to_are_not_searched():
    dataset = torch.utils.data.TensorDataset(BAD)
    model = torch.nn.Linear(2, 2)
    model.seen = BAD
    assert not scan_batch(Plain(dataset=dataset, model=model))


def test_python_numbers_are_scanned():
    assert found({"w": NAN, "v": -INF, "ok": 1.0}) == {
        "batch['w']": (0, 0, 1, None),
        "batch['v']": (1, 1, 0, None),
    }
    assert scan_batch(NAN).fields == (BadField("batch", "float", (), 0, 0, 1, None),)


def test_a_list_of_numbers_is_one_field():
    report = scan_batch({"y": [1.0, 10**400, INF, NAN], "mixed": [NAN, torch.ones(1)]})
    assert report.fields == (
        BadField("batch['y']", "float", (4,), 1, 0, 1, 2),
        BadField("batch['mixed'][0]", "float", (), 0, 0, 1, None),
    )
    assert report.scanned == 3


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "g"])
def test_arrays_are_scanned_whatever_their_memory(dtype):
    array = np.array([[1.0, 2.0], [NAN, 3.0], [INF, -INF]]).astype(dtype)[::-1]
    array.flags.writeable = False
    assert found([array]) == {"batch[0]": (2, 1, 1, 0)}
    assert scan_batch([array]).fields[0].shape == (3, 2)


def test_arrays_of_numbers_objects_and_records_are_scanned():
    objects = np.array([1.0, BAD, "x"], dtype=object)
    records = np.array([(1, NAN), (2, 1.0)], dtype=[("id", "i4"), ("x", "f4")])
    assert found(np.float32(NAN)) == {"batch": (0, 0, 1, None)}
    assert found(np.float64(INF)) == {"batch": (1, 0, 0, None)}
    assert found(objects) == {"batch.flat[1]": (2, 1, 1, 1)}
    assert found({"r": records}) == {"batch['r']['x']": (0, 0, 1, 0)}
    assert found(np.ones((0, 3))) == found(np.ones((3, 0))) == {}


def test_what_turns_into_an_array_is_scanned_as_one():
    assert found({"t": Frame([[1.0], [NAN]])}) == {"batch['t']": (0, 0, 1, 1)}


def test_sparse_tensors_name_the_sample():
    where, values = [[0, 2, 2], [1, 0, 0]], [1.0, INF, -INF]
    sparse = torch.sparse_coo_tensor(where, values, (3, 2), check_invariants=True)
    assert found(sparse) == {"batch": (0, 0, 1, 2)}  # the sum of its duplicates, as a model sees it
    rows = torch.sparse_coo_tensor([[4]], [[0.0, INF]], (5, 2), check_invariants=True)
    assert found(rows) == {"batch": (1, 0, 0, 4)}
    assert scan_batch(rows).fields[0].shape == (5, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_compressed_and_nested_tensors_are_counted(layout):
    assert found(torch.diag(torch.tensor([1.0, NAN])).to_sparse_csr()) == {"batch": (0, 0, 1, None)}
    ragged = [torch.tensor([1.0, INF]), torch.tensor([NAN])]
    nested = torch.nested.nested_tensor(ragged, layout=layout)
    assert found(nested) == {"batch": (1, 0, 1, None)}


# --- samples ------------------------------------------------------------------------------------


def test_first_bad_sample_is_along_the_first_dimension():
    values = torch.zeros(6, 2, 3)
    values[4, 0, 2] = NAN
    values[5] = INF
    assert found(values) == {"batch": (6, 0, 1, 4)}
    assert found(values.transpose(0, 2)) == {"batch": (6, 0, 1, 0)}
    assert found(torch.tensor(NAN)) == {"batch": (0, 0, 1, None)}


@pytest.mark.parametrize("piece", [1, 4, 7, 1000])
@pytest.mark.parametrize("shape", [(20,), (10, 2), (2, 10), (1, 20), (4, 1, 5)])
def test_counts_do_not_depend_on_the_pieces(monkeypatch, piece, shape):
    monkeypatch.setattr(module, "_PIECE", piece)
    values = torch.zeros(20)
    values[[7, 13, 19]] = torch.tensor([NAN, INF, -INF])
    first = 7 // (20 // shape[0])
    assert found(values.reshape(shape)) == {"batch": (2, 1, 1, first)}


def test_empty_tensors_are_clean():
    report = scan_batch([torch.ones(0), torch.ones(3, 0), torch.ones(0, 2)])
    assert not report
    assert report.scanned == 3


# --- safety -------------------------------------------------------------------------------------


def test_cycles_end():
    batch: dict[str, Any] = {"x": BAD}
    batch["self"] = batch
    batch["list"] = [batch, Plain(parent=batch)]
    assert list(found(batch)) == ["batch['x']"]


def test_very_deep_nesting_is_followed():
    batch: Any = BAD
    for _ in range(5000):
        batch = [batch]
    assert list(found(batch)) == ["batch" + "[0]" * 5000]


def test_the_batch_is_left_alone():
    values = BAD.clone().requires_grad_()
    with torch.inference_mode():
        inferred = BAD.clone()
    report = scan_batch([values, inferred])
    assert [field.path for field in report.fields] == ["batch[0]", "batch[1]"]
    assert values._version == 0
    assert values.grad is None


def test_attributes_are_read_and_properties_not_called():
    class Lazy(Plain):
        @property
        def costly(self):
            raise AssertionError("called")

    assert found(Lazy(x=BAD)) == {"batch.x": (2, 1, 1, 1)}


def test_one_read_for_all_fields():
    names = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Reads():
        scan_batch({"a": BAD, "b": [BAD] * 5, "c": 1.0})
    # `tolist` reads the memory of the stacked counts: no element is asked for before.
    assert names.count("stack") == 6 + 1
    assert "_local_scalar_dense" not in names[: names.index("stack")]
    assert not {"item", "nonzero", "is_nonzero"} & set(names)


# --- the report ---------------------------------------------------------------------------------


def test_a_finite_batch_makes_a_falsy_report():
    report = scan_batch({"x": torch.ones(2), "n": 1.0, "y": torch.tensor([1])})
    assert not report
    assert (report.scanned, report.inf, report.nan) == (2, 0, 0)
    assert str(report) == "The batch is finite: 2 fields with floating point numbers."
    assert str(scan_batch(["a"])) == "The batch holds no floating point numbers."
    assert report.to_dict() == {"scanned": 2, "bad": 0, "inf": 0, "nan": 0}


def test_text_says_field_counts_place_and_dtype():
    mask = torch.tensor([0.0, -INF])
    report = scan_batch({"image": BAD, "mask": mask, "w": NAN})
    assert str(report).splitlines() == [
        "batch['image'] holds 1 NaN and 2 inf in 6 values (float32, shape (3, 2)),"
        " first at sample 1",
        "batch['mask'] holds 1 inf in 2 values (float32, shape (2,)), first at sample 1,"
        " all -inf: a mask?",
        "batch['w'] holds 1 NaN in 1 values (float)",
    ]


def test_long_reports_are_cut_in_the_text_only():
    report = scan_batch([torch.tensor([NAN])] * 13)
    assert len(report.fields) == 13
    assert str(report).splitlines()[10:] == ["and 3 more fields"]


def test_dict_is_flat():
    report = scan_batch({"x": BAD, "y": 1.0})
    assert report.to_dict() == {
        "scanned": 2,
        "bad": 1,
        "inf": 2,
        "nan": 1,
        "batch['x'] inf": 2,
        "batch['x'] negative_inf": 1,
        "batch['x'] nan": 1,
        "batch['x'] first": 1,
        "batch['x'] dtype": "float32",
        "batch['x'] shape": "3x2",
    }


def test_leaves_are_yielded_with_their_path():
    batch = {"a": [1.0, 2], "b": (1, 2), "c": [1.0, "x"]}
    assert [(as_text(path), leaf) for path, leaf in leaves_of(batch)] == [
        ("batch['a']", [1.0, 2]),
        ("batch['c'][0]", 1.0),
    ]
