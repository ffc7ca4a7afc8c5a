"""The paths of frames and answers between two ranks: through shared memory if possible, otherwise by gloo."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from easydist.errors import EasydistError
from easydist.groups.communicators import Communicators
from easydist.parallel import frames
from easydist.parallel.frames import FRAME
from easydist.parallel.transfers import Answer, Part, aside
from easydist.shm.mailbox import Mailbox
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo
from easydist.transport.work import Begun, handle

_MESSAGES, _ANSWERS = 64, 65
"""Channels of the group's connections that are reserved for frames and answers."""

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

Wait = Callable[[Part], None]
"""A function that waits for a part in a call."""


def way_to(comms: Communicators, peer: int) -> Way:
    """Return the path between this rank and another one, in a call. Both ranks choose the same one."""
    mailbox = comms.mailbox(peer)
    return _ByGloo(comms, peer) if mailbox is None else _ThroughMemory(comms, peer, mailbox)


class Way(ABC):
    """Frames and their answers, to and from another rank.

    Args:
        comms: The group.
        peer: The other rank.
    """

    def __init__(self, comms: Communicators, peer: int) -> None:
        self._comms, self.peer = comms, peer
        self._channels: dict[int, Gloo] = {}

    def _channel(self, number: int) -> Gloo:
        if number not in self._channels:
            backend = self._comms.direct
            if not isinstance(backend, Gloo):
                raise RuntimeError(f"{self._comms.name}: the group has no gloo connections")
            self._channels[number] = channel = backend.among(range(self._comms.size), number)
            channel.monitor = None  # each waiter chooses its own monitor
        return self._channels[number]

    @abstractmethod
    def send(self, frame: torch.Tensor, wait: Wait) -> tuple[list[Part], Answer]:
        """Send a frame.

        Returns:
            The parts still under way, and the answer.
        """

    @abstractmethod
    def receive(self, wait: Wait) -> torch.Tensor:
        """Wait for the next frame, and return it."""

    @abstractmethod
    def answer(self, error: EasydistError | None, wait: Wait) -> None:
        """Answer the last frame, even one that contained only an error. None means that it is accepted."""

    def move(self, verb: str, buffer: torch.Tensor, device: str = "cpu") -> Part:
        """Begin to ``"send"`` or ``"recv"`` a buffer of a device's data."""
        comm = self._comms.data(torch.device(device))
        return self._begin(self._channel(_MESSAGES) if comm.get_device().type == "cpu" else comm.backend, verb, buffer)

    def _begin(self, carrier: Backend, verb: str, buffer: torch.Tensor) -> Part:
        post: Callable[[torch.Tensor, int], Begun] = getattr(carrier, verb)
        try:
            return Part(handle(post(buffer, self.peer)), buffer)
        except RuntimeError as error:  # the connection broke before
            raise self._comms.monitor.explain(error, self.peer) from error

    def _post(self, frame: torch.Tensor) -> list[Part]:
        """Send a frame by gloo, in one part or two."""
        return [self.move("send", part) for part in (frame[:FRAME], frame[FRAME:]) if part.numel()]

    def _fetch(self, wait: Wait) -> torch.Tensor:
        """Receive the frame that ``_post`` has sent."""
        frame = torch.empty(FRAME, dtype=torch.uint8, device="cpu")
        wait(self.move("recv", frame))
        if (nbytes := frames.nbytes_of(frame)) <= FRAME:
            return frame[:nbytes]
        self._comms.monitor.is_promised = True  # the sender posts all of a message at once
        whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        whole[:FRAME].copy_(frame)
        wait(self.move("recv", whole[FRAME:]))
        return whole

    def _fetch_answer(self) -> Part:
        answer = torch.empty(FRAME, dtype=torch.uint8, device="cpu")
        return self._begin(self._channel(_ANSWERS), "recv", answer)

    def _post_answer(self, frame: torch.Tensor) -> Part:
        return self._begin(self._channel(_ANSWERS), "send", frame)


class _ByGloo(Way):
    """Frames as gloo messages. The sender posts the receive of the answer at once."""

    def send(self, frame: torch.Tensor, wait: Wait) -> tuple[list[Part], Answer]:
        answer = self._fetch_answer()
        return self._post(frame), Answer(lambda: frames.decode(answer.memory), [answer])

    def receive(self, wait: Wait) -> torch.Tensor:
        return self._fetch(wait)

    def answer(self, error: EasydistError | None, wait: Wait) -> None:
        wait(self._post_answer(_answer(error, 0)))


class _ThroughMemory(Way):
    """Frames in a mailbox if they fit. Refusals, which are rare, come by gloo."""

    def __init__(self, comms: Communicators, peer: int, mailbox: Mailbox) -> None:
        super().__init__(comms, peer)
        self._mailbox = mailbox

    def send(self, frame: torch.Tensor, wait: Wait) -> tuple[list[Part], Answer]:
        number, is_there = self._mailbox.post(frame)
        answer = Answer(partial(self._answer_to, number, wait), has_come=partial(self._mailbox.has_answer, number))
        return [] if is_there else self._post(frame), answer

    def receive(self, wait: Wait) -> torch.Tensor:
        frame = self._mailbox.receive()
        self._comms.monitor.is_promised = True
        return self._fetch(wait) if frame is None else frame

    def answer(self, error: EasydistError | None, wait: Wait) -> None:
        if error is not None:  # the sender may never ask for the answer
            refusal = self._post_answer(_answer(error, self._mailbox.answered))
            aside(refusal.end, weakref.ref(self._comms), (self.peer, "refusals"))
        self._mailbox.answer(is_refusal=error is not None)

    def _answer_to(self, number: int, wait: Wait) -> frames.Message | None:
        box = self._mailbox
        box.wait_for_answer(number)
        for _ in range(box.unknown_refusals()):
            wait(part := self._fetch_answer())
            message = frames.decode(part.memory)
            box.refusals[message.terms["number"]] = message._replace(body=_NOTHING)  # else its frame would stay
        return box.refusals.get(number)


def _answer(error: EasydistError | None, number: int) -> torch.Tensor:
    if error is None:
        return frames.encode(0, frames.WELL, {})
    return frames.encode(0, frames.REFUSED, {**frames.terms_of(error), "number": number})
