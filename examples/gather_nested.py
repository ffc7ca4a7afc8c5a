"""Gather nested results from every rank, and print them on the main process.

python examples/gather_nested.py
torchrun --standalone --nproc-per-node 2 examples/gather_nested.py
"""

from __future__ import annotations

import torch

import easydist

state = easydist.ProcessState()
rank = state.process_index

results = {
    "loss": torch.tensor(0.5 + rank),
    "scores": [torch.full((1 + rank, 2), float(rank))],  # lengths differ between ranks
    "correct": 3,
}
everything = easydist.gather(results)
total = easydist.reduce(results["correct"], "sum")
names = easydist.gather_object([f"sample-{rank}"])

state.print(f"{state.num_processes} rank(s), names {names}, correct {total}")
leaves, spec = easydist.tree.flatten(everything)
for path, value in zip(spec.paths, leaves, strict=True):
    state.print(path, value.tolist())
