"""A tensor dict from one Ray actor to others, beside the ways that Ray itself has; in one run, on the same data.

python benchmarks/weights.py [--receivers 1 3] [--repeats 7]

Printed is the median, in milliseconds from the driver's calls to their ends, and how many times as long as easydist's
fastest way each takes. Every way is checked for exact bytes once. The receivers of ``ray.put`` get views of the
object store that they may not write; what a model would have to copy then is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

import easydist.ray

CASES = {"200 x 4 KB": (200, 2048), "64 x 4 MB": (64, 2 << 20)}
"""Tensors of bfloat16, and the elements of each."""

State = dict[str, torch.Tensor]


def tensors(case: str, fill: int) -> State:
    """The data of a case, whatever is in it."""
    count, numel = CASES[case]
    return {f"layer.{i}": torch.full((numel,), float(fill * i % 7), dtype=torch.bfloat16) for i in range(count)}


class Member:
    """An actor; rank 0 has the weights."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def join(self) -> None:
        """Connect in Ray's own way."""
        from ray.util import collective

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        collective.init_collective_group(self.size, self.rank, "gloo", "rays")

    def prepare(self, case: str) -> None:
        """Make the data, and what receives it."""
        self.weights = tensors(case, 1 if self.rank == 0 else 0)
        self.got: State = {}

    def easydist_into(self) -> None:
        """Into the tensors that are there."""
        self.got = easydist.ray.ray_broadcast_tensor_dict(self.weights, group_name="ours")

    def easydist_new(self) -> None:
        """Into new tensors."""
        mine = self.weights if self.rank == 0 else {}
        self.got = easydist.ray.ray_broadcast_tensor_dict(mine, group_name="ours")

    def per_tensor(self) -> None:
        """One broadcast for each tensor, as ColossalAI does it."""
        from ray.util import collective

        for one in self.weights.values():
            collective.broadcast(one.view(torch.uint8), 0, "rays")
        self.got = self.weights

    def give(self) -> State:
        """The weights as an object of Ray."""
        return self.weights

    def take(self, state: State) -> None:
        """Get that object."""
        self.got = state

    def is_exact(self, case: str) -> bool:
        """True if the last way has brought the values of rank 0."""
        want = tensors(case, 1)
        return self.rank == 0 or all(torch.equal(self.got[name], one) for name, one in want.items())

    def forget(self) -> None:
        """Start the next way from nothing."""
        self.got = {}
        for one in self.weights.values() if self.rank else ():
            one.zero_()


def ways(members: list[Any]) -> dict[str, Callable[[], Any]]:
    """Each way as one call of the driver."""

    def all_of(name: str) -> Callable[[], Any]:
        return lambda: ray.get([getattr(one, name).remote() for one in members])

    def put() -> None:
        state = members[0].give.remote()
        ray.get([one.take.remote(state) for one in members[1:]])

    return {
        "easydist, into existing": all_of("easydist_into"),
        "easydist, new tensors": all_of("easydist_new"),
        "per tensor, ray.util.collective": all_of("per_tensor"),
        "ray.put of the dict": put,
    }


def measured(members: list[Any], case: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of each way."""
    ray.get([one.prepare.remote(case) for one in members])
    found = {}
    for name, way in ways(members).items():
        ray.get([one.forget.remote() for one in members])
        way()
        assert all(ray.get([one.is_exact.remote(case) for one in members])), f"{name} brought other bytes"
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            way()
            times.append(1000 * (time.perf_counter() - began))
        found[name] = statistics.median(times)
    return found


def main() -> None:
    """Measure all cases and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, Ray {ray.__version__}")
    for receivers in options.receivers:
        actor = ray.remote(num_cpus=0)(Member)
        members = [actor.remote(rank, receivers + 1) for rank in range(receivers + 1)]
        easydist.ray.create_group(members, "ours")
        ray.get([one.join.remote() for one in members])
        for case in CASES:
            found = measured(members, case, options.repeats)
            best = min(took for name, took in found.items() if name.startswith("easydist"))
            print(f"\n{case}, {receivers} receivers")
            for name, took in found.items():
                print(f"  {name:34}{took:9.1f} ms {took / best:7.1f} x")
        for one in members:
            ray.kill(one)
    ray.shutdown()


if __name__ == "__main__":
    main()
