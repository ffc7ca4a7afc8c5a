"""Every sample in exactly one batch of one rank, and equally many batches on all ranks."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from easydist.metrics import Collate, DistributedBatchSampler

SIZES = {"total": st.integers(0, 200), "batch_size": st.integers(1, 17), "world_size": st.integers(1, 9)}


def batches(world_size, start=0, epoch=0, **options):
    """[rank][step]: the indices of a batch."""
    samplers = [DistributedBatchSampler(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.start = start
    found = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(one) for one in found}
    return found


def order_of(total, shuffle, seed):
    if not shuffle:
        return list(range(total))
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()


@given(**SIZES, shuffle=st.booleans(), drop_last=st.booleans(), epoch=st.integers(0, 2), done=st.integers(0, 220))
def test_steps_joined_in_rank_order_are_the_order(total, batch_size, world_size, shuffle, drop_last, epoch, done):
    options = {"total": total, "batch_size": batch_size, "shuffle": shuffle, "seed": 7, "drop_last": drop_last}
    start = done if epoch == 0 else 0
    found = batches(world_size, start, epoch, **options)
    order, size = order_of(total, shuffle, 7 + epoch)[start:], batch_size * world_size
    kept = len(order) // size * size if drop_last else len(order)
    joined = [list(chain(*step)) for step in zip(*found, strict=True)]
    assert joined == [order[i : i + size] for i in range(0, kept, size)]
    for step in list(zip(*found, strict=True))[:-1]:
        assert {len(batch) for batch in step} == {batch_size}
    for step in list(zip(*found, strict=True))[-1:]:
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_the_order_is_that_of_torchs_sampler():
    torchs = DistributedSampler(range(40), num_replicas=1, rank=0, seed=3)
    torchs.set_epoch(2)
    ours = batches(4, epoch=2, total=40, batch_size=2, shuffle=True, seed=3)
    assert list(chain(*chain(*zip(*ours, strict=True)))) == list(torchs)


def test_torchs_own_loader_takes_it():
    dataset = [{"x": torch.full((3,), i, dtype=torch.int16), "id": str(i)} for i in range(5)]
    sampler = DistributedBatchSampler(5, 2, rank=3, world_size=4)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(None, dataset))
    assert len(loader) == math.ceil(5 / 8)
    (batch,) = loader
    assert (batch["x"].tolist(), batch["id"]) == ([[4] * 3], ["4"])
    loader = DataLoader(dataset[:3], batch_sampler=DistributedBatchSampler(3, 2, rank=3, world_size=4))
    loader.collate_fn = Collate(None, dataset)
    (batch,) = loader
    assert (batch["x"].shape, batch["x"].dtype, batch["id"]) == ((0, 3), torch.int16, [])


def test_another_epoch_begins_at_its_first_sample():
    sampler = DistributedBatchSampler(6, 2, rank=0, world_size=1)
    sampler.start = 4
    sampler.set_epoch(0)
    assert list(sampler) == [[4, 5]]
    sampler.set_epoch(1)
    assert len(sampler) == 3


def test_in_a_world_of_one_it_is_a_plain_batch_sampler():
    assert list(DistributedBatchSampler(5, 2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch_size": 0}, "batch_size=0 is less than 1"),
        ({"total": -1}, "total=-1 is less than 0"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": 2}, r"rank=2 is not a rank of the world, which has 2 ranks \(0–1\)"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, text):
    options = {"total": 5, "batch_size": 2, "rank": 1, "world_size": 2} | wrong
    with pytest.raises(ValueError, match=text):
        DistributedBatchSampler(options.pop("total"), options.pop("batch_size"), **options)
