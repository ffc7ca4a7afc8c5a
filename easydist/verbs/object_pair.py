"""The verbs that send an object to one rank, and receive it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from easydist.base.arguments import UNSET, hiding
from easydist.base.eager import eager
from easydist.format import codec
from easydist.messages.frames import OBJECT, Message
from easydist.messages.pair import Buffers, receive, send
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.ranks import named_peer

__all__ = ["recv_object", "send_object"]


@eager
@hiding()
def send_object(
    obj: Any,
    dst: int = UNSET,
    *,
    weights_only: bool = False,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send an object to one rank, which calls ``recv_object``, and return when that rank has it.

    Law: ``recv_object(r)`` on rank ``dst`` returns a copy of ``obj``, as ``gather_object`` would.

    Example:
        >>> import easydist
        >>> easydist.send_object({"step": 3}, 1)
        Traceback (most recent call last):
        ValueError: send_object: dst=1 is not another rank of the group, which has 1 rank (0); this is rank 0

    Args:
        obj: Any value that can be pickled, without DTensors.
        dst: Another rank, inside the group. With a group of torch, it must be the same rank of the world.
        weights_only: As in ``gather_object``.
        group: The group; only these two ranks take part.
        group_dst: The receiver, a rank inside any group.
        timeout: The time limit of the call; None is the group's.

    Raises:
        RemoteError: The object cannot be pickled, or one of the two ranks does not allow it. The receiver raises the
            same error.
        DisagreementError: The receiver called ``recv_tensor_dict``, or it sends, too. It raises the same error.
        ValueError: ``dst`` is not another rank of the group, or is ambiguous; only this rank raises this.

    Cost: one message there and one back, through shared memory if it fits (64 KiB). Tensors and arrays are copied once,
    into the message.

    Source: vLLM's ``GroupCoordinator.send_object``; ``torch.distributed.send_object_list``.
    """
    peer = named_peer(group, "send_object", "dst", dst, group_dst)
    send(communicators(group), "send_object", OBJECT, peer, encoded(obj, weights_only), timeout=timeout)


@eager
@hiding()
def recv_object(
    src: int = UNSET,
    *,
    weights_only: bool = False,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Receive the object that one rank sends with ``send_object``.

    Law: ``recv_object(src)`` returns a copy of the sender's ``obj``, as ``gather_object`` would.

    Example:
        >>> import easydist
        >>> easydist.recv_object(0)
        Traceback (most recent call last):
        ValueError: recv_object: src=0 is not another rank of the group, which has 1 rank (0); this is rank 0

    On two ranks::

        easydist.send_object([3], 1) if rank == 0 else easydist.recv_object(0)  # rank 0: None   rank 1: [3]

    Args:
        src: Another rank, inside the group. With a group of torch, it must be the same rank of the world.
        weights_only: As in ``gather_object``. This rank's own value decides how the object is decoded here.
        group: The group; only these two ranks take part.
        group_src: The sender, a rank inside any group.
        timeout: The time limit of the call; None is the group's.

    Returns:
        The object; tensors and arrays in it share the memory of the message.

    Raises:
        RemoteError: The object cannot be pickled, or one of the two ranks does not allow it. The sender raises the same
            error.
        DisagreementError: The sender called ``send_tensor_dict``, or it receives, too. It raises the same error.
        ValueError: ``src`` is not another rank of the group, or is ambiguous; only this rank raises this.

    Cost: as ``send_object``.

    Source: vLLM's ``GroupCoordinator.recv_object``; ``torch.distributed.recv_object_list``.
    """
    peer = named_peer(group, "recv_object", "src", src, group_src)
    obj, _ = receive(communicators(group), "recv_object", OBJECT, peer, decoded(weights_only), timeout=timeout)
    return obj


def encoded(obj: Any, weights_only: bool) -> Callable[[], tuple[torch.Tensor, Buffers]]:
    """Return the function that makes the message of an object."""
    return lambda: (codec.encode(obj, weights_only=weights_only), [])


def decoded(weights_only: bool) -> Callable[[Message], tuple[Any, Buffers]]:
    """Return the function that reads the message of an object."""
    return lambda message: (codec.decode(message.body, weights_only=weights_only), [])
