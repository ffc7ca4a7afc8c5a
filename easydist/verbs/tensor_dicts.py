"""The verbs that send nested data to ranks that do not know its structure: from one to one, and from one to all.

The header goes first (``tensor_dict_messages``), then every receiver answers whether it can take the data, then the
data follows. So both sides raise or neither does, and targets are written only if all of them fit.
"""

from __future__ import annotations

import torch

from easydist.agreement.runner import run
from easydist.base.arguments import UNSET, hiding
from easydist.base.eager import eager
from easydist.errors import DisagreementError
from easydist.messages.frames import TENSOR_DICT, Message
from easydist.messages.pair import Buffers, receive, send
from easydist.state import communicators
from easydist.typing import Group, Timeout, Tree
from easydist.verbs.ranks import named_peer, named_rank
from easydist.verbs.tensor_dict_broadcast import BroadcastTensorDict
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing, disagreement

__all__ = ["broadcast_tensor_dict", "recv_tensor_dict", "send_tensor_dict"]


@eager
@hiding()
def send_tensor_dict(
    tensor_dict: Tree,
    dst: int = UNSET,
    *,
    objects: bool = False,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send a tree to one rank, which calls ``recv_tensor_dict`` and need not know the structure.

    Law: ``recv_tensor_dict(r)`` on rank ``dst`` returns the tree that ``load`` would return after ``save`` of
    ``tensor_dict``.

    It sends tensors of every dtype and any strides, arrays, Python numbers, text, bytes and None, bit for bit, in
    containers nested at most 100 deep. A tensor that is in several places is sent once, and arrives as one tensor. The
    structure is sent as JSON, never as pickle, so it names no classes: a dataclass or namedtuple arrives as a dict of
    its fields, another mapping as a dict, a parameter as a tensor without ``requires_grad``. With ``into=`` the
    receiver fills the original classes.

    Example:
        >>> import torch, easydist
        >>> easydist.send_tensor_dict({"x": torch.ones(2)}, 1)
        Traceback (most recent call last):
        ValueError: send_tensor_dict: dst=1 is not another rank of the group, which has 1 rank (0); this is rank 0

    Args:
        tensor_dict: Any such tree, not only a dict.
        dst: Another rank, inside the group. With a group of torch, it must be the same rank of the world.
        objects: True to keep the types of dataclasses, namedtuples, enums, sets and other values. They are sent as by
            the object verbs with ``weights_only=True``, so your own classes have to be allowed on both sides
            (``easydist.allow_globals``, ``torch.serialization.add_safe_globals``). Parameters and ``requires_grad``
            are then kept, too.
        group: The group; only these two ranks take part.
        group_dst: The receiver, a rank inside any group.
        timeout: The time limit of the call; None is the group's.

    Raises:
        RemoteError: ``tensor_dict`` holds other values (``__cause__`` is a TypeError with the path), or the receiver
            cannot take it. The receiver raises the same error.
        DisagreementError: The receiver's ``into=`` has another structure, dtype or shape. The receiver raises the same
            error.
        ValueError: ``dst`` is not another rank of the group, or is ambiguous; only this rank raises this.

    Cost: one message there and one back, which carry a small tree (31 KiB); a larger tree needs one more
    message for each tensor of 256 KiB or more, and one for all others. Large tensors are copied only if they are not
    contiguous.

    Source: vLLM's ``GroupCoordinator.send_tensor_dict``.
    """
    name = "send_tensor_dict"
    peer, comms = named_peer(group, name, "dst", dst, group_dst), communicators(group)

    def prepare() -> tuple[torch.Tensor, Buffers]:
        return Outgoing(tensor_dict, objects).message(comms)

    send(comms, name, TENSOR_DICT, peer, prepare, timeout=timeout)


@eager
@hiding()
def recv_tensor_dict(
    src: int = UNSET,
    *,
    into: Tree = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Receive the tree that one rank sends with ``send_tensor_dict``.

    Law: ``recv_tensor_dict(src)`` returns the tree that ``load`` would return after ``save`` of the sender's
    ``tensor_dict``.

    Args:
        src: Another rank, inside the group. With a group of torch, it must be the same rank of the world.
        into: A tree with tensors and arrays, on any devices, to be written in place. Its leaves are matched by path and
            must have the dtypes and shapes of the sent ones, which is checked before the first is written.
        group: The group; only these two ranks take part.
        group_src: The sender, a rank inside any group.
        timeout: The time limit of the call; None is the group's.

    Returns:
        The tree, as ``send_tensor_dict`` describes it; tensors are contiguous, and on this process's current device of
        the type that they had. With ``into``, that tree, in which numbers are replaced by the sent ones.

    Raises:
        DisagreementError: ``into`` has another structure, dtype or shape; it is not changed. The sender raises the same
            error.
        RemoteError: The sender's tree cannot be sent, or ``into`` cannot be written (read-only arrays, expanded
            tensors, …; it is not changed). The sender raises the same error.
        ValueError: ``src`` is not another rank of the group, or is ambiguous; only this rank raises this.

    Example:
        >>> import easydist
        >>> easydist.recv_tensor_dict(0)
        Traceback (most recent call last):
        ValueError: recv_tensor_dict: src=0 is not another rank of the group, which has 1 rank (0); this is rank 0

    Cost: as ``send_tensor_dict``; with ``into`` large tensors arrive in their targets without a copy.

    Source: vLLM's ``GroupCoordinator.recv_tensor_dict``.
    """
    name = "recv_tensor_dict"
    peer, comms = named_peer(group, name, "src", src, group_src), communicators(group)

    def open_(message: Message) -> tuple[Incoming, Buffers]:
        if "gather" in message.terms:
            raise DisagreementError(
                f"{name}: rank {peer} sends with an all_gather_group, and this call has none\n"
                "Receive with the coordinator's recv_tensor_dict and its all_gather_group, or send without one."
            )
        incoming = Incoming.announced(comms, message.body, into)
        if misfit := incoming.misfit():
            raise DisagreementError(disagreement(name, peer, {comms.rank: misfit}))
        return incoming, incoming.buffers()

    incoming, _ = receive(comms, name, TENSOR_DICT, peer, open_, timeout=timeout)
    return incoming.finish()


@eager
@hiding(src=0)
def broadcast_tensor_dict(
    tensor_dict: Tree = None,
    src: int = UNSET,
    *,
    into: Tree = None,
    objects: bool = False,
    group: Group = None,
    group_src: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Send one rank's tree to all ranks, which need not know its structure.

    Law: on other ranks ``broadcast_tensor_dict(src=s)`` returns the tree that ``load`` would return after ``save`` of
    the ``tensor_dict`` of rank s; on ``src`` it returns ``tensor_dict`` itself. ``send_tensor_dict`` lists the values
    that can be sent.

    Example:
        >>> import torch, easydist
        >>> easydist.broadcast_tensor_dict({"x": torch.ones(2), "step": 3})
        {'x': tensor([1., 1.]), 'step': 3}

    On two ranks::

        easydist.broadcast_tensor_dict(
            {"x": torch.ones(2)} if rank == 0 else None
        )  # both ranks: {'x': tensor([1., 1.])}

    Args:
        tensor_dict: The tree, on ``src``; ignored on other ranks.
        src: The source, a rank inside the group. With a group of torch, it must be the same rank of the world.
        into: As in ``recv_tensor_dict``, on any ranks; ignored on ``src``.
        objects: As in ``send_tensor_dict``; ignored on ranks other than ``src``.
        group: The ranks that take part.
        group_src: The source, a rank inside any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        The tree; with ``into``, that tree, in which numbers are replaced by the sent ones.

    Raises:
        DisagreementError: ``into`` of some ranks has another structure, dtype or shape than the source's tree, or the
            ranks name different sources; nothing was written.
        RemoteError: The source's tree cannot be sent, or a rank's ``into`` cannot be written; nothing was written.
        TypeError: In a single process, the tree holds other values; the text names the path.
        ValueError: ``src`` is not a rank of the group, or is ambiguous.

    Cost: one header exchange, which carries a small tree on the CPU (512 KiB / W in small groups). A larger tree needs
    one more header exchange, and one broadcast for each tensor of 256 KiB or more and one for all others. Large tensors
    are copied only if they are not contiguous. With ``into`` on any rank, or with objects, a small tree needs the
    second header exchange, too.

    Source: vLLM's ``GroupCoordinator.broadcast_tensor_dict``.
    """
    source = named_rank(group, "broadcast_tensor_dict", "src", src, group_src)
    return run(BroadcastTensorDict(tensor_dict, source, into, objects), communicators(group), timeout, check)
