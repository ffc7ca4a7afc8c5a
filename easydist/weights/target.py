"""What a receiver makes of the entries that come: compared with what it has first, then written."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from easydist import memory
from easydist.data.leaves import Leaves
from easydist.data.packing import dtype_name
from easydist.format import header, outline
from easydist.format.header import Entry
from easydist.typing import Device
from easydist.verbs.sharded import is_sharded
from easydist.weights.blocks import whole
from easydist.weights.places import Place, new, place_of, unpacked
from easydist.weights.receivers import entries_of, memory_of
from easydist.weights.schedule import Item, Message, schedule
from easydist.weights.source import METADATA, Filter, Rename, named

Row = tuple[str, str, str]
"""An entry that does not fit: its name, what comes, what is here."""


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
    """

    def __init__(self, encoded: bytes) -> None:
        head = header.decode(encoded, apart=True)
        self.about: dict[str, Any] = header.parse_json(head.metadata[METADATA].encode())
        self.entries: list[Entry] = head.entries
        self.names: dict[str, str | None] = self.about["names"]
        self.kinds: list[str] = [self.about["kinds"].get(entry.name, "cpu") for entry in self.entries]
        self.dtypes = [entry.dtype for entry in self.entries]
        self.index = {entry.name: i for i, entry in enumerate(self.entries)}

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages, where the first source has all of it."""
        first = self.about["sources"][0]
        rows = zip(self.entries, self.kinds, strict=True)
        items = [Item(entry.dtype, kind, [(first, whole(entry.shape))]) for entry, kind in rows]
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
    return _known(encoded) if len(encoded) <= _KEPT else Announced(encoded)


_KEPT = 1 << 22
"""Bytes up to which a header is kept."""

_known = functools.lru_cache(maxsize=4)(Announced)


class Wanted(NamedTuple):
    """How a receiver wants what comes.

    Attributes:
        keep: Which entries it takes.
        rename: What it calls them.
        strict: Whether its own entries have to be just these.
        grow: Whether its dict becomes the dict that comes: entries are added and removed.
        device: Where new tensors shall be; None: on the type of device where they are on the source.
        pin: Whether new tensors on the CPU are pinned.
    """

    keep: Filter = None
    rename: Rename = None
    strict: bool = True
    grow: bool = False
    device: Device | None = None
    pin: bool = False


class Target:
    """The receiver's side of one call.

    Args:
        into: A module or dict whose tensors are written; None or an empty dict: all are new.
        announced: What comes.
        wanted: How.

    Raises:
        TypeError: ``into`` is neither.
        ValueError: Two entries get one name.
    """

    def __init__(self, into: Any, announced: Announced, wanted: Wanted) -> None:
        self._announced, self._wanted, self._into = announced, wanted, entries_of(into)
        self._mine = self._into.values
        takes_all = wanted.grow or not (self._mine or isinstance(into, nn.Module))
        self._is_strict = wanted.strict and not takes_all
        names = named(announced.names, wanted.keep, wanted.rename)
        self._coming = {m: n for n, m in names.items() if takes_all or wanted.strict or m in self._mine}
        self._places: list[list[Place]] = [[] for _ in announced.entries]
        self._new: dict[str, torch.Tensor] = {}

    def misfit(self) -> list[Row]:
        """How what is here differs from what comes, sorted by name; empty where it does not."""
        rows = [row for name in self._coming if (row := self._compared(name)) is not None]
        if self._is_strict:
            absent = [(name, value) for name, value in self._mine.items() if name not in self._coming]
            filled = {memory_of(self._mine[name]) for name in self._coming if absent and name in self._mine}
            rows += [(name, "missing", _described(one)) for name, one in absent if memory_of(one) not in filled]
        return sorted(rows)

    def _key(self, name: str) -> str | None:
        return self._announced.names[self._coming[name]]

    def _compared(self, name: str) -> Row | None:
        entry = None if (key := self._key(name)) is None else self._announced.entry(key)
        theirs = "no tensor" if entry is None else _text(entry.dtype, entry.shape)
        if name not in self._mine:
            return (name, theirs, "missing") if self._is_strict else None
        value = self._mine[name]
        if entry is None or not isinstance(value, torch.Tensor):
            fits = entry is None and not isinstance(value, torch.Tensor)
        else:
            are_floats = entry.dtype.is_floating_point and value.dtype.is_floating_point
            fits = tuple(value.shape) == entry.shape and (are_floats or value.dtype == entry.dtype)
        return None if fits else (name, theirs, _described(value))

    def allocate(self) -> None:
        """Find or make the memory for all that comes, before the first byte does.

        Raises:
            RuntimeError: There is not enough, or no such device.
            ValueError: A tensor of ``into`` cannot be written.
        """
        made: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        seen: set[tuple[str, Any]] = set()
        written: dict[str, torch.Tensor] = {}
        for name in self._coming:
            key, value = self._key(name), self._mine.get(name)
            if key is None:
                continue
            if name in self._into.writable:
                place = place_of(self._mine[name])
                if (there := (key, memory_of(place.tensor))) not in seen:  # else tied here as on the source
                    seen.add(there)
                    self._places_of(key).append(place)
                    written[name] = place.tensor
                continue
            dtype = self._announced.entry(key).dtype if value is None else value.dtype
            if (key, dtype) not in made:
                made[key, dtype] = self._make(name, key, dtype)
            self._new[name] = made[key, dtype]
        for key in self._announced.extra():
            self._make(key, key, self._announced.entry(key).dtype)
        Leaves(written).check_writable()

    def _places_of(self, key: str) -> list[Place]:
        return self._places[self._announced.index[key]]

    def _make(self, name: str, key: str, dtype: torch.dtype) -> torch.Tensor:
        value = self._mine.get(name)
        if isinstance(value, torch.Tensor) and is_sharded(value):
            raise ValueError(f"[{name!r}] is a DTensor without memory of its own; call model.to_empty(device=…) first")
        device, kind = self._wanted.device, self._announced.kinds[self._announced.index[key]]
        place = new(self._announced.entry(key).shape, dtype, kind if device is None else device, self._wanted.pin)
        self._places_of(key).append(place)
        return place.tensor

    def buffer(self, message: Message, there: torch.device) -> torch.Tensor:
        """Where a message arrives: in its place itself, or in memory for a while."""
        if len(message.parts) == 1:
            (part,) = message.parts
            for place in self._places[part.entry]:
                if (direct := place.direct(part, self._announced.dtypes[part.entry], there)) is not None:
                    return direct
        return memory.empty([message.nbytes], torch.uint8, there)

    def take(self, message: Message, buffer: torch.Tensor) -> None:
        """Write what has arrived, where it has not arrived in its place."""
        targets, values = [], []
        for part, piece in zip(message.parts, unpacked(message, self._announced.dtypes, buffer), strict=True):
            for place in self._places[part.entry]:
                pair = place.view(part, piece)
                if pair is not None and pair[0].data_ptr() != pair[1].data_ptr():
                    targets.append(pair[0])
                    values.append(pair[1])
        if targets:
            torch._foreach_copy_(targets, values)

    def finish(self) -> Any:
        """Hand over what has arrived; the result of the call."""
        tensors = {key: self._places_of(key)[0].tensor for key in self._announced.extra()}
        decoded = outline.decode(self._announced.about["extra"], tensors, None)[0]
        extra = {name: decoded[self._coming[name]] for name in self._coming if self._key(name) is None}
        arrived: dict[str, Any] = {}
        for name in self._coming:  # in the source's order
            arrived |= {name: self._new[name]} if name in self._new else {name: extra[name]} if name in extra else {}
        return self._into.fill(arrived, self._coming if self._wanted.grow else None)


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def _described(value: Any) -> str:
    return _text(value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"
