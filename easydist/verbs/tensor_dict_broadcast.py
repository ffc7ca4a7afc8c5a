"""A tree from one rank to all: first the header, with a small tree; for a larger one each rank accepts the data."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from easydist.agreement.agree import judged, shared
from easydist.agreement.call import Call
from easydist.agreement.calling import calling
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import Verb
from easydist.errors import DisagreementError
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.messages.pair import Buffers
from easydist.typing import Tree
from easydist.verbs.buckets import carriers
from easydist.verbs.ranks import source_rank
from easydist.verbs.tensor_dict_messages import Incoming, Misfit, Outgoing, disagreement

_FRAME_HEAD = 128
"""The bytes of a frame that an announcement cannot use: the frame's header, and the byte before the announcement."""

_FROM_SOURCE, _ANSWERS = torch.tensor([[0], [1]], dtype=torch.uint8, device="cpu")
"""The byte before an announcement, or the whole message of a receiver: 1 if all ranks have to accept the data."""


class BroadcastTensorDict(Verb[Tree]):
    """The verb ``broadcast_tensor_dict``.

    Args:
        tensor_dict: As in ``broadcast_tensor_dict``.
        src: As in ``broadcast_tensor_dict``.
        into: As in ``broadcast_tensor_dict``.
        objects: As in ``broadcast_tensor_dict``.
        weights_only: True to decode objects with the restricted decoder; the same on all ranks.
        data: The communicators for data that does not fit the headers; None for the call's own.
    """

    operation = "broadcast_tensor_dict"

    def __init__(
        self,
        tensor_dict: Tree,
        src: int,
        into: Tree = None,
        objects: bool = False,
        weights_only: bool = True,
        data: Communicators | None = None,
    ) -> None:
        self._tensor_dict, self._src, self._into = tensor_dict, src, into
        self._objects, self._weights_only, self._data = objects, weights_only, data
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        self._buffers: Buffers = []
        self._message = _FROM_SOURCE

    def prepare(self, comms: Communicators) -> Call:
        src = self._src
        arguments: dict[str, Any] = {"src": source_rank(comms, self.operation, "src", src)}
        if not self._weights_only:
            codec.demand_pickle()
            arguments["weights_only"] = False
        if comms.rank != src:
            asked = [] if self._into is None else [_ANSWERS]
            return Call(arguments, nbytes=len(asked), payload=asked)
        if self._tensor_dict is None:
            raise ValueError(f"broadcast_tensor_dict: rank {src} is the source, but its tensor_dict is None")
        self._outgoing = outgoing = Outgoing(self._tensor_dict, self._objects, self._weights_only)
        if comms.size > 1:
            self._message = outgoing.announcement(comms.frames.nbytes - _FRAME_HEAD, bytes(1))
            self._buffers = outgoing.buffers(self._data or comms)
            self._message[0] = bool(self._buffers or outgoing.needs_answer)
        return Call(arguments, nbytes=self._message.numel(), payload=[self._message])

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        if comms.size == 1:
            return
        src, nbytes = self._src, agreed.nbytes
        self._message = agreed.payload_of(comms, src)
        if self._message[0] or any(n for rank, n in enumerate(nbytes) if rank != src):
            self._accept(comms)
            carrier = self._data or comms
            with contextlib.nullcontext() if carrier is comms else calling(carrier, self.operation):
                carrier.monitor.is_one_way = True  # only the source is needed
                self._move(carrier)

    def _read(self, comms: Communicators) -> Incoming:
        return Incoming.announced(self._data or comms, self._message[1:], self._into, self._weights_only)

    def _accept(self, comms: Communicators) -> None:
        """Exchange whether each rank can take the data; all ranks raise if one cannot."""
        if misfits := judged(comms, self.operation, lambda: self._misfit(comms)):
            raise shared(comms, DisagreementError(disagreement(self.operation, self._src, misfits)))

    def _misfit(self, comms: Communicators) -> Misfit | None:
        """Allocate the memory for the data; return the differences between ``into`` and the data."""
        if self._outgoing is not None:
            return None
        self._incoming = self._read(comms)
        self._buffers = self._incoming.buffers()
        return self._incoming.misfit()

    def _move(self, comms: Communicators) -> None:
        carried = carriers(comms, [(kind, buffer.numel()) for kind, buffer in self._buffers])
        works = [carried[kind].broadcast(buffer, self._src, async_op=True) for kind, buffer in self._buffers]
        for work in works:
            work.wait()

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Tree:
        if self._outgoing is not None:
            return self._tensor_dict
        return (self._incoming or self._read(comms)).finish()
