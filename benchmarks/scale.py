"""Compare easydist over gloo alone, as between hosts, with gloo's own collectives, for more and more ranks.

python benchmarks/scale.py [--ranks 2 4 8] [--seconds 0.5] [--only TEXT] [--draw docs/scaling.svg]

It prints the table of ``nested.py`` for each number of ranks. gloo's collectives compare nothing, and tell nobody why
they do not end. After that it prints what a call costs between thousands of hosts: rounds, messages and bytes follow
from the schedules, the time from a model whose constants are printed, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from bounds import Bound, show
from curves import INK, axes_for_both_themes, save
from nested import table

import easydist
from easydist.agreement.frames import FOLDED_FROM
from easydist.cli.measure import BenchRow, Work, measured
from easydist.testing import Pool
from easydist.transport import schedules

_SIZES = {"64 B": 16, "64 KB": 1 << 14, "1 MB": 1 << 18}
_HOSTS = [2**k for k in range(1, 14)] + [10_000]
_DRAWN = "wait_for_everyone", "gather 64 B", "reduce 64 B"
_FRAME, _FOLDED = 72, 128
"""The bytes of a header with its length, and those of a reduction of headers."""


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


def bounds(rows: list[BenchRow]) -> Iterator[Bound]:
    """Yield the bounds of one table: a call takes no longer than gloo's and a round of headers, which gloo lacks."""
    headers = [our for name, _, rounds in rows if name == "wait_for_everyone" for our, _ in rounds]
    for name, peer, rounds in rows if headers else []:
        if name != "wait_for_everyone":
            ratios = [(their + statistics.median(headers)) / our for our, their in rounds]
            yield Bound(f"{name}, beside {peer} and a round of headers", statistics.median(ratios), 1.0)


class Link(NamedTuple):
    """A connection between two hosts.

    Attributes:
        latency: The seconds until a message has arrived and its receiver runs.
        overhead: The seconds of a processor that a rank needs for each message that it sends or receives.
        bandwidth: Bytes per second.
    """

    latency: float = 50e-6
    overhead: float = 15e-6
    bandwidth: float = 1.25e9


class Traffic(NamedTuple):
    """The messages of the rank that has the most.

    Attributes:
        rounds: The rounds, one after another.
        messages: The messages that it sends, and those that it receives.
        nbytes: The bytes that it receives, or sends if these are more.
    """

    rounds: int
    messages: int
    nbytes: int

    def over(self, link: Link) -> float:
        """Return the seconds that this takes."""
        return self.rounds * link.latency + self.messages * link.overhead + self.nbytes / link.bandwidth


def at_once(hosts: int) -> Traffic:
    """Return the traffic of headers that each host sends to all others."""
    return Traffic(1, 2 * (hosts - 1), _FRAME * (hosts - 1))


def doubled(hosts: int) -> Traffic:
    """Return the traffic of headers in rounds."""
    every = schedules.doubling(0, hosts)
    return Traffic(len(every), 2 * len(every), _FRAME * sum(one.blocks for one in every))


def folded(hosts: int) -> Traffic:
    """Return the traffic of headers that are reduced."""
    count = len(schedules.doubling(0, hosts))
    return Traffic(count, 2 * count, _FOLDED * count)


def ring(hosts: int) -> Traffic:
    """Return the traffic of headers in a ring, in which each host passes on what has arrived."""
    return Traffic(hosts - 1, 2 * (hosts - 1), _FRAME * (hosts - 1))


def chosen(hosts: int) -> Traffic:
    """Return the traffic of the headers of a call without small data."""
    if hosts >= FOLDED_FROM:
        return folded(hosts)
    return doubled(hosts) if schedules.is_doubled(hosts, 0) else at_once(hosts)


def along_a_tree(hosts: int, nbytes: int) -> Traffic:
    """Return the traffic of a broadcast along a tree; each round begins once the one before has ended."""
    depth = len(schedules.tree(0, hosts)[1])
    return Traffic(depth, depth, depth * nbytes)


def scattered(hosts: int, nbytes: int) -> Traffic:
    """Return the traffic of a broadcast that is scattered first."""
    return Traffic(2, 2 * (hosts - 1), 2 * nbytes)


HEADERS = {"to all at once": at_once, "a ring, as gloo's": ring, "in rounds": doubled, "reduced": folded}


def model(link: Link, hosts: Sequence[int]) -> None:
    """Print the traffic and the times between many hosts."""
    print(
        f"\nbetween hosts, computed: {link.latency * 1e6:g} µs until a message has arrived, "
        f"{link.overhead * 1e6:g} µs of a processor for each, {link.bandwidth / 1e9:g} GB/s"
    )
    print(
        f"{'hosts':>8}{'rounds':>8}{'messages':>10}{'bytes':>10}{'header':>12}   "
        + "".join(f"{n:>20}" for n in HEADERS)
    )
    for count in hosts:
        one = chosen(count)
        times = "".join(f"{_ms(way(count).over(link)):>20}" for way in HEADERS.values())
        print(f"{count:8}{one.rounds:8}{one.messages:10}{one.nbytes:10}{_ms(one.over(link)):>12}   {times}")
    print(f"{'hosts':>8}{'broadcast of 64 MB':>20}{'along a tree':>15}{'scattered':>15}")
    for count in hosts:
        tree, cut = along_a_tree(count, 64 << 20), scattered(count, 64 << 20)
        mine = cut if schedules.is_scattered(count, 64 << 20) else tree
        print(f"{count:8}" + "".join(f"{_ms(one.over(link)):>{n}}" for one, n in ((mine, 20), (tree, 15), (cut, 15))))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def draw(tables: dict[int, list[BenchRow]], link: Link, output: Path) -> None:
    """Draw the measured times of some rows, and the computed ones of a header."""
    figure, (left, right) = axes_for_both_themes()
    for name, color in zip(_DRAWN, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        found = {size: rounds for size, rows in tables.items() for row, _, rounds in rows if row == name}
        for index, label, line in ((0, name, "o-"), (1, "the same by gloo", "s--")):
            times = [statistics.median(pair[index] for pair in rounds) for rounds in found.values()]
            left.loglog([*found], times, line, color=color, label=label if index == 0 or color == "tab:green" else None)
    for label, way in HEADERS.items():
        right.loglog(_HOSTS, [way(count).over(link) for count in _HOSTS], label=label)
    right.loglog(_HOSTS, [chosen(count).over(link) for count in _HOSTS], ".", color=INK, label="easydist")
    left.set_xticks([*tables], [str(size) for size in tables], minor=False)
    left.minorticks_off()
    left.set(xlabel=f"ranks on {os.cpu_count()} cores, measured", ylabel="time of one call")
    right.set(xlabel="hosts, computed", ylabel="time of a header")
    save(figure, (left, right), output)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row and number of ranks, roughly")
    parser.add_argument("--only", default="", help="the rows whose name contains this text")
    parser.add_argument("--draw", type=Path, help="the file for a drawing of the results")
    options = parser.parse_args()
    os.environ["EASYDIST_SHM"] = "0"
    tables: dict[int, list[BenchRow]] = {}
    with Pool(timeout=600) as pool:
        for size in options.ranks:
            tables[size] = pool.run(measure, size, seconds=options.seconds, only=options.only)[0]
            table(size, tables[size])
            show(bounds(tables[size]))
    model(Link(), _HOSTS)
    if options.draw is not None:
        draw(tables, Link(), options.draw)


if __name__ == "__main__":
    main()
