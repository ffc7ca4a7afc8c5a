"""Python's garbage collector, which runs when many objects have been made, garbage or not."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects that stay, without a look through all objects of the process at every quarter that they add.

    The garbage of other threads waits as well, so nothing long runs in it.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
