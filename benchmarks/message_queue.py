"""Compare the message queue with ZeroMQ's PUB and SUB sockets, which carry pickles: the same objects in the same run.

python benchmarks/message_queue.py [--readers 1 3] [--seconds 1]

One way is the time from ``enqueue`` until the last reader has the object: each reader reports when it has got it, since
all processes of a host read one clock. In a row means that nobody waits for an answer; the time is that of one object.
It prints medians of the turns, ZeroMQ's time over easydist's as median, min and max, the share of a core that a reader
uses while it waits, and the bounds and whether they hold. The queue loses nothing and waits if a reader is slow;
ZeroMQ's sockets, here, queue without a limit.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import zmq
from bounds import Bound, show

from easydist import broadcast_object_list
from easydist.queue import MessageQueue
from easydist.testing import Pool

SIZES = {"100 B": 100, "1 KB": 1 << 10, "10 KB": 10 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
IN_A_ROW = ("100 B", "10 KB")
IDLE, TURNS = 1.3, 9
AFTER_A_PAUSE = f"1 KB after {IDLE} s"
Turns = list[tuple[float, float]]
"""The seconds of easydist and of ZeroMQ in each turn."""

LEAST = {"100 B, in a row": 0.5, AFTER_A_PAUSE: 1 / 1.5}
"""The least ratio of ZeroMQ's time to easydist's, by row."""


class Ours:
    """The queue from rank 0 to all others."""

    def __init__(self) -> None:
        self.queue = MessageQueue.create_from_process_group(dist.group.WORLD, 24 << 20, 10)
        self.put, self.take = self.queue.enqueue, self.queue.dequeue


class Theirs:
    """A socket that publishes on rank 0 (XPUB: it sees who subscribes), and a SUB socket on each of the others."""

    def __init__(self, rank: int) -> None:
        folder = [tempfile.mkdtemp(prefix="zmq") if rank == 0 else ""]
        address = f"ipc://{broadcast_object_list(folder)[0]}/socket"
        self._socket = zmq.Context.instance().socket(zmq.SUB if rank else zmq.XPUB)
        self._socket.setsockopt(zmq.RCVHWM if rank else zmq.SNDHWM, 0)
        if rank == 0:
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each reader's subscription arrives, though they are equal
            self._socket.bind(address)
        dist.barrier()
        if rank:
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.connect(address)
        for _ in range(0 if rank else dist.get_world_size() - 1):
            self._socket.recv()  # a subscription
        dist.barrier()

    def put(self, payload: object) -> None:
        """Send an object."""
        self._socket.send(pickle.dumps(payload, 5))

    def take(self) -> object:
        """Receive an object."""
        return pickle.loads(self._socket.recv())


class Ends:
    """Both peers, and a queue from each reader back, which carries the times of arrival."""

    def __init__(self, rank: int) -> None:
        self.rank, self.peers = rank, (Ours(), Theirs(rank))
        self._back, handles = MessageQueue.create_from_process_group_single_reader(dist.group.WORLD, 1 << 12, 10)
        self._answers = [MessageQueue.create_from_handle(handle, 0) for handle in handles[1:]]

    def one_way(self, peer: Ours | Theirs, payload: object, pause: float = 0.0) -> float:
        """Return the seconds until the last reader has the object, which is sent after a pause."""
        if self.rank:
            peer.take()
            self._back.enqueue(time.perf_counter())
            return 0.0
        time.sleep(pause)
        start = time.perf_counter()
        peer.put(payload)
        return max(answer.dequeue() for answer in self._answers) - start

    def in_a_row(self, peer: Ours | Theirs, payload: object, count: int) -> float:
        """Return the seconds for one of several objects."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            peer.take() if self.rank else peer.put(payload)
        dist.barrier()
        return (time.perf_counter() - start) / count

    def turns(self, measured: Callable[[Ours | Theirs], float]) -> Turns:
        """Measure both peers in turns, after one that does not count."""
        return [(measured(self.peers[0]), measured(self.peers[1])) for _ in range(TURNS + 1)][1:]

    def idle_share(self, seconds: float) -> float:
        """Return the share of a core that this process uses while it waits for the queue."""
        before = time.process_time()
        if self.rank:
            self.peers[0].take()
        else:
            time.sleep(seconds)
            self.peers[0].put(None)
        return (time.process_time() - before) / seconds


def rows(ends: Ends, seconds: float) -> Iterator[tuple[str, Turns]]:
    """Measure and yield the rows."""
    for name, nbytes in SIZES.items():
        payload: Any = bytes(nbytes) if nbytes < 1 << 15 else torch.ones(nbytes, dtype=torch.uint8)
        often = max(2, int(seconds * 50)) if nbytes < 1 << 20 else 3

        def one_way(peer: Ours | Theirs, payload: Any = payload, often: int = often) -> float:
            return statistics.median(ends.one_way(peer, payload) for _ in range(often))

        yield name, ends.turns(one_way)
        if name in IN_A_ROW:
            yield f"{name}, in a row", ends.turns(lambda peer, p=payload: ends.in_a_row(peer, p, int(seconds * 2000)))
    yield AFTER_A_PAUSE, ends.turns(lambda peer: ends.one_way(peer, bytes(1024), IDLE))


def measure(rank: int, seconds: float) -> tuple[list[tuple[str, Turns]], float]:
    """Return the times of all rows, and the idle share."""
    ends = Ends(rank)
    return [*rows(ends, seconds)], ends.idle_share(2.0)


def in_units(seconds: float) -> str:
    """Return a short text with its unit."""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def report(readers: int, results: list[tuple[list[tuple[str, Turns]], float]]) -> None:
    """Print the table of one number of readers, from the writer's times, and its bounds."""
    print(f"\n{readers} reader(s), {os.cpu_count()} cores")
    print(f"{'':20}{'easydist':>10}{'ZeroMQ':>10}   ZeroMQ / easydist: median (min to max)")
    bounds = []
    for name, turns in results[0][0]:
        ours, theirs = (in_units(statistics.median(column)) for column in zip(*turns, strict=True))
        ratios = sorted(their / our for our, their in turns)
        ratio = statistics.median(ratios)
        print(f"{name:20}{ours:>10}{theirs:>10}   {ratio:5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        bounds.append(Bound(f"{name}, beside ZeroMQ", ratio, LEAST.get(name, 1.0)))
    print(f"{'core of a waiting reader':27}{max(share for _, share in results[1:]):.1%}")
    show(bounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seconds", type=float, default=1, help="for each size, roughly")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for readers in options.readers:
            report(readers, pool.run(measure, readers + 1, seconds=options.seconds))


if __name__ == "__main__":
    main()
