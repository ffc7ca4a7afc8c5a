"""Columns collected over a loop by sample index, and sorted once at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from easydist.agreement.runner import reported
from easydist.base.arguments import UNSET, hiding, integer
from easydist.base.eager import eager_methods
from easydist.format import codec
from easydist.metrics.columns import Schema
from easydist.metrics.indices import as_indices
from easydist.metrics.store import Store, copied, nbytes_of
from easydist.metrics.windows import ALL, Destination, Plan, arrived_rows, planned, whole, windows
from easydist.state import communicators, together
from easydist.typing import Group, Timeout, Tree
from easydist.verbs.ranks import check_rank, named_rank
from easydist.verbs.reduce import reduce

__all__ = ["MetricCollector"]


@eager_methods
class MetricCollector:
    """A collector of columns by sample index over a loop, which returns whole columns in index order at its end.

    Law: after ``update`` with all samples, on any ranks and in any order, ``compute()`` is the result of one process
    with all samples in order. A sample may come more than once, for example if a sampler repeats it, with the same
    values. Holds at W = 1, too.

    Example:
        >>> import torch, easydist
        >>> collector = easydist.MetricCollector(total=3)
        >>> collector.update([2, 0], predictions=torch.tensor([0.5, 0.25]), ids=["c", "a"])
        >>> collector.update([1], predictions=torch.tensor([0.75]), ids=["b"])
        >>> collector.compute()
        {'predictions': tensor([0.2500, 0.7500, 0.5000]), 'ids': ['a', 'b', 'c']}

    Args:
        total: The number of samples. ``compute`` makes sure that each of ``range(total)`` has come. None: any number.
        every: A number of updates, the same on all ranks, after which all new rows move to rank ``dst``, so that the
            others hold no more than these. None: each rank keeps its own rows.
        dst: The rank inside the group to which ``every`` moves rows. With a group of torch, it must be the same rank of
            the world.
        spill_nbytes: The approximate number of bytes that a rank holds in memory; the rest goes to a file. None:
            everything stays in memory.
        directory: The folder for this file; None means the usual one for temporary files. The file has no name there:
            its room is free again after ``reset``, and once the collector or its process has ended, however it ends.
        rtol: The relative difference allowed between values of one sample, since the same sample in another batch may
            be rounded differently.
        group: The participating ranks.
        group_dst: The same as ``dst``, for any group.
        timeout: The time limit of each exchange; None is the group's.

    Source: torchmetrics' ``update``, ``compute`` and ``reset``.
    """

    @hiding(dst=0)
    def __init__(
        self,
        total: int | None = None,
        *,
        every: int | None = None,
        dst: int = UNSET,
        spill_nbytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        rtol: float = 0.0,
        group: Group = None,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        if every is not None and integer("MetricCollector: every", every, "a number of updates") < 1:
            raise ValueError(f"MetricCollector: every={every} is not a number of updates")
        self.total = None if total is None else integer("MetricCollector: total", total, "a number of samples")
        if self.total is not None and self.total < 0:
            raise ValueError(f"MetricCollector: total={total} is negative")
        self._every, self._rtol, self._group, self._timeout = every, rtol, group, timeout
        self._dst = named_rank(group, "MetricCollector", "dst", dst, group_dst)
        self._store = Store(spill_nbytes, directory)
        self.reset()

    def reset(self) -> None:
        """Discard all rows on this rank."""
        self._store.clear()
        self._schema = Schema()
        self._updates = 0

    def __len__(self) -> int:
        """Return the number of rows on this rank."""
        return len(self._store)

    def update(self, indices: Any, **columns: Tree) -> None:
        """Add rows, which are copied to the CPU, with all objects in them.

        Args:
            indices: The index of each row in the dataset: a tensor, an array or a list of integers.
            **columns: Tensors, arrays and lists with one row or item per sample, or trees of these; the same columns in
                every update, or none if there are no rows. Items of lists are any objects that can be pickled. Arrays
                of text may differ in width between updates, and those of dates in their unit.

        Raises:
            ValueError: A column has another number of rows than ``indices``, or another dtype or shape than before, or
                an index is negative or not below ``total``.
            TypeError: A tensor is not dense, an array is masked, or an item cannot be pickled.
            RemoteError: In an update that moves rows, another rank raised one of these. No row moves; those that were
                added stay on their rank until the next move.

        Cost: no exchange, except every ``every`` updates: one ``gather`` to rank ``dst`` and a small one.
        """
        self._updates += 1  # of one that fails, too, so that all ranks move their rows in the same update
        if self._every is None or self._updates % self._every:
            self._add(indices, columns)
            return
        with together(self._group, timeout=self._timeout):
            self._add(indices, columns)
            self._move()
        if communicators(self._group).rank != self._dst:
            self._store.clear()

    def _add(self, indices: Any, columns: Mapping[str, Tree]) -> None:
        """Add copies of rows to those of this rank."""
        found = as_indices(indices, "MetricCollector", self.total).clone()
        if not (columns or len(found)):
            return  # of a batch without rows, for which the caller has computed nothing
        schema, leaves, nbytes = copied(columns, len(found))
        self._schema = self._joined(schema)
        self._store.add(found, leaves, nbytes)

    def _joined(self, schema: Schema) -> Schema:
        """Return the schema of the rows that are there and of new ones."""
        if schema.types == self._schema.types or not (self._schema.types or len(self._store)):
            return schema
        try:
            return self._schema.joined(schema)
        except ValueError:
            new, old = [", ".join(map(str, each.types)) or "none" for each in (schema, self._schema)]
            raise ValueError(f"MetricCollector: the columns are {new}, but they were {old}") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of this rank, for ``load_state_dict`` of any rank in any world.

        Returns:
            Tensors, numbers and lists, as ``easydist.save`` and ``torch.save`` write them. The tensors are those of the
            collector: do not change them. Other values are encoded as bytes. Rows in files are mapped into memory.

        Cost: no exchange, and no copy of tensors.

        Example:
            >>> import torch, easydist
            >>> collector = easydist.MetricCollector(total=3)
            >>> collector.update([2], loss=torch.tensor([0.5]))
            >>> resumed = easydist.MetricCollector(total=3)
            >>> resumed.load_state_dict(collector.state_dict())
            >>> resumed.missing()
            tensor([0, 1])
        """
        return {"schema": codec.encode(self._schema.description()), **self._store.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the rows of a ``state_dict`` to those of this rank, with copies of their data.

        The states of one world may be loaded on any number of ranks, one or several on a rank: each row counts once.
        Objects in it are decoded as those of a message: load only what you trust, or deny pickle (``allow_pickle``).

        Args:
            state: A result of ``state_dict``, also after ``easydist.load`` or ``torch.load``.

        Raises:
            ValueError: ``state`` is something else, or has other columns than this collector, or an index that is not
                below ``total``. Then no row is added.
            UnsafeObjectError: Pickle is denied, and an object is not allow-listed.

        Cost: no exchange.
        """
        given: object = state
        names = [*given] if isinstance(given, Mapping) else [f"the type {type(given).__name__}"]
        if not {"schema", "indices", "blocks"}.issubset(names):
            has = ", ".join(map(str, names)) or "nothing"
            raise ValueError(f"load_state_dict: the state has {has}; pass a result of MetricCollector.state_dict")
        indices = as_indices(state["indices"], "MetricCollector", self.total)
        schema = Schema.of(codec.decode(state["schema"].clone()))
        if not (schema.types or len(indices)):
            return  # of a rank without updates, which has no columns
        schema = self._joined(schema)
        self._store.load(indices, state["blocks"])
        self._schema = schema

    def missing(self) -> torch.Tensor:
        """Return the indices that no rank has, in ascending order, on all ranks.

        So an evaluation goes on after an interruption, with the ranks that are there, and evaluates nothing twice.

        Returns:
            int64, on the CPU.

        Raises:
            ValueError: The collector was made without ``total``.
            DisagreementError: The ranks have different values of ``total``.

        Cost: one ``reduce`` of ``total`` bytes.
        """
        with reported(communicators(self._group), "MetricCollector.missing"):
            if self.total is None:
                raise ValueError(
                    "MetricCollector.missing: the number of samples is not known; pass total= when you make it"
                )
            is_here = torch.zeros(self.total, dtype=torch.uint8, device="cpu")
            is_here[self._store.indices] = 1
        is_there = reduce(is_here, "max", group=self._group, timeout=self._timeout)
        return (is_there == 0).nonzero().flatten()

    def compute(self, dst: int | None = None, *, group_dst: int | None = None) -> dict[str, Any] | None:
        """Return all ranks' rows in index order. They stay in the collector until ``reset``.

        Args:
            dst: The only rank that gets the result; None means all of them. It counts as in the constructor.
            group_dst: The same, for any group.

        Returns:
            The whole columns by name, with tensors on the CPU; None on ranks other than ``dst``.

        Raises:
            ValueError: On all ranks: samples are missing, which the text names; an index came with different values; or
                the ranks have different columns. On one rank: a date is out of the range of another one's finer unit.
            RemoteError: Another rank failed.

        Cost: three small exchanges, one of the indices, and a ``gather`` for every 512 KiB, each with one more small
        exchange if samples came more than once. Memory: the result on the ranks that get it, and no more than some MiB
        on others.
        """
        with together(self._group, timeout=self._timeout):
            plan, to = self._planned("compute", dst, group_dst)
            columns = whole(self._store, plan, to, self._rtol)
            return None if columns is None else plan.schema.rebuilt(columns) or {}

    def blocks(self, dst: int | None = None, *, group_dst: int | None = None) -> Iterator[dict[str, Any] | None]:
        """Iterate over the result of ``compute``, about 512 KiB of rows at a time. All ranks must iterate to the end.

        Args:
            dst: As in ``compute``.
            group_dst: As in ``compute``.

        Yields:
            Columns by name, with consecutive rows in index order; None, as often, on ranks other than ``dst``.

        Raises:
            ValueError: As for ``compute``. Different values of one index are found when their block comes.

        Cost: as ``compute``, and a small exchange per block. Memory: one block.
        """
        with together(self._group, timeout=self._timeout):
            plan, to = self._planned("blocks", dst, group_dst)
        every = windows(self._store, plan, to, self._rtol)
        for _ in plan.bounds[1:]:
            with together(self._group, timeout=self._timeout):
                leaves = next(every)
            yield None if leaves is None else plan.schema.rebuilt(leaves)

    def _planned(self, method: str, dst: int | None, group_dst: int | None) -> tuple[Plan, Destination]:
        """Return the plan, and the rank that the caller names; called where all ranks learn of an error."""
        operation = f"MetricCollector.{method}"
        rank = named_rank(self._group, operation, "dst", dst, group_dst)
        to = Destination(
            check_rank(communicators(self._group), operation, "dst", rank), self._group, timeout=self._timeout
        )
        return planned(self._store, self._schema, self.total, to), to

    def _move(self) -> None:
        """Add all rows to those of rank ``dst``; called where all ranks learn of an error."""
        is_there = communicators(self._group).rank == self._dst
        check_rank(communicators(self._group), "MetricCollector", "dst", self._dst)
        empty = [one.empty() for one in self._schema.types]
        to = Destination(self._dst, self._group, timeout=self._timeout)
        got = arrived_rows(Store() if is_there else self._store, empty, ALL, to)
        if got is not None:
            self._store.add(*got, sum(map(nbytes_of, got[1])))
