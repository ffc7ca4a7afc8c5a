"""The record of a group's first meeting in its store: the identity of each rank, and whether the ranks have met.

Ranks that recover a group agree on their pages if all of them know all pages, else in the store. They must not differ
about having met: two agreements could have two results. So the store decides: the first rank that asks decides it for
all, either one that has met the others or one that recovers the group without having met them.
"""

from __future__ import annotations

import contextlib
import time

from torch.distributed import Store

from easydist.errors import PeerLostError, RemoteError
from easydist.liveness import texts
from easydist.liveness.background import NoAnswerError
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.liveness.status import WHO
from easydist.liveness.stored import damaged, in_store
from easydist.liveness.timed_store import POLL, TimedStore

_MET, _NOT_MET = "yes", "no"


class FirstMeeting:
    """One rank's view of the first meeting.

    Args:
        store: The group's store; None if it has none.
        monitor: The group's monitor.
    """

    def __init__(self, store: Store | None, monitor: Monitor) -> None:
        self._store = None if store is None else TimedStore(store)
        self._monitor = monitor

    def announce(self) -> None:
        """Publish the identity of this rank, before the meeting."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # if the store is gone, nothing can be recovered through it either
                told = record(own_page(), self._monitor.entry, False).decode()
                self._monitor.log(WHO).append(self._store, self._monitor.rank, told)

    def conclude(self) -> bool:
        """Record that the ranks have met, after the meeting.

        Returns:
            False if the store is silent, so that another rank may have recorded the opposite; else True.

        Raises:
            RemoteError: Another rank, which has not met the others, is already recovering the group.
        """
        if self._store is None:
            return True
        try:
            answer = self._store.set_first("met", _MET)
        except RuntimeError:  # a store that is gone contradicts nobody
            return True
        if answer == _NOT_MET.encode():
            error = RemoteError(texts.unmet(self._monitor.operation))
            error.is_final = True
            self._monitor.give_up(error)
            self._monitor.raise_if_broken()
        return answer is not None

    def look(self, has_met: bool, timeout: float) -> bool:
        """Return True if the ranks have met, so that this rank knows all others; called before recovering.

        Args:
            has_met: True if this rank knows that they have met, and that the store says so.
            timeout: Seconds in which the store has to answer.

        Raises:
            PeerLostError: The store is silent, or it is gone and this rank does not know all others.
        """
        if has_met:
            return True
        try:
            return self._store is not None and self._look(self._store, time.monotonic() + timeout)
        except NoAnswerError as error:  # others may agree in the store when it answers again
            raise PeerLostError(texts.unrecoverable(self._monitor.rank, self._monitor.name, True)) from error
        except RuntimeError as error:
            if all(peer.pid is not None for peer in self._monitor.peers.values()):
                return True  # the meeting had got far enough for this rank to know all others
            raise PeerLostError(texts.unrecoverable(self._monitor.rank, self._monitor.name)) from error

    def _look(self, store: TimedStore, deadline: float) -> bool:
        self.announce()
        answer = store.set_first("met", _NOT_MET) or _awaited(store, "met", deadline)
        if answer not in (_MET.encode(), _NOT_MET.encode()):
            raise damaged(in_store("met"), answer)
        has_met = answer == _MET.encode()
        who = self._monitor.log(WHO)
        # All that have met must know all others, or some would agree on pages and some in the store.
        while not (told := who.last(store)).keys() >= self._monitor.peers.keys() and has_met:
            _pause(deadline, WHO)
        self._monitor.peers |= {rank: Peer(rank, told[rank]) for rank in self._monitor.peers if rank in told}
        return has_met


def _awaited(store: TimedStore, key: str, deadline: float) -> bytes:
    while (value := store.get(key)) is None:
        _pause(deadline, key)
    return value


def _pause(deadline: float, key: str) -> None:
    if time.monotonic() >= deadline:
        raise NoAnswerError(f"the store does not answer, or {key} is not set")
    time.sleep(POLL)
