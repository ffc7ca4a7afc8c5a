"""Any Python value: gathered from all ranks, broadcast to all ranks, and scattered.

torchrun --standalone --nproc-per-node 2 examples/objects.py
"""

from __future__ import annotations

import easydist

state = easydist.ProcessState()
rank, world_size = state.process_index, state.num_processes

lists = easydist.gather_object([f"id-{rank}a", f"id-{rank}b"])
dicts = easydist.gather_object({"rank": rank})

config = [{"lr": 0.1}] if rank == 0 else [None]
easydist.broadcast_object_list(config)

share: list[object] = [None]
easydist.scatter_object_list(share, [f"part {r}" for r in range(world_size)] if rank == 0 else None)

state.print("lists are concatenated:", lists)
state.print("anything else is one item per rank:", dicts)
state.print("everybody has:", easydist.gather_object([config[0]]))
state.print("scattered:", easydist.gather_object(share))
