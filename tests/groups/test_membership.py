"""The agreement of survivors on who goes on, on simulated ranks; ``check(seed)`` plays one schedule again."""

import functools

import pytest
from launching import examples
from memberships import check

from easydist.groups.membership import (
    CONNECTING,
    Ballot,
    Connect,
    Failure,
    Membership,
    Raise,
    Read,
    Register,
    Return,
    Stage,
    Write,
)


def play(count, machine=Membership):
    """Play so many schedules."""
    for seed in range(count):
        try:
            check(seed, machine)
        except AssertionError as error:
            raise AssertionError(f"check({seed}): {error}") from error


@pytest.mark.stress
@pytest.mark.slow
def test_whatever_happens_ranks_that_return_have_the_same_members():
    play(examples(600))


@pytest.mark.slow
def test_where_nothing_goes_wrong_all_ranks_return():
    for seed in range(100):
        check(seed, faults=0)


def test_a_member_that_still_tries_to_connect_is_waited_for():
    """Others have failed at once; it notices only when its own attempt has failed."""
    others = [Register(Stage.HERE, 2, (0, 1, 2)), Register(Stage.READY, 1, (0, 1, 2))]
    one = Membership(0, 3, 0.0, 60.0, 10.0)
    actions, now = one.begin(), 0.0
    one.heard(now, [Register(), *others], set())  # learns that the members could not connect
    while now < CONNECTING * 10.0 + 1.0:
        now += 0.1
        actions = one.heard(now, [Register(), *others], set())
        assert actions == [Read()]  # proposes nobody yet
    actions = one.heard(now, [Register(), others[0], others[0]], set())
    assert any(isinstance(action, Write) for action in actions)


def test_a_living_member_that_is_slow_to_come_back_is_left_out_only_when_the_time_is_over():
    registers = [Register(), Register(Stage.HERE, 2, (0, 1, 2)), Register(Stage.READY, 1, (0, 1, 2))]
    one = Membership(0, 3, 0.0, 60.0, 10.0)
    one.begin()
    for now in (0.0, 10.0, 59.0):
        actions = one.heard(now, registers, set())
        assert not [action for action in actions if isinstance(action, Write) and action.register.ballot]
    (action, _), _ = one.heard(60.0, registers, set()), None
    assert action.register.ballot


class ProposesItsOwn(Membership):
    """Does not adopt what others may have decided."""

    def _compare(self, now, registers):
        others = [register._replace(accepted=0, value=None) for register in registers]
        self._mine = self._mine._replace(accepted=0) if self._ballot is Ballot.BEGUN else self._mine
        super()._compare(now, others)


class DoesNotLookAgain(Membership):
    """Decides when it has written the value."""

    def _compare(self, now, registers):
        super()._compare(now, registers)
        if self._ballot is Ballot.ACCEPTED:
            self._decided(now)


class DecidesAlone(Membership):
    """Takes its wish for decided."""

    def _propose(self, now, registers, ended):
        super()._propose(now, registers, ended)
        if self._ballot is not Ballot.NONE:
            self._mine = self._mine._replace(value=self._wished)
            self._decided(now)


class SettlesEarly(Membership):
    """Does not wait until the others are connected."""

    def _are_connected(self, now, registers, ended):
        return True if self._mine.stage == Stage.CONNECTED else super()._are_connected(now, registers, ended)


class Forgets(Membership):
    """Has forgotten what it had written when it comes again."""

    def __init__(self, rank, size, now, timeout, limit, before=None):
        super().__init__(rank, size, now, timeout, limit)


class DoesNotListen(Membership):
    """Does not hear what has been decided without it."""

    def heard(self, now, registers, ended):
        return super().heard(
            now, [other if other.slot <= self._mine.slot else Register() for other in registers], ended
        )


class HasNoClock(Membership):
    """Waits for all ranks that are alive, however long."""

    def heard(self, now, registers, ended):
        self._deadline = self._end = self._since = float("inf")
        return super().heard(now, registers, ended)


class ComesBack(Membership):
    """Takes part again although it has been left out."""

    def _ended(self):
        mine = self._mine
        is_out = mine.slot and self._rank not in mine.members
        return [Write(mine), Return(mine.members)] if is_out and mine.is_settled else super()._ended()


MUTANTS = [
    DoesNotLookAgain,
    DecidesAlone,
    SettlesEarly,
    Forgets,
    DoesNotListen,
    HasNoClock,
    ComesBack,
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_schedules_find_a_mistake(mutant):
    with pytest.raises(AssertionError, match=r"member|returned with|past its time"):
        play(3000, mutant)


def alone(machine, registers, ended=frozenset(), now=0.0):
    """The last action of a machine that hears the same of the others each time; what it writes it reads."""
    actions = machine.begin()
    for _ in range(20):
        written = [action.register for action in actions if isinstance(action, Write)]
        registers = [written[-1] if rank == machine._rank and written else r for rank, r in enumerate(registers)]
        if not isinstance(actions[-1], Read | Connect):
            break
        ask = functools.partial(machine.heard, registers=registers, ended=ended)
        actions = machine.connected(now, True) if isinstance(actions[-1], Connect) else ask(now)
    return actions[-1]


def in_doubt(machine):
    """Rank 0 may have decided that all are connected, and returned; then rank 2 has given up."""
    everyone = (0, 1, 2)
    registers = [
        Register(Stage.CONNECTED, 1, everyone, ballot=3, accepted=3, value=True),
        Register(Stage.CONNECTED, 1, everyone),
        Register(Stage.LEFT, 1, everyone),
    ]
    one = machine(1, 3, 0.0, 1.0, 1.0, registers[1])
    one._mine = registers[1]
    written = []
    for now in range(3):
        actions = one.heard(0.5 + now / 10, [registers[0], one._mine, registers[2]], frozenset())
        written += [action.register for action in actions if isinstance(action, Write)]
    return next(register.value for register in written if register.accepted > 3)


def test_what_may_have_been_decided_is_adopted():
    assert in_doubt(Membership) is True
    assert in_doubt(ProposesItsOwn) is False


def test_it_waits_for_a_rank_that_is_alive():
    assert alone(Membership(0, 2, 0.0, 1.0, 1.0), [Register(), Register()]) == Read()


def test_it_does_not_wait_for_one_that_has_ended():
    assert alone(Membership(0, 2, 0.0, 1.0, 1.0), [Register(), Register()], {1}) == Return((0,))


def test_it_leaves_out_who_does_not_come_in_time():
    assert alone(Membership(1, 2, 0.0, 1.0, 1.0), [Register(), Register()], now=1.5) == Return((1,))


def test_who_comes_too_late_is_left_out():
    settled = Register(Stage.CONNECTED, 2, (0,), is_settled=True)
    assert alone(Membership(1, 2, 9.0, 1.0, 1.0), [settled, Register()]) == Raise(Failure.LEFT_OUT, (0,))


def test_who_returned_to_an_agreement_in_which_it_is_a_member_is_left_out_of_it():
    settled = Register(Stage.CONNECTED, 2, (0, 1), is_settled=True)
    assert alone(Membership(1, 2, 9.0, 1.0, 1.0), [settled, Register()]) == Raise(Failure.LEFT_OUT, (0, 1))


def test_time_ends_a_silence():
    machine = Membership(0, 2, 0.0, 1.0, 1.0)
    machine.begin()
    assert machine.tick(3.9) == []
    assert machine.tick(4.0)[-1] == Raise(Failure.LATE)


def test_ctrl_c_is_told():
    machine = Membership(0, 2, 0.0, 1.0, 1.0)
    machine.begin()
    assert machine.interrupted() == [Write(Register(Stage.LEFT)), Raise(Failure.INTERRUPTED)]
