"""A simulation of ranks that agree on the members of a group, with delays, deaths, stops and interrupts, from a seed.

Every read of a register, every write and every step of connecting is one step of a schedule that a seed draws.
"""

import random

from easydist.groups.membership import Connect, Failure, Membership, Raise, Read, Register, Return, Write

TIMEOUT, LIMIT = 2.0, 1.0
LONGEST = TIMEOUT + 3 * LIMIT


class Rank:
    """One rank: its machine, and the pending part of its last actions."""

    def __init__(self, rank, size, machine, comes):
        self.rank, self.size, self.machine, self.comes = rank, size, machine, comes
        self.wakes = self.began = comes
        self.slept = 0.0
        self.actions, self.seen, self.unread = None, {}, []
        self.written = Register()
        self.result = None
        self.is_dead = self.has_called_again = False
        self.joins = None

    @property
    def is_done(self):
        return self.is_dead or self.result is not None


class World:
    """Ranks that call ``recover`` at random times, while some are killed, stopped and interrupted.

    Args:
        seed: The seed of the schedule.
        machine: The class of the machines.
        faults: 0 for no faults; 1 for all kinds of faults.
    """

    def __init__(self, seed, machine=Membership, faults=1.0):
        self.draw = random.Random(seed)
        size = 64 if self.draw.random() < 0.02 else self.draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 8, 12])
        late = self.draw.random() < 0.3 * faults
        self.now, self.machine = 0.0, machine
        self.risk = faults * self.draw.choice([0.0, 0.002, 0.01, 0.05])
        self.pace = 10 ** self.draw.uniform(-3, -1 if faults else -2)
        self.ranks = [Rank(r, size, None, self.draw.uniform(0, 1.5 * LONGEST if late else 0.3)) for r in range(size)]
        self.turn = self.draw.choice([0.0, 0.01, Membership.turn]) if faults else Membership.turn
        self.connecting = {}
        self.agreed = {}

    def play(self):
        """Play the schedule, and return the ranks."""
        while running := [rank for rank in self.ranks if not rank.is_done]:
            ready = [rank for rank in running if rank.wakes <= self.now]
            if not ready:
                self.now = min(rank.wakes for rank in running)
                continue
            self.now += self.draw.expovariate(1) * self.pace / len(ready)
            self.step(self.draw.choice(ready))
        return self.ranks

    def step(self, rank):
        if self.draw.random() < self.risk / 4:
            rank.is_dead = True
        elif rank.actions and self.draw.random() < self.risk / 2:
            self.sleep(rank, self.draw.choice([0.05, 0.5, 2, 8]) * self.draw.random())
        elif rank.actions and self.draw.random() < self.risk / 4:
            rank.actions = rank.machine.interrupted()
        else:
            self.act(rank)

    def sleep(self, rank, seconds):
        rank.wakes = self.now + seconds
        rank.slept += seconds

    def act(self, rank):
        if rank.actions is None:
            rank.began, rank.slept = self.now, 0.0
            rank.machine = self.machine(rank.rank, rank.size, self.now, TIMEOUT, LIMIT, rank.written)
            rank.machine.turn = self.turn
            rank.actions = rank.machine.begin()
            return
        action, *rest = rank.actions
        if isinstance(action, Write):
            rank.written, rank.actions = action.register, rest
        elif isinstance(action, Read):
            self.read(rank)
        elif isinstance(action, Connect):
            self.connect(rank, action)
        elif isinstance(action, Raise) and action.failure is Failure.INTERRUPTED and self.draw.random() < 0.5:
            self.again(rank)
        else:
            self.end(rank, action)

    def again(self, rank):
        """Let the user call again."""
        rank.actions, rank.seen, rank.unread, rank.joins, rank.has_called_again = None, {}, [], None, True
        self.sleep(rank, self.draw.random())

    def end(self, rank, action):
        rank.result = action
        assert self.now - rank.began - rank.slept <= LONGEST + 20 * self.pace + 1, "it has waited past its time"

    def read(self, rank):
        """Read some of the registers that have not been read in this round."""
        if not rank.seen and not rank.unread:
            rank.unread = list(range(rank.size))
            self.draw.shuffle(rank.unread)
        for _ in range(self.draw.randint(1, rank.size)):
            if rank.unread:
                number = rank.unread.pop()
                rank.seen[number] = self.ranks[number].written
        if rank.unread:
            return
        registers, rank.seen = [rank.seen[r] for r in range(rank.size)], {}
        ended = {other.rank for other in self.ranks if other.is_dead}
        rank.actions = rank.machine.heard(self.now, registers, ended)

    def connect(self, rank, action):
        """Connect if all members come within half of the limit."""
        assert self.agreed.setdefault(action.attempt, action.members) == action.members, "two memberships in one slot"
        there = self.connecting.setdefault(action, set())
        if rank.joins is None:
            rank.joins = self.now
            there.add(rank.rank)
        if len(there) == len(action.members) and self.draw.random() >= self.risk / 10:
            is_connected = True
        elif self.now >= rank.joins + LIMIT / 2 or len(there) == len(action.members):
            is_connected = False
        else:
            return
        rank.joins = None
        rank.actions = rank.machine.connected(self.now, is_connected)


def check(seed, machine=Membership, faults=1.0):
    """Play one schedule, check its final state, and return the outcomes of the ranks."""
    ranks = World(seed, machine, faults).play()
    returned = {rank.rank: rank.result.members for rank in ranks if isinstance(rank.result, Return)}
    assert len(set(returned.values())) <= 1, f"two memberships: {returned}"
    for rank, members in returned.items():
        assert rank in members, f"rank {rank} returned with {members}"
    for rank in ranks:
        if returned and isinstance(rank.result, Raise) and rank.result.failure is Failure.LEFT_OUT:
            is_out = rank.rank not in next(iter(returned.values()))
            assert is_out or rank.has_called_again, f"rank {rank.rank} was left out, but is a member"
    if faults == 0:
        everyone = tuple(range(len(ranks)))
        assert returned == dict.fromkeys(everyone, everyone), f"all had come: {returned}"
    return [rank.result for rank in ranks]
