"""The calls of a simulated rank, and how its connections are made: what ``Communicators`` and ``calling`` do."""

import contextlib
import math

from simulated_monitor import monitor_class
from simulated_process import Client, Page, record
from simulated_world import CPP, NEVER, PYTHON, STEP, Link, Process, running

from easydist.errors import EasydistError


class Failed(Exception):
    """An error of one rank's own, in the middle of a call."""


class SimulatedRank:
    """One rank of a group.

    Args:
        group: The group.
        rank: This rank.
        code: The loaded modules (``sources.load``).
    """

    def __init__(self, group, rank, code):
        self.group, self.world, self.rank, self.code = group, group.world, rank, code
        interrupt_at = group.schedule.steps.get(rank)
        self.process = process = Process(self.world, group.hosts[rank], interrupt_at, self._on_signal)
        process.page, process.client = Page(process), Client(self.world, group.store, code.rules.PATIENCE)
        running.process = process
        self.monitor = monitor_class(code.monitor.Monitor)(self, rank, group.size, "world")
        self.monitor.timeout = group.schedule.group_limit
        self.part = process.client.under("world/")
        self.monitors = [self.monitor]
        self.link = self.first = group.links.setdefault("first", Link(self.world, False))
        self.has_met, self.is_connected, self.is_in_memory = False, True, False
        self.has_disconnected = False
        self.has_all = False
        """True if all data of the call has moved."""
        self.missing = []
        """The ranks whose data had not come at the last look of a wait in memory."""
        self.waits_since = 0.0
        """When the last wait in memory, or for all ranks to reconnect, began."""
        self.has_signal = False
        self.ended_at, self.body_since = NEVER, 0.0
        self.headers_at = self.connected_at = self.met_at = 0.0

    # Signals, and what the laws want to know.

    def _on_signal(self):
        self.has_signal = True
        self.group.signalled(self)
        self.world.after(self.world.soon() / 4, self.process.later, self._watchdog_hears)

    def notice_signals(self):
        if self.has_signal:
            self.has_signal = False
            self.world.news += 1
            for monitor in self.monitors:
                monitor.was_interrupted = True

    def _watchdog_hears(self):
        if self.has_signal:
            self.notice_signals()
            for monitor in self.monitors:
                monitor.heard_signal()

    def disconnect(self):
        self.has_disconnected = True
        self.first.close(self.rank)

    def gave_up(self, monitor, error, kind):
        self.group.laws.gave_up(self, monitor, error, kind)

    def sees(self, rank):
        """True if this rank knows another one, on its host."""
        return rank != self.rank and self.monitor.peers[rank].is_visible

    # Exchanges.

    def exchange(self, link, members, message):
        """Give a message to all members, and take theirs."""
        key = link.post(self.rank, (self.monitor.peer is None, members), message)
        yield STEP, None
        yield from self.wait_in(link, key, self.monitor)
        return link.messages(key)

    def wait_in(self, link, key, monitor):
        """Wait until an exchange is complete."""
        wait = self._wait_in_memory if link.is_memory else self._wait_in_cpp
        yield from wait(link, key, monitor)

    def _wait_in_memory(self, link, key, monitor):
        rank, began = monitor.rank, self.world.now
        self.waits_since = began
        try:
            link.wait(rank, self.process)
            while True:
                complete, _ = link.state(rank, key)
                if complete is not None and complete <= self.world.now:
                    return
                pause = self.world.now + self.group.guard_every
                yield PYTHON, pause if complete is None else min(complete, pause)
                complete, _ = link.state(rank, key)
                if complete is None or complete > self.world.now:
                    self.missing = link.missing(key)
                    yield from monitor.guard(self.missing, self.world.now - began)
        finally:
            link.end_wait(rank)

    def _wait_in_cpp(self, link, key, monitor):
        monitor.begin_wait()
        try:
            broken = yield from self.wait_for_link(link, key, monitor.rank)
        finally:
            monitor.end_wait()
        if broken is not None:
            raise (yield from monitor.explain(RuntimeError("Connection closed by peer"), broken))
        monitor.raise_if_broken()

    def wait_for_link(self, link, key, rank, deadline=NEVER):
        """Wait in C++; return the rank whose connection broke, or None; or raise at the deadline."""
        broken = None
        try:
            link.wait(rank, self.process)
            while broken is None:
                complete, broken = link.state(rank, key)
                if complete is not None and complete <= self.world.now:
                    break
                if self.world.now >= deadline:
                    raise RuntimeError("timed out")
                if broken is None:
                    yield CPP, complete if deadline == NEVER else min(deadline, complete or NEVER)
        finally:
            link.end_wait(rank)
        return broken

    def begin(self, exchange):
        """Make the first exchange of a call; repeat it while a call before this one has failed elsewhere."""
        while True:
            self.monitor.is_awaited = self.monitor.peer is None
            try:
                return (yield from exchange())
            except EasydistError as error:
                if not error.is_earlier:
                    raise
            yield from self.make_ready()

    # Meeting and reconnecting.

    def make_ready(self):
        monitor = self.monitor
        peer, monitor.peer = monitor.peer, None
        try:
            while self._is_apart() or not (self.has_met or peer is not None):
                try:
                    yield from self.reconnect() if self._is_apart() else self._meet()
                except EasydistError as error:
                    if not error.is_earlier:
                        raise
        finally:
            monitor.peer = peer

    def _is_apart(self):
        return self.monitor.broken is not None or not self.is_connected

    def _meet(self):
        monitor, everyone = self.monitor, self.group.everyone
        monitor.is_awaited = True
        self._announce()
        messages = yield from self._exchange_records("meet", record(self.process, monitor.entry))
        monitor.describe("met")
        monitor.peers = {one: self.code.monitor.Peer(one, messages[one][3]) for one in everyone if one != self.rank}
        self.met_at = self.met_at or self.world.now
        self.world.news += 1
        yield from self._exchange_records("attach", None)
        self.is_in_memory = self.group.shares
        if self.is_in_memory:
            self.link = self.group.links.setdefault((self.first, "memory"), Link(self.world, True))
        monitor.waits_in_memory = self.is_in_memory
        monitor.is_awaited, self.has_met = False, True

    def _announce(self):
        with contextlib.suppress(RuntimeError):
            self.part.append("who", self.rank, record(self.process, self.monitor.entry).decode())

    def _exchange_records(self, kind, told):
        message = kind, None, math.ceil(self.monitor.at), told
        return (yield from self.group.paired(self, self.exchange(self.first, self.group.everyone, message)))

    def reconnect(self):
        if self.monitor.broken is not None and self.monitor.broken.is_final:
            self.monitor.raise_if_broken()
        self.has_met, self.waits_since, link = False, self.world.now, None

        def connect(place, limit):
            nonlocal link
            link = self.group.links.setdefault(place, Link(self.world, False))
            yield from self.code.connecting.connect(lambda: self._connect(place, limit), limit, self.monitor)
            return link

        try:
            made = yield from self.code.reconnecting.reconnect(self.part, self.monitor, connect)
        except BaseException:
            if link is not None:  # nobody has it any more
                link.close(self.rank)
            raise
        yield STEP, None
        self.first = self.link = made
        self.is_connected = True
        yield from self._meet()

    def _connect(self, place, limit):
        """Connect all ranks in C++, which hears no signals."""
        self.connected_at = self.world.now
        here, deadline = self.group.connecting.setdefault(place, {}), self.world.now + limit
        here[self.rank] = self
        if len(here) == self.group.size:
            for other in here.values():
                other.process.wake()
        while len(here) < self.group.size and self.world.now < deadline:
            yield CPP, deadline
        if len(here) < self.group.size:
            here.pop(self.rank)
            raise RuntimeError("connect: timed out")

    # Calls.

    def call(self, place, limit, peer=None, fails=None):
        """One call; returns the messages of all its ranks.

        Args:
            place: Where it stands in the program.
            limit: Seconds that it may take; None: those of the group.
            peer: The only other rank; None: all take part.
            fails: "data" if this rank fails in the middle, "result" if it does when all data has moved, or None.
        """
        monitor = self.monitor
        try:
            self.has_all, self.missing = False, []
            monitor.begin("call", "place", limit, peer)
            if peer is not None or not self.is_in_memory:
                self.notice_signals()  # as ``signals_wake_watchdog``: earlier ones do not end the waits of this call
            yield STEP, None
            if monitor.broken is not None or not self.has_met:
                yield from self.make_ready()
            yield STEP, None
            messages = yield from self._exchanges(place, peer, fails == "data")
            self.has_all = True
            if fails == "result":  # no other rank waits for this one any more
                raise Failed
        except (Exception, KeyboardInterrupt) as caught:
            self._end_call(caught)
            raise
        self._end_call(None)
        return messages

    def _end_call(self, error):
        monitor = self.monitor
        if error is not None and monitor.tells_of(isinstance(error, Exception), False):
            monitor.ended_by(error)
        is_past_exchange = not (monitor.is_awaited or monitor.is_fresh or monitor.broken)
        monitor.end(error is None or is_past_exchange)

    def _exchanges(self, place, peer, fails):
        monitor = self.monitor
        monitor.is_awaited = peer is None
        members = self.group.everyone if peer is None else tuple(sorted((self.rank, peer)))
        is_posted = peer is not None and self.group.schedule.is_posted(self.group.places[self.rank])
        if is_posted and self.rank == members[0]:
            self._begin_message(members, waits=False)
            self._post_headers(place, members)
        else:
            yield from self.begin(lambda: self._headers(place, members))
        monitor.is_fresh, monitor.is_promised = False, is_posted
        if peer is not None and not (is_posted and self.rank == members[0]):
            yield from monitor.check_reports()
        monitor.is_awaited = True
        yield STEP, None
        if fails:
            raise Failed
        if self.group.schedule.is_small(monitor.number):  # the data came with the headers
            monitor.is_awaited = False
            return ()
        message = ("data", place, monitor.number)
        if is_posted and self.rank == members[0]:
            self.link.post(self.rank, (False, members), message)
            monitor.is_awaited = False
            return ()
        messages = self.exchange(self.link, members, message)
        messages = yield from self.group.paired(self, messages)
        monitor.is_awaited = False
        yield STEP, None
        return messages

    def _post_headers(self, place, members):
        self.link.post(self.rank, (False, members), ("headers", place, self.monitor.number, 0.0))

    def _begin_message(self, members, waits=True):
        """Begin the message of a call of two, which the lower rank sends."""
        if (peer := self.monitor.peer) is not None:
            crossing = self.code.crossing
            message = self.monitor.crossing.begin(crossing.RECEIVE if self.rank == members[1] else crossing.SEND, peer)
            if waits:
                self.monitor.waits_for(message)

    def _headers(self, place, members):
        self._begin_message(members)
        message = ("headers", place, self.monitor.number, self.world.now + self.group.clock(self.rank))
        messages = yield from self.group.paired(self, self.exchange(self.link, members, message))
        self.headers_at = self.world.now
        yield STEP, None
        if self.monitor.peer is None:
            yield from self._listen_after(messages)

    def _listen_after(self, messages):
        now, monitor = self.world.now, self.monitor
        if (apart := monitor.exchanged(now)) > self.code.rules.APART:
            came = min(message[3] for message in messages.values())
            seems_late = now + self.group.clock(self.rank) > came + self.code.rules.APART
            yield from monitor.check_reports(remote=monitor.listens_after(now, apart, seems_late))

    def run_body(self, seconds):
        """Run a body for which others wait, as in ``main_process_first``."""
        page = self.process.page
        page.set_body("first")
        self.body_since = self.world.now
        self.group.laws.runs_body(seconds)
        try:
            yield PYTHON, self.world.now + seconds
        finally:
            page.set_body("")

    # How it ends.

    def die(self, has_raised=False):
        """The process is killed, or ends with an exception."""
        if not self.process.is_alive or self.process.is_done:
            return
        if has_raised:
            running.process = self.process
            for monitor in self.monitors:
                monitor.post_exception("ValueError: x")
        self.process.kill()
        self.world.after(self.world.soon() * 3, self._ended)
        self.world.after(self.world.soon() * 3, self.first.close, self.rank)
        for comms in self.group.comms:
            if self.rank in comms:
                self.world.after(self.world.soon() * 3, comms[self.rank].disconnect)
        self.group.died(self)

    def _ended(self):
        self.process.has_ended = True
        self.ended_at = self.world.now
        self.world.news += 1
