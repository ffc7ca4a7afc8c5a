"""Gathering large data to one rank, a window of rows at a time, so that no rank holds copies of all that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from easydist.data.leaves import as_array
from easydist.metrics.columns import Items
from easydist.metrics.encoding import concatenated
from easydist.metrics.order import Order, positions
from easydist.metrics.schema import Schema
from easydist.metrics.store import Store
from easydist.metrics.windows import Plan, Way, bounds_of, per_window, windows
from easydist.state import communicators
from easydist.verbs.gather import gather

__all__ = ["AT_ONCE", "Large", "moved"]

AT_ONCE = 1 << 23
"""The most bytes of one rank whose columns move in one exchange."""


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


def moved(large: Large, way: Way) -> list[Any] | None:
    """Move all columns to rank ``way.dst``, and return them there; None on other ranks.

    Raises:
        EasydistError: Another rank failed.
    """
    alone = {i: column for i, column in enumerate(large.columns) if large.counts[i] is None}
    found = gather(alone, group_dst=way.dst, group=way.group, check=way.check, timeout=way.timeout) if alone else {}
    for counts in dict.fromkeys(filter(None, large.counts)):  # in one order on all ranks
        numbers = [i for i, each in enumerate(large.counts) if each == counts]
        plan, places = _planned(large, counts, numbers, way)
        whole = _moved_together([_rows(large, i) for i in numbers], places, plan, way)
        if found is not None:
            found |= {i: as_array(column, large.columns[i]) for i, column in zip(numbers, whole, strict=True)}
    return [found[i] for i in range(len(large.columns))] if way.dst == communicators(way.group).rank else None


def _rows(large: Large, number: int) -> Any:
    """Return the rows of a column: a tensor, or the objects to encode."""
    column = large.columns[number]
    if not isinstance(column, Items):
        return large.tensors[number]
    return [*column.value] if isinstance(column.value, torch.Tensor) else column.value


def _planned(large: Large, counts: tuple[int, ...], numbers: Sequence[int], way: Way) -> tuple[Plan, torch.Tensor]:
    """Return the plan for columns with as many rows, and the place of each row of this rank."""
    rows = per_window(sum(counts), large.nbytes)
    empty = [_rows(large, i)[:0] for i in numbers]
    if large.indices is not None:
        length, bounds, _ = bounds_of(large.indices, large.total, rows, way)
        return Plan(Schema(), empty, length, bounds, False), large.indices
    places, length = positions(large.orders[numbers[0]], counts, communicators(way.group).rank)
    return Plan(Schema(), empty, length, [*range(0, length, rows), length], False), places


def _moved_together(leaves: Sequence[Any], places: torch.Tensor, plan: Plan, way: Way) -> list[Any]:
    """Return the columns that have as many rows, whole on rank ``way.dst``."""
    store, at = Store(), 0
    store.add(places, [*leaves], 0)
    length = plan.length if way.dst == communicators(way.group).rank else 0
    whole = [_room(leaf, length) for leaf in plan.empty]
    for rows in windows(store, plan, way):
        for column, part in zip(whole, rows or (), strict=rows is not None):
            if isinstance(column, list):
                column.append(part)
            else:
                column[at : at + len(part)] = part
        at += len(rows[0]) if rows else 0
    return [concatenated(column) if isinstance(column, list) else column for column in whole]


def _room(leaf: Any, length: int) -> Any:
    """Return the target of all windows' rows: one tensor, or a list of parts."""
    return leaf.new_empty((length, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) else [leaf]
