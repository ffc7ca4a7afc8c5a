"""Compare GroupCoordinator with plain torch.distributed (gloo), on the same data in the same run.

python benchmarks/coordinator.py [--ranks 2 4] [--seconds 1]

The stand-in does what engines do with torch.distributed alone: metadata by ``broadcast_object_list`` or
``send_object_list``, then one operation per tensor. It prints medians over turns of ten calls, of the slowest rank. The
last column was measured earlier on an idle machine of the same type, with vLLM 0.33. Below each
table it lists the bounds and whether they hold.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from easydist.parallel import GroupCoordinator
from easydist.testing import Pool

SMALL, LARGE = "10 × 1 KB", "64 × 1 MB"
BEFORE = {
    ("broadcast_tensor_dict", SMALL, 2): 1.75e-3,
    ("broadcast_tensor_dict", SMALL, 4): 5.5e-3,
    ("broadcast_tensor_dict", LARGE, 2): 22e-3,
    ("broadcast_tensor_dict", LARGE, 4): 60e-3,
    ("send + recv_tensor_dict", SMALL, 2): 0.42e-3,
    ("send + recv_tensor_dict", LARGE, 2): 34e-3,
    ("broadcast_object", "1 KB", 2): 202e-6,
    ("broadcast_object", "1 KB", 4): 928e-6,
    ("broadcast_object, queue", "", 2): 27e-6,
    ("broadcast_object, queue", "", 4): 197e-6,
}
"""Seconds of vLLM 0.33, measured earlier on the same machine type."""

Row = tuple[str, str]
Call = Callable[[], Any]
_IN_A_ROW = 10
RAW = "broadcast_object beside our queue"
"""The name of rows whose last columns show the queue alone, not gloo."""


def tree(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((nbytes // 4,), float(i)) for i in range(count)}


def described(data: dict[str, torch.Tensor]) -> list[Any]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in data.items()]


class StandIn:
    """The stand-in, which uses torch.distributed alone, as engines do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def broadcast_tensor_dict(self, data: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        told: list[Any] = [described(data) if data else None]
        dist.broadcast_object_list(told, 0)
        result = data or {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in told[0]}
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in result.values()]:
            work.wait()
        return result

    def send_tensor_dict(self, data: dict[str, torch.Tensor]) -> None:
        dist.send_object_list([described(data)], 1)
        for tensor in data.values():
            dist.send(tensor, 1)

    def recv_tensor_dict(self) -> dict[str, torch.Tensor]:
        told: list[Any] = [None]
        dist.recv_object_list(told, 0)
        result = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in told[0]}
        for tensor in result.values():
            dist.recv(tensor, 0)
        return result

    def broadcast_object(self, obj: Any) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, 0)
        return objects[0]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total


def calls(rank: int, group: Any) -> dict[Row, Callable[[], Any]]:
    """Return the measured calls, of a coordinator or of the stand-in."""
    rows: dict[Row, Callable[[], Any]] = {}
    for name, data in ((SMALL, tree(10, 1024)), (LARGE, tree(64, 1 << 20))):
        mine = data if rank == 0 else None
        rows["broadcast_tensor_dict", name] = lambda mine=mine: group.broadcast_tensor_dict(mine)
        pair = [lambda data=data: group.send_tensor_dict(data), group.recv_tensor_dict]
        rows["send + recv_tensor_dict", name] = pair[rank] if rank < 2 else lambda: None
    obj = {"text": "x" * 1000} if rank == 0 else None
    rows["broadcast_object", "1 KB"] = lambda: group.broadcast_object(obj)
    for name, numel in (("1 KB", 256), ("1 MB", 1 << 18)):
        tensor = torch.ones(numel)
        rows["all_reduce", name] = lambda tensor=tensor: group.all_reduce(tensor)
    return rows


def timed(call: Call, other: Call, seconds: float) -> tuple[float, float]:
    """Return the median seconds of two calls in turns of ten, under the same load. The ranks begin together."""
    both, times = (call, other), ([], [])  # type: tuple[Call, Call], tuple[list[float], list[float]]
    once = sum(_turn(one, 3) for one in both)
    count = torch.tensor([int(min(200, max(3, seconds / max(once, 1e-6) / _IN_A_ROW)))])
    dist.broadcast(count, 0)
    for _ in range(int(count)):
        for one, taken in zip(both, times, strict=True):
            taken.append(_turn(one, _IN_A_ROW))
    return statistics.median(times[0]), statistics.median(times[1])


def _turn(call: Call, calls: int) -> float:
    """Return the seconds of one call, averaged over several in a row."""
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def of_objects(plain: GroupCoordinator, queued: GroupCoordinator) -> dict[Row, tuple[Call, Call]]:
    """Return the calls that broadcast objects: the coordinator's, and those for comparison."""
    rank, last = plain.rank_in_group, plain.world_size - 1
    obj, stand_in = {"text": "x" * 1000}, StandIn(rank)
    rows: dict[Row, tuple[Call, Call]] = {}
    for src in (0, last):
        queue = plain.create_mq_broadcaster(src)
        mine = obj if rank == src else None
        through_queue = functools.partial(queued.broadcast_object, mine, src)
        rows["broadcast_object, queue", f"src {src}"] = through_queue, lambda: stand_in.broadcast_object(obj)
        rows[RAW, f"src {src}"] = through_queue, functools.partial(queue.broadcast_object, mine)
    data = [tree(10, 1024) if rank == 0 else None]
    rows["broadcast_object_list", SMALL] = (
        lambda: plain.broadcast_object_list([*data]),
        lambda: dist.broadcast_object_list([*data]),
    )
    return rows


def measure(rank: int, world_size: int, seconds: float) -> list[tuple[Row, float, float]]:
    """Return for each row the seconds of the coordinator and of the stand-in."""
    everyone = [[*range(world_size)]]
    plain = GroupCoordinator(everyone, rank, "gloo", False)
    queued = GroupCoordinator(everyone, rank, "gloo", False, True)
    ours, theirs = calls(rank, plain), calls(rank, StandIn(rank))
    pairs = {row: (ours[row], theirs[row]) for row in ours} | of_objects(plain, queued)
    rows = [(row, *timed(one, other, seconds)) for row, (one, other) in pairs.items()]
    plain.destroy()
    queued.destroy()
    return rows


def bounds(found: dict[Row, tuple[float, float]], ranks: int) -> list[tuple[str, float, float, bool]]:
    """Return the required bounds: a text, the measured value, the bound, and True if the value must be above it."""
    small, large = found["broadcast_tensor_dict", SMALL], found["broadcast_tensor_dict", LARGE]
    pair, listed = found["send + recv_tensor_dict", SMALL], found["broadcast_object_list", SMALL]
    rows = [
        (f"broadcast_tensor_dict {SMALL}: times faster than gloo", small[1] / small[0], 8.0, True),
        (f"broadcast_tensor_dict {SMALL}: times broadcast_object_list", small[0] / listed[0], 1.5, False),
        (f"broadcast_tensor_dict {LARGE}: times faster than gloo", large[1] / large[0], 1.6, True),
        (f"send + recv_tensor_dict {SMALL}: times faster than gloo", pair[1] / pair[0], 2.0, True),
    ]
    for name, size in found:
        if name == RAW:
            ratio = found[name, size][0] / found[name, size][1]
            rows.append((f"broadcast_object, {size}: times our queue", ratio, 2.0 if ranks == 2 else 1.5, False))
    return rows


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def report(results: list[list[tuple[Row, float, float]]], ranks: int) -> None:
    """Print the table and the bounds."""
    print(f"\n{ranks} ranks, {os.cpu_count()} cores")
    print(f"{'':40}{'easydist':>10}{'gloo':>10}{'ratio':>8}   vLLM 0.33, same machine type, measured before")
    found: dict[Row, tuple[float, float]] = {}
    for each in zip(*results, strict=True):
        (name, size), *_ = each[0]
        ours, theirs = found[name, size] = max(row[1] for row in each), max(row[2] for row in each)
        before = BEFORE.get((name, size, ranks)) or BEFORE.get((name, "", ranks))
        line = f"{name + ', ' + size:40}{shown(ours):>10}{shown(theirs):>10}{theirs / ours:>8.1f}"
        print(f"{line}   {shown(before) if before else ''}".rstrip())
    for text, figure, bound, is_least in bounds(found, ranks):
        holds = figure >= bound if is_least else figure <= bound
        print(f"  {'holds' if holds else 'FAILS'}  {text}: {figure:.2f}, at {'least' if is_least else 'most'} {bound}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=1, help="for each row, roughly")
    options = parser.parse_args()
    with Pool(timeout=600) as pool:
        for ranks in options.ranks:
            report(pool.run(measure, ranks, seconds=options.seconds), ranks)


if __name__ == "__main__":
    main()
