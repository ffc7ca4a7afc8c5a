"""The nodes of a Ray cluster as the place of ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easydist import settings
from easydist.agreement.calling import seconds
from easydist.cluster.actors import Actors
from easydist.cluster.facts import session_folder
from easydist.cluster.world import variables
from easydist.notebook.keeper import Keeper
from easydist.notebook.remote import RemoteRank
from easydist.typing import Timeout


class OnRay:
    """Actors of a Ray cluster, each with the kernel of a rank. Arguments and errors are those of ``Ranks``."""

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
        self._size, self._limit = size, seconds(timeout, "start")
        key = os.environ.get(settings.JOB_KEY)
        self._key = {} if key is None else {settings.JOB_KEY: key}
        self._owns_gpus = bool((resources or {}).get("GPU"))
        place = resources, strategy, nodes, runtime_env, address, ship
        self._actors = Actors(Keeper, size, *place, self._limit)
        self.folder = Path(tempfile.mkdtemp(prefix="easydist-", dir=session_folder()))

    def meeting(self, ranks: Iterable[int], epoch: int) -> Mapping[int, dict[str, Any]]:
        """Start the actors of some ranks, and return what all need to meet in a store that rank 0's actor serves."""
        import ray

        self._actors.start([*ranks], time.monotonic() + self._limit)
        port = ray.get(self._actors[0].serve.remote(), timeout=self._limit)
        facts = [self._actors.facts[rank] for rank in range(self._size)]
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
                pid, gpus = ray.get(answer)
            except ray.exceptions.RayError as error:
                text = str(getattr(error, "cause", error))
                raise RuntimeError(f"rank {rank} did not start on {facts.address}: {text}") from error
            yield RemoteRank(rank, self._actors[rank], facts, pid, gpus)

    def close(self) -> None:
        """End the actors, give their resources back, and remove the folder."""
        self._actors.close()
        shutil.rmtree(self.folder, ignore_errors=True)
