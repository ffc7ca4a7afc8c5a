"""One rank's part in the agreement of survivors; ``tests/survivors`` plays whole groups."""

import functools

from easydist.groups.membership import (
    CONNECTING,
    Connect,
    Membership,
    Raise,
    Read,
    Reason,
    Register,
    Return,
    Stage,
    Write,
)


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


def test_it_waits_for_a_rank_that_is_alive():
    assert alone(Membership(0, 2, 0.0, 1.0, 1.0), [Register(), Register()]) == Read()


def test_it_does_not_wait_for_one_that_has_ended():
    assert alone(Membership(0, 2, 0.0, 1.0, 1.0), [Register(), Register()], {1}) == Return((0,))


def test_it_leaves_out_who_does_not_come_in_time():
    assert alone(Membership(1, 2, 0.0, 1.0, 1.0), [Register(), Register()], now=1.5) == Return((1,))


def test_who_comes_too_late_is_left_out():
    settled = Register(Stage.CONNECTED, 2, (0,), is_settled=True)
    assert alone(Membership(1, 2, 9.0, 1.0, 1.0), [settled, Register()]) == Raise(Reason.LEFT_OUT, (0,))


def test_who_returned_to_an_agreement_in_which_it_is_a_member_is_left_out_of_it():
    settled = Register(Stage.CONNECTED, 2, (0, 1), is_settled=True)
    assert alone(Membership(1, 2, 9.0, 1.0, 1.0), [settled, Register()]) == Raise(Reason.LEFT_OUT, (0, 1))
