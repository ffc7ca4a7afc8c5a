"""Compare easydist with gloo's own collectives between hosts with slow links, as root on Linux.

python benchmarks/links.py [--sizes 2x1 2x2 4x1 4x2] [--delay 0.01] [--rate 125e6] [--seconds 3] [--only TEXT]

The hosts are network namespaces of this machine, and a process passes their packets on, DELAY seconds later and RATE
bytes a second from each host. It prints the table of ``nested.py`` for each number of hosts and ranks of a host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from bounds import show
from nested import table
from scale import bounds, works

import easydist
from easydist.cli.measure import BenchRow, Work, measured

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from namespaces import LINK, address, hosts, on
from wires import Wire

_MTU = 65535
_LARGE = 1 << 22


def every(world_size: int) -> Iterator[Work]:
    """Yield the rows."""
    yield from works(world_size)
    data = torch.ones(_LARGE)
    parts = [torch.empty(_LARGE) for _ in range(world_size)]
    yield Work("gather 16 MB", partial(easydist.gather, data), partial(dist.all_gather, parts, data), "gloo")
    yield Work("broadcast 16 MB", partial(easydist.broadcast, data), partial(dist.broadcast, data, 0), "gloo")
    yield Work("reduce 16 MB", partial(easydist.reduce, data), partial(dist.all_reduce, data), "gloo")


def measure(seconds: float, only: str) -> None:
    """Measure on one rank; the first prints its times as JSON."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = measured(rank, size, seconds, only, lambda: every(size))
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def between(count: int, per_host: int, options: argparse.Namespace) -> list[BenchRow]:
    """Return the times between so many hosts."""
    wire, ranks = Wire(options.delay, options.rate, mtu=_MTU), list[subprocess.Popen[str]]()
    command = [sys.executable, __file__, "--rank", "--seconds", options.seconds, "--only", options.only]
    world = {"MASTER_ADDR": address(1), "MASTER_PORT": 29500, "WORLD_SIZE": count * per_host, "OMP_NUM_THREADS": 1}
    with hosts(count, wire=wire) as pids:
        for rank in range(count * per_host):
            host, local = divmod(rank, per_host)
            own = {"RANK": rank, "LOCAL_RANK": local, "EASYDIST_HOST_ID": f"host {host}", "GLOO_SOCKET_IFNAME": LINK}
            environment = {name: str(value) for name, value in {**os.environ, **world, **own}.items()}
            line = [*map(str, on(pids[host], *command))]
            ranks.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
        printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    return [(name, peer, [(our, their) for our, their in rounds]) for name, peer, rounds in json.loads(printed[0])]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["2x1", "2x2", "4x1", "4x2"], help="hosts x ranks of a host")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds one way")
    parser.add_argument("--rate", type=float, default=1.25e8, help="bytes a second")
    parser.add_argument("--seconds", type=float, default=3, help="for each row, roughly")
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.seconds, options.only)
        return
    for size in options.sizes:
        count, per_host = map(int, size.split("x"))
        rows = between(count, per_host, options)
        print(f"\n{count} hosts with {per_host} ranks each, {options.delay * 1e3:g} ms one way", end="")
        table(count * per_host, rows)
        show(bounds(rows))


if __name__ == "__main__":
    main()
