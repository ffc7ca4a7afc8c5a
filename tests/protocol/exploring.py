"""Plays all schedules of a few ranks in which few things go wrong, each at any step up to a depth.

A step is one event of the simulated world: a rank goes on until it waits, a message comes, the watchdog looks. A fault
may follow each of them, on each rank. Two states that differ in times only count as the same state, so that the same
fault is not played in both; delays are those of one seed. ``explore`` says how many schedules it has played.
"""

import sources
from schedules import Group, Schedule

KINDS = ("interrupt", "kill", "raise", "freeze", "silence", "end")
"""Ctrl-C; SIGKILL; an exception; a rank stops and returns; the store is silent for a while; the store ends."""

OF_STORE = ("silence", "end")

WHILE = 1.5
"""Seconds for which a rank or the store stops: longer than the limit of the calls."""

PROGRAM = (None, (0, 1), None, None)
"""The steps of the program, again and again: calls of all ranks, and one of two."""


class Script(Schedule):
    """A schedule that is given, not drawn.

    Args:
        size: The number of ranks.
        way: "shm", "gloo" or "hosts".
        plan: What goes wrong: the step, the kind, and the rank.
        seed: Draws the delays.
    """

    afterwards = 3

    def __init__(self, size, way, plan=(), seed=0):
        self.seed, self.size, self.way, self.plan = seed, size, way, tuple(plan)
        self.hosts = [rank % 2 if way == "hosts" else 0 for rank in range(size)]
        self.quiet_from, self.thinks, self.limits, self.group_limit = 0.2, 0.02, (0.6, 0.6), 0.6
        self.pairs, self.comms, self.store_is_in, self.faults = 0.25, [], None, ["explored"]
        self._clear()

    def __str__(self):
        return f"Script({self.size}, {self.way!r}, {self.plan}, {self.seed})"

    def step(self, place):
        return PROGRAM[place % len(PROGRAM)]


class Run:
    """One schedule.

    Args:
        script: The schedule.
        code: The loaded modules.
        until: The last step whose state is of interest; the first is that after the last fault.
    """

    def __init__(self, script, code, until=0):
        self._group, self._plan, self._steps, self._until = Group(script, code), list(script.plan), 0, until
        self.states = []

    def play(self):
        """Play it.

        Raises:
            Violation: A law does not hold.
        """
        self._group.run(self._after_step)

    def _after_step(self):
        self._group.laws.check()
        self._steps += 1
        while self._plan and self._plan[0][0] == self._steps:
            self._go_wrong(*self._plan.pop(0)[1:])
        if not self._plan and self._steps <= self._until:
            self.states.append((self._steps, hash(state(self._group))))

    def _go_wrong(self, kind, rank):
        group = self._group
        if kind == "silence":
            group.schedule.stops.append((group.world.now, group.world.now + WHILE))
        elif kind == "end":
            group.store.is_gone = True
        elif kind == "freeze":
            group.freeze(rank, WHILE)
        elif kind == "interrupt":
            group.ranks[rank].process.interrupt()
        else:
            group.ranks[rank].die(kind == "raise")


def state(group):
    """Return the state of a group without its times, as a value."""
    return (group.store.state(), *(_state_of(rank) for rank in group.ranks))


_RULES = ("number", "at", "phase", "peer", "was_interrupted", "is_awaited", "is_fresh", "is_promised", "_has_followed")
_RULES += ("_turn", "_meetings", "_left_at")


def _state_of(rank):
    monitor, process = rank.monitor, rank.process
    broken = monitor.broken
    values = [getattr(monitor, name) for name in _RULES]
    values += [
        monitor.waits % 2,
        str(monitor._met),
        str(monitor._turns),
        str(monitor._before),
        str(monitor._over),
        str(monitor._looks),
    ]
    values += [broken and (type(broken), broken.is_final, broken.is_earlier, broken.is_reported)]
    values += [
        process.is_alive,
        process.has_ended,
        process.is_stopped,
        rank.has_signal,
        rank.has_met,
        rank.is_connected,
    ]
    return (*values, len(monitor._log), tuple(_position(process.body)), process.page.report(monitor.entry)[:20])


def _position(body):
    """Yield where a generator is, and those to which it delegates."""
    while body is not None and hasattr(body, "gi_frame"):
        if body.gi_frame is not None:
            yield body.gi_code.co_name, body.gi_frame.f_lasti
        body = body.gi_yieldfrom


def explore(size, way, depth, faults=1, apart=10, mutant=None):
    """Play all schedules with up to a number of faults; return how many these are.

    Args:
        size: The number of ranks.
        way: As for ``Script``.
        depth: The last step that the first fault may follow.
        faults: The most faults.
        apart: The most steps between two faults.
        mutant: A fault to put into the code.

    Raises:
        Violation: A law does not hold.
    """
    code, seen, todo, count = sources.load(mutant), set(), [()], 0
    while todo:
        plan, count = todo.pop(), count + 1
        may_add = len(plan) < faults
        run = Run(Script(size, way, plan), code, 0 if not may_add else plan[-1][0] + apart if plan else depth)
        run.play()
        for step, known in run.states:
            for kind in KINDS:
                for rank in (None,) if kind in OF_STORE else range(size):
                    if (key := (known, kind, rank)) not in seen:
                        seen.add(key)
                        todo.append((*plan, (step, kind, rank)))
    return count
