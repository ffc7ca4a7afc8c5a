"""Nested data to ranks that know nothing of it beforehand: from one to one, and from one to all.

The header goes first (``tensor_dict_messages``), then every receiver says whether it can take the data, then the data.
So both sides raise or neither does, and targets are written only where all of them fit.
"""

from __future__ import annotations

from easydist.agreement.runner import run
from easydist.eager import eager
from easydist.state import communicators
from easydist.typing import Group, Timeout, Tree
from easydist.verbs.tensor_dict_broadcast import BroadcastTensorDict
from easydist.verbs.tensor_dict_pair import RecvTensorDict, SendTensorDict

__all__ = ["broadcast_tensor_dict", "recv_tensor_dict", "send_tensor_dict"]


@eager
def send_tensor_dict(
    tensor_dict: Tree, dst: int, *, objects: bool = False, group: Group = None, timeout: Timeout | None = None
) -> None:
    """Give one rank a tree; it calls ``recv_tensor_dict`` and need know nothing beforehand.

    Law: ``recv_tensor_dict(r)`` on rank ``dst`` is what ``load`` gives of what ``save`` has written of ``tensor_dict``.

    Tensors of every dtype and of any strides, arrays, Python numbers, text, bytes and None travel, bit for bit, in
    containers nested at most 100 deep. What is one tensor in several places is sent once and is one tensor again. The
    structure travels as JSON, never as pickle, so it names no classes: a dataclass or namedtuple arrives as a dict of
    its fields, other mappings as dict, a parameter as a tensor, without ``requires_grad``. ``into=`` of the receiver
    fills the original classes.

    Example:
        >>> import torch, easydist
        >>> easydist.send_tensor_dict({"x": torch.ones(2)}, 1)
        Traceback (most recent call last):
        ValueError: send_tensor_dict: dst=1 is not another rank of the group: it has 1, this is rank 0

    Args:
        tensor_dict: Any such tree, not just a dict.
        dst: Another rank, inside the group.
        objects: Let dataclasses, namedtuples, enums, sets and other values arrive as what they are. They travel as in
            the object verbs with ``weights_only=True``, so classes of your own have to be allowed on both sides
            (``easydist.allow_globals``, ``torch.serialization.add_safe_globals``). Parameters and ``requires_grad``
            then stay what they are.
        group: The group; only these two ranks take part.
        timeout: How long the call may take; None is the group's.

    Raises:
        RemoteError: ``tensor_dict`` holds something else (``__cause__`` is a TypeError with its path), or the receiver
            cannot take it. The receiver raises the same.
        DisagreementError: The receiver's ``into=`` has another structure, dtype or shape. The receiver raises the same.
        ValueError: ``dst`` is not another rank of the group.

    Cost: three messages on the CPU, one of them back, which carry a small tree (32 KiB); the data of others in one
    message for each tensor of 256 KiB or more and one for all others. Large tensors are copied only if they are not
    contiguous.

    Source: vLLM's ``GroupCoordinator.send_tensor_dict``.
    """
    run(SendTensorDict(tensor_dict, dst, objects), communicators(group), timeout)


@eager
def recv_tensor_dict(src: int, *, into: Tree = None, group: Group = None, timeout: Timeout | None = None) -> Tree:
    """Take the tree that one rank sends with ``send_tensor_dict``.

    Law: ``recv_tensor_dict(src)`` is what ``load`` gives of what ``save`` has written of the sender's ``tensor_dict``.

    Args:
        src: Another rank, inside the group.
        into: A tree whose tensors and arrays, on whatever devices, are written in place. Its leaves are matched by path
            and must have the dtypes and shapes of those that come, which is checked before the first is written.
        group: The group; only these two ranks take part.
        timeout: How long the call may take; None is the group's.

    Returns:
        The tree, as ``send_tensor_dict`` describes it; tensors are contiguous, and on this process's current device of
        the type that they had. With ``into`` that tree, with new values where its leaves are numbers.

    Raises:
        DisagreementError: ``into`` has another structure, dtype or shape; it is untouched. The sender raises the same.
        RemoteError: The sender's tree cannot be sent, or ``into`` cannot be written (read-only arrays, expanded
            tensors, …; it is untouched). The sender raises the same.
        ValueError: ``src`` is not another rank of the group.

    Example:
        >>> import easydist
        >>> easydist.recv_tensor_dict(0)
        Traceback (most recent call last):
        ValueError: recv_tensor_dict: src=0 is not another rank of the group: it has 1, this is rank 0

    Cost: as ``send_tensor_dict``; with ``into`` large tensors arrive in their targets without a copy.

    Source: vLLM's ``GroupCoordinator.recv_tensor_dict``.
    """
    return run(RecvTensorDict(src, into), communicators(group), timeout)


@eager
def broadcast_tensor_dict(
    tensor_dict: Tree = None,
    src: int = 0,
    *,
    into: Tree = None,
    objects: bool = False,
    group: Group = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Give all ranks a tree that the others know nothing of.

    Law: on ``src`` it is ``tensor_dict`` itself; elsewhere ``broadcast_tensor_dict(src=s)`` is what ``load`` gives of
    what ``save`` has written of the ``tensor_dict`` of rank s. ``send_tensor_dict`` says what travels, and how.

    Example:
        >>> import torch, easydist
        >>> easydist.broadcast_tensor_dict({"x": torch.ones(2), "step": 3})
        {'x': tensor([1., 1.]), 'step': 3}

    Args:
        tensor_dict: The tree, on ``src``; elsewhere it is not looked at.
        src: The source, a rank inside the group.
        into: As in ``recv_tensor_dict``, on any ranks; on ``src`` it is not looked at.
        objects: As in ``send_tensor_dict``; looked at on ``src`` only.
        group: The ranks that take part.
        check: Whether calls are compared; None is as ``EASYDIST_CHECK`` says (on).
        timeout: How long the call may take; None is the group's.

    Returns:
        The tree; with ``into`` that tree, with new values where its leaves are numbers.

    Raises:
        DisagreementError: ``into`` of some ranks has another structure, dtype or shape than the source's tree, or the
            ranks name several sources; nothing was written.
        RemoteError: The source's tree cannot be sent, or a rank's ``into`` cannot be written; nothing was written.
        TypeError: The same in a world of one: the tree holds something else; the text has its path.
        ValueError: ``src`` is not a rank of the group.

    Cost: one header exchange, which carries a small tree on the CPU (32 KiB in small groups); otherwise one more, and
    the data in one broadcast for each tensor of 256 KiB or more and one for all others. Large tensors are copied only
    if they are not contiguous. With ``into`` on any rank, or objects, one more header exchange in any case.

    Source: vLLM's ``GroupCoordinator.broadcast_tensor_dict``.
    """
    return run(BroadcastTensorDict(tensor_dict, src, into, objects), communicators(group), timeout, check)
