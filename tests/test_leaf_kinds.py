"""Every kind of tensor goes through every entry on two ranks: it arrives, or all ranks say why it cannot."""

import hashlib
import os
import random
import warnings

import numpy as np
import pytest
import torch
from launching import IS_STRESS, within
from leaf_entries import ALONE, ENTRIES, IN_PLACE, LOCAL, Env, like
from leaf_kinds import INSIDE, KINDS

import easydist
from easydist.data.backing import absence
from easydist.testing import default_pool

SEED, SAMPLE = 25, 6
SHAPES = {"small": (4, 6), "large": (256, 260)}
REFUSALS = {"TypeError", "ValueError", "RuntimeError", "NotImplementedError", "ShapeError"}
REFUSALS |= {"RemoteError", "DisagreementError", "UnsafeObjectError", "WeightsOnlyError"}

PASS = {*LOCAL, "pad", "state dict into", "gathered parameters", "coordinator send"}
"""Entries that have no need of the data of some kinds of leaves, or find it: they may return it."""

TAKEN = {
    "sharded": {"state dict", "state dict as half", "published", "streamed", "resharding", "resharding into"},
    "recorded": {*ENTRIES},  # it has its values, which move right wherever nobody asks
}
"""Entries that take leaves of some kinds."""

PICKLED = {name for name in ENTRIES if any(word in name for word in ("object", "queue", "lists", "items"))}
"""Entries that pickle: torch itself knows how to write some kinds that a buffer cannot hold."""

UNSAFE = "UnsafeObjectError", "WeightsOnlyError"
"""The errors of the restricted decoder, which takes no subclasses."""

UNREAD = "nothing to read"
"""The description of a leaf without values, which an entry did not need on this rank."""

STEPS = [
    (name, mode, size)
    for name in ENTRIES
    for mode in ("on both", "on one")
    for size in SHAPES
    if mode == "on both" or name in ALONE
]


def drawn(kind):
    """Return the steps for a kind: some, the same ones in each run; all of them in a stress test."""
    return STEPS if IS_STRESS else random.Random(f"{SEED} {kind}").sample(STEPS, SAMPLE)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("kind", [*KINDS, *INSIDE])
def test_no_kind_of_leaf_ends_a_process(kind, tmp_path):
    """If a process dies, the last line of its file names the step; ``replay`` makes that step alone."""
    steps = drawn(kind)
    check(kind, steps, default_pool().run(play, 2, kind, steps, tmp_path / "step", timeout=within(20 + len(steps))))


def replay(kind, *step):
    check(kind, [step], default_pool().run(play, 2, kind, [step]))


def check(kind, steps, outcomes):
    for step, (first, second) in zip(steps, zip(*outcomes, strict=True), strict=True):
        name = step[0]
        for got, want in (first, second):
            assert is_right(kind, name, got, want), (kind, step, got, want)
        failed = [got[0] == "error" for got, _ in (first, second)]
        if name in ALONE:
            assert failed[0] == failed[1], (kind, step, first, second)
        if kind.startswith("quantized") and " comm " in name:
            continue  # communicators move any bytes, and these are int8
        passes = PASS | PICKLED | TAKEN.get(kind, set())
        if first[1] is None and name not in passes and UNREAD not in f"{first}{second}":
            assert any(failed), (kind, step, first, second)


def is_right(kind, name, got, want):
    if got[0] == "error":
        is_torchs = name.startswith("dist") and "view_as_real" in got[2]  # it refuses conjugate views by itself
        is_unsafe = name in PICKLED and any(word in f"{got}" for word in UNSAFE)
        is_allowed = is_unsafe or want is None or want[0] == "error" or name in IN_PLACE or is_torchs
        return is_allowed and (got[1] in REFUSALS or name in LOCAL)
    return want is None or got == want


def play(rank, kind, steps, log=os.devnull):
    """Return for each step the outcome with the leaf, and with a plain tensor of its values if it has any."""
    torch.autograd.set_multithreading_enabled(False)
    env, outcomes = Env(rank), []
    if kind in INSIDE:
        env.make_all()
    with open(f"{log}-{rank}" if log != os.devnull else log, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            print(step, file=file, flush=True)
            outcomes.append(outcome(env, kind, *step))
            if easydist.gather(outcomes[-1][0][0] == "error").any():
                env.works()
        env.works()
    return outcomes


def outcome(env, kind, name, mode, size):
    shape = SHAPES[size]
    plain = (torch.arange(shape[0] * shape[1]) % 97 + env.rank).float().view(shape)
    is_alone = mode == "on one" and env.rank == 0
    if kind in INSIDE:
        return INSIDE[kind](lambda leaf: called(ENTRIES[name], env, leaf, like(leaf)), plain), None
    want = None
    values = [KINDS[kind](plain)[1] for _ in range(4)]
    if values[0] is not None:
        want = called(ENTRIES[name], env, values[0], values[1])
    leaf = KINDS[kind](plain)[0]
    twin = like(leaf) if values[2] is None else values[2]
    return called(ENTRIES[name], env, twin if is_alone else leaf, twin), want


def called(function, env, leaf, twin):
    try:
        return "value", seen(function(env, leaf, twin))
    except Exception as error:
        return "error", type(error).__name__, str(error)


def seen(value):
    """Return a result in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, np.ndarray):
        return bits(torch.from_numpy(value))
    if isinstance(value, dict):
        return {str(key): seen(part) for key, part in value.items()}
    return [seen(part) for part in value] if isinstance(value, list | tuple) else str(value)


def bits(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        if absence(tensor) and not tensor._is_zerotensor():
            return UNREAD
        plain = tensor.clone() if tensor._is_zerotensor() else tensor.detach()
        data = plain.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(data, digest_size=8).hexdigest()
