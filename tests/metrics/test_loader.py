"""distributed_loader: the batches of a step, joined in rank order, are the next samples of the dataset."""

from itertools import chain

import launching
import pytest
import torch
import torch.distributed as dist
from counting import exchanges
from hypothesis import given, settings, strategies as st
from torch.utils.data import ChainDataset, Dataset, IterableDataset

import easydist
from easydist import DisagreementError, RemoteError
from easydist.metrics import DistributedBatchSampler, distributed_loader
from easydist.testing import distributed

FORKED = {"multiprocessing_context": "fork"}  # a worker that imports torch anew takes seconds


class Rows(Dataset):
    """Samples that know their numbers."""

    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def __getitem__(self, i):
        if not 0 <= i < self.total:
            raise IndexError(i)
        return {"x": torch.full((2,), i, dtype=torch.int16), "id": f"row {i}", "half": i / 2}


class Stream(IterableDataset):
    """The same samples, one after another; another stream in each epoch that it is told of."""

    def __init__(self, total, first=0):
        self.total, self.first, self.told = total, first, []

    def __iter__(self):
        rows = Rows(10**6)
        return (rows[self.first + i] for i in range(self.total))

    def set_epoch(self, epoch):
        self.told.append(epoch)


def collected(loader, limit=None, group=None):
    """The indices of the steps that are read, of all ranks in rank order."""
    steps = []
    for indices, batch in loader:
        rows = easydist.gather({"indices": indices, "x": batch["x"], "half": batch["half"]}, group=group)
        names = easydist.gather_object(list(batch["id"]), group=group)
        assert names == [f"row {i}" for i in rows["x"][:, 0].tolist()]
        assert rows["indices"].tolist() == rows["x"][:, 1].tolist()
        assert (rows["half"].dtype, rows["x"].dtype) == (torch.float64, torch.int16)
        assert rows["half"].tolist() == [i / 2 for i in rows["indices"].tolist()]
        assert len(batch["id"]) <= loader.batch_size
        steps.append(rows["indices"].tolist())
        if len(steps) == limit:
            break
    return steps


def order_of(total, shuffle, epoch):
    if not shuffle:
        return list(range(total))
    return torch.randperm(total, generator=torch.Generator().manual_seed(5 + epoch)).tolist()


def blocks(order, size, drop_last):
    kept = len(order) // size * size if drop_last else len(order)
    return [order[i : i + size] for i in range(0, kept, size)]


CASE = {
    "total": st.integers(0, 200),
    "batch_size": st.integers(1, 17),
    "size": st.integers(1, 4),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "is_stream": st.booleans(),
    "limit": st.integers(1, 12),
    "resumed_by": st.integers(1, 4),
}


@pytest.mark.slow
@settings(max_examples=launching.examples(5))
@given(cases=st.lists(st.fixed_dictionaries(CASE), min_size=8, max_size=8))
@distributed(world_size=4)
def test_every_sample_once_also_when_resumed_by_other_ranks(rank, cases):
    groups = {n: torch.distributed.new_group(range(n)) for n in (1, 2, 3, 4)}
    for case in cases:
        check(rank, groups, **case)


def check(rank, groups, total, batch_size, size, shuffle, drop_last, is_stream, limit, resumed_by):
    """Two epochs, of which the first is left in the middle and resumed by another loader on other ranks."""

    def loader_of(n, batch_size):
        data = Stream(total) if is_stream else Rows(total)
        options = {"shuffle": shuffle and not is_stream, "seed": 5, "drop_last": drop_last, "with_indices": True}
        return distributed_loader(data, batch_size, group=groups[n], **options)

    state, seen = None, []
    if rank < size:
        loader = loader_of(size, batch_size)
        seen = collected(loader, limit, groups[size])
        state = loader.state_dict()
        whole = blocks(order_of(total, shuffle and not is_stream, 0), batch_size * size, drop_last)
        assert seen == whole[:limit]
    states = easydist.gather_object((state, seen))
    if rank < resumed_by:
        state, seen = states[0]
        loader = loader_of(resumed_by, batch_size + 1)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        rest = collected(loader, group=groups[resumed_by])
        done = list(chain(*seen)) if state["epoch"] == 0 else []
        order = order_of(total, shuffle and not is_stream, state["epoch"])
        assert rest == blocks(order[len(done) :], (batch_size + 1) * resumed_by, drop_last)
        assert loader.state_dict()["epoch"] == state["epoch"] + 1


@pytest.mark.parametrize("kind", [Rows, Stream])
@distributed(world_size=(1, 2, 3, 4))
def test_steps_and_epochs(rank, world_size, kind):
    for total in (0, 1, 2, 3, 8, 13):
        loader = distributed_loader(kind(total), 2, with_indices=True)
        assert collected(loader) == blocks(list(range(total)), 2 * world_size, False)
        assert (loader.epoch, loader.position) == (1, 0)


@distributed(world_size=(1, 2, 3))
def test_an_epoch_is_followed_by_another_order(rank, world_size):
    loader = distributed_loader(Rows(20), 3, shuffle=True, seed=5, with_indices=True)
    assert len(loader) == -(-20 // (3 * world_size))
    assert len(distributed_loader(Rows(20), 3, drop_last=True)) == 20 // (3 * world_size)
    for epoch in range(3):
        assert list(chain(*collected(loader))) == order_of(20, True, epoch)
    loader.set_epoch(1)
    assert list(chain(*collected(loader))) == order_of(20, True, 1)


@distributed(world_size=2)
def test_an_epoch_that_was_left_begins_again(rank):
    loader = distributed_loader(Rows(20), 3, shuffle=True, seed=5, with_indices=True)
    collected(loader, 2)
    assert (loader.epoch, loader.position) == (0, 12)
    assert list(chain(*collected(loader))) == order_of(20, True, 0)
    state = loader.state_dict() | {"position": 12}
    loader.load_state_dict(state)
    assert len(list(chain(*collected(loader, 1)))) == 6  # the rest of the epoch begins, and is left, too
    assert list(chain(*collected(loader))) == order_of(20, True, state["epoch"])


@distributed(world_size=2)
def test_the_epoch_that_was_loaded_is_gone_on_with(rank):
    loader = distributed_loader(Rows(10), 2, with_indices=True)
    loader.load_state_dict({"epoch": 3, "position": 4, "order": {"shuffle": False, "seed": 0, "total": 10}})
    loader.set_epoch(3)
    assert collected(loader) == [[4, 5, 6, 7], [8, 9]]
    loader.load_state_dict({"epoch": 3, "position": 4, "order": {"shuffle": False, "seed": 0, "total": 10}})
    loader.set_epoch(4)
    assert collected(loader)[0] == [0, 1, 2, 3]


@distributed(world_size=2)
def test_a_state_that_one_rank_has_not_loaded_is_not_lost(rank):
    loader = distributed_loader(Rows(10), 2, with_indices=True)
    state = loader.state_dict() | {"position": 4}
    if rank:
        loader.load_state_dict(state)
    with pytest.raises(DisagreementError, match=r"position=0.*\n.*position=4"):
        list(loader)
    loader.load_state_dict(state)
    assert collected(loader) == [[4, 5, 6, 7], [8, 9]]


@distributed(world_size=2)
def test_a_state_of_another_order_is_refused(rank):
    loader = distributed_loader(Rows(10), 2)
    with pytest.raises(ValueError, match=r"'total': 11.*'total': 10.*same dataset, shuffle and seed"):
        loader.load_state_dict(distributed_loader(Rows(11), 2).state_dict())
    assert loader.epoch == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [(Rows, 2), (Stream, 1)])
@distributed(world_size=2)
def test_workers_give_the_same(rank, kind, workers):
    loader = distributed_loader(kind(9), 4, with_indices=True, num_workers=workers, **FORKED)
    for _ in range(2):
        assert collected(loader) == [list(range(8)), [8]]
    loader.load_state_dict(loader.state_dict() | {"position": 5})
    assert collected(loader) == [[5, 6, 7, 8]]


def skip_a_hundred(number):
    torch.utils.data.get_worker_info().dataset.first = 100


class Shifted(Rows):
    first = 0

    def __getitem__(self, i):
        return self.first + i


class ShiftedStream(Stream):
    def __iter__(self):
        return iter(range(self.first, self.first + self.total))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Shifted, ShiftedStream])
@distributed(world_size=1)
def test_a_worker_knows_the_dataset_of_the_caller(kind):
    """Its worker_init_fn may open a file there, or choose a seed."""
    options = {"num_workers": 1, "worker_init_fn": skip_a_hundred, **FORKED}
    assert [batch.tolist() for batch in distributed_loader(kind(3), 2, **options)] == [[100, 101], [102]]


@pytest.mark.slow
@distributed(world_size=2)
def test_workers_that_persist_see_each_epoch(rank):
    loader = distributed_loader(
        Rows(9), 2, shuffle=True, seed=5, with_indices=True, num_workers=1, persistent_workers=True, **FORKED
    )
    for epoch in range(2):
        assert list(chain(*collected(loader))) == order_of(9, True, epoch)


@distributed(world_size=2)
def test_plain_batches_of_plain_lists_and_generators(rank):
    assert [batch.tolist() for batch in distributed_loader([5, 6, 7], 1)] == [[5 + rank], [7][rank:]]
    rows = (i for i in range(3))
    loader = distributed_loader(rows, 1)
    assert [batch.tolist() for batch in loader] == [[rank], [2][rank:]]
    with pytest.raises(
        ValueError, match="the dataset is a generator, which can be read once, and has been: make another"
    ):
        next(iter(loader))


@distributed(world_size=2)
def test_a_data_set_that_gives_many_at_once(rank):
    class Together(Rows):
        def __getitems__(self, indices):
            assert indices
            return [self[i] for i in indices]

    assert collected(distributed_loader(Together(5), 2, with_indices=True)) == [[0, 1, 2, 3], [4]]


@distributed(world_size=2)
def test_streams_without_a_length_may_be_chained(rank):
    loader = distributed_loader(ChainDataset([Stream(2), Stream(1)]), 2, with_indices=True)
    assert loader.total is None
    assert [indices.tolist() for indices, _ in loader] == [[2] if rank else [0, 1]]


@distributed(world_size=2)
def test_a_stream_is_told_the_epoch(rank):
    stream = Stream(3)
    loader = distributed_loader(stream, 2)
    list(loader)
    list(loader)
    assert stream.told == [0, 1]
    with pytest.raises(TypeError, match="the dataset of this loader has no length"):
        len(loader)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2, "sampler": [1]}, TypeError, "sampler= is not accepted"),
        ({"batch_size": 2, "workers": 1}, TypeError, "workers"),
        ({"batch_size": 2, "num_workers": -1}, ValueError, "num_workers"),
    ],
)
@distributed(world_size=2)
def test_what_one_rank_asks_wrongly_is_an_error_on_all(rank, options, error, text):
    with pytest.raises(error, match=text):
        distributed_loader(Rows(5), **options)
    with pytest.raises(RemoteError, match=f"rank 1: {error.__name__}.*{text}"):
        distributed_loader(Rows(5), **(options if rank else {"batch_size": 2}))
    assert collected(distributed_loader(Rows(2), 1, with_indices=True)) == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size=0: a batch holds at least one"),
        ({"shuffle": True}, "an iterable dataset has its own order"),
        ({"num_workers": 2}, "one worker reads it"),
        ({"num_workers": 1, "persistent_workers": True}, "no persistent_workers"),
    ],
)
@distributed(world_size=2)
def test_what_a_stream_cannot_do(rank, options, text):
    with pytest.raises(ValueError, match=text):
        distributed_loader(Stream(5), **({"batch_size": 2} | options))


@pytest.mark.parametrize("dataset", [Rows(5), Stream(5)], ids=["rows", "stream"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 2.0}, "batch_size=2.0 is not a number of samples: pass an integer"),
        ({"batch_size": "2"}, "batch_size='2' is not a number of samples: pass an integer"),
        ({"seed": None}, "seed=None is not a seed: pass an integer"),
    ],
)
@distributed(world_size=2)
def test_what_is_no_integer_is_refused_at_once(rank, options, text, dataset):
    with pytest.raises(TypeError, match=text):
        distributed_loader(dataset, **options)
    with pytest.raises(RemoteError, match=f"rank 1: TypeError: {text}"):
        distributed_loader(dataset, **(options if rank else {}))


@pytest.mark.parametrize("dataset", [Rows(5), Stream(5)], ids=["rows", "stream"])
@distributed(world_size=2)
def test_batches_in_another_order_are_refused(rank, dataset):
    """The position after a step would not tell which samples are done."""
    with pytest.raises(ValueError, match="in_order=False is not accepted"):
        distributed_loader(dataset, 2, in_order=False)


@distributed(world_size=2)
def test_ranks_that_share_out_something_else_are_told(rank):
    with pytest.raises(DisagreementError, match=r"total=5.*\n.*total=6"):
        distributed_loader(Rows(5 + rank), 2)
    with pytest.raises(DisagreementError, match=r"seed=0.*\n.*seed=1"):
        distributed_loader(Rows(5), 2, seed=rank)
    loader = distributed_loader(Rows(5), 2, with_indices=True)
    loader.set_epoch(rank)
    with pytest.raises(DisagreementError, match=r"begin_epoch\(epoch=0.*\n.*begin_epoch\(epoch=1"):
        list(loader)
    loader.set_epoch(0)
    assert collected(loader) == [[0, 1, 2, 3], [4]]


@distributed(world_size=2)
def test_streams_of_other_lengths_are_found_at_the_end(rank):
    """As where each rank reads samples of its own."""
    told = r"position=3\).*\n.*position=4\)(.|\n)*Every rank must read the same samples .*split_dataset_by_node"
    with pytest.raises(DisagreementError, match=told):
        list(distributed_loader(Stream(3 + rank), 2))
    with pytest.raises(DisagreementError, match=r"end_epoch"):
        collected(distributed_loader(Stream(2 + 2 * rank), 1, with_indices=True))
    assert collected(distributed_loader(Stream(2), 1, with_indices=True)) == [[0, 1]]


@pytest.mark.parametrize(("kind", "count"), [(Rows, 1), (Stream, 2)])
@distributed(world_size=2)
def test_an_epoch_costs_a_header_at_its_beginning(rank, kind, count):
    assert exchanges(lambda: distributed_loader(kind(50), 1)) == ["header"]
    loader = distributed_loader(kind(50), 1)
    assert exchanges(lambda: list(loader)) == count * ["header"]


@pytest.mark.parametrize("kind", [Rows, Stream])
@distributed(world_size=(1, 2, 3))
def test_gather_for_metrics_knows_that_nothing_is_repeated(rank, world_size, kind):
    for total in (1, 8, 13):
        loader = distributed_loader(kind(total), 2)
        every, whole = {"x": [], "id": []}, []
        for batch in loader:
            whole += easydist.gather_for_metrics(batch["x"][:, 0], loader=loader).tolist()
            every = {"x": [*every["x"], *batch["x"][:, 0].tolist()], "id": [*every["id"], *batch["id"]]}
        assert whole == list(range(total))
        rows = {"x": torch.tensor(every["x"], dtype=torch.int16), "id": every["id"]}
        after = easydist.gather_for_metrics(rows, loader=loader)
        assert after["x"].tolist() == whole
        assert after["id"] == [f"row {i}" for i in whole]


@pytest.mark.parametrize("shuffle", [False, True])
@distributed(world_size=(1, 2, 4))
def test_a_collector_has_the_whole_data_set_in_order(rank, world_size, shuffle):
    for total in (1, 5, 16):
        loader = distributed_loader(Rows(total), 3, shuffle=shuffle, with_indices=True)
        collector = easydist.MetricCollector(total=total)
        for indices, batch in loader:
            collector.update(indices, **batch)
        columns = collector.compute()
        assert columns["x"][:, 0].tolist() == list(range(total))
        assert list(columns["id"]) == [f"row {i}" for i in range(total)]
        assert columns["half"].tolist() == [i / 2 for i in range(total)]


@distributed(world_size=(1, 2))
def test_the_state_names_the_epoch_that_is_being_read(rank, world_size):
    loader = distributed_loader(range(10), 1, shuffle=True)
    for number, _ in enumerate(loader):
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, (number + 1) * world_size)
        inner = [loader.state_dict()["position"] for _ in loader]  # the same epoch from its beginning
        assert inner == [*range(world_size, 11, world_size)]
        assert loader.state_dict() == state
        loader.set_epoch(7)  # for the next pass: this one goes on
        assert loader.state_dict() == state
        if number == 1:
            break
    assert loader.state_dict() == state  # it can be resumed there
    loader.set_epoch(3)
    assert (loader.epoch, loader.position) == (3, 0)
    list(loader)
    assert (loader.epoch, loader.position) == (4, 0)


@distributed(world_size=(1, 2))
def test_choosing_the_next_epoch_while_reading_one_loses_no_sample(rank, world_size):
    loader, got = distributed_loader(range(10), 1, shuffle=True, seed=5), []
    for batch in loader:
        got += easydist.gather(batch).tolist()
        loader.set_epoch(7)
        if len(got) == 4:
            break
    resumed = distributed_loader(range(10), 1, shuffle=True, seed=5)
    resumed.load_state_dict(loader.state_dict())
    got += [i for batch in resumed for i in easydist.gather(batch).tolist()]
    assert got == order_of(10, True, 0)
    assert [i for batch in loader for i in easydist.gather(batch).tolist()] == order_of(10, True, 7)
    assert loader.epoch == 8


@pytest.mark.parametrize("is_stream", [False, True])
@distributed(world_size=2)
def test_a_loader_that_is_older_than_the_group_splits_among_its_ranks(is_stream, rank):
    """Lightning, for one, makes the group in ``fit``, after the loaders."""
    store = dist.PrefixStore("later", dist.group.WORLD.get_group_store())
    dist.barrier()
    dist.destroy_process_group()
    easydist.ProcessState._reset_state()
    loader = distributed_loader(Stream(7) if is_stream else Rows(7), 2, with_indices=True)
    sampler, unlike = DistributedBatchSampler(7, 2), distributed_loader(Rows(7), 2, seed=rank)
    assert (sampler.world_size, len(sampler), [len(batch) for batch in sampler]) == (1, 4, [2, 2, 2, 1])
    assert is_stream or len(loader) == 4
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert is_stream or len(loader) == 2
    assert collected(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    assert (sampler.rank, len(sampler), [*sampler]) == (rank, 2, [[[0, 1], [4, 5]], [[2, 3], [6]]][rank])
    with pytest.raises(easydist.DisagreementError, match="seed=1"):
        next(iter(unlike))
