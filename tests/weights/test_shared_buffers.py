"""Broadcasts through buffers that several ranks have mapped: here files, on a GPU its memory (see tests/gpu)."""

import random

import pytest
import torch
from counting import recorded

from easydist.state import communicators
from easydist.testing import distributed
from easydist.weights import shared_buffers
from easydist.weights.blocks import whole
from easydist.weights.schedule import BlockPart, Packet, UnderWay
from easydist.weights.shared_buffers import SharedBuffers, opened

CPU = torch.device("cpu")


def mapped(folder, rank, world_size, room):
    """Return the buffers of all ranks, each in a file."""
    paths = {root: str(folder / str(root)) for root in range(world_size)}
    torch.from_file(paths[rank], shared=True, size=2 * room, dtype=torch.uint8).fill_(0)
    torch.distributed.barrier()
    return {root: torch.from_file(path, shared=True, size=2 * room, dtype=torch.uint8) for root, path in paths.items()}


def packet_of(root, nbytes, kind="cuda", ranks=()):
    return Packet(root, ranks, kind, (BlockPart(0, whole((nbytes,)), nbytes),), nbytes)


def values(number, packet):
    return torch.arange(number, number + packet.nbytes).remainder(251).to(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@distributed(world_size=[1, 2, 3])
def test_random_packets_arrive_in_their_order(rank, world_size, seed, tmp_path):
    drawn = random.Random(seed)
    for turn in range(8):
        room = drawn.choice([7, 64, 1000])
        packets = [
            packet_of(
                drawn.randrange(world_size),
                drawn.randint(1, room),
                ranks=tuple(r for r in range(world_size) if drawn.random() < 0.7),
            )
            for _ in range(drawn.randint(1, 40))
        ]
        folder = tmp_path / str(turn)
        folder.mkdir(exist_ok=True)
        buffers = SharedBuffers(communicators(), mapped(folder, rank, world_size, room), room, CPU)
        arrived = []
        under_way = UnderWay(2 * room, lambda packet, buffer, into=arrived: into.append((packet, buffer)))
        for number, packet in enumerate(packets):
            under_way.admit(packet)
            data = values(number, packet) if packet.root == rank else torch.zeros(packet.nbytes, dtype=torch.uint8)
            under_way.add(packet, data, buffers.multicast(data, packet.root, packet.ranks))
        under_way.finish()
        buffers.close()
        assert [packet for packet, _ in arrived] == packets
        for number, (packet, data) in enumerate(arrived):
            want = values(number, packet) if rank in (packet.root, *packet.ranks) else torch.zeros_like(data)
            assert torch.equal(data, want), (seed, turn, number)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_half_costs_one_barrier(rank, world_size, tmp_path):
    """Also for a rank that neither sends nor receives, and maps nothing."""
    room = 100
    shared = mapped(tmp_path, rank, world_size, room)
    buffers = SharedBuffers(communicators(), {} if rank == 2 else shared, room, CPU)
    data = [torch.full((10,), 1 if rank == 0 else 0, dtype=torch.uint8) for _ in range(60)]
    with recorded() as begun:
        works = [buffers.multicast(one, 0, [1, 2]) for one in data]
        assert [work.is_completed() for work in works] == [i < 50 for i in range(60)]
        works[0].wait()
        assert len(begun) == 5
        works[-1].wait()
        buffers.close()
    assert len(begun) == 7
    assert all(one.tolist() == [0 if rank == 2 else 1] * 10 for one in data)


@pytest.mark.slow
@distributed(world_size=2)
def test_ranks_that_cannot_share_agree_on_it(rank):
    """One rank has no GPU, or memory that cannot be shared: all take the other way. Little data does not even ask."""
    comms, large = communicators(), [packet_of(0, shared_buffers.LEAST)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_CUDA_IPC", "0")
        assert opened(comms, "test", large, 1 << 26, receives=rank == 1) is None
        patch.setattr(shared_buffers, "_offer", lambda *about: {"gpu": "GPU-1", "handle": "00"})
        assert opened(comms, "test", large, 1 << 26, receives=rank == 1) is None
        patch.setattr(shared_buffers, "judged", None)
        assert opened(comms, "test", [packet_of(0, 9), *([packet_of(0, 1 << 30, "cpu")])], 1 << 26, rank == 1) is None
