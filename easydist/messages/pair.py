"""Messages between two ranks: the sender describes the data, and the receiver answers whether it takes it.

A message is a frame (``frames``) and one further message for each buffer whose data is not in the frame. The receiver
answers each frame: it accepts the message, or refuses it with the reason, and both ranks raise. A sender that waits
sends the data once it is accepted. One that does not wait posts everything at once; a receiver that refuses such a
message still receives its data, so that later messages match the right receiver.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch

from easydist.agreement.calling import calling
from easydist.base import modes
from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.liveness.crossing import RECEIVE, SEND
from easydist.liveness.page import MessageWait
from easydist.messages import frames
from easydist.messages.channels import Channel, channel_to
from easydist.messages.frames import ASKED, FAULT, FRAME, POSTED, REFUSED, Message
from easydist.messages.transfers import Part, Transfer
from easydist.shm.mailbox import NobodySendsError
from easydist.typing import Timeout

R = TypeVar("R")
E = TypeVar("E", bound=EasydistError)

ROOM = FRAME - 1024
"""The most bytes of a message's body that fit into one frame together with its terms."""

Buffers = Sequence[tuple[str, torch.Tensor]]
"""Buffers in the order of sending, each with the device type of its data."""

Prepare = Callable[[], tuple[torch.Tensor, Buffers]]
"""A function that returns the body of a message, and the buffers that follow it."""

Open = Callable[[Message], tuple[R, Buffers]]
"""A function that returns what a message contains, and the buffers for the data that follows it."""

_CALLS = ("send_object", "send", "send_tensor_dict")
_COUNTERPARTS = ("recv_object", "recv", "recv_tensor_dict")
_IN_MEMORY = "in_memory"
"""The term of a posted message whose data is in memory, if it is on the CPU."""

_NO_TERMS: Mapping[str, Any] = MappingProxyType({})


def send(
    comms: Communicators,
    operation: str,
    kind: int,
    dst: int,
    prepare: Prepare,
    terms: Mapping[str, Any] = _NO_TERMS,
    *,
    waits: bool = True,
    timeout: Timeout | None = None,
) -> Transfer:
    """Send what ``prepare`` returns to one rank; if ``prepare`` raises, send the error.

    Args:
        comms: The group.
        operation: The call's name.
        kind: The kind of data, as in ``Message``.
        dst: The receiver.
        prepare: Makes the message.
        terms: Facts that both sides need.
        waits: True to return once the receiver has accepted the message, and its data is sent.
        timeout: The time limit of the call; None is the group's.

    Returns:
        The message under way; it has ended if ``waits``.

    Raises:
        RemoteError: ``prepare`` has raised; or the receiver has refused the message. It raises the same.
        DisagreementError: The receiver expects something else, or sends, too. It raises the same.
    """
    pair = Pair(comms, operation, dst)
    where = modes.without_data()
    with modes.left() if where else nullcontext(), calling(comms, operation, timeout, dst, name="dst"):
        try:
            if where:
                raise modes.refusal(operation, where)
            body, data = prepare()
        except Exception as error:
            raise pair.refuse(kind, error) from error
        return pair.ask(kind, terms, body, data) if waits else pair.post(kind, terms, body, data)


def receive(
    comms: Communicators,
    operation: str,
    kind: int,
    src: int,
    open_: Open[R],
    *,
    waits: bool = True,
    timeout: Timeout | None = None,
) -> tuple[R, Transfer]:
    """Receive the next message of one rank; if ``open_`` raises, refuse it.

    Args:
        comms: The group.
        operation: The call's name.
        kind: The kind of data, as in ``Message``.
        src: The sender.
        open_: Reads the message.
        waits: True to return once all data has arrived.
        timeout: The time limit of the call; None is the group's.

    Returns:
        What ``open_`` has returned, and the transfer of the data that is still under way.

    Raises:
        RemoteError: The sender has failed, or ``open_`` has raised. The sender raises the same.
        DisagreementError: The sender sends something else. It raises the same.
    """
    pair = Pair(comms, operation, src)
    where = modes.without_data()
    with modes.left() if where else nullcontext(), calling(comms, operation, timeout, src, name="src"):
        message = comms.begin(lambda: pair.receive(kind))
        try:
            if where:
                raise modes.refusal(operation, where)
            opened, data = open_(message)
        except Exception as error:
            pair.reject(message, error)
        comms.monitor.is_awaited = True
        transfer = pair.accept(message, data)
        if waits:
            transfer.wait_inside()
        comms.monitor.is_awaited = False
        return opened, transfer


class Pair:
    """This rank and another one of the group, in one call.

    Args:
        comms: The group.
        operation: The call's name, for error messages.
        peer: The other rank.
    """

    def __init__(self, comms: Communicators, operation: str, peer: int) -> None:
        self._comms, self._operation, self.peer = comms, operation, peer
        self._channel: Channel

    def post(self, kind: int, terms: Mapping[str, Any], body: torch.Tensor, data: Buffers) -> Transfer:
        """Send a message without waiting. The transfer ends when the receiver has answered."""
        channel, in_memory = channel_to(self._comms, self.peer, self._wait), False
        if data:
            sizes = _on_cpu(data)
            in_memory = channel.has_room(sizes)
            terms = {**terms, "data": [[device, buffer.numel()] for device, buffer in data], _IN_MEMORY: in_memory}
            terms |= channel.offer() if sizes else {}
        message = self._begin(SEND)
        parts, answer = channel.post(frames.encode(kind, POSTED, terms, body))
        for device, buffer in data:
            part = channel.move("send", buffer, device, in_memory)
            parts += [] if in_memory and buffer.is_cpu else [part]
        parts += answer.parts if answer is not None else ()
        return self._transfer(parts, answer, message)

    def ask(self, kind: int, terms: Mapping[str, Any], body: torch.Tensor, data: Buffers) -> Transfer:
        """Send a message, and return when the receiver has accepted it and the data is sent."""
        answer = self._comms.begin(lambda: self._asked(kind, terms, body, bool(_on_cpu(data))))
        if answer is not None and answer.status == REFUSED:
            raise frames.error_of(answer.terms)
        self._comms.monitor.is_awaited = True
        transfer = self._transfer([self._channel.move("send", buffer, device, True) for device, buffer in data])
        transfer.wait_inside()
        self._comms.monitor.is_awaited = False
        return transfer

    def _asked(self, kind: int, terms: Mapping[str, Any], body: torch.Tensor, offers: bool) -> Message | None:
        self._channel = channel = channel_to(self._comms, self.peer, self._wait)
        self._comms.monitor.waits_for(self._begin(SEND))
        frame = frames.encode(kind, ASKED, {**terms, **channel.offer()} if offers else terms, body)
        answer = channel.ask(frame, lambda message: self._crossed(kind, message))
        self._has_heard()
        return answer

    def _crossed(self, kind: int, message: Message) -> DisagreementError:
        """Return the error of two ranks that send to each other, which is the same on both."""
        self._begin(RECEIVE)  # its message was taken, to be refused
        last = max(kind, message.kind)
        return DisagreementError(self._both("send to", "receives", _CALLS[last], _COUNTERPARTS[last]))

    def _both(self, do: str, does_not: str, call: str, counterpart: str) -> str:
        first, second = sorted((self._comms.rank, self.peer))
        return (
            f"{call}: ranks {first} and {second} {do} each other, and neither {does_not}\n"
            f"One of the two has to call {counterpart} first."
        )

    def refuse(self, kind: int, error: Exception) -> RemoteError:
        """Send only the error, and return the error that both ranks raise."""
        text = (
            f"{self._operation}: rank {self._comms.rank} failed before the exchange\n  rank {self._comms.rank}: "
            f"{_lines(error)}\nNothing was changed, and the group keeps working. Fix the error on that rank."
        )
        return self._told(kind, frames.remote(text, self._comms.rank))

    def _told(self, kind: int, error: E) -> E:
        """Send an error, and return it."""
        self._begin(SEND)
        parts, answer = channel_to(self._comms, self.peer, self._wait).post(
            frames.encode(kind, FAULT, frames.terms_of(error))
        )
        self._transfer([*parts, *(answer.parts if answer is not None else ())], answer)
        return error

    def receive(self, kind: int) -> Message:
        """Wait for the next message.

        Raises:
            EasydistError: The sender has failed.
        """
        self._channel = channel = channel_to(self._comms, self.peer, self._wait)
        awaited = self._begin(RECEIVE)
        if not self._comms.inbox(self.peer):
            self._comms.monitor.waits_for(awaited)
        try:
            message = channel.receive()
        except NobodySendsError:
            self._comms.monitor.crossing.begun[RECEIVE, self.peer] -= 1
            self._comms.monitor.crossing.end()
            text = self._both("receive from", "sends", _COUNTERPARTS[kind], _CALLS[kind])
            raise self._told(kind, DisagreementError(text)) from None
        self._comms.monitor.is_promised = message.status != ASKED
        self._has_heard()
        if message.status == FAULT:
            channel.answer(message, None)
            raise frames.error_of(message.terms)
        if message.kind != kind:
            self._refuse_kind(message, kind)
        return message

    def _has_heard(self) -> None:
        self._comms.monitor.is_fresh = False
        self._comms.monitor.check_reports()  # the peer may have given up before this rank came

    def _refuse_kind(self, message: Message, kind: int) -> None:
        text = (
            f"{_COUNTERPARTS[kind]}: rank {self.peer} called {_CALLS[message.kind]}, rank {self._comms.rank} called "
            f"{_COUNTERPARTS[kind]}\nCall {_COUNTERPARTS[message.kind]} for what {_CALLS[message.kind]} sends."
        )
        self.reject(message, DisagreementError(text))

    def accept(self, message: Message, data: Buffers) -> Transfer:
        """Tell the sender that the message is accepted, and begin to receive its data."""
        channel, is_asked, in_memory = self._channel, message.status == ASKED, _is_in_memory(message)
        channel.take(message.terms)
        parts = [channel.move("recv", buffer, device, in_memory) for device, buffer in data if buffer.is_cpu]
        channel.answer(message, None)
        # The first message of a pair over NCCL blocks until both ranks have posted it: the sender waits for the answer.
        parts += [channel.move("recv", buffer, device, in_memory) for device, buffer in data if not buffer.is_cpu]
        return self._transfer(parts, is_promised=not is_asked)

    def reject(self, message: Message, error: Exception) -> NoReturn:
        """Raise on both ranks, after receiving the data that is on its way."""
        text = (
            f"{self._operation}: rank {self._comms.rank} cannot take what rank {self.peer} sends\n"
            f"  rank {self._comms.rank}: {_lines(error)}\n"
            "Nothing was changed, and the group keeps working. Fix the error on that rank."
        )
        known: EasydistError = frames.shareable(error, text, self._comms.rank)
        channel = self._channel
        channel.answer(message, known)
        for device, nbytes in message.terms.get("data", ()):
            there = self._comms.data(torch.device(device)).get_device()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=there)
            self._wait(channel.move("recv", buffer, device, _is_in_memory(message)))
        try:
            raise known from error
        finally:
            del known, error  # their frames, which hold the data, would be kept in a cycle

    def _transfer(
        self,
        parts: Sequence[Part],
        answer: Any = None,
        message: MessageWait | None = None,
        is_promised: bool = False,
    ) -> Transfer:
        return Transfer(self._comms, self._operation, self.peer, parts, answer, message, is_promised)

    def _begin(self, kind: int) -> MessageWait:
        return self._comms.monitor.crossing.begin(kind, self.peer)

    def _wait(self, part: Part) -> None:
        self._transfer([part]).wait_inside()


def _is_in_memory(message: Message) -> bool:
    return message.status == ASKED or bool(message.terms.get(_IN_MEMORY))


def _on_cpu(data: Buffers) -> list[int]:
    """Return the bytes of each buffer that is on the CPU."""
    return [buffer.numel() for _, buffer in data if buffer.is_cpu]


def _lines(error: Exception) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
