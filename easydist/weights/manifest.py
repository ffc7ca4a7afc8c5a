"""The decoded header of a broadcast, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from easydist.agreement.disagreement import Row
from easydist.data.packing import type_text
from easydist.format import header
from easydist.format.header import Entry
from easydist.weights.blocks import Block, apart, deliveries, whole
from easydist.weights.schedule import Packet, ScheduledEntry, schedule
from easydist.weights.source import LONGEST, METADATA

_KEPT = 100_000
"""The most parts of a schedule that is kept: some 50 MB."""

Blocks = Mapping[int, Mapping[str, Sequence[Sequence[int]] | None]]
"""By rank and name, the block of an entry that a rank holds or wants; None is nothing of it."""


class Manifest:
    """The decoded header of the entries that arrive.

    Args:
        encoded: The header's bytes.

    Raises:
        WireError: They are not a valid header.

    Attributes:
        about: The header's further contents, by name.
        entries: The entries in the order of their bytes.
        names: The names under which entries arrive, and the key of each one's entry; None if it is not a tensor.
        kinds: The device types of the entries.
        dtypes: The dtypes of the entries.
        index: The positions of the entries in this order, by their keys.
        boxes: The block of each entry that covers all of it.
        layout: A value that is equal if the memory for one header's entries fits those of another.
        is_kept: True if the same header gives the same object again.
    """

    def __init__(self, encoded: bytes) -> None:
        head = header.decode(encoded, apart=True)
        self.about: dict[str, Any] = header.parse_json(head.metadata[METADATA].encode())
        self.entries = head.entries
        self.names: dict[str, str | None] = self.about["names"]
        self.kinds: list[str] = [self.about["kinds"].get(entry.name, "cpu") for entry in self.entries]
        self.dtypes = [entry.dtype for entry in self.entries]
        self.index = {entry.name: i for i, entry in enumerate(self.entries)}
        self.is_kept = len(encoded) <= LONGEST
        self.boxes = [whole(entry.shape) for entry in self.entries]
        self.layout = self.entries, self.names, self.kinds
        self._scheduled: tuple[Any, list[Packet]] | None = None

    def packets(self, held: Blocks, wanted: Blocks, overlap: bool = False) -> list[Packet]:
        """Return the schedule. Each block of each entry goes from the first source that holds it to those that want it.

        The last one is kept for the next version, unless it has very many parts.

        Args:
            held: The shards of each source; an entry of which there are none comes whole from the first source.
            wanted: For each receiver, the entries of which it does not want all.
            overlap: True if the sources have the same values, so that it does not matter whose shards overlap.

        Raises:
            ValueError: The sources do not hold all of an entry.
        """
        asked, last = (held, wanted, overlap), self._scheduled  # another thread may replace it
        if last is not None and last[0] == asked:
            return last[1]
        packets = schedule(self._items(held, wanted, overlap), self.about["bucket"], in_order=True)
        if sum(len(packet.parts) for packet in packets) <= _KEPT:
            self._scheduled = asked, packets
        return packets

    def _items(self, held: Blocks, wanted: Blocks, overlap: bool) -> Iterator[ScheduledEntry]:
        sources = self.about["sources"]
        for entry, kind, box in zip(self.entries, self.kinds, self.boxes, strict=True):
            blocks = _of_entry(entry.name, {rank: held.get(rank, {}) for rank in sources}, box if overlap else None)
            blocks = tuple(apart(blocks)) if overlap else blocks
            boxes = _of_entry(entry.name, wanted, box)
            try:
                found = deliveries(entry.shape, blocks or ((sources[0], box),), boxes)
            except ValueError:
                raise ValueError(
                    f"ranks {sources} together do not hold all of {entry.name}\nPass src= all ranks of its mesh, and "
                    "no others; each of them has to pass its own shards."
                ) from None
            yield ScheduledEntry(entry.dtype, kind, found)

    def differing(self, other: Manifest) -> list[Row]:
        """Return the entries that a further source has otherwise than this first one."""
        theirs, ours = ({one.name: type_text(one.dtype, one.shape) for one in a.entries} for a in (self, other))
        rows = [(name, theirs.get(name, "missing"), ours.get(name, "missing")) for name in theirs.keys() | ours.keys()]
        return sorted(row for row in rows if row[1] != row[2])

    def entry(self, key: str) -> Entry:
        """Return the entry with this key."""
        return self.entries[self.index[key]]

    def extra(self) -> set[str]:
        """Return the keys of tensors inside of entries that are not tensors themselves."""
        return self.index.keys() - {key for key in self.names.values() if key is not None}


def _of_entry(name: str, blocks: Blocks, otherwise: Block | None) -> tuple[tuple[int, Block], ...]:
    """Return the ranks that hold or want a block of an entry, and that block; ``otherwise`` if a rank names none."""
    found = {rank: one.get(name, otherwise) for rank, one in blocks.items()}
    return tuple([(rank, Block(*map(tuple, one))) for rank, one in found.items() if one is not None])


def manifest(encoded: bytes) -> Manifest:
    """Decode a header. The results of recent headers are reused, except for very long ones."""
    return _known(encoded) if len(encoded) <= LONGEST else Manifest(encoded)


_known = functools.lru_cache(maxsize=4)(Manifest)
