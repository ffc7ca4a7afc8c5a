"""Nested data to ranks that know nothing of it beforehand: from one to one, and from one to all.

The header goes first (``tensor_dict_messages``), then every receiver says whether it can take the data, then the data.
So both sides raise or neither does, and targets are written only where all of them fit.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NoReturn

import torch

from easydist.agreement.agree import agree, shared
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import R, Verb, run
from easydist.eager import eager
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.state import communicators
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork
from easydist.typing import Group, Timeout, Tree
from easydist.verbs.ranks import check_rank
from easydist.verbs.tensor_dict_messages import Buffers, Incoming, Outgoing

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
    run(_SendTensorDict(tensor_dict, dst), communicators(group), timeout)


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
    return run(_RecvTensorDict(src, into), communicators(group), timeout)


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
    return run(_BroadcastTensorDict(tensor_dict, src, into), communicators(group), timeout, check)


class _OfTwo(Verb[R]):
    """What both ends of a pair have in common: they agree by themselves, and nobody else takes part."""

    peer: int

    def prepare(self, comms: Communicators) -> Call:
        return Call()

    def agree(self, comms: Communicators, check: bool | None) -> Agreement:
        self.handshake(comms)
        return Agreement(Call(), [])

    def handshake(self, comms: Communicators) -> None:
        """Tell the other one what comes, or whether it can come; both raise where it cannot."""
        raise NotImplementedError


class _SendTensorDict(_OfTwo[None]):
    operation = "send_tensor_dict"

    def __init__(self, tensor_dict: Tree, dst: int) -> None:
        self._tensor_dict, self.peer = tensor_dict, dst

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self.operation, "dst", self.peer)
        try:
            self.refuse(comms)
            outgoing = Outgoing(self._tensor_dict)
            self._buffers = outgoing.buffers(comms)
        except Exception as error:
            pair.refuse(error)
        comms.begin(lambda: pair.ask(outgoing.header))

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        dst = self.peer
        _move(comms, self._buffers, comms.between_two, lambda comm, buffer: comm.send(buffer, dst, async_op=True))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> None:
        return None


class _RecvTensorDict(_OfTwo[Tree]):
    operation = "recv_tensor_dict"

    def __init__(self, src: int, into: Tree) -> None:
        self.peer, self._into = src, into

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self.operation, "src", self.peer)
        encoded = comms.begin(pair.receive)
        try:
            self.refuse(comms)
            self._incoming = Incoming(comms, encoded, self._into)
            misfit = self._incoming.misfit()
        except Exception as error:
            pair.refuse(error)
        if misfit:
            pair.fail(DisagreementError(_disagreement(self.operation, self.peer, {comms.rank: misfit})))
        pair.tell(_WELL)
        pair.settle()

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        src, buffers = self.peer, self._incoming.buffers()
        _move(comms, buffers, comms.between_two, lambda comm, buffer: comm.recv(buffer, src, async_op=True))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Tree:
        return self._incoming.finish()


class _BroadcastTensorDict(Verb[Tree]):
    operation = "broadcast_tensor_dict"

    def __init__(self, tensor_dict: Tree, src: int, into: Tree) -> None:
        self._tensor_dict, self._src, self._into = tensor_dict, src, into
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        self._buffers: Buffers = []

    def prepare(self, comms: Communicators) -> Call:
        src = self._src
        check_rank(comms, "src", src)
        if comms.rank != src:
            return Call({"src": index(src)})
        if self._tensor_dict is None:
            raise ValueError(f"broadcast_tensor_dict: rank {src} is the source, but its tensor_dict is None")
        self._outgoing = Outgoing(self._tensor_dict)
        self._buffers = self._outgoing.buffers(comms) if comms.size > 1 else []
        return Call({"src": index(src)}, nbytes=self._outgoing.header.numel())

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        if comms.size == 1:
            return
        src, outgoing = self._src, self._outgoing
        encoded = outgoing.header if outgoing else torch.empty(agreed.nbytes[src], dtype=torch.uint8, device="cpu")
        comms.control.broadcast(encoded, src, async_op=False)
        self._accept(comms, encoded)
        _move(comms, self._buffers, comms.cpu, lambda comm, buffer: comm.broadcast(buffer, src, async_op=True))

    def _accept(self, comms: Communicators, encoded: torch.Tensor) -> None:
        """Every rank says whether it can take what comes; all raise where one cannot."""
        mine = torch.empty(0, dtype=torch.uint8, device="cpu")

        def judge() -> Call:
            nonlocal mine
            if self._outgoing is None:
                self._incoming = Incoming(comms, encoded, self._into)
                if misfit := self._incoming.misfit():
                    mine = _as_bytes(json.dumps(misfit))
                self._buffers = self._incoming.buffers()
            return Call(nbytes=mine.numel())

        nbytes = agree(comms, self.operation, judge).nbytes
        if any(nbytes):
            raise shared(
                comms, DisagreementError(_disagreement(self.operation, self._src, _misfits(comms, mine, nbytes)))
            )

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Tree:
        return self._incoming.finish() if self._incoming else self._tensor_dict


def _misfits(comms: Communicators, mine: torch.Tensor, nbytes: Sequence[int]) -> dict[int, dict[str, Any]]:
    """How ``into`` differs from what comes, on each rank where it does."""
    every = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in nbytes]
    comms.control.all_gather_v(every, mine, async_op=False)
    return {rank: json.loads(bytes(one.numpy())) for rank, one in enumerate(every) if one.numel()}


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode(errors="backslashreplace")), dtype=torch.uint8)


def _move(
    comms: Communicators,
    buffers: Buffers,
    choose: Callable[[int], Collectives],
    post: Callable[[Collectives, torch.Tensor], TorchWork],
) -> None:
    """Exchange the data; ``choose`` gives the communicator for this much of it on the CPU."""
    carried = [(comms.data(torch.device(kind)), buffer) for kind, buffer in buffers]
    cpu = choose(sum(buffer.numel() for comm, buffer in carried if comm is comms.control))
    works = [post(cpu if comm is comms.control else comm, buffer) for comm, buffer in carried]
    for work in works:
        work.wait()


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
        return self.receive()

    def receive(self) -> torch.Tensor:
        """What the other one tells; its error where it has one."""
        prefix = torch.empty(3, dtype=torch.int64, device="cpu")
        self._comms.control.recv(prefix, self._peer, async_op=False)
        self._comms.monitor.is_fresh = False
        self._comms.monitor.check_reports()  # it may have given up before this rank came
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
            "Nothing was changed; fix that rank; the group keeps working."
        )
        self.fail(RemoteError(text), error)

    def fail(self, error: EasydistError, cause: Exception | None = None) -> NoReturn:
        """Let both ranks raise ``error``."""
        status = next(status for status, cls in _ERRORS.items() if isinstance(error, cls))
        self.tell(status, _as_bytes(str(error)))
        self.settle()
        raise error from cause
