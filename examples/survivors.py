"""Lose a rank in the middle of an evaluation, and finish it with the remaining ones.

easydist run --survivors -n 3 examples/survivors.py
"""

import os
import signal

import torch

import easydist
from easydist import EasydistError, MetricCollector, ProcessState

SAMPLES = torch.arange(60.0)
BATCH = 4


def predict(samples: torch.Tensor) -> torch.Tensor:
    """Return the model's prediction."""
    return samples**2


def todo(done: set[int]) -> list[int]:
    """Return this rank's share of the samples that no remaining rank has predicted."""
    state = ProcessState()
    left = [index for index in range(len(SAMPLES)) if index not in done]
    return left[state.process_index :: state.num_processes]


def everybodys(mine: set[int]) -> set[int]:
    """Return the samples that any rank has predicted."""
    return {index for indices in easydist.gather_object([sorted(mine)]) for index in indices}


def main() -> None:
    state = ProcessState(cpu=True)
    collector = MetricCollector(len(SAMPLES))
    mine: set[int] = set()
    while True:
        try:
            done = everybodys(mine)
        except EasydistError:  # a rank is lost, together with its predictions
            easydist.recover()
            state.print(f"{state.num_processes} ranks go on")
            continue
        if len(done) == len(SAMPLES):
            break
        indices = todo(done)[:BATCH]
        if indices:
            collector.update(indices, prediction=predict(SAMPLES[indices]), label=SAMPLES[indices] ** 2)
            mine |= set(indices)
        if state.num_processes == 3 and state.process_index == 1 and len(mine) == 3 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)
    columns = collector.compute(dst=0)
    if columns is not None:
        right = int((columns["prediction"] == columns["label"]).sum())
        print(f"{right} of {len(SAMPLES)} are right")


if __name__ == "__main__":
    main()
