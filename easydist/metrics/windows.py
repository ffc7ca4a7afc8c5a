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
from easydist.data import packing
from easydist.data.leaves import is_numeric
from easydist.format import codec
from easydist.groups.communicators import Communicators
from easydist.metrics.columns import Items, listed, taken
from easydist.metrics.dtypes import held, kind_of
from easydist.metrics.encoding import Objects, as_objects, joined
from easydist.metrics.order import by_index
from easydist.metrics.schema import ColumnType, Schema
from easydist.metrics.store import Store
from easydist.state import communicators
from easydist.typing import Group, Timeout
from easydist.verbs.gather import Gather, Moved, gather
from easydist.verbs.objects import gather_object

__all__ = ["ALL", "Plan", "Way", "arrived_rows", "bounds_of", "check_complete", "per_window", "planned", "windows"]

_WINDOW = 1 << 19
"""The approximate bytes of a window."""

ALL = (-(1 << 63), (1 << 63) - 1)
"""The window of all indices."""


class Way(NamedTuple):
    """The destination of rows, rank ``dst`` or all ranks, and the further arguments of the exchanges."""

    dst: int | None
    group: Group
    operation: str = "MetricCollector"
    check: bool | None = None
    timeout: Timeout | None = None


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


def planned(store: Store, schema: Schema, total: int | None, way: Way) -> Plan:
    """Plan the windows, after making sure that all indices are there.

    Raises:
        ValueError: On all ranks: the ranks have different columns or ``total``, or indices are missing.
    """
    told = _told(([one.told() for one in schema.types], schema.template, total, len(store), store.nbytes), way)
    schema = _common([Schema([ColumnType.of(one) for one in types], template) for types, template, *_ in told])
    if len({one[2] for one in told}) > 1:
        raise ValueError(f"MetricCollector: the ranks have total={', '.join([str(one[2]) for one in told])}")
    rows = per_window(sum([one[3] for one in told]), sum([one[4] for one in told]))
    length, bounds, has_repeated = bounds_of(store.indices, total, rows, way)
    return Plan(schema, [one.empty() for one in schema.types], length, bounds, has_repeated)


def per_window(rows: int, nbytes: int) -> int:
    """Return the number of rows of a window, given the bytes of all rows."""
    return max(_WINDOW * rows // max(nbytes, 1), 1)


def bounds_of(indices: torch.Tensor, total: int | None, rows: int, way: Way) -> tuple[int, list[int], bool]:
    """Return the number of different indices, the bounds of the windows, and True if some are repeated.

    Raises:
        ValueError: On all ranks: indices of ``range(total)`` are missing.
    """
    every = gather(indices, group_dst=way.dst, group=way.group, check=way.check, timeout=way.timeout)
    mine = None if every is None else _found(every, total, rows)
    length, bounds, has_repeated, fault = next(one for one in _told(mine, way) if one is not None)
    if fault:
        raise ValueError(f"{way.operation}: {fault}")
    return length, bounds, has_repeated


def _told(value: Any, way: Way) -> list[Any]:
    """Exchange a value of each rank."""
    restricted = not codec.is_pickle_allowed()
    told = gather_object(value, weights_only=restricted, group=way.group, check=way.check, timeout=way.timeout)
    return told or []


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
    return len(found), bounds, len(found) < len(indices), _fault(found, counts, total)


def _fault(found: torch.Tensor, counts: torch.Tensor, total: int | None) -> str:
    """Return a text that names the missing and the repeated indices; empty if none is missing."""
    if total is None or len(found) == total:
        return ""
    is_missing = torch.ones(total, dtype=torch.bool, device="cpu")
    is_missing[found] = False
    missing, repeated = is_missing.nonzero().flatten(), found[counts > 1]
    fault = f"{len(missing)} of {total} samples are missing: {listed(missing)}"
    return fault + (f"; {len(repeated)} came more than once: {listed(repeated)}" if len(repeated) else "")


def check_complete(indices: torch.Tensor, total: int | None, operation: str) -> None:
    """Make sure that each index of ``range(total)`` came.

    Raises:
        ValueError: Some are missing.
    """
    *_, fault = _found(indices, total, 1 << 62)
    if fault:
        raise ValueError(f"{operation}: {fault}")


def windows(store: Store, plan: Plan, way: Way, rtol: float = 0.0) -> Iterator[list[Any] | None]:
    """Yield the columns of each window in order of the index; None on ranks other than ``way.dst``.

    Raises:
        ValueError: On all ranks: an index came with different values.
    """
    for first, last in zip(plan.bounds, plan.bounds[1:], strict=False):
        got = arrived_rows(store, plan.empty, (first, last), way)
        fault, leaves = "", None
        if got is not None:
            indices, rows = got
            order = by_index(indices)
            leaves = [taken(leaf, order) for leaf in rows]
            if len(order) < len(indices) and plan.is_compared:
                fault = _difference(indices, rows, plan.schema.types, rtol)
        if plan.is_compared and any(faults := _told(fault, way)):
            raise ValueError(next(filter(None, faults)))
        yield leaves


def _difference(indices: torch.Tensor, leaves: list[Any], types: Sequence[ColumnType], rtol: float) -> str:
    """Name an index that came with different values, if there is one."""
    order = torch.argsort(indices, stable=True)
    again = (indices[order][1:] == indices[order][:-1]).nonzero().flatten()
    first, second = order[again], order[again + 1]
    for leaf, one in zip(leaves, types, strict=True):
        is_same = _same(taken(leaf, first), taken(leaf, second), rtol)
        if not is_same.all():
            which = int(is_same.logical_not().nonzero()[0])
            values = [taken(leaf, part[which : which + 1])[0] for part in (first, second)]
            texts = [f"{value.tolist() if isinstance(value, torch.Tensor) else value!r}"[:80] for value in values]
            return (
                f"MetricCollector: index {int(indices[first[which]])} came with different values of {one.path}: "
                f"{texts[0]} and {texts[1]}"
            )
    return ""


def _same(first: Any, second: Any, rtol: float) -> torch.Tensor:
    """Return for each pair of rows whether they are equal. NaN equals NaN."""
    if isinstance(first, list) or (isinstance(first, np.ndarray) and first.dtype.hasobject):
        return torch.tensor([_same_objects(a, b) for a, b in zip(first, second, strict=True)], device="cpu")
    if isinstance(first, np.ndarray):
        equal = torch.from_numpy(_same_arrays(first, second))
    elif first.is_floating_point() and packing.is_copyable(first.dtype):
        equal = torch.isclose(first, second, rtol=rtol, atol=0.0, equal_nan=True)
    else:
        bits = packing.BITS[first.dtype.itemsize]
        equal = first.view(bits) == second.view(bits)
    return equal.flatten(1).all(1) if equal.ndim > 1 else equal


def _same_arrays(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return where two arrays are equal. NaN equals NaN, and NaT equals NaT."""
    equal: np.ndarray[Any, Any] = (first == second) | ((first != first) & (second != second))
    return equal


def _same_objects(first: Any, second: Any) -> bool:
    values, spec = tree.flatten(first)
    others, other = tree.flatten(second)
    is_alike = spec.paths == other.paths and spec.plain == other.plain
    return is_alike and all(_same_leaves(*pair) for pair in zip(values, others, strict=True))


def _same_leaves(first: Any, second: Any) -> bool:
    """True if two leaves of objects are equal. NaN equals NaN."""
    arrays = [leaf for leaf in (first, second) if isinstance(leaf, torch.Tensor | np.ndarray)]
    if not arrays:  # numbers, which may be too large for a tensor
        return bool(first == second or (first != first and second != second))
    if not all(isinstance(leaf, torch.Tensor) or is_numeric(leaf) for leaf in arrays):
        return np.shape(first) == np.shape(second) and bool(np.all(_same_arrays(first, second)))
    one, other = (torch.as_tensor(leaf, device="cpu") for leaf in (first, second))
    if one.dtype != other.dtype or one.shape != other.shape:
        return torch.equal(one, other)
    return bool(_same(one, other, 0.0).all())


def arrived_rows(
    store: Store, empty: Sequence[Any], window: tuple[int, int], way: Way
) -> tuple[torch.Tensor, list[Any]] | None:
    """Return all ranks' rows of a window with their indices, in rank order; None on ranks other than ``way.dst``."""
    verb = _GatherRows(store, empty, window, way)
    got: tuple[torch.Tensor, list[Any]] | None = run(verb, communicators(way.group), way.timeout, way.check)
    return got


class _GatherRows(Gather):
    operation = "MetricCollector"

    def __init__(self, store: Store, empty: Sequence[Any], window: tuple[int, int], way: Way) -> None:
        super().__init__(None, way.dst)
        self.operation = way.operation
        self._store, self._empty, self._window = store, empty, window

    def prepare(self, comms: Communicators) -> Call:
        positions = self._store.between(*self._window)
        leaves = self._store.rows(positions) if len(positions) else self._empty
        arrays = {i: leaf.dtype for i, leaf in enumerate(self._empty) if isinstance(leaf, np.ndarray)}
        leaves = [held(leaf, arrays[i]) if i in arrays else leaf for i, leaf in enumerate(leaves)]
        columns = [leaf if isinstance(leaf, torch.Tensor) else as_objects(Items(leaf, True)) for leaf in leaves]
        self._tensor = {"indices": self._store.indices[positions], "columns": columns}
        call = super().prepare(comms)
        if arrays:
            call.arguments["arrays"] = {i: kind_of(dtype) for i, dtype in arrays.items()}
        return call

    def result(self, comms: Communicators, agreed: Agreement, arrived: Moved) -> Any:
        gathered = super().result(comms, agreed, arrived)
        if gathered is None:
            return None
        at = {path: i for i, path in enumerate(agreed.call.tree.layout.paths)}
        leaves = []
        for i, column in enumerate(gathered["columns"]):
            if isinstance(column, Objects):
                leaf = at[f"['columns'][{i}].message"]
                column = joined(column.message, [row[leaf][0] for row in arrived[0]], are_rows=True)
            leaves.append(column)
        return gathered["indices"], leaves
