"""However the batches of a loader are gathered, each sample comes once and in order, or all ranks raise."""

import sys
import threading
from collections import deque

import launching
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loaders import accelerate_state, prepared
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from easydist import DisagreementError, RemoteError, gather_for_metrics, gather_object
from easydist.metrics import DistributedBatchSampler, distributed_loader
from easydist.metrics.gather import _GatherForMetrics
from easydist.metrics.passes import existing
from easydist.testing import distributed

SCRIPT = launching.ROOT / "tests" / "scripts" / "late_import.py"
ALL = (1, 2, 3, 4)


def strided(rank, size, total, batch_size):
    sampler = DistributedSampler(range(total), size, rank, shuffle=False)
    return DataLoader(range(total), batch_size, sampler=sampler)


def strided_batches(rank, size, total, batch_size):
    sampler = DistributedSampler(range(total), size, rank, shuffle=False)
    return DataLoader(range(total), batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))


def stateful(rank, size, total, batch_size):
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = DistributedSampler(range(total), size, rank, shuffle=False)
    return StatefulDataLoader(range(total), batch_size, sampler=sampler)


def accelerated(rank, size, total, batch_size):
    return prepared(range(total), batch_size)


def split(rank, size, total, batch_size):
    return prepared(range(total), batch_size * size, split_batches=True)


def dispatched(rank, size, total, batch_size):
    return prepared(range(total), batch_size, dispatch_batches=True)


def ours(rank, size, total, batch_size):
    return distributed_loader(range(total), batch_size)


def our_batches(rank, size, total, batch_size):
    sampler = DistributedBatchSampler(total, batch_size)
    return DataLoader(range(total), batch_sampler=sampler, collate_fn=torch.tensor)


KINDS = {
    each.__name__: each
    for each in (strided, strided_batches, stateful, accelerated, split, dispatched, ours, our_batches)
}


def rows(batch):
    """This rank's part of a batch, as a model returns it."""
    return torch.as_tensor(batch, dtype=torch.int64)


class Epoch:
    """The gathered samples of one way to read an epoch."""

    def __init__(self, loader):
        self.loader, self.samples = loader, []

    def gather(self, batch, factor=1):
        return (gather_for_metrics(rows(batch) * factor, loader=self.loader) // factor).tolist()

    def keep(self, batch):
        self.samples += self.gather(batch)

    def keep_both(self, batch):
        """Predictions and labels in two calls."""
        predictions, labels = self.gather(batch), self.gather(batch, 10)
        assert predictions == labels
        self.samples += predictions


def in_loop(epoch):
    for batch in epoch.loader:
        epoch.keep(batch)


def in_two_calls(epoch):
    for batch in epoch.loader:
        epoch.keep_both(batch)


def listed_first(epoch):
    for batch in list(epoch.loader):
        epoch.keep(batch)


def listed_first_in_two_calls(epoch):
    for batch in list(epoch.loader):
        epoch.keep_both(batch)


def pipelined(epoch, depth=1, keep=Epoch.keep):
    waiting = deque()
    for batch in epoch.loader:
        waiting.append(batch)
        if len(waiting) > depth:
            keep(epoch, waiting.popleft())
    for batch in waiting:
        keep(epoch, batch)


def pipelined_by_two(epoch):
    pipelined(epoch, 2)


def pipelined_in_two_calls(epoch):
    pipelined(epoch, keep=Epoch.keep_both)


def joined(batches):
    return torch.cat([rows([]), *map(rows, batches)])


def three_at_once(epoch):
    waiting = []
    for batch in epoch.loader:
        waiting.append(batch)
        if len(waiting) == 3:
            epoch.keep(joined(waiting))
            waiting.clear()
    if any(gather_object([len(waiting)])):
        epoch.keep(joined(waiting))


def after(epoch):
    epoch.keep(joined(epoch.loader))


def after_a_pass_without_calls(epoch):
    list(epoch.loader)
    in_loop(epoch)


def warmed_up(epoch):
    """One batch of another iterator, which stays alive."""
    epoch.other = iter(epoch.loader)
    for batch in epoch.other:
        epoch.gather(batch)
        break
    in_loop(epoch)


def beside_an_exhausted_iterator(epoch):
    epoch.other = iter(epoch.loader)
    list(epoch.other)
    in_loop(epoch)


def broken_off_and_again(epoch):
    for _, batch in zip(range(2), epoch.loader, strict=False):
        epoch.gather(batch)
    in_loop(epoch)


def twice(epoch):
    in_loop(epoch)
    first, epoch.samples = epoch.samples, []
    in_loop(epoch)
    assert epoch.samples == first


def beside_another_loader(epoch):
    other = Epoch(epoch.again())
    for batch in epoch.loader:
        epoch.keep(batch)
        other.samples = []
        in_loop(other)
        assert other.samples == epoch.want


RIGHT = (
    in_loop,
    in_two_calls,
    three_at_once,
    after,
    after_a_pass_without_calls,
    warmed_up,
    beside_an_exhausted_iterator,
    broken_off_and_again,
    twice,
    beside_another_loader,
)
"""Always right."""


def nested(epoch):
    for _ in epoch.loader:
        epoch.samples = []
        in_loop(epoch)


def zipped(epoch):
    for batch, other in zip(epoch.loader, epoch.loader, strict=True):
        epoch.keep(batch)
        epoch.gather(other)


RIGHT_OR_REFUSED = (
    listed_first,
    listed_first_in_two_calls,
    pipelined,
    pipelined_by_two,
    pipelined_in_two_calls,
    nested,
    zipped,
)


def without_a_batch(epoch, left_out):
    for i, batch in enumerate(epoch.loader):
        if i != left_out:
            epoch.keep(batch)
    in_loop(epoch)  # the next pass shows it, if nothing else has


def without_the_first(epoch):
    without_a_batch(epoch, 0)


def without_the_second(epoch):
    without_a_batch(epoch, 1)


def the_last_alone(epoch):
    batch = []
    for batch in epoch.loader:  # noqa: B007 (the last one is wanted)
        pass
    epoch.keep(batch)
    in_loop(epoch)


def outer_rows_in_an_inner_loop(epoch):
    for outer in epoch.loader:
        for _ in epoch.loader:
            epoch.gather(outer)


WRONG = (without_the_first, without_the_second, the_last_alone, outer_rows_in_an_inner_loop)
"""Refused, at the latest in the next call: the batches of the rows cannot be known, or samples are missing."""


def outcome(way, epoch):
    try:
        way(epoch)
    except ValueError as error:
        return str(error)
    return None


def check(rank, size, kind, way, total, batch_size):
    with accelerate_state(rank, size):
        epoch = Epoch(KINDS[kind](rank, size, total, batch_size))
        epoch.want, epoch.again = [*range(total)], lambda: KINDS[kind](rank, size, total, batch_size)
        refused = outcome(way, epoch)
        told = gather_object([refused])
        assert told == [refused] * size, told  # on all ranks or on none
        if way in RIGHT:
            assert refused is None, refused
        if refused is None and way not in WRONG:
            assert epoch.samples == epoch.want
        again = Epoch(epoch.loader)  # and then the loader works as ever
        in_loop(again)
        assert again.samples == epoch.want
        return refused


CASE = {
    "kind": st.sampled_from(sorted(KINDS)),
    "way": st.sampled_from((*RIGHT, *RIGHT_OR_REFUSED, *WRONG)),
    "total": st.integers(0, 50),
    "batch_size": st.integers(1, 5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@settings(deadline=None, max_examples=launching.examples(2))
@given(cases=st.lists(st.fixed_dictionaries(CASE), min_size=35, max_size=35))
@distributed(world_size=ALL)
def test_each_sample_comes_once_or_all_ranks_raise(rank, world_size, cases):
    for case in cases:
        if case["kind"] != "dispatched" or case["total"]:  # accelerate raises without a sample
            check(rank, world_size, **case)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WRONG, listed_first, zipped])
@distributed(world_size=2)
def test_rows_of_unknown_batches_are_refused(rank, world_size, way):
    for kind in ("strided", "accelerated", "split"):
        refused = check(rank, world_size, kind, way, total=11, batch_size=2)
        assert refused.startswith("gather_for_metrics: ")
        assert refused.endswith("or pass indices=") or "or indices=" in refused


@distributed(world_size=(2, 3))
def test_a_loop_that_stops_early_keeps_what_it_gathered(rank, world_size):
    loader, got = strided(rank, world_size, 11, 1), []
    for _, batch in zip(range(3), loader, strict=False):
        got += gather_for_metrics(rows(batch), loader=loader).tolist()
    assert got == [*range(3 * world_size)]
    kept = joined([batch for _, batch in zip(range(2), loader, strict=False)])
    assert gather_for_metrics(kept, loader=loader).tolist() == [*range(2 * world_size)]


@distributed(world_size=2)
def test_a_pass_that_came_to_its_end_without_its_rows_is_an_error_in_the_next_one(rank, world_size):
    loader = strided(rank, world_size, 11, 1)
    for step, batch in enumerate(loader):
        if step == 0:
            gather_for_metrics(rows(batch), loader=loader)
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="the last pass over the loader, the call of each step gathered 2 of 12 rows"):
        gather_for_metrics(rows(batch), loader=loader)


class Shards(torch.utils.data.Sampler):
    """Contiguous shards, as transformers' SequentialDistributedSampler dealt them."""

    def __init__(self, dataset, num_replicas, rank):
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.num_samples = -(-len(dataset) // num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self):
        order = [i % len(self.dataset) for i in range(self.total_size)]
        return iter(order[self.rank * self.num_samples :][: self.num_samples])

    def __len__(self):
        return self.num_samples


class Backwards(DistributedSampler):
    def __iter__(self):
        return reversed([*super().__iter__()])


class Named(DistributedSampler):
    """A class of one's own that deals as its base does."""


@distributed(world_size=3)
def test_samplers_that_deal_otherwise_are_refused(rank, world_size):
    for sampler in (Shards(range(7), world_size, rank), Backwards(range(7), world_size, rank, shuffle=False)):
        loader = DataLoader(range(7), 1, sampler=sampler)
        for batch in loader:
            with pytest.raises(ValueError, match=f"{type(sampler).__name__} has an __iter__ of its own.*indices="):
                gather_for_metrics(batch, loader=loader)
            break
    loader = DataLoader(range(7), 1, sampler=Named(range(7), world_size, rank, shuffle=False))
    epoch = Epoch(loader)
    in_loop(epoch)
    assert epoch.samples == [*range(7)]


@distributed(world_size=2)
def test_a_sampler_of_another_rank_is_refused(rank, world_size):
    loader = strided(1 - rank, world_size, 7, 2)
    with pytest.raises(RemoteError, match="the loader is that of rank 1, but this is rank 0; pass indices="):
        gather_for_metrics(rows([0]), loader=loader)


@distributed(world_size=(2, 3))
def test_a_rank_without_a_batch_takes_the_loader_of_the_others(rank, world_size):
    with accelerate_state(rank, world_size):
        loader = prepared(range(2), 2, even_batches=False)
        mine = [int(i) for batch in loader for i in batch]
        assert len(mine) == (2 if rank == 0 else 0)
        assert gather_for_metrics(rows(mine)).tolist() == [0, 1]


@distributed(world_size=2)
def test_ranks_at_different_batches_are_told(rank, world_size):
    loader = strided(rank, world_size, 7, 1)
    reading = iter(loader)
    batch = next(reading)
    if rank:
        batch = next(reading)
    with pytest.raises(DisagreementError, match="rank 0: batch 1\n  rank 1: batch 2\nGather at the same step"):
        gather_for_metrics(batch, loader=loader)
    other = strided(rank, world_size, 7 + rank * 2, 1)
    with pytest.raises(
        DisagreementError, match="rank 0: 8 rows, in blocks of 1, 1 samples in the last step\n  rank 1: 10"
    ):
        gather_for_metrics(batch, loader=other)


@pytest.mark.slow
@distributed(world_size=2)
def test_ranks_that_count_differently_after_a_failure_refuse_together(rank, world_size):
    epoch = Epoch(strided(rank, world_size, 7, 1))
    reading = iter(epoch.loader)
    epoch.keep(next(reading))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(_GatherForMetrics, "result", _fail)  # the others have their result already
        refused = outcome(lambda epoch: epoch.keep(next(reading)), epoch)
    assert refused == ("out of memory" if rank == 0 else None)
    epoch.keep(next(reading))
    refused = outcome(lambda epoch: epoch.keep(next(reading)), epoch)
    assert "these are 2 of the 8 rows" in refused
    assert gather_object([refused]) == [refused] * world_size
    epoch.samples = []
    in_loop(epoch)
    assert epoch.samples == [*range(7)]


def _fail(self, *args):
    raise ValueError("out of memory")


@pytest.mark.slow
def test_loops_before_the_import_and_with_persistent_workers_are_counted():
    options = {"PYTHON_EXEC": launching.fork()}
    launching.forked("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT, **options)


@pytest.mark.slow
def test_looking_for_loaders_does_not_disturb_other_threads():
    """CPython cannot end a tuple that is being built while a list of all objects holds it, too."""
    stop, errors = threading.Event(), []

    def build():
        try:
            while not stop.is_set():
                tuple(number for number in range(30))
        except SystemError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        iterator = iter(DataLoader(range(3)))
        assert all(any(each is iterator for each in existing(_BaseDataLoaderIter)) for _ in range(50))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
