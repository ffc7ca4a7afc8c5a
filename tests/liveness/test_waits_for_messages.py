"""The rule by which ranks that wait for one another in different calls find it out, without processes."""

import pytest
from torch.distributed import HashStore

from easydist.liveness.crossing import RECEIVE, SEND, Crossing
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import MessageWait, OwnPage, PeerPage
from easydist.liveness.peer import Peer
from easydist.liveness.timed_store import TimedStore


class Rank(Peer):
    """A rank in the same process, with the number of its last call of all ranks."""

    def __init__(self, rank, number=1):
        super().__init__(rank)
        self.last = number
        page = OwnPage()
        self.entry = page.new_entry()
        self.crossing = Crossing(rank, page, self.entry)
        self.seen = PeerPage.attach(*page.address)

    def waits(self):
        return self.seen.waits(self.entry)

    def number(self):
        return self.last

    def waits_for(self, rank, kind):
        self.crossing.show(self.crossing.begin(kind, rank))


def monitors(calls):
    """Two monitors that see each other in a store only, rank 1 in a message after ``calls`` calls of all ranks."""
    store = HashStore()
    one, other = (Monitor(rank, 2, 60.0, TimedStore(store)) for rank in range(2))
    for _ in range(calls):
        other.begin("gather", "here")
        other.end()
    other.begin("recv_object", "here", peer=0)
    other.crossing.show(other.crossing.begin(RECEIVE, 0))
    other.crossing.tell(other._write, lambda: (other.phase, other.number))
    one.begin("gather", "here")
    return one, other


def test_ranks_of_other_hosts_tell_it_in_the_store():
    one, _ = monitors(calls=0)
    assert one._crossed(listens=True).call == 1
    assert one._crossed(listens=False) is None
    one.crossing.begin(SEND, 1)
    assert one._crossed(listens=True) is None


def test_who_told_it_after_this_call_is_not_needed_in_it():
    one, _ = monitors(calls=1)
    assert one._crossed(listens=True) is None


def test_a_call_without_headers_may_not_need_all_others():
    one, _ = monitors(calls=0)
    one.is_one_way = True
    assert one._crossed(listens=True) is None


def test_what_was_told_is_taken_back_at_the_end_of_the_call():
    one, other = monitors(calls=0)
    other.end()
    assert one._crossed(listens=True) is None


def ranks(count):
    made = [Rank(rank) for rank in range(count)]
    return made, lambda rank: made[rank].waits()


def circles(made, look_up):
    return [[*one.crossing.circle(look_up)] for one in made]


@pytest.mark.parametrize("kind", [SEND, RECEIVE])
def test_who_has_not_begun_the_message_is_needed(kind):
    (one, other), _ = ranks(2)
    assert one.crossing.needs_me({1: other}, 2) is None
    other.waits_for(0, kind)
    assert one.crossing.needs_me({1: other}, 2) == 1
    one.crossing.begin(1 - kind, 1)
    assert one.crossing.needs_me({1: other}, 2) is None  # however long it is on its way
    one.crossing.begin(kind, 1)
    other.waits_for(0, kind)
    assert one.crossing.needs_me({1: other}, 2) == 1


def test_who_has_come_to_the_call_of_all_ranks_and_gone_on_is_not_awaited():
    (one, other), _ = ranks(2)
    other.waits_for(0, RECEIVE)
    other.last = 2
    assert one.crossing.needs_me({1: other}, 2) is None


def test_a_wait_for_another_rank_is_not_this_ranks():
    (one, other, _), _ = ranks(3)
    other.waits_for(2, RECEIVE)
    assert one.crossing.needs_me({1: other}, 2) is None


def test_a_wait_that_has_ended_is_none():
    (one, other), _ = ranks(2)
    other.waits_for(0, RECEIVE)
    other.crossing.end()
    assert other.waits() is None
    assert one.crossing.needs_me({1: other}, 2) is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_lowest_rank_of_a_circle_finds_it_once_all_show_it(size):
    made, look_up = ranks(size)
    for rank, one in enumerate(made):
        one.waits_for((rank + 1) % size, SEND)
    for rank in range(1, size):
        assert not made[rank].crossing.circle(look_up)
    assert [*made[0].crossing.circle(look_up)] == [*range(size)]
    made[1].crossing.show(made[1].crossing.wait)
    assert not made[0].crossing.circle(look_up)  # rank 1 may have begun the message


def test_a_message_that_has_been_begun_opens_the_circle():
    made, look_up = ranks(3)
    made[1].crossing.begin(RECEIVE, 0)  # a message of rank 0 that it has begun to receive
    for rank, one in enumerate(made):
        one.waits_for((rank + 1) % 3, SEND)
    assert circles(made, look_up) == [[], [], []]
    assert circles(made, look_up) == [[], [], []]


def test_who_waits_for_a_circle_is_not_in_it():
    made, look_up = ranks(3)
    for rank, other in ((0, 1), (1, 0), (2, 0)):
        made[rank].waits_for(other, RECEIVE)
    circles(made, look_up)
    assert circles(made, look_up) == [[0, 1], [], []]


def test_a_new_wait_of_one_rank_is_another_circle():
    made, look_up = ranks(2)
    for rank, one in enumerate(made):
        one.waits_for(1 - rank, RECEIVE)
    circles(made, look_up)
    made[1].crossing.show(MessageWait(0, SEND, 2))
    assert not made[0].crossing.circle(look_up)


def test_an_old_view_of_a_rank_is_no_part_of_a_circle():
    made, look_up = ranks(3)
    for rank, one in enumerate(made):
        one.waits_for((rank + 1) % 3, RECEIVE)
    made[1].crossing.circle(look_up)
    old = made[1].waits()
    made[1].crossing.begin(SEND, 0)  # the message for which rank 0 waits: it is on its way
    made[1].waits_for(2, RECEIVE)
    made[2].crossing.circle(look_up)
    assert not made[0].crossing.circle(lambda rank: old if rank == 1 else look_up(rank))
