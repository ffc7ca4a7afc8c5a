"""Tensor dicts that do not fit, cannot be sent or cannot be taken: the same error on all sides, and headers."""

import re
import warnings

import numpy as np
import pytest
import torch
from exchanging import exchanged, works_on
from trees import THING

import easydist
from easydist import DisagreementError, RemoteError, WireError
from easydist.comms import SOLO
from easydist.format import header, outline
from easydist.testing import distributed
from easydist.verbs.buckets import LARGE
from easydist.verbs.tensor_dict_messages import Announcement, Incoming, Outgoing


def text_of(caught):
    """Return the text of the error, without the place of the call."""
    return "\n".join(line for line in str(caught.value).splitlines() if not line.startswith("Called at"))


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
    "read-only": (
        read_only,
        "ValueError: leaf ['x'][0] is a read-only array (pass a copy), so it cannot be written in place",
    ),
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
        said = "cannot take what rank 0 sends" if verb == "recv_tensor_dict" else "failed before the exchange"
        assert text_of(caught) == (
            f"{verb}: rank 1 {said}\n  rank 1: {text}\n"
            "Nothing was changed, and the group keeps working. Fix the error on that rank."
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
        "broadcast_object_list\nNothing was changed, and the group keeps working. Fix the error on that rank."
    )
    with pytest.raises(RemoteError) as caught:
        exchanged(rank, {"a": [THING]}, src, 1 - src)
    assert text_of(caught) == f"send_tensor_dict: {said}"
    assert type(caught.value.__cause__) is (TypeError if rank == src else type(None))
    with pytest.raises(RemoteError) as caught:
        easydist.broadcast_tensor_dict({"a": [THING]}, src)
    assert text_of(caught) == f"broadcast_tensor_dict: {said}"
    works_on(rank)


@pytest.mark.parametrize("sparse", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@distributed(world_size=2)
def test_a_tensor_that_is_not_dense_is_refused_by_its_path(rank, sparse):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its compressed sparse tensors are in beta
        data = {"x": getattr(torch.eye(2), sparse)()}
    said = r"rank 0: TypeError: leaf \['x'\] is not a dense tensor \(torch\.\w+ on cpu\); pass its dense parts"
    with pytest.raises(RemoteError, match=said):
        exchanged(rank, data)
    with pytest.raises(RemoteError, match=said):
        easydist.broadcast_tensor_dict(data)
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
        with pytest.raises(
            ValueError, match=r"=0 is not another rank of the group, which has 1 rank \(0\); this is rank 0"
        ):
            call()


@distributed(world_size=2)
def test_ranks_outside_the_group_are_refused(rank):
    for other in (-1, 2, rank):
        said = re.escape(f"={other} is not another rank of the group, which has 2 ranks (0–1); this is rank {rank}")
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


@pytest.mark.parametrize("change", [lambda one: one[:-1], lambda one: torch.cat([one, one[:1]]), lambda one: one[:20]])
def test_an_announcement_of_another_length_is_refused(change):
    message = Outgoing({"a": torch.ones(3)}).announcement(1 << 10)
    assert Announcement(message).data.numel() == 12
    with pytest.raises(WireError, match="an announcement of"):
        Announcement(change(message))


def test_a_header_without_its_data_is_checked_like_any_other():
    encoded = header.encode({"a": torch.ones(3)})
    assert header.decode(encoded, apart=True).entries[0].stop == 12
    with pytest.raises(WireError, match="the entries need 12 bytes of data, but there are 16"):
        header.decode(encoded + b"more", apart=True)
    with pytest.raises(WireError, match="the entries need 12 bytes of data, but there are 0"):
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
