"""Ranks that wait for one another in different calls raise the same error, and programs that end raise none."""

import contextlib
import random
import time
from functools import partial

import groups
import pytest
import torch
from launching import examples, sampled
from test_entries import VALUES, made, waited, ways

import easydist
from easydist.errors import CollectiveTimeout, DisagreementError, RemoteError
from easydist.groups.known import of_group
from easydist.liveness.crossing import RECEIVE, SEND
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

TREE, LARGE = {"x": torch.arange(3)}, {"x": torch.ones(1 << 19)}
KINDS = pytest.mark.parametrize("kind", ["shm", "gloo", "hosts"])
FEW = ("recv_tensor_dict", "send_object")
"""The messages that are tried where an error takes seconds: between hosts, which look at the store once a second."""


@contextlib.contextmanager
def coordinator(kind, rank, world_size):
    """A new group, whose ranks have not met."""
    with ways(kind, rank):
        group = GroupCoordinator([[*range(world_size)]], rank, "gloo", False)
        yield group
        group.destroy()


def messages(group, other):
    """The ways to wait for a message of another rank."""
    return {
        "recv_tensor_dict": lambda: easydist.recv_tensor_dict(group_src=other, group=group),
        "send_tensor_dict": lambda: easydist.send_tensor_dict(TREE, group_dst=other, group=group),
        "send_tensor_dict of much": lambda: easydist.send_tensor_dict(LARGE, group_dst=other, group=group),
        "recv_object": lambda: easydist.recv_object(group_src=other, group=group),
        "send_object": lambda: group.send_object(1, other),
        "recv_tensor_dict of the coordinator": lambda: group.recv_tensor_dict(other),
        "isend_tensor_dict": lambda: waited(group.isend_tensor_dict(TREE, other)),
        "irecv_tensor_dict": lambda: group.irecv_tensor_dict(other),
    }


def crossed(group, call):
    """Return the text of the error, which is the same on all ranks, after which the group works in step."""
    with pytest.raises(DisagreementError) as caught:
        call()
    texts = easydist.gather_object(str(caught.value), group=group)  # at once: others may still wait
    assert len({*texts}) == 1, texts
    assert not of_group(group.cpu_group).monitor.crossing.begun
    assert texts[0].startswith("ranks wait for one another, in calls that do not match\n")
    return texts[0]


def gathered(group):
    return easydist.gather(torch.ones(2), group=group)


@pytest.mark.slow
@KINDS
@distributed(world_size=[2, 3])
def test_a_message_meets_a_call_of_all_ranks(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for name, wait in messages(group, 0).items():
            if kind == "hosts" and name not in FEW:
                continue
            text = crossed(group, wait if rank == 1 else lambda: gathered(group))
            assert f"rank 1: waits in {name.split()[0].removeprefix('i')}" in text.replace("waits in i", "waits in ")
            assert "waits in gather" in text


@pytest.mark.slow
@KINDS
@distributed(world_size=sampled([3, 4]))
def test_who_waits_for_such_a_rank_raises_the_same(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for first in FEW:
            waits = {1: messages(group, 0)[first], 2: messages(group, 1)["recv_object"]}
            crossed(group, waits.get(rank, lambda: gathered(group)))


@pytest.mark.slow
@KINDS
@distributed(world_size=sampled([3, 4]))
def test_ranks_that_wait_in_a_circle_raise_the_same(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for step in (1, -1) if kind != "hosts" else (1,):
            for name in messages(group, 0) if kind == "shm" else FEW:
                text = crossed(group, messages(group, (rank + step) % world_size)[name])
                assert text.count("\n  rank ") == world_size


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_a_message_that_came_early_is_awaited_until_its_receiver_calls(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for tree in (TREE, LARGE) if kind != "hosts" else (TREE,):
            send = partial(group.isend_tensor_dict, tree, 0)
            text = crossed(group, partial(group.send_object, 1, 1) if rank == 0 else lambda send=send: waited(send()))
            assert "rank 0: waits in send_object" in text
            assert "rank 1: waits in isend_tensor_dict" in text


@pytest.mark.slow
@KINDS
@distributed(world_size=3)
def test_a_call_with_a_limit_of_its_own_may_end_in_vain(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for _ in range(2):
            if rank == 0:
                with pytest.raises(CollectiveTimeout, match="recv_tensor_dict: 1 of 3 ranks did not come"):
                    easydist.recv_tensor_dict(group_src=1, group=group, timeout=1.5)
            assert gathered(group).tolist() == [1] * 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "gloo"])
@distributed(world_size=4)
def test_who_waits_for_a_rank_of_a_circle_goes_on(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        if rank < 3:
            with pytest.raises(DisagreementError, match="ranks wait for one another"):
                group.recv_object((rank + 1) % 3)
        if rank == 0:
            group.send_object("later", 3)
        elif rank == 3:
            assert group.recv_object(0) == "later"
        assert easydist.gather_object(rank, group=group) == [0, 1, 2, 3]


@pytest.mark.slow
@distributed(world_size=2)
def test_two_that_receive_from_each_other_over_gloo_raise_the_same(rank, world_size):
    with made("gloo", rank, world_size) as entries:
        receivers = [partial(one, VALUES[kind][0]) for kind in VALUES for _, one in getattr(entries, f"get_{kind}")]
        for receive in receivers:
            assert "ranks wait for one another" in entries.raised(receive, receive)
        entries.works()


class Program:
    """Drawn calls of all ranks, and messages between two of them, in the same order on all ranks.

    Args:
        group: The group.
        rank: This rank.
        seed: The seed.
    """

    def __init__(self, group, rank, seed):
        self.group, self.rank, self.random = group, rank, random.Random(seed)
        self.handles = []

    def run(self, steps):
        for step in range(steps):
            late = self.random.randrange(self.group.world_size) if self.random.random() < 0.15 else None
            kind = self.random.choice(["all", "dict", "dict", "object", "posted", "posted", "waits"])
            src, dst = self.random.sample(range(self.group.world_size), 2)
            value = {"x": torch.full((self.random.choice([1, 100, 1 << 18]),), step)}
            if late == self.rank:
                time.sleep(0.12)  # the others look around meanwhile
            self.step(kind, src, dst, value, step)
        waited(self.handles)

    def step(self, kind, src, dst, value, step):
        if kind == "all":
            assert easydist.gather_object(step, group=self.group) == [step] * self.group.world_size
        elif kind == "waits":
            waited(self.handles)
            self.handles.clear()
        elif self.rank == src:
            self.send(kind, dst, value, step)
        elif self.rank == dst and kind == "object":
            assert self.group.recv_object(src) == step
        elif self.rank == dst:
            assert torch.equal(easydist.recv_tensor_dict(group_src=src, group=self.group)["x"], value["x"])

    def send(self, kind, dst, value, step):
        if kind == "posted":
            self.handles += self.group.isend_tensor_dict(value, dst)
        elif kind == "dict":
            easydist.send_tensor_dict(value, group_dst=dst, group=self.group)
        else:
            self.group.send_object(step, dst)


@pytest.mark.slow
@pytest.mark.stress
@KINDS
@distributed(world_size=sampled([2, 3, 4]))
def test_programs_that_end_raise_nothing(kind, rank, world_size):
    for seed in sampled(range(examples(2))):
        with coordinator(kind, rank, world_size) as group:
            Program(group, rank, seed).run(60)


def counts_match(group, rank):
    """Check that what one rank has begun to send is what the other one has begun to receive."""
    begun = of_group(group.cpu_group).monitor.crossing.begun
    mine = [begun[kind, 1 - rank] for kind in (SEND, RECEIVE)]
    told = groups.of_all(mine)
    assert told[0] == told[1][::-1]
    return mine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "gloo"])
@distributed(world_size=2)
def test_both_ranks_count_the_same_messages_whatever_becomes_of_them(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        with pytest.raises(DisagreementError, match="send to each other"):
            group.send_object(1, 1 - rank)
        assert counts_match(group, rank) == [1, 1]
        with pytest.raises(RemoteError, match="failed before the exchange"):
            group.send_object(lambda: None, 1) if rank == 0 else group.recv_object(0)
        with pytest.raises(DisagreementError, match="recv_object: rank 0 called send_tensor_dict"):
            group.send_tensor_dict(TREE, 1) if rank == 0 else group.recv_object(0)
        waited(group.isend_tensor_dict(TREE, 1)) if rank == 0 else group.recv_tensor_dict(0)
        assert counts_match(group, rank) == ([4, 1] if rank == 0 else [1, 4])
        if kind == "shm":
            with pytest.raises(DisagreementError, match="receive from each other"):
                group.recv_object(1 - rank)
            assert rank == 1 or of_group(group.cpu_group).monitor.crossing.wait is None
            assert sum(counts_match(group, rank)) == 6  # the lower rank tells the other one


def passed(group, rank, value):
    """Send from rank 0 to rank 1."""
    if rank == 0:
        group.send_object(value, 1)
    elif rank == 1:
        assert group.recv_object(0) == value


def refused(call):
    with pytest.raises(DisagreementError, match="ranks wait for one another"):
        call()


@pytest.mark.slow
@KINDS
@distributed(world_size=3)
def test_messages_after_the_error_are_in_step(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        for turn in range(3):
            passed(group, rank, turn)
        refused(lambda: group.recv_object(0) if rank == 1 else gathered(group))
        passed(group, rank, "at once") if rank < 2 else gathered(group)
        passed(group, rank, "and again")
        gathered(group) if rank < 2 else None
        refused(lambda: group.send_object(1, (rank + 1) % 3))
        for turn in range(3):
            passed(group, rank, turn)
        gathered(group)


@pytest.mark.slow
@distributed(world_size=3)
def test_a_broadcast_without_headers_needs_its_source_only(rank, world_size):
    with coordinator("gloo", rank, world_size) as group:
        gathered(group)
        large = torch.full((1 << 20,), float(rank))
        time.sleep(1.2 if rank == 0 else 0)
        if rank == 2:  # the others look around meanwhile
            assert group.recv_object(1) == "first"
        easydist.broadcast(large, group_src=0, group=group, check=False)
        if rank == 1:
            group.send_object("first", 2)
        assert large[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "gloo"])
@distributed(world_size=2)
def test_a_message_from_before_the_ranks_connected_again_is_awaited_no_more(kind, rank, world_size):
    with coordinator(kind, rank, world_size) as group:
        gathered(group)
        if rank == 0:
            handles = group.isend_tensor_dict(TREE, 1)
        else:
            group.recv_tensor_dict(0)
        with pytest.raises(CollectiveTimeout):
            easydist.gather(torch.ones(1), group=group, timeout=0.5) if rank == 0 else no_call(group)
        gathered(group)
        if rank == 0:
            with contextlib.suppress(RemoteError, RuntimeError):  # its end was not known before
                waited(handles)
            assert of_group(group.cpu_group).monitor.crossing.wait is None  # the other rank counts from zero
        gathered(group)


def no_call(group):
    """Come late to a call that the others have given up."""
    time.sleep(1)
    easydist.gather(torch.ones(1), group=group)
