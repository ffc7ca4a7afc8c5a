"""Calls in which one rank is odd, and data that cannot travel."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from trees import Batch

import easydist
from easydist import DisagreementError, ProcessState, RemoteError

SIZES = (2, 3, 4)

DIFFER, FAULT, MISUSE = DisagreementError, RemoteError, ValueError


class Rank(NamedTuple):
    """One rank's view of a case: its rank, the world size, the odd rank, and the verb."""

    rank: int
    size: int
    odd: int
    verb: Callable[..., Any] | None = None

    def call(self, *args, **options):
        """Return the call to make. Its arguments are compared before and after."""
        return partial(self.verb, *args, **options)

    def pick(self, usual, odd):
        return odd if self.rank == self.odd else usual

    @property
    def other(self):
        """A rank that is not the odd one."""
        return (self.odd + 1) % self.size


def enter():
    with ProcessState().main_process_first():
        pass


def pickling(allowed, verb, *args):
    """Call ``verb`` while pickle is allowed, or denied."""
    easydist.allow_pickle(allowed)
    try:
        return verb(*args)
    finally:
        easydist.allow_pickle(True)


class Broken(Mapping):
    """A mapping whose iteration ends in an error."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, key):
        return torch.ones(1)

    def __len__(self):
        return 2

    def __iter__(self):
        yield "first"
        raise self.error


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Nameless(float):
    def __repr__(self):
        raise KeyError("no repr")


class Sealed:
    def __reduce__(self):
        raise OSError("sealed")


class Same:
    """A key whose instances all print alike."""

    def __repr__(self):
        return "same"


def alike():
    return {Same(): ROW, Same(): ROW + 1}


class Cursed:
    def __index__(self):
        raise OSError("cursed")


class Elusive:
    @property
    def __class__(self):
        raise OSError("gone")


class Untrue:
    def __bool__(self):
        raise OSError("neither")


def read_only(array):
    array.flags.writeable = False
    return array


def inference():
    with torch.inference_mode():
        return torch.zeros(4)


def cycle():
    loop = [torch.ones(1)]
    loop.append(loop)
    return loop


def deep(levels=3_000):
    nest = []
    for _ in range(levels):
        nest = [nest]
    return nest


def of(dtype):
    return {"x": torch.zeros(2, dtype=dtype)}


def full(on, *shape):
    """Return a tensor whose values differ on each rank, so that a write would show."""
    return torch.full(shape, 1.0 + on.rank)


def stamped(on, data):
    """Return the tree with tensors and arrays whose values differ on each rank."""

    def stamp(leaf):
        return (torch if isinstance(leaf, torch.Tensor) else np).full_like(leaf, 1 + on.rank)

    return easydist.tree.map(stamp, data)


A, B, AB = {"a": torch.ones(2)}, {"b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}

X, GRID, NAN = {"x": torch.ones(2)}, torch.arange(6.0).view(2, 3), float("nan")

SPARSE, TEXT = {"x": torch.eye(2).to_sparse()}, {"x": np.array(["text"])}

HUGE, META = {"x": 1 << 64}, {"x": torch.empty(2, device="meta")}

TREES = {
    "a key less": ("['b']", AB, A),
    "a key more": ("['b']", A, AB),
    "another key": ("['a']", A, B),
    "another nested key": ("['m'][0]['v']", {"m": [{"w": GRID}]}, {"m": [{"v": GRID}]}),
    "a shorter list": ("[1]", [GRID, GRID], [GRID]),
    "a dataclass for a dict": (".ids", {"ids": GRID}, Batch(GRID)),
    "no leaf": ("rank {odd}: missing", A, {}),
    "a leaf where others have none": ("['a']", {}, A),
    "text for a tensor": ("rank {odd}: 'text'", GRID, "text"),
    "int32 for float32": ("rank {odd}: int32", of(torch.float32), of(torch.int32)),
    "uint8 for bool": ("rank {odd}: uint8", of(torch.bool), of(torch.uint8)),
    "float16 for bfloat16": ("rank {odd}: float16", of(torch.bfloat16), of(torch.float16)),
    "one float8 for another": ("rank {odd}: float8_e5m2", of(torch.float8_e4m3fn), of(torch.float8_e5m2)),
    "complex64 for float64": ("rank {odd}: complex64", of(torch.float64), of(torch.complex64)),
    "an array of another dtype": ("rank {odd}: float64", of(torch.float32), {"x": np.zeros(2)}),
    "a transposed matrix": ("(3, 2)", {"m": GRID}, {"m": GRID.T}),
    "a dimension more": ("(2, 3, 1)", {"m": GRID}, {"m": GRID[..., None]}),
    "another last dimension": ("(2, 2)", {"m": GRID}, {"m": GRID[:, :2]}),
}
"""Unequal trees: a part of the error text, the usual tree, the odd one."""

FAULTS = {
    "a sparse leaf": ("leaf ['x'] is not a dense tensor", SPARSE),
    "a meta tensor": ("is a meta tensor, which has no data", META),
    "an array of text": ("leaf ['x'] is a NumPy array of <U4", TEXT),
    "an array of objects": ("NumPy array of object", {"x": np.array([None, 1])}),
    "an array of dates": ("datetime64", {"x": np.array(["2024-01-01"], "M8[D]")}),
    "a masked array": ("masked array", {"x": np.ma.masked_array([1.0], [True])}),
    "an int beyond 64 bits": ("leaf ['x'] is an int that does not fit", HUGE),
    "a cycle": ("cycle", cycle()),
    "a nest too deep": ("recursion limit", deep()),
    "an iteration that raises": ("rank {odd}: OSError: the stream ended", Broken(OSError("the stream ended"))),
    "an iteration that stops": ("rank {odd}: RuntimeError", Broken(StopIteration())),
    "an error without a text": ("rank {odd}: Mute", Broken(Mute())),
    "an error of several lines": ("second", Broken(OSError("first\nsecond\n"))),
    "an error in odd letters": ("\udcff – é", Broken(OSError("\udcff – é"))),
    "a key without a repr": ("rank {odd}: KeyError", {Nameless(1): torch.ones(1)}),
}
"""Trees that no verb can send: a part of the error text, the odd rank's tree."""

COMPARED = {
    **{
        name: (DIFFER, shows, lambda on, n=name: on.call(stamped(on, on.pick(*TREES[n][1:]))))
        for name, (shows, *_) in TREES.items()
    },
    **{
        name: (FAULT, shows, lambda on, n=name: on.call(on.pick(stamped(on, X), FAULTS[n][1])))
        for name, (shows, _) in FAULTS.items()
    },
    "a fault on all but one": (FAULT, "leaf ['x']", lambda on: on.call(on.pick(SPARSE, X))),
    "another fault on each rank": (FAULT, "ranks 0, 1", lambda on: on.call([SPARSE, TEXT, HUGE, META][on.rank])),
    "a fault, and other keys elsewhere": (
        FAULT,
        "rank {odd}: TypeError",
        lambda on: on.call([A, B, AB, SPARSE][on.pick(on.rank % 3, 3)]),
    ),
    "another tree on each rank": (DIFFER, "['leaf1']", lambda on: on.call({f"leaf{on.rank}": GRID})),
    "many leaves": (DIFFER, "… and 30 more", lambda on: on.call({f"{i:02}": on.pick(GRID, GRID.T) for i in range(40)})),
}
"""Cases for every verb that compares trees."""


def unpicklable(send):
    """Return cases for verbs that send objects. ``send(on, value)`` lets the odd rank send ``value``."""
    return {
        "a lock": (FAULT, "_thread.lock", lambda on: send(on, threading.Lock())),
        "a lambda": (FAULT, "<lambda>", lambda on: send(on, lambda: None)),
        "a refusal": (FAULT, "rank {odd}: OSError: sealed", lambda on: send(on, {"x": Sealed()})),
        "a nest too deep": (FAULT, "rank {odd}: RecursionError", lambda on: send(on, deep())),
        "a class that is not allowed": (FAULT, "trees.Batch", lambda on: send(on, Batch(1), weights_only=True)),
    }


def odd_rank(number, size):
    """Return rank 0, the last one and one in the middle in turns."""
    return (0, size - 1, size // 2)[number // 3 % 3]


def tied(tensor):
    return [tensor, tensor]


ROW, ONES, DOUBLE = torch.arange(3), torch.ones(2), torch.float64
