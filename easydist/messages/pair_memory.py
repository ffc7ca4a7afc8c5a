"""Memory for the large data between two ranks of a host, made with the first message that has such data.

Two ranks cannot create the group's larger slots, which takes all of them. The sender creates this memory and names it
in its frame. The receiver attaches it and shows that in the mailbox before it accepts the message, so both know from
then on whether data goes through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from easydist.groups.communicators import Communicators
from easydist.shm.mailbox import Mailbox
from easydist.shm.segment import Segment, spare
from easydist.transport.backends.shm import Shm

TERM = "memory"
"""The term of a frame that names the memory."""

_WORTH = 1 << 17
"""The bytes of a message that are worth it."""

_NBYTES = Shm.nbytes(2, 1 << 18)
"""The bytes of the memory: 3 MiB, for chunks of 128 KiB. A message of 4 MB takes a tenth longer than with 512 KiB."""


class PairMemory:
    """The memory of this rank and another one.

    Args:
        rank: The rank of this process.
        peer: The other rank.
        mailbox: The mailbox to and from it.

    Attributes:
        backend: The backend between the two; None as long as they have no such memory.
        there: The number of the other rank in it.
    """

    def __init__(self, rank: int, peer: int, mailbox: Mailbox) -> None:
        self.backend: Shm | None = None
        self.there = int(rank < peer)
        self._peer, self._mailbox = peer, mailbox
        self._offered: Segment | None = None
        self._is_possible = True

    def offer(self, nbytes: int) -> dict[str, str]:
        """Return the terms that offer memory for this many bytes of data; none if there is some, or can be none."""
        if self.backend is not None or nbytes < _WORTH or not self._is_possible:
            return {}
        with contextlib.suppress(OSError):
            self._offered = Segment.create(_NBYTES) if spare() >= _NBYTES else None
        self._is_possible = self._offered is not None  # else the group's slots move the data, in small pieces
        return {} if self._offered is None else {TERM: self._offered.name}

    def attach(self, comms: Communicators, name: str) -> None:
        """Attach the memory that the other rank offers, if that is possible; before its message is answered."""
        with contextlib.suppress(OSError, ValueError):
            self._use(comms, Segment.attach(name, _NBYTES))
            self._mailbox.show_attached()

    def conclude(self, comms: Communicators, is_accepted: bool) -> None:
        """Use the memory that this rank has offered if the other one has attached it, once that has answered."""
        offered, self._offered = self._offered, None
        if offered is None:
            return
        if self._mailbox.has_attached():
            self._use(comms, offered)
        elif is_accepted:
            self._is_possible = False
        offered.unlink()

    def _use(self, comms: Communicators, segment: Segment) -> None:
        monitor, peer = comms.monitor, self._peer

        def guard(_: Sequence[int], waited: float) -> None:
            monitor.guard([peer], waited)

        self.backend = Shm(segment, 1 - self.there, 2, guard)
        comms.keep(self.backend)
