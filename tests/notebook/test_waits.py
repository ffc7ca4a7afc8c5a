"""Waits of ranks, and which of them are in vain, as read from the pages that they would publish."""

import functools
from typing import NamedTuple

import pytest

from easydist.liveness.page import PageEntry
from easydist.notebook import application
from easydist.notebook.launcher import start
from easydist.notebook.status import Pages, RankStatus, Status, where


class Rank(NamedTuple):
    """A rank of which only the number is known."""

    rank: int


class Told(Pages):
    """Pages with these entries, by rank."""

    def __init__(self, told, size):
        super().__init__(Rank(rank) for rank in range(size))
        self.told = told

    def entries(self):
        return {rank: [entry] for rank, entry in self.told.items()}


def told(number, call, in_call=True, size=3, group="0", peer=None):
    return PageEntry(group, "met", number, size, call, "gather, call 2, at <cell 4>:1", in_call, peer, 1.5)


def waits(told, running, size=3):
    return Told(told, size).waits(running)


def test_a_rank_waits_for_those_that_have_not_come():
    calls = {0: told(0, 2), 1: told(1, 1, in_call=False), 2: told(2, 2)}
    found = waits(calls, [0, 1, 2])
    assert [*found] == [0, 2]
    assert found[0][:4] == ("gather", "<cell 4>:1", (1,), 1.5)
    assert not found[0].is_vain
    assert [*waits(calls, [0, 1])] == [0]  # of those that run the cell


def test_a_wait_is_in_vain_if_an_awaited_rank_does_not_run_the_cell():
    calls = {0: told(0, 2), 1: told(1, 1, in_call=False), 2: told(2, 2, in_call=False)}
    found = waits(calls, [0])[0]
    assert (found.is_vain, found.ranks, found.missing) == (True, (1,), (1,))  # rank 2 has come before it ended the cell
    assert not waits(calls, [0, 1])[0].is_vain


def test_a_wait_for_one_rank_is_in_vain_if_that_one_does_not_run_the_cell():
    calls = {0: told(0, 1, peer=2), 1: told(1, 1, in_call=False), 2: told(2, 1, in_call=False)}
    assert not waits(calls, [0, 2])[0].is_vain
    assert waits(calls, [0, 1])[0].is_vain


def test_a_wait_for_a_rank_that_cannot_be_seen_is_in_vain_if_no_other_runs_the_cell():
    calls = {0: told(0, 1, size=2)}
    assert not waits(calls, [0, 1], size=4)[0].is_vain
    found = waits(calls, [0], size=4)[0]
    assert (found.is_vain, found.ranks, found.missing) == (True, (), ())  # any of three
    found = waits(calls, [0], size=2)[0]
    assert (found.is_vain, found.ranks, found.missing) == (True, (1,), (1,))


@pytest.mark.parametrize(
    ("in_call", "running", "is_vain"),
    [
        ([True, True, True], [0, 1, 2], False),  # they have met
        ([True, True, False], [0, 1], True),
        ([True, False, False], [0, 1], False),  # rank 1 may come yet
        ([True, False, False], [0], True),
    ],
)
def test_where_numbers_count_messages_too_all_that_run_the_cell_have_to_wait(in_call, running, is_vain):
    calls = {rank: told(rank, 9 - rank, waits, group="easydist_shm") for rank, waits in enumerate(in_call)}
    assert waits(calls, running)[0].is_vain is is_vain


def test_a_rank_that_cannot_be_seen_may_come_if_it_runs_the_cell():
    calls = {rank: told(rank, 1, group="easydist_shm") for rank in (0, 1)}
    assert not waits(calls, [0, 1, 2])[0].is_vain
    assert waits(calls, [0, 1])[0].is_vain


def test_a_line_of_an_earlier_or_later_cell_is_named_with_its_cell():
    assert where("<cell 4>:3", 4) == where("<cell 4, part 7>:3", 4) == "cell line 3"
    assert [where(f"<cell {number}>:3", 4) for number in (3, 5)] == ["line 3 of cell 3", "line 3 of cell 5"]


def raised(call):
    """Return the error of a call, as if this file had not caught it."""
    try:
        call()
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next)


def user():
    raise ValueError("the user's")


def test_of_the_causes_of_an_error_those_without_frames_of_the_user_are_left_out():
    error, own = ValueError("shown"), raised(user)
    error.__cause__, own.__cause__ = own, raised(functools.partial(start, 0))
    application._cut_causes(error)
    assert error.__cause__ is own
    assert own.__traceback__.tb_frame.f_code is user.__code__
    assert own.__cause__ is None


def test_node_and_gpus_are_shown_where_there_are_any():
    assert str(Status([RankStatus(0, 4711, "idle")])).split()[:2] == ["rank", "pid"]
    table = Status([RankStatus(0, 4711, "idle", node="10.0.0.12", gpus="3"), RankStatus(1, 4712, "idle")])
    assert [line.split() for line in str(table).splitlines()][1:] == [
        ["0", "10.0.0.12", "3", "4711", "idle"],
        ["1", "4712", "idle"],
    ]
    assert "GPU" in table._repr_html_()
