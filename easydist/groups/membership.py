"""The agreement of the survivors of a group on the members of the new group: a pure state machine.

The module does no I/O and uses no clock and no thread. Events come in as method calls, with the time as a number, and
the machine returns actions. ``groups/recovering.py`` carries them between processes, and
``tests/groups/test_membership.py`` runs the same code on simulated ranks. ``docs/design/groups.md`` states the rules.

Each rank has one ``Register``, which only that rank writes and all can read, even after its process has ended. The
ranks make a sequence of decisions: an even decision lists the members, and the odd decision after it tells whether all
of them are connected. If they are not, the next two decisions are about fewer members. Each is made as in Disk Paxos
(Gafni and Lamport, 2003) with one disk: a rank writes the number of its ballot and reads all registers. It adopts the
value of the highest ballot that it finds, or else its own value, writes it, and reads all registers again. If it has
seen no higher ballot, the value is decided. So a rank may stop at any point and continue at any time, and two ranks
never decide differently.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set as AbstractSet
from typing import NamedTuple

Decision = tuple[int, ...] | bool
"""The members, ascending; or True if the members are connected, False if not."""

CONNECTING, LAGGING = 0.5, 0.75
"""The parts of the limit in which a member finds out that it cannot connect, and in which members may at least answer
once others have found that out. The second one is longer, so that a member that still tries to connect is not left out
though the time is over."""


class Stage(enum.IntEnum):
    """The stages of a rank in the agreement."""

    AWAY = 0
    """The rank has not come."""
    LEFT = 1
    """The rank has come, and left again with an error."""
    HERE = 2
    """The rank takes part in deciding the members."""
    READY = 3
    """The rank knows that it is a member, and waits for the others to connect."""
    CONNECTED = 4
    FAILED = 5
    """The rank could not connect."""


class Register(NamedTuple):
    """One rank's state, as the others may read it.

    Attributes:
        stage: The rank's stage.
        slot: The number of decisions made so far.
        members: The last members that were decided; empty if there are none.
        is_settled: True if the last decision says that they are connected.
        ballot: The highest ballot that the rank has begun for the next decision; 0 if none.
        accepted: The highest ballot in which it has accepted a value for that decision; 0 if none.
        value: The accepted value; None if there is none.
    """

    stage: Stage = Stage.AWAY
    slot: int = 0
    members: tuple[int, ...] = ()
    is_settled: bool = False
    ballot: int = 0
    accepted: int = 0
    value: Decision | None = None


class Write(NamedTuple):
    """Write this rank's register, and finish that before the next action."""

    register: Register


class Read(NamedTuple):
    """Read all registers, and answer with ``heard``."""


class Connect(NamedTuple):
    """Connect with the members, and answer with ``connected``. No two attempts have the same number."""

    attempt: int
    members: tuple[int, ...]


class Return(NamedTuple):
    """Return the members, which are all connected."""

    members: tuple[int, ...]


class Reason(enum.Enum):
    """The reasons why a rank cannot continue."""

    LEFT_OUT = enum.auto()
    LATE = enum.auto()
    INTERRUPTED = enum.auto()


class Raise(NamedTuple):
    """Raise an error."""

    reason: Reason
    members: tuple[int, ...] = ()


Action = Write | Read | Connect | Return | Raise


class Ballot(enum.Enum):
    """The part of its ballot that this rank has written, but not yet compared with the other registers."""

    NONE = enum.auto()
    BEGUN = enum.auto()
    ACCEPTED = enum.auto()


class Membership:
    """One rank's part in the agreement.

    Args:
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        now: The current time.
        timeout: Seconds after which ranks that have not come are left out.
        limit: Seconds after which members that do not connect are left out. The whole agreement takes
            no longer than ``timeout + 3 * limit``.
        before: The register that this rank has written in an earlier attempt.

    Attributes:
        stagger: Seconds that a rank gives each lower rank to propose first: if two propose at once, both have to start
            over.

    Example:
        >>> machine = Membership(0, 1, now=0.0, timeout=1.0, limit=1.0)
        >>> actions, heard = machine.begin(), [Register()]
        >>> while not isinstance(actions[-1], Return):
        ...     heard = [*heard, *(action.register for action in actions if isinstance(action, Write))]
        ...     is_connecting = isinstance(actions[-1], Connect)
        ...     actions = machine.connected(0.0, True) if is_connecting else machine.heard(0.0, heard[-1:], set())
        >>> actions[-1]
        Return(members=(0,))
    """

    stagger = 0.1

    def __init__(
        self, rank: int, size: int, now: float, timeout: float, limit: float, before: Register | None = None
    ) -> None:
        self._rank, self._size, self._limit = rank, size, limit
        self._deadline, self._end = now + timeout, now + timeout + 3 * limit
        self._since = self._not_before = now
        self._wished_since: float | None = None
        self._ballot = Ballot.NONE
        self._mine = before or Register()

    def begin(self) -> list[Action]:
        """Return the first actions."""
        # If the next decision is about connecting, the connections of an earlier attempt are gone.
        stage = Stage.FAILED if self._mine.slot % 2 else Stage.HERE
        self._mine = self._mine._replace(stage=stage)
        return self._ended() or [Write(self._mine), Read()]

    def interrupted(self) -> list[Action]:
        """Return the actions after Ctrl-C, or after any other exception on this rank."""
        return self._leave(Reason.INTERRUPTED)

    def tick(self, now: float) -> list[Action]:
        """Return the actions at a time without new answers; if there are none, keep waiting for the answer."""
        return self._leave(Reason.LATE) if now >= self._end else []

    def connected(self, now: float, is_connected: bool) -> list[Action]:
        """Take the answer to ``Connect``, and return the next actions."""
        self._mine = self._mine._replace(stage=Stage.CONNECTED if is_connected else Stage.FAILED)
        return self.tick(now) or [Write(self._mine), Read()]

    def is_in_vain(self, now: float, registers: Sequence[Register], ended: AbstractSet[int]) -> bool:
        """True if the attempt to connect that is under way cannot succeed; the arguments are those of ``heard``."""
        has_been_decided = any(register.slot > self._mine.slot for register in registers)
        return has_been_decided or self._are_connected(now, registers, ended) is False

    def heard(self, now: float, registers: Sequence[Register], ended: AbstractSet[int]) -> list[Action]:
        """Take the answer to ``Read``, and return the next actions.

        Args:
            now: The current time.
            registers: The registers of all ranks, each as it was at some time after the ``Read``.
            ended: The ranks with ended processes.
        """
        before = self._mine
        ahead = max(registers, key=lambda register: register.slot)
        if ahead.slot > before.slot:
            self._learn(now, ahead.slot, ahead.members, ahead.is_settled)
        elif self._ballot is not Ballot.NONE:
            self._compare(now, registers)
        else:
            self._propose(now, registers, ended)
        if ended_now := self._ended() or self.tick(now):
            return ended_now
        if self._mine == before and self._may_connect(registers, ended):
            return [Connect(before.slot, before.members)]
        return [Read()] if self._mine == before else [Write(self._mine), Read()]

    # Making the next decision.

    def _propose(self, now: float, registers: Sequence[Register], ended: AbstractSet[int]) -> None:
        """Begin a ballot, if there is something to decide and it is this rank's turn."""
        wish = self._wish(now, registers, ended)
        if wish is None:
            self._wished_since = None
            return
        self._wished_since = now if self._wished_since is None else self._wished_since
        if now < max(self._wished_since + self.stagger * self._turn(registers, ended), self._not_before):
            return
        self._wished = wish
        highest = max(register.ballot for register in self._peers(registers))
        number = (highest // self._size + 1) * self._size + self._rank  # used by this rank only, and the highest
        self._mine, self._ballot = self._mine._replace(ballot=number), Ballot.BEGUN

    def _compare(self, now: float, registers: Sequence[Register]) -> None:
        """Continue the ballot, unless there is a higher one."""
        peers = self._peers(registers)
        if max(register.ballot for register in peers) > self._mine.ballot:
            self._ballot = Ballot.NONE
            self._not_before = now + self.stagger * (1 + self._rank)  # so that they do not all propose at once again
        elif self._ballot is Ballot.BEGUN:
            last = max(peers, key=lambda register: register.accepted)
            value = last.value if last.accepted else self._wished
            self._mine = self._mine._replace(accepted=self._mine.ballot, value=value)
            self._ballot = Ballot.ACCEPTED
        else:
            self._decided(now)

    def _decided(self, now: float) -> None:
        value, slot = self._mine.value, self._mine.slot + 1
        if isinstance(value, tuple):
            self._learn(now, slot, value, False)
        else:
            self._learn(now, slot, self._mine.members, bool(value))

    def _learn(self, now: float, slot: int, members: tuple[int, ...], is_settled: bool) -> None:
        """Adopt decisions that others have made."""
        stage = Stage.READY if slot % 2 else Stage.HERE
        if is_settled and slot == self._mine.slot + 1:
            stage = self._mine.stage  # CONNECTED or FAILED: the decision does not change it
        # Without ballots: those were about the decision before.
        self._mine = Register(stage, slot, members, is_settled)
        self._ballot = Ballot.NONE
        self._since, self._wished_since, self._not_before = now, None, now

    def _peers(self, registers: Sequence[Register]) -> list[Register]:
        """Return this rank's own register, and those of other ranks that are about the same decision."""
        others = [other for rank, other in enumerate(registers) if rank != self._rank]
        return [self._mine, *[other for other in others if other.slot == self._mine.slot]]

    def _turn(self, registers: Sequence[Register], ended: AbstractSet[int]) -> int:
        """Return the number of ranks that may propose before this one."""
        slot = self._mine.slot
        lower = [rank for rank in range(self._rank) if rank not in ended]
        return sum(registers[rank].stage >= Stage.HERE and registers[rank].slot == slot for rank in lower)

    # The value that this rank would propose.

    def _wish(self, now: float, registers: Sequence[Register], ended: AbstractSet[int]) -> Decision | None:
        """Return the value to propose; None if it is too early."""
        seen = [*registers[: self._rank], self._mine, *registers[self._rank + 1 :]]
        if self._mine.slot % 2:
            return self._are_connected(now, seen, ended)
        return self._new_members(now, seen, ended)

    def _new_members(
        self, now: float, registers: Sequence[Register], ended: AbstractSet[int]
    ) -> tuple[int, ...] | None:
        """Return the ranks that have come, once all that can have come or the time is over; None before that."""
        slot, candidates = self._mine.slot, self._mine.members or range(self._size)
        alive = [rank for rank in candidates if rank not in ended and registers[rank].stage != Stage.LEFT]
        here = tuple(r for r in alive if registers[r].stage >= Stage.HERE and registers[r].slot == slot)
        # A member that lives and has come once is not left out early: it may be slow, with many processes on each core.
        until = max(self._deadline, self._since + LAGGING * self._limit) if slot else self._deadline
        return here if len(here) == len(alive) or now >= until else None

    def _are_connected(self, now: float, registers: Sequence[Register], ended: AbstractSet[int]) -> bool | None:
        members, slot = self._mine.members, self._mine.slot
        told = [registers[rank] for rank in members]
        if any(register.stage == Stage.LEFT or _has_failed(register, slot) for register in told):
            return False
        if not ended.isdisjoint(members) or now >= self._since + self._limit:
            return False
        return True if all(_is_at(register, slot, Stage.CONNECTED) for register in told) else None

    def _may_connect(self, registers: Sequence[Register], ended: AbstractSet[int]) -> bool:
        """True if all members wait for this rank to connect."""
        mine = self._mine
        if mine.stage != Stage.READY or self._ballot is not Ballot.NONE:
            return False
        ready = (_is_at(registers[rank], mine.slot, Stage.READY) for rank in mine.members if rank != self._rank)
        return ended.isdisjoint(mine.members) and all(ready)

    # Leaving the agreement.

    def _ended(self) -> list[Action]:
        """Return the last actions if a decision ends the agreement for this rank; else none."""
        mine = self._mine
        if mine.slot and self._rank not in mine.members:
            return self._leave(Reason.LEFT_OUT)
        if not mine.is_settled:
            return []
        return [Write(mine), Return(mine.members)] if mine.stage == Stage.CONNECTED else self._leave(Reason.LEFT_OUT)

    def _leave(self, reason: Reason) -> list[Action]:
        self._mine = self._mine._replace(stage=Stage.LEFT)
        return [Write(self._mine), Raise(reason, self._mine.members)]


def _is_at(register: Register, slot: int, stage: Stage) -> bool:
    return register.slot == slot and stage <= register.stage < Stage.FAILED


def _has_failed(register: Register, slot: int) -> bool:
    return register.slot == slot and register.stage == Stage.FAILED
