"""The distribution of samples to ranks by known loaders: accelerate's, torch's, transformers', torchdata's and ours.

This module imports none of these packages, but looks up their classes if they have been imported.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from easydist.metrics.order import Dealt

__all__ = ["dealt_by", "dealt_last"]


def dealt_last(size: int, total: int | None = None) -> Dealt | None:
    """Return the distribution by accelerate's loader that is being iterated, else by the only one that has ended.

    If the rows belong to another loader, their number hardly ever matches: one batch, or the whole epoch.

    Returns:
        The distribution; None if there is no such loader.

    Raises:
        ValueError: As for ``dealt_by``.
    """
    state = _class("accelerate.state", "GradientState")
    if state is None or not state._shared_state:
        return None
    if (active := state().active_dataloader) is not None:
        dealt = dealt_by(active, size, total)
        return dealt._replace(most=dealt.block)
    if len(done := _done()) > 1:
        gc.collect()  # some of them may be garbage
        done = _done()
    if len(done) != 1:
        return None
    return dealt_by(done[0], size, total)._replace(kept=_epoch(done[0], size, total))


def _done() -> list[Any]:
    return [loader for loader in _alive(_prepared()) if loader.end_of_dataloader]


def _epoch(loader: Any, size: int, total: int | None) -> int | None:
    """Return the number of samples of an epoch; None if it is unknown, or if the epoch began in the middle."""
    parts = [loader, *_samplers(loader)]
    if any(getattr(part, "skip_batches", 0) for part in parts):
        return None
    try:
        total = len(_source(loader)) if total is None else total
    except TypeError:
        return None
    if not loader._drop_last:
        return total
    batch_size = next(part.batch_size for part in parts[1:] if hasattr(part, "batch_size"))
    is_split = any(getattr(part, "split_batches", False) for part in [*parts, loader.dataset])
    step: int = batch_size if is_split else batch_size * size
    return total // step * step


def _source(loader: Any) -> Any:
    """Return the sampler or data set whose length is the number of samples before any is repeated."""
    if isinstance(loader.dataset, IterableDataset):
        return _unsharded(loader.dataset)
    samplers = [part for part in _samplers(loader) if _inner(part) is None and not hasattr(part, "batch_size")]
    return samplers[0] if samplers else loader.dataset


def _unsharded(data: Any) -> Any:
    """Return the user's data set if accelerate or transformers shards it."""
    return data.dataset if hasattr(data, "process_index") else data


def dealt_by(loader: Any, size: int, total: int | None = None) -> Dealt:
    """Return the distribution of a loader's samples to the ranks, up to the last yielded batch.

    Args:
        loader: The loader, which accelerate may have prepared.
        size: The number of participating ranks.
        total: The number of samples, for a data set without a length.

    Raises:
        ValueError: The distribution is unknown, or the loader is for another number of ranks.
        TypeError: It is not a loader.
    """
    if isinstance(loader, _classes("easydist.metrics.loader", "DistributedLoader")):
        return Dealt(loader.batch_size)
    if not isinstance(loader, DataLoader):  # accelerate's loaders report this class
        raise TypeError(f"loader is {type(loader).__name__}, not a DataLoader")
    if size == 1:
        return Dealt()
    if isinstance(loader, _classes("accelerate.data_loader", "DataLoaderDispatcher")):
        return _dispatched(loader, size)
    chain = list(_samplers(loader))
    for part in [*chain, loader.dataset]:
        if hasattr(part, "num_processes") and hasattr(part, "process_index"):
            return _sharded(loader, part, size, total)
    for part in chain:
        if hasattr(part, "num_replicas") and hasattr(part, "total_size"):
            return _strided(loader, part, size)
        if isinstance(part, _classes("easydist.metrics.sampler", "DistributedBatchSampler")):
            return Dealt(part.batch_size)
    if total is None:
        raise ValueError(
            f"the loader does not tell how it distributes its samples over {size} ranks, so repeated samples would go "
            "unnoticed; prepare it with accelerate, use distributed_loader or DistributedSampler, or pass total= or "
            "indices="
        )
    return Dealt()


def _class(module: str, name: str) -> Any:
    """Return a class of a module if the module has been imported."""
    return getattr(sys.modules.get(module), name, None)


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    return tuple([cls for name in names if (cls := _class(module, name)) is not None])


def _prepared() -> Any:
    """Return the base class of the loaders that accelerate makes."""
    return _class("accelerate.data_loader", "DataLoaderStateMixin") or ()


def _alive(cls: Any) -> list[Any]:
    """Return all existing instances. Uses ``type``, since accelerate's loaders report another ``__class__``."""
    return [each for each in gc.get_objects() if issubclass(type(each), cls)]


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the loader's batch sampler and the samplers inside it, outermost first."""
    part = loader
    while (part := _inner(part)) is not None:
        yield part


def _inner(part: Any) -> Any:
    batch_sampler = getattr(part, "batch_sampler", None)
    return getattr(part, "sampler", None) if batch_sampler is None else batch_sampler


def _check_size(found: int, size: int) -> None:
    if found != size:
        raise ValueError(
            f"the loader distributes its samples over {found} ranks, but {size} take part; pass indices=, or another "
            "group"
        )


def _dispatched(loader: Any, size: int) -> Dealt:
    """Handle loaders for which rank 0 reads the batches, and at the end sends the size of the last step to all."""
    _check_size(loader.state.num_processes, size)
    batch_size = next(part.batch_size for part in _samplers(loader) if hasattr(part, "batch_size"))
    block = batch_size // size if loader.split_batches else batch_size
    return Dealt(block, loader.remainder) if loader.end_of_dataloader else Dealt(block, is_full=True)


def _sharded(loader: Any, shard: Any, size: int, total: int | None) -> Dealt:
    """Handle loaders whose ranks read their own batches, to which a sampler or data set adds repeated samples."""
    _check_size(shard.num_processes, size)
    if shard.batch_size is None:
        raise ValueError("the loader's batches differ in size, so its order is not known; pass indices=")
    block = shard.batch_size // size if getattr(shard, "split_batches", False) else shard.batch_size
    if shard.drop_last or not getattr(shard, "even_batches", True):
        return Dealt(block)
    total = _length(loader) if total is None else total
    steps = -(-total // (block * size))
    ended = loader.end_of_dataloader if issubclass(type(loader), _prepared()) else _has_ended(loader, steps)
    return Dealt(block, _rest(total, block * size)) if ended else Dealt(block, is_full=True)


def _length(loader: Any) -> int:
    """Return the number of samples before any is repeated."""
    try:
        return len(_source(loader))
    except TypeError:
        raise ValueError(
            "the loader's data set has no length, and samples may be repeated at its end; pass total=, the number of "
            "samples, or indices="
        ) from None


def _rest(total: int, step: int) -> int:
    """Return the number of samples of the last step."""
    return total % step or min(total, step)


def _strided(loader: Any, sampler: Any, size: int) -> Dealt:
    """Handle loaders that give each rank every W-th sample: DistributedSampler and similar ones."""
    _check_size(sampler.num_replicas, size)
    samples = getattr(sampler, "lengths", None)
    total = len(sampler.dataset if samples is None else samples)
    is_cut = loader.drop_last and sampler.num_samples % loader.batch_size
    if sampler.total_size <= total or is_cut or not _has_ended(loader, len(loader)):
        return Dealt(1)
    return Dealt(1, _rest(total, size))


_iterators: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
"""The last iterator found for each loader."""


def _has_ended(loader: Any, batches: int) -> bool:
    """True if a torch DataLoader has yielded its last batch: its iterator has ended, or no longer exists."""
    known = _iterators.get(loader)
    iterator = known() if known is not None else None
    if iterator is None:
        found = [each for each in _alive(_BaseDataLoaderIter) if each._index_sampler is loader._index_sampler]
        if not found:
            return True
        if len(found) > 1:
            raise ValueError(f"the loader is being iterated {len(found)} times at once, so its position is not known")
        iterator = found[0]
        _iterators[loader] = ref(iterator)
    return bool(iterator._num_yielded >= batches)
