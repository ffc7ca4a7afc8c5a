"""What the battery for communicators moves and reduces, and how results are compared."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

from easydist.transport.reduce_op import ReduceOp

MOVED = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
)
"""Dtypes that every communicator moves, bit for bit."""

REDUCED = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Dtypes that every communicator reduces."""

SIZES = (0, 1, 7, 40_001)
"""Numbers of elements: none, one, odd, large and odd."""

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

_drawn: list[tuple[torch.dtype, ...]] = [MOVED]


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different values on every rank, in every dtype: random bits where data moves, with NaN payloads and -0.0."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def small(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sums and products every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


def expect(got: torch.Tensor, want: torch.Tensor, *what: object) -> None:
    """Make sure that two tensors are the same bits; ``what`` says which they are."""
    same = got.dtype == want.dtype and got.shape == want.shape
    same = same and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert same, f"{' '.join(map(str, what))}: got {got}, want {want}"


def cases() -> Iterator[tuple[torch.dtype, int]]:
    """Every dtype that is drawn, with every size."""
    return itertools.product(_drawn[-1], SIZES)


@contextlib.contextmanager
def drawing(*dtypes: torch.dtype) -> Iterator[None]:
    """While this lasts, only these dtypes are moved."""
    _drawn.append(dtypes)
    try:
        yield
    finally:
        _drawn.pop()


def uneven(rank: int, numel: int) -> int:
    """Sizes that differ between ranks; rank 1 has nothing."""
    return 0 if rank == 1 else numel + rank
