"""Memory of this process. Pages that a forked rank shares with others until one of them writes count as its own."""

import ctypes
import gc
from pathlib import Path


def _read(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def own():
    """Return the bytes of its own memory, without pages of files and without shared memory."""
    return _read("RssAnon")


def give_back():
    """Give the system the memory that has been freed, which would be used again, and not count."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_above(call):
    """Return the result of ``call``, and the bytes that this process used at its peak beyond what it used before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = _read("VmRSS")
    result = call()
    return result, _read("VmHWM") - before
