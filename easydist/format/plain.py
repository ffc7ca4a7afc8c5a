"""Pickles of plain values, which pickle itself may read: they name no global, so that there is nothing to call.

Numbers of the memo, which could request any amount of memory, do not occur in protocol 5.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Iterable

_SHORT = 1024
"""The bytes up to which a pickle of plain values is left to pickle itself: the most keys of one hash cost little."""

_HEAD = pickle.PROTO + b"\x05"
_BEGIN, _END = _HEAD + pickle.EMPTY_LIST + pickle.MARK, pickle.APPENDS + pickle.STOP


def _sized(code: bytes, lengths: Iterable[int]) -> bytes:
    """Return the pattern of an opcode that is followed by a length in one byte, and as many bytes."""
    return re.escape(code) + b"(?:%s)" % b"|".join(b"%s.{%d}" % (re.escape(bytes([n])), n) for n in lengths)


@functools.cache
def _plain() -> re.Pattern[bytes]:
    """Return the pattern of a pickle; its groups are the part after the head, tuples, and values in several places."""
    single = pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.MARK
    single += pickle.MEMOIZE + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS
    tuples = pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.TUPLE
    sizes = (pickle.BININT1, 1), (pickle.BININT2, 2), (pickle.BININT, 4), (pickle.BINFLOAT, 8)
    # Each opcode matches in one way only, so that what does not match is found out in as many steps as it has bytes.
    every = [b"[%s]" % re.escape(single), *[re.escape(code) + b".{%d}" % n for code, n in sizes]]
    every += [_sized(code, range(128)) for code in (pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES)]
    every += [_sized(pickle.LONG1, range(5, 10)), b"([%s])" % re.escape(tuples), b"(%s.)" % re.escape(pickle.BINGET)]
    head = re.escape(_HEAD) + b"(?:%s.{8})?" % re.escape(pickle.FRAME)
    return re.compile(head + b"((?:%s)*)" % b"|".join(every) + re.escape(pickle.STOP), re.DOTALL)


def listed(data: bytes | memoryview) -> bytes | None:
    """Return the pickle of a list of which the value is the only item, for pickle to read; None if it is not plain.

    Pickle ignores what else is left on its stack at the end. In a list, that is more or fewer items, or an error.

    Args:
        data: A whole pickle.

    Example:
        >>> [listed(pickle.dumps(value, 5)) is None for value in ([1, "a", None], {"a": (1.5, b"b")}, {1}, print)]
        [False, False, True, True]
        >>> pickle.loads(listed(pickle.dumps({"a": 1}, 5)))
        [{'a': 1}]

    Cost: 1 µs for a small dict.
    """
    found = _plain().fullmatch(data) if len(data) <= _SHORT else None
    # A tuple in several places may take long: hashing it hashes all of its items again, at every level.
    return None if found is None or (found[2] and found[3]) else _BEGIN + found[1] + _END
