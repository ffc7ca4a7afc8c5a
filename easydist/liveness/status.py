"""The places of the ranks of one group, and their failure reports.

Ranks of one host write both on their pages, which the others read; between hosts, the group's store carries them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from easydist.errors import CollectiveTimeout, DisagreementError, EasydistError, PeerLostError, RemoteError
from easydist.liveness import bodies, texts
from easydist.liveness.bodies import Body
from easydist.liveness.crossing import Crossing, Seen
from easydist.liveness.events import Cause, Heard, Why
from easydist.liveness.log import Log, LogEntry
from easydist.liveness.page import OwnPage, own_page
from easydist.liveness.peer import Peer
from easydist.liveness.protocol import GroupProtocol
from easydist.liveness.report import EXCEPTION, LEAVING, Report
from easydist.liveness.rules import LISTEN_EVERY
from easydist.liveness.stored import damaged, decoded, in_store
from easydist.liveness.timed_store import TimedStore, is_reachable

_LOG = "reports/log"

WHO = "who"
"""The log in a group's store with the records of its ranks."""

_ROWS = 32
"""The most ranks that a text lists."""


_all: dict[int, weakref.ref[GroupStatus]] = {}
"""The groups of this process, by their identity: tables can be copied in one step."""


class GroupStatus(GroupProtocol):
    """One rank's knowledge of a group; ``GroupProtocol`` draws the conclusions.

    Args:
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        store: The store for exchanges with ranks of other hosts.
        name: The name of the group.

    Attributes:
        name: The name of the group.
        peers: The other ranks.
        entry: The group's entry on this process's page; -1 if there is none.
        operation: The verb of the call that began last.
        site: The file and line of the call that began last.
        sync_signals: Waits until ``was_interrupted`` reflects all signals that have come.
        advice: The advice for the user after an error.
        unreached: The words for the place of the store while this rank tries to reach it, and True if rank 0 serves
            it; None otherwise.
        parts: Takes the awaited ranks, and returns by rank what the others do about the operation for which this rank
            waits: True if they wait, False if they have begun it, but wait for nothing, None if they have not begun it.
            Returns None if the numbers of the calls tell who has come.
        crossing: The messages to and from the other ranks, and the wait for one of them.
        elder: The status of another group of the same ranks, which have met there; None if there is none. It shows
            who has ended or left as long as the ranks have not met in this group.
    """

    def __init__(self, rank: int, size: int, store: TimedStore | None = None, name: str = "") -> None:
        super().__init__(rank, size)
        self.name, self.operation, self.site = name, "", ""
        self.peers = {r: Peer(r) for r in range(size) if r != rank}
        self.sync_signals: Callable[[], None] = nothing
        self.advice = texts.RECONNECTS
        self.parts: Callable[[Sequence[int]], Mapping[int, bool | None] | None] = _unknown
        self.elder: GroupStatus | None = None
        self._page = own_page() if size > 1 else None
        self.entry = self._page.new_entry() if self._page else -1
        self.crossing = Crossing(rank, self._page, self.entry)
        if self._page is not None:
            _all[id(self)] = weakref.ref(self)
            weakref.finalize(self, _forget, id(self), self._page, self.entry).atexit = False
        self.describe()
        self._place = b""
        self._published = (0, b"")
        self._told = dict[int, tuple[float, bytes | None, Body | None]]()  # when read, the message, the body
        self._log: list[Report] = []
        self._refused: set[str] = set()
        self._logs: dict[str, Log] = {}
        self._store = store
        self._lost_store: TimedStore | None = None
        self.unreached: tuple[str, bool] | None = None
        self._has_left, self._pid = False, os.getpid()

    # Pages and the store.

    @property
    def own_page(self) -> OwnPage | None:
        """The page of this process; None if it has none."""
        return self._page

    def use(self, store: TimedStore | None) -> None:
        """Use this store for exchanges with the others from now on, or none; another process may serve it."""
        self._logs, self._log = dict[str, Log](), []
        self._store = store

    def log(self, name: str) -> Log:
        """Return this process's view of a log in the group's store."""
        return self._logs.setdefault(name, Log(name, self._refused))

    def drop_log(self, name: str) -> None:
        """Drop the view of a log that is not read any more."""
        self._logs.pop(name, None)

    def sees(self, rank: int) -> bool:
        """True if another rank's process is known to be on this host."""
        return self.peers[rank].is_visible

    def describe(self, meeting: str = "") -> None:
        """Write on the page which rank of which group this is.

        Args:
            meeting: A text that is equal for all ranks of the group, and for no other group; empty before they have
                met.
        """
        if self._page is not None:
            self._page.describe(self.entry, self.name[:100], meeting, self.rank, self.size)

    def publish(self) -> None:
        """Publish this rank's call for ranks of other hosts, unless that has been done, and each time its body."""
        now = (self.number, self._place)
        if now != self._published:
            self._published = now
            self._write(f"seen/{self.rank}", json.dumps([self.number, self._place.decode()]))
        if (told := bodies.message()) is not None:
            self._write(f"body/{self.rank}", told)

    @property
    def _is_cut_off(self) -> bool:
        """True if the store does not answer, so that other hosts cannot be observed."""
        return (store := self._store) is not None and store.is_silent

    def _place_of(self, peer: Peer) -> str:
        return peer.place() if peer.is_visible else self._seen(peer)[1]

    def _number_of(self, peer: Peer) -> int | None:
        return peer.number() if peer.is_visible else self._seen(peer)[0]

    def is_behind(self) -> bool:
        """True if another rank has begun a call of all ranks that this one has not begun."""
        return any((self._number_of(peer) or 0) > self.number for peer in self.peers.values())

    def _seen(self, peer: Peer) -> tuple[int | None, str]:
        """Return the published state of a rank on another host: the number of its last call, and its place."""
        if (text := self._read(key := f"seen/{peer.rank}", peer.rank)) is None:
            return None, ""
        number, place = decoded(in_store(key), text, (int, str))
        return number, place

    def _read(self, key: str, by: int | None = None) -> bytes | None:
        # The attribute is read once, because the watchdog may set it to None.
        if (store := self._store) is not None and self._has_remote_peers():
            try:
                return store.get(key, by)
            except RuntimeError:  # the store has ended with rank 0, and would log each further attempt
                self._store, self._lost_store = None, store
        return None

    def _write(self, key: str, text: str, always: bool = False) -> None:
        if (store := self._store) is not None and (always or self._has_remote_peers()):
            try:
                store.set(key, text)
            except RuntimeError:
                self._store, self._lost_store = None, store

    def _append(self, report: str, always: bool) -> None:
        if (store := self._store) is not None and (always or self._has_remote_peers()):
            try:
                self.log(_LOG).append(store, self.rank, report)
            except RuntimeError:
                self._store, self._lost_store = None, store

    def _news(self) -> Iterator[LogEntry]:
        if (store := self._store) is not None and self._has_remote_peers():
            try:
                yield from self.log(_LOG).news(store)
            except RuntimeError:
                self._store, self._lost_store = None, store

    def _has_remote_peers(self) -> bool:
        return not all(peer.is_visible for peer in self.peers.values())

    # Failure reports.

    def post(
        self, kind: str, text: str, number: float, is_final: bool = False, is_relayed: bool = False, **fields: Any
    ) -> None:
        """Post a failure report for the others; the arguments are those of ``Report``.

        A report that is only relayed is not logged: the first rank has logged it, about this call or a later one.
        A forked child, whose parent is the rank, posts nothing.
        """
        if self._pid != os.getpid():
            return
        report = Report(
            kind, text, self.rank, self.entry, self.phase, number, time.monotonic(), is_final, fields, *self.origin
        ).to_json()
        if self._page is not None:
            self._page.set_report(self.entry, report)
            if kind == EXCEPTION and self.entry >= 0:  # for groups of this process whose monitors tell nobody
                self._page.set_report(-1, report)
        is_unknown = not self._exchanged  # ranks that have not met this process read the store
        self._write(f"reports/{self.phase}/{self.rank}", report, is_unknown)
        if not is_relayed:
            self._append(report, is_unknown)

    def announce_leaving(self) -> None:
        """Tell the others that this rank leaves the group, so that they do not wait for it.

        They know by the number of its calls which of their calls it has still served. Nothing may be sent afterwards.
        """
        if self._has_left or self._pid != os.getpid():
            return
        self._has_left = True
        self.crossing.untell(self._write)
        if self._page is not None:
            self._page.leave(self.entry)
        is_unknown = any(peer.pid is None for peer in self.peers.values())
        report = Report(LEAVING, "", self.rank, self.entry, self.phase, self.number_of_report, time.monotonic())
        self._append(report.to_json(), is_unknown)

    def _stored_report(self, rank: int) -> Report | None:
        """Return a rank's report of this phase, or of the meeting before it, from the store; None if there is none."""
        keys = [f"reports/{phase}/{rank}" for phase in self.phases]
        return next(filter(None, (Report.from_store(in_store(key), self._read(key, rank)) for key in keys)), None)

    def _read_log(self) -> list[Report]:
        """Return the logged reports of ranks on other hosts that may still matter, in the order of posting."""
        for key, _, text in self._news():
            report = Report.from_store(in_store(key), text)
            if report is None or report.by == self.rank:
                continue
            if report.by not in self.peers:
                self.log(_LOG).refuse(damaged(in_store(key), text))
                continue
            if report.kind == LEAVING:
                self.peers[report.by].left(report.number)
            else:
                self._log.append(report)
        self._log = [report for report in self._log if self.may_matter(report)]
        return self._log

    def hear(self, peer: Peer, remote: bool = False, is_awaited: bool = False, logged: Report | None = None) -> Heard:
        """Look at another rank.

        Args:
            peer: The rank.
            remote: True to read the store, too.
            is_awaited: True to check its process, too.
            logged: Its report, if that has been found in the store's log.
        """
        # Before reading its report: a process posts its report before it ends.
        known = self._known(peer)
        has_ended, has_left = is_awaited and known.has_ended(), is_awaited and known.has_left()
        report = peer.report()
        if report is None and remote and not peer.is_visible:
            report = peer.recent(logged or self._stored_report(peer.rank))
        is_ours = None if report is None or not peer.pid else peer.is_same_group(report.entry)
        if report is None and is_awaited and (report := self._parting(peer)) is not None:
            is_ours = True
        if report is not None and self.crossing.is_in(report.fields.get("circle")):
            report = dataclasses.replace(report, peer=self.rank, turn=self._turn)
        if self.hinges_on_signals(report):
            self.sync_signals()
        return Heard(peer.rank, report, is_ours, has_ended, has_left=has_left)

    def _known(self, peer: Peer) -> Peer:
        """Return a rank as the elder group knows it, if the ranks have not met in this group yet."""
        return self.elder.peers[peer.rank] if peer.pid is None and self.elder is not None else peer

    def _parting(self, peer: Peer) -> Report | None:
        """Return the report with which a rank has left the elder group for good, before the ranks have met in this one.

        Its number is that of another group, so it counts as one about this call.
        """
        if (known := self._known(peer)) is peer or (report := known.report()) is None:
            return None
        is_last = report.kind == EXCEPTION or (report.is_final and known.is_same_group(report.entry))
        return dataclasses.replace(report, number=0.0) if is_last else None

    def _gave_up(self) -> list[Peer]:
        """Return the peers that left this call or an earlier one before its end; they may have begun others since."""
        if self.peer is not None:
            return []
        reports = [(peer, report) for peer in self.peers.values() if (report := peer.report()) is not None]
        return [peer for peer, one in reports if peer.is_same_group(one.entry) and one.is_about(self.number)]

    def _unfinished(self, ranks: Iterable[int], is_exact: bool = False) -> list[Peer]:
        """Return the peers among these ranks that have yet to send data of this call.

        Args:
            ranks: The ranks for which this one waits.
            is_exact: True if data of each of these ranks is missing: one that has ended does not send it any more,
                whatever it has told of its calls, which an exception at the wrong moment may have counted wrongly.
        """
        if self.peer is not None:
            return [self.peers[self.peer]]
        peers = [self.peers[rank] for rank in ranks if rank in self.peers]
        return [peer for peer in peers if not peer.has_finished(self.number) or (is_exact and peer.has_ended())]

    # Messages that others wait for.

    def _crossed(self, listens: bool) -> DisagreementError | None:
        """Return the error if ranks wait for one another in different calls, this one among them; None if none do.

        Args:
            listens: True to read and write the store, too.
        """
        if not self.is_fresh or self.is_promised or self.phase % 2:  # while they reconnect, they have yet to hear why
            return None
        if self._partner is not None:
            if listens:
                self.crossing.tell(self._write, lambda: (self.phase, self.number))
            waits = self.crossing.circle(functools.partial(self._wait_of, remote=listens))
            return self._waiting([*waits], circle=[[rank, *wait] for rank, wait in waits.items()]) if waits else None
        rank = None if self.is_one_way else self.crossing.needs_me(self.peers, self.number)
        if rank is None and listens and not self.is_one_way:
            rank = self.crossing.needs_me_from_afar(self._read, self.peers, self.phase, self.number)
        return None if rank is None else self._waiting([self.rank, rank], call=self.number)

    def _wait_of(self, rank: int, remote: bool) -> Seen:
        peer = self.peers.get(rank)
        if peer is None or peer.is_visible or not remote:
            return None if peer is None else peer.waits()
        told = self.crossing.told(self._read, rank, self.phase)
        return None if told is None else told[1]

    def _waiting(self, ranks: Sequence[int], **facts: Any) -> DisagreementError:
        places = {rank: self._place_of(self.peers[rank]) for rank in ranks if rank != self.rank}
        places[self.rank] = self._place.decode()
        rows = [texts.row(rank, f"waits in {places[rank]}", "") for rank in sorted(places)[:_ROWS]]
        error = DisagreementError(texts.crossed(rows, self.advice.failed))
        vars(error).update(facts)
        return error

    # Bodies that others wait for.

    def _waits_for_a_body(self, awaited: Iterable[int]) -> bool:
        """True if the group's limit counts, and an awaited rank is in a body that does not wait for this rank."""
        return not self._is_limit_given and any(self._body_of(peer) is not None for peer in self._unfinished(awaited))

    def _body_of(self, peer: Peer) -> Body | None:
        """Return the body in which a rank is known to be; None if it waits there for this rank."""
        known = self._known(peer)
        body = known.body() if known.is_visible else self._told_body(peer)
        entries = [] if body is None or self._page is None else self._page.entries()
        return None if body is None or body.waits_for(entries) else body

    def _told_body(self, peer: Peer) -> Body | None:
        """Return the body of a rank of another host, if it has told of it again since the previous look."""
        now = time.monotonic()
        looked, told, body = self._told.get(peer.rank, (0.0, None, None))
        if now - looked > LISTEN_EVERY / 2:
            before, told = told, self._read(key := f"body/{peer.rank}", peer.rank)
            self._told[peer.rank] = now, told, None  # before decoding: a damaged message ends one call only
            body = bodies.of_message(in_store(key), told) if told != before and looked else None
            self._told[peer.rank] = now, told, body
            if body is not None and peer.pid is None:
                self._meet_alone(peer.rank)
        return body

    def _meet_alone(self, rank: int) -> None:
        """Look up the process of a rank, so that its end is noticed before the ranks have met."""
        log = self.log(WHO)  # before the store, as ``use`` replaces them
        if (store := self._store) is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, as the next look finds out
                if (record := log.last_of(store, rank)) is not None:
                    self.peers[rank] = Peer(rank, record)

    # Errors that list the ranks' last calls.

    def error_of(self, cause: Cause, awaited: Sequence[int]) -> EasydistError:
        """Return the error for a cause; ``awaited`` are the ranks that have not come."""
        if cause.why is Why.LATE:
            return self.late(awaited, self.limit)
        peer = self._known(self.peers[cause.rank])
        if cause.why is Why.LEFT:
            return self._left(peer)
        if cause.report is None:
            how = {Why.BROKE: texts.BROKE, Why.UNREACHABLE: texts.unreachable()}
            lost = self._lost(peer, how.get(cause.why, ""))
            lost.is_unreachable = cause.why is Why.UNREACHABLE
            return lost
        if cause.why is Why.ENDED:
            return self._ended_with(peer, cause.report.text)
        error = cause.report.error()
        error.is_earlier, error.is_reported = cause.is_earlier, True
        return error

    def _ended_with(self, peer: Peer, text: str) -> RemoteError:
        told = texts.raised(self.operation, self.rank, peer.rank, text, self._last_seen(peer))
        error = RemoteError(told, rank=peer.rank)
        error.is_final = True
        return error

    def _lost(self, peer: Peer, how: str = "") -> PeerLostError:
        status = peer.exit_status() if peer.is_visible or peer.has_ended() else None
        what = f"{texts.process(peer.pid, peer.host)}{how or f' ended ({texts.status_text(status)})'}"
        if not peer.pid:
            is_silent = how not in ("", texts.BROKE)  # its host may never have come
            what = how.removeprefix(": ") if is_silent else "it left before the ranks had connected"
        rows = self._last_seen(peer)
        error = PeerLostError(texts.lost(self.operation, f"rank {peer.rank}", what, rows, self.advice.lost))
        error.rank, error.pid, error.host, error.exit_status = peer.rank, peer.pid, peer.host, status
        return error

    def _left(self, peer: Peer) -> PeerLostError:
        error = PeerLostError(texts.left(self.operation, peer.rank, peer.pid, peer.host, self._last_seen(peer)))
        error.rank, error.pid, error.host = peer.rank, peer.pid, peer.host
        return error

    def late(self, awaited: Sequence[int], seconds: float, advice: str = "") -> CollectiveTimeout:
        """Return the error that lists the missing ranks, and the place of each rank.

        Args:
            awaited: The ranks that have not come yet, as far as that is known.
            seconds: The seconds that this rank has waited.
            advice: The advice; empty for the group's.
        """
        if self.unreached is not None:
            return self._late_store(*self.unreached, seconds, advice)
        parts = self.parts(awaited)
        missing, unknown = self._absent(awaited) if parts is None else ([r for r in parts if parts[r] is None], [])
        idle = [rank for rank, waits in (parts or {}).items() if waits is False]
        involved = range(self.size) if parts is None else sorted([self.rank, *parts])
        shown = [r for r in involved if self.size <= _ROWS or r in missing or r in unknown]
        rows = [self._row(rank, rank in missing, rank in unknown, rank in idle) for rank in shown]
        store = (self._store if self._is_cut_off or unknown else None) or (self._lost_store if unknown else None)
        todo = ([] if store is None else [self._about(store)]) + [advice or self._advice_if_late]
        error = CollectiveTimeout(texts.late(self.operation, missing, unknown, self.size, seconds, rows[:_ROWS], todo))
        error.missing = tuple(missing)
        return error

    def _absent(self, awaited: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the awaited ranks that have not begun the call, and those that cannot be observed."""
        awaited = awaited if self.peer is None else [self.peer]
        numbers = {rank: self._heard_of(self.peers[rank]) for rank in awaited if rank in self.peers}
        unknown = [rank for rank, number in numbers.items() if number is None]
        begun = self.number + self._connects_all_for_two
        missing = [rank for rank, number in numbers.items() if number is not None and number < begun]
        return missing if self.peer is None or unknown else [self.peer], unknown

    @property
    def _connects_all_for_two(self) -> bool:
        """True while this rank waits, in a call of two, for a further call of each other rank."""
        return self._partner is not None and self.peer is None

    @property
    def _advice_if_late(self) -> str:
        return texts.CONNECTS_ALL if self._connects_all_for_two else self.advice.late

    def _late_store(self, where: str, is_served_by_rank_0: bool, seconds: float, advice: str) -> CollectiveTimeout:
        row = texts.row(self.rank, f"waits in {self._place.decode()}", "")
        todo = advice or self.advice.late
        error = CollectiveTimeout(texts.unreached(self.operation, where, is_served_by_rank_0, seconds, row, todo))
        error.missing = (0,) if is_served_by_rank_0 else ()
        return error

    def _about(self, store: TimedStore) -> str:
        """Return the reason why other hosts cannot be observed."""
        if (address := store.address()) is not None and not is_reachable(*address):
            return texts.cut_off(socket.gethostname(), *address)
        return texts.SILENT if store is self._store else texts.STORE_ENDED

    def _last_seen(self, peer: Peer) -> list[str]:
        place = self._place_of(peer)
        lines = [f"  rank {peer.rank} was last seen in {place}"] if place else []
        return [*lines, f"  rank {self.rank} waited in {self._place.decode()}"]

    def _heard_of(self, peer: Peer) -> int | None:
        """Return the number of a peer's last call, 0 before its first; None if it cannot be known."""
        was_cut_off = self._is_cut_off
        if (number := self._number_of(peer)) is not None:
            return number
        return None if peer.is_visible or self._store is None or was_cut_off or self._is_cut_off else 0

    def _row(self, rank: int, is_missing: bool, is_unknown: bool, is_idle: bool) -> str:
        if rank == self.rank:
            return texts.row(rank, f"waits in {self._place.decode()}", "")
        peer = self.peers[rank]
        body, known = self._body_of(peer), self._known(peer)
        state = texts.IDLE if is_idle else texts.state(self._place_of(peer), is_missing, is_unknown)
        state = texts.in_body(body.text) if body else state
        return texts.row(rank, state, known.condition(even_if_well=is_missing or is_idle))


def _forget(known: int, page: OwnPage, entry: int) -> None:
    _all.pop(known, None)
    page.free_entry(entry)


def _others() -> list[GroupStatus]:
    return [status for ref in tuple(_all.values()) if (status := ref()) is not None]


@contextlib.contextmanager
def recovering(group: GroupStatus) -> Iterator[None]:
    """Let ranks that wait for this one in other groups know that it recovers this group, for which it needs them.

    They give their calls up. So this rank may have missed calls, as after Ctrl-C.
    """
    page, others = own_page(), _others()
    if page is not None:
        page.set_recovers(group.entry)
    try:
        yield
    finally:
        if page is not None:
            page.set_recovers(-1)
        for other in others:
            other.was_interrupted = True


def recovered_by(peer: Peer) -> str:
    """Return the name of the group of this process that another rank recovers; empty if there is none.

    Also if this process recovers a group itself: the other rank then does not wait for it.
    """
    if (entry := peer.recovers()) < 0 or (page := own_page()) is None or page.recovers() >= 0:
        return ""
    return next((one.name for one in _others() if any(other.is_in(entry, peer) for other in one.peers.values())), "")


def _unknown(awaited: Sequence[int]) -> None:
    """Return None: the default where the numbers of the calls tell who has come."""


def nothing() -> None:
    """Do nothing: the default while there is no connection and no watchdog."""
