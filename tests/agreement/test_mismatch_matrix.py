"""Ranks that differ, verb by verb: one error for all, nothing written, and the next call works."""

import enum
import itertools
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from trees import Batch, bits, difference

import easydist
from easydist import DisagreementError, ProcessState, RemoteError
from easydist.testing import distributed

SIZES = (2, 3, 4)

pytestmark = pytest.mark.slow

DIFFER, FAULT, MISUSE = DisagreementError, RemoteError, ValueError


class Rank(NamedTuple):
    """One rank's view of a case: who it is, how many there are, which of them is odd, and the verb."""

    rank: int
    size: int
    odd: int
    verb: Callable[..., Any] | None = None

    def call(self, *args, **options):
        """The call to make; what it is given is compared before and after."""
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
    """``verb`` where pickle is allowed, or is not."""
    easydist.allow_pickle(allowed)
    try:
        return verb(*args)
    finally:
        easydist.allow_pickle(True)


# --- data that cannot travel


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
    """A key of which all print alike."""

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
    """A tensor that is another one on each rank: a write would show."""
    return torch.full(shape, 1.0 + on.rank)


def stamped(on, data):
    """The tree with tensors and arrays that are other ones on each rank."""

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
"""Unequal trees: what the text shows, the usual one, the odd one."""

FAULTS = {
    "a sparse leaf": ("leaf ['x'] is not a dense tensor", SPARSE),
    "a meta tensor": ("on meta", META),
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
"""Trees that no verb can send: what the text shows, the odd rank's tree."""

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
"""For every verb that compares trees."""


def unpicklable(send):
    """For every verb for objects; ``send(on, value)`` is the call in which the odd rank has ``value`` to send."""
    return {
        "a lock": (FAULT, "_thread.lock", lambda on: send(on, threading.Lock())),
        "a lambda": (FAULT, "<lambda>", lambda on: send(on, lambda: None)),
        "a refusal": (FAULT, "rank {odd}: OSError: sealed", lambda on: send(on, {"x": Sealed()})),
        "a nest too deep": (FAULT, "rank {odd}: RecursionError", lambda on: send(on, deep())),
        "a class that is not allowed": (FAULT, "trees.Batch", lambda on: send(on, Batch(1), weights_only=True)),
    }


# --- the matrix: what all ranks raise, what the text shows ({odd} is the odd rank), each rank's call

CASES = {
    "gather": {
        **COMPARED,
        "None": (DIFFER, "rank {odd}: None", lambda on: on.call(on.pick(GRID, None))),
        "another text": (DIFFER, "rank {odd}: 'b'", lambda on: on.call([GRID, on.pick("a", "b")])),
        "a set of tensors": (FAULT, "is a set that holds tensors", lambda on: on.call([GRID, on.pick(1, {GRID})])),
        "keys that print alike": (FAULT, "path of several leaves", lambda on: on.call(on.pick(AB, alike()))),
        "None on all but one": (DIFFER, "rank {odd}: float32 (2, 3)", lambda on: on.call(on.pick(None, GRID))),
        "another dim": (DIFFER, "rank {odd}: gather(dst=None, dim=1)", lambda on: on.call(GRID, dim=on.pick(0, 1))),
        "a dim from the end": (DIFFER, "dim=-1", lambda on: on.call(GRID, dim=on.pick(1, -1))),
        "a size that is not free": (DIFFER, "(3, 2)", lambda on: on.call(GRID.new_ones(on.pick(2, 3), 2), dim=1)),
        "another dst": (DIFFER, "rank {odd}: gather(dst=1", lambda on: on.call(GRID, dst=on.pick(0, 1))),
        "no dst": (DIFFER, "rank {odd}: gather(dst=None", lambda on: on.call(GRID, dst=on.pick(0, None))),
        "a dst that is no rank": (FAULT, "dst=9", lambda on: on.call(GRID, dst=on.pick(0, 9))),
        "a negative dst": (FAULT, "dst=-1", lambda on: on.call(GRID, dst=on.pick(0, -1))),
        "a fractional dst": (FAULT, "rank {odd}: TypeError", lambda on: on.call(GRID, dst=on.pick(0, 0.5))),
        "a dst that is text": (FAULT, "rank {odd}: TypeError", lambda on: on.call(GRID, dst=on.pick(0, "0"))),
        "no such dim": (FAULT, "no dim 7", lambda on: on.call(GRID, dim=on.pick(0, 7))),
        "a dim of None": (FAULT, "rank {odd}: TypeError", lambda on: on.call(GRID, dim=on.pick(0, None))),
        "a dim that is a list": (FAULT, "rank {odd}: TypeError", lambda on: on.call(GRID, dim=on.pick(0, [0]))),
        "a dim that raises": (FAULT, "rank {odd}: ", lambda on: on.call(GRID, dim=on.pick(0, Cursed()))),
        "a key less at dst": (DIFFER, "['b']", lambda on: on.call(on.pick(AB, A), dst=on.odd)),
        "a key less elsewhere": (DIFFER, "['b']", lambda on: on.call(on.pick(AB, A), dst=on.other)),
        "a fault at dst": (FAULT, "leaf ['x']", lambda on: on.call(on.pick(X, SPARSE), dst=on.odd)),
        "a fault elsewhere": (FAULT, "leaf ['x']", lambda on: on.call(on.pick(X, TEXT), dst=on.other)),
        "a bad dst and another key": (FAULT, "dst=7", lambda on: on.call(on.pick(A, B), dst=on.pick(0, 7))),
    },
    "broadcast": {
        **COMPARED,
        "[3] into [5]": (DIFFER, "rank {odd}: float32 (3,)", lambda on: on.call(full(on, on.pick(5, 3)), on.odd)),
        "[1] into [5]": (DIFFER, "rank {odd}: float32 (5,)", lambda on: on.call(full(on, on.pick(1, 5)), on.other)),
        "a number into [1]": (DIFFER, "rank {odd}: float64 ()", lambda on: on.call(on.pick(np.zeros(1), 1.0), on.odd)),
        "a large target": (
            DIFFER,
            "(70001,)",
            lambda on: on.call([full(on, on.pick(70_000, 70_001)), GRID], on.other),
        ),
        "another source": (DIFFER, "rank {odd}: broadcast(from_process=1)", lambda on: on.call(GRID, on.pick(0, 1))),
        "a source that is no rank": (FAULT, "from_process=4", lambda on: on.call(GRID, on.pick(0, 4))),
        "a source that is text": (FAULT, "rank {odd}: TypeError", lambda on: on.call(GRID, on.pick(0, "0"))),
        "a read-only target": (
            FAULT,
            "leaf ['x'] is a read-only array",
            lambda on: on.call({"x": on.pick(full(on, 2).numpy(), read_only(np.zeros(2, "f4")))}, on.other),
        ),
        "an expanded target": (
            FAULT,
            "leaf [1] is an expanded tensor",
            lambda on: on.call([GRID, on.pick(full(on, 4), torch.zeros(1).expand(4))], on.other),
        ),
        "an inference target": (
            FAULT,
            "is an inference tensor",
            lambda on: on.call(on.pick(full(on, 4), inference()), on.other),
        ),
        "only read-only targets": (
            FAULT,
            "leaf ['x'] is a read-only array",
            lambda on: on.call({"x": on.pick(read_only(np.zeros(2)), np.ones(2))}, on.odd),
        ),
        "None at the source": (MISUSE, "rank {odd} is the source", lambda on: on.call(on.pick(GRID, None), on.odd)),
        "tied at one target": (
            MISUSE,
            "are one tensor on rank {odd}",
            lambda on: on.call(on.pick([ROW, ROW.clone()], tied(ROW * 0)), on.other),
        ),
        "tied at one target, None elsewhere": (
            MISUSE,
            "are one tensor on rank {odd}",
            lambda on: on.call({on.odd: tied(ROW * 0), on.other: [ROW, ROW.clone()]}.get(on.rank), on.other),
        ),
        "another tree, and None elsewhere": (
            DIFFER,
            "['b']",
            lambda on: on.call({on.odd: AB, on.other: {"a": full(on, 2)}}.get(on.rank), on.odd),
        ),
        "a fault, and None elsewhere": (
            FAULT,
            "leaf ['x']",
            lambda on: on.call({on.odd: SPARSE, on.other: stamped(on, X)}.get(on.rank), on.other),
        ),
        "a lock at the source, and None elsewhere": (
            FAULT,
            "_thread.lock",
            lambda on: on.call(on.pick(None, {"x": GRID, "l": threading.Lock()}), on.odd),
        ),
    },
    "reduce": {
        **COMPARED,
        "None": (DIFFER, "rank {odd}: None", lambda on: on.call(on.pick(GRID, None))),
        "another text": (DIFFER, "rank {odd}: 'b'", lambda on: on.call([GRID, on.pick("a", "b")])),
        "another length": (DIFFER, "rank {odd}: float32 (3,)", lambda on: on.call(torch.ones(on.pick(2, 3)))),
        "an int for a float": (DIFFER, "rank {odd}: int64 ()", lambda on: on.call(on.pick(1.0, 1))),
        "another reduction": (
            DIFFER,
            "rank {odd}: reduce(reduction='max'",
            lambda on: on.call(GRID, on.pick("sum", "max")),
        ),
        "no reduction": (
            DIFFER,
            "rank {odd}: reduce(reduction='none'",
            lambda on: on.call(GRID, on.pick("mean", "none")),
        ),
        "a reduction mistyped": (FAULT, "no reduction 'summ'", lambda on: on.call(GRID, on.pick("sum", "summ"))),
        "a reduction that is a list": (
            FAULT,
            "rank {odd}: TypeError",
            lambda on: on.call(GRID, on.pick("sum", ["sum"])),
        ),
        "another scale": (DIFFER, "scale=0.5", lambda on: on.call(GRID, "sum", on.pick(1.0, 0.5))),
        "a scale that is NaN": (DIFFER, "scale=nan", lambda on: on.call(GRID, "sum", on.pick(1.0, NAN))),
        "a scale that is text": (
            FAULT,
            "rank {odd}: ValueError",
            lambda on: on.call(GRID, "sum", on.pick(1.0, "half")),
        ),
        "the maximum of a complex number": (FAULT, "have no max", lambda on: on.call(on.pick(1.0, 1j), "max")),
    },
    "scatter": {
        "another source": (DIFFER, "rank {odd}: scatter(from_process=1", lambda on: on.call(GRID, on.pick(0, 1))),
        "another dim": (
            DIFFER,
            "rank {odd}: scatter(from_process=0, dim=1)",
            lambda on: on.call(GRID, dim=on.pick(0, 1)),
        ),
        "no such dim": (FAULT, "no dim 2", lambda on: on.call(GRID, on.odd, dim=2)),
        "None at the source": (FAULT, "use scatter_object_list", lambda on: on.call(on.pick(GRID, None), on.odd)),
        "a source that is no rank": (FAULT, "from_process=-1", lambda on: on.call(GRID, on.pick(0, -1))),
        "a source that is an array": (
            FAULT,
            "rank {odd}: ValueError",
            lambda on: on.call(GRID, on.pick(0, np.zeros(2))),
        ),
        "a number": (FAULT, "['n'] of shape () has no dim 0", lambda on: on.call({"n": 1}, on.odd)),
        "a sparse leaf": (FAULT, "leaf ['x']", lambda on: on.call(SPARSE, on.odd)),
        "an array of text": (FAULT, "leaf ['x']", lambda on: on.call(on.pick(None, TEXT), on.odd)),
        "an iteration that raises": (
            FAULT,
            "OSError: lost",
            lambda on: on.call(on.pick(None, Broken(OSError("lost"))), on.odd),
        ),
        "a lock in the structure": (
            FAULT,
            "_thread.lock",
            lambda on: on.call({"x": GRID, "l": threading.Lock()}, on.odd),
        ),
    },
    "all_to_all": {
        **COMPARED,
        "another dim": (DIFFER, "rank {odd}: all_to_all(dim=1)", lambda on: on.call(GRID, dim=on.pick(0, 1))),
        "no such dim": (FAULT, "no dim -3", lambda on: on.call(GRID, dim=on.pick(0, -3))),
        "a number": (FAULT, "of shape () has no dim 0", lambda on: on.call(on.pick(GRID, 1.0))),
    },
    "pad_across_processes": {
        **COMPARED,
        "another dim": (DIFFER, "rank {odd}: pad_across_processes(dim=1", lambda on: on.call(GRID, on.pick(0, 1))),
        "a dim that it does not have": (
            DIFFER,
            "rank {odd}: pad_across_processes(dim=2",
            lambda on: on.call(GRID, on.pick(0, 2)),
        ),
        "another pad_index": (DIFFER, "pad_index=-100", lambda on: on.call(GRID, 0, on.pick(0, -100))),
        "a pad_index that is NaN": (DIFFER, "pad_index=nan", lambda on: on.call(GRID, 0, on.pick(0, NAN))),
        "a pad_index that is text": (FAULT, "rank {odd}: ValueError", lambda on: on.call(GRID, 0, on.pick(0, "zero"))),
        "a pad_index that does not fit": (
            FAULT,
            "cannot hold pad_index=2",
            lambda on: on.call(on.pick(GRID, GRID > 1), 0, 2),
        ),
        "another pad_first": (DIFFER, "pad_first=True", lambda on: on.call(GRID, pad_first=on.pick(False, True))),
        "a pad_first that raises": (
            FAULT,
            "OSError: neither",
            lambda on: on.call(GRID, pad_first=on.pick(False, Untrue())),
        ),
    },
    "gather_object": {
        **unpicklable(lambda on, value, **options: on.call(on.pick("fine", value), **options)),
        "a proxy of what is gone": (FAULT, "rank {odd}: OSError: gone", lambda on: on.call(on.pick("fine", Elusive()))),
        "a list": (DIFFER, "rank {odd}: gather_object(is_list=True", lambda on: on.call(on.pick("ab", ["ab"]))),
        "no list": (DIFFER, "rank {odd}: gather_object(is_list=False", lambda on: on.call(on.pick([], ()))),
        "another weights_only": (DIFFER, "weights_only=True", lambda on: on.call(1, weights_only=on.pick(False, True))),
        "pickle denied": (
            FAULT,
            "rank {odd}: UnsafeObjectError",
            lambda on: partial(pickling, on.pick(True, False), on.verb, 1),
        ),
        "pickle denied to all but one": (
            FAULT,
            "pickle is denied",
            lambda on: partial(pickling, on.pick(False, True), on.verb, [1]),
        ),
        "a lock on all but one": (FAULT, "_thread.lock", lambda on: on.call(on.pick(threading.Lock(), 1))),
        "a fault, and lists elsewhere": (
            FAULT,
            "rank {odd}: OSError: sealed",
            lambda on: on.call(on.pick([1], Sealed())),
        ),
    },
    "broadcast_object_list": {
        **unpicklable(lambda on, value, **options: on.call([on.rank, value], on.odd, **options)),
        "a longer list": (DIFFER, "length=3", lambda on: on.call([on.rank] * on.pick(2, 3))),
        "an empty list": (DIFFER, "length=0", lambda on: on.call([on.rank] * on.pick(2, 0))),
        "another source": (DIFFER, "from_process=1", lambda on: on.call([on.rank], on.pick(0, 1))),
        "a source that is no rank": (FAULT, "from_process=4", lambda on: on.call([on.rank], on.pick(0, 4))),
        "a source that is an array": (
            FAULT,
            "rank {odd}: ValueError",
            lambda on: on.call([on.rank], on.pick(0, np.zeros(2))),
        ),
        "a tuple": (FAULT, "got tuple", lambda on: on.call(on.pick([1], (1,)), on.other)),
        "None": (FAULT, "got NoneType", lambda on: on.call(on.pick([1], None), on.odd)),
        "a dict on all but one": (FAULT, "got dict", lambda on: on.call(on.pick({0: 1}, [1]), on.odd)),
        "another weights_only": (
            DIFFER,
            "weights_only=True",
            lambda on: on.call([on.rank], weights_only=on.pick(False, True)),
        ),
        "pickle denied to a receiver": (
            FAULT,
            "rank {odd}: UnsafeObjectError",
            lambda on: partial(pickling, on.pick(True, False), on.verb, [on.rank], on.other),
        ),
    },
    "scatter_object_list": {
        **unpicklable(lambda on, value, **options: on.call([on.rank], [value] * on.size, on.odd, **options)),
        "an output of None": (
            FAULT,
            "output_list has to be a list",
            lambda on: on.call(on.pick([None], None), [1] * on.size, on.other),
        ),
        "an empty output": (
            FAULT,
            "at least one element",
            lambda on: on.call(on.pick([None], []), [1] * on.size, on.other),
        ),
        "an input too short": (FAULT, "one object per rank", lambda on: on.call([None], [1] * (on.size - 1), on.odd)),
        "no input": (FAULT, "got NoneType", lambda on: on.call([None], None, on.odd)),
        "an input of text": (FAULT, "got str", lambda on: on.call([None], "a" * on.size, on.odd)),
        "another source": (DIFFER, "src=1", lambda on: on.call([None], [1] * on.size, on.pick(0, 1))),
        "a source that is no rank": (FAULT, "src=-1", lambda on: on.call([None], [1] * on.size, on.pick(0, -1))),
        "another weights_only": (
            DIFFER,
            "weights_only=True",
            lambda on: on.call([None], [1] * on.size, weights_only=on.pick(False, True)),
        ),
    },
    "copy_tensor_to_devices": {
        "nobody has it": (MISUSE, "ranks []", lambda on: on.call(None)),
        "everybody has it": (MISUSE, "ranks [0, 1", lambda on: on.call(GRID)),
        "two have other trees": (DIFFER, "['a']", lambda on: on.call({on.odd: A, on.other: B}.get(on.rank))),
        "two have other dtypes": (
            DIFFER,
            "rank {odd}: int32",
            lambda on: on.call({on.odd: of(torch.int32), on.other: X}.get(on.rank)),
        ),
        "a sparse leaf": (FAULT, "leaf ['x']", lambda on: on.call(on.pick(None, SPARSE))),
        "an int beyond 64 bits": (FAULT, "does not fit 64 bits", lambda on: on.call(on.pick(None, HUGE))),
        "a fault on a second one": (FAULT, "leaf ['x']", lambda on: on.call({on.odd: TEXT, on.other: X}.get(on.rank))),
        "a lock in the structure": (
            FAULT,
            "_thread.lock",
            lambda on: on.call(on.pick(None, {"x": GRID, "l": threading.Lock()})),
        ),
    },
    "synchronize_rng_states": {
        "another kind": (DIFFER, "rng_types=['numpy']", lambda on: on.call([on.pick("torch", "numpy")])),
        "another order": (
            DIFFER,
            "['numpy', 'torch']",
            lambda on: on.call(on.pick(["torch", "numpy"], ["numpy", "torch"])),
        ),
        "no kind": (DIFFER, "rng_types=[]", lambda on: on.call(on.pick(["python"], []))),
        "a kind that does not exist": (
            FAULT,
            "no dice here",
            lambda on: on.call(on.pick(["torch"], ["torch", "dice"])),
        ),
        "a kind of None": (FAULT, "no None here", lambda on: on.call(on.pick(["torch"], [None]))),
        "no generator": (FAULT, "pass generator=", lambda on: on.call(["generator"], on.pick(torch.Generator(), None))),
        "kinds that cannot be listed": (FAULT, "rank {odd}: TypeError", lambda on: on.call(on.pick(["torch"], 7))),
        "kinds that end in an error": (
            FAULT,
            "OSError: lost",
            lambda on: on.call(on.pick(["torch"], Broken(OSError("lost")))),
        ),
        "a generator that is none": (FAULT, "rank {odd}: ", lambda on: on.call(["torch"], on.pick(None, "generator"))),
    },
}

OPERATIONS = {
    "gather": lambda on: partial(easydist.gather, X),
    "broadcast": lambda on: partial(easydist.broadcast, X),
    "reduce": lambda on: partial(easydist.reduce, X),
    "scatter": lambda on: partial(easydist.scatter, X),
    "all_to_all": lambda on: partial(easydist.all_to_all, X),
    "pad_across_processes": lambda on: partial(easydist.pad_across_processes, X),
    "gather_object": lambda on: partial(easydist.gather_object, [X]),
    "broadcast_object_list": lambda on: partial(easydist.broadcast_object_list, [X]),
    "scatter_object_list": lambda on: partial(easydist.scatter_object_list, [None], [X] * on.size),
    "copy_tensor_to_devices": lambda on: partial(easydist.copy_tensor_to_devices, X),
    "wait_for_everyone": lambda on: partial(easydist.wait_for_everyone),
    "synchronize_rng_states": lambda on: partial(easydist.synchronize_rng_states, ["torch"]),
    "main_process_first": lambda on: partial(enter),
}
"""Any two of them are different calls."""

# --- how a case is judged


def snapshot(*values):
    """What ``values`` hold, bit for bit, which objects are in their containers, and the generators' states."""
    found = [torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate()]
    stack, seen = list(values), set()
    while stack:
        value = stack.pop()
        if id(value) not in seen:
            seen.add(id(value))
            held = children(value)
            found.append((id(value), contents(value), [id(child) for child in held]))
            stack += held
    return found


def children(value):
    if issubclass(type(value), dict):
        return [*value, *value.values()]
    return list(value) if type(value) in (list, tuple) else []


def contents(value):
    if issubclass(type(value), np.ndarray):  # isinstance would ask the value itself
        return value.dtype, value.shape, value.strides, value.flags.writeable, bits(value)
    if not issubclass(type(value), torch.Tensor) or value.is_meta:
        return None
    if value.layout is not torch.strided:
        return bits(value.to_dense())
    return value.dtype, value.shape, value.stride(), value.data_ptr(), bits(value)


def outcome(call):
    """How ``call`` ends on this rank: the error's name and text, and whether all that it was given is as before."""
    given = [*call.args, *call.keywords.values()]
    before = snapshot(*given)
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), snapshot(*given) == before
    return "no error", "", True


def followed(name, mine, on):
    """The outcome, and whether the next two calls on the group go well."""
    try:
        ranks = easydist.gather(on.rank).tolist(), easydist.gather_object(on.rank)
    except Exception as error:
        raise AssertionError(f"{name}: {mine}; the next call failed") from error
    return mine, ranks == (list(range(on.size)),) * 2


def problem(outcomes, error, fragments):
    """What is wrong with a case, given how it went on every rank."""
    every, goes_on = zip(*outcomes, strict=True)
    errors, texts, untouched = zip(*every, strict=True)
    checks = {
        "the error": set(errors) == {error.__name__},
        "one text": len(set(texts)) == 1,
        "what it shows": all(fragment in text for fragment in fragments for text in texts),
        "untouched": all(untouched),
        "the next calls": all(goes_on),
    }
    wrong = [what for what, right in checks.items() if not right]
    return f"{', '.join(wrong)}: {every}, should show {fragments}" if wrong else ""


def judge(rows, rank):
    """Make the calls of ``{name: (error, fragments, call, on)}``; fail with the names of those that went wrong."""
    outcomes = [followed(name, outcome(case(on)), on) for name, (_, _, case, on) in rows.items()]
    every = zip(*[mine for [mine] in easydist.gather_object((outcomes,))], strict=True)
    found = {name: problem(column, row[0], row[1]) for (name, row), column in zip(rows.items(), every, strict=True)}
    assert rank or not any(found.values()), "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def odd_rank(number, size):
    """Rank 0, the last one and one in the middle by turns."""
    return (0, size - 1, size // 2)[number // 3 % 3]


def rows_of(verb, rank, size):
    """The verb's part of the matrix; of what other verbs have as well each world size takes a third."""
    function = getattr(easydist, verb)
    first = list(CASES).index(verb)
    rows = {}
    for number, (name, (error, shows, case)) in enumerate(CASES[verb].items()):
        if name in COMPARED and (number + first + size) % 3:
            continue
        odd = odd_rank(number, size)
        rows[f"{verb}: {name}, odd rank {odd}"] = (
            error,
            (verb, shows.format(odd=odd)),
            case,
            Rank(rank, size, odd, function),
        )
    return rows


@pytest.mark.parametrize("verb", CASES)
@distributed(world_size=SIZES)
def test_ranks_that_differ(rank, world_size, verb):
    judge(rows_of(verb, rank, world_size), rank)


@distributed(world_size=SIZES)
def test_any_two_operations_are_different_calls(rank, world_size):
    rows = {}
    for number, (usual, other) in enumerate(itertools.combinations(OPERATIONS, 2)):
        odd = odd_rank(number, world_size)
        fragments = f"rank {(odd + 1) % world_size}: {usual}(", f"rank {odd}: {other}("
        if number % 3 == world_size % 3:
            on = Rank(rank, world_size, odd)
            rows[f"{usual}, {other} on rank {odd}"] = DIFFER, fragments, OPERATIONS[on.pick(usual, other)], on
    judge(rows, rank)


@distributed(world_size=SIZES)
def test_a_body_that_raises_on_one_rank(rank, world_size):
    """Where it raised, its own exception goes on."""

    def body(fails):
        with ProcessState().main_process_first():
            if fails:
                raise KeyError("lost")

    for odd in range(world_size):
        mine = outcome(partial(body, rank == odd))
        assert easydist.gather(rank).tolist() == list(range(world_size))
        every = easydist.gather_object(mine)
        assert every.pop(odd)[0] == "KeyError"
        assert len(set(every)) == 1
        assert every[0][0] == "RemoteError"
        assert "main_process_first" in every[0][1]
        assert f"rank {odd}: KeyError: 'lost'" in every[0][1]


# --- differences that may be: what a call gives, what it should give


class Kind(str, enum.Enum):
    TORCH = "torch"


def swapped(on, a, b):
    return on.pick({"a": a, "b": b}, {"b": b, "a": a})


def joined(on, usual, odd):
    return torch.cat([odd if rank == on.odd else usual for rank in range(on.size)])


def tied(tensor):
    return [tensor, tensor]


def filled(verb, target, *args, **options):
    """``target``, after the call that fills it."""
    verb(target, *args, **options)
    return target


def with_ties(pair):
    """The pair, and whether it is one object twice."""
    return pair, pair[0] is pair[1]


def drawn(on, kinds):
    """Numbers that all ranks draw alike once their generators are in step."""
    easydist.set_seed(on.rank)
    easydist.synchronize_rng_states(kinds)
    return torch.rand(1).item()


def first_of(seed):
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


ROW, ONES, DOUBLE = torch.arange(3), torch.ones(2), torch.float64

WORKS = {
    "gather: another order of keys": lambda on: (
        easydist.gather(swapped(on, torch.tensor(on.rank), torch.tensor(-on.rank))),
        swapped(on, torch.arange(on.size), -torch.arange(on.size)),
    ),
    "gather: another length": lambda on: (easydist.gather(ROW[on.pick(1, 0) :]), joined(on, ROW[1:], ROW)),
    "gather: no rows": lambda on: (easydist.gather(GRID[on.pick(0, 2) :]), joined(on, GRID, GRID[2:])),
    "gather: no dimension": lambda on: (easydist.gather(on.pick(ROW, ROW[0])), joined(on, ROW, ROW[:1])),
    "gather: tied on one rank": lambda on: (
        easydist.gather(on.pick([ROW, ROW.clone()], tied(ROW))),
        [ROW.repeat(on.size)] * 2,
    ),
    "gather: not tied on one rank": lambda on: (
        easydist.gather(on.pick(tied(ROW), [ROW, ROW.clone()])),
        [ROW.repeat(on.size)] * 2,
    ),
    "gather: tied and longer on one rank": lambda on: (
        easydist.gather(on.pick([ROW[1:], ROW[1:]], tied(ROW))),
        [joined(on, ROW[1:], ROW)] * 2,
    ),
    "gather: an array": lambda on: (
        easydist.gather(on.pick(ROW, ROW.numpy())),
        on.pick(ROW.repeat(on.size), ROW.repeat(on.size).numpy()),
    ),
    "gather: a number": lambda on: (
        easydist.gather(on.pick(np.float64(2), 2.0)),
        on.pick(np.ones, torch.ones)(on.size, dtype=on.pick(float, DOUBLE)) * 2,
    ),
    "gather: a tuple": lambda on: (
        easydist.gather(on.pick([ROW], (ROW,))),
        on.pick(list, tuple)([ROW.repeat(on.size)]),
    ),
    "gather: text beside tensors": lambda on: (easydist.gather([ROW, "a"]), [ROW.repeat(on.size), "a"]),
    "gather: other strides": lambda on: (
        easydist.gather(on.pick(GRID, GRID.T.contiguous().T)),
        GRID.repeat(on.size, 1),
    ),
    "gather: with a gradient": lambda on: (
        easydist.gather(ONES.clone().requires_grad_(on.pick(False, True))),
        ONES.repeat(on.size),
    ),
    "gather: a conjugate view": lambda on: (
        easydist.gather(on.pick(torch.tensor([1 - 2j]), torch.tensor([1 + 2j]).conj())),
        torch.tensor([1 - 2j] * on.size),
    ),
    "gather: dim and dst of NumPy": lambda on: (
        easydist.gather(ROW, dst=on.pick(0, np.int64(0)), dim=on.pick(0, np.int32(0))),
        None if on.rank else ROW.repeat(on.size),
    ),
    "gather: no leaf anywhere": lambda on: (easydist.gather(on.pick({}, ())), on.pick({}, ())),
    "broadcast: another order of keys": lambda on: (
        easydist.broadcast(swapped(on, torch.tensor(on.rank), torch.tensor(-on.rank)), on.odd),
        swapped(on, torch.tensor(on.odd), torch.tensor(-on.odd)),
    ),
    "broadcast: None on one rank": lambda on: (easydist.broadcast(on.pick(ROW.clone(), None), on.other), ROW),
    "broadcast: None on all but one": lambda on: (
        easydist.broadcast(on.pick(None, {"x": ROW, "s": "text"}), on.odd),
        {"x": ROW, "s": "text"},
    ),
    "broadcast: None everywhere": lambda on: (easydist.broadcast(None, on.odd), None),
    "broadcast: tied at the source, None elsewhere": lambda on: (
        with_ties(easydist.broadcast(on.pick(None, tied(ROW)), on.odd)),
        ([ROW, ROW], True),
    ),
    "broadcast: tied at the source": lambda on: (
        with_ties(easydist.broadcast(on.pick([ROW * 0, ROW * 0], tied(ROW)), on.odd)),
        ([ROW, ROW], on.rank == on.odd),
    ),
    "broadcast: an array and a number": lambda on: (
        filled(easydist.broadcast, [on.pick(ROW.clone(), np.zeros(3, int)), 1], on.other),
        [on.pick(ROW, ROW.numpy()), 1],
    ),
    "broadcast: a number": lambda on: (
        easydist.broadcast(on.pick(torch.tensor(2.5, dtype=DOUBLE), 0.0), on.other),
        on.pick(torch.tensor(2.5, dtype=DOUBLE), 2.5),
    ),
    "broadcast: a target with gaps": lambda on: (
        filled(easydist.broadcast, on.pick(GRID.clone(), torch.zeros(2, 6)[:, ::2]), on.other),
        GRID,
    ),
    "broadcast: an expanded source": lambda on: (
        filled(easydist.broadcast, on.pick(torch.zeros(4), torch.ones(1).expand(4)), on.odd),
        torch.ones(4),
    ),
    "broadcast: a read-only source": lambda on: (
        filled(easydist.broadcast, on.pick(np.zeros(2), read_only(np.ones(2))), on.odd),
        np.ones(2),
    ),
    "broadcast: an inference source": lambda on: (
        filled(easydist.broadcast, on.pick(torch.ones(4), inference()), on.odd),
        torch.zeros(4),
    ),
    "broadcast: a target with a gradient": lambda on: (
        filled(
            easydist.broadcast, torch.full((2,), float(on.rank)).requires_grad_(on.pick(False, True)), on.other
        ).detach(),
        torch.full((2,), float(on.other)),
    ),
    "reduce: another order of keys": lambda on: (
        easydist.reduce(swapped(on, ROW, -ROW), "sum"),
        swapped(on, ROW * on.size, -ROW * on.size),
    ),
    "reduce: tied on one rank": lambda on: (easydist.reduce(on.pick([ROW, ROW + 1], tied(ROW)), "max"), [ROW, ROW + 1]),
    "reduce: a number, a tensor": lambda on: (
        easydist.reduce(on.pick(2, torch.tensor(2)), "sum"),
        on.pick(2 * on.size, torch.tensor(2 * on.size)),
    ),
    "reduce: a scale that is an int": lambda on: (easydist.reduce(ROW, "sum", on.pick(1.0, 1)), ROW * on.size),
    "scatter: None elsewhere": lambda on: (
        easydist.scatter(on.pick(None, torch.arange(on.size)), on.odd),
        torch.tensor([on.rank]),
    ),
    "scatter: anything elsewhere": lambda on: (
        easydist.scatter(on.pick(SPARSE, torch.arange(on.size)), on.odd),
        torch.tensor([on.rank]),
    ),
    "scatter: tied at the source": lambda on: (
        with_ties(easydist.scatter(on.pick(None, tied(torch.arange(on.size))), on.odd)),
        ([torch.tensor([on.rank])] * 2, True),
    ),
    "all_to_all: another length": lambda on: (
        easydist.all_to_all(ROW[: on.pick(0, on.size)]),
        torch.tensor_split(ROW[: on.size], on.size)[on.rank],
    ),
    "all_to_all: tied on one rank": lambda on: (
        easydist.all_to_all(on.pick([ROW, ROW.clone()], tied(ROW))),
        [torch.tensor_split(ROW, on.size)[on.rank].repeat(on.size)] * 2,
    ),
    "pad_across_processes: another length": lambda on: (
        easydist.pad_across_processes(ONES[: on.pick(2, 1)]),
        on.pick(ONES, torch.tensor([1.0, 0.0])),
    ),
    "pad_across_processes: tied on one rank": lambda on: (
        easydist.pad_across_processes(on.pick([ONES, ONES.clone()], tied(ONES[:1])), 0, 1),
        [ONES, ONES],
    ),
    "pad_across_processes: arguments of other types": lambda on: (
        easydist.pad_across_processes(ONES, on.pick(0, np.int64(0)), on.pick(0, 0.0), on.pick(False, 0)),
        ONES,
    ),
    "gather_object: another length": lambda on: (easydist.gather_object([on.rank] * on.pick(0, 2)), [on.odd] * 2),
    "gather_object: another type": lambda on: (
        easydist.gather_object(on.pick("a", None)),
        ["a"] * on.odd + [None] + ["a"] * (on.size - on.odd - 1),
    ),
    "broadcast_object_list: a lock elsewhere": lambda on: (
        filled(easydist.broadcast_object_list, [on.pick(threading.Lock(), 1)], on.odd),
        [1],
    ),
    "broadcast_object_list: empty": lambda on: (easydist.broadcast_object_list([], on.odd), []),
    "broadcast_object_list: a source of NumPy": lambda on: (
        easydist.broadcast_object_list([on.rank], on.pick(0, np.int64(0))),
        [0],
    ),
    "scatter_object_list: anything elsewhere": lambda on: (
        filled(easydist.scatter_object_list, [None], on.pick(7, [5] * on.size), on.odd),
        [5],
    ),
    "scatter_object_list: a longer output": lambda on: (
        filled(easydist.scatter_object_list, [8] * on.pick(1, 2), [5] * on.size),
        [5] + [8] * on.pick(0, 1),
    ),
    "scatter_object_list: a source of NumPy": lambda on: (
        filled(easydist.scatter_object_list, [None], [5] * on.size, on.pick(0, np.int64(0))),
        [5],
    ),
    "copy_tensor_to_devices: any rank": lambda on: (
        easydist.copy_tensor_to_devices(on.pick(None, {"x": ROW, "n": 1})),
        {"x": ROW, "n": 1},
    ),
    "copy_tensor_to_devices: tied": lambda on: (
        with_ties(easydist.copy_tensor_to_devices(on.pick(None, tied(ROW)))),
        ([ROW, ROW], True),
    ),
    "synchronize_rng_states: a tuple, an enum": lambda on: (drawn(on, on.pick(["torch"], (Kind.TORCH,))), first_of(0)),
    "synchronize_rng_states: None": lambda on: (drawn(on, on.pick(None, ["torch", "numpy", "python"])), first_of(0)),
}


def shortfall(name, case, on):
    """What a call that should work gives instead."""
    try:
        unlike = difference(*case(on))
    except Exception as error:
        unlike = f"{type(error).__name__}: {error}"
    return [f"{name}, odd rank {on.odd}, rank {on.rank}: {unlike}"] if unlike else []


@distributed(world_size=SIZES)
def test_differences_that_may_be(rank, world_size):
    wrong = []
    for number, (name, case) in enumerate(WORKS.items()):
        wrong += shortfall(name, case, Rank(rank, world_size, odd_rank(number, world_size)))
    assert not wrong, "\n".join(wrong)
