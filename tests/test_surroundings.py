"""Calls give the same whatever surrounds them: inference mode, a default device or dtype, torch's and NumPy's modes.

Evaluation in inference mode comes before training, or after it: what the first call makes has to serve the next one.
"""

import contextlib
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import sampled, within
from leaf_entries import ENTRIES, Env, like
from test_leaf_kinds import SHAPES, called
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import easydist
import easydist.process_group  # registers easydist_shm
from easydist.comms import ReduceOp, new_comm
from easydist.testing import default_pool, distributed


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def setting(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextlib.contextmanager
def modes():
    with FunctionMode(), DispatchMode(), torch.no_grad(), torch.autocast("cpu"), np.errstate(all="raise"):
        yield


SURROUNDINGS = {
    "inference mode": torch.inference_mode,
    "a default device": lambda: torch.device("meta"),
    "a default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic algorithms": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "modes": modes,
}


ORDERS = [(name, first) for i, name in enumerate(SURROUNDINGS) for first in (i % 2 == 0, i % 2 == 1)]
"""The surroundings with the first call inside or outside; the sample is each with one of both, in turn."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), sampled(ORDERS))
def test_every_entry_gives_the_same_inside_and_outside(name, first):
    for outcomes in default_pool().run(play, 2, name, first, timeout=within(60)):
        for step, found in outcomes.items():
            assert found[0][0] == "value", (step, found)
            assert found[0] == found[1] == found[2], (step, found)


def play(rank, surrounding, first):
    env, outcomes = Env(rank), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ENTRIES:
            for size, shape in SHAPES.items() if surrounding == "inference mode" else [("small", SHAPES["small"])]:
                found = []
                for is_inside in (first, not first, first):
                    with SURROUNDINGS[surrounding]() if is_inside else contextlib.nullcontext():
                        values = torch.arange(shape[0] * shape[1], device="cpu") % 97 + rank
                        leaf = values.to(torch.float32).view(shape)
                        found.append(called(ENTRIES[name], env, leaf, like(leaf)))
                outcomes[name, size] = found
    env.works()
    return outcomes


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@distributed(world_size=2)
def test_an_operation_begun_in_inference_mode_ends_outside_of_it(rank, backend):
    comm = new_comm(backend, torch.device("cpu"), "inference")
    group = dist.new_group(backend="gloo" if backend == "gloo" else "easydist_shm")
    for numel in (6, 1 << 18):
        with torch.inference_mode():
            mine = [torch.full((numel // 2, 2), rank + 1.0) for _ in range(8)]
            columns = mine[1].t()
            works = [comm.all_reduce(mine[0], ReduceOp.SUM, True), comm.all_reduce(columns, ReduceOp.SUM, True)]
            works += [comm.reduce(mine[4], 0, ReduceOp.PREMUL_SUM(0.5), True)]
            works += [comm.reduce_scatter(mine[5], [mine[6], mine[7]], ReduceOp.PREMUL_SUM(0.5), True)]
            works += [dist.all_reduce(mine[2], group=group, async_op=True)]
            works += [dist.broadcast(mine[3], group_src=1, group=group, async_op=True)]
        for work in works:
            work.wait()
        assert [tensor.unique().tolist() for tensor in mine[:4]] == [[3.0], [3.0], [3.0], [2.0]]
        assert [tensor.unique().tolist() for tensor in mine[4:6]] == [[2.0 if rank else 1.5], [1.5]]
        assert all(tensor.is_inference() for tensor in mine)
    assert easydist.gather(rank).tolist() == [0, 1]
