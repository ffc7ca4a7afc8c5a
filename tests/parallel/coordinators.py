"""Coordinators for the tests, and what all ranks would hold."""

import contextlib

import torch

import easydist
from easydist.parallel import GroupCoordinator


@contextlib.contextmanager
def made(rank, world_size, ranks=None, **options):
    """A coordinator of all ranks, or of these lists."""
    lists = [[*range(world_size)]] if ranks is None else ranks
    group = GroupCoordinator(lists, rank, "gloo", False, **options)
    yield group
    group.destroy()


def values(shape, dtype, rank):
    """Small numbers that differ between ranks, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + rank * 7) % 5).view(shape).to(dtype)


def text_of(call):
    """Return the type and the text of the error that the call raises."""
    try:
        call()
    except (easydist.EasydistError, ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "a result"
