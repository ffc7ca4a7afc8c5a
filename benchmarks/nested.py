"""easydist beside accelerate, on gloo, in one run: the same data, the same ranks, turn by turn.

python benchmarks/nested.py [--ranks 2 4] [--seconds 0.5]

Prints for each piece of work the median time of both, and accelerate's time over easydist's: median, min and max of
the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import easydist
from easydist.testing import Pool


class Work(NamedTuple):
    """One row of the table; each function is called with nothing and does the whole of the work."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


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


def measure(rank: int, world_size: int, seconds: float) -> list[tuple[str, list[tuple[float, float]]]]:
    """Times of (ours, theirs) in several rounds, on this rank."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    from accelerate import PartialState

    PartialState(cpu=True)
    rows = []
    for work in table(rank):
        once = agreed(max(timed(work.ours, 2), timed(work.theirs, 2)))
        repeats = max(1, min(200, int(seconds / 10 / once)))
        rows.append((work.name, [(timed(work.ours, repeats), timed(work.theirs, repeats)) for _ in range(7)]))
    PartialState._reset_state()
    return rows


def timed(fn: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, all ranks beginning together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    return (time.perf_counter() - start) / repeats


def agreed(seconds: float) -> float:
    """The slowest rank's figure, so that all ranks repeat equally often."""
    value = torch.tensor([seconds])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def report(world_size: int, rows: list[tuple[str, list[tuple[float, float]]]]) -> None:
    """The table of one world size, from rank 0's times."""
    print(f"\n{world_size} ranks, {os.cpu_count()} cores")
    print(f"{'':42}{'easydist':>12}{'accelerate':>12}   accelerate / easydist: median (min to max)")
    for name, rounds in rows:
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [their / our for our, their in rounds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(f"{name:42}{ours * 1e6:9.0f} µs{theirs * 1e6:9.0f} µs   {statistics.median(ratios):6.1f} ({spread})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each piece of work and world size, roughly")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            report(world_size, pool.run(measure, world_size, seconds=options.seconds)[0])


if __name__ == "__main__":
    main()
