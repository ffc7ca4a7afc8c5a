"""Groups of all ranks, checks that they work, and faults of one rank."""

import contextlib
from datetime import timedelta

import launching
import pytest
import torch
import torch.distributed as dist

import easydist
from easydist import ProcessState, memory
from easydist.groups import communicators
from easydist.transport import schedules

BACKENDS = pytest.mark.parametrize("backend", ["shm", "gloo"])
TREE = {"large": torch.ones(300_000), "small": [torch.ones(1000) for _ in range(30)], "whole": torch.arange(9000)}

DEADLINE = timedelta(seconds=launching.within(10))


@contextlib.contextmanager
def made(way, **options):
    """Create a group of all ranks, over shared memory or over gloo alone, which also applies when it reconnects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", str(int(way == "shm")))
        yield dist.new_group(**options)


@contextlib.contextmanager
def short_rows(way="shm", **options):
    """Create a group as ``made`` does, in which less data travels with the header."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "_CUT_ROWS", 0)
        with made(way, **options) as group:
            yield group


@contextlib.contextmanager
def many():
    """Choose the schedules of many ranks for a few."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "DOUBLING_FROM": 2,
            "_DOUBLED_EACH": 1 << 17,
            "_SCATTERED_FROM": 2,
            "_SCATTERED": 16,
        }.items():
            patch.setattr(schedules, name, value)
        yield


def check_works(group, backend):
    """Make sure that small and large data reach every rank of the group, over the expected backend."""
    rank, size = group.rank(), group.size()
    assert easydist.gather(torch.tensor([rank]), group=group).tolist() == list(range(size))
    got = easydist.gather(torch.full((200_000,), rank), group=group).view(size, -1)
    assert (got == torch.arange(size)[:, None]).all()
    assert easydist.reduce(torch.full((200_000,), rank + 1), "sum", group=group).unique().tolist() == [
        size * (size + 1) // 2
    ]
    assert ProcessState().communicators(group).control.get_backend() == backend


def outcome(call):
    """Return the name of the error that ``call`` raises, or its result."""
    try:
        return call()
    except easydist.EasydistError as error:
        return type(error).__name__


def of_all(value):
    """Gather a value from every rank, using torch, so that all ranks compare the same values."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def no_memory_from(number):
    """Let the allocation of this result, counted from 1, and of all later ones fail."""
    inner, count = memory.empty, 0

    def empty(*args):
        nonlocal count
        count += 1
        if count >= number:
            raise MemoryError("no memory for a result")
        return inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "empty", empty)
        yield


def everyone() -> list[int]:
    """The ranks that an exchange reaches: shows that the group works."""
    return easydist.gather_object([ProcessState().process_index])


def events(folder, world_size) -> dist.Store:
    """Return the store in which ranks leave marks for each other beside the group."""
    store = dist.FileStore(str(folder / "events"), world_size)
    store.set_timeout(DEADLINE)
    return store
