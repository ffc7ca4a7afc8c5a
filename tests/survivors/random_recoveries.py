"""Random schedules of processes that recover a group: deaths, stops, Ctrl-C, and stores that freeze or end."""

import random

import simulated_recovery as simulation
from recovery_mutants import mutated
from simulated_agreement import law
from simulated_recovery import LIMIT, TIMEOUT, Process, SimulatedMonitor, Store

from easydist.errors import CollectiveTimeout, EasydistError, LeftOutError, PeerLostError
from easydist.groups.membership import CONNECTING, Stage

RECOVERING, FIRST_MEETING = "easydist.groups.recovering", "easydist.groups.first_meeting"
REGISTERS = "easydist.groups.registers"
FAULTS = ["die", "die", "stop", "interrupt", "freeze", "fail", "end"]
PLACES = [("one", 0), ("one", 0), ("one", None), ("two", None), ("two", 0)]
"""One host or two, and the rank that serves the store; None for the launcher."""


def loaded(mutants=None):
    """Load the modules, with faults by their names, for the simulation."""
    mutants = mutants or {}
    recovering, first_meeting, registers = (
        mutated(name, mutants.get(name)) for name in (RECOVERING, FIRST_MEETING, REGISTERS)
    )
    recovering.StoreRegisters, recovering.are_on_one_host = registers.StoreRegisters, registers.are_on_one_host
    return simulation.simulated(recovering, first_meeting)


class Schedule:
    """One schedule.

    Args:
        seed: Draws it.
        modules: The library's modules (``loaded``).
    """

    longest = 4 * (TIMEOUT + 3 * LIMIT) + 10.0

    def __init__(self, seed, modules):
        draw = self.draw = random.Random(seed)
        self.recovering, self.first_meeting = modules
        self.size = draw.choice([2, 2, 3, 3, 3, 4])
        self.kind, server = draw.choice(PLACES)
        self.meeting = draw.choice(["met", "met", "meet", "never"])
        self.stays, self.steps, self.failing = draw.choice([0.3, 0.7, 0.9]), 0, 0
        self.is_frozen = self.has_stops = False
        count = draw.choice([0, 1, 1, 2, 2, 3])
        span = draw.choice([20, 60, 150]) * self.size
        self.faults = sorted(
            (draw.randrange(span), draw.choice(FAULTS), draw.randrange(self.size)) for _ in range(count)
        )
        self.count = 0
        self.comes = [draw.uniform(0, draw.choice([0.0, 0.3, 0.3, 6.0])) for _ in range(self.size)]
        self.world = simulation.begin(self)
        hosts = ["a" if self.kind == "one" else "ab"[draw.randrange(2)] for _ in range(self.size)]
        self.hosts = hosts
        self.world.processes = [Process(rank, host, self.live) for rank, host in enumerate(hosts)]
        self.store = Store(None if server is None else self.world.processes[server])
        for process, comes in zip(self.world.processes, self.comes, strict=True):
            process.wakes = comes
            process.is_prompt = comes < 0.5

    @property
    def needs_store(self):
        """True if the processes agree in the store."""
        return self.kind == "two" or self.meeting != "met"

    # The processes.

    def live(self, process):
        """Meet the others, and recover the group."""
        monitor = SimulatedMonitor(process, self.size)
        first = self.first_meeting.FirstMeeting(self.store, monitor)
        has_met = self.meeting == "met"
        if has_met:
            simulation.introduce(monitor)
            self.store.values["met"] = b"yes"
        elif self.meeting == "meet":
            try:
                first.announce()
                simulation.meet(monitor)
                has_met = first.conclude() is not False
            except (EasydistError, KeyboardInterrupt):
                pass
        return self.recover(process, monitor, has_met)

    def recover(self, process, monitor, has_met):
        """Recover, again after Ctrl-C."""
        recovery, process.began = None, self.world.now
        while True:
            try:
                if recovery is None:
                    self.notice(monitor)
                    met = self.look(process, monitor, has_met)
                    recovery = self.recovering.Recovery(monitor, self.store, met)
                process.slept = 0.0
                began = self.world.now
                found = recovery.run(TIMEOUT, simulation.connect)
                self.check_spent(process, began)
                self.check_recovered(process, recovery, found)
                return found
            except KeyboardInterrupt:
                process.calls += 1
                if recovery is not None and process.page and process.interrupts == process.calls:
                    law(process.register.stage == Stage.LEFT, f"rank {process.rank} does not say that it leaves")
                if process.calls > 2:
                    return None
            except EasydistError as error:
                if recovery is not None:
                    self.check_spent(process, began)
                return error

    def check_spent(self, process, began):
        spent = self.world.now - began - process.slept
        law(spent < TIMEOUT + 3 * LIMIT + 1.0, f"rank {process.rank} waited for {spent:.1f} s")

    def look(self, process, monitor, has_met):
        """Ask the store whether the ranks have met, for no longer than the time limit."""
        process.slept, began = 0.0, self.world.now
        try:
            return self.first_meeting.FirstMeeting(self.store, monitor).look(has_met, TIMEOUT)
        finally:
            spent = self.world.now - began - process.slept
            law(spent < TIMEOUT + 1.0 or process.is_dead, f"rank {process.rank} looked for {spent:.1f} s")

    def notice(self, monitor):
        """Let a process have noticed that a rank of another host is lost."""
        for other in self.world.processes:
            if other.is_dead and other.host != self.world.current.host:
                monitor.broken = PeerLostError("gather: a rank is lost")
                monitor.broken.rank = other.rank

    def check_recovered(self, process, recovery, found):
        law(found.made[:2] == (found.made[0], found.members), "the members are those that connected")
        law(found.hosts == tuple(self.hosts[one] for one in found.members), f"hosts {found.hosts} of {found.members}")
        law(recovery.monitor.is_retired, "the monitor of the old group goes on")
        try:
            recovery.run(TIMEOUT, simulation.connect)
        except RuntimeError as error:
            law("already been recovered" in str(error), str(error))
        else:
            law(False, "a group is recovered twice")

    # What happens to them.

    def choose(self, ready):
        return ready[int(self.draw.random() * len(ready))]

    def lets_others_run(self, world):
        self.steps += 1
        while self.faults and self.faults[0][0] <= self.steps:
            _, fault, rank = self.faults.pop(0)
            if not world.processes[rank].is_done:
                self.count += 1
                getattr(self, fault)(world, world.processes[rank])
        return self.draw.random() >= self.stays

    def die(self, world, process):
        world.die(process)

    def stop(self, world, process):
        seconds = self.draw.choice([0.1, 1.0, 4.0, 8.0])
        process.wakes = max(process.wakes, world.now) + seconds
        process.slept, process.is_prompt, self.has_stops = process.slept + seconds, False, True

    def interrupt(self, world, process):
        process.surprise, process.is_prompt = KeyboardInterrupt(), False
        process.interrupts += 1
        process.wakes = min(process.wakes, world.now)

    def freeze(self, world, process):
        self.store.frozen = max(world.now, self.store.frozen) + self.draw.choice([0.2, 2.0, 20.0])
        self.is_frozen = True

    def end(self, world, process):
        self.store.is_gone = self.store.is_gone or self.store.server is None

    def fail(self, world, process):
        self.failing += 1

    def fails_to_connect(self):
        """True if the next attempt to connect fails on the running process."""
        if self.failing:
            self.failing -= 1
            raise RuntimeError("it cannot connect")
        return False

    # Laws.

    def play(self):
        """Play the schedule to its end, and check the laws."""
        self.world.play()
        for process in self.world.processes:
            if (failure := simulation.failure_of(process)) is not None:
                raise failure
        found = {
            one.rank: one.outcome
            for one in self.world.processes
            if hasattr(one.outcome, "members") and not isinstance(one.outcome, LeftOutError)
        }
        law(len({one.members for one in found.values()}) <= 1, f"agreement: {found}")
        law(len({one.made for one in found.values()}) <= 1, f"members have met in different places: {found}")
        for rank, one in found.items():
            law(rank in one.members, f"rank {rank} got {one}")
        for process in self.world.processes:
            self.check(process)
        self.check_time()
        return self.world

    def check_time(self):
        """Check that nobody waited for a process that had ended: with pages and a single fault, it takes no second."""
        is_quick = not self.needs_store and self.count <= 1 and not self.has_stops and max(self.comes) < 0.5
        longest = max(self.comes) + CONNECTING * LIMIT + 1.0
        for process in self.world.processes:
            law(not is_quick or process.ended_at < longest, f"rank {process.rank} took {process.ended_at:.1f} s")

    def check(self, process):
        if process.is_dead or isinstance(process.outcome, self.recovering.Recovered):
            return
        what = f"rank {process.rank} got {process.outcome!r} after {self.count} faults"
        is_sure = process.is_prompt and self.count <= 2 and not (self.is_frozen and self.needs_store)
        if isinstance(process.outcome, LeftOutError):
            law(not is_sure, what)
        elif isinstance(process.outcome, PeerLostError):
            law(self.store.is_gone or self.is_frozen, what)
            law(self.needs_store, what)
        else:
            law(not is_sure or (isinstance(process.outcome, CollectiveTimeout) and self.count == 2), what)


def play(seed, modules):
    """Play one schedule."""
    return Schedule(seed, modules).play()
