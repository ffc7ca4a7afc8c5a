"""Launches of 4 ranks that end without any cleanup. They are forked, so that torch is loaded once.

python tests/scripts/exits.py none none 0 3 …

A case is the rank that must end last, if any. Each rank leaves through the interpreter's own shutdown, and the last one
has seen the end of the others.
"""

import os
import sys

import torch
from forking import forked, side_by_side, statuses

import easydist

WORLD_SIZE = 4


def launch(case: str) -> None:
    """Fork the ranks. The pipe ends when all of them but the last have ended."""
    reading, writing = os.pipe()
    last = int(case) if case.isdigit() else None

    def live(rank: int) -> None:
        os.close(writing if rank == last else reading)
        work(rank, reading if rank == last else None)

    pids = forked(WORLD_SIZE, live, whole=None)
    os.close(reading)
    os.close(writing)
    os.write(1, (" ".join([case, *map(str, statuses(pids))]) + "\n").encode())


def work(rank: int, others: int | None) -> None:
    assert easydist.gather_object([rank]) == list(range(WORLD_SIZE))
    assert easydist.broadcast(torch.full((1000,), rank))[-1] == 0  # runs on gloo's own threads
    if others is not None:
        assert os.read(others, 1) == b""


if __name__ == "__main__":
    side_by_side(3, sys.argv[1:], launch)
