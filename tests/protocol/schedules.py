"""The schedule of one simulated run, drawn from a seed: ranks, delays and faults; and the program of the ranks."""

import random
from typing import NamedTuple

import sources
from laws import Laws
from simulated_comm import SimulatedComm
from simulated_rank import Failed, SimulatedRank
from simulated_world import NEVER, PYTHON, Link, Store, Violation, World

from easydist.errors import EasydistError

LAST_LIMIT = 25.0
"""Seconds that each of the last calls may take, when nothing goes wrong any more: more than a store stops."""

SIZES = [2] * 40 + [3] * 38 + [4] * 16 + [5, 6, 8] * 2
FAULTS = ["interrupt", "interrupt all", "interrupt step", "late", "late", "fail", "kill", "raise", "stop", "clock"]
FAULTS += ["freeze", "freeze", "leave", "recover", "body", "store"]
ALONE = ("interrupt all",)
THEMES = [ALONE, ("interrupt", "interrupt all", "interrupt step"), ("late", "late", "clock", "freeze", "interrupt")]
THEMES += [
    ("leave", "recover", "late", "freeze"),
    ("stop", "late", "freeze", "kill"),
    ("interrupt step", "fail", "late"),
]
"""Faults that come together more often than chance would have it; one of them comes alone."""


class Schedule:
    """The faults of a run.

    Args:
        seed: Draws it.
    """

    afterwards = 5
    """Calls of all ranks that are left when nothing goes wrong any more; the last two have to be well."""

    def __init__(self, seed):
        draw = self._draw = random.Random(seed)
        self.seed, self._script = seed, []
        self.size = draw.choice(SIZES) if draw.random() < 0.998 else draw.choice([16, 32])
        self.way = draw.choice(["shm", "gloo", "hosts"])
        self.hosts = [draw.randrange(2) if self.way == "hosts" else 0 for _ in range(self.size)]
        self.quiet_from = draw.uniform(0.4, 1.8)
        self._soon = draw.uniform(0.0, self.quiet_from)
        self.thinks = draw.choice([0.02, 0.1, 0.3])
        self.group_limit = draw.choice([0.6, 2.0])
        self.limits = draw.choice([(0.3, 0.6), (0.5, 3.0), (2.0, 3.0)])
        self.pairs = draw.choice([0.0, 0.0, 0.3, 0.6])
        self.comms = self._draw_comms() if draw.random() < 0.5 else []
        self._clear()
        self.store_is_in = draw.choice([None, 0])
        kinds, count = draw.choice(THEMES) if draw.random() < 0.5 else FAULTS, draw.choice([0, 1, 2, 2, 3, 3, 4, 5])
        self.faults = ["interrupt all"] if kinds is ALONE else [draw.choice(kinds) for _ in range(count)]
        for fault in self.faults:
            getattr(self, "_" + fault.replace(" ", "_"))()

    def _clear(self):
        """Begin without any fault."""
        self.interrupts, self.steps, self.ends, self.stops, self.clocks = [], {}, [], [], []
        self.fails, self.lates, self.is_at_once = {}, {}, False
        self.freezes, self.leaves, self.bodies, self.store_ends = [], {}, {}, None

    def __str__(self):
        return f"seed {self.seed}"

    def _time(self):
        """Draw the time of a fault; half of them come soon after one another."""
        if self._draw.random() < 0.5:
            return self._soon + self._draw.uniform(0.0, 0.1)
        return self._draw.uniform(0.0, self.quiet_from)

    def _rank(self):
        return self._draw.randrange(self.size)

    def _interrupt(self):
        self.interrupts.append((self._time(), self._rank()))

    def _interrupt_all(self):
        time, apart = self._time(), self._draw.choice([0.0, 0.0, 0.02, 0.2])
        self.is_at_once = apart == 0.0
        self.interrupts += [(time + self._draw.uniform(0.0, apart), rank) for rank in range(self.size)]

    def _interrupt_step(self):
        self.steps[self._rank()] = self._draw.randrange(1, self._draw.choice([16, 60, 120]))

    def _late(self):
        self.lates[self._rank(), self._draw.randrange(12)] = self._draw.uniform(0.3, 4.0)

    def _fail(self):
        self.fails[self._rank(), self._draw.randrange(10)] = self._draw.choice(["data", "data", "result"])

    def _kill(self):
        self.ends.append((self._time(), self._rank(), False))

    def _raise(self):
        self.ends.append((self._time(), self._rank(), True))

    def _stop(self):
        begin = self._time()
        self.stops.append((begin, begin + self._draw.uniform(0.1, 8.0)))

    def _clock(self):
        self.clocks.append((self._time(), self._draw.choice(self.hosts), self._draw.uniform(-5.0, 5.0)))

    def _freeze(self):
        self.freezes.append((self._time(), self._rank(), self._draw.uniform(0.1, 4.0)))

    def _leave(self):
        self.leaves[self._rank()] = (self._draw.randrange(10), False)

    def _recover(self):
        self.leaves[self._rank()] = (self._draw.randrange(10), True)

    def _body(self):
        self.bodies[self._rank(), self._draw.randrange(8)] = self._draw.uniform(0.3, 6.0)

    def _store(self):
        self.store_ends = self._time()

    def _draw_comms(self):
        """Draw communicators: the kind, and the members; as by ``split``."""
        kinds = ["counted", "shm"] if self.way == "shm" else ["gloo"]
        found = []
        for _ in range(self._draw.choice([1, 2])):
            count = self._draw.randrange(2, self.size + 1)
            found.append((self._draw.choice(kinds), tuple(sorted(self._draw.sample(range(self.size), count)))))
        return found

    def is_small(self, number):
        """True if the data of a call travels with its headers."""
        return (self.seed + number) % 3 != 0

    def is_posted(self, place):
        """True if the call of two at a place is a message that its sender posts, without waiting for the receiver."""
        return (self.seed + place) % 2 == 0

    def step(self, place):
        """Return None for a call of all ranks, or the two that take part, or an ``Op``; the same on all ranks."""
        while len(self._script) <= place:
            self._script.append(self._drawn_step())
        return self._script[place]

    def _drawn_step(self):
        draw = self._draw
        if self.comms and draw.random() < 0.4:
            index = draw.randrange(len(self.comms))
            members = self.comms[index][1]
            sender = draw.choice(members) if self.way == "shm" and draw.random() < 0.3 else None
            return Op(index, members, sender)
        return tuple(sorted(draw.sample(range(self.size), 2))) if draw.random() < self.pairs else None


class Op(NamedTuple):
    """An operation of a communicator.

    Attributes:
        comm: Its place in ``Schedule.comms``.
        members: The ranks that take part.
        sender: The member for whose signal the others wait in a window; None for a collective.
    """

    comm: int
    members: tuple
    sender: int | None


class Group:
    """The ranks of a run, and their program.

    Args:
        schedule: What happens.
        code: The loaded modules of easydist.
    """

    def __init__(self, schedule, code):
        self.schedule, self.size, self.hosts = schedule, schedule.size, schedule.hosts
        self.world = world = World(schedule.seed, delay=0.01)
        self.shares, self.everyone = schedule.way == "shm", tuple(range(schedule.size))
        self.guard_every = 0.05 + 0.1 * (self.size > 8)
        self.store, self.links, self.connecting = Store(world, schedule.stops), {}, {}
        self.ranks = []
        self.laws = Laws(self)
        self.ranks += [SimulatedRank(self, rank, code) for rank in self.everyone]
        self.comms = [self._made(index, *comm) for index, comm in enumerate(schedule.comms)]
        self.places, self.is_wild, self.end = [0] * self.size, [False] * self.size, None
        self._place_of, self._next = [-1], 0

    def _made(self, index, kind, members):
        link = Link(self.world, kind != "gloo")
        made = {rank: SimulatedComm(self.ranks[rank], index, kind, members, link) for rank in members}
        for comm in made.values():
            comm.meet(made)
        return made

    def clock(self, rank):
        """By how much the wall clock of a rank's host is wrong."""
        now, host = self.world.now, self.hosts[rank]
        return sum(step for time, where, step in self.schedule.clocks if where == host and time <= now)

    def run(self, check=None):
        """Play it.

        Args:
            check: Called after each step in place of ``laws.check``.

        Raises:
            Violation: A law does not hold.
        """
        schedule, world = self.schedule, self.world
        for rank in self.ranks:
            rank.process.start(self._program(rank))
        for time, rank in schedule.interrupts:
            world.at(time, self.ranks[rank].process.interrupt)
        if schedule.faults == ["interrupt all"] and schedule.is_at_once:
            world.at(schedule.interrupts[0][0] - 1e-9, self.laws.note_who_is_outside)
        for time, rank, has_raised in schedule.ends:
            world.at(time, self.ranks[rank].die, has_raised)
        for time, rank, seconds in schedule.freezes:
            world.at(time, self.freeze, rank, seconds)
        if schedule.store_ends is not None:
            world.at(schedule.store_ends, self._end_store)
        world.at(schedule.quiet_from + 0.3, self._quiet)
        world.check = check or self.laws.check
        try:
            world.run(until=2000.0)
            self.laws.judge()
        finally:
            self.laws.is_over = True
            for process in world.processes:  # now, not at some time by the garbage collector
                process.body.close()

    def freeze(self, rank, seconds):
        self.ranks[rank].process.stop(seconds)
        self.laws.stops(rank, seconds)

    def _end_store(self):
        self.store.is_gone = True

    def _quiet(self):
        for rank in self.ranks:
            rank.process.interrupt_at = None
        self.end = self.place_of(max(rank.monitor.number for rank in self.ranks) + self.schedule.afterwards) + 1

    # The program of each rank.

    def _program(self, rank):
        mine = rank.rank
        while self.end is None or self.places[mine] < self.end:
            leaves_at, recovers = self.schedule.leaves.get(mine, (NEVER, False))
            if self.end is None and self.places[mine] >= leaves_at:
                rank.monitor.recovers() if recovers else rank.monitor.announce_leaving()
                self.laws.leaves(rank)
                return
            step = self.schedule.step(self.places[mine])
            if isinstance(step, Op):
                if mine in step.members:
                    yield from self._operate(rank, step)
            elif step is None or mine in step:
                yield from self._make_call(rank, step)
            self.places[mine] += 1

    def _operate(self, rank, step):
        """Make an operation of a communicator, unless that is broken."""
        comm = self.comms[step.comm][rank.rank]
        if not (yield from self._think(rank, self.places[rank.rank])):
            self.is_wild[rank.rank] = True
        if self.is_wild[rank.rank]:  # it no longer knows which operations the others are in
            comm.finalize()
        if comm.is_over:
            return
        limit = LAST_LIMIT / 3 if self.end is not None else self.world.random.uniform(*self.schedule.limits)
        self.laws.begins_operation(rank, limit)
        try:
            yield from comm.operate(step.sender, self.places[rank.rank], limit)
            error = None
        except (EasydistError, KeyboardInterrupt) as caught:
            error = caught
        self.laws.ended_operation(rank, comm, error)

    def _make_call(self, rank, members):
        mine, place = rank.rank, self.places[rank.rank]
        if not (yield from self._think(rank, place)):
            self.is_wild[mine] = True
        peer = None if members is None else sum(members) - mine
        limit = self.world.random.uniform(*self.schedule.limits)
        limit = LAST_LIMIT if self.end is not None else limit if self.world.random.random() < 0.6 else None
        self.laws.begins(rank, limit, members)
        try:
            yield from rank.call(
                None if self.is_wild[mine] else place,
                limit,
                peer,
                self.schedule.fails.get((mine, place)) if self.end is None else None,
            )
            outcome = None
        except (EasydistError, KeyboardInterrupt, Failed) as error:
            outcome = error
        self.laws.ended(rank, outcome, members)
        if self.is_wild[mine]:
            for comms in self.comms:
                if mine in comms:
                    comms[mine].finalize()
        if self.is_wild[mine] and members is None:  # it may have taken the number of the others
            self.places[mine] = self.place_of(rank.monitor.number)
            self.is_wild[mine] = rank.has_signal
        self.laws.outcome(rank, self.places[mine], outcome, members)

    def _think(self, rank, place):
        """Act as the rank does between two calls; return False if Ctrl-C ends it."""
        late = self.schedule.lates.get((rank.rank, place), 0.0)
        try:
            if (seconds := self.schedule.bodies.get((rank.rank, place))) is not None and self.end is None:
                yield from rank.run_body(seconds)
            yield PYTHON, self.world.now + late + self.world.random.random() * self.schedule.thinks
        except KeyboardInterrupt:
            return False
        return True

    def place_of(self, number):
        """Return the place in the program of the call of all ranks with this number."""
        while len(self._place_of) <= number:
            if self.schedule.step(self._next) is None:
                self._place_of.append(self._next)
            self._next += 1
        return self._place_of[number]

    # What the ranks say of themselves.

    def signalled(self, rank):
        self.laws.signalled(rank)

    def has_left(self, rank):
        """True if a rank has left the group for good, while its process goes on."""
        return self.ranks[rank].monitor._has_left or rank in self.laws.leavers

    def died(self, rank):
        if self.schedule.store_is_in == rank.rank:
            self.store.is_gone = True

    def paired(self, rank, exchange):
        messages = yield from exchange
        self.laws.paired(rank, messages)
        self.laws.check_time_left(rank)
        return messages


def play(seed, mutant=None):
    """Play the schedule of a seed.

    Args:
        seed: The seed.
        mutant: A fault to put into the code.

    Raises:
        Violation: A law does not hold.
    """
    Group(Schedule(seed), sources.load(mutant)).run()


__all__ = ["Group", "Schedule", "Violation", "play"]
