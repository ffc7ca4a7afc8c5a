"""The laws that every schedule has to keep, in one place; ``Laws.check`` is called after every step.

1.  Two ranks never pair different calls.
2.  No rank returns from a call that another rank gave up before its data was complete, or has not begun.
3.  No rank raises an error about a call that is not its own.
4.  No rank waits past its time, or raises before it, or long after it could have heard why.
5.  An error names only ranks that have ended, left, failed, been interrupted, or not come.
6.  Numbers and phases never fall, and what is final stays so.
7.  When nothing goes wrong any more, all ranks return from the same calls again, or all know that the group is lost.
"""

from typing import NamedTuple

from simulated_world import NEVER, Violation, running

from easydist.errors import CollectiveTimeout, PeerLostError, RemoteError
from easydist.liveness.report import INTERRUPT, kind_of

SLACK = 5.0
"""Seconds by which a call may last longer than its limit: looks, answers that do not come, and broken connections."""


ASKING = 0.6
"""Seconds for which a rank may ask a silent store between its last look and its error: ``PATIENCE`` and a bit."""


class GaveUp(NamedTuple):
    """A rank that has given a call up.

    Attributes:
        by: The rank.
        time: When.
        phase: Its phase.
        at: The call, as in ``Report.number``.
        pair: The two ranks of that call; None if all take part.
        kind: The kind of its report.
        is_final: True if it is for good.
    """

    by: int
    time: float
    phase: int
    at: float
    pair: frozenset | None
    kind: str
    is_final: bool


class Laws:
    """The laws, and the history of a run that is needed to judge it.

    Args:
        group: The group.
    """

    def __init__(self, group):
        self.group, self.world, size = group, group.world, group.size
        self.is_over = False
        self.given_up, self.leavers = [], set()
        self._left = {}
        self._inside, self._had_wild = [None] * size, False
        self._ends_at, self._is_limited, self._bodies_end = [NEVER] * size, [True] * size, 0.0
        self._came, self._must_return, self._disturbed = {}, set(), set()
        self._counted = [0.0] * size
        self._outcomes = [{} for _ in range(size)]
        self._operating = set()
        self._stopped = [0.0] * size
        self._seen = [(0, 0, False)] * size

    def fail(self, text):
        raise Violation(f"{self.group.schedule}, {self.world.now:.3f} s: {text}")

    # After every step.

    def check(self):
        """Check the rank that has just made a step."""
        rank = running.process.pid - 1
        self._check_deadline(self.group.ranks[rank])
        monitor = self.group.ranks[rank].monitor
        seen = (monitor.number, monitor.phase, monitor.broken is not None and monitor.broken.is_final)
        if seen != self._seen[rank]:
            self._check_growth(rank, self._seen[rank], seen)
            if monitor.number != self._seen[rank][0]:
                self._counted[rank] = self.world.now
            self._seen[rank] = seen

    def _check_deadline(self, rank):
        """Law 4: nobody waits past its time, also not for the store; a process that has ended no longer waits."""
        if not rank.process.is_alive:
            return
        if max(self.world.now, rank.process.client.busy_until) > self._ends_at[rank.rank]:
            self.fail(f"rank {rank.rank} waits longer than its time in call {self.group.places[rank.rank]}")

    def _check_growth(self, rank, before, seen):
        if any(new < old for new, old in zip(seen, before, strict=True)):
            self.fail(f"rank {rank} falls from (number, phase, final) {before} to {seen}")

    # What the ranks do.

    def begins(self, rank, limit, members):
        """A rank begins a call."""
        now, mine = self.world.now, rank.rank
        self._inside[mine], self._is_limited[mine] = (now, limit or rank.monitor.timeout), limit is not None
        begins = now if limit else max(now, self._bodies_end)
        self._ends_at[mine] = begins + self._inside[mine][1] + SLACK + self.group.size / 10
        if members is None:
            self._came[mine, rank.monitor.number + 1] = now

    def gave_up(self, rank, monitor, error, kind):
        """A rank gives up a call, or outside of calls."""
        if self.is_over or monitor is not rank.monitor:
            return
        number, kind = monitor.number_of_report, kind or kind_of(error)
        if error.is_earlier:
            return
        pair = None if monitor.origin[0] is None else frozenset((rank.rank, monitor.origin[0]))
        left = GaveUp(rank.rank, self.world.now, monitor.phase, number, pair, kind, error.is_final)
        self.given_up.append(left)
        if rank.has_all and self._inside[rank.rank] is not None and kind != INTERRUPT:
            self.fail(f"rank {rank.rank} gives call {number} up, for which it has all data")
        if pair is None and number == monitor.number:
            self._left[rank.rank, monitor.number] = left

    def leaves(self, rank):
        """A rank leaves the group for good."""
        self.leavers.add(rank.rank)

    def stops(self, rank, seconds):
        """A rank is stopped for some seconds, in which it cannot do anything in time."""
        self._ends_at[rank] += seconds
        self._stopped[rank] += seconds

    def runs_body(self, seconds):
        """A rank runs a body, in which the group's limit does not count."""
        self._bodies_end = max(self._bodies_end, self.world.now + seconds)
        for rank, is_limited in enumerate(self._is_limited):
            if not is_limited and self._ends_at[rank] < NEVER:
                limit = self.group.ranks[rank].monitor.timeout + SLACK + self.group.size / 10
                self._ends_at[rank] = max(self._ends_at[rank], self._bodies_end + limit)

    def begins_operation(self, rank, limit):
        """A rank begins an operation of a communicator."""
        now = self.world.now
        self._inside[rank.rank], self._is_limited[rank.rank] = (now, limit), True
        self._operating.add(rank.rank)
        self._ends_at[rank.rank] = now + limit + SLACK

    def ended_operation(self, rank, comm, error):
        """A rank returns from an operation of a communicator, or raises: laws 3, 4 and 5."""
        (began, limit), now = self._inside[rank.rank], self.world.now
        self._check_deadline(rank)
        self._inside[rank.rank], self._ends_at[rank.rank] = None, NEVER
        self._operating.discard(rank.rank)
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if isinstance(error, CollectiveTimeout) and not is_reported(error):
            if now < began + limit - 1e-6:
                self.fail(f"rank {rank.rank} raises {error!r} in {comm} before its time")
        elif not any(other.has_parted for other in comm.others):
            self.fail(f"rank {rank.rank} raises {error!r} in {comm}, in which all are well")
        if isinstance(error, PeerLostError) and not is_reported(error) and error.rank is not None:
            other = self.group.comms[comm.index][comm.members[error.rank]]
            if not other.has_parted:
                self.fail(f"rank {rank.rank} raises {error!r}, but rank {other.owner.rank} is well")

    def signalled(self, rank):
        """Ctrl-C reaches a rank."""
        self._disturbed.add(rank.rank)
        if self._inside[rank.rank] is None or rank.rank in self._operating:
            self.group.is_wild[rank.rank] = self._had_wild = True

    def note_who_is_outside(self):
        """After a Ctrl-C that reaches all ranks, some of them in one call, the next call of the others succeeds."""
        ranks = self.group.ranks
        inside = {rank.monitor.number for rank in ranks if self._inside[rank.rank] is not None}
        outside = [rank for rank in ranks if self._inside[rank.rank] is None]
        # A rank further behind first comes to calls that the others gave up before, and raises what ended those.
        if len(inside) == 1 and all(0 <= max(inside) - rank.monitor.number <= 1 for rank in outside):
            self._must_return = set() if self.group.schedule.pairs else {rank.rank for rank in outside}

    def paired(self, rank, messages):
        """Law 1, for messages that have come."""
        mine = messages[rank.rank]
        for other, message in messages.items():
            is_same = message[0] == mine[0] and message[2] == mine[2]
            is_wild = message[1] is None or mine[1] is None
            if not is_same or (message[1] != mine[1] and not is_wild):
                self.fail(f"rank {rank.rank} in {mine[:3]} takes what rank {other} sends in {message[:3]}")

    def check_time_left(self, rank):
        """Law 4, for what is left of a call."""
        began, limit = self._inside[rank.rank]
        expected, left = max(0.0, began + limit - self.world.now), rank.monitor.left
        is_right = left is not None and (abs(left - expected) < 1e-6 or not self._is_limited[rank.rank])
        if not is_right:
            self.fail(f"rank {rank.rank} has {left} s left, and not {expected} s")

    def ended(self, rank, error, members):
        """A rank returns from a call, or raises."""
        mine, (began, limit) = rank.rank, self._inside[rank.rank]
        self._check_deadline(rank)
        if rank.monitor.left is not None:
            self.fail(f"rank {mine} has {rank.monitor.left} s left outside of calls")
        self._inside[mine], self._ends_at[mine] = None, NEVER
        if error is not None:
            self._check_named(rank, error)
            self._check_is_own(rank, error, members)
        if error is not None and members is None:
            self._check_time(rank, error, began, limit)

    def outcome(self, rank, place, error, members):
        """The same, with the place in the program."""
        self._outcomes[rank.rank][place] = error
        if isinstance(error, Exception) and not is_reported(error):
            self._disturbed.add(rank.rank)
        if error is None and members is None:
            self._must_return.discard(rank.rank)
            self._check_returned(rank, place)

    # The laws about one outcome.

    def _check_returned(self, rank, place):
        """Law 2: nobody returns from a call that another rank has given up before, or has not begun."""
        number = rank.monitor.number
        for other in self.group.everyone:
            if self.group.ranks[other].monitor.number < number:
                self.fail(f"rank {rank.rank} returns from call {place}, which rank {other} has not begun")
            left = self._left.get((other, number))
            if left is None or left.kind != "late" or other == rank.rank:
                continue
            margin = 0.02 if rank.sees(other) else 0.15  # by then a late rank notices that a connection has broken
            if left.phase >= rank.monitor.phase - 1 and left.time + margin < rank.headers_at:
                self.fail(
                    f"rank {rank.rank} returns from call {place}, which rank {other} gave up at {left.time:.3f} s"
                )

    def _check_is_own(self, rank, error, members):
        """Law 3: what another rank has reported is about this call or a later one."""
        monitor = rank.monitor
        if is_reported(error) and error_is_final(error):
            self._check_is_needed(rank, error)
        if not is_reported(error) or error_is_final(error):
            return
        pair = None if members is None else frozenset(members)
        for left in self.given_up:
            is_between_others = left.pair is not None and pair is not None and left.pair != pair
            is_later = left.at > monitor.at or (left.at == monitor.at and not is_between_others)
            is_later = is_later or (pair is not None and not monitor.is_fresh)  # it cannot begin the same call again
            if left.by != rank.rank and left.phase >= monitor.phase - 1 and is_later:
                return
        self.fail(f"rank {rank.rank} raises {error!r} in call {monitor.at}, which no other rank has given up")

    def _check_is_needed(self, rank, error):
        """Law 3: what a rank has sent before it left for good still counts, at least in memory."""
        others = [left for left in self.given_up if left.by != rank.rank]
        in_calls = [left for left in others if left.at <= rank.monitor.at or left.at % 1 == 0]  # final: for all calls
        has_loss = in_calls or not all(one.process.is_alive for one in self.group.ranks)
        if rank.is_in_memory and not has_loss and rank.monitor.peer is None:
            self.fail(f"rank {rank.rank} raises {error!r} in call {rank.monitor.at}, which all others have made")

    def _check_time(self, rank, error, began, limit):
        """Law 4: nobody raises before its time, or long after it could have heard why."""
        now, mine = self.world.now, rank.rank
        is_late = isinstance(error, CollectiveTimeout) and not is_reported(error)
        if is_late and now < began + limit - 1e-6 and rank.connected_at < began:
            self.fail(f"rank {mine} raises {error!r} before its time")
        is_of_interrupt = isinstance(error, RemoteError) and is_reported(error) and rank.monitor.is_fresh
        if mine in self._must_return and is_of_interrupt:
            self.fail(f"rank {mine} raises {error!r}, although Ctrl-C has reached all ranks")
        self._must_return.discard(mine)
        if rank.connected_at >= began:
            return
        for other in self.group.ranks:
            if other is not rank and rank.sees(other.rank):
                self._check_end(rank, other, began)
        if self.group.schedule.stops:
            return
        for other in self.group.everyone:
            if other != mine and (left := self._left.get((other, rank.monitor.number))) is not None:
                self._check_promptness(rank, left, began)

    def _check_end(self, rank, other, began):
        """Law 4, for the end of a rank that can be seen, and had not begun this call or not sent its data.

        The first data of a call may have come from a rank that has ended since. Then only the wait for the second, or
        for connecting again, needs that rank. And ranks that have not met cannot know one another's processes before
        they have read of them in the store, which may have been silent. A call of a group that is lost raises as it
        begins: the last wait was in an earlier call, and the rank may have been elsewhere since.
        """
        has_begun = other.monitor.number >= rank.monitor.number
        is_needed = not has_begun or other.rank in rank.missing or rank.monitor.phase % 2
        known = rank.monitor.peers[other.rank].known_since if self.group.schedule.stops else rank.met_at
        heard = max(other.ended_at, began, rank.waits_since if has_begun else 0.0, known)
        heard += self._stopped[rank.rank] + 2.0 + self.group.size / 10
        if is_needed and self.world.now > heard:
            self.fail(f"rank {rank.rank} hears only now that rank {other.rank} ended at {other.ended_at:.3f} s")

    def _check_promptness(self, rank, left, began):
        monitor, at = rank.monitor, left.time
        if left.kind == INTERRUPT and self.group.is_wild[rank.rank] and not monitor._has_followed:
            at = self._came.get((left.by, monitor.number + 1), NEVER)  # it awaits the next call
        heard = NEVER if self.group.store.is_gone else max(at, began) + 3.0  # hosts hear of one another in the store
        if rank.sees(left.by):
            heard = min(heard, max(at, began, rank.met_at) + 1.0)
        if left.phase >= monitor.phase and self.world.now > heard + self._stopped[rank.rank] + self.group.size / 10:
            self.fail(f"rank {rank.rank} hears only now that rank {left.by} gave up at {left.time:.3f} s")

    def _check_named(self, rank, error):
        """Law 5: an error names no live rank that is well."""
        if is_reported(error):
            return
        if isinstance(error, PeerLostError) and error.rank is not None:
            one = self.group.ranks[error.rank]
            if one.process.is_alive and not self._has_parted(rank, error.rank):
                self.fail(f"rank {rank.rank} raises {error!r}, but rank {error.rank} is well")
        if isinstance(error, CollectiveTimeout) and rank.monitor.peer is None:
            for other in error.missing:
                if rank.sees(other) and self._is_in_body(other) and not rank.monitor._is_limit_given:
                    self.fail(f"rank {rank.rank} misses rank {other}, which is in a body")
                monitor = self.group.ranks[other].monitor
                # A rank that is stopped between its last look and the error cannot know who has come meanwhile.
                is_there = self._awake(rank.rank, self._here_since(other)) > ASKING
                if rank.sees(other) and monitor.number >= rank.monitor.number and is_there:
                    self.fail(f"rank {rank.rank} misses rank {other}, which is in call {monitor.number}")

    def _here_since(self, rank):
        """Return when a rank began its call, or moved on to that of the others; ``NEVER`` outside of calls."""
        inside = self._inside[rank]
        return NEVER if inside is None else max(inside[0], self._counted[rank])

    def _awake(self, rank, since):
        """Return the seconds since a time in which a rank has not been stopped."""
        now, freezes = self.world.now, self.group.schedule.freezes
        stops = [(max(begin, since), min(begin + seconds, now)) for begin, one, seconds in freezes if one == rank]
        return now - since - sum(max(0.0, end - begin) for begin, end in stops)

    def _is_in_body(self, rank):
        """True if a rank is in a body, and others can know it: it was not stopped, either, when they last looked."""
        one, process = self.group.ranks[rank], self.group.ranks[rank].process
        since = max(one.body_since if self.group.schedule.stops else 0.0, process.stopped_until)
        return self.world.now > since + ASKING and process.page.body() and process.is_alive

    def _has_parted(self, rank, other):
        """True if a rank has broken its connections, or left."""
        one = self.group.ranks[other]
        return one.has_disconnected or self.group.has_left(other) or any(left.by == other for left in self.given_up)

    # At the end.

    def judge(self):
        """Law 7, when all have come to the end of their program."""
        ranks = self.group.ranks
        alive = [rank for rank in ranks if rank.process.is_alive]
        for rank in alive:
            if not rank.process.is_done:
                self.fail(f"rank {rank.rank} waits forever in call {self.group.places[rank.rank]}")
        here = [rank.rank for rank in alive if rank.rank not in self.leavers]
        for rank in here:
            self._check_causes(rank)
        for place in self.group._place_of[-2:]:
            self._check_last(here, place)

    def _check_causes(self, rank):
        """Law 3: who raises what others have reported is not alone."""
        others = [self._outcomes[other] for other in self.group.everyone if other != rank]
        latest = max((p for found in others for p, e in found.items() if e and not is_reported(e)), default=-1)
        count = sum(one.process.is_alive for one in self.group.ranks)
        for place, error in self._outcomes[rank].items():
            if self.group.schedule.step(place) is not None:  # calls of two have no order between those of all ranks
                place = self._last_of_all(place)
            is_told = error is not None and is_reported(error) and not error_is_final(error)
            if is_told and place > latest and not self._had_wild and len(others) == count - 1:
                self.fail(f"rank {rank} raises {error!r} in call {place}, to which nobody has anything to say")

    def _last_of_all(self, place):
        """Return the last call of all ranks before a call of two."""
        return max((at for at in range(place) if self.group.schedule.step(at) is None), default=-1)

    def _check_last(self, here, place):
        """All return, or all know that the group is lost; without a store, not all can hear of it."""
        errors = [self._outcomes[rank].get(place, "nothing") for rank in here]
        gone = [rank for rank in self.group.everyone if rank not in here]
        ranks, text = self.group.ranks, f"ranks {here} have {errors!r} in call {place}"
        if gone and any(ranks[one].sees(other) for one in here for other in gone):
            if not all(map(error_is_final, errors)):  # the end of a rank that nobody can see is none
                self.fail(f"{text}, when ranks {gone} have ended")
        elif self.group.store.is_gone and not gone:
            if len(set(map(error_is_final, errors))) > 1 or (None in errors and any(errors)):
                self.fail(f"{text}, without a store")
        elif not gone and any(errors):
            self.fail(f"{text}, when all has been well for long")


def error_is_final(error):
    return getattr(error, "is_final", False)


def is_reported(error):
    return getattr(error, "is_reported", False)
