"""Compare GroupCoordinator with vLLM's own and with plain torch.distributed (gloo), on the same data in the same run.

python benchmarks/coordinator.py [--ranks 2 4] [--seconds 1] [--vllm vllm-0.33.0-….whl]

vLLM's class is taken from its wheel, which is unpacked beside it and needs no more than ``pip install cbor2``; without
a wheel, that column is empty. The stand-in does what engines do with torch.distributed alone: metadata by
``broadcast_object_list`` or ``send_object_list``, then one operation per tensor. It prints medians over turns of ten
calls, of the slowest rank, and below each table the bounds and whether they hold.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bounds import Bound, show

from easydist.parallel import GroupCoordinator
from easydist.testing import Pool

SMALL, LARGE = "10 × 1 KB", "64 × 1 MB"
Row = tuple[str, str]
Call = Callable[[], Any]
Calls = dict[str, Call]
OURS, GLOO, VLLM, QUEUE = "easydist", "gloo", "vLLM", "queue"
_IN_A_ROW = 10


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

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        dist.send(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        dist.recv(tensor, src)
        return tensor


def unpacked(wheel: str | None) -> Path | None:
    """Return the folder beside a wheel of vLLM that has its Python modules."""
    if wheel is None:
        return None
    folder = Path(wheel).with_suffix(".unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py") and not (folder / n).exists()])
    return folder


def of_vllm(folder: Path, rank: int, name: str, *args: Any) -> Any:
    """Return a coordinator of vLLM's class for the CPU.

    It asks the engine's configuration for time limits; the engine, with all that it imports, is left out.
    """
    sys.path.insert(0, str(folder))
    config: Any = types.ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: None
    sys.modules["vllm.config"] = config
    from vllm import platforms
    from vllm.distributed import parallel_state
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    return parallel_state.GroupCoordinator([[*range(dist.get_world_size())]], rank, "gloo", True, *args, name)


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
    for name, numel in (("1 KB", 256), ("1 MB", 1 << 18), ("4 MB", 1 << 20)):
        tensor = torch.ones(numel)
        rows["all_reduce", name] = lambda tensor=tensor: group.all_reduce(tensor)
    pair = [lambda: group.send(tensor, 1), lambda: group.recv(tensor.size(), tensor.dtype, 0)]
    rows["send + recv", "4 MB"] = pair[rank] if rank < 2 else lambda: None
    return rows


def timed(*calls: Call, seconds: float) -> list[float]:
    """Return the median seconds of calls in turns of ten, under the same load. The ranks begin together."""
    times: list[list[float]] = [[] for _ in calls]
    once = sum(_turn(one, 3) for one in calls)
    count = torch.tensor([int(min(200, max(3, seconds / max(once, 1e-6) / _IN_A_ROW)))])
    dist.broadcast(count, 0)
    for _ in range(int(count)):
        for one, taken in zip(calls, times, strict=True):
            taken.append(_turn(one, _IN_A_ROW))
    return [*map(statistics.median, times)]


def _turn(call: Call, calls: int) -> float:
    """Return the seconds of one call, averaged over several in a row."""
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def of_objects(plain: GroupCoordinator, queued: GroupCoordinator, vllm: Any) -> dict[Row, Calls]:
    """Return the calls that broadcast objects."""
    rank, last = plain.rank_in_group, plain.world_size - 1
    obj, stand_in = {"text": "x" * 1000}, StandIn(rank)
    rows: dict[Row, Calls] = {}
    for src in (0, last):
        mine = obj if rank == src else None
        rows["broadcast_object, queue", f"src {src}"] = found = {
            OURS: functools.partial(queued.broadcast_object, mine, src),
            GLOO: functools.partial(stand_in.broadcast_object, obj),
            QUEUE: functools.partial(plain.create_mq_broadcaster(src).broadcast_object, mine),
        }
        if vllm is not None and src == 0:  # the only one whose queue it has
            found[VLLM] = functools.partial(vllm.broadcast_object, mine)
    data = [tree(10, 1024) if rank == 0 else None]
    rows["broadcast_object_list", SMALL] = {
        OURS: lambda: plain.broadcast_object_list([*data]),
        GLOO: lambda: dist.broadcast_object_list([*data]),
    }
    return rows


def measure(rank: int, world_size: int, seconds: float, vllm: Path | None) -> dict[Row, dict[str, float]]:
    """Return for each row the seconds of the coordinator and of those that it is compared with."""
    everyone = [[*range(world_size)]]
    plain = GroupCoordinator(everyone, rank, "gloo", False)
    queued = GroupCoordinator(everyone, rank, "gloo", False, True)
    groups: dict[str, Any] = {OURS: plain, GLOO: StandIn(rank)}
    with_queue = None
    if vllm is not None:
        groups[VLLM] = of_vllm(vllm, rank, "tp", False)
        with_queue = of_vllm(vllm, rank, "queued", True)
    by_group = {name: calls(rank, group) for name, group in groups.items()}
    rows = {row: {name: each[row] for name, each in by_group.items()} for row in by_group[OURS]}
    rows |= of_objects(plain, queued, with_queue)
    found = {row: dict(zip(every, timed(*every.values(), seconds=seconds), strict=True)) for row, every in rows.items()}
    plain.destroy()
    queued.destroy()
    return found


def bounds(found: dict[Row, dict[str, float]], ranks: int) -> Iterator[Bound]:
    """Yield the required bounds."""
    for name, size, peer, least in (
        ("broadcast_tensor_dict", SMALL, GLOO, 8.0),
        ("broadcast_tensor_dict", LARGE, GLOO, 1.6),
        ("send + recv_tensor_dict", SMALL, GLOO, 2.0),
        ("broadcast_tensor_dict", SMALL, VLLM, 4.0),
        ("send + recv_tensor_dict", SMALL, VLLM, 4.0),
    ):
        if peer in found[name, size]:
            ratio = found[name, size][peer] / found[name, size][OURS]
            yield Bound(f"{name} {size}: times faster than {peer}", ratio, least)
    small, listed = found["broadcast_tensor_dict", SMALL], found["broadcast_object_list", SMALL]
    ratio = small[OURS] / listed[OURS]
    yield Bound(f"broadcast_tensor_dict {SMALL}: times broadcast_object_list", ratio, 1.5, is_least=False)
    for (name, size), seconds in found.items():
        if QUEUE in seconds:
            most, ratio = 2.0 if ranks == 2 else 1.5, seconds[OURS] / seconds[QUEUE]
            yield Bound(f"{name}, {size}: times our queue", ratio, most, is_least=False)
        if VLLM in seconds and SMALL not in size:
            yield Bound(f"{name}, {size}: times as fast as {VLLM}", seconds[VLLM] / seconds[OURS], 1.0)


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def report(results: list[dict[Row, dict[str, float]]], ranks: int) -> None:
    """Print the table and the bounds."""
    print(f"\n{ranks} ranks, {os.cpu_count()} cores; how many times longer each takes than easydist")
    print(f"{'':40}{OURS:>10}" + "".join(f"{name:>20}" for name in (GLOO, VLLM)))
    found: dict[Row, dict[str, float]] = {}
    for row, times in results[0].items():
        found[row] = slowest = {name: max(each[row][name] for each in results) for name in times}
        peers = [f"{shown(slowest[p])}{slowest[p] / slowest[OURS]:8.2f}" if p in slowest else "" for p in (GLOO, VLLM)]
        print(f"{', '.join(row):40}{shown(slowest[OURS]):>10}{peers[0]:>20}{peers[1]:>20}".rstrip())
    show(bounds(found, ranks))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=1, help="for each row, roughly")
    parser.add_argument("--vllm", metavar="WHEEL", help="a wheel of vLLM 0.33")
    options = parser.parse_args()
    vllm = unpacked(options.vllm)
    with Pool(timeout=600) as pool:
        for ranks in options.ranks:
            report(pool.run(measure, ranks, seconds=options.seconds, vllm=vllm), ranks)


if __name__ == "__main__":
    main()
