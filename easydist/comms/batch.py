"""Several sends and receives at once."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import SupportsIndex

import torch

from easydist.base.arguments import integer
from easydist.groups.pickled import OfThisProcess
from easydist.transport.backend import Addressed
from easydist.transport.checked import Staging, demand, flat
from easydist.transport.comm import Collectives
from easydist.transport.work import TorchWork


class P2POpType(enum.Enum):
    """The direction of a message."""

    SEND = 0
    RECV = 1


class P2POp:
    """One message of a batch.

    Args:
        type: ``P2POpType.SEND`` or ``RECV``.
        tensor: The tensor to send or to fill.
        peer: The other rank.

    Example:
        >>> import torch
        >>> from easydist.comms import P2POp, P2POpType
        >>> P2POp(P2POpType.SEND, torch.ones(2), 1).peer
        1

    Raises:
        TypeError: ``type`` is not a ``P2POpType``, ``tensor`` not a tensor, or ``peer`` not an integer.
    """

    def __init__(self, type: P2POpType, tensor: torch.Tensor, peer: SupportsIndex) -> None:
        for value, kind in ((type, P2POpType), (tensor, torch.Tensor)):
            if not isinstance(value, kind):
                raise TypeError(f"P2POp() takes a P2POpType, a tensor and a rank, got {value!r}")
        self.type, self.tensor, self.peer = type, tensor, integer("P2POp: peer", peer, "a rank")

    def __repr__(self) -> str:
        return f"P2POp({self.type.name}, {tuple(self.tensor.shape)}, {self.peer})"


class BatchP2POptions:
    """Options of a batch.

    Attributes:
        hints: Texts for a backend.
        timeout: A ``timedelta``; None means the communicator's.

    Example:
        >>> from easydist.comms import BatchP2POptions
        >>> BatchP2POptions().timeout is None
        True
    """

    def __init__(self) -> None:
        self.hints: Mapping[str, str] | None = None
        self.timeout: timedelta | None = None


class BatchSendRecv(OfThisProcess):
    """Sends and receives that begin together, so that their order cannot block any rank.

    The i-th send to a rank matches that rank's i-th receive from this one, no matter which batches or calls contain
    them. Only ranks named in a batch need to know of it. A batch may be issued again.

    Args:
        comm: The communicator.

    Attributes:
        ops: The messages so far.

    Example:
        >>> from easydist.comms import Solo, TorchComm
        >>> batch = TorchComm(Solo()).batch_op_create()
        >>> batch.ops
        []
        >>> batch.issue(False)
        Traceback (most recent call last):
        RuntimeError: Cannot issue empty batch operation
    """

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: torch.Tensor, dst: SupportsIndex) -> None:
        """Add a send.

        Args:
            tensor: The tensor to send. Do not change it before the batch has ended.
            dst: Another rank.
        """
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: SupportsIndex) -> None:
        """Add a receive.

        Args:
            tensor: A tensor of as many bytes as are sent.
            src: Another rank.
        """
        self.ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(self, async_op: bool, options: BatchP2POptions = BatchP2POptions()) -> TorchWork:  # noqa: B008
        """Check all messages, then begin them.

        Args:
            async_op: Return at once.
            options: Hints and time limit.

        Returns:
            The work of all messages.

        Raises:
            RuntimeError: The batch is empty, or a message does not fit.
        """
        demand(bool(self.ops), "Cannot issue empty batch operation")
        staging = Staging()
        sends = [self._send(op) for op in self.ops if op.type is P2POpType.SEND]
        recvs = [self._recv(op, staging) for op in self.ops if op.type is P2POpType.RECV]
        begin = functools.partial(self._comm.backend.batch, sends, recvs)
        return self._comm._run("batch_op", begin, async_op, options.hints, options.timeout, staging)

    def _send(self, op: P2POp) -> Addressed:
        checks = self._comm.checks
        peer = checks.peer("send to", "dst", op.peer)
        checks.tensors("send", [], [op.tensor])
        return checks.raw(flat(op.tensor)), peer

    def _recv(self, op: P2POp, staging: Staging) -> Addressed:
        checks = self._comm.checks
        peer = checks.peer("recv from", "src", op.peer)
        checks.tensors("recv", [op.tensor])
        return checks.raw(staging.target(op.tensor)), peer
