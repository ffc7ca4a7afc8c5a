"""A loader for several ranks: every sample exactly once, and the same number of batches on all of them.

``progress`` shows one bar for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from easydist.agreement.runner import compare
from easydist.base.arguments import integer
from easydist.base.eager import eager, eager_methods
from easydist.data.structure import find_batch_size
from easydist.errors import DisagreementError
from easydist.groups.communicators import Communicators
from easydist.metrics.sampler import Parameters, Source, Streamed, source_of
from easydist.state import ProcessState, communicators
from easydist.typing import Group, T

__all__ = ["DistributedLoader", "distributed_loader", "progress"]

_OURS = frozenset({"batch_sampler", "sampler"})
"""The arguments of ``DataLoader`` that select this rank's samples."""

_DIFFERENT_STREAMS = (
    "This rank's stream has ended. Every rank must read the same samples in the same order, and keeps its share of "
    "them. Do not split the dataset by rank (split_dataset_by_node, get_rank). To read different samples on each "
    "rank, use a DataLoader and collect with MetricCollector."
)


@eager
def distributed_loader(
    dataset: Dataset[Any] | Sequence[Any],
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    with_indices: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    group: Group = None,
    **options: Any,
) -> DistributedLoader:
    """Create a loader that distributes a dataset over the ranks, without repeating a sample.

    Law: the batches of step s, joined in rank order, are ``order[s * W * B : (s + 1) * W * B]``, where ``order`` is the
    dataset, shuffled if requested. Each sample is in exactly one batch of one rank. All ranks have the same number of
    batches, so collectives in the loop match. Only the last batch may be shorter, down to no rows, with the same
    dtypes, trailing shapes and keys (see ``Collate``). Holds at W = 1, too. The ranks are those of the group when the
    epoch begins: the loader may be made before the group, and survive a lost rank.

    Args:
        dataset: The same on all ranks. One with a length is indexed. An ``IterableDataset`` is read whole by every
            rank, which keeps its share; all must read the same samples in the same order.
        batch_size: B, the samples of one batch of one rank.
        shuffle: Draw another order in each epoch, as ``DistributedSampler`` does; not for an iterable dataset.
        seed: The seed of the order.
        drop_last: Skip the last step if it has fewer than W * B samples.
        with_indices: Yield ``(indices, batch)``: int64 positions in the dataset, or in the stream.
        collate_fn: A function that makes a batch of a list of samples; None means torch's ``default_collate``.
        group: The participating ranks.
        **options: Options of ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory``, ….

    Raises:
        DisagreementError: The length of the dataset or an argument differs between ranks; or, at the end of an epoch,
            the lengths of the ranks' streams differ.
        ValueError: ``batch_size`` is below 1, ``in_order`` is false, or an iterable dataset is to be shuffled, or read
            by several workers or by one that persists.
        TypeError: ``dataset`` is a ``DataLoader``, a dict of columns or no dataset, ``sampler`` or ``batch_sampler`` is
            given, ``DataLoader`` does not have an option, or ``batch_size`` or ``seed`` is not an integer.
        RemoteError: One of these happened on another rank.

    Example:
        >>> from easydist.metrics import distributed_loader
        >>> loader = distributed_loader(range(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]

    Cost: one header exchange, one more at the beginning of each epoch, and for an iterable dataset another one at the
    end of each epoch. None in between.

    Source: ``torch.utils.data.DataLoader`` and ``DistributedSampler``.
    """

    def opened(comms: Communicators) -> tuple[Source, dict[str, Any]]:
        if taken := sorted(_OURS & options.keys()):
            raise TypeError(
                f"distributed_loader: {taken[0]}= is not accepted, because the loader itself splits the samples among "
                "the ranks"
            )
        if not options.get("in_order", True):
            raise ValueError(
                "distributed_loader: in_order=False is not accepted, because the position would not tell which samples "
                "are done"
            )
        arguments: dict[str, Any] = {
            "batch_size": integer("batch_size", batch_size, "a number of samples"),
            "shuffle": shuffle,
            "seed": integer("seed", seed, "a seed"),
            "drop_last": drop_last,
        }
        source = source_of(dataset, Parameters(comms.rank, comms.size, **arguments), collate_fn, options)
        return source, {"total": source.total, **arguments}

    source = compare(communicators(group), "distributed_loader", opened)
    return DistributedLoader(dataset, source, with_indices, group)


@eager_methods
class DistributedLoader:
    """The loader that ``distributed_loader`` returns. All ranks iterate together, and one iteration is one epoch.

    After an epoch was read to its end, the next one follows, in another order if the loader shuffles.

    Attributes:
        dataset: The dataset.
        batch_size: The samples of one batch of one rank.
        total: The number of samples of an epoch over all ranks; None if the dataset has no length.
    """

    def __init__(self, dataset: Any, source: Source, with_indices: bool, group: Group) -> None:
        self.dataset, self.batch_size, self.total = dataset, source.parameters.batch_size, source.total
        self._source, self._with_indices, self._group = source, with_indices, group
        self._next = _Cursor(0, 0)
        self._here, self._reading = self._next, list[_Cursor]()

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the next."""
        return self._here.epoch

    @property
    def position(self) -> int:
        """The number of samples of the epoch that all ranks together have received."""
        return self._here.position

    @property
    def place(self) -> tuple[int, int]:
        """The rank whose samples these are, and the number of ranks among which they were distributed last."""
        return self._source.parameters[:2]

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the dataset of this loader has no length")
        size = self.batch_size * self._dealt().world_size
        return self.total // size if self._source.parameters.drop_last else -(-self.total // size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch, on all ranks. It starts at its first sample, unless a position in it was loaded.

        An epoch that is being read goes on, and ``state_dict`` describes that one until the next begins.

        Args:
            epoch: Its number, which determines the order together with the seed. An iterable dataset gets it through
                its own ``set_epoch``, if it has one.
        """
        if (number := integer("set_epoch: epoch", epoch, "the number of an epoch")) != self._next.epoch:
            self._next = _Cursor(number, 0)
            self._here = self._reading[-1] if self._reading else self._next

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._next.epoch, self._next.position
        self._begin(epoch, start)
        here = self._here = _Cursor(epoch, start)
        self._next = _Cursor(epoch, 0)
        self._reading.append(here)
        try:
            for here.position, indices, batch in self._source.batches(epoch, start):
                self._here = here
                yield (indices, batch) if self._with_indices else batch
            if isinstance(self._source, Streamed):
                self._meet_at_end(here)
            if self._next.epoch == epoch:  # set_epoch has chosen no other
                self._next = _Cursor(epoch + 1, 0)
            self._here = self._next
        finally:
            self._reading = [place for place in self._reading if place is not here]
            self._here = self._reading[-1] if self._reading else self._here

    def _begin(self, epoch: int, start: int) -> None:
        """Make sure that all ranks begin the same epoch, and can."""
        dealt = self._dealt()
        same = {name: getattr(dealt, name) for name in ("batch_size", "shuffle", "seed", "drop_last")}

        def begun(_: Communicators) -> tuple[None, dict[str, Any]]:
            self._source.demand_unread()
            return None, {"epoch": epoch, "position": start, "total": self.total, **same}

        compare(communicators(self._group), "begin_epoch", begun)

    def _dealt(self) -> Parameters:
        """Distribute the samples among the ranks that are there now; the loader may be older than their group."""
        comms = communicators(self._group)
        if (comms.rank, comms.size) != self._source.parameters[:2]:
            self._source.among(comms.rank, comms.size)
        return self._source.parameters

    def _meet_at_end(self, here: _Cursor) -> None:
        """Make sure that all ranks' streams were equally long. Their samples are not compared."""
        told = {"epoch": here.epoch, "position": here.position}
        try:
            compare(communicators(self._group), "end_epoch", lambda _: (None, told))
        except DisagreementError as error:
            error.args = (f"{error}\n{_DIFFERENT_STREAMS}",)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks after the last yielded batch. It is the same on all ranks.

        Example:
            >>> distributed_loader(range(5), batch_size=2).state_dict()
            {'epoch': 0, 'position': 0, 'order': {'shuffle': False, 'seed': 0, 'total': 5}}
        """
        return {"epoch": self.epoch, "position": self.position, "order": self._source.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, with any number of ranks and any batch size. All ranks call it.

        The next iteration yields the remaining samples of that epoch, in the same order.

        Args:
            state: A result of ``state_dict``.

        Raises:
            ValueError: The order of the samples differs: another length, seed or ``shuffle``; or ``state`` is not a
                result of ``state_dict``.
        """
        given: Any = state
        if not isinstance(given, Mapping) or not self.state_dict().keys() <= given.keys():
            what = f"keys {[*given]}" if isinstance(given, Mapping) else f"type {type(given).__name__}"
            raise ValueError(f"load_state_dict: the state has the {what}; pass a result of the loader's state_dict")
        if state["order"] != self._source.order:
            raise ValueError(
                f"load_state_dict: the state belongs to a loader with {state['order']}, but this one has "
                f"{self._source.order}; make it with the same dataset, shuffle and seed"
            )
        self._next = self._here = _Cursor(state["epoch"], state["position"])


class _Cursor:
    """A position in an epoch."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position


def progress(loader: Iterable[T], desc: str | None = None, *, total: int | None = None, **options: Any) -> Iterator[T]:
    """Iterate over a loader with a progress bar of all ranks' samples, which only the main process shows.

    Law: ``list(progress(loader)) == list(loader)``.

    Args:
        loader: A ``DistributedLoader``, whose samples are counted exactly; or any other one, each of whose batches is
            assumed to have as many samples on the other ranks as on this one.
        desc: The text before the bar; the number of ranks is added.
        total: The number of samples of all ranks; None uses that of the loader or its dataset. Without one the bar has
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
