"""Sleeping until another process has changed shared memory, and the order in which changes become visible.

Data that a rank has written into a slot has to become visible before the number that announces it. CPython stores and
loads an aligned 8-byte item of a memoryview with one instruction, and interpreter code runs between any two of them, so
no compiler reorders them. That leaves the processor:

- x86: stores become visible in the order in which they are made, and loads are made in order (the C library ends copies
  that bypass the cache with ``sfence``), so an announcement needs no barrier (``release`` is None). Only a load may
  overtake an earlier store. Therefore ``fence`` is called between announcing and checking for sleepers, and between
  going to sleep and checking for an announcement. It takes and frees a lock: taking one is a locked instruction, which
  is a full barrier.
- other machines (arm64): the writer calls ``membarrier`` before and after the store. The kernel then makes every
  running thread of the registered processes execute a barrier. membarrier(2) states the pairing: if one side calls it,
  program order suffices on the other. Without ``membarrier``, ``Futex`` raises OSError.

If a wake-up got lost nevertheless, the sleeper would lose the time limit of one sleep, and not hang.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

_CALLS = {"x86_64": (202, 324), "aarch64": (98, 283), "riscv64": (98, 283)} if sys.platform == "linux" else {}
"""The system call numbers of futex and membarrier, by machine; on other machines they mean other calls."""

_ORDERED = platform.machine() == "x86_64"
_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET = 9, 10
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
_ALL = 2**31 - 1

give_core: Callable[[], object] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))
"""Let another thread or process run; not every system has ``sched_yield``."""


@functools.cache
def _system_call() -> Callable[..., int]:
    """Return the C library's ``syscall``, looked up only when memory is first shared: not every system has it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes, call.restype = [ctypes.c_long] * 7, ctypes.c_long
    return call


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Futex:
    """One word of shared memory on which all ranks of a segment sleep; any subset of them can be woken.

    All ranks use the same word, so that waking the three others of a group takes one system call. Waking changes the
    word, so that a rank that is about to sleep does not.

    Args:
        memory: The shared memory; its first item, a 32-bit number, is the word.
        address: The address of ``memory``.
        rank: The rank of this process; rank r sleeps on bit r modulo 32.

    Attributes:
        fence: The full barrier, see above.
        release: The barrier to call before an announcement, or None if there is none to call.

    Raises:
        OSError: The order of memory accesses cannot be kept on this machine.
    """

    def __init__(self, memory: memoryview, address: int, rank: int) -> None:
        self._word = memory.cast("B").cast("i")
        self._address, self._rank, self._wakes = address, rank, 0
        self._number, barrier = _CALLS.get(platform.machine(), (0, 0))
        self._call = _system_call() if self._number else None
        self.fence = _locked_instruction() if _ORDERED else _membarrier(barrier)
        self.release = None if _ORDERED else self.fence

    def wake(self, ranks: int) -> None:
        """Wake the sleeping ranks of ``ranks``, which has one bit per rank, modulo 32."""
        self._wakes = (self._wakes + 1) % (1 << 20)
        self._word[0] = self._wakes << 10 | self._rank % 1024  # no two ranks write the same number
        if self._call is not None:
            self._call(self._number, self._address, _FUTEX_WAKE_BITSET, _ALL, 0, 0, ranks)

    def value(self) -> int:
        """Return the number to pass to ``sleep``; call this before the last check that sleeping is necessary."""
        return self._word[0]

    def sleep(self, expected: int, seconds: float) -> None:
        """Sleep until this rank is woken, a signal comes, or the time is over; not if the word has changed."""
        if self._call is not None:
            self._sleep_in_kernel(self._call, expected, seconds)
        else:
            self._doze(expected, seconds)

    def _sleep_in_kernel(self, call: Callable[..., int], expected: int, seconds: float) -> None:
        # This futex operation takes a deadline of the monotonic clock, not a duration.
        whole, rest = divmod(time.monotonic_ns() + int(seconds * 1e9), 1_000_000_000)
        until = _Timespec(whole, rest)
        failed = call(
            self._number, self._address, _FUTEX_WAIT_BITSET, expected, ctypes.addressof(until), 0, 1 << self._rank % 32
        )
        if failed and ctypes.get_errno() == errno.ENOSYS:  # a sandbox may forbid futexes
            self._call = None

    def _doze(self, expected: int, seconds: float) -> None:
        """Poll less and less often, on systems without a futex."""
        until, pause = time.monotonic() + seconds, 50e-6
        while self._word[0] == expected and (left := until - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 5e-3)


def _locked_instruction() -> Callable[[], object]:
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence


def _membarrier(number: int) -> Callable[[], object]:
    if not number or _system_call()(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0, 0, 0, 0):
        raise OSError(
            f"membarrier(2) is not available here ({platform.machine()}), and shared memory needs it on this machine"
        )
    return functools.partial(_system_call(), number, _GLOBAL_EXPEDITED, 0, 0, 0, 0, 0)
