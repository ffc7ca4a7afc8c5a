"""Short messages between two ranks: in order, of any length, with answers, in memory or another way."""

import random

import pytest
import torch
from launching import examples

from easydist.shm.segment import Segment
from easydist.transport.backends.shm import Shm

CHUNK = 1 << 15
"""Of two ranks."""


def both():
    """The mailboxes of two ranks, in one process."""

    def never(ranks, seconds):
        raise AssertionError(f"waited for {ranks}")

    segment = Segment.create(Shm.nbytes(2, 4096))
    ends = [Shm(segment, rank, 2, never) for rank in range(2)]
    return [end.mailbox(1 - rank) for rank, end in enumerate(ends)]


BYTES = (torch.arange(4 * CHUNK) % 251).to(torch.uint8)


def message(nbytes, number=0):
    return BYTES[number % 251 :][:nbytes]


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_message_that_fits_lies_in_memory(nbytes):
    here, there = both()
    for number in range(3):
        assert here.post(message(nbytes, number)) == (number, True)
        assert torch.equal(there.receive(), message(nbytes, number))
        assert not here.has_answer(number)
        there.answer()
        here.wait_for_answer(number)


def test_what_does_not_fit_goes_another_way_and_so_does_what_follows_until_all_is_answered():
    here, there = both()
    ways = [here.post(message(n))[1] for n in (10, 10, 10, 2 * CHUNK + 1, 10)]
    assert ways == [True, True, False, False, False]
    for is_here in ways[:-1]:
        assert (there.receive() is not None) == is_here
        there.answer()
    assert here.post(message(5))[1] is False  # one is not answered yet
    for _ in range(2):
        assert there.receive() is None
        there.answer()
    assert here.post(message(5)) == (6, True)
    assert there.receive().tolist() == [0, 1, 2, 3, 4]


def test_refusals_are_counted_apart():
    here, there = both()
    for is_refusal in (False, True, True):
        number, _ = here.post(message(3))
        there.receive()
        there.answer(is_refusal)
        assert here.has_answer(number)
    assert here.unknown_refusals() == 2
    here.refusals[1] = "why"
    assert here.unknown_refusals() == 1


def test_a_mailbox_that_is_closed_takes_nothing():
    segment = Segment.create(Shm.nbytes(2, 4096))
    end = Shm(segment, 0, 2, lambda ranks, seconds: None)
    mailbox = end.mailbox(1)
    end.close()
    for call in (lambda: mailbox.post(message(1)), mailbox.receive, lambda: mailbox.wait_for_answer(0)):
        with pytest.raises(RuntimeError, match="it has been closed"):
            call()


@pytest.mark.slow
def test_random_messages_in_both_directions_arrive_in_order():
    draw, ends = random.Random(7), both()
    sent, come, answered = [[], []], [0, 0], [0, 0]
    for _ in range(examples(2000)):
        way, act = draw.randrange(2), draw.choice(["post", "receive", "answer"])
        here, there = ends[way], ends[1 - way]
        if act == "post":
            data = message(draw.choice([0, 9, 900, CHUNK, CHUNK + 9, 3 * CHUNK]), len(sent[way]))
            number, is_here = here.post(data)
            assert number == len(sent[way])
            sent[way].append(data if is_here else None)
        elif act == "receive" and come[way] == answered[way] < len(sent[way]):
            got, want = there.receive(), sent[way][come[way]]
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got, want)
            come[way] += 1
        elif act == "answer" and answered[way] < come[way]:
            there.answer()
            answered[way] += 1
    assert min(come) > 100
