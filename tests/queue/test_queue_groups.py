"""Queues between the ranks of a group."""

import random

import launching
import pytest
import torch.distributed as dist
from queues import SOON

from easydist.errors import DisagreementError, RemoteError
from easydist.queue import MessageQueue
from easydist.shm.ring import RingReader, RingWriter, Shape
from easydist.testing import distributed


@distributed(world_size=3)
def test_ranks_of_a_group(rank):
    group = dist.new_group([2, 1])
    if rank == 0:
        return
    with MessageQueue.create_from_process_group(group, 1 << 16, 10, writer_rank=1) as queue:
        assert queue.is_writer == (rank == 2)
        assert queue.broadcast_object("x" if rank == 2 else None) == "x"
        dist.barrier(group)
    queue, handles = MessageQueue.create_from_process_group_single_reader(group, 1 << 16, 10, 2)
    assert len(handles) == (2 if rank == 2 else 0)
    queue.close()


@distributed(world_size=2)
def test_writer_outside_of_the_group(rank):
    outside = MessageQueue(2, 2) if rank == 0 else None
    queue = MessageQueue.create_from_process_group(
        None, 1, 1, external_writer_handle=outside.export_handle() if outside else None, blocking=False
    )
    if outside:
        outside.wait_until_ready(SOON)
        outside.enqueue("all")
    queue.wait_until_ready(SOON)
    assert queue.dequeue(SOON) == "all"
    dist.barrier()
    queue.close()


@distributed(world_size=2)
def test_all_ranks_hear_that_one_cannot_make_its_end(rank):
    with pytest.raises(RemoteError, match=r"rank 0: ValueError: .*max_chunks=0"):
        MessageQueue.create_from_process_group(None, 1, 0)


@distributed(world_size=2)
def test_all_ranks_hear_that_they_mean_different_ends(rank):
    from_one, to_one = MessageQueue.create_from_process_group, MessageQueue.create_from_process_group_single_reader
    for make, name in ((from_one, "writer_rank"), (to_one, "reader_rank")):
        with pytest.raises(DisagreementError, match=rf"rank 1: MessageQueue\({name}=1\)"):
            make(None, 1 << 16, 10, rank)
        with pytest.raises(
            RemoteError, match=rf"rank 1: ValueError: MessageQueue: {name}=5 is not a rank of the group"
        ):
            make(None, 1 << 16, 10, 5 * rank)
        with pytest.raises(ValueError, match=rf"{name}=5 is not a rank of the group"):
            make(None, 1 << 16, 10, 5)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.stress
def test_ring_of_random_pieces():
    for seed in range(launching.examples(5)):
        draw = random.Random(seed)
        writer = RingWriter(Shape.of(3, 1 << 14, 4))
        readers = [RingReader(writer.name, writer.shape, i, b"") for i in range(3)]
        sent, got, at = [], [[] for _ in readers], 0
        value = b""
        for _ in range(3000):
            if draw.random() < 0.5:
                if not at:  # sometimes a message is given up
                    value = draw.randbytes(draw.choice([1, 60, 700, 20_000]))
                piece = value[at : at + writer.shape.piece]
                if (place := writer.place(len(piece))) >= 0:
                    writer.post(place, [memoryview(piece)], at, len(value))
                    at += len(piece)
                    sent += [value] * (at == len(value))
                    at *= at != len(value) and draw.random() > 0.05
            else:
                i = draw.randrange(3)
                got[i] += [bytes(m) for m in iter(readers[i].pull, None)]
        for i, reader in enumerate(readers):
            got[i] += [bytes(m) for m in iter(reader.pull, None)]
            assert got[i] == sent
        writer.close()
