"""Ranks that do not make the same call: all of them get the same text, nothing moves, the next call works."""

import contextlib
import re

import pytest
import torch
from groups import made

import easydist
from easydist import DisagreementError, RemoteError
from easydist.agreement.disagreement import calls_text, fault_text, trees_text
from easydist.data import leaves
from easydist.testing import distributed


def message(call):
    """The text of the error that ``call`` raises, the same on all ranks, and that the group works afterwards."""
    with pytest.raises((DisagreementError, RemoteError)) as caught:
        call()
    texts = easydist.gather_object(str(caught.value))
    assert len(set(texts)) == 1
    return re.sub(r"test_agree.py:\d+", "test_agree.py:N", texts[0])


@distributed(world_size=2)
def test_a_leaf_of_another_shape(rank):
    assert message(
        lambda: easydist.gather({"logits": torch.ones(8, 10 + 2 * rank), "ids": rank, "x": torch.ones(2)})
    ) == (
        "gather: ranks disagree on 1 of 3 leaves\n"
        "  ['logits']  rank 0: float32 (8, 10)   rank 1: float32 (8, 12)\n"
        "Called at tests/agreement/test_agree.py:N\n"
        "Only dim 0 may differ between ranks; pad the other dims first: pad_across_processes(x, dim=1)"
    )


@distributed(world_size=3)
def test_a_leaf_of_another_dtype(rank):
    assert message(lambda: easydist.gather([torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)])) == (
        "gather: ranks disagree on 1 of 1 leaves\n"
        "  [0]  rank 0: float32 (2,)   rank 1: int32 (2,)   rank 2: float32 (2,)\n"
        "Called at tests/agreement/test_agree.py:N\n"
        "Pass the same structure, dtypes and shapes on every rank."
    )


@distributed(world_size=2)
def test_other_keys(rank):
    assert message(lambda: easydist.reduce({"a": 1.0, "bc"[rank]: 2.0})) == (
        "reduce: ranks disagree on 2 of 3 leaves\n"
        "  ['b']  rank 0: float64 ()   rank 1: missing\n"
        "  ['c']  rank 0: missing   rank 1: float64 ()\n"
        "Called at tests/agreement/test_agree.py:N\n"
        "Pass the same structure, dtypes and shapes on every rank."
    )


@distributed(world_size=2)
def test_at_most_ten_leaves_are_shown(rank):
    text = message(lambda: easydist.broadcast({f"leaf{i:03d}": torch.ones(1 + rank) for i in range(25)}))
    lines = text.splitlines()
    assert lines[0] == "broadcast: ranks disagree on 25 of 25 leaves"
    assert len(lines) == 14
    assert lines[11] == "  … and 15 more"


@distributed(world_size=2)
def test_other_operations(rank):
    assert message(lambda: easydist.reduce(1, "sum") if rank else easydist.gather(1)) == (
        "ranks made different calls\n"
        "  rank 0: gather(dst=None, dim=0) at tests/agreement/test_agree.py:N\n"
        "  rank 1: reduce(reduction='sum', scale=1.0) at tests/agreement/test_agree.py:N\n"
        "Every rank of the group has to make the same calls in the same order."
    )


DIFFERENT = {
    "reductions": lambda r: easydist.reduce(1, ("sum", "max")[r]),
    "sources": lambda r: easydist.broadcast(1, r),
    "destinations": lambda r: easydist.gather(1, dst=r),
    "dims": lambda r: easydist.gather(torch.ones(2, 2), dim=r),
    "object sources": lambda r: easydist.broadcast_object_list([1], r),
    "scatter sources": lambda r: easydist.scatter(torch.ones(2), r),
    "verb and barrier": lambda r: easydist.wait_for_everyone() if r else easydist.gather(1),
    "objects and tensors": lambda r: easydist.gather_object(1) if r else easydist.gather(1),
    "fillings": lambda r: easydist.pad_across_processes(torch.ones(1), pad_index=r),
    "generators": lambda r: easydist.synchronize_rng_states([("torch", "numpy")[r]]),
}


@pytest.mark.parametrize("name", DIFFERENT)
@distributed(world_size=2)
def test_other_arguments(rank, name):
    assert message(lambda: DIFFERENT[name](rank)).startswith("ranks made different calls\n  rank 0: ")


@distributed(world_size=3)
def test_one_ranks_fault_reaches_all(rank):
    def call():
        easydist.gather({"x": torch.eye(2).to_sparse() if rank == 2 else torch.eye(2)})

    assert message(call) == (
        "gather: rank 2 failed before the exchange\n"
        "  rank 2: TypeError: leaf ['x'] is not a dense tensor (torch.sparse_coo on cpu); pass its dense parts\n"
        "Called at tests/agreement/test_agree.py:N\n"
        "Nothing was changed, and the group keeps working. Fix the error on that rank."
    )


@distributed(world_size=2)
def test_the_original_error_is_the_cause_on_the_rank_that_failed(rank):
    with pytest.raises(RemoteError) as caught:
        easydist.gather(torch.ones(1) if rank else torch.ones(1).to_sparse())
    assert type(caught.value.__cause__) is (type(None) if rank else TypeError)


@distributed(world_size=3)
def test_the_error_holds_the_lowest_rank_that_failed(rank):
    with pytest.raises(RemoteError) as caught:
        easydist.gather(torch.ones(1).to_sparse() if rank else torch.ones(1))
    assert caught.value.rank == 1
    with pytest.raises(KeyError if rank == 2 else RemoteError) as raised, easydist.together():
        {0: 0, 1: 1}[rank]
    assert getattr(raised.value, "rank", 2) == 2


@distributed(world_size=(2, 3))
def test_errors_with_another_text_on_each_rank_are_one_that_names_them_all(rank, world_size):
    lines = message(lambda: easydist.gather(rank, dst=world_size + rank)).splitlines()
    assert lines[0] == f"gather: ranks {', '.join(map(str, range(world_size)))} failed before the exchange"
    for r, line in enumerate(lines[1 : world_size + 1]):
        assert line.startswith(f"  rank {r}: ValueError: gather: dst={world_size + r} is not a rank of the group")


@pytest.mark.parametrize(("count", "named"), [(11, "8, 9, 10"), (12, "8, 9, 2 more")])
def test_more_than_eleven_ranks_are_counted(count, named):
    fault = {"operation": "gather", "body": 0, "site": "train.py:7", "text": "KeyError"}
    head = fault_text(dict.fromkeys(range(count), fault)).splitlines()[0]
    assert head == f"gather: ranks 0, 1, 2, 3, 4, 5, 6, 7, {named} failed before the exchange"


def test_texts_of_a_large_group_do_not_grow_with_it():
    calls = [{"title": "gather()", "site": "train.py:7"} for _ in range(1000)]
    calls[500]["title"] = "reduce()"
    assert calls_text(calls).splitlines() == [
        "ranks made different calls",
        "  ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 989 more: gather() at train.py:7",
        "  rank 500: reduce() at train.py:7",
        "Every rank of the group has to make the same calls in the same order.",
    ]
    faults = {
        rank: {"operation": "gather", "body": 0, "site": "train.py:7", "text": "KeyError"} for rank in range(1000)
    }
    assert fault_text(faults).splitlines()[1] == "  ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 990 more: KeyError"
    for rank, (call, fault) in enumerate(zip(calls, faults.values(), strict=True)):
        call["site"] = fault["site"] = fault["text"] = f"train.py:{rank}"
    texts = [calls_text(calls), fault_text(faults), trees_text([tree_of(rank) for rank in range(1000)])]
    assert max(len(line) for text in texts for line in text.splitlines()) < 800
    assert max(len(text.splitlines()) for text in texts) <= 14
    assert "\n  … and 990 more\n" in texts[0]
    assert "   rank 9: float32 (9,)   … and 990 more\n" in texts[2]


def tree_of(rank):
    told = {"absent": False, "operation": "gather", "site": f"train.py:{rank}", "advice": ""}
    return told | {"types": [["['x']", "float32", [rank]]], "fixed": [["['x']", f"float32, {rank}", None]]}


@distributed(world_size=2)
def test_a_sub_group_disagrees_on_its_own(rank):
    alone = torch.distributed.new_group([0])
    if rank == 0:
        assert easydist.gather(torch.ones(3), group=alone).shape == (3,)
    assert easydist.gather(rank).tolist() == [0, 1]


@contextlib.contextmanager
def counted(group=None):
    """The operations of a group's control communicator, in order."""
    control = easydist.ProcessState().communicators(group).met().control
    names = [name for name in dir(type(control)) if name.startswith(("all_", "broad", "gather", "scatter", "barrier"))]
    operations = []
    for name in names:
        inner = getattr(control, name)
        setattr(control, name, lambda *a, _n=name, _i=inner, **k: operations.append(_n) or _i(*a, **k))
    yield operations
    for name in names:
        delattr(control, name)


@pytest.mark.parametrize("count", [1, 10, 1000])
@pytest.mark.parametrize("numel", [2, 80_000])
@distributed(world_size=[2, 4])
def test_one_header_exchange_and_one_data_exchange(rank, count, numel):
    """The number of leaves does not matter; what is small in all travels with the header."""
    data = {str(i): torch.full((numel // count + 1,), float(rank)) for i in range(count)}
    reduced = "all_reduce" if count > 1 else "all_reduce_parts"
    moved = {easydist.gather: "all_gather_parts", easydist.broadcast: "broadcast_parts", easydist.reduce: reduced}
    for verb, name in moved.items():
        with counted() as operations:
            verb(data)
        assert operations == ["all_gather_upto"] + [name] * (numel > 2)


@distributed(world_size=[2, 4])
def test_sizes_that_differ_travel_with_the_header(rank):
    ragged = {"large": torch.ones(80_000 + rank), "small": torch.ones(2 * rank)}
    with counted() as operations:
        easydist.gather(ragged)
    assert operations == ["all_gather_upto", "all_gather_parts"]
    with counted() as operations:
        easydist.pad_across_processes(ragged)
    assert operations == ["all_gather_upto"]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("more", [0, 1, 16, 80])
@distributed(world_size=[2, 4])
def test_data_that_leaves_no_room_for_the_header_follows_it(rank, world_size, backend, more):
    """Beside 512 KiB of all ranks there is 1 KiB, of which the header takes 64 bytes, and the size of the leaf 16."""
    numel = (1 << 19) // world_size + 1024 - 80 + more
    with made(backend) as group, counted(group) as operations:
        got = easydist.gather(torch.full((numel,), rank + 1, dtype=torch.uint8), group=group)
    assert operations == ["all_gather_upto"] + ["all_gather_parts"] * (more > 0)
    assert torch.equal(got, torch.arange(1, world_size + 1, dtype=torch.uint8).repeat_interleave(numel))


@pytest.mark.parametrize("count", [1, 2, 3])
@distributed(world_size=2)
def test_data_behind_any_number_of_sizes_starts_where_every_dtype_may(rank, count):
    got = easydist.gather([torch.full((1 + rank,), complex(i, rank), dtype=torch.complex128) for i in range(count)])
    assert [leaf.tolist() for leaf in got] == [[complex(i, 0), complex(i, 1), complex(i, 1)] for i in range(count)]


@pytest.mark.parametrize("numel", [1, 200_000])
@distributed(world_size=2)
def test_small_objects_travel_with_the_header(rank, numel):
    value = {"rank": rank, "text": "x" * numel}
    with counted() as operations:
        assert easydist.gather_object(value)[1] == {"rank": 1, "text": "x" * numel}
        assert easydist.broadcast_object_list([value])[0] == {"rank": 0, "text": "x" * numel}
    assert operations == 2 * ["all_gather_upto"]


@distributed(world_size=2)
def test_without_the_check_nothing_travels_beside_the_data(rank):
    x = torch.full((3,), float(rank))
    for verb, name in {easydist.broadcast: "broadcast_parts", easydist.reduce: "all_reduce_from"}.items():
        with counted() as operations:
            verb({"x": x}, check=False)
        assert operations == [name]
    assert easydist.gather(torch.ones(1 + rank), check=False).shape == (3,)
    assert easydist.broadcast({"x": 1.0 + rank}, check=False) == {"x": 1.0}


@distributed(world_size=2)
def test_a_call_of_the_same_structure_is_not_planned_again(rank):
    trees = [{"a": torch.ones(i % 2 + 2), "b": [torch.ones(2, 2), rank]} for i in range(6)]
    for tree in trees[:2]:
        easydist.gather(tree)
        easydist.reduce(tree)
    before = leaves.layout.cache_info().misses
    for tree in trees[2:]:
        easydist.gather(tree)
        easydist.reduce(tree)
    assert leaves.layout.cache_info().misses == before


@distributed(world_size=3)
def test_each_rank_is_named_with_the_place_of_its_call(rank):
    def call():
        if rank == 1:
            easydist.reduce({"x": torch.ones(2)})
        else:
            easydist.reduce({"x": torch.ones(3)})

    with pytest.raises(DisagreementError) as caught:
        call()
    first = call.__code__.co_firstlineno
    here = "tests/agreement/test_agree.py"
    assert f"Called at {here}:{first + 4} (ranks 0, 2), {here}:{first + 2} (rank 1)\n" in str(caught.value)


class Odd(float):
    def __repr__(self):
        raise KeyError("no text")


@distributed(world_size=2)
def test_an_argument_without_a_text_is_an_error_for_all(rank):
    assert "rank 1: " in message(lambda: easydist.gather({Odd(1) if rank else "x": 1}))


@pytest.mark.parametrize("letter", ["x", "é", "\\", "\0", "😀"], ids=ascii)
@distributed(world_size=(2, 3))
def test_a_long_error_text_is_cut_for_all(rank, letter):
    text = message(lambda: easydist.gather({letter * 50_000: torch.eye(2).to_sparse() if rank == 1 else torch.eye(2)}))
    lines = text.splitlines()
    assert lines[0] == "gather: rank 1 failed before the exchange"
    assert lines[1].startswith("  rank 1: TypeError: leaf ['")
    assert lines[-1] == "Nothing was changed, and the group keeps working. Fix the error on that rank."
    assert 1000 < len(lines[1]) < 50_000

    def body():
        with easydist.together():
            if rank == 1:
                raise ValueError(letter * 50_000)

    with pytest.raises(ValueError if rank == 1 else RemoteError) as caught:
        body()
    assert str(caught.value).count(letter) > 1000
    assert easydist.gather(rank).tolist() == list(range(easydist.ProcessState().num_processes))


@distributed(world_size=2)
def test_a_default_device_does_not_matter(rank):
    """The tensors of the exchange itself are on the CPU, also where one rank has another default."""
    x = torch.tensor([rank])
    with torch.device("meta" if rank else "cpu"):
        assert easydist.gather({"x": x, "n": rank})["n"].tolist() == [0, 1]
        assert easydist.reduce({"x": x, "n": rank}, "sum")["n"] == 1
        assert easydist.gather_object(rank) == [0, 1]
        assert easydist.scatter(torch.arange(2, device="cpu") if rank == 0 else None).tolist() == [rank]
        assert easydist.broadcast(x if rank == 0 else None).tolist() == [0]
        assert easydist.pad_across_processes(torch.ones(rank + 1, device="cpu")).shape == (2,)
        assert easydist.all_to_all(torch.arange(2, device="cpu")).tolist() == [rank, rank]
        output = [None]
        easydist.scatter_object_list(output, ["a", "b"] if rank == 0 else None)
        easydist.wait_for_everyone()
    assert output == ["ab"[rank]]
