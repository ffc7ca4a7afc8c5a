"""The rows that one rank has collected: copied, in memory up to a limit, then in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from easydist.base import forks
from easydist.base.wording import some
from easydist.data.leaves import as_tensor, check_unmasked, is_numeric
from easydist.data.packing import dtype_name
from easydist.format import codec, header
from easydist.format.files import described, tree_in
from easydist.metrics.columns import ColumnType, Schema, are_plain, split, taken
from easydist.metrics.joining import concatenated
from easydist.typing import Tree

__all__ = ["Store", "copied"]

_BLOCK = 1 << 20
"""The bytes from which rows are joined to a block, so that many small updates do not remain many small tensors."""

_WINDOW = 1 << 30
"""The bytes of a file that are mapped at once, a multiple of the system's granularity."""

RowLeaves = list[Any]
"""The rows of each column: a tensor, an array that no tensor can hold, or a list."""


class _File:
    """A file without a name, open as long as anything refers to this object."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        # It outlives any block: the rows that are in it are read when they are asked for.
        file: IO[bytes] = tempfile.TemporaryFile(prefix="easydist-", dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self.opened = file
        self._windows = weakref.WeakValueDictionary[int, mmap.mmap]()

    def mapped(self, start: int, stop: int) -> memoryview:
        """Return the memory of a part of the file.

        All parts of a window share its mapping, as long as anything refers to it: each mapping takes a file descriptor
        (in Python 3.12 and older), so one for each tree would soon be too many. One for the whole file fails if that is
        larger than the computer's memory.
        """
        first = start // _WINDOW * _WINDOW
        memory = self._windows.get(first)
        if memory is None or first + len(memory) < stop:
            size = os.fstat(self.opened.fileno()).st_size
            nbytes = min(size, max(stop, first + _WINDOW)) - first
            memory = mmap.mmap(self.opened.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=first)
            self._windows[first] = memory
        return memoryview(memory)[start - first : stop - first]


class Spooled(NamedTuple):
    """The place of a tree in a file."""

    file: _File
    start: int
    nbytes: int

    def read(self) -> Tree:
        """Return the tree. It is mapped, not read, so its pages are loaded when they are used."""
        memory = self.file.mapped(self.start, self.start + self.nbytes)
        return tree_in(memory, header.decode(memory))[0]


class Spool:
    """A file to which trees are appended, each as ``save`` would write it.

    Args:
        folder: The folder of the file; None means the usual one for temporary files.

    Example:
        >>> spool = Spool()
        >>> first, second = spool.append([torch.ones(2)]), spool.append(["text"])
        >>> first.read(), second.read()
        ([tensor([1., 1.])], ['text'])
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder, self._generation = folder, -1

    def append(self, tree: Tree) -> Spooled:
        """Write a tree, which may hold what ``save`` accepts.

        Raises:
            OSError: The disk is full, or the folder does not exist.
        """
        if self._generation != forks.generation:  # a forked child would write over what its parent appends
            self._file, self._end, self._generation = _File(self._folder), 0, forks.generation
        start = self._end
        try:
            stop = self._written(tree, start)
        except OSError as error:  # the file has no name
            folder = tempfile.gettempdir() if self._folder is None else self._folder
            raise OSError(error.errno, error.strerror, os.fspath(folder)) from error
        self._end = -(-stop // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
        return Spooled(self._file, start, stop - start)

    def _written(self, tree: Tree, start: int) -> int:
        """Write a tree at a place, and return its end."""
        file = self._file.opened
        file.seek(start)
        for chunk in header.chunks(*described("save", tree, None, None)):
            left = memoryview(chunk).cast("B")
            while left:
                left = left[file.write(left) :]
        return file.tell()


class _RowBlock(NamedTuple):
    """Consecutive rows: their leaves, or their place in a file."""

    length: int
    nbytes: int
    leaves: RowLeaves | Spooled

    def read(self) -> RowLeaves:
        """Return the rows, after loading them if they are in a file."""
        if not isinstance(self.leaves, Spooled):
            return self.leaves
        return _decoded(self.leaves.read())

    def written(self) -> RowLeaves:
        """Return the rows as they are in a file: what is not a tensor is a list of one, its encoding."""
        if isinstance(self.leaves, Spooled):
            written: RowLeaves = self.leaves.read()
            return written
        return [leaf if isinstance(leaf, torch.Tensor) else [codec.encode(leaf)] for leaf in self.leaves]


class Store:
    """Rows in the order in which they were added.

    Args:
        spill_nbytes: The approximate number of bytes held in memory; None: everything.
        directory: The folder for the file; None means the usual one for temporary files. The file has no name, so that
            nothing is left of it even if the process is killed.

    Attributes:
        nbytes: The bytes of all rows, in memory and in files.

    Example:
        >>> store = Store()
        >>> store.add(torch.tensor([7, 5]), [torch.tensor([70, 50]), ["g", "e"]], 40)
        >>> store.rows(torch.tensor([1]))
        [tensor([50]), ['e']]
    """

    def __init__(self, spill_nbytes: int | None = None, directory: str | os.PathLike[str] | None = None) -> None:
        self._limit, self._directory = spill_nbytes, directory
        self.clear()

    def clear(self) -> None:
        """Discard all rows; nothing is left of the file once no tensor is mapped from it."""
        self.nbytes = self._held = 0
        self._blocks: list[_RowBlock] = []
        self._open: list[_RowBlock] = []
        self._indices: list[torch.Tensor] = []
        self._spool = Spool(self._directory)
        self._order: torch.Tensor | None = None

    def __len__(self) -> int:
        return sum([len(part) for part in self._indices])

    @property
    def indices(self) -> torch.Tensor:
        """The index of every row."""
        if len(self._indices) != 1:
            self._indices = [torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *self._indices])]
        return self._indices[0]

    def between(self, first: int, last: int) -> torch.Tensor:
        """Return the positions of the rows whose indices are in ``range(first, last)``, in index order."""
        if self._order is None:
            self._order = torch.argsort(self.indices, stable=True)
        bounds = torch.tensor([first, last], device="cpu")
        begin, end = torch.searchsorted(self.indices, bounds, sorter=self._order).tolist()
        return self._order[begin:end]

    def add(self, indices: torch.Tensor, leaves: RowLeaves, nbytes: int) -> None:
        """Add rows.

        Args:
            indices: The indices of the rows.
            leaves: The rows of each column. No one else may change them.
            nbytes: The bytes of the rows.
        """
        self._order = None
        self._indices.append(indices)
        self._open.append(_RowBlock(len(indices), nbytes, leaves))
        self.nbytes += nbytes
        self._held += nbytes
        if sum([block.nbytes for block in self._open]) >= _BLOCK:
            self._seal()

    def state(self) -> dict[str, Any]:
        """Return all rows, in blocks; those in files are mapped, not read."""
        self._seal()
        blocks = [{"rows": one.length, "nbytes": one.nbytes, "leaves": one.written()} for one in self._blocks]
        return {"indices": self.indices, "blocks": blocks}

    def load(self, indices: torch.Tensor, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Add copies of the rows of a ``state``; none if an object cannot be decoded.

        Raises:
            ValueError: Indices and rows do not fit together.
        """
        counts = [block["rows"] for block in blocks]
        decoded = [_decoded(_cloned(block["leaves"])) for block in blocks]
        lengths = [len(leaf) == count for count, leaves in zip(counts, decoded, strict=True) for leaf in leaves]
        if sum(counts) != len(indices) or not all(lengths):
            raise ValueError(
                "load_state_dict: the state does not have one row of each column for each index; it was changed"
            )
        for block, leaves, part in zip(blocks, decoded, indices.split(counts), strict=True):
            self.add(part.clone(), leaves, block["nbytes"])

    def rows(self, positions: torch.Tensor) -> RowLeaves:
        """Return the rows at these positions, counted from the first one added; at least one."""
        self._seal()
        ends = torch.tensor([block.length for block in self._blocks], device="cpu").cumsum(0)
        numbers = torch.bucketize(positions, ends, right=True)
        parts = []
        for number in numbers.unique().tolist():
            block = self._blocks[number]
            here = positions[numbers == number] - int(ends[number]) + block.length
            chosen = _as_slice(here)
            parts.append([taken(leaf, chosen) for leaf in block.read()])
        back = _as_slice(torch.argsort(torch.argsort(numbers, stable=True)))
        return [taken(_whole(column), back) for column in zip(*parts, strict=True)]

    def _seal(self) -> None:
        """Join the rows added last to one block, and write blocks to the file while the memory limit is exceeded."""
        if self._open:
            columns = zip(*[block.read() for block in self._open], strict=True)
            length, nbytes = sum([block.length for block in self._open]), sum([block.nbytes for block in self._open])
            self._blocks.append(_RowBlock(length, nbytes, [_whole(column) for column in columns]))
            self._open = []
        for i, block in enumerate(self._blocks):
            if self._limit is None or self._held <= self._limit:
                break
            if not isinstance(block.leaves, Spooled):
                self._blocks[i] = block._replace(leaves=self._spool.append(block.written()))
                self._held -= block.nbytes


def _decoded(written: RowLeaves) -> RowLeaves:
    """Return rows as they are in memory."""
    return [codec.decode(leaf[0]) if isinstance(leaf, list) else leaf for leaf in written]


def _cloned(written: RowLeaves) -> RowLeaves:
    """Return copies, whose memory nobody else changes."""
    return [[leaf[0].clone()] if isinstance(leaf, list) else leaf.clone() for leaf in written]


def _as_slice(positions: torch.Tensor) -> torch.Tensor | slice:
    """Return consecutive positions as a slice, so that nothing is copied."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions) and bool((positions.diff() == 1).all()):
        return slice(first, last + 1)
    return positions


def copied(columns: Mapping[str, Tree], count: int) -> tuple[Schema, RowLeaves, int]:
    """Split the data of one update into columns, and copy their rows.

    Args:
        columns: Trees of tensors, arrays and lists with one row per sample.
        count: The number of rows that each must have.

    Returns:
        The schema, a copy of each column's rows on the CPU, and their bytes.

    Raises:
        ValueError: A column has another number of rows, or is not one row per sample.
        TypeError: A tensor is not dense, an array is masked, or an item of a list cannot be pickled.
    """
    values, spec = split(columns, has_lists=True)
    if spec.plain:
        raise ValueError(f"MetricCollector: {spec.plain[0][0]} is {spec.plain[0][1]!r:.60}, not one row per sample")
    for path, value in zip(spec.paths, values, strict=True):
        rows = len(value) if isinstance(value, list | tuple) or np.ndim(value) else None
        if rows != count:
            said = "one value" if rows is None else some(rows, "row", "rows")
            raise ValueError(f"MetricCollector: {path} has {said}, indices has {count}; pass one row per sample")
    found = [_copy(*each) for each in zip(values, spec.paths, strict=True)]
    order = sorted(range(len(values)), key=spec.paths.__getitem__)  # dicts may have their keys in another order
    leaves, nbytes = [found[i][0] for i in order], sum([size for _, size in found])
    types = [_type_of(spec.paths[i], values[i], rows) for i, rows in zip(order, leaves, strict=True)]
    places = sorted(range(len(values)), key=order.__getitem__)
    return Schema(types, spec.rebuild(places)), leaves, nbytes


def _whole(parts: Sequence[Any]) -> Any:
    """Return the rows of parts of a column, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else concatenated(parts)


def nbytes_of(rows: Any) -> int:
    """Return the bytes of a column's rows in the store.

    Raises:
        TypeError: An item cannot be pickled.
    """
    nbytes: int = codec.EncodedObject(rows).nbytes if _has_objects(rows) else rows.nbytes
    return nbytes


def _has_objects(rows: Any) -> bool:
    return isinstance(rows, list) or (isinstance(rows, np.ndarray) and rows.dtype.hasobject)


def _copy(value: Any, path: str) -> tuple[Any, int]:
    """Copy the rows, and return their bytes, too."""
    if isinstance(value, torch.Tensor):
        tensor = as_tensor(value, path).to("cpu", copy=True, memory_format=torch.contiguous_format)
        return tensor, tensor.nbytes
    if isinstance(value, np.ndarray):
        check_unmasked(value, path)
        if not value.dtype.hasobject and not is_numeric(value):
            return value.copy(), value.nbytes
    rows = [*value] if isinstance(value, list | tuple) else value
    if _has_objects(rows):
        message = codec.EncodedObject(rows)  # nobody can change plain items; the others are copied as if they travelled
        is_fixed = isinstance(rows, list) and are_plain(rows)
        return rows if is_fixed else codec.decode(message.joined()), message.nbytes
    tensor = as_tensor(rows, path).clone()
    return tensor, tensor.nbytes


def _type_of(path: str, value: Any, rows: Any) -> ColumnType:
    if isinstance(rows, list):
        return ColumnType(path, "list")
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    dtype = rows.dtype if isinstance(rows, np.ndarray) else dtype_name(rows.dtype)
    return ColumnType(path, kind, dtype, tuple(rows.shape[1:]))
