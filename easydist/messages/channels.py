"""The channels of frames and answers between two ranks: shared memory, gloo, or the group's own backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch

from easydist.errors import EasydistError
from easydist.groups.communicators import Communicators
from easydist.messages import frames
from easydist.messages.frames import ACCEPTED, ASKED, FRAME, HEAD, REFUSED, Message
from easydist.messages.pair_memory import TERM, PairMemory
from easydist.messages.transfers import Answer, Part
from easydist.shm.mailbox import Mailbox
from easydist.transport.backend import Backend
from easydist.transport.backends.c10d import Gloo
from easydist.transport.work import Begun

_FRAMES, _ANSWERS, _DATA = 64, 65, 66
"""Lanes of the group's connections for frames, for the answers to posted ones, and for the data that follows frames.

A rank that waits for an answer may find a posted frame first. Its data must not come among the frames.
"""

_CROSSED = "crossed"
"""The term of an answer that refuses a rank because both send."""

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

Crossed = Callable[[Message], EasydistError]
"""A function of the peer's message; it returns the error of two ranks that send to each other."""


def channel_to(comms: Communicators, peer: int, wait: Callable[[Part], None]) -> Channel:
    """Return the channel between this rank and another one, in a call. Both ranks choose the same one."""
    if not isinstance(comms.direct, Gloo):
        return Channel(comms, peer, wait)
    mailbox = comms.mailbox(peer)
    return _OfGloo(comms, peer, wait) if mailbox is None else _OfMemory(comms, peer, wait, mailbox)


class Channel:
    """Frames and their answers, to and from another rank, through a backend that keeps the order of messages.

    The answer to a rank that asks comes among the other rank's frames, so the two notice if both ask.

    Args:
        comms: The group.
        peer: The other rank.
        wait: Waits for a part.
    """

    _first = HEAD
    """The bytes of the first part of a frame."""

    def __init__(self, comms: Communicators, peer: int, wait: Callable[[Part], None]) -> None:
        self._comms, self.peer, self._wait = comms, peer, wait

    def offer(self) -> Mapping[str, str]:
        """Return the terms in which this rank offers memory for data on the CPU."""
        return {}

    def has_room(self, sizes: Sequence[int]) -> bool:
        """True if all data of a message, of these bytes, fits into memory now, where it would wait for the peer."""
        return False

    def take(self, terms: Mapping[str, Any]) -> None:
        """Take the memory that the terms offer; called before the message is accepted."""

    def post(self, frame: torch.Tensor) -> tuple[list[Part], Answer | None]:
        """Send a frame without waiting.

        Returns:
            The parts still under way, and the answer; None if there will be none.
        """
        return self._send(frame), None

    def ask(self, frame: torch.Tensor, crossed: Crossed) -> Message | None:
        """Send a frame, and return the answer; None means that the frame is accepted.

        A peer that asks, too, instead of receiving is refused, with the error of ``crossed``; so will this rank be.
        Frames that the peer has posted before are kept.
        """
        parts = self._send(frame)
        while (message := self._fetch()).status not in (ACCEPTED, REFUSED):
            if message.status == ASKED:
                parts += self._send(_answer(crossed(message)))  # the peer reads it once it has sent its own
            else:
                self._comms.inbox(self.peer).append(message)
        for part in parts:
            self._wait(part)
        return message

    def receive(self) -> Message:
        """Wait for the next frame, and return it."""
        inbox = self._comms.inbox(self.peer)
        return inbox.popleft() if inbox else self._fetch()

    def answer(self, message: Message, error: EasydistError | None) -> None:
        """Answer a frame, even one that contained only an error. None means that it is accepted."""
        if message.status == ASKED:
            for part in self._send(_answer(error)):
                self._wait(part)

    def move(self, verb: str, buffer: torch.Tensor, device: str, in_memory: bool) -> Part:
        """Begin to ``"send"`` or ``"recv"`` the data of a device that follows a frame.

        Args:
            verb: The operation.
            buffer: The data.
            device: The type of the device.
            in_memory: True if it may go through memory: both ranks wait for it, or it is there.
        """
        comm = self._comms.data(torch.device(device))
        carrier, peer = self._carrier(in_memory) if comm.get_device().type == "cpu" else (comm.backend, self.peer)
        return self._begin(carrier, verb, buffer, peer)

    def _begin(self, carrier: Backend, verb: str, buffer: torch.Tensor, peer: int | None = None) -> Part:
        begin: Callable[[torch.Tensor, int], Begun] = getattr(carrier, verb)
        try:
            return Part(begin(buffer, self.peer if peer is None else peer), buffer)
        except RuntimeError as error:  # the connection broke before
            raise self._comms.monitor.explain(error, self.peer) from error

    def _frames(self) -> Backend:
        """Return the backend that moves frames."""
        return self._comms.control.backend

    def _carrier(self, in_memory: bool) -> tuple[Backend, int]:
        """Return the backend that moves data on the CPU, and the number of the peer in it."""
        return self._comms.control.backend, self.peer

    def _send(self, frame: torch.Tensor) -> list[Part]:
        parts = (frame[: self._first], frame[self._first :])
        return [self._begin(self._frames(), "send", part) for part in parts if part.numel()]

    def _fetch(self) -> Message:
        """Receive the frame that ``_send`` has sent."""
        frame = torch.empty(self._first, dtype=torch.uint8, device="cpu")
        self._wait(self._begin(self._frames(), "recv", frame))
        if (nbytes := frames.nbytes_of(frame)) <= self._first:
            return frames.decode(frame[:nbytes])
        self._comms.monitor.is_promised = True  # the sender posts all of a message at once
        whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        whole[: self._first].copy_(frame)
        self._wait(self._begin(self._frames(), "recv", whole[self._first :]))
        return frames.decode(whole)


class _OfGloo(Channel):
    """Frames as gloo messages, and the answers to frames that were posted with a tag of their own."""

    _first = FRAME

    def __init__(self, comms: Communicators, peer: int, wait: Callable[[Part], None]) -> None:
        super().__init__(comms, peer, wait)
        self._tagged: dict[int, Gloo] = {}

    def post(self, frame: torch.Tensor) -> tuple[list[Part], Answer | None]:
        answer = self._fetch_answer()
        return self._send(frame), Answer(lambda: frames.decode(answer.memory), [answer])

    def answer(self, message: Message, error: EasydistError | None) -> None:
        if message.status == ASKED:
            super().answer(message, error)
        else:
            self._wait(self._post_answer(_answer(error)))

    def _frames(self) -> Backend:
        return self._with_tag(_FRAMES)

    def _carrier(self, in_memory: bool) -> tuple[Backend, int]:
        backend = self._comms.control.backend  # of several hosts, ranks of one exchange data in memory
        return self._with_tag(_DATA) if isinstance(backend, Gloo) or not in_memory else backend, self.peer

    def _fetch_answer(self) -> Part:
        return self._begin(self._with_tag(_ANSWERS), "recv", torch.empty(FRAME, dtype=torch.uint8, device="cpu"))

    def _post_answer(self, frame: torch.Tensor) -> Part:
        return self._begin(self._with_tag(_ANSWERS), "send", frame)

    def _with_tag(self, tag: int) -> Gloo:
        if tag not in self._tagged:
            self._tagged[tag] = gloo = cast(Gloo, self._comms.direct).among(range(self._comms.size), tag)
            gloo.monitor = None  # each waiter chooses its own monitor
        return self._tagged[tag]


class _OfMemory(_OfGloo):
    """Frames in a mailbox if they fit, and data that is asked for in memory. Refusals, which are rare, come by gloo."""

    def __init__(self, comms: Communicators, peer: int, wait: Callable[[Part], None], mailbox: Mailbox) -> None:
        super().__init__(comms, peer, wait)
        self._mailbox = mailbox
        if peer not in comms.pairs:
            comms.pairs[peer] = PairMemory(comms.rank, peer, mailbox)
        self._memory: PairMemory = comms.pairs[peer]

    def offer(self) -> Mapping[str, str]:
        return self._memory.offer(self._comms)

    def has_room(self, sizes: Sequence[int]) -> bool:
        return self._memory.has_room(self._comms, sizes)

    def take(self, terms: Mapping[str, Any]) -> None:
        if TERM in terms:
            self._memory.attach(self._comms, terms[TERM])

    def _carrier(self, in_memory: bool) -> tuple[Backend, int]:
        # Nothing would move other data in memory while neither rank waits.
        backend = self._memory.backend(self._comms) if in_memory else None
        return super()._carrier(in_memory) if backend is None else (backend, self._memory.there)

    def post(self, frame: torch.Tensor) -> tuple[list[Part], Answer | None]:
        box = self._mailbox
        number, is_there = box.post(frame)
        answer = Answer(
            partial(self._answer_to, number),
            has_come=partial(box.has_answer, number),
            is_known=lambda: not box.unknown_refusals(),
        )
        return [] if is_there else self._send(frame), answer

    def ask(self, frame: torch.Tensor, crossed: Crossed) -> Message | None:
        number, is_there = self._mailbox.post(frame, asks=True)
        parts = [] if is_there else self._send(frame)
        if crosses := not self._mailbox.wait_for_answer(number, or_asked=True):
            self._refuse(crossed)
        answer = self._answer_to(number)
        if answer is not None and _CROSSED in answer.terms and not crosses:  # the peer was the first to notice
            self._refuse(crossed)
        for part in parts:
            self._wait(part)
        return answer

    def receive(self) -> Message:
        frame = self._mailbox.receive()
        self._comms.monitor.is_promised = True
        return self._fetch() if frame is None else frames.decode(frame)

    def answer(self, message: Message, error: EasydistError | None, has_crossed: bool = False) -> None:
        if error is not None:  # the sender may never ask for the answer
            terms = {"number": self._mailbox.answered} | ({_CROSSED: True} if has_crossed else {})
            refusal = self._post_answer(_answer(error, terms))
            refusal.in_line(self._comms, (self.peer, "refusals"))
        self._mailbox.answer(is_refusal=error is not None)

    def _refuse(self, crossed: Crossed) -> None:
        message = self.receive()
        self.answer(message, crossed(message), has_crossed=True)

    def _answer_to(self, number: int) -> Message | None:
        box = self._mailbox
        box.wait_for_answer(number)
        for _ in range(box.unknown_refusals()):
            self._wait(part := self._fetch_answer())
            message = frames.decode(part.memory)
            box.refusals[message.terms["number"]] = message._replace(body=_NOTHING)  # else its frame would stay
        return box.refusals.get(number)


def _answer(error: EasydistError | None, terms: Mapping[str, Any] = MappingProxyType({})) -> torch.Tensor:
    if error is None:
        return frames.encode(0, ACCEPTED, {})
    return frames.encode(0, REFUSED, {**frames.terms_of(error), **terms})
