"""Why a wait does not last for ever: lost, late and interrupted ranks of one group.

While a call waits, ``guard`` looks every quarter of a second whether the ranks it waits for can still come. What ends
the wait on one rank is said to all of them, on this process's page for its own host and in the store for others, so
that every rank raises the same kind of error.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from easydist.comms.board import Board
from easydist.comms.far_store import FarStore
from easydist.comms.peer import Peer, status_text
from easydist.errors import CollectiveTimeout, EasydistError, PeerLostError, RemoteError

_log = logging.getLogger("easydist")
WARN_AFTER = float(os.environ.get("EASYDIST_WARN_AFTER", "30"))
"""Seconds after which a wait is mentioned in the log."""

_GRACE = 1.5
"""Seconds in which a process whose connection broke has to end or to leave its last words."""

_UNMET_GRACE = 0.5
"""The same for one that has not been met: its end cannot be seen, and its words were in the store before."""

_ROWS = 32
_KINDS: dict[str, type[EasydistError]] = {
    "late": CollectiveTimeout,
    "lost": PeerLostError,
    "remote": RemoteError,
    "interrupt": RemoteError,
}
_LISTEN_EVERY = 1.0
"""Seconds between two looks for what ranks of other hosts say."""

_IDLE = 0.05
"""Seconds without a call after which this process may have missed what its peers said."""
_SILENT = "The store by which hosts hear of one another does not answer: is rank 0, or the launcher, stopped?\n"
_NEXT = {
    CollectiveTimeout: "Bring every rank to this call, or give it more time (timeout=); the next call connects anew.",
    PeerLostError: "The group cannot go on without it: start the job again, or make a group of those that are left.",
}


class Watch(Board):
    """What one group's calls know while they wait.

    Args:
        rank: This process in the group.
        size: How many processes the group has.
        timeout: Seconds that a call may take unless it says otherwise.
        store: Where ranks of other hosts leave their last words.

    Attributes:
        at: The number of the call that began last; between two numbers, if it is of two ranks alone.
        operation: The verb of the call that began last.
        site: Where the call was made that began last.
        peer: The only other rank that takes part in the call; None: all do.
        broken: What ended the group's exchanges; None while all is well.
        sever: Breaks this process's connections of the group: who waits in C++ for this rank, or is this rank, returns.
        is_awaited: Whether others wait for what this rank has to send in its call.
        was_interrupted: Whether Ctrl-C has come since the last call ended: this rank may have missed one.
        is_fresh: Whether nothing of this rank's call has been exchanged yet.
        notice: Waits until ``was_interrupted`` is true, if it has to be.
        waits_in_memory: Whether the group's ranks share memory, so that all of them look around while they wait.
        phase: Rises with every breach of the connections, to an odd number, and with every repair, to an even one.
        waits: Even outside of waits in C++; rises with every beginning and end of one.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: FarStore | None = None) -> None:
        super().__init__(rank, size, store)
        self.timeout = timeout
        self.at, self.phase, self.waits = 0.0, 0, 0
        self.broken: EasydistError | None = None
        self.sever: Callable[[], None] = _nothing
        self.notice: Callable[[], None] = _nothing
        self.waits_in_memory = False
        self.is_awaited, self.is_fresh = False, True
        self.operation, self.site = "", ""
        self._limit, self._ended = timeout, 0.0
        self.peer: int | None = None
        self._seen_ended: set[int] = set()
        self._end_of_time = self._deadline = self._warn_at = self._listen_at = float("inf")
        self._lock = threading.Lock()
        self.was_interrupted = False

    def begin(self, operation: str, site: str, timeout: float | None = None, peer: int | None = None) -> None:
        """A call begins.

        Args:
            operation: Its name.
            site: The caller's file and line.
            timeout: Seconds; None is the group's.
            peer: The only other rank that takes part; such calls are not counted. None: all do.
        """
        self.peer, slot = peer, self.slot if peer is None else -1
        self.number += peer is None
        self.at = self.number + 0.5 * (peer is not None)
        self._seen_ended.clear()
        self.operation, self.site, self._place = operation, site, f"{operation}, call {self.number}, at {site}".encode()
        now, self._limit = time.monotonic(), self.timeout if timeout is None else timeout
        self.is_awaited, self.is_fresh = False, True
        self._deadline, self._warn_at = now + self._limit, now + WARN_AFTER
        self._listen_at = now + _LISTEN_EVERY
        if self._page is not None:
            self._page.begin(slot, self.number, self._place)
        if self.broken is None and (self.was_interrupted or now - self._ended > _IDLE):
            self._miss()

    def _miss(self) -> None:
        """Others have left a call that this rank had ended, or missed: nothing to raise, but to connect anew."""
        for peer in self.peers.values():
            if (error := self._heard(peer)) is not None and error.is_earlier:
                self.broken = error

    def end(self, is_done: bool = True) -> None:
        """The call has ended; unless ``is_done`` without having sent all that others wait for."""
        self._deadline = self._warn_at = self._end_of_time
        self._ended, self.was_interrupted = time.monotonic(), False
        if self._page is not None and is_done and self.peer is None:
            self._page.end(self.slot)

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
        """This process waits in C++, and the sentry looks around for it."""
        self.waits += 1

    def end_wait(self) -> None:
        """It does not any more."""
        with self._lock:  # what the sentry finds out about a wait breaks no later one
            self.waits += 1

    def look(self, wait: int) -> None:
        """Look around for a thread that cannot; the sentry does, and the thread raises what ends its wait.

        Args:
            wait: The value of ``waits`` in that wait.
        """
        if self.broken is None and (error := self._in_vain(list(self.peers))) is not None:
            self.give_up(error, wait=wait)

    def _in_vain(self, awaited: Sequence[int]) -> EasydistError | None:
        """Why there is nothing to wait for, where that is so."""
        for peer in self._unfinished(awaited):
            if (error := self._heard(peer) or self._end_of(peer)) is not None:
                return error
        for peer in self._gave_up():
            if (error := self._heard(peer)) is not None:
                return error
        now = time.monotonic()
        if now >= self._listen_at:
            self._listen_at = now + _LISTEN_EVERY
            if (error := self._heard_far()) is not None:
                return error
        if now >= self._deadline:
            return self._late(awaited, self._limit)
        if now >= self._warn_at:
            self._warn_at = now + WARN_AFTER
            _log.warning("%s", self._late(awaited, now + self._limit - self._deadline, "Still waiting."))
        return None

    def _end_of(self, peer: Peer) -> EasydistError | None:
        """The loss of a peer that had ended at the last look, too: what it sent before may have come since then."""
        if not peer.has_ended():
            return None
        if peer.rank in self._seen_ended:
            return self._lost(peer)
        self._seen_ended.add(peer.rank)
        return None

    def _heard_far(self) -> EasydistError | None:
        """What ranks of other hosts say; a broken connection may be kept from showing, by a child that holds it too."""
        words = self._read(f"words/{self.phase}/last")
        if words is None or words["kind"] == "exception" or words["number"] > self.number or words["by"] == self.rank:
            return None
        return self._heard(self.peers[words["by"]], far=True)

    def hear(self) -> None:
        """Listen once whether another rank has given the call up.

        Raises:
            EasydistError: What it said.
        """
        far = None if self.peer is not None else self._read(f"words/{self.phase}/last")
        for peer in self.peers.values() if self.peer is None else [self.peers[self.peer]]:
            words = peer.words()
            if words is not None and words["kind"] == "exception" and peer.has_finished(self.number):
                continue  # it has sent all of this call before it ended
            if (error := self._heard(peer, far is not None and far["by"] == peer.rank)) is not None:
                self.give_up(error)
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raise what ended the group's exchanges."""
        if self.broken is not None:
            raise again(self.broken)

    def detach(self) -> None:
        """The group is no more."""
        self.sever = self.notice = _nothing

    def begin_anew(self) -> EasydistError | None:
        """The ranks come to connect anew; returns what has broken the old connections."""
        with self._lock:
            broken, self.broken = self.broken, None
            self.phase |= 1
        return broken

    def catch_up(self, at: float) -> None:
        """Others have come to a call of a higher number than this rank.

        Raises:
            RemoteError: It is not because of an interruption that this rank has missed theirs.
        """
        if at > math.ceil(self.at) and not self.was_interrupted:
            text = f"{self.operation}: the others have given this call up, and gone on to a later one"
            self.give_up(RemoteError(f"{text}\nThe next call of the group connects anew."))
            self.raise_if_broken()
        is_between = self.at > self.number
        self.number = math.ceil(at) - is_between
        self.at = self.number + 0.5 * is_between
        if self._page is not None:
            self._page.begin(self.slot, self.number, self._place)

    def end_anew(self) -> None:
        """They are connected."""
        self.broken = None
        self.phase += 1

    def give_up(self, error: EasydistError, kind: str = "", wait: int | None = None) -> None:
        """This rank leaves the group's exchanges; all others hear why.

        Args:
            error: Why.
            kind: What others are told of it; empty: what its type says.
            wait: Unless this wait in C++ has ended; None: in any case.
        """
        with self._lock:  # the waiting thread and the sentry may find out together
            if self.broken is not None or wait not in (None, self.waits):
                return
            self.broken = error
            error.is_earlier = error.is_earlier and self.is_fresh and not error.is_final
            if error.is_earlier:  # this call begins again, and so do the others'
                self._sever()
                return
            kind = kind or next(kind for kind, cls in _KINDS.items() if isinstance(error, cls))
            self.say({"kind": kind, "text": str(error), "final": error.is_final, **vars(error), "raised_in": None})
            self._sever()

    def _sever(self) -> None:
        if self.waits % 2 or not self.waits_in_memory:
            self.sever()

    def ended_by(self, error: BaseException) -> None:
        """An error ends the call, of which all others hear, unless it comes from them."""
        if isinstance(error, Exception):
            self.failed(error)
        else:
            self.interrupted(error)

    def interrupted(self, error: BaseException, wait: int | None = None) -> None:
        """This rank leaves a call in the middle, because of Ctrl-C or the like; unless the wait has ended."""
        self.notice()  # now, as part of this call
        text = f"{self.operation}: rank {self.rank} was interrupted ({type(error).__name__})"
        self.give_up(RemoteError(f"{text}\nThe next call of the group connects anew."), "interrupt", wait)

    def failed(self, error: Exception) -> None:
        """This rank leaves a call in the middle, because of an error of its own."""
        what = f"{type(error).__name__}: {error}\nThe next call of the group connects anew."
        head = f"{self.operation}: rank {self.rank} failed in the middle"
        self.give_up(RemoteError(f"{head}\n  rank {self.rank}: {what}"))

    def say(self, words: dict[str, Any]) -> None:
        """Leave last words for the others."""
        number = self.number + 0.5 if self.left is None else self.at  # outside of calls: before the next one
        about = {"slot": self.slot, "phase": self.phase, "time": time.time(), "by": self.rank, "number": number}
        text = json.dumps({**about, **words})
        if self._page is not None:
            self._page.say(text)
        for key in (self.rank, "last"):
            self._write(f"words/{self.phase}/{key}", text)

    def explain(self, error: Exception, rank: int) -> EasydistError:
        """What really happened, where the connection to a rank broke."""
        if self.broken is None:
            self.give_up(self._cause(error, self.peers[rank]))
        with self._lock:  # the sentry may be giving up, too
            assert self.broken is not None
            return again(self.broken)

    def unconnected(self, seconds: float) -> EasydistError:
        """Why the ranks have met, but were not connected within so many seconds: one has left again."""
        everyone = list(self.peers)
        why = self._in_vain(everyone) or self._in_vain(everyone)  # who has ended is lost at the second look
        self.give_up(why or self._late(everyone, seconds))
        assert self.broken is not None
        return again(self.broken)

    def _cause(self, error: Exception, broken: Peer) -> EasydistError:
        if "imed out" in str(error):
            return self._late(list(self.peers), self._limit)
        deadline = time.monotonic() + (_GRACE if broken.pid else _UNMET_GRACE)
        while time.monotonic() < deadline:
            for peer in [broken, *self.peers.values()]:
                if cause := self._heard(peer, far=True):
                    return cause
                if peer.has_ended() and (peer is broken or peer in self._unfinished([peer.rank])):
                    return self._heard(peer, far=True) or self._lost(peer)
            time.sleep(0.005)
        return self._lost(broken, ": its connection broke")

    def _unfinished(self, ranks: Iterable[int]) -> list[Peer]:
        if self.peer is not None:
            return [self.peers[self.peer]]
        return [self.peers[r] for r in ranks if r in self.peers and not self.peers[r].has_finished(self.number)]

    def _gave_up(self) -> list[Peer]:
        """Peers that have left this call, or one before it, in the middle; they may have begun others since."""
        if self.peer is not None:
            return []
        said = [(peer, peer.words()) for peer in self.peers.values()]
        return [
            peer for peer, words in said if words and words["kind"] != "exception" and words["number"] <= self.number
        ]

    def _heard(self, peer: Peer, far: bool = False) -> EasydistError | None:
        """What a peer has said about its end, or about the group's."""
        words = peer.words()
        if words is None and far and not peer.is_visible:
            words = peer.recent(self._read(f"words/{self.phase}/{peer.rank}"))
        if words is None:
            return None
        if words["kind"] == "exception":
            return self._ended_with(peer, words["text"])
        # Of a peer that has not been met only the store is read, and that is the group's own.
        is_ours = peer.is_same_group(words["slot"]) if peer.pid else self.phase % 2 or words["number"] < self.at + 1
        if words["phase"] < self.phase or self._is_passed(words) or not is_ours:
            return None
        error = _KINDS[words["kind"]](words["text"])
        error.is_final, error.is_earlier = words["final"], self._is_earlier(words)
        for name in ("rank", "pid", "host", "exit_status"):
            if name in words:
                setattr(error, name, words[name])
        if isinstance(error, CollectiveTimeout):
            error.missing = tuple(words.get("missing", ()))
        return error

    def _is_passed(self, words: dict[str, Any]) -> bool:
        """Whether words are about an attempt to connect anew that ended before this one."""
        return self.phase % 2 == 1 and self._is_earlier(words)

    def _is_earlier(self, words: dict[str, Any]) -> bool:
        """Whether words are about a call before this one; or one that this rank would have come to, but for Ctrl-C."""
        if words["kind"] == "interrupt" and words["number"] == self.at:
            self.notice()
            return self.was_interrupted
        return float(words["number"]) < self.at

    def _ended_with(self, peer: Peer, text: str) -> RemoteError:
        head = f"{self.operation}: rank {peer.rank} ended with an exception while rank {self.rank} waited for it"
        error = RemoteError("\n".join([head, f"  rank {peer.rank}: {text}", *self._last_seen(peer)]))
        error.is_final = True
        return error

    def _lost(self, peer: Peer, what: str = "") -> PeerLostError:
        status = peer.exit_status() if peer.is_visible else None
        what = f"process {peer.pid} on {peer.host}{what or f' ended ({status_text(status)})'}"
        what = what if peer.pid else "it has left before the ranks had met"
        head = f"{self.operation}: rank {peer.rank} is lost: {what}"
        error = PeerLostError("\n".join([head, *self._last_seen(peer), _NEXT[PeerLostError]]))
        error.rank, error.pid, error.host, error.exit_status = peer.rank, peer.pid, peer.host, status
        return error

    def _late(
        self, awaited: Sequence[int], seconds: float, advice: str = _NEXT[CollectiveTimeout]
    ) -> CollectiveTimeout:
        missing = [r for r in awaited if r in self.peers and (self._number_of(self.peers[r]) or 0) < self.number]
        missing = missing if self.peer is None else [self.peer]
        who = f"{len(missing)} of {self.size} ranks did not come" if missing else "all ranks came, but not their data,"
        lines = [self._row(rank, rank in missing) for rank in range(self.size) if self.size <= _ROWS or rank in missing]
        advice = _SILENT + advice if self._is_deaf else advice
        head = f"{self.operation}: {who} within {seconds:.3g} s"
        error = CollectiveTimeout("\n".join([head, *lines[:_ROWS], advice]))
        error.missing = tuple(missing)
        return error


def again(error: EasydistError) -> EasydistError:
    """A copy, to be raised on its own."""
    copy = type(error)(*error.args)
    vars(copy).update(vars(error))
    return copy


def _nothing() -> None:
    """Nobody is connected."""
