"""Messages between two ranks of a coordinator: all that goes is posted at once, and the receiver answers.

A message is a frame: four 64-bit numbers (kind, status, bytes of the terms, bytes of the body), the terms as JSON, the
body; what does not fit 32 KiB follows in a second part. The body of a tensor dict is an ``Announcement``, that of an
object a ``codec`` message. Data that has not come with it follows, one message per buffer. The answer says whether the
receiver has taken all that. A receiver that refuses lets the data come all the same, so that what is sent later still
meets the right ``recv``.
"""

from __future__ import annotations

import functools
import json
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.parallel.transfers import Part, Transfer
from easydist.transport.backends.c10d import Gloo

FRAME = 1 << 15
_LONGEST = FRAME // 16
"""Characters of an error, each of which may need 12 bytes."""

_HEAD = struct.Struct("<4q")
_MESSAGES, _ANSWERS = 64, 65
"""Channels of the group's connections that nothing else uses."""

_WELL, _FAULT, _REFUSED = range(3)
OBJECT, TENSOR, TENSOR_DICT = range(3)
_CALLS = ("send_object", "send", "send_tensor_dict")
_COUNTERPARTS = ("recv_object", "recv", "recv_tensor_dict")
_ERRORS: dict[str, type[EasydistError]] = {cls.__name__: cls for cls in (RemoteError, DisagreementError)}

Buffers = Sequence[tuple[str, torch.Tensor]]


class Message(NamedTuple):
    """What has come.

    Attributes:
        kind: What was sent: ``OBJECT``, ``TENSOR`` or ``TENSOR_DICT``.
        terms: What both sides have to know beside it; ``"data"`` are the buffers that follow, as (kind, bytes).
        body: uint8.
    """

    kind: int
    terms: dict[str, Any]
    body: torch.Tensor


class Pair:
    """This rank and another one of the group, in one call.

    Args:
        comms: The group.
        operation: The call's name, for the errors.
        name: Of the argument that names the other rank.
        peer: The other rank.

    Raises:
        ValueError: It is not another rank of the group.
    """

    def __init__(self, comms: Communicators, operation: str, name: str, peer: int) -> None:
        if not 0 <= peer < comms.size or peer == comms.rank:
            raise ValueError(
                f"{operation}: {name}={peer} is not another rank of the group: it has {comms.size}, "
                f"this is rank {comms.rank}"
            )
        self._comms, self._operation, self.peer = comms, operation, peer

    def _channel(self, number: int) -> Gloo:
        backend = self._comms.direct
        if not isinstance(backend, Gloo):
            raise RuntimeError(f"{self._operation}: the group has no gloo connections")
        channel = backend.among(range(self._comms.size), number)
        channel.monitor = None  # whoever waits says who looks after it
        return channel

    def post(self, kind: int, terms: dict[str, Any], body: torch.Tensor, data: Buffers) -> Transfer:
        """Send a message, without waiting; the transfer ends when the receiver has answered."""
        if data:
            terms = {**terms, "data": [[device, buffer.numel()] for device, buffer in data]}
        channel = self._channel(_MESSAGES)
        parts = [self._send(channel, part) for part in _parts(kind, _WELL, terms, body)]
        parts += [self._move("send", channel, device, buffer) for device, buffer in data]
        answer = torch.empty(FRAME, dtype=torch.uint8, device="cpu")
        parts.append(Part(self._channel(_ANSWERS).recv(answer, self.peer), answer))
        return Transfer(self._comms, self._operation, self.peer, parts, functools.partial(_check, answer))

    def refuse(self, kind: int, error: Exception) -> RemoteError:
        """Send nothing but what has gone wrong; gives the error that both ranks raise."""
        lines = "".join(traceback.format_exception_only(type(error), error)).strip()
        text = (
            f"{self._operation}: rank {self._comms.rank} failed before the exchange\n  rank {self._comms.rank}: "
            f"{lines}\nNothing was changed; fix that rank; the group keeps working."
        )
        channel = self._channel(_MESSAGES)
        body = torch.empty(0, dtype=torch.uint8, device="cpu")
        reason = RemoteError(text[:_LONGEST])
        parts = [self._send(channel, part) for part in _parts(kind, _FAULT, _told(reason), body)]
        Transfer(self._comms, self._operation, self.peer, parts)
        return reason

    def receive(self, kind: int) -> Message:
        """Wait for the next message.

        Raises:
            EasydistError: The sender has failed.
        """
        channel = self._channel(_MESSAGES)
        frame = torch.empty(FRAME, dtype=torch.uint8, device="cpu")
        self._wait(Part(channel.recv(frame, self.peer), frame))
        self._comms.monitor.is_fresh = False
        self._comms.monitor.check_reports()  # the sender may have given up before this rank came
        came, status, terms_nbytes, body_nbytes = _HEAD.unpack_from(frame.numpy().data)
        whole = frame[: (nbytes := _HEAD.size + terms_nbytes + body_nbytes)]
        if nbytes > FRAME:
            whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            whole[:FRAME].copy_(frame)
            self._wait(Part(channel.recv(whole[FRAME:], self.peer), whole))
        told = whole[_HEAD.size : _HEAD.size + terms_nbytes]
        terms = json.loads(bytes(told.numpy())) if terms_nbytes else {}
        if status == _FAULT:
            raise _error(terms)
        message = Message(came, terms, whole[_HEAD.size + terms_nbytes :])
        if came != kind:
            self._refuse_kind(message, kind)
        return message

    def _refuse_kind(self, message: Message, kind: int) -> None:
        text = (
            f"{_COUNTERPARTS[kind]}: rank {self.peer} called {_CALLS[message.kind]}, rank {self._comms.rank} called "
            f"{_COUNTERPARTS[kind]}\nCall {_COUNTERPARTS[message.kind]} for what {_CALLS[message.kind]} sends."
        )
        self.reject(message, DisagreementError(text))

    def accept(self, data: Buffers) -> Transfer:
        """Tell the sender that all is well, and let the data come."""
        channel = self._channel(_MESSAGES)
        parts = [self._move("recv", channel, device, buffer) for device, buffer in data]
        self._answer(_WELL, {})
        return Transfer(self._comms, self._operation, self.peer, parts)

    def reject(self, message: Message, error: Exception) -> NoReturn:
        """Let both ranks raise, once the data has come that is on its way."""
        text = str(error)
        kind = _ERRORS.get(type(error).__name__, RemoteError)
        if type(error) is not kind:
            lines = "".join(traceback.format_exception_only(type(error), error)).strip()
            text = (
                f"{self._operation}: rank {self._comms.rank} cannot take what rank {self.peer} sends\n"
                f"  rank {self._comms.rank}: {lines}\nFix that rank; the group keeps working."
            )
        known = kind(text[:_LONGEST])
        self._answer(_REFUSED, _told(known))
        channel = self._channel(_MESSAGES)
        for device, nbytes in message.terms.get("data", ()):
            there = self._comms.data(torch.device(device)).get_device()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=there)
            self._wait(self._move("recv", channel, device, buffer))
        raise known from error

    def _answer(self, status: int, terms: dict[str, Any]) -> None:
        body = torch.empty(0, dtype=torch.uint8, device="cpu")
        (part,) = _parts(0, status, terms, body)
        self._wait(Part(self._channel(_ANSWERS).send(part, self.peer), part))

    def _wait(self, part: Part) -> None:
        Transfer(self._comms, self._operation, self.peer, [part]).wait_inside()

    def _send(self, channel: Gloo, part: torch.Tensor) -> Part:
        return Part(channel.send(part, self.peer), part)

    def _move(self, way: str, channel: Gloo, device: str, buffer: torch.Tensor) -> Part:
        comm = self._comms.data(torch.device(device))
        carrier: Any = channel if comm.get_device().type == "cpu" else comm.backend
        post: Callable[[torch.Tensor, int], Any] = getattr(carrier, way)
        return Part(post(buffer, self.peer), buffer)


def _check(answer: torch.Tensor) -> None:
    _, status, nbytes, _ = _HEAD.unpack_from(answer.numpy().data)
    if status != _WELL:
        raise _error(json.loads(bytes(answer[_HEAD.size : _HEAD.size + nbytes].numpy())))


def _parts(kind: int, status: int, terms: dict[str, Any], body: torch.Tensor) -> list[torch.Tensor]:
    """The frame, and what it has no room for."""
    told = json.dumps(terms, separators=(",", ":")).encode() if terms else b""
    head = torch.frombuffer(bytearray(_HEAD.pack(kind, status, len(told), body.numel()) + told), dtype=torch.uint8)
    if head.numel() + body.numel() <= FRAME:
        return [torch.cat([head, body])]
    room = max(0, FRAME - head.numel())
    if room == 0:
        whole = torch.cat([head, body])
        return [whole[:FRAME], whole[FRAME:]]
    return [torch.cat([head, body[:room]]), body[room:]]


def _told(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def _error(terms: dict[str, Any]) -> EasydistError:
    return _ERRORS.get(terms.get("error", ""), RemoteError)(terms.get("text", ""))
