"""The samples of each rank: every sample exactly once, in the same number of batches on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index

import torch
from torch.utils.data import Sampler

from easydist.data.plan import split_bounds
from easydist.state import ProcessState

__all__ = ["DistributedBatchSampler", "steps"]


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank, for the ``batch_sampler`` of torch's ``DataLoader``.

    Law: the batches of step s, joined in rank order, are ``order[s * W * B : (s + 1) * W * B]``, where ``order`` is
    ``range(total)``, or with ``shuffle`` torch's permutation for the seed ``seed + epoch``, as ``DistributedSampler``
    draws it. So each sample is in exactly one batch of one rank, and all ranks have the same number of batches. The
    samples of the last step are distributed evenly; if it has fewer than W, some ranks get an empty batch, for which
    ``Collate`` makes a batch without rows.

    Args:
        total: The number of samples, the same on all ranks.
        batch_size: B, the samples of one batch of one rank.
        shuffle: Draw another order in each epoch.
        seed: The seed of the order, the same on all ranks.
        drop_last: Skip the last step if it has fewer than W * B samples.
        rank: The rank of this process; None means that of ``ProcessState``.
        world_size: W, the number of processes; None means that of ``ProcessState``.

    Attributes:
        epoch: The epoch, set by ``set_epoch``.
        start: The number of samples at the beginning of the order to skip because they are done.

    Raises:
        ValueError: ``batch_size`` or ``world_size`` is below 1, ``total`` below 0, or there is no such rank.

    Example:
        >>> list(DistributedBatchSampler(7, 2, rank=0, world_size=2))
        [[0, 1], [4, 5]]
        >>> list(DistributedBatchSampler(7, 2, rank=1, world_size=2))
        [[2, 3], [6]]

    Cost: no exchange.

    Source: ``torch.utils.data.DistributedSampler``, which repeats samples instead.
    """

    def __init__(
        self,
        total: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.total, self.batch_size, self.seed = index(total), index(batch_size), index(seed)
        self.shuffle, self.drop_last = shuffle, drop_last
        self.world_size = ProcessState().num_processes if world_size is None else world_size
        self.rank = ProcessState().process_index if rank is None else rank
        self.epoch = self.start = 0
        _check(self.total, self.batch_size, self.rank, self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, the same on all ranks. A different epoch starts at its first sample."""
        if epoch != self.epoch:
            self.epoch, self.start = index(epoch), 0

    def __len__(self) -> int:
        step = self.batch_size * self.world_size
        rows = max(self.total - self.start, 0)
        return rows // step if self.drop_last else -(-rows // step)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for begin, end in steps(self.total, self.batch_size * self.world_size, self.start, self.drop_last):
            mine = range(begin, end)[slice(*split_bounds(end - begin, self.world_size, self.rank))]
            yield list(mine) if order is None else order[mine.start : mine.stop].tolist()

    def _order(self) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.total, generator=generator, device="cpu")


def steps(total: int, size: int, start: int = 0, drop_last: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each step over ``range(start, total)``.

    Args:
        total: The number of samples.
        size: The samples of a step, over all ranks.
        start: The first sample.
        drop_last: Skip the last step if it is not full.

    Example:
        >>> list(steps(7, 4)), list(steps(7, 4, start=1)), list(steps(7, 4, drop_last=True))
        ([(0, 4), (4, 7)], [(1, 5), (5, 7)], [(0, 4)])
    """
    for begin in range(start, total, size):
        end = min(begin + size, total)
        if end - begin == size or not drop_last:
            yield begin, end


def _check(total: int, batch_size: int, rank: int, world_size: int) -> None:
    if total < 0 or batch_size < 1 or world_size < 1:
        raise ValueError(
            f"total={total}, batch_size={batch_size}, world_size={world_size}: total is at least 0, the others are at "
            "least 1"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of a world of {world_size}, counted from 0")
