"""Each rank receives the bytes that it wants, and no others: counted where the backends receive them."""

import contextlib

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from groups import BACKENDS, check_works, made
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from trees import assert_same

from easydist import RemoteError, weights
from easydist.shm.slots import Pipe
from easydist.shm.steps import Steps
from easydist.testing import distributed
from easydist.transport.backends.c10d import Gloo
from easydist.weights import LocalShard, WeightPublisher, WeightReceiver, spans, target
from easydist.weights.exchange import BroadcastWeights

ROWS, COLUMNS = 700, 400
LARGE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
SMALL = torch.arange(60.0).view(10, 6)
BIAS = torch.arange(5.0)
WHOLE = {"large": LARGE, "small": SMALL, "bias": BIAS}
BUCKET = {"bucket_bytes": 1 << 20}


@contextlib.contextmanager
def received():
    """Count the bytes of weights that this rank receives, over gloo or out of shared memory."""
    count, moves = [0], []

    def move(verb, *about, inner=BroadcastWeights._move):
        moves.append(verb)
        yield from inner(verb, *about)
        moves.pop()

    def counting(owner, name, nbytes):
        inner = getattr(owner, name)

        def call(*about, **options):
            count[0] += nbytes(*about) if moves else 0
            return inner(*about, **options)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastWeights, "_move", move)
        # A barrier's tokens have one byte.
        counting(
            Gloo, "_exchange", lambda gloo, sends, recvs, *_: sum(data.nbytes for data, _ in recvs if data.nbytes > 1)
        )
        counting(Steps, "_fetch", lambda steps, root, half, pieces, *_: sum(length for _, length, _ in pieces))
        counting(Pipe, "take", lambda pipe, address, length, *_: length)
        yield count


def cut(at, dims, bounds=(0, 0.5, 1)):
    """The part of the model between two bounds, along a dimension of each entry; others are whole."""
    part = {}
    for name, value in WHOLE.items():
        if name not in dims:
            part[name] = value.clone()
            continue
        size = value.shape[dims[name]]
        first, stop = (round(size * bounds[at + side]) for side in (0, 1))
        start = [0, 0]
        start[dims[name]] = first
        part[name] = LocalShard(value.narrow(dims[name], first, stop - first).contiguous(), start, value.shape)
    return part


def tensors(state):
    return {name: value.tensor if isinstance(value, LocalShard) else value for name, value in state.items()}


def nbytes(state, itemsize=4):
    return sum(value.numel() * itemsize for value in tensors(state).values())


def empty(state):
    """A target like it, and what it holds afterwards."""
    zeros = {
        name: value._replace(tensor=torch.zeros_like(value.tensor))
        if isinstance(value, LocalShard)
        else torch.zeros_like(value)
        for name, value in state.items()
    }
    return zeros, tensors(state)


ROWWISE, MIXED = {"large": 0, "small": 0}, {"large": 1, "small": 0}
UNEVEN, LOPSIDED = (0, 0.3, 1), (0, 1, 1)


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize(
    ("dims", "bounds", "others", "other_bounds"),
    [
        (ROWWISE, (0, 0.5, 1), ROWWISE, (0, 0.5, 1)),
        (ROWWISE, (0, 0.5, 1), MIXED, (0, 0.5, 1)),
        (MIXED, UNEVEN, ROWWISE, (0, 0.6, 1)),
        (ROWWISE, UNEVEN, MIXED, LOPSIDED),  # the second receiver has nothing of the sharded entries
        ({}, UNEVEN, ROWWISE, UNEVEN),  # both sources have all; the first one sends
    ],
)
@distributed(world_size=4)
def test_a_shard_goes_to_its_receiver_alone(rank, backend, dims, bounds, others, other_bounds):
    sends = rank < 2
    mine = cut(rank, dims, bounds) if sends else None
    target, want = (None, {}) if sends else empty(cut(rank - 2, others, other_bounds))
    with made(backend) as group, received() as count:
        options = {"src": [0, 1], "group": group, **BUCKET}
        member = WeightPublisher(mine, **options) if sends else WeightReceiver(target, src=[0, 1], group=group)
        for _ in range(2):
            member.publish() if sends else member.receive()
            assert count[0] == (0 if sends else nbytes(want))
            count[0] = 0
        assert sends or assert_same(tensors(target), want) is None
        for verify, dtype in ((True, None), (False, torch.bfloat16), (True, torch.bfloat16)):
            given = mine if sends else target
            weights.broadcast_state_dict(given, [0, 1], dtype=dtype, verify=verify, group=group, **BUCKET)
            assert count[0] == (0 if sends else nbytes(want, 4 if dtype is None else 2))
            count[0] = 0
        member.publish(changed=["small"]) if sends else member.receive()
        assert count[0] == (0 if sends else want["small"].nbytes)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=4)
def test_whole_receivers_beside_sharded_ones(rank, backend):
    """Rank 1 wants all, ranks 2 and 3 halves; rank 3 also streams."""
    target, want = empty(cut(rank - 2, MIXED)) if rank > 1 else (None, WHOLE)
    with made(backend) as group, received() as count:
        member = WeightPublisher(WHOLE, group=group) if rank == 0 else WeightReceiver(target, group=group)
        member.publish() if rank == 0 else member.receive()
        assert count[0] == (nbytes(want) if rank else 0)
        assert not rank or assert_same(tensors(member.state), want) is None
        member = WeightReceiver(group=group) if rank == 3 else member
        count[0] = 0
        if rank == 3:
            assert_same({**WHOLE, **dict(member.stream())}, WHOLE)
            want = WHOLE
        else:
            member.publish() if rank == 0 else member.receive()
        assert count[0] == (nbytes(want) if rank else 0)
        member = WeightReceiver(group=group) if rank == 3 else member  # the only one without the version before
        count[0] = 0
        member.publish(changed=["small"]) if rank == 0 else member.receive()
        due = want if rank == 3 else {"small": want["small"]}
        assert count[0] == (nbytes(due) if rank else 0)
        assert rank < 3 or assert_same(member.state, WHOLE) is None


@pytest.mark.slow
@BACKENDS
@distributed(world_size=4)
def test_a_late_receiver_alone_gets_the_version(rank, backend):
    """Rank 0 trains, 1 and 2 have the version, and 3 comes late for the second half of it."""
    with made(backend) as everyone:
        first = dist.new_group([0, 1, 2])
        target, want = empty(cut(1, MIXED)) if rank == 3 else (None, WHOLE)
        if rank < 3:
            member = WeightPublisher(WHOLE, group=first) if rank == 0 else WeightReceiver(group=first)
            member.publish() if rank == 0 else member.receive()
        else:
            member = WeightReceiver(target)
        with received() as count:
            assert member.regroup(everyone, src=0) == 1
        assert count[0] == (nbytes(want) if rank == 3 else 0)
        assert rank < 3 or assert_same(tensors(target), want) is None


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_a_checkpoint_reaches_each_rank_in_part(rank, backend, tmp_path):
    """The rank that reads takes its own part, too; one shard is empty, and one that only it wants does not travel."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    bias = torch.arange(2.0)
    if rank == 1:
        safetensors.torch.save_file({"weight": LARGE, "bias": bias}, tmp_path / "model.safetensors")
    mesh = DeviceMesh("cpu", [0, 1, 2])
    mine = {
        "weight": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.zeros(2), mesh, [Shard(0)]),
    }
    with made(backend) as group, received() as count:
        weights.broadcast_checkpoint(tmp_path, mine, group=group, group_src=1, verify=True)
        want = {"weight": LARGE.chunk(3)[rank], "bias": bias[rank : rank + 1]}
        assert_same({name: value.to_local() for name, value in mine.items()}, want)
        assert count[0] == (0 if rank == 1 else nbytes(want))
        count[0] = 0
        weights.broadcast_checkpoint(tmp_path, model if rank == 1 else {}, 1, strict=False, group=group)
        assert count[0] == (0 if rank == 1 else LARGE.nbytes + bias.nbytes)
        assert rank != 1 or torch.equal(model.weight, LARGE)


@pytest.mark.slow
@BACKENDS
@distributed(world_size=3)
def test_entries_that_a_receiver_leaves_out_do_not_go_there(rank, backend):
    target = {"small": torch.zeros(10, 6), "other": torch.ones(1)} if rank == 2 else {}
    with made(backend) as group, received() as count:
        weights.broadcast_state_dict(WHOLE if rank == 0 else target, strict=False, group=group)
        assert count[0] == [0, nbytes(WHOLE), SMALL.nbytes][rank]
        weights.broadcast_state_dict(
            WHOLE if rank == 0 else {}, filter=lambda name: rank != 2 or name == "bias", group=group
        )
        assert count[0] == [0, 2 * nbytes(WHOLE), SMALL.nbytes + BIAS.nbytes][rank]
        assert rank != 2 or assert_same(target, {"small": SMALL, "other": torch.ones(1)}) is None


@pytest.mark.slow
@distributed(world_size=3)
def test_tied_on_the_source_but_in_different_blocks_here(rank):
    """All of the entry arrives on such a receiver, and nothing of it twice."""
    mine = dict.fromkeys(("a", "b"), LARGE)
    if rank:
        places = [(0, 100), (300, 50)]
        mine = {
            name: LocalShard(torch.zeros(length, COLUMNS), (first, 0), LARGE.shape)
            for name, (first, length) in zip(mine, places, strict=True)
        }
    with received() as count:
        weights.broadcast_state_dict(mine)
    assert count[0] == (LARGE.nbytes if rank else 0)
    assert not rank or assert_same(tensors(mine), {"a": LARGE[:100], "b": LARGE[300:350]}) is None


@pytest.mark.slow
@BACKENDS
@distributed(world_size=4)
def test_a_receiver_that_fails_is_named_on_all(rank, backend):
    """Rank 2 shares no packet with rank 3, which fails."""

    class Fails(spans.Destinations):
        def take(self, packet, buffer):
            raise OSError("the disk is full")

    mine = cut(rank % 2, ROWWISE)
    mine = {name: value for name, value in mine.items() if name in ROWWISE}
    with made(backend) as group, pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(target, "Destinations", Fails)
        with pytest.raises(OSError if rank == 3 else RemoteError, match="the disk is full") as caught:
            weights.broadcast_state_dict(mine, [0, 1], group=group)
        assert rank == 3 or "rank 3" in str(caught.value)
        check_works(group, backend)
