"""The samples of each rank: every sample exactly once, in the same number of batches on all ranks.

torch's ``DataLoader`` reads the batches, from an indexed dataset or from a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from easydist.base.arguments import integer
from easydist.base.wording import a_or_an, counted
from easydist.data.arithmetic import split_bounds
from easydist.metrics.collate import Collate
from easydist.state import ProcessState

__all__ = ["DistributedBatchSampler", "Parameters", "Source", "Streamed", "source_of"]


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
        rank: The rank of this process; None means that of ``ProcessState``, also of a group that is made later.
        world_size: W, the number of processes; None likewise.

    Attributes:
        epoch: The epoch, set by ``set_epoch``.
        start: The number of samples at the beginning of the order to skip because they are done.

    Raises:
        ValueError: ``batch_size`` or ``world_size`` is below 1, ``total`` below 0, or there is no such rank.
        TypeError: ``total``, ``batch_size`` or ``seed`` is not an integer.

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
        self.total = integer("total", total, "a number of samples")
        self.batch_size = integer("batch_size", batch_size, "a number of samples")
        self.seed = integer("seed", seed, "a seed")
        self.shuffle, self.drop_last = shuffle, drop_last
        self._rank, self._world_size = rank, world_size
        self.epoch = self.start = 0
        _check(self.total, self.batch_size, self.rank, self.world_size)

    @property
    def rank(self) -> int:
        """The rank that gets the batches."""
        return ProcessState().process_index if self._rank is None else self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks among which the samples are distributed."""
        return ProcessState().num_processes if self._world_size is None else self._world_size

    def among(self, rank: int, world_size: int) -> None:
        """Distribute the samples of the next epoch among other ranks.

        Args:
            rank: The rank that gets the batches.
            world_size: The number of ranks.
        """
        self._rank, self._world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, the same on all ranks. A different epoch starts at its first sample.

        Args:
            epoch: The number of the epoch, from 0.
        """
        if (number := integer("set_epoch: epoch", epoch, "the number of an epoch")) != self.epoch:
            self.epoch, self.start = number, 0

    def __len__(self) -> int:
        step = self.batch_size * self.world_size
        rows = max(self.total - self.start, 0)
        return rows // step if self.drop_last else -(-rows // step)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        rank, world_size = self.rank, self.world_size
        for begin, end in _steps(self.total, self.batch_size * world_size, self.start, self.drop_last):
            first, last = [begin + bound for bound in split_bounds(end - begin, world_size, rank)]
            yield [*range(first, last)] if order is None else order[first:last].tolist()

    def _order(self) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.total, generator=generator, device="cpu")


def _steps(total: int, size: int, start: int = 0, drop_last: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each step over ``range(start, total)``.

    Args:
        total: The number of samples.
        size: The samples of a step, over all ranks.
        start: The first sample.
        drop_last: Skip the last step if it is not full.

    Example:
        >>> list(_steps(7, 4)), list(_steps(7, 4, start=1)), list(_steps(7, 4, drop_last=True))
        ([(0, 4), (4, 7)], [(1, 5), (5, 7)], [(0, 4)])
    """
    for begin in range(start, total, size):
        end = min(begin + size, total)
        if end - begin == size or not drop_last:
            yield begin, end


def _check(total: int, batch_size: int, rank: int, world_size: int) -> None:
    for name, value, least in (("total", total, 0), ("batch_size", batch_size, 1), ("world_size", world_size, 1)):
        if value < least:
            raise ValueError(f"{name}={value} is less than {least}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of the world, which has {counted(world_size)}")


Batch = tuple[int, torch.Tensor, Any]
"""The number of samples of the epoch done after this step, the indices of this rank's, and its batch."""


class Parameters(NamedTuple):
    """The parameters of the distribution, named as for ``distributed_loader``."""

    rank: int
    world_size: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool


class Indexed:
    """The batches of an indexed dataset."""

    def __init__(self, dataset: Any, parameters: Parameters, collate: Collate, options: dict[str, Any]) -> None:
        self.parameters, self.total = parameters, len(dataset)
        self.order = {"shuffle": parameters.shuffle, "seed": parameters.seed, "total": self.total}
        self._sampler = DistributedBatchSampler(self.total, **parameters._asdict())
        finish = functools.partial(_collate_numbered, collate)
        options = options | {"worker_init_fn": _within(options)}
        self._loader = DataLoader(_Numbered(dataset), batch_sampler=self._sampler, collate_fn=finish, **options)

    def among(self, rank: int, world_size: int) -> None:
        """Distribute the samples of the next epoch among other ranks."""
        self.parameters = self.parameters._replace(rank=rank, world_size=world_size)
        self._sampler.among(rank, world_size)

    def demand_unread(self) -> None:
        """Do nothing: the dataset may be read any number of times."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read an epoch, starting at its sample ``start``."""
        sampler = self._sampler
        sampler.epoch, sampler.start = epoch, start
        ends = _steps(sampler.total, sampler.batch_size * sampler.world_size, start, sampler.drop_last)
        for (_, end), (indices, batch) in zip(ends, self._loader, strict=True):
            yield end, indices, batch


class _Numbered(Dataset[Any]):
    """A dataset that returns samples together with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> tuple[list[int], list[Any]]:
        together = getattr(self.dataset, "__getitems__", None)
        return indices, together(indices) if together and indices else [self.dataset[i] for i in indices]


def _within(options: dict[str, Any]) -> Callable[[int], None]:
    """Return the beginning of a worker: the dataset that it knows is the caller's, as with torch's own loader."""
    return functools.partial(_begin_worker, options.get("worker_init_fn"))


def _begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # its own method refuses any change
    if begin is not None:
        begin(number)


def _collate_numbered(collate: Collate, rows: tuple[list[int], list[Any]]) -> tuple[torch.Tensor, Any]:
    indices, samples = rows
    return torch.tensor(indices, dtype=torch.int64, device="cpu"), collate(samples)


class Streamed:
    """The batches of a dataset that can only be read from its beginning."""

    def __init__(self, dataset: Any, parameters: Parameters, collate: Collate, options: dict[str, Any]) -> None:
        _check_stream(parameters, options)
        self.parameters, self.total = parameters, _length(dataset)
        self.order: dict[str, Any] = {"total": self.total}
        self._shares = _Shares(dataset, parameters)
        finish = functools.partial(_collate_share, collate)
        options = options | {"worker_init_fn": _within(options)}
        self._loader = DataLoader(self._shares, batch_size=None, collate_fn=finish, **options)
        self._is_read = False

    def among(self, rank: int, world_size: int) -> None:
        """Distribute the samples of the next epoch among other ranks."""
        self.parameters = self._shares.parameters = self.parameters._replace(rank=rank, world_size=world_size)

    def demand_unread(self) -> None:
        """Make sure that the stream begins at its beginning.

        Raises:
            ValueError: It is an iterator that this process has read.
        """
        data = self._shares.dataset
        if self._is_read and isinstance(data, Iterator) and not isinstance(data, IterableDataset):
            raise ValueError(
                f"the dataset is {a_or_an(type(data).__name__)}, which can be read once, and has been: make another "
                "loader, or pass an IterableDataset"
            )

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Read an epoch, starting at its sample ``start``."""
        self._shares.start, self._is_read = start, not self._loader.num_workers  # a worker reads a copy
        if hasattr(self._shares.dataset, "set_epoch"):
            self._shares.dataset.set_epoch(epoch)
        yield from self._loader


def _length(dataset: Any) -> int | None:
    """Return the length of a stream; None if it has none, like a ``ChainDataset`` of streams without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _check_stream(parameters: Parameters, options: dict[str, Any]) -> None:
    if parameters.batch_size < 1:
        raise ValueError(f"batch_size={parameters.batch_size}: a batch holds at least one sample")
    if parameters.shuffle:
        raise ValueError("shuffle=True: an iterable dataset has its own order; shuffle inside it")
    if options.get("num_workers", 0) > 1 or options.get("persistent_workers"):
        raise ValueError(
            "an iterable dataset has one order, so one worker reads it, from the beginning in every epoch: pass "
            "num_workers=0 or 1, and no persistent_workers"
        )


_Share = tuple[int, range, list[Any], Any]
"""The number of samples done after this step, this rank's indices and samples, and any sample."""


class _Shares(IterableDataset[_Share]):
    """This rank's share of every step of a stream."""

    def __init__(self, dataset: Any, parameters: Parameters) -> None:
        self.dataset, self.start, self.parameters = dataset, 0, parameters

    def __iter__(self) -> Iterator[_Share]:
        rank, world_size, batch_size, *_, drop_last = self.parameters
        stream, begin = islice(self.dataset, self.start, None), self.start
        while rows := list(islice(stream, batch_size * world_size)):
            end = begin + len(rows)
            first, last = split_bounds(len(rows), world_size, rank)
            if len(rows) == batch_size * world_size or not drop_last:
                yield end, range(begin + first, begin + last), rows[first:last], rows[0]
            begin = end


def _collate_share(collate: Collate, rows: _Share) -> Batch:
    end, mine, samples, any_sample = rows
    indices = torch.arange(mine.start, mine.stop, device="cpu")
    return end, indices, collate(samples) if samples else collate.without_rows(any_sample)


Source: TypeAlias = Indexed | Streamed
"""This rank's batches.

Attributes:
    parameters: The parameters of the distribution.
    total: The samples of an epoch over all ranks; None if that is unknown.
    order: The facts that determine the order of the samples.
"""


def source_of(
    dataset: Any, parameters: Parameters, collate_fn: Callable[[list[Any]], Any] | None, options: dict[str, Any]
) -> Source:
    """Return this rank's batches. A dataset that can only be read from its beginning is a stream.

    Args:
        dataset: The dataset.
        parameters: The parameters of the distribution.
        collate_fn: As for ``distributed_loader``.
        options: Those of ``DataLoader``.

    Raises:
        TypeError: ``dataset`` has batches or columns in place of samples, or is no dataset.
        ValueError: ``parameters`` or ``options`` do not fit the dataset.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError("distributed_loader takes a dataset, not a DataLoader: pass loader.dataset")
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:  # its samples would be dataset[0], dataset[1], …
        what = f"{type(dataset).__name__} of {', '.join(map(repr, dataset))}"
        raise TypeError(
            f"distributed_loader takes a dataset, not a {what}: pass one of its values, or all as the columns of one "
            "dataset, torch.utils.data.StackDataset(**columns)"
        )
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream and not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"distributed_loader takes a dataset, not {type(dataset).__name__}: pass an object that has __len__ and "
            "__getitem__, such as a list, or an IterableDataset"
        )
    kind = Streamed if is_stream else Indexed
    return kind(dataset, parameters, Collate(collate_fn, dataset), options)
