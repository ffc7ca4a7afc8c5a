"""A tree or an object from one rank to one other: the two exchange the header and their status before the data."""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

import torch

from easydist import memory
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement, Headers
from easydist.agreement.runner import R, Verb
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.transport.work import TorchWork
from easydist.typing import Tree
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing
from easydist.verbs.tensor_dict_moves import as_bytes, disagreement, move

_SMALL = 1 << 15
"""The bytes up to which the announcement contains the whole tree."""

_WELL, _REMOTE, _DISAGREEMENT = range(3)
_ANSWER, _TREE, _OBJECT = range(3)
_VERBS = {_TREE: "send_tensor_dict", _OBJECT: "send_object"}
_ERRORS: dict[int, type[EasydistError]] = {_REMOTE: RemoteError, _DISAGREEMENT: DisagreementError}


class _OfTwo(Verb[R]):
    """The common part of both ends of a pair: they agree between themselves, without the other ranks."""

    peer: int

    def prepare(self, comms: Communicators) -> Call:
        return Call()

    def agree(self, comms: Communicators, check: bool | None) -> Agreement:
        self.handshake(comms)
        return Agreement(Call(), Headers.of())

    def handshake(self, comms: Communicators) -> None:
        """Announce the data, or accept it; both ranks raise if it cannot be sent or taken."""
        raise NotImplementedError


class SendTensorDict(_OfTwo[None]):
    """The verb ``send_tensor_dict``, which takes the same arguments."""

    operation, peer_name = "send_tensor_dict", "dst"

    def __init__(self, tensor_dict: Tree, dst: int, objects: bool) -> None:
        self._tensor_dict, self.peer, self._objects = tensor_dict, dst, objects

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self, _TREE)
        try:
            self.refuse(comms)
            outgoing = Outgoing(self._tensor_dict, self._objects)
            announcement = outgoing.announcement(_SMALL)
            self._buffers = outgoing.buffers(comms)
        except Exception as error:
            pair.refuse(error)
        comms.begin(lambda: pair.ask(announcement))

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        dst = self.peer
        move(comms, self._buffers, comms.between_two, lambda comm, buffer: comm.send(buffer, dst, async_op=True))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> None:
        return None


class RecvTensorDict(_OfTwo[Tree]):
    """The verb ``recv_tensor_dict``, which takes the same arguments."""

    operation, peer_name = "recv_tensor_dict", "src"

    def __init__(self, src: int, into: Tree) -> None:
        self.peer, self._into = src, into

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self, _TREE)
        encoded = comms.begin(pair.receive)
        try:
            self.refuse(comms)
            self._incoming = Incoming.announced(comms, encoded, self._into)
            misfit = self._incoming.misfit()
        except Exception as error:
            pair.refuse(error)
        if misfit:
            pair.fail(DisagreementError(disagreement(self.operation, self.peer, {comms.rank: misfit})))
        pair.tell(_WELL)
        pair.settle()

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        src, buffers = self.peer, self._incoming.buffers()
        move(comms, buffers, comms.between_two, lambda comm, buffer: comm.recv(buffer, src, async_op=True))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Tree:
        return self._incoming.finish()


class SendObject(_OfTwo[None]):
    """The verb ``send_object``, which takes the same arguments."""

    operation, peer_name = "send_object", "dst"

    def __init__(self, obj: Any, dst: int, weights_only: bool) -> None:
        self._obj, self.peer, self._weights_only = obj, dst, weights_only

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self, _OBJECT)
        try:
            self.refuse(comms)
            message = codec.encode(self._obj, weights_only=self._weights_only)
        except Exception as error:
            pair.refuse(error)
        comms.begin(lambda: pair.ask(message))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> None:
        return None


class RecvObject(_OfTwo[Any]):
    """The verb ``recv_object``, which takes the same arguments."""

    operation, peer_name = "recv_object", "src"

    def __init__(self, src: int, weights_only: bool) -> None:
        self.peer, self._weights_only = src, weights_only

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self, _OBJECT)
        message = comms.begin(pair.receive)
        try:
            self.refuse(comms)
            self._obj = codec.decode(message, weights_only=self._weights_only)
        except Exception as error:
            pair.refuse(error)
        pair.tell(_WELL)
        pair.settle()

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Any:
        return self._obj


class _Pair:
    """The messages of two ranks before the data: its kind, or an answer; a status; and the bytes."""

    def __init__(self, comms: Communicators, verb: _OfTwo[Any], kind: int) -> None:
        self._comms, self._rank, self._operation, self._peer = comms, comms.rank, verb.operation, verb.peer
        self._kind, self._sends = kind, kind if verb.peer_name == "dst" else _ANSWER
        self._told: list[TorchWork] = []

    def tell(self, status: int, data: torch.Tensor | None = None) -> None:
        data = torch.empty(0, dtype=torch.uint8, device="cpu") if data is None else data
        prefix = torch.tensor([self._sends, status, data.numel()], device="cpu")
        bulk = self._comms.between_two(data.numel())
        self._told = [
            self._comms.control.send(prefix, self._peer, async_op=True),
            bulk.send(data, self._peer, async_op=True),
        ]

    def settle(self) -> None:
        """Wait until the peer has received all messages of this rank."""
        for work in self._told:
            work.wait()

    def ask(self, data: torch.Tensor) -> torch.Tensor:
        """Send data with a good status, and return the peer's answer."""
        self.tell(_WELL, data)
        return self.receive()

    def receive(self) -> torch.Tensor:
        """Return the peer's data; raise the peer's error if it has one."""
        prefix = torch.empty(3, dtype=torch.int64, device="cpu")
        self._comms.control.recv(prefix, self._peer, async_op=False)
        self._comms.monitor.is_fresh = False
        self._comms.monitor.check_reports()  # the peer may have given up before this rank came
        sends, status, nbytes = prefix.tolist()
        data = memory.empty([nbytes], torch.uint8)
        self._comms.between_two(nbytes).recv(data, self._peer, async_op=False)
        self.settle()
        if sends and self._sends:  # two ranks that both receive would send no message
            verb = _VERBS.get(min(sends, self._sends), self._operation)
            first, second = sorted((self._rank, self._peer))
            raise DisagreementError(
                f"{verb}: ranks {first} and {second} send to each other, and neither receives\n"
                f"One of the two has to call {verb.replace('send', 'recv')} first."
            )
        if status != _WELL:
            raise _ERRORS[status](bytes(data.numpy()).decode())
        if sends not in (_ANSWER, self._kind):
            verb = _VERBS.get(sends, "another verb")
            self.fail(
                DisagreementError(
                    f"{self._operation}: rank {self._peer} calls {verb}\nRank {self._rank} has to call "
                    f"{verb.replace('send', 'recv')} to receive it."
                )
            )
        return data

    def refuse(self, error: Exception) -> NoReturn:
        """Make both ranks raise that this rank has failed."""
        lines = "".join(traceback.format_exception_only(type(error), error)).strip()
        text = (
            f"{self._operation}: rank {self._rank} failed before the exchange\n  rank {self._rank}: {lines}\n"
            "Nothing was changed, and the group keeps working. Fix the error on that rank."
        )
        self.fail(RemoteError(text), error)

    def fail(self, error: EasydistError, cause: Exception | None = None) -> NoReturn:
        """Make both ranks raise ``error``."""
        status = next(status for status, cls in _ERRORS.items() if isinstance(error, cls))
        self.tell(status, as_bytes(str(error)))
        self.settle()
        raise error from cause
