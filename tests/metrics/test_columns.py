"""Columns of samples: the kinds, their transfer, and the ones that all ranks refuse."""

import contextlib
import datetime

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import exchanges
from groups import no_memory_from
from torch.utils.data import DataLoader, DistributedSampler

import easydist
from easydist import MetricCollector, RemoteError, gather_for_metrics
from easydist.metrics import DistributedBatchSampler, distributed_loader
from easydist.metrics.joining import Padded
from easydist.testing import distributed
from easydist.testing.conformance import MOVED, sample

ALL = (1, 2, 3, 4)


def batch(rank, count):
    """Nested columns of several kinds."""
    numbers = [100 * rank + i for i in range(count)]
    return {
        "tensors": (torch.tensor(numbers, dtype=torch.int64), torch.full((count, 2), rank, dtype=torch.bfloat16)),
        "array": np.array(numbers, dtype=np.uint16),
        "text": [f"s{i}" for i in numbers],
        "objects": ([{"id": i, "at": datetime.date(2024, 1, 1)} for i in numbers], None),
        "names": np.array([f"n{i}" for i in numbers], dtype="U9"),
        "alone": (rank, torch.tensor(float(rank))),
        "plain": "the same",
    }


@distributed(world_size=ALL)
@pytest.mark.parametrize("count", [3, 5000], ids=["small", "large"])
def test_columns_of_all_kinds_are_joined(rank, world_size, count):
    counts = [count if r % 2 else 0 for r in range(world_size)]
    got = gather_for_metrics(batch(rank, counts[rank]), total=sum(counts))
    every = [batch(r, n) for r, n in enumerate(counts)]
    want = [i for one in every for i in one["tensors"][0].tolist()]
    assert got["tensors"][0].tolist() == want
    assert got["tensors"][1].dtype == torch.bfloat16
    assert got["tensors"][1].shape == (len(want), 2)
    assert got["array"].dtype == np.uint16
    assert got["array"].tolist() == want
    assert got["text"] == [f"s{i}" for i in want]
    assert got["objects"] == ([{"id": i, "at": datetime.date(2024, 1, 1)} for i in want], None)
    assert got["names"].tolist() == [f"n{i}" for i in want]
    assert [column.tolist() for column in got["alone"]] == [[*range(world_size)]] * 2
    assert got["plain"] == "the same"


@distributed(world_size=(1, 2, 3))
def test_tuples_of_text_are_columns(rank, world_size):
    """As default_collate makes them; those of a rank that has no row are empty."""
    names = tuple(f"s{rank}{i}" for i in range(rank))
    every = [f"s{r}{i}" for r in range(world_size) for i in range(r)]
    got = gather_for_metrics((torch.zeros(rank), names), total=len(every))
    assert (got[0].shape, got[1]) == ((len(every),), tuple(every))
    places = [every.index(name) for name in names]
    assert gather_for_metrics(names, indices=[len(every) - i for i in places]) == tuple(reversed(every))
    collector = MetricCollector(total=len(every))
    collector.update(places, names=names)
    assert collector.compute() == {"names": every}


@distributed(world_size=2)
def test_one_exchange_carries_all_columns(rank):
    small, large = batch(rank, 3), batch(rank, 5000)
    assert exchanges(lambda: gather_for_metrics(small, total=6)) == ["header"]
    assert exchanges(lambda: gather_for_metrics(small, indices=range(3))) == ["header"]
    assert exchanges(lambda: gather_for_metrics(large, total=10_000)) == ["header", "all_gather"]
    assert exchanges(lambda: gather_for_metrics(large, total=10_000, dst=0)) == ["header", "gather"]


@distributed(world_size=(2, 3))
def test_rows_of_every_dtype_change_places(rank, world_size):
    loader = DataLoader(range(10), 5, sampler=DistributedSampler(range(10), world_size, rank, shuffle=False))
    rows = len(loader.sampler)
    mine = {str(dtype): sample(rank, rows, dtype) for dtype in MOVED}
    got = gather_for_metrics(mine, loader=loader)
    for dtype in MOVED:
        bits = torch.stack([sample(r, rows, dtype).view(torch.uint8).view(rows, -1) for r in range(world_size)], 1)
        assert torch.equal(got[str(dtype)].view(torch.uint8), bits.view(rows * world_size, -1)[:10].reshape(-1))
        assert got[str(dtype)].dtype == dtype


@distributed(world_size=ALL)
def test_indices_put_rows_in_order_and_each_once(rank, world_size):
    mine = [(3 * i + rank) % 10 for i in range(8)]
    rows = {"x": torch.tensor(mine) * 10, "id": [str(i) for i in mine], "rank": rank}
    for indices in (mine, torch.tensor(mine, dtype=torch.int32), np.array(mine)):
        got = gather_for_metrics(rows, indices=indices)
        found = sorted({(3 * i + r) % 10 for i in range(8) for r in range(world_size)})
        assert got["x"].tolist() == [10 * i for i in found]
        assert got["id"] == [str(i) for i in found]
        assert got["rank"].tolist() == [*range(world_size)]
    assert gather_for_metrics([], indices=[]) == []


@pytest.mark.slow
@distributed(world_size=(2, 3))
def test_missing_doubled_and_impossible_indices_are_named(rank, world_size):
    row, last = torch.ones(1), 2 * world_size
    for options in ({}, {"dst": 0}, {"dst": 1}):
        for rows in (1, 40_000):  # so many indices do not travel with the header
            total, mine = rows * world_size + 1, [*range(rank * rows, (rank + 1) * rows), 0]
            said = rf"gather_for_metrics: 1 of {total} samples are missing: {total - 1}; 1 came more than once: 0"
            with pytest.raises((ValueError, RemoteError), match=said):
                gather_for_metrics(torch.ones(rows + 1), indices=mine, total=total, **options)
        wrong = [0, 1] if rank else [0, last]
        with pytest.raises(
            (ValueError, RemoteError), match=rf"index {last} is out of range for a dataset of {last} samples"
        ):
            gather_for_metrics(torch.ones(2), indices=wrong, total=last, **options)
        with pytest.raises((ValueError, RemoteError), match="gather_for_metrics: indices -1, -2 are out of range"):
            gather_for_metrics(torch.ones(2), indices=[0, 1] if rank else [-1, -2], **options)
    with pytest.raises(easydist.DisagreementError, match="total=4"):
        gather_for_metrics(row, indices=[rank], total=3 + (rank == 1))
    got = gather_for_metrics(torch.tensor([rank, 0]), indices=[rank, 0], total=world_size)
    assert got.tolist() == [*range(world_size)]


@distributed(world_size=ALL)
def test_a_list_of_samples_is_one_column(rank, world_size):
    total = 2 * world_size
    references = [["a", "b"], [f"of {rank}"]]
    assert gather_for_metrics(references, total=total)[-1] == [f"of {world_size - 1}"]
    assert gather_for_metrics([0.5, rank], total=total)[:2] == [0.5, 0]
    assert gather_for_metrics((["p"], ["r"]), total=world_size) == (["p"] * world_size, ["r"] * world_size)
    assert gather_for_metrics("text", total=1) == ["text"] * world_size
    assert gather_for_metrics([torch.tensor([rank])], True, total=world_size)[-1].tolist() == [world_size - 1]
    assert gather_for_metrics({"a": rank}, use_gather_object=True, total=0) == [{"a": r} for r in range(world_size)]


@distributed(world_size=ALL)
def test_generated_tokens_of_another_length_on_each_rank(rank, world_size):
    tokens = {"ids": torch.full((2, 3 + rank), rank), "score": torch.tensor([rank, 0.5])}
    got = gather_for_metrics(tokens, total=2 * world_size, ragged=True)
    assert [row.tolist() for row in got["ids"]] == [[r] * (3 + r) for r in range(world_size) for _ in range(2)]
    assert got["score"].shape == (2 * world_size,)
    got = gather_for_metrics(tokens, indices=[rank, 10 + rank], pad_index=-100)["ids"]
    assert type(got) is Padded
    assert got.lengths.tolist() == [3 + r for r in range(world_size)] * 2
    assert got.values.dtype == torch.int64
    assert got.values[-1].tolist() == [world_size - 1] * (2 + world_size)
    assert got.values[0].tolist() == [0] * 3 + [-100] * (world_size - 1)


@distributed(world_size=ALL)
def test_detection_boxes(rank, world_size):
    found = [{"boxes": torch.full((i, 4), float(rank)), "labels": torch.arange(i)} for i in (rank, 0)]
    got = gather_for_metrics(found, total=2 * world_size, ragged=True)
    assert [len(image["boxes"]) for image in got] == [n for r in range(world_size) for n in (r, 0)]
    assert got[-2]["boxes"].tolist() == [[world_size - 1.0] * 4] * (world_size - 1)
    boxes = gather_for_metrics([image["boxes"] for image in found], total=2 * world_size, pad_index=0)
    assert boxes.values.shape == (2 * world_size, world_size - 1, 4)
    nothing = gather_for_metrics(found if rank == 0 else [], total=2, ragged=True)
    assert len(nothing) == 2


@pytest.mark.slow
@distributed(world_size=3)
def test_ranks_other_than_dst_take_no_memory_for_the_result(rank):
    with no_memory_from(1) if rank else contextlib.nullcontext():
        got = gather_for_metrics(torch.full((200_000,), rank), total=600_000, dst=0)
    assert got is None if rank else got[::200_000].tolist() == [0, 1, 2]


class Backward(DistributedBatchSampler):
    """The same batches, the last one first."""

    def __iter__(self):
        return reversed([*super().__iter__()])


@distributed(world_size=2)
def test_what_says_nothing_of_repeated_samples_is_refused(rank):
    x = torch.ones(2)
    plain, wider = DataLoader(range(4)), DataLoader(range(6), sampler=DistributedSampler(range(6), 3, 0))
    strange = DataLoader(range(4), 2, sampler=DistributedSampler(range(4), 2, rank))
    of_one = DataLoader(range(4), batch_sampler=DistributedBatchSampler(4, 2, rank=0, world_size=1))
    alone = distributed_loader(range(4), 2, group=[dist.new_group([r]) for r in range(2)][rank])
    mixed = DataLoader(range(4), 2, sampler=DistributedSampler(range(4), 2, rank), num_workers=2, in_order=False)
    backward = DataLoader(range(4), batch_sampler=Backward(4, 1))
    for options, said in {
        (): "no loader prepared with accelerate tells",
        (("loader", plain),): "does not tell how it distributes its samples over 2 ranks",
        (("loader", wider),): "the loader distributes its samples over 3 ranks, but 2 take part",
        (("loader", of_one),): "the loader distributes its samples over 1 rank, but 2 take part",
        (("loader", alone),): "the loader distributes its samples over 1 rank, but 2 take part",
        (("loader", mixed),): "the loader has in_order=False, so its batches come in another order",
        (("loader", backward),): "Backward has an __iter__ of its own, so the order",
        (("total", 5),): r"the ranks have 2, 2 rows, 4 in all, but total is 5",
        (("total", 3),): r"the ranks have 2, 2 rows, 4 in all, but total is 3",
        (("loader", plain), ("total", 3)): r"the ranks have 2, 2 rows, 4 in all, but total is 3",
        (("indices", (1, 2, 3)),): "has 2, 2 rows on the ranks, indices has 3, 3",
        (("indices", (0.5, 1.0)),): "indices has to be one integer per row",
    }.items():
        with pytest.raises(ValueError, match=said):
            gather_for_metrics(x, **dict(options))
    with pytest.raises(TypeError, match="loader is list, not a DataLoader"):
        gather_for_metrics(x, loader=[x])
    assert gather_for_metrics(x, loader=strange).shape == (4,)
    assert gather_for_metrics(x, loader=plain, total=4).shape == (4,)


@distributed(world_size=2)
def test_rows_that_a_distributed_loader_cannot_have_dealt_are_refused(rank):
    loader = distributed_loader(range(5), 2)
    mine = [*loader]
    got = gather_for_metrics(torch.cat(mine), loader=loader)
    assert got.tolist() == [0, 1, 2, 3, 4]
    for rows in (torch.cat(mine * 2), torch.ones(4 - 2 * rank), torch.ones(3 + rank)):
        with pytest.raises(ValueError, match="the loader gives each rank 2 samples in a step, and equal parts of the"):
            gather_for_metrics(rows, loader=loader)
    assert gather_for_metrics(torch.ones(1 - rank), loader=loader).tolist() == [1]
    some = [gather_for_metrics(batch[batch != 0], loader=loader).tolist() for batch in loader]  # of one step each
    assert some == [[1, 2, 3], [4]]


@distributed(world_size=2)
def test_a_rank_that_cannot_send_is_an_error_on_all(rank):
    columns = {"x": torch.ones(1), "f": [lambda: 0 if rank else 1] if rank else ["text"]}
    with pytest.raises((TypeError, RemoteError), match="cannot be pickled"):
        gather_for_metrics(columns, total=2)
    with pytest.raises((ValueError, RemoteError), match="no loader prepared with accelerate"):
        gather_for_metrics(columns["x"], **({"total": 2} if rank else {}))
    with pytest.raises(easydist.DisagreementError, match="total=3"):
        gather_for_metrics(columns["x"], total=2 + rank)
    with pytest.raises(easydist.DisagreementError, match=r"\['x'\]"):
        gather_for_metrics({"x": ["a"] if rank else torch.ones(1)}, total=2)
    assert gather_for_metrics(columns["x"], total=2).tolist() == [1, 1]


@distributed(world_size=2)
def test_pickle_that_is_denied(rank):
    easydist.allow_pickle(False)
    try:
        assert gather_for_metrics([{"a": 1}, "b"], total=4) == [{"a": 1}, "b"] * 2
        with pytest.raises((easydist.UnsafeObjectError, RemoteError), match="Refused"):
            gather_for_metrics([Refused()] if rank else ["x"], total=2)
    finally:
        easydist.allow_pickle(True)


class Refused:
    """Of no class that is allow-listed."""


@distributed(world_size=2)
def test_values_of_ranks_are_weighted_wrong_where_batches_differ(rank):
    loader = DataLoader(range(5), 2, sampler=DistributedSampler(range(5), 2, rank, shuffle=False))
    for i, _ in enumerate(loader):
        with pytest.warns(UserWarning, match=r"\['loss'\] is one value per rank") if i else contextlib.nullcontext():
            assert gather_for_metrics({"loss": 0.5 + rank}, loader=loader)["loss"].tolist() == [0.5, 1.5]


@distributed(world_size=2)
def test_padding_that_cannot_be_is_refused(rank):
    for columns, options, said in [
        ([torch.ones(1, 2), torch.ones(1, 3)], {"pad_index": 0}, "sample 0 is of shape"),
        ([[1, 2], [3]], {"pad_index": 0.5}, "cannot hold pad_index=0.5"),
    ]:
        with pytest.raises(ValueError, match=said):
            gather_for_metrics(columns, total=4, **options)
    assert gather_for_metrics(["a", "b"], total=4, pad_index=0) == ["a", "b"] * 2


def test_torchs_default_device_does_not_matter():
    with torch.device("meta"):  # stands for any accelerator
        batches = [*DistributedBatchSampler(3, 2, shuffle=True, rank=0, world_size=1)]
        whole = gather_for_metrics({"x": ["a", "b"]}, indices=[1, 0])
        ragged = gather_for_metrics([[1, 2], [3]], total=2, pad_index=-1)
        collector = MetricCollector(total=2)
        collector.update([1, 0, 1], x=["b", "a", "b"])
        collected = collector.compute()
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2]
    assert whole == {"x": ["b", "a"]}
    assert ragged.values.tolist() == [[1, 2], [3, -1]]
    assert collected == {"x": ["a", "b"]}
