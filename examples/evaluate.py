"""Train a small classifier on scikit-learn's digits, then evaluate it in batches on every rank and collect the results.

python examples/evaluate.py
torchrun --standalone --nproc-per-node 2 examples/evaluate.py
accelerate launch --config_file examples/accelerate_cpu.yaml examples/evaluate.py  # needs mpirun: docs/launching.md
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import easydist
from easydist import metrics


class Confidence(NamedTuple):
    """The classifier's confidence in its answers."""

    top: torch.Tensor
    margin: torch.Tensor


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1797 images of 8 × 8 pixels, every third one for the test."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float64) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(images)) % 3 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int = 12) -> nn.Module:
    """Train a network with one hidden layer, using Adam."""
    easydist.set_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@torch.no_grad()
def predict(model: nn.Module, indices: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
    """Return a batch's outputs. It runs one image at a time, so that no sum depends on the size of a batch."""
    logits = torch.cat([model(image[None]) for image in images]) if len(images) else images.new_zeros(0, 10)
    top, second = logits.softmax(-1).topk(2).values.unbind(-1)
    return {
        "logits": logits,
        "labels": labels,
        "ids": [f"digit-{index:04d}" for index in indices.tolist()],
        "confidence": Confidence(top, top - second),
    }


def summarize(outputs: dict[str, object]) -> str:
    """Return the accuracy, a line per class, and the classifier's most confident mistake."""
    predictions, labels = outputs["logits"].argmax(-1), outputs["labels"]
    right = predictions == labels
    confidence, ids = outputs["confidence"], outputs["ids"]
    worst = max((i for i in range(len(ids)) if not right[i]), key=lambda i: confidence.margin[i].item())
    accuracy = right.double().mean().item()
    lines = [f"accuracy {accuracy:.17g} of {len(labels)} images", "class  images  recall  precision"]
    for digit in range(10):
        is_digit, is_predicted = labels == digit, predictions == digit
        recall, precision = right[is_digit].double().mean().item(), right[is_predicted].double().mean().item()
        lines.append(f"{digit:5d}  {int(is_digit.sum()):6d}  {recall:.4f}  {precision:9.4f}")
    mistake = f"{int(predictions[worst])} for {int(labels[worst])}, margin {confidence.margin[worst].item():.17g}"
    return "\n".join([*lines, f"most confident mistake: {ids[worst]}: {mistake}"])


def main() -> None:
    """Evaluate on every rank, and once more in one process, which must give exactly the same."""
    state = easydist.ProcessState(cpu=True)
    training, test = load()
    with state.main_process_first():  # one rank trains, and the others get its weights
        model = train(*training.tensors) if state.is_main_process else train(*training.tensors, epochs=0)
    easydist.broadcast(dict(model.named_parameters()))

    collector = easydist.MetricCollector(total=len(test))
    loader = metrics.distributed_loader(test, batch_size=32, with_indices=True)
    for indices, (images, labels) in metrics.progress(loader, "evaluate"):
        collector.update(indices, **predict(model, indices, images, labels))
    outputs = collector.compute()

    state.print(f"images on each rank: {easydist.gather(len(collector)).tolist()}")
    state.print(summarize(outputs))
    if state.is_main_process:
        alone = predict(model, torch.arange(len(test)), *test.tensors)
        assert summarize(outputs) == summarize(alone)
        assert torch.equal(outputs["logits"], alone["logits"])
        print("equal to the single-process run, to the last digit")


if __name__ == "__main__":
    main()
