"""A tree between ranks: a header that says all there is to know, then the data.

The header is safetensors' (``header``), with the structure of the tree as its metadata (``outline``) and, under
``easydist.devices``, JSON ``{name: device type}`` of what is not on the CPU. The data is one message for each large
tensor, which is not copied, and one for all others of a device type, packed.

What goes first is an announcement: three u64, the bytes of the header, of the objects, of the data; then these three.
The objects are a ``codec`` message, the list of what JSON and tensors cannot express. The data is there if it is small
and on the CPU; then it is all that goes.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from easydist import memory
from easydist.data import packing
from easydist.errors import WireError
from easydist.format import codec, header, outline
from easydist.format.header import Entry, Header
from easydist.format.targets import Targets
from easydist.groups.communicators import Communicators
from easydist.typing import Tree
from easydist.verbs.buckets import LARGE

DEVICES = "easydist.devices"

Buffers = list[tuple[str, torch.Tensor]]
"""Messages in the order in which they travel: the device type of the data, and what is sent or where it arrives."""


_LENGTHS = struct.Struct("<3Q")
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Outgoing:
    """A tree made ready to be sent.

    Args:
        data: The tree.
        objects: Send what JSON cannot express as objects; else it is refused.
        weights_only: Refuse objects that the restricted decoder refuses.
        metadata: Further text for the header.

    Attributes:
        header: Its bytes.
        objects: The bytes of what JSON cannot express.
        needs_answer: True if a receiver may find that it cannot take the data, though nothing is wrong with it.

    Raises:
        TypeError: The tree holds something that cannot travel.
        UnsafeObjectError: It holds an object that is not allow-listed.
    """

    def __init__(
        self,
        data: Tree,
        objects: bool = False,
        weights_only: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        key = None if metadata else _recipe_key(data)
        found: list[Any] | None = [] if objects else None
        if key is not None and (recipe := _recipes.get(key)) is not None:
            self.header, names = recipe
            self._tensors = [data[name] for name in names]
        else:
            self._write(data, found, metadata)
            if key is not None:
                _keep_recipe(key, self.header, self._names)
        self.objects = _encoded(found, weights_only) if found else _NOTHING
        self._data_nbytes = sum(map(packing.nbytes, self._tensors))
        self._is_inline = False
        self.needs_answer = bool(found) or not all(tensor.is_cpu for tensor in self._tensors)

    def _write(self, data: Tree, found: list[Any] | None, metadata: Mapping[str, str] | None) -> None:
        """Make the header."""
        text, tensors = outline.encode(data, "a tensor dict", "send its parts, or use broadcast_object_list", found)
        devices = {name: tensor.device.type for name, tensor in tensors.items() if not tensor.is_cpu}
        told = {outline.METADATA: text, **({DEVICES: json.dumps(devices)} if devices else {}), **(metadata or {})}
        self.header = torch.frombuffer(bytearray(header.encode(tensors, told)), dtype=torch.uint8)
        self._names = header.order(tensors)
        self._tensors = [tensors[name] for name in self._names]

    def announcement(self, comms: Communicators, room: int) -> torch.Tensor:
        """What goes first: the header, the objects, and all data if it is small.

        Args:
            comms: The group.
            room: With how many bytes at most the data goes along.
        """
        head = _LENGTHS.size + self.header.numel() + self.objects.numel()
        on_cpu = all(tensor.is_cpu for tensor in self._tensors)
        self._is_inline = on_cpu and head + self._data_nbytes <= room
        data = [buffer for _, buffer in self._messages(comms)] if self._is_inline else []
        lengths = _LENGTHS.pack(self.header.numel(), self.objects.numel(), sum(map(torch.Tensor.numel, data)))
        return torch.cat([torch.frombuffer(bytearray(lengths), dtype=torch.uint8), self.header, self.objects, *data])

    def buffers(self, comms: Communicators) -> Buffers:
        """What to send after it; whatever has to be copied for that is copied now."""
        return [] if self._is_inline else self._messages(comms)

    def _messages(self, comms: Communicators) -> Buffers:
        kinds, sizes = [t.device.type for t in self._tensors], [packing.nbytes(t) for t in self._tensors]
        return [
            (kind, packing.pack([self._tensors[i] for i in members], there))
            for kind, there, members in _together(comms, kinds, sizes)
        ]


_Recipe = tuple[torch.Tensor, list[str]]
_recipes: dict[Any, _Recipe] = {}
"""Headers of dicts that were sent before, and the keys in the order of the data: engines repeat themselves."""

_MOST_RECIPES, _LONGEST_TEXT = 256, 64
_PLAIN = frozenset({bool, int, str, type(None)})


def _recipe_key(data: Tree) -> Any:
    """What determines the header of a flat dict; None for other trees, and where tensors may be tied."""
    if type(data) is not dict:
        return None
    parts: list[Any] = []
    addresses: list[int] = []
    for name, value in data.items():
        if type(name) is not str:
            return None
        if type(value) is torch.Tensor and value.is_cpu and not value.requires_grad and not _is_odd(value):
            parts.append((name, value.dtype, value.shape))
            addresses.append(value.data_ptr())
        elif type(value) in _PLAIN and not (type(value) is str and len(value) > _LONGEST_TEXT):
            parts.append((name, type(value), value))
        else:
            return None
    return tuple(parts) if len(set(addresses)) == len(addresses) else None


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg()


def _keep_recipe(key: Any, head: torch.Tensor, paths: Sequence[str]) -> None:
    names = {f"[{name!r}]": name for name, *_ in key}
    if len(_recipes) >= _MOST_RECIPES:
        _recipes.clear()
    _recipes[key] = head, [names[path] for path in paths]


def _encoded(objects: list[Any], weights_only: bool) -> torch.Tensor:
    message = codec.EncodedObject(objects)
    if weights_only:
        message.check()
    return message.joined()


class Announcement:
    """What came first.

    Args:
        message: Its bytes.

    Attributes:
        header: The header's bytes.
        objects: Those of the objects.
        data: Those of the data; None if they come by themselves.

    Raises:
        WireError: The lengths do not fit.
    """

    def __init__(self, message: torch.Tensor) -> None:
        if message.numel() < _LENGTHS.size:
            raise WireError(f"an announcement of {message.numel()} bytes is truncated")
        lengths = _LENGTHS.unpack_from(message.numpy().data)
        if _LENGTHS.size + sum(lengths) != message.numel():
            raise WireError(
                f"an announcement of {message.numel()} bytes says that it has {sum(lengths)} and its lengths"
            )
        self.header, self.objects, self.data = message[_LENGTHS.size :].split(list(lengths))


def _together(
    comms: Communicators, kinds: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, torch.device, list[int]]]:
    """Which tensors make one message, and on which device; by device types and sizes alone, the same on both sides."""
    for kind in dict.fromkeys(kinds):
        there = comms.data(torch.device(kind)).get_device()
        members = [i for i, other in enumerate(kinds) if other == kind and sizes[i]]
        yield from ((kind, there, [i]) for i in members if sizes[i] >= LARGE)
        if small := [i for i in members if sizes[i] < LARGE]:
            yield kind, there, small


_I = TypeVar("_I", bound="Incoming")


class Incoming:
    """The tree that a header announces. All memory is there before the first byte of data comes."""

    def __init__(
        self,
        comms: Communicators,
        encoded: torch.Tensor,
        into: Tree = None,
        objects: Sequence[Any] = (),
        data: torch.Tensor | None = None,
    ) -> None:
        """Read the header.

        Args:
            comms: The group.
            encoded: The header's bytes.
            into: Where the data shall be written in place; None is new memory.
            objects: What JSON could not express.
            data: All data, if it has come along.

        Raises:
            WireError: The header is not valid, or has other data.
            RuntimeError: There is no memory, or no device of the kind that the data comes from.
        """
        head = _header_of(encoded)
        self._objects, self._data = objects, data
        self._targets = None if into is None else Targets(into)
        self._receiving, self._tensors = self.allocate(comms, head)
        self._outline = head.metadata.get(outline.METADATA, "")
        self._tree, self._leaves = self._decoded()
        self._check_data()

    @classmethod
    def announced(
        cls: type[_I], comms: Communicators, message: torch.Tensor, into: Tree = None, weights_only: bool = True
    ) -> _I:
        """Read an announcement.

        Args:
            comms: The group.
            message: Its bytes.
            into: As in the constructor.
            weights_only: Decode objects with the restricted decoder.

        Raises:
            WireError: It is not valid.
            RuntimeError: As in the constructor.
            UnsafeObjectError: An object is not allow-listed here.
        """
        told = Announcement(message)
        objects = codec.decode(told.objects.clone(), weights_only=weights_only) if told.objects.numel() else ()
        return cls(comms, told.header, into, objects, told.data.clone() if told.data.numel() else None)

    @property
    def tree(self) -> Tree:
        """The tree, whose tensors hold their values after ``finish``."""
        return self._tree

    def _check_data(self) -> None:
        """Make sure that the data which has come along fits its buffers."""
        if self._data is not None and self._receiving:
            _demand_nbytes(self._data, sum(receive.buffer.numel() for receive in self._receiving))

    def _decoded(self) -> tuple[Tree, dict[str, Any]]:
        wanted = None if self._targets is None else self._targets.values
        return outline.decode(self._outline, self._tensors, None, wanted, self._objects)

    def allocate(self, comms: Communicators, head: Header) -> tuple[list[_ReceiveBuffer], dict[str, torch.Tensor]]:
        """The memory for each message that is to come, and all tensors by name."""
        if self._data is not None and self._targets is None:
            return [], _filled(head, self._data)
        devices = header.parse_json(head.metadata.get(DEVICES, "{}").encode())
        kinds = [devices.get(entry.name, "cpu") for entry in head.entries]
        receiving = [
            _ReceiveBuffer(kind, there, [head.entries[i] for i in members], self._targets)
            for kind, there, members in _together(comms, kinds, [_size(entry) for entry in head.entries])
        ]
        tensors = {name: tensor for receive in receiving for name, tensor in receive.tensors.items()}
        for entry, kind in zip(head.entries, kinds, strict=True):
            if not _size(entry):
                tensors[entry.name] = _empty(entry, kind if self._targets is None else "cpu")
        return receiving, tensors

    def misfit(self) -> dict[str, Any] | None:
        """How ``into`` differs from what comes; None where it does not.

        Raises:
            ValueError: It does not differ, but cannot be written.
        """
        if self._targets is None:
            return None
        if rows := self._targets.differing(self._leaves):
            return {"rows": rows, "of": self._targets.count(self._leaves)}
        self._targets.check_writable("recv_tensor_dict", "what is sent", self._leaves)
        return None

    def buffers(self) -> Buffers:
        """Where the data has to arrive that has not come along."""
        return [] if self._data is not None else [(receive.kind, receive.buffer) for receive in self._receiving]

    def finish(self) -> Tree:
        """The tree, when all data has arrived."""
        if self._data is not None and self._receiving:
            parts = self._data.split([receive.buffer.numel() for receive in self._receiving])
            for receive, part in zip(self._receiving, parts, strict=True):
                receive.buffer.copy_(part)
        for receive in self._receiving:
            receive.finish()
        if self._receiving and '"scalar"' in self._outline:  # NumPy's scalars are copies of what was there before
            self._tree, self._leaves = self._decoded()
        return self._tree if self._targets is None else self._targets.write(self._leaves)


_CACHED = 1 << 14


def _header_of(encoded: torch.Tensor) -> Header:
    """The header; read once if it is short and comes again and again."""
    data = encoded.numpy()
    return _known_header(data.tobytes()) if len(data) <= _CACHED else header.decode(data, apart=True)


@functools.lru_cache(maxsize=64)
def _known_header(encoded: bytes) -> Header:
    return header.decode(encoded, apart=True)


def _filled(head: Header, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors by name, of data that has come along; each has memory of its own."""
    sizes = list(map(_size, head.entries))
    _demand_nbytes(data, sum(sizes))
    parts = zip(head.entries, data.split(sizes), strict=True)
    return {entry.name: part.view(entry.dtype).view(entry.shape).clone() for entry, part in parts}


def _demand_nbytes(data: torch.Tensor, nbytes: int) -> None:
    if data.numel() != nbytes:
        raise WireError(f"{data.numel()} bytes of data came along, not {nbytes}")


def _size(entry: Entry) -> int:
    return entry.stop - entry.start


class _ReceiveBuffer:
    """The memory for one message.

    Attributes:
        kind: The device type of the data.
        buffer: Where it arrives.
        tensors: By name, what is in it; the values are there after ``finish``.
    """

    def __init__(self, kind: str, there: torch.device, entries: Sequence[Entry], targets: Targets | None) -> None:
        self.kind, self._there = kind, there
        self.tensors: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(entries) == 1 and (place := self._place(entries[0], targets)) is not None:
            self.buffer, self.tensors[entries[0].name] = packing.as_bytes(place), place
        else:
            self.buffer = memory.empty([sum(map(_size, entries))], torch.uint8, there)
            self._cut(entries, kind if targets is None else None)

    def _place(self, entry: Entry, targets: Targets | None) -> torch.Tensor | None:
        """Where a message of one tensor can arrive without being copied: in the target, or in the result."""
        target = targets.values.get(entry.name) if targets is not None else None
        if _fits(target, entry, self._there):
            return target.detach()  # type: ignore[no-any-return, union-attr]
        if targets is None and self.kind != self._there.type:  # a device that the group's communicators cannot reach
            return None
        return memory.empty(entry.shape, entry.dtype, self._there)

    def _cut(self, entries: Sequence[Entry], kind: str | None) -> None:
        """Tensors of their own for the parts of the buffer; views of it where targets get copies anyway."""
        parts = self.buffer.split([_size(entry) for entry in entries])
        for entry, part in zip(entries, parts, strict=True):
            if kind is None:
                self.tensors[entry.name] = part.view(entry.dtype).view(entry.shape)
            else:
                tensor = self.tensors[entry.name] = _empty(entry, kind)
                self._copies.append((packing.as_bytes(tensor), part))

    def finish(self) -> None:
        for target, part in self._copies:
            target.copy_(part)
        self._copies = []


def _fits(target: Any, entry: Entry, device: torch.device) -> bool:
    """Whether a message can arrive in the target itself."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and (target.dtype, tuple(target.shape), target.device.type) == (entry.dtype, entry.shape, device.type)
        and target.layout is torch.strided
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def _empty(entry: Entry, kind: str) -> torch.Tensor:
    try:
        return memory.empty(entry.shape, entry.dtype, kind)
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f"{entry.name or 'the tensor'} is on {kind}, where this process cannot make a tensor ({error}); pass into="
        ) from error
