"""Compare easydist with its peers in one run: the same data, the same ranks, in turns.

python benchmarks/nested.py [--ranks 2 4] [--seconds 0.5] [--only TEXT]

For each piece of work it prints the median time of both, and the peer's time over easydist's: median, min and max of
the rounds, and below the table the bounds and whether they hold. The peer is accelerate on gloo, gloo itself,
safetensors, the copies in memory that the work needs at least, or easydist with more leaves. EASYDIST_SHM=0 measures
easydist on gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from bounds import Bound, show
from safetensors.torch import load_file

import easydist
from easydist.cli.measure import BenchRow, Work, beside_accelerate, measured, trees
from easydist.comms import ReduceOp
from easydist.testing import Pool


def primitives(world_size: int) -> Iterator[Work]:
    """Yield the operations that the verbs use, beside gloo, and the least copies of a gather in shared memory."""
    comms = easydist.ProcessState().communicators().met()
    small, large = torch.ones(2, dtype=torch.int64), torch.ones(1 << 22)
    smalls, _larges = torch.empty(2 * world_size, dtype=torch.int64), torch.empty(world_size << 22)
    comm, bulk = comms.control, comms.cpu(large.nbytes)
    yield Work("barrier", lambda: comm.barrier(async_op=False), dist.barrier, "gloo")
    yield Work(
        "all-gather 16 bytes",
        lambda: comm.all_gather_single(smalls, small, async_op=False),
        lambda: dist.all_gather(list(smalls.chunk(world_size)), small),
        "gloo",
    )
    yield Work(
        "all-reduce 16 MB",
        lambda: bulk.all_reduce(large, ReduceOp.MAX, async_op=False),
        lambda: dist.all_reduce(large, dist.ReduceOp.MAX),
        "gloo",
    )
    tree, target = trees(0)["16 x 1 MB"], torch.empty_like(large)
    middle, whole = [torch.ones(1 << 14) for _ in range(1000)], torch.ones(1000 << 14)
    room = torch.empty_like(whole)
    ten, thousand = trees(0)["10 small leaves"], trees(0)["1000 small leaves"]
    yield Work(
        "gather 10 small leaves, beside 1000", lambda: easydist.gather(ten), lambda: easydist.gather(thousand), "itself"
    )
    yield Work(
        f"gather 16 x 1 MB, {world_size + 1} copies of 16 MB",
        lambda: easydist.gather(tree),
        lambda: [target.copy_(large) for _ in range(world_size + 1)],
        "memcpy",
    )
    yield Work(
        f"gather 1000 x 64 KB, {world_size + 1} copies of 64 MB",
        lambda: easydist.gather(middle),
        lambda: [room.copy_(whole) for _ in range(world_size + 1)],
        "memcpy",
    )
    yield Work("reduce 1000 x 64 KB", lambda: easydist.reduce(middle), lambda: dist.all_reduce(whole), "gloo")


def files(folder: str) -> Iterator[Work]:
    """Yield the reading of a file beside safetensors."""
    path = os.path.join(folder, "small.safetensors")
    easydist.save({f"layer.{i}": torch.full((16,), float(i)) for i in range(10_000)}, path)
    yield Work("load 10 000 small tensors", lambda: easydist.load(path), lambda: load_file(path), "safetensors")


def measure(rank: int, world_size: int, seconds: float, only: str) -> list[BenchRow]:
    """Return the times of (ours, theirs) in several rounds, on this rank."""
    with tempfile.TemporaryDirectory() as folder:

        def works() -> list[Work]:
            return [*beside_accelerate(rank), *primitives(world_size), *files(folder)]

        return measured(rank, world_size, seconds, only, works)


LEAST = {
    "pad + gather 2 ragged leaves": {2: 15.0, 4: 60.0},
    "broadcast 16 x 1 MB": {4: 6.0},
    "reduce 16 x 1 MB": {4: 8.0},
    "load 10 000 small tensors": dict.fromkeys((2, 4), 0.83),
}
"""The least ratio to the peer's time, by work and number of ranks. Elsewhere no peer may be faster."""

_COPIES = 0.5
"""A gather takes at most twice as long as the copies that it needs."""


def bounds(world_size: int, rows: list[BenchRow]) -> Iterator[Bound]:
    """Yield the bounds of the table."""
    for name, peer, rounds in rows:
        least = LEAST.get(name, {}).get(world_size, 1.0)
        ratio = statistics.median(their / our for our, their in rounds)
        yield Bound(f"{name}, beside {peer}", ratio, _COPIES if peer == "memcpy" else least)


def table(world_size: int, rows: list[BenchRow]) -> None:
    """Print the table of one world size, from rank 0's times."""
    print(f"\n{world_size} ranks, {os.cpu_count()} cores")
    print(f"{'':42}{'easydist':>12}{'peer':>12}   peer / easydist: median (min to max)")
    for name, peer, rounds in rows:
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [their / our for our, their in rounds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{name:42}{ours * 1e6:9.0f} µs{theirs * 1e6:9.0f} µs   {statistics.median(ratios):6.1f} ({spread}) {peer}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each piece of work and world size, roughly")
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            rows = pool.run(measure, world_size, seconds=options.seconds, only=options.only)[0]
            table(world_size, rows)
            show(bounds(world_size, rows))


if __name__ == "__main__":
    main()
