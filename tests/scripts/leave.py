"""Shows what is left of the process group when everything that easydist registered for the exit has run."""

import atexit
import sys
from pathlib import Path

import torch.distributed as dist

folder, who = sys.argv[1:]


@atexit.register  # the first to register is the last to run
def look():
    Path(folder, f"{who}-{rank}").write_text(str(dist.is_initialized()))
    if dist.is_initialized():
        dist.destroy_process_group()


if who == "mine":
    dist.init_process_group("gloo")

import easydist  # noqa: E402

easydist.wait_for_everyone()
rank = easydist.ProcessState().process_index
