"""Compare this checkout with another one: the same work in both, turn by turn, while the other one's ranks wait.

python benchmarks/paired.py CHECKOUT [--work verbs comms metrics] [--ranks 2 4] [--turns 15] [--seconds 0.1] [--only X]

For each piece of work it prints the median times of both, and this checkout's time over the other's: the ratio of the
medians, the median, min and max of the turns, and the ratio of the shortest times. EASYDIST_SHM=0 measures gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
Works = dict[str, Callable[[], Any]]
"""The pieces of work by name. A function that returns a float has measured itself."""


def verbs(rank: int, world_size: int) -> Works:
    """Return the verbs of the table in nested.py."""
    import torch

    from easydist.cli.measure import beside_accelerate, beside_gloo

    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    return {work.name: work.ours for work in (*beside_accelerate(rank), *beside_gloo(world_size))}


def comms(_rank: int, world_size: int) -> Works:
    """Return the operations of communicators of the table in comms.py."""
    import torch
    from comms import table

    from easydist.comms import new_comm

    works: Works = {}
    for backend in ("shm", "gloo"):
        comm = new_comm(backend, torch.device("cpu"), f"paired-{backend}")
        for nbytes in (16, 1 << 20):
            for work in table(world_size, nbytes):
                works[f"{backend}: {work.name} {nbytes} B"] = functools.partial(work.run, comm)
    return works


def metrics(rank: int, world_size: int) -> Works:
    """Return the loops of the table in metrics.py."""
    from metrics import loops

    return {loop.name: loop.ours for loop in loops(rank, world_size, 100)}


def body(rank: int, world_size: int, kinds: list[str], address: str, seconds: float) -> None:
    """Measure each work that the parent asks for, on every rank of one pool."""
    import torch
    import torch.distributed as dist

    from easydist.cli.measure import agreed, timed

    works = {name: work for kind in kinds for name, work in globals()[kind](rank, world_size).items()}
    names, repeats = list(works), dict.fromkeys(works, 0)
    with Client(address) if rank == 0 else contextlib.nullcontext() as parent:
        if parent:
            parent.send(names)
        while (index := _told(parent, names)) >= 0:
            name = names[index]
            work = works[name]
            own = isinstance(work(), float)
            if not own and not repeats[name]:
                repeats[name] = max(1, min(2000, int(seconds / agreed(timed(work, 5)))))
            dist.barrier()
            took = torch.tensor([work() if own else timed(work, repeats[name])])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if parent:
                parent.send(took.item())


def _told(parent: Connection | None, names: list[str]) -> int:
    """Return the index of the work that rank 0 was asked for, on every rank."""
    import torch
    import torch.distributed as dist

    index = torch.tensor([0])
    if parent:
        name = parent.recv()
        index[0] = names.index(name) if name else -1
    dist.broadcast(index, 0)
    return int(index)


def serve(options: argparse.Namespace) -> None:
    """Run the ranks of one checkout, the one in which this process finds easydist."""
    from easydist.testing import Pool

    with Pool(timeout=3600) as pool:
        pool.run(body, options.ranks[0], options.work, options.serve, options.seconds)


class Side(NamedTuple):
    """The ranks of one checkout."""

    process: subprocess.Popen[bytes]
    connection: Connection
    names: list[str]

    def seconds(self, name: str) -> float:
        """Return the seconds that one call of a piece of work takes now."""
        self.connection.send(name)
        return float(self.connection.recv())


@contextlib.contextmanager
def side(checkout: Path, world_size: int, options: argparse.Namespace) -> Iterator[Side]:
    """Start the ranks of a checkout, and end them."""
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/parent") as listener:
        command = [sys.executable, str(HERE), str(checkout), "--ranks", str(world_size), "--serve", f"{folder}/parent"]
        command += ["--seconds", str(options.seconds), "--work", *options.work]
        path = os.pathsep.join([str(checkout), str(checkout / "benchmarks"), str(HERE.parent)])
        process = subprocess.Popen(command, cwd=checkout, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        with listener.accept() as connection:
            yield Side(process, connection, connection.recv())
            connection.send(None)
            process.wait()


def compare(world_size: int, options: argparse.Namespace) -> None:
    """Print the table of one world size."""
    with side(HERE.parents[1], world_size, options) as new, side(options.checkout, world_size, options) as old:
        print(f"\n{world_size} ranks, {os.cpu_count()} cores, {options.turns} turns")
        print(f"{'':36}{'this':>11}{'other':>11}   this / other: medians, median of turns (min to max), shortest")
        for name in (name for name in new.names if options.only in name and name in old.names):
            times: list[list[float]] = [[], []]
            for turn in range(options.turns + 1):
                for each in ((0, 1), (1, 0))[turn % 2]:
                    times[each].append((new, old)[each].seconds(name))
            print(_line(name, times[0][1:], times[1][1:]), flush=True)


def _line(name: str, ours: list[float], others: list[float]) -> str:
    """Return one row of the table."""
    mine, theirs = statistics.median(ours), statistics.median(others)
    ratios = [our / other for our, other in zip(ours, others, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    shortest = min(ours) / min(others)
    return f"{name:36}{mine * 1e6:8.1f} µs{theirs * 1e6:8.1f} µs   {mine / theirs:.2f}, {spread}, {shortest:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda text: Path(text).resolve(), help="the folder of another checkout")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each turn of each checkout, roughly")
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    parser.add_argument("--work", nargs="+", choices=["verbs", "comms", "metrics"], default=["verbs", "comms"])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        # Workers of the pool import this function by its module's name, which is not __main__ for them.
        import paired

        paired.serve(options)
        return
    for world_size in options.ranks:
        compare(world_size, options)


if __name__ == "__main__":
    main()
