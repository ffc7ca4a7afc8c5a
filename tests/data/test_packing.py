"""Laws of packing tensors into bytes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from launching import examples
from trees import DTYPES, assert_same, bits, tensors

from easydist.data import packing

PROPERTY = settings(max_examples=examples(80), deadline=None)


def by_sort_key(values):
    return sorted(values, key=lambda t: packing.sort_key(t.dtype))


def round_trip(values):
    return packing.unpack(packing.pack(values), [t.dtype for t in values], [t.shape for t in values])


sorted_lists = st.lists(tensors(), max_size=6).map(by_sort_key)


@PROPERTY
@given(sorted_lists)
def test_unpack_is_the_inverse_of_pack_bit_for_bit(values):
    assert_same(round_trip(values), [t.detach() for t in values])


@PROPERTY
@given(sorted_lists)
def test_packed_bytes_are_the_tensors_bytes_one_after_the_other(values):
    buffer = packing.pack(values)
    assert (buffer.dtype, buffer.ndim) == (torch.uint8, 1)
    assert bits(buffer) == b"".join(bits(t) for t in values)
    assert buffer.numel() == sum(map(packing.nbytes, values))


@PROPERTY
@given(sorted_lists)
def test_every_tensor_lies_at_a_multiple_of_its_item_size(values):
    for view in round_trip(values):
        assert view.storage_offset() * view.element_size() % view.dtype.itemsize == 0
        assert view.data_ptr() % view.dtype.itemsize == 0


@PROPERTY
@given(sorted_lists)
def test_unpack_copies_nothing(values):
    buffer = packing.pack(values).clone()
    before = [t.clone() for t in packing.unpack(buffer, [t.dtype for t in values], [t.shape for t in values])]
    views = packing.unpack(buffer, [t.dtype for t in values], [t.shape for t in values])
    assert_same(views, before)
    buffer.zero_()
    assert not any(any(bits(view)) for view in views)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_dtype_round_trips(dtype, count):
    values = [torch.tensor([0, 1, 1]).to(dtype) for _ in range(count)]
    assert_same(round_trip(values), values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_payloads_survive(dtype):
    ones = torch.full((4 * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
    quiet = torch.arange(4 * dtype.itemsize, dtype=torch.uint8).bitwise_or(0x7F).view(dtype)
    assert_same(round_trip([ones, quiet]), [ones, quiet])


@PROPERTY
@given(sorted_lists)
def test_packing_into_a_buffer_writes_the_same_bytes_there(values):
    want = packing.pack(values)
    out = torch.full((16 + want.numel(),), 255, dtype=torch.uint8)[16:]
    assert packing.pack(values, out=out) is out
    assert bits(out) == bits(want)


def known(tensors, count):
    """The leaves of a known packing in rows of a buffer, from byte 16 on, and the rows."""
    layout = packing.Packing([t.dtype for t in tensors], [t.shape for t in tensors])
    rows = torch.zeros((count, (layout.nbytes // 16 + 2) * 16), dtype=torch.uint8)
    return packing.Packed(rows, layout, 16), rows


@PROPERTY
@given(sorted_lists)
def test_a_packing_that_is_known_writes_the_same_bytes(values):
    tensors = tuple([value.detach() for value in values])
    packed, rows = known(tensors, 3)
    for row in (2, 0, 0):  # the second time with the same views
        packed.pack(row, tensors)
    want, nothing = packing.pack(tensors), torch.zeros(16, dtype=torch.uint8)
    for row, values in enumerate((want, want * 0, want)):
        assert bits(rows[row]) == bits(torch.cat([nothing, values, nothing, nothing])[: rows.shape[1]])


@PROPERTY
@given(sorted_lists)
def test_a_packing_that_is_known_fills_tensors_of_any_strides(values):
    tensors = tuple([value.detach().resolve_conj().resolve_neg() for value in values])
    targets = [torch.zeros((*t.shape, 2), dtype=t.dtype)[..., 1] if t.ndim else torch.zeros_like(t) for t in tensors]
    targets = tuple(targets)
    packed, _ = known(tensors, 2)
    packed.pack(1, tensors)
    for target in targets:
        target.zero_()
    packed.unpack_to(targets, 1)
    assert_same(targets, tensors)
    assert_same(tuple(packed.views(1)), tensors)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("extra", [-1, 1])
def test_packing_into_a_buffer_of_another_length_is_an_error(count, extra):
    out = torch.zeros(8 * count + extra, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        packing.pack([torch.ones(1, dtype=torch.int64)] * count, out=out)
    assert not out.any()


def rows_of(values, count):
    """A buffer with a row of packed bytes per rank; every row has other bits."""
    length = sum(map(packing.nbytes, values))
    rows = torch.zeros((count, (length // 16 + 1) * 16), dtype=torch.uint8)
    for rank, row in enumerate(rows):
        row[:length] = packing.pack([packing.as_bytes(t.contiguous()) ^ rank for t in values])
    return rows


def check_rows(values, count):
    rows = rows_of(values, count)
    dtypes, shapes = [t.dtype for t in values], [t.shape for t in values]
    packed = packing.Packed(rows, packing.Packing(dtypes, shapes))
    every = [packing.unpack_rows(rows, dtypes, shapes), *(packed.joined() for _ in range(3))]
    parts = [packing.unpack(row, dtypes, shapes) for row in rows]
    want = [b"".join(map(bits, column)) for column in zip(*parts, strict=True)]
    rows.zero_()
    for got in every:
        assert [(t.dtype, bits(t)) for t in got] == list(zip(dtypes, want, strict=True))
        assert [t.shape for t in got] == [(count * first, *rest) for first, *rest in shapes]
        assert all(t.is_contiguous() for t in got)
    starts = [t.untyped_storage().data_ptr() for t in [rows, *itertools.chain(*every)] if t.numel()]
    assert len(set(starts)) == len(starts), "each result has memory of its own"


vectors = tensors().map(lambda t: t if t.ndim else t.reshape(1))


@PROPERTY
@given(st.lists(vectors, max_size=6).map(by_sort_key), st.integers(1, 3))
def test_rows_are_concatenated_into_memory_of_their_own(values, count):
    check_rows(values, count)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 5), (3, 0), (257,), (1, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_leaves_of_one_shape_are_concatenated_likewise(shape, dtype):
    for count in (1, 2, 3):
        check_rows([torch.ones(shape).to(dtype)] * 3, count)


@pytest.mark.parametrize(
    "shapes",
    [[(4,)], [(2, 3), (2, 3)], [(2, 3), (3, 2)], [(2,), (1,), (2,)], [(0, 2), (), (3,)], [(1, 300), (1, 300)]],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_separate_tensors_have_their_shapes_and_memory_of_their_own(dtype, shapes):
    values = [(torch.arange(math.prod(shape)) % 2).to(dtype).view(shape) for shape in shapes]
    got = packing.separate(torch.cat([packing.as_bytes(value) for value in values]).view(dtype), shapes)
    assert_same(list(got), values)
    starts = [t.untyped_storage().data_ptr() for t in got if t.numel()]
    assert len(set(starts)) == len(starts)


def test_no_tensors_make_an_empty_buffer():
    assert packing.pack([], out=torch.empty(0, dtype=torch.uint8)).tolist() == []
    assert packing.pack([]).tolist() == []
    assert packing.unpack(torch.empty(0, dtype=torch.uint8), [], []) == []
    assert packing.nbytes(torch.empty(0)) == 0


def test_empty_tensors_take_no_bytes_and_keep_their_shapes():
    values = [torch.empty(2, 0, 3, dtype=torch.float64), torch.empty(0), torch.empty(0, 1, dtype=torch.bool)]
    assert packing.pack(values).numel() == 0
    assert_same(round_trip(values), values)


def test_a_single_contiguous_tensor_is_not_copied():
    value = torch.arange(6.0).view(2, 3)
    assert packing.pack([value]).data_ptr() == value.data_ptr()


def test_packing_several_tensors_copies_them():
    values = [torch.ones(2), torch.ones(3)]
    buffer = packing.pack(values)
    values[0].zero_()
    assert packing.unpack(buffer, [torch.float32] * 2, [(2,), (3,)])[0].tolist() == [1, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_from_elsewhere_come_to_the_buffers_device(count):
    buffer = packing.pack([torch.ones(3)] * count, "meta")
    assert (buffer.device.type, buffer.numel()) == ("meta", 12 * count)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "value",
    [torch.arange(6).view(2, 3).t(), torch.arange(10)[1::3], torch.arange(3).expand(2, 3), torch.tensor(7)],
    ids=["transposed", "strided", "expanded", "0-dim"],
)
def test_strides_do_not_change_the_order_of_elements(value, count):
    values = [value] * count
    assert [t.tolist() for t in round_trip(values)] == [value.tolist()] * count


def test_sort_key_puts_larger_items_first_and_keeps_dtypes_together():
    order = sorted(DTYPES, key=packing.sort_key)
    sizes = [dtype.itemsize for dtype in order]
    assert sizes == sorted(sizes, reverse=True)
    assert len({packing.sort_key(dtype) for dtype in DTYPES}) == len(DTYPES)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stride_of_none_or_one_element_means_nothing(dtype, size):
    value = torch.zeros(2 * size, 3).to(dtype)[:, 0][::2]
    assert_same(round_trip([value]), [value])
    assert_same(round_trip([value, value]), [value, value])


def test_as_bytes_is_a_view_of_any_dtype_and_shape():
    assert packing.as_bytes(torch.tensor(True)).tolist() == [1]
    assert packing.as_bytes(torch.tensor([[1.0]], dtype=torch.float32)).tolist() == [0, 0, 128, 63]
    value = torch.zeros(2, 2)
    packing.as_bytes(value).fill_(0)
    packing.as_bytes(value)[3] = 64
    assert value.tolist() == [[2, 0], [0, 0]]


def test_a_longer_buffer_than_needed_is_fine():
    buffer = torch.cat([packing.as_bytes(torch.tensor([1, 2])), torch.zeros(5, dtype=torch.uint8)])
    assert packing.unpack(buffer, [torch.int64], [(2,)])[0].tolist() == [1, 2]


def test_dtype_name_is_the_name_in_torch():
    assert all(getattr(torch, packing.dtype_name(dtype)) is dtype for dtype in DTYPES)
