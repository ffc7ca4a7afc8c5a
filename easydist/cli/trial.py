"""A real run: the ranks meet, every verb moves data that is then checked, and times are compared with plain gloo's."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from easydist.cli.findings import Finding
from easydist.cli.measure import Work, timed
from easydist.errors import CollectiveTimeout, EasydistError
from easydist.groups.connecting import connect
from easydist.groups.rendezvous import Rendezvous
from easydist.liveness.timed_store import reached, served
from easydist.state import ProcessState, wait_for_everyone
from easydist.state.environment import World, has_agent
from easydist.verbs.all_to_all import all_to_all
from easydist.verbs.broadcast import broadcast
from easydist.verbs.gather import gather
from easydist.verbs.objects import broadcast_object_list, gather_object, scatter_object_list
from easydist.verbs.padding import pad_across_processes
from easydist.verbs.reduce import reduce
from easydist.verbs.scatter import scatter
from easydist.verbs.tensor_dicts import broadcast_tensor_dict, recv_tensor_dict, send_tensor_dict

_LARGE = 1 << 20
_ROUNDS = 15


def meet(world: World, seconds: float) -> Finding:
    """Let the ranks meet, and create the default process group.

    Args:
        world: The launcher's description of the world.
        seconds: The time limit.

    Returns:
        The outcome; on failure a fault that names the missing ranks.
    """
    limit, where = timedelta(seconds=seconds), f"{world.address}:{world.port}"
    is_host = world.rank == 0 and not has_agent()
    try:
        store = (served if is_host else reached)(world.address, world.port, seconds)
    except RuntimeError as error:  # DNS errors, too
        does = "listen" if is_host else f"reach rank 0 within {seconds:.0f} s"
        said = f"rank {world.rank} cannot {does} at {where} ({_first_line(error)})"
        advice = (
            "MASTER_ADDR must be a name or address of the host of rank 0 that all hosts know, and MASTER_PORT a free "
            "port that no firewall blocks. Rank 0 must be running."
        )
        return Finding("rendezvous", "fault", said, advice)
    if missing := _missing(store, world, limit):
        ranks = ", ".join(map(str, missing))
        said = f"{len(missing)} of {world.size} ranks did not reach {where} within {seconds:.0f} s: {ranks}"
        advice = "Start them, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
        return Finding("rendezvous", "fault", said, advice)
    return _connect(world, store, limit)


def _missing(store: Store, world: World, limit: timedelta) -> Sequence[int]:
    try:
        with Rendezvous(PrefixStore("check", store), world.rank, world.size, limit, name="check") as rendezvous:
            rendezvous.arrive()
    except CollectiveTimeout as error:
        return error.missing
    return ()


def _connect(world: World, store: Store, limit: timedelta) -> Finding:
    join = functools.partial(dist.init_process_group, "gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        connect(lambda: join(timeout=limit), limit.total_seconds())
        backend = ProcessState(cpu=True).communicators().met().control.get_backend()
    except (RuntimeError, EasydistError) as error:
        advice = (
            "Hosts need an open port for each pair of ranks; GLOO_SOCKET_IFNAME names the network interface between "
            "them."
        )
        return Finding("rendezvous", "fault", f"rank {world.rank} cannot connect ({_first_line(error)})", advice)
    return Finding(
        "rendezvous", "ok", f"{world.size} ranks at {world.address}:{world.port}, which communicate over {backend}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def verbs(rank: int, size: int) -> list[Finding]:
    """Call every verb once, on every rank, and check its result.

    Args:
        rank: The rank of this process in the default group.
        size: The number of ranks.
    """
    found = []
    for name, is_right in _trials(rank, size).items():
        try:
            said = "" if is_right() else "its result is wrong"
        except (RuntimeError, ValueError, EasydistError) as error:
            said = _first_line(error)
        advice = "This is a fault of easydist, torch or the machine: report it with the output of easydist env."
        found.append(Finding(name, "fault", said, advice) if said else Finding(name, "ok", "right"))
    return found


def _trials(rank: int, size: int) -> dict[str, Callable[[], bool]]:
    numbers = list(range(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    large = torch.full((_LARGE,), float(rank))

    def mine() -> dict[str, Any]:
        return {"a": torch.full((2,), rank), "b": [torch.ones(1)]}  # a new one: broadcast writes into it

    def passed_on() -> bool:
        if rank % 2:
            send_tensor_dict(mine(), after)
        got = recv_tensor_dict(before) if before % 2 else None
        return got is None or bool((got["a"] == before).all())

    def scattered() -> bool:
        got: list[Any] = [None]
        scatter_object_list(got, [{"n": n} for n in numbers])
        return bool(got == [{"n": rank}])

    return {
        "gather": lambda: gather(mine())["a"].tolist() == [n for n in numbers for _ in range(2)],
        "gather, 4 MB": lambda: bool((gather(large)[::_LARGE] == torch.arange(size)).all()),
        "reduce": lambda: reduce(mine(), "sum")["a"].tolist() == [sum(numbers)] * 2,
        "broadcast": lambda: broadcast(mine())["a"].tolist() == [0, 0],
        "scatter": lambda: scatter(torch.arange(size)).tolist() == [rank],
        "all_to_all": lambda: all_to_all(torch.arange(size)).tolist() == [rank] * size,
        "pad_across_processes": lambda: pad_across_processes(torch.ones(rank + 1)).numel() == size,
        "gather_object": lambda: gather_object([rank]) == numbers,
        "broadcast_object_list": lambda: broadcast_object_list([rank]) == [0],
        "scatter_object_list": scattered,
        "broadcast_tensor_dict": lambda: broadcast_tensor_dict(mine())["a"].tolist() == [0, 0],
        "send_tensor_dict": passed_on,
    }


def times(size: int) -> list[dict[str, Any]]:
    """Measure easydist and gloo on the same data, in turns. Every rank calls it.

    Args:
        size: The number of ranks.

    Returns:
        The name of each piece of work, and the median seconds of both on this rank.
    """
    return [_times(work) for work in _works(size)]


def _times(work: Work) -> dict[str, Any]:
    rounds = [(timed(work.ours, 1), timed(work.theirs, 1)) for _ in range(_ROUNDS)]
    ours, theirs = map(statistics.median, zip(*rounds, strict=True))
    return {"work": work.name, "easydist": ours, "gloo": theirs}


def _works(size: int) -> Iterator[Work]:
    leaves = {f"leaf{i}": torch.ones(4) for i in range(10)}
    large = torch.ones(_LARGE)

    def gathered(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor)

    yield Work("barrier", wait_for_everyone, dist.barrier)
    yield Work("gather 10 leaves", lambda: gather(leaves), lambda: gathered(*leaves.values()))
    yield Work("gather 4 MB", lambda: gather(large), lambda: gathered(large))
    yield Work("reduce 4 MB", lambda: reduce(large, "sum"), lambda: dist.all_reduce(large.clone()))
