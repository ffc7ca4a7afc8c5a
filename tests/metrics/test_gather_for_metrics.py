"""Over an epoch, gather_for_metrics gives what one process gets: each sample once, in the sampler's order."""

import itertools

import launching
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loaders import Sized, Stream, accelerate_state, prepared
from torch.utils.data import DataLoader, DistributedSampler
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

from easydist import broadcast_object_list, gather, gather_for_metrics
from easydist.metrics.order import Sharding, in_order
from easydist.testing import distributed

ALL = (1, 2, 3, 4)


def rows(batch):
    """Return a model's output for a batch: several columns, each with the number of the sample in its rows."""
    numbers = [int(i) for i in batch]
    return {"x": torch.as_tensor(numbers, dtype=torch.float16), "id": [f"s{i}" for i in numbers], "n": numbers}


def whole(got):
    """The samples that the columns tell of, which have to be the same in each."""
    assert got["x"].dtype == torch.float16
    assert got["id"] == [f"s{int(i)}" for i in got["x"]]
    assert got["n"] == [int(i) for i in got["x"]]
    return got["n"]


def in_loop(batches, **options):
    """Gathered batch by batch."""
    return [i for batch in batches for i in whole(gather_for_metrics(rows(batch), **options))]


def after(batches, **options):
    """Gathered after the loop."""
    mine = [int(i) for batch in batches for i in batch]
    return whole(gather_for_metrics(rows(mine), **options))


@pytest.mark.slow
@distributed(world_size=2)
def test_101_samples_of_a_prepared_loader(rank, world_size):
    with accelerate_state(rank, world_size):
        loader = prepared(range(101), 8)
        assert in_loop(loader) == list(range(101))
        assert after(loader) == list(range(101))
        assert in_loop(loader, loader=loader) == list(range(101))


@pytest.mark.slow
@distributed(world_size=(1, 2))
def test_another_loader_than_the_one_that_was_meant_is_noticed(rank, world_size):
    with accelerate_state(rank, world_size):
        train, test = prepared(range(37), 4), prepared(range(101), 8)
        assert in_loop(train) == [*range(37)]
        with pytest.raises(ValueError, match="the only loader that has ended has 37 samples; pass loader="):
            gather_for_metrics(torch.ones(8))
        mine = [int(i) for batch in test for i in batch]
        with pytest.raises(ValueError, match="no loader prepared with accelerate tells"):
            gather_for_metrics(rows(mine))
        assert whole(gather_for_metrics(rows(mine), loader=test)) == [*range(101)]
        if world_size == 2:
            for _ in train:
                with pytest.raises(ValueError, match="a batch of the loader that is being iterated has 4"):
                    gather_for_metrics(torch.ones(8))
                assert whole(gather_for_metrics(rows(mine), loader=test)) == [*range(101)]
            for _ in train:
                with pytest.raises(ValueError, match="pass one row per sample, or indices="):
                    gather_for_metrics(torch.ones(6), loader=train)


@pytest.mark.slow
@distributed(world_size=(1, 2))
def test_a_loader_whose_loop_was_left_does_not_count_the_rows_of_the_next_one(rank, world_size):
    with accelerate_state(rank, world_size):
        train, test = prepared(range(11), 2), prepared(range(20), 2)
        batch = next(iter(train))
        assert whole(gather_for_metrics(rows(batch))) == [*range(2 * world_size)]
        for batch in DataLoader(range(7), 2, sampler=DistributedSampler(range(7), world_size, rank)):
            with pytest.raises(ValueError, match="no loader prepared with accelerate tells"):
                gather_for_metrics(rows(batch))
        samples = []
        for batch in train:
            samples += whole(gather_for_metrics(rows(batch)))
            for part in test:
                assert len(whole(gather_for_metrics(rows(part)))) == 2 * world_size
                break
        assert samples == [*range(11)]


@pytest.mark.slow
@distributed(world_size=2)
def test_accelerates_own_shuffling(rank, world_size):
    with accelerate_state(rank, world_size):
        for seedable in (True, False):
            loader = prepared(range(101), 8, shuffle=True, use_seedable_sampler=seedable)
            assert sorted(in_loop(loader)) == [*range(101)]
            assert sorted(after(loader, loader=loader)) == [*range(101)]


def left(order, skipped, step, drop_last):
    """The samples that are dealt in steps, from a sample on."""
    rest = order[skipped:]
    return rest[: len(rest) // step * step] if drop_last else rest


totals, batch_sizes, flags = st.integers(0, 200), st.integers(1, 17), st.booleans()
dispatching, skipped = st.sampled_from([None, True, False]), st.integers(0, 3)


def draws(**strategies):
    """Fifteen cases for one run, as a run with its group costs more than a case; a stress test has many runs."""
    settled = settings(deadline=None, max_examples=launching.examples(2))
    drawn = given(cases=st.lists(st.fixed_dictionaries(strategies), min_size=15, max_size=15))
    return lambda test: pytest.mark.slow(settled(drawn(test)))


@draws(
    total=totals,
    batch_size=batch_sizes,
    shuffle=flags,
    drop_last=flags,
    even=flags,
    split=flags,
    dispatch=dispatching,
    skip=skipped,
)
@distributed(world_size=ALL)
def test_prepared_loaders(rank, world_size, cases):
    for case in cases:
        check_prepared_loader(rank, world_size, **case)


@pytest.mark.slow
@distributed(world_size=launching.sampled([4, 3]))
def test_a_dispatcher_with_fewer_samples_than_half_the_ranks(rank, world_size):
    """accelerate fills the only step with the samples that it has, so some ranks get none."""
    for total, even, split in itertools.product(range(1, 5), (True, False), (True, False)):
        case = {"total": total, "batch_size": 2, "shuffle": False, "drop_last": False, "dispatch": True}
        check_prepared_loader(rank, world_size, **case, even=even, split=split, skip=0)
        check_prepared_loader(rank, world_size, **case | {"total": total + 2}, even=even, split=False, skip=1)


def check_prepared_loader(rank, world_size, total, batch_size, shuffle, drop_last, even, split, dispatch, skip):
    from accelerate import skip_first_batches

    batch_size *= world_size if split else 1
    step = batch_size if split else batch_size * world_size
    order = torch.randperm(total).tolist() if shuffle else [*range(total)]
    order = broadcast_object_list([order])[0]
    want = left(order, skip * (batch_size if dispatch else step), step, drop_last)
    if dispatch and not want:
        return  # accelerate raises
    options = {"split_batches": split, "dispatch_batches": dispatch, "even_batches": even}
    with accelerate_state(rank, world_size):
        loader = prepared(range(total), batch_size, order=order, drop_last=drop_last, **options)
        resumed = skip_first_batches(loader, skip) if skip else loader
        if even or dispatch:  # else ranks have more batches than others
            assert in_loop(resumed) == want
        assert after(resumed, loader=resumed) == want


@draws(
    total=totals, batch_size=batch_sizes, sized=flags, drop_last=flags, split=flags, dispatch=dispatching, skip=skipped
)
@distributed(world_size=ALL)
def test_prepared_streams(rank, world_size, cases):
    for case in cases:
        check_prepared_stream(rank, world_size, **case)


def check_prepared_stream(rank, world_size, total, batch_size, sized, drop_last, split, dispatch, skip):
    from accelerate import skip_first_batches

    batch_size *= world_size if split else 1
    step = batch_size if split else batch_size * world_size
    want = left([*range(total)], skip * step, step, drop_last)
    if dispatch is not False and not want:
        return
    with accelerate_state(rank, world_size):
        stream = (Sized if sized else Stream)(total)
        options = {} if sized or dispatch is not False else {"total": total}
        loader = prepared(stream, batch_size, drop_last=drop_last, split_batches=split, dispatch_batches=dispatch)
        resumed = skip_first_batches(loader, skip) if skip else loader
        assert in_loop(resumed, **options) == want
        assert after(resumed, loader=resumed, **options) == want


def test_rows_that_do_not_fit_the_last_step_are_refused():
    of_few = Sharding(block=2, rest=1, rows=2)  # a dispatcher's, which gives two of four ranks the only sample
    assert in_order([1, 1, 0, 0], of_few) == slice(1)
    with pytest.raises(ValueError, match="the ranks have 2, 0, 0, 0 rows, which are not the loader's: its last step"):
        in_order([2, 0, 0, 0], of_few)


@draws(
    total=totals,
    batch_size=batch_sizes,
    shuffle=flags,
    drop_last=flags,
    drop_batch=flags,
    by_length=flags,
    skip=skipped,
)
@distributed(world_size=ALL)
def test_samplers_that_deal_every_nth_sample(rank, world_size, cases):
    for case in cases:
        check_sampler(rank, world_size, **case)


def check_sampler(rank, world_size, total, batch_size, shuffle, drop_last, drop_batch, by_length, skip):
    from accelerate import skip_first_batches

    data = range(total)
    if by_length and total >= world_size:  # it does not work with fewer samples
        sampler = DistributedLengthGroupedSampler(
            batch_size, data, world_size, rank, drop_last=drop_last, lengths=[1 + i % 7 for i in data]
        )
    else:
        sampler = DistributedSampler(data, world_size, rank, shuffle, drop_last=drop_last)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=drop_batch)
    want = every_nth(sampler, total, world_size)
    if drop_batch:
        want = want[: len(sampler) // batch_size * batch_size * world_size]
    if skip:
        loader, want = skip_first_batches(loader, skip), want[skip * batch_size * world_size :]
    assert in_loop(loader, loader=loader) == want
    assert after(loader, loader=loader) == want


def every_nth(sampler, total, world_size):
    """The order that all ranks' samplers deal together, without what is repeated."""
    columns = gather(torch.tensor([*sampler], dtype=torch.int64)).view(world_size, -1)
    return columns.t().reshape(-1)[:total].tolist()
