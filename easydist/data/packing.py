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
from easydist.base.torch_private import foreach_clone, foreach_copy
from easydist.typing import Device


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def type_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the text for tensors of a dtype and shape, as errors show it.

    Example:
        >>> type_text(torch.float32, (8, 10))
        'float32 (8, 10)'
    """
    return f"{dtype_name(dtype)} {tuple(shape)}"


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
    if not (part.is_cpu and all(tensor.is_cpu for tensor in tensors)):
        tensors = [tensor.to(part.device) for tensor in tensors]
    if (whole := _whole(dtype, [tensor.shape for tensor in tensors])) is None:
        tensors, whole = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors], (-1,)
    if not is_copyable(dtype):
        tensors, dtype = [tensor.view(BITS[1]) for tensor in tensors], BITS[1]
    torch.cat([*tensors], out=part.view(dtype).view(whole))


def is_copyable(dtype: torch.dtype) -> bool:
    """True if ``torch.cat`` supports the dtype; it does not support floats of one byte."""
    return not (dtype.itemsize == 1 and dtype.is_floating_point)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, on an accelerator in one launch for all that are alike."""
    alike: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.dtype, target.device, source.device, target.is_contiguous() and source.is_contiguous()
        for one, some in zip((target, source), alike.setdefault(key, ([], [])), strict=True):
            some.append(one)
    for pair in alike.values():
        foreach_copy(*pair)


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


_SMALL, _FEW = 256, 1024
"""The number of items of a leaf, or of all leaves in all rows, up to which one more copy costs less than changes of
shape from Python."""


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
    return Packed(rows, _packing_of(dtypes, shapes)).joined()


class _Run(NamedTuple):
    """A run of adjacent leaves with the same dtype."""

    dtype: torch.dtype
    leaves: slice
    shapes: Sequence[tuple[int, ...]]
    sizes: list[int]
    start: int
    nbytes: int
    whole: tuple[int, ...] | None
    """The shape of all leaves concatenated along dim 0; None if ``torch.cat`` cannot do that."""
    is_flat: bool
    """True if all leaves have one dimension."""
    is_uniform: bool
    """True if all leaves are small and have the same shape."""

    def shaped(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return a view for each leaf of a flat tensor that holds the run."""
        pieces = flat.split_with_sizes(self.sizes)
        return pieces if self.is_flat else [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def columns(self, bits: torch.Tensor) -> torch.Tensor:
        """Return a view of the run's bytes in all rows, from which ``_joined`` copies."""
        values = bits.view(self.dtype) if is_copyable(self.dtype) else bits
        if not self.is_uniform or len(self.shapes) == 1:
            return values
        return values.view(len(bits), len(self.shapes), *self.shapes[0]).transpose(0, 1)


def _whole(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    tail = shapes[0][1:]
    if not is_copyable(dtype) or not all(shape and shape[1:] == tail for shape in shapes):
        return None
    return sum(shape[0] for shape in shapes), *tail


class Packing:
    """The layout of tensors of certain dtypes and shapes in a buffer: computed once, and reused by every call.

    Args:
        dtypes: The dtypes, sorted by ``sort_key``.
        shapes: The shapes, in the same order.

    Attributes:
        nbytes: The length of the buffer.
        lengths: The bytes of each tensor.
        runs: The runs of tensors with the same dtype.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> None:
        self.runs: list[_Run] = []
        self.lengths: list[int] = []
        first = self.nbytes = 0
        for dtype, group in itertools.groupby(dtypes):
            last = first + sum(1 for _ in group)
            run = tuple(map(tuple, shapes[first:last]))
            sizes, is_uniform = _sizes_of(run)
            nbytes = sum(sizes) * dtype.itemsize
            self.lengths += [size * dtype.itemsize for size in sizes]
            kinds = _whole(dtype, run), all(len(shape) == 1 for shape in run), is_uniform
            self.runs.append(_Run(dtype, slice(first, last), run, sizes, self.nbytes, nbytes, *kinds))
            first, self.nbytes = last, self.nbytes + nbytes

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a buffer; see the function ``unpack``."""
        views: list[torch.Tensor] = []
        for run in self.runs:
            part = buffer if buffer.shape[0] == run.nbytes else buffer.narrow(0, run.start, run.nbytes)
            views += run.shaped(part.view(run.dtype))
        return views


class _ByLeaf:
    """Memory for a run's values by leaf, then by row, from which the leaves can be copied in one call.

    Args:
        run: Several leaves.
        columns: Their values in all rows, see ``_Run.columns``.
    """

    def __init__(self, run: _Run, columns: torch.Tensor) -> None:
        self._order = None if run.is_uniform else _order(run, columns)
        if self._order is None:
            self._values, self._whole = columns, columns.new_empty(columns.shape)
            self._leaves: Sequence[torch.Tensor] = self._whole.flatten(1, 2).unbind()
            return
        bits = columns.view(BITS[columns.itemsize])  # index_select does not support all dtypes
        self._values = bits.as_strided([bits.untyped_storage().nbytes() // bits.itemsize], [1], 0)
        self._whole = bits.new_empty(self._order.shape)
        pieces = self._whole.view(columns.dtype).split_with_sizes([size * len(columns) for size in run.sizes])
        shapes = [(len(columns) * first, *rest) for first, *rest in run.shapes]
        self._leaves = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def copies(self) -> Sequence[torch.Tensor]:
        """Return new leaves."""
        if self._order is None:
            self._whole.copy_(self._values)
        else:
            torch.index_select(self._values, 0, self._order, out=self._whole)
        return cast(Sequence[torch.Tensor], foreach_clone(self._leaves))


def _order(run: _Run, values: torch.Tensor) -> torch.Tensor:
    """Return for each item, by leaf, then by row, its place in the memory of the rows."""
    places = torch.arange(values.untyped_storage().nbytes() // values.itemsize, device=values.device)
    rows = places.as_strided(values.shape, values.stride(), values.storage_offset())
    return torch.cat([column.flatten() for column in rows.split_with_sizes(run.sizes, 1)])


class Packed:
    """The leaves of every rank in the rows of one buffer; its views are made once, and reused by every call.

    Args:
        rows: uint8; the length of a row is a multiple of 16 bytes.
        packing: The layout of the leaves in a row.
        start: The byte at which they start, a multiple of 16.
    """

    def __init__(self, rows: torch.Tensor, packing: Packing, start: int = 0) -> None:
        self._runs = packing.runs
        self._bits = [rows.narrow(1, start + run.start, run.nbytes) for run in packing.runs]
        self._columns = [run.columns(bits) for run, bits in zip(self._runs, self._bits, strict=True)]
        self._has_joined = False
        self._targets: dict[int, list[Any]] = {}
        self._sources: dict[int, list[Sequence[torch.Tensor]]] = {}

    @functools.cached_property
    @memory.kept
    def flat(self) -> list[tuple[torch.Tensor, ...]]:
        """For each run of leaves with the same dtype its values, flat, in every row."""
        return [bits.view(run.dtype).unbind() for run, bits in zip(self._runs, self._bits, strict=True)]

    def pack(self, row: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """Copy tensors into a row; they are on the CPU, of any strides."""
        for run, target in zip(self._runs, self._targets.get(row) or self._targets_in(row), strict=True):
            if type(target) is torch.Tensor:
                torch.cat(tensors[run.leaves], out=target)
            else:
                foreach_copy(target, tensors[run.leaves])

    @memory.kept
    def _targets_in(self, row: int) -> list[Any]:
        """Return for each run a view of a row that all its leaves fill, or one view for each."""
        found = self._targets[row] = [
            run.shaped(flat) if run.whole is None else flat.view(run.whole) for run, flat in self._parts(row)
        ]
        return found

    def unpack_to(self, targets: tuple[torch.Tensor, ...], row: int) -> None:
        """Copy the values of a row to tensors on the CPU, of any strides."""
        for run, source in zip(self._runs, self._sources.get(row) or self._sources_in(row), strict=True):
            foreach_copy(targets[run.leaves], source)  # two thirds of the time of splitting into them

    @memory.kept
    def _sources_in(self, row: int) -> list[Sequence[torch.Tensor]]:
        """Return for each run a view of each of its leaves in a row."""
        found = self._sources[row] = [run.shaped(flat) for run, flat in self._parts(row)]
        return found

    def views(self, row: int) -> list[torch.Tensor]:
        """Return a view of each leaf in a row."""
        return [view for run, flat in self._parts(row) for view in run.shaped(flat)]

    def _parts(self, row: int) -> list[tuple[_Run, torch.Tensor]]:
        """Return the runs, each with its values in a row."""
        return [(run, bits[row].view(run.dtype)) for run, bits in zip(self._runs, self._bits, strict=True)]

    def joined(self) -> list[torch.Tensor]:
        """Return the leaves, each concatenated over all rows along dim 0, in memory of their own."""
        results: list[torch.Tensor] = []
        rooms = self._by_leaf if self._has_joined else [None] * len(self._runs)  # their memory pays off the second time
        self._has_joined = True
        for run, values, room in zip(self._runs, self._columns, rooms, strict=True):
            joined = _joined(values, run, room)
            results += joined if is_copyable(run.dtype) else [each.view(run.dtype) for each in joined]
        return results

    @functools.cached_property
    @memory.kept
    def _by_leaf(self) -> list[_ByLeaf | None]:
        return [
            _ByLeaf(run, values) if len(run.shapes) > 1 and (run.is_uniform or values.numel() <= _FEW) else None
            for run, values in zip(self._runs, self._columns, strict=True)
        ]


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
    sizes, is_uniform = _sizes_of(tuple(map(tuple, shapes)))
    if not flat.is_cpu:  # the functions below make a launch for each
        pieces = [flat.new_empty(tuple(shape)) for shape in shapes]
        copy_each([piece.view(-1) for piece in pieces], flat.split_with_sizes(sizes))
        return pieces
    if is_uniform:
        return cast(Sequence[torch.Tensor], _unbind_copy(flat.view(len(shapes), *shapes[0])))
    return [piece.resize_(tuple(shape)) for piece, shape in zip(_split_copy(flat, sizes), shapes, strict=True)]


@functools.lru_cache(maxsize=256)
def _sizes_of(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], bool]:
    """Return the items of each of several tensors, and True if all are small and have the same shape."""
    sizes = list(map(math.prod, shapes))
    return sizes, sizes[0] <= _SMALL and shapes.count(shapes[0]) == len(shapes)


def _joined(values: torch.Tensor, run: _Run, room: _ByLeaf | None) -> Sequence[torch.Tensor]:
    """Return the leaves of a run, each concatenated over all rows in its own memory."""
    if room is not None:
        return room.copies()
    if len(run.shapes) == 1:
        first, *rest = run.shapes[0]
        return [values.clone(memory_format=torch.contiguous_format).resize_(len(values) * first, *rest)]
    if run.is_uniform:  # by leaf, then by row
        return cast(Sequence[torch.Tensor], _unbind_copy(values.flatten(1, 2)))
    pieces = _split_copy(values, run.sizes, dim=1)
    # The pieces are new and contiguous, so resize_ changes only the shape; view would create one more tensor for each.
    count = len(values)
    return [piece.resize_(count * first, *rest) for piece, (first, *rest) in zip(pieces, run.shapes, strict=True)]
