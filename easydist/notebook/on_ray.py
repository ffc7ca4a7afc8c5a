"""Ranks on a Ray cluster as the place of a notebook's ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easydist import settings
from easydist.cluster import failures
from easydist.cluster.facts import session_folder
from easydist.cluster.ranks import Ranks
from easydist.cluster.world import variables
from easydist.notebook import kernel
from easydist.notebook.keeper import Keeper
from easydist.notebook.remote import RemoteRank


class OnRay:
    """Ranks on Ray: the kernel of each runs in its actor, and beside it is another actor, its keeper.

    Args:
        ranks: The ranks, which this place borrows.
        is_owner: True to close them with the place.
    """

    def __init__(self, ranks: Ranks, is_owner: bool) -> None:
        self._ranks, self._is_owner, self._loan = ranks, is_owner, ranks.lend()
        self._actors = self._loan.actors
        self._keepers, self._calls = dict[int, Any](), dict[int, Any]()
        self._owns_gpus = self._actors.resources.get("GPU", 0) >= 1
        key = os.environ.get(settings.JOB_KEY)
        self._key = {} if key is None else {settings.JOB_KEY: key}

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of this machine."""
        return Path(tempfile.mkdtemp(prefix="easydist-", dir=session_folder()))

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Replace those ranks that have begun, and return what all need to meet in the store of rank 0's keeper."""
        import ray

        new = [*ranks]
        if begun := [rank for rank in new if rank in self._keepers]:
            self._loan.replace(begun)
        for rank in new:
            self._end_keeper(rank)
            self._keepers[rank] = self._actors.beside(rank, Keeper, Keeper.CONCURRENCY)
        facts = [self._actors.facts[rank] for rank in range(self._ranks.size)]
        try:
            port = ray.get(self._keepers[0].serve.remote(), timeout=self._actors.limit)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"rank 0 cannot serve a store: {failures.end_of(facts[0], error)}") from error
        meeting = {"epoch": epoch, "address": (facts[0].address, port), "owns_gpus": self._owns_gpus}
        told = variables(facts, port, epoch)
        return {rank: {**meeting, "variables": own | self._key} for rank, own in told.items()}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RemoteRank]:
        """Start the kernels of ranks, each for its meeting."""
        import ray

        facts, size = self._actors.facts, self._ranks.size
        asked = {rank: self._keepers[rank].begin.remote(facts[rank].pid) for rank in meetings}
        for rank, answer in asked.items():
            try:
                place = ray.get(answer, timeout=self._actors.limit)
            except ray.exceptions.RayError as error:
                text = f"rank {rank} did not start on {facts[rank].address}: {failures.end_of(facts[rank], error)}"
                raise RuntimeError(text) from error
            arguments = {"rank": rank, "size": size, "meeting": meetings[rank], **place}
            message = ray.cloudpickle.dumps((kernel.attend, (), arguments))
            call = self._calls[rank] = self._actors[rank].call.remote(message)
            yield RemoteRank(rank, self._keepers[rank], facts[rank], call)

    def _end_keeper(self, rank: int) -> None:
        import ray

        if (keeper := self._keepers.pop(rank, None)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(keeper)

    def close(self) -> None:
        """Give the ranks back, or close them, and remove the folder."""
        import ray

        if ray.is_initialized():  # otherwise these would start a cluster
            self._loan.give_back({call: rank for rank, call in self._calls.items()})
            for rank in [*self._keepers]:
                self._end_keeper(rank)
        if self._is_owner:
            self._ranks.close()
        shutil.rmtree(self.folder, ignore_errors=True)
