"""Measure the cost of tracing per call: without a trace, inside of one, and of the hooks that are always there.

python benchmarks/trace.py [--ranks 1 2] [--seconds 2]

For each number of ranks it prints the nanoseconds of one ``wait_for_everyone`` and of one ``gather`` of 16 bytes,
outside and inside of a trace, in turns in one run: medians over the rounds, and the difference within each round as
median, min and max. The last lines are the cost of the three tests by which a call finds that no trace is running, and
the bounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from bounds import Bound, show

import easydist
from easydist.testing import Pool

ROUNDS = 201
OFF, ON = 200.0, 5_000.0
"""The nanoseconds that a call may take longer because it could be traced, and because it is."""


def measure(rank: int, world_size: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Return for each operation the nanoseconds per call without and with a trace, per round."""
    data = torch.zeros(4)
    work = {"wait_for_everyone": easydist.wait_for_everyone, "gather": lambda: easydist.gather(data)}
    repeats = {name: round_length(call, seconds / (2 * ROUNDS * len(work))) for name, call in work.items()}
    return {
        name: [(timed(call, repeats[name], trace=False), timed(call, repeats[name], trace=True)) for _ in range(ROUNDS)]
        for name, call in work.items()
    }


def round_length(call: Callable[[], Any], seconds: float) -> int:
    """Return the number of calls that take that long, the same on all ranks."""
    slowest = easydist.reduce(timed(call, 50, trace=False), "max")
    return max(5, int(seconds * 1e9 / slowest))


def timed(call: Callable[[], Any], repeats: int, trace: bool) -> float:
    """Return the nanoseconds per call. All ranks begin together."""
    easydist.wait_for_everyone()
    with easydist.trace() if trace else nullcontext():
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        return (time.perf_counter_ns() - start) / repeats


def report(world_size: int, found: dict[str, list[tuple[float, float]]]) -> list[Bound]:
    """Print the lines of one number of ranks, from rank 0's times, and return their bounds."""
    bounds = []
    for name, rounds in found.items():
        off, on = (statistics.median(column) for column in zip(*rounds, strict=True))
        more = sorted(traced - plain for plain, traced in rounds)
        spread = f"{statistics.median(more):7.0f} ({more[0]:.0f} to {more[-1]:.0f})"
        print(f"{world_size:5}  {name:20}{off:10.0f}{on:10.0f}   {spread}")
        bounds.append(
            Bound(f"{name}, {world_size} ranks: ns a traced call", statistics.median(more), ON, is_least=False)
        )
    return bounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of ranks, roughly")
    options = parser.parse_args()
    print(f"ns per call, {os.cpu_count()} cores, {ROUNDS} rounds")
    print(f"ranks  {'operation':20}{'off':>10}{'on':>10}   on - off: median (min to max)")
    found: list[Bound] = []
    with Pool(timeout=600) as pool:
        for world_size in options.ranks:
            found += report(world_size, pool.run(measure, world_size, seconds=options.seconds)[0])
    asked = timeit.repeat("\nif listeners: pass" * 3, "from easydist.agreement.notes import listeners", number=10**6)
    print(f"three questions whether anybody listens: {min(asked) * 1e3:.0f} ns")
    found.append(Bound("no trace: ns a call", min(asked) * 1e3, OFF, is_least=False))
    show(found)


if __name__ == "__main__":
    main()
