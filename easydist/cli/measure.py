"""The measurements of ``easydist bench``: the same work by easydist and by its peer, on the same ranks, in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from easydist.state import wait_for_everyone
from easydist.verbs.broadcast import broadcast
from easydist.verbs.gather import gather
from easydist.verbs.objects import broadcast_object_list, gather_object
from easydist.verbs.padding import pad_across_processes
from easydist.verbs.reduce import reduce

_ROUNDS = 7
_LARGE = 1 << 22
BenchRow = tuple[str, str, list[tuple[float, float]]]
"""The name of the work, the name of the peer, and the seconds of easydist and of the peer in each round."""


class Work(NamedTuple):
    """One row of the table.

    Attributes:
        name: The name of the work.
        ours: A function that does all of it with easydist.
        theirs: A function that does the same with the peer.
        peer: The peer's name.
    """

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    peer: str = "accelerate"


def trees(rank: int) -> dict[str, Any]:
    """Return the data of the table by name.

    Args:
        rank: The rank that contributes the data.
    """
    return {
        "10 small leaves": {f"leaf{i}": torch.full((4,), float(rank)) for i in range(10)},
        "1000 small leaves": {f"leaf{i}": torch.full((4,), float(rank)) for i in range(1000)},
        "16 x 1 MB": {f"leaf{i}": torch.full((1 << 18,), float(rank)) for i in range(16)},
    }


def beside_accelerate(rank: int) -> Iterator[Work]:
    """Yield the rows with accelerate's functions beside ours."""
    from accelerate.utils import operations as peer

    for name, tree in trees(rank).items():
        yield Work(f"gather {name}", partial(gather, tree), partial(peer.gather, tree))
        yield Work(f"broadcast {name}", partial(broadcast, tree), partial(peer.broadcast, tree))
        yield Work(f"reduce {name}", partial(reduce, tree), partial(peer.reduce, tree))
    ragged = {"ids": torch.ones(8, 10 + rank), "mask": torch.ones(8, 10 + rank, dtype=torch.int64)}
    yield Work(
        "pad + gather 2 ragged leaves",
        lambda: gather(pad_across_processes(ragged, dim=1)),
        lambda: peer.gather(peer.pad_across_processes(ragged, dim=1)),
    )
    small, strings = [{"rank": rank, "loss": 0.5}], [f"prediction {rank} {i}" for i in range(10_000)]
    for name, value in (("a small dict", small), ("10 000 strings", strings)):
        yield Work(
            f"gather_object {name}",
            partial(gather_object, value),
            partial(peer.gather_object, value),
        )
        yield Work(
            f"broadcast_object_list {name}",
            partial(broadcast_object_list, value),
            partial(peer.broadcast_object_list, value),
        )


def beside_gloo(world_size: int) -> Iterator[Work]:
    """Yield the rows with gloo's own collectives, which check nothing, beside ours."""
    large = torch.ones(_LARGE)
    parts = list(torch.empty(world_size * _LARGE).chunk(world_size))
    yield Work("wait_for_everyone", wait_for_everyone, dist.barrier, "gloo")
    yield Work("gather 16 MB", lambda: gather(large), lambda: dist.all_gather(parts, large), "gloo")
    yield Work("reduce 16 MB", lambda: reduce(large), lambda: dist.all_reduce(large.clone()), "gloo")


def measure(rank: int, world_size: int, seconds: float, only: str) -> list[BenchRow]:
    """Measure all rows. Every rank of a default group calls it.

    Args:
        rank: The rank of this process in the group.
        world_size: The number of ranks.
        seconds: The approximate time for each row.
        only: A text in the names of the rows to measure.

    Returns:
        This rank's times.
    """
    return measured(rank, world_size, seconds, only, lambda: [*beside_accelerate(rank), *beside_gloo(world_size)])


def measured(
    rank: int, world_size: int, seconds: float, only: str, works: Callable[[], Iterable[Work]]
) -> list[BenchRow]:
    """Measure the caller's rows.

    Args:
        rank: As for ``measure``.
        world_size: As for ``measure``.
        seconds: As for ``measure``.
        only: As for ``measure``.
        works: A function that returns the rows, called once the peers are ready.
    """
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    from accelerate import PartialState

    PartialState(cpu=True)
    try:
        return [_row(work, seconds) for work in works() if only in work.name]
    finally:
        PartialState._reset_state()


def _row(work: Work, seconds: float) -> BenchRow:
    ours, theirs = (_repeats(fn, seconds / 10) for fn in (work.ours, work.theirs))
    return work.name, work.peer, [(timed(work.ours, ours), timed(work.theirs, theirs)) for _ in range(_ROUNDS)]


def _repeats(fn: Callable[[], Any], seconds: float) -> int:
    """Return the number of repetitions of a piece of work in this time, the same on all ranks."""
    return max(1, min(200, int(seconds / agreed(timed(fn, 3)))))


def timed(fn: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of one call. All ranks begin together.

    Args:
        fn: The function to call.
        repeats: The number of calls.
    """
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    return (time.perf_counter() - start) / repeats


def agreed(seconds: float) -> float:
    """Return the slowest rank's time, so that all ranks repeat equally often.

    Args:
        seconds: This rank's time.
    """
    value = torch.tensor([seconds])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
