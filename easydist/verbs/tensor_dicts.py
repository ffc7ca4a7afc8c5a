"""Nested data to ranks that know nothing of it beforehand: from one to one, and from one to all.

The header goes first (``tensor_dict_messages``), then every receiver says whether it can take the data, then the data.
So both sides raise or neither does, and targets are written only where all of them fit.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NoReturn

import torch

from easydist.agreement.agree import agree, shared
from easydist.agreement.call import Call
from easydist.agreement.calling import calling
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import R, Verb, run
from easydist.eager import eager
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.format import codec
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
    run(_SendTensorDict(tensor_dict, dst, objects), communicators(group), timeout)


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

    def __init__(self, tensor_dict: Tree, dst: int, objects: bool) -> None:
        self._tensor_dict, self.peer, self._objects = tensor_dict, dst, objects

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self.operation, "dst", self.peer)
        try:
            self.refuse(comms)
            outgoing = Outgoing(self._tensor_dict, self._objects)
            announcement = outgoing.announcement(comms, _SMALL)
            self._buffers = outgoing.buffers(comms)
        except Exception as error:
            pair.refuse(error)
        comms.begin(lambda: pair.ask(announcement))

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
            self._incoming = Incoming.announced(comms, encoded, self._into)
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


class BroadcastTensorDict(Verb[Tree]):
    """The verb itself.

    Args:
        tensor_dict: As in ``broadcast_tensor_dict``.
        src: Likewise.
        into: Likewise.
        objects: Likewise.
        weights_only: Decode objects with the restricted decoder; the same on all ranks.
        data: The communicators that carry data which does not go along with the headers; None is the call's own.
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
        check_rank(comms, "src", src)
        arguments: dict[str, Any] = {"src": index(src)}
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
            announcement = outgoing.announcement(comms, comms.frames.nbytes - _FRAME_HEAD)
            self._buffers = outgoing.buffers(self._data or comms)
            asked = [_ANSWERS if self._buffers or outgoing.needs_answer else _FROM_SOURCE]
            self._message = torch.cat([*asked, announcement])
        return Call(arguments, nbytes=self._message.numel(), payload=[self._message])

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        if comms.size == 1:
            return
        src, nbytes = self._src, agreed.nbytes
        if agreed.has_payload:
            self._message = agreed.payload(src).clone()  # another exchange of headers may follow
        else:
            if comms.rank != src:
                self._message = torch.empty(nbytes[src], dtype=torch.uint8, device="cpu")
            comms.control.broadcast(self._message, src, async_op=False)
        if self._message[0] or any(n for rank, n in enumerate(nbytes) if rank != src):
            self._accept(comms)
            carrier = self._data or comms
            with contextlib.nullcontext() if carrier is comms else calling(carrier, self.operation):
                _move(carrier, self._buffers, carrier.cpu, lambda comm, data: comm.broadcast(data, src, async_op=True))

    def _read(self, comms: Communicators) -> Incoming:
        return Incoming.announced(self._data or comms, self._message[1:], self._into, self._weights_only)

    def _accept(self, comms: Communicators) -> None:
        """Every rank says whether it can take what comes; all raise where one cannot."""
        mine = torch.empty(0, dtype=torch.uint8, device="cpu")

        def judge() -> Call:
            nonlocal mine
            if self._outgoing is None:
                self._incoming = self._read(comms)
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
        if self._outgoing is not None:
            return self._tensor_dict
        return (self._incoming or self._read(comms)).finish()


_SMALL = 1 << 15
"""Bytes up to which a tree travels to one rank in its announcement."""

_FRAME_HEAD = 128
"""Bytes of a frame before its payload, and what goes before the announcement."""

_FROM_SOURCE, _ANSWERS = torch.zeros(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
"""What goes before an announcement, or is all that a receiver says: whether all ranks have to say that they take it."""


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
