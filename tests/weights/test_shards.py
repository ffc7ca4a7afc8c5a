"""Weights that code shards by hand, as ``LocalShard``s: sources and receivers of every call."""

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from trees import assert_same

from easydist import DisagreementError, RemoteError, weights
from easydist.testing import distributed
from easydist.weights import LocalShard, WeightPublisher, WeightReceiver

WIDE = 600
WHOLE = {
    "rows": torch.arange(6.0 * WIDE).view(WIDE, 6),
    "columns": torch.arange(4.0 * WIDE).view(4, WIDE),
    "large": torch.arange(700.0 * WIDE).view(WIDE, 700),
    "bias": torch.arange(7.0),
    "step": torch.tensor(3),
}
DIMS = {"rows": 0, "columns": 1, "large": 1}
"""The dimension along which an engine splits an entry."""


def part(name, at, of=2, dim=None, add=0.0):
    """One of several equal parts of an entry."""
    dim = DIMS[name] if dim is None else dim
    values = (WHOLE[name] + add).chunk(of, dim)[at].contiguous()
    start = [0] * values.ndim
    start[dim] = at * values.shape[dim]
    return LocalShard(values, start, WHOLE[name].shape)


def half(at, dim=None, add=0.0):
    """One of the two halves of a model, whose small entries are whole."""
    return {
        name: part(name, at, 2, dim, add) if name in DIMS else (value + add).to(value.dtype)
        for name, value in WHOLE.items()
    }


def empty(state, dtype=None):
    """A model like this, without values."""

    def zeros(value):
        if isinstance(value, LocalShard):
            return value._replace(tensor=zeros(value.tensor))
        return torch.zeros_like(value, dtype=dtype if value.is_floating_point() else None)

    return {name: zeros(value) for name, value in state.items()}


def tensors(state):
    return {name: value.tensor if isinstance(value, LocalShard) else value for name, value in state.items()}


def cast(state, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors(state).items()}


@pytest.mark.slow
@distributed(world_size=4)
def test_versions_go_from_one_layout_by_hand_to_another(rank):
    """Ranks 0 and 1 train, each with half of the rows; ranks 2 and 3 infer with halves along other dimensions."""
    trains = rank < 2
    mine = half(rank, dim=0) if trains else empty(half(rank - 2), torch.bfloat16)
    options = {"src": [0, 1]}
    member = WeightPublisher(mine, **options) if trains else WeightReceiver(mine, **options)
    places = [value.data_ptr() for value in tensors(mine).values()]
    assert (member.publish() if trains else member.arrive()) == 1
    if not trains:
        assert all(not value.any() for value in tensors(mine).values())
        member.commit()
        assert_same(tensors(mine), cast(half(rank - 2), torch.bfloat16))
    for value in tensors(mine).values() if trains else ():
        value += 5
    assert (member.publish(changed=["rows", "bias"]) if trains else member.receive()) == 2
    if not trains:
        want = {**half(rank - 2), **{name: half(rank - 2, add=5)[name] for name in ("rows", "bias")}}
        assert_same(tensors(mine), cast(want, torch.bfloat16))
        assert [value.data_ptr() for value in tensors(mine).values()] == places


@pytest.mark.slow
@distributed(world_size=4)
def test_a_part_of_an_engine_is_replaced(rank):
    """Rank 0 trains, ranks 1 and 2 serve halves; then rank 3 serves in place of rank 2, and then of rank 1."""
    before, after = dist.new_group([0, 1, 2]), dist.new_group()
    trained = {name: value.clone() for name, value in WHOLE.items()}
    mine = trained if rank == 0 else empty(half(rank - 1 if rank < 3 else 0))
    member = None
    if rank < 3:
        member = WeightPublisher(mine, group=before) if rank == 0 else WeightReceiver(mine, group=before)
        assert (member.publish() if rank == 0 else member.receive()) == 1
    for value in trained.values():
        value += 100  # the trainer goes on
    member = WeightReceiver(mine) if rank == 3 else member
    assert member.regroup(after, src=0) == 1
    if rank:  # from the halves, not from the publisher
        assert_same(tensors(mine), tensors(half(rank - 1 if rank < 3 else 0)))


@pytest.mark.slow
@pytest.mark.parametrize("second", ["whole", "overlapping"])
@distributed(world_size=4)
def test_holders_of_other_layouts_make_a_version_together(second, rank):
    """Rank 0 trains, rank 1 has the upper half, and rank 2 all or the lower three quarters; rank 3 wants all."""
    before, after = dist.new_group([0, 1, 2]), dist.new_group()
    values = torch.arange(24.0).view(4, 6)
    lower = LocalShard(values[1:].clone(), [1, 0], [4, 6])
    mine = [values, LocalShard(values[:2].clone(), [0, 0], [4, 6]), values if second == "whole" else lower, values][
        rank
    ]
    held = {"w": mine.clone() if rank == 0 else empty({"w": mine})["w"]}
    member = None
    if rank < 3:
        member = WeightPublisher(held, group=before) if rank == 0 else WeightReceiver(held, group=before)
        assert (member.publish() if rank == 0 else member.receive()) == 1
    if rank == 0:
        held["w"] += 100  # the trainer goes on
    member = WeightReceiver(held) if rank == 3 else member
    assert member.regroup(after, src=0) == 1
    if rank:  # from the engines, not from the publisher
        assert_same(tensors(held), tensors({"w": mine}))


@pytest.mark.slow
@distributed(world_size=3)
def test_the_other_calls_take_them_too(rank, tmp_path):
    source, whole = half(rank) if rank < 2 else None, None
    state = weights.broadcast_state_dict(source if rank < 2 else whole, src=[0, 1])
    if rank == 2:
        assert_same(state, WHOLE)
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in WHOLE.items()}, tmp_path / "all.safetensors"
        )
    mine = empty(half(rank % 2))
    weights.broadcast_checkpoint(tmp_path / "all.safetensors" if rank == 2 else "nowhere", mine, 2, verify=True)
    assert_same(tensors(mine), tensors(half(rank % 2)))


@pytest.mark.slow
@distributed(world_size=3)
def test_what_does_not_fit_is_an_error_on_all_ranks(rank):
    w = torch.arange(4.0)

    def refused(error, said, source, target, src=(0, 1)):
        with pytest.raises(error, match=said):
            weights.broadcast_state_dict({"w": source} if rank in src else {"w": target}, src=list(src))

    halves = LocalShard(w[2 * (rank % 2) :][:2], [2 * (rank % 2)], [4])
    refused(DisagreementError, r"ranks \[0, 1\] together do not hold all of w", LocalShard(w[:2], [0], [4]), w)
    refused(DisagreementError, "together do not hold all of w\nPass src=", halves, w, src=(0,))
    refused(
        DisagreementError, r"w  rank 0: float32 \(4,\)   rank 2: float32 \(5,\)", halves, LocalShard(w[:2], [0], [5])
    )
    refused(
        RemoteError, r"\['w'\] is a shard of shape \(2,\) at \(3,\), not inside", halves, LocalShard(w[:2], [3], [4])
    )
    refused(RemoteError, r"\['w'\] is a shard of shape \(2,\) at \(3,\)", LocalShard(w[:2], [3], [4]), w)
    weights.broadcast_state_dict({"w": halves if rank < 2 else w.zero_()}, src=[0, 1])
    assert w.tolist() == [0, 1, 2, 3]


def test_a_shard_on_the_meta_device_is_refused():
    with pytest.raises(ValueError, match=r"\['w'\] is on the meta device; give it memory"):
        WeightReceiver({"w": LocalShard(torch.empty(2, device="meta"), [0], [4])})


@pytest.mark.parametrize(
    ("start", "shape", "said"),
    [("a", [4], r"start has to be one integer for each dimension, got 'a'"), ([0], 4, "shape has to be one integer")],
)
def test_places_are_integers(start, shape, said):
    with pytest.raises(TypeError, match=said):
        LocalShard(torch.ones(2), start, shape)
    with pytest.raises(TypeError, match="tensor has to be a tensor, got list"):
        LocalShard([1], [0], [4])


@pytest.mark.slow
@distributed(world_size=3)
def test_one_part_in_two_places_is_no_tie(rank):
    part = torch.full((2,), rank + 1.0)
    places = {"a": 2 * rank, "b": 2 - 2 * rank}
    shards = {name: LocalShard(part, np.array([start]), torch.tensor([4])) for name, start in places.items()}
    state = weights.broadcast_state_dict(shards if rank < 2 else None, src=[0, 1])
    if rank == 2:
        assert_same(state, {"a": torch.tensor([1.0, 1, 2, 2]), "b": torch.tensor([2.0, 2, 1, 1])})
    whole = torch.arange(4.0)
    both = {"a": LocalShard(part, [1], [4]), "b": LocalShard(part, [2], [4])}
    with pytest.raises(RemoteError, match=r"rank 2: .*share memory, but are different parts"):
        weights.broadcast_state_dict({"a": whole, "b": whole} if rank < 2 else both, src=0)


@pytest.mark.slow
@distributed(world_size=2)
def test_a_source_that_would_be_overwritten_is_refused(rank):
    buffer = torch.arange(2.0) + 10 * rank
    held, wanted = (LocalShard(buffer, [2 * at], [4]) for at in (rank, 1 - rank))
    with pytest.raises(ValueError, match=r"the target \['w'\] shares memory with the source \['w'\], which it would"):
        weights.Resharding({"w": held}, {"w": wanted})
    weights.Resharding({"w": held}, {"w": held}).run()  # each block takes the place of itself
    assert buffer.tolist() == [10 * rank, 10 * rank + 1]


@pytest.mark.slow
@pytest.mark.parametrize("empty_rank", [0, 1])
@distributed(world_size=3)
def test_a_rank_without_rows_of_tied_parameters_agrees(rank, empty_rank):
    rows = 0 if rank == empty_rank else 1
    part = torch.full((rows, 4), 7.0)
    shards = {name: LocalShard(part, [0, 0], [1, 4]) for name in ("emb.weight", "head.weight")}
    state = weights.broadcast_state_dict(shards if rank < 2 else None, src=[0, 1])
    if rank == 2:
        assert_same(state, {name: torch.full((1, 4), 7.0) for name in shards})
    member = (
        WeightReceiver(src=[0, 1])
        if rank == 2
        else WeightPublisher(dict(reversed(shards.items())) if rank else shards, src=[0, 1])
    )
    assert (member.receive() if rank == 2 else member.publish()) == 1


def test_fields_that_are_replaced_are_checked_as_new_ones():
    shard = LocalShard(torch.ones(2, 2), (0, 0), (4, 2))._replace(start=[np.int64(2), 0])
    assert isinstance(shard, LocalShard)
    assert shard[1:] == ((2, 0), (4, 2))
    with pytest.raises(TypeError, match=r"^LocalShard: start has to be one integer for each dimension, got '12'$"):
        shard._replace(start="12")
