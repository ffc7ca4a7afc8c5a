"""Moving the rows of all ranks in index order, a window of indices at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from easydist import tree
from easydist.agreement.call import Call
from easydist.agreement.frames import Agreement
from easydist.agreement.runner import run
from easydist.data.leaves import as_array
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.metrics.columns import Items, Schema, as_column, rows_of, taken
from easydist.metrics.encoding import lengths_of, received, travelling
from easydist.metrics.indices import by_index, difference, fault
from easydist.metrics.joining import aligned, concatenated, held
from easydist.metrics.order import Order, positions
from easydist.metrics.store import Store
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.gather import Gather, Moved, gather
from easydist.verbs.objects import gather_object

__all__ = ["ALL", "AT_ONCE", "Destination", "Large", "Plan", "arrived_rows", "moved", "planned", "whole", "windows"]

AT_ONCE = 1 << 23
"""The most bytes of one rank whose columns move in one exchange."""

_WINDOW = 1 << 19
"""The approximate bytes of a window."""

ALL = (-(1 << 63), (1 << 63) - 1)
"""The window of all indices."""


class Destination(NamedTuple):
    """The destination of rows, rank ``dst`` or all ranks, and the further arguments of the exchanges."""

    dst: int | None
    group: Group
    operation: str = "MetricCollector"
    check: bool | None = None
    timeout: Timeout | None = None

    @property
    def comms(self) -> Communicators:
        """The communicators of the group."""
        return communicators(self.group)

    def is_here(self) -> bool:
        """True if the rows go to this rank, too."""
        return self.dst in (None, self.comms.rank)

    def gathered(self, data: Any) -> Any:
        """Gather a tree; return None on ranks to which nothing goes."""
        return gather(data, group_dst=self.dst, group=self.group, check=self.check, timeout=self.timeout)

    def exchanged(self, value: Any) -> list[Any]:
        """Exchange an object of each rank, among all ranks."""
        restricted = not codec.is_pickle_allowed()
        every = gather_object(value, weights_only=restricted, group=self.group, check=self.check, timeout=self.timeout)
        return every or []


class Plan(NamedTuple):
    """The plan for moving all rows, the same on all ranks.

    Attributes:
        schema: The schema of all ranks that have rows.
        empty: For each column, the value of a rank without rows.
        length: The number of different indices.
        bounds: The first index of each window, and one more than the last index.
        is_compared: True if an index comes more than once, so that its values must be compared.
    """

    schema: Schema
    empty: Sequence[Any]
    length: int
    bounds: list[int]
    is_compared: bool


def planned(store: Store, schema: Schema, total: int | None, to: Destination) -> Plan:
    """Plan the windows, after making sure that all indices are there.

    Raises:
        ValueError: On all ranks: the ranks have different columns or ``total``, or indices are missing.
    """
    mine = schema.description(), total, len(store), store.nbytes
    schemas, totals, counts, nbytes = zip(*to.exchanged(mine), strict=True)
    schema = _common([*map(Schema.of, schemas)])
    if len({*totals}) > 1:
        raise ValueError(f"MetricCollector: the ranks have total={', '.join(map(str, totals))}")
    length, bounds, has_repeated = _bounds(store.indices, total, _per_window(sum(counts), sum(nbytes)), to)
    return Plan(schema, [one.empty() for one in schema.types], length, bounds, has_repeated)


def _per_window(rows: int, nbytes: int) -> int:
    """Return the number of rows of a window, given the bytes of all rows."""
    return max(_WINDOW * rows // max(nbytes, 1), 1)


def _bounds(indices: torch.Tensor, total: int | None, rows: int, to: Destination) -> tuple[int, list[int], bool]:
    """Return the number of different indices, the bounds of the windows, and True if some are repeated.

    Raises:
        ValueError: On all ranks: indices of ``range(total)`` are missing.
    """
    every = to.gathered(indices)
    mine = None if every is None else _found(every, total, rows)
    length, bounds, has_repeated, said = next(one for one in to.exchanged(mine) if one is not None)
    if said:
        raise ValueError(f"{to.operation}: {said}")
    return length, bounds, has_repeated


def _common(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of all ranks that have columns."""
    known = {rank: schema for rank, schema in enumerate(schemas) if schema.types}
    try:
        return reduce(Schema.joined, reversed(known.values())) if known else Schema()
    except ValueError:
        lines = [f"  rank {rank}: {', '.join(map(str, schema.types))}" for rank, schema in known.items()]
        raise ValueError("\n".join(["MetricCollector: the ranks have different columns", *lines])) from None


def _found(indices: torch.Tensor, total: int | None, rows: int) -> tuple[int, list[int], bool, str]:
    """Return the number of different indices, the windows, True if some are repeated, and an error text."""
    found, counts = indices.unique(return_counts=True)
    bounds = [*found[::rows].tolist(), *(found[-1:] + 1).tolist()]
    return len(found), bounds, len(found) < len(indices), fault(found, counts, total)


def whole(store: Store, plan: Plan, to: Destination, rtol: float = 0.0) -> list[Any] | None:
    """Move all rows, and return the columns in order of the index; None on ranks other than ``to.dst``.

    Raises:
        ValueError: As ``windows``.
    """
    is_here, at = to.is_here(), 0
    columns = [_room(leaf, plan.length if is_here else 0) for leaf in plan.empty]
    for rows in windows(store, plan, to, rtol):
        if rows:
            columns = [_put(*each, at) for each in zip(columns, rows, strict=True)]
            at += len(rows[0])
    if not is_here:
        return None
    return [concatenated(column) if isinstance(column, list) else column for column in columns]


def _room(leaf: Any, length: int) -> Any:
    """Return the place of all windows' rows: a tensor or an array, or a list of parts."""
    if isinstance(leaf, torch.Tensor):
        return leaf.new_empty((length, *leaf.shape[1:]))
    return np.zeros((length, *leaf.shape[1:]), leaf.dtype) if isinstance(leaf, np.ndarray) else [leaf]


def _put(column: Any, rows: Any, at: int) -> Any:
    """Write the rows of a window after the previous ones, and return the column: text of other ranks may be wider."""
    if isinstance(column, list):
        column.append(rows)
        return column
    if isinstance(column, np.ndarray):
        column, rows = aligned([column, rows])
    column[at : at + len(rows)] = rows
    return column


def windows(store: Store, plan: Plan, to: Destination, rtol: float = 0.0) -> Iterator[list[Any] | None]:
    """Yield the columns of each window in order of the index; None on ranks other than ``to.dst``.

    Raises:
        ValueError: On all ranks: an index came with different values.
    """
    for first, last in zip(plan.bounds, plan.bounds[1:], strict=False):
        got = arrived_rows(store, plan.empty, (first, last), to)
        said, leaves = "", None
        if got is not None:
            indices, rows = got
            order = by_index(indices)
            leaves = [taken(leaf, order) for leaf in rows]
            if len(order) < len(indices) and plan.is_compared:
                said = difference(indices, rows, plan.schema.types, rtol)
        if plan.is_compared and any(faults := to.exchanged(said)):
            raise ValueError(next(filter(None, faults)))
        yield leaves


def arrived_rows(
    store: Store, empty: Sequence[Any], window: tuple[int, int], to: Destination
) -> tuple[torch.Tensor, list[Any]] | None:
    """Return all ranks' rows of a window with their indices, in rank order; None on ranks other than ``to.dst``."""
    verb = _GatherRows(store, empty, window, to)
    got: tuple[torch.Tensor, list[Any]] | None = run(verb, to.comms, to.timeout, to.check)
    return got


class _GatherRows(Gather):
    operation = "MetricCollector"

    def __init__(self, store: Store, empty: Sequence[Any], window: tuple[int, int], to: Destination) -> None:
        super().__init__(None, to.dst)
        self.operation = to.operation
        self._store, self._empty, self._window = store, empty, window

    def prepare(self, comms: Communicators) -> Call:
        positions = self._store.between(*self._window)
        leaves = self._store.rows(positions) if len(positions) else self._empty
        pairs = zip(leaves, self._empty, strict=True)
        rows = [held(leaf, like.dtype) if isinstance(like, np.ndarray) else leaf for leaf, like in pairs]
        names = [f"['columns'][{i}]" for i in range(len(rows))]
        self._columns, self._tensor, paths = travelling([*map(as_column, rows)], names)
        self._tensor.append(self._store.indices[positions])
        self._spec = tree.listed([*paths, "['indices']"], [])
        return super().prepare(comms)

    def result(self, comms: Communicators, agreed: Agreement, arrived: Moved) -> Any:
        leaves = super().result(comms, agreed, arrived)
        if leaves is None:
            return None
        return leaves[-1], received(self._columns, leaves, lengths_of(agreed.call.tree, arrived[0]))


class Large(NamedTuple):
    """Columns of an agreed call whose data has not moved yet.

    Attributes:
        columns: This rank's columns, ``Items`` or data.
        tensors: The tensor of each column that is data.
        counts: For each column the number of rows of each rank; None if it is one value per rank.
        orders: For each column the rows to keep, see ``in_order``.
        indices: The index of each row; None if ``orders`` determine the places.
        total: The number of different indices; None: any number.
        nbytes: The bytes of all columns of all ranks.
    """

    columns: Sequence[Any]
    tensors: Sequence[Any]
    counts: Sequence[tuple[int, ...] | None]
    orders: Sequence[Order]
    indices: torch.Tensor | None
    total: int | None
    nbytes: int


def moved(large: Large, to: Destination) -> list[Any] | None:
    """Move all columns to rank ``to.dst``, and return them there; None on other ranks.

    Raises:
        EasydistError: Another rank failed.
    """
    alone = {i: column for i, column in enumerate(large.columns) if large.counts[i] is None}
    found = to.gathered(alone) if alone else {}
    for counts in dict.fromkeys(filter(None, large.counts)):  # in one order on all ranks
        numbers = [i for i, each in enumerate(large.counts) if each == counts]
        rows, store = [_rows(large, i) for i in numbers], Store()
        plan, places = _plan_of(large, counts, numbers[0], [leaf[:0] for leaf in rows], to)
        store.add(places, rows, 0)
        columns = whole(store, plan, to)
        if found is not None and columns is not None:
            found |= {i: as_array(column, large.columns[i]) for i, column in zip(numbers, columns, strict=True)}
    return [found[i] for i in range(len(large.columns))] if to.is_here() else None


def _rows(large: Large, number: int) -> Any:
    """Return the rows of a column: a tensor, or the objects to encode."""
    column = large.columns[number]
    return rows_of(column.value) if isinstance(column, Items) else large.tensors[number]


def _plan_of(
    large: Large, counts: tuple[int, ...], number: int, empty: Sequence[Any], to: Destination
) -> tuple[Plan, torch.Tensor]:
    """Return the plan for columns with as many rows as one of them, and the place of each row of this rank."""
    rows = _per_window(sum(counts), large.nbytes)
    if large.indices is not None:
        length, bounds, _ = _bounds(large.indices, large.total, rows, to)
        return Plan(Schema(), empty, length, bounds, False), large.indices
    places, length = positions(large.orders[number], counts, to.comms.rank)
    return Plan(Schema(), empty, length, [*range(0, length, rows), length], False), places
