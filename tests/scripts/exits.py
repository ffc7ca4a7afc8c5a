"""Launches of 4 ranks, one after another, which end without any cleanup; forked, so that torch is loaded once.

Each rank leaves through the interpreter's own shutdown; where one is to be the last, it has seen the end of the others.
"""

import gc
import os
import sys

import torch
from forking import free_port, statuses

import easydist

WORLD_SIZE = 4


def launch(last: int | None) -> bool:
    """Fork the ranks; True in a rank. The pipe ends when all of them but the last have ended."""
    reading, writing = os.pipe()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": WORLD_SIZE}
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                {name: str(value) for name, value in (variables | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            )
            os.close(writing if rank == last else reading)
            work(rank, reading if rank == last else None)
            return True
        pids.append(pid)
    os.close(reading)
    os.close(writing)
    print(last, *statuses(pids), flush=True)
    return False


def work(rank: int, others: int | None) -> None:
    assert easydist.gather_object([rank]) == list(range(WORLD_SIZE))
    assert easydist.broadcast(torch.full((1000,), rank))[-1] == 0  # runs on gloo's own threads
    if others is not None:
        assert os.read(others, 1) == b""


gc.collect()
gc.freeze()  # what was loaded before the fork need not be copied to be collected: an exit takes a third of the time
if __name__ == "__main__" and not any(launch(last) for last in [None] * 14 + [0, 3] * 3):
    sys.exit()
