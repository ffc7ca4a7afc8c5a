"""Memory for the data between two ranks of a host, made with the first message whose data is not in its frame.

Two ranks cannot create the group's larger slots, which takes all of them. The sender creates this memory and names it
in its frame. The receiver attaches it when it accepts the message, and shows that in the mailbox, before it answers or
sends anything else. So from then on both find it there. If both offer memory at the same time, that of the lower rank
is used: it attaches no other while it waits for its own to be attached.
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

_NBYTES = Shm.nbytes(2, 1 << 19)
"""The bytes of the memory: 6 MiB, for two chunks of 256 KiB in each direction."""


class PairMemory:
    """The memory of this rank and another one.

    Args:
        rank: The rank of this process.
        peer: The other rank.
        mailbox: The mailbox to and from it.

    Attributes:
        there: The number of the other rank in the memory.
    """

    def __init__(self, rank: int, peer: int, mailbox: Mailbox) -> None:
        self.there = int(rank < peer)
        self._peer, self._mailbox = peer, mailbox
        self._backend: Shm | None = None
        self._offered: Segment | None = None
        self._is_possible = True

    def backend(self, comms: Communicators) -> Shm | None:
        """Return the backend between the two; None as long as they do not share the memory."""
        if self._offered is not None and (told := self._mailbox.attached()) is not None:
            offered, self._offered, self._is_possible = self._offered, None, told
            if told:
                self._use(comms, offered)
            offered.unlink()
        return self._backend

    def offer(self, comms: Communicators) -> dict[str, str]:
        """Return the terms that offer memory; none if there is some, or can be none."""
        if self.backend(comms) is not None or not self._is_possible:
            return {}
        if self._offered is None:
            with contextlib.suppress(OSError):
                self._offered = Segment.create(_NBYTES) if spare() >= _NBYTES else None
            self._is_possible = self._offered is not None  # else the group's slots or gloo move the data
        return {} if self._offered is None else {TERM: self._offered.name}

    def attach(self, comms: Communicators, name: str) -> None:
        """Attach the memory that the other rank offers, if that is possible and it is still needed."""
        if self.backend(comms) is not None or (self._offered is not None and self.there):
            return
        try:
            self._use(comms, Segment.attach(name, _NBYTES))
        except (OSError, ValueError):
            self._mailbox.show_attached(False)
        else:
            self._offered = None
            self._mailbox.show_attached(True)

    def has_room(self, comms: Communicators, sizes: Sequence[int]) -> bool:
        """True if all data of a message fits into the memory now, where it would wait for the other rank."""
        backend = self.backend(comms)
        return backend is not None and backend.has_room(sizes, self.there)

    def _use(self, comms: Communicators, segment: Segment) -> None:
        monitor, peer = comms.monitor, self._peer

        def guard(_: Sequence[int], waited: float) -> None:
            monitor.guard([peer], waited)

        self._backend = Shm(segment, 1 - self.there, 2, guard)
        comms.keep(self._backend)
