"""The resources of the ranks, in the bundles of a placement group."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from easydist.base.wording import named
from easydist.errors import CollectiveTimeout

_log = logging.getLogger("easydist")

_TELLS_AFTER = 30
"""Seconds after which the log says that the resources are not free."""

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_NOT_STARTED = (
    "Ray may still be preparing runtime_env: give it more time (timeout=). If processes crash at their start, Ray's "
    "messages above or its logs on the nodes say why."
)


class Placement:
    """A placement group with a bundle for each rank, or for each node. Ranks of one node follow one another.

    Args:
        size: The number of ranks.
        resources: The resources of a rank.
        strategy: One of ``STRATEGIES``.
        seconds: The time limit.
        nodes: The number of nodes, with the same number of ranks each; None leaves it to the strategy.

    Raises:
        CollectiveTimeout: The resources were not free in time.
    """

    def __init__(
        self, size: int, resources: Mapping[str, float], strategy: str, seconds: float, nodes: int | None = None
    ) -> None:
        from ray.util.placement_group import placement_group, placement_group_table

        self._size, self._resources = size, dict(resources)
        count, strategy = (size, strategy) if nodes is None else (nodes, "STRICT_SPREAD")
        self._where = strategy if nodes is None else f"{size // nodes} on each of {nodes} nodes"
        self._each = size // count
        bundle = {name: amount * self._each for name, amount in resources.items()}
        self._group = placement_group([bundle] * count, strategy=strategy)
        try:
            self._wait(seconds)
            places = placement_group_table(self._group)["bundles_to_node_id"]
        except BaseException:
            self.remove()
            raise
        found = list(dict.fromkeys(places[bundle] for bundle in range(count)))
        self._bundles = sorted(range(count), key=lambda bundle: found.index(places[bundle]))

    def _wait(self, seconds: float) -> None:
        """Wait until the resources are free."""
        silent = min(seconds, _TELLS_AFTER)
        if self._group.wait(math.ceil(silent)):  # it would cut off the fraction
            return
        if seconds > silent:
            _log.warning("%s\nStill waiting.", self._missing(silent))
            if self._group.wait(math.ceil(seconds - silent)):
                return
        raise self.too_little(seconds)

    def options(self, rank: int) -> dict[str, Any]:
        """Return the options of the actor of a rank. If its node has died, Ray moves its bundle to another one."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        other = dict(self._resources)
        bundle = self._bundles[rank // self._each]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        known = {"num_cpus": other.pop("CPU", 0), "num_gpus": other.pop("GPU", 0), "memory": other.pop("memory", None)}
        return {**known, "resources": other, "scheduling_strategy": place}

    def late(self, ranks: Collection[int], seconds: float) -> CollectiveTimeout:
        """Return the error for ranks that have not started in time."""
        from ray.util.placement_group import placement_group_table

        if placement_group_table(self._group)["state"] != "CREATED":
            return self.too_little(seconds)
        head = f"Ranks: {named(sorted(ranks))} of {self._size} did not start within {seconds:.3g} s, on free resources"
        return CollectiveTimeout(f"{head}\n{_NOT_STARTED}")

    def too_little(self, seconds: float) -> CollectiveTimeout:
        """Return the error for ranks that got no resources in time."""
        advice = "Ask for less, end what uses the rest, or give the cluster more time to grow (timeout=)."
        return CollectiveTimeout(f"{self._missing(seconds)}\n{advice}")

    def _missing(self, seconds: float) -> str:
        """Return how much is asked for, and how much of it is free."""
        import ray

        free, every = ray.available_resources(), ray.cluster_resources()
        rows = [f"  {name}: {free.get(name, 0):g} of {every.get(name, 0):g} free" for name in self._resources]
        asked = ", ".join(f"{name} {amount:g}" for name, amount in self._resources.items())
        nodes = sum(node["Alive"] for node in ray.nodes())
        head = f"Ranks: {self._size} ranks with {asked} each ({self._where}) were not started within {seconds:.3g} s"
        return "\n".join([head, f"  nodes: {nodes} alive", *rows])

    def remove(self) -> None:
        """Give the resources back, which ends the actors that use them."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)
