"""When a wait ends although not all ranks have come: lost, late and interrupted ranks of one group.

While a call waits, ``guard`` is called again and again, and ends the wait if the awaited ranks can no longer come. The
rank then posts a failure report, on its page for its own host and in the store for other hosts, so that every rank
raises the same kind of error. ARCHITECTURE.md states the rules ("Liveness").
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from easydist.errors import EasydistError, RemoteError
from easydist.liveness import texts
from easydist.liveness.peer import Peer
from easydist.liveness.report import EXCEPTION, INTERRUPT, fields_of, kind_of
from easydist.liveness.status import GroupStatus, nothing
from easydist.liveness.timed_store import TimedStore

_log = logging.getLogger("easydist")
WARN_AFTER = float(os.environ.get("EASYDIST_WARN_AFTER", "30"))
"""Seconds after which a wait is mentioned in the log."""

_GRACE = 1.5
"""Seconds in which a process whose connection broke has to end or to leave its failure report."""

_UNMET_GRACE = 0.5
"""The same for one that has not been met: its end cannot be seen, and its failure report was in the store before."""

_LISTEN_EVERY = 1.0
"""Seconds between two looks for what ranks of other hosts say."""

_IDLE = 0.05
"""Seconds without a call after which this process may have missed what its peers said."""


class Monitor(GroupStatus):
    """Looks after the waits of one group's calls.

    Args:
        rank: This process in the group.
        size: How many processes the group has.
        timeout: Seconds that a call may take unless it says otherwise.
        store: Where ranks of other hosts leave their failure reports.
        name: The group's.

    Attributes:
        broken: The error that ended the group's exchanges; None while all is well.
        disconnect: Breaks this process's connections of the group, so that waits in C++ end.
        is_awaited: True if others wait for what this rank has to send in its call.
        is_fresh: True if nothing of this rank's call has been exchanged yet.
        waits_in_memory: True if the group's ranks share memory, so that all of them look around while they wait.
        waits: Even outside of waits in C++; rises with every beginning and end of one.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: TimedStore | None = None, name: str = "") -> None:
        super().__init__(rank, size, store, name)
        self.timeout = timeout
        self.waits = 0
        self.broken: EasydistError | None = None
        self.disconnect: Callable[[], None] = nothing
        self.waits_in_memory = False
        self.is_awaited, self.is_fresh = False, True
        self._limit, self._ended = timeout, 0.0
        self._seen_ended: set[int] = set()
        self._end_of_time = self._deadline = self._warn_at = self._listen_at = float("inf")
        self._lock = threading.Lock()

    def begin(self, operation: str, site: str, timeout: float | None = None, peer: int | None = None) -> None:
        """Begin a call.

        Args:
            operation: Its name.
            site: The caller's file and line.
            timeout: Seconds; None is the group's.
            peer: The only other rank that takes part; such calls are not counted. None: all do.
        """
        self.peer = peer
        self.number += peer is None
        self.at = self.number + 0.5 * (peer is not None)
        self._seen_ended.clear()
        self.operation, self.site, self._place = operation, site, f"{operation}, call {self.number}, at {site}".encode()
        now, self._limit = time.monotonic(), self.timeout if timeout is None else timeout
        self.is_awaited, self.is_fresh = False, True
        self._deadline, self._warn_at = now + self._limit, now + WARN_AFTER
        self._listen_at = now + _LISTEN_EVERY
        if self._page is not None:
            self._page.begin(self.entry, self._place, now, self.number if peer is None else None, peer)
        if self.broken is None and (self.was_interrupted or now - self._ended > _IDLE):
            self._check_missed()

    def _check_missed(self) -> None:
        """Reconnect, and raise nothing, if others have left a call that this rank had ended, or missed."""
        for peer in self.peers.values():
            if (error := self._reported(peer)) is not None and error.is_earlier:
                self.broken = error

    def end(self, is_done: bool = True) -> None:
        """End the call; unless ``is_done``, this rank has not sent all that others wait for."""
        self._deadline = self._warn_at = self._end_of_time
        self._ended, self.was_interrupted = time.monotonic(), False
        if self._page is not None:
            self._page.end(self.entry, self._ended, is_done and self.peer is None)

    @property
    def left(self) -> float | None:
        """Seconds until the call's time is over; None outside of calls."""
        return None if self._deadline == self._end_of_time else max(0.0, self._deadline - time.monotonic())

    def guard(self, awaited: Sequence[int], waited: float = 0.0) -> None:
        """End the wait where it is in vain.

        Args:
            awaited: The ranks that have not come yet, as far as that is known.
            waited: Seconds so far.

        Raises:
            PeerLostError: One of them has ended.
            RemoteError: One of them has ended with an exception, or was interrupted.
            CollectiveTimeout: The call's time is over.
        """
        self.raise_if_broken()
        if (error := self._in_vain(awaited)) is not None:
            self.give_up(error)
        self.raise_if_broken()

    def begin_wait(self) -> None:
        """Begin a wait in C++, which the watchdog looks after."""
        self.waits += 1

    def end_wait(self) -> None:
        """End a wait in C++."""
        with self._lock:  # what the watchdog finds out about a wait breaks no later one
            self.waits += 1

    def check_wait(self, wait: int) -> None:
        """End the wait of a thread in C++ where it is in vain; the watchdog calls this, and the thread raises.

        Args:
            wait: The value of ``waits`` in that wait.
        """
        if self.broken is None and (error := self._in_vain(list(self.peers))) is not None:
            self.give_up(error, wait=wait)

    def _in_vain(self, awaited: Sequence[int]) -> EasydistError | None:
        """Return why the wait is in vain; None if it is not."""
        for peer in self._unfinished(awaited):
            if (error := self._reported(peer) or self._end_of(peer)) is not None:
                return error
        for peer in self._gave_up():
            if (error := self._reported(peer)) is not None:
                return error
        now = time.monotonic()
        if now >= self._listen_at:
            self._listen_at = now + _LISTEN_EVERY
            if (error := self._remote_report()) is not None:
                return error
        if now >= self._deadline:
            return self.late(awaited, self._limit)
        if now >= self._warn_at:
            self._warn_at = now + WARN_AFTER
            _log.warning("%s", self.late(awaited, now + self._limit - self._deadline, "Still waiting."))
        return None

    def _end_of(self, peer: Peer) -> EasydistError | None:
        """The loss of a peer that had ended at the last look, too: what it sent before may have come since then."""
        if not peer.has_ended():
            return None
        if peer.rank in self._seen_ended:
            return self._lost(peer)
        self._seen_ended.add(peer.rank)
        return None

    def _remote_report(self) -> EasydistError | None:
        """Return what ranks of other hosts report: a connection does not break while a forked child holds it, too."""
        report = self._stored_report("last")
        if report is None or report.by == self.rank or not report.is_about(self.number):
            return None
        return self._reported(self.peers[report.by], remote=True)

    def check_reports(self) -> None:
        """Raise if another rank has given the call up.

        Raises:
            EasydistError: As that rank has reported.
        """
        last = None if self.peer is not None else self._stored_report("last")
        for peer in self.peers.values() if self.peer is None else [self.peers[self.peer]]:
            report = peer.report()
            if report is not None and report.kind == EXCEPTION and peer.has_finished(self.number):
                continue  # it has sent all of this call before it ended
            if (error := self._reported(peer, last is not None and last.by == peer.rank)) is not None:
                self.give_up(error)
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raise what ended the group's exchanges."""
        if self.broken is not None:
            raise again(self.broken)

    def detach(self) -> None:
        """Forget the connections: the group is no more."""
        self.disconnect = self.sync_signals = nothing

    def begin_reconnecting(self) -> EasydistError | None:
        """Make the phase odd; return what has broken the old connections."""
        with self._lock:
            broken, self.broken = self.broken, None
            self.phase |= 1
        return broken

    def catch_up(self, at: float) -> None:
        """Go on from a call of a higher number, to which others have come.

        Raises:
            RemoteError: They have given this rank's call up; unless it has missed theirs because of an interruption.
        """
        if at > math.ceil(self.at) and not self.was_interrupted:
            self.give_up(RemoteError(texts.given_up(self.operation, self.advice.failed)))
            self.raise_if_broken()
        is_between = self.at > self.number
        self.number = math.ceil(at) - is_between
        self.at = self.number + 0.5 * is_between
        if self._page is not None:
            self._page.begin(self.entry, self._place, time.monotonic(), self.number)

    def end_reconnecting(self) -> None:
        """Make the phase even: the ranks are connected."""
        self.broken = None
        self.phase += 1

    def give_up(self, error: EasydistError, kind: str = "", wait: int | None = None) -> None:
        """Leave the group's exchanges, and tell all other ranks why.

        Args:
            error: Why.
            kind: Of the report; empty: what follows from the error's type.
            wait: Do nothing if this wait in C++ has ended; None: give up in any case.
        """
        with self._lock:  # the waiting thread and the watchdog may find out together
            if self.broken is not None or wait not in (None, self.waits):
                return
            self.broken = error
            error.is_earlier = error.is_earlier and self.is_fresh and not error.is_final
            if error.is_earlier:  # this call begins again, and so do the others'
                self._disconnect()
                return
            number = self.number + 0.5 if self.left is None else self.at  # outside of calls: before the next one
            self.post(kind or kind_of(error), str(error), number, error.is_final, **fields_of(error))
            self._disconnect()

    def _disconnect(self) -> None:
        if self.waits % 2 or not self.waits_in_memory:
            self.disconnect()

    def ended_by(self, error: BaseException) -> None:
        """Leave the call because of an error, and tell all other ranks, unless it comes from them."""
        if isinstance(error, Exception):
            self.failed(error)
        else:
            self.interrupted(error)

    def interrupted(self, error: BaseException, wait: int | None = None) -> None:
        """Leave a call in the middle because of Ctrl-C or the like; do nothing if the wait has ended."""
        self.sync_signals()  # now, as part of this call
        text = texts.interrupted(self.operation, self.rank, error, self.advice.failed)
        self.give_up(RemoteError(text), INTERRUPT, wait)

    def failed(self, error: Exception) -> None:
        """Leave a call in the middle because of an error of this rank."""
        self.give_up(RemoteError(texts.failed(self.operation, self.rank, error, self.advice.failed)))

    def post_exception(self, text: str) -> None:
        """Tell the others that this process ends with an exception.

        Args:
            text: The exception's.
        """
        self.post(EXCEPTION, text, self.number + 0.5 if self.left is None else self.at)

    def explain(self, error: Exception, rank: int) -> EasydistError:
        """Return the error that says why the connection to a rank broke."""
        if self.broken is None:
            self.give_up(self._cause(error, self.peers[rank]))
        with self._lock:  # the watchdog may be giving up, too
            assert self.broken is not None
            return again(self.broken)

    def unconnected(self, seconds: float) -> EasydistError:
        """Return the error of ranks that have met, but were not connected in time: one has left again."""
        everyone = list(self.peers)
        why = self._in_vain(everyone) or self._in_vain(everyone)  # who has ended is lost at the second look
        self.give_up(why or self.late(everyone, seconds))
        assert self.broken is not None
        return again(self.broken)

    def _cause(self, error: Exception, broken: Peer) -> EasydistError:
        if "imed out" in str(error):
            return self.late(list(self.peers), self._limit)
        deadline = time.monotonic() + (_GRACE if broken.pid else _UNMET_GRACE)
        while time.monotonic() < deadline:
            for peer in [broken, *self.peers.values()]:
                if cause := self._reported(peer, remote=True):
                    return cause
                if peer.has_ended() and (peer is broken or peer in self._unfinished([peer.rank])):
                    return self._reported(peer, remote=True) or self._lost(peer)
            time.sleep(0.005)
        return self._lost(broken, ": its connection broke")

    def _unfinished(self, ranks: Iterable[int]) -> list[Peer]:
        if self.peer is not None:
            return [self.peers[self.peer]]
        return [self.peers[r] for r in ranks if r in self.peers and not self.peers[r].has_finished(self.number)]


def again(error: EasydistError) -> EasydistError:
    """A copy, to be raised on its own."""
    copy = type(error)(*error.args)
    vars(copy).update(vars(error))
    return copy
