"""Ranks that do not make the same call: all of them get the same text, nothing moves, the next call works."""

import pytest
import torch

import easydist
from easydist import DisagreementError, RemoteError
from easydist.testing import distributed


def message(call):
    """The text of the error that ``call`` raises, the same on all ranks, and that the group works afterwards."""
    with pytest.raises((DisagreementError, RemoteError)) as caught:
        call()
    texts = easydist.gather_object(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


@distributed(world_size=2)
def test_a_leaf_of_another_shape(rank):
    assert message(
        lambda: easydist.gather({"logits": torch.ones(8, 10 + 2 * rank), "ids": rank, "x": torch.ones(2)})
    ) == (
        "gather: ranks disagree on 1 of 3 leaves\n"
        "  ['logits']  rank 0: float32 (8, 10)   rank 1: float32 (8, 12)\n"
        "Only dim 0 may differ between ranks; pad the other dims first: pad_across_processes(x, dim=1)"
    )


@distributed(world_size=3)
def test_a_leaf_of_another_dtype(rank):
    assert message(lambda: easydist.gather([torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)])) == (
        "gather: ranks disagree on 1 of 1 leaves\n"
        "  [0]  rank 0: float32 (2,)   rank 1: int32 (2,)   rank 2: float32 (2,)\n"
        "Pass the same structure, dtypes and shapes on every rank."
    )


@distributed(world_size=2)
def test_other_keys(rank):
    assert message(lambda: easydist.reduce({"a": 1.0, "bc"[rank]: 2.0})) == (
        "reduce: ranks disagree on 2 of 3 leaves\n"
        "  ['b']  rank 0: float64 ()   rank 1: missing\n"
        "  ['c']  rank 0: missing   rank 1: float64 ()\n"
        "Pass the same structure, dtypes and shapes on every rank."
    )


@distributed(world_size=2)
def test_at_most_ten_leaves_are_shown(rank):
    text = message(lambda: easydist.broadcast({f"leaf{i:03d}": torch.ones(1 + rank) for i in range(25)}))
    lines = text.splitlines()
    assert lines[0] == "broadcast: ranks disagree on 25 of 25 leaves"
    assert len(lines) == 13
    assert lines[11] == "  … and 15 more"


@distributed(world_size=2)
def test_other_operations(rank):
    assert message(lambda: easydist.reduce(1, "sum") if rank else easydist.gather(1)) == (
        "ranks made different calls\n"
        "  rank 0: gather(dst=None, dim=0)\n"
        "  rank 1: reduce(reduction='sum', scale=1.0)\n"
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
        "No data has moved; mend that rank, the group works on."
    )


@distributed(world_size=2)
def test_the_original_error_is_the_cause_on_the_rank_that_failed(rank):
    with pytest.raises(RemoteError) as caught:
        easydist.gather(object() if rank else torch.ones(1).to_sparse())
    assert type(caught.value.__cause__) is (type(None) if rank else TypeError)


@distributed(world_size=2)
def test_a_sub_group_disagrees_on_its_own(rank):
    alone = torch.distributed.new_group([0])
    if rank == 0:
        assert easydist.gather(torch.ones(3), group=alone).shape == (3,)
    assert easydist.gather(rank).tolist() == [0, 1]


@distributed(world_size=2)
def test_one_header_exchange_and_one_data_exchange(rank):
    """Counted at the communicator: the number of leaves does not matter."""
    comms = easydist.ProcessState().communicators()
    calls = []
    for name in ("all_gather_single", "all_gather_v", "all_reduce", "broadcast"):
        inner = getattr(comms.control, name)
        setattr(comms.control, name, lambda *a, _n=name, _i=inner, **k: calls.append(_n) or _i(*a, **k))
    for count in (1, 10, 1000):
        data = {str(i): torch.full((2,), float(rank)) for i in range(count)}
        for verb, moved in (
            (easydist.gather, "all_gather_v"),
            (easydist.broadcast, "broadcast"),
            (easydist.reduce, "all_reduce"),
        ):
            calls.clear()
            verb(data)
            assert calls == ["all_gather_single", moved]


class Odd(float):
    def __repr__(self):
        raise KeyError("no text")


@distributed(world_size=2)
def test_an_argument_without_a_text_is_an_error_for_all(rank):
    assert "rank 1: " in message(lambda: easydist.gather({Odd(1) if rank else "x": 1}))


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
