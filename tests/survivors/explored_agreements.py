"""All schedules of ranks that agree on the survivors, up to a number of surprises.

The ranks run in turn, each until it waits for others; if all wait, time passes. All else is a surprise: the rank is
stopped before any step and continues at any later time at which another one waits (that may be at once, or when the
others have long returned); it dies; Ctrl-C reaches it; its attempt to connect fails.
"""

from simulated_agreement import LONGEST, Agreement

from easydist.groups.membership import Membership, Read

KINDS = ("stop", "die", "interrupt", "fail")
NEVER = float("inf")


def explore(size, surprises, machine=Membership, stagger=0.0, kinds=KINDS):
    """Play all schedules, check the laws after each step, and return the number of different states.

    Args:
        size: The number of ranks.
        surprises: The number of surprises.
        machine: The class of the machines.
        stagger: ``Membership.stagger`` for them; 0 lets all ranks propose at once.
        kinds: The kinds of surprises.
    """
    world = Agreement([0.0] * size, machine, stagger)
    world.offered = None
    seen, todo = {}, [(world, number, surprises) for number in range(size)]
    while todo:
        world, number, left = todo.pop()
        while left > seen.get(key := hash((world.key(), number)), -1):
            seen[key] = left
            todo += [(after, number, left - 1) for after in surprised(world, number, kinds if left else ())]
            number = run(world, number, todo, left)
            if number is None:
                break
    return len(seen)


def run(world, number, todo, left):
    """Carry out a step, or let another rank or the time go on; return the rank that goes on, None if the ranks end."""
    if world.can_step(number):
        world.step(number)
        return number
    everyone = [(number + one) % world.size for one in range(1, world.size)]
    if world.offered != (offered := (tuple(world.written), world.ended)):
        world.offered = offered  # stopped ranks can continue here; as long as nothing changes, later is the same
        for one in [one for one in everyone if is_stopped(world, one)]:
            after = world.copy()
            after.ranks[one].wakes = after.last_fault = after.now
            todo.append((after, one, left))
    if (one := next(filter(world.can_step, everyone), None)) is not None:
        return one
    if all(rank.is_done for rank in world.ranks):
        world.check_end()
        world.check_time()
        return None
    if all(rank.is_done or is_stopped(world, one) for one, rank in enumerate(world.ranks)):
        return None
    world.pass_time(at_most=LONGEST)
    return number


def is_stopped(world, number):
    return world.ranks[number].wakes == NEVER and not world.ranks[number].is_done


def surprised(world, number, kinds):
    """Yield the worlds after one surprise in a rank that is running.

    Between the reads of two registers a rank only stops: the other surprises there are the same as before the reads.
    """
    rank = world.ranks[number]
    if not kinds or not world.can_step(number):
        return
    is_reading = bool(rank.seen) and isinstance(rank.actions[0], Read)
    can_be = {
        "die": not is_reading,
        "interrupt": not is_reading and world.can_interrupt(number),
        "fail": world.can_fail(number),
    }
    for kind in kinds:
        if can_be.get(kind):
            after = world.copy()
            getattr(after, kind)(number)
            yield after
    if "stop" in kinds:
        after = world.copy()
        after.stop(number, 0.0)
        after.ranks[number].wakes = NEVER
        yield after
