"""Schedules of messages: who sends to whom, as pure functions of a rank and the number of ranks.

Times are those of ranks that share two cores (``benchmarks/scale.py``); counts of rounds and messages hold anywhere.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

DOUBLING_FROM = 8
"""The number of ranks from which ``doubling`` is faster than messages to all others at once: on 6 ranks it takes 0.7
times as long, but between hosts, where a round costs more than a message, 1.2 times. On 8 ranks it takes 0.5 times as
long, on 32 ranks 0.2."""

_DOUBLED, _DOUBLED_EACH = 1 << 17, 1 << 12
"""The most bytes of a rank that ``doubling`` may move, and the same for each rank of the group: every byte is copied
twice more, and some messages become so long that a thread has to wait for them. With 64 KB on 8 ranks it takes 1.7
times as long as messages to all, on 16 ranks 0.5, on 32 ranks 0.4; with 1 MB on 32 ranks 1.15."""

_SCATTERED_FROM, _SCATTERED = 4, 1 << 20
"""The number of ranks, and the bytes for each of them, from which a broadcast is scattered first. Its source then sends
the data twice at most, instead of log₂ W times along a tree, and each rank sends its part to all others."""


class Round(NamedTuple):
    """A round of ``doubling`` on one rank, which holds the blocks of itself and of the ranks that follow it.

    Attributes:
        dst: The rank to which it sends its first blocks.
        src: The rank from which it receives the blocks that follow its own.
        held: The number of blocks that it holds before.
        blocks: The number of blocks that it sends, and receives.
    """

    dst: int
    src: int
    held: int
    blocks: int


@functools.cache
def doubling(rank: int, size: int) -> tuple[Round, ...]:
    """Return the rounds in which each rank gets a block of every other: ⌈log₂ W⌉, with one message each.

    Rank r receives from r + 1, r + 2, r + 4, …, modulo the number of ranks.

    Example:
        >>> [(one.src, one.blocks) for one in doubling(0, 6)]
        [(1, 1), (2, 2), (4, 2)]

    Source: Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, 1997.
    """
    distances = [1 << k for k in range((size - 1).bit_length())]
    return tuple(Round((rank - d) % size, (rank + d) % size, d, min(d, size - d)) for d in distances)


@functools.cache
def tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Return the place from which a place gets a broadcast, and those to which it passes it on, along a binomial tree.

    The root is place 0. Place p gets the data from p less its lowest bit.

    Example:
        >>> [tree(place, 4) for place in range(4)]
        [(None, [2, 1]), (0, []), (0, [3]), (2, [])]
    """
    bits = [1 << k for k in range(size.bit_length()) if not place or 1 << k < place & -place]
    # The farthest first, because it has the most ranks to pass the data on to.
    children = [place + bit for bit in reversed(bits) if place + bit < size]
    return place & (place - 1) if place else None, children


def is_doubled(size: int, nbytes: int) -> bool:
    """True if ranks exchange their data by ``doubling``; else each sends it to all others at once.

    Args:
        size: The number of ranks.
        nbytes: The bytes of all ranks together.
    """
    return size >= DOUBLING_FROM and nbytes <= size * min(_DOUBLED, size * _DOUBLED_EACH)


def is_scattered(size: int, nbytes: int) -> bool:
    """True if a broadcast of ``nbytes`` is scattered first; else it goes along a ``tree``."""
    return size >= _SCATTERED_FROM and nbytes >= size * _SCATTERED
