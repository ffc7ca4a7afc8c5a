"""gather_for_metrics of much data to one rank: the same result, a window of rows at a time, in flat memory."""

import datetime

import numpy as np
import pytest
import resident
import torch
from counting import exchanges
from torch.utils.data import DataLoader, DistributedSampler
from trees import assert_same

import easydist
from easydist import RemoteError, gather_for_metrics
from easydist.metrics import gather, windows
from easydist.testing import distributed


def columns(rank, count):
    """Columns of every kind, and values of the rank."""
    numbers = [1000 * rank + i for i in range(count)]
    return {
        "tensors": (torch.tensor(numbers, dtype=torch.int64), torch.full((count, 3), rank, dtype=torch.bfloat16)),
        "strided": torch.arange(2 * count).view(2, count).t(),
        "array": np.array(numbers, dtype=np.uint16),
        "names": np.array([f"n{i}" for i in numbers], dtype="U9"),
        "text": tuple(f"s{i}" for i in numbers),
        "objects": [{"id": i, "at": datetime.date(2024, 1, 1)} for i in numbers],
        "alone": (rank, torch.tensor(0.5 * rank), np.float32(rank)),
        "plain": "the same",
    }


def small_windows(patch, window):
    """Let little data count as much."""
    patch.setattr(gather, "AT_ONCE", 0)
    patch.setattr(windows, "_WINDOW", window)


@pytest.mark.slow
@distributed(world_size=(2, 3, 4))
def test_the_result_is_that_of_one_exchange(rank, world_size):
    for counts, dst, ragged, window in (
        ([3, 0, 20, 7], 1, False, 1500),
        ([1, 9, 0, 2], 0, True, 400),
        ([0, 0, 0, 1], 0, False, 400),
    ):
        mine, options = columns(rank, counts[rank]), {"dst": dst, "ragged": ragged}
        repeated = [(3 * i + rank) % 8 for i in range(counts[rank])]
        for rest in ({"total": sum(counts[:world_size])}, {"indices": repeated}):
            want = gather_for_metrics(mine, **options, **rest)
            with pytest.MonkeyPatch.context() as patch:
                small_windows(patch, window)
                assert_same(gather_for_metrics(mine, **options, **rest), want)


@distributed(world_size=2)
def test_arrays_of_rows_may_differ_in_shape_and_dtype(rank):
    rows, options = np.ones((4, 2 + rank), np.float64 if rank else np.float32), {"total": 8, "dst": 0, "ragged": True}
    want = gather_for_metrics(rows, **options)
    with pytest.MonkeyPatch.context() as patch:
        small_windows(patch, 16)
        assert_same(gather_for_metrics(rows, **options), want)


@distributed(world_size=2)
def test_rows_that_a_sampler_repeated_are_dropped(rank):
    sampler = DistributedSampler(range(7), 2, rank, shuffle=False)
    loader = DataLoader(range(7), 4, sampler=sampler)
    mine = [int(i) for batch in loader for i in batch]
    with pytest.MonkeyPatch.context() as patch:
        small_windows(patch, 16)
        got = gather_for_metrics({"x": torch.tensor(mine), "id": [str(i) for i in mine]}, loader=loader, dst=1)
        padded = gather_for_metrics([[i] * i for i in mine], loader=loader, dst=1, pad_index=-1)
    assert (got is None) == (padded is None) == (rank == 0)
    if rank:
        assert got == {"x": got["x"], "id": [str(i) for i in range(7)]}
        assert got["x"].tolist() == padded.lengths.tolist() == [*range(7)]


@distributed(world_size=2)
def test_an_exchange_per_window(rank):
    rows = {"x": torch.ones(300, 1 << 10), "id": ["a"] * 300}
    small = {"x": torch.ones(70, 512), "y": torch.ones(70, 512)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "AT_ONCE", 1 << 20)
        assert exchanges(lambda: gather_for_metrics(small, total=140, dst=0)) == ["header", "gather"]
        found = exchanges(lambda: gather_for_metrics(rows, total=600, dst=0))
    assert found == ["header", *5 * ["header", "gather"], "header"]


@distributed(world_size=2)
def test_what_one_rank_finds_wrong_is_raised_on_all(rank):
    x = torch.ones(8)
    with pytest.MonkeyPatch.context() as patch:
        small_windows(patch, 16)
        with pytest.raises(ValueError, match="1 of 9 samples are missing: 8; 8 came more than once: 0, 1"):
            gather_for_metrics(x, indices=range(8), total=9, dst=0)
        with pytest.raises(ValueError, match="the ranks have 8, 8 rows"):
            gather_for_metrics(x, total=15, dst=0)
        if rank == 0:
            patch.setattr(windows, "_room", no_memory)
        with pytest.raises((MemoryError, RemoteError), match="no memory for the result"):
            gather_for_metrics(x, total=16, dst=0)
    assert easydist.gather(rank).tolist() == [0, 1]


def no_memory(*args):
    raise MemoryError("no memory for the result")


def peak_of(call):
    """By how much a call raises the memory of this process, while it lasts."""
    resident.give_back()
    found = [resident.own()]

    def noted(inner):
        def noting(*args):
            result = inner(*args)
            found.append(resident.own())
            return result

        return noting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather._GatherForMetrics, "prepare", noted(gather._GatherForMetrics.prepare))
        patch.setattr(windows._GatherRows, "result", noted(windows._GatherRows.result))
        call()
    return max(found) - found[0]


@pytest.mark.slow
@distributed(world_size=2)
def test_memory_of_the_others_stays_flat(rank):
    count = 10_000
    rows = {"x": torch.ones(count, 500), "text": [f"{i:0500d}" for i in range(count)]}  # 20 MB, 5 MB
    total = 2 * count
    gather_for_metrics(rows, total=total, dst=0)
    easydist.memory.release()
    peak = peak_of(lambda: gather_for_metrics(rows, total=total, dst=0))
    result = 2 * sum([rows["x"].nbytes, 550 * count])
    assert peak < (1.5 * result if rank == 0 else 6 << 20)
