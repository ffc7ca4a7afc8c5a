"""easydist beside its peers in one run: the same data, the same ranks, turn by turn.

python benchmarks/nested.py [--ranks 2 4] [--seconds 0.5] [--only TEXT]

Prints for each piece of work the median time of both, and the peer's time over easydist's: median, min and max of the
rounds. The peer is accelerate on gloo, gloo itself, the copies in memory that the work needs at least, or easydist with
more leaves.
EASYDIST_SHM=0 shows easydist on gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import agreed, timed

import easydist
from easydist.comms import ReduceOp
from easydist.testing import Pool


class Work(NamedTuple):
    """One row of the table; each function is called with nothing and does the whole of the work."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    peer: str = "accelerate"


def trees(rank: int) -> dict[str, Any]:
    """The data of the table."""
    return {
        "10 small leaves": {f"leaf{i}": torch.full((4,), float(rank)) for i in range(10)},
        "1000 small leaves": {f"leaf{i}": torch.full((4,), float(rank)) for i in range(1000)},
        "16 x 1 MB": {f"leaf{i}": torch.full((1 << 18,), float(rank)) for i in range(16)},
    }


def table(rank: int) -> Iterator[Work]:
    """All rows, accelerate's functions beside ours."""
    from accelerate.utils import operations as peer

    for name, tree in trees(rank).items():
        yield Work(f"gather {name}", lambda t=tree: easydist.gather(t), lambda t=tree: peer.gather(t))
        yield Work(f"broadcast {name}", lambda t=tree: easydist.broadcast(t), lambda t=tree: peer.broadcast(t))
        yield Work(f"reduce {name}", lambda t=tree: easydist.reduce(t), lambda t=tree: peer.reduce(t))
    ragged = {"ids": torch.ones(8, 10 + rank), "mask": torch.ones(8, 10 + rank, dtype=torch.int64)}
    yield Work(
        "pad + gather 2 ragged leaves",
        lambda: easydist.gather(easydist.pad_across_processes(ragged, dim=1)),
        lambda: peer.gather(peer.pad_across_processes(ragged, dim=1)),
    )
    small, strings = [{"rank": rank, "loss": 0.5}], [f"prediction {rank} {i}" for i in range(10_000)]
    for name, value in (("a small dict", small), ("10 000 strings", strings)):
        yield Work(
            f"gather_object {name}",
            lambda v=value: easydist.gather_object(v),
            lambda v=value: peer.gather_object(v),
        )
        yield Work(
            f"broadcast_object_list {name}",
            lambda v=value: easydist.broadcast_object_list(list(v)),
            lambda v=value: peer.broadcast_object_list(list(v)),
        )


def primitives(world_size: int) -> Iterator[Work]:
    """What the verbs are made of, beside gloo; and the copies that a gather in shared memory needs at least."""
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


def measure(rank: int, world_size: int, seconds: float, only: str) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Times of (ours, theirs) in several rounds, on this rank."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    from accelerate import PartialState

    PartialState(cpu=True)
    rows = []
    for work in [*table(rank), *primitives(world_size)]:
        if only not in work.name:
            continue
        often = [repeats(fn, seconds / 10) for fn in (work.ours, work.theirs)]
        rounds = [(timed(work.ours, often[0]), timed(work.theirs, often[1])) for _ in range(7)]
        rows.append((work.name, work.peer, rounds))
    PartialState._reset_state()
    return rows


def repeats(fn: Callable[[], Any], seconds: float) -> int:
    """How often to do a piece of work in this time, the same on all ranks."""
    return max(1, min(200, int(seconds / agreed(timed(fn, 3)))))


def report(world_size: int, rows: list[tuple[str, str, list[tuple[float, float]]]]) -> None:
    """The table of one world size, from rank 0's times."""
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
            report(world_size, pool.run(measure, world_size, seconds=options.seconds, only=options.only)[0])


if __name__ == "__main__":
    main()
