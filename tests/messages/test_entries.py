"""Whatever sends a tree, an object or a tensor meets whatever receives one, over the same members."""

import contextlib
import itertools
import re
from functools import partial
from pathlib import Path
from unittest import mock

import groups
import pytest
import torch
from launching import sampled

import easydist
from easydist.comms import new_comm
from easydist.errors import DisagreementError, RemoteError
from easydist.parallel import GroupCoordinator
from easydist.parallel.point_to_point import PointToPoint
from easydist.testing import distributed
from easydist.verbs import object_pair, tensor_dicts

ROOT = Path(easydist.__file__).parent

TREES = [
    {"large": torch.arange(1 << 19), "small": torch.ones(2), "scalar": torch.tensor(2.5)},
    {"x": torch.arange(20_000), "empty": torch.ones(0)},
    {"x": torch.arange(3), "y": [1, "text", None]},
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
        self.tensor, self.get_tensor = {}, {}


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
        self.object = {
            "coordinator.send_object": group.send_object,
            "coordinator.isend_object": lambda obj, dst: group.isend_object(obj, dst).wait(),
        }
        self.get_object = {"coordinator.recv_object": lambda obj, src: group.recv_object(src)}
        self.tensor = {"coordinator.send": group.send}
        self.get_tensor = {"coordinator.recv": lambda one, src: group.recv(one.shape, one.dtype, src)}


def test_the_entries_are_all_that_there_are():
    functions = [name for module in (object_pair, tensor_dicts) for name in module.__all__ if "broadcast" not in name]
    methods = [f"coordinator.{name}" for name in vars(PointToPoint) if re.match("i?(send|recv)", name)]
    known = {
        name.partition("(")[0]
        for source in (OfVerbs(None), OfCoordinator(mock.Mock()))
        for entries in vars(source).values()
        for name in entries
    }
    assert known == {*functions, *methods}
    users = {
        path for path in ROOT.rglob("*.py") if re.search(r"messages\.pair import.*\b(send|receive)\b", path.read_text())
    }
    assert {str(path.relative_to(ROOT)) for path in users} == {
        "verbs/object_pair.py",
        "verbs/tensor_dicts.py",
        "parallel/point_to_point.py",
    }


class Entries:
    """All entries over the members of a group, by name, from its first rank to its last one.

    Args:
        rank: This rank.
        world_size: The number of ranks; those between the two take no part.
        sources: The entries.
        is_shared: True if the data is in shared memory.
    """

    def __init__(self, rank, world_size, *sources, is_shared=True):
        self.rank, self.src, self.dst, self.is_shared = rank, 0, world_size - 1, is_shared
        for kind in ("tree", "object", "tensor"):
            for name in (kind, f"get_{kind}"):
                entries = [one for source in sources for one in getattr(source, name).items()]
                setattr(self, name, [(f"{each} {number}", entry) for number, (each, entry) in enumerate(entries)])

    def pairs(self, senders, receivers):
        """Return all pairs of entries for two ranks that share memory, a sample else: the rest differs below them."""
        every = [*itertools.product(senders, receivers)]
        return every if self.is_shared and self.dst == 1 else sampled(every, 3)

    def some(self, values):
        """Return the values for this number of ranks: the first one is enough for a second number."""
        return values if self.dst == 1 else values[:1]

    def meet(self, kind, values):
        """Send each value by each entry to each entry that receives such a value."""
        senders, receivers = getattr(self, kind), getattr(self, f"get_{kind}")
        for value, (sender, send), (receiver, receive) in itertools.product(self.some(values), senders, receivers):
            if self.rank == self.src:
                send(value, self.dst)
            elif self.rank == self.dst:
                assert equal(receive(value, self.src), value), (sender, receiver)

    def raised(self, first, second):
        """Return the text of the error that both ranks raise.

        Args:
            first: A function of the other rank, to call on the first rank.
            second: The same for the last rank.
        """
        return raised({self.src: lambda: first(self.dst), self.dst: lambda: second(self.src)}.get(self.rank))

    def works(self):
        self.meet("tree", [{"y": 2}])


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
            yield Entries(rank, world_size, OfVerbs(comm))
            comm.finalize()
            return
        group = GroupCoordinator([[*range(world_size)]], rank, "gloo", False)
        yield Entries(
            rank, world_size, OfVerbs(group), OfVerbs(group.cpu_group), OfCoordinator(group), is_shared=kind == "shm"
        )
        group.destroy()


KINDS = pytest.mark.parametrize("kind", ["shm", "gloo", "hosts", "comm"])


@pytest.mark.slow
@KINDS
@distributed(world_size=[2, 3])
def test_all_that_send_meet_all_that_receive(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        entries.meet("tree", TREES)
        entries.meet("object", ["text" * 20_000, {"x": 1}])
        entries.meet("tensor", [torch.arange(1 << 19).view(2, -1), torch.tensor(2.5)])


def raised(call):
    """Return the text of the error that a call raises on all ranks that make it; others pass None."""
    error = None
    if call is not None:
        with pytest.raises((DisagreementError, RemoteError)) as caught:
            call()
        error = f"{type(caught.value).__name__}: {caught.value}"
    (text,) = {text for text in groups.of_all(error) if text is not None}
    return text


VALUES = {
    "tree": [{"x": 1}, {"x": list(range(20_000))}],
    "object": [{"x": 1}, {"x": list(range(20_000))}],
    "tensor": [torch.ones(2), torch.ones(1 << 19)],
}


@pytest.mark.slow
@KINDS
@distributed(world_size=[2, 3])
def test_a_sender_and_a_receiver_of_different_kinds_raise_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        for sent, got in itertools.permutations(VALUES, 2):
            for (_, send), (_, receive) in entries.pairs(getattr(entries, sent), getattr(entries, f"get_{got}")):
                for value in entries.some(VALUES[sent]):
                    text = entries.raised(partial(send, value), partial(receive, VALUES[got][0]))
                    assert text.startswith("DisagreementError: recv")
        entries.works()


@pytest.mark.slow
@KINDS
@distributed(world_size=[2, 3])
def test_two_that_send_to_each_other_raise_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        senders = [(name, one, kind) for kind in VALUES for name, one in getattr(entries, kind) if "isend" not in name]
        for (_, one, this), (_, other, that) in entries.pairs(senders, senders):
            for mine, others in entries.some([*zip(VALUES[this], VALUES[that], strict=True)]):
                text = entries.raised(partial(one, mine), partial(other, others))
                assert f"ranks 0 and {world_size - 1} send to each other, and neither receives" in text
        entries.works()


@pytest.mark.slow
@distributed(world_size=[2, 3])
def test_two_that_receive_from_each_other_raise_the_same(rank, world_size):
    with made("shm", rank, world_size) as entries:
        receivers = [partial(one, VALUES[kind][0]) for kind in VALUES for _, one in getattr(entries, f"get_{kind}")]
        for one, other in itertools.product(receivers, receivers):
            text = entries.raised(one, other)
            assert f"ranks 0 and {world_size - 1} receive from each other, and neither sends" in text
        entries.works()


def fail(text):
    raise ValueError(text)


class Unreadable:
    """Its receiver fails, with a text that is too long for an answer."""

    def __reduce__(self):
        return fail, ("text" * 10_000,)


@pytest.mark.slow
@KINDS
@distributed(world_size=2)
def test_what_cannot_travel_or_be_taken_raises_the_same(kind, rank, world_size):
    with made(kind, rank, world_size) as entries:
        for (_, send), (_, receive) in itertools.product(entries.tree, entries.get_tree):
            text = entries.raised(partial(send, {"x": iter([])}), partial(receive, {}))
            assert "rank 0 failed before the exchange" in text
        wrong = [receive for name, receive in entries.get_tree if "into" in name]
        # Both follow their frame. If they were accepted, memory would carry the one, and gloo the other.
        for numel, (_, send), receive in itertools.product((1 << 16, 1 << 19), entries.tree, wrong):
            text = entries.raised(partial(send, {"x": torch.ones(numel)}), partial(receive, {"x": torch.ones(1)}))
            assert "ranks disagree on 1 of 1 leaves" in text
        for (name, send), (other, receive) in itertools.product(entries.object, entries.get_object):
            if "coordinator" not in name + other:  # whose decoder is restricted
                text = entries.raised(partial(send, Unreadable()), partial(receive, None))
                assert "rank 1 cannot take what rank 0 sends" in text
        entries.works()


@pytest.mark.slow
@distributed(world_size=2)
def test_what_was_posted_before_two_send_to_each_other_arrives(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", "0")
        group = GroupCoordinator([[0, 1]], rank, "gloo", False)
        handles = [] if rank else group.isend_tensor_dict({"x": 1}, 1)
        assert "neither receives" in raised(lambda: group.send_object(1, 1 - rank))
        if rank:
            assert group.recv_tensor_dict(0) == {"x": 1}
        waited(handles)
        group.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "gloo", "hosts"])
@distributed(world_size=2)
def test_data_that_is_under_way_does_not_come_instead_of_an_answer(kind, rank):
    with ways(kind, rank):
        group = GroupCoordinator([[0, 1]], rank, "gloo", False)
        for numel in (3, 20_000, 1 << 19):
            tree = {"x": torch.arange(numel), "y": torch.ones(numel)}
            if rank:
                handles = group.isend_tensor_dict(tree, 0)
                assert group.recv_object(0) == "first"
                waited(handles)
            else:
                group.send_object("first", 1)
                assert equal(group.recv_tensor_dict(1), tree)
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
