"""Versions that an engine loads as they come; deaths are in test_ray_losses."""

import contextlib

import pytest
import resident
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from trees import assert_same

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed
from easydist.weights import WeightPublisher, WeightReceiver

MiB = 1 << 20


def strange(fill):
    tied = torch.full((3, 4), fill)
    return {
        "long": torch.full((300_000,), fill) + torch.arange(300_000),  # several pieces
        "tied": tied,
        "same": tied,
        "strided": torch.arange(12, dtype=torch.int16).view(3, 4).t() + int(fill),
        "empty": torch.zeros(0, 3),
        "half": torch.full((5,), fill, dtype=torch.bfloat16),
        "note": {"step": int(fill), "scale": torch.tensor([fill])},
    }


def exactly(entries, want):
    """Check an iterator's entries, in any order, each once."""
    entries = list(entries)
    assert sorted(name for name, _ in entries) == sorted(want)
    assert_same({name: dict(entries)[name] for name in want}, want)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_stream_has_what_was_published(rank):
    """Rank 1 streams, rank 2 receives; then both stream."""
    sent, bucket = strange(1.0), 1 << 20
    member = WeightPublisher(sent, bucket_bytes=bucket) if rank == 0 else WeightReceiver()
    for version in (1, 2, 3):
        sent.update(strange(float(version)))
        if rank == 0:
            assert member.publish() == version
        elif rank == 1 or version == 3:
            exactly(member.stream(), strange(float(version)))
            assert member.state is None
        else:
            member.receive()
            assert_same(member.state, strange(float(version)))
        assert member.version == version
    if rank:
        with pytest.raises(RemoteError, match="rank 1: ValueError: version 2 is not newer than 3, which this receiver"):
            next(iter(member.stream()))
        assert member.version == 3  # nothing came
    else:
        with pytest.raises(RemoteError, match="version 2 is not newer"):
            WeightPublisher(sent).publish(2)


COUNT = 40


def plain(fill):
    return {str(i): torch.full((1000,), float(fill)) for i in range(COUNT)}


def breaks(member):
    for name, _ in member.stream():
        if name == "3":
            break


def raises(member):
    def load_weights(entries):
        for name, _ in entries:
            raise KeyError(name)

    with pytest.raises(KeyError, match="0"):  # afterwards the frame of load_weights is gone, and with it the iterator
        load_weights(member.stream())


def closes(member):
    with contextlib.closing(member.stream()) as entries:
        for _ in range(COUNT):  # all, but without asking whether there are more
            next(entries)


left = []


def keeps(member):
    """Keep the iterator; the next call of the receiver ends it."""
    left.append(member.stream())
    next(left[0])
    with pytest.raises(RuntimeError, match="another call of the group is under way"):
        easydist.gather(torch.ones(1))


@pytest.mark.slow
@distributed(world_size=3)
def test_a_loop_that_is_left_is_an_error_on_all_others_and_the_next_version_replaces_it(rank):
    sent = plain(0)
    member = WeightPublisher(sent, bucket_bytes=16_384) if rank == 0 else WeightReceiver()
    for version, leave in enumerate((breaks, raises, closes, keeps), start=1):
        sent.update(plain(-1))
        if rank == 2:
            leave(member)
            assert member.version == 0
        else:
            with pytest.raises(RemoteError, match="rank 2: RuntimeError: the loop over the stream was left before its"):
                member.publish() if rank == 0 else member.receive()
            assert member.version == version - 1
        sent.update(plain(version))
        if rank == 2:
            exactly(member.stream(), plain(version))
        else:
            assert (member.publish() if rank == 0 else member.receive()) == version
        assert member.version == version
        assert rank != 1 or assert_same(member.state, plain(version)) is None


@pytest.mark.slow
@distributed(world_size=2)
def test_a_stream_never_holds_a_copy(rank):
    """96 MiB through 8 MiB; each entry is a little longer than two pieces, and none may wait for the others' rests.

    Four of them are there at a time, in pages of 2 MiB.
    """
    count, numel = 24, MiB + 2048
    if rank == 0:
        member = WeightPublisher({str(i): torch.full((numel,), float(i)) for i in range(count)}, bucket_bytes=8 * MiB)
        assert (member.publish(), member.publish()) == (1, 2)
        return

    def load(member):
        return [tensor.eq(int(name)).all().item() and tensor.numel() for name, tensor in member.stream()]

    member = WeightReceiver()
    assert load(member) == [numel] * count
    easydist.memory.release()
    loaded, peak = resident.peak_above(lambda: load(member))
    assert loaded == [numel] * count
    assert peak < 32 * MiB


def halves(rank, values):
    """Return each entry of a dict as the part of it that this rank of two holds."""
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    whole = {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in values.items()}
    return {**whole, "step": torch.tensor(3)} if rank < 2 else {}


@pytest.mark.slow
@distributed(world_size=4)
def test_a_sharded_trainer_streams(rank):
    """Rank 2 streams, rank 3 receives; ``odd`` has nothing on rank 1, ``long`` large parts on both."""
    values = {"odd": torch.arange(7.0).view(1, 7), "long": torch.arange(400_000.0).view(4, -1), "w": torch.ones(5, 2)}
    values |= {str(i): torch.full((3, 100), float(i)) for i in range(50)}
    want = {**values, "step": torch.tensor(3)}
    if rank < 2:
        member = WeightPublisher(halves(rank, values), src=[0, 1], bucket_bytes=1 << 16)
        assert member.publish() == 1
    elif rank == 2:
        member = WeightReceiver(src=[0, 1])
        exactly(member.stream(), want)
    else:
        member = WeightReceiver(src=[0, 1])
        member.receive()
        assert_same(member.state, want)
    assert member.version == 1


@pytest.mark.slow
@distributed(world_size=2)
def test_a_receiver_with_a_model_cannot_stream(rank):
    mine = plain(0)
    member = WeightPublisher(plain(1)) if rank == 0 else WeightReceiver(mine)
    with pytest.raises(RemoteError, match="rank 1: TypeError: stream\\(\\) and load= are for a receiver without"):
        member.publish() if rank == 0 else next(iter(member.stream()))
    assert (member.publish() if rank == 0 else member.receive()) == 1
    assert rank == 0 or assert_same(mine, plain(1)) is None


@pytest.mark.slow
@distributed(world_size=4)
def test_streaming_engines_come_back_with_regroup(rank):
    """Rank 0 trains, ranks 1 and 2 stream; rank 2 is half loaded, and rank 3 is new."""
    first, everyone, sent = dist.new_group([0, 1, 2]), dist.new_group(), plain(1)
    if rank < 3:
        member = WeightPublisher(sent, group=first) if rank == 0 else WeightReceiver(group=first)
        assert (member.publish() if rank == 0 else dict(member.stream()) and member.version) == 1
        sent.update(plain(2))
        if rank == 2:
            left.append(member.stream())  # regroup ends it
            next(left[-1])
        else:
            with pytest.raises(RemoteError, match="left before its end"):
                member.publish() if rank == 0 else dict(member.stream())
    else:
        member = WeightReceiver()
    assert member.version == (1 if rank == 0 else 0)

    def fails(entries):
        next(entries)
        raise KeyError("full")

    def forgets(entries):
        next(entries)

    for load, error, text in ((fails, KeyError, "KeyError: 'full'"), (forgets, RuntimeError, "was left before its")):
        with pytest.raises(error if rank == 3 else RemoteError, match=None if rank == 3 else f"rank 3: .*{text}"):
            member.regroup(everyone, load=load if rank == 3 else list)
    loaded = {}
    assert member.regroup(everyone, load=loaded.update) == member.version == 1  # the number of what all have
    assert rank == 0 or assert_same({name: loaded[name] for name in plain(2)}, plain(2)) is None
    assert member.regroup(everyone, load=fails) == 1  # nobody lacks it
    assert getattr(member, "state", None) is None

    # Without load=, the version arrives in memory; from there, others get it.
    if rank == 3:
        member = WeightReceiver()
    assert member.regroup(everyone) == 1
    assert rank == 0 or assert_same(member.state, plain(2)) is None


@pytest.mark.slow
@distributed(world_size=4)
def test_a_late_receiver_gets_the_version_from_one_of_the_others(rank):
    """Rank 3 comes while ranks 0 and 1 publish and receive; only rank 2 gives it the version."""
    first, pair, everyone = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group()
    most, sent = dist.new_group([0, 1, 2]), plain(1)
    if rank < 3:
        member = WeightPublisher(sent, group=most) if rank == 0 else WeightReceiver(group=most)
        assert (member.publish() if rank == 0 else member.receive()) == 1
    else:
        member = WeightReceiver(mine := plain(0), group=pair)
    if rank < 2:  # the pair does not wait for these, nor they for the pair
        easydist.gather(torch.ones(1), group=first)
    else:
        assert member.share(pair) == member.version == 1
        assert rank != 3 or assert_same(mine, plain(1)) is None
    sent.update(plain(2))
    if rank < 3:
        assert (member.publish() if rank == 0 else member.receive()) == 2
    assert member.regroup(everyone, src=0) == 2
    assert rank != 3 or assert_same(mine, plain(2)) is None
    if rank > 1:
        if rank == 3:
            member = WeightReceiver()
        member.streams = rank == 2  # as if it had streamed the version
        with pytest.raises(DisagreementError, match="share: no receiver of the group has a copy of version 2"):
            member.share(pair)
