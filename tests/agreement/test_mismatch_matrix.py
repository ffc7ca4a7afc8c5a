"""Ranks that differ, verb by verb: one error for all, nothing written, and the next call works."""

import itertools
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from mismatches import (
    AB,
    COMPARED,
    DIFFER,
    FAULT,
    GRID,
    HUGE,
    MISUSE,
    NAN,
    ROW,
    SIZES,
    SPARSE,
    TEXT,
    A,
    B,
    Broken,
    Cursed,
    Elusive,
    Rank,
    Sealed,
    Untrue,
    X,
    alike,
    enter,
    full,
    inference,
    odd_rank,
    of,
    pickling,
    read_only,
    stamped,
    tied,
    unpicklable,
)
from trees import bits

import easydist
from easydist import ProcessState
from easydist.testing import distributed

pytestmark = pytest.mark.slow

OF_SIZES = {"a transposed matrix", "another last dimension"}
"""Cases of trees that differ only in sizes."""

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
        "a dst that raises": (FAULT, "rank {odd}: OSError: cursed", lambda on: on.call(GRID, dst=on.pick(0, Cursed()))),
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
            "leaf ['x'] is a read-only array (pass a copy)",
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
            "leaf ['x'] is a read-only array (pass a copy)",
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
            "scale='half' is not a number",
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
        "None at the source": (
            FAULT,
            "scatter: rank {odd} is the source, but its tree is None",
            lambda on: on.call(on.pick(GRID, None), on.odd),
        ),
        "a source that is no rank": (FAULT, "from_process=-1", lambda on: on.call(GRID, on.pick(0, -1))),
        "a source that is an array": (
            FAULT,
            "=array([0., 0.]) is not a rank: pass an integer",
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
        **{name: case for name, case in COMPARED.items() if name not in OF_SIZES},
        "many leaves": (
            DIFFER,
            "… and 30 more",
            lambda on: on.call({f"{i:02}": on.pick(GRID, GRID.flatten()) for i in range(40)}),
        ),
        "another dim": (DIFFER, "rank {odd}: pad_across_processes(dim=1", lambda on: on.call(GRID, on.pick(0, 1))),
        "a dim that it does not have": (
            DIFFER,
            "rank {odd}: pad_across_processes(dim=2",
            lambda on: on.call(GRID, on.pick(0, 2)),
        ),
        "another pad_index": (DIFFER, "pad_index=-100", lambda on: on.call(GRID, 0, on.pick(0, -100))),
        "a pad_index that is NaN": (DIFFER, "pad_index=nan", lambda on: on.call(GRID, 0, on.pick(0, NAN))),
        "a pad_index that is text": (FAULT, "is not a number", lambda on: on.call(GRID, 0, on.pick(0, "zero"))),
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
            "=array([0., 0.]) is not a rank: pass an integer",
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
        "nobody has it": (MISUSE, "none does", lambda on: on.call(None)),
        "everybody has it": (MISUSE, "ranks 0, 1", lambda on: on.call(GRID)),
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


def snapshot(*values):
    """Return the bits of ``values``, the identities of the objects in their containers, and the generators' states."""
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
    """Return the end of ``call`` on this rank: the error's name and text, and True if its arguments are unchanged."""
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
    """Return the faults of a case, given its outcome on every rank."""
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
    """The rank that raised keeps its own exception."""

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
