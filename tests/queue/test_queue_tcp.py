"""A queue's port, and who is let in."""

import dataclasses
import os
import resource
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from queues import SOON, TINY, eventually, filled, in_thread

import easydist
import easydist.queue.writer
from easydist import PeerLostError
from easydist.errors import WireError
from easydist.liveness.signed import digest
from easydist.queue import MessageQueue, tcp


def test_wrong_key_is_refused():
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    handle = writer.export_handle()
    assert handle.key.hex() not in repr(handle)
    assert str(handle.key) not in repr(handle)
    connection = socket.create_connection(handle.address)
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
    wrong = MessageQueue.create_from_handle(dataclasses.replace(handle, key=bytes(32)), 0)
    thread = in_thread(writer.wait_until_ready, SOON)
    with pytest.raises(PermissionError, match="rejects this reader"):
        wrong.dequeue(SOON)
    reader = MessageQueue.create_from_handle(handle, 0)
    thread.join()
    writer.enqueue("secret")
    assert reader.dequeue(SOON) == "secret"
    with suppress(ConnectionResetError):
        assert connection.recv(1 << 16) == b""
    for end in (connection, wrong, reader, writer):
        end.close()


@pytest.mark.parametrize(("writers", "readers"), [("a" * 40, "b" * 40), ("a" * 40, None), (None, "b" * 40)])
def test_a_reader_with_another_job_key_is_refused_and_both_ends_say_so(writers, readers, monkeypatch):
    def have(key):
        monkeypatch.setenv("EASYDIST_JOB_KEY", key) if key else monkeypatch.delenv("EASYDIST_JOB_KEY", raising=False)

    have(writers)
    with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        have(readers)
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as stranger:
            eventually(lambda: writer._end._listener._pending or writer._end._listener.accepted() == [])
            with pytest.raises(ConnectionError, match="reader 0 was not admitted: it has another EASYDIST_JOB_KEY"):
                writer.enqueue(1, SOON)
            with pytest.raises(PermissionError, match="rejects this reader: it has another EASYDIST_JOB_KEY than"):
                stranger.dequeue(SOON)
        have(writers)
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(2, SOON)
            assert reader.dequeue(SOON) == 2


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


@pytest.mark.parametrize("nbytes", [100, 2 << 20])
@pytest.mark.parametrize("n_local", [0, 1])
def test_after_ctrl_c_all_readers_have_a_message_or_none(monkeypatch, n_local, nbytes):
    add = tcp.Sender.add

    def interrupted(sender, data):
        signal.raise_signal(signal.SIGINT)
        add(sender, data)

    with ExitStack() as ends:
        writer = ends.enter_context(MessageQueue(3, n_local, connect_ip="127.0.0.1"))
        handle = writer.export_handle()
        readers = [ends.enter_context(MessageQueue.create_from_handle(handle, rank)) for rank in range(3)]
        writer.wait_until_ready(SOON)
        with monkeypatch.context() as patch:
            patch.setattr(tcp.Sender, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.enqueue(filled(nbytes))
        writer.enqueue("after it")
        for reader in readers:
            assert reader.dequeue(SOON).equal(filled(nbytes))
            assert reader.dequeue(SOON) == "after it"


@pytest.mark.slow
def test_a_writer_with_shared_memory_keeps_no_trace_of_what_it_has_sent_by_tcp():
    with MessageQueue(2, 1, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in (0, 1)]
        threads = [in_thread(lambda reader=reader: [reader.dequeue(SOON) for _ in range(20)]) for reader in readers]
        large = filled(2 << 20)
        for _ in range(20):
            writer.enqueue(large, SOON)
        for thread in threads:
            thread.join()
        assert writer._end._progress.qsize() <= 1
        for reader in readers:
            reader.close()


def test_a_connection_that_says_nothing_is_closed_when_its_time_is_over(monkeypatch):
    listener = tcp.Listener("127.0.0.1", bytes(32))
    with socket.create_connection(listener.address):
        assert listener.accepted() == []
        assert len(listener._pending) == 1
    monkeypatch.setattr(tcp, "_PATIENCE", -1.0)
    with socket.create_connection(listener.address) as silent:
        assert listener.accepted() == []
        assert listener._pending == []
        assert silent.recv(1) == b""
    listener.close()


def test_a_message_that_is_sent_in_part_counts_as_one():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        ours.setblocking(False)
        sender = tcp.Sender(ours, b"")
        counts = []
        for _ in range(3):
            sender.add(bytes(32 << 20))  # more than the system holds
            counts.append(sender.unsent()[0])
        assert counts == [1, 2, 3]
        assert theirs.recv(8) == tcp._LENGTH.pack(32 << 20)
        sender.close()


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
    text = r"^MessageQueue: a reader cannot be admitted: Too many open files\. If .* raise the limit \(ulimit"
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
            connection.sendall(hello + 2 * digest(handle.key, b"reader", hello))
            with pytest.raises(
                ConnectionError, match="reader 0 was not admitted: the record of its process is damaged"
            ):
                writer.enqueue(1)
            assert connection.recv(1) == b""
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue(2)
            assert reader.dequeue(SOON) == 2
        with pytest.raises(WireError, match="the record of its process is damaged"):
            MessageQueue.create_from_handle(dataclasses.replace(handle, writer=record), 0)


def test_a_message_that_no_memory_can_hold_is_an_error_of_the_queue(remote):
    writer, reader = remote
    writer.wait_until_ready(SOON)
    writer._end._senders[0]._add(tcp._LENGTH.pack(2**62))
    with pytest.raises(
        ConnectionError, match=f"announces a message of {2**62} bytes, for which this process has no memory"
    ):
        reader.dequeue(SOON)
    with pytest.raises(PeerLostError):
        reader.dequeue(SOON)


def test_each_rank_is_let_in_once(pair):
    writer, reader = pair()
    with pytest.raises((RuntimeError, ConnectionError), match=r"has attached already|has all its readers"):
        MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1


def test_more_readers_than_announced_are_refused():
    writer = MessageQueue(2, 0, connect_ip="127.0.0.1")
    first, again = [MessageQueue.create_from_handle(writer.export_handle(), 3) for _ in range(2)]
    thread = in_thread(writer.wait_until_ready, SOON)
    with pytest.raises(PermissionError, match="another reader has its rank"):
        again.dequeue(SOON)
    second = MessageQueue.create_from_handle(writer.export_handle(), 0)
    thread.join()
    writer.enqueue(1)
    assert first.dequeue(SOON) == second.dequeue(SOON) == 1
    for end in (again, first, second, writer):
        end.close()


def test_of_readers_that_come_at_once_no_more_are_let_in_than_there_is_room_for():
    """Ranks 0 and 1 share memory with the writer, but cannot attach; there is room for two others."""
    with ExitStack() as ends:
        writer = ends.enter_context(MessageQueue(4, 2, connect_ip="127.0.0.1"))
        handle = writer.export_handle()
        hidden = dataclasses.replace(handle, ring=("1/999999/0/0", handle.ring[1]))
        ranks = [0, 1, 0, 7, 8, 7, 9]
        readers = [ends.enter_context(MessageQueue.create_from_handle(hidden, rank)) for rank in ranks]
        writer.wait_until_ready(SOON)
        writer.enqueue("all")
        for reader, is_admitted in zip(readers, [True, True, False, True, True, False, False], strict=True):
            if is_admitted:
                assert reader.dequeue(SOON) == "all"
            else:
                with pytest.raises(PermissionError, match="rejects this reader"):
                    reader.dequeue(SOON)


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


def test_a_ring_does_not_fill_up_for_a_reader_that_cannot_attach():
    writer = MessageQueue(2, 2, **TINY)
    handle = writer.export_handle()
    hidden = dataclasses.replace(handle, ring=("1/999999/0/0", handle.ring[1]))
    far, near = MessageQueue.create_from_handle(hidden, 0), MessageQueue.create_from_handle(handle, 1)
    writer.wait_until_ready(SOON)
    for number in range(50):
        writer.enqueue(number, SOON)
        assert far.dequeue(SOON) == near.dequeue(SOON) == number
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


@pytest.mark.parametrize(("n_reader", "n_local"), [(1, 1), (2, 2), (3, 2), (2, 0)])
@pytest.mark.parametrize("shm", ["0", "1"])
def test_each_missing_reader_is_counted_once(monkeypatch, shm, n_reader, n_local):
    monkeypatch.setenv("EASYDIST_SHM", shm)
    with MessageQueue(n_reader, n_local, connect_ip="127.0.0.1") as writer:
        readers = []
        for missing in range(n_reader, 0, -1):
            text = f"wait_until_ready: {missing} of {n_reader} readers did not come in time"
            with pytest.raises(TimeoutError, match=text):
                writer.wait_until_ready(0.02)
            readers.append(MessageQueue.create_from_handle(writer.export_handle(), n_reader - missing))
        writer.wait_until_ready(SOON)
        for reader in readers:
            reader.close()


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


def no_network(*args):
    raise OSError("Network is unreachable")


def test_the_address_is_that_of_the_interface_for_gloo_or_of_a_connection_if_there_is_no_default_route(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none,lo" if sys.platform == "linux" else "lo0")
    assert tcp.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(tcp.keepalive, "addresses", lambda: ["fe80::1", "10.0.0.3", "10.0.1.3"])
    assert tcp.own_address() == "10.0.0.3"
    monkeypatch.setattr(tcp.keepalive, "addresses", lambda: ["fe80::1", "fd00::3"])
    assert tcp.own_address() == "fd00::3"  # a host without IPv4
    monkeypatch.setattr(tcp.keepalive, "addresses", list)
    assert tcp.own_address() == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="the system has no IPv6")
def test_a_reader_connects_over_ipv6(monkeypatch):
    monkeypatch.setattr("easydist.queue.writer.own_address", lambda: "::1")
    writer = MessageQueue(1, 0)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(1)
    assert reader.dequeue(SOON) == 1
    writer.close()
    with pytest.raises(ConnectionError, match=r"is not listening at \[::1\]:\d+ "):
        MessageQueue.create_from_handle(writer.export_handle(), 0)
    reader.close()
