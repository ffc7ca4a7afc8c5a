"""The packets of a transfer: their schedule, and those under way.

The schedule is computed on every rank from the same facts, with the same result. Large blocks travel alone, so that
they need no packing, in pieces of a fraction of the bucket. Small ones of the same source, receivers and device type
share a packet of at most that size. A rank that hands over complete entries holds those that lack a part, so in a
broadcast few of them do at any moment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from easydist.base.arguments import integer
from easydist.transport.work import TorchWork
from easydist.verbs.buckets import LARGE
from easydist.weights.blocks import Block, Delivery, cut

SHARES = 4
"""The number of packets of the largest size that fit into the bucket and may be under way."""

_DEPTH = 16
"""The most packets under way, however small they are, as gloo keeps a buffer for each."""


_LEAST = 1 << 10
"""The least bytes of a bucket."""

_Key = tuple[int, tuple[int, ...], str]
"""The root, the receivers and the device type of a packet."""


class BlockPart(NamedTuple):
    """A block of an entry, and its size in bytes."""

    entry: int
    block: Block
    nbytes: int

    def of(self, buffer: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, as a view of a packet's buffer in which they begin at ``start``."""
        return buffer.narrow(0, start, self.nbytes).view(dtype).view(self.block.shape)


class Packet(NamedTuple):
    """The blocks that travel together.

    Attributes:
        root: The rank that sends it.
        ranks: The ranks that receive it, ascending; ``root`` may be one of them.
        kind: The device type of its data.
        parts: The parts in the order of their bytes; item sizes never increase.
        nbytes: The bytes of all parts.
    """

    root: int
    ranks: tuple[int, ...]
    kind: str
    parts: tuple[BlockPart, ...]
    nbytes: int


class ScheduledEntry(NamedTuple):
    """An entry of a header, to be sent.

    Attributes:
        dtype: Its dtype on the wire.
        kind: The device type of its data.
        blocks: The deliveries of its blocks.
    """

    dtype: torch.dtype
    kind: str
    blocks: Sequence[Delivery]


def bucket(nbytes: Any) -> int:
    """Return the argument ``bucket_bytes`` of a call.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small.

    Example:
        >>> bucket(1e6)
        Traceback (most recent call last):
        TypeError: bucket_bytes=1000000.0 is not a number of bytes: pass an integer
    """
    if (found := integer("bucket_bytes", nbytes, "a number of bytes")) < _LEAST:
        raise ValueError(f"bucket_bytes={found} is less than {_LEAST}")
    return found


def schedule(items: Iterable[ScheduledEntry], bucket_nbytes: int, in_order: bool = False) -> list[Packet]:
    """Return the packets, in the order in which all ranks exchange them.

    Args:
        items: The entries, by decreasing item size.
        bucket_nbytes: The most bytes under way; a packet has at most a quarter of them.
        in_order: True if the parts of an entry have to arrive at about the same time. Then a block travels alone if any
            block of its entry is large, and when a packet is full, the others that wait for parts go to its receivers,
            too.

    Example:
        >>> from easydist.weights.blocks import whole
        >>> every = [Delivery(0, (1,), whole((n,))) for n in (3 << 20, 5, 6)]
        >>> items = [ScheduledEntry(torch.uint8, "cpu", [one]) for one in every]
        >>> [(m.nbytes, [part.entry for part in m.parts]) for m in schedule(items, 8 << 20)]
        [(2097152, [0]), (1048576, [0]), (11, [1, 2])]
    """
    limit, packets, waiting = max(1, bucket_nbytes // SHARES), list[Packet](), _Waiting()
    for entry, item in enumerate(items):
        largest = max((one.block.numel for one in item.blocks), default=0) * item.dtype.itemsize
        for key, part in _parts(entry, item, limit):
            if (largest if in_order else part.nbytes) >= min(LARGE, limit):
                packets.append(Packet(*key, (part,), part.nbytes))
                continue
            is_full = waiting.nbytes[key] + part.nbytes > limit
            if is_full or (in_order and waiting.most(key) + part.nbytes > bucket_nbytes):
                packets += map(waiting.packet, waiting.beside(key) if in_order else [key])
            waiting.add(key, part)
    return [*packets, *map(waiting.packet, [*waiting.parts])]


class _Waiting:
    """The parts that wait for others with which to share a packet.

    Attributes:
        parts: The parts of each packet.
        nbytes: Their bytes.
    """

    def __init__(self) -> None:
        self.parts: dict[_Key, list[BlockPart]] = {}
        self.nbytes: Counter[_Key] = Counter()
        self._of_rank: Counter[int] = Counter()

    def add(self, key: _Key, part: BlockPart) -> None:
        """Let a part wait."""
        self.parts.setdefault(key, []).append(part)
        self.nbytes[key] += part.nbytes
        for rank in key[1]:
            self._of_rank[rank] += part.nbytes

    def most(self, key: _Key) -> int:
        """Return the most bytes that wait for one of the receivers of a packet."""
        return max([self._of_rank[rank] for rank in key[1]], default=0)

    def beside(self, key: _Key) -> list[_Key]:
        """Return the packets that wait for any of the receivers of this one, itself included."""
        return [one for one in self.parts if not {*key[1]}.isdisjoint(one[1])]

    def packet(self, key: _Key) -> Packet:
        """Return a packet of the parts that wait for it."""
        nbytes = self.nbytes.pop(key)
        for rank in key[1]:
            self._of_rank[rank] -= nbytes
        return Packet(*key, tuple(self.parts.pop(key)), nbytes)


def _parts(entry: int, item: ScheduledEntry, limit: int) -> Iterator[tuple[_Key, BlockPart]]:
    size = item.dtype.itemsize
    for root, ranks, block in item.blocks:
        if block.numel:
            for part in cut(block, max(1, limit // size)):
                yield (root, ranks, item.kind), BlockPart(entry, part, part.numel * size)


class UnderWay:
    """The packets under way, which end in their order: never more bytes than the bucket has.

    Args:
        bucket_nbytes: The most bytes under way.
        take: A function to call with each packet and its buffer when it has ended.

    Attributes:
        room: The bytes that may still begin.
    """

    def __init__(self, bucket_nbytes: int, take: Callable[[Packet, torch.Tensor], None]) -> None:
        self.room, self._take = bucket_nbytes, take
        self._begun: deque[tuple[Packet, torch.Tensor, TorchWork]] = deque()

    def admit(self, packet: Packet) -> None:
        """Wait for the first packets until there is room for another one."""
        while self._begun and (packet.nbytes > self.room or len(self._begun) == _DEPTH):
            self._end()

    def add(self, packet: Packet, buffer: torch.Tensor, work: TorchWork) -> None:
        """Add a packet that has begun."""
        self._begun.append((packet, buffer, work))
        self.room -= packet.nbytes

    def finish(self) -> None:
        """Wait for all packets."""
        while self._begun:
            self._end()

    def _end(self) -> None:
        packet, buffer, work = self._begun.popleft()
        work.wait()
        self._take(packet, buffer)
        self.room += packet.nbytes


Advance = Callable[[int], None]
"""A function to call with the number of bytes that have moved."""


@contextmanager
def progress(is_shown: bool, nbytes: int, title: str) -> Iterator[Advance]:
    """Show a progress bar once the transfer has taken a second, if requested."""
    if not is_shown:
        yield lambda nbytes: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=nbytes, unit="B", unit_scale=True, delay=1) as bar:
        yield lambda nbytes: bar.update(nbytes) and None
