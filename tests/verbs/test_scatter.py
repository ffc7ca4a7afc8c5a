"""scatter gives each rank its part of one rank's tree; all_to_all each rank its part of every rank's."""

import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from counting import recorded

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed
from easydist.testing.conformance import MOVED, sample

ALL = (1, 2, 3, 4)
Point = namedtuple("Point", "x y")


def tree_of(rank, rows):
    grid = torch.arange(rows * 6).view(rows, 2, 3) + 1000 * rank
    return {
        "p": Point(grid, grid.transpose(1, 2).float()),
        "a": np.arange(rows) + rank,
        "s": "text",
        "b": [grid[:, 0, 0] > 3],
    }


def parts_of(tree, world_size):
    """Return the result that each rank should get, computed by one process."""
    values, spec = easydist.tree.flatten(tree)
    columns = [torch.tensor_split(torch.as_tensor(value), world_size) for value in values]
    return [spec.rebuild([column[r] for column in columns]) for r in range(world_size)]


def assert_equal(got, want):
    got, want = easydist.tree.flatten(got)[0], easydist.tree.flatten(want)[0]
    for one, other in zip(got, want, strict=True):
        assert torch.as_tensor(one).dtype == torch.as_tensor(other).dtype
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@distributed(world_size=ALL)
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_scatter_is_tensor_split_and_gather_undoes_it(rank, world_size, rows):
    for source in range(world_size):
        data = tree_of(source, rows)
        got = easydist.scatter(data if rank == source else None, source)
        assert_equal(got, parts_of(data, world_size)[rank])
        assert isinstance(got["p"], Point)
        assert isinstance(got["a"], np.ndarray)
        assert got["s"] == "text"
        assert_equal(easydist.gather(got), data)


@distributed(world_size=(2, 3))
def test_scatter_along_another_dim_in_every_dtype(rank, world_size):
    data = {str(dtype): sample(0, 20, dtype).view(4, 5) for dtype in MOVED}
    got = easydist.scatter(data if rank == 0 else "not looked at", dim=1)
    for dtype in MOVED:
        want = torch.tensor_split(data[str(dtype)].view(torch.uint8).view(4, 5, -1), world_size, dim=1)[rank]
        assert torch.equal(got[str(dtype)].contiguous().view(torch.uint8).flatten(), want.flatten())


@pytest.mark.parametrize("numel", [6, 60_000])
@distributed(world_size=(1, 2, 3))
def test_scatter_along_the_last_dim(rank, world_size, numel):
    tree = {"one": torch.arange(numel), "two": torch.arange(2 * numel).view(2, -1), "three": torch.ones(2, 1, numel)}
    got = easydist.scatter(tree if rank == 0 else None, dim=-1)
    for name, leaf in tree.items():
        assert torch.equal(got[name], torch.tensor_split(leaf, world_size, dim=-1)[rank])


@distributed(world_size=2)
def test_scatter_keeps_ties(rank):
    tied = torch.arange(4)
    got = easydist.scatter([tied, tied] if rank == 0 else None)
    assert got[0] is got[1]
    assert got[0].tolist() == [2 * rank, 2 * rank + 1]


@distributed(world_size=2)
def test_scatter_of_what_cannot_be_cut_is_an_error_for_all(rank):
    with pytest.raises(RemoteError, match=r"ValueError: scatter: \['x'\] of shape \(\) has no dim 0"):
        easydist.scatter({"x": torch.tensor(1)} if rank == 0 else None)
    with pytest.raises(ValueError, match="from_process=-1 is not a rank"):
        easydist.scatter(torch.ones(2), -1)
    assert easydist.scatter(torch.arange(2) if rank == 0 else None).tolist() == [rank]


@distributed(world_size=ALL)
def test_all_to_all_is_the_transpose_of_the_parts(rank, world_size):
    for rows in (lambda r: 5, lambda r: 2 * r, lambda r: 1):
        got = easydist.all_to_all(tree_of(rank, rows(rank)))
        columns = [parts_of(tree_of(s, rows(s)), world_size)[rank] for s in range(world_size)]
        assert_equal(got, easydist.concatenate(columns))


@distributed(world_size=3)
def test_all_to_all_along_another_dim(rank, world_size):
    grids = [torch.arange(2 * 7).view(2, 7) + 100 * s for s in range(world_size)]
    got = easydist.all_to_all(grids[rank], dim=-1)
    want = torch.cat([torch.tensor_split(grid, world_size, dim=-1)[rank] for grid in grids], dim=-1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("nbytes", [(1 << 19) - 8, 1 << 19, (1 << 19) + 8])
@distributed(world_size=(2, 3))
def test_all_to_all_of_half_a_mebibyte_and_more_has_a_communicator_of_its_own(rank, world_size, nbytes):
    wholes = [torch.arange(nbytes // 8) + r for r in range(world_size)]
    control = easydist.ProcessState().communicators().met().control
    with recorded() as operations:
        got = easydist.all_to_all(wholes[rank])
    assert torch.equal(got, torch.cat([torch.tensor_split(whole, world_size)[rank] for whole in wholes]))
    assert [comm is control for kind, comm in operations if kind == "all_to_all"] == [nbytes < 1 << 19]


@pytest.mark.parametrize("dim", [0, 1])
@distributed(world_size=[2, 3])
def test_leaves_that_are_large_on_one_rank_only(rank, world_size, dim):
    """All ranks have to make the same messages. A large leaf may have any strides."""

    def tree(r):
        large = torch.arange(200_000).view(500, 400).T if r == 1 else torch.arange(5).view(5, 1).expand(5, 500)
        leaves = {
            "wide": torch.full((2 + r, 4), r, dtype=torch.complex128),
            "large": large,
            "both": torch.ones(400, 400),
        }
        return leaves if dim == 0 else {name: leaf.T for name, leaf in leaves.items()}

    got, trees = easydist.all_to_all(tree(rank), dim=dim), [tree(r) for r in range(world_size)]
    for name in got:
        parts = [torch.tensor_split(one[name], world_size, dim)[rank] for one in trees]
        assert torch.equal(got[name], torch.cat(parts, dim))
    got = easydist.scatter(trees[1] if rank == 1 else None, from_process=1, dim=dim)
    for name in got:
        assert torch.equal(got[name], torch.tensor_split(trees[1][name], world_size, dim)[rank])


@distributed(world_size=2)
def test_all_to_all_of_other_shapes_is_an_error(rank):
    with pytest.raises(
        DisagreementError, match=r"Only dim 0 may differ between ranks; pad the other dims first: .*dim=1\)"
    ):
        easydist.all_to_all(torch.ones(2, 3 + rank))


@distributed(world_size=2)
def test_a_structure_that_cannot_be_pickled_is_an_error_for_all(rank):
    data = {"x": torch.arange(4), "lock": threading.Lock()} if rank == 0 else None
    for verb in (easydist.scatter, easydist.broadcast, easydist.copy_tensor_to_devices):
        with pytest.raises(RemoteError, match=r"rank 0: TypeError: .*cannot"):
            verb(data)
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_parts_do_not_share_memory(rank):
    got = easydist.scatter([torch.ones(2), torch.ones(2)] if rank == 0 else None)
    assert [part.untyped_storage().nbytes() for part in got] == [4, 4]


class OnRank0Only:
    """Can be unpickled where it was made, and nowhere else."""

    def __reduce__(self):
        return make_on_rank_0, ()


def make_on_rank_0():
    if torch.distributed.get_rank():
        raise LookupError("not here")
    return OnRank0Only()


@distributed(world_size=3)
def test_a_structure_that_one_receiver_cannot_make_is_an_error_for_all(rank):
    data = {"x": torch.arange(3), "odd": OnRank0Only()} if rank == 0 else None
    for verb in (easydist.scatter, easydist.broadcast):
        with pytest.raises(RemoteError, match="ranks 1, 2 failed before the exchange\n  rank 1: LookupError: not here"):
            verb(data)
    assert easydist.gather(rank).tolist() == [0, 1, 2]
