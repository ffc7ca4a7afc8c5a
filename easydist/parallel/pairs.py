"""Tensors and objects from one rank of a coordinator to another, and the exchange that trees use, too."""

from __future__ import annotations

from typing import Any

import torch

from easydist.base.eager import eager
from easydist.errors import DisagreementError
from easydist.messages.frames import OBJECT, TENSOR, Message
from easydist.messages.pair import Buffers, receive, send
from easydist.parallel.membership import Membership
from easydist.verbs.object_pair import decoded, encoded
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing


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

        def prepare() -> tuple[torch.Tensor, Buffers]:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"send: got {type(tensor).__name__}, not a tensor; use send_object")
            return Outgoing(tensor.detach()).message(self.communicators)

        send(self.communicators, "send", TENSOR, self._peer_of(dst, 1), prepare)

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
        peer = self._peer_of(src, -1)

        def open_(message: Message) -> tuple[Incoming, Buffers]:
            wanted = torch.Size(size)
            incoming = Incoming.announced(self.communicators, message.body)
            came = incoming.tree
            if came.dtype is not dtype or came.numel() != wanted.numel():
                raise DisagreementError(
                    f"recv: rank {peer} sends {came.dtype} {tuple(came.shape)}, "
                    f"but rank {self.rank_in_group} expects {dtype} {tuple(wanted)}"
                )
            return incoming, incoming.buffers()

        incoming, _ = receive(self.communicators, "recv", TENSOR, peer, open_)
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
        send(self.communicators, "send_object", OBJECT, dst, encoded(obj, self.weights_only))

    @eager
    def recv_object(self, src: int) -> Any:
        """Receive the object that one rank sends with ``send_object``."""
        obj, _ = receive(self.communicators, "recv_object", OBJECT, src, decoded(self.weights_only))
        return obj

    def _peer_of(self, rank: int | None, step: int) -> int:
        return (self.rank_in_group + step) % self.world_size if rank is None else rank
