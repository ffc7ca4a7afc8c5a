"""The connection to readers that share no memory with the writer: TCP, authenticated with a key.

A reader sends a hello: its rank, a random number, its process record, and two HMACs of them, one with the queue's key
and one with the joint key: that of the queue and of the job (``EASYDIST_JOB_KEY``), if there is one. The writer answers
with an HMAC of the reader's random number with the joint key, and then sends each message after its length. The queue's
key is the writer's challenge: it is random, and the writer accepts each rank once, so that an intercepted hello is
useless. The messages are neither encrypted nor authenticated: an HMAC of
each would cost more than a third of the throughput (1 MB: 0.55 ms at either end, while sending takes 1 ms).
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from easydist import memory, settings
from easydist.liveness import keepalive
from easydist.liveness.peer import RECORD_NBYTES, Peer
from easydist.liveness.signed import digest, seal

_HELLO = struct.Struct(f"<q32s{RECORD_NBYTES}s")
_PROOF_NBYTES = 32
_HELLO_NBYTES = _HELLO.size + 2 * _PROOF_NBYTES
_LENGTH = struct.Struct("<Q")
_READY, _CLOSED = 2**64 - 1, 2**64 - 2
_LEAVE = b"L"
_PENDING, _PATIENCE = 64, 10.0
"""The number of unauthenticated connections allowed, and the seconds that each may take."""

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Hosts for documentation, which nobody has."""

_NO_FILES = errno.EMFILE, errno.ENFILE


def own_address() -> str:
    """Return the address by which other hosts reach this one; loopback if there is no network.

    It is that of the interface which ``GLOO_SOCKET_IFNAME`` names, else that of the default route, else one that a
    connection to another host has; of IPv6 only if there is none of IPv4.
    """
    of_interface, connected = _of_interface(os.environ.get("GLOO_SOCKET_IFNAME", "")), keepalive.addresses()
    routed = [_of_route(family, host) for family, host in _ELSEWHERE.items()]
    return _first(of_interface) or _first([routed[0], *connected, routed[1]]) or "127.0.0.1"


def _of_interface(names: str) -> list[str]:
    """Return the addresses of interfaces."""
    if not names:
        return []
    import psutil

    found = psutil.net_if_addrs()
    every = (one for name in names.split(",") for one in found.get(name, ()))
    return [str(one.address) for one in every if one.family in _ELSEWHERE]


def _of_route(family: socket.AddressFamily, host: str) -> str:
    """Return the address of this host on its way to another one; "" if there is none."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])
    return ""


def _first(addresses: Iterable[str]) -> str | None:
    """Return the first address of IPv4, else of IPv6 that other hosts reach; None if there is none."""
    known = [one for one in addresses if one and not one.startswith("fe80:")]
    return next((one for one in known if ":" not in one), known[0] if known else None)


def _joint(key: bytes) -> bytes:
    job = seal().key
    return digest(job, b"queue", key) if job else key


_Accepted = tuple[int, bytes, "Sender"]
"""A reader's rank, its record, and the connection to it."""


class Listener:
    """The socket to which readers connect.

    Args:
        host: The address to listen at.
        key: The key of the queue.

    Attributes:
        address: The host and port.
        fault: The error of the last attempt to accept connections; None if it succeeded.
        refused: The text about a reader with the key of the queue and another job key; None if there is none.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._key, self._joint = key, _joint(key)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self.address = host, int(self._socket.getsockname()[1])
        self._pending: list[tuple[socket.socket, bytearray, float]] = []
        self.fault: str | None = None
        self.refused: str | None = None

    def accepted(self) -> list[_Accepted]:
        """Return the readers that have since the last call proved to have the key: rank, record, connection."""
        # First, because new connections may push out the oldest, whose hello may have come by now.
        found = self._heard()
        for _ in range(_PENDING):  # a limit, so that a flood of connections does not block the writer
            if (connection := self._accept()) is None:
                break
            if len(self._pending) == _PENDING:
                self._drop_oldest()
            connection.setblocking(False)
            self._pending.append((connection, bytearray(), time.monotonic() + _PATIENCE))
        return found + self._heard()

    def _heard(self) -> list[_Accepted]:
        received = [(self._read_hello(*each), each) for each in self._pending]
        self._pending = [each for hello, each in received if hello is None and each[0].fileno() >= 0]
        return [hello for hello, _ in received if hello is not None]

    def _drop_oldest(self) -> None:
        """Drop the oldest pending connection. Readers send their hello at once, so it is not a reader's."""
        self._pending.pop(0)[0].close()

    def _accept(self) -> socket.socket | None:
        """Accept the next connection; None if there is none or accepting fails."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno in _NO_FILES and self._pending:
                    self._drop_oldest()  # a silent connection may hold the last descriptor
                    continue
                is_fault = not isinstance(error, BlockingIOError)
                self.fault = os.strerror(error.errno or 0) if is_fault else None
                return None
            self.fault = None
            return connection

    def _read_hello(self, connection: socket.socket, received: bytearray, until: float) -> _Accepted | None:
        """Return the hello of a pending connection once it is complete. Close the connection if it is not valid."""
        try:
            text = connection.recv(_HELLO_NBYTES - len(received))
        except BlockingIOError:
            text = None
        except OSError:
            text = b""
        received += text or b""
        # First with the queue's key alone, so that a reader of this queue with another job key is reported.
        if len(received) == _HELLO_NBYTES and self._proves(received, self._key, 0):
            rank, number, record = _HELLO.unpack_from(received)
            if self._proves(received, self._joint, 1):
                return rank, record, Sender(connection, digest(self._joint, b"writer", number))
            self.refused = f"reader {rank} was not admitted: it has another {settings.JOB_KEY} than the writer, or none"
        if text == b"" or len(received) == _HELLO_NBYTES or time.monotonic() > until:
            connection.close()
        return None

    def _proves(self, received: bytearray, key: bytes, place: int) -> bool:
        hello, proofs = bytes(received[: _HELLO.size]), bytes(received[_HELLO.size :])
        told = proofs[place * _PROOF_NBYTES : (place + 1) * _PROOF_NBYTES]
        return hmac.compare_digest(digest(key, b"reader", hello), told)

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()
        for connection, _, _ in self._pending:
            connection.close()
        self._pending.clear()


class Sender:
    """The writer's side of the connection to one reader.

    A thread sends the bytes that the socket does not accept at once.

    Args:
        connection: A non-blocking socket.
        proof: The proof that this is the writer, which is sent first.

    Attributes:
        has_left: True if the reader has closed its end.
        is_broken: True if the connection broke.
        on_progress: A function that the thread calls after sending something.
    """

    def __init__(self, connection: socket.socket, proof: bytes) -> None:
        self._socket = connection
        # Otherwise a message would wait until the reader's system has acknowledged its length, sent before.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        keepalive.watch(connection.fileno())
        self._proof = proof
        self._backlog: deque[tuple[memoryview, list[int]]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.has_left = self.is_broken = False
        self.on_progress: Callable[[], None] = _nothing

    def welcome(self) -> None:
        """Accept the reader."""
        self._add(self._proof)

    def add(self, message: bytes) -> None:
        """Send a message. Returns at once."""
        self._add(message, _LENGTH.pack(len(message)))

    def set_ready(self) -> None:
        """Tell the reader that all readers have attached."""
        self._add(_LENGTH.pack(_READY))

    def _add(self, data: bytes, head: bytes = b"") -> None:
        parts: list[tuple[memoryview, list[int]]] = [(memoryview(part), []) for part in (head, data) if part]
        with self._lock:
            self._backlog.extend(parts)
            self._push()

    def _push(self) -> None:
        """Send as much as the socket accepts, and start a thread for the rest unless one runs already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._send()
        if self._backlog:
            self._thread = threading.Thread(target=self._pump, name="easydist queue", daemon=True)
            self._thread.start()

    def _send(self) -> None:
        backlog = self._backlog
        try:
            while backlog:
                left, sent = backlog[0]
                if sent:
                    backlog[0] = left[sent[0] :], []
                elif left:  # no bytecode, and so no interrupt, between the call and recording its result
                    sent.extend(map(self._socket.send, (left,)))
                else:
                    backlog.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
            backlog.clear()

    def _pump(self) -> None:
        """Send the rest, then end."""
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLOUT)
        except ValueError:  # closed before this thread started
            return
        while True:
            poller.poll(500)
            with self._lock:
                self._send()
                if not self._backlog:
                    self._thread = None
                    break
            self.on_progress()
        self.on_progress()

    def unsent(self) -> tuple[int, int]:
        """Return the number of messages that have not been sent completely, and their bytes."""
        with self._lock:
            self._push()
            return -(-len(self._backlog) // 2), sum(len(left) for left, _ in self._backlog)

    def look(self) -> None:
        """Check whether the reader is still connected."""
        try:
            text = self._socket.recv(1)
            self.has_left = self.has_left or text == _LEAVE
            self.is_broken = self.is_broken or not text
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True

    def say_goodbye(self) -> None:
        """Tell the reader that the queue is closed."""
        self._add(_LENGTH.pack(_CLOSED))

    def close(self) -> None:
        """Close the connection. Unsent data is lost."""
        with self._lock:
            self._backlog.clear()
            thread = self._thread
        if thread is not None and thread.is_alive():
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            # Without the lock, which the thread takes before it ends.
            thread.join()
        self._socket.close()

    def release(self) -> None:
        """Close this process's copy of the socket: that of a refused reader, or in a forked child the parent's."""
        self._socket.close()


class _Awaited:
    """The data that a reader waits for. Only ``got`` ever changes, so an interrupt cannot leave it inconsistent.

    Attributes:
        whole: The target memory.
        left: The part that has not arrived.
        got: The number of bytes that arrived last, if ``left`` does not include them yet.
        message: The message that they belong to; None for a length, and for the proof at the beginning.
    """

    def __init__(
        self,
        whole: memoryview,
        is_proof: bool = False,
        message: memoryview | None = None,
        left: memoryview | None = None,
    ) -> None:
        self.whole, self.is_proof, self.message = whole, is_proof, message
        self.left = whole if left is None else left
        self.got: list[int] = []


class Receiver:
    """The reader's side of a connection.

    Args:
        address: The writer's address.
        key: The key of the queue.
        rank: The rank of this reader.
        record: The record of this process for the writer.
        writer: The writer's process.

    Attributes:
        is_ready: True if all readers have attached.
        is_closed: True if the writer has closed its end, and all its messages have been read.

    Raises:
        OSError: No process listens there.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int, record: bytes, writer: Peer) -> None:
        self._socket = socket.create_connection(address, timeout=_PATIENCE)
        keepalive.watch(self._socket.fileno())
        number = secrets.token_bytes(32)
        hello = _HELLO.pack(rank, number, record)
        joint = _joint(key)
        self._socket.sendall(hello + digest(key, b"reader", hello) + digest(joint, b"reader", hello))
        self._socket.setblocking(False)
        self._expected, self._writer = digest(joint, b"writer", number), writer
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self.is_ready = self.is_closed = self.is_broken = False
        self._awaited = _Awaited(memoryview(bytearray(_PROOF_NBYTES)), is_proof=True)
        self._whole: memoryview | None = None

    def pull(self) -> memoryview | None:
        """Receive available data, and return a message once it is complete.

        Raises:
            PermissionError: The writer refuses this reader, or is not the one that created the handle.
        """
        while self._whole is None and not (self.is_closed or self.is_broken):
            awaited = self._awaited
            if awaited.got:  # before more is received: an interrupt may have come after the last bytes
                self._advance(awaited, awaited.got[0])
            elif not awaited.left:
                self._take(awaited)
            elif not self._receive(awaited):
                break
        message, self._whole = self._whole, None
        return message

    def _receive(self, awaited: _Awaited) -> bool:
        try:  # no bytecode, and so no interrupt, between the call and recording its result
            awaited.got.extend(map(self._socket.recv_into, (awaited.left,)))
        except BlockingIOError:
            return False
        except OSError:
            awaited.got.append(0)
        return True

    def _advance(self, awaited: _Awaited, count: int) -> None:
        if count:
            self._awaited = _Awaited(awaited.whole, awaited.is_proof, awaited.message, awaited.left[count:])
            return
        self.is_broken = True
        if awaited.is_proof and not self._writer.has_ended():
            raise PermissionError(f"the writer rejects this reader: {self._reason()}")

    def _reason(self) -> str:
        if self._writer.fingerprint != seal().fingerprint:
            return f"it has another {settings.JOB_KEY} than the writer, or only one of them has one"
        return "the handle belongs to another queue, or another reader has its rank"

    def _take(self, awaited: _Awaited) -> None:
        """Handle awaited data that is complete."""
        following = _Awaited(memoryview(bytearray(_LENGTH.size)))
        if awaited.is_proof:
            self._check(awaited.whole)
        elif awaited.message is None:
            (length,) = _LENGTH.unpack(awaited.whole)
            self.is_closed = length == _CLOSED
            self.is_ready = True  # once the first message has come, all readers have attached, or need not
            if length < _CLOSED:
                message = self._memory(length)
                following = _Awaited(message, message=message)
        # Last, and both at once: after an interrupt before this, the whole step is taken again.
        self._whole, self._awaited = awaited.message, following

    def _memory(self, length: int) -> memoryview:
        try:
            return memory.empty([length], torch.uint8).numpy().data
        except (MemoryError, OSError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            self.is_broken = True  # the beginning of the next message is unknown
            raise ConnectionError(
                f"MessageQueue: the writer announces a message of {length} bytes, for which this process has no "
                "memory; close this queue, and make a new one"
            ) from error

    def _check(self, proof: memoryview) -> None:
        if not hmac.compare_digest(self._expected, bytes(proof)):
            self.is_broken = True
            raise PermissionError("the program at the writer's address does not have the key of this queue")

    def sleep(self, look: Callable[[], bool], seconds: float) -> bool:
        """Sleep until something arrives, and return the result of ``look``."""
        if self.is_broken:
            time.sleep(seconds)
        else:
            self._poller.poll(1000 * seconds)
        return look()

    def close(self) -> None:
        """Tell the writer that this reader has closed."""
        with suppress(OSError):
            self._socket.send(_LEAVE)
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()

    def release(self) -> None:
        """Close this process's copy of the socket, in a forked child."""
        self._socket.close()


def _nothing() -> None:
    """Do nothing; used while no one waits."""
