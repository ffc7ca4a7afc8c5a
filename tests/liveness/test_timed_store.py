"""A store that answers late, and a process that ends meanwhile."""

import gc
import threading
import time
import weakref
from queue import SimpleQueue

import launching
import pytest
from torch.distributed import HashStore, TCPStore

from easydist.errors import PeerLostError, WireError
from easydist.liveness.background import NoAnswerError, within
from easydist.liveness.log import Log
from easydist.liveness.monitor import Monitor
from easydist.liveness.rules import PATIENCE
from easydist.liveness.stored import decoded, in_store
from easydist.liveness.timed_store import TimedStore

SCRIPT = """
import time
from datetime import timedelta
from torch.distributed import HashStore
from easydist.liveness.timed_store import TimedStore

class Late(HashStore):
    def check(self, keys):
        self.wait(["never"], timedelta(seconds=1))

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # while the interpreter ends: the answer comes now

ends_slowly = EndsSlowly()
print(TimedStore(Late()).check(["key"]))
"""


GIVEN_UP = """
import os, signal, sys, time
from torch.distributed import TCPStore
from easydist.liveness.background import NoAnswerError, within

reader, writer = os.pipe()
server = os.fork()
if server == 0:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    os.closerange(0, 3)  # else the test would wait for this process, too
    signal.pause()
store = TCPStore("127.0.0.1", int(os.read(reader, 16)), None, False, wait_for_workers=False)
os.kill(server, signal.SIGSTOP)
try:
    within(0.1, lambda: store.add("key", 1))
except NoAnswerError as error:
    print(error)

class EndsSlowly:  # its names are defaults, because the interpreter has emptied modules by then
    def __del__(self, kill=os.kill, sleep=time.sleep, server=server, goes_on=signal.SIGCONT, ends=signal.SIGKILL):
        kill(server, goes_on)
        sleep(1)  # while the interpreter ends: the answer comes now
        kill(server, ends)

sys.modules["ends_slowly"] = EndsSlowly()  # the pending call keeps the script's own globals
"""


class Broken(HashStore):
    def set(self, key, value):
        raise ConnectionError("reset by peer")


def test_a_store_that_raises_an_error_of_its_own_is_gone_and_the_others_go_on():
    with pytest.raises(RuntimeError, match="reset by peer"):
        TimedStore(Broken()).set("key", "value")
    store = TimedStore(HashStore())
    store.set("key", "value")
    assert store.get("key") == b"value"


class Stopped(HashStore):
    """A store that answers once ``goes_on`` is set."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()
        self.order = []

    def set(self, key, value):
        self.goes_on.wait(launching.within(20))
        self.order.append(key)


@pytest.mark.slow
def test_a_stopped_store_holds_up_no_other_and_gets_in_order_what_was_written_meanwhile():
    stopped, other = Stopped(), TimedStore(HashStore())
    store = TimedStore(stopped)
    for key in "abc":
        store.set(key, "")
    store.append("log", 1, "text")
    assert store.is_silent
    assert store.get("a") is None
    assert not store.has_answered
    other.set("key", "value")
    assert other.get("key") == b"value"
    stopped.goes_on.set()
    deadline = time.monotonic() + launching.within(20)
    while store.is_silent:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stopped.order == ["a", "b", "c", "log/1"]


class Far(HashStore):
    """A store on another continent: each question takes its time."""

    def check(self, keys):
        time.sleep(WAY)
        return super().check(keys)

    def get(self, key):
        time.sleep(WAY)
        return super().get(key)

    def multi_get(self, keys):
        time.sleep(WAY)
        return super().multi_get(keys)


WAY = PATIENCE / 3
"""The seconds of one question, of which ``entries`` needs four."""


@pytest.mark.slow
def test_a_store_that_always_takes_longer_than_usual_is_heard():
    store, log, deadline = TimedStore(Far()), Log("log"), time.monotonic() + launching.within(20)
    log.append(store, 1, "first")
    while not (found := log.last(store)):
        assert time.monotonic() < deadline
    assert found == {1: b"first"}


def test_a_call_that_returns_too_late_is_given_up_and_its_result_discarded():
    goes_on, discarded = threading.Event(), SimpleQueue()
    with pytest.raises(NoAnswerError, match=r"the store has not answered within 0\.1 s"):
        within(0.1, lambda: goes_on.wait(launching.within(20)), discard=discarded.put)
    goes_on.set()
    assert discarded.get(timeout=launching.within(20)) is True
    assert within(launching.within(20), lambda: 3) == 3


def test_a_call_ends_with_what_its_check_raises():
    def lost():
        raise PeerLostError("rank 1 is lost")

    with pytest.raises(PeerLostError):
        within(launching.within(20), threading.Event().wait, lost)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (b"[1", [int]),
        (b'["1"]', [int]),
        (b"[true]", (int,)),
        (b"[1, 2]", (int,)),
        (b"{}", {"a": int}),
        (b'{"a": 1}', {str: str}),
        (b"\xff", object),
        (b"[" * 100_000, object),
    ],
)
def test_a_value_of_another_form_is_damaged_and_named(text, form):
    with pytest.raises(WireError, match=r"^the value of 'seen/1' in the group's store is damaged"):
        decoded(in_store("seen/1"), text, form)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "printed"), [(SCRIPT, "False\n"), (GIVEN_UP, "the store has not answered within 0.1 s\n")]
)
def test_a_question_under_way_does_not_abort_a_process_that_ends(script, printed):
    assert launching.python("-c", script) == (printed, "")


@pytest.mark.slow
def test_a_key_that_is_deleted_while_it_is_read_holds_up_nobody():
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    writer, client = TimedStore(server), TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    reader, is_over = TimedStore(client), threading.Event()

    def change():
        while not is_over.is_set():
            writer.set("key", "value")
            writer.delete("key")

    thread = threading.Thread(target=change)
    thread.start()
    found = {reader.get("key") for _ in range(2000)}
    is_over.set()
    thread.join()
    assert found <= {None, b"value"}
    assert not reader.is_silent
    assert client.check(["key"])
    assert reader.get("key") is None


def test_an_empty_value_is_a_value():
    store = HashStore()
    store.set("key", "")
    assert TimedStore(store).get("key") == b""


class Ended(HashStore):
    """A store whose process has ended."""

    def check(self, keys):
        raise RuntimeError("connection reset")


def test_a_group_that_was_recovered_keeps_no_connection_to_a_store_that_has_ended():
    monitor = Monitor(0, 2, 60.0, TimedStore(Ended()))
    store = weakref.ref(monitor._store)
    monitor.hear(monitor.peers[1], remote=True)
    assert monitor._store is None
    assert store() is not None  # for the text of an error
    monitor.retire()
    gc.collect()
    assert store() is None


FAILING_CALLS = """
import os, signal, threading
import torch
import easydist
from easydist import CollectiveTimeout

rank = 1
if (pid := os.fork()) == 0:
    rank = 0
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
easydist.gather(torch.ones(1))
if rank == 0:  # it serves the store
    os.closerange(0, 3)
    signal.pause()
os.kill(pid, signal.SIGSTOP)
counts = []
for _ in range(4):
    try:
        easydist.gather(torch.ones(1), timeout=0.7)
    except CollectiveTimeout:
        counts.append(sum(thread.name == "easydist-call" for thread in threading.enumerate()))
os.kill(pid, signal.SIGKILL)
print(*counts, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_calls_that_fail_while_a_store_is_stopped_leave_no_further_threads():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launching.free_port(), "WORLD_SIZE": "2"}
    out, _ = launching.forked("-c", FAILING_CALLS, **address)
    counts = [int(count) for count in out.split()]
    assert len(counts) == 4
    assert counts[-1] <= max(2, counts[0])
