"""A trainer on a Ray actor and two engines: one of two tensor-parallel ranks, and one in an asyncio program.

The ranks of the first one load a version from an iterator, as vLLM and SGLang do: each takes its half of every tensor,
and holds no copy. The second one goes on answering while a version arrives beside its model. One tensor-parallel rank
ends and is replaced.

pip install '.[ray]'
python examples/ray_engine.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import nn

import easydist
import easydist.ray
from easydist import weights

WIDTH, HIDDEN = 8, 64
QUESTION = torch.linspace(-1, 1, WIDTH)


def network() -> nn.Module:
    """Create the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False))


@ray.remote(num_cpus=0)
class Trainer:
    """The owner of the weights."""

    def __init__(self) -> None:
        self.net = network()
        self.publisher: weights.WeightPublisher | None = None

    def regroup(self) -> int:
        """Continue in the newest generation of the group."""
        group = easydist.ray.group("sync")
        self.publisher = self.publisher or weights.WeightPublisher(self.net, group=group)
        return self.publisher.regroup(group)

    @torch.no_grad()
    def step(self, changed: list[str] | None = None) -> int:
        """Change these entries, or all, and publish them."""
        assert self.publisher is not None
        for name, parameter in self.net.named_parameters():
            if changed is None or name in changed:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return self.publisher.publish(changed=changed)

    @torch.no_grad()
    def answer(self) -> torch.Tensor:
        """Answer the question."""
        return self.net(QUESTION)


@ray.remote(num_cpus=0)
class Half:
    """A tensor-parallel rank, which holds half of the hidden units."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.halves: dict[str, torch.Tensor] = {}
        self.receiver: weights.WeightReceiver | None = None

    def load_weights(self, entries: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's part of each tensor."""
        for name, tensor in entries:
            self.halves[name] = tensor.chunk(2, dim=0 if name == "0.weight" else 1)[self.rank].clone()

    def regroup(self) -> int:
        """Continue in the newest generation of the group; load its version if it is not here."""
        group = easydist.ray.group("sync")
        self.receiver = self.receiver or weights.WeightReceiver(group=group)
        return self.receiver.regroup(group, load=self.load_weights)

    def receive(self) -> int:
        """Load the next version."""
        assert self.receiver is not None
        self.load_weights(self.receiver.stream())
        return self.receiver.version

    def answer(self) -> torch.Tensor:
        """Answer the question together with the other half."""
        part = self.halves["2.weight"] @ (self.halves["0.weight"] @ QUESTION).tanh()
        total: torch.Tensor = easydist.reduce(part, "sum", group=easydist.ray.group("halves"))
        return total

    def end(self) -> None:
        """End this actor's process."""
        ray.actor.exit_actor()


@ray.remote(num_cpus=0)
class Service:
    """An engine in an asyncio program."""

    def __init__(self) -> None:
        self.net = network()
        self.receiver: weights.WeightReceiver | None = None

    async def regroup(self) -> int:
        """Continue in the newest generation of the group."""
        group = easydist.ray.group("sync")
        self.receiver = self.receiver or weights.WeightReceiver(self.net, group=group)
        return await self.receiver.aregroup(group)

    async def receive(self) -> int:
        """Receive the next version, and go on answering meanwhile."""
        assert self.receiver is not None
        return await self.receiver.areceive()

    async def answer(self) -> torch.Tensor:
        """Answer the question; ``areceive`` takes a version into use between two answers."""
        with torch.no_grad():
            return self.net(QUESTION)


def connect(members: list[Any]) -> int:
    """Create new generations of the groups, and return the version that all members have then."""
    easydist.ray.create_group(members, "sync", timeout=60.0)
    easydist.ray.create_group(members[1:3], "halves", timeout=60.0)
    versions = ray.get([member.regroup.remote() for member in members])
    assert len(set(versions)) == 1
    return versions[0]


def update(members: list[Any], changed: list[str] | None = None) -> None:
    """Publish the next version, and print whether all members give the same answer with it."""
    step = members[0].step.remote(changed)
    version, *_ = ray.get([step, *[member.receive.remote() for member in members[1:]]])
    answers = ray.get([member.answer.remote() for member in members])
    agree = all(torch.allclose(answers[0], other, atol=1e-5) for other in answers)
    print(f"version {version}: trainer, halves and service {'agree' if agree else 'differ'}")


def main() -> None:
    """Publish versions, and lose a rank in between."""
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    members = [Trainer.remote(), Half.remote(0), Half.remote(1), Service.remote()]
    connect(members)
    update(members)
    update(members, changed=["2.weight"])

    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(members[2].end.remote())
    for call in [members[0].step.remote(), *[member.receive.remote() for member in members[1:]]]:
        with contextlib.suppress(easydist.PeerLostError, ray.exceptions.RayActorError):
            ray.get(call)
    members[2] = Half.remote(1)
    print(f"a half was lost; its replacement has version {connect(members)}, from the service")
    update(members)
    ray.shutdown()


if __name__ == "__main__":
    main()
