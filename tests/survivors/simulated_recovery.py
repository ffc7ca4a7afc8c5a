"""Simulated processes that recover a group with the library's own code over simulated pages, stores and time.

Each process is a thread, and one of them runs at a time, until its next step: a look at a page, a question to a store,
a pause. There it may have to let others run, stop, die, or raise ``KeyboardInterrupt``, as its schedule says.
"""

import functools
import json
import threading
from types import SimpleNamespace
from typing import NamedTuple

from simulated_agreement import Broken, law

from easydist.errors import EasydistError, PeerLostError
from easydist.groups.membership import Register, Stage
from easydist.groups.registers import RecoveryState
from easydist.liveness.log import Log

TIMEOUT, LIMIT, POLL = 2.0, 1.0, 0.05
ENTRY = 3


class Died(BaseException):
    """The process has ended; nothing that it does after this has an effect."""


class Process:
    """One process.

    Attributes:
        wakes: The time when it continues.
        surprise: The exception that its next step raises; None for none.
        outcome: Its group, or the error that it got; None before.
    """

    def __init__(self, rank, host, body):
        self.rank, self.host, self.wakes, self.slept = rank, host, 0.0, 0.0
        self.surprise = self.outcome = self.failure = None
        self.is_dead = self.is_done = False
        self.is_prompt, self.calls, self.began, self.page = True, 0, None, ""
        self.register, self.interrupts, self.ended_at = Register(), 0, 0.0
        self.go = threading.Lock()
        self.go.acquire()
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)

    def _run(self, body):
        self.go.acquire()
        try:
            if not self.is_dead:
                self.outcome = body(self)
        except Died:
            pass
        except BaseException as error:
            self.failure = error
        self.is_done, self.ended_at = True, WORLD.now
        WORLD.running.release()


class World:
    """The processes, their hosts and stores, and the time.

    Args:
        schedule: Decides after each step which process runs next, and what happens to it.
    """

    def __init__(self, schedule):
        self.schedule, self.now, self.running = schedule, 0.0, threading.Lock()
        self.running.acquire()
        self.processes, self.stores, self.decided = [], [], {}
        self.current, self.arrived, self.met, self.places, self.accepted = None, {}, set(), {}, {}

    def play(self):
        """Run the processes until all have ended."""
        for process in self.processes:
            process.thread.start()
        while running := [process for process in self.processes if not process.is_done]:
            ready = [process for process in running if process.wakes <= self.now or process.is_dead]
            if not ready:
                self.now = min(process.wakes for process in running)
                self.thaw()
                continue
            self.current = self.schedule.choose(ready)
            self.current.go.release()
            self.running.acquire()
        for process in self.processes:
            process.thread.join()

    def step(self, seconds=0.0):
        """End a step of the running process; it continues after so many seconds, if nothing happens to it."""
        process = self.current
        if process.is_dead:
            raise Died
        is_ending = self.now <= self.schedule.longest and self.schedule.steps < 20_000
        law(is_ending, f"rank {process.rank} waits without an end")
        process.wakes = max(process.wakes, self.now + seconds)
        if self.schedule.lets_others_run(self) or process.wakes > self.now:
            self.running.release()
            process.go.acquire()
        if process.is_dead:
            raise Died
        surprise, process.surprise = process.surprise, None
        if surprise is not None:
            raise surprise

    def die(self, process):
        """End a process, and the stores that it serves."""
        process.is_dead = True
        for store in self.stores:
            store.is_gone = store.is_gone or store.server is process

    def thaw(self):
        for store in self.stores:
            store.thaw()

    def check(self, text):
        """Check a register that a process writes."""
        process, register = self.current, RecoveryState.from_json(text).register
        law(register.slot >= process.register.slot, f"rank {process.rank} forgets what has been decided")
        process.register = register
        if register.slot:
            made = register.members, register.is_settled
            law(self.decided.setdefault(register.slot, made) == made, f"agreement: {self.decided} but {register}")
        if register.accepted:
            known = self.accepted.setdefault((register.slot, register.accepted), register.value)
            law(known == register.value, f"ballot {register.accepted} has two values: {known}, {register.value}")


WORLD: World


def begin(schedule):
    """Return a new world, in which all simulated parts are from now on."""
    global WORLD
    WORLD = World(schedule)
    return WORLD


class Store:
    """A store, as a process serves it: it may be frozen until some time, or gone."""

    def __init__(self, server=None):
        self.server, self.values, self.frozen, self.late, self.is_gone = server, {}, 0.0, [], False
        self.port = len(WORLD.stores) + 1
        WORLD.stores.append(self)

    def thaw(self):
        if self.frozen <= WORLD.now and not self.is_gone:
            while self.late:
                self.late.pop(0)()


class Prefix(NamedTuple):
    """``PrefixStore``."""

    prefix: str
    store: Store


def written(value):
    rank, _, text = value.partition(b" ")
    return int(rank), text


class SimulatedTimedStore:
    """``TimedStore`` over a simulated store."""

    def __init__(self, store):
        self._store, self._pending, self.has_answered = store, 0, False

    @property
    def is_silent(self):
        self._store.thaw()
        return self._pending > 0

    def get(self, key, by=None):
        return self._ask(lambda values: values.get(key), False)

    def set(self, key, text):
        if key.startswith("recover/"):
            WORLD.check(text)
        self._ask(lambda values: values.update({key: text.encode()}), True)

    def append(self, log, rank, text):
        def append(values):
            values[log] = values.get(log, 0) + 1
            values[f"{log}/{values[log]}"] = f"{rank} {text}".encode()

        self._ask(append, True)

    def entries(self, log, new, unwritten):
        def look(values):
            last = max(new.start - 1, min(values.get(log, 0), new[-1]))
            found = {n: values.get(f"{log}/{n}") for n in (*unwritten, *range(new.start, last + 1))}
            return last, {n: value and written(value) for n, value in found.items()}

        return self._ask(look, False)

    def set_first(self, key, text):
        return self._ask(lambda values: values.setdefault(key, text.encode()), True)

    def check(self, keys):
        return bool(self._ask(lambda values: all(key in values for key in keys), False))

    def _ask(self, question, is_lasting):
        WORLD.step()
        store, self.has_answered = self._store, False
        store.thaw()
        if store.is_gone:
            raise RuntimeError("the store is gone")
        if store.frozen <= WORLD.now:
            self.has_answered = True
            return question(store.values)
        if is_lasting or not self._pending:
            self._pending += 1
            store.late.append(lambda: self._answer(question))
        WORLD.step(POLL)
        return None

    def _answer(self, question):
        self._pending -= 1
        question(self._store.values)


class Page:
    """The page of the running process."""

    def __init__(self, process):
        self._process = process

    def set_register(self, entry, text):
        law(entry == ENTRY, "a register is in the entry of its group")
        WORLD.step()
        WORLD.check(text)
        self._process.page = text


class SimulatedPeer:
    """``Peer``: another process, which is known once its record has come."""

    def __init__(self, rank, told=None):
        self.rank, self._process = rank, WORLD.processes[rank]
        near = told is not None and self._process.host == WORLD.current.host
        self.pid = None if told is None else 100 + rank
        self.shares_pages, self.is_visible = near, near
        self.host_id = None if told is None else self._process.host

    def is_gone(self):
        return self.shares_pages and self._process.is_dead

    def has_left(self):
        return False

    def register(self):
        WORLD.step()
        return self._process.page if self.is_visible else ""


class SimulatedMonitor:
    """``Monitor``, as far as recovering asks it."""

    def __init__(self, process, size):
        self.rank, self.size, self.name, self.operation, self.entry = process.rank, size, "the group", "gather", ENTRY
        self.own_page, self.broken, self.is_retired, self.log = Page(process), None, False, functools.cache(Log)
        self.peers = {rank: SimulatedPeer(rank) for rank in range(size) if rank != process.rank}
        self.questions = SimpleNamespace(end=lambda: None, have_begun=False)

    def silent(self):
        """Hosts do not vanish here."""
        return []

    def recovers(self):
        WORLD.step()

    def retire(self):
        self.is_retired = True

    def give_up(self, error):
        self.broken = error

    def raise_if_broken(self):
        raise self.broken


def record(page, entry, shares):
    return json.dumps([page, entry, shares]).encode()


def served(host, port, seconds):
    WORLD.step()
    return Store(WORLD.current)


def reached(host, port, seconds, check):
    until = WORLD.now + seconds
    WORLD.step()
    store, looked_on = WORLD.stores[port - 1], 0
    while store.is_gone:
        check()
        if WORLD.now >= until:
            raise RuntimeError("no process listens")
        WORLD.step(POLL)
        looked_on += not WORLD.schedule.needs_store
        law(looked_on < 3, f"rank {WORLD.current.rank} looks for the store of a member that has ended")
    return store


def connect(attempt):
    """Connect the members, if all of them come to the same store."""
    prefix, store = _opened(attempt.store)
    place = attempt.number, attempt.members, prefix, store.port
    process, there = WORLD.current, WORLD.arrived.setdefault(place, set())
    law(WORLD.places.setdefault(place[2:], place[0]) == place[0], "two attempts meet in one place")
    law(attempt.members[attempt.rank] == process.rank, "a member's rank is its place among the members")
    there.add(process.rank)
    looked_on = 0
    while len(there) < len(attempt.members) or WORLD.schedule.fails_to_connect():
        WORLD.step(POLL)
        attempt.check()
        if store.is_gone:
            raise PeerLostError("a member is lost")
        if WORLD.now >= attempt.deadline:
            raise RuntimeError("not all members have come")
        looked_on += _is_in_vain(attempt) and not WORLD.schedule.needs_store
        law(looked_on < 3, f"rank {process.rank} waits for a member that does not come")
    return place


def _opened(store, prefix=""):
    """Return the prefix of a store's keys, and the store behind it."""
    return _opened(store.store, f"{prefix}/{store.prefix}") if isinstance(store, Prefix) else (prefix, store)


def _is_in_vain(attempt):
    members = [WORLD.processes[one] for one in attempt.members]
    registers = [one.register for one in members]
    gone = [one.slot == attempt.number and one.stage in (Stage.LEFT, Stage.FAILED) for one in registers]
    return any(gone) or any(one.is_dead for one in members)


def meet(monitor):
    """Exchange the records of all ranks."""
    process = WORLD.current
    WORLD.met.add(process.rank)
    until = WORLD.now + TIMEOUT / 2
    while len(WORLD.met) < monitor.size:
        WORLD.step(POLL)
        if WORLD.now > until or any(one.is_dead for one in WORLD.processes):
            raise PeerLostError("not all ranks have met")
    introduce(monitor)


def introduce(monitor):
    monitor.peers = {rank: SimulatedPeer(rank, b"told") for rank in monitor.peers}


def simulated(recovering, first_meeting):
    """Give modules of the library the simulated parts, and return them."""
    clock = SimpleNamespace(monotonic=lambda: WORLD.now, sleep=lambda seconds: WORLD.step(seconds))
    for module in (recovering, first_meeting):
        module.time, module.TimedStore, module.POLL = clock, SimulatedTimedStore, POLL
    recovering.PrefixStore, recovering.served, recovering.reached = Prefix, served, reached
    recovering.underlying = lambda store: store
    recovering.LIMIT, recovering.this_host = LIMIT, lambda: WORLD.current.host
    first_meeting.own_page, first_meeting.record, first_meeting.Peer = lambda: None, record, SimulatedPeer
    return recovering, first_meeting


def failure_of(process):
    """Return the reason why a process did not end as the library promises; None if it did."""
    if isinstance(process.failure, Broken):
        return process.failure
    if process.failure is not None and not isinstance(process.failure, EasydistError | KeyboardInterrupt):
        return Broken(f"rank {process.rank} raised {process.failure!r}")
    return None
