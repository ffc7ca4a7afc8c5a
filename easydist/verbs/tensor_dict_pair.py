"""A tree from one rank to one other: the two exchange the header and their status before the data."""

from __future__ import annotations

import traceback
from typing import NoReturn

import torch

from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement, Headers
from easydist.agreement.runner import R, Verb
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.transport.work import TorchWork
from easydist.typing import Tree
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing
from easydist.verbs.tensor_dict_moves import as_bytes, disagreement, move

_SMALL = 1 << 15
"""The bytes up to which the announcement contains the whole tree."""

_WELL, _REMOTE, _DISAGREEMENT = range(3)
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

    operation = "send_tensor_dict"

    def __init__(self, tensor_dict: Tree, dst: int, objects: bool) -> None:
        self._tensor_dict, self.peer, self._objects = tensor_dict, dst, objects

    def handshake(self, comms: Communicators) -> None:
        pair = _Pair(comms, self.operation, "dst", self.peer)
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
            pair.fail(DisagreementError(disagreement(self.operation, self.peer, {comms.rank: misfit})))
        pair.tell(_WELL)
        pair.settle()

    def exchange(self, comms: Communicators, agreed: Agreement) -> None:
        src, buffers = self.peer, self._incoming.buffers()
        move(comms, buffers, comms.between_two, lambda comm, buffer: comm.recv(buffer, src, async_op=True))

    def result(self, comms: Communicators, agreed: Agreement, arrived: None) -> Tree:
        return self._incoming.finish()


class _Pair:
    """The messages of two ranks before the data: 1 from the sender, 0 from the receiver; a status; and its bytes."""

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
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._comms.control.recv(data, self._peer, async_op=False)
        self.settle()
        if sends == self._sends:  # both send: two ranks that both receive would send no message
            raise DisagreementError(
                f"send_tensor_dict: ranks {min(self._rank, self._peer)} and {max(self._rank, self._peer)} send to each "
                "other, and neither receives\nOne of the two has to call recv_tensor_dict first."
            )
        if status != _WELL:
            raise _ERRORS[status](bytes(data.numpy()).decode())
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
