"""Random schedules of ranks that agree on the survivors: delays, deaths, stops and Ctrl-C, all drawn from a seed."""

import random

from simulated_agreement import LONGEST, Agreement, law

from easydist.groups.membership import Membership

SIZES = [1] + [2] * 12 + [3] * 14 + [4] * 6 + [5, 6, 8]
FAULTS = ["die", "die", "stop", "stop", "interrupt", "fail"]


class Schedule:
    """One schedule.

    Args:
        seed: Draws it.
        machine: The class of the machines.
        has_faults: False to draw no faults.
    """

    def __init__(self, seed, machine=Membership, has_faults=True):
        draw = self.draw = random.Random(seed)
        size = draw.choice(SIZES)
        latest = 1.5 * LONGEST if has_faults and draw.random() < 0.15 else draw.choice([0.0, 0.3])
        self.order = [*range(size), *range(size)]
        stagger = draw.choice([0.0, 0.0, Membership.stagger, Membership.stagger])
        self.world = Agreement(
            [draw.uniform(0, latest) for _ in range(size)], machine, stagger if has_faults else Membership.stagger
        )
        self.pace = draw.choice([0.0, 1e-4, 0.02 / size**2])
        self.stays = draw.choice([0.0, 0.5, 0.9, 0.97])
        count = draw.choice([0, 1, 1, 2, 2, 3, 4]) if has_faults else 0
        span = draw.choice([10, 40, 100]) * size
        self.faults = sorted((draw.randrange(span), draw.choice(FAULTS), draw.randrange(size)) for _ in range(count))

    def play(self):
        """Play the schedule to its end, check the laws, and return the world."""
        world, draw, steps, number = self.world, self.draw.random, 0, 0
        while True:
            if number < 0 or draw() >= self.stays or not world.can_step(number):
                first = int(draw() * world.size)
                number = next((one for one in self.order[first : first + world.size] if world.can_step(one)), -1)
            if number >= 0:
                world.step(number)
            elif all(rank.is_done for rank in world.ranks):
                break
            else:
                world.pass_time()
            while self.faults and self.faults[0][0] <= steps:
                self.harm(*self.faults.pop(0)[1:])
            world.now += self.pace
            steps += 1
            if steps == 3000 * world.size:
                law(not world.is_fair, "the ranks do not come to an end")
                return world
        world.check_end()
        return world

    def harm(self, fault, number):
        world, rank = self.world, self.world.ranks[number]
        if fault == "fail":
            connecting = [one for one in range(world.size) if world.can_fail(one)]
            if connecting:
                world.fail(self.draw.choice(connecting))
        elif rank.is_done:
            return
        elif fault == "die":
            world.die(number)
        elif fault == "stop":
            world.stop(number, self.draw.choice([0.05, 0.5, 2.0, 8.0]) * self.draw.random())
        elif world.can_interrupt(number):
            world.interrupt(number)


def play(seed, machine=Membership, has_faults=True):
    """Play one schedule."""
    return Schedule(seed, machine, has_faults).play()
