"""Differences between ranks that may be: what a call gives, and what it should give."""

import enum
import threading

import numpy as np
import pytest
import torch
from mismatches import DOUBLE, GRID, ONES, ROW, SIZES, SPARSE, Rank, inference, odd_rank, read_only, tied
from trees import difference

import easydist
from easydist.testing import distributed

pytestmark = pytest.mark.slow


class Kind(str, enum.Enum):
    TORCH = "torch"


def swapped(on, a, b):
    return on.pick({"a": a, "b": b}, {"b": b, "a": a})


def joined(on, usual, odd):
    return torch.cat([odd if rank == on.odd else usual for rank in range(on.size)])


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
    """Return the error of a call that should work."""
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
