"""Waits for signals that are in vain, because one rank has ended and all others wait: every order of their looks."""

import itertools

import pytest

from easydist.comms.regions import SignalWait


def numbers(size):
    return [memoryview(bytearray(8 * SignalWait.NUMBERS)).cast("q") for _ in range(size)]


def test_with_nobody_left_a_wait_is_in_vain():
    assert SignalWait(numbers(2), 0, 1).is_in_vain([])


@pytest.mark.parametrize("size", [2, 3])
def test_those_who_wait_find_it_out_and_all_others_hear_it(size):
    """In every order of looks: nobody says it before all were seen to wait and have looked twice since; then all do."""
    for order in itertools.product(range(size), repeat=7):
        waits = [SignalWait(memory, rank, 1) for memory in [numbers(size)] for rank in range(size)]
        for step, rank in enumerate(order):
            waits[rank].look()
            if waits[rank].is_in_vain(set(range(size)) - {rank}):
                assert all(order[: step + 1].count(other) >= 3 for other in range(size) if other != rank)
                assert all(wait.is_in_vain(set(range(size)) - {r}) for r, wait in enumerate(waits))
                break
    assert step < 7


def test_a_rank_that_has_waited_anew_may_have_signalled_between():
    memory = numbers(2)
    mine, first = SignalWait(memory, 0, 1), SignalWait(memory, 1, 1)
    mine.look(), first.look()
    assert not mine.is_in_vain([1])
    first.end()
    second = SignalWait(memory, 1, 2)
    for _ in range(3):
        second.look()
    assert not mine.is_in_vain([1])
    second.look(), second.look()
    assert mine.is_in_vain([1])


@pytest.mark.parametrize("is_mine", [True, False])
def test_a_rank_that_computes_meanwhile_may_still_signal(is_mine):
    memory = numbers(2)
    waits = [SignalWait(memory, 0, 0 if is_mine else 1), SignalWait(memory, 1, 1 if is_mine else 0)]
    for _ in range(4):
        for rank, wait in enumerate(waits):
            wait.look()
            assert not wait.is_in_vain([1 - rank])


def test_a_rank_that_has_ended_meanwhile_is_waited_for_no_longer():
    memory = numbers(3)
    waits = [SignalWait(memory, rank, 1) for rank in range(3)]
    for _ in range(4):
        waits[0].look(), waits[2].look()
        assert not waits[0].is_in_vain([1, 2])
    waits[0].is_in_vain([2])
    waits[2].look(), waits[2].look()
    assert waits[0].is_in_vain([2])
