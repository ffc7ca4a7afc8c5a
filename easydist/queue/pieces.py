"""Splitting of messages into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def cut(parts: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Yield pieces of ``nbytes`` each; the last one may be shorter.

    Example:
        >>> parts = [memoryview(b"abc"), memoryview(b"defgh")]
        >>> [b"".join(piece) for piece in cut(parts, 4)]
        [b'abcd', b'efgh']
    """
    piece: list[memoryview] = []
    room = nbytes
    for part in parts:
        while len(part) >= room:
            yield [*piece, part[:room]]
            piece, part, room = [], part[room:], nbytes
        if len(part):
            piece.append(part)
            room -= len(part)
    if piece:
        yield piece
