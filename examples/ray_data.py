"""Evaluate shards of Ray Data on ranks of a Ray cluster, and on Ray Train's workers; each sample counts once.

python examples/ray_data.py                     # a cluster that begins and ends with this program
RAY_ADDRESS=auto python examples/ray_data.py    # the cluster to which this machine belongs

Needs Ray Data and Ray Train: pip install 'ray[data,train]'.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import ray.data
import ray.train.torch
import torch
from torch import nn

import easydist.ray

SAMPLES, RANKS = 1001, 3
CPU = {"CPU": 0.25}  # of each rank: Ray Data's tasks need CPUs, too


def with_features(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a batch of Ray Data with the features of each sample, and its target."""
    return {**batch, "x": np.sin(np.outer(batch["id"], np.arange(1, 9))), "y": np.cos(batch["id"])}


def dataset() -> ray.data.Dataset:
    """Return the samples, each with its index as ``id``, in blocks of about 50."""
    return ray.data.range(SAMPLES, override_num_blocks=20).map_batches(with_features)


@torch.no_grad()
def evaluate(batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Evaluate the batches of this rank; return how many samples each rank had, and the mean loss of all samples."""
    easydist.set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    collector = easydist.MetricCollector(total=SAMPLES)
    for batch in batches:
        predicted = torch.cat([model(x) for x in batch["x"]])  # one by one: no sum depends on the size of a batch
        collector.update(batch["id"], loss=(predicted - batch["y"]).square())
    mine = len(collector)
    return {"samples": easydist.gather(mine).tolist(), "loss": collector.compute()["loss"].mean().item()}


def on_rank(shards: list[ray.data.DataIterator]) -> dict[str, Any]:
    """Evaluate the shard of this rank."""
    shard = shards[easydist.ProcessState(cpu=True).process_index]
    return evaluate(shard.iter_torch_batches(batch_size=32))


def in_worker() -> dict[str, Any]:
    """Evaluate the shard of this worker of Ray Train."""
    shard = ray.train.get_dataset_shard("test")
    return evaluate(shard.iter_torch_batches(batch_size=32))


class EverySample(ray.train.DataConfig):
    """Splits datasets as they are: Ray Train's own class drops samples to make the shards equally long."""

    def configure(
        self, datasets: dict[str, ray.data.Dataset], world_size: int, *_: object, **__: object
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Return the shards of each worker by the datasets' names."""
        shards = {name: one.streaming_split(world_size) for name, one in datasets.items()}
        return [{name: shards[name][rank] for name in shards} for rank in range(world_size)]


def main() -> None:
    """Evaluate on ranks, on Ray Train's workers, and in this process."""
    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    with easydist.ray.Ranks(RANKS, resources=CPU) as ranks:
        found = ranks.run(on_rank, dataset().streaming_split(RANKS))
    assert found == RANKS * found[:1]
    print(f"ranks: {found[0]['samples']} samples, loss {found[0]['loss']:.6f}")
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            in_worker,
            scaling_config=ray.train.ScalingConfig(num_workers=RANKS, resources_per_worker=CPU),
            run_config=ray.train.RunConfig(storage_path=folder),
            datasets={"test": dataset()},
            dataset_config=EverySample(),
        )
        workers = trainer.fit().return_value  # that of rank 0
    print(f"Ray Train's workers: {workers['samples']} samples, loss {workers['loss']:.6f}")
    torch.set_num_threads(1)  # as on the ranks
    alone = evaluate(dataset().iter_torch_batches())
    assert alone["loss"] == found[0]["loss"] == workers["loss"]
    print("equal to one process, to the last digit")


if __name__ == "__main__":
    main()
