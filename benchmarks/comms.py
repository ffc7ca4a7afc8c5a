"""Compare communicators with plain torch.distributed in one run: the same data, the same ranks, in turns.

python benchmarks/comms.py [--ranks 2 4] [--seconds 0.3] [--sizes 16 1048576]

For each operation and size it prints the shortest time of nine rounds in µs: over gloo, over shared memory, and of a
direct call of ProcessGroupGloo; then the extra time of gloo over the direct call; and the ratio by which shared memory
is faster. The first lines show the cost of a call besides the exchange, on a communicator of a single rank. Below each
table are the bounds, and whether they hold.
"""

from __future__ import annotations

import argparse
import functools
import os
import timeit
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bounds import Bound, show

from easydist.cli.measure import agreed, timed
from easydist.comms import ReduceOp, Solo, TorchComm, new_comm
from easydist.testing import Pool

SUM = ReduceOp.SUM
SMALL = 1 << 10
"""The bytes up to which an operation is limited by the calls, not by the copies."""

PAIR = "send and recv"
"""The row with two operations."""


class Work(NamedTuple):
    """One row of the table."""

    name: str
    run: Callable[[TorchComm], Any]
    direct: Callable[[Any], Any]


def table(size: int, nbytes: int) -> Iterator[Work]:
    """Yield all operations that gloo has itself. ``direct`` gets the process group."""
    data, whole = torch.zeros(nbytes // 4), torch.zeros(size * nbytes // 4)
    parts, others = list(whole.chunk(size)), list(torch.zeros_like(whole).chunk(size))
    rank, root = dist.get_rank(), 0
    to_root = dist.GatherOptions()
    to_root.rootRank = root
    from_root = dist.ScatterOptions()
    from_root.rootRank = root
    yield Work("all_gather", lambda c: c.all_gather(parts, data, False), lambda g: g.allgather([parts], [data]).wait())
    yield Work("all_reduce", lambda c: c.all_reduce(data, SUM, False), lambda g: g.allreduce([data]).wait())
    yield Work("all_to_all", lambda c: c.all_to_all(parts, others, False), lambda g: g.alltoall(parts, others).wait())
    yield Work("broadcast", lambda c: c.broadcast(data, root, False), lambda g: g.broadcast(data, root).wait())
    lists = [parts] if rank == root else []
    yield Work(
        "gather",
        lambda c: c.gather(parts if rank == root else [], data, root, False),
        lambda g: g.gather(lists, [data], to_root).wait(),
    )
    yield Work(
        "scatter",
        lambda c: c.scatter(data, parts if rank == root else [], root, False),
        lambda g: g.scatter([data], lists, from_root).wait(),
    )
    peer = rank ^ 1
    first = rank < peer

    def ping(send: Callable[[], Any], recv: Callable[[], Any]) -> None:
        for call in (send, recv) if first else (recv, send):
            call()

    yield Work(
        PAIR,
        lambda c: ping(lambda: c.send(data, peer, False), lambda: c.recv(data, peer, False)),
        lambda g: ping(lambda: g.send([data], peer, 0).wait(), lambda: g.recv([data], peer, 0).wait()),
    )


def measure(rank: int, world_size: int, sizes: list[int], seconds: float) -> list[tuple[str, int, list[list[float]]]]:
    """Return the times of several rounds, on this rank."""
    cpu = torch.device("cpu")
    gloo, shm = new_comm("gloo", cpu, "gloo"), new_comm("shm", cpu, "shm")
    direct: Any = gloo.split(list(range(world_size)), "direct").unsafe_get_backend().process_group
    rows = []
    for nbytes in sizes:
        for work in table(world_size, nbytes):
            ways = [lambda w=work, c=comm: w.run(c) for comm in (gloo, shm)] + [lambda w=work: w.direct(direct)]
            repeats = [max(3, min(500, int(seconds / 27 / agreed(timed(way, 5))))) for way in ways]
            rows.append(
                (work.name, nbytes, [[timed(*each) for each in zip(ways, repeats, strict=True)] for _ in range(9)])
            )
    return rows


def calls() -> None:
    """Print the cost of one call that exchanges nothing."""
    comm, data = TorchComm(Solo()), torch.zeros(4)
    core = comm.core()
    for name, each in (("TorchComm", comm), ("its core", core)):
        run = functools.partial(each.all_reduce, data, SUM, False)
        seconds = min(timeit.repeat(run, number=2000, repeat=9)) / 2000
        print(f"one all_reduce of a single rank, {name}: {seconds * 1e6:.1f} µs (best of 9 rounds)")


def bounds(name: str, nbytes: int, gloo: float, shm: float, direct: float) -> Iterator[Bound]:
    """Yield the bounds of a row, from the times in µs."""
    yield Bound(f"{name} {nbytes} B, shm: times faster than direct", direct / shm, 10 if nbytes <= SMALL else 1)
    if nbytes <= SMALL:
        more = (gloo - direct) / (2 if name == PAIR else 1)
        yield Bound(f"{name} {nbytes} B, gloo: µs an operation more than direct", more, 10, is_least=False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each operation and size, roughly")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 1 << 20], help="bytes per rank")
    options = parser.parse_args()
    calls()
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            print(f"\n{world_size} ranks, {os.cpu_count()} cores; the best of nine rounds in µs")
            print(f"{'':24}{'gloo':>9}{'shm':>9}{'direct':>9}{'gloo more':>11}{'direct/shm':>12}")
            found: list[Bound] = []
            for name, nbytes, rounds in pool.run(measure, world_size, options.sizes, options.seconds)[0]:
                gloo, shm, direct = (min(column) * 1e6 for column in zip(*rounds, strict=True))
                row = f"{gloo:9.1f}{shm:9.1f}{direct:9.1f}{gloo - direct:11.1f}{direct / shm:12.1f}"
                print(f"{name + f' {nbytes} B':24}{row}")
                found += bounds(name, nbytes, gloo, shm, direct)
            show(found)


if __name__ == "__main__":
    main()
