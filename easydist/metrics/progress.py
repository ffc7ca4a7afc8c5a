"""One progress bar for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from easydist.data.structure import find_batch_size
from easydist.metrics.loader import DistributedLoader
from easydist.state import ProcessState
from easydist.typing import T

__all__ = ["progress"]


def progress(loader: Iterable[T], desc: str | None = None, *, total: int | None = None, **options: Any) -> Iterator[T]:
    """Iterate over a loader with a progress bar of all ranks' samples, which only the main process shows.

    Law: ``list(progress(loader)) == list(loader)``.

    Args:
        loader: A ``DistributedLoader``, whose samples are counted exactly; or any other one, each of whose batches is
            assumed to have as many samples on the other ranks as on this one.
        desc: The text before the bar; the number of ranks is added.
        total: The number of samples of all ranks; None uses that of the loader or its data set. Without one the bar has
            no end.
        **options: Options of ``tqdm``, such as ``leave``.

    Raises:
        ImportError: tqdm is not installed.

    Example:
        >>> from easydist.metrics import distributed_loader
        >>> [batch.tolist() for batch in progress(distributed_loader(range(3), 2), "evaluate", disable=True)]
        [[0, 1], [2]]

    Cost: no exchange besides those of the loader.
    """
    state = ProcessState()
    if not state.is_main_process:
        yield from loader
        return
    from tqdm.auto import tqdm

    total = _total(loader) if total is None else total
    ranks = "1 rank" if state.num_processes == 1 else f"{state.num_processes} ranks"
    title = f"{desc} on {ranks}" if desc else ranks
    with tqdm(desc=title, total=total, unit="sample", **options) as bar:
        for batch in loader:
            bar.update(_done(loader, batch, bar.n, total) - bar.n)
            yield batch


def _total(loader: Any) -> int | None:
    try:
        return loader.total if isinstance(loader, DistributedLoader) else len(loader.dataset)
    except (AttributeError, TypeError):  # not a DataLoader, or one of a stream
        return None


def _done(loader: Any, batch: Any, before: int, total: int | None) -> int:
    """Return the number of samples that the ranks have received, including this batch."""
    if isinstance(loader, DistributedLoader):
        return loader.position
    done = before + (find_batch_size(batch) or 1) * ProcessState().num_processes
    return done if total is None else min(done, total)
