"""Ranks that are stopped at random moments of a call over gloo, until the others have given it up, and then go on.

python tests/scripts/stops.py SIZE STOPS SEED prints "well", or where a rank hangs. The same seed stops the same ranks
after the same times.
"""

import contextlib
import faulthandler
import os
import random
import select
import signal
import sys
import time

import torch
from forking import forked
from launching import within

import easydist
from easydist import EasydistError

LIMIT = 0.3
"""Seconds that a call may take."""


class Ranks:
    """The ranks of a world, and the pipes between them and the process that stops them."""

    def __init__(self, size: int) -> None:
        self.told, self.go = os.pipe(), [os.pipe() for _ in range(size)]
        self.pids = forked(size, self.play, whole=(), EASYDIST_SHM=0)

    def play(self, rank: int) -> None:
        faulthandler.register(signal.SIGUSR1)
        tree = {str(number): torch.ones(4) for number in range(10)}
        while True:
            easydist.wait_for_everyone()
            self.tell_and_wait(rank)
            with contextlib.suppress(EasydistError):  # of ranks that were missing one
                easydist.reduce(tree, timeout=LIMIT)
            self.tell_and_wait(rank)

    def tell_and_wait(self, rank: int) -> None:
        os.write(self.told[1], b".")
        os.read(self.go[rank][0], 1)

    def have_come(self, count: int) -> bool:
        """Wait until so many ranks have come; return False if that takes too long."""
        deadline = time.monotonic() + within(20)
        while count and time.monotonic() < deadline:
            if select.select([self.told[0]], [], [], 1)[0]:
                count -= len(os.read(self.told[0], count))
        return not count

    def continue_all(self) -> None:
        for _, pipe in self.go:
            os.write(pipe, b".")

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGUSR1)  # where they are, if one hangs
        time.sleep(0.2)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


def outcome(ranks: Ranks, stops: int, draw: random.Random) -> str:
    """Stop ranks, and return what has happened."""
    for number in range(stops):
        if not ranks.have_come(len(ranks.pids)):
            return f"not all ranks met again after {number} stops"
        ranks.continue_all()
        victim = draw.choice(ranks.pids)
        time.sleep(draw.random() * 0.002)
        os.kill(victim, signal.SIGSTOP)
        others = ranks.have_come(len(ranks.pids) - 1)
        time.sleep(draw.choice([0, 0.001, 0.05]))
        os.kill(victim, signal.SIGCONT)
        if not (others and ranks.have_come(1)):
            return f"a rank hangs after {number + 1} stops"
        ranks.continue_all()
    return "well"


if __name__ == "__main__":
    size, stops, seed = map(int, sys.argv[1:])
    ranks = Ranks(size)
    print(outcome(ranks, stops, random.Random(seed)), flush=True)
    ranks.end()
