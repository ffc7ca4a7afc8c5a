"""A world without processes: virtual time, events in an order that a seed draws, a store, connections, shared memory.

It knows nothing of the protocol. A ``Process`` is a generator that yields ``(mode, until)``: it sleeps until a time, or
until it is woken (None). Ctrl-C ends a pause of the mode ``PYTHON`` at once, and one in ``CPP`` only when that is over.
``STEP`` takes no time; it is a moment at which Ctrl-C may come. ``PAY`` is one, too, and lasts until the store has
answered all questions.
"""

import heapq
import itertools
import random
import types

STEP, PYTHON, CPP, PAY = "step", "python", "c++", "pay"
NEVER = float("inf")


running = types.SimpleNamespace(process=None)
"""The process that runs now."""


class Violation(AssertionError):
    """A law of the protocol does not hold."""


class World:
    """The clock and what is to happen.

    Args:
        seed: Draws the delays, and the order of what happens at one time.
        delay: Seconds that a message takes at most.
    """

    def __init__(self, seed, delay=0.01):
        self.random = random.Random(seed)
        self.now = 0.0
        self.delay = delay
        self.news = 0
        """Rises whenever somebody could hear of something new."""
        self.processes = []
        self.check = _nothing
        """Called after each step: the laws."""
        self._events, self._count = [], itertools.count()

    def at(self, time, action, *arguments):
        """Let something happen at a time; whatever happens at the same time comes in a random order."""
        heapq.heappush(self._events, (time, self.random.random(), next(self._count), action, arguments))

    def after(self, seconds, action, *arguments):
        self.at(self.now + seconds, action, *arguments)

    def soon(self):
        """Draw the seconds that something small takes."""
        return self.random.random() * self.delay

    def run(self, until):
        """Let everything happen; the time of the last event must not be later than ``until``."""
        events = self._events
        while events:
            self.now, _, _, action, arguments = heapq.heappop(events)
            if self.now > until:
                raise Violation(f"something still goes on after {until:g} s")
            action(*arguments)
            self.check()


def _nothing():
    pass


class Process:
    """A generator that can be interrupted, stopped and killed.

    Args:
        world: The world.
        host: Its host.
        interrupt_at: The count of the step at which Ctrl-C comes; None: at none.
        on_signal: Called when Ctrl-C comes.

    Attributes:
        pid: Its place in ``world.processes``, from 1 on.
        page: Its page.
        client: Its way to the store.
        has_ended: True once the others can see that it has ended.
        stopped_until: When it was continued last, or will be.
    """

    page = client = None

    def __init__(self, world, host, interrupt_at, on_signal):
        self.world, self.host, self.is_alive, self.is_done, self.has_ended = world, host, True, False, False
        self.interrupt_at, self._on_signal, self._steps = interrupt_at, on_signal, 0
        self._has_signal, self._mode, self._token, self.body, self.stopped_until = False, None, 0, None, 0.0
        world.processes.append(self)
        self.pid = len(world.processes)

    def start(self, body):
        self.body = body
        self._run(None, None)

    def interrupt(self):
        """Ctrl-C."""
        if not self.is_alive or self.is_done:
            return
        self._has_signal = True
        self._on_signal()
        if self._mode == PYTHON:
            self.world.after(0.0, self._resume, self._token)

    def kill(self):
        self.is_alive, self._token = False, self._token + 1

    def stop(self, seconds):
        """SIGSTOP, and SIGCONT later."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    @property
    def is_stopped(self):
        return self.world.now < self.stopped_until

    def later(self, action, *arguments):
        """Let a thread of this process do something now, or when it is continued."""
        if self.is_stopped:
            self.world.at(self.stopped_until, self.later, action, *arguments)
        elif self.is_alive:
            running.process = self
            action(*arguments)

    def wake(self):
        """End the pause."""
        self.world.after(0.0, self._resume, self._token)

    def _resume(self, token):
        if token == self._token and self.is_stopped:
            self.world.at(self.stopped_until, self._resume, token)
        elif token == self._token:
            self._mode, has_signal, self._has_signal = None, self._has_signal, False
            self._run(None, KeyboardInterrupt() if has_signal else None)

    def _run(self, value, error):
        self._token += 1
        while self.is_alive:
            running.process = self
            try:
                mode, until = self.body.send(value) if error is None else self.body.throw(error)
            except StopIteration:
                self.is_done = True
                return
            error = None
            if mode == PAY:
                until = self.client.paid()
                mode = PYTHON if until > self.world.now else STEP
            self._steps += 1
            if self._steps == self.interrupt_at:
                self.interrupt()
            if self._has_signal and mode != CPP:
                self._has_signal, error = False, KeyboardInterrupt()
            elif mode != STEP or self.is_stopped:
                self._pause(mode, until)
                return

    def _pause(self, mode, until):
        self._mode = mode
        if mode == STEP:
            until = self.stopped_until
        if until is not None:
            self.world.at(until, self._resume, self._token)


class Store:
    """A key-value store, which may be stopped for a while, or be gone."""

    def __init__(self, world, stops=()):
        self._world, self._stops, self._values = world, stops, {}
        self.is_gone = False

    def answers_at(self, time):
        """When a question of this time is answered."""
        for begin, end in self._stops:
            if begin <= time < end:
                time = end
        return time + self._world.soon() / 4

    def get(self, key):
        return self._values.get(key)

    def set(self, key, value):
        self._values[key] = value
        self._world.news += 1

    def state(self):
        """Return what it holds, and whether it answers, as a value."""
        now = self._world.now
        is_silent = any(begin <= now < end for begin, end in self._stops)
        return frozenset(self._values), self.is_gone, is_silent

    def append(self, log, value):
        self._values[log] = self._values.get(log, 0) + 1
        self.set(f"{log}/{self._values[log]}", value)


class Link:
    """The connections of ranks: gloo's, or shared memory.

    In memory a message is there once it is written, whatever becomes of its sender. Between gloo's pairs it moves when
    both sides are there, and a side that has closed its connections gets and gives nothing. A rank that has noticed a
    closed connection can post nothing: gloo refuses what it wants to receive, which easydist posts before all it sends.

    Args:
        world: The world.
        is_memory: True for shared memory.
    """

    def __init__(self, world, is_memory):
        self._world, self.is_memory = world, is_memory
        self._turns, self._posts, self._closed, self._waiting, self._refused = {}, {}, {}, {}, {}

    def post(self, rank, members, message):
        """Give a message to all members, a channel and its ranks; returns the key of this exchange."""
        turn = self._turns[rank, members] = self._turns.get((rank, members), 0) + 1
        posts = self._posts.setdefault((members, turn), {})
        posts[rank] = (self._world.now, self._world.soon() * (0.01 if self.is_memory else 1.0), message)
        if (broken := self._noticed(rank, members[1])) is not None:
            self._refused[rank, (members, turn)] = broken
        if len(posts) == len(members[1]):
            self._wake()
        return members, turn

    def _noticed(self, rank, members):
        """The first member of which a rank knows that their connection is broken; None if it knows of none."""
        noticed = {one for one, time in self._closed.items() if time + self._world.delay <= self._world.now}
        return next((one for one in members if one != rank and not noticed.isdisjoint((one, rank))), None)

    def close(self, rank):
        """All connections of a rank break; the others hear of it in a moment."""
        if not self.is_memory and rank not in self._closed:
            self._closed[rank] = self._world.now
            self._world.after(self._world.soon(), self._wake)

    def _wake(self):
        for process in list(self._waiting.values()):
            process.wake()

    def wait(self, rank, process):
        """Wake a process when something has come, or broken."""
        self._waiting[rank] = process

    def end_wait(self, rank):
        self._waiting.pop(rank, None)

    def state(self, rank, key):
        """When the exchange is complete for a rank (None: not known), and the first rank whose connection is broken."""
        members, _ = key
        posts, last = self._posts[key], 0.0
        if (rank, key) in self._refused:
            return None, self._refused[rank, key]
        mine = posts[rank][0]
        for other in members[1]:
            if other == rank:
                continue
            if other not in posts or (other, key) in self._refused:
                is_broken = not self.is_memory and (other in self._closed or rank in self._closed)
                return None, other if is_broken else None
            sent, delay, _ = posts[other]
            comes = (sent if self.is_memory else max(sent, mine)) + delay
            closed = min(self._closed.get(other, NEVER), self._closed.get(rank, NEVER))
            if closed < comes:
                return None, other
            last = max(last, comes)
        return last, None

    def missing(self, key):
        """The members whose message is not there."""
        members, _ = key
        return [rank for rank in members[1] if rank not in self._posts[key]]

    def messages(self, key):
        return {rank: post[2] for rank, post in self._posts[key].items()}
