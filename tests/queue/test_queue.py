import dataclasses
import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from fractions import Fraction

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist

import easydist
import easydist.queue.writer
from easydist import PeerLostError, UnsafeObjectError
from easydist.errors import RemoteError, WireError
from easydist.format import codec
from easydist.queue import Handle, MessageQueue, tcp
from easydist.shm.ring import RingReader, RingWriter, Shape
from easydist.testing import distributed

SOON = launching.within(10)
"""Seconds after which a test that waits has failed."""

TINY = {"max_chunk_bytes": 1 << 14, "max_chunks": 4}
forked = multiprocessing.get_context("forkserver")


class Own:
    """Of a class that nobody has allow-listed."""


@pytest.fixture(params=["shm", "tcp"])
def pair(request):
    """Makes a writer and its reader in this process; both are closed at the end."""
    ends = []

    def make(**options):
        writer = MessageQueue(1, int(request.param == "shm"), connect_ip="127.0.0.1", **options)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        ends.extend([reader, writer])
        writer.wait_until_ready(SOON)
        reader.wait_until_ready(SOON)
        return writer, reader

    make.is_local = request.param == "shm"
    yield make
    for end in ends:
        end.close()


def in_thread(function, *args):
    """Run it beside; ``join`` gives its result, or raises what it raised."""

    class Thread(threading.Thread):
        def run(self):
            self.error = self.result = None
            try:
                self.result = function(*args)
            except BaseException as error:
                self.error = error

        def join(self):
            super().join(SOON)
            assert not self.is_alive()
            if self.error is not None:
                raise self.error
            return self.result

    thread = Thread(daemon=True)
    thread.start()
    return thread


def eventually(condition):
    """Until it is true."""
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def fill(writer, nbytes=1 << 20, timeout=None):
    """Enqueue, and count, until there is no room."""
    writer.count = 0
    while True:
        writer.enqueue(filled(nbytes, writer.count), timeout)
        writer.count += 1


def filled(nbytes, number=0):
    return ((torch.arange(nbytes) * 7 + number) % 251).to(torch.uint8)


def drawn(draw, depth=0):
    """A random object."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return draw.choice([None, True, draw.getrandbits(70), draw.random(), "né" * draw.randrange(9)])
    if kind == 1:
        return draw.randbytes(draw.choice([0, 1, 500, 5000]))
    if kind == 2:
        return torch.tensor([draw.random() for _ in range(draw.randrange(9))], dtype=torch.float64)
    if kind == 3:
        return np.arange(draw.choice([0, 3, 3000]))
    if kind == 4:
        return filled(draw.choice([0, 100, 70_000]), draw.randrange(9))
    if kind == 5:
        return Fraction(draw.randrange(9), 7)
    inner = [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return inner if kind == 6 else tuple(inner) if kind == 7 else dict(enumerate(inner))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@distributed(world_size=[1, 2, 4])
def test_all_readers_get_all_objects_in_order(rank, world_size):
    root = world_size - 1
    with MessageQueue.create_from_process_group(None, 1 << 20, 10, writer_rank=root) as queue:
        for number in range(50):
            value = {"step": number, "x": torch.full((3,), number)} if rank == root else None
            got = queue.broadcast_object(value)
            assert got["step"] == number
            assert got["x"].tolist() == [number] * 3
        assert queue.is_writer == (rank == root)
        dist.barrier()


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=3, timeout=launching.within(30 + launching.examples(10)))
def test_random_objects(rank):
    draw = random.Random(5)
    queue = MessageQueue.create_from_process_group(None, 1 << 16, 10)
    for number in range(launching.examples(10_000)):
        value = drawn(draw)
        if rank == 0:
            queue.enqueue(value)
        else:
            assert same(queue.dequeue(SOON), value), number
    dist.barrier()
    queue.close()


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=3, timeout=launching.within(30 + launching.examples(10)))
def test_random_objects_by_tcp(rank):
    draw = random.Random(6)
    handle = [None]
    if rank == 0:
        queue = MessageQueue(2, 0, connect_ip="127.0.0.1", **TINY)
        handle = [queue.export_handle().plain()]
    easydist.broadcast_object_list(handle, weights_only=True)
    if rank:
        queue = MessageQueue.create_from_handle(Handle(*handle[0]), rank)
    queue.wait_until_ready(SOON)
    for number in range(launching.examples(1000)):
        value = drawn(draw)
        if rank == 0:
            queue.enqueue(value)
        else:
            assert same(queue.dequeue(SOON), value), number
    dist.barrier()
    queue.close()


def test_a_message_is_what_the_codec_writes():
    draw = random.Random(7)
    for value in [*(drawn(draw) for _ in range(200)), np.ones((70, 70)).T, [filled(5000), filled(4096), Own()]]:
        assert b"".join(codec.EncodedObject(value).parts()) == bytes(codec.encode(value).numpy())


def test_objects_larger_than_the_queue(pair):
    writer, reader = pair(**TINY)
    values = [filled(nbytes, nbytes) for nbytes in (5 << 20, 1, 1 << 16, (1 << 16) - 80, 3 << 20)]
    sending = in_thread(lambda: [writer.enqueue(value) for value in values])
    for value in values:
        assert torch.equal(reader.dequeue(SOON), value)
    sending.join()


@pytest.mark.slow
def test_what_a_queue_holds_without_a_reader(pair):
    writer, reader = pair(max_chunk_bytes=6 << 20, max_chunks=2)
    with pytest.raises(TimeoutError, match=r"readers \[0\] made no room in time; nothing of this message will arrive"):
        fill(writer, 5 << 20, timeout=0.05)
    assert writer.count == 2 if pair.is_local else writer.count >= 2  # the system holds some, too
    assert all(torch.equal(reader.dequeue(SOON), filled(5 << 20, number)) for number in range(writer.count))
    writer.enqueue(3)
    assert reader.dequeue(SOON) == 3


def test_threads_of_one_process():
    writer = MessageQueue(3, 2, [4, 1], connect_ip="127.0.0.1", **TINY)
    count = 300

    def read(rank):
        with MessageQueue.create_from_handle(writer.export_handle(), rank) as reader:
            reader.wait_until_ready(SOON)
            return list(reader)

    readers = [in_thread(read, rank) for rank in (4, 1, 7)]
    writer.wait_until_ready(timedelta(seconds=SOON))
    for number in range(count):
        writer.enqueue(number)
    writer.close()
    assert [reader.join() for reader in readers] == [list(range(count))] * 3


def test_threads_share_an_end(pair):
    writer, reader = pair(**TINY)
    writers = [in_thread(lambda t=t: [writer.enqueue((t, n), SOON) for n in range(100)]) for t in range(3)]
    readers = [in_thread(lambda: [reader.dequeue(SOON) for _ in range(100)]) for _ in range(3)]
    for thread in writers:
        thread.join()
    got = [item for thread in readers for item in thread.join()]
    assert sorted(got) == [(t, n) for t in range(3) for n in range(100)]


def test_changes_after_enqueue_do_not_arrive(pair):
    writer, reader = pair()
    tensor, array = filled(3 << 20), np.arange(100_000)
    writer.enqueue([tensor, array])
    tensor.fill_(0)
    array[:] = 0
    got = reader.dequeue(SOON)
    assert torch.equal(got[0], filled(3 << 20))
    assert np.array_equal(got[1], np.arange(100_000))
    got[0].fill_(1)  # nor are they read-only


@pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=1)])
def test_dequeue_in_vain(pair, timeout):
    writer, reader = pair()
    with pytest.raises(TimeoutError, match=rf"no message from the writer, process {os.getpid()} on .*, in time"):
        reader.dequeue(timeout)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


@pytest.mark.slow
def test_time_is_over_in_the_middle_of_a_message(pair):
    """The reader keeps its place; what the writer gives up never arrives."""
    writer, reader = pair(**TINY)
    large = filled(16 << 20)
    sending = in_thread(writer.enqueue, large)
    times = 0
    while True:
        try:
            got = reader.dequeue(0)
            break
        except TimeoutError:
            times += 1
    sending.join()
    assert times > 0 or not pair.is_local
    assert torch.equal(got, large)
    if pair.is_local:
        with pytest.raises(TimeoutError, match="made no room"):
            writer.enqueue(large, 0.02)
        with pytest.raises(TimeoutError):
            reader.dequeue(0.01)  # holds a part of it
        writer.enqueue("next")
        with pytest.raises(TimeoutError, match="made no room"):
            writer.enqueue(large, 0.02)
        assert reader.dequeue(SOON) == "next"
        writer.enqueue("last")
        assert reader.dequeue(SOON) == "last"
    else:
        with pytest.raises(TimeoutError):
            fill(writer, timeout=0.01)
        assert all(torch.equal(reader.dequeue(SOON), filled(1 << 20, number)) for number in range(writer.count))
        writer.enqueue("last")
        assert reader.dequeue(SOON) == "last"


@pytest.mark.slow
def test_slow_readers_make_the_writer_wait(pair):
    writer, reader = pair(**TINY)
    count = 60
    sending = in_thread(lambda: [writer.enqueue([n, filled(1 << 19)]) for n in range(count)])
    eventually(waits(writer))
    for number in range(count):
        got = reader.dequeue(SOON)
        assert got[0] == number
        assert torch.equal(got[1], filled(1 << 19))
    sending.join()


def waits(queue):
    """Whether another thread has its turn at a queue's end."""

    def look():
        if is_free := queue._end._lock.acquire(blocking=False):
            queue._end._lock.release()
        return not is_free

    return look


@pytest.mark.parametrize("end", ["cancel", "close", "shutdown"])
@pytest.mark.parametrize("which", ["reader", "writer"])
def test_waits_are_cancelled(pair, which, end):
    writer, reader = pair(**TINY)
    queue, wait = (reader, reader.dequeue) if which == "reader" else (writer, lambda: fill(writer))
    thread = in_thread(wait)
    eventually(waits(queue))
    closing = in_thread(getattr(queue, end))
    with pytest.raises(RuntimeError, match=r"cancelled|has been closed"):
        thread.join()
    if end != "cancel" and which == "writer":
        assert all(torch.equal(value, filled(1 << 20, number)) for number, value in enumerate(reader))
    closing.join()
    with pytest.raises(RuntimeError, match="cancelled" if end == "cancel" else "has been closed"):
        wait()


def test_a_cancelled_end_does_what_needs_no_wait(pair):
    writer, reader = pair()
    writer.cancel()
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


def test_the_writer_closes(pair):
    writer, reader = pair()
    writer.enqueue([1])
    writer.enqueue(filled(100_000))
    thread = in_thread(lambda: list(reader))
    writer.close()
    assert len(thread.join()) == 2
    for _ in range(2):
        with pytest.raises(EOFError, match=f"the writer, process {os.getpid()} on .*, has closed the queue"):
            reader.dequeue(SOON)
    with pytest.raises(RuntimeError, match="this end of the queue has been closed"):
        writer.enqueue(1)


def test_a_reader_closes(pair):
    writer, reader = pair(**TINY)
    thread = in_thread(fill, writer)
    eventually(waits(writer))
    reader.close()
    for _ in range(2):
        with pytest.raises(BrokenPipeError, match="reader 0 has closed its end"):
            thread.join()
        thread = in_thread(fill, writer)
    reader.close()


@pytest.mark.slow
def test_an_end_that_is_forgotten_is_closed():
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    del writer
    gc.collect()
    assert list(reader) == []


def read_then_wait(handle, rank, pipe):
    queue = MessageQueue.create_from_handle(handle, rank)
    pipe.send(queue.dequeue(SOON))
    try:
        while True:
            queue.dequeue(SOON)
    except Exception as error:
        pipe.send((type(error).__name__, str(error), getattr(error, "pid", None)))


def write_then_die(is_local, pipe):
    queue = MessageQueue(1, int(is_local), connect_ip="127.0.0.1")
    pipe.send(queue.export_handle())
    queue.wait_until_ready(SOON)
    queue.enqueue("last words")
    pipe.send(None)
    time.sleep(SOON)


def started(function, *args):
    mine, theirs = forked.Pipe()
    process = forked.Process(target=function, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def killed(process):
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    return lambda: time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [True, False])
def test_writer_that_is_killed(is_local):
    process, pipe = started(write_then_die, is_local)
    reader = MessageQueue.create_from_handle(pipe.recv(), 0)
    pipe.recv()
    assert reader.dequeue(SOON) == "last words"
    thread = in_thread(reader.dequeue)
    eventually(waits(reader))
    seconds = killed(process)
    with pytest.raises(PeerLostError, match=f"the writer is lost: process {process.pid} on .* ended") as caught:
        thread.join()
    assert seconds() < launching.within(0.5)
    assert caught.value.pid == process.pid
    process.join()
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [True, False])
def test_reader_that_is_killed(is_local):
    writer = MessageQueue(2, 2 * is_local, connect_ip="127.0.0.1", **TINY)
    processes = [started(read_then_wait, writer.export_handle(), rank) for rank in range(2)]
    writer.wait_until_ready(SOON)
    writer.enqueue(1)
    assert [pipe.recv() for _, pipe in processes] == [1, 1]
    victim = processes[1][0]
    os.kill(victim.pid, signal.SIGSTOP)
    thread = in_thread(fill, writer)
    eventually(waits(writer))
    seconds = killed(victim)
    with pytest.raises(PeerLostError, match=f"reader 1 is lost: process {victim.pid} on .* ended") as caught:
        thread.join()
    assert seconds() < launching.within(0.5)
    assert (caught.value.rank, caught.value.pid) == (1, victim.pid)
    with pytest.raises(PeerLostError):
        fill(writer)
    writer.close()
    for process, _ in processes:
        process.join()


@pytest.mark.slow
def test_reader_hears_that_the_writer_has_closed():
    for is_local in (True, False):
        writer = MessageQueue(1, int(is_local), connect_ip="127.0.0.1")
        process, pipe = started(read_then_wait, writer.export_handle(), 0)
        writer.wait_until_ready(SOON)
        writer.enqueue([2])
        assert pipe.recv() == [2]
        writer.close()
        assert pipe.recv()[0] == "EOFError"
        process.join()
        assert process.exitcode == 0


def test_wrong_key_is_refused():
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    handle = writer.export_handle()
    assert handle.key.hex() not in repr(handle)
    assert str(handle.key) not in repr(handle)
    connection = socket.create_connection(handle.address)
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
    wrong = MessageQueue.create_from_handle(dataclasses.replace(handle, key=bytes(32)), 0)
    thread = in_thread(writer.wait_until_ready, SOON)
    with pytest.raises(PermissionError, match="does not let this reader in"):
        wrong.dequeue(SOON)
    reader = MessageQueue.create_from_handle(handle, 0)
    thread.join()
    writer.enqueue("secret")
    assert reader.dequeue(SOON) == "secret"
    with suppress(ConnectionResetError):
        assert connection.recv(1 << 16) == b""
    for end in (connection, wrong, reader, writer):
        end.close()


def test_a_false_writer_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
        handle = dataclasses.replace(writer.export_handle(), address=server.getsockname())
        reader = MessageQueue.create_from_handle(handle, 0)
        connection, _ = server.accept()
        connection.sendall(bytes(1000))
        with pytest.raises(PermissionError, match="does not have the key"):
            reader.dequeue(SOON)
        for end in (connection, reader, writer):
            end.close()


@pytest.mark.slow
def test_silent_connections_do_not_keep_a_reader_out():
    with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        waiting = in_thread(writer.wait_until_ready, SOON)
        silent = []
        for _ in range(150):
            silent.append(socket.create_connection(handle.address))
            if len(silent) % 50 == 0:  # none of them waits in the kernel
                eventually(lambda: len(writer._end._listener._pending) == min(64, len(silent)))
        with MessageQueue.create_from_handle(handle, 0) as reader:
            reader.wait_until_ready(5)  # what says nothing may stay for 10 s
            waiting.join()
            writer.enqueue(1)
            assert reader.dequeue(SOON) == 1
        for connection in silent:
            connection.close()


@contextmanager
def no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def remote():
    """A writer and its reader by TCP, which the writer has not let in yet."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    yield writer, reader
    reader.close()
    writer.close()


@pytest.mark.parametrize("wait", ["enqueue", "wait_until_ready"])
def test_a_writer_without_descriptors_says_so_and_goes_on_when_it_has_some(remote, wait):
    writer, reader = remote
    text = r"^MessageQueue: a reader cannot be let in: Too many open files\. If .* raise the limit \(ulimit"
    with no_descriptor_left(), pytest.raises(ConnectionError, match=text):
        writer.enqueue("lost", SOON) if wait == "enqueue" else writer.wait_until_ready(SOON)
    writer.wait_until_ready(SOON)
    writer.enqueue("next")
    assert reader.dequeue(SOON) == "next"


def test_a_reader_without_descriptors_says_so(remote):
    text = r"no connection to process .*: Too many open files\. Close some files"
    with no_descriptor_left(), pytest.raises(ConnectionError, match=text):
        MessageQueue.create_from_handle(remote[0].export_handle(), 0)


@pytest.mark.parametrize(
    "record",
    [
        *(b"", b"\xff" * 512, b"[" * 512, b"[1]", b'{"a": 1}', b'[1.0, "h", "i", true, -1, "../../x", 3, "t"]'),
        b'[1.0, "h", "i", true, -1, 1, 3, null]',
    ],
)
def test_a_reader_that_tells_nonsense_is_refused_and_the_writer_says_so(record):
    with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        hello = tcp._HELLO.pack(0, bytes(32), record.ljust(tcp.RECORD_NBYTES))
        with socket.create_connection(handle.address) as connection:
            connection.sendall(hello + tcp._proof(handle.key, b"reader", hello))
            with pytest.raises(
                ConnectionError, match="reader 0 was not let in: what it tells of its process is damaged"
            ):
                writer.enqueue(1)
            assert connection.recv(1) == b""
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue(2)
            assert reader.dequeue(SOON) == 2
        with pytest.raises(WireError, match="what it tells of its process is damaged"):
            MessageQueue.create_from_handle(dataclasses.replace(handle, writer=record), 0)


def test_a_message_that_no_memory_can_hold_is_an_error_of_the_queue(remote):
    writer, reader = remote
    writer.wait_until_ready(SOON)
    writer._end._senders[0]._add(tcp._LENGTH.pack(2**62))
    with pytest.raises(ConnectionError, match=f"announces a message of {2**62} bytes, for which there is no memory"):
        reader.dequeue(SOON)
    with pytest.raises(PeerLostError):
        reader.dequeue(SOON)


def test_each_rank_is_let_in_once(pair):
    writer, reader = pair()
    with pytest.raises((RuntimeError, ConnectionError), match=r"taken|has all its readers"):
        MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


def test_more_readers_than_announced_are_refused():
    writer = MessageQueue(2, 0, connect_ip="127.0.0.1")
    first, again = [MessageQueue.create_from_handle(writer.export_handle(), 3) for _ in range(2)]
    thread = in_thread(writer.wait_until_ready, SOON)
    with pytest.raises(PermissionError, match="its rank has been taken"):
        again.dequeue(SOON)
    second = MessageQueue.create_from_handle(writer.export_handle(), 0)
    thread.join()
    writer.enqueue(1)
    assert first.dequeue(SOON) == second.dequeue(SOON) == 1
    for end in (again, first, second, writer):
        end.close()


def test_local_reader_that_cannot_attach_is_connected():
    writer = MessageQueue(2, 2)
    handle = writer.export_handle()
    writer.enqueue(filled(3 << 20))
    writer.enqueue("second")
    hidden = dataclasses.replace(handle, ring=("1/999999/0/0", handle.ring[1]))
    far, near = MessageQueue.create_from_handle(hidden, 0), MessageQueue.create_from_handle(handle, 1)
    writer.wait_until_ready(SOON)
    writer.enqueue("third")
    for reader in (far, near):
        assert torch.equal(reader.dequeue(SOON), filled(3 << 20))
        assert [reader.dequeue(SOON), reader.dequeue(SOON)] == ["second", "third"]
    assert (far._end.is_local, near._end.is_local) == (False, True)
    for end in (far, near, writer):
        end.close()


def test_shared_memory_that_is_not_wanted(monkeypatch):
    with MessageQueue(1, 1) as writer:
        monkeypatch.setenv("EASYDIST_SHM", "0")
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue(SOON) == 1
            assert not reader._end.is_local
        with MessageQueue(1, 1) as other:
            assert other.export_handle().ring is None


def test_host_without_shared_memory(monkeypatch, caplog):
    def full(shape):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(easydist.queue.writer, "RingWriter", full)
    writer = MessageQueue(1, 1)
    assert "no shared memory" in caplog.text
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1
    writer.close()
    reader.close()


def test_what_is_not_allow_listed_is_refused_by_both_ends(pair):
    writer, reader = pair()
    with pytest.raises(UnsafeObjectError, match="Own"):
        writer.enqueue(Own())
    writer._end.put(codec.EncodedObject(Own()), None)  # a writer that does not look
    writer.enqueue(1)
    with pytest.raises(UnsafeObjectError, match="Own"):
        reader.dequeue(SOON)
    assert reader.dequeue(SOON) == 1


def test_any_object(pair):
    writer, reader = pair(weights_only=False)
    writer.enqueue([Own(), {1: "a"}])
    assert type(reader.dequeue(SOON)[0]) is Own
    easydist.allow_pickle(False)
    try:
        with pytest.raises(UnsafeObjectError):
            MessageQueue(1, 1, weights_only=False)
        with pytest.raises(UnsafeObjectError):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
    finally:
        easydist.allow_pickle(True)


def test_what_cannot_be_pickled_leaves_nothing(pair):
    writer, reader = pair()
    with pytest.raises(TypeError, match="cannot be pickled"):
        writer.enqueue([filled(100_000), lambda: 1])
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


class Half:
    """Fails in the middle of being pickled."""

    def __reduce__(self):
        raise LookupError("no other half")


BEFORE_IT_IS_SENT = {
    "not allow-listed": ([filled(100_000), Own()], {}, UnsafeObjectError),
    "not to be pickled": ([filled(100_000), lambda: 1], {}, TypeError),
    "fails while it is pickled": ([filled(3 << 20), Half()], {}, LookupError),
    "no timeout": (1, {"timeout": "soon"}, ValueError),
    "no number": (1, {"timeout": [1]}, TypeError),
}


@pytest.mark.parametrize("name", BEFORE_IT_IS_SENT)
def test_an_error_before_an_object_is_sent_leaves_nothing_in_the_queue(pair, name):
    value, options, error = BEFORE_IT_IS_SENT[name]
    writer, reader = pair()
    for number in range(3):
        with pytest.raises(error):
            writer.enqueue(value, **options)
        writer.enqueue(number)
    assert [reader.dequeue(SOON) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(error):
        writer.enqueue(value, **options)
    writer.close()
    assert list(reader) == []


def test_a_closed_queue_takes_nothing(pair):
    writer, reader = pair()
    writer.enqueue(1)
    writer.close()
    with pytest.raises(RuntimeError, match="this end of the queue has been closed"):
        writer.enqueue(2)
    with pytest.raises(RuntimeError, match="Only writers can enqueue"):
        reader.enqueue(3)
    assert list(reader) == [1]


def test_misuse(pair):
    writer, reader = pair()
    with pytest.raises(RuntimeError, match="Only writers can enqueue"):
        reader.enqueue(1)
    with pytest.raises(RuntimeError, match="Only readers can dequeue"):
        writer.dequeue()
    for numbers in ((1, 2), (2, 1, [0, 1]), (2, 2, [1, 1]), (-1, 0), (1, 1, None, 0), (1, 1, None, 1, 0)):
        with pytest.raises(ValueError, match="MessageQueue: "):
            MessageQueue(*numbers)


def test_nobody_comes():
    writer = MessageQueue(2, 1)
    with pytest.raises(TimeoutError, match="wait_until_ready: 2 of 2 readers did not come in time"):
        writer.wait_until_ready(0.01)
    with pytest.raises(TimeoutError, match="enqueue: 2 of 2 readers did not come in time"):
        writer.enqueue(1, 0.01)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(TimeoutError, match="wait_until_ready: not all readers came in time"):
        reader.wait_until_ready(0.01)
    writer.close()
    with pytest.raises(EOFError):
        reader.wait_until_ready(SOON)
    with pytest.raises(ConnectionError, match="has closed the queue"):
        MessageQueue.create_from_handle(writer.export_handle(), 1)
    reader.close()


@pytest.mark.slow
def test_nothing_is_left_behind(pair):
    def open_files():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("/dev/shm" in line for line in maps)

    def once():
        writer, reader = pair()
        writer.enqueue(filled(10_000))
        reader.dequeue(SOON)
        reader.close()
        writer.close()

    once()
    gc.collect()
    before, names = open_files(), os.listdir("/dev/shm")
    for _ in range(100):
        once()
    gc.collect()
    assert open_files() == before
    assert [name for name in os.listdir("/dev/shm") if name not in names and "easydist" in name] == []


def test_signals_reach_waits(pair):
    writer, reader = pair(**TINY)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.get_ident()

    def interrupt(queue):
        eventually(waits(queue))
        signal.pthread_kill(thread, signal.SIGINT)

    try:
        for queue, wait in ((reader, reader.dequeue), (writer, lambda: fill(writer))):
            in_thread(interrupt, queue)
            with pytest.raises(KeyboardInterrupt):
                wait()
    finally:
        signal.signal(signal.SIGINT, before)


def test_forked_child_has_to_make_its_own_end(pair):
    writer, reader = pair()
    other = MessageQueue(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking a process with threads
        child = os.fork()
    if child == 0:
        try:
            for call in (lambda: writer.enqueue(1), reader.dequeue):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            writer.close()
            reader.close()
            own = MessageQueue.create_from_handle(other.export_handle(), 0)
            assert own.dequeue(SOON) == "to the child"
            os._exit(0)
        finally:
            os._exit(1)
    other.enqueue("to the child")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.enqueue(2)
    assert reader.dequeue(SOON) == 2
    other.close()


@pytest.mark.slow
def test_waiting_does_not_use_the_core(pair):
    _, reader = pair()
    before = time.process_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(1.0)
    assert time.process_time() - before < 0.02


@distributed(world_size=3)
def test_one_reader_for_every_rank(rank, world_size):
    queue, handles = MessageQueue.create_from_process_group_single_reader(None, 1 << 16, 10, reader_rank=1)
    queue.enqueue(rank)
    assert len(handles) == (world_size if rank == 1 else 0)
    readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    assert [reader.dequeue(SOON) for reader in readers] == list(range(world_size))[: len(readers)]
    dist.barrier()
    for end in (*readers, queue):
        end.close()


@distributed(world_size=3)
def test_ranks_of_a_group(rank):
    group = dist.new_group([2, 1])
    if rank == 0:
        return
    with MessageQueue.create_from_process_group(group, 1 << 16, 10, writer_rank=1) as queue:
        assert queue.is_writer == (rank == 2)
        assert queue.broadcast_object("x" if rank == 2 else None) == "x"
        dist.barrier(group)
    queue, handles = MessageQueue.create_from_process_group_single_reader(group, 1 << 16, 10, 2)
    assert len(handles) == (2 if rank == 2 else 0)
    queue.close()


@distributed(world_size=2)
def test_writer_outside_of_the_group(rank):
    outside = MessageQueue(2, 2) if rank == 0 else None
    queue = MessageQueue.create_from_process_group(
        None, 1, 1, external_writer_handle=outside.export_handle() if outside else None, blocking=False
    )
    if outside:
        outside.wait_until_ready(SOON)
        outside.enqueue("all")
    queue.wait_until_ready(SOON)
    assert queue.dequeue(SOON) == "all"
    dist.barrier()
    queue.close()


@distributed(world_size=2)
def test_all_ranks_hear_that_one_cannot_make_its_end(rank):
    with pytest.raises(RemoteError, match=r"rank 0: ValueError: .*max_chunks=0"):
        MessageQueue.create_from_process_group(None, 1, 0)


@pytest.mark.slow
@pytest.mark.stress
def test_ring_of_random_pieces():
    for seed in range(launching.examples(5)):
        draw = random.Random(seed)
        writer = RingWriter(Shape.of(3, 1 << 14, 4))
        readers = [RingReader(writer.name, writer.shape, i, b"") for i in range(3)]
        sent, got, at = [], [[] for _ in readers], 0
        value = b""
        for _ in range(3000):
            if draw.random() < 0.5:
                if not at:  # sometimes a message is given up
                    value = draw.randbytes(draw.choice([1, 60, 700, 20_000]))
                piece = value[at : at + writer.shape.piece]
                if (place := writer.place(len(piece))) >= 0:
                    writer.post(place, [memoryview(piece)], at, len(value))
                    at += len(piece)
                    sent += [value] * (at == len(value))
                    at *= at != len(value) and draw.random() > 0.05
            else:
                i = draw.randrange(3)
                got[i] += [bytes(m.numpy()) for m in iter(readers[i].pull, None)]
        for i, reader in enumerate(readers):
            got[i] += [bytes(m.numpy()) for m in iter(reader.pull, None)]
            assert got[i] == sent
        writer.close()


def test_ring_takes_memory_only_where_readers_lag():
    writer = RingWriter(Shape.of(1, 64 << 20, 10))
    reader = RingReader(writer.name, writer.shape, 0, b"")
    piece = bytes(writer.shape.piece)

    def taken():
        return os.fstat(writer._file).st_blocks * 512

    for _ in range(100):
        writer.post(writer.place(len(piece)), [memoryview(piece)], 0, len(piece))
        reader.pull()
    assert taken() < 5 << 20
    while writer.place(len(piece), grow=False) >= 0:
        writer.post(writer.place(len(piece)), [memoryview(piece)], 0, len(piece))
    assert taken() < 5 << 20
    writer.post(writer.place(len(piece)), [memoryview(piece)], 0, len(piece))
    assert taken() < 13 << 20
    writer.close()
    reader.close()
