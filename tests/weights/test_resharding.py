"""From one layout to another: the plan by property, the moving on real ranks, bytes on each link counted."""

import contextlib
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from counting import exchanges
from groups import BACKENDS, made
from hypothesis import given, settings, strategies as st
from launching import examples
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed
from easydist.transport.comm import Collectives
from easydist.weights import LocalShard, Resharding, broadcast_state_dict
from easydist.weights.blocks import Block, block_transfers, common, shard, whole


def laid_out(shape, ranks, placements):
    """Return the blocks of a DTensor over a mesh of these ranks."""
    mesh = np.asarray(ranks)
    return {int(rank): shard(shape, mesh.shape, place, placements) for place, rank in np.ndenumerate(mesh)}


def everywhere(shape, ranks):
    return {rank: whole(shape) for rank in ranks}


@st.composite
def layouts(draw, shape, first):
    """Ranks from ``first`` on that hold a tensor: sharded over a mesh, or each of them whole."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    ranks = torch.arange(first, first + math.prod(mesh)).view(mesh)
    if draw(st.integers(0, 4)) == 0:
        return everywhere(shape, ranks.flatten().tolist())
    dims = st.integers(0, len(shape) - 1).map(Shard)
    return laid_out(shape, ranks, [draw(st.just(Replicate()) | dims) for _ in mesh])


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    return shape, draw(layouts(shape, 0)), draw(layouts(shape, draw(st.sampled_from([0, 3, 100]))))


@settings(max_examples=examples(40))
@given(pairs())
def test_every_rank_gets_just_what_it_wants(case):
    shape, held, wanted = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    got = {rank: torch.full(box.shape, -1) for rank, box in wanted.items()}
    count = Counter()
    for src, dst, block in block_transfers(shape, (*held.items(),), (*wanted.items(),)):
        assert common(block, held[src]) == block
        block.within(wanted[dst]).of(got[dst])[...] = block.within(held[src]).of(held[src].of(tensor))
        count[dst] += block.numel
    for rank, box in wanted.items():
        assert got[rank].equal(box.of(tensor))
        assert count[rank] == box.numel


def test_a_layout_does_not_depend_on_the_default_device():
    with torch.device("meta"):
        assert shard((4,), (2,), (1,), [Shard(0)]) == Block((2,), (2,))


def test_replicas_share_the_work():
    all_of_it, load = whole((8,)), {}
    held = (0, all_of_it), (1, all_of_it)
    found = [block_transfers((8,), held, ((rank, all_of_it),), load)[0].src for rank in (2, 3, 4, 5)]
    assert sorted(found) == [0, 0, 1, 1]


def test_holes_are_refused():
    with pytest.raises(ValueError, match=r"blocks of ranks \[0\] do not make up a tensor of shape \(4,\)"):
        block_transfers((4,), ((0, Block((0,), (3,))),), ((1, whole((4,))),))


# --- on real ranks


@contextlib.contextmanager
def sent():
    """The bytes that this process sends, by receiver."""
    found, inner = Counter(), Collectives.send

    def send(comm, tensor, dst, *args, **kwargs):
        found[dst] += tensor.nbytes
        return inner(comm, tensor, dst, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "send", send)
        yield found


WIDE = 1200
VALUES = {
    "rows": torch.arange(6.0 * WIDE).view(WIDE, 6),
    "columns": torch.arange(4.0 * WIDE).view(4, WIDE),
    "bias": torch.arange(7.0),
    "large": torch.arange(700.0 * WIDE).view(WIDE, 700),
}


@pytest.mark.slow
@BACKENDS
@distributed(world_size=4)
def test_fsdp_to_tensor_parallel(rank, backend):
    """Ranks 0 and 1 train with FSDP2, ranks 2 and 3 infer with tensor parallelism, which knows no DTensor there."""
    trainers = DeviceMesh("cpu", [0, 1])
    dims = {"rows": 0, "columns": 1, "large": 1}
    source, target = None, None
    if rank < 2:
        source = {name: distribute_tensor(value, trainers, [Shard(0)]) for name, value in VALUES.items()}
    else:
        target = {"bias": torch.zeros(7)}
        for name, dim in dims.items():
            want = VALUES[name].chunk(2, dim)[rank - 2]
            start = [0, 0]
            start[dim] = (rank - 2) * want.shape[dim]
            target[name] = LocalShard(torch.zeros(want.shape, dtype=torch.bfloat16), start, VALUES[name].shape)
    with made(backend) as group:
        resharding = Resharding(source, target, group=group, bucket_bytes=1 << 20)
        for factor in (1, 3):
            with sent() as found:
                resharding.run()
            for name, dim in dims.items() if rank > 1 else ():
                want = VALUES[name].chunk(2, dim)[rank - 2] * factor
                assert torch.equal(target[name].tensor, want.bfloat16()), name
            if rank > 1:
                assert torch.equal(target["bias"], VALUES["bias"] * factor)
            # each rank sends to each worker what both have, and nothing else goes anywhere
            assert {dst: n for dst, n in found.items() if n} == {
                dst: resharding.nbytes(rank, dst) for dst in range(4) if dst != rank and resharding.nbytes(rank, dst)
            }
            assert not found or rank < 2
            for value in source.values() if rank < 2 else ():
                value.to_local().mul_(3)
    links = {(src, dst): resharding.nbytes(src, dst) for src in (0, 1) for dst in (2, 3)}
    whole = sum(value.nbytes for value in VALUES.values())
    assert sum(links.values()) == whole + 7 * 4  # every byte once, but for the bias, which both workers want whole
    assert max(links.values()) < 0.3 * whole


@pytest.mark.slow
@distributed(world_size=4)
def test_a_model_of_fsdp2_to_one_of_tensor_parallelism(rank):
    """The modules as their own libraries have sharded them; after a step of training the outputs are equal."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    trainers, workers = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    net, x = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)), torch.ones(3, 6)
    if rank < 2:
        fully_shard(net, mesh=trainers)
    else:
        with torch.no_grad():
            [parameter.zero_() for parameter in net.parameters()]
        parallelize_module(net, workers, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    resharding = Resharding(net if rank < 2 else None, net if rank > 1 else None)
    if rank < 2:
        net(x).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.5).step()
    resharding.run()
    outputs = easydist.gather_object((net(x) + 0).detach())  # what a worker gives is still on its way
    assert all(torch.allclose(one, outputs[0], atol=1e-6) for one in outputs)
    assert outputs[0].any()
    links = {(src, dst): resharding.nbytes(src, dst) for src in range(4) for dst in range(4)}
    assert {link for link, count in links.items() if count} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    whole = sum(parameter.nbytes for parameter in nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4)).parameters())
    assert sum(links.values()) == whole + 4 * 4  # the last bias, which both workers have whole


@pytest.mark.slow
@distributed(world_size=3)
def test_any_layout_to_any_other(rank):
    mesh = DeviceMesh("cpu", [0, 1, 2])
    values = torch.arange(35.0).view(5, 7)
    placements = [Shard(0), Shard(1), Replicate()]
    for one in placements:
        for other in placements:
            target = {"w": distribute_tensor(torch.zeros(5, 7), mesh, [other])}
            resharding = Resharding({"w": distribute_tensor(values, mesh, [one])}, target)
            with sent() as found:
                resharding.run()
            assert torch.equal(target["w"].full_tensor(), values)
            assert one != other or not found
    model, trained = nn.Linear(7, 5), nn.Linear(7, 5)
    nn.init.constant_(trained.weight, rank + 1)
    resharding = Resharding(trained if rank == 1 else None, model if rank != 1 else None)
    resharding.run()
    assert rank == 1 or resharding.nbytes(1, rank) == 40 * 4
    assert rank == 1 or model.weight.eq(2).all()


@distributed(world_size=2)
def test_autograd_hears_of_what_was_written(rank):
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    held, wanted = ({"w": torch.zeros(2)}, None) if rank == 0 else (None, {"w": weight})
    Resharding(held, wanted).run()
    if rank == 0:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@distributed(world_size=2)
def test_of_tied_targets_the_last_one_counts_as_in_load_state_dict(rank):
    source = {"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": torch.full((3,), 3.0)} if rank == 0 else None
    tied = torch.zeros(3)
    target = {"b": tied, "c": torch.zeros(3), "a": tied} if rank == 1 else None
    resharding = Resharding(source, target)
    for _ in range(2):
        resharding.run()
        assert rank == 0 or [target[name].tolist() for name in "abc"] == [[1.0] * 3, [1.0] * 3, [3.0] * 3]
        tied.zero_()


@pytest.mark.slow
@distributed(world_size=3)
def test_layouts_that_do_not_fit_are_refused_everywhere(rank):
    def refused(error, match, source, target):
        with pytest.raises(error, match=match):
            Resharding(source if rank == 0 else None, target if rank == 1 else None)

    w = torch.zeros(4)
    refused(DisagreementError, "  v  is wanted, but no rank holds it", {"w": w}, {"v": w})
    refused(DisagreementError, r"w  is float32 \(4,\), rank 1 wants float32 \(5,\)", {"w": w}, {"w": torch.zeros(5)})
    refused(DisagreementError, r"rank 1 wants int64 \(4,\)", {"w": w}, {"w": torch.zeros(4, dtype=torch.int64)})
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # torch casts nothing to it
    refused(DisagreementError, r"rank 1 wants float4_e2m1fn_x2 \(4,\)", {"w": w}, {"w": packed})
    refused(
        DisagreementError,
        r"  9  is wanted, but no rank holds it\n  … and 2 more$",
        {"w": w},
        {f"{i:x}": w for i in range(12)},
    )
    held = {0: {"w": w}, 2: {"w": w.bfloat16()}}.get(rank)
    with pytest.raises(DisagreementError, match=r"w  is bfloat16 \(4,\), rank 0 holds float32 \(4,\)"):
        Resharding(held, {"w": w} if rank == 1 else None)
    half = LocalShard(w[:2], (0,), (4,))
    refused(DisagreementError, r"blocks of ranks \[0\] do not make up a tensor of shape \(4,\)", {"w": half}, {"w": w})
    refused(RemoteError, "not a dense tensor", {"w": w.to_sparse()}, {"w": w})
    refused(RemoteError, "share memory", {"w": w}, {"w": torch.zeros(1).expand(4)})
    both, room = {"a": w, "b": w + 1}, torch.zeros(6)
    refused(RemoteError, r"\['a'\] and \['b'\] share memory", both, {"a": room[:4], "b": room[2:]})
    halves = {"a": LocalShard(room[:2], (0,), (4,)), "b": LocalShard(room[:2], (2,), (4,))}
    refused(RemoteError, r"\['a'\] and \['b'\] share memory, but are different parts", both, halves)
    outside = r"\['w'\] is a shard of shape \(2,\) at .*, not inside of \(4,\)"
    for start in ((3,), (-1,), (0, 0), ()):
        refused(RemoteError, outside, {"w": w}, {"w": LocalShard(w[:2], start, (4,))})
    refused(RemoteError, "not inside of", {"w": LocalShard(w, (1,), (4,))}, {"w": w})
    refused(RemoteError, "is a str; only tensors", {"w": "text"}, {"w": w})
    good = Resharding({"w": w + 1} if rank == 0 else None, {"w": w} if rank == 1 else None)
    good.run()
    assert rank != 1 or w.tolist() == [1, 1, 1, 1]


def test_one_process_exchanges_nothing():
    target = {"w": torch.zeros(3)}
    assert "all_gather" not in exchanges(lambda: Resharding({"w": torch.ones(3)}, target).run())
    assert target["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes=0 is less than 1024"),
        ({"bucket_bytes": 1e9}, "bucket_bytes=1000000000.0 is not a number of bytes: pass an integer"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is no floating-point dtype to which torch can cast, such as"),
        ({"dtype": torch.float4_e2m1fn_x2}, "dtype=torch.float4_e2m1fn_x2 is no floating-point dtype to which"),
    ],
)
def test_settings_that_no_transfer_could_follow(argument, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        broadcast_state_dict({"w": torch.ones(3)}, **argument)
    if "bucket_bytes" in argument:
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            Resharding({"w": torch.ones(3)}, **argument)
