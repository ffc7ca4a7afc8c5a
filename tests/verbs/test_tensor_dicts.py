"""send_tensor_dict, recv_tensor_dict, broadcast_tensor_dict: what arrives is what a file would give back."""

import contextlib
from collections import OrderedDict

import launching
import numpy as np
import pytest
import torch
from exchanging import exchanged, works_on
from hypothesis import given, settings, strategies as st
from trees import CASES, OUTSIDERS, Point, arrays, assert_same, numbers, tensors

import easydist
from easydist import RemoteError, tree
from easydist.comms import SOLO
from easydist.testing import distributed
from easydist.verbs import tensor_dict_messages
from easydist.verbs.buckets import LARGE
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing

REFUSED = {"enum", "int enum", "object", "class", "function", "set", "odd keys", "statics", "registered"}
NAMES = [name for name in CASES if name not in REFUSED and name not in OUTSIDERS]


def plain(data):
    """Describe the tree as JSON, without easydist's own code: the oracle."""
    if isinstance(data, torch.Tensor):
        return data.detach().clone()
    if isinstance(data, np.ndarray):
        return data.astype(data.dtype.newbyteorder("="))
    if isinstance(data, dict) and type(data) in (dict, OrderedDict):
        return type(data)((key, plain(child)) for key, child in data.items())
    if type(data) is torch.Size or not tree.is_container(data):
        return data
    if hasattr(data, "_fields") or hasattr(data, "__dataclass_fields__"):
        names = getattr(data, "_fields", None) or [n for n in data.__dataclass_fields__ if hasattr(data, n)]
        return {name: plain(getattr(data, name)) for name in names}
    if hasattr(data, "keys"):
        return {key: plain(data[key]) for key in data.keys()}  # noqa: SIM118
    return (tuple if isinstance(data, tuple) else list)(plain(child) for child in data)


def everything():
    """Every case in one tree, and tensors on both sides of what travels alone."""
    large = torch.arange(LARGE // 4, dtype=torch.int32)
    sizes = {"large": large, "almost": torch.arange(LARGE - 1).to(torch.uint8), "wide": large.view(2, -1).t()}
    return {**{name: CASES[name]() for name in NAMES}, **sizes, "expanded large": large[:1].expand(2, LARGE)}


# --- the header


@contextlib.contextmanager
def announced():
    """Record the header of each announcement that this rank receives."""
    headers, read = [], tensor_dict_messages.Announcement.__init__

    def reading(announcement, message):
        read(announcement, message)
        headers.append(bytes(announcement.header.numpy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_dict_messages.Announcement, "__init__", reading)
        yield headers


@pytest.mark.slow
@distributed(world_size=2)
def test_what_is_sent_is_what_header_shows_and_save_writes(rank, tmp_path):
    tied, large = torch.ones(2), torch.zeros(LARGE)
    trees = [
        {"b.weight": torch.ones(2, 3), "a": torch.arange(3)},
        OrderedDict(torch.nn.BatchNorm1d(2).state_dict()),
        {"x": tied, "y": tied, "large": large},
        {"x": tied, "n": 5, "l": [large, np.ones(2)]},
        {"x": Point(tied, torch.tensor(1j))},
        {"__metadata__": tied},
        tied,
        {},
    ]
    for data in trees:
        with announced() as headers:
            for _ in range(3):  # the first makes the header, the others may find it
                exchanged(rank, data, 0, 1)
                easydist.broadcast_tensor_dict(data if rank == 0 else None)
        assert len(headers) == 6 * rank
        path = tmp_path / str(rank)
        easydist.save(data, path)
        want = easydist.read_header(path)
        assert easydist.header(data) == want
        for one in headers:
            assert one == path.read_bytes()[: want.nbytes]
            assert easydist.read_header(one) == want


@pytest.mark.slow
@distributed(world_size=2)
def test_a_flat_dict_arrives_in_place_and_large_tensors_without_a_copy(rank):
    data = {"['b']": torch.arange(LARGE), "b": -torch.arange(LARGE), "small": torch.ones(2)}
    for names in (data, [*data][::-1]):
        into = {name: torch.zeros_like(data[name]) for name in names}
        got = exchanged(rank, data, 0, 1, into=into)
        if rank == 1:
            assert all(got[name] is into[name] for name in data)
            assert_same({name: into[name] for name in data}, data)


# --- what arrives


@pytest.mark.slow
@distributed(world_size=(2, 3, 4))
def test_every_awkward_tree_arrives_bit_for_bit(rank, world_size):
    data, last = everything(), world_size - 1
    for src, dst in ((0, last), (last, 0)):
        got = exchanged(rank, data, src, dst)
        if rank == dst:
            assert_same(got, plain(data))
            assert all(leaf.is_contiguous() for leaf in tree.leaves(got) if isinstance(leaf, torch.Tensor))
    got = easydist.broadcast_tensor_dict(data if rank == last else None, last)
    assert_same(got, data if rank == last else plain(data))
    assert (got is data) == (rank == last)


KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.binary(max_size=2)
PLAIN = st.recursive(
    tensors(max_dims=2, max_side=2) | arrays() | numbers() | st.integers() | st.text(max_size=3) | st.none(),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(KEYS | st.tuples(KEYS), child, max_size=3),
        st.dictionaries(KEYS, child, max_size=3).map(OrderedDict),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=launching.examples(25))
@given(st.lists(PLAIN, max_size=12))
@distributed(world_size=2)
def test_plain_trees_arrive_bit_for_bit(rank, data):
    got = exchanged(rank, data)
    if rank == 1:
        assert_same(got, plain(data))
    got = easydist.broadcast_tensor_dict(data if rank == 1 else None, 1)
    assert_same(got, data if rank == 1 else plain(data))


@distributed(world_size=(2, 3))
def test_ties_are_sent_once_and_tied_again(rank, world_size):
    weight, array = torch.arange(1000.0), np.arange(1000.0)
    data = {"a": weight, "b": [weight, weight.view(10, 100)], "c": array, "d": (array,)}
    for got in (exchanged(rank, data), easydist.broadcast_tensor_dict(data)):
        if got is not None:
            assert got["b"][0] is got["a"]
            assert got["d"][0] is got["c"]
            assert got["b"][1].tolist() == weight.view(10, 100).tolist()
    sent = sum(buffer.numel() for _, buffer in Outgoing(data).buffers(SOLO))
    assert sent == 2 * weight.nbytes + array.nbytes  # of another shape it is another tensor


@distributed(world_size=2)
def test_with_objects_values_arrive_as_what_they_are_where_their_class_is_allowed(rank):
    data = {
        "set": {1, 2},
        "enum": CASES["enum"](),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "n": CASES["namedtuple"](),
    }
    classes = [type(data["enum"]), type(data["n"])]
    for call in (lambda: easydist.broadcast_tensor_dict(data, objects=True), lambda: pair(rank, data)):
        with pytest.raises(RemoteError, match=r"which is not allow-listed"):
            call()
        with (
            torch.serialization.safe_globals(classes if rank == 0 else []),
            pytest.raises(RemoteError, match=r"which is not allow-listed"),
        ):
            call()
        with torch.serialization.safe_globals(classes):
            got = call()
        assert_same(got, data) if got is not None else None
    works_on(rank)


def pair(rank, data):
    return easydist.recv_tensor_dict(0) if rank else easydist.send_tensor_dict(data, 1, objects=True)


@distributed(world_size=2)
def test_headers_that_come_again_are_those_of_what_is_sent(rank):
    base = torch.arange(4.0)
    trees = [{"a": base}, {"a": base, "n": 1}, {"a": base, "n": True}, {"a": base, "n": "1"}, {"a": base.int()}]
    trees += [{"a": base, "b": base}, {"a": base[:2], "b": base[2:]}, {"b": base, "a": base.double()}, {"a": base[:0]}]
    for sent in trees * 2 + trees[::-1]:
        got = easydist.broadcast_tensor_dict(sent if rank == 0 else None)
        assert_same(got, sent)
        assert "b" not in sent or (got["a"] is got["b"]) == (sent["a"] is sent["b"])
    for one in (base, base.clone().requires_grad_()):
        got = easydist.broadcast_tensor_dict({"a": one} if rank == 0 else None, objects=True)
        assert got["a"].requires_grad == one.requires_grad


@distributed(world_size=2)
def test_what_arrives_has_memory_of_its_own(rank):
    shared = torch.arange(6.0)
    got = exchanged(rank, {"a": shared[:3], "b": shared[3:]})
    if rank == 1:
        assert got["a"].untyped_storage().nbytes() == 12
        before = got["b"]._version
        got["a"].zero_()
        assert got["b"]._version == before
    weight = torch.ones(3)
    assert rank or easydist.broadcast_tensor_dict({"w": weight})["w"] is weight
    assert not rank or easydist.broadcast_tensor_dict()["w"].tolist() == [1, 1, 1]


@distributed(world_size=2)
def test_flags_of_autograd_do_not_travel_and_parameters_can_be_filled(rank):
    source = {"p": torch.nn.Parameter(torch.ones(2)), "t": torch.ones(2, requires_grad=True)}
    got = exchanged(rank, source)
    assert rank == 0 or type(got["p"]) is torch.Tensor
    assert rank == 0 or not (got["p"].requires_grad or got["t"].requires_grad)
    model = torch.nn.Linear(2, 1)
    into = dict(model.named_parameters())
    got = exchanged(rank, {"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)}, into=into)
    if rank == 1:
        assert got["weight"] is model.weight
        assert model.weight.tolist() == [[7.0, 7.0]]
        assert model.weight.requires_grad


@distributed(world_size=2)
def test_autograd_notices_what_arrives_in_into_at_any_size(rank):
    for numel in (4, 1 << 17):  # along with the header, and straight into the target
        weight = torch.full((numel,), float(rank), requires_grad=True)
        loss = (weight * weight).sum()
        exchanged(rank, {"w": weight}, into={"w": weight})
        if rank == 0:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@distributed(world_size=3)
def test_many_messages_between_pairs_and_collectives_keep_their_order(rank):
    for step in range(5):
        if rank == 0:
            for dst in (1, 2):
                easydist.send_tensor_dict({"step": step, "dst": torch.tensor(dst)}, dst)
        else:
            assert easydist.recv_tensor_dict(0) == {"step": step, "dst": torch.tensor(rank)}
        assert easydist.gather(torch.tensor([step])).tolist() == [step] * 3
    ring = easydist.recv_tensor_dict(2) if rank == 0 else None
    if rank:
        easydist.send_tensor_dict([rank] if rank == 1 else [3], (rank + 1) % 3)
    if rank == 2:
        assert easydist.recv_tensor_dict(1) == [1]
    assert ring in (None, [3])


@distributed(world_size=4)
def test_ranks_are_those_of_the_group(rank):
    groups = [torch.distributed.new_group(ranks) for ranks in ([1, 3], [0, 2])]
    group, mine = groups[rank % 2 == 0], rank // 2
    if mine == 1:
        easydist.send_tensor_dict({"from": rank}, group_dst=0, group=group)
    else:
        assert easydist.recv_tensor_dict(group_src=1, group=group) == {"from": rank + 2}
    got = easydist.broadcast_tensor_dict({"from": rank} if mine else None, group_src=1, group=group)
    assert got == {"from": 3 if rank % 2 else 2}


# --- in place


def targets():
    """A place for every sort of leaf: contiguous, transposed, large, array, numbers."""
    return {
        "small": torch.zeros(3),
        "transposed": torch.zeros(2, 3).t(),
        "slice": torch.zeros(4, 4, dtype=torch.bfloat16)[:, 1],
        "large": torch.zeros(LARGE, dtype=torch.int16),
        "large strided": torch.zeros(2, LARGE).t(),
        "conj": torch.zeros(LARGE, dtype=torch.complex64).conj(),
        "array": np.zeros((2, 2), np.int16),
        "scalar": np.float32(0),
        "numbers": [0, 0.0, False],
        "text": "mine",
    }


def filling():
    sizes = torch.arange(2 * LARGE, dtype=torch.float32).view(LARGE, 2)
    return {
        "text": "theirs",
        "numbers": [5, 0.5, True],
        "scalar": np.float32(1.5),
        "array": np.arange(4, dtype=np.int16).reshape(2, 2),
        "conj": torch.complex(*sizes.t()),
        "large strided": sizes,
        "large": torch.arange(LARGE).to(torch.int16),
        "slice": torch.arange(4, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).view(3, 2),
        "small": torch.arange(3.0).expand(3),
    }


@distributed(world_size=(2, 3))
def test_into_is_written_in_place(rank, world_size):
    for verb in ("recv", "broadcast"):
        into = targets()
        if verb == "recv":
            got = exchanged(rank, filling(), into=into)
        else:
            got = easydist.broadcast_tensor_dict(filling() if rank == 0 else None, into=into)
        if rank != 0 and got is not None:
            assert_same(got, {name: filling()[name] if name != "text" else "mine" for name in into})
            assert all(got[name] is into[name] for name in ("small", "transposed", "large", "conj", "array", "text"))
            assert into["slice"]._base[:, 0].tolist() == [0] * 4


def test_a_large_tensor_leaves_its_source_and_arrives_in_its_target_without_a_copy():
    source, target = torch.ones(LARGE), torch.zeros(LARGE)
    outgoing = Outgoing({"x": source})
    incoming = Incoming(SOLO, outgoing.header, {"x": target})
    assert [buffer.data_ptr() for _, buffer in outgoing.buffers(SOLO)] == [source.data_ptr()]
    assert [buffer.data_ptr() for _, buffer in incoming.buffers()] == [target.data_ptr()]


STRIDED = {
    "columns": lambda base: base[:, 100:],
    "every second row": lambda base: base[::2],
    "transposed": lambda base: base.t(),
}


@pytest.mark.parametrize("numel", [10_000, 1_000_000], ids=["small", "large"])
@pytest.mark.parametrize("layout", STRIDED)
@distributed(world_size=2)
def test_strided_targets_are_written_and_nothing_beside_them(rank, layout, numel):
    values = torch.arange(numel).view(-1, 1000)
    source, want = STRIDED[layout](values.clone()), torch.full_like(values, -1)
    STRIDED[layout](want).copy_(source)
    for verb in (
        lambda into: exchanged(rank, {"x": source}, into=into),
        lambda into: easydist.broadcast_tensor_dict({"x": source} if rank == 0 else None, into=into),
    ):
        base = torch.full_like(values, -1)
        verb({"x": STRIDED[layout](base)})
        assert rank == 0 or torch.equal(base, want)


@distributed(world_size=2)
def test_containers_of_other_classes_can_be_filled(rank):
    into = Point(torch.zeros(2), {"z": 0})
    got = exchanged(rank, Point(torch.ones(2), {"z": 5}), into=into)
    if rank == 1:
        assert isinstance(got, Point)
        assert (got.x is into.x, got.x.tolist(), got.y) == (True, [1, 1], {"z": 5})
