"""Simulated ranks that agree on the survivors of a group, one step at a time, and the laws that hold after each step.

A step writes one register, reads one, or is a part of connecting. The caller chooses the rank of each step: at random
(``random_agreements``) or all ranks in turn (``explored_agreements``). A register is one word here: what a reader of a
page or of a store may see of a register that is being written is tested with the page and the store.
"""

from easydist.groups.membership import (
    CONNECTING,
    LAGGING,
    Connect,
    Membership,
    Raise,
    Read,
    Reason,
    Register,
    Return,
    Write,
)

TIMEOUT, LIMIT = 2.0, 1.0
LONGEST = TIMEOUT + 3 * LIMIT
MARGIN = 0.2
"""Seconds by which a rank has to come before the time is over so that it is never left out."""


class Broken(AssertionError):
    """A law does not hold."""


def law(holds, text):
    """Check a law."""
    if not holds:
        raise Broken(text)


class Rank:
    """One rank: its machine, and the part of its last actions that it has not carried out yet.

    Attributes:
        comes: The time when it calls.
        wakes: The time when it continues after a stop.
        idle: The stamp of the world when it last read all registers, if it found nothing to do then.
        is_prompt: True until it stops, is interrupted, or is late.
        result: Its last action; None before.
    """

    def __init__(self, comes):
        self.comes, self.wakes, self.began, self.slept = comes, 0.0, None, 0.0
        self.machine, self.actions, self.seen = None, [], []
        self.reads_from = self.idle = -1
        self.reads_at = 0.0
        self.joined, self.is_prompt, self.calls, self.is_connected = None, True, 0, False
        self.result, self.is_dead = None, False

    @property
    def is_done(self):
        return self.is_dead or self.result is not None

    def copy(self):
        other = Rank.__new__(Rank)
        other.__dict__.update(self.__dict__)
        other.seen = list(self.seen)
        if self.machine is not None:
            other.machine = object.__new__(type(self.machine))
            other.machine.__dict__.update(self.machine.__dict__)
        return other

    def key(self, stamp):
        """Return everything that decides how it continues."""
        machine = None if self.machine is None else tuple(self.machine.__dict__.values())
        return (
            machine,
            tuple(self.actions),
            tuple(self.seen),
            self.reads_at if self.seen else 0.0,
            self.idle == stamp,
            self.wakes,
            self.joined,
            self.result,
            self.is_dead,
            self.is_connected,
        )


class Agreement:
    """Ranks that agree.

    Args:
        comes: The times when the ranks call.
        machine: The class of their machines.
        stagger: ``Membership.stagger`` for them.
    """

    def __init__(self, comes, machine=Membership, stagger=Membership.stagger):
        self.size, self.machine, self.stagger = len(comes), machine, stagger
        self.ranks = [Rank(time) for time in comes]
        self.written = [Register()] * self.size
        self.is_fair = stagger == Membership.stagger  # otherwise ranks may begin ballots forever
        self.now, self.stamp, self.ended, self.faults = 0.0, 0, frozenset(), 0
        self.decided, self.ballots, self.accepted, self.connected = {}, {}, {}, {}
        self.deadline, self.last_fault, self.has_stops = float("inf"), 0.0, False

    def copy(self):
        other = Agreement.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.ranks = [rank.copy() for rank in self.ranks]
        other.written = list(self.written)
        for name in ("decided", "ballots", "accepted", "connected"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def key(self):
        """Return everything that decides how it continues."""
        state = tuple(rank.key(self.stamp) for rank in self.ranks), tuple(self.written), self.now
        return *state, tuple(self.connected.items()), tuple(self.decided.items())

    # Steps.

    def can_step(self, number):
        """True if a rank has something to do: it need not look again until something has changed."""
        rank = self.ranks[number]
        if rank.is_dead or rank.result is not None or rank.wakes > self.now or rank.comes > self.now:
            return False
        return rank.idle != self.stamp

    def step(self, number):
        """Carry out the next step of a rank."""
        rank = self.ranks[number]
        if rank.began is None:
            self._begin(number, rank)
            return
        action = rank.actions[0]
        if isinstance(action, Read):
            self._read(number, rank)
        elif isinstance(action, Write):
            rank.actions = rank.actions[1:]
            if self.written[number] != action.register:
                self.written[number] = action.register
                self.stamp += 1
        elif isinstance(action, Connect):
            self._connect(number, rank, action)
        else:
            self._end(number, rank, action)

    def _begin(self, number, rank):
        rank.began, rank.slept, rank.is_connected = self.now, 0.0, False
        rank.is_prompt = rank.is_prompt and self.now < self.deadline - MARGIN
        self.deadline = min(self.deadline, self.now + TIMEOUT)
        rank.machine = self.machine(number, self.size, self.now, TIMEOUT, LIMIT, self.written[number])
        rank.machine.stagger = self.stagger
        self._take(number, rank, rank.machine.begin())

    def _read(self, number, rank):
        if not rank.seen:
            rank.reads_from, rank.reads_at = self.stamp, self.now
            if number == 0:
                rank.seen.append(self.written[0])  # its own, which it knows
        if len(rank.seen) < self.size:
            rank.seen.append(self.written[len(rank.seen)])
        if len(rank.seen) == number:
            rank.seen.append(self.written[number])
        if len(rank.seen) == self.size:
            seen, rank.seen = rank.seen, []
            rank.idle = -1
            actions = rank.machine.heard(rank.reads_at, seen, self.ended)
            if len(actions) == 1 and isinstance(actions[0], Read) and rank.machine._mine == self.written[number]:
                rank.idle = rank.reads_from
            self._take(number, rank, actions)

    def _connect(self, number, rank, action):
        """Connect if all members come within their part of the limit."""
        if rank.joined is None:
            rank.joined = self.now
            self.connected[action.attempt, number] = False
            self.stamp += 1
        elif all((action.attempt, member) in self.connected for member in action.members):
            self.connected[action.attempt, number] = True
            self._take_connected(number, True)
        elif self.now >= rank.joined + CONNECTING * LIMIT:
            self._take_connected(number, False)
        else:
            rank.idle = self.stamp

    def _take_connected(self, number, is_connected):
        rank = self.ranks[number]
        rank.joined, rank.idle, rank.is_connected = None, -1, is_connected
        self._take(number, rank, rank.machine.connected(self.now, is_connected))

    def _end(self, number, rank, action):
        if isinstance(action, Raise) and action.reason is Reason.INTERRUPTED and rank.calls < 2:
            rank.began, rank.actions, rank.seen, rank.idle = None, [], [], -1  # the user calls again
            rank.calls += 1
            return
        rank.result = action
        self.stamp += 1

    # Faults.

    def die(self, number):
        """End the process of a rank."""
        self.ranks[number].is_dead = True
        self.ended |= {number}
        self.stamp += 1
        self._harmed()

    def stop(self, number, seconds):
        """Stop a rank, which continues later."""
        rank = self.ranks[number]
        rank.wakes, rank.slept, rank.is_prompt = self.now + seconds, rank.slept + seconds, False
        self._harmed(self.now + seconds)
        self.has_stops = True

    def can_interrupt(self, number):
        """True if Ctrl-C reaches a rank in ``recover``."""
        rank = self.ranks[number]
        return not rank.is_done and rank.began is not None and not isinstance(rank.actions[-1], Return | Raise)

    def interrupt(self, number):
        """Interrupt a rank."""
        rank = self.ranks[number]
        rank.is_prompt, rank.joined, rank.seen, rank.idle = False, None, [], -1
        self._harmed()
        self._take(number, rank, rank.machine.interrupted())

    def can_fail(self, number):
        """True if a rank is connecting."""
        rank = self.ranks[number]
        return not rank.is_done and rank.joined is not None

    def fail(self, number):
        """Let a rank fail to connect."""
        self._harmed()
        self._take_connected(number, False)

    def _harmed(self, until=0.0):
        self.faults += 1
        self.last_fault = max(self.last_fault, self.now, until)

    def pass_time(self, at_most=LIMIT):
        """Continue at the next time at which a rank may have something to do."""
        times = [time for rank in self.ranks if not rank.is_done for time in self._times(rank) if time > self.now]
        law(times, "a rank waits without an end")
        self.now = min(min(times), self.now + at_most)
        self.stamp += 1

    def _times(self, rank):
        if rank.machine is None or rank.began is None:
            return [rank.comes, rank.wakes]
        machine = rank.machine
        turns = [] if machine._wished_since is None else [machine._wished_since + self.stagger * i for i in range(8)]
        joined = [] if rank.joined is None else [rank.joined + CONNECTING * LIMIT]
        lags = [machine._since + LAGGING * LIMIT, machine._since + LIMIT]
        return [rank.wakes, machine._not_before, rank.began + TIMEOUT, rank.began + LONGEST, *lags, *turns, *joined]

    # Laws.

    def _take(self, number, rank, actions):
        """Take the next actions of a rank, and check the laws."""
        for action in actions:
            if isinstance(action, Write):
                self._check_register(number, action.register)
        last = actions[-1]
        if isinstance(last, Return):
            law(number in last.members, f"rank {number} returned with members {last.members}")
            law(rank.is_connected, f"rank {number} returned without being connected")
            law(self.decided.get(rank.machine._mine.slot) == (last.members, True), f"{last.members} is not decided")
        elif isinstance(last, Raise):
            self._check_raised(number, rank, last)
        else:
            spent = self.now - rank.began - rank.slept
            law(spent <= LONGEST + MARGIN, f"rank {number} waits past its time")
        rank.actions = actions

    def _check_raised(self, number, rank, last):
        settled = next((members for members, is_settled in self.decided.values() if is_settled), ())
        if last.reason is Reason.LEFT_OUT:
            law(number not in settled or rank.calls or not rank.is_prompt, f"member {number} was left out")
            law(not rank.is_prompt, f"rank {number}, which answers in time, was left out")
        if last.reason is Reason.LATE:
            is_excused = self.faults > 2 or not rank.is_prompt
            is_excused = is_excused and (rank.wakes or self.last_fault > rank.began + TIMEOUT)
            law(is_excused or not self.is_fair, f"rank {number} is late after {self.faults} faults")

    def _check_register(self, number, register):
        _, slot, members, is_settled, ballot, accepted, value = register
        law(slot >= self.written[number].slot, f"rank {number} forgets what has been decided")
        if slot and (known := self.decided.setdefault(slot, (members, is_settled))) != (members, is_settled):
            raise Broken(f"agreement: {known} and {members, is_settled} are decided in slot {slot}")
        if slot:
            self._check_decided(slot)
        if ballot:
            law(self.ballots.setdefault((slot, ballot), number) == number, f"two ranks use ballot {ballot}")
        if accepted:
            known = self.accepted.setdefault((slot, accepted), value)
            law(known == value and type(known) is type(value), f"ballot {accepted} has two values: {known}, {value}")
            law(accepted <= ballot, f"ballot {accepted} is accepted before it has begun")

    def _check_decided(self, slot):
        """Check a decision when it is made first: validity, and that no rank that answers in time is left out."""
        members, is_settled = self.decided[slot]
        if self.connected.get(slot) is True:
            return
        self.connected[slot] = True
        if slot % 2:
            before = self.decided.get(slot - 2, (tuple(range(self.size)), False))[0]
            law(members and set(members) <= set(before), f"validity: members {before} have become {members}")
            law(all(self.ranks[one].machine is not None for one in members), f"validity: not all of {members} came")
            for one in set(before) - set(members):
                self._check_left_out(one)
        elif is_settled:
            there = all(self.connected.get((slot - 1, one)) is True for one in members)
            law(there, f"validity: members {members} are not all connected")

    def _check_left_out(self, number):
        rank = self.ranks[number]
        is_prompt = rank.is_prompt and (rank.began is not None or rank.comes < self.deadline - MARGIN)
        law(rank.is_dead or not is_prompt, f"rank {number}, which answers in time, was left out")

    def check_end(self):
        """Check the laws that hold when all ranks have returned, raised or ended."""
        for number, rank in enumerate(self.ranks):
            if rank.is_dead or not rank.is_prompt or self.faults > 2 or not self.is_fair:
                continue
            law(isinstance(rank.result, Return), f"rank {number}, which answers in time, got {rank.result}")

    def check_time(self):
        """Check that no rank waited for one that had ended, left or failed, if each step takes no time."""
        latest = max(rank.comes for rank in self.ranks)
        # After each fault the members may have to find out that they cannot connect, and each may wait for its turn.
        longest = latest + self.faults * CONNECTING * LIMIT + (self.faults + 1) * 3 * self.size * self.stagger + MARGIN
        if not self.has_stops and latest < self.deadline - MARGIN:
            law(self.now <= longest, f"it took {self.now:.1f} s, although no rank was late")
