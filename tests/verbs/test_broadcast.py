"""broadcast(x, from_process=s) == x of rank s, in place."""

import re
from collections import namedtuple

import numpy as np
import pytest
import torch

import easydist
from easydist import DisagreementError, RemoteError, tree
from easydist.testing import distributed
from easydist.testing.conformance import MOVED, sample

ALL = (1, 2, 3, 4)
Point = namedtuple("Point", "x y")


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@distributed(world_size=ALL)
def test_every_rank_gets_the_sources_values_in_place(rank, world_size):
    for source in range(world_size):
        grid = torch.full((3, 2), rank).t()
        array = np.full(4, rank, np.int16)
        data = {"grid": grid, "point": Point(array, [torch.tensor(float(rank)), "text", None]), "number": rank}
        got = easydist.broadcast(data, source)
        assert got["grid"] is grid
        assert got["point"].x is array
        assert isinstance(got["point"], Point)
        assert grid.tolist() == [[source] * 3] * 2
        assert array.tolist() == [source] * 4
        assert (got["point"].y, got["number"]) == ([torch.tensor(float(source)), "text", None], source)


@distributed(world_size=2)
def test_autograd_notices_what_is_written_at_any_size(rank):
    for numel in (4, 1 << 17):  # packed with others, and straight into the target
        weight, other = torch.full((numel,), float(rank), requires_grad=True), torch.ones(2)
        loss = (weight * weight).sum()
        easydist.broadcast([weight, other], 1)
        if rank == 1:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        with torch.inference_mode():
            values = easydist.broadcast(torch.full((numel,), float(rank)), 1)
        assert values.unique().tolist() == [1.0]


@distributed(world_size=(2, 3))
def test_every_dtype_comes_bit_for_bit(rank):
    mine = {str(dtype): sample(rank, 7, dtype) for dtype in MOVED}
    easydist.broadcast(mine, 1)
    for dtype in MOVED:
        assert bits(mine[str(dtype)]) == bits(sample(1, 7, dtype))


@distributed(world_size=2)
def test_one_big_tensor_lands_where_it_belongs(rank):
    x = torch.full((1000, 100), float(rank))
    place = x.data_ptr()
    assert easydist.broadcast(x, 1) is x
    assert x.data_ptr() == place
    assert x.unique().tolist() == [1.0]


@distributed(world_size=2)
def test_slices_of_a_tensor_are_written_and_nothing_else(rank):
    base = torch.full((4, 4), float(rank))
    easydist.broadcast({"a": base[:, 1], "b": base[0, 2:]}, 1)
    want = torch.full((4, 4), float(rank))
    want[:, 1] = want[0, 2:] = 1
    assert torch.equal(base, want)


LAYOUTS = {
    "columns": lambda base: base[:, 100:],
    "every second row": lambda base: base[::2],
    "transposed": lambda base: base.t(),
    "columns, transposed": lambda base: base[:, :700].t(),
}


@pytest.mark.parametrize("numel", [25_000, 1_000_000], ids=["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=(2, 3))
def test_large_targets_are_written_through_their_strides_and_nothing_beside_them(rank, layout, numel):
    """Large ones, and on 3 ranks the others, too, arrive after the header, contiguous targets as they are."""
    values = torch.arange(numel).view(-1, 1000)
    base, want = torch.full_like(values, -1), torch.full_like(values, -1)
    source = LAYOUTS[layout](values.clone())
    LAYOUTS[layout](want).copy_(source)
    target = source.clone() if rank == 1 else LAYOUTS[layout](base)
    assert easydist.broadcast({"x": target}, 1)["x"] is target
    assert torch.equal(target, source)
    assert rank == 1 or torch.equal(base, want)


@pytest.mark.parametrize("numel", [3, 50_000, 100_000])
@distributed(world_size=(2, 3))
def test_what_the_source_ties_may_be_apart_elsewhere(rank, numel):
    x = torch.full((numel,), float(rank))
    data = [x, x] if rank == 1 else [x, x.clone()]
    assert [leaf.unique().tolist() for leaf in easydist.broadcast(data, 1)] == [[1.0], [1.0]]


@distributed(world_size=2)
def test_conjugate_views_and_parameters_are_written(rank):
    z = torch.full((2,), complex(rank, rank))
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    easydist.broadcast({"z": z.conj(), "weight": weight}, 1)
    assert z.tolist() == [1 + 1j] * 2
    assert weight.tolist() == [1.0, 1.0]


@distributed(world_size=(2, 3))
def test_other_ranks_may_pass_none(rank):
    tied = torch.arange(3)
    data = {"t": tied, "again": tied, "a": np.ones(2), "point": Point(1.5, "text"), "e": torch.empty(0, 2)}
    got = easydist.broadcast(data if rank == 1 else None, 1)
    assert got["t"].tolist() == [0, 1, 2]
    assert got["again"] is got["t"]
    assert isinstance(got["a"], np.ndarray)
    assert got["point"] == Point(1.5, "text")
    assert got["e"].shape == (0, 2)
    assert easydist.broadcast(None) is None


@distributed(world_size=(2, 3))
def test_a_tree_without_data_is_refused_on_the_ranks_that_pass_none_too(rank):
    for verb in (easydist.broadcast, easydist.copy_tensor_to_devices):
        with pytest.raises(RemoteError, match=r"rank 0: TypeError: .* holds no tensor, array or number"):
            verb({"name": "text"} if rank == 0 else None)
        assert verb({} if rank == 0 else None) == {}
    assert easydist.gather(rank)[-1] == torch.distributed.get_world_size() - 1


@distributed(world_size=(1, 2, 3))
def test_copy_tensor_to_devices_finds_the_one_holder(rank, world_size):
    for holder in range(world_size):
        got = easydist.copy_tensor_to_devices({"x": torch.full((2,), holder)} if rank == holder else None)
        assert got["x"].tolist() == [holder] * 2
    with pytest.raises(ValueError, match=r"exactly one rank has to pass the tensor, but none does"):
        easydist.copy_tensor_to_devices(None)
    if world_size > 1:
        with pytest.raises(ValueError, match=r"exactly one rank has to pass the tensor, but ranks 0, 1 do"):
            easydist.copy_tensor_to_devices(torch.ones(2) if rank < 2 else None)


@distributed(world_size=(2, 3))
def test_a_structure_larger_than_a_frame_comes_from_any_source(rank, world_size):
    source = world_size - 1
    tree = {f"{'a long name ' * 3}{i}": torch.tensor([i]) for i in range(1500)}
    got = easydist.broadcast(tree if rank == source else None, from_process=source)
    assert list(got) == list(tree)
    assert torch.cat([*got.values()]).tolist() == [*range(1500)]


@distributed(world_size=2)
def test_shapes_that_differ_are_an_error_and_targets_stay(rank):
    target = torch.full((3 + 2 * rank,), float(rank))
    with pytest.raises(DisagreementError) as caught:
        easydist.broadcast({"x": target})
    assert re.sub(r":\d+\n", ":N\n", str(caught.value)) == (
        "broadcast: ranks disagree on 1 of 1 leaves\n"
        "  ['x']  rank 0: float32 (3,)   rank 1: float32 (5,)\n"
        "Called at tests/verbs/test_broadcast.py:N\n"
        "Pass the same structure, dtypes and shapes on every rank."
    )
    assert target.unique().tolist() == [float(rank)]
    assert easydist.broadcast(rank, 1) == 1


@distributed(world_size=2)
def test_a_target_that_cannot_be_written_is_an_error_for_all(rank):
    read_only = np.zeros(2)
    read_only.flags.writeable = rank == 0
    with pytest.raises(
        RemoteError,
        match=r"(?s)rank 1 failed.*leaf \['a'\] is a read-only array \(pass a copy\), so it cannot be written",
    ):
        easydist.broadcast({"a": read_only})
    expanded = torch.zeros(1).expand(3) if rank else torch.ones(3)
    with pytest.raises(RemoteError, match="is an expanded tensor whose elements share memory"):
        easydist.broadcast(expanded)


@distributed(world_size=2)
def test_a_missing_source_is_an_error_for_all(rank):
    with pytest.raises(ValueError, match=r"from_process=2 is not a rank of the group, which has 2 ranks \(0–1\)"):
        easydist.broadcast(torch.ones(1), 2)
    with pytest.raises(ValueError, match="rank 0 is the source, but its tree is None"):
        easydist.broadcast(None if rank == 0 else torch.ones(1))
    assert easydist.broadcast(rank) == 0


def overlapping(kind):
    base = torch.zeros(400_000)
    array = np.zeros(20)
    return {
        "strides": base.as_strided((200_000, 2), (1, 1)),
        "NumPy strides": np.lib.stride_tricks.sliding_window_view(array, 3, writeable=True),
        "parts": {"a": base[:300_000], "b": base[100_000:]},
        "small parts": {"a": base[:3], "b": base[2:5]},
    }[kind]


@pytest.mark.parametrize("kind", ["strides", "NumPy strides", "parts", "small parts"])
@distributed(world_size=2)
def test_targets_that_share_memory_are_refused_before_anything_moves(rank, kind):
    target = overlapping(kind)
    source = tree.map(lambda leaf: leaf.copy() + 1 if isinstance(leaf, np.ndarray) else leaf.clone() + 1, target)
    with pytest.raises(RemoteError, match="share memory"):
        easydist.broadcast(target if rank else source)
    assert all(not leaf.any() for leaf in tree.leaves(target))
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.parametrize("numel", [3, 100_000])
@distributed(world_size=(2, 3))
def test_leaves_that_are_one_on_a_target_only_are_refused_on_all_ranks(rank, world_size, numel):
    one = torch.zeros(numel)
    for pair in ([one, one], [one, one.detach()], {"a": one, "b": one.view(numel), "s": "text"}):
        apart = tree.map(lambda leaf: leaf.clone() + 1, pair)
        with pytest.raises(ValueError, match=f"one tensor on rank {world_size - 1} are not on rank 0"):
            easydist.broadcast(pair if rank == world_size - 1 else apart)
        assert not one.any()
        with pytest.raises(ValueError, match="are not on rank 0"):  # ranks without a tree raise it, too
            easydist.broadcast(pair if rank == world_size - 1 else apart if rank == 0 else None)
        got = easydist.broadcast(apart if rank else tree.map(lambda leaf: leaf, pair))  # tied at the source alone: fine
        assert all(not leaf.any() for leaf in tree.leaves(got))
    tied = [one, one.detach()] if rank else [one + 1] * 2
    with pytest.raises(ValueError, match="are not on rank 0"):
        easydist.broadcast(tied if rank else [one + 1, one + 2])


@pytest.mark.parametrize("size", [3, 100_000])
@distributed(world_size=2)
def test_leaves_in_the_same_memory_may_be_one_object_or_several(rank, size):
    """A checkpoint holds tied weights as one tensor, ``state_dict`` as two in the same memory."""
    one, other = (torch.full((size,), float(rank)) for _ in range(2))
    trees = [one, one, other, one], [one, one.detach(), other, one[:]]
    for src in (0, 1):
        for unlike in (0, 1):
            one.fill_(rank)
            got = easydist.broadcast(trees[rank == unlike], group_src=src)
            assert all(new is old for new, old in zip(got, trees[rank == unlike], strict=True))
            assert (one == src).all()
    for apart in ([one, one.clone(), other, one], [one, other, other, one]):
        with pytest.raises(ValueError, match="leaves that are one tensor on rank 1 are not on rank 0"):
            easydist.broadcast(trees[1] if rank else apart)
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.parametrize("converted", [0, 1])
@pytest.mark.parametrize("size", [3, 100_000])
@distributed(world_size=2)
def test_leaves_that_are_one_on_all_ranks_may_be_converted_on_some(rank, converted, size):
    """Such a leaf has a copy for each of its places, so its tensors do not share memory."""
    array = np.full(size, rank, ">f8" if rank == converted else "<f8")
    tensor = torch.full((size,), 1j + rank)
    tensor = tensor.conj() if rank == converted else tensor
    got = easydist.broadcast([array, tensor, array, tensor])
    assert got[0] is got[2] is array
    assert got[1] is got[3] is tensor
    assert (array == 0).all()
    assert (tensor == (-1j if converted == 0 else 1j)).all()


@distributed(world_size=2)
def test_tied_weights_are_broadcast(rank):
    layer = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(layer.weight, rank)
    model = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Linear(3, 3)})
    model["b"].weight = layer.weight
    easydist.broadcast(model.state_dict(), 1)
    assert (model["a"].weight == 1).all()
