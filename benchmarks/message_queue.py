"""Measure the message queue one way, from the writer's ``enqueue`` until the last reader has the object.

python benchmarks/message_queue.py [--readers 1 3] [--seconds 1]

Each reader reports when it has got a message, and waits for the next one: all processes of a host read one clock. It
prints median, min and max, also of 1 KB after a pause of 1.3 s, and the share of a core that a reader uses while it
waits. The last column was measured earlier on an idle machine of the same type, with vLLM 0.33.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from easydist.queue import MessageQueue
from easydist.testing import Pool

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
BEFORE = {
    (1, "1 KB"): 35e-6,
    (1, "1 MB"): 0.28e-3,
    (1, "64 MB"): 27e-3,
    (1, "1 KB after 1.3 s"): 0.64e-3,
    (3, "1 KB"): 190e-6,
    (3, "1 MB"): 0.66e-3,
    (3, "64 MB"): 65e-3,
    (3, "1 KB after 1.3 s"): 1.2e-3,
}
"""Seconds of vLLM 0.33, measured earlier on the same machine type."""

IDLE = 1.3


class Ends:
    """A queue from rank 0 to all others, and one from each of them back, which carries the times of arrival."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.queue = MessageQueue.create_from_process_group(dist.group.WORLD, 24 << 20, 10)
        self.back, handles = MessageQueue.create_from_process_group_single_reader(dist.group.WORLD, 1 << 12, 10)
        self.answers = [MessageQueue.create_from_handle(handle, 0) for handle in handles[1:]]

    def one_way(self, payload: object) -> float:
        """Return the seconds from ``enqueue`` until the last reader has the object."""
        if self.rank:
            self.queue.dequeue()
            self.back.enqueue(time.perf_counter())
            return 0.0
        start = time.perf_counter()
        self.queue.enqueue(payload)
        return max(answer.dequeue() for answer in self.answers) - start

    def after_a_pause(self) -> float:
        """Return the seconds for 1 KB, after a pause in which all processes were idle."""
        if not self.rank:
            time.sleep(IDLE)
        return self.one_way(bytes(1024))

    def idle_share(self, seconds: float) -> float:
        """Return the share of a core that this process uses while it waits."""
        before = time.process_time()
        if self.rank:
            self.queue.dequeue()
        else:
            time.sleep(seconds)
            self.queue.enqueue(None)
        return (time.process_time() - before) / seconds


def measure(rank: int, world_size: int, seconds: float) -> tuple[dict[str, list[float]], float]:
    """Return the times of all rows, and the idle share."""
    ends = Ends(rank, world_size)
    rows: dict[str, list[float]] = {}
    for name, nbytes in SIZES.items():
        payload: object = bytes(nbytes) if nbytes < 4096 else torch.ones(nbytes, dtype=torch.uint8)
        for _ in range(3):
            ends.one_way(payload)
        count = {"1 KB": 2000, "1 MB": 500, "64 MB": 20}[name]
        rows[name] = [ends.one_way(payload) for _ in range(int(count * seconds))]
    rows[f"1 KB after {IDLE} s"] = [ends.after_a_pause() for _ in range(5)]
    return rows, ends.idle_share(2.0)


def in_units(seconds: float) -> str:
    """Return a short text with its unit."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seconds", type=float, default=1, help="for each size, roughly")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for readers in options.readers:
            results = pool.run(measure, readers + 1, seconds=options.seconds)
            print(f"\n{readers} reader(s), {os.cpu_count()} cores")
            print(f"{'':20}{'median':>10}{'min':>10}{'max':>10}   vLLM 0.33, same machine type, measured before")
            for name, times in results[0][0].items():
                shown = "".join(f"{in_units(f(times)):>10}" for f in (statistics.median, min, max))
                before = BEFORE.get((readers, name))
                print(f"{name:20}{shown}   {in_units(before) if before else ''}".rstrip())
            print(f"{'core of a waiting reader':27}{max(share for _, share in results[1:]):.1%}")


if __name__ == "__main__":
    main()
