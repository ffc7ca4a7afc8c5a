"""What the store of a group knows of the first meeting of its ranks: who they are, and whether they have met.

Ranks that recover a group agree on their pages where all of them know all pages, else in the store. Whether they have
met must not be a matter of opinion, as two agreements could have two results. So the store says it: the first rank
decides it for all, be it one that has met the others or one that recovers the group without having met them.
"""

from __future__ import annotations

import contextlib
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from easydist.errors import PeerLostError, RemoteError
from easydist.liveness import texts
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.liveness.timed_store import POLL, TimedStore

_MET, _NOT_MET = "yes", "no"


class FirstMeeting:
    """One rank's view of it.

    Args:
        store: The group's; None where it has none.
        monitor: The group's.
    """

    def __init__(self, store: Store | None, monitor: Monitor) -> None:
        self._store = None if store is None else TimedStore(store)
        self._monitor = monitor

    def announce(self) -> None:
        """Before the meeting: tell who this rank is."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store has ended: nothing is recovered in it either
                told = record(own_page(), self._monitor.entry, False).decode()
                self._store.set(f"who/{self._monitor.rank}", told)

    def conclude(self) -> None:
        """After the meeting: say that the ranks have met.

        Raises:
            RemoteError: Another rank recovers the group already, and has not met the others.
        """
        answer = None
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                answer = self._store.compare_set("met", "", _MET)
        if answer == _NOT_MET.encode():
            error = RemoteError(texts.unmet(self._monitor.operation))
            error.is_final = True
            self._monitor.give_up(error)
            self._monitor.raise_if_broken()

    def look(self, has_met: bool, timeout: float) -> bool:
        """Before recovering: true if the ranks have met, so that this rank knows all others.

        Args:
            has_met: True if this rank knows that they have.
            timeout: Seconds in which the store has to answer.

        Raises:
            PeerLostError: The store is gone, or silent, and the ranks do not know of one another.
        """
        if has_met:
            return True
        try:
            return self._store is not None and self._look(self._store, time.monotonic() + timeout)
        except RuntimeError as error:
            if all(peer.pid is not None for peer in self._monitor.peers.values()):
                return True  # they were about to have met
            raise PeerLostError(texts.unrecoverable(self._monitor.rank, self._monitor.name)) from error

    def _look(self, store: TimedStore, deadline: float) -> bool:
        self.announce()
        answer = store.compare_set("met", "", _NOT_MET)
        while answer is None:
            if time.monotonic() >= deadline:
                raise RuntimeError("the store is silent")
            time.sleep(POLL)
            answer = store.get("met")
        for rank in self._monitor.peers:
            if (told := store.get(f"who/{rank}")) is not None:
                self._monitor.peers[rank] = Peer(rank, told)
        return answer == _MET.encode()
