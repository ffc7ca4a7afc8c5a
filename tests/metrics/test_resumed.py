"""An evaluation that was interrupted goes on, on any number of ranks, with the rows that are there."""

import shutil
import tempfile
from pathlib import Path

import launching
import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import exchanges
from hypothesis import given, settings, strategies as st
from test_collector import nameless_files

import easydist
from easydist import DisagreementError, MetricCollector, UnsafeObjectError, allow_pickle
from easydist.metrics import distributed_loader
from easydist.testing import distributed

WRITERS = {"easydist": (easydist.save, easydist.load), "torch": (torch.save, torch.load)}


def columns(indices):
    """Columns of several kinds, each telling its samples' indices."""
    return {
        "logits": {"half": indices.to(torch.float16).view(-1, 1).expand(-1, 3)},
        "array": indices.numpy().astype(np.uint16),
        "words": np.array([f"s{i}" for i in indices], dtype="U3"),
        "text": [f"s{i}" for i in indices],
        "boxes": [torch.full((int(i) % 4, 2), float(i)) for i in indices],
    }


def check(got, total):
    want = columns(torch.arange(total))
    assert torch.equal(got["logits"]["half"], want["logits"]["half"])
    assert got["array"].dtype == np.uint16
    assert got["array"].tolist() == want["array"].tolist()
    assert isinstance(got["words"], np.ndarray)
    assert got["words"].tolist() == got["text"] == want["text"]
    assert all(map(torch.equal, got["boxes"], want["boxes"]))


@pytest.mark.parametrize("writer", WRITERS)
@given(
    total=st.integers(0, 40),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    spill_nbytes=st.sampled_from([None, 0]),
    ranks=st.integers(1, 4),
)
@settings(deadline=None, max_examples=launching.examples(3))
@distributed(world_size=(1, 3, 4))
def test_rows_of_one_world_count_in_another(rank, world_size, writer, total, seed, share, spill_nbytes, ranks):
    generator = torch.Generator().manual_seed(seed)
    done = torch.randperm(total, generator=generator)[: int(share * total)]
    ranks = min(ranks, world_size)
    collector = MetricCollector(total, spill_nbytes=spill_nbytes)
    for part in done[rank::world_size].split(3):
        collector.update(part, **columns(part))
    states = easydist.gather_object(through(writer, collector.state_dict()))
    group = dist.new_group([*range(ranks)])
    if rank < ranks:
        resume(states[rank::ranks], total, done, group)
    easydist.wait_for_everyone()


def through(writer, state):
    """Write a state, and read it."""
    save, load = WRITERS[writer]
    with tempfile.TemporaryDirectory() as folder:
        save(state, f"{folder}/state")
        return load(f"{folder}/state")


def resume(states, total, done, group):
    """Evaluate what is left on the ranks of a group."""
    collector = MetricCollector(total, spill_nbytes=0, group=group)
    for state in states:
        collector.load_state_dict(state)
    left = collector.missing()
    assert left.tolist() == sorted({*range(total)} - {*done.tolist()})
    for positions, numbers in distributed_loader(left.tolist(), batch_size=4, with_indices=True, group=group):
        assert torch.equal(left[positions], numbers)
        collector.update(numbers, **columns(numbers))
    assert not len(collector.missing())
    got = collector.compute()
    if total:
        check(got, total)


ROWS = launching.examples(600) * 1000 if launching.IS_STRESS else 20_000
"""Ten million under ``make stress``."""


def answers(indices):
    """Three numbers for each sample, which tell its index."""
    return {"loss": indices.double().sin(), "label": indices * 3, "correct": indices % 7 == 0}


def evaluate(collector, indices):
    for part in indices.split(ROWS // 100):
        collector.update(part, **answers(part))


@pytest.mark.slow
@pytest.mark.stress
@distributed(world_size=4)
def test_a_large_evaluation_goes_on_without_a_rank_that_had_saved_less(rank, world_size):
    folder = Path(easydist.broadcast_object_list([tempfile.mkdtemp() if rank == 0 else ""])[0])
    mine = torch.arange(rank, ROWS, world_size)
    saved = len(mine) // (4 if rank == 3 else 2)
    first = MetricCollector(ROWS, spill_nbytes=64 << 20)
    evaluate(first, mine[:saved])
    easydist.save(first.state_dict(), folder / f"{rank}.safetensors")
    group = dist.new_group([0, 1, 2])
    if rank == 3:
        return
    collector = MetricCollector(ROWS, spill_nbytes=64 << 20, group=group)
    for path in sorted(folder.iterdir())[rank :: group.size()]:
        collector.load_state_dict(easydist.load(path))
    left = collector.missing()
    assert len(left) == sum(len(range(r, ROWS, 4)) - len(range(r, ROWS, 4)) // (4 if r == 3 else 2) for r in range(4))
    evaluate(collector, left[rank :: group.size()])
    got = collector.compute(dst=0)
    if rank == 0:
        shutil.rmtree(folder)
        want = answers(torch.arange(ROWS))
        assert {name: torch.equal(got[name], column) for name, column in want.items()} == dict.fromkeys(want, True)


def filled(**columns):
    collector = MetricCollector(3)
    collector.update([2, 0], **columns)
    return collector


def test_the_state_of_a_rank_without_updates_adds_nothing():
    for writer in WRITERS:
        collector = filled(x=torch.ones(2))
        collector.load_state_dict(through(writer, MetricCollector(3).state_dict()))
        assert collector.missing().tolist() == [1]
        collector.update([1], x=torch.zeros(1))
        assert collector.compute()["x"].tolist() == [1.0, 0.0, 1.0]


def test_rows_that_are_loaded_are_copies():
    state = filled(x=torch.ones(2), items=[[1], [2]]).state_dict()
    collector = MetricCollector(3)
    collector.load_state_dict(state)
    state["blocks"][0]["leaves"][1].zero_()
    state["indices"].zero_()
    collector.update([1], x=torch.ones(1), items=[[3]])
    assert collector.compute() == {"x": pytest.approx([1, 1, 1]), "items": [[2], [3], [1]]}


def test_rows_in_files_are_mapped(tmp_path):
    collector = MetricCollector(3, spill_nbytes=0, directory=tmp_path)
    collector.update([2, 0], x=torch.ones(2, 1000), name=["b", "a"])
    state = collector.state_dict()
    assert nameless_files(tmp_path)
    collector.reset()
    resumed = MetricCollector(3)
    resumed.load_state_dict(state)
    assert resumed.missing().tolist() == [1]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"epoch": 0, "position": 4}, "load_state_dict: the state has epoch, position; pass a result of MetricColl"),
        ({}, "load_state_dict: the state has nothing; pass a result of MetricCollector.state_dict"),
        (filled(x=torch.ones(2, dtype=torch.int8)).state_dict(), r"columns are \['x'\] tensor int8.*they were \['x'\]"),
        (filled(y=torch.ones(2)).state_dict(), r"the columns are \['y'\]"),
    ],
)
def test_what_a_collector_refuses_leaves_it_as_it_was(state, said):
    collector = MetricCollector(3)
    collector.update([1], x=torch.zeros(1))
    with pytest.raises(ValueError, match=said):
        collector.load_state_dict(state)
    assert collector.missing().tolist() == [0, 2]


def test_an_index_beyond_the_samples_is_refused():
    collector = MetricCollector(2)
    with pytest.raises(ValueError, match="index 2 is out of range for a dataset of 2 samples"):
        collector.load_state_dict(filled(x=torch.ones(2)).state_dict())
    assert not len(collector)


def test_objects_are_not_unpickled_if_that_is_denied():
    state = filled(x=torch.ones(2), items=[test_rows_in_files_are_mapped] * 2).state_dict()
    collector = MetricCollector(3)
    allow_pickle(False)
    try:
        with pytest.raises(UnsafeObjectError):
            collector.load_state_dict(state)
    finally:
        allow_pickle(True)
    assert not len(collector)
    collector.load_state_dict(state)
    assert len(collector) == 2


@distributed(world_size=2)
def test_what_is_missing_is_one_exchange(rank):
    collector = MetricCollector(4)
    collector.update([2 * rank], x=torch.ones(1))
    assert exchanges(collector.missing) == ["header"]
    assert collector.missing().tolist() == [1, 3]


@distributed(world_size=2)
def test_ranks_hear_of_a_collector_without_a_total(rank):
    for totals, error in (((3, None), easydist.EasydistError), ((3, 4), DisagreementError)):
        with pytest.raises((error, ValueError), match=r"total|shape"):
            MetricCollector(totals[rank]).missing()
    assert MetricCollector(1).missing().tolist() == [0]


@pytest.mark.parametrize("change", [{"rows": 1}, {"leaves": [torch.ones(7)]}])
def test_a_state_that_was_changed_is_refused_and_leaves_no_columns(change):
    state = filled(x=torch.ones(2)).state_dict()
    state["blocks"][0] |= change
    collector = MetricCollector(3)
    with pytest.raises(ValueError, match="not have one row of each column for each index"):
        collector.load_state_dict(state)
    collector.update([0], y=torch.ones(1))
    assert list(collector.compute.__self__._schema.template) == ["y"]


@distributed(world_size=2)
def test_columns_may_come_in_any_order(rank):
    collector = MetricCollector(4)
    columns = {"a": torch.tensor([rank]), "b": {"d": [str(rank)], "c": torch.ones(1)}}
    collector.update([2 * rank], **columns)
    again = {"b": {"c": torch.ones(1), "d": ["x"]}, "a": torch.tensor([7])}
    collector.update([2 * rank + 1], **again)
    got = collector.compute()
    assert got["a"].tolist() == [0, 7, 1, 7]
    assert got["b"]["d"] == ["0", "x", "1", "x"]
    other = MetricCollector(2)
    other.update([rank], **dict(reversed(columns.items()) if rank else columns.items()))
    assert other.compute()["a"].tolist() == [0, 1]
