"""Logs of real stores: what ranks append at the same time is read once, in few questions."""

import threading
import time

import launching
import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from easydist.errors import WireError
from easydist.liveness import log as logs_of_stores, timed_store
from easydist.liveness.log import Log, LogEntry, pause
from easydist.liveness.rules import PATIENCE
from easydist.liveness.timed_store import POLL, TimedStore


def reached(server, count):
    return [TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(count)]


STORES = {
    "hash": lambda _: [HashStore()] * 4,
    "file": lambda folder: [FileStore(str(folder / "store"), 4) for _ in range(4)],
    "tcp": lambda _: [(server := TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)), *reached(server, 3)],
}


class View:
    """One rank's view of a log."""

    def __init__(self, store):
        self._log, self._store = Log("log"), TimedStore(store)

    def append(self, rank, text):
        self._log.append(self._store, rank, text)

    def withdraw(self, rank):
        self._log.withdraw(self._store, rank)

    def news(self):
        return [*self._log.news(self._store)]

    def last(self):
        return self._log.last(self._store)


@pytest.fixture(params=STORES)
def views(request, tmp_path):
    """Return the views of four ranks."""
    return [View(PrefixStore("group", store)) for store in STORES[request.param](tmp_path)]


def test_each_entry_is_read_once_while_others_append(views):
    def write(rank):
        for number in range(50):
            views[rank].append(rank, f"{number}\n é")

    found = []

    def read():
        while any(thread.is_alive() for thread in writers) or len(found) < 150:
            found.extend(views[0].news())

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(1, 4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in (*writers, *readers):
        thread.join()
    assert sorted(int(entry.key[4:]) for entry in found) == [*range(1, 151)]
    for rank in range(1, 4):
        mine = sorted((int(entry.key[4:]), entry.text.decode()) for entry in found if entry.by == rank)
        assert [text for _, text in mine] == [f"{number}\n é" for number in range(50)]
    assert not views[0].news()


def test_the_last_entry_of_a_rank_counts_until_it_withdraws(views):
    for rank, text in ((1, "a"), (2, ""), (1, "b")):
        views[rank].append(rank, text)
    assert views[0].last() == {1: b"b", 2: b""}
    views[1].withdraw(1)
    assert views[0].last() == views[3].last() == {2: b""}
    views[1].append(1, "c")
    assert views[0].last() == {1: b"c", 2: b""}


def test_an_entry_that_is_counted_but_not_written_yet_holds_up_no_other():
    store = HashStore()
    view = View(store)
    store.add("log", 1)
    view.append(2, "second")
    assert view.news() == [LogEntry("log/2", 2, b"second")]
    assert not view.news()
    store.set("log/1", "1 first")
    assert view.news() == [LogEntry("log/1", 1, b"first")]


def test_many_entries_that_are_not_written_yet_are_read_later(monkeypatch):
    monkeypatch.setattr(logs_of_stores, "AT_ONCE", 3)
    store = HashStore()
    view = View(store)
    for _ in range(8):
        store.add("log", 1)
    assert not view.news()
    for number in range(1, 9):
        store.set(f"log/{number}", f"{number} text")
    found = [entry.by for _ in range(4) for entry in view.news()]
    assert sorted(found) == [*range(1, 9)]


def test_an_older_entry_that_is_written_later_does_not_count():
    store = HashStore()
    view = View(store)
    store.add("log", 1)
    view.append(2, "new")
    assert view.last() == {2: b"new"}
    store.set("log/1", "2 old")
    assert view.last() == {2: b"new"}


@pytest.mark.parametrize("junk", ["[1]", f"{'9' * 5000} text", "-1 text", ""])
def test_an_entry_of_another_program_does_not_count(junk):
    store = HashStore()
    view = View(store)
    store.set(f"log/{store.add('log', 1)}", junk)
    view.append(1, "text")
    assert view.last() == {1: b"text"}
    assert View(store).news() == [LogEntry("log/1", None, junk.encode()), LogEntry("log/2", 1, b"text")]


def test_a_rank_with_another_key_is_named_until_it_comes_with_the_right_one(monkeypatch):
    store = HashStore()
    for key in ("b" * 40, "a" * 40):
        monkeypatch.setenv("EASYDIST_JOB_KEY", "a" * 40)
        view = View(store)
        monkeypatch.setenv("EASYDIST_JOB_KEY", key)
        View(store).append(1, "text")
        if key == "b" * 40:
            for _ in range(2):
                with pytest.raises(WireError, match="rank 1 has another EASYDIST_JOB_KEY"):
                    view.last()
    assert view.last() == {1: b"text"}


def test_an_error_of_news_is_raised_once_also_by_a_view_that_begins_again(monkeypatch):
    raw, refused = HashStore(), set()
    View(raw).append(1, "text")
    monkeypatch.setenv("EASYDIST_JOB_KEY", "a" * 40)
    store = TimedStore(raw)
    with pytest.raises(WireError, match="is not signed"):
        [*Log("log", refused).news(store)]
    assert not [*Log("log", refused).news(store)]


class Ending(HashStore):
    """A store that ends after some questions."""

    left = 5

    def check(self, keys):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the store is gone")
        return super().check(keys)


def test_what_was_read_before_the_store_ended_is_told(monkeypatch):
    monkeypatch.setattr(logs_of_stores, "AT_ONCE", 2)
    store = Ending()
    view, found = View(store), []
    for number in range(10):
        view.append(1, str(number))

    def read():
        found.extend(entry.text for entry in view._log.news(view._store))

    with pytest.raises(RuntimeError, match="the store is gone"):
        read()
    assert found == [b"0", b"1", b"2", b"3"]


def test_the_rank_of_an_entry_is_signed(monkeypatch):
    monkeypatch.setenv("EASYDIST_JOB_KEY", "a" * 40)
    store = HashStore()
    View(store).append(1, "text")
    store.set("log/1", store.get("log/1").decode().replace(":1 text", ":2 text"))
    with pytest.raises(WireError, match="has a wrong signature"):
        View(store).news()


class Counting(HashStore):
    """A store that counts its questions, and takes its time for each value."""

    asked, seconds = 0, 0.0


def counted(real):
    def count(self, *arguments):
        Counting.asked += 1
        time.sleep(Counting.seconds * (len(arguments[0]) if isinstance(arguments[0], list) else 1))
        return real(self, *arguments)

    return count


for name in ("add", "set", "get", "check", "multi_get"):
    setattr(Counting, name, counted(getattr(HashStore, name)))


@pytest.mark.parametrize("size", [2, 100])
def test_a_rank_that_reads_all_others_asks_six_times(size):
    store = Counting()
    views = [View(store) for _ in range(size)]
    Counting.asked = 0
    for rank, view in enumerate(views):
        view.append(rank, "text")
    assert all(view.last().keys() == {*range(size)} for view in views)
    assert Counting.asked == 6 * size
    assert not views[0].news()
    assert Counting.asked == 6 * size + 2


def test_an_entry_that_is_missing_costs_few_questions():
    store = Counting()
    for _ in range(500):
        store.set(f"log/{store.add('log', 1)}", "1 text")
    store.delete_key("log/77")
    Counting.asked = 0
    assert len(View(store).news()) == 499
    assert Counting.asked < 50


def test_more_entries_than_are_asked_for_at_once_are_read_in_one_look(monkeypatch):
    monkeypatch.setattr(logs_of_stores, "AT_ONCE", 10)
    view = View(HashStore())
    for rank in range(95):
        view.append(rank, "text")
    assert view.last().keys() == {*range(95)}


@pytest.mark.slow
def test_a_slow_store_is_asked_for_less(monkeypatch):
    store, view = Counting(), None
    for _ in range(100):
        store.set(f"log/{store.add('log', 1)}", "1 text")
    monkeypatch.setattr(Counting, "seconds", PATIENCE / 50)
    monkeypatch.setattr(timed_store, "_MOST_PATIENCE", PATIENCE)  # else it would soon wait for all of them
    monkeypatch.setattr(logs_of_stores, "AT_ONCE", 200)
    view, found, until = View(store), [], time.monotonic() + launching.within(30)
    while len(found) < 100:
        assert time.monotonic() < until
        found += view.news()
    assert len({entry.key for entry in found}) == len(found)


def test_the_store_has_time_for_all_ranks():
    assert [pause(size, 0.0) for size in (2, 100, 10_000)] == [POLL, POLL, 0.2]


def test_ranks_that_have_waited_long_look_less_often():
    assert [pause(2, waited) for waited in (0.2, 0.5, 1.0, 60.0)] == [POLL, 0.01, 0.02, 0.05]
    assert pause(10_000, 60.0) == 0.2
