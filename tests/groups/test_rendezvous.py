"""A rendezvous, seen by one rank: its messages in the store, its errors and its warnings."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from easydist.errors import CollectiveTimeout, PeerLostError, RemoteError, WireError
from easydist.groups.rendezvous import Rendezvous
from easydist.liveness import monitor
from easydist.liveness.background import NoAnswerError
from easydist.liveness.log import Log
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import own_page
from easydist.liveness.peer import Peer, record
from easydist.liveness.status import nothing
from easydist.liveness.timed_store import TimedStore


@pytest.fixture
def store():
    return HashStore()


class Messages:
    """The first messages of the ranks, in the first attempt of rank 0."""

    def __init__(self, store):
        self._store, self._log = TimedStore(PrefixStore("1/meeting", store)), Log("0")

    def append(self, rank, text):
        self._log.append(self._store, rank, text)

    def withdraw(self, rank):
        self._log.withdraw(self._store, rank)

    def ranks(self):
        return {*self._log.last(self._store)}


@pytest.fixture
def messages(store):
    return Messages(store)


@pytest.fixture
def came(messages):
    """The other rank's monitor, which has come as rank 1."""
    other = Monitor(1, 3, 60.0)
    other.begin("the group", "here")
    messages.append(1, record(own_page(), other.entry, False).decode())
    return other


def meet(store, size, seconds=0.1, look=nothing):
    """Come as rank 0, and meet the others for a moment."""
    with Rendezvous(store, 0, size, timedelta(seconds=seconds), name="the group", look=look) as rendezvous:
        rendezvous.introduce(False)


def test_a_warning_names_only_ranks_that_have_not_come(store, came, monkeypatch, caplog):
    monkeypatch.setattr(monitor, "WARN_AFTER", 0.0)
    with pytest.raises(CollectiveTimeout) as caught:
        meet(store, 3)
    assert caught.value.missing == (2,)
    said = [one.getMessage() for one in caplog.records]
    assert said
    for text in said:
        assert text.startswith("the group: 1 of 3 ranks did not come within ")
        assert "\n  rank 1: came; " in text


def test_the_end_of_a_rank_that_has_come_ends_the_wait_unless_it_had_given_up(store, messages, came, monkeypatch):
    def give_up():
        messages.withdraw(1)
        monkeypatch.setattr(Peer, "has_ended", lambda peer: peer.pid is not None and peer.rank == 1)

    with pytest.raises(CollectiveTimeout) as caught:
        meet(store, 3, look=give_up)
    assert caught.value.missing == (2,)
    messages.append(1, record(own_page(), came.entry, False).decode())
    with pytest.raises(PeerLostError, match=r"^the group: rank 1 is lost"):
        meet(store, 3, seconds=600)
    assert (
        store.add("came/0", 0) == 1
    )  # it meets the replacement of the lost rank, which comes for the second time, too


def test_a_rank_that_gave_up_is_missing_only_if_no_other_one_is(store, messages, came):
    """All ranks whose time is over at about the same moment name the same ones."""
    messages.withdraw(1)
    for size, missing in ((3, (2,)), (2, (1,))):
        with pytest.raises(CollectiveTimeout) as caught:
            meet(store, size)
        assert caught.value.missing == missing


def test_who_has_no_time_left_is_late(store):
    with pytest.raises(CollectiveTimeout, match="rank 1: missing"):
        meet(store, 2, seconds=0)


def test_a_store_that_does_not_answer_is_a_timeout(monkeypatch):
    def never(store, key, amount, seconds):
        raise NoAnswerError(f"the store has not answered within {seconds:.3g} s")

    monkeypatch.setattr(TimedStore, "add", never)
    with pytest.raises(CollectiveTimeout, match=r"^the group: 1 of 2 ranks could not be observed"):
        meet(HashStore(), 2)


def test_an_error_that_all_ranks_raise_leaves_the_record_for_those_that_have_not_read_it(store, messages, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("EASYDIST_SHM", "maybe")
        messages.append(1, record(own_page(), -1, False).decode())
    with pytest.raises(RemoteError, match="rank 1: EASYDIST_SHM='maybe' is malformed"):
        meet(store, 2)
    assert 0 in messages.ranks()
    assert store.add("came/0", 0) == 1  # the other rank has used up its first attempt, too


def test_a_rank_that_gives_up_leaves_as_if_it_had_not_come(store, messages):
    with pytest.raises(CollectiveTimeout):
        meet(store, 2)
    assert 0 not in messages.ranks()
    assert store.add("came/0", 0) == 0


def test_a_rank_that_had_another_key_may_come_again_with_the_right_one(store, monkeypatch):
    for key, error in (("b" * 40, WireError), ("a" * 40, None)):
        monkeypatch.setenv("EASYDIST_JOB_KEY", key)
        Messages(store).append(1, record(own_page(), -1, False).decode())
        monkeypatch.setenv("EASYDIST_JOB_KEY", "a" * 40)
        if error is None:
            meet(store, 2, seconds=10)
        else:
            with pytest.raises(error, match="rank 1 has another EASYDIST_JOB_KEY"):
                meet(store, 2)


def test_a_rendezvous_reads_the_messages_of_all_ranks_at_once(store, messages, monkeypatch):
    looks, entries = [], TimedStore.entries
    monkeypatch.setattr(TimedStore, "entries", lambda one, *asked: looks.append(asked) or entries(one, *asked))
    for rank in range(1, 100):
        messages.append(rank, record(own_page(), -1, False).decode())
    meet(store, 100, seconds=10)
    assert len(looks) == 1
