"""What is made in inference mode works outside of it, and the reverse: evaluation first, then training."""

import warnings

import pytest
import torch
import torch.distributed as dist
from launching import within
from leaf_entries import ENTRIES, Env, like
from test_leaf_kinds import SHAPES, called

import easydist
from easydist.comms import ReduceOp, new_comm
from easydist.testing import default_pool, distributed


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["inside", "outside"])
def test_every_entry_gives_the_same_inside_and_outside(first):
    for outcomes in default_pool().run(play, 2, first, timeout=within(60)):
        for (name, size), found in outcomes.items():
            assert found[0][0] == "value", (name, size, found)
            assert found[0] == found[1] == found[2], (name, size, found)


def play(rank, first):
    env, outcomes = Env(rank), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ENTRIES:
            for size, shape in SHAPES.items():
                found = []
                for mode in (first, not first, first):
                    with torch.inference_mode(mode):
                        leaf = (torch.arange(shape[0] * shape[1]) % 97 + rank).float().view(shape)
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
            mine = [torch.full((numel // 2, 2), rank + 1.0) for _ in range(4)]
            columns = mine[1].t()
            works = [comm.all_reduce(mine[0], ReduceOp.SUM, True), comm.all_reduce(columns, ReduceOp.SUM, True)]
            works += [dist.all_reduce(mine[2], group=group, async_op=True)]
            works += [dist.broadcast(mine[3], group_src=1, group=group, async_op=True)]
        for work in works:
            work.wait()
        assert [tensor.unique().tolist() for tensor in mine] == [[3.0], [3.0], [3.0], [2.0]]
        assert all(tensor.is_inference() for tensor in mine)
    assert easydist.gather(rank).tolist() == [0, 1]
