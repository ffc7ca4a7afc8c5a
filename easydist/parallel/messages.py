"""Messages between two ranks of a coordinator: the sender posts everything at once, and the receiver answers.

A message is a frame (``frames``) and one further message for each buffer whose data is not in the frame. The receiver
answers each frame: it accepts the message, or refuses it with the reason. A receiver that refuses a message still
receives its data, so that later messages match the right ``recv``.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from easydist.errors import DisagreementError, EasydistError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.parallel import frames
from easydist.parallel.frames import FAULT, WELL, Message
from easydist.parallel.transfers import Part, Transfer
from easydist.parallel.ways import Way, way_to

_CALLS = ("send_object", "send", "send_tensor_dict")
_COUNTERPARTS = ("recv_object", "recv", "recv_tensor_dict")

Buffers = Sequence[tuple[str, torch.Tensor]]


class Pair:
    """This rank and another one of the group, in one call.

    Args:
        comms: The group.
        operation: The call's name, for error messages.
        peer: The other rank.
    """

    _way: Way

    def __init__(self, comms: Communicators, operation: str, peer: int) -> None:
        self._comms, self._operation, self.peer = comms, operation, peer

    def post(self, kind: int, terms: dict[str, Any], body: torch.Tensor, data: Buffers) -> Transfer:
        """Send a message without waiting. The transfer ends when the receiver has answered."""
        if data:
            terms = {**terms, "data": [[device, buffer.numel()] for device, buffer in data]}
        way = way_to(self._comms, self.peer)
        parts, answer = way.send(frames.encode(kind, WELL, terms, body), self._wait)
        parts += [way.move("send", buffer, device) for device, buffer in data]
        return Transfer(self._comms, self._operation, self.peer, [*parts, *answer.parts], answer)

    def refuse(self, kind: int, error: Exception) -> RemoteError:
        """Send only the error, and return the error that both ranks raise."""
        text = (
            f"{self._operation}: rank {self._comms.rank} failed before the exchange\n  rank {self._comms.rank}: "
            f"{_lines(error)}\nNothing was changed, and the group keeps working. Fix the error on that rank."
        )
        reason = RemoteError(text[: frames.LONGEST])
        frame = frames.encode(kind, FAULT, frames.terms_of(reason))
        parts, answer = way_to(self._comms, self.peer).send(frame, self._wait)
        Transfer(self._comms, self._operation, self.peer, [*parts, *answer.parts], answer)
        return reason

    def receive(self, kind: int) -> Message:
        """Wait for the next message.

        Raises:
            EasydistError: The sender has failed.
        """
        self._way = way = way_to(self._comms, self.peer)
        frame = way.receive(self._wait)
        self._comms.monitor.is_fresh, self._comms.monitor.is_promised = False, True
        self._comms.monitor.check_reports()  # the sender may have given up before this rank called
        message = frames.decode(frame)
        if message.status == FAULT:
            way.answer(None, self._wait)
            raise frames.error_of(message.terms)
        if message.kind != kind:
            self._refuse_kind(message, kind)
        return message

    def _refuse_kind(self, message: Message, kind: int) -> None:
        text = (
            f"{_COUNTERPARTS[kind]}: rank {self.peer} called {_CALLS[message.kind]}, rank {self._comms.rank} called "
            f"{_COUNTERPARTS[kind]}\nCall {_COUNTERPARTS[message.kind]} for what {_CALLS[message.kind]} sends."
        )
        self.reject(message, DisagreementError(text))

    def accept(self, data: Buffers) -> Transfer:
        """Tell the sender that the message is accepted, and begin to receive its data."""
        parts = [self._way.move("recv", buffer, device) for device, buffer in data]
        self._way.answer(None, self._wait)
        return Transfer(self._comms, self._operation, self.peer, parts, is_promised=True)

    def reject(self, message: Message, error: Exception) -> NoReturn:
        """Raise on both ranks, after receiving the data that is on its way."""
        text = (
            f"{self._operation}: rank {self._comms.rank} cannot take what rank {self.peer} sends\n"
            f"  rank {self._comms.rank}: {_lines(error)}\nThe group keeps working. Fix the error on that rank."
        )
        known: EasydistError = frames.shareable(error, text)
        self._way.answer(known, self._wait)
        for device, nbytes in message.terms.get("data", ()):
            there = self._comms.data(torch.device(device)).get_device()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=there)
            self._wait(self._way.move("recv", buffer, device))
        raise known from error

    def _wait(self, part: Part) -> None:
        Transfer(self._comms, self._operation, self.peer, [part]).wait_inside()


def _lines(error: Exception) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
