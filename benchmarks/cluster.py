"""Compare ranks on a Ray cluster with Ray's own actors: how long they take to start, a call, and a cell.

python benchmarks/cluster.py [--size 8] [--nodes 3] [--repeats 3]

The cluster has several nodes, all on this machine. Ranks and actors take turns; an actor that is to compare imports
torch. It prints the median of the turns, and whether the bounds hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from bounds import Bound, show
from ray.cluster_utils import Cluster

import easydist.notebook
import easydist.ray

CALLS = 100
"""The calls of which the median counts."""


class Bare:
    """An actor that is ready once it has imported torch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def nothing(self) -> None:
        """Do nothing."""


def nothing() -> None:
    """Do nothing."""


def seconds(call: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median(call: Callable[[], object]) -> float:
    """Return the median of the times of some calls, after one that does not count."""
    call()
    return statistics.median(seconds(call) for _ in range(CALLS))


def of_actors(size: int) -> tuple[float, float]:
    """Return the seconds until bare actors are ready, and those of one call of all of them."""
    actors: list[Any] = []

    def start() -> None:
        bare = ray.remote(num_cpus=1)(Bare)
        actors.extend(bare.options(scheduling_strategy="SPREAD").remote() for _ in range(size))
        ray.get([one.nothing.remote() for one in actors])

    took = seconds(start)
    call = median(lambda: ray.get([one.nothing.remote() for one in actors]))
    for one in actors:
        ray.kill(one)
    return took, call


def of_ranks(size: int) -> tuple[float, float, float]:
    """Return the seconds until ranks are ready, and those of one call and of one cell on all of them."""
    began = time.perf_counter()
    with easydist.ray.Ranks(size, strategy="SPREAD") as ranks:
        took = time.perf_counter() - began
        call = median(lambda: ranks.run(nothing))
        with easydist.notebook.start(on=ranks) as cells, contextlib.redirect_stdout(io.StringIO()):
            return took, call, median(lambda: cells.execute("1 + 1"))


def bounds(size: int, actors: list[tuple[float, ...]], ranks: list[tuple[float, ...]]) -> Iterator[Bound]:
    """Yield the bounds, of the median turn."""
    (start, call), (own_start, own_call, cell) = (
        [statistics.median(column) for column in zip(*turns, strict=True)] for turns in (actors, ranks)
    )
    print(f"  actors: start {start:.2f} s, call {1e3 * call:.2f} ms")
    print(f"  ranks:  start {own_start:.2f} s, call {1e3 * own_call:.2f} ms, cell {1e3 * cell:.1f} ms")
    yield Bound(f"start of {size} ranks, relative to actors", own_start / start, 3.0, is_least=False)
    yield Bound("a call of all ranks, relative to actors", own_call / call, 3.0, is_least=False)
    yield Bound("a cell, in ms", 1e3 * cell, 100.0, is_least=False)


def main() -> None:
    """Print the figures and the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster()
    try:
        for node in range(args.nodes):
            cluster.add_node(node_ip_address=f"127.0.0.{node + 2}", num_cpus=args.size, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.2")
        turns = [(of_actors(args.size), of_ranks(args.size)) for _ in range(args.repeats)]
        print(f"{args.size} ranks on {args.nodes} nodes of this machine, {os.cpu_count()} cores")
        show(bounds(args.size, [one for one, _ in turns], [one for _, one in turns]))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
