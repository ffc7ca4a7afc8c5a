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


def missing(collector: MetricCollector) -> torch.Tensor:
    """Return the samples that no remaining rank has predicted."""
    while True:
        try:
            return collector.missing()
        except EasydistError:  # a rank is lost, together with its predictions
            easydist.recover()
            ProcessState().print(f"{ProcessState().num_processes} ranks go on")


def main() -> None:
    state = ProcessState(cpu=True)
    collector = MetricCollector(len(SAMPLES))
    while len(left := missing(collector)):
        indices = left[state.process_index :: state.num_processes][:BATCH]
        samples = SAMPLES[indices]
        collector.update(indices, prediction=predict(samples), label=samples**2)
        is_victim = state.num_processes == 3 and state.process_index == 1
        if is_victim and len(collector) == 3 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)
    columns = collector.compute(dst=0)
    if columns is not None:
        right = int((columns["prediction"] == columns["label"]).sum())
        print(f"{right} of {len(SAMPLES)} are right")


if __name__ == "__main__":
    main()
