"""Short messages between two ranks of a host, posted and answered without either rank waiting for the other.

A mailbox for one direction consists of two chunks of memory, and of numbers. The sender writes, about its messages:

    length, length      bytes of the message that begins in the first, the second chunk
    sent                twice the messages sent, including those sent another way; one more if the sender waits for the
                        answer to the last one
    elsewhere           0, or one more than the number of the first message sent another way

and the receiver writes, about the messages that it gets:

    taken               chunks copied out
    answered            twice the messages answered; one more if the receiver waits for the next one
    refused             the answers that were refusals
    attached            1 once it has attached further memory of the sender, for data; 2 if it could not

A message has to fit into the free chunks as a whole, so that the sender never waits. If it does not, it is sent another
way, by gloo for instance, and so are all later ones until the receiver has answered every message: then both know that
the next one is in memory again. A receiver that waits for message n reads ``sent`` first, then ``elsewhere``: the
sender writes them in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from easydist.memory import copy
from easydist.shm.slots import NEVER, Need, Slots
from easydist.shm.streams import Streams


class NobodySendsError(RuntimeError):
    """Both ranks wait for a message of the other one."""


_ATTACHED, _TAKEN, _SENT, _ELSEWHERE, _LENGTH, _, _ANSWERED, _REFUSED = range(8)


class Mailbox:
    """This rank's side of the messages to one other rank, and from it.

    Args:
        slots: The memory.
        streams: The streams in which waits run.
        peer: The other rank.

    Attributes:
        answered: The number of messages that this rank has answered.
        refusals: The refusals of ``peer`` received so far, by the numbers of the refused messages.
    """

    def __init__(self, slots: Slots, streams: Streams, peer: int) -> None:
        self._slots, self._streams, self._peer = slots, streams, peer
        self._mine, self._theirs = slots.message_cell(slots.rank, peer), slots.message_cell(peer, slots.rank)
        self._out, self._in = slots.message_address(slots.rank, peer), slots.message_address(peer, slots.rank)
        self._posted = self._taken = 0
        self._sent = self._received = self.answered = self._refused = 0
        self._is_elsewhere = False
        self.refusals: dict[int, Any] = {}

    def post(self, message: torch.Tensor, asks: bool = False) -> tuple[int, bool]:
        """Write a message into the mailbox, if there is room.

        Args:
            message: uint8, contiguous; it can be reused when this returns.
            asks: True if this rank now waits for the answer.

        Returns:
            The number of the message, and True if it is in memory. If False, it has to be sent another way.
        """
        self._streams.check()
        number, slots = self._sent, self._slots
        is_here = self._comes_here(number) and self._lay(message)
        if not is_here and not self._is_elsewhere:
            self._is_elsewhere = True
            # Before ``sent``: a receiver that sees ``sent`` has to know where the message is.
            slots.write(self._mine + _ELSEWHERE, number + 1)
        self._sent += 1
        slots.tell(self._mine + _SENT, 2 * self._sent + asks, self._peer)
        return number, is_here

    def _comes_here(self, number: int) -> bool:
        """True if the peer will read this message from memory."""
        if self._is_elsewhere and self.has_answer(number - 1):
            self._is_elsewhere = False
            self._slots.write(self._mine + _ELSEWHERE, 0)
        return not self._is_elsewhere

    def _lay(self, message: torch.Tensor) -> bool:
        slots, nbytes, chunk = self._slots, message.numel(), self._slots.message_chunk
        posted = self._posted
        count = max(1, -(-nbytes // chunk))
        if posted + count - slots.read(self._theirs + _TAKEN) > 2:
            return False
        slots.write(self._mine + _LENGTH + posted % 2, nbytes)
        self._copy(self._out, posted, message, is_in=False)
        self._posted += count
        return True

    def _copy(self, chunks: int, first: int, message: torch.Tensor, is_in: bool) -> None:
        """Copy between a message and the two chunks, which alternate; ``first`` is the number of the first chunk."""
        chunk, address, nbytes = self._slots.message_chunk, message.data_ptr(), message.numel()
        for offset in range(0, nbytes, chunk):
            place, there = chunks + (first + offset // chunk) % 2 * chunk, address + offset
            source, target = (place, there) if is_in else (there, place)
            copy(target, source, min(chunk, nbytes - offset))

    def receive(self) -> torch.Tensor | None:
        """Wait for the next message.

        Returns:
            The message; None if it is sent another way.

        Raises:
            NobodySendsError: The peer waits, too. The lower of the two ranks raises this; it has to tell the other one.
        """
        number, slots = self._received, self._slots
        if not self._has_come(number):
            self._wait_for(number)
        self._received += 1
        elsewhere = slots.read(self._theirs + _ELSEWHERE)
        if elsewhere and number >= elsewhere - 1:
            return None
        nbytes = slots.read(self._theirs + _LENGTH + self._taken % 2)
        message = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._copy(self._in, self._taken, message, is_in=True)
        self._taken += max(1, -(-nbytes // slots.message_chunk))
        # After the copy: the sender may overwrite the chunks at once.
        slots.write(self._mine + _TAKEN, self._taken)
        return message

    def _has_come(self, number: int) -> bool:
        return self._slots.read(self._theirs + _SENT) >> 1 > number

    def _wait_for(self, number: int) -> None:
        slots, at = self._slots, self._mine + _ANSWERED
        slots.tell(at, 2 * self.answered + 1, self._peer)
        try:
            self._wait("sent", lambda: self._has_come(number) or self._is_in_vain())
        finally:
            slots.write(at, 2 * self.answered)
        if not self._has_come(number):
            raise NobodySendsError

    def _is_in_vain(self) -> bool:
        """True if the peer has answered all messages of this rank, and waits for the next one instead of sending."""
        slots = self._slots
        waits = slots.rank < self._peer and slots.read(self._theirs + _ANSWERED) == 2 * self._sent + 1
        return waits and not self._has_come(self._received)  # read last: it may have sent one before it waits

    def answer(self, is_refusal: bool = False) -> None:
        """Answer the last message received: accept or refuse it."""
        slots = self._slots
        if is_refusal:
            self._refused += 1
            # Before ``answered``: a sender that sees the answer reads next whether it was a refusal.
            slots.write(self._mine + _REFUSED, self._refused)
        self.answered += 1
        slots.tell(self._mine + _ANSWERED, 2 * self.answered, self._peer)

    def has_answer(self, number: int) -> bool:
        """True if the peer has answered a message."""
        return self._slots.read(self._theirs + _ANSWERED) >> 1 > number

    def wait_for_answer(self, number: int, or_asked: bool = False) -> bool:
        """Wait until the peer has answered a message.

        Args:
            number: The number of the message.
            or_asked: True to give up once the peer will not answer, because it waits for an answer of this rank.

        Returns:
            True if it has answered.
        """
        if not self.has_answer(number):  # the streams may have ended since it came
            self._wait("answered", lambda: self.has_answer(number) or (or_asked and self._is_asked_instead_of(number)))
        return self.has_answer(number)

    def _is_asked_instead_of(self, number: int) -> bool:
        # Only if the peer's last message is the only one without an answer: answers are counted in order.
        sent = self._slots.read(self._theirs + _SENT)
        asks = sent % 2 == 1 and sent >> 1 == self.answered + 1 == self._received + 1
        return asks and not self.has_answer(number)  # read last: a peer that has answered may ask next

    def show_attached(self, is_attached: bool) -> None:
        """Show the peer, before the answer to its message, whether this rank could attach its memory."""
        self._slots.write(self._mine + _ATTACHED, 1 if is_attached else 2)

    def attached(self) -> bool | None:
        """Return whether the peer could attach the memory of this rank; None if it has not tried."""
        found = self._slots.read(self._theirs + _ATTACHED)
        return found == 1 if found else None

    def unknown_refusals(self) -> int:
        """Return the number of refusals that are not yet in ``refusals``."""
        return self._slots.read(self._theirs + _REFUSED) - len(self.refusals)

    def _wait(self, what: str, has_come: Callable[[], bool]) -> None:
        need: Need = (NEVER, (self._peer,))

        def until() -> Iterator[Need]:
            while not has_come():
                yield need

        self._streams.begin([((what, self._peer), until())], None).wait()
