"""Packing a list of tensors into one buffer of bytes, without holes.

Tensors keep the given order. The caller puts large items first, so that every tensor starts at a multiple of its item
size: 16-byte items, then 8, 4, 2, 1 (``sort_key``). Tensors of the same dtype are packed by a single ``torch.cat``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from easydist import memory
from easydist.typing import Device


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def sort_key(dtype: torch.dtype) -> tuple[int, str]:
    """Return a key that sorts dtypes by descending item size, so that a buffer needs no padding.

    Example:
        >>> sorted([torch.bool, torch.float32, torch.float64, torch.int32], key=sort_key)
        [torch.float64, torch.float32, torch.int32, torch.bool]
    """
    return -dtype.itemsize, str(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 view of a contiguous tensor of any dtype and shape.

    Example:
        >>> as_bytes(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and not tensor.requires_grad:
        return tensor
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8)


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor needs in a buffer, whatever its strides.

    Example:
        >>> nbytes(torch.zeros(1).expand(3))
        12
    """
    return tensor.numel() * tensor.element_size()


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype for each item size that every copy kernel supports, and that copies all bits unchanged."""


def pack(tensors: Sequence[torch.Tensor], device: Device = "cpu", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Pack tensors, sorted by ``sort_key``, into one uint8 buffer; a single contiguous tensor gives a view.

    Law: ``unpack(pack(ts), [t.dtype for t in ts], [t.shape for t in ts])`` equals ``ts`` bit for bit.

    Args:
        tensors: Tensors with any shapes and strides, copied to the buffer's device if they are on another one.
        device: The device of the buffer; ignored with ``out``.
        out: The buffer to copy into: uint8, contiguous, with exactly the bytes that the tensors need, starting at a
            multiple of 16 bytes of its storage.

    Raises:
        RuntimeError: ``out`` has another length.

    Cost: one ``torch.cat`` per dtype.
    """
    if out is None and len(tensors) == 1:
        return as_bytes(tensors[0].to(device).contiguous())
    runs = [list(run) for _, run in itertools.groupby(tensors, key=_dtype_of)]
    lengths = [sum(map(torch.Tensor.numel, run)) * run[0].itemsize for run in runs]
    buffer = memory.empty([sum(lengths)], torch.uint8, device) if out is None else out
    for run, part in zip(runs, buffer.split(lengths), strict=True):
        _fill(part, run)
    return buffer


_dtype_of = operator.attrgetter("dtype")


def _fill(part: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors of one dtype into their part of a buffer."""
    dtype = tensors[0].dtype
    if len(tensors) == 1:  # one copy for any strides and device, whereas cat needs a flat tensor on the same device
        part.view(dtype).view(tensors[0].shape).copy_(tensors[0].detach())
        return
    flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
    if not (part.is_cpu and all(tensor.is_cpu for tensor in flat)):
        flat = [tensor.to(part.device) for tensor in flat]
    if not is_copyable(dtype):
        flat, dtype = [tensor.view(BITS[1]) for tensor in flat], BITS[1]
    torch.cat(flat, out=part.view(dtype))


def is_copyable(dtype: torch.dtype) -> bool:
    """True if ``torch.cat`` supports the dtype; it does not support floats of one byte."""
    return not (dtype.itemsize == 1 and dtype.is_floating_point)


def copy_to(address: int, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors on the CPU to memory, one after another: faster than ``pack`` for small ones.

    Args:
        address: The address of memory with room for all of them.
        tensors: Tensors of any dtypes, shapes and strides.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory.copy(address, tensor.data_ptr(), length := tensor.nbytes)
        address += length


_FEW = 6
"""The number of tensors of one dtype up to which a copy of each costs less than ``torch.cat`` of all."""

_SMALL = 256
"""The number of items up to which one more copy costs less than a change of shape from Python."""


_split_copy: Any = torch.split_with_sizes_copy  # Any, because torch's stubs declare that these two return None
_unbind_copy: Any = torch.unbind_copy


def unpack(buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return views of ``buffer`` with the given dtypes and shapes: the inverse of ``pack``.

    Args:
        buffer: uint8, contiguous, with at least the bytes that the shapes need.
        dtypes: The dtypes, in the order in which the tensors were packed.
        shapes: The shapes, in the same order.
    """
    return _packing_of(dtypes, shapes).unpack(buffer)


def unpack_rows(
    rows: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Concatenate the leaves of all rows along dim 0; law, leaf by leaf: ``torch.cat([unpack(row) for row in rows])``.

    Args:
        rows: uint8; the length of a row is a multiple of 16 bytes, and at least the bytes that the shapes need.
        dtypes: The dtypes, in the order in which the tensors were packed.
        shapes: The shapes of the leaves in one row; each has a dim 0.

    Cost: one copy per leaf; one more, of all leaves together, if they are small and have the same shape.
    """
    return _packing_of(dtypes, shapes).unpack_rows(rows)


class _Run(NamedTuple):
    """A run of adjacent leaves with the same dtype."""

    dtype: torch.dtype
    leaves: slice
    shapes: list[tuple[int, ...]]
    sizes: list[int]
    start: int
    nbytes: int
    is_flat: bool
    is_uniform: bool

    def of(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the part of a buffer that holds the run; the buffer itself if it has nothing else."""
        return buffer if buffer.shape[dim] == self.nbytes else buffer.narrow(dim, self.start, self.nbytes)


class Packing:
    """The layout of tensors of certain dtypes and shapes in a buffer: computed once, and reused by every call.

    Args:
        dtypes: The dtypes, sorted by ``sort_key``.
        shapes: The shapes, in the same order.

    Attributes:
        nbytes: The length of the buffer.
        lengths: The bytes of each tensor.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> None:
        self._runs: list[_Run] = []
        self.lengths: list[int] = []
        first = self.nbytes = 0
        for dtype, group in itertools.groupby(dtypes):
            last = first + sum(1 for _ in group)
            run = list(map(tuple, shapes[first:last]))
            sizes = list(map(math.prod, run))
            nbytes = sum(sizes) * dtype.itemsize
            self.lengths += [size * dtype.itemsize for size in sizes]
            is_flat, is_uniform = all(len(s) == 1 for s in run), sizes[0] <= _SMALL and run.count(run[0]) == len(run)
            self._runs.append(_Run(dtype, slice(first, last), run, sizes, self.nbytes, nbytes, is_flat, is_uniform))
            first, self.nbytes = last, self.nbytes + nbytes

    def pack(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copy tensors of these dtypes and shapes, all on the CPU, into ``out``."""
        if len(tensors) <= _FEW * len(self._runs) and all(map(torch.Tensor.is_contiguous, tensors)):
            at = out.data_ptr()
            for tensor in tensors:
                memory.copy(at, tensor.data_ptr(), tensor.nbytes)
                at += tensor.nbytes
            return
        for run in self._runs:
            part = run.of(out, 0)
            if run.is_flat and is_copyable(run.dtype):
                torch.cat(list(tensors[run.leaves]), out=part.view(run.dtype))
            else:
                _fill(part, tensors[run.leaves])

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a buffer; see the function ``unpack``."""
        views: list[torch.Tensor] = []
        for run in self._runs:
            flat = run.of(buffer, 0).view(run.dtype).split_with_sizes(run.sizes)
            views += flat if run.is_flat else [p.view(shape) for p, shape in zip(flat, run.shapes, strict=True)]
        return views

    def unpack_to(self, targets: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy the tensors in a buffer to ``targets``, all on the CPU: as fast as ``unpack`` alone for small ones."""
        for run in self._runs:
            flat = run.of(buffer, 0).view(run.dtype)
            if run.is_flat:
                _split_copy(flat, run.sizes, out=targets[run.leaves])
            else:
                pieces = flat.split_with_sizes(run.sizes)
                views = [piece.view(shape) for piece, shape in zip(pieces, run.shapes, strict=True)]
                torch._foreach_copy_(list(targets[run.leaves]), views)

    def unpack_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Concatenate the leaves of all rows; see the function ``unpack_rows``."""
        results: list[torch.Tensor] = []
        for run in self._runs:
            bits = run.of(rows, 1)
            if is_copyable(run.dtype):
                results += _joined(bits.view(run.dtype), run)
            else:
                results += [joined.view(run.dtype) for joined in _joined(bits, run)]
        return results


_known = functools.lru_cache(maxsize=256)(Packing)


def _packing_of(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> Packing:
    return _known(tuple(dtypes), tuple(map(tuple, shapes)))


def separate(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    """Cut a flat tensor into tensors that each have their own memory; a single one keeps its memory.

    Views would take a fifth of the time. But pickling, saving and the search for tied weights look at the whole memory
    of a tensor: pickle would write all of it for each view.

    Args:
        flat: The flat tensor.
        shapes: The shapes of the tensors, which fill ``flat``.

    Cost: one copy.
    """
    if len(shapes) == 1:
        return [flat.view(tuple(shapes[0]))]
    if not is_copyable(flat.dtype):
        return [piece.view(flat.dtype) for piece in separate(flat.view(BITS[1]), shapes)]
    sizes = [math.prod(shape) for shape in shapes]
    if sizes[0] <= _SMALL and shapes.count(shapes[0]) == len(shapes):
        return cast(Sequence[torch.Tensor], _unbind_copy(flat.view(len(shapes), *shapes[0])))
    return [piece.resize_(tuple(shape)) for piece, shape in zip(_split_copy(flat, sizes), shapes, strict=True)]


def _joined(rows: torch.Tensor, run: _Run) -> Sequence[torch.Tensor]:
    """Return the leaves of a run, each concatenated over all rows in its own memory."""
    count = rows.shape[0]
    if len(run.shapes) == 1:
        first, *rest = run.shapes[0]
        return [rows.clone(memory_format=torch.contiguous_format).resize_(count * first, *rest)]
    if run.is_uniform:
        leaves = rows.view(count, len(run.shapes), *run.shapes[0]).transpose(0, 1)
        return cast(Sequence[torch.Tensor], _unbind_copy(leaves.flatten(1, 2)))
    pieces = _split_copy(rows, run.sizes, dim=1)
    # The pieces are new and contiguous, so resize_ changes only the shape; view would create one more tensor for each.
    return [piece.resize_(count * first, *rest) for piece, (first, *rest) in zip(pieces, run.shapes, strict=True)]
