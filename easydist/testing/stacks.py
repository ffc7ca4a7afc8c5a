"""Recognise the end of what ``faulthandler`` writes.

It writes line by line, straight from the signal handler, so that a process that is stuck in C is shown too; and it
puts no mark at the end. But the main thread comes last, and its outermost frames never change: a dump that was made
at the start shows how every later one ends.
"""

from __future__ import annotations

import re

_IDENT = re.compile(r"hread (0x[0-9a-f]+)")


def is_whole(dump: str, first: str) -> bool:
    r"""True if a dump of all threads has been written to its end.

    Args:
        dump: As much of it as there is.
        first: A dump that the main thread made of itself, before any task and any other thread.

    Example:
        >>> first = "Current thread 0x1 (most recent call first):\n  File a, line 9 in work\n  File b, line 1 in run\n"
        >>> dump = "Thread 0x1 (most recent call first):\n  File c, line 5 in wait\n  File a, line 9 in work\n"
        >>> is_whole(dump, first), is_whole(dump + "  File b, line 1 in run\n", first)
        (False, True)
    """
    header, _, frames = first.partition("\n")
    main, outermost = _IDENT.findall(header), frames.partition("\n")[2]
    thread = dump.rpartition("\n\n")[2]
    if thread == "...\n":  # more threads than faulthandler shows
        return True
    is_main = bool(main) and main == _IDENT.findall(thread.partition("\n")[0])
    return is_main and thread.endswith((outermost, "\n  ...\n"))  # the dots: more frames than it shows
