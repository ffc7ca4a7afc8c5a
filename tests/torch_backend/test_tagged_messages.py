"""Messages over ``easydist_shm``: with tags, of any sender, and those that do not fit."""

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist.process_group import NAME
from easydist.shm.slots import POINT_TO_POINT
from easydist.testing import distributed


@distributed(world_size=3)
def test_messages_with_tags_arrive_in_any_order(rank):
    made, drawn = dist.new_group(backend=NAME), random.Random(7)
    for _ in range(5):
        tags = [drawn.randrange(4) for _ in range(20)]
        sizes = [drawn.choice([0, 1, 1000, 300_000]) for _ in tags]
        order = drawn.sample(range(20), 20)
        order = [number for tag in drawn.sample(range(4), 4) for number in sorted(order) if tags[number] == tag]
        content = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
        if rank == 0:
            works = [dist.isend(c, 2, group=made, tag=tag) for c, tag in zip(content, tags, strict=True)]
        elif rank == 2:
            got = {number: torch.zeros(sizes[number]) for number in order}
            works = [dist.irecv(got[number], 0, group=made, tag=tags[number]) for number in order]
            drawn_order = random.Random(3).sample(range(20), 20)
            for number in drawn_order:
                works[number].wait()
            for number, tensor in got.items():
                assert torch.equal(tensor, content[number])
            works = []
        else:
            works = []
        for work in works:
            work.wait()
        dist.barrier(made)


@distributed(world_size=4)
def test_messages_of_any_rank(rank):
    made, count = dist.new_group(backend=NAME), 25
    drawn = random.Random(rank)
    if rank == 0:
        got = {sender: [] for sender in (1, 2, 3)}
        for number in range(2 * count):
            tensor = torch.zeros(3)
            if number % 5 == 0:  # one that names its sender, beside those that do not
                dist.recv(tensor, 1, group=made, tag=9)
                assert tensor.tolist() == [1.0, number // 5, 9.0]
            dist.recv(tensor, group=made, tag=1) if number % 2 else dist.irecv(tensor, group=made, tag=1).wait()
            sender, place, _ = tensor.tolist()
            got[int(sender)].append(place)
        assert got == {1: [], 2: [*range(count)], 3: [*range(count)]}  # in the order of each sender
        whole = torch.zeros(300_000)  # several chunks
        assert dist.recv(whole, group=made, tag=2) == 1
        assert whole.unique().tolist() == [7]
        with pytest.raises(easydist.CollectiveTimeout, match=r"within the timeout of 0\.2 s"):
            made.recv_anysource([whole], 3).wait(timedelta(seconds=0.2))
    elif rank == 1:
        works = [dist.isend(torch.tensor([1.0, i, 9.0]), 0, group=made, tag=9) for i in range(10)]
        dist.send(torch.full((300_000,), 7.0), 0, group=made, tag=2)
        for work in works:
            work.wait()
    else:
        for i in range(count):
            if drawn.random() < 0.3:
                time.sleep(0.001)
            dist.send(torch.tensor([float(rank), i, 1.0]), 0, group=made, tag=1)
    easydist.gather_object(None)


@distributed(world_size=2)
def test_a_receive_that_names_its_sender_waits_for_one_that_does_not(rank):
    made = dist.new_group(backend=NAME)
    big, small = torch.arange(1 << 22).float(), torch.tensor([3.0])
    if rank:
        works = [dist.isend(big, 0, group=made, tag=2), dist.isend(small, 0, group=made, tag=4)]
    else:
        works = [dist.irecv(big := torch.zeros(1 << 22), group=made, tag=2)]
        pipe = made._backend._steps.slots.pipe_from(POINT_TO_POINT, 1)
        while not (pipe.is_lent or works[0].is_completed()):
            pass  # until a part of the message has come
        works.append(dist.irecv(small := torch.zeros(1), 1, group=made, tag=4))
    for work in reversed(works):
        work.wait()
    assert small.item() == 3
    assert torch.equal(big, torch.arange(1 << 22).float())
    easydist.gather_object(None)


@distributed(world_size=3)
def test_a_message_of_any_rank_may_come_until_all_have_left(rank):
    made = dist.new_group(backend=NAME)
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, group=made)
        if rank == 2:  # later than the other one has left
            easydist.gather_object(None)
            dist.send(torch.full((2,), 5.0), 0, group=made)
        dist.destroy_process_group(made)
        if rank == 1:
            easydist.gather_object(None)
        return
    got = [torch.zeros(2) for _ in range(3)]
    assert {dist.recv(tensor, group=made) for tensor in got[:2]} == {1, 2}
    easydist.gather_object(None)
    assert dist.recv(got[2], group=made) == 2
    assert got[2].tolist() == [5, 5]
    with pytest.raises(easydist.PeerLostError, match="has left the group"):
        dist.recv(got[0], group=made)


@distributed(world_size=2)
def test_messages_with_tags_that_do_not_fit_are_an_error_on_both_ranks(rank):
    made = dist.new_group(backend=NAME)
    if rank == 0:
        dist.isend(torch.ones(3), 1, group=made, tag=5)
        dist.isend(torch.ones(4), 1, group=made, tag=6)
        with pytest.raises(easydist.DisagreementError, match="3 elements"):
            dist.barrier(made)
    else:
        dist.recv(four := torch.zeros(4), 0, group=made, tag=6)
        assert four.sum() == 4
        with pytest.raises(easydist.DisagreementError, match="3 elements"):
            dist.recv(torch.zeros(2), 0, group=made, tag=5)
    dist.all_reduce(one := torch.ones(1), group=made)
    assert one.item() == 2
