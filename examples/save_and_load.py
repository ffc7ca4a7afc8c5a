"""A checkpoint of model, optimizer and progress, and the model alone for other programs; one rank writes, all read.

torchrun --standalone --nproc-per-node 2 examples/save_and_load.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import easydist

state = easydist.ProcessState()
easydist.set_seed(0, device_specific=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())

model(torch.ones(1, 4)).sum().backward()
optimizer.step()

folder = easydist.broadcast_object_list([tempfile.mkdtemp() if state.is_main_process else None])[0]
path, weights_path = Path(folder) / "checkpoint.safetensors", Path(folder) / "model.safetensors"
if state.is_main_process:
    easydist.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, path)
    easydist.save(model.state_dict(), weights_path)  # keeps the names that other programs look for
easydist.wait_for_everyone()

checkpoint = easydist.load(path)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])

weights = easydist.gather(model.weight.detach().flatten()[None])
state.print("step:", checkpoint["step"])
state.print("for other programs:", [entry.name for entry in easydist.read_header(weights_path).entries])
state.print("all ranks have the same weights:", bool((weights == weights[0]).all()))

easydist.wait_for_everyone()
if state.is_main_process:
    path.unlink()
    weights_path.unlink()
    path.parent.rmdir()
