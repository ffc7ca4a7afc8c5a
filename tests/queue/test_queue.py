"""A queue delivers all objects to all readers, in order."""

import copy
import gc
import itertools
import os
import pickle
import random
import signal
import threading
import time
from datetime import timedelta

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist
from queues import SOON, TINY, Own, drawn, eventually, fill, filled, in_thread, same, waits

import easydist
import easydist.queue.writer
from easydist import UnsafeObjectError
from easydist.format import codec
from easydist.queue import Handle, MessageQueue
from easydist.queue.end import End, deadline
from easydist.shm.ring import RingReader, RingWriter, Shape
from easydist.testing import distributed


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
    for number in range(launching.examples(4000)):
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


@pytest.mark.parametrize("lengths", [[], [0], [3], [4], [8], [3, 5], [0, 4, 0], [1, 9, 2], [5, 0, 3, 4], [13]], ids=str)
def test_a_message_is_cut_into_pieces_of_one_length(lengths):
    whole, ends = bytes(range(sum(lengths))), [0, *itertools.accumulate(lengths)]
    parts = [memoryview(whole)[begin:end] for begin, end in itertools.pairwise(ends)]
    pieces = [*easydist.queue.writer._cut(parts, 4)]
    assert [b"".join(piece) for piece in pieces] == [whole[begin : begin + 4] for begin in range(0, len(whole), 4)]
    assert all(len(part) for piece in pieces for part in piece)


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
    with pytest.raises(
        TimeoutError, match=r"readers \[0\] made no room in time, so no part of this message will arrive"
    ):
        fill(writer, 5 << 20, timeout=1)
    assert writer.count == 2 if pair.is_local else writer.count >= 2  # the system holds some, too
    assert all(torch.equal(reader.dequeue(SOON), filled(5 << 20, number)) for number in range(writer.count))
    writer.enqueue(3)
    assert reader.dequeue(SOON) == 3


def test_a_message_that_fits_the_queue_waits_for_those_before_it():
    """By TCP: more than the system holds of one message, and no room for the next."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1", max_chunk_bytes=33 << 20, max_chunks=2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(bytes(64 << 20), SOON)
    with pytest.raises(TimeoutError, match="made no room in time"):
        writer.enqueue(bytes(64 << 20), 0.05)
    reading = in_thread(lambda: len(reader.dequeue(SOON)))
    assert reading.join() == 64 << 20
    writer.close()


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
    with pytest.raises(
        TimeoutError, match=rf"no message from the writer, process {os.getpid()} on .*, arrived in time"
    ):
        reader.dequeue(timeout)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


@pytest.mark.parametrize("timeout", [float("inf"), 1e12, timedelta.max])
def test_a_timeout_longer_than_any_lock_can_wait_is_none(pair, timeout):
    writer, reader = pair()
    writer.enqueue(1, timeout)
    assert reader.dequeue(timeout) == 1


def test_a_timeout_that_is_no_number_is_refused(pair):
    writer, reader = pair()
    for wait in (reader.dequeue, writer.wait_until_ready):
        with pytest.raises(ValueError, match="timeout is not a number"):
            wait(float("nan"))
        with pytest.raises(TypeError, match=r"^MessageQueue: timeout= takes seconds or a datetime.timedelta, got "):
            wait(np.timedelta64(60_000_000_000))


def test_what_is_not_allow_listed_is_refused_by_both_ends(pair):
    writer, reader = pair()
    with pytest.raises(UnsafeObjectError, match="Own"):
        writer.enqueue(Own())
    writer._end.put(codec.EncodedObject(Own()), None)  # a writer that does not look
    writer.enqueue(1)
    with pytest.raises(UnsafeObjectError, match="Own"):
        reader.dequeue(SOON)
    assert reader.dequeue(SOON) == 1


@pytest.mark.parametrize("rank", [1, 7, -1])
def test_a_rank_that_is_no_reader_is_refused(rank):
    with MessageQueue(1, 1) as writer:
        with pytest.raises(ValueError, match=f"rank={rank} is not a reader; the readers are 0"):
            MessageQueue.create_from_handle(writer.export_handle(), rank)
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue("still here")
            assert reader.dequeue(SOON) == "still here"


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
    "no timeout": (1, {"timeout": "soon"}, TypeError),
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
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"send its export_handle\(\), and call MessageQueue.create_from_handle"):
            send(writer)
    for numbers in ((1, 2), (2, 1, [0, 1]), (2, 2, [1, 1]), (-1, 0), (1, 1, None, 0), (1, 1, None, 1, 0)):
        with pytest.raises(ValueError, match="MessageQueue: "):
            MessageQueue(*numbers)


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


class LastMoment(End):
    """Finds what it waits for just after it has heard that the other end is closed."""

    has_come = False

    def _sleep(self, look, seconds):
        return look()

    def _fault(self):
        self.has_come = True
        return EOFError("closed")


def test_what_comes_at_the_last_moment_counts():
    end = LastMoment()
    end._until(lambda: end.has_come, None, str)
    with pytest.raises(EOFError):
        end._until(lambda: False, None, str)


def test_the_ring_grows_only_if_readers_make_no_room_for_a_while(monkeypatch):
    monkeypatch.setattr(easydist.queue.writer, "_SOON", 1e9)
    with MessageQueue(1, 1, max_chunk_bytes=64 << 20, max_chunks=100) as writer:
        reader, sent = MessageQueue.create_from_handle(writer.export_handle(), 0), []

        def enqueue(nbytes, timeout):
            writer.enqueue(bytes(nbytes), timeout)
            sent.append(nbytes)

        with pytest.raises(TimeoutError, match="made no room in time"):
            [enqueue(3 << 20, 0.02) for _ in range(20)]
        monkeypatch.setattr(easydist.queue.writer, "_SOON", 0.0)
        enqueue(9 << 20, SOON)
        assert [len(reader.dequeue(SOON)) for _ in sent] == sent
        reader.close()


@pytest.mark.parametrize("timeout", [timedelta(days=2), timedelta(milliseconds=1500), 1.5])
def test_a_timeout_may_be_days_or_parts_of_a_second(timeout):
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    before = time.monotonic()
    assert before <= deadline(timeout) - seconds <= time.monotonic()
