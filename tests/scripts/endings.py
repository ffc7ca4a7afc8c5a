"""Many ends of processes in which gloo's threads hardly get the core: they still hold the tensors of the last call.

python tests/scripts/endings.py 20 prints the exit statuses. The processes are forked, so that torch is loaded once.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forking import forked, statuses

import easydist


def end(rank: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    easydist.gather(1.0)
    os.sched_setaffinity(0, {0})
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text() == "pt_gloo_runloop\n":
            os.sched_setaffinity(int(thread.name), {0})
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
    dist.all_reduce(torch.ones(1000))  # when this has ended, this thread takes the core from gloo's
    sys.exit()


if __name__ == "__main__":
    print(*statuses([forked(1, end)[0] for _ in range(int(sys.argv[1]))]))
