"""Writers and readers of queues for the tests."""

import multiprocessing
import os
import signal
import threading
import time
from fractions import Fraction

import launching
import numpy as np
import torch

from easydist.queue import MessageQueue

SOON = launching.within(10)
"""Seconds after which a waiting test has failed."""

TINY = {"max_chunk_bytes": 1 << 14, "max_chunks": 4}

forked = multiprocessing.get_context("forkserver")


class Own:
    """A class that is not allow-listed."""


def in_thread(function, *args):
    """Run a function in a thread, whose ``join`` returns its result or raises its error."""

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
    """Wait until the condition is true."""
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def fill(writer, nbytes=1 << 20, timeout=None):
    """Enqueue until there is no room, and count."""
    writer.count = 0
    while True:
        writer.enqueue(filled(nbytes, writer.count), timeout)
        writer.count += 1


def filled(nbytes, number=0):
    again = ((torch.arange(251) * 7 + number) % 251).to(torch.uint8)
    return again.repeat(nbytes // 251 + 1)[:nbytes].clone()


def drawn(draw, depth=0):
    """Return a random object."""
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


def waits(queue):
    """Return a function that is true while another thread has its turn at a queue's end."""

    def look():
        if is_free := queue._end._lock.acquire(blocking=False):
            queue._end._lock.release()
        return not is_free

    return look


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
