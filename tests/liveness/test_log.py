"""Logs of real stores: what ranks append at the same time is read once, in few questions."""

import threading

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from easydist.errors import WireError
from easydist.liveness.log import Entry, Log, pause
from easydist.liveness.timed_store import POLL, TimedStore

STORES = {
    "hash": lambda _: [HashStore()] * 4,
    "file": lambda folder: [FileStore(str(folder / "store"), 4) for _ in range(4)],
    "tcp": lambda _: [(server := TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)), *reached(server, 3)],
}


def reached(server, count):
    return [TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(count)]


@pytest.fixture(params=STORES)
def logs(request, tmp_path):
    """Return the views of four ranks."""
    return [Log(TimedStore(PrefixStore("group", store)), "log") for store in STORES[request.param](tmp_path)]


def test_each_entry_is_read_once_while_others_append(logs):
    def write(rank):
        for number in range(50):
            logs[rank].append(rank, f"{number}\n é")

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(1, 4)]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads) or len(found) < 150:
        found += logs[0].news()
    assert {entry.key for entry in found} == {f"log/{number}" for number in range(1, 151)}
    for rank in range(1, 4):
        assert [entry.text.decode() for entry in found if entry.by == rank] == [f"{n}\n é" for n in range(50)]
    assert not [*logs[0].news()]


def test_the_last_entry_of_a_rank_counts_until_it_withdraws(logs):
    for rank, text in ((1, "a"), (2, ""), (1, "b")):
        logs[rank].append(rank, text)
    assert logs[0].last() == {1: b"b", 2: b""}
    logs[1].withdraw(1)
    assert logs[0].last() == logs[3].last() == {2: b""}
    logs[1].append(1, "c")
    assert logs[0].last() == {1: b"c", 2: b""}


def test_an_entry_that_is_counted_but_not_written_yet_holds_up_no_other():
    store = HashStore()
    log = Log(TimedStore(store), "log")
    store.add("log", 1)
    log.append(2, "second")
    assert [*log.news()] == [Entry("log/2", 2, b"second")]
    assert not [*log.news()]
    store.set("log/1", "1 first")
    assert [*log.news()] == [Entry("log/1", 1, b"first")]


def test_an_entry_of_another_program_is_raised_once():
    store = HashStore()
    log = Log(TimedStore(store), "log")
    store.set(f"log/{store.add('log', 1)}", "[1]")
    log.append(1, "text")
    with pytest.raises(WireError, match=r"^the value of 'log/1' in the group's store is damaged"):
        log.last()
    assert log.last() == {1: b"text"}


class Counting(HashStore):
    """A store that counts its questions."""

    asked = 0


def counted(real):
    def count(self, *arguments):
        Counting.asked += 1
        return real(self, *arguments)

    return count


for name in ("add", "set", "get", "check", "multi_get"):
    setattr(Counting, name, counted(getattr(HashStore, name)))


@pytest.mark.parametrize("size", [2, 100])
def test_a_rank_that_reads_all_others_asks_five_times(size):
    store = Counting()
    logs = [Log(TimedStore(store), "log") for _ in range(size)]
    Counting.asked = 0
    for rank, log in enumerate(logs):
        log.append(rank, "text")
    assert all(log.last().keys() == {*range(size)} for log in logs)
    assert Counting.asked == 5 * size
    assert not [*logs[0].news()]
    assert Counting.asked == 5 * size + 1


def test_the_store_has_time_for_all_ranks():
    assert [pause(size) for size in (2, 100, 10_000)] == [POLL, POLL, 0.2]
