"""The verb ``gather_for_metrics``: every rank's samples, each once, in the sampler's order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

from easydist import tree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.base.arguments import integer
from easydist.base.eager import eager
from easydist.groups.communicators import Communicators
from easydist.metrics.columns import has_rows, opened, taken
from easydist.metrics.encoding import lengths_of, nbytes_of, received, travelling
from easydist.metrics.indices import as_indices, by_index, check_complete
from easydist.metrics.joining import padded
from easydist.metrics.known_loaders import lot_of, lot_of_last
from easydist.metrics.order import Order, check_split, in_order, per_rank, rows_text
from easydist.metrics.tally import Lot, agreed_lot
from easydist.metrics.windows import AT_ONCE, Destination, Large, moved
from easydist.state import communicators, together
from easydist.typing import Group, Timeout, Tree
from easydist.verbs.buckets import every_shape
from easydist.verbs.gather import Gather, Moved
from easydist.verbs.ranks import named_rank

__all__ = ["gather_for_metrics"]


@eager
def gather_for_metrics(
    input_data: Tree,
    use_gather_object: bool = False,
    *,
    loader: Any = None,
    total: int | None = None,
    indices: Any = None,
    ragged: bool = False,
    pad_index: float | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    check: bool | None = None,
    timeout: Timeout | None = None,
) -> Tree:
    """Collect every rank's samples in the sampler's order, without those that a sampler repeated.

    Law: over the calls of an epoch, which have the rows of one batch after another, or of several together, each column
    is the one that one process gets from the same dataset; with ``indices`` it is sorted by them. Holds at W = 1, too.
    The rows are counted by loader, pass and sequence: the n-th calls between two steps of the loader form a sequence.

    Example:
        >>> import torch, easydist
        >>> batch = {"prediction": torch.tensor([0.5, 0.25]), "id": ["b", "a"]}
        >>> easydist.gather_for_metrics(batch, total=2)
        {'prediction': tensor([0.5000, 0.2500]), 'id': ['b', 'a']}
        >>> easydist.gather_for_metrics(batch, indices=[1, 0])
        {'prediction': tensor([0.2500, 0.5000]), 'id': ['a', 'b']}

    Args:
        input_data: Any tree. Tensors and arrays have one row per sample along dim 0; a list without tensors has one
            item per sample (text, numbers, other objects), and so does a tuple of text. A tensor without dimensions and
            a number are one row per rank, none of which is dropped. Other values must be equal on all ranks, and do not
            change.
        use_gather_object: Treat ``input_data`` as one object: a list of samples, or one value per rank.
        loader: The loader that distributed the samples: a ``DataLoader`` with ``DistributedSampler`` or a similar one,
            one that accelerate has prepared, or ``distributed_loader``. None means accelerate's loader that is being
            iterated, and then the rows must be one batch of it; else the only one that has ended, and then they must
            be all of its rows, or the last of them.
        total: The number of samples, for a loader whose dataset has no length. Without a loader, or with one that does
            not tell how it distributes its samples, the ranks must have that many rows in all, which are kept in rank
            order. With ``indices``, each of ``range(total)`` must come.
        indices: The index of each row of this rank in the dataset, from 0. No loader is needed. If an index comes
            twice, the first row is kept.
        ragged: Lists with tensors have one item per sample, too, and tensors of several dimensions become lists of one
            tensor per sample, so any dimension may differ between ranks.
        pad_index: Implies ``ragged``. In addition a list of tensors or of lists of numbers becomes a ``Padded`` with
            ``values``, padded with this number, and ``lengths``. The dtype is that to which torch promotes those of
            the samples; Python floats are float64.
        dst: The only rank that gets the result, a rank inside the group; None means all of them. With a group of torch,
            it must be the same rank of the world.
        group: The participating ranks.
        group_dst: The same as ``dst``, for any group.
        check: True to compare the calls of all ranks; None follows ``EASYDIST_CHECK`` (on by default).
        timeout: The time limit of the call; None is the group's.

    Returns:
        A new tree of the same structure; None on ranks other than ``dst``.

    Raises:
        ValueError: It is unknown which rows are repeated samples, or which batches they came from; a sequence lacks
            rows of the last pass; the loader is for another rank or number of ranks, or its order is unknown; the rows
            do not match the loader, ``total`` or ``indices``; an index is missing or impossible, which the text names;
            or padding would change a value.
        DisagreementError: Paths, dtypes, shapes apart from dim 0, or the loaders' distributions or positions differ
            between ranks.
        RemoteError: Another rank's data could not travel.
        TypeError: An object cannot be pickled, an array is masked, or a leaf is not a dense tensor.

    Cost: that of ``gather``: one header exchange, which also carries small data, and one exchange for larger data. The
    loader's position travels with the header.
    With ``dst``, if a rank has more than 8 MiB: a ``gather`` for every 512 KiB, so that the others need no memory
    beside their data, and with ``indices`` three more exchanges. With ``dst`` and either ``pad_index`` or both
    ``indices`` and ``total``, one more small exchange, for what only ``dst`` can find wrong.

    Source: ``Accelerator.gather_for_metrics``.
    """
    dst = named_rank(group, "gather_for_metrics", "dst", dst, group_dst)
    options = _Options(loader, total, indices, use_gather_object, ragged or pad_index is not None, pad_index)
    verb = _GatherForMetrics(input_data, dst, options)
    is_checked_on_one = dst is not None and (pad_index is not None or (indices is not None and total is not None))
    with together(group) if is_checked_on_one else _NOTHING:
        result = run(verb, communicators(group), timeout, check)
    if verb.large is None:
        return result
    with together(group):
        columns = moved(verb.large, Destination(dst, group, "gather_for_metrics", check, timeout))
        return None if columns is None else verb.finished(columns)


_NOTHING = nullcontext()


class _Options(NamedTuple):
    """The arguments that determine which rows to keep, and how the tree is split."""

    loader: Any
    total: int | None
    indices: Any
    whole: bool
    ragged: bool
    pad_index: float | None

    def lot(self, rank: int, size: int) -> Lot:
        """Return the loader that the rows come from, as this rank knows it."""
        if self.loader is not None:
            return lot_of(self.loader, rank, size, self.total)
        return Lot() if self.indices is not None else lot_of_last(rank, size, self.total)

    @property
    def need_no_loader(self) -> bool:
        """True if it can be done without a loader."""
        return self.indices is not None or self.total is not None


Rows: TypeAlias = tuple[int, ...]
"""The number of rows of each rank."""

_NO_LOADER = (
    "gather_for_metrics: no loader prepared with accelerate tells which samples are repeated; pass loader= (the loader "
    "that these rows come from), indices=, or total= (the number of samples)"
)


class _GatherForMetrics(Gather):
    operation = "gather_for_metrics"

    def __init__(self, input_data: Tree, dst: int | None, options: _Options) -> None:
        super().__init__(input_data, dst)
        self._options, self._lot = options, Lot()
        self.large: Large | None = None

    def prepare(self, comms: Communicators) -> Call:
        options = self._options
        self._lot = lot = options.lot(comms.rank, comms.size)
        self._values, self._tree = opened(self._tensor, options.ragged, options.whole)
        nbytes = 0 if self._dst is None or comms.size == 1 else sum(map(nbytes_of, self._values))
        is_small = nbytes <= AT_ONCE or not any(map(has_rows, self._values))
        self._columns, self._tensor, paths = travelling(self._values, self._tree.paths, with_objects=is_small)
        if options.indices is not None:
            self._tensor.append(as_indices(options.indices, "gather_for_metrics", options.total))
            paths.append("indices=")
        self._spec = tree.listed(paths, self._tree.plain)
        call = super().prepare(comms)
        call.nbytes = call.nbytes if is_small else nbytes
        del call.arguments["dim"]
        total = None if options.total is None else integer("total", options.total, "a number of samples")
        call.arguments |= {"total": total, "ragged": options.ragged, "pad_index": options.pad_index}
        if lot.tally is None and (lot.sharding is not None or options.need_no_loader):
            call.arguments["block"] = None if lot.sharding is None else lot.sharding.block
        elif lot.tally is None and self._has_rows():
            raise ValueError(_NO_LOADER)
        else:
            call.numbers = lot.numbers()
        return call

    def _has_rows(self) -> bool:
        """True if this rank has rows. One without any may have had no batch; then it takes the others' loader."""
        return any(column.rows is not None and len(self._tensor[column.rows]) for column in self._columns)

    def validate(self, comms: Communicators, agreed: Agreement) -> None:
        """Raise if the ranks' loaders differ, or if none of them knows one."""
        super().validate(comms, agreed)
        if not agreed.call.numbers:
            return
        self._lot = agreed_lot(self._lot, agreed.numbers())
        if self._lot.sharding is None:
            raise ValueError(_NO_LOADER)

    def exchange(self, comms: Communicators, agreed: Agreement) -> Moved:
        if self._is_large(comms, agreed):
            return every_shape(comms, agreed.call.tree, 0, agreed), None
        return super().exchange(comms, agreed)

    def _is_large(self, comms: Communicators, agreed: Agreement) -> bool:
        """True if a rank has more data than moves at once."""
        is_to_one = self._dst is not None and comms.size > 1
        return is_to_one and max(agreed.nbytes) > AT_ONCE and any(map(has_rows, self._values))

    def result(self, comms: Communicators, agreed: Agreement, arrived: Moved) -> Tree:
        """Select the rows on all ranks, so that all of them raise if the rows are wrong."""
        leaves = agreed.call.tree
        sizes = lengths_of(leaves, arrived[0])
        counts = [None if column.rows is None else sizes[column.rows] for column in self._columns]
        orders = self._ordered(counts, sizes, self._admitted(counts))
        if alone := [column.path for column in self._columns if column.rows is None]:
            _warn_of_weights(self._lot, comms.size, alone[0])
        if self._is_large(comms, agreed):
            tensors = leaves.layout.placed(leaves.tensors)
            indices = None if self._options.indices is None else tensors[-1]
            data = [tensors[column.leaf] for column in self._columns]
            self.large = Large(self._values, data, counts, orders, indices, self._options.total, sum(agreed.nbytes))
            return None
        gathered = super().result(comms, agreed, arrived)
        return None if self._dst not in (None, comms.rank) else self._kept(gathered, sizes, orders)

    def _admitted(self, counts: Sequence[Rows | None]) -> bool:
        """Add the rows to the loader's tally; return True if its last step is among them."""
        if self._lot.sharding is None or not self._lot.sharding.is_counted:
            return True
        found = [rows for rows in counts if rows is not None]
        if not found:
            return True
        return self._lot.admit(found[0] if found.count(found[0]) == len(found) else self._alike(counts))

    def _alike(self, counts: Sequence[Rows | None]) -> Rows:
        """Return the numbers of rows of all columns that have rows; they must be the same."""
        pairs = zip(counts, self._columns, strict=True)
        found = {rows: column.path or "the data" for rows, column in pairs if rows is not None and any(rows)}
        if len(found) > 1:
            columns = [f"{path} has {per_rank(rows)} on the ranks" for rows, path in found.items()]
            raise ValueError(f"gather_for_metrics: {', '.join(columns)}; pass one row per sample")
        return next(iter(found))

    def _ordered(self, counts: Sequence[Rows | None], sizes: Sequence[Rows], has_last: bool) -> list[Order]:
        """Return the rows of each column to keep; columns with as many rows have one order."""
        orders: dict[Rows | None, Order] = {None: None}
        for rows, column in zip(counts, self._columns, strict=True):
            if rows is not None and rows not in orders:
                orders[rows] = self._order(rows, column.path or "the data", sizes, has_last)
        return [orders[rows] for rows in counts]

    def _order(self, rows: Rows, path: str, sizes: Sequence[Rows], has_last: bool) -> Order:
        """Return the rows of a column to keep, as far as it follows from the numbers of rows."""
        sharding = self._lot.sharding
        if self._options.indices is not None:
            if rows != sizes[-1]:
                raise ValueError(
                    f"gather_for_metrics: {path} has {per_rank(rows)} on the ranks, indices has "
                    f"{', '.join(map(str, sizes[-1]))}; pass one index per row"
                )
            return None
        try:
            if sharding is None:
                _check_total(rows, self._options.total)
                return None
            if self._lot.tally is None and sharding.block is not None:
                check_split(rows, sharding.block)
            return in_order(rows, sharding, has_last)
        except ValueError as error:
            raise ValueError(f"gather_for_metrics: {path}: {error}") from None

    def _kept(self, leaves: Sequence[Any], sizes: Sequence[Rows], orders: Sequence[Order]) -> Tree:
        """Return the selected rows, in their order."""
        if self._options.indices is not None:
            order = by_index(leaves[-1])
            if self._options.total not in (None, len(order)):
                check_complete(leaves[-1], self._options.total, "gather_for_metrics")
            orders = [None if column.rows is None else order for column in self._columns]
        values = received(self._columns, leaves, sizes)
        return self.finished([taken(value, order) for value, order in zip(values, orders, strict=True)])

    def finished(self, columns: Sequence[Any]) -> Tree:
        """Rebuild the tree from whole columns."""
        if self._options.pad_index is not None:
            columns = [padded(each, self._options.pad_index) if isinstance(each, list) else each for each in columns]
        return self._tree.rebuild([*columns])


def _check_total(rows: Sequence[int], total: int | None) -> None:
    if total is not None and sum(rows) != total:
        raise ValueError(
            f"{rows_text(rows)}, {sum(rows)} in all, but total is {total}; pass loader= or indices= to tell which rows "
            "are repeated"
        )


def _warn_of_weights(lot: Lot, size: int, path: str) -> None:
    """Warn against averaging values of ranks whose batches differ."""
    sharding = lot.sharding
    if sharding is None or sharding.block is None or not lot.at.has_ended:
        return
    if sharding.rest not in (None, sharding.block * size):
        text = (
            f"gather_for_metrics: {path or 'the data'} is one value per rank, and the last batches have repeated "
            "or fewer samples, so its mean is not the mean of the dataset; gather one value per sample, or use "
            "easydist.metrics.WeightedMean"
        )
        warnings.warn(text, UserWarning, stacklevel=5)
