"""Leaves as bytes: one buffer for a list of tensors, without holes.

Tensors lie in the order given; whoever calls puts large items first, so that every tensor starts at a multiple of its
item size: 16-byte items, then 8, 4, 2, 1 (``sort_key``). Items of one size are packed by a single ``torch.cat``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from easydist.typing import Device


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def sort_key(dtype: torch.dtype) -> tuple[int, str]:
    """Sorts dtypes by falling item size, so that a buffer needs no padding.

    Example:
        >>> sorted([torch.bool, torch.float32, torch.float64, torch.int32], key=sort_key)
        [torch.float64, torch.float32, torch.int32, torch.bool]
    """
    return -dtype.itemsize, str(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor, of any dtype and shape.

    Example:
        >>> as_bytes(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8)


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes that a tensor needs in a buffer, whatever its strides.

    Example:
        >>> nbytes(torch.zeros(1).expand(3))
        12
    """
    return tensor.numel() * tensor.element_size()


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype of each item size that every copy kernel knows; bits do not change under it."""


def pack(tensors: Sequence[torch.Tensor], device: Device = "cpu") -> torch.Tensor:
    """Tensors, sorted by ``sort_key``, as one uint8 buffer: a new one, or a view of a single contiguous tensor.

    Law: ``unpack(pack(ts), [t.dtype for t in ts], [t.shape for t in ts])`` equals ``ts`` bit for bit.

    Args:
        tensors: Any shapes and strides; copied to ``device`` where they are elsewhere.
        device: Where the buffer shall be.

    Cost: one ``torch.cat`` per item size.
    """
    if len(tensors) == 1:
        return as_bytes(tensors[0].to(device).contiguous())
    buffer = torch.empty(sum(map(nbytes, tensors)), dtype=torch.uint8, device=device)
    start = 0
    for itemsize, run in itertools.groupby(tensors, key=torch.Tensor.element_size):
        flat = [tensor.reshape(-1) for tensor in run]
        dtype = flat[0].dtype
        if not is_copyable(dtype) or any(tensor.dtype is not dtype for tensor in flat):
            flat, dtype = [tensor.view(BITS[itemsize]) for tensor in flat], BITS[itemsize]
        if any(tensor.device != buffer.device for tensor in flat):
            flat = [tensor.to(buffer.device) for tensor in flat]
        stop = start + sum(map(torch.Tensor.numel, flat)) * itemsize
        torch.cat(flat, out=buffer[start:stop].view(dtype))
        start = stop
    return buffer


def is_copyable(dtype: torch.dtype) -> bool:
    """Whether ``torch.cat`` knows the dtype; it does not know floats of one byte."""
    return not (dtype.itemsize == 1 and dtype.is_floating_point)


def unpack(buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of ``buffer`` with the given dtypes and shapes: the inverse of ``pack``.

    Args:
        buffer: uint8, contiguous, of at least the bytes that the shapes need.
        dtypes: In the order in which the tensors were packed.
        shapes: Likewise.
    """
    views: list[torch.Tensor] = []
    for run, flat in _runs(buffer, dtypes, shapes):
        views += [piece.view(tuple(shapes[i])) for i, piece in zip(run, flat, strict=True)]
    return views


def unpack_rows(
    rows: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Concatenate along dim 0 what the rows hold; law, leaf by leaf: ``torch.cat([unpack(row) for row in rows])``.

    Args:
        rows: uint8, contiguous; a row has a multiple of 16 bytes, at least those that the shapes need.
        dtypes: In the order in which the tensors were packed.
        shapes: Of the leaves in one row.

    Cost: one copy per leaf.
    """
    results: list[torch.Tensor] = []
    for run, flat in _runs(rows, dtypes, shapes):
        for i, piece in zip(run, flat, strict=True):
            dtype, (first, *rest) = dtypes[i], shapes[i]
            bits = piece if is_copyable(dtype) else piece.view(BITS[1])
            own = bits.clone() if len(rows) == 1 else bits  # else reshape copies
            results.append(own.reshape(len(rows) * first, *rest).view(dtype))
    return results


def _runs(
    buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], Sequence[torch.Tensor]]]:
    """The leaves of each dtype in turn, and their flat pieces along the last dim of ``buffer``."""
    start = 0
    for dtype, group in itertools.groupby(range(len(dtypes)), key=dtypes.__getitem__):
        run = list(group)
        sizes = [math.prod(shapes[i]) for i in run]
        stop = start + sum(sizes) * dtype.itemsize
        yield run, buffer[..., start:stop].view(dtype).split(sizes, dim=-1)
        start = stop
