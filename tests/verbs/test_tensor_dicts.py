"""send_tensor_dict, recv_tensor_dict, broadcast_tensor_dict: what arrives is what a file would give back."""

from collections import OrderedDict

import launching
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from trees import CASES, OUTSIDERS, THING, Point, arrays, assert_same, numbers, tensors

import easydist
from easydist import DisagreementError, RemoteError, WireError, tree
from easydist.comms import SOLO
from easydist.format import header, outline
from easydist.testing import distributed
from easydist.verbs.buckets import LARGE
from easydist.verbs.tensor_dict_messages import Incoming, Outgoing

REFUSED = {"enum", "int enum", "object", "class", "function", "set", "odd keys", "statics", "registered"}
NAMES = [name for name in CASES if name not in REFUSED and name not in OUTSIDERS]


def plain(data):
    """What JSON can tell of the tree, without easydist's own code: the oracle."""
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


def exchanged(rank, data, src=0, dst=1, **kwargs):
    """Sent from ``src`` to ``dst``: what arrives there, None elsewhere."""
    if rank == src:
        easydist.send_tensor_dict(data, dst)
    return easydist.recv_tensor_dict(src, **kwargs) if rank == dst else None


def everything():
    """Every case in one tree, and tensors on both sides of what travels alone."""
    large = torch.arange(LARGE // 4, dtype=torch.int32)
    sizes = {"large": large, "almost": torch.arange(LARGE - 1).to(torch.uint8), "wide": large.view(2, -1).t()}
    return {**{name: CASES[name]() for name in NAMES}, **sizes, "expanded large": large[:1].expand(2, LARGE)}


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
        easydist.send_tensor_dict({"from": rank}, 0, group=group)
    else:
        assert easydist.recv_tensor_dict(1, group=group) == {"from": rank + 2}
    got = easydist.broadcast_tensor_dict({"from": rank} if mine else None, 1, group=group)
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


# --- what goes wrong


def text_of(caught):
    """What the error says, but for where it was called."""
    return "\n".join(line for line in str(caught.value).splitlines() if not line.startswith("Called at"))


def works_on(rank):
    """The next call on the pair and on the group works."""
    got = exchanged(rank, {"ok": torch.ones(1)})
    assert rank == 0 or got["ok"].tolist() == [1]
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1]


MISFITS = {
    "shape": ({"w": torch.zeros(3)}, "['w']  rank 0: float32 (2,)   into= of rank 1: float32 (3,)"),
    "dtype": ({"w": torch.zeros(2).double()}, "['w']  rank 0: float32 (2,)   into= of rank 1: float64 (2,)"),
    "kind": ({"w": 0.5}, "['w']  rank 0: float32 (2,)   into= of rank 1: float"),
}


@pytest.mark.parametrize("name", MISFITS)
@distributed(world_size=2)
def test_into_that_does_not_fit_is_the_same_error_on_both_sides(rank, name):
    into, line = MISFITS[name]
    big = torch.zeros(LARGE)
    into = {"big": big, "n": 1, **into}
    data = {"big": torch.ones(LARGE), "n": 2, "w": torch.ones(2)}
    advice = "Pass into= the structure, dtypes and shapes that rank 0 sends, or leave it out."
    with pytest.raises(DisagreementError) as caught:
        exchanged(rank, data, into=into)
    assert text_of(caught) == f"recv_tensor_dict: ranks disagree on 1 of 3 leaves\n  {line}\n{advice}"
    with pytest.raises(DisagreementError) as caught:
        easydist.broadcast_tensor_dict(data, into=into)
    assert text_of(caught) == f"broadcast_tensor_dict: ranks disagree on 1 of 3 leaves\n  {line}\n{advice}"
    assert not big.any()
    works_on(rank)


@distributed(world_size=3)
def test_missing_and_further_keys_of_several_ranks_stand_in_one_table(rank):
    into = {1: {"a": torch.zeros(1)}, 2: {"a": torch.zeros(1), "b": torch.zeros(2), "c": 0}}.get(rank)
    with pytest.raises(DisagreementError) as caught:
        easydist.broadcast_tensor_dict({"a": torch.ones(1), "b": torch.ones(1)}, into=into)
    assert text_of(caught) == (
        "broadcast_tensor_dict: ranks disagree on 2 of 3 leaves\n"
        "  ['b']  rank 0: float32 (1,)   into= of rank 1: missing   into= of rank 2: float32 (2,)\n"
        "  ['c']  rank 0: missing   into= of rank 2: int\n"
        "Pass into= the structure, dtypes and shapes that rank 0 sends, or leave it out."
    )
    assert rank == 0 or into["a"].tolist() == [0]
    assert easydist.broadcast_tensor_dict([1]) == [1]


@distributed(world_size=2)
def test_of_many_differences_ten_are_shown(rank):
    with pytest.raises(DisagreementError, match=r"disagree on 30 of 30 leaves(\n  \[\d+\] .*){10}\n  … and 20 more\n"):
        exchanged(rank, [torch.ones(1)] * 30, into=[torch.ones(2) for _ in range(30)])


def read_only():
    array = np.zeros(2)
    array.flags.writeable = False
    return array


UNWRITABLE = {
    "read-only": (read_only, "ValueError: leaf ['x'][0] is a read-only array, so it cannot be written in place"),
    "expanded": (
        lambda: torch.zeros(1, dtype=torch.float64).expand(2),
        "ValueError: leaf ['x'][0] is an expanded tensor whose elements share memory (pass .contiguous()), so it "
        "cannot be written in place",
    ),
    "sparse": (
        lambda: torch.zeros(2, dtype=torch.float64).to_sparse(),
        "TypeError: leaf ['x'][0] is not a dense tensor (torch.sparse_coo on cpu); pass its dense parts",
    ),
}


@pytest.mark.parametrize("name", UNWRITABLE)
@distributed(world_size=2)
def test_into_that_cannot_be_written_is_the_same_error_on_both_sides(rank, name):
    make, text = UNWRITABLE[name]
    other = torch.zeros(LARGE)
    for verb, call in {
        "recv_tensor_dict": lambda data, into: exchanged(rank, data, into=into),
        "broadcast_tensor_dict": lambda data, into: easydist.broadcast_tensor_dict(data, into=into),
    }.items():
        with pytest.raises(RemoteError) as caught:
            call({"x": [torch.ones(2).double()], "y": torch.ones(LARGE)}, {"x": [make()], "y": other})
        assert text_of(caught) == (
            f"{verb}: rank 1 failed before the exchange\n  rank 1: {text}\n"
            "Nothing was changed; fix that rank; the group keeps working."
        )
        assert (caught.value.__cause__ is not None) == (rank == 1)
        assert not other.any()
        works_on(rank)


@distributed(world_size=2)
def test_one_tensor_in_two_places_of_into_has_to_be_one_at_the_source(rank):
    place = torch.zeros(2)
    with pytest.raises(RemoteError, match=r"\['a'\] and \['b'\] are one tensor in into=, but two in what is sent"):
        exchanged(rank, {"a": torch.ones(2), "b": torch.zeros(2)}, into={"a": place, "b": place})
    one = torch.ones(2)
    exchanged(rank, {"a": one, "b": one}, into={"a": place, "b": place})
    assert place.tolist() == [rank, rank]


@pytest.mark.parametrize("src", [0, 1])
@distributed(world_size=2)
def test_what_json_cannot_say_is_refused_on_all_ranks(rank, src):
    said = (
        f"rank {src} failed before the exchange\n  rank {src}: TypeError: ['a'][0] is a Thing; a tensor dict holds "
        "tensors, arrays, numbers, text, bytes, None and plain containers of them: send its parts, or use "
        "broadcast_object_list\nNothing was changed; fix that rank; the group keeps working."
    )
    with pytest.raises(RemoteError) as caught:
        exchanged(rank, {"a": [THING]}, src, 1 - src)
    assert text_of(caught) == f"send_tensor_dict: {said}"
    assert type(caught.value.__cause__) is (TypeError if rank == src else type(None))
    with pytest.raises(RemoteError) as caught:
        easydist.broadcast_tensor_dict({"a": [THING]}, src)
    assert text_of(caught) == f"broadcast_tensor_dict: {said}"
    works_on(rank)


@distributed(world_size=1)
def test_in_a_world_of_one_broadcast_is_the_tree_and_nobody_can_be_sent_to(rank):
    data = {"x": torch.ones(2)}
    assert easydist.broadcast_tensor_dict(data) is data
    with pytest.raises(TypeError, match=r"^\['a'\] is a Thing; a tensor dict holds tensors"):
        easydist.broadcast_tensor_dict({"a": THING})
    with pytest.raises(ValueError, match="rank 0 is the source, but its tensor_dict is None"):
        easydist.broadcast_tensor_dict()
    for call in (lambda: easydist.send_tensor_dict(data, 0), lambda: easydist.recv_tensor_dict(0)):
        with pytest.raises(ValueError, match=r"=0 is not another rank of the group: it has 1, this is rank 0"):
            call()


@distributed(world_size=2)
def test_ranks_outside_the_group_are_refused(rank):
    for other in (-1, 2, rank):
        said = f"={other} is not another rank of the group: it has 2, this is rank {rank}"
        with pytest.raises(ValueError, match=f"send_tensor_dict: dst{said}"):
            easydist.send_tensor_dict({}, other)
        with pytest.raises(ValueError, match=f"recv_tensor_dict: src{said}"):
            easydist.recv_tensor_dict(other)
    with pytest.raises(ValueError, match="src=2 is not a rank of the group"):
        easydist.broadcast_tensor_dict({}, 2)
    with pytest.raises(DisagreementError, match=r"rank 1: broadcast_tensor_dict\(src=1\)"):
        easydist.broadcast_tensor_dict({}, rank)
    with pytest.raises(RemoteError, match="rank 1 is the source, but its tensor_dict is None"):
        easydist.broadcast_tensor_dict({} if rank == 0 else None, 1)
    works_on(rank)


@distributed(world_size=2)
def test_two_that_send_to_each_other_are_told(rank):
    with pytest.raises(DisagreementError) as caught:
        easydist.send_tensor_dict({"x": torch.ones(LARGE)}, 1 - rank)
    assert text_of(caught) == (
        "send_tensor_dict: ranks 0 and 1 send to each other, and neither receives\n"
        "One of the two has to call recv_tensor_dict first."
    )
    works_on(rank)


@distributed(world_size=2)
def test_an_error_that_has_no_text_is_told_as_well(rank):
    class Broken(dict):
        def keys(self):
            raise Silent

    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    with pytest.raises(RemoteError, match=r"rank 0 failed before the exchange\n  rank 0: .*Silent: <.*str\(\) failed>"):
        exchanged(rank, {"x": Broken(a=1)})
    works_on(rank)


# --- headers


def test_a_header_without_its_data_is_checked_like_any_other():
    encoded = header.encode({"a": torch.ones(3)})
    assert header.decode(encoded, apart=True).entries[0].stop == 12
    with pytest.raises(WireError, match="the entries need 12 bytes of data, there are 16"):
        header.decode(encoded + b"more", apart=True)
    with pytest.raises(WireError, match="the entries need 12 bytes of data, there are 0"):
        header.decode(encoded)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [({}, "the header is not JSON"), ({outline.METADATA: '{"tree":1}'}, "entry \"'a'\" has no place in the structure")],
)
def test_a_header_without_its_structure_is_refused(metadata, error):
    encoded = torch.frombuffer(bytearray(header.encode({"a": torch.ones(1)}, metadata)), dtype=torch.uint8)
    with pytest.raises(WireError, match=error.replace("\"'a'\"", "'a'")):
        Incoming(SOLO, encoded)


def test_a_device_that_the_receiver_does_not_have_is_named():
    metadata = {outline.METADATA: '{"tree":{"tensor":""}}', "easydist.devices": '{"":"xpu"}'}
    encoded = torch.frombuffer(bytearray(header.encode({"": torch.ones(1)}, metadata)), dtype=torch.uint8)
    with pytest.raises(
        RuntimeError, match=r"the tensor is on xpu, where this process cannot make a tensor \(.*\); pass into="
    ):
        Incoming(SOLO, encoded)
    target = torch.zeros(1)
    incoming = Incoming(SOLO, encoded, target)
    for _, buffer in incoming.buffers():
        buffer.view(torch.float32).fill_(5)
    assert incoming.finish() is target
    assert target.item() == 5


@pytest.mark.parametrize("numel", [0, 1, LARGE])
def test_data_for_a_device_that_the_communicator_cannot_reach_goes_through_the_host(numel):
    metadata = {outline.METADATA: '{"tree":{"tensor":""}}', "easydist.devices": '{"":"meta"}'}
    encoded = torch.frombuffer(bytearray(header.encode({"": torch.ones(numel)}, metadata)), dtype=torch.uint8)
    incoming = Incoming(SOLO, encoded)
    assert all(buffer.is_cpu for _, buffer in incoming.buffers())
    assert incoming.finish().is_meta
