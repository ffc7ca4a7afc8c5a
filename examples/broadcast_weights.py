"""Give all ranks the weights of one: as new tensors, in a model on the meta device, and from a checkpoint.

torchrun --standalone --nproc-per-node 2 examples/broadcast_weights.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import easydist
from easydist import weights

state = easydist.ProcessState()
rank = state.process_index


def model(device: str) -> nn.Module:
    """Create a model that is the same on every rank, except for its values."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 8, device=device), nn.Linear(8, 2, device=device))


trained = model("cpu")
received = weights.broadcast_state_dict(trained if rank == 0 else None)
print(f"rank {rank}: {len(received)} tensors, sum {sum(float(one.sum()) for one in received.values()):.4f}")

empty = model("meta")
weights.broadcast_state_dict(trained if rank == 0 else empty, dtype=torch.bfloat16, verify=True)
mine = trained if rank == 0 else empty
print(f"rank {rank}: first weight {mine[0].weight[0, 0].item():.2f}, {mine[0].weight.dtype}, {mine[0].weight.device}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    if rank == 0:
        easydist.save(trained.state_dict(), path)
    loaded = model("meta")
    weights.broadcast_checkpoint(path, loaded)  # only rank 0 reads the path
    same = all(torch.equal(one, other) for one, other in zip(loaded.parameters(), received.values(), strict=True))
    print(f"rank {rank}: loaded {'the same' if same else 'other'} weights")
