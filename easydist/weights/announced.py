"""What the header of a broadcast says, on every rank."""

from __future__ import annotations

import functools
from typing import Any

from easydist.format import header
from easydist.format.header import Entry
from easydist.weights.blocks import whole
from easydist.weights.likeness import LONGEST
from easydist.weights.schedule import Item, Message, schedule
from easydist.weights.source import METADATA


class Announced:
    """What a header says of the entries that come.

    Args:
        encoded: Its bytes.

    Raises:
        WireError: They are no valid header.

    Attributes:
        about: What it says besides, by name.
        entries: In the order of their bytes.
        names: Under which name each entry arrives, and which entry that is; None: it is no tensor.
        kinds: The device types of the entries.
        dtypes: Likewise.
        index: The places of the entries in this order, by their keys.
        boxes: All of each entry.
        is_kept: Whether the same header gives the same object again.
    """

    def __init__(self, encoded: bytes) -> None:
        head = header.decode(encoded, apart=True)
        self.about: dict[str, Any] = header.parse_json(head.metadata[METADATA].encode())
        self.entries: list[Entry] = head.entries
        self.names: dict[str, str | None] = self.about["names"]
        self.kinds: list[str] = [self.about["kinds"].get(entry.name, "cpu") for entry in self.entries]
        self.dtypes = [entry.dtype for entry in self.entries]
        self.index = {entry.name: i for i, entry in enumerate(self.entries)}
        self.is_kept = len(encoded) <= LONGEST
        self.boxes = [whole(entry.shape) for entry in self.entries]

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages, where the first source has all of it."""
        first = self.about["sources"][0]
        rows = zip(self.dtypes, self.kinds, self.boxes, strict=True)
        items = [Item(dtype, kind, [(first, box)]) for dtype, kind, box in rows]
        return schedule(items, self.about["bucket"])

    @property
    def nbytes(self) -> int:
        """Of all data."""
        return self.entries[-1].stop if self.entries else 0

    def entry(self, key: str) -> Entry:
        """The entry with this key."""
        return self.entries[self.index[key]]

    def extra(self) -> set[str]:
        """The keys of tensors that are inside of entries which are none themselves."""
        return self.index.keys() - {key for key in self.names.values() if key is not None}


def announced(encoded: bytes) -> Announced:
    """What a header says; one that has come before is not read again, unless it is very long."""
    return _known(encoded) if len(encoded) <= LONGEST else Announced(encoded)


_known = functools.lru_cache(maxsize=4)(Announced)
