"""A policy learns on one Ray actor while three others act with its newest weights; one of them is killed and replaced.

A trainer learns to steer a point to the origin, by evolution strategies: it publishes its policy, workers try noisy
copies of it and report their rewards, and the trainer moves towards those with high rewards.

pip install '.[ray]'
python examples/ray_weight_sync.py
"""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from torch import nn

import easydist
import easydist.ray
from easydist import weights

STEPS, WORKERS, TRIES = 40, 3, 16
NOISE, RATE = 0.1, 0.2


def policy() -> nn.Module:
    """Create a policy: position and speed in, acceleration out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


@torch.no_grad()
def reward(net: nn.Module, generator: torch.Generator) -> float:
    """Return how close to the origin a few points come in 20 steps: the mean of minus the squared distance."""
    place, speed, total = torch.randn(8, 2, generator=generator), torch.zeros(8, 2), 0.0
    for _ in range(20):
        speed = 0.8 * speed + 0.2 * net(torch.cat([place, speed], 1)).clamp(-1, 1)
        place = place + speed
        total -= float(place.square().sum(1).mean())
    return total / 20


@torch.no_grad()
def shaken(net: nn.Module, seed: int, scale: float) -> None:
    """Add noise that depends only on the seed, so that it need not travel."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


@ray.remote(num_cpus=0)
class Trainer:
    """The owner of the policy."""

    def __init__(self) -> None:
        self.net = policy()
        self.publisher: weights.WeightPublisher | None = None

    def regroup(self) -> int:
        """Continue in the newest generation of the group."""
        group = easydist.ray.group("sync")
        self.publisher = self.publisher or weights.WeightPublisher(self.net, group=group)
        return self.publisher.regroup(group)

    def publish(self) -> tuple[int, float]:
        """Publish the next version, and return it with the milliseconds that this took."""
        assert self.publisher is not None
        began = time.perf_counter()
        version = self.publisher.publish()
        return version, 1000 * (time.perf_counter() - began)

    def learn(self, tried: list[tuple[int, float, float]]) -> None:
        """Move along each noise in proportion to its advantage over its opposite."""
        spread = torch.tensor([better - worse for _, better, worse in tried]).std().clamp(min=1e-6)
        for seed, better, worse in tried:
            shaken(self.net, seed, RATE * float((better - worse) / spread) / len(tried))


@ray.remote(num_cpus=0)
class Worker:
    """A worker that acts with the newest weights."""

    def __init__(self) -> None:
        self.net = policy()
        self.receiver: weights.WeightReceiver | None = None

    def regroup(self) -> int:
        """Continue in the newest generation of the group."""
        group = easydist.ray.group("sync")
        self.receiver = self.receiver or weights.WeightReceiver(self.net, group=group)
        return self.receiver.regroup(group)

    def receive(self) -> int:
        """Receive the next version, and return its number."""
        assert self.receiver is not None
        return self.receiver.receive()

    def act(self, first_seed: int) -> tuple[float, list[tuple[int, float, float]]]:
        """Return the policy's reward, and the rewards of noisy copies: both ways along each noise."""
        tried = []
        for seed in range(first_seed, first_seed + TRIES):
            found = []
            for scale in (NOISE, -NOISE):
                shaken(self.net, seed, scale)
                found.append(reward(self.net, torch.Generator().manual_seed(seed)))
                shaken(self.net, seed, -scale)
            tried.append((seed, found[0], found[1]))
        return reward(self.net, torch.Generator().manual_seed(0)), tried


def connect(trainer: Any, workers: list[Any]) -> tuple[int, float]:
    """Create a new generation of the group. Return the version that all members have, and the seconds taken."""
    began = time.perf_counter()
    members = [trainer, *workers]
    easydist.ray.create_group(members, "sync", timeout=60.0)
    versions = ray.get([member.regroup.remote() for member in members])
    assert len(set(versions)) == 1
    return versions[0], time.perf_counter() - began


def together(calls: list[Any]) -> list[Any]:
    """Return the results of all calls. If a member was lost, raise one error after all calls have ended."""
    results, lost = [], None
    for call in calls:
        try:
            results.append(ray.get(call))
        except (easydist.PeerLostError, ray.exceptions.RayActorError) as error:
            lost = error
    if lost is not None:
        raise lost
    return results


def main() -> None:
    """Train, and lose a worker on the way."""
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    trainer, workers = Trainer.remote(), [Worker.remote() for _ in range(WORKERS)]
    spare = Worker.remote()
    connect(trainer, workers)
    for step in range(STEPS):
        if step == STEPS // 2:
            ray.kill(workers[1])
        try:
            (version, took), *_ = together([trainer.publish.remote(), *[one.receive.remote() for one in workers]])
            seeds = [(step * WORKERS + i) * TRIES for i in range(WORKERS)]
            acted = together([one.act.remote(seed) for one, seed in zip(workers, seeds, strict=True)])
        except (easydist.PeerLostError, ray.exceptions.RayActorError):
            workers[1] = spare
            version, seconds = connect(trainer, workers)
            print(f"worker 1 was lost; its replacement has version {version}, after {seconds:.2f} s")
            continue
        if step % 5 == 0 or step == STEPS - 1:
            print(f"version {version:2} on {WORKERS} workers in {took:5.1f} ms   reward {acted[0][0]:8.3f}")
        ray.get(trainer.learn.remote([one for _, tried in acted for one in tried]))
    ray.shutdown()


if __name__ == "__main__":
    main()
