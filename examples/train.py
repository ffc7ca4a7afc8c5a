"""Train with DDP, evaluate exactly after each epoch, write checkpoints, and continue from the last one.

torchrun --standalone --nproc-per-node 2 examples/train.py FOLDER EPOCHS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.utils.data import Dataset, TensorDataset

import easydist
from easydist import metrics
from easydist.metrics import DistributedLoader


def data() -> tuple[Dataset, Dataset]:
    """Return 1797 images of 8 × 8 pixels with their labels, every third one for the evaluation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % 3 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def train(model: nn.Module, optimizer: Optimizer, loader: DistributedLoader) -> float:
    """Train for one epoch; return the mean loss over all samples of all ranks."""
    device = easydist.ProcessState().device
    total = metrics.WeightedMean()
    for batch in metrics.progress(loader, "train"):
        images, labels = easydist.send_to_device(batch, device)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total.update(loss.detach(), weight=len(labels))
    return total.compute()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DistributedLoader) -> float:
    """Return the accuracy over all held-out samples, each of which counts once."""
    device = easydist.ProcessState().device
    sums = metrics.Sums()
    for batch in loader:
        images, labels = easydist.send_to_device(batch, device)
        sums.update(right=model(images).argmax(-1) == labels, samples=len(labels))
    total = sums.compute()
    return total["right"] / total["samples"]


def main(folder: str, epochs: str) -> None:
    state = easydist.ProcessState()  # a GPU for each rank if there are GPUs, else the CPU
    easydist.set_seed(0)
    training, held_out = data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(state.device)
    optimizer = Adam(model.parameters(), lr=3e-3)
    # The step of all ranks together has 64 samples, whatever their number.
    share = 64 // state.num_processes
    loader = metrics.distributed_loader(training, share, shuffle=True, drop_last=True)

    path = Path(folder) / "checkpoint.safetensors"
    # Rank 0 decides: other hosts may see another disk.
    if easydist.broadcast_object_list([path.exists()])[0]:
        found = easydist.load(path) if state.is_main_process else None
        found = easydist.broadcast_object_list([found])[0]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])

    replicated = DistributedDataParallel(model) if state.num_processes > 1 else model
    for epoch in range(loader.epoch, int(epochs)):
        loss = train(replicated, optimizer, loader)
        accuracy = evaluate(model, metrics.distributed_loader(held_out, 64))
        state.print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}")
        if state.is_main_process:  # also the place for wandb.log(…) or a SummaryWriter
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            path.parent.mkdir(parents=True, exist_ok=True)
            easydist.save({name: part.state_dict() for name, part in parts.items()}, path)
        easydist.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
