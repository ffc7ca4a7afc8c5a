"""A rank whose rules are those of production (``easydist.liveness.protocol``), and whose world is simulated.

What is here carries events, as ``Monitor``, ``Communicators``, ``reconnecting`` and ``calling`` do between processes.
"""

from simulated_world import NEVER, PYTHON, Client, Link, Process

from easydist.errors import PeerLostError, RemoteError
from easydist.liveness import rules
from easydist.liveness.events import Cause, Heard, Parting, Why
from easydist.liveness.protocol import GroupProtocol
from easydist.liveness.report import _KINDS, INTERRUPT, Report, kind_of

WARN_AFTER = NEVER
WATCHDOG_EVERY, GRACE_OF_SIGNAL = 0.25, 0.05
ERRORS = {Why.LOST: PeerLostError, Why.BROKE: PeerLostError, Why.LATE: _KINDS["late"]}


class Failed(Exception):
    """An error of one rank's own, in the middle of a call."""


class Page:
    """The page of a process, which the processes of its host can read."""

    def __init__(self):
        self.number, self.is_inside, self.report, self.has_ended = 0, False, None, False


class SimulatedMonitor:
    """A rank's observations of the others, and the way in which it gives a call up.

    Args:
        group: The group.
        rank: This rank.
        interrupt_at: The count of the step at which Ctrl-C comes; None: at none.
        machine: The class of the rules.
    """

    patience = rules.PATIENCE

    def __init__(self, group, rank, interrupt_at=None, machine=GroupProtocol):
        self.group, self.world, self.rank = group, group.world, rank
        self.rules = machine(rank, group.size)
        self.page = Page()
        self.store = Client(self.world, group.store, self.patience)
        self.process = Process(self.world, interrupt_at, self._on_signal)
        self.link = self.first = group.links.setdefault("first", Link(self.world, False))
        self.has_met, self.met, self.is_connected = False, frozenset(), True
        self._log, self._entries_read = [], 0
        self.has_signal, self._waits_in_memory, self._looked = False, False, -1
        self.headers_at = self.connected_at = self.met_at = 0.0

    # What the watchdog does.

    def _on_signal(self):
        self.has_signal = True
        self.group.signalled(self)
        self.world.after(self.world.soon() / 4, self._watchdog_hears)

    def notice_signals(self):
        if self.has_signal:
            self.has_signal, self.rules.was_interrupted = False, True
            self.world.news += 1

    def _watchdog_hears(self):
        if self.process.is_alive and self.has_signal:
            self.notice_signals()
            if self.rules.waits % 2:
                self.world.after(GRACE_OF_SIGNAL, self._interrupted, self.rules.waits)

    def _interrupted(self, wait):
        if self.process.is_alive:
            self.notice_signals()
            self.give_up(RemoteError(f"{self.rank} was interrupted"), INTERRUPT, wait)

    def _watch(self, wait):
        if not self.process.is_alive or self.rules.waits != wait or self.rules.broken is not None:
            return
        error, cost = self.in_vain(range(self.group.size))
        if error is not None:
            slow = 40 if self.world.random.random() < 0.1 else 0.25
            self.world.after(cost + self.world.soon() * slow, self._give_up_wait, error, wait)
        self.world.after(cost + WATCHDOG_EVERY, self._watch, wait)

    def _give_up_wait(self, error, wait):
        if self.process.is_alive:
            self.give_up(error, wait=wait)

    # What the others see, and what is seen of them.

    def sees(self, rank):
        return rank in self.met and self.group.hosts[rank] == self.group.hosts[self.rank]

    def has_remote_peers(self):
        return not all(self.sees(rank) for rank in range(self.group.size) if rank != self.rank)

    def read(self, key):
        """A report in the store, and the seconds that reading takes."""
        if self.store is None or not self.has_remote_peers():
            return None, 0.0
        try:
            return self.store.get(key)
        except RuntimeError:
            self.store = None
            return None, 0.0

    def stored_report(self, rank):
        total = 0.0
        for phase in self.rules.phases:
            report, cost = self.read(f"reports/{phase}/{rank}")
            total = max(total, cost)
            if report is not None:
                return report, total
        return None, total

    def post(self, kind, number, is_final=False, is_relayed=False):
        phase = self.rules.phase
        report = Report(kind, "", self.rank, 0, phase, number, self.world.now, is_final, {}, *self.rules.origin)
        self.page.report = report
        self.world.news += 1
        if self.store is None or (self.rules._exchanged and not self.has_remote_peers()):
            return
        try:
            self.store.set(f"reports/{phase}/{self.rank}", report)
            if not is_relayed:
                self.store.append("reports", report)
        except RuntimeError:
            self.store = None

    def read_log(self):
        """The reports of the store's log, and the seconds that reading takes."""
        total = 0.0
        while True:
            report, cost = self.read(f"reports/{self._entries_read + 1}")
            total = max(total, cost)
            if report is None:
                break
            self._entries_read += 1
            self._log.append(report)
        self._log = [one for one in self._log if one.by != self.rank and self.rules.may_matter(one)]
        return self._log, total

    def hear(self, rank, remote=False, is_awaited=False, logged=None):
        cost, page, sees = 0.0, self.group.ranks[rank].page, self.sees(rank)
        report = page.report if sees else None
        if report is None and remote and not sees:
            report, cost = (logged, 0.0) if logged else self.stored_report(rank)
        is_ours = None if report is None or rank not in self.met else True
        if self.rules.hinges_on_signals(report, is_ours):
            self.notice_signals()
        return Heard(rank, report, is_ours, is_awaited and sees and page.has_ended), cost

    def has_finished(self, rank):
        page = self.group.ranks[rank].page
        return self.sees(rank) and rules.has_finished(self.rules.number, page.number, page.is_inside)

    def unfinished(self, ranks):
        if self.rules.peer is not None:
            return [self.rules.peer]
        return [rank for rank in ranks if rank != self.rank and not self.has_finished(rank)]

    def in_vain(self, awaited):
        """Why the wait is in vain, and the seconds that it took to see that."""
        machine, now = self.rules, self.world.now
        if self._looked == self.world.news and not machine._looks and now < machine._deadline < NEVER:
            cause, cost = None, 0.0
        else:
            self._looked = self.world.news
            cause, cost = machine.look(self._heard(awaited)), 0.0
        if cause is None and machine.listens(now):
            heard, cost = self._heard_from_afar()
            cause = machine.look(heard)
        if cause is None and machine.is_late(now):
            cause = Cause(Why.LATE)
        return (None if cause is None else self.error_of(cause)), cost

    def _heard(self, awaited):
        for rank in self.unfinished(awaited):
            yield self.hear(rank, is_awaited=True)[0]
        if self.rules.peer is None:
            for rank, other in enumerate(self.group.ranks):
                report = other.page.report
                if rank != self.rank and self.sees(rank) and report and report.is_about(self.rules.number):
                    yield self.hear(rank)[0]

    def _heard_from_afar(self):
        log, cost = self.read_log()
        about = [report for report in log if report.is_about(self.rules.number)]
        return [self.hear(report.by, remote=True, logged=report)[0] for report in about], cost

    def error_of(self, cause):
        if cause.report is None:
            return ERRORS[cause.why](f"{cause.why.name} {cause.rank}")
        if cause.why is Why.ENDED:
            error = RemoteError("ended")
            error.is_final = True
            return error
        error = cause.report.error()
        error.is_earlier, error.is_reported = cause.is_earlier, True
        return error

    # How a call ends.

    def give_up(self, error, kind="", wait=None):
        parting = self.rules.leave(error, wait)
        if parting is Parting.TELL:
            self.post(kind or kind_of(error), self.rules.number_of_report, error.is_final, error.is_reported)
            self.group.gave_up(self, kind or kind_of(error))
        if parting is not Parting.NOTHING and (self.rules.waits % 2 or not self._waits_in_memory):
            self.first.close(self.rank)

    def raise_if_broken(self):
        if self.rules.broken is not None:
            raise again(self.rules.broken)

    def guard(self, awaited):
        self.raise_if_broken()
        error, cost = self.in_vain(awaited)
        if cost:
            yield PYTHON, self.world.now + cost
        if error is not None:
            self.give_up(error)
        self.raise_if_broken()

    def check_reports(self, remote=True):
        peers = [r for r in range(self.group.size) if r != self.rank] if self.rules.peer is None else [self.rules.peer]
        heard, log, cost = [], [], 0.0
        for rank in peers:
            one, _ = self.hear(rank)
            heard.append(one._replace(has_finished=one.report is not None and self.has_finished(rank)))
        if remote and self.rules.peer is None:
            log, cost = self.read_log()
        heard += [self.hear(report.by, remote=True, logged=report)[0] for report in log]
        cause = self.rules.check(heard)
        if cost:
            yield PYTHON, self.world.now + cost
        if cause is not None:
            self.give_up(self.error_of(cause))
        self.raise_if_broken()

    def explain(self, rank):
        """The error that says why a connection broke."""
        if self.rules.broken is None:
            looks = self.rules.explaining(rank, rank in self.met, self.world.now)
            try:
                next(looks)
                while True:
                    heard, cost = self._heard_by_all(rank)
                    is_cut_off = self.has_remote_peers() and self.store is not None and self.store.is_silent
                    looks.send((self.world.now, is_cut_off, heard))
                    yield PYTHON, self.world.now + cost + 0.05
            except StopIteration as end:
                self.give_up(self.error_of(end.value))
        return again(self.rules.broken)

    def _heard_by_all(self, broken):
        found, total = [], 0.0
        for rank in [broken, *(r for r in range(self.group.size) if r != self.rank)]:
            heard, cost = self.hear(rank, remote=True, is_awaited=True)
            is_done = heard.has_ended and rank not in self.unfinished([rank])
            found.append(heard._replace(has_finished=is_done))
            total = max(total, cost)
        return found, total

    def ended_by(self, error):
        if isinstance(error, Exception):
            self.give_up(RemoteError(f"{self.rank} failed"))
        else:
            self.notice_signals()
            self.give_up(RemoteError(f"{self.rank} was interrupted"), INTERRUPT)


def again(error):
    copy = type(error)(*error.args)
    vars(copy).update(vars(error))
    return copy
