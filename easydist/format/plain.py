"""Pickles of plain values, which pickle itself may read: they name no global, so that there is nothing to call.

Numbers of the memo, which could request any amount of memory, do not occur in protocol 5.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Iterable

_MOST = 1024
"""The bytes, beside long text and bytes, up to which pickle may read a pickle: keys of one hash cost little then."""

_MARGIN = 140
"""The bytes of the head and of the longest opcode: a row that ends within so many more has been read to its end."""

_REACH = _MOST + _MARGIN

_LONGEST = 1 << 16
"""The bytes of all: from here on, pickle writes long text outside of its frame."""

_STOP = pickle.STOP[0]
_HEAD = pickle.PROTO + b"\x05"
_BEGIN, _END = _HEAD + pickle.EMPTY_LIST + pickle.MARK, pickle.APPENDS + pickle.STOP
_WIDTHS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.SHORT_BINBYTES[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINBYTES[0]: 4}
"""The bytes of the length of text and bytes."""


def _sized(code: bytes, lengths: Iterable[int]) -> bytes:
    """Return the pattern of an opcode that is followed by a length in one byte, and as many bytes."""
    return re.escape(code) + b"(?:%s)" % b"|".join(b"%s.{%d}" % (re.escape(bytes([n])), n) for n in lengths)


@functools.cache
def _plain() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the patterns of opcodes in a row, after the head and anywhere else.

    Their groups are all these opcodes, the last one of a tuple, and the last one of a value in several places.
    """
    single = pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.MARK
    single += pickle.MEMOIZE + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS
    tuples = pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.TUPLE
    sizes = (pickle.BININT1, 1), (pickle.BININT2, 2), (pickle.BININT, 4), (pickle.BINFLOAT, 8)
    # Nothing has to follow a row, so that no other way of matching it is tried: that could take exponential time.
    every = [b"[%s]" % re.escape(single), *[re.escape(code) + b".{%d}" % n for code, n in sizes]]
    every += [_sized(code, range(128)) for code in (pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES)]
    every += [_sized(pickle.LONG1, range(5, 10)), b"([%s])" % re.escape(tuples), b"(%s.)" % re.escape(pickle.BINGET)]
    head, row = re.escape(_HEAD) + b"(?:%s.{8})?" % re.escape(pickle.FRAME), b"((?:%s)*)" % b"|".join(every)
    return re.compile(head + row, re.DOTALL), re.compile(row, re.DOTALL)


def _after_long(data: memoryview, at: int) -> int:
    """Return the position after text or bytes, whose length a pattern cannot count; the end if there is none."""
    width = _WIDTHS.get(data[at], 0)
    first = at + 1 + width
    return min(first + int.from_bytes(data[at + 1 : first], "little"), len(data)) if width else len(data)


def listed(data: memoryview) -> bytes | None:
    """Return the pickle of a list of which the value is the only item, for pickle to read; None if it is not plain.

    Pickle ignores what else is left on its stack at the end. In a list, that is more or fewer items, or an error.

    Args:
        data: A whole pickle.

    Example:
        >>> values = [1, "a", None], {"a": (1.5, b"b")}, "b" * 1000, {1}, print
        >>> [listed(memoryview(pickle.dumps(value, 5))) is None for value in values]
        [False, False, False, True, True]
        >>> pickle.loads(listed(memoryview(pickle.dumps({"a": 1}, 5))))
        [{'a': 1}]

    Cost: 1 µs for a small dict, and 1 µs for each long text in it.
    """
    found = _plain()[0].match(data, 0, _REACH)
    if found is None or found.end() + 1 != len(data):
        return _listed_with_long(data, found) if len(data) <= _LONGEST else None
    row, of_tuple, of_repeated = found.groups()
    # A tuple in several places may take long: hashing it hashes all of its items again, at every level.
    if (of_tuple and of_repeated) or data[-1] != _STOP or len(row) > _MOST:
        return None
    return _BEGIN + row + _END


def _listed_with_long(data: memoryview, found: re.Match[bytes] | None) -> bytes | None:
    """Return the list of a pickle with long text or bytes behind its first row."""
    start, left, tuples, repeated = found.start(1) if found else 0, _MOST, None, None
    while found:
        row, of_tuple, of_repeated = found.groups()
        at, left = found.end(), left - len(row)
        tuples, repeated = tuples or of_tuple, repeated or of_repeated
        if left < 0 or (tuples and repeated) or at == len(data):
            return None
        if data[at] == _STOP and at + 1 == len(data):
            return _BEGIN + data[start:at] + _END
        found = _plain()[1].match(data, after := _after_long(data, at), after + left + _MARGIN)
    return None
