"""The monitor of one group: it ends waits for ranks that are lost, late or interrupted.

While a call waits, it calls ``guard`` repeatedly, which ends the wait if the awaited ranks can no longer come. The rank
then posts a failure report, on its page for its own host and in the store for other hosts, so that every rank raises
the same kind of error. ``docs/design/liveness.md`` states the rules.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from easydist import settings
from easydist.errors import DisagreementError, EasydistError, PeerLostError, RemoteError
from easydist.liveness import keepalive, texts
from easydist.liveness.events import Cause, Heard, Parting, Why
from easydist.liveness.page import MessageWait
from easydist.liveness.peer import Peer
from easydist.liveness.questions import Questions
from easydist.liveness.report import EXCEPTION, INTERRUPT, fields_of, kind_of
from easydist.liveness.status import GroupStatus, nothing, recovered_by
from easydist.liveness.timed_store import TimedStore
from easydist.liveness.watchdog import interrupts_deferred

_log = logging.getLogger("easydist")
WARN_AFTER: float = settings.read("EASYDIST_WARN_AFTER")
"""Seconds after which a wait is logged."""

_LOOK_EVERY = 0.005
"""Seconds between two checks for the reason why a connection broke."""


class Monitor(GroupStatus):
    """The monitor of the waits in one group's calls.

    Args:
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        timeout: Seconds that a call may take, unless the call sets its own limit.
        store: The store for failure reports between hosts.
        name: The name of the group.

    Attributes:
        disconnect: Breaks this process's connections of the group, so that waits in C++ end.
        waits_in_memory: True if the group's ranks share memory, so that each of them checks the others while it waits.
        is_destroyed: Returns True if the caller has destroyed the group without easydist.
        younger: Returns the monitor of the verbs that wait in the memory of this group; None if there is none.
        questions: The questions to the hosts of ranks that meet.
        is_meeting: True while the ranks of a new group meet, outside of the calls of an older one.
        untold: The error that has ended the last call, as long as it could not be told to the others; else None.
        outside: Called at every look; it raises an error once something outside of the group makes its waits vain.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: TimedStore | None = None, name: str = "") -> None:
        super().__init__(rank, size, store, name)
        self.timeout = self._limit = timeout
        self.disconnect: Callable[[], None] = nothing
        self.waits_in_memory = False
        self.is_destroyed: Callable[[], bool] = _never
        self.younger: Callable[[], Monitor | None] = _nobody
        self.outside: Callable[[], None] = nothing
        self.is_meeting, self.questions = False, Questions()
        self.untold: BaseException | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        operation: str,
        site: str,
        timeout: float | None = None,
        peer: int | None = None,
        is_turn: bool = True,
    ) -> None:
        """Begin a call.

        Args:
            operation: The name of the operation.
            site: The caller's file and line.
            timeout: The time limit in seconds; None for the group's.
            peer: The only other rank that takes part; such calls are not counted. None if all ranks take part.
            is_turn: False if ``peer`` makes no call that belongs to this one, which only waits for an earlier message.

        Raises:
            RemoteError: ``peer`` had left this call before the ranks met last.
        """
        now = time.monotonic()
        limit = self.timeout if timeout is None else timeout
        begun = self.crossing.calls() if peer is None and self.crossing.begun else {}  # most groups send no messages
        number = self.number + (peer is None)
        self._is_limit_given = timeout is not None
        self.crossing.wait = None
        self.operation, self.site, self._place = operation, site, f"{operation}, call {number}, at {site}".encode()
        if (
            self._page is not None
        ):  # before the call is counted, so that an exception in between is not about the last one
            self._page.begin(self.entry, self._place, now, number if peer is None else None, peer)
        may_have_missed = self.begin_call(now, limit, WARN_AFTER, peer, is_turn, begun)
        if self.peer is not None and is_turn and self.was_left_before():
            raise RemoteError(texts.given_up(operation, self.advice.failed))
        if may_have_missed and (cause := self.missed(map(self.hear, self.peers.values()))) is not None:
            self.broken = self.error_of(cause, ())
            if not self.waits_in_memory:
                self.disconnect()  # a rank that waits for this one first does not see whose connection broke

    def end(self, is_done: bool = True) -> None:
        """End the call; ``is_done`` is False if this rank has not sent all the data that others wait for."""
        now = time.monotonic()
        if self.crossing.is_told:
            self.crossing.untell(self._write)
        self.end_call(now)
        if self._page is not None:
            self._page.end(self.entry, now, is_done and self.peer is None)

    @property
    def left(self) -> float | None:
        """Seconds until the call's time is over; None outside of calls."""
        return self.time_left(time.monotonic())

    def guard(self, awaited: Sequence[int], waited: float = 0.0, is_exact: bool = True) -> None:
        """End the wait if it cannot succeed.

        Args:
            awaited: The ranks that have not come yet, as far as that is known.
            waited: Seconds waited so far.
            is_exact: True if the wait needs data of each of these ranks that has not come.

        Raises:
            PeerLostError: An awaited rank has ended.
            RemoteError: A rank has ended with an exception, was interrupted, or failed.
            CollectiveTimeout: The call's time is over.
        """
        if (younger := self.younger()) is not None and younger.left is not None:  # this may be a wait of its call
            younger.guard(awaited, waited, is_exact)
        self.raise_if_broken()
        if (error := self._in_vain(awaited, is_exact)) is not None:
            self.give_up(error)
        self.raise_if_broken()

    def waits_for(self, message: MessageWait) -> None:
        """Let the others see for which message this rank waits, unless the call has a limit of its own.

        Such a call may well be meant to time out, after which this rank comes to the others' call.
        """
        if not self._is_limit_given:
            self.crossing.show(message)

    def begin_wait(self) -> None:
        """Begin a wait in C++, which the watchdog monitors."""
        self.waits += 1

    def end_wait(self) -> None:
        """End a wait in C++."""
        with self._lock:  # so that a finding of the watchdog about this wait does not break a later one
            self.waits += 1

    def check_wait(self, wait: int) -> None:
        """End the wait of a thread in C++ if it cannot succeed; the watchdog calls this, and the thread raises.

        Args:
            wait: The value of ``waits`` in that wait.
        """
        if self.broken is None and (error := self._in_vain(list(self.peers))) is not None:
            self.give_up(error, wait=wait)

    def _in_vain(self, awaited: Sequence[int], is_exact: bool = False) -> EasydistError | None:
        """Return the error because of which the wait cannot succeed; None if it still can."""
        try:
            self.outside()
            return self._found(awaited, is_exact)
        except EasydistError as error:  # from outside, or of a damaged value in the store, which it names
            return error

    def _found(self, awaited: Sequence[int], is_exact: bool) -> EasydistError | None:
        cause = self.look(self._heard(awaited, is_exact))
        now = time.monotonic()
        listens, is_late = self.listens(now), self.is_late(now)
        if listens:
            keepalive.end_unreachable()
        if cause is None and listens:
            cause = self.look(self._heard_from_afar())
        if cause is None and listens:
            cause = self._vanished()
        if cause is None and (crossed := self._crossed(listens)) is not None:
            return crossed
        if cause is None and listens and (recovering := self.recovering(awaited)) is not None:
            return recovering
        if cause is None and (listens or is_late) and self._waits_for_a_body(awaited):
            self.extend(now)
        elif cause is None and is_late:
            cause = Cause(Why.LATE)
        if cause is not None:
            return self.error_of(cause, awaited)
        if self.warns(now, WARN_AFTER) and not self._others_warn():
            _log.warning("%s", self.late(awaited, now - self._began, "Still waiting."))
        return None

    def _vanished(self) -> Cause | None:
        """Return the cause if a host no longer answers while ranks meet; connected ranks learn of it from TCP."""
        if not (self.phase % 2 or self.is_meeting) or (self._others_warn() and not self.questions.have_begun):
            return None
        lost = self.silent()
        return Cause(Why.UNREACHABLE, lost[0]) if lost else None

    def silent(self) -> list[int]:
        """Ask the hosts of the others if it is time; return the ranks of those that have answered and no longer do."""
        far = [peer for peer in self.peers.values() if not peer.is_visible]
        return [peer.rank for peer in far if self.questions.are_unanswered(peer.addresses)]

    def recovering(self, awaited: Sequence[int]) -> EasydistError | None:
        """Return the error if an awaited rank recovers another group, and so waits for this rank; None if none does."""
        for peer in self._unfinished(awaited):
            if name := recovered_by(peer):
                error = RemoteError(texts.recovers_another(self.operation, peer.rank, name, self.advice.recovered))
                error.rank, error.is_interrupt = peer.rank, True  # that rank misses this call, as after Ctrl-C
                return error
        return None

    def _others_warn(self) -> bool:
        """True if a lower rank of this host waits in this call of all ranks, so that its warning is enough."""
        return self.peer is None and any(
            peer.rank < self.rank and peer.is_inside(self.number) and not (peer.is_stopped or peer.has_ended())
            for peer in self.peers.values()
        )

    def _heard(self, awaited: Sequence[int], is_exact: bool) -> Iterator[Heard]:
        # Ranks that meet need all others until they are connected, also those that have come, or have ended this call.
        for peer in self.peers.values() if self.phase % 2 else self._unfinished(awaited, is_exact):
            yield self.hear(peer, is_awaited=True)._replace(blocks=is_exact)
        for peer in self._gave_up():
            yield self.hear(peer)

    def _heard_from_afar(self) -> Iterator[Heard]:
        """Yield the reports of ranks on other hosts.

        A broken connection is not enough to notice that they failed: it stays up while a forked child holds it open.
        """
        for report in self._read_log():
            if report.is_about(self.number):
                yield self.hear(self.peers[report.by], remote=True, logged=report)

    def check_reports(self, remote: bool = True, even_if_sent: bool = True) -> None:
        """Raise an error if another rank has given the call up.

        Args:
            remote: True to read the store, too.
            even_if_sent: False to let the wait find out whether a rank that has ended with an exception had sent its
                data of this call before, where its calls are not counted.

        Raises:
            EasydistError: The error that the rank has reported.
        """
        heard = self._heard_of_call(remote)
        if not even_if_sent:
            heard = (one for one in heard if one.report is None or one.report.kind != EXCEPTION)
        if (cause := self.check(heard)) is not None:
            self.give_up(self.error_of(cause, ()))
        self.raise_if_broken()

    def _heard_of_call(self, remote: bool) -> Iterator[Heard]:
        for peer in self.peers.values() if self.peer is None else [self.peers[self.peer]]:
            heard = self.hear(peer)
            yield heard._replace(has_finished=heard.report is not None and peer.has_finished(self.number))
        for report in self._read_log() if remote and self.peer is None else ():
            yield self.hear(self.peers[report.by], remote=True, logged=report)

    def raise_if_broken(self) -> None:
        """Raise the error that ended the group's exchanges, if there is one."""
        if self.broken is not None:
            raise again(self.broken)

    def publish(self) -> None:
        """Publish this rank's state for ranks of other hosts; if torch has destroyed the group, tell all ranks."""
        if self.is_destroyed():
            self.announce_leaving()
        super().publish()

    def detach(self) -> None:
        """Drop the references to the connections of a destroyed group."""
        self.disconnect = self.sync_signals = nothing
        self.is_destroyed = _never

    def retire(self) -> None:
        """Keep only the entry on this process's page: other ranks may still read that this group has been recovered."""
        self.detach()
        self.peers = {rank: Peer(rank) for rank in self.peers}
        self._store = self._lost_store = None
        self._logs.clear()
        if self.broken is not None:  # its traceback holds the frames of the call, and with them the connections
            self.broken = again(self.broken)
            self.broken.raised_in = None

    def begin_reconnecting(self) -> EasydistError | None:
        """Make the phase odd; return the error that broke the old connections."""
        self.crossing.end()
        with self._lock:
            return self.begin_meeting()

    def end_meeting(self) -> None:
        """Make the phase even: the ranks are connected."""
        self.crossing.begun.clear()
        self.questions.end()
        super().end_meeting()

    def give_up_for_others(self) -> None:
        """Give the call up, because the other ranks have given it up and are in a later one.

        Raises:
            RemoteError: Always.
        """
        self.give_up(RemoteError(texts.given_up(self.operation, self.advice.failed)))
        self.raise_if_broken()

    def move(self) -> None:
        """Write to the page that this rank is in another call."""
        if self._page is not None:
            self._page.begin(self.entry, self._place, time.monotonic(), self.number)

    def give_up(self, error: EasydistError, kind: str = "", wait: int | None = None) -> None:
        """Leave the group's exchanges, and report the reason to all other ranks.

        Args:
            error: The reason.
            kind: The kind of the report; empty to derive it from the error's type.
            wait: The wait in C++ for which to give up: do nothing if it has ended. None to give up in any case.
        """
        # The waiting thread and the watchdog may get here at the same time; a second Ctrl-C must not come in between.
        with interrupts_deferred(), self._lock:
            parting = self.leave(error, wait)
            try:
                # Before disconnecting: a rank whose connection breaks looks for this report.
                if parting is Parting.TELL:
                    number = self.number_of_report
                    fields = fields_of(error)
                    self.post(kind or kind_of(error), str(error), number, error.is_final, error.is_reported, **fields)
            finally:
                if parting is not Parting.NOTHING and (self.waits % 2 or not self.waits_in_memory):
                    self.disconnect()

    def ended_by(self, error: BaseException) -> None:
        """Leave the call because of an error, and report it to all other ranks, unless it comes from them."""
        self.questions.end()
        if isinstance(error, Exception):
            self.failed(error)
        else:
            self.interrupted(error)

    def interrupted(self, error: BaseException, wait: int | None = None) -> None:
        """Leave a call before its end because of Ctrl-C or the like; do nothing if the wait has ended."""
        with interrupts_deferred():
            self.sync_signals()  # now, so that the signal counts for this call
            text = texts.interrupted(self.operation, self.rank, error, self.advice.failed)
            self.give_up(self._own(text), INTERRUPT, wait)

    def failed(self, error: Exception, wait: int | None = None) -> None:
        """Leave a call before its end because of an error of this rank; do nothing if the wait has ended."""
        with interrupts_deferred():
            text = texts.failed(self.operation, self.rank, error, self.advice.failed)
            self.give_up(self._different(error) or self._own(text), wait=wait)

    def recovers(self) -> None:
        """Leave the group for good, in order to recover it: ranks that wait in it hear of that, and come, too."""
        self.leave_for_good(self._own(texts.recovers(self.rank)))

    def left_by_this_process(self) -> PeerLostError:
        """Return the error for a call that this process makes while it leaves the group, or after that."""
        pid, host = os.getpid(), socket.gethostname()
        error = PeerLostError(texts.left(self.operation or "a verb", self.rank, pid, host, []))
        error.rank, error.pid, error.host = self.rank, pid, host
        return error

    def refuse_calls(self, error: EasydistError) -> None:
        """Let each further call of this process raise the error, unless it raises another one already."""
        if self.broken is None or not self.broken.is_final:
            self.broken, error.is_final = error, True

    def leave_for_good(self, error: EasydistError) -> None:
        """Leave the group for good: ranks that wait for this one raise the error, in torch's own calls one of torch."""
        if self.broken is None or not self.broken.is_final:
            self.broken, error.is_final = None, True
            self.give_up(error)
        self.disconnect()

    def _different(self, error: Exception) -> DisagreementError | None:
        """Return the error of a communicator whose ranks made different calls, for all ranks; None for another one."""
        is_of_communicator = isinstance(error, DisagreementError) and isinstance(error, RuntimeError)
        return DisagreementError(f"{error}\n{self.advice.failed}") if is_of_communicator else None

    def _own(self, text: str) -> RemoteError:
        return RemoteError(text, rank=self.rank)

    def reported(self, ranks: Iterable[int]) -> EasydistError | None:
        """Return the error that ended the exchanges of this rank, or of one of these ranks; None if none has ended.

        For waits outside of calls.
        """
        if self.broken is not None:
            return again(self.broken)
        found = (self.judge(self.hear(self.peers[rank], remote=True)) for rank in ranks)
        cause = next((cause for cause in found if cause is not None), None)
        return None if cause is None else self.error_of(cause, ())

    def post_exception(self, text: str) -> None:
        """Report to the others that this process ends with an exception.

        Args:
            text: The text of the exception.
        """
        self.post(EXCEPTION, text, self.number_of_report)

    def explain(self, error: Exception, rank: int) -> EasydistError:
        """Return an error that explains why the connection to a rank broke."""
        if self.broken is None:
            self.give_up(self._different(error) or self._cause(error, self.peers[rank]))
        with self._lock:  # the watchdog may be giving up at the same time
            assert self.broken is not None
            return again(self.broken)

    def unconnected(self, seconds: float) -> EasydistError:
        """Return the error for ranks that have met but were not connected in time, because one has left again."""
        self.give_up(self.in_vain() or self.late(list(self.peers), seconds))
        assert self.broken is not None
        return again(self.broken)

    def in_vain(self) -> EasydistError | None:
        """Return why no wait for all others can succeed; None if it still can."""
        everyone = list(self.peers)
        return self._in_vain(everyone) or self._in_vain(everyone)  # an ended rank counts as lost at the second look

    def raise_if_lost(self) -> None:
        """Raise an error if another rank has ended.

        Raises:
            PeerLostError: A rank has ended.
        """
        if isinstance(error := self.in_vain(), PeerLostError):
            self.give_up(error)
            raise again(error)

    def _cause(self, error: Exception, broken: Peer) -> EasydistError:
        is_unreachable = keepalive.TEXT in str(error) or keepalive.has_ended(broken.addresses)
        is_late = "imed out" in str(error) and not is_unreachable
        cause = Cause(Why.LATE) if is_late else self._explained(broken)
        if cause.why is Why.BROKE and is_unreachable:
            cause = cause._replace(why=Why.UNREACHABLE)
        return self.error_of(cause, list(self.peers))

    def _explained(self, broken: Peer) -> Cause:
        looks = self.explaining(broken.rank, bool(broken.pid), time.monotonic())
        try:
            next(looks)
            while True:
                # If the store is silent here, the peer may have read a report there that this rank cannot read now.
                # It may also have fallen silent during the look, of which nothing can be concluded, either.
                keepalive.end_unreachable()  # also the connection to a store that will never answer
                was_cut_off, heard = self._is_cut_off, list(self._heard_by_all(broken))
                is_cut_off = self._has_remote_peers() and (was_cut_off or self._is_cut_off)
                now = time.monotonic()
                if is_cut_off and self._waits_for_a_body(list(self.peers)):
                    self.extend(now)
                looks.send((now, is_cut_off, heard))
                time.sleep(_LOOK_EVERY)
        except StopIteration as end:
            cause: Cause = end.value
            return cause

    def _heard_by_all(self, broken: Peer) -> Iterator[Heard]:
        logged = self._read_log()
        for peer in [broken, *self.peers.values()]:
            heard = self.hear(peer, remote=True, is_awaited=True)
            is_done = (heard.has_ended or heard.has_left) and peer not in self._unfinished([peer.rank])
            yield heard._replace(has_finished=is_done)
        for report in logged:  # a later report may have replaced the one about this call
            yield self.hear(self.peers[report.by], remote=True, logged=report)

    def share_memory_with(self, younger: Monitor) -> None:
        """Let verbs over the same ranks and memory have a monitor of their own, with the rules of their calls."""
        younger.elder, self.younger = self, weakref.ref(younger)


def _never() -> bool:
    return False


def _nobody() -> None:
    return None


def again(error: EasydistError) -> EasydistError:
    """Return a copy of an error, which is raised separately."""
    copy = type(error)(*error.args)
    vars(copy).update(vars(error))
    return copy
