"""The schedule of one simulated run, drawn from a seed: ranks, delays and faults; and the laws that must hold."""

import random

from simulated_rank import Failed, SimulatedRank
from simulated_world import NEVER, PYTHON, Store, Violation, World

from easydist.errors import EasydistError, RemoteError
from easydist.liveness.protocol import GroupProtocol
from easydist.liveness.report import INTERRUPT

SLACK = 5.0
"""Seconds by which a call may last longer than its limit: looks, answers that do not come, and broken connections."""

AFTERWARDS = 5
"""Calls of all ranks that are left when nothing goes wrong any more; the last two have to be well."""

SIZES = [2] * 30 + [3] * 36 + [4] * 22 + [5, 6, 7, 8] * 3
FAULTS = ["interrupt", "interrupt all", "interrupt step", "late", "late", "fail", "kill", "raise", "stop", "clock"]


class Schedule:
    """The faults of a run.

    Args:
        seed: Draws it.
    """

    def __init__(self, seed):
        draw = self._draw = random.Random(seed)
        self.seed, self._script = seed, []
        self.size = draw.choice(SIZES) if draw.random() < 0.995 else draw.choice([16, 32, 64])
        self.way = draw.choice(["shm", "gloo", "hosts"])
        self.hosts = [draw.randrange(2) if self.way == "hosts" else 0 for _ in range(self.size)]
        self.quiet_from = draw.uniform(0.4, 1.8)
        self.thinks = draw.choice([0.02, 0.1, 0.3])
        self.limits = draw.choice([(0.3, 0.6), (0.5, 3.0), (2.0, 3.0)])
        self.pairs = draw.choice([0.0, 0.0, 0.3, 0.6])
        self.interrupts, self.steps, self.ends, self.stops, self.clocks = [], {}, [], [], []
        self.fails, self.lates, self.is_at_once = set(), {}, False
        self.store_is_in = draw.choice([None, 0])
        self.faults = [draw.choice(FAULTS) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))]
        for fault in self.faults:
            getattr(self, "_" + fault.replace(" ", "_"))()

    def _time(self):
        return self._draw.uniform(0.0, self.quiet_from)

    def _rank(self):
        return self._draw.randrange(self.size)

    def _interrupt(self):
        self.interrupts.append((self._time(), self._rank()))

    def _interrupt_all(self):
        time, apart = self._time(), self._draw.choice([0.0, 0.02, 0.2])
        self.is_at_once = apart == 0.0
        self.interrupts += [(time + self._draw.uniform(0.0, apart), rank) for rank in range(self.size)]

    def _interrupt_step(self):
        self.steps[self._rank()] = self._draw.randrange(1, self._draw.choice([16, 60, 120]))

    def _late(self):
        self.lates[self._rank(), self._draw.randrange(12)] = self._draw.uniform(0.3, 4.0)

    def _fail(self):
        self.fails.add((self._rank(), self._draw.randrange(10)))

    def _kill(self):
        self.ends.append((self._time(), self._rank(), False))

    def _raise(self):
        self.ends.append((self._time(), self._rank(), True))

    def _stop(self):
        begin = self._time()
        self.stops.append((begin, begin + self._draw.uniform(0.1, 8.0)))

    def _clock(self):
        self.clocks.append((self._time(), self._draw.choice(self.hosts), self._draw.uniform(-5.0, 5.0)))

    def is_small(self, number):
        """True if the data of a call travels with its headers."""
        return (self.seed + number) % 3 != 0

    def step(self, place):
        """None for a call of all ranks, else the two that take part; the same on all ranks."""
        while len(self._script) <= place:
            is_pair = self._draw.random() < self.pairs
            self._script.append(tuple(sorted(self._draw.sample(range(self.size), 2))) if is_pair else None)
        return self._script[place]


class Group:
    """The ranks of a run, their program, and the laws.

    Args:
        schedule: What happens.
        kind: The class of the ranks.
        machine: The class of their rules.
    """

    def __init__(self, schedule, kind=SimulatedRank, machine=GroupProtocol):
        self.schedule, self.size, self.hosts = schedule, schedule.size, schedule.hosts
        self.world = world = World(schedule.seed, delay=0.01)
        self.shares, self.everyone = schedule.way == "shm", tuple(range(schedule.size))
        self.guard_every, self.poll = 0.05 + 0.1 * (self.size > 8), 0.1 + 0.2 * (self.size > 8)
        self.store, self.links, self.connecting = Store(world, schedule.stops), {}, {}
        self.ranks = []
        self.ranks += [kind(self, rank, schedule.steps.get(rank), machine) for rank in self.everyone]
        self.places, self.is_wild, self.end = [0] * self.size, [False] * self.size, None
        self._is_inside, self._had_wild = [False] * self.size, False
        self.outcomes = [{} for _ in self.everyone]
        self.left, self._came, self.has_end = {}, {}, bool(schedule.ends)
        self._place_of, self._next = [-1], 0
        self.must_return = {}

    def clock(self, rank):
        """By how much the wall clock of a rank's host is wrong."""
        now, host = self.world.now, self.hosts[rank]
        return sum(step for time, where, step in self.schedule.clocks if where == host and time <= now)

    def run(self):
        """Play it.

        Raises:
            Violation: A law does not hold.
        """
        schedule, world = self.schedule, self.world
        for rank in self.ranks:
            rank.process.start(self._program(rank))
        for time, rank in schedule.interrupts:
            world.at(time, self.ranks[rank].process.interrupt)
        if schedule.faults == ["interrupt all"] and schedule.is_at_once:
            world.at(schedule.interrupts[0][0] - 1e-9, self._note_who_is_outside)
        for time, rank, has_raised in schedule.ends:
            world.at(time, self.ranks[rank].die, has_raised)
        world.at(schedule.quiet_from + 0.3, self._quiet)
        world.run(until=2000.0)
        self._judge()

    def _quiet(self):
        for rank in self.ranks:
            rank.process.interrupt_at = None
        self.end = self.place_of(max(rank.rules.number for rank in self.ranks) + AFTERWARDS) + 1

    def _note_who_is_outside(self):
        """After a Ctrl-C that reaches all ranks, some of them in one call, the next call of the others succeeds."""
        inside = {rank.rules.number for rank in self.ranks if self._is_inside[rank.rank]}
        outside = [rank for rank in self.ranks if not self._is_inside[rank.rank]]
        if len(inside) == 1 and all(rank.rules.number <= max(inside) for rank in outside) and not self.schedule.pairs:
            self.must_return = {rank.rank: True for rank in outside}

    # The program of each rank.

    def _program(self, rank):
        mine = rank.rank
        while self.end is None or self.places[mine] < self.end:
            members = self.schedule.step(self.places[mine])
            if members is None or mine in members:
                yield from self._make_call(rank, members)
            self.places[mine] += 1

    def _make_call(self, rank, members):
        mine, place = rank.rank, self.places[rank.rank]
        if not (yield from self._think(rank, place)):
            self.is_wild[mine] = True
        peer = None if members is None else sum(members) - mine
        limit = self.world.random.uniform(*self.schedule.limits) if self.end is None else 60.0
        began, self._is_inside[mine] = self.world.now, True
        if members is None:
            self._came[mine, rank.rules.number + 1] = began
        try:
            yield from rank.call(
                None if self.is_wild[mine] else place,
                limit,
                peer,
                self.end is None and (mine, place) in self.schedule.fails,
            )
            outcome = None
        except (EasydistError, KeyboardInterrupt, Failed) as error:
            outcome = error
        self._is_inside[mine] = False
        if outcome is not None and members is None:
            self._check_raised(rank, outcome, began, limit)
        self._ended(rank, outcome, self.world.now - began - limit, members)

    def _think(self, rank, place):
        """Act as the rank does between two calls; return False if Ctrl-C ends it."""
        late = self.schedule.lates.get((rank.rank, place), 0.0)
        try:
            yield PYTHON, self.world.now + late + self.world.random.random() * self.schedule.thinks
        except KeyboardInterrupt:
            return False
        return True

    def _ended(self, rank, error, over, members):
        mine = rank.rank
        if over > SLACK + self.size / 10:
            self.fail(f"rank {mine} has waited {over:.1f} s longer than its time in call {self.places[mine]}")
        if self.is_wild[mine] and members is None:  # it may have taken the number of the others
            self.places[mine] = self.place_of(rank.rules.number)
            self.is_wild[mine] = rank.has_signal
        place = self.places[mine]
        self.outcomes[mine][place] = error
        if error is None and members is None:
            self.must_return.pop(mine, None)
            self._check_returned(rank, place)

    def place_of(self, number):
        """Return the place in the program of the call of all ranks with this number."""
        while len(self._place_of) <= number:
            if self.schedule.step(self._next) is None:
                self._place_of.append(self._next)
            self._next += 1
        return self._place_of[number]

    # What the ranks say of themselves.

    def fail(self, text):
        raise Violation(f"seed {self.schedule.seed}, {self.world.now:.3f} s: {text}")

    def signalled(self, rank):
        if not self._is_inside[rank.rank]:
            self.is_wild[rank.rank] = self._had_wild = True

    def gave_up(self, rank, kind):
        if rank.rules.peer is None and rank.rules.at == rank.rules.number:
            self.left[rank.rank, rank.rules.number] = (self.world.now, rank.rules.phase, kind)

    def died(self, rank):
        if self.schedule.store_is_in == rank.rank:
            self.store.is_gone = True

    def paired(self, rank, exchange):
        """Law 1: two ranks never pair different calls."""
        messages = yield from exchange
        mine = messages[rank.rank]
        for other, message in messages.items():
            is_same = message[0] == mine[0] and message[2] == mine[2]
            is_wild = message[1] is None or mine[1] is None
            if not is_same or (message[1] != mine[1] and not is_wild):
                self.fail(f"rank {rank.rank} in {mine[:3]} takes what rank {other} sends in {message[:3]}")
        return messages

    # Laws.

    def _check_returned(self, rank, place):
        """Law 2: nobody returns from a call that another rank has given up before."""
        for other in self.everyone:
            at, phase, kind = self.left.get((other, rank.rules.number), (NEVER, 0, ""))
            at = at if kind == "late" else NEVER
            sees = rank.sees(other)
            margin = 0.02 if sees else NEVER if self.schedule.stops else 1.0
            if other != rank.rank and phase >= rank.rules.phase - 1 and at + margin < rank.headers_at:
                self.fail(f"rank {rank.rank} returns from call {place}, which rank {other} had given up at {at:.3f} s")

    def _check_raised(self, rank, error, began, limit):
        """Law 3: nobody raises before its time, or long after it could have heard why."""
        now, mine = self.world.now, rank.rank
        if "LATE" in str(error) and now < began + limit - 1e-6 and rank.connected_at < began:
            self.fail(f"rank {mine} raises {error!r} before its time")
        is_of_interrupt = isinstance(error, RemoteError) and is_reported(error) and rank.rules.is_fresh
        if self.must_return.pop(mine, False) and is_of_interrupt:
            self.fail(f"rank {mine} raises {error!r}, although Ctrl-C has reached all ranks")
        if rank.connected_at >= began or self.schedule.stops:
            return
        for other in self.everyone:
            at, phase, kind = self.left.get((other, rank.rules.number), (NEVER, 0, ""))
            if kind == INTERRUPT and self.is_wild[mine] and not rank.rules._has_followed:  # it awaits the next call
                at = self._came.get((other, rank.rules.number + 1), NEVER)
            heard = NEVER if self.store.is_gone else max(at, began) + 3.0  # hosts hear of one another in the store
            if rank.sees(other):
                heard = min(heard, max(at, began, rank.met_at) + 1.0)
            if other != mine and phase >= rank.rules.phase and now > heard + self.size / 10:
                self.fail(f"rank {mine} hears only now that rank {other} gave up at {at:.3f} s")

    def _judge(self):
        alive = [rank for rank in self.ranks if rank.process.is_alive]
        for rank in alive:
            if not rank.process.is_done:
                self.fail(f"rank {rank.rank} waits for ever in call {self.places[rank.rank]}")
        for rank in alive:
            self._check_causes(rank.rank)
            for place in self._place_of[-2:]:
                self._check_last(rank.rank, place, len(alive) < self.size)

    def _check_causes(self, rank):
        """Law 2: who raises what others have reported is not alone."""
        others = [self.outcomes[other] for other in self.everyone if other != rank]
        latest = max((p for found in others for p, e in found.items() if e and not is_reported(e)), default=-1)
        for place, error in self.outcomes[rank].items():
            if self.schedule.step(place) is not None:  # calls of two have no order between those of all ranks
                place = self._last_of_all(place)
            is_told = error is not None and is_reported(error) and not error_is_final(error)
            if is_told and place > latest and not self._had_wild and len(others) == self._count_alive() - 1:
                self.fail(f"rank {rank} raises {error!r} in call {place}, to which nobody has anything to say")

    def _last_of_all(self, place):
        """Return the last call of all ranks before a call of two."""
        return max((at for at in range(place) if self.schedule.step(at) is None), default=-1)

    def _count_alive(self):
        return sum(rank.process.is_alive for rank in self.ranks)

    def _check_last(self, rank, place, is_final):
        error = self.outcomes[rank].get(place, "nothing")
        gone = [other.rank for other in self.ranks if not other.process.is_alive]
        is_seen = any(one.sees(other) for one in self.ranks if one.process.is_alive for other in gone)
        if is_final and is_seen and not error_is_final(error):  # the end of a rank that nobody can see is none
            self.fail(f"rank {rank} has {error!r} in call {place}, when another rank has ended")
        if not is_final and error is not None:
            self.fail(f"rank {rank} has {error!r} in call {place}, when all has been well for long")


def error_is_final(error):
    return getattr(error, "is_final", False)


def is_reported(error):
    return getattr(error, "is_reported", False)


def play(seed, kind=SimulatedRank, machine=GroupProtocol):
    """Play the schedule of a seed.

    Raises:
        Violation: A law does not hold.
    """
    Group(Schedule(seed), kind, machine).run()


__all__ = ["Group", "Schedule", "Violation", "play"]
