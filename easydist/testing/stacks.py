"""Detection of the end of a ``faulthandler`` dump.

``faulthandler`` writes line by line, straight from the signal handler, so that it also shows a process stuck in C; and
it writes no mark at the end. But the main thread comes last, and its outermost frames never change: a dump made at the
start shows the end of every later one.
"""

from __future__ import annotations

import re

_IDENT = re.compile(r"hread (0x[0-9a-f]+)")


def is_whole(dump: str, first: str) -> bool:
    r"""True if a dump of all threads is complete.

    Args:
        dump: The part written so far.
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
