"""The messages that carry a tree between ranks: a header that describes it completely, then the data.

The header is that of a file with the same tree (``outline.describe``), with the structure as its metadata and, under
``easydist.devices``, JSON ``{name: device type}`` of the tensors that are not on the CPU. The data is one message for
each large tensor, which is not copied, and one packed message for all others of a device type.

The first message is the announcement: three u64, the lengths of the header, of the objects, and of the data; then these
three. The objects are a ``codec`` message, the list of values that JSON and tensors cannot express. The announcement
contains the data if that is small and on the CPU; then there are no further messages.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from easydist.agreement.disagreement import listed, misfit_lines
from easydist.data import packing
from easydist.errors import WireError
from easydist.format import codec, header, outline
from easydist.format.header import Header
from easydist.format.targets import Targets
from easydist.groups.communicators import Communicators
from easydist.messages.pair import ROOM, Buffers
from easydist.typing import Tree
from easydist.verbs import tensor_dict_recipes as recipes
from easydist.verbs.tensor_dict_buffers import ReceiveBuffer, coalesced, demand_nbytes, empty, entry_nbytes, filled

DEVICES = "easydist.devices"

_LENGTHS = struct.Struct("<3Q")
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Outgoing:
    """A tree prepared for sending.

    Args:
        data: The tree.
        objects: True to send values that JSON cannot express as objects; else they are refused.
        weights_only: True to refuse objects that the restricted decoder refuses.
        metadata: Further texts for the header.

    Attributes:
        header: The bytes of the header.
        objects: The bytes of the values that JSON cannot express.
        needs_answer: True if a receiver may be unable to take valid data (objects, or other devices than the CPU).

    Raises:
        TypeError: The tree holds a value that cannot be sent.
        UnsafeObjectError: It holds an object that is not allow-listed.
    """

    def __init__(
        self,
        data: Tree,
        objects: bool = False,
        weights_only: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        key = None if metadata else recipes.key_of(data)
        found: list[Any] | None = [] if objects else None
        if key is not None and (recipe := recipes.made.find(key)) is not None:
            self.header, self._tensors = recipe.header, recipe.tensors(data)
        else:
            self._write(data, found, metadata)
            if key is not None and (made := recipes.SendRecipe.of(self.header, data, self._tensors)) is not None:
                recipes.made.keep(key, made)
        self.objects = _encoded(found, weights_only) if found else _NOTHING
        self._data_nbytes = sum(map(packing.nbytes, self._tensors))
        self._is_inline = False
        self.needs_answer = bool(found) or not all(tensor.is_cpu for tensor in self._tensors)

    def _write(self, data: Tree, found: list[Any] | None, metadata: Mapping[str, str] | None) -> None:
        """Make the header."""
        advice = "send its parts, or use broadcast_object_list"
        tensors, texts = outline.describe(data, metadata, None, "a tensor dict", advice, found)
        if devices := {name: tensor.device.type for name, tensor in tensors.items() if not tensor.is_cpu}:
            texts[DEVICES] = json.dumps(devices)
        self.header = torch.frombuffer(bytearray(header.encode(tensors, texts)), dtype=torch.uint8)
        self._tensors = [tensors[name] for name in header.order(tensors)]

    def message(self, comms: Communicators, room: int = ROOM) -> tuple[torch.Tensor, Buffers]:
        """Return the announcement, and the messages to send after it."""
        return self.announcement(room), self.buffers(comms)

    def announcement(self, room: int, before: bytes = b"") -> torch.Tensor:
        """Return the first message: the header, the objects, and all data if it is small.

        Args:
            room: The longest message in which the data goes along, in bytes.
            before: Bytes to put before the announcement.
        """
        texts = self.header.numel(), self.objects.numel()
        nbytes = len(before) + _LENGTHS.size + sum(texts) + self._data_nbytes
        self._is_inline = nbytes <= room and all(tensor.is_cpu for tensor in self._tensors)
        data = self._tensors if self._is_inline else []
        lengths = _LENGTHS.pack(*texts, self._data_nbytes if data else 0)
        start = torch.frombuffer(bytearray(before + lengths), dtype=torch.uint8)
        message = torch.empty(nbytes if data else nbytes - self._data_nbytes, dtype=torch.uint8, device="cpu")
        packing.copy_to(message.data_ptr(), [start, self.header, self.objects, *data])
        return message

    def buffers(self, comms: Communicators) -> Buffers:
        """Return the messages to send after it; data that has to be copied is copied here."""
        return [] if self._is_inline else self._messages(comms)

    def _messages(self, comms: Communicators) -> Buffers:
        kinds, sizes = [t.device.type for t in self._tensors], [packing.nbytes(t) for t in self._tensors]
        return [
            (kind, packing.pack([self._tensors[i] for i in members], there))
            for kind, there, members in coalesced(comms, kinds, sizes)
        ]


def _encoded(objects: list[Any], weights_only: bool) -> torch.Tensor:
    message = codec.EncodedObject(objects)
    if weights_only:
        message.check()
    return message.joined()


class Announcement:
    """A received announcement.

    Args:
        message: The bytes of the announcement.

    Attributes:
        header: The bytes of the header.
        objects: The bytes of the objects.
        data: The bytes of the data; empty if they come in further messages.

    Raises:
        WireError: The lengths are inconsistent.
    """

    def __init__(self, message: torch.Tensor) -> None:
        if message.numel() < _LENGTHS.size:
            raise WireError(f"an announcement of {message.numel()} bytes is truncated")
        lengths = _LENGTHS.unpack_from(message.numpy().data)
        if _LENGTHS.size + sum(lengths) != message.numel():
            raise WireError(
                f"an announcement of {message.numel()} bytes declares {sum(lengths)} bytes beside its lengths"
            )
        self.header, self.objects, self.data = message[_LENGTHS.size :].split(list(lengths))

    def key(self) -> bytes | None:
        """Return the key of the recipe for this header; None if there is more to read than a recipe describes."""
        if self.objects.numel() or self.header.numel() > recipes.LONGEST_HEADER:
            return None
        key: bytes = self.header.numpy().tobytes()
        return key


Misfit = dict[str, Any]
"""The ``"rows"`` that differ, and the number of paths ``"of"`` which they are."""

_I = TypeVar("_I", bound="Incoming")


class Incoming:
    """The tree that a header announces. All memory is allocated before the first byte of data arrives."""

    _receiving: Sequence[ReceiveBuffer] = ()
    _targets: Targets | None = None
    _leaves: Mapping[str, Any] = MappingProxyType({})
    _data: torch.Tensor | None

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
            encoded: The bytes of the header.
            into: The tree to write in place; None for new memory.
            objects: The values that JSON could not express.
            data: All data, if it came along.

        Raises:
            WireError: The header is not valid, or does not fit the data.
            RuntimeError: There is no memory, or no device of the type that the data comes from.
        """
        head = _header_of(encoded)
        self._objects, self._data = objects, data
        self._targets = None if into is None else Targets(into)
        self._outline = head.metadata.get(outline.METADATA, "")
        self._receiving, self._tensors = self.allocate(comms, head)
        self._tree, self._leaves = self._decoded()
        self._check_data()

    @classmethod
    def announced(
        cls: type[_I], comms: Communicators, message: torch.Tensor, into: Tree = None, weights_only: bool = True
    ) -> _I:
        """Read an announcement.

        Args:
            comms: The group.
            message: The bytes of the announcement.
            into: As in the constructor.
            weights_only: True to decode objects with the restricted decoder.

        Raises:
            WireError: The announcement is not valid.
            RuntimeError: As in the constructor.
            UnsafeObjectError: An object is not allow-listed here.
        """
        sent = Announcement(message)
        key = sent.key() if into is None else None
        known = None if key is None else recipes.read.find(key)
        if known is not None and known.nbytes == sent.data.numel():
            incoming = cls.__new__(cls)
            incoming._tree, incoming._data = known.tree(sent.data), sent.data
            return incoming
        objects = codec.decode(sent.objects.clone(), weights_only=weights_only) if sent.objects.numel() else ()
        incoming = cls(comms, sent.header, into, objects, sent.data.clone() if sent.data.numel() else None)
        if key is not None and not incoming._receiving:
            made = recipes.ReceiveRecipe.of(_header_of(sent.header), incoming._tree, incoming._tensors)
            if made is not None:
                recipes.read.keep(key, made)
        return incoming

    @property
    def tree(self) -> Tree:
        """The tree; its tensors hold their values after ``finish``."""
        return self._tree

    @property
    def has_scalars(self) -> bool:
        """True if the tree has NumPy scalars, which are copies of data that had not arrived."""
        return bool(self._receiving) and '"scalar"' in self._outline

    def _check_data(self) -> None:
        """Check that data that came along fits its buffers."""
        if self._data is not None and self._receiving:
            demand_nbytes(self._data, sum(receive.buffer.numel() for receive in self._receiving))

    def _decoded(self) -> tuple[Tree, dict[str, Any]]:
        wanted = None if self._targets is None else self._targets.values
        return outline.decode(self._outline, self._tensors, None, wanted, self._objects)

    def allocate(self, comms: Communicators, head: Header) -> tuple[list[ReceiveBuffer], dict[str, torch.Tensor]]:
        """Return the memory for each message to receive, and all tensors by name."""
        if self._data is not None and self._targets is None:
            return [], filled(head, self._data)
        devices = header.parse_json(head.metadata.get(DEVICES, "{}").encode())
        kinds = [devices.get(entry.name, "cpu") for entry in head.entries]
        targets = None if self._targets is None else self._by_name(head, self._targets)
        receiving = [
            ReceiveBuffer(kind, there, [head.entries[i] for i in members], targets)
            for kind, there, members in coalesced(comms, kinds, [entry_nbytes(entry) for entry in head.entries])
        ]
        tensors = {name: tensor for receive in receiving for name, tensor in receive.tensors.items()}
        for entry, kind in zip(head.entries, kinds, strict=True):
            if not entry_nbytes(entry):
                tensors[entry.name] = empty(entry, kind if self._targets is None else "cpu")
        return receiving, tensors

    def path_of(self, name: str) -> str:
        """Return the path of a tensor. In messages, only the tensors of a flat mapping have other names."""
        return f"[{name!r}]" if self._is_flat else name

    @functools.cached_property
    def _is_flat(self) -> bool:
        return outline.is_named(self._outline)

    def _by_name(self, head: Header, targets: Targets) -> dict[str, Any]:
        """Return the leaves of ``into`` by the names of the entries."""
        return {entry.name: targets.values.get(self.path_of(entry.name)) for entry in head.entries}

    def misfit(self) -> Misfit | None:
        """Return the differences between ``into`` and the sent tree; None if there are none.

        Raises:
            ValueError: ``into`` does not differ, but cannot be written.
        """
        if self._targets is None:
            return None
        if rows := self._targets.differing(self._leaves):
            return {"rows": rows, "of": self._targets.count(self._leaves)}
        self._targets.check_writable("recv_tensor_dict", "what is sent", self._leaves)
        return None

    def buffers(self) -> Buffers:
        """Return the buffers for data that did not come along."""
        return [] if self._data is not None else [(receive.kind, receive.buffer) for receive in self._receiving]

    def finish(self) -> Tree:
        """Return the tree; called when all data has arrived."""
        if self._data is not None and self._receiving:
            parts = self._data.split([receive.buffer.numel() for receive in self._receiving])
            for receive, part in zip(self._receiving, parts, strict=True):
                receive.buffer.copy_(part)
        for receive in self._receiving:
            receive.finish()
        if self.has_scalars:
            self._tree, self._leaves = self._decoded()
        return self._tree if self._targets is None else self._targets.write(self._leaves)


def disagreement(operation: str, src: int, misfits: Mapping[int, Misfit]) -> str:
    """Describe the leaves that differ from the source's, one per line."""
    lines = misfit_lines(f"rank {src}", {rank: misfit["rows"] for rank, misfit in misfits.items()}, "into= of rank")
    total = max(misfit["of"] for misfit in misfits.values())
    advice = f"Pass into= the structure, dtypes and shapes that rank {src} sends, or leave it out."
    return "\n".join([f"{operation}: ranks disagree on {len(lines)} of {total} leaves", *listed(lines), advice])


def _header_of(encoded: torch.Tensor) -> Header:
    """Return the decoded header; short headers are cached, as they often come repeatedly."""
    data = encoded.numpy()
    return _known_header(data.tobytes()) if len(data) <= recipes.LONGEST_HEADER else header.decode(data, apart=True)


@functools.lru_cache(maxsize=64)
def _known_header(encoded: bytes) -> Header:
    return header.decode(encoded, apart=True)
