"""A world without processes: virtual time, events in an order that a seed draws, a store, connections, shared memory.

It knows nothing of the protocol. A ``Process`` is a generator that yields ``(mode, until)``: it sleeps until a time, or
until it is woken (None). Ctrl-C ends a pause of the mode ``PYTHON`` at once, and one in ``CPP`` only when that is over.
``STEP`` takes no time; it is a moment at which Ctrl-C may come.
"""

import heapq
import itertools
import random

STEP, PYTHON, CPP = "step", "python", "c++"
NEVER = float("inf")


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


class Process:
    """A generator that can be interrupted and killed.

    Args:
        world: The world.
        interrupt_at: The count of the step at which Ctrl-C comes; None: at none.
        on_signal: Called when Ctrl-C comes.
    """

    def __init__(self, world, interrupt_at, on_signal):
        self.world, self.is_alive, self.is_done = world, True, False
        self.interrupt_at, self._on_signal, self._steps = interrupt_at, on_signal, 0
        self._has_signal, self._mode, self._token, self._body = False, None, 0, None

    def start(self, body):
        self._body = body
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

    def wake(self):
        """End the pause."""
        self.world.after(0.0, self._resume, self._token)

    def _resume(self, token):
        if token != self._token:
            return
        self._mode = None
        if self._has_signal:
            self._has_signal = False
            self._run(None, KeyboardInterrupt())
        else:
            self._run(None, None)

    def _run(self, value, error):
        self._token += 1
        while self.is_alive:
            try:
                mode, until = self._body.send(value) if error is None else self._body.throw(error)
            except StopIteration:
                self.is_done = True
                return
            error = None
            self._steps += 1
            if self._steps == self.interrupt_at:
                self.interrupt()
            if self._has_signal and mode != CPP:
                self._has_signal, error = False, KeyboardInterrupt()
            elif mode != STEP:
                self._mode = mode
                if until is not None:
                    self.world.at(until, self._resume, self._token)
                return


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

    def append(self, log, value):
        self._values[log] = self._values.get(log, 0) + 1
        self.set(f"{log}/{self._values[log]}", value)


class Client:
    """One process's way to the store: an answer that does not come in time counts as none.

    Questions of one moment are asked one after the other, so what each of them takes includes those before it.

    Args:
        world: The world.
        store: The store.
        patience: Seconds.
    """

    def __init__(self, world, store, patience):
        self._world, self._store, self._patience = world, store, patience
        self._busy_until = self._silent_until = 0.0

    @property
    def is_silent(self):
        return self._silent_until > self._world.now

    def get(self, key):
        """The value, None without an answer, and the seconds that it takes.

        Raises:
            RuntimeError: The store is gone.
        """
        _, cost = self._ask(is_lasting=False)
        return (None if self.is_silent else self._store.get(key)), cost

    def set(self, key, value):
        """The seconds that it takes; it is written when the store answers."""
        answered, cost = self._ask(is_lasting=True)
        self._world.at(answered, self._store.set, key, value)
        return cost

    def append(self, log, value):
        """Add an entry to a log; the seconds that it takes."""
        answered, cost = self._ask(is_lasting=True)
        self._world.at(answered, self._store.append, log, value)
        return cost

    def _ask(self, is_lasting):
        now = self._world.now
        if self._store.is_gone:
            raise RuntimeError("the store is gone")
        was_silent = self.is_silent
        if was_silent and not is_lasting:
            return None, 0.0
        asked = max(now, self._busy_until)
        answered = self._busy_until = self._store.answers_at(asked)
        if was_silent:  # still, until it has answered this, too
            self._silent_until = answered
            return answered, 0.0
        if answered - asked > self._patience:
            self._silent_until = answered
            return answered, asked + self._patience - now
        return answered, answered - now


class Link:
    """The connections of ranks: gloo's, or shared memory.

    In memory a message is there once it is written, whatever becomes of its sender. Between gloo's pairs it moves when
    both sides are there, and a side that has closed its connections gets and gives nothing.

    Args:
        world: The world.
        is_memory: True for shared memory.
    """

    def __init__(self, world, is_memory):
        self._world, self.is_memory = world, is_memory
        self._turns, self._posts, self._closed, self._waiting = {}, {}, {}, {}

    def post(self, rank, members, message):
        """Give a message to all members, a channel and its ranks; returns the key of this exchange."""
        turn = self._turns[rank, members] = self._turns.get((rank, members), 0) + 1
        posts = self._posts.setdefault((members, turn), {})
        posts[rank] = (self._world.now, self._world.soon() * (0.01 if self.is_memory else 1.0), message)
        if len(posts) == len(members[1]):
            self._wake()
        return members, turn

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
        mine = posts[rank][0]
        for other in members[1]:
            if other == rank:
                continue
            if other not in posts:
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
