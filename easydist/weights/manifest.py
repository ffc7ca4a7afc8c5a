"""The decoded header of a broadcast, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from easydist.agreement.disagreement import Row
from easydist.data.packing import type_text
from easydist.format import header
from easydist.format.header import Entry
from easydist.weights.blocks import Block, is_covered, whole
from easydist.weights.schedule import Packet, ScheduledEntry, schedule
from easydist.weights.source import LONGEST, METADATA

Shards = Mapping[int, Mapping[str, Sequence[Sequence[int]]]]
"""The block that each source holds of each sharded entry, by rank and name."""


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

    def packets(self, shards: Shards, only: Container[str] | None = None) -> list[Packet]:
        """Return the schedule. Each block of each entry comes from the first source that holds it.

        Args:
            shards: The shards of each source; an entry of which there are none comes whole from the first source.
            only: The keys of the entries to send; None means all.

        Raises:
            ValueError: The sources do not hold all of an entry.
        """
        if any(shards.values()) or only is not None:
            return schedule(self._items(shards, only), self.about["bucket"], in_order=True)
        return self._unsharded

    @functools.cached_property
    def _unsharded(self) -> list[Packet]:
        return schedule(self._items({}, None), self.about["bucket"], in_order=True)

    def _items(self, shards: Shards, only: Container[str] | None) -> Iterator[ScheduledEntry]:
        sources = self.about["sources"]
        for entry, kind, box in zip(self.entries, self.kinds, self.boxes, strict=True):
            held: dict[Block, int] = {}
            for rank in sources:
                shard = shards.get(rank, {}).get(entry.name)
                if shard is not None and 0 not in shard[1]:
                    held.setdefault(Block(*map(tuple, shard)), rank)
            if held and not is_covered(entry.shape, list(held)):
                raise ValueError(
                    f"ranks {sources} together do not hold all of {entry.name}\nPass src= all ranks of its mesh, and "
                    "no others; each of them has to pass its own shards."
                )
            blocks = [(rank, block) for block, rank in held.items()] or [(sources[0], box)]
            yield ScheduledEntry(entry.dtype, kind, blocks if only is None or entry.name in only else [])

    @property
    def nbytes(self) -> int:
        """The bytes of all data."""
        return self.entries[-1].stop if self.entries else 0

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


def manifest(encoded: bytes) -> Manifest:
    """Decode a header. The results of recent headers are reused, except for very long ones."""
    return _known(encoded) if len(encoded) <= LONGEST else Manifest(encoded)


_known = functools.lru_cache(maxsize=4)(Manifest)
