"""Evaluate the classifier of evaluate.py on four ranks of a Ray cluster, of which one is killed and replaced.

python examples/ray_ranks.py                      # a cluster that begins and ends with this program
RAY_ADDRESS=auto python examples/ray_ranks.py     # the cluster to which this machine belongs
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import easydist.ray
from easydist import metrics


def evaluated(killed: int | None = None) -> tuple[int, float]:
    """Return the number of images that this rank has seen, and the accuracy over the images of all ranks."""
    import evaluate  # the ranks have a copy of this folder

    state = easydist.ProcessState(cpu=True)
    training, test = evaluate.load()
    model = evaluate.train(*training.tensors, epochs=12 if state.is_main_process else 0)
    easydist.broadcast(dict(model.named_parameters()))
    collector = easydist.MetricCollector(total=len(test))
    for indices, (images, labels) in metrics.distributed_loader(test, batch_size=32, with_indices=True):
        if state.process_index == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        collector.update(indices, **evaluate.predict(model, indices, images, labels))
    outputs = collector.compute()
    return len(collector), (outputs["logits"].argmax(-1) == outputs["labels"]).double().mean().item()


def show(results: list[tuple[int, float]]) -> None:
    """Print what all ranks have found."""
    counts, accuracies = zip(*results, strict=True)
    assert len(set(accuracies)) == 1
    print(f"{list(counts)} images, accuracy {accuracies[0]:.17g}")


def main() -> None:
    """Evaluate, lose a rank, replace it, and evaluate again."""
    folder = {"working_dir": str(Path(__file__).parent)}
    with easydist.ray.Ranks(4, runtime_env=folder) as ranks:
        show(ranks.run(evaluated))
        try:
            ranks.run(evaluated, killed=2)
        except easydist.PeerLostError as error:
            print(f"rank {error.rank} was lost")
            ranks.restart([error.rank])
        show(ranks.run(evaluated))


if __name__ == "__main__":
    main()
