"""Whatever sends a tree, an object or a tensor meets whatever receives one, over the same members."""

import contextlib
import itertools

import groups
import pytest
import torch

import easydist
from easydist.comms import new_comm
from easydist.errors import DisagreementError, RemoteError
from easydist.parallel import GroupCoordinator
from easydist.testing import distributed

TREES = [
    {"x": torch.arange(3), "y": [1, "text", None]},
    {"x": torch.arange(20_000), "empty": torch.ones(0)},
    {"large": torch.arange(1 << 19), "small": torch.ones(2), "scalar": torch.tensor(2.5)},
]


def waited(handles):
    for handle in handles:
        handle.wait()


def taken(found, handles, after):
    waited(handles)
    for step in after:
        step()
    return found


def into(tree):
    return easydist.recursively_apply(torch.zeros_like, tree)


class OfVerbs:
    """The entries of the verbs over a group."""

    def __init__(self, group):
        self.tree = {
            "send_tensor_dict": lambda tree, dst: easydist.send_tensor_dict(tree, group_dst=dst, group=group),
        }
        self.get_tree = {
            "recv_tensor_dict": lambda tree, src: easydist.recv_tensor_dict(group_src=src, group=group),
            "recv_tensor_dict(into=)": lambda tree, src: easydist.recv_tensor_dict(
                group_src=src, into=into(tree), group=group
            ),
        }
        self.object = {"send_object": lambda obj, dst: easydist.send_object(obj, group_dst=dst, group=group)}
        self.get_object = {"recv_object": lambda obj, src: easydist.recv_object(group_src=src, group=group)}


class OfCoordinator:
    """The entries of a coordinator."""

    def __init__(self, group):
        self.tree = {
            "coordinator.send_tensor_dict": group.send_tensor_dict,
            "coordinator.isend_tensor_dict": lambda tree, dst: waited(group.isend_tensor_dict(tree, dst)),
        }
        self.get_tree = {
            "coordinator.recv_tensor_dict": lambda tree, src: group.recv_tensor_dict(src),
            "coordinator.irecv_tensor_dict": lambda tree, src: taken(*group.irecv_tensor_dict(src)),
        }
        self.object = {"coordinator.send_object": group.send_object}
        self.get_object = {"coordinator.recv_object": lambda obj, src: group.recv_object(src)}


class Entries:
    """All entries over the members of a group, by name."""

    def __init__(self, *sources):
        for kind in ("tree", "get_tree", "object", "get_object"):
            entries = [(name, entry) for source in sources for name, entry in getattr(source, kind).items()]
            setattr(self, kind, [(f"{name} {number}", entry) for number, (name, entry) in enumerate(entries)])

    def meet(self, rank, kind, values):
        """Send each value by each entry to each entry that receives such a value."""
        senders, receivers = getattr(self, kind), getattr(self, f"get_{kind}")
        for value, (sender, send), (receiver, receive) in itertools.product(values, senders, receivers):
            if rank == 0:
                send(value, 1)
            else:
                assert equal(receive(value, 0), value), (sender, receiver)

    def works(self, rank):
        self.meet(rank, "tree", [{"y": 2}])


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


@contextlib.contextmanager
def ways(kind, rank):
    """The variables with which groups move data in this way: in shared memory, by gloo alone, or between hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", str(int(kind != "gloo")))
        if kind == "hosts":
            patch.setenv("EASYDIST_HOST_ID", f"host {rank}")
        yield


@contextlib.contextmanager
def made(kind, rank, world_size):
    """The entries over a group of this kind."""
    with ways(kind, rank):
        if kind == "comm":
            comm = new_comm("shm", torch.device("cpu"), "messages")
            yield Entries(OfVerbs(comm))
            comm.finalize()
            return
        group = GroupCoordinator([[*range(world_size)]], rank, "gloo", False)
        yield Entries(OfVerbs(group), OfVerbs(group.cpu_group), OfCoordinator(group))
        group.destroy()


KINDS = pytest.mark.parametrize("kind", ["shm", "gloo", "hosts", "comm"])


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_all_that_send_meet_all_that_receive(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        entries.meet(rank, "tree", TREES)
        entries.meet(rank, "object", [{"x": 1}, "text" * 20_000])


def raised(call, *args):
    """Return the text of the error that a call raises on both ranks."""
    with pytest.raises((DisagreementError, RemoteError)) as caught:
        call(*args)
    texts = groups.of_all(f"{type(caught.value).__name__}: {caught.value}")
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_a_sender_and_a_receiver_of_different_kinds_raise_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        for sent, got in (("tree", "get_object"), ("object", "get_tree")):
            for value in ({"x": 1}, {"x": list(range(20_000))}):
                for (_, send), (_, receive) in itertools.product(getattr(entries, sent), getattr(entries, got)):
                    text = raised(receive, {}, 0) if rank else raised(send, value, 1)
                    assert text.startswith("DisagreementError: recv_")
        entries.works(rank)


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_two_that_send_to_each_other_raise_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        senders = [each for each in entries.tree + entries.object if "isend" not in each[0]]
        for value in ({"x": 1}, {"x": list(range(20_000))}):
            for mine, other in itertools.product(senders, senders):
                text = raised((other if rank else mine)[1], value, 1 - rank)
                assert "ranks 0 and 1 send to each other, and neither receives" in text
        entries.works(rank)


@pytest.mark.slow
@distributed(world_size=2)
def test_two_that_receive_from_each_other_raise_the_same(rank, world_size):
    with made("shm", rank, world_size) as entries:
        receivers = [each for _, each in entries.get_tree + entries.get_object]
        for mine, other in itertools.product(receivers, receivers):
            text = raised(other if rank else mine, {}, 1 - rank)
            assert "ranks 0 and 1 receive from each other, and neither sends" in text
        entries.works(rank)


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_what_cannot_travel_or_be_taken_raises_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        for (_, send), (_, receive) in itertools.product(entries.tree, entries.get_tree):
            text = raised(receive, {}, 0) if rank else raised(send, {"x": iter([])}, 1)
            assert "rank 0 failed before the exchange" in text
        large = {"x": torch.ones(1 << 19)}
        for (_, send), (name, receive) in itertools.product(entries.tree, entries.get_tree):
            if "into" in name:
                text = raised(receive, {"x": torch.ones(1)}, 0) if rank else raised(send, large, 1)
                assert "ranks disagree on 1 of 1 leaves" in text
        entries.works(rank)


@pytest.mark.slow
@distributed(world_size=2)
def test_what_was_posted_before_two_send_to_each_other_arrives(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", "0")
        group = GroupCoordinator([[0, 1]], rank, "gloo", False)
        handles = [] if rank else group.isend_tensor_dict({"x": 1}, 1)
        assert "neither receives" in raised(group.send_object, 1, 1 - rank)
        if rank:
            assert group.recv_tensor_dict(0) == {"x": 1}
        waited(handles)
        group.destroy()


@pytest.mark.slow
@distributed(world_size=4)
def test_a_verb_does_not_take_shares_for_tensors(rank):
    tp = GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", False)
    pp = GroupCoordinator([[0, 2], [1, 3]], rank, "gloo", False)
    shares = {"all_gather_group": tp, "all_gather_tensors": {"x": True}}
    if rank < 2:
        text = raised(lambda: pp.send_tensor_dict({"x": torch.ones(4)}, 1, **shares))
    else:
        text = raised(lambda: easydist.recv_tensor_dict(group_src=0, group=pp))
    assert text.startswith("DisagreementError: recv_tensor_dict: rank 0 sends with an all_gather_group")
    pp.destroy()
    tp.destroy()
