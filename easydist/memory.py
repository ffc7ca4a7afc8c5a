"""A pool of huge-page memory for large results, and a function that copies between addresses.

Pages that are new to the process cost more than the copy into them: 12 ms for 32 MB, whereas the copy takes 3 ms. So
the memory of a large tensor is kept after its last reference is gone, for the next tensor of about its size.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

_LARGE = 1 << 18
"""The bytes from which the memory of a tensor comes from the pool; malloc serves most smaller ones from its heap."""

_KEPT = 1 << 28
"""The most bytes that a process keeps for later results."""

_HUGE_PAGE = 1 << 21
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")

_free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)
"""The free memory by length. Only single atomic steps change it: tensors are freed in any thread, at any time."""


kept = torch.inference_mode(False)
"""A decorator for functions that make tensors for later calls or other threads: inference mode makes read-only ones."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int = "cpu") -> torch.Tensor:
    """Return a tensor as ``torch.empty`` does; a large one on the CPU gets reused memory, and cannot grow in place.

    Args:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        device: The device of the tensor.

    Cost: 5 µs, if free memory of this size is available.

    Example:
        >>> empty((2, 3), torch.float32).shape
        torch.Size([2, 3])
    """
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes >= _LARGE and _HAS_HUGE_PAGES and torch.device(device).type == "cpu":
        with contextlib.suppress(OSError, OverflowError):  # too many mappings, or too large a size
            return torch.frombuffer(_lent(nbytes), dtype=dtype).resize_(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype, device=device)


_SMALL = 1 << 16
"""The bytes up to which a copy does not release the interpreter lock."""

_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_ARGUMENTS = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_copy_at_once = ctypes.PYFUNCTYPE(None, *_ARGUMENTS)(_MEMMOVE)
_copy_aside = ctypes.CFUNCTYPE(None, *_ARGUMENTS)(_MEMMOVE)


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy memory between addresses: 256 bytes in a quarter of the time of ``Tensor.copy_``, 16 MB as fast."""
    (_copy_at_once if nbytes <= _SMALL else _copy_aside)(target, source, nbytes)


def release() -> None:
    """Return all memory that is kept for later results to the system.

    Example:
        >>> import easydist
        >>> easydist.memory.release()
    """
    _free.clear()


class _Lent(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array of bytes that returns its memory to the pool when it is freed."""

    memory: mmap.mmap | None = None
    room = 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Views have no memory of their own. The default argument is bound because the module's names may be gone when
        # the interpreter ends.
        if self.memory is not None and not is_finalizing():
            _give_back(self.memory, self.room)


def _lent(nbytes: int) -> _Lent:
    room = _rounded(nbytes)
    try:
        memory = _free[room].pop()
    except IndexError:
        memory = _new(room)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE if room >= _HUGE_PAGE else 0
    lent = whole[start : start + nbytes].view(_Lent)
    lent.memory, lent.room = memory, room
    return lent


def _rounded(nbytes: int) -> int:
    """Return the length that is used for all tensors of about this size: at most an eighth more.

    Example:
        >>> [_rounded(n << 20) for n in (1, 9, 16, 17)]
        [1048576, 9437184, 16777216, 18874368]
    """
    unit = 1 << nbytes.bit_length() - 4
    return -(-nbytes // unit) * unit


def _new(room: int) -> mmap.mmap:
    """Return new memory, with room to begin on a huge page."""
    more = _HUGE_PAGE if room >= _HUGE_PAGE else 0
    memory = mmap.mmap(-1, room + more, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have been built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap, room: int) -> None:
    """Keep memory in the pool; if the pool is full, release memory of other sizes first."""
    if _kept() + room > _KEPT:
        for other in [size for size in tuple(_free) if size != room]:
            _free.pop(other, None)
    if _kept() + room <= _KEPT:
        _free[room].append(memory)


def _kept() -> int:
    return sum([room * len(blocks) for room, blocks in tuple(_free.items())])
