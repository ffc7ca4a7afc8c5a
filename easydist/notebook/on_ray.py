"""The nodes of a Ray cluster as the place of ranks."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easydist import settings
from easydist.cluster import failures
from easydist.cluster.actors import Actors
from easydist.cluster.facts import session_folder
from easydist.cluster.world import variables
from easydist.notebook.keeper import Keeper
from easydist.notebook.remote import RemoteRank

_ENDS_BY_ITSELF = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Otherwise Ray kills the kernel first, which then cannot end what it has started, or remove its folder."""


class OnRay:
    """Actors of a Ray cluster, each with the kernel of a rank.

    Args:
        size: The number of ranks.
        **options: Keyword arguments of ``Ranks``, whose errors are raised, too.
    """

    def __init__(self, size: int, **options: Any) -> None:
        env = dict(options.pop("runtime_env", None) or {})
        env["env_vars"] = {**_ENDS_BY_ITSELF, **env.get("env_vars", {})}
        self._size, self._actors = size, Actors(Keeper, size, runtime_env=env, **options)
        self._owns_gpus = self._actors.resources.get("GPU", 0) >= 1
        key = os.environ.get(settings.JOB_KEY)
        self._key = {} if key is None else {settings.JOB_KEY: key}

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of this machine."""
        return Path(tempfile.mkdtemp(prefix="easydist-", dir=session_folder()))

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Start the actors of some ranks, and return what all need to meet in a store that rank 0's actor serves."""
        import ray

        self._actors.start([*ranks])
        facts = [self._actors.facts[rank] for rank in range(self._size)]
        try:
            port = ray.get(self._actors[0].serve.remote(), timeout=self._actors.limit)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"rank 0 cannot serve a store: {failures.end_of(facts[0], error)}") from error
        meeting = {"epoch": epoch, "address": (facts[0].address, port), "owns_gpus": self._owns_gpus}
        told = variables(facts, port, epoch)
        return {rank: {**meeting, "variables": own | self._key} for rank, own in told.items()}

    def begin(self, meetings: Mapping[int, dict[str, Any]]) -> Iterator[RemoteRank]:
        """Start the kernels of ranks, each for its meeting."""
        import ray

        asked = {rank: self._actors[rank].begin.remote(self._size, told) for rank, told in meetings.items()}
        for rank, answer in asked.items():
            facts = self._actors.facts[rank]
            try:
                pid, gpus = ray.get(answer, timeout=self._actors.limit)
            except ray.exceptions.RayError as error:
                text = f"rank {rank} did not start on {facts.address}: {failures.end_of(facts, error)}"
                raise RuntimeError(text) from error
            yield RemoteRank(rank, self._actors[rank], facts, pid, gpus)

    def close(self) -> None:
        """End the actors, give their resources back, and remove the folder."""
        self._actors.close()
        shutil.rmtree(self.folder, ignore_errors=True)
