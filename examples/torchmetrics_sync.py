"""Metrics of torchmetrics over all ranks, in one exchange, with the same values on any number of ranks.

python examples/torchmetrics_sync.py
torchrun --standalone --nproc-per-node 3 examples/torchmetrics_sync.py
"""

from __future__ import annotations

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import easydist

CLASSES, SAMPLES = 3, 101


def main() -> None:
    """Update the metrics with each rank's own samples, whose number differs between ranks."""
    state = easydist.ProcessState(cpu=True)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    scores = (torch.randn(SAMPLES, CLASSES, generator=generator) + torch.eye(CLASSES)[labels]).softmax(-1)
    metrics = MetricCollection(
        [MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES), MulticlassConfusionMatrix(CLASSES)]
    )
    with state.split_between_processes({"scores": scores, "labels": labels}) as mine:
        metrics.update(mine["scores"], mine["labels"])
    with easydist.trace() as trace:
        values = easydist.metrics.sync_dist(metrics)
        assert all(torch.equal(values[name], value) for name, value in metrics.compute().items())  # no exchange
    state.print({name: value.tolist() for name, value in values.items()})
    assert [call.operation for call in trace.calls] == ["sync_dist"]
    assert int(values["MulticlassConfusionMatrix"].sum()) == SAMPLES


if __name__ == "__main__":
    main()
