# SPDX-License-Identifier: Apache-2.0
"""Counts of zero, subnormal, normal, overflow and NaN, against hand work and torch's own casts."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp_guard.diagnosis import counts as module
from lightning_amp_guard.diagnosis.counts import numbers_in, pieces
from lightning_amp_guard.diagnosis.range import (
    EXPONENTS,
    KINDS,
    classify_range,
    exponent_counts,
    range_counts,
)

INF, NAN = math.inf, math.nan
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
# With an inf that a cast overflows to; torch rounds into float8_e4m3fn by saturation.
WITH_INF = [HALF, BF16, torch.float8_e5m2]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


def kinds(report):
    return tuple(getattr(report, kind) for kind in KINDS)


def exponents(values):
    found = exponent_counts(values)
    return {EXPONENTS[i]: int(found[i]) for i in found.nonzero().flatten()}


def shares_memory(out, args):
    own = out.untyped_storage().data_ptr()
    return any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == own for a in args)


class Operators(TorchDispatchMode):
    """Which operators run inside, and the largest number of bytes that one of them makes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not shares_memory(out, args):
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


# --- the worked example -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "found"),
    # 2^-30, 2^-20, 2 become 2^-20, 2^-10, 2^11 and then 2^-14, 2^-4, 2^17; float16's normal numbers
    # begin at 2^-14 and end at 65504.
    [(2.0**10, (0, 1, 2, 0, 0)), (2.0**16, (0, 0, 2, 1, 0)), (1.0, (1, 1, 1, 0, 0))],
)
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, iter])
def test_the_worked_example(scale, found, kind):
    report = classify_range(kind([2.0**-30, 2.0**-20, 2.0]), scale, HALF)
    assert kinds(report) == found
    assert report.total == 3
    assert report.headroom_bits == pytest.approx(math.log2(65504 / 2) - math.log2(scale), abs=1e-9)


def test_lost_bits_are_the_doublings_that_make_the_smallest_value_normal():
    values = [2.0**-30, 2.0**-20, 2.0]
    assert [classify_range(values, 2.0**k).lost_bits for k in (0, 10, 15, 16)] == [16, 6, 1, 0]
    for k in range(16):
        lost = classify_range(values[:2], 2.0**k).lost_bits
        assert classify_range(values[:2], 2.0 ** (k + lost)).normal == 2
        assert classify_range(values[:2], 2.0 ** (k + lost - 1)).normal < 2


def test_headroom_and_lost_bits_look_at_all_tensors_together():
    big, small = torch.tensor([65504.0 / 8]), torch.tensor([2.0**-16], dtype=DOUBLE)
    for values in ([big, small], [small, big], [small, torch.ones(1), big, torch.zeros(1)]):
        report = classify_range(values)
        assert (report.headroom_bits, report.lost_bits) == (pytest.approx(3.0), 2)


def test_recoverable_compares_what_is_lost_with_the_room_above():
    # From 2^-30 to normal: 16 doublings; 2 has 14.99 up to 65504, 0.5 has 16.99.
    assert not classify_range([2.0**-30, 2.0]).recoverable
    assert classify_range([2.0**-30, 0.5]).recoverable


def test_underflow_leaves_true_zeros_out():
    report = classify_range([0.0, -0.0, 2.0**-25, -(2.0**-40), 1.0])
    assert (report.zero, report.underflow, report.normal) == (4, 2, 1)


# --- rounding -----------------------------------------------------------------------------------


def by_casting(values, dtype):
    """What torch's own cast makes of float32 values."""
    cast = values.to(dtype).to(SINGLE).abs()
    least = torch.finfo(dtype).smallest_normal
    nan = values.isnan()
    beyond = ~cast.isfinite() & ~nan
    zero, small = cast == 0, (cast > 0) & (cast < least)
    normal = cast.isfinite() & (cast >= least)
    return torch.stack([zero, small, normal, beyond, nan]).sum(1)


def around(bounds):
    """Float32 numbers at, just below and just above each bound."""
    at = torch.tensor(bounds, dtype=SINGLE)
    near = [at, torch.nextafter(at, torch.tensor(INF)), torch.nextafter(at, torch.tensor(0.0))]
    return torch.cat([*near, *[-part for part in near]])


@pytest.mark.parametrize("dtype", WITH_INF)
def test_every_float16_bit_pattern_falls_where_a_cast_puts_it(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(HALF)
    assert torch.equal(range_counts(values, 1.0, dtype), by_casting(values.float(), dtype))


@pytest.mark.parametrize("dtype", WITH_INF)
@pytest.mark.parametrize("seed", range(3))
def test_random_float32_bit_patterns_fall_where_a_cast_puts_them(dtype, seed):
    torch.manual_seed(seed)
    values = (
        torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64).to(torch.int32).view(SINGLE)
    )
    assert torch.equal(range_counts(values, 1.0, dtype), by_casting(values, dtype))


@pytest.mark.parametrize("dtype", WITH_INF)
def test_values_at_the_bounds_fall_where_a_cast_puts_them(dtype):
    info = torch.finfo(dtype)
    small = info.smallest_normal * info.eps
    last = info.max * (1 + info.eps / 4)
    values = around([small, small / 2, info.smallest_normal, info.smallest_normal - small / 2])
    for sample in (values, around([info.max, min(last, 3.4e38)])):
        for value in sample:
            one = value.reshape(1)
            assert torch.equal(range_counts(one, 1.0, dtype), by_casting(one, dtype)), value


def test_float16_bounds_worked_by_hand():
    # Ties go to the even neighbour: 2^-25 to 0, 65520 to 65536 = inf, 2^-14 - 2^-25 to 2^-14.
    assert kinds(classify_range([2.0**-25])) == (1, 0, 0, 0, 0)
    assert kinds(classify_range([2.0**-25 * (1 + 2.0**-40)])) == (0, 1, 0, 0, 0)
    assert kinds(classify_range([65519.999, 65520.0])) == (0, 0, 1, 1, 0)
    assert kinds(classify_range([2.0**-14 - 2.0**-25])) == (0, 0, 1, 0, 0)
    assert kinds(classify_range([2.0**-14 - 2.0**-25 - 2.0**-40])) == (0, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "smallest", "normal", "largest", "beyond"),
    [  # from the formats' definitions (arXiv 2209.05433, arXiv 2206.02915)
        (torch.float8_e4m3fn, 2.0**-9, 2.0**-6, 464.0, 464.01),
        (torch.float8_e4m3fnuz, 2.0**-10, 2.0**-7, 247.9, 248.0),
        (torch.float8_e5m2, 2.0**-16, 2.0**-14, 61439.9, 61440.0),
        (torch.float8_e5m2fnuz, 2.0**-17, 2.0**-15, 61439.9, 61440.0),
        (BF16, 2.0**-133, 2.0**-126, 3.3895e38, 3.397e38),
        (SINGLE, 2.0**-149, 2.0**-126, 3.4028234e38, 3.5e38),
        (DOUBLE, 5e-324, 2.0**-1022, 1.7e308, INF),
    ],
)
def test_each_format_has_its_own_range(dtype, smallest, normal, largest, beyond):
    half = math.ldexp(smallest, -1)
    assert kinds(classify_range([half, smallest, normal, largest, beyond], dtype=dtype)) == (
        *(1, 1, 2, 1),
        0,
    )


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_of_a_float8_format_is_held_by_it(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = values.float()
    finite = numbers.isfinite()
    found = range_counts(numbers, 1.0, dtype).tolist()
    small = (numbers != 0) & (numbers.abs() < torch.finfo(dtype).smallest_normal)
    normal = int(finite.sum()) - int(small.sum()) - int((numbers == 0).sum())
    expected = [int((numbers == 0).sum()), int(small.sum()), normal]
    assert found == [*expected, int(numbers.isinf().sum()), int(numbers.isnan().sum())]
    assert range_counts(values, 1.0, dtype).tolist() == found


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "scale", "dtype", "kind"),
    [
        (2.0**120, 2.0**16, HALF, "overflow"),  # 2^136 is beyond float32 too
        (2.0**120, 2.0**10, BF16, "overflow"),
        (2.0**-140, 2.0**140, HALF, "normal"),  # a scale that float32 does not have
        (2.0**20, 2.0**-130, BF16, "normal"),  # nor this one as a normal number
        (0.0, 2.0**200, HALF, "zero"),  # inf * 0 would be NaN
        (2.0**-100, 2.0**-60, SINGLE, "zero"),
        (INF, 2.0**-100, HALF, "overflow"),
        (NAN, 2.0**16, HALF, "nan"),
    ],
)
@pytest.mark.parametrize("own", [SINGLE, DOUBLE])
def test_products_beyond_float32_are_judged_rightly(value, scale, dtype, kind, own):
    report = classify_range(torch.tensor([value], dtype=own), scale, dtype)
    assert getattr(report, kind) == report.total == 1


def test_float64_values_are_not_rounded_to_float32_first():
    # Just above the tie 2^-25; float32 would round it onto the tie, which goes to 0.
    value = 2.0**-25 * (1 + 2.0**-30)
    assert classify_range(torch.tensor([value], dtype=DOUBLE)).subnormal == 1
    assert classify_range([value]).subnormal == 1


@pytest.mark.parametrize("own", [HALF, BF16, SINGLE, DOUBLE])
def test_values_of_any_float_dtype_are_taken(own):
    values = torch.tensor([0.0, 2.0**-20, 1.0, NAN, -INF], dtype=own)
    assert kinds(classify_range(values, 4.0)) == (1, 1, 1, 1, 1)


def test_lost_bits_of_a_product_that_no_float_holds():
    # 2^-1074 * 2^-500 to 2^-1022: 552 doublings.
    assert classify_range([5e-324], 2.0**-500, DOUBLE).lost_bits == 552


# --- what may be passed -------------------------------------------------------------------------


def test_generator_over_gradients_is_taken_one_at_a_time_and_none_is_passed_over():
    alive = []

    def gradients():
        for size in (3, 4, 5):
            made = torch.ones(size)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage()))
            assert sum(not ref.expired() for ref in alive) <= 2
            yield made
            del made
            yield None

    assert classify_range(gradients()).normal == 12


def test_sparse_complex_and_strided_tensors_count_their_stored_numbers():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0**-20, NAN], (4,), check_invariants=True)
    assert kinds(classify_range(sparse)) == (0, 1, 1, 0, 1)
    assert kinds(classify_range(torch.tensor([1 + 1e9j, 0j]))) == (2, 0, 1, 1, 0)
    assert kinds(classify_range(torch.eye(3).t()[::2])) == (4, 0, 2, 0, 0)
    assert kinds(classify_range(torch.ones(1).expand(5))) == (0, 0, 5, 0, 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_compressed_and_nested_tensors_count_their_stored_numbers():
    assert kinds(classify_range(torch.eye(3).to_sparse_csr())) == (0, 0, 3, 0, 0)
    ragged = [torch.ones(2), torch.zeros(3)]
    jagged = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    assert kinds(classify_range(jagged)) == (3, 0, 2, 0, 0)


def test_mixed_and_nested_sequences_are_summed():
    values = [1.0, torch.tensor([2.0, 1e6]), [3, np.float32(2.0**-20)], np.zeros((2, 2)), None]
    assert kinds(classify_range(values)) == (4, 1, 3, 1, 0)
    assert kinds(classify_range(2.0**-20)) == (0, 1, 0, 0, 0)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    assert classify_range(read_only[::-1]).normal == 3


@pytest.mark.parametrize("empty", [[], None, torch.ones(0), torch.ones(0, 3), [None], iter(())])
def test_no_values_make_a_falsy_report(empty):
    report = classify_range([] if empty is None else empty)
    assert not report
    assert set(report.shares.values()) == {0.0}
    assert (report.headroom_bits, report.lost_bits, str(report)) == (INF, 0, "no values")


def test_only_zeros_and_nan_have_all_the_room():
    report = classify_range([0.0, NAN])
    assert report
    assert (report.headroom_bits, report.lost_bits, report.recoverable) == (INF, 0, True)
    assert classify_range([1.0, -INF]).headroom_bits == -INF


def test_values_are_left_as_they_were():
    values = torch.tensor([-2.0, 3.0], requires_grad=True)
    assert not range_counts(values, 4.0, HALF).requires_grad
    exponent_counts(values)
    classify_range(values, 4.0)
    assert values.tolist() == [-2.0, 3.0]
    assert values._version == 0


# --- what may not -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN])
def test_scale_that_is_not_positive_and_finite_is_refused(scale):
    with pytest.raises(ValueError, match=r"`scale=.*positive finite"):
        classify_range([1.0], scale)


@pytest.mark.parametrize("scale", [True, "2", None, torch.tensor(2.0)])
def test_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(TypeError, match=r"`scale=.*expected a number"):
        classify_range([], scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e8m0fnu, torch.complex64, "float16"])
def test_dtype_without_a_signed_range_is_refused(dtype):
    with pytest.raises(ValueError, match=r"expected one of torch\.float16, torch\.bfloat16"):
        classify_range([1.0], dtype=dtype)


@pytest.mark.parametrize("values", ["1.0", [1.0, "x"], {"a": 1.0}, [True], None, object()])
def test_values_that_are_no_numbers_are_refused(values):
    with pytest.raises(TypeError, match=r"`values` holds .*gradients\.values\(\)"):
        classify_range(values)


@pytest.mark.parametrize("values", [torch.tensor([1]), torch.tensor([True]), np.arange(3)])
def test_integer_tensors_are_refused(values):
    with pytest.raises(TypeError, match=r"leave them out, or write `\.float\(\)`"):
        classify_range(values)


# --- the report ---------------------------------------------------------------------------------


def test_text_says_counts_shares_headroom_and_what_is_lost():
    report = classify_range([0.0, 2.0**-30, 2.0**-20, 4096.0], 4.0)
    assert str(report) == (
        "4 values, times 4, in float16:\n"
        "  zero                2   50.00%  (1 not 0 before rounding)\n"
        "  subnormal           1   25.00%\n"
        "  normal              1   25.00%\n"
        "  overflow            0    0.00%\n"
        "  nan                 0    0.00%\n"
        "  headroom          2.0  bits\n"
        "  lost               14  bits: a scale of 2**14 times this would make all normal,"
        " but overflow elsewhere"
    )


def test_dict_is_flat_and_holds_every_number():
    found = classify_range([2.0**-20, 1.0, 2.0, 0.0], 2.0).to_dict()
    assert found == {
        "dtype": "float16",
        "scale": 2.0,
        "total": 4,
        "zero": 1,
        "subnormal": 1,
        "normal": 2,
        "overflow": 0,
        "nan": 0,
        "underflow": 0,
        "zero_share": 0.25,
        "subnormal_share": 0.25,
        "normal_share": 0.5,
        "overflow_share": 0.0,
        "nan_share": 0.0,
        "headroom_bits": math.log2(65504) - 2,
        "lost_bits": 5,
    }


# --- on the device ------------------------------------------------------------------------------


def test_exponents_are_the_floor_of_the_logarithm():
    values = torch.tensor([1.0, 1.999, -2.0, 0.5, 0.4999, 2.0**-149, 3.4e38, 0.0, INF, NAN])
    assert exponents(values) == {0: 2, 1: 1, -1: 1, -2: 1, -149: 1, 127: 1}


@pytest.mark.parametrize("own", [HALF, BF16, SINGLE, DOUBLE])
def test_exponents_of_every_dtype(own):
    assert exponents(torch.tensor([[2.0**-14, 3.0], [8.0, 0.0]], dtype=own)) == {-14: 1, 1: 1, 3: 1}


def test_exponents_of_float64_beyond_the_range_are_in_the_outermost_bins():
    values = torch.tensor([2.0**-300, 2.0**-160, 2.0**127, 2.0**400], dtype=DOUBLE)
    assert exponents(values) == {-160: 2, 127: 2}


def test_exponents_of_no_values_are_zero():
    assert exponent_counts(torch.ones(0)).tolist() == [0] * 288


def test_counting_reads_nothing_from_the_device():
    with Operators() as seen:
        range_counts(torch.ones(4, 4), 2.0, HALF)
        exponent_counts(torch.ones(4, 4))
    assert "mul" in seen.names
    assert not {"_local_scalar_dense", "item", "nonzero", "bincount"} & set(seen.names)


def test_large_tensors_are_counted_in_pieces():
    values = torch.full((3, 2**20), 2.0**-20).t()
    values[:7, 0] = NAN
    with Operators() as seen:
        found = range_counts(values, 1.0, HALF)
        bins = exponent_counts(values)
    assert found.tolist() == [0, 3 * 2**20 - 7, 0, 0, 7]
    assert int(bins[-20 - EXPONENTS.start]) == int(bins.sum()) == 3 * 2**20 - 7
    assert seen.largest <= 2**22


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(48.0).reshape(4, 12)[:, ::2],
        torch.arange(4.0).reshape(1, 4, 1).expand(3, 4, 5),
        torch.tensor(3.0),
        torch.arange(7.0),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_pieces_are_views_that_make_up_the_tensor(values, size):
    parts = list(pieces(values, size))
    assert max(part.numel() for part in parts) <= size
    assert {part.untyped_storage().data_ptr() for part in parts} == {
        values.untyped_storage().data_ptr()
    }
    together = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(together.sort().values, values.reshape(-1).sort().values)


def test_numbers_in_gives_a_view_where_it_can():
    values = torch.ones(3, requires_grad=True)
    assert numbers_in(values).data_ptr() == values.data_ptr()
    assert set(module.KINDS) == {"zero", "subnormal", "normal", "overflow", "nan"}
