"""The system of a simulated process: a clock, a page, peers, and a client of the store.

The process that runs now is ``running.process``. The loaded modules get these names in place of their own (``names``).
"""

import functools
import json
import types
import weakref

from simulated_world import NEVER, PAY, PYTHON, running

from easydist.liveness.bodies import of_message, of_page
from easydist.liveness.page import PageEntry
from easydist.liveness.report import Report

POLL = 0.1
"""Seconds between two looks of ranks that meet: more than in reality, where looks are cheap."""


def carried(value):
    """Carry out a call that may wait, pay for its questions to the store, and let Ctrl-C come."""
    if isinstance(value, types.GeneratorType):
        value = yield from value
    yield PAY, None
    return value


def _pause(seconds):
    yield PYTHON, running.process.world.now + seconds


def _now():
    return running.process.world.now


clock = types.SimpleNamespace(monotonic=_now, sleep=lambda seconds: _pause(max(seconds, POLL)))


class _Reports:
    """``Report``, of which the same text is decoded once only."""

    from_page = staticmethod(functools.lru_cache(maxsize=4096)(Report.from_page))
    from_store = staticmethod(functools.lru_cache(maxsize=4096)(Report.from_store))

    def __new__(cls, *arguments, **options):
        return Report(*arguments, **options)


def _message():
    process = running.process
    if not (text := process.page.body()):
        return None
    return json.dumps([process.world.now, text, [[g, m, p] for g, m, p in of_page(text, process.page.entries()).calls]])


def names(module, loaded):
    """Return the names to replace in a loaded module.

    Args:
        module: The key of the module in ``sources.FILES``.
        loaded: The modules loaded before it.
    """
    found = {"time": clock, "carried": carried, "Report": _Reports, "own_page": lambda: running.process.page}
    if module in ("status", "monitor", "reconnecting"):
        found["Peer"] = _peer_class(loaded.peer.Peer)
    if module == "status":
        found["bodies"] = types.SimpleNamespace(message=_message, of_message=of_message)
    if module == "monitor":
        found["WARN_AFTER"] = NEVER
    if module == "connecting":
        found["within"] = _within
    if module == "reconnecting":
        found |= {"PrefixStore": lambda prefix, _: prefix, "pause": lambda *_: POLL}
    return found


def _within(seconds, call, check, discard):
    """Connect in C++, which hears nothing."""
    return (yield from call())


class _Entry:
    def __init__(self, made):
        self.number, self.is_inside, self.report, self.has_left, self.place = 0, 0, "", False, b""
        self.made, self.who, self.peer, self.is_in_call = made, None, None, False
        self.wait = None


class Page:
    """The page of a process, for itself and for those of its host: what ``OwnPage`` and ``PeerPage`` are.

    Args:
        process: The process.
    """

    def __init__(self, process):
        self._process, self._entries, self._report, self._body = weakref.proxy(process), [], "", ""

    def recovers(self):
        """No process of the simulation recovers a group."""
        return -1

    # For the process itself.

    def new_entry(self):
        self._entries.append(_Entry(self._process.world.now))
        return len(self._entries) - 1

    def free_entry(self, entry):
        self._entries[entry].who = None

    def describe(self, entry, *who):
        self._entries[entry].who = who

    def begin(self, entry, place, now, number=None, peer=None):
        one = self._entries[entry]
        one.place, one.peer, one.is_in_call, one.wait = place, peer, True, None
        if number is not None:
            one.is_inside, one.number = 1, number
        self._changed()

    def end(self, entry, now, is_done=True):
        one = self._entries[entry]
        one.is_in_call, one.is_inside, one.wait = False, one.is_inside and not is_done, None
        self._changed()

    def wait(self, entry, wait):
        self._entries[entry].wait = (wait, None) if wait.number else None
        self._changed()

    def holds(self, entry, rank, wait):
        one = self._entries[entry]
        one.wait = one.wait and (one.wait[0], (rank, wait.number, wait.kind))
        self._changed()

    def leave(self, entry):
        self._entries[entry].has_left, self._entries[entry].who = True, None
        self._changed()

    def set_report(self, entry, text):
        if entry < 0:
            self._report = text
        else:
            self._entries[entry].report = text
        self._changed()

    def set_body(self, text):
        self._body = text
        self._changed()

    def _changed(self):
        self._process.world.news += 1

    # For the others.

    def report(self, entry):
        return self._report if entry < 0 else self._entries[entry].report

    def number(self, entry):
        return self._entries[entry].number

    def waits(self, entry):
        return self._entries[entry].wait

    def is_inside(self, entry):
        return bool(self._entries[entry].is_inside)

    def has_left(self, entry, born):
        return self._entries[entry].has_left or self.is_reused(entry, born)

    def is_reused(self, entry, born):
        return self._entries[entry].made > born

    def place(self):
        return ""

    def body(self):
        return self._body

    def entries(self):
        return [PageEntry(*one.who, one.number, "", one.is_in_call, one.peer, 0.0) for one in self._entries if one.who]


@functools.cache
def _peer_class(real):
    class SimulatedPeer(real):
        """Another process, of which a record tells: the place of its process in the world, and its entry."""

        def __init__(self, rank, told=None):
            super().__init__(rank)
            if told is None:
                return
            pid, self._entry, self._born = (float(part) if "." in part else int(part) for part in told.decode().split())
            self._other, self.known_since = running.process.world.processes[pid - 1], running.process.world.now
            self.pid, self.host, self.host_id = pid, str(self._other.host), str(self._other.host)
            if self._other.host == running.process.host:
                self._process = self._other  # which has a page, as a ``SeenProcess`` has
                self.shares_pages = True

        def has_ended(self):
            return self.is_visible and self._other.has_ended

        is_stopped = property(lambda self: self.is_visible and self._other.is_stopped)

        def is_gone(self):
            return self.has_ended()

        def exit_status(self):
            return -9

        def place(self):
            return ""

        def body(self):
            text = "" if self._page is None or self._other.has_ended or self._other.is_stopped else self._page.body()
            return of_page(text, self._page.entries()) if text else None

    return SimulatedPeer


def record(process, entry):
    """Return the record about a process for its peers."""
    return f"{process.pid} {entry} {process.world.now!r}".encode()


def written(value):
    """Return the rank and the text of an entry of a log."""
    rank, _, text = value.partition(b" ")
    return int(rank), text


class Client:
    """One process's way to the store (``TimedStore``): an answer that does not come in time counts as none.

    Questions of one moment are asked one after the other, so what each of them takes includes those before it. The
    seconds are in ``spent`` until somebody pays for them.

    Args:
        world: The world.
        store: The store.
        patience: Seconds.
    """

    def __init__(self, world, store, patience):
        self._world, self._store, self._patience = world, store, patience
        self._busy_until = self._silent_until = self._spent_until = 0.0

    @property
    def is_silent(self):
        return self._silent_until > self._world.now

    def address(self):
        return None

    @property
    def busy_until(self):
        """The time until which the process waits for answers."""
        return self._spent_until

    def paid(self):
        """Return the time at which all questions until now are answered, or given up; they are paid for by that."""
        until, self._spent_until = self._spent_until, 0.0
        return until

    def get(self, key, by=None):
        self._ask(is_lasting=False)
        return None if self.is_silent else self._store.get(key)

    def check(self, keys):
        return all(self.get(key) is not None for key in keys)

    def set(self, key, text):
        self._world.at(self._ask(is_lasting=True), self._store.set, key, text.encode())

    def append(self, log, rank, text):
        self._world.at(self._ask(is_lasting=True), self._store.append, log, f"{rank} {text}".encode())

    def entries(self, log, new, unwritten):
        self._ask(is_lasting=False)
        if self.is_silent:
            return None
        last = max(new.start - 1, min(self._store.get(log) or 0, new[-1]))
        values = {n: self._store.get(f"{log}/{n}") for n in (*unwritten, *range(new.start, last + 1))}
        return last, {n: value and written(value) for n, value in values.items()}

    def under(self, prefix):
        """Return the same client for a part of the store, as with ``PrefixStore``."""
        return _Part(self, prefix)

    def _ask(self, is_lasting):
        now = self._world.now
        if self._store.is_gone:
            raise RuntimeError("the store is gone")
        was_silent = self.is_silent
        if was_silent and not is_lasting:
            return None
        asked = max(now, self._busy_until)
        answered = self._busy_until = self._store.answers_at(asked)
        if was_silent:  # still, until it has answered this, too
            self._silent_until = answered
        elif answered - asked > self._patience:
            self._silent_until = answered
            self._spent_until = max(self._spent_until, asked + self._patience)
        else:
            self._spent_until = max(self._spent_until, answered)
        return answered


class _Part:
    """A part of the store, with a prefix."""

    def __init__(self, client, prefix):
        self._client, self._prefix = client, prefix
        self.address, self.paid = client.address, client.paid

    is_silent = property(lambda self: self._client.is_silent)
    plain = None

    def get(self, key, by=None):
        return self._client.get(self._prefix + key, by)

    def set(self, key, text):
        self._client.set(self._prefix + key, text)

    def append(self, log, rank, text):
        self._client.append(self._prefix + log, rank, text)

    def entries(self, log, new, unwritten):
        return self._client.entries(self._prefix + log, new, unwritten)

    def check(self, keys):
        return self._client.check([self._prefix + key for key in keys])
