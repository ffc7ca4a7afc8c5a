"""The end of a wait for a message that gloo has lost.

gloo writes a message once the other rank has announced that it receives. If the connection breaks at that very moment
(seen once in 150 times that a rank was stopped, and went on after the others had given it up), gloo forgets the
message: it closes the connection, but no wait for the message ever ends. Only its C++ has a method for that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

_ABORT = "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"
_TABLE = "_ZTVN4c10d16ProcessGroupGloo8SendWorkE"
"""The method, and the table of virtual methods by which an object of its class is recognised."""


def end_wait(work: dist.Work) -> None:
    """End another thread's wait for a message that is being sent: ``work.wait()`` returns False there.

    It does nothing for any other work, or in a torch that is built in another way: there, a verb's wait for a lost
    message goes on, and a communicator's ends with the operation's time limit.
    """
    if (found := _method()) is not None:
        table, abort = found
        this = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
        if this and ctypes.c_void_p.from_address(this).value == table:
            abort(this)


@functools.cache
def _method() -> tuple[int, Callable[[int], None]] | None:
    """Return the address of the table, and the method; None if this torch does not have them."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE)) + 2 * ctypes.sizeof(ctypes.c_void_p)
        abort = getattr(library, _ABORT)
    except (OSError, ValueError, AttributeError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return table, abort
