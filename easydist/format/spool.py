"""Trees in a file without a name, which ends with the process, however that ends."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import IO, NamedTuple

from easydist.base import forks
from easydist.format.files import described, tree_in
from easydist.format.header import chunks, decode
from easydist.typing import Tree


class _File:
    """A file without a name, open as long as anything refers to this object."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        # It outlives any block: the rows that are in it are read when they are asked for.
        file: IO[bytes] = tempfile.TemporaryFile(prefix="easydist-", dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self.opened = file


class Spooled(NamedTuple):
    """The place of a tree in a file."""

    file: _File
    start: int
    nbytes: int

    def read(self) -> Tree:
        """Return the tree. It is mapped, not read, so its pages are loaded when they are used."""
        memory = mmap.mmap(self.file.opened.fileno(), self.nbytes, access=mmap.ACCESS_COPY, offset=self.start)
        return tree_in(memory, decode(memory))[0]


class Spool:
    """A file to which trees are appended, each as ``save`` would write it.

    Args:
        folder: The folder of the file; None means the usual one for temporary files.

    Example:
        >>> import torch
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
        start, file = self._end, self._file.opened
        file.seek(start)
        for chunk in chunks(*described("save", tree, None, None)):
            left = memoryview(chunk).cast("B")
            while left:
                left = left[file.write(left) :]
        stop = file.tell()
        self._end = -(-stop // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
        return Spooled(self._file, start, stop - start)
