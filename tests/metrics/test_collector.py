"""A collector gives what one process has of all samples in order, or says what is missing."""

import os
import re
import resource
from contextlib import nullcontext, suppress

import launching
import numpy as np
import pytest
import resident
import torch
from counting import exchanges
from hypothesis import given, settings, strategies as st

import easydist
from easydist import MetricCollector, RemoteError
from easydist.metrics import store, windows
from easydist.metrics.store import Spool
from easydist.testing import distributed

ALL = (1, 2, 3, 4)


def columns(indices):
    """Columns of several kinds, each telling its samples' indices."""
    numbers = [int(i) for i in indices]
    return {
        "logits": {"half": torch.tensor(numbers, dtype=torch.float16).view(-1, 1).expand(-1, 3), "n": numbers},
        "array": np.array(numbers, dtype=np.uint16),
        "text": [f"s{i}" for i in numbers],
        "boxes": [torch.full((i % 4, 4), float(i)) for i in numbers],
    }


def check(got, want):
    assert got["logits"]["half"].dtype == torch.float16
    assert got["logits"]["half"].tolist() == [[i] * 3 for i in want]
    assert got["logits"]["n"] == want
    assert got["array"].dtype == np.uint16
    assert got["array"].tolist() == want
    assert got["text"] == [f"s{i}" for i in want]
    assert [box.tolist() for box in got["boxes"]] == [[[float(i)] * 4] * (i % 4) for i in want]


def batches(order, size):
    return [order[i : i + size] for i in range(0, len(order), size)]


CASE = {
    "total": st.integers(0, 200),
    "batch_size": st.integers(1, 17),
    "seed": st.integers(0, 9),
    "repeated": st.integers(0, 5),
    "options": st.fixed_dictionaries({"every": st.sampled_from([None, 2]), "spill_nbytes": st.sampled_from([None, 0])}),
    "dst": st.sampled_from([None, 0]),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=launching.examples(2))
@given(cases=st.lists(st.fixed_dictionaries(CASE), min_size=12, max_size=12))
@distributed(world_size=ALL)
def test_columns_come_in_order(rank, world_size, cases):
    for case in cases:
        check_order(rank, world_size, **case)


def check_order(rank, world_size, total, batch_size, seed, repeated, options, dst):
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    order += order[:repeated]
    collector = MetricCollector(total, dst=world_size - 1, **options)
    steps = batches(order, batch_size * world_size)
    for step in steps:
        mine = step[rank * batch_size : (rank + 1) * batch_size]
        collector.update(mine, **columns(mine))
    got = collector.compute(dst)
    if dst not in (None, rank):
        assert got is None
    elif steps:
        check(got, [*range(total)])
    collector.reset()
    assert len(collector) == 0


@distributed(world_size=(1, 3))
def test_a_block_at_a_time(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_WINDOW", 4000)
        collector = MetricCollector()
        mine = [*range(rank, 900, world_size)]
        collector.update(mine, x=torch.tensor(mine), t=torch.ones(len(mine), 3))
        got = [*collector.blocks(dst=0)]
        assert len(got) > 3
        if rank:
            assert {*got} == {None}
        else:
            assert torch.cat([block["x"] for block in got]).tolist() == [*range(900)]
        assert collector.compute()["x"].tolist() == [*range(900)]


@distributed(world_size=3)
def test_ranks_that_have_nothing_get_the_result_too(rank):
    collector = MetricCollector(2)
    if rank == 1:
        collector.update([1, 0], x=torch.tensor([10, 0]), nested=({"id": ["b", "a"]},))
    got = collector.compute()
    assert got["x"].tolist() == [0, 10]
    assert got["nested"] == ({"id": ["a", "b"]},)
    collector.reset()
    with pytest.raises(ValueError, match="2 of 2 samples are missing: 0, 1"):
        collector.compute()
    assert MetricCollector().compute() == {}
    empty = MetricCollector(0)
    empty.update([], x=torch.ones(0, 2))
    assert empty.compute(dst=2)["x"].shape == (0, 2) if rank == 2 else empty.compute(dst=2) is None


@distributed(world_size=2)
def test_missing_and_repeated_samples_are_named_on_all_ranks(rank):
    collector = MetricCollector(101)
    mine = [i for i in range(rank, 100, 2) if i not in (7, 50)]
    collector.update([*mine, 3], x=torch.tensor([*mine, 3]))
    said = r"MetricCollector: 3 of 101 samples are missing: 7, 50, 100; 1 came more than once: 3"
    for dst in (None, 0, 1):
        with pytest.raises(ValueError, match=said):
            collector.compute(dst)
    collector.update([7, 50, 100], x=torch.tensor([7, 50, 100]))
    assert collector.compute()["x"].tolist() == [*range(101)]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.5]]), r"\[1.0, 2.0\] and \[1.0, 2.5\]"),
        (torch.tensor([3]), torch.tensor([4]), "3 and 4"),
        (["a"], ["b"], "'a' and 'b'"),
        ([{"box": torch.ones(2)}], [{"box": torch.zeros(2)}], "index 5 came with different values"),
        ([{"box": 1}], [{"mask": 1}], "index 5 came with different values"),
    ],
)
@distributed(world_size=2)
def test_another_value_of_one_sample_is_an_error_that_names_it(rank, first, second, said):
    collector = MetricCollector()
    collector.update([5], x=second if rank else first)
    for dst in (None, 1):
        with pytest.raises(
            ValueError, match=rf"MetricCollector: index 5 came with different values of \['x'\]: .*{said}|{said}"
        ):
            collector.compute(dst)
    same = MetricCollector()
    same.update([5, 6 + rank], x=torch.tensor([float("nan"), 1.0]), y=[first, rank])
    assert same.compute()["x"][1:].tolist() == [1.0, 1.0]


ITEMS = {
    "NaN": float("nan"),
    "NaN in a tree": {"a": float("nan"), "b": torch.tensor([float("nan"), 1.0])},
    "large integer": 1 << 70,
    "text array": np.array(["a", "b"]),
    "unsigned": np.uint64((1 << 64) - 1),
    "float8": torch.ones(2).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
@distributed(world_size=2)
def test_objects_of_any_kind_may_come_twice(rank, item):
    collector = MetricCollector(total=1)
    collector.update([0], x=[item])
    assert repr(collector.compute()) == repr({"x": [item]})


@distributed(world_size=2)
def test_rounding_may_be_allowed(rank):
    collector = MetricCollector(rtol=1e-4)
    collector.update([0], x=torch.tensor([1.0 + 1e-5 * rank]), z=torch.tensor([1.0j + 1e-5 * rank]))
    assert collector.compute() == {"x": torch.tensor([1.0]), "z": torch.tensor([1.0j])}


@distributed(world_size=2)
def test_complex_numbers_that_are_equal_may_come_twice(rank):
    collector = MetricCollector(total=2)
    collector.update([0, 1], z=torch.tensor([complex(float("nan"), 0.0), -0.0j if rank else 0.0j]))
    assert len(collector.compute()["z"]) == 2


@distributed(world_size=2)
def test_an_update_without_rows_needs_no_columns(rank):
    collector = MetricCollector(total=2)
    for indices in ([], [rank], []):
        collector.update(indices, **({"x": torch.ones(1)} if indices else {}))
    assert collector.compute()["x"].tolist() == [1.0, 1.0]


def test_columns_that_begin_later_are_refused_at_once():
    collector = MetricCollector(total=2)
    collector.update([0])
    with pytest.raises(ValueError, match=r"the columns are \['x'\] tensor float32 \(\), but they were none"):
        collector.update([1], x=torch.ones(1))
    assert collector.missing().tolist() == [1]


@distributed(world_size=2)
def test_ranks_that_differ_get_one_error(rank):
    collector = MetricCollector()
    collector.update([rank], x=torch.ones(1, dtype=torch.float64 if rank else torch.float32))
    with pytest.raises(
        ValueError, match=r"different columns\n  rank 0: \['x'\] tensor float32 \(\)\n  rank 1: .* float64"
    ):
        collector.compute()
    with pytest.raises(ValueError, match="the ranks have total=3, 4"):
        MetricCollector(3 + rank).compute()
    with pytest.raises((ValueError, RemoteError), match="dst=2 is not a rank"):
        MetricCollector().compute(dst=2)
    assert easydist.gather(rank).tolist() == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
@distributed(world_size=2)
def test_an_update_that_fails_on_one_rank_keeps_the_moves_in_step(rank, failing):
    """Update 3 would move no rows, so it fails alone; update 4 would, so all ranks raise."""
    collector = MetricCollector(total=8, every=2)
    for number in range(1, 7):
        rows = torch.ones(2 if rank == failing and number in {3, 4} else 1)
        fails = number == 4 or len(rows) == 2
        error: type[Exception] = ValueError if len(rows) == 2 else RemoteError
        with pytest.raises(error, match=r"\['x'\] has 2 rows, indices has 1") if fails else nullcontext():
            collector.update([number % 4 * 2 + rank], x=rows)
    assert collector.missing().tolist() == [failing, 6 + failing]
    assert len(collector) == (0 if rank else 10)


def no_memory(*args):
    raise MemoryError("no memory in the middle")


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["_GatherRows.prepare", "_GatherRows.result", "_found"])
@distributed(world_size=3)
def test_a_rank_that_fails_alone_is_an_error_on_all(rank, failing):
    collector = MetricCollector()
    collector.update(range(500), x=torch.ones(500, 1000))
    for call in (collector.compute, lambda: [*collector.blocks()]):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"easydist.metrics.windows.{failing}", no_memory)
            with pytest.raises((MemoryError, RemoteError), match="no memory in the middle"):
                call()
        assert collector.compute()["x"].shape == (500, 1000)


def test_what_update_refuses():
    collector = MetricCollector(5)
    collector.update([0], x=torch.ones(1, 2), y=["a"])
    x, y = torch.ones(1, 2), ["b"]
    for indices, columns, said in [
        ([1, 2], {"x": x, "y": y}, r"\['x'\] has 1 row, indices has 2"),
        ([1], {"x": 3.0, "y": y}, r"\['x'\] has one value"),
        ([1], {"x": x, "y": "b"}, r"\['y'\] is 'b', not one row per sample"),
        ([1], {"x": x}, "the columns are"),
        ([1], {"x": x.double(), "y": y}, "float64"),
        ([5], {"x": x, "y": y}, "index 5 is out of range for a dataset of 5 samples"),
        ([5, 2, -1, 9], {"x": x, "y": y}, "indices 5, -1, 9 are out of range for a dataset of 5 samples"),
        ([-1], {"x": x, "y": y}, "index -1 is out of range for a dataset of 5 samples"),
        ([0.5], {"x": x, "y": y}, "one integer per row"),
        ([2**70], {"x": x, "y": y}, "one integer per row"),
        (["a"], {"x": x, "y": y}, "one integer per row"),
    ]:
        with pytest.raises(ValueError, match=said):
            collector.update(indices, **columns)
    with pytest.raises(TypeError, match="cannot be pickled"):
        collector.update([1], x=x, y=[lambda: 0])
    with pytest.raises(TypeError, match="indices is a masked array"):
        collector.update(np.ma.array([1], mask=[1]), x=x, y=y)
    assert len(collector) == 1
    with pytest.raises(ValueError, match="every=0"):
        MetricCollector(every=0)
    with pytest.raises(TypeError, match=r"every=1\.5 is not a number of updates: pass an integer"):
        MetricCollector(every=1.5)


def test_rows_are_copies():
    collector, x = MetricCollector(), torch.ones(1)
    collector.update([0], x=x)
    x.zero_()
    assert collector.compute()["x"].tolist() == [1.0]
    collector.compute()["x"].zero_()
    assert collector.compute()["x"].tolist() == [1.0]


@pytest.mark.parametrize("options", [{}, {"every": 1}, {"spill_nbytes": 0}], ids=["plain", "every", "spill"])
@distributed(world_size=(1, 2))
def test_nothing_of_an_update_is_kept_but_copied(rank, world_size, options):
    collector = MetricCollector(total=6 * world_size, **options)
    box, array, names, indices = torch.empty(2), np.empty(1), np.empty(2, "U3"), torch.empty(2, dtype=torch.int64)
    nested, objects = {"box": box, "array": array, "rows": [0]}, np.empty(2, dtype=object)
    for step in range(3):
        first = 2 * (3 * rank + step)
        for reused in (indices, box, array, nested["rows"], names):
            reused[:1] = reused[:1].__class__([first]) if isinstance(reused, list) else first
        indices[1], objects[:] = first + 1, [nested, [box]]
        collector.update(indices, item=[nested, first], object=objects, name=names, n=indices.numpy())
    for reused in (indices, box, array, names):
        reused[:] = 77
    got = collector.compute()
    every = [*range(0, 6 * world_size, 2)]
    assert [int(item["box"][0]) for item in got["item"][::2]] == every
    assert [item["array"].tolist() for item in got["item"][::2]] == [[i] for i in every]
    assert [item["rows"] for item in got["item"][::2]] == [[i] for i in every]
    assert [int(item["box"][0]) for item in got["object"][::2]] == every
    assert [int(item[0][0]) for item in got["object"][1::2]] == every
    assert got["name"][::2].tolist() == [str(i) for i in every]
    assert got["n"].tolist() == [*range(6 * world_size)]


def nameless_files(folder):
    """Return the sizes of the files without a name in a folder that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            if os.readlink(path := f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                found.append(os.stat(path).st_size)
    return found


@pytest.mark.slow
def test_files_take_what_is_above_the_limit_and_end_with_the_collector(tmp_path):
    collector = MetricCollector(spill_nbytes=1 << 20, directory=tmp_path)
    for i in range(100):
        collector.update([99 - i], x=torch.full((1, 10_000), i), name=[str(i)])
    assert collector._store.nbytes > 3 << 20
    (nbytes,) = nameless_files(tmp_path)
    assert nbytes > 2 << 20
    got = collector.compute()
    assert got["x"][:, 5].tolist() == [*range(99, -1, -1)]
    assert got["name"] == [str(i) for i in range(99, -1, -1)]
    assert not [*tmp_path.iterdir()]
    collector.reset()
    assert not nameless_files(tmp_path)


@pytest.mark.slow
def test_rows_in_a_file_take_one_descriptor(tmp_path):
    collector = MetricCollector(spill_nbytes=0, directory=tmp_path)
    for i in range(20):
        collector.update([i], x=torch.full((1, 1 << 18), float(i)))
    before = len(os.listdir("/proc/self/fd"))
    state = collector.state_dict()
    assert len(os.listdir("/proc/self/fd")) - before <= 1
    assert [block["leaves"][0][0, 7].item() for block in state["blocks"]] == [*range(20)]
    collector.update([20], x=torch.full((1, 1 << 18), 20.0))  # the file is longer than its first mapping
    assert collector.state_dict()["blocks"][20]["leaves"][0][0, 7].item() == 20
    assert collector.compute()["x"][:, 7].tolist() == [*range(21)]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_rows_are_kept(tmp_path):
    collector = MetricCollector(spill_nbytes=0, directory=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path))):
            collector.update([1], x=torch.full((1, 1 << 20), 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    collector.update([0], x=torch.full((1, 1 << 20), 0.0))
    assert collector.compute()["x"][:, 7].tolist() == [0, 1]


def test_a_file_larger_than_the_computers_memory_is_read():
    """The system refuses to map all of it at once."""
    spool = Spool()
    first = spool.append([torch.ones(2)])
    os.truncate(first.file.opened.fileno(), 1 << 42)
    assert first.read()[0].tolist() == [1, 1]


def test_rows_in_windows_of_a_file_are_read(monkeypatch):
    """Also those that lie in two windows, and those that came after their window was mapped."""
    monkeypatch.setattr(store, "_WINDOW", 1 << 16)
    spool, kept = Spool(), []
    for nbytes in (1 << 14, 1 << 17, 1 << 16, 3, 1 << 15):
        kept.append((spool.append([torch.full((nbytes,), len(kept), dtype=torch.uint8)]), nbytes))
        read = [(spooled.read()[0].unique().tolist(), len(spooled.read()[0])) for spooled, _ in kept]
        assert read == [([i], length) for i, (_, length) in enumerate(kept)]


KILLED = """
import os, signal, sys, torch
from easydist import MetricCollector
collector = MetricCollector(spill_nbytes=0, directory=sys.argv[1])
collector.update([0, 1], x=torch.ones(2, 200_000))
collector.state_dict()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_no_rows_on_the_disk(tmp_path):
    launching.forked("-c", KILLED, tmp_path, status=-9)
    assert not [*tmp_path.iterdir()]


FORKED = """
import os, sys, torch
from easydist import MetricCollector
torch.set_num_threads(1)
collector = MetricCollector(spill_nbytes=0, directory=sys.argv[1])
collector.update([0], x=torch.zeros(1, 300_000))
collector.state_dict()
child = os.fork()
collector.update([1], x=torch.full((1, 300_000), 2.0 if child else 1.0))
got = collector.compute()["x"][:, 0].tolist()
assert got == [0, 2 if child else 1], got
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert collector.compute()["x"][:, 0].tolist() == [0, 2]
"""


@pytest.mark.slow
def test_a_forked_child_writes_to_a_file_of_its_own(tmp_path):
    launching.forked("-c", FORKED, tmp_path)


@distributed(world_size=2)
def test_rows_that_were_moved_count_as_those_that_were_not(rank):
    collectors = [MetricCollector(every=every) for every in (None, 1)]
    for collector in collectors:
        for i in range(10):
            collector.update([2 * i + rank], name=np.array([f"s{i}"]), x=torch.ones(1, 4), items=[i])
    kept, moved = (collector._store.nbytes for collector in collectors)
    assert moved == (2 * kept if rank == 0 else 0)


class Odd(list):
    """A list that is not made of another one."""

    def __init__(self):
        super().__init__()


@distributed(world_size=(1, 2))
def test_columns_come_in_the_usual_classes_on_any_number_of_ranks(rank, world_size):
    items = Odd()
    items.extend(["b", "a"])
    texts = np.char.array(["b", "a"])
    got = easydist.gather_for_metrics({"items": items, "texts": texts}, indices=[2 * rank + 1, 2 * rank])
    assert type(got["items"]) is list
    assert type(got["texts"]) is np.ndarray
    assert got["items"] == got["texts"].tolist() == ["a", "b"] * world_size


@distributed(world_size=2)
def test_small_columns_take_five_exchanges(rank):
    collector = MetricCollector(6)
    mine = [*range(3 * rank, 3 * rank + 3)]
    collector.update(mine, **columns(mine))
    assert exchanges(collector.compute) == ["header"] * 5
    assert exchanges(lambda: collector.compute(dst=0)) == ["header"] * 5


SAMPLES, WIDTH = 400_000, 100  # so much that what threads and allocators keep does not count


def recording(result, found):
    """The same method, which notes the memory before and after."""

    def recorded(*args):
        found.append(resident.own())
        got = result(*args)
        found.append(resident.own())
        return got

    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("deal", ["every nth", "in a row"])
@distributed(world_size=4, timeout=300)
def test_memory_is_bounded(rank, world_size, deal):
    easydist.gather(torch.ones(1 << 20))
    easydist.memory.release()
    resident.give_back()
    share = SAMPLES // world_size
    before = resident.own()
    collector = MetricCollector(SAMPLES)
    for step in range(0, share, 50):
        rows = torch.arange(step, step + 50)
        indices = rows * world_size + rank if deal == "every nth" else rows + rank * share
        collector.update(indices, x=indices.float()[:, None].expand(-1, WIDTH))
    found = [resident.own()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows._GatherRows, "result", recording(windows._GatherRows.result, found))
        got = collector.compute(dst=0)
    found.append(resident.own())
    assert len(found) > 40
    result = 4 * WIDTH * SAMPLES
    if rank == 0:
        assert got["x"][:, 7].tolist() == [*range(SAMPLES)]
        assert max(found) - before < 2.2 * result
    else:
        assert max(found) - before < 1.3 * result / world_size
