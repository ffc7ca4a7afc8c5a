"""Compare easydist over gloo alone, as between hosts, with gloo's own collectives, for more and more ranks.

python benchmarks/scale.py [--ranks 2 4 8] [--seconds 0.5] [--only TEXT]

It prints the table of ``nested.py`` for each number of ranks. gloo's collectives compare nothing, and tell nobody why
they do not end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from nested import report

import easydist
from easydist.cli.measure import BenchRow, Work, measured
from easydist.testing import Pool

_SIZES = {"64 B": 16, "64 KB": 1 << 14, "1 MB": 1 << 18}


def works(world_size: int) -> Iterator[Work]:
    """Yield the rows."""
    yield Work("wait_for_everyone", easydist.wait_for_everyone, dist.barrier, "gloo")
    small = [{"loss": 0.5}]
    yield Work(
        "broadcast_object_list of a small dict",
        partial(easydist.broadcast_object_list, small),
        partial(dist.broadcast_object_list, small),
        "torch",
    )
    for name, numel in _SIZES.items():
        data, parts = torch.ones(numel), [torch.empty(numel) for _ in range(world_size)]
        yield Work(f"gather {name}", partial(easydist.gather, data), partial(dist.all_gather, parts, data), "gloo")
        yield Work(f"broadcast {name}", partial(easydist.broadcast, data), partial(dist.broadcast, data, 0), "gloo")
        yield Work(f"reduce {name}", partial(easydist.reduce, data), partial(_reduced, data), "gloo")


def _reduced(data: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(reduced := data.clone())
    return reduced


def measure(rank: int, world_size: int, seconds: float, only: str) -> list[BenchRow]:
    """Return the times of (ours, theirs) in several rounds, on this rank."""
    return measured(rank, world_size, seconds, only, lambda: works(world_size))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row and number of ranks, roughly")
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    options = parser.parse_args()
    os.environ["EASYDIST_SHM"] = "0"
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            report(world_size, pool.run(measure, world_size, seconds=options.seconds, only=options.only)[0])


if __name__ == "__main__":
    main()
