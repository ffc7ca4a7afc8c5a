"""The calls of a simulated rank, and how it meets the others: what ``Communicators`` and ``calling`` do."""

import math

from simulated_monitor import SimulatedMonitor, again
from simulated_world import CPP, NEVER, PYTHON, STEP, Client, Link

from easydist.errors import EasydistError, PeerLostError, RemoteError
from easydist.liveness import rules
from easydist.liveness.events import Answer, Cause, Do, Why
from easydist.liveness.report import EXCEPTION

WARN_AFTER, WATCHDOG_EVERY = NEVER, 0.25


class Failed(Exception):
    """An error of one rank's own, in the middle of a call."""


class SimulatedRank(SimulatedMonitor):
    """One rank of a group; its arguments are those of ``SimulatedMonitor``."""

    # Exchanges.

    def exchange(self, link, members, message):
        """Give a message to all members, and take theirs."""
        key = link.post(self.rank, (self.rules.peer is None, members), message)
        yield STEP, None
        wait = self._wait_in_memory if link.is_memory else self._wait_in_cpp
        yield from wait(link, key)
        return link.messages(key)

    def _wait_in_memory(self, link, key):
        try:
            link.wait(self.rank, self.process)
            while True:
                complete, _ = link.state(self.rank, key)
                if complete is not None and complete <= self.world.now:
                    return
                pause = self.world.now + self.group.guard_every
                yield PYTHON, pause if complete is None else min(complete, pause)
                complete, _ = link.state(self.rank, key)
                if complete is None or complete > self.world.now:
                    yield from self.guard(link.missing(key))
        finally:
            link.end_wait(self.rank)

    def _wait_in_cpp(self, link, key):
        self.rules.waits += 1
        self.world.after(self.world.random.random() * WATCHDOG_EVERY, self._watch, self.rules.waits)
        broken = None
        try:
            link.wait(self.rank, self.process)
            while broken is None:
                complete, broken = link.state(self.rank, key)
                if complete is not None and complete <= self.world.now:
                    break
                if broken is None:
                    yield CPP, complete
        finally:
            link.end_wait(self.rank)
            self.rules.waits += 1
        if broken is not None:
            raise (yield from self.explain(broken))
        self.raise_if_broken()

    def begin(self, exchange):
        """Make the first exchange of a call; repeat it while a call before this one has failed elsewhere."""
        while True:
            self.rules.is_awaited = self.rules.peer is None
            try:
                return (yield from exchange())
            except EasydistError as error:
                if not error.is_earlier:
                    raise
            yield from self.make_ready()

    # Meeting and reconnecting.

    def make_ready(self):
        machine = self.rules
        peer, machine.peer = machine.peer, None
        try:
            while self._is_apart() or not (self.has_met or peer is not None):
                try:
                    yield from self.reconnect() if self._is_apart() else self._meet()
                except EasydistError as error:
                    if not error.is_earlier:
                        raise
        finally:
            machine.peer = peer

    def _is_apart(self):
        return self.rules.broken is not None or not self.is_connected

    def _meet(self):
        self.rules.is_awaited = True
        everyone = self.group.everyone
        yield from self.group.paired(
            self, self.exchange(self.first, everyone, ("meet", None, math.ceil(self.rules.at)))
        )
        self.met, self.met_at = frozenset(everyone), self.met_at if self.met else self.world.now
        self.world.news += 1
        yield from self.group.paired(
            self, self.exchange(self.first, everyone, ("attach", None, math.ceil(self.rules.at)))
        )
        if self.group.shares:
            self.link = self.group.links.setdefault((self.first, "memory"), Link(self.world, True))
            self._waits_in_memory = True
        self.rules.is_awaited, self.has_met = False, True

    def reconnect(self):
        machine = self.rules
        if machine.broken is not None and machine.broken.is_final:
            self.raise_if_broken()
        self.has_met, broken, link = False, machine.begin_meeting(), None
        yield STEP, None
        try:
            met = yield from self._agree_on_call()
            yield STEP, None
            link = self._link_of(met)
            yield from self._connect(link, met)
            machine.end_meeting()
            broken = None
            yield STEP, None
        except (Exception, KeyboardInterrupt) as error:
            self.ended_by(error)
            if link is not None:  # nobody has it any more
                link.close(self.rank)
            raise
        finally:
            machine.broken = machine.broken or broken
        yield STEP, None
        self.first = self.link = link
        self.is_connected = True
        yield from self._meet()

    def _agree_on_call(self):
        steps = self.rules.meeting()
        step = next(steps)
        try:
            while True:
                step = steps.send((yield from self._take(step)))
        except StopIteration as end:
            return end.value
        except RuntimeError:
            self.give_up(PeerLostError("the store is gone"))
            self.raise_if_broken()

    def _take(self, step):
        prefix, now, answer = f"{self.rules.phase}/here", self.world.now, None
        if step.do is Do.ANNOUNCE:
            cost = self._demanded().set(f"{prefix}/{self.rank}", step.told)
            yield PYTHON, now + max(cost, self._demanded().set(f"{self.rules.phase}/begun", True))
        elif step.do is Do.ASK:
            told = {rank: self._demanded().get(f"{prefix}/{rank}") for rank in step.ranks}
            is_passed, cost = self._demanded().get(f"{self.rules.phase + 2}/begun")
            answer = Answer({rank: one for rank, (one, _) in told.items() if one}, bool(is_passed))
            yield PYTHON, now + max([cost, *(cost for _, cost in told.values())])
        elif step.do is Do.PAUSE:
            yield PYTHON, now + self.group.poll
        elif step.do is Do.GUARD:
            yield from self.guard(step.ranks)
        elif step.do is Do.LISTEN:
            yield from self.check_reports()
        elif step.do is Do.NOTICE:
            self.notice_signals()
        elif step.do is Do.GIVE_UP:
            self.give_up(RemoteError("given up"))
            self.raise_if_broken()
        elif step.do is Do.MOVE:
            self._show(self.rules.number)
        return answer

    def _demanded(self):
        if self.group.store.is_gone:
            raise RuntimeError("the store is gone")
        return self.store or Client(self.world, self.group.store, self.patience)

    def _link_of(self, met):
        return self.group.links.setdefault((self.rules.phase, tuple(met)), Link(self.world, False))

    def _connect(self, link, met):
        """Connect all ranks in C++, which hears no signals."""
        self.connected_at = self.world.now
        key, limit = (self.rules.phase, tuple(met)), self.rules.connect_limit(self.world.now)
        here, deadline = self.group.connecting.setdefault(key, {}), self.world.now + limit
        here[self.rank] = self
        if len(here) == self.group.size:
            for other in here.values():
                other.process.wake()
        while len(here) < self.group.size and self.world.now < deadline:
            yield CPP, deadline
        if len(here) < self.group.size:
            here.pop(self.rank)
            raise self._unconnected()

    def _unconnected(self):
        everyone = range(self.group.size)
        why = self.in_vain(everyone)[0] or self.in_vain(everyone)[0]
        self.give_up(why or self.error_of(Cause(Why.LATE)))
        return again(self.rules.broken)

    # Calls.

    def call(self, place, limit, peer=None, fails=False):
        """One call; returns the messages of all its ranks.

        Args:
            place: Where it stands in the program.
            limit: Seconds that it may take.
            peer: The only other rank; None: all take part.
            fails: True if this rank fails in the middle.
        """
        machine = self.rules
        may_have_missed = machine.begin_call(self.world.now, limit, WARN_AFTER, peer)
        self._looked = -1
        if peer is None:
            self._show(machine.number)
        try:
            yield STEP, None
            if machine.was_left_before():
                raise RemoteError("given up")
            if may_have_missed:
                heard = [self.hear(rank)[0] for rank in range(self.group.size) if rank != self.rank]
                if (cause := machine.missed(heard)) is not None:
                    machine.broken = self.error_of(cause)
            if machine.broken is not None or not self.has_met:
                yield from self.make_ready()
            yield STEP, None
            messages = yield from self._exchanges(place, peer, fails)
        except (Exception, KeyboardInterrupt) as caught:
            self._end_call(caught, peer)
            raise
        self._end_call(None, peer)
        return messages

    def _end_call(self, error, peer):
        machine = self.rules
        if error is not None and machine.tells_of(isinstance(error, Exception), False):
            self.ended_by(error)
        if peer is None and error is None:
            self.page.is_inside = False
        machine.end_call(self.world.now)

    def _exchanges(self, place, peer, fails):
        machine = self.rules
        machine.is_awaited = peer is None
        members = self.group.everyone if peer is None else tuple(sorted((self.rank, peer)))
        yield from self.begin(lambda: self._headers(place, members))
        machine.is_fresh = False
        if peer is not None:
            yield from self.check_reports()
        machine.is_awaited = True
        yield STEP, None
        if fails:
            raise Failed
        if self.group.schedule.is_small(machine.number):  # the data came with the headers
            machine.is_awaited = False
            return ()
        messages = self.exchange(self.link, members, ("data", place, machine.number))
        messages = yield from self.group.paired(self, messages)
        machine.is_awaited = False
        yield STEP, None
        return messages

    def _headers(self, place, members):
        message = ("headers", place, self.rules.number, self.world.now + self.group.clock(self.rank))
        messages = yield from self.group.paired(self, self.exchange(self.link, members, message))
        self.headers_at = self.world.now
        yield STEP, None
        if len(members) == self.group.size and self.rules.peer is None:
            yield from self._listen_after(messages)

    def _listen_after(self, messages):
        now = self.world.now
        if (apart := self.rules.exchanged(now)) > rules.APART:
            came = min(message[3] for message in messages.values())
            seems_late = now + self.group.clock(self.rank) > came + rules.APART
            yield from self.check_reports(self.rules.listens_after(now, apart, seems_late))

    def _show(self, number):
        self.page.is_inside, self.page.number = True, number

    # How it ends.

    def die(self, has_raised=False):
        """The process is killed, or ends with an exception."""
        if not self.process.is_alive or self.process.is_done:
            return
        if has_raised:
            self.post(EXCEPTION, self.rules.number_of_report)
        self.process.kill()
        self.world.after(self.world.soon() * 3, self._ended)
        self.world.after(self.world.soon() * 3, self.first.close, self.rank)
        self.group.died(self)

    def _ended(self):
        self.page.has_ended = True
        self.world.news += 1
