"""Many ends of processes in which gloo's threads lose the core after the last call, whose tensors they still hold.

python tests/scripts/endings.py 20 prints the exit statuses. The processes are forked, so that torch is loaded once.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forking import forked, statuses

import easydist
from easydist.liveness import background


def end(rank: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    easydist.gather(1.0)
    os.sched_setaffinity(0, {0})
    paths = [path for path in Path("/proc/self/task").iterdir() if "gloo_runloop" in (path / "comm").read_text()]
    threads = [int(path.name) for path in paths]
    for thread in threads:
        os.sched_setaffinity(thread, {0})
    schedule(threads, os.SCHED_IDLE)
    look = background._are_running

    def look_at_them(name: str) -> bool:
        schedule(threads, os.SCHED_OTHER)  # from now on they only compete with the load of the machine
        return look(name)

    background._are_running = look_at_them
    dist.all_reduce(torch.ones(1000))  # when this has ended, this thread takes the core from gloo's
    sys.exit()


def schedule(threads: list[int], policy: int) -> None:
    for thread in threads:
        os.sched_setscheduler(thread, policy, os.sched_param(0))


if __name__ == "__main__":
    print(*statuses([forked(1, end)[0] for _ in range(int(sys.argv[1]))]))
