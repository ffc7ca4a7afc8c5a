"""Laws of combining values: NumPy's for whole numbers, one rounding for narrow floats."""

import functools

import numpy as np
import pytest
import torch
from trees import bits

from easydist.comms import ReduceOp, combine
from easydist.transport.reduce_op import combine_into

OPS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
WHOLE = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers_are_combined_as_numpy_does_it(op, dtype):
    info = np.iinfo(dtype)
    values = np.array([info.min, 0, 1, 3, info.max // 2, info.max // 2 + 1, info.max], dtype)
    parts = [values, np.roll(values, 1), values[::-1].copy()]
    got = combine(op, [torch.from_numpy(part.copy()) for part in parts])
    assert bits(got) == functools.reduce(OPS[op], parts).tobytes()


NARROW = {torch.float16: 2048.0, torch.bfloat16: 256.0, torch.float8_e4m3fn: 16.0, torch.float8_e5m2: 8.0}
"""Numbers from which on such floats are all even."""


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_are_rounded_once(dtype):
    large = NARROW[dtype]
    parts = [torch.tensor([value, 1.0, -1.0]).to(dtype) for value in (large, 1.0, 1.0)]
    assert combine(ReduceOp.SUM, parts).float().tolist() == [large + 2, 3.0, -3.0]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=repr)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64], ids=str)
def test_nan_is_passed_on(op, dtype):
    parts = [torch.tensor([1.0, float("nan")]).to(dtype), torch.tensor([float("nan"), 1.0]).to(dtype)]
    assert combine(op, parts).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint64, torch.complex64])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_combine_into_gives_what_combine_gives_also_into_a_part(count, dtype):
    for place in (None, *range(count)):
        parts = [torch.tensor([1, 3, 7]).mul(number + 2).to(dtype) for number in range(count)]
        want = combine(ReduceOp.SUM, parts)
        out = torch.zeros(3, dtype=dtype) if place is None else parts[place]
        combine_into(out, ReduceOp.SUM, parts)
        assert out.tolist() == want.tolist()
