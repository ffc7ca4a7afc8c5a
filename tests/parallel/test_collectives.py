"""Tensors among all ranks, against the single-process expression."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coordinators import made, text_of, values
from counting import exchanges
from groups import of_all
from trees import DTYPES, bits

import easydist
from easydist.testing import distributed

SUMMED = [dtype for dtype in DTYPES if not str(dtype).endswith("e8m0fnu")]
SHAPES = [(12,), (2, 12), (2, 3, 12), (12, 1, 2), (0, 12), (12, 5000)]
"""All of them have a dimension that 1, 2, 3 and 4 ranks divide."""


def total(shape, dtype, world_size):
    """The sum over ranks as torch adds it, rounded once where the dtype is small."""
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    wide = torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else wide
    parts = [values(shape, dtype, r).to(wide) for r in range(world_size)]
    return sum(parts[1:], parts[0]).to(dtype)


@pytest.mark.slow
@distributed(world_size=(1, 2, 3, 4))
def test_sums_equal_those_of_one_process_for_every_dtype_shape_and_dim(rank, world_size):
    with made(rank, world_size) as group:
        for dtype in SUMMED:
            mine, want = values((3, 4), dtype, rank), total((3, 4), dtype, world_size)
            got = group.all_reduce(mine)
            assert (got.dtype, bits(got)) == (dtype, bits(want)), dtype
            assert bits(mine) == bits(values((3, 4), dtype, rank))
        for shape in SHAPES:
            mine, want = values(shape, torch.float32, rank), total(shape, torch.float32, world_size)
            assert torch.equal(group.all_reduce(mine), want)
            for dim in [d for d, n in enumerate(shape) if n % 12 == 0] + [
                d - len(shape) for d, n in enumerate(shape) if n == 12
            ]:
                assert torch.equal(group.reduce_scatter(mine, dim), want.chunk(world_size, dim)[rank])
                assert torch.equal(group._reduce_scatter_out_place(mine, dim), want.chunk(world_size, dim)[rank])


@pytest.mark.slow
@distributed(world_size=(1, 2, 3, 4))
def test_parts_are_put_together_along_any_dim(rank, world_size):
    with made(rank, world_size) as group:
        for shape in [(4,), (2, 3), (2, 3, 4), (0, 2), (300, 400)]:
            every = [values(shape, torch.float32, r) for r in range(world_size)]
            for dim in [*range(len(shape)), -1]:
                want, mine = torch.cat(every, dim), every[rank]
                assert torch.equal(group.all_gather(mine, dim), want)
                for dst in {0, world_size - 1}:
                    got = group.gather(mine, dst, dim)
                    assert torch.equal(got, want) if rank == dst else got is None
            assert torch.equal(group.all_gather(every[rank]), torch.cat(every, -1))
        for dtype in DTYPES:
            every = [values((2, 3), dtype, r) for r in range(world_size)]
            assert bits(group.all_gather(every[rank], 0)) == b"".join(map(bits, every))


@pytest.mark.slow
@distributed(world_size=(1, 2, 3, 4))
def test_sizes_may_differ_and_be_zero(rank, world_size):
    sizes = [3, 0, 2, 5][:world_size]
    every = [values((n, 2), torch.float32, r) for r, n in enumerate(sizes)]
    whole = values((sum(sizes), 2), torch.float32, 0)
    with made(rank, world_size) as group:
        for given in (None, sizes):
            assert torch.equal(group.all_gatherv(every[rank], sizes=given), torch.cat(every))
            pair = group.all_gatherv([every[rank], every[rank].double()], 0, given)
            assert torch.equal(pair[1], torch.cat(every).double())
            assert torch.equal(group.all_gatherv(every[rank].t().contiguous(), 1, given), torch.cat(every).t())
        assert torch.equal(group.reduce_scatterv(whole, 0, sizes), (world_size * whole).split(sizes)[rank])
        assert torch.equal(group.reduce_scatterv(whole.t(), -1, sizes), (world_size * whole.t()).split(sizes, 1)[rank])
        assert torch.equal(group.reduce_scatterv(whole, 0), torch.tensor_split(world_size * whole, world_size)[rank])
        big = torch.ones(sum(sizes) * 10_000, 2)
        assert group.reduce_scatterv(big, 0, [n * 10_000 for n in sizes]).shape == (sizes[rank] * 10_000, 2)


@distributed(world_size=2)
def test_strided_tensors_and_their_neighbours_stay_as_they_are(rank):
    with made(rank, 2) as group:
        for base in (torch.arange(24.0).view(4, 6), torch.arange(240_000.0).view(400, 600)):
            before = base.clone()
            for view in (base[:, 1::2], base.t(), base[::2], base[:1].expand(*base.shape)):
                want = view.clone()
                assert torch.equal(group.all_reduce(view), 2 * want)
                assert torch.equal(group.all_gather(view, 0), torch.cat([want, want]))
                assert torch.equal(group.reduce_scatter(view[:, :2], 1), 2 * want[:, rank : rank + 1])
            assert torch.equal(base, before)
            column = base[:, 1] if rank else (base + 1)[:, 1]
            assert group.broadcast(column) is column
            assert torch.equal(base[:, 1], before[:, 1] + rank)
            assert torch.equal(base[:, 2:], before[:, 2:])
        assert group.all_reduce(torch.ones(2, requires_grad=True)).tolist() == [2, 2]


@distributed(world_size=2)
def test_sizes_may_be_numbers_of_any_kind(rank):
    every = [[1, 3], np.array([1, 3]), torch.tensor([1, 3]), torch.Size([1, 3])]
    with made(rank, 2) as group:
        for i, mine in enumerate(every):
            sizes = every[i - rank]
            assert group.reduce_scatterv(torch.ones(4), 0, sizes).tolist() == [2.0] * [1, 3][rank], mine
            assert group.all_gatherv(torch.ones([1, 3][rank]), 0, sizes).tolist() == [1.0] * 4, mine


@distributed(world_size=2)
def test_small_tensors_cost_one_exchange(rank):
    with made(rank, 2) as group:
        x = torch.ones(2, 4)
        for call in (group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast, group.all_gatherv):
            assert exchanges(lambda call=call: call(x)) == ["header"]
        assert exchanges(group.barrier) == ["header"]
        large = torch.ones(2, 40_000)
        assert exchanges(lambda: group.all_reduce(large)) == ["header", "all_reduce"]
        assert exchanges(lambda: group.reduce_scatter(large)) == ["header", "reduce_scatter"]


@distributed(world_size=4)
def test_groups_side_by_side_and_verbs_that_are_given_one(rank):
    with made(rank, 4, [[0, 1], [2, 3]]) as tp, made(rank, 4, [[0, 2], [1, 3]]) as pp:
        mine = torch.tensor([float(rank)])
        assert tp.all_gather(mine).tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert pp.all_gather(mine).tolist() == ([0, 2] if rank in (0, 2) else [1, 3])
        for group in (tp, pp):
            ranks = group.ranks
            assert easydist.gather(mine, group=group).tolist() == ranks
            assert easydist.reduce(mine, "sum", group=group).item() == sum(ranks)
            assert easydist.broadcast(mine.clone(), 1, group=group).item() == ranks[1]
            assert easydist.gather_object(rank, group=group) == ranks
            assert easydist.broadcast_object_list([rank], 1, group=group) == [ranks[1]]
            assert easydist.broadcast_tensor_dict({"r": mine}, src=1, group=group)["r"].item() == ranks[1]
            peer = 1 - group.rank_in_group
            if peer:
                easydist.send_tensor_dict({"r": mine}, peer, group=group)
            else:
                assert easydist.recv_tensor_dict(peer, group=group)["r"].item() == ranks[0]
            assert easydist.scatter(torch.arange(2), group=group).tolist() == [group.rank_in_group]
            dist.all_reduce(sum_ := mine.clone(), group=group.cpu_group)
            assert sum_.item() == sum(ranks)

        class Stranger:
            """vLLM's own coordinator has a cpu_group too."""

            cpu_group = tp.cpu_group

        assert easydist.gather(mine, group=Stranger()).tolist() == tp.ranks


def wrong_calls(group, rank):
    odd = torch.ones(3 + rank)
    return {
        "all_reduce(3,) and (4,)": lambda: group.all_reduce(odd),
        "dtypes": lambda: group.all_reduce(torch.ones(2, dtype=[torch.int32, torch.float32][rank])),
        "reduce_scatter of 3": lambda: group.reduce_scatter(torch.ones(3)),
        "no such dim": lambda: group.reduce_scatter(torch.ones(4), 1),
        "no such dim of all_gather": lambda: group.all_gather(torch.ones(4), 1),
        "sizes": lambda: group.reduce_scatterv(torch.ones(4), 0, [1, 2]),
        "sizes of all_gatherv": lambda: group.all_gatherv(odd, 0, [3, 3]),
        "no tensor": lambda: group.all_reduce([1.0]) if rank else group.all_reduce(torch.ones(1)),
        "other calls": lambda: group.barrier() if rank else group.all_reduce(odd),
        "src=-1": lambda: group.broadcast_tensor_dict({}, -1),
        "src=2": lambda: group.broadcast(torch.ones(2), 2),
        "src of an object": lambda: group.broadcast_object(1, src=2),
        "dst=2": lambda: group.gather(torch.ones(2), 2),
    }


WRONG = {
    "all_reduce(3,) and (4,)": "DisagreementError: all_reduce: ranks disagree on 1 of 1 leaves",
    "dtypes": "DisagreementError: all_reduce: ranks disagree on 1 of 1 leaves",
    "reduce_scatter of 3": "ValueError: reduce_scatter: dim -1 of (3,) cannot be split among 2 ranks; pass sizes",
    "no such dim": "ValueError: reduce_scatter: a tensor of 1 dimensions has no dim 1",
    "no such dim of all_gather": "ValueError: all_gather: ",
    "sizes": "ValueError: reduce_scatterv: dim 0 of (4,) cannot be split among 2 ranks as sizes=[1, 2] says",
    "sizes of all_gatherv": "RemoteError: all_gatherv: rank 1 failed before the exchange",
    "no tensor": "RemoteError: all_reduce: rank 1 failed before the exchange",
    "other calls": "DisagreementError: ",
    "src=-1": "ValueError: broadcast_tensor_dict: src=-1 is not a rank of the group",
    "src=2": "ValueError: broadcast: src=2 is not a rank of the group",
    "src of an object": "ValueError: broadcast_object: src=2 is not a rank of the group",
    "dst=2": "ValueError: gather: dst=2 is not a rank of the group",
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, "0", 1.5, -1, 9], ids=str)
@distributed(world_size=2)
def test_every_method_names_itself_if_a_rank_is_wrong(rank, wrong):
    x, shape = torch.ones(1), torch.Size([1])
    with made(rank, 2) as group, made(rank, 2, use_message_queue_broadcaster=True) as queued:
        calls = [
            ("broadcast", lambda: group.broadcast(x, wrong)),
            ("gather", lambda: group.gather(x, wrong)),
            ("broadcast_object", lambda: group.broadcast_object(1, wrong)),
            ("broadcast_object", lambda: queued.broadcast_object(1, wrong)),
            ("broadcast_object_list", lambda: group.broadcast_object_list([1], wrong)),
            ("broadcast_tensor_dict", lambda: group.broadcast_tensor_dict({"x": x}, wrong)),
            ("send", lambda: group.send(x, wrong)),
            ("recv", lambda: group.recv(shape, x.dtype, wrong)),
            ("send_object", lambda: group.send_object(1, wrong)),
            ("isend_object", lambda: group.isend_object(1, wrong)),
            ("recv_object", lambda: group.recv_object(wrong)),
            ("send_tensor_dict", lambda: group.send_tensor_dict({"x": x}, wrong)),
            ("isend_tensor_dict", lambda: group.isend_tensor_dict({"x": x}, wrong)),
            ("recv_tensor_dict", lambda: group.recv_tensor_dict(wrong)),
            ("irecv_tensor_dict", lambda: group.irecv_tensor_dict(wrong)),
        ]
        kind = "ValueError" if type(wrong) is int else "TypeError"
        for name, call in calls:
            assert re.match(rf"{kind}: {name}: (src|dst)={re.escape(repr(wrong))} is not a", text_of(call)), name
        assert group.all_reduce(x).item() == 2


@distributed(world_size=2)
def test_wrong_calls_are_the_same_error_on_all_ranks_and_the_group_goes_on(rank):
    with made(rank, 2) as group:
        for name, call in wrong_calls(group, rank).items():
            found = text_of(call)
            assert found.startswith(WRONG[name]), (name, found)
            assert len(set(of_all(found))) == 1, name
            assert group.all_reduce(torch.ones(1)).item() == 2, name
