"""DDP on one host, with gradients through shared memory.

torchrun --standalone --nproc-per-node 2 examples/ddp_shared_memory.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import easydist
import easydist.process_group  # registers the backend

dist.init_process_group("easydist_shm")
state = easydist.ProcessState()
easydist.set_seed(0)

model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(state.process_index)

for step in range(200):
    x = torch.randn(32, 8, generator=data)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        state.print(f"step {step + 1}: loss {easydist.reduce(loss.detach(), 'mean'):.3f}")

weights = easydist.gather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
state.print("all ranks have the same weights:", bool((weights == weights[0]).all()))
dist.destroy_process_group()
