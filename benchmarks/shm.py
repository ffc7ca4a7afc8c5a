"""Compare the shared-memory backend with gloo in one run: the same data, the same ranks, in turns.

python benchmarks/shm.py [--ranks 2 4] [--seconds 0.5] [--slot 2097152]

For each piece of work it prints the median time of the shared-memory backend, of easydist's gloo backend and of
torch.distributed, and gloo's times over shared memory's: median, min and max of the rounds. The last line is one copy
of 16 MB, the least work that each of them must do. Below the table are the bounds: nothing is slower than over gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bounds import Bound, show

from easydist.cli.measure import agreed, timed
from easydist.comms import Backend, ReduceOp, over
from easydist.shm.segment import Segment
from easydist.testing import Pool
from easydist.transport.backends.shm import Shm

LARGE = 16 << 20
"""The bytes that each rank contributes."""


class Work(NamedTuple):
    """One row of the table. Each function takes no arguments and does all of the work."""

    name: str
    shm: Callable[[], Any]
    gloo: Callable[[], Any] | None = None
    torch: Callable[[], Any] | None = None


def shared(rank: int, world_size: int, slot: int) -> Shm:
    """Create the backend over a segment whose name the default group distributes."""
    nbytes = Shm.nbytes(world_size, slot)
    names = [None]
    if rank == 0:
        segment = Segment.create(nbytes)
        names = [segment.name]
    dist.broadcast_object_list(names)
    if rank != 0:
        segment = Segment.attach(str(names[0]), nbytes)
    dist.barrier()
    segment.unlink()
    return Shm(segment, rank, world_size, guard=lambda ranks, seconds: None)


def table(shm: Backend, gloo: Backend) -> Iterator[Work]:
    """Yield all rows."""
    size, op = shm.size, ReduceOp.SUM
    yield Work("barrier", lambda: shm.barrier().wait(), lambda: gloo.barrier().wait(), dist.barrier)
    for nbytes in (256, 32 << 10):
        rows = torch.zeros((size, 32 << 10), dtype=torch.uint8)
        yield Work(
            f"all_gather_upto {nbytes} B",
            lambda r=rows, n=nbytes: shm.all_gather_upto(r, n).wait(),
            lambda r=rows, n=nbytes: gloo.all_gather_upto(r, n).wait(),
        )
    for nbytes, name in ((16, "16 B"), (LARGE, "16 MB")):
        data, output = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(size * nbytes, dtype=torch.uint8)
        floats = torch.zeros(nbytes // 4)
        parts = list(output.chunk(size))
        yield Work(
            f"all_gather {name}",
            lambda o=output, d=data: shm.all_gather_single(o, d).wait(),
            lambda o=output, d=data: gloo.all_gather_single(o, d).wait(),
            lambda p=parts, d=data: dist.all_gather(p, d),
        )
        yield Work(
            f"all_reduce {name}",
            lambda f=floats: shm.all_reduce(f, op).wait(),
            lambda f=floats: gloo.all_reduce(f, op).wait(),
            lambda f=floats: dist.all_reduce(f),
        )
        yield Work(
            f"broadcast {name}",
            lambda d=data: (shm.broadcast(d, 0).wait(), shm.barrier().wait()),
            lambda d=data: (gloo.broadcast(d, 0).wait(), gloo.barrier().wait()),
            lambda d=data: (dist.broadcast(d, 0), dist.barrier()),
        )
        yield Work(
            f"all_to_all {name}",
            lambda p=parts, d=data: shm.all_to_all_v(p, [d] * size).wait(),
            lambda p=parts, d=data: gloo.all_to_all_v(p, [d] * size).wait(),
        )
        if shm.rank < 2:
            send, recv = ("send", "recv") if shm.rank == 0 else ("recv", "send")
        else:
            send = recv = ""

        def there_and_back(backend: Backend, d: torch.Tensor = data, calls: tuple[str, str] = (send, recv)) -> None:
            for call in filter(None, calls):
                getattr(backend, call)(d, 1 - backend.rank).wait()

        yield Work(f"send and recv {name}", lambda f=there_and_back: f(shm), lambda f=there_and_back: f(gloo))
    source, target = torch.zeros(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
    yield Work("one copy of 16 MB", lambda: target.copy_(source))


def measure(rank: int, world_size: int, seconds: float, slot: int) -> list[tuple[str, list[list[float]]]]:
    """Return the times of several rounds on this rank. The slowest rank's differ by at most one hand-over."""
    gloo = over(dist.group.WORLD)
    assert gloo is not None
    rows = []
    for work in table(shared(rank, world_size, slot), gloo):
        ways = [way for way in work[1:] if way is not None]
        share = seconds / 9 / len(ways)
        repeats = [max(3, min(1000, int(share / agreed(timed(way, 5))))) for way in ways]
        rows.append((work.name, [[timed(*each) for each in zip(ways, repeats, strict=True)] for _ in range(9)]))
    return rows


def report(world_size: int, rows: list[tuple[str, list[list[float]]]]) -> None:
    """Print the table of one world size, from rank 0's times."""
    print(f"\n{world_size} ranks, {os.cpu_count()} cores; times are medians in µs, ratios median (min to max)")
    print(f"{'':24}{'shm':>9}{'gloo':>9}{'torch':>9}   {'gloo / shm':24}torch / shm")
    for name, rounds in rows:
        times = [f"{statistics.median(column) * 1e6:9.1f}" for column in zip(*rounds, strict=True)]
        ratios = [[one[other] / one[0] for one in rounds] for other in range(1, len(rounds[0]))]
        spreads = [f"{statistics.median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in ratios]
        print(f"{name:24}{''.join(times):27}   {''.join(f'{spread:24}' for spread in spreads)}".rstrip())
    show(bounds(rows))


def bounds(rows: list[tuple[str, list[list[float]]]]) -> Iterator[Bound]:
    """Yield for each row the ratio to the faster one of the others."""
    for name, rounds in rows:
        ours, *others = (statistics.median(column) for column in zip(*rounds, strict=True))
        if others:
            yield Bound(f"{name}: times faster than over gloo", min(others) / ours, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each piece of work and world size, roughly")
    parser.add_argument("--slot", type=int, default=2 << 20, help="bytes of a slot")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            report(world_size, pool.run(measure, world_size, seconds=options.seconds, slot=options.slot)[0])


if __name__ == "__main__":
    main()
