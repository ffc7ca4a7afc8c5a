"""Which bytes travel in which message, and from whom: worked out alike on every rank, from the header alone.

Large blocks travel alone, so that they need not be packed, cut to a fraction of the bucket; small ones of one source
and device type share a message of at most that size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from easydist.verbs.buckets import LARGE
from easydist.weights.blocks import Block, cut

SHARES = 4
"""Messages of the largest size that fit a bucket: so many may be under way."""


class Part(NamedTuple):
    """A block of an entry, and the bytes that it has."""

    entry: int
    block: Block
    nbytes: int

    def of(self, buffer: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
        """The values, as a view of a message's buffer in which they begin at ``start``."""
        return buffer.narrow(0, start, self.nbytes).view(dtype).view(self.block.shape)


class Message(NamedTuple):
    """What travels at once.

    Attributes:
        root: Who sends it.
        kind: The device type of its data.
        parts: In the order of their bytes; item sizes never rise.
        nbytes: Of all parts.
    """

    root: int
    kind: str
    parts: tuple[Part, ...]
    nbytes: int


class Item(NamedTuple):
    """An entry of a header, to be sent.

    Attributes:
        dtype: Its dtype on the wire.
        kind: The device type of its data.
        blocks: Who sends which block of it.
    """

    dtype: torch.dtype
    kind: str
    blocks: Sequence[tuple[int, Block]]


def schedule(items: Iterable[Item], bucket_nbytes: int) -> list[Message]:
    """The messages, in the order in which all ranks exchange them.

    Args:
        items: By falling item size.
        bucket_nbytes: The bytes that may be under way; a message has at most a quarter of them.

    Example:
        >>> from easydist.weights.blocks import whole
        >>> items = [Item(torch.uint8, "cpu", [(0, whole((n,)))]) for n in (3 << 20, 5, 6)]
        >>> [(m.nbytes, [part.entry for part in m.parts]) for m in schedule(items, 8 << 20)]
        [(2097152, [0]), (1048576, [0]), (11, [1, 2])]
    """
    limit = max(1, bucket_nbytes // SHARES)
    messages: list[Message] = []
    waiting: dict[tuple[int, str], list[Part]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for entry, item in enumerate(items):
        for root, part in _parts(entry, item, limit):
            key = root, item.kind
            if part.nbytes >= min(LARGE, limit):
                messages.append(Message(*key, (part,), part.nbytes))
                continue
            if sizes.get(key, 0) + part.nbytes > limit:
                messages.append(Message(*key, tuple(waiting.pop(key)), sizes.pop(key)))
            waiting.setdefault(key, []).append(part)
            sizes[key] = sizes.get(key, 0) + part.nbytes
    return messages + [Message(*key, tuple(parts), sizes[key]) for key, parts in waiting.items()]


def _parts(entry: int, item: Item, limit: int) -> Iterator[tuple[int, Part]]:
    size = item.dtype.itemsize
    for root, block in item.blocks:
        if block.numel:
            for part in cut(block, max(1, limit // size)):
                yield root, Part(entry, part, part.numel * size)
