"""Waits in a queue that end: in time, by a close, a kill, a signal."""

import gc
import os
import signal
import sys
import time
import warnings

import launching
import pytest
import torch
import torch.distributed as dist
from queues import (
    SOON,
    TINY,
    eventually,
    fill,
    filled,
    in_thread,
    killed,
    read_then_wait,
    started,
    waits,
    write_then_die,
)

from easydist import PeerLostError
from easydist.queue import MessageQueue
from easydist.testing import distributed


@pytest.mark.slow
def test_time_is_over_in_the_middle_of_a_message(pair):
    """The reader keeps its place; what the writer gives up never arrives."""
    writer, reader = pair(**TINY)
    large = filled(8 << 20)
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
    count = 30
    sending = in_thread(lambda: [writer.enqueue([n, filled(1 << 19)]) for n in range(count)])
    eventually(waits(writer))
    for number in range(count):
        got = reader.dequeue(SOON)
        assert got[0] == number
        assert torch.equal(got[1], filled(1 << 19))
    sending.join()


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


@pytest.mark.parametrize("which", ["reader", "writer"])
def test_an_end_is_cancelled_while_another_thread_closes_it(pair, which, monkeypatch):
    queue = pair()[which == "reader"]
    wake = type(queue._end)._wake

    def late(end):
        monkeypatch.undo()  # closing wakes the waits, too
        in_thread(queue.close).join()
        wake(end)

    monkeypatch.setattr(type(queue._end), "_wake", late)
    assert not queue.shutting_down
    queue.cancel()
    assert queue.shutting_down


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
    with pytest.raises(BrokenPipeError, match="reader 0 has closed its end"):
        thread.join()
    with pytest.raises(BrokenPipeError, match="reader 0 has closed its end"):
        fill(writer)
    reader.close()


def test_no_message_is_sent_once_a_reader_has_closed(pair):
    writer, reader = pair()
    writer.enqueue(1)
    reader.close()
    with pytest.raises(BrokenPipeError, match="reader 0 has closed its end"):
        writer.enqueue(2) if pair.is_local else fill(writer)  # TCP tells the writer a moment later


@pytest.mark.slow
def test_an_end_that_is_forgotten_is_closed():
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    del writer
    gc.collect()
    assert list(reader) == []


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
    with pytest.raises(PeerLostError, match=f"the writer is lost: process {process.pid} on .* ended"):
        MessageQueue.create_from_handle(reader.export_handle(), 0)
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


LEAVING = """
import threading
from easydist.queue import MessageQueue
writer = MessageQueue(1, {n_local})
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
has_come = threading.Event()
def serve():
    while True:
        reader.dequeue()
        has_come.set()
threading.Thread(target=serve, daemon=True).start()
writer.enqueue(1)
has_come.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n_local", "is_forked"), [(1, True), (0, False)])
def test_a_daemon_thread_that_waits_at_the_exit_prints_nothing(n_local, is_forked):
    interpreter = launching.fork() if is_forked else sys.executable
    process = launching.start(interpreter, "-c", LEAVING.format(n_local=n_local))
    (told,) = launching.finished(process)
    assert process.returncode == 0, told
    assert "Traceback" not in str(told)


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
    assert time.process_time() - before < 0.1  # a tenth of a core: 0.005 on an idle machine, 0.03 on a busy one


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


def test_queues_of_vllms_executor():
    """It names its arena, asks whether a handle is for other hosts, and reads there as rank -1."""
    with MessageQueue(2, 2, connect_ip="127.0.0.1", enable_shm_tensor_arena=True) as local:
        assert local.export_handle().remote_subscribe_addr is None
    with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        assert handle.remote_subscribe_addr == f"tcp://127.0.0.1:{handle.address[1]}"
        with MessageQueue.create_from_handle(handle, -1) as reader:
            writer.enqueue({"method": "execute_model"}, SOON)
            assert reader.dequeue(SOON) == {"method": "execute_model"}
