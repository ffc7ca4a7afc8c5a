"""Nested data to ranks that know nothing of it beforehand: from one to one, and from one to all.

The header goes first (``message``), then every receiver says whether it can take the data, then the data. So both sides
raise or neither does, and targets are written only where all of them fit.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from operator import index
from typing import Any, NoReturn

import torch

from easydist.agree import Call, agree
from easydist.calling import calling
from easydist.comms import Communicators, TorchComm, TorchWork
from easydist.eager import eager
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.exchange import check_rank
from easydist.message import Buffers, Incoming, Outgoing
from easydist.state import communicators
from easydist.typing import Group, Timeout, Tree

__all__ = ["broadcast_tensor_dict", "recv_tensor_dict", "send_tensor_dict"]

_SHOWN = 10


@eager
def send_tensor_dict(tensor_dict: Tree, dst: int, *, group: Group = None, timeout: Timeout | None = None) -> None:
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
        group: The group; only these two ranks take part.
        timeout: How long the call may take; None is the group's.

    Raises:
        RemoteError: ``tensor_dict`` holds something else (``__cause__`` is a TypeError with its path), or the receiver
            cannot take it. The receiver raises the same.
        DisagreementError: The receiver's ``into=`` has another structure, dtype or shape. The receiver raises the same.
        ValueError: ``dst`` is not another rank of the group.

    Cost: three messages on the CPU, one of them back; the data in one message for each tensor of 256 KiB or more and
    one for all others. Large tensors are copied only if they are not contiguous.

    Source: vLLM's ``GroupCoordinator.send_tensor_dict``.
    """
    with calling(communicators(group), "send_tensor_dict", timeout, peer=dst) as comms:
        pair = _Pair(comms, "send_tensor_dict", "dst", dst)
        try:
            outgoing = Outgoing(tensor_dict)
            buffers = outgoing.buffers(comms)
        except Exception as error:
            pair.refuse(error)
        comms.begin(lambda: pair.ask(outgoing.header))
        _move(comms, buffers, comms.between_two, lambda comm, buffer: comm.send(buffer, dst, async_op=True))


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
    with calling(communicators(group), "recv_tensor_dict", timeout, peer=src) as comms:
        pair = _Pair(comms, "recv_tensor_dict", "src", src)
        encoded = comms.begin(pair.hear)
        try:
            incoming = Incoming(comms, encoded, into)
            misfit = incoming.misfit()
        except Exception as error:
            pair.refuse(error)
        if misfit:
            pair.fail(DisagreementError(_disagreement("recv_tensor_dict", src, {comms.rank: misfit})))
        pair.tell(_WELL)
        pair.settle()
        _move(comms, incoming.buffers(), comms.between_two, lambda comm, buffer: comm.recv(buffer, src, async_op=True))
        return incoming.finish()


@eager
def broadcast_tensor_dict(
    tensor_dict: Tree = None,
    src: int = 0,
    *,
    into: Tree = None,
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

    Cost: two header exchanges, one small broadcast; the data in one broadcast for each tensor of 256 KiB or more and
    one for all others. Large tensors are copied only if they are not contiguous.

    Source: vLLM's ``GroupCoordinator.broadcast_tensor_dict``.
    """
    with calling(communicators(group), "broadcast_tensor_dict", timeout) as comms:
        outgoing: Outgoing | None = None
        buffers: Buffers = []

        def send() -> Call:
            nonlocal outgoing, buffers
            check_rank(comms, "src", src)
            if comms.rank == src:
                if tensor_dict is None:
                    raise ValueError(f"broadcast_tensor_dict: rank {src} is the source, but its tensor_dict is None")
                outgoing = Outgoing(tensor_dict)
                buffers = outgoing.buffers(comms) if comms.size > 1 else []
            return Call({"src": index(src)}, nbytes=0 if outgoing is None else outgoing.header.numel())

        _, agreement = agree(comms, "broadcast_tensor_dict", send, check)
        if comms.size == 1:
            return tensor_dict
        encoded = torch.empty(agreement.nbytes[src], dtype=torch.uint8, device="cpu")
        if outgoing is not None:
            encoded = outgoing.header
        comms.control.broadcast(encoded, src, async_op=False)
        incoming = _accepted(comms, src, None if outgoing else encoded, into)
        buffers = incoming.buffers() if incoming else buffers
        _move(comms, buffers, comms.cpu, lambda comm, buffer: comm.broadcast(buffer, src, async_op=True))
        return incoming.finish() if incoming else tensor_dict


def _accepted(comms: Communicators, src: int, encoded: torch.Tensor | None, into: Tree) -> Incoming | None:
    """What comes, on all ranks but the source, when every rank has said that it can take it."""
    incoming: Incoming | None = None
    mine = torch.empty(0, dtype=torch.uint8, device="cpu")

    def judge() -> Call:
        nonlocal incoming, mine
        if encoded is not None:
            incoming = Incoming(comms, encoded, into)
            if misfit := incoming.misfit():
                mine = _as_bytes(json.dumps(misfit))
        return Call(nbytes=mine.numel(), follows=True)

    _, agreement = agree(comms, "broadcast_tensor_dict", judge)
    if any(agreement.nbytes):
        every = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in agreement.nbytes]
        comms.control.all_gather_v(every, mine, async_op=False)
        misfits = {rank: json.loads(bytes(one.numpy())) for rank, one in enumerate(every) if one.numel()}
        error = DisagreementError(_disagreement("broadcast_tensor_dict", src, misfits))
        error.raised_in = comms
        raise error
    return incoming


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode(errors="backslashreplace")), dtype=torch.uint8)


def _move(
    comms: Communicators,
    buffers: Buffers,
    choose: Callable[[int], TorchComm],
    post: Callable[[TorchComm, torch.Tensor], TorchWork],
) -> None:
    """Exchange the data; ``choose`` gives the communicator for this much of it on the CPU."""
    carried = [(comms.data(torch.device(kind)), buffer) for kind, buffer in buffers]
    cpu = choose(sum(buffer.numel() for comm, buffer in carried if comm is comms.control))
    works = [post(cpu if comm is comms.control else comm, buffer) for comm, buffer in carried]
    for work in works:
        work.wait()
    comms.watch.is_awaited = False


def _disagreement(operation: str, src: int, misfits: dict[int, dict[str, Any]]) -> str:
    """The leaves of ``into`` that differ, one line each, with what the source and the ranks that differ have there."""
    lines: dict[str, str] = {}
    for rank, misfit in misfits.items():
        for path, theirs, mine in misfit["rows"]:
            start = lines.get(path, f"  {path or 'the value'}  rank {src}: {theirs}")
            lines[path] = f"{start}   into= of rank {rank}: {mine}"
    total = max(misfit["of"] for misfit in misfits.values())
    shown = [lines[path] for path in sorted(lines)[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  … and {len(lines) - _SHOWN} more")
    advice = f"Pass into= the structure, dtypes and shapes that rank {src} sends, or leave it out."
    return "\n".join([f"{operation}: ranks disagree on {len(lines)} of {total} leaves", *shown, advice])


_WELL, _REMOTE, _DISAGREEMENT = range(3)
_ERRORS: dict[int, type[EasydistError]] = {_REMOTE: RemoteError, _DISAGREEMENT: DisagreementError}


class _Pair:
    """Two ranks that tell each other how they are: who sends, a status, and bytes that belong to it."""

    def __init__(self, comms: Communicators, operation: str, name: str, peer: int) -> None:
        if not 0 <= peer < comms.size or peer == comms.rank:
            raise ValueError(
                f"{operation}: {name}={peer} is not another rank of the group: it has {comms.size}, "
                f"this is rank {comms.rank}"
            )
        self._comms, self._rank, self._operation, self._peer = comms, comms.rank, operation, peer
        self._sends = int(name == "dst")
        self._told: list[TorchWork] = []

    def tell(self, status: int, data: torch.Tensor | None = None) -> None:
        data = torch.empty(0, dtype=torch.uint8, device="cpu") if data is None else data
        prefix = torch.tensor([self._sends, status, data.numel()], device="cpu")
        self._told = [self._comms.control.send(part, self._peer, async_op=True) for part in (prefix, data)]

    def settle(self) -> None:
        """Wait until the other one has heard all."""
        for work in self._told:
            work.wait()

    def ask(self, data: torch.Tensor) -> torch.Tensor:
        """Tell the other one this, and hear what it says to it."""
        self.tell(_WELL, data)
        return self.hear()

    def hear(self) -> torch.Tensor:
        """What the other one tells; its error where it has one."""
        prefix = torch.empty(3, dtype=torch.int64, device="cpu")
        self._comms.control.recv(prefix, self._peer, async_op=False)
        self._comms.watch.is_fresh = False
        self._comms.watch.hear()  # it may have given up before this rank came
        sends, status, nbytes = prefix.tolist()
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._comms.control.recv(data, self._peer, async_op=False)
        self.settle()
        if sends == self._sends:  # only two that send can meet: of two that receive nobody speaks
            raise DisagreementError(
                f"send_tensor_dict: ranks {min(self._rank, self._peer)} and {max(self._rank, self._peer)} send to each "
                "other, and neither receives\nOne of the two has to call recv_tensor_dict first."
            )
        if status != _WELL:
            raise _ERRORS[status](bytes(data.numpy()).decode())
        return data

    def refuse(self, error: Exception) -> NoReturn:
        """Let both ranks raise that this one has failed."""
        lines = "".join(traceback.format_exception_only(type(error), error)).strip()
        text = (
            f"{self._operation}: rank {self._rank} failed before the exchange\n  rank {self._rank}: {lines}\n"
            "Nothing was changed; mend that rank, the group works on."
        )
        self.fail(RemoteError(text), error)

    def fail(self, error: EasydistError, cause: Exception | None = None) -> NoReturn:
        """Let both ranks raise ``error``."""
        status = next(status for status, cls in _ERRORS.items() if isinstance(error, cls))
        self.tell(status, _as_bytes(str(error)))
        self.settle()
        raise error from cause
