"""The distribution of samples to ranks by known loaders: accelerate's, torch's, transformers', torchdata's and ours.

This module imports only torch of these packages; it looks up the others' classes if they have been imported. A sampler
counts as known if its ``__iter__`` is that of a known class: one that only looks alike may deal otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from easydist.base.wording import some
from easydist.metrics.loader import DistributedLoader
from easydist.metrics.order import Sharding
from easydist.metrics.passes import LoaderSteps, existing, passes_of
from easydist.metrics.sampler import DistributedBatchSampler
from easydist.metrics.tally import ACTIVE, ENDED, Lot

__all__ = ["lot_of", "lot_of_last"]


def lot_of_last(rank: int, size: int, total: int | None = None) -> Lot:
    """Return the lot of accelerate's loader that is being iterated, else of the only one that has ended.

    Args:
        rank: This rank in the group.
        size: The number of participating ranks.
        total: The number of samples, for a dataset without a length.

    Raises:
        ValueError: As for ``lot_of``.
    """
    state = _class("accelerate.state", "GradientState")
    if state is None or not state._shared_state:
        return Lot()
    loader, origin = _iterated(state()), ACTIVE
    if loader is None:
        if len(done := _done()) > 1:
            gc.collect()  # some of them may be garbage
            done = _done()
        if len(done) != 1:
            return Lot()
        loader, origin = done[0], ENDED
    lot = _alone(loader, total) if size == 1 else lot_of(loader, rank, size, total)
    return lot._replace(origin=origin)


def _iterated(state: Any) -> Any:
    """Return the innermost loader that is being iterated; None if there is none.

    accelerate still names a loader whose loop was left by ``break`` or an error. Rows may be its last batch until
    another loader takes a step.
    """
    named = [loader for loader in state.dataloader_references if loader is not None]
    return next((loader for loader in reversed(named) if not _is_left(loader)), None)


def _is_left(loader: Any) -> bool:
    with contextlib.suppress(TypeError):  # a list of batches, whose passes are not noted
        return passes_of(loader).are_left()
    return False


def _done() -> list[Any]:
    return [loader for loader in existing(*_prepared()) if loader.end_of_dataloader]


def lot_of(loader: Any, rank: int, size: int, total: int | None = None) -> Lot:
    """Return the distribution of a loader's samples to the ranks, and its position.

    Args:
        loader: The loader, which accelerate may have prepared.
        rank: This rank in the group.
        size: The number of participating ranks.
        total: The number of samples, for a dataset without a length.

    Raises:
        ValueError: The distribution is unknown, or the loader is for another rank or number of ranks.
        TypeError: It is not a loader.
    """
    if isinstance(loader, DistributedLoader):
        _check_place(loader.place, (rank, size))
        return Lot(sharding=Sharding(loader.batch_size))  # it repeats no sample, so nothing needs to be counted
    if not isinstance(loader, DataLoader):  # accelerate's loaders report this class
        raise TypeError(f"loader is {type(loader).__name__}, not a DataLoader")
    if size == 1:
        return Lot(sharding=Sharding())
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError(
            "the loader has in_order=False, so its batches come in another order than their samples; make it with "
            "in_order=True, or pass indices="
        )
    if isinstance(loader, _classes("accelerate.data_loader", "DataLoaderDispatcher")):
        return _dispatched(loader, rank, size, total)
    chain = list(_samplers(loader))
    for part in [*chain, loader.dataset]:
        if hasattr(part, "num_processes") and hasattr(part, "process_index"):
            return _sharded(loader, part, rank, size, total)
        if hasattr(part, "num_replicas") and hasattr(part, "total_size"):
            return _strided(loader, part, rank, size)
        if isinstance(part, DistributedBatchSampler):
            _check_class(part, (DistributedBatchSampler,))
            _check_place((part.rank, part.world_size), (rank, size))
            return Lot(sharding=Sharding(part.batch_size))
    if total is None:
        raise ValueError(
            f"the loader does not tell how it distributes its samples over {size} ranks, so repeated samples would go "
            "unnoticed; prepare it with accelerate, use distributed_loader or DistributedSampler, or pass indices=, or "
            "total= with all rows in one call"
        )
    return Lot()


def _class(module: str, name: str) -> Any:
    """Return a class of a module if the module has been imported."""
    return getattr(sys.modules.get(module), name, None)


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    return tuple([cls for name in names if (cls := _class(module, name)) is not None])


def _prepared() -> tuple[Any, ...]:
    """Return the base class of the loaders that accelerate makes, if there can be any."""
    return _classes("accelerate.data_loader", "DataLoaderStateMixin")


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the loader's batch sampler and the samplers inside it, outermost first."""
    part = loader
    while (part := _inner(part)) is not None:
        yield part


def _inner(part: Any) -> Any:
    batch_sampler = getattr(part, "batch_sampler", None)
    return getattr(part, "sampler", None) if batch_sampler is None else batch_sampler


def _check_place(found: tuple[int, int], ours: tuple[int, int]) -> None:
    """Make sure that a loader is for this rank, of as many ranks as take part."""
    if found[1] != ours[1]:
        raise ValueError(
            f"the loader distributes its samples over {some(found[1], 'rank', 'ranks')}, but {ours[1]} take part; pass "
            "indices=, or another group"
        )
    if found[0] != ours[0]:
        raise ValueError(f"the loader is that of rank {found[0]}, but this is rank {ours[0]}; pass indices=")


def _check_class(part: Any, known: tuple[Any, ...]) -> None:
    """Make sure that a sampler distributes samples as one of the known classes does."""
    if not any(type(part).__iter__ is cls.__iter__ for cls in known):
        raise ValueError(
            f"{type(part).__name__} has an __iter__ of its own, so the order in which it distributes the samples is "
            "not known; pass indices="
        )


def _accelerated(loader: Any, size: int, reads: int = 1) -> LoaderSteps:
    """Return the steps of a loader that accelerate may have prepared: such a loader reads one step ahead."""
    if not issubclass(type(loader), _prepared()):
        return LoaderSteps(passes_of(loader), size)
    ended = bool(loader.end_of_dataloader)
    return LoaderSteps(passes_of(loader), size, loader.skip_batches, 1, reads, loader._drop_last, ended)


def _alone(loader: Any, total: int | None) -> Lot:
    """Handle a loader of a single process, since the rows may be those of another one."""
    if (batches := _batch_sampler(loader)) is None:
        return Lot(sharding=Sharding())
    steps = _accelerated(loader, batches.batch_size)
    left = _left(loader, steps, total, batches.batch_size)
    sharding = _evened(left, batches.batch_size, 1, batches.drop_last, fills=False)
    return steps.lot(Sharding(rows=sharding.rows))


def _batch_sampler(loader: Any) -> Any:
    return next((part for part in _samplers(loader) if hasattr(part, "batch_size")), None)


def _dispatched(loader: Any, rank: int, size: int, total: int | None) -> Lot:
    """Handle loaders for which rank 0 reads the batches, so that only rank 0 knows their position."""
    _check_place((loader.state.process_index, loader.state.num_processes), (rank, size))
    if rank:
        return Lot(passes_of(loader).tally)
    batch_size = _batch_sampler(loader).batch_size
    block, reads = (batch_size // size, 1) if loader.split_batches else (batch_size, size)
    steps = _accelerated(loader, block * size, reads)
    at, left = steps.at(None), _left(loader, steps, total, batch_size)
    if at.has_ended and at.steps:  # it knows the number of samples of its last step
        left = (at.steps - 1) * steps.size + loader.remainder
    sharding = _evened(left, block, size, loader._drop_last, fills=False)
    if left is not None and 0 < 2 * left < size and not loader._drop_last:
        # It fills the last step with the first one, so some ranks get nothing.
        sharding = Sharding(block, left, 2 * left)
    return steps.lot(sharding)


def _evened(left: int | None, block: int, size: int, drop_last: bool, fills: bool) -> Sharding:
    """Return the distribution of samples in steps, with repeated ones in the last.

    Args:
        left: The number of samples; None if it is unknown.
        block: The samples of one rank in a step.
        size: The number of ranks.
        drop_last: True if the last step is dropped if it is not full.
        fills: True if the last step is filled; otherwise all ranks get the same number of samples.
    """
    step = block * size
    if left is None or drop_last or left % step == 0:
        return Sharding(block, None, None if left is None else left // step * step, True)
    rest = left % step
    last = step if fills else -(-rest // size) * size
    return Sharding(block, rest if last > rest else None, left - rest + last, True)


def _sharded(loader: Any, shard: Any, rank: int, size: int, total: int | None) -> Lot:
    """Handle loaders whose ranks read their own batches, to which a sampler or dataset adds repeated samples."""
    known = _classes("accelerate.data_loader", "BatchSamplerShard", "IterableDatasetShard")
    known += _classes("transformers.trainer_pt_utils", "IterableDatasetShard")
    _check_class(shard, known)
    _check_place((shard.process_index, shard.num_processes), (rank, size))
    if shard.batch_size is None:
        raise ValueError("the loader's batches differ in size, so its order is not known; pass indices=")
    is_even = getattr(shard, "even_batches", True)
    block = shard.batch_size // size if getattr(shard, "split_batches", False) else shard.batch_size
    steps = _accelerated(loader, block * size)
    left = _left(loader, steps, total, shard.batch_size)
    if left is None and is_even and not shard.drop_last:
        raise ValueError(
            "the loader's dataset has no length, and samples may be repeated at its end; pass total=, the number of "
            "samples, or indices="
        )
    sharding = (
        _evened(left, block, size, shard.drop_last, True) if is_even or shard.drop_last else Sharding(block, None, left)
    )
    if steps.done is None:
        sharding = sharding._replace(rows=None)
    return steps.lot(sharding)


def _left(loader: Any, steps: LoaderSteps, total: int | None, batch_size: int) -> int | None:
    """Return the number of samples of the pass before any is repeated; None if it is unknown.

    Args:
        loader: The loader.
        steps: Its steps.
        total: The number of samples of a whole pass, if the loader does not know it.
        batch_size: The samples of a batch before it is split.
    """
    try:
        total = len(_source(loader)) if total is None else total
    except TypeError:
        return None
    left = total - (steps.done or 0) - steps.skipped * steps.size
    size = steps.size if steps.reads == 1 else batch_size
    for part in _samplers(loader):
        left -= getattr(part, "skip_batches", 0) * size
        size = batch_size if hasattr(part, "num_processes") else size
    return max(left, 0)


def _source(loader: Any) -> Any:
    """Return the sampler or dataset whose length is the number of samples before any is repeated."""
    if isinstance(loader.dataset, IterableDataset):
        return _unsharded(loader.dataset)
    samplers = [part for part in _samplers(loader) if _inner(part) is None and not hasattr(part, "batch_size")]
    return samplers[0] if samplers else loader.dataset


def _unsharded(data: Any) -> Any:
    """Return the user's dataset if accelerate or transformers shards it."""
    return data.dataset if hasattr(data, "process_index") else data


def _strided(loader: Any, sampler: Any, rank: int, size: int) -> Lot:
    """Handle loaders that give each rank every W-th sample: DistributedSampler and similar ones."""
    known = _classes("torchdata.stateful_dataloader.sampler", "StatefulDistributedSampler")
    known += _classes("transformers.trainer_pt_utils", "DistributedLengthGroupedSampler")
    _check_class(sampler, (DistributedSampler, *known))
    _check_place((sampler.rank, sampler.num_replicas), (rank, size))
    batch_size, drop_last, skipped = _batches(loader, sampler)
    steps = LoaderSteps(passes_of(loader), batch_size * size)
    each = sampler.num_samples // batch_size * batch_size if drop_last else sampler.num_samples
    rows = max(each * size - skipped * steps.size - (steps.done or 0), 0)
    samples = getattr(sampler, "lengths", None)
    total = len(sampler.dataset if samples is None else samples)
    repeats = sampler.total_size > total and each == sampler.num_samples
    sharding = Sharding(1, (total % size or size) if repeats else None, rows, True)
    lot = steps.lot(sharding)
    return lot if steps.done is not None else lot._replace(sharding=sharding._replace(rows=None))


def _batches(loader: Any, sampler: Any) -> tuple[int, bool, int]:
    """Return the batch size of a loader over a sampler, whether it drops the last batch, and the batches skipped."""
    known = (BatchSampler, *_classes("torchdata.stateful_dataloader.sampler", "BatchSampler"))
    skipping = _classes("accelerate.data_loader", "SkipBatchSampler")
    batch_size, drop_last, skipped = loader.batch_size or 1, loader.drop_last, 0
    for part in _samplers(loader):
        if part is sampler:
            break
        if type(part) in skipping:
            skipped += part.skip_batches
        else:
            _check_class(part, known)
            batch_size, drop_last = part.batch_size, part.drop_last
    return batch_size, drop_last, skipped
