"""The batches of one rank, read by torch's ``DataLoader`` from an indexed data set or from a stream."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from easydist.data.plan import split_bounds
from easydist.metrics.collate import Collate
from easydist.metrics.sampler import DistributedBatchSampler, steps

__all__ = ["Batch", "Indexed", "Sharing", "Source", "Streamed", "is_stream"]

Batch = tuple[int, torch.Tensor, Any]
"""The number of samples of the epoch done after this step, the indices of this rank's, and its batch."""


class Sharing(NamedTuple):
    """The parameters of the distribution, named as for ``distributed_loader``."""

    rank: int
    world_size: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool


class Source(ABC):
    """This rank's batches.

    Attributes:
        sharing: The parameters of the distribution.
        total: The samples of an epoch over all ranks; None if that is unknown.
        order: The facts that determine the order of the samples.
    """

    sharing: Sharing
    total: int | None
    order: dict[str, Any]

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read an epoch, starting at its sample ``start``."""


class Indexed(Source):
    """The batches of an indexed data set."""

    def __init__(self, dataset: Any, sharing: Sharing, collate: Collate, options: dict[str, Any]) -> None:
        self.sharing, self.total = sharing, len(dataset)
        self.order = {"shuffle": sharing.shuffle, "seed": sharing.seed, "total": self.total}
        self._sampler = DistributedBatchSampler(self.total, **sharing._asdict())
        finish = functools.partial(_collate_numbered, collate)
        self._loader = DataLoader(_Numbered(dataset), batch_sampler=self._sampler, collate_fn=finish, **options)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read an epoch, starting at its sample ``start``."""
        sampler = self._sampler
        sampler.epoch, sampler.start = epoch, start
        ends = steps(sampler.total, sampler.batch_size * sampler.world_size, start, sampler.drop_last)
        for (_, end), (indices, batch) in zip(ends, self._loader, strict=True):
            yield end, indices, batch


class _Numbered(Dataset[Any]):
    """A data set that returns samples together with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[int]) -> tuple[list[int], list[Any]]:
        together = getattr(self._dataset, "__getitems__", None)
        return indices, together(indices) if together and indices else [self._dataset[i] for i in indices]


def _collate_numbered(collate: Collate, rows: tuple[list[int], list[Any]]) -> tuple[torch.Tensor, Any]:
    indices, samples = rows
    return torch.tensor(indices, dtype=torch.int64, device="cpu"), collate(samples)


class Streamed(Source):
    """The batches of a data set that can only be read from its beginning."""

    def __init__(self, dataset: Any, sharing: Sharing, collate: Collate, options: dict[str, Any]) -> None:
        _check_stream(sharing, options)
        self.sharing, self.total = sharing, _length(dataset)
        self.order = {"total": self.total}
        self._shares = _Shares(dataset, sharing)
        finish = functools.partial(_collate_share, collate)
        self._loader = DataLoader(self._shares, batch_size=None, collate_fn=finish, **options)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read an epoch, starting at its sample ``start``."""
        self._shares.start = start
        if hasattr(self._shares.dataset, "set_epoch"):
            self._shares.dataset.set_epoch(epoch)
        yield from self._loader


def _length(dataset: Any) -> int | None:
    """Return the length of a stream; None if it has none, like a ``ChainDataset`` of streams without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _check_stream(sharing: Sharing, options: dict[str, Any]) -> None:
    if sharing.batch_size < 1:
        raise ValueError(f"batch_size={sharing.batch_size}: a batch holds at least one sample")
    if sharing.shuffle:
        raise ValueError("shuffle=True: an iterable data set has its own order; shuffle inside it")
    if options.get("num_workers", 0) > 1 or options.get("persistent_workers"):
        raise ValueError(
            "an iterable data set has one order, so one worker reads it, from the beginning in every epoch: pass "
            "num_workers=0 or 1, and no persistent_workers"
        )


_Share = tuple[int, range, list[Any], Any]
"""The number of samples done after this step, this rank's indices and samples, and any sample."""


class _Shares(IterableDataset[_Share]):
    """This rank's share of every step of a stream."""

    def __init__(self, dataset: Any, sharing: Sharing) -> None:
        self.dataset, self.start, self._sharing = dataset, 0, sharing

    def __iter__(self) -> Iterator[_Share]:
        rank, world_size, batch_size, *_, drop_last = self._sharing
        stream, begin = islice(self.dataset, self.start, None), self.start
        while rows := list(islice(stream, batch_size * world_size)):
            end = begin + len(rows)
            mine = range(begin, end)[slice(*split_bounds(len(rows), world_size, rank))]
            if len(rows) == batch_size * world_size or not drop_last:
                yield end, mine, rows[mine.start - begin : mine.stop - begin], rows[0]
            begin = end


def _collate_share(collate: Collate, rows: _Share) -> Batch:
    end, mine, samples, any_sample = rows
    indices = torch.arange(mine.start, mine.stop, device="cpu")
    return end, indices, collate(samples) if samples else collate.without_rows(any_sample)


def is_stream(dataset: object) -> bool:
    """True if a data set can only be read from its beginning."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
