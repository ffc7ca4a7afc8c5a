"""Send weights to ranks that do not know their structure: first into new memory, then into the same tensors.

torchrun --standalone --nproc-per-node 2 examples/tensor_dict.py
"""

from __future__ import annotations

import torch

import easydist

state = easydist.ProcessState()
rank, world_size = state.process_index, state.num_processes
embedding = torch.arange(4.0).view(2, 2)
weights = {"step": 1, "embedding": embedding, "head": {"weight": embedding, "scale": torch.tensor(0.5).bfloat16()}}

mine = easydist.broadcast_tensor_dict(weights if rank == 0 else None)
print(f"rank {rank} has {mine['embedding'].tolist()}, tied: {mine['head']['weight'] is mine['embedding']}")

embedding.mul_(10)
before = mine["embedding"].data_ptr()
mine = easydist.broadcast_tensor_dict(weights | {"step": 2} if rank == 0 else None, into=mine)
in_place = mine["embedding"].data_ptr() == before
print(f"rank {rank} has {mine['embedding'].tolist()} in step {mine['step']}, in place: {in_place}")

if world_size > 1:
    if rank == 0:
        easydist.send_tensor_dict({"note": "for the last rank", "ids": torch.arange(3)}, world_size - 1)
    elif rank == world_size - 1:
        print(f"rank {rank} got {easydist.recv_tensor_dict(0)}")
