"""The main process prepares a file and the others read it. A failure there reaches all ranks.

torchrun --standalone --nproc-per-node 2 examples/first_on_main.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import easydist

state = easydist.ProcessState()
folder = [tempfile.mkdtemp() if state.is_main_process else None]
path = Path(easydist.broadcast_object_list(folder)[0]) / "cache.txt"

with state.main_process_first():
    if not path.exists():
        path.write_text(f"made by rank {state.process_index}")
    text = path.read_text()
state.print(easydist.gather_object([text]))

try:
    with state.main_process_first():
        if state.is_main_process:
            raise FileNotFoundError("no dataset here")
except (FileNotFoundError, easydist.RemoteError) as error:
    outcome = f"rank {state.process_index}: {type(error).__name__}: {error}"
state.print("\n".join(easydist.gather_object([outcome])))
