"""Compare ways to send a tensor dict from one Ray actor to others, easydist's and Ray's own, on the same data.

python benchmarks/weights.py [--receivers 1 3] [--repeats 15]

The ways take turns. It prints the median in milliseconds, from the driver's calls to their ends, and the speed
relative to one broadcast per tensor: the median of the turns, the least and the most. Every way is checked once for
exact bytes. Below each table are the bounds, and whether they hold. One broadcast per tensor is the method of
ColossalAI, here without the names and shapes that it sends first. The receivers of ``ray.put`` get read-only views of
the object store; the copy that a model would then need is not counted. Every way includes Ray's own calls of the
actors, which the last line shows alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from bounds import Bound, show
from ray.experimental.collective import create_collective_group, destroy_collective_group

import easydist.ray

CASES = {"200 x 4 KB": (200, 2048), "64 x 4 MB": (64, 2 << 20)}
"""The number of bfloat16 tensors, and the elements of each."""

OURS, COPY = "easydist, into existing", "a copy in each actor"
BASE, EMPTY = "per tensor, ray.util.collective", "calls of the actors alone"

State = dict[str, torch.Tensor]


def tensors(case: str, fill: int) -> State:
    """Return the data of a case, filled with some values."""
    count, numel = CASES[case]
    return {f"layer.{i}": torch.full((numel,), float(fill * i % 7), dtype=torch.bfloat16) for i in range(count)}


class Member:
    """An actor. Rank 0 has the weights."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def prepare(self, case: str) -> None:
        """Create the data, and the tensors that receive it."""
        self.weights = tensors(case, 1 if self.rank == 0 else 0)
        self.source = tensors(case, 1)
        self.got: State = {}

    def easydist_into(self) -> None:
        """Broadcast into existing tensors."""
        self.got = easydist.ray.ray_broadcast_tensor_dict(self.weights, group_name="ours")

    def easydist_new(self) -> None:
        """Broadcast into new tensors."""
        mine = self.weights if self.rank == 0 else {}
        self.got = easydist.ray.ray_broadcast_tensor_dict(mine, group_name="ours")

    def per_tensor(self) -> None:
        """Broadcast each tensor on its own, as ColossalAI does."""
        from ray.util import collective

        for one in self.weights.values():
            collective.broadcast(one.view(torch.uint8), 0, "rays")
        self.got = self.weights

    def give(self) -> State:
        """Return the weights as an object of Ray."""
        return self.weights

    @ray.method(tensor_transport="gloo")
    def give_directly(self) -> State:
        """Return the weights. Their tensors stay here until an actor takes them."""
        return self.weights

    def copied(self) -> None:
        """Copy as many bytes as a receiver gets, within this process."""
        for name, one in self.source.items():
            self.weights[name].copy_(one)
        self.got = self.weights

    def nothing(self) -> None:
        """Do nothing, which shows the cost of a call."""

    def take(self, state: State) -> None:
        """Receive that object."""
        self.got = state

    def is_exact(self, case: str) -> bool:
        """True if the last way delivered the values of rank 0."""
        want = tensors(case, 1)
        return self.rank == 0 or all(torch.equal(self.got[name], one) for name, one in want.items())

    def forget(self) -> None:
        """Reset the receivers for the next way."""
        self.got = {}
        for one in self.weights.values() if self.rank else ():
            one.zero_()


def ways(members: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return each way as one call of the driver."""

    def all_of(name: str) -> Callable[[], Any]:
        return lambda: ray.get([getattr(one, name).remote() for one in members])

    def by_object(name: str) -> Callable[[], Any]:
        def give_and_take() -> None:
            state = getattr(members[0], name).remote()
            ray.get([one.take.remote(state) for one in members[1:]])

        return give_and_take

    return {
        OURS: all_of("easydist_into"),
        "easydist, new tensors": all_of("easydist_new"),
        BASE: all_of("per_tensor"),
        "ray.put of the dict": by_object("give"),
        "Ray Direct Transport, gloo": by_object("give_directly"),
        COPY: all_of("copied"),
        EMPTY: all_of("nothing"),
    }


def measured(members: list[Any], case: str, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way in each turn."""
    ray.get([one.prepare.remote(case) for one in members])
    every = ways(members)
    for name, way in every.items():
        ray.get([one.forget.remote() for one in members])
        way()
        exact = name == EMPTY or all(ray.get([one.is_exact.remote(case) for one in members]))
        assert exact, f"{name} brought other bytes"
    found: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(repeats):
        for name, way in every.items():
            began = time.perf_counter()
            way()
            found[name].append(1000 * (time.perf_counter() - began))
    return found


def row(name: str, took: list[float], base: list[float]) -> str:
    """Return a line of the table."""
    ratios = sorted(theirs / ours for ours, theirs in zip(took, base, strict=True))
    times = f"{statistics.median(ratios):6.1f} x  ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    return f"  {name:34}{statistics.median(took):9.1f} ms {times}"


def bounds(found: dict[str, list[float]]) -> Iterator[Bound]:
    """Yield the bounds of a case: no other way is faster, and it takes not much longer than a copy of the bytes."""
    took = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in took.items():
        if not name.startswith("easydist") and name not in (COPY, EMPTY):
            yield Bound(f"{OURS}: times as fast as {name}", seconds / took[OURS], 1)
    yield Bound(f"{OURS}: times {COPY}", took[OURS] / took[COPY], 2.5, is_least=False)


def main() -> None:
    """Measure all cases and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, Ray {ray.__version__}")
    for receivers in options.receivers:
        actor = ray.remote(num_cpus=0)(Member)
        members = [actor.remote(rank, receivers + 1) for rank in range(receivers + 1)]
        easydist.ray.create_group(members, "ours")
        rays = create_collective_group(members, "gloo", "rays")
        for case in CASES:
            found = measured(members, case, options.repeats)
            print(f"\n{case}, {receivers} receivers")
            for name, took in found.items():
                print(row(name, took, found[BASE]))
            show(bounds(found))
        destroy_collective_group(rays)
        for one in members:
            ray.kill(one)
    ray.shutdown()


if __name__ == "__main__":
    main()
