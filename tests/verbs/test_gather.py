"""gather(x, dim=d) == torch.cat([x of rank 0, …, x of rank W-1], dim=d)."""

import contextlib
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import launching
import numpy as np
import pytest
import torch
from groups import BACKENDS, check_works, made, no_memory_from
from hypothesis import given, settings, strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

import easydist
from easydist.testing import distributed
from easydist.testing.conformance import MOVED, sample

ALL = (1, 2, 3, 4)
Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str
    extra: list = dataclasses.field(default_factory=list)


def same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8))


def tree_of(rank, rows):
    """The same structure on every rank, other values; dim 0 has ``rows`` elements."""
    values = torch.arange(rows * 6, dtype=torch.float32).view(rows, 2, 3) + 100 * rank
    return {
        "float": values,
        "transposed": values.transpose(1, 2),
        "strided": values[:, ::2],
        "nested": [Point(values[:, 0, 0].bool(), (values.to(torch.bfloat16),)), None, "text", rank],
        "array": np.arange(rows, dtype=np.uint16) + rank,
        "mapping": OrderedDict(b=values[:, 0].to(torch.complex64), a=values[:, 0, 0].short()),
        "dataclass": Output(values[:, 1], "name", [torch.full((rows,), rank)]),
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(rows, 0),
        "none": {},
    }


def expected(world_size, rows_of):
    """Return the result that one process computes from all ranks' trees."""
    trees = [tree_of(r, rows_of(r)) for r in range(world_size)]

    def cat(get):
        parts = [get(tree) for tree in trees]
        parts = [torch.as_tensor(part) for part in parts]
        return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])

    return {
        "['float']": cat(lambda t: t["float"]),
        "['transposed']": cat(lambda t: t["transposed"]),
        "['strided']": cat(lambda t: t["strided"]),
        "['nested'][0].x": cat(lambda t: t["nested"][0].x),
        "['nested'][0].y[0]": cat(lambda t: t["nested"][0].y[0]),
        "['nested'][3]": cat(lambda t: t["nested"][3]),
        "['array']": cat(lambda t: t["array"]),
        "['mapping']['b']": cat(lambda t: t["mapping"]["b"]),
        "['mapping']['a']": cat(lambda t: t["mapping"]["a"]),
        "['dataclass'].logits": cat(lambda t: t["dataclass"].logits),
        "['dataclass'].extra[0]": cat(lambda t: t["dataclass"].extra[0]),
        "['scalar']": cat(lambda t: t["scalar"]),
        "['empty']": cat(lambda t: t["empty"]),
    }


def check_against_oracle(rank, world_size, rows_of):
    got = easydist.gather(tree_of(rank, rows_of(rank)))
    leaves, spec = easydist.tree.flatten(got)
    want = expected(world_size, rows_of)
    assert set(spec.paths) == set(want)
    for path, leaf in zip(spec.paths, leaves, strict=True):
        same_bits(torch.as_tensor(leaf), want[path])
    assert isinstance(got["nested"][0], Point)
    assert type(got["mapping"]) is OrderedDict
    assert isinstance(got["array"], np.ndarray)
    assert (got["nested"][1], got["nested"][2], got["dataclass"].name) == (None, "text", "name")


@pytest.mark.slow
@distributed(world_size=ALL)
def test_concatenates_every_leaf_in_rank_order(rank, world_size):
    check_against_oracle(rank, world_size, lambda r: 3)


@distributed(world_size=ALL)
def test_uneven_dim_0_works_without_padding(rank, world_size):
    check_against_oracle(rank, world_size, lambda r: (2 * r + 1) % 4)


@distributed(world_size=ALL)
def test_a_rank_may_have_nothing(rank, world_size):
    check_against_oracle(rank, world_size, lambda r: 2 if r == 0 else 0)


@distributed(world_size=ALL)
def test_every_dtype_comes_bit_for_bit(rank, world_size):
    got = easydist.gather({str(dtype): sample(rank, 5 + rank, dtype) for dtype in MOVED})
    for dtype in MOVED:
        want = torch.cat([sample(r, 5 + r, dtype).view(torch.uint8) for r in range(world_size)]).view(dtype)
        same_bits(got[str(dtype)], want)


@distributed(world_size=ALL)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_any_dim(rank, world_size, dim):
    def part(r):
        shape = [2, 3, 4]
        shape[dim] += r
        return torch.arange(np.prod(shape)).view(shape) + 1000 * r

    got = easydist.gather(part(rank), dim=dim)
    assert torch.equal(got, torch.cat([part(r) for r in range(world_size)], dim=dim))


@distributed(world_size=ALL)
def test_dst_gets_the_result_and_the_others_none(rank, world_size):
    for dst in range(world_size):
        got = easydist.gather({"x": torch.full((rank + 1,), rank)}, dst=dst)
        if rank == dst:
            assert got["x"].tolist() == [r for r in range(world_size) for _ in range(r + 1)]
        else:
            assert got is None


@BACKENDS
@distributed(world_size=3)
def test_ranks_other_than_dst_take_no_memory_for_the_result(rank, backend):
    with made(backend) as group:
        check_works(group, backend)
        for dst in range(3):
            with no_memory_from(1) if rank != dst else contextlib.nullcontext():
                got = easydist.gather(torch.full((200_000,), rank), dst=dst, group=group)
            assert got is None if rank != dst else got[::100_000].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("rows", [40_000, 100_000], ids=["320 KB", "800 KB"])
@distributed(world_size=(2, 3))
def test_leaves_that_are_large_on_one_rank_only(rank, world_size, rows):
    """All ranks have to make the same messages, over the same communicator."""

    def tree(r):
        wide, narrow = (torch.full((2 + r,), r, dtype=dtype) for dtype in (torch.complex128, torch.int8))
        return {"wide": wide, "large": torch.arange(rows if r == 0 else 3) + r, "narrow": narrow}

    got = easydist.gather(tree(rank))
    for name in got:
        assert torch.equal(got[name], torch.cat([tree(r)[name] for r in range(world_size)]))


@distributed(world_size=ALL)
@pytest.mark.parametrize("rows", [3, 100_000], ids=["small", "large"])
def test_as_list_keeps_the_ranks_apart(rank, world_size, rows):
    def tree(r):
        tied = torch.arange(rows + r) + r
        return {"x": tied, "y": [tied, "text"], "array": np.full((r, 2), r), "number": r, "scalar": torch.tensor(r)}

    got = easydist.gather(tree(rank), as_list=True)
    assert len(got) == world_size
    for r, found in enumerate(got):
        want = tree(r)
        assert torch.equal(found["x"], want["x"])
        assert torch.equal(found["y"][0], want["x"])
        assert found["y"][1] == "text"
        assert np.array_equal(found["array"], want["array"])
        assert (found["number"], found["scalar"].shape) == (r, ())
    last = world_size - 1
    got = easydist.gather(torch.ones(2, rank), dim=1, dst=last, as_list=True)
    assert got is None if rank != last else [part.shape[1] for part in got] == [*range(world_size)]


@pytest.mark.parametrize("rows", [1, 3])
@distributed(world_size=2)
def test_as_list_takes_a_leaf_without_dimensions_on_all_ranks_or_on_none(rank, rows):
    """A rank that took the other's rows for a scalar would fail alone, or give them another shape."""
    with pytest.raises(
        easydist.DisagreementError, match=r"as_list=True, scalars=\[\"\['x'\]\"\]\) at .*\n  rank 1: .*True\) "
    ):
        easydist.gather({"x": torch.ones(rows) if rank else torch.tensor(0.5)}, as_list=True)
    got = easydist.gather(1.5 if rank else np.float64(0.5), as_list=True)
    assert got == [0.5, 1.5]
    assert isinstance(got[1 - rank], float if rank else np.float64)


@distributed(world_size=ALL)
def test_a_scalar_becomes_one_element_per_rank_at_every_world_size(rank, world_size):
    assert easydist.gather(torch.tensor(rank)).tolist() == list(range(world_size))
    assert easydist.gather(rank).dtype == torch.int64
    assert easydist.gather(0.1).tolist() == [0.1] * world_size
    assert easydist.gather(rank > 0).tolist() == [r > 0 for r in range(world_size)]
    assert isinstance(easydist.gather(np.float32(rank)), np.ndarray)


@distributed(world_size=(2, 3))
def test_leaves_are_matched_by_key_whatever_the_order(rank, world_size):
    data = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    mine = data if rank == 0 else dict(reversed(data.items()))
    got = easydist.gather(mine)
    assert list(got) == list(mine)
    assert got["a"].tolist() == [1.0] * world_size
    assert got["b"].tolist() == [2.0] * world_size


@distributed(world_size=(1, 2))
def test_one_tensor_twice_in_a_tree_is_one_tensor_in_the_result(rank, world_size):
    tied = torch.tensor([rank])
    got = easydist.gather({"a": tied, "b": [tied]})
    assert got["a"] is got["b"][0]
    assert got["a"].tolist() == list(range(world_size))


@distributed(world_size=2)
def test_ties_may_differ_between_ranks(rank):
    tied = torch.tensor([rank])
    got = easydist.gather({"a": tied, "b": tied if rank else torch.tensor([7])})
    assert got["a"].tolist() == [0, 1]
    assert got["b"].tolist() == [7, 1]


@distributed(world_size=2)
def test_containers_keep_their_type(rank):
    x = torch.tensor([rank])
    assert type(easydist.gather(UserDict(x=x))) is UserDict
    assert type(easydist.gather(MappingProxyType({"x": x}))) is MappingProxyType
    assert easydist.gather(defaultdict(list, x=x)).default_factory is list
    assert type(easydist.gather(BatchEncoding({"x": x}))) is BatchEncoding
    output = easydist.gather(SequenceClassifierOutput(logits=x))
    assert type(output) is SequenceClassifierOutput
    assert output.logits.tolist() == [0, 1]
    assert output.loss is None
    assert isinstance(easydist.gather(torch.max(torch.eye(2), 0)), tuple)


@distributed(world_size=2)
def test_tensordict_grows_its_batch(rank):
    from tensordict import TensorDict

    inner = TensorDict({"y": torch.full((2, 3), rank)}, batch_size=[2])
    got = easydist.gather(TensorDict({"x": torch.full((2,), rank), "inner": inner}, batch_size=[2]))
    assert isinstance(got, TensorDict)
    assert got.batch_size == torch.Size([4])
    assert got["x"].tolist() == [0, 0, 1, 1]
    assert got["inner", "y"].shape == (4, 3)


@pytest.mark.parametrize("dim", [1, 2, -1, -2])
@distributed(world_size=(2, 3))
def test_equal_small_trees_along_a_later_dim(rank, world_size, dim):
    """They come with the headers, in rows of one length, and are no rows of the result."""

    def tree(r):
        numbers = torch.arange(24).view(2, 3, 4) + 100 * r
        return {"whole": numbers, "half": numbers.half().contiguous(), "byte": numbers.to(torch.uint8)}

    got = easydist.gather(tree(rank), dim=dim)
    for name in got:
        assert torch.equal(got[name], torch.cat([tree(r)[name] for r in range(world_size)], dim))


@distributed(world_size=2)
def test_the_result_is_new_and_detached(rank):
    x = torch.ones(2, requires_grad=True)
    got = easydist.gather({"x": x, "y": x * 2})
    assert not got["x"].requires_grad
    assert got["x"].data_ptr() != x.data_ptr()
    got["x"].zero_()
    assert x.tolist() == [1.0, 1.0]


def test_the_result_is_new_in_a_world_of_one():
    x = torch.ones(2)
    easydist.gather(x).zero_()
    assert x.tolist() == [1.0, 1.0]


@distributed(world_size=2)
def test_conjugate_and_negative_views_are_resolved(rank):
    z = torch.tensor([1 + 2j])
    assert easydist.gather(z.conj()).tolist() == [1 - 2j] * 2
    assert easydist.gather(z.conj().imag).tolist() == [-2.0] * 2


@distributed(world_size=2)
def test_what_cannot_travel_is_refused_on_all_ranks(rank):
    for leaf in (torch.eye(2).to_sparse(), np.array(["a"]), 2**70, torch.empty(2, device="meta")):
        with pytest.raises((TypeError, ValueError), match=r"leaf \['x'\]"):
            easydist.gather({"x": leaf})
    with pytest.raises(ValueError, match=r"gather: \['x'\] of shape \(2,\) has no dim 1"):
        easydist.gather({"x": torch.ones(2)}, dim=1)
    with pytest.raises(ValueError, match="dst=2 is not a rank of the group, which has 2"):
        easydist.gather(torch.ones(1), dst=2)
    assert easydist.gather(rank).tolist() == [0, 1]


shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3)
trees = st.recursive(
    st.tuples(shapes, st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.int16])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def build(plan, rank, rows):
    """The tree that a drawn plan describes, on one rank."""
    if isinstance(plan, dict):
        return {key: build(value, rank, rows) for key, value in plan.items()}
    if isinstance(plan, list):
        return [build(value, rank, rows) for value in plan]
    shape, dtype = plan
    shape = [rows, *shape[1:]]
    return sample(rank, int(np.prod(shape)), dtype).view(shape)


@pytest.mark.slow
@settings(deadline=None, max_examples=launching.examples(12))
@given(plan=trees, rows=st.lists(st.integers(0, 3), min_size=3, max_size=3))
@distributed(world_size=3)
def test_law_holds_for_any_tree(rank, world_size, plan, rows):
    got, _ = easydist.tree.flatten(easydist.gather(build(plan, rank, rows[rank])))
    every = [easydist.tree.flatten(build(plan, r, rows[r]))[0] for r in range(world_size)]
    for leaf, *parts in zip(got, *every, strict=True):
        bits = [part.contiguous().view(torch.uint8) if part.dtype != torch.bool else part for part in parts]
        want = torch.cat(bits)
        assert torch.equal(leaf.contiguous().view(torch.uint8) if leaf.dtype != torch.bool else leaf, want)
