"""Train with DDP, lose a rank in the middle of a backward pass, and continue with the remaining ones.

easydist run --survivors -n 3 examples/train_survivors.py
"""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import easydist
from easydist import EasydistError, ProcessState

STEPS = 100
BATCH = 48
"""The samples of all ranks together in each step."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the step's samples."""
    state = ProcessState()
    images = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    mine = images[state.process_index :: state.num_processes]
    return mine, mine[:, :10].argmax(-1)


class Training:
    """A model and its optimizer, equal on all ranks, and the number of steps that they have made."""

    def __init__(self) -> None:
        easydist.set_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step, self.loss = 0, torch.tensor(0.0)
        self.replicated: nn.Module | None = None

    def advance(self) -> None:
        """Make one step on all ranks."""
        state = ProcessState()
        if self.replicated is None:  # at the beginning, and for each new set of ranks
            alone = state.num_processes == 1
            self.replicated = (
                self.model if alone else DistributedDataParallel(self.model, process_group=state.process_group)
            )
        images, labels = batch(self.step)
        self.loss = nn.functional.cross_entropy(self.replicated(images), labels)
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()
        self.step += 1

    def resume(self) -> None:
        """Continue on the surviving ranks with the last step that any of them has completed."""
        self.replicated = None
        easydist.recover()
        try:
            # Some ranks may have had all gradients when the rank was lost, and have made the step that others have not.
            steps = easydist.gather_object([self.step])
            mine = self.step, self.model.state_dict(), self.optimizer.state_dict()
            self.step, model, optimizer = easydist.broadcast_object_list([mine], steps.index(max(steps)))[0]
        except EasydistError:  # another rank was lost
            self.resume()
        else:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)


def main() -> None:
    state = ProcessState(cpu=True)
    training = Training()
    if state.num_processes == 3 and state.process_index == 1:  # the rank that the others lose
        weight = next(training.model.parameters())
        weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL) if training.step == 40 else None)
    while training.step < STEPS:
        ranks = state.num_processes
        try:
            training.advance()
        except (EasydistError, RuntimeError):  # gloo and NCCL raise a RuntimeError if a rank is lost
            training.resume()
            if state.num_processes == ranks:  # no rank was lost, so it is an error of the program
                raise
            state.print(f"step {training.step}: {state.num_processes} of {ranks} ranks continue")
    loss = easydist.reduce(training.loss.detach(), "mean")
    state.print(f"step {training.step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
