"""Where the ranks of one group are, and how each failed.

On this host that stands on each process's page, which the others read; between hosts, in the group's store.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from easydist.errors import CollectiveTimeout, EasydistError, PeerLostError, RemoteError
from easydist.liveness import texts
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer
from easydist.liveness.report import EXCEPTION, INTERRUPT, Report
from easydist.liveness.timed_store import TimedStore

_ROWS = 32
"""How many ranks a text names at most."""


class GroupStatus:
    """One rank's knowledge of a group.

    Args:
        rank: This process in the group.
        size: How many processes the group has.
        store: Where ranks of other hosts write.
        name: The group's.

    Attributes:
        name: The group's.
        peers: The other ranks.
        entry: The group's entry on this process's page; -1 where there is none.
        number: Counts the calls of this group, but for those of two ranks alone.
        at: The number of the call that began last; between two numbers, if it is of two ranks alone.
        phase: Rises with every breach of the connections, to an odd number, and with every repair, to an even one.
        operation: The verb of the call that began last.
        site: Where the call was made that began last.
        peer: The only other rank that takes part in the call; None: all do.
        was_interrupted: True if Ctrl-C has come since the last call ended: this rank may have missed one.
        sync_signals: Waits until ``was_interrupted`` is true, if it has to be.
        advice: For the user, after an error.
    """

    def __init__(self, rank: int, size: int, store: TimedStore | None = None, name: str = "") -> None:
        self.rank, self.size, self.name = rank, size, name
        self.number, self.at, self.phase = 0, 0.0, 0
        self.operation, self.site = "", ""
        self.peer: int | None = None
        self.peers = {r: Peer(r) for r in range(size) if r != rank}
        self.was_interrupted = False
        self.sync_signals: Callable[[], None] = nothing
        self.advice = texts.RECONNECTS
        self._page = own_page() if size > 1 else None
        self.entry = self._page.new_entry() if self._page else -1
        if self._page is not None:
            weakref.finalize(self, self._page.free_entry, self.entry)
        self.describe()
        self._store = store
        self._place = b""
        self._published = (0, b"")

    # Pages and the store.

    def describe(self, meeting: str = "") -> None:
        """Say on the page which rank of which group this is.

        Args:
            meeting: Equal for all ranks of the group, and for no other group's; empty before they have met.
        """
        if self._page is not None:
            self._page.describe(self.entry, self.name[:100], meeting, self.rank, self.size)

    def publish(self) -> None:
        """Tell ranks of other hosts where this one is, if it has been there for a while."""
        now = (self.number, self._place)
        if now != self._published:
            self._published = now
            self._write(f"seen/{self.rank}", json.dumps([self.number, self._place.decode()]))

    @property
    def _is_cut_off(self) -> bool:
        """True if nothing is to be heard from other hosts."""
        return (store := self._store) is not None and store.is_silent

    def _place_of(self, peer: Peer) -> str:
        return peer.place() if peer.is_visible else self._seen(peer)[1]

    def _number_of(self, peer: Peer) -> int | None:
        return peer.number() if peer.is_visible else self._seen(peer)[0]

    def _seen(self, peer: Peer) -> tuple[int | None, str]:
        """Return what a rank of another host has published: the number of its last call, and its place."""
        number, place = json.loads(self._read(f"seen/{peer.rank}") or '[null, ""]')
        return number, place

    def _read(self, key: str) -> bytes | None:
        if (store := self._store) is not None and self._has_remote_peers():  # the watchdog may let go of it meanwhile
            try:
                return store.get(key)
            except RuntimeError:  # it has ended with rank 0, and would log each further attempt
                self._store = None
        return None

    def _write(self, key: str, text: str) -> None:
        if (store := self._store) is not None and self._has_remote_peers():
            try:
                store.set(key, text)
            except RuntimeError:
                self._store = None

    def _has_remote_peers(self) -> bool:
        return not all(peer.is_visible for peer in self.peers.values())

    # Failure reports.

    def post(self, kind: str, text: str, number: float, is_final: bool = False, **fields: Any) -> None:
        """Post a failure report for the others; its arguments are those of ``Report``."""
        report = Report(
            kind, text, self.rank, self.entry, self.phase, number, time.monotonic(), is_final, fields
        ).to_json()
        if self._page is not None:
            self._page.set_report(report)
        for key in (self.rank, "last"):
            self._write(f"reports/{self.phase}/{key}", report)

    def _stored_report(self, key: int | str) -> Report | None:
        """The report of a rank, or the last one, as far as it is in the store."""
        return Report.from_json(self._read(f"reports/{self.phase}/{key}"))

    def _reported(self, peer: Peer, remote: bool = False) -> EasydistError | None:
        """Return the error that a peer has reported; with ``remote`` look into the store, too."""
        report = peer.report()
        if report is None and remote and not peer.is_visible:
            report = peer.recent(self._stored_report(peer.rank))
        if report is None:
            return None
        if report.kind == EXCEPTION:
            return self._ended_with(peer, report.text)
        # Of a peer that has not been met only the store is read, and that is the group's own.
        is_ours = peer.is_same_group(report.entry) if peer.pid else self.phase % 2 or report.number < self.at + 1
        if report.phase < self.phase or self._is_passed(report) or not is_ours:
            return None
        error = report.error()
        error.is_earlier = self._is_earlier(report)
        return error

    def _is_passed(self, report: Report) -> bool:
        """True if a report is about an attempt to reconnect that ended before this one."""
        return self.phase % 2 == 1 and self._is_earlier(report)

    def _is_earlier(self, report: Report) -> bool:
        """True if a report is about an earlier call, or one that this rank would have come to but for Ctrl-C."""
        if report.kind == INTERRUPT and report.number == self.at:
            self.sync_signals()
            return self.was_interrupted
        return report.number < self.at

    def _gave_up(self) -> list[Peer]:
        """Return the peers that left this call, or an earlier one, in the middle; they may have begun others since."""
        if self.peer is not None:
            return []
        reports = [(peer, peer.report()) for peer in self.peers.values()]
        return [peer for peer, report in reports if report and report.is_about(self.number)]

    # Errors that say where the ranks are.

    def _ended_with(self, peer: Peer, text: str) -> RemoteError:
        error = RemoteError(texts.raised(self.operation, self.rank, peer.rank, text, self._last_seen(peer)))
        error.is_final = True
        return error

    def _lost(self, peer: Peer, how: str = "") -> PeerLostError:
        status = peer.exit_status() if peer.is_visible else None
        what = f"{texts.process(peer.pid, peer.host)}{how or f' ended ({texts.status_text(status)})'}"
        what = what if peer.pid else "it has left before the ranks had met"
        error = PeerLostError(texts.lost(self.operation, f"rank {peer.rank}", what, self._last_seen(peer)))
        error.rank, error.pid, error.host, error.exit_status = peer.rank, peer.pid, peer.host, status
        return error

    def late(self, awaited: Sequence[int], seconds: float, advice: str = "") -> CollectiveTimeout:
        """Say who is missing, and where each rank is.

        Args:
            awaited: The ranks that have not come yet, as far as that is known.
            seconds: How long this rank has waited.
            advice: What to do; empty: the group's.
        """
        awaited = awaited if self.peer is None else [self.peer]
        numbers = {rank: self._heard_of(self.peers[rank]) for rank in awaited if rank in self.peers}
        unknown = [rank for rank, number in numbers.items() if number is None]
        missing = [rank for rank, number in numbers.items() if number is not None and number < self.number]
        missing = missing if self.peer is None or unknown else [self.peer]
        shown = [r for r in range(self.size) if self.size <= _ROWS or r in missing or r in unknown]
        rows = [self._row(rank, rank in missing, rank in unknown) for rank in shown]
        is_silent = self._is_cut_off or (bool(unknown) and self._store is not None)
        todo = [texts.SILENT] * is_silent + [advice or self.advice.late]
        error = CollectiveTimeout(texts.late(self.operation, missing, unknown, self.size, seconds, rows[:_ROWS], todo))
        error.missing = tuple(missing)
        return error

    def _last_seen(self, peer: Peer) -> list[str]:
        place = self._place_of(peer)
        lines = [f"  rank {peer.rank} was last seen in {place}"] if place else []
        return [*lines, f"  rank {self.rank} waited in {self._place.decode()}"]

    def _heard_of(self, peer: Peer) -> int | None:
        """The number of a peer's last call, 0 before its first; None where it may have come, and nobody can say."""
        was_cut_off = self._is_cut_off
        if (number := self._number_of(peer)) is not None:
            return number
        return None if peer.is_visible or self._store is None or was_cut_off or self._is_cut_off else 0

    def _row(self, rank: int, is_missing: bool, is_unknown: bool) -> str:
        if rank == self.rank:
            return texts.row(rank, f"waits in {self._place.decode()}", "")
        peer = self.peers[rank]
        state = texts.state(self._place_of(peer), is_missing, is_unknown)
        return texts.row(rank, state, peer.condition(even_if_well=is_missing))


def nothing() -> None:
    """Do nothing: nobody is connected, or listens for signals."""
