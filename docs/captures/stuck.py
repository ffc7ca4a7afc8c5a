"""A job that hangs on purpose: rank 2 waits for a batch that its loader never delivers."""

import queue

import torch

import easydist

state = easydist.ProcessState(cpu=True)
batches: queue.Queue[torch.Tensor] = queue.Queue()
for value in range(2 if state.process_index == 2 else 3):
    batches.put(torch.full((8,), float(value)))

for _ in range(3):
    batch = batches.get()
    loss = easydist.reduce(batch.mean(), "mean")
    state.print(f"loss {loss.item()}")
