"""A driver sends steps through one queue, and gets the answers of all ranks through others.

python examples/message_queue.py
torchrun --standalone --nproc-per-node 3 examples/message_queue.py
"""

from __future__ import annotations

import torch

import easydist
from easydist.queue import MessageQueue

STEPS = 3

state = easydist.ProcessState()
rank = state.process_index
steps = MessageQueue.create_from_process_group(state.process_group, max_chunk_bytes=1 << 20, max_chunks=10)
answers, handles = MessageQueue.create_from_process_group_single_reader(
    state.process_group, max_chunk_bytes=1 << 20, max_chunks=10
)
readers = [MessageQueue.create_from_handle(handle, rank=0) for handle in handles]  # on rank 0

for number in range(STEPS):
    step = steps.broadcast_object({"number": number, "x": torch.ones(2) * number} if rank == 0 else None)
    answers.enqueue((rank, step["number"], float(step["x"].sum())))
    if rank == 0:
        print([reader.dequeue(timeout=60) for reader in readers])

state.wait_for_everyone()
for queue in (steps, answers, *readers):
    queue.close()
