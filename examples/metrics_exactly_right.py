"""The same evaluation with common methods, which give wrong numbers on several ranks, and with correct ones.

torchrun --standalone --nproc-per-node 2 examples/metrics_exactly_right.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import easydist
from easydist import metrics

BATCH_SIZE = 8


class Numbers(NamedTuple):
    """The results of an evaluation."""

    samples: float
    accuracy: float
    f1: float


def data() -> TensorDataset:
    """Return 101 samples: a classifier's prediction for each, and the label. One in five is positive."""
    random = torch.Generator().manual_seed(11)
    labels = torch.rand(101, generator=random) < 0.2
    is_wrong = torch.rand(101, generator=random) < 0.15
    return TensorDataset(labels ^ is_wrong, labels)


def numbers_of(predictions: torch.Tensor, labels: torch.Tensor) -> Numbers:
    """Return accuracy, and F1 of the positive class, of whole columns."""
    hits, positives = int((predictions & labels).sum()), int(predictions.sum()) + int(labels.sum())
    return Numbers(
        len(predictions),
        int((predictions == labels).sum()) / len(predictions),
        2 * hits / positives if positives else 0.0,
    )


def joined(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Numbers:
    """Return the numbers of all rows of all batches."""
    predictions, labels = zip(*batches, strict=True)
    return numbers_of(torch.cat(predictions), torch.cat(labels))


# --- wrong, each in its own way


def padded_by_the_sampler() -> Numbers:
    """Use DistributedSampler, which repeats samples to give all ranks the same number."""
    sampler = DistributedSampler(data(), *world(), shuffle=False)
    loader = DataLoader(data(), BATCH_SIZE, sampler=sampler)
    return joined(easydist.gather(batch) for batch in loader)


def mean_of_means() -> Numbers:
    """Average batches and ranks with equal weights, whatever their number of samples. F1 is not a mean at all."""
    loader = metrics.distributed_loader(data(), BATCH_SIZE)
    batches = [numbers_of(*batch) for batch in loader if len(batch[0])]
    mean = torch.tensor(batches, dtype=torch.float64).mean(0)
    samples = easydist.reduce(sum(batch.samples for batch in batches), "sum")
    return Numbers(samples, *easydist.reduce(mean[1:]).tolist())


def rank_0_only() -> Numbers:
    """Report only the main process's own samples."""
    mine = joined(metrics.distributed_loader(data(), BATCH_SIZE))
    return Numbers(*easydist.broadcast(tuple(mine)))


def prepared_and_gathered() -> Numbers:
    """Use accelerate's loader, which repeats samples until every rank's last batch is full, with a plain gather."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(data(), BATCH_SIZE))
    return joined(accelerator.gather(tuple(batch)) for batch in loader)


# --- right


def gathered_for_metrics() -> Numbers:
    """Use any loader. gather_for_metrics drops repeated samples."""
    loader = Accelerator(cpu=True).prepare(DataLoader(data(), BATCH_SIZE))
    return joined(easydist.gather_for_metrics(tuple(batch), loader=loader) for batch in loader)


def loaded_once() -> Numbers:
    """Use a loader that repeats nothing, so that gather is enough."""
    return joined(easydist.gather(batch) for batch in metrics.distributed_loader(data(), BATCH_SIZE))


def summed() -> Numbers:
    """Sum the components of the numbers. Nothing else travels, once for the whole loop."""
    sums = metrics.Sums()
    for predictions, labels in metrics.distributed_loader(data(), BATCH_SIZE):
        sums.update(
            samples=len(predictions),
            right=predictions == labels,
            hits=predictions & labels,
            predictions=predictions,
            labels=labels,
        )
    total = sums.compute()
    return Numbers(
        total["samples"],
        total["right"] / total["samples"],
        2 * total["hits"] / (total["predictions"] + total["labels"]),
    )


WRONG = {
    "DistributedSampler, gather": padded_by_the_sampler,
    "mean of the batches' means": mean_of_means,
    "rank 0's samples": rank_0_only,
    "accelerate: prepare, gather": prepared_and_gathered,
}
RIGHT = {
    "gather_for_metrics": gathered_for_metrics,
    "distributed_loader, gather": loaded_once,
    "distributed_loader, Sums": summed,
}


def world() -> tuple[int, int]:
    """Return the number of ranks and this rank."""
    state = easydist.ProcessState(cpu=True)
    return state.num_processes, state.process_index


def line(name: str, numbers: Numbers) -> str:
    """Return a row of the table."""
    return f"{name:30}{numbers.samples:8.0f}  {numbers.accuracy:.6f}  {numbers.f1:.6f}"


def main() -> None:
    """Print the numbers of all methods, and make sure that the correct ones are correct."""
    state = easydist.ProcessState(cpu=True)
    want = numbers_of(*data().tensors)
    state.print(f"{f'{state.num_processes} ranks':30} samples  accuracy  F1")
    state.print(line("one process", want))
    ways: dict[str, Callable[[], Numbers]] = WRONG | RIGHT
    for name, way in ways.items():
        got = way()
        state.print(line(name, got) + ("" if got == want else "  wrong"))
        assert got == want or name in WRONG


if __name__ == "__main__":
    main()
