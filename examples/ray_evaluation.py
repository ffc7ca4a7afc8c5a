"""Evaluate a small language model on a Ray cluster, lose a rank halfway, and finish without repeating a text.

python examples/ray_evaluation.py                      # a cluster that begins and ends with this program
RAY_ADDRESS=auto python examples/ray_evaluation.py 2   # two nodes of the cluster to which this machine belongs
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import easydist.ray
from easydist import MetricCollector, ProcessState
from easydist.metrics import distributed_loader

WORDS = ["the", "a", "cat", "dog", "sees", "hears", "old", "small", "house", "and", "."]
TEXTS = 400
SAVE_EVERY = 5


class LanguageModel(nn.Module):
    """A recurrent network that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 1, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, len(WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next word."""
        return self.head(self.memory(self.embedding(tokens))[0])


def texts() -> list[list[int]]:
    """Return the generated texts, the same on all ranks."""
    generator = random.Random(0)
    return [generator.choices(range(len(WORDS)), k=generator.randint(3, 20)) for _ in range(TEXTS)]


@torch.no_grad()
def losses(model: nn.Module, batch: list[list[int]]) -> torch.Tensor:
    """Return the loss of each text, which runs alone, so that no sum depends on the other texts of a batch."""
    found = []
    for text in batch:
        tokens = torch.tensor([[len(WORDS), *text]])  # the first one begins every text
        found.append(nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="sum"))
    return torch.stack(found) if found else torch.zeros(0)


def made() -> nn.Module:
    """Return the model with the same weights on all ranks."""
    easydist.set_seed(0)
    return LanguageModel().eval()


def evaluate(folder: str, killed: int | None = None) -> dict[str, Any] | None:
    """Evaluate the texts that no rank has evaluated; return the columns of all texts on rank 0.

    Args:
        folder: The folder that all nodes see, with the rows that were saved.
        killed: The rank that dies halfway.
    """
    state, model, dataset = ProcessState(cpu=True), made(), texts()
    collector = MetricCollector(len(dataset))
    for path in sorted(Path(folder).glob("*.safetensors"))[state.process_index :: state.num_processes]:
        collector.load_state_dict(easydist.load(path))
    left = collector.missing()
    state.print(f"{len(left)} of {len(dataset)} texts are left for {state.num_processes} ranks")
    loader = distributed_loader([dataset[i] for i in left], 8, with_indices=True, collate_fn=list)
    for step, (indices, batch) in enumerate(loader):
        if state.process_index == killed and step == len(loader) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        collector.update(left[indices], loss=losses(model, batch), words=[len(text) for text in batch])
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            easydist.save(collector.state_dict(), f"{folder}/{state.process_index:05}.safetensors")
    return collector.compute(dst=0)


def perplexity(columns: dict[str, Any]) -> float:
    """Return the perplexity of all words."""
    return math.exp(columns["loss"].double().sum().item() / sum(columns["words"]))


def main() -> None:
    """Evaluate, lose rank 2, replace it, go on, and compare with one process."""
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with tempfile.TemporaryDirectory() as folder, easydist.ray.Ranks(4, nodes=nodes) as ranks:
        try:
            ranks.run(evaluate, folder, killed=2)
        except easydist.PeerLostError as error:
            print(f"rank {error.rank} was lost")
            ranks.restart([error.rank])
        columns = ranks.run(evaluate, folder)[0]
    print(f"perplexity {perplexity(columns):.5f}")
    torch.set_num_threads(1)  # as on the ranks: several threads round otherwise
    alone = losses(made(), texts())
    assert torch.equal(columns["loss"], alone)
    print("equal to one process, to the last digit")
    if find_spec("pandas"):
        import pandas

        table = pandas.DataFrame(columns)
        table["nats"] = table.loss / table.words
        print(table.groupby(pandas.cut(table.words, [0, 5, 10, 20]), observed=True).nats.agg(["count", "mean", "max"]))


if __name__ == "__main__":
    main()
