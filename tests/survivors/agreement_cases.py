"""Situations of one rank that no schedule of whole groups leads to, or too rarely: the rules hold there, too.

Each case takes the class of the machine, so that mutants can be tried.
"""

from easydist.groups.membership import Connect, Membership, Raise, Read, Reason, Register, Return, Stage, Write

BOTH = (0, 1)


def at(rank, mine, size=2, machine=Membership):
    """Return a machine that has got as far as a register says."""
    one = machine(rank, size, 0.0, 1.0, 1.0)
    one._mine = mine
    return one


def writes(actions):
    return [action.register for action in actions if isinstance(action, Write)]


def who_has_missed_the_end_of_its_group_is_left_out(machine):
    settled = Register(Stage.CONNECTED, 4, BOTH, is_settled=True)
    one = at(1, Register(Stage.CONNECTED, 1, BOTH), machine=machine)
    assert one.heard(0.0, [settled, one._mine], set())[-1] == Raise(Reason.LEFT_OUT, BOTH)


def members_never_grow(machine):
    mine = Register(Stage.HERE, 2, BOTH)
    one = at(0, mine, 3, machine)
    one.heard(0.5, [mine, mine, mine], set())
    assert one._wished == BOTH


def an_attempt_of_an_earlier_entry_says_nothing(machine):
    mine = Register(Stage.CONNECTED, 3, BOTH)
    for stage in (Stage.CONNECTED, Stage.FAILED):
        assert at(0, mine, 2, machine).heard(0.0, [mine, Register(stage, 1, BOTH)], set()) == [Read()]


def it_connects_when_all_are_ready(machine):
    mine = Register(Stage.READY, 1, BOTH)
    for other, ended, expected in (
        (Register(Stage.HERE, 0), set(), Read()),
        (Register(Stage.READY, 1, BOTH), set(), Connect(1, BOTH)),
        (Register(Stage.CONNECTED, 1, BOTH), set(), Connect(1, BOTH)),
    ):
        assert at(0, mine, 2, machine).heard(0.0, [mine, other], ended)[-1] == expected
    failed = Register(Stage.FAILED, 1, BOTH)
    assert at(1, mine, 2, machine).heard(0.0, [failed, mine], set()) == [Read()]  # rank 0 says that it has failed
    ready = Register(Stage.READY, 1, (0, 1, 2))
    assert at(1, ready, 3, machine).heard(0.0, [ready] * 3, {2}) == [Read()]


def it_does_not_wait_for_ranks_that_have_ended_or_left(machine):
    mine = Register(Stage.HERE)
    for other, ended in ((Register(Stage.LEFT), set()), (mine, {1})):
        one = at(0, mine, 2, machine)
        one.heard(0.0, [mine, other], ended)
        assert one._wished == (0,)


def lower_ranks_propose_first(machine):
    mine = Register(Stage.HERE)
    one = at(1, mine, 2, machine)
    assert one.heard(0.0, [mine, mine], set()) == [Read()]
    assert writes(one.heard(machine.stagger, [mine, mine], set()))
    assert writes(at(1, mine, 2, machine).heard(0.0, [mine, mine], {0}))


def it_lets_others_finish_before_it_proposes_again(machine):
    mine, other = Register(Stage.HERE), Register(Stage.HERE, ballot=5)
    one = at(0, mine, 2, machine)
    one.heard(0.0, [mine, mine], set())
    one.heard(0.0, [one._mine, other], set())
    assert one.heard(0.01, [one._mine, other], set()) == [Read()]


def it_begins_again_after_a_higher_ballot(machine):
    mine, other = Register(Stage.HERE), Register(Stage.HERE, ballot=3)
    one = at(0, mine, 2, machine)
    for now in (0.0, 0.1, 0.9, 0.95):
        one.heard(now, [one._mine, other if now else Register(Stage.HERE)], set())
    assert one._mine.ballot > 3


def a_ballot_is_higher_than_all_that_have_begun(machine):
    mine, other = Register(Stage.HERE), Register(Stage.HERE, ballot=7)
    one = at(0, mine, 2, machine)
    one.heard(0.0, [mine, other], set())
    assert one._mine.ballot > 7


def its_own_higher_ballot_counts(machine):
    """A rank that called again has promised more than the others know."""
    mine = Register(Stage.HERE, ballot=8)
    one = at(0, mine, 2, machine)
    one.heard(0.0, [Register(), Register(Stage.HERE)], set())
    assert one._mine.ballot > 8


def what_may_have_been_decided_is_adopted(machine):
    """Rank 0 may have decided that all are connected, and returned; then rank 2 has given up."""
    everyone = (0, 1, 2)
    told = [
        Register(Stage.CONNECTED, 1, everyone, ballot=3, accepted=3, value=True),
        Register(Stage.CONNECTED, 1, everyone),
        Register(Stage.LEFT, 1, everyone),
    ]
    one, written = at(1, told[1], 3, machine), []
    for now in (0.5, 0.6, 0.7):
        written += writes(one.heard(now, [told[0], one._mine, told[2]], set()))
    assert next(register.value for register in written if register.accepted > 3) is True


def it_gives_way_to_a_promise(machine):
    """Another rank has begun a higher ballot, and may have read this register before the value was there."""
    mine = Register(Stage.HERE, ballot=2, accepted=2, value=BOTH)
    one = at(0, mine, 2, machine)
    one.heard(0.0, [mine, Register(Stage.HERE)], set())  # begins
    one.heard(0.0, [one._mine, Register(Stage.HERE)], set())  # accepts
    one.heard(0.0, [one._mine, Register(Stage.HERE, ballot=99)], set())
    assert one._mine.slot == 0


def the_time_ends_its_silence(machine):
    one = at(0, Register(Stage.HERE), 2, machine)
    assert one.tick(3.9) == []
    assert one.tick(4.0)[-1] == Raise(Reason.LATE)


def it_says_that_it_leaves(machine):
    one = machine(0, 2, 0.0, 1.0, 1.0)
    one.begin()
    assert one.interrupted() == [Write(Register(Stage.LEFT)), Raise(Reason.INTERRUPTED)]


def a_member_that_called_again_has_no_connections(machine):
    one = machine(0, 2, 0.0, 1.0, 1.0, Register(Stage.LEFT, 1, BOTH))
    assert writes(one.begin()) == [Register(Stage.FAILED, 1, BOTH)]
    settled = Register(Stage.CONNECTED, 2, BOTH, is_settled=True)
    assert not isinstance(one.heard(0.0, [one._mine, settled], set())[-1], Return)


CASES = [
    who_has_missed_the_end_of_its_group_is_left_out,
    members_never_grow,
    an_attempt_of_an_earlier_entry_says_nothing,
    it_connects_when_all_are_ready,
    it_does_not_wait_for_ranks_that_have_ended_or_left,
    lower_ranks_propose_first,
    it_lets_others_finish_before_it_proposes_again,
    it_begins_again_after_a_higher_ballot,
    a_ballot_is_higher_than_all_that_have_begun,
    its_own_higher_ballot_counts,
    what_may_have_been_decided_is_adopted,
    it_gives_way_to_a_promise,
    the_time_ends_its_silence,
    it_says_that_it_leaves,
    a_member_that_called_again_has_no_connections,
]
