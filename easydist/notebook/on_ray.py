"""The nodes of a Ray cluster as the place of ranks."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easydist import settings
from easydist.agreement.calling import seconds
from easydist.cluster import failures
from easydist.cluster.actors import Actors, demand_possible
from easydist.cluster.connection import demand_ray
from easydist.cluster.facts import session_folder
from easydist.cluster.world import variables
from easydist.notebook.keeper import Keeper
from easydist.notebook.remote import RemoteRank
from easydist.typing import Timeout

_ENDS_BY_ITSELF = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Otherwise Ray kills the kernel first, which then cannot end what it has started, or remove its folder."""


class OnRay:
    """Actors of a Ray cluster, each with the kernel of a rank. Arguments and errors are those of ``Ranks``.

    Nothing is asked of the cluster before the first meeting.
    """

    def __init__(
        self,
        size: int,
        *,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        nodes: int | None = None,
        runtime_env: dict[str, Any] | None = None,
        address: str | None = None,
        ship: bool | None = None,
        timeout: Timeout = 300.0,
    ) -> None:
        demand_ray("start")
        asked = {"CPU": 1} if resources is None else resources
        demand_possible(size, asked, strategy, nodes)
        self._size, self._limit, self._owns_gpus = size, seconds(timeout, "start"), asked.get("GPU", 0) >= 1
        env = dict(runtime_env or {})
        env["env_vars"] = {**_ENDS_BY_ITSELF, **env.get("env_vars", {})}
        self._place = asked, strategy, nodes, env, address, ship
        key = os.environ.get(settings.JOB_KEY)
        self._key = {} if key is None else {settings.JOB_KEY: key}
        self._actors: Actors | None = None

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of this machine."""
        return Path(tempfile.mkdtemp(prefix="easydist-", dir=session_folder()))

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Start the actors of some ranks, and return what all need to meet in a store that rank 0's actor serves."""
        import ray

        if self._actors is None:
            self._actors = Actors(Keeper, self._size, *self._place, self._limit)
        self._actors.start([*ranks], time.monotonic() + self._limit)
        facts = [self._actors.facts[rank] for rank in range(self._size)]
        try:
            port = ray.get(self._actors[0].serve.remote(), timeout=self._limit)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"rank 0 cannot serve a store: {failures.end_of(facts[0], error)}") from error
        meeting = {"epoch": epoch, "address": (facts[0].address, port), "owns_gpus": self._owns_gpus}
        told = variables(facts, port, epoch)
        return {rank: {**meeting, "variables": own | self._key} for rank, own in told.items()}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RemoteRank]:
        """Start the kernels of ranks, each for its meeting."""
        import ray

        assert self._actors is not None
        asked = {rank: self._actors[rank].begin.remote(self._size, told) for rank, told in meetings.items()}
        for rank, answer in asked.items():
            facts = self._actors.facts[rank]
            try:
                pid, gpus = ray.get(answer, timeout=self._limit)
            except ray.exceptions.RayError as error:
                text = f"rank {rank} did not start on {facts.address}: {failures.end_of(facts, error)}"
                raise RuntimeError(text) from error
            yield RemoteRank(rank, self._actors[rank], facts, pid, gpus)

    def close(self) -> None:
        """End the actors, give their resources back, and remove the folder."""
        if self._actors is not None:
            self._actors.close()
        shutil.rmtree(self.folder, ignore_errors=True)
