"""The plan of a storm: a program of random steps, and the signals that strike its ranks. All of it follows from a case.

A case is the world size, the kind of group, and a seed, such as ``4/comm_shm/17``. Kinds are shm and gloo (the verbs
over a default group), torch_shm (verbs and torch's own calls over a default group "easydist_shm"), comm_shm and
comm_gloo (a communicator).
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

STEPS = 24
"""The steps of a program; a rank that fails in one continues with a later one."""

STRUCK = 14
"""The first steps, in which faults begin, so that the last ones show that the ranks are in step again."""

SIZES = [0, 1, 3, 1000, 30_000, 80_000]
"""Numbers of elements: nothing, one step of shared memory, several slots."""

_VERBS = ["verb"] * 6 + ["pair"]
_COMM = ["burst"] * 3 + ["split", "window", "registered", "objects", "message", "verb"]
KINDS = {
    "shm": [*_VERBS, "coordinator"],
    "gloo": [*_VERBS, "coordinator"],
    "torch_shm": ["verb", "pair", "burst", "burst"],
    "comm_shm": _COMM,
    "comm_gloo": _COMM,
}
"""The steps over each kind of group, by the frequency in which they are drawn."""


class Step(NamedTuple):
    """One step of the program; ranks are taken modulo the number of ranks that are left.

    Attributes:
        case: The case.
        number: The number in the program.
        kind: The function that plays it.
        numel: The number of elements of its tensors.
        root: A rank.
        peer: The distance from the root to another rank.
    """

    case: str
    number: int
    kind: str
    numel: int
    root: int
    peer: int

    def draw(self, *who: object) -> random.Random:
        """Return the choices of this step: of all ranks, or of one of them."""
        return random.Random(f"{self.case}/{self.number}/{who}")


class Fault(NamedTuple):
    """A signal that strikes a rank.

    Attributes:
        rank: The rank.
        signal: KILL, STOP or INT.
        place: Where it begins to count the functions that it calls: in a "step", or in a "recovery".
        number: The number of that step or recovery.
        calls: The number of functions that it calls before it tells the controller.
        waits: True if it waits there for the signal, else it goes on and the signal strikes a moment later.
        until: After STOP it continues once all others have "raised" or "recovered", or one has "moved".
    """

    rank: int
    signal: str
    place: str
    number: int
    calls: int
    waits: bool
    until: str


class Plan:
    """The choices of a case."""

    def __init__(self, case: str) -> None:
        size, self.kind, _ = case.split("/")
        self.case, self.size = case, int(size)
        draw = random.Random(case)
        self.has_agent, self.reaps = draw.random() < 0.5, draw.random() < 0.5
        self.shares = self.kind != "gloo" and (self.kind != "comm_gloo" or draw.random() < 0.5)
        self.goes_on = self.kind in ("shm", "gloo") and draw.random() < 0.3
        kills = self.size - 1 if draw.random() < 0.25 else draw.randint(0, 2)
        signals = ["KILL"] * kills + draw.choices(["INT", "STOP"], [2, 1], k=draw.randint(0 if kills else 1, 2))
        victims = draw.sample(range(self.size), self.size - 1)
        self.faults = [_fault(draw, signal, victims[i % len(victims)]) for i, signal in enumerate(signals)]
        self.has_stop = "STOP" in signals

    def of(self, rank: int) -> list[Fault]:
        """Return the faults of a rank, in their order; it is killed last."""
        return sorted((fault for fault in self.faults if fault.rank == rank), key=lambda fault: fault.signal == "KILL")

    def step(self, number: int) -> Step:
        draw = random.Random(f"{self.case}/{number}")
        left_out = [] if self.shares else ["window", "registered"]
        left_out += ["coordinator"] if self.goes_on else []
        left_out += ["verb"] if self.has_stop and self.kind.startswith("comm") else []  # it ignores the limit
        kinds = [kind for kind in KINDS[self.kind] if kind not in left_out]
        return Step(self.case, number, draw.choice(kinds), draw.choice(SIZES), draw.randrange(60), draw.randrange(59))


def _fault(draw: random.Random, signal: str, rank: int) -> Fault:
    place = "recovery" if draw.random() < 0.3 else "step"
    number = draw.randint(1, 2) if place == "recovery" else draw.randint(1, STRUCK)
    calls = int(math.exp(draw.uniform(0, math.log(4000))))
    until = draw.choice(["raised", "raised", "recovered", "moved"])
    return Fault(rank, signal, place, number, calls, draw.random() < 0.5, until)
