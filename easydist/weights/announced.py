"""The decoded header of a broadcast, on every rank."""

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

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages if the first source has all of the state dict."""
        first = self.about["sources"][0]
        rows = zip(self.dtypes, self.kinds, self.boxes, strict=True)
        items = [Item(dtype, kind, [(first, box)]) for dtype, kind, box in rows]
        return schedule(items, self.about["bucket"])

    @property
    def nbytes(self) -> int:
        """The bytes of all data."""
        return self.entries[-1].stop if self.entries else 0

    def entry(self, key: str) -> Entry:
        """Return the entry with this key."""
        return self.entries[self.index[key]]

    def extra(self) -> set[str]:
        """Return the keys of tensors inside of entries that are not tensors themselves."""
        return self.index.keys() - {key for key in self.names.values() if key is not None}


def announced(encoded: bytes) -> Announced:
    """Decode a header. The results of recent headers are reused, except for very long ones."""
    return _known(encoded) if len(encoded) <= LONGEST else Announced(encoded)


_known = functools.lru_cache(maxsize=4)(Announced)
