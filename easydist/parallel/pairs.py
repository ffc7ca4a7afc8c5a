"""Tensors and objects from one rank of a coordinator to another, and the exchange that trees use, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from easydist import modes
from easydist.agreement.calling import calling
from easydist.eager import eager
from easydist.errors import DisagreementError
from easydist.format import codec
from easydist.parallel.frames import FRAME, OBJECT, TENSOR, Message
from easydist.parallel.membership import Membership
from easydist.parallel.messages import Pair
from easydist.parallel.transfers import Transfer
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing

_ROOM = FRAME - 1024
"""The most bytes of a tensor dict that fit into one frame together with its terms."""


class Pairs(Membership):
    """The methods between two ranks. ``dst=None`` is the next rank of the group, ``src=None`` the previous one."""

    weights_only: bool

    @eager
    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to one rank, and return when it has arrived.

        Law: ``recv(tensor.shape, tensor.dtype, src)`` on rank ``dst`` is ``tensor``.

        Args:
            tensor: A tensor of any dtype and strides.
            dst: Another rank, inside the group; None means the next one.

        Raises:
            DisagreementError: The receiver expects something else. It raises the same.
            ValueError: ``dst`` is not another rank of the group.

        Cost: one message there and one back. 256 KiB and more, or data that is not on the CPU, needs one more there.
        """

        def prepare() -> Outgoing:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"send: got {type(tensor).__name__}, not a tensor; use send_object")
            return Outgoing(tensor.detach())

        self._post("send", TENSOR, dst, prepare, {}, waits=True)

    @eager
    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive the tensor that one rank sends with ``send``.

        Args:
            size: The shape. A tensor of another shape with as many elements is received as a view.
            dtype: The dtype.
            src: Another rank, inside the group; None means the previous one.

        Returns:
            A new tensor, on ``device``.

        Raises:
            DisagreementError: The sent tensor has another dtype or number of elements. The sender raises the same.
        """

        def open_(message: Message) -> Incoming:
            wanted = torch.Size(size)
            incoming = Incoming.announced(self.communicators, message.body)
            came = incoming.tree
            if came.dtype is not dtype or came.numel() != wanted.numel():
                raise DisagreementError(
                    f"recv: rank {self._peer_of(src, -1)} sends {came.dtype} {tuple(came.shape)}, "
                    f"but rank {self.rank_in_group} expects {dtype} {tuple(wanted)}"
                )
            return incoming

        incoming, _ = self._receive("recv", TENSOR, src, open_, waits=True)
        tensor: torch.Tensor = incoming.finish()
        return tensor.to(self.device).view(size)

    @eager
    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one rank, and return when it has arrived.

        Args:
            obj: Any object that ``weights_only`` of the constructor permits.
            dst: Another rank, inside the group.

        Raises:
            RemoteError: ``obj`` cannot travel, or the receiver refuses it. The receiver raises the same.
        """
        self._post(
            "send_object", OBJECT, dst, lambda: codec.encode(obj, weights_only=self.weights_only), {}, waits=True
        )

    @eager
    def recv_object(self, src: int) -> Any:
        """Receive the object that one rank sends with ``send_object``."""

        def open_(message: Message) -> Any:
            return codec.decode(message.body.clone(), weights_only=self.weights_only)

        obj, _ = self._receive("recv_object", OBJECT, src, open_, waits=True)
        return obj

    def _peer_of(self, rank: int | None, step: int) -> int:
        return (self.rank_in_group + step) % self.world_size if rank is None else rank

    def _post(
        self,
        operation: str,
        kind: int,
        dst: int | None,
        prepare: Callable[[], Any],
        terms: dict[str, Any],
        *,
        waits: bool,
    ) -> Transfer:
        """Send the result of ``prepare``, an ``Outgoing`` or the bytes of an object; if it raises, send the error."""
        comms, peer = self.communicators, self._peer_of(dst, 1)
        pair = Pair(comms, operation, peer)
        where = modes.without_data()
        with modes.left() if where else nullcontext(), calling(comms, operation, None, peer, name="dst"):
            try:
                if where:
                    raise modes.refusal(operation, where)
                made = prepare()
                is_tree = isinstance(made, Outgoing)
                body = made.announcement(_ROOM) if is_tree else made
                data = made.buffers(comms) if is_tree else []
            except Exception as error:
                raise pair.refuse(kind, error) from error
            transfer = pair.post(kind, terms, body, data)
            if waits:
                transfer.wait_inside()
            return transfer

    def _receive(
        self, operation: str, kind: int, src: int | None, open_: Callable[[Message], Any], *, waits: bool
    ) -> tuple[Any, Transfer]:
        """Return the next message as ``open_`` decodes it, and the transfer of the data that is still under way."""
        comms, peer = self.communicators, self._peer_of(src, -1)
        pair = Pair(comms, operation, peer)
        where = modes.without_data()
        with modes.left() if where else nullcontext(), calling(comms, operation, None, peer, name="src"):
            message = comms.begin(lambda: pair.receive(kind))
            try:
                if where:
                    raise modes.refusal(operation, where)
                opened = open_(message)
                data = opened.buffers() if isinstance(opened, Incoming) else []
            except Exception as error:
                pair.reject(message, error)
            transfer = pair.accept(data)
            if waits:
                transfer.wait_inside()
            return opened, transfer
