"""The data and reductions of the conformance test for communicators, and the comparison of results."""

from __future__ import annotations

import contextlib
import functools
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
"""The dtypes that every communicator moves, bit for bit."""

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
"""The dtypes that every communicator reduces."""

SIZES = (0, 1, 7, 40_001)
"""The numbers of elements: none, one, odd, large and odd."""

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

_STARTS, _ALIGNMENT = 1 << 16, 16
"""The number of places at which a sample can start, and the bytes between them."""

_drawn: list[tuple[torch.dtype, ...]] = [MOVED]


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return different values on every rank, in every dtype: random bits, including NaN payloads and -0.0."""
    return wanted(rank, numel, dtype).clone()


@functools.cache
def wanted(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a sample to compare results with, which is not to be written: the next call returns it again."""
    start = (1000 * rank + numel) * 4099 % _STARTS * _ALIGNMENT  # an odd factor: another start for each rank and size
    bits = _noise()[start : start + numel * dtype.itemsize]
    return (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)


@functools.cache
def _noise() -> torch.Tensor:
    """Return random bytes, of which samples are parts: to draw each of them would take most of the test's time."""
    return torch.randint(
        0, 256, (2 * _STARTS * _ALIGNMENT,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def small(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values whose sums and products every dtype represents exactly."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


def expect(got: torch.Tensor, want: torch.Tensor, *what: object) -> None:
    """Make sure that two tensors have the same bits. ``what`` names them in the error."""
    same = got.dtype == want.dtype and got.shape == want.shape
    same = same and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert same, f"{' '.join(map(str, what))}: got {got}, want {want}"


def cases() -> Iterator[tuple[torch.dtype, int]]:
    """Return every selected dtype with every size."""
    return itertools.product(_drawn[-1], SIZES)


@contextlib.contextmanager
def drawing(*dtypes: torch.dtype) -> Iterator[None]:
    """Move only these dtypes during the block."""
    _drawn.append(dtypes)
    try:
        yield
    finally:
        _drawn.pop()


def uneven(rank: int, numel: int) -> int:
    """Return a size that differs between ranks, and is 0 on rank 1."""
    return 0 if rank == 1 else numel + rank
