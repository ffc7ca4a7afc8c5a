"""Tests of the records of a trace on real ranks, of its table, and of its file for viewers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist import CollectiveTimeout, DisagreementError, RemoteError, Trace, TracedCall
from easydist.agreement import notes
from easydist.state import communicators
from easydist.testing import distributed

ALL = (1, 2, 3)


def announce(group, key):
    """Set a key of the store once this rank's header for its next call in a group, with its time, is written."""
    control, store = communicators(group).met().control, dist.group.WORLD.get_group_store()
    exchange = control.all_gather_upto

    def announced(*args, **kwargs):
        store.set(key, "")
        return exchange(*args, **kwargs)

    control.all_gather_upto = announced


def arrive_last(rank, world_size):
    """Return on the last rank once the others' headers for their next call, with their times, are written."""
    easydist.wait_for_everyone()
    if rank < world_size - 1:
        announce(None, f"inside/{rank}")
    else:
        dist.group.WORLD.get_group_store().wait([f"inside/{other}" for other in range(world_size - 1)])


@distributed(world_size=ALL)
def test_each_call_is_a_record(rank, world_size):
    with easydist.trace() as trace:
        easydist.gather({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int64)})
        easydist.gather_object("x" * 100)
        easydist.wait_for_everyone()
    gather, objects, meeting = trace.calls
    assert [call.operation for call in trace.calls] == ["gather", "gather_object", "wait_for_everyone"]
    assert all(call.site.startswith("tests/test_tracing.py:") for call in trace.calls)
    assert len({call.site for call in trace.calls}) == 3
    assert all((call.rank, call.size, call.peer, call.error) == (rank, world_size, None, None) for call in trace.calls)
    assert {call.group for call in trace.calls} == {communicators().met().control.get_name()}
    assert gather.nbytes == 28
    assert objects.nbytes > 100
    assert meeting.nbytes is None
    if world_size > 1:
        assert [call.number for call in trace.calls] == [gather.number + i for i in range(3)]
        assert all(call.start <= call.came[rank] <= call.end for call in trace.calls)
        assert all(len(call.came) == world_size for call in trace.calls)
    else:
        assert all((call.number, call.came, call.last, call.waited) == (0, (), None, None) for call in trace.calls)
    times = [time for call in trace.calls for time in (call.start, call.end)]
    assert times == sorted(times)


@distributed(world_size=ALL)
def test_gathered_has_what_each_rank_has_recorded(rank, world_size):
    with easydist.trace() as trace:
        easydist.broadcast(torch.ones(4))
        easydist.reduce(torch.ones(2), "sum", check=False)
    easydist.allow_pickle(False)
    try:
        every = trace.gathered()
    finally:
        easydist.allow_pickle(True)
    assert every[rank] == trace.calls
    assert [[call.rank for call in calls] for calls in every] == [[r, r] for r in range(world_size)]
    assert len({tuple(call.came for call in calls) for calls in every}) == 1
    assert trace.calls[1].came == ()


@distributed(world_size=3)
def test_who_waited_for_whom(rank, world_size):
    easydist.wait_for_everyone()
    with easydist.trace() as trace:
        arrive_last(rank, world_size)
        easydist.gather(torch.ones(2))
    call = trace.calls[-1]
    assert call.last == 2
    assert call.waited == max(call.came) - call.came[rank]
    assert (call.waited == 0) == (rank == 2)
    assert call.waited <= call.end - call.start
    rows = [row.split() for row in Trace().summary(trace.gathered()).splitlines()]
    gather = next(row for row in rows if row[0] == "gather")
    assert gather[-3:] == ["rank", "2", "(100%)"]
    assert gather[2:4] == ["3", "24"]


@distributed(world_size=2)
def test_waits_are_known_on_the_rank_that_came_last_too(rank, world_size):
    arrive_last(rank, world_size)
    with easydist.trace() as trace:
        easydist.gather(torch.ones(2))
    (call,) = trace.calls
    wait = f"{call.waited_by(0) / 1e6:.3f}"
    assert trace.summary().splitlines()[-2:] == ["waited for:", f"  rank 1  {wait} ms, by rank 0 {wait}"]


@distributed(world_size=2)
def test_calls_between_two_ranks(rank):
    with easydist.trace() as trace:
        if rank == 0:
            easydist.send_tensor_dict({"x": torch.ones(2)}, 1)
        else:
            easydist.recv_tensor_dict(0)
    (call,) = trace.calls
    assert (call.operation, call.peer, call.number) == (["send_tensor_dict", "recv_tensor_dict"][rank], 1 - rank, 0)
    assert (call.came, call.waited, call.nbytes) == ((), None, None)


@distributed(world_size=2)
def test_calls_that_raise(rank):
    with easydist.trace() as trace:
        with pytest.raises(DisagreementError):
            easydist.gather(torch.ones(2, 2 + rank))
        with pytest.raises(RemoteError):
            easydist.gather(torch.ones(2) if rank else torch.ones(2).to_sparse())
        store = dist.group.WORLD.get_group_store()
        if rank == 1:
            store.wait(["given up"])
        with pytest.raises(CollectiveTimeout):
            easydist.gather(rank, timeout=0.06)
        store.set("given up", "")
        assert easydist.gather(rank).tolist() == [0, 1]
    assert [call.error for call in trace.calls] == ["DisagreementError", "RemoteError", "CollectiveTimeout", None]
    assert rank == 1 or [len(call.came) for call in trace.calls] == [2, 2, 0, 2]


class Interrupting:
    """An object whose pickling is interrupted by the user."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_calls_that_are_interrupted_or_refused():
    with easydist.trace() as trace:
        with pytest.raises(KeyboardInterrupt):
            easydist.gather_object(Interrupting())
        with pytest.raises(ValueError, match="dst=1"):
            easydist.gather(1, dst=1)
        with pytest.raises(TypeError):
            easydist.send_tensor_dict({}, dst="nobody")
    assert [(call.error, call.nbytes, call.peer) for call in trace.calls] == [
        ("KeyboardInterrupt", None, None),
        ("ValueError", None, None),
        ("TypeError", None, None),
    ]


def test_functions_that_call_others_are_rows_of_their_own():
    parameter = torch.nn.Parameter(torch.ones(2))
    with easydist.trace() as trace, easydist.GatheredParameters(parameter, modifier_rank=0):
        pass
    assert [call.operation for call in trace.calls] == ["GatheredParameters"] * 3 + ["broadcast"]
    assert len({call.site for call in trace.calls}) == 1


@distributed(world_size=2)
def test_a_call_made_while_another_one_pickles_does_not_take_its_record(rank):
    group = dist.new_group()

    class Asks:
        def __reduce__(self):
            easydist.gather(rank, group=group)
            return int, (rank,)

    with easydist.trace() as trace:
        assert easydist.gather_object(Asks()) == [0, 1]
    assert [(call.operation, len(call.came)) for call in trace.calls] == [("gather", 2), ("gather_object", 2)]


def test_nothing_is_recorded_after_the_end():
    trace = easydist.trace()
    easydist.gather(1)
    with pytest.raises(ValueError, match="dst=1"), trace:
        easydist.gather(2, dst=1)
    easydist.gather(3)
    assert len(trace.calls) == 1
    assert notes.listeners == []


def test_traces_in_one_another():
    with easydist.trace() as outer:
        easydist.gather(1)
        with easydist.trace() as inner:
            easydist.reduce(2)
        easydist.gather_object(3)
    assert [call.operation for call in outer.calls] == ["gather", "reduce", "gather_object"]
    assert inner.calls == outer.calls[1:2]


def events(path):
    """Return the slices of a trace file, per track, after checking all events against the Trace Event Format."""
    whole = json.loads(path.read_text())
    assert whole["displayTimeUnit"] in ("ms", "ns")
    tracks, slices = {}, {}
    for event in whole["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                tracks[event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["name"]
            assert event["cat"] in ("call", "wait")
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices.setdefault(tracks[event["tid"]], []).append(event)
    return slices


def nanoseconds(event):
    """Return begin and end of a slice. Viewers round to nanoseconds."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


@distributed(world_size=ALL)
def test_the_file_has_a_track_per_rank(rank, world_size, tmp_path):
    with easydist.trace() as trace:
        easydist.gather(torch.ones(2))
        arrive_last(rank, world_size)
        easydist.reduce({"x": torch.ones(3)})
    trace.save(tmp_path / "trace.json")
    easydist.wait_for_everyone()
    slices = events(tmp_path / "trace.json")
    assert list(slices) == [f"rank {r}" for r in range(world_size)]
    for r, own in enumerate(slices.values()):
        calls = [event for event in own if event["cat"] == "call"]
        assert [event["name"] for event in calls] == ["gather", "wait_for_everyone", "reduce"]
        assert calls[2]["args"]["bytes"] == 12
        assert calls[2]["args"]["rank"] == r
        assert calls[2]["args"]["site"].startswith("tests/test_tracing.py:")
        assert calls[2]["args"].get("waited_for") == (world_size - 1 if r < world_size - 1 else None)
        assert [event["name"] for event in own[own.index(calls[2]) + 1 :]] == (
            [f"wait for rank {world_size - 1}"] if r < world_size - 1 else []
        )
        around = (0, 0)
        for event in own:  # slices of one track are disjoint or nested
            start, end = nanoseconds(event)
            assert (start >= around[1]) if event["cat"] == "call" else (around[0] <= start <= end <= around[1])
            around = (start, end) if event["cat"] == "call" else around


@distributed(world_size=2)
def test_a_file_that_cannot_be_written(rank, tmp_path):
    with pytest.raises(RemoteError if rank else FileNotFoundError):
        easydist.trace().save(tmp_path / "nowhere" / "trace.json")
    easydist.trace().save(tmp_path / "empty.json")
    easydist.wait_for_everyone()
    assert events(tmp_path / "empty.json") == {}


@distributed(world_size=3)
def test_groups_are_told_apart(rank, tmp_path):
    pair = dist.new_group([1, 2])
    with easydist.trace() as trace:
        easydist.gather(rank)
        if rank:
            easydist.gather(rank, group=pair)
    every = trace.gathered()
    assert [len(calls) for calls in every] == [1, 2, 2]
    if rank:
        assert (trace.calls[1].rank, trace.calls[1].size) == (rank - 1, 2)
        assert trace.calls[1].group != trace.calls[0].group
        assert " group " in trace.summary().splitlines()[1]
        trace.save(tmp_path / "pair.json", group=pair)
        easydist.gather(rank, group=pair)
        assert list(events(tmp_path / "pair.json")) == ["rank 0", "rank 1"]


@distributed(world_size=2)
def test_calls_of_threads_that_overlap_are_on_tracks_of_their_own(rank, tmp_path):
    one, other = (dist.new_group([0, 1]) for _ in range(2))
    for group in (one, other):
        easydist.gather(rank, group=group)
    store = dist.group.WORLD.get_group_store()
    with easydist.trace() as trace:
        if rank:
            store.wait(["other"])
            easydist.gather(rank, group=one)
            store.wait(["done"])
            easydist.gather(rank, group=other)
        else:
            announce(one, "one")
            announce(other, "other")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(easydist.gather, rank, group=one).add_done_callback(lambda _: store.set("done", ""))
                store.wait(["one"])
                easydist.gather(rank, group=other)
    trace.save(tmp_path / "threads.json")
    easydist.wait_for_everyone()
    slices = events(tmp_path / "threads.json")
    calls = {track: [event for event in own if event["cat"] == "call"] for track, own in slices.items()}
    assert {track: len(own) for track, own in calls.items()} == {"rank 0": 1, "rank 0 (2)": 1, "rank 1": 2}
    (first,), (second,) = calls["rank 0"], calls["rank 0 (2)"]
    assert nanoseconds(first)[0] < nanoseconds(second)[0] < nanoseconds(first)[1] < nanoseconds(second)[1]


def call(operation="gather", site="a.py:1", rank=0, came=(), start=0, end=10, **values):
    """Return a call of group ``g`` with times in ms."""
    times = {"start": start * 10**6, "end": end * 10**6, "came": tuple(time * 10**6 for time in came)}
    own = {"group": "g", "size": max(len(came), 1), "peer": None, "number": 1, "nbytes": None, "error": None}
    return TracedCall(operation, site, rank=rank, **(own | times | values))


def test_the_table_of_one_rank():
    trace = Trace()
    trace.calls.extend(
        [
            call("reduce", "b.py:22", start=0, end=2, nbytes=8, came=(1, 1)),
            call(start=10, end=15, nbytes=100, came=(11, 14)),
            call(start=20, end=24, nbytes=50, came=(22, 21)),
            call("send_tensor_dict", "c.py:3", start=30, end=31, peer=1, error="RemoteError"),
        ]
    )
    assert trace.summary() == (
        "4 calls of this rank in 0.031 s; times in ms\n"
        "operation         called at  calls  raised  bytes  total  median  longest  waited  for\n"
        "gather            a.py:1         2            150  9.000   4.500    5.000   3.000  rank 1 (100%)\n"
        "reduce            b.py:22        1              8  2.000   2.000    2.000   0.000\n"
        "send_tensor_dict  c.py:3         1       1      –  1.000   1.000    1.000       –\n"
        "waited for:\n"
        "  rank 1  3.000 ms, by rank 0 3.000\n"
        "  rank 0  1.000 ms, by rank 1 1.000"
    )


def test_the_table_of_all_ranks():
    every = [[call(rank=rank, came=(1, 9, 5), nbytes=rank), call(rank=rank, came=(8, 8, 9))] for rank in range(3)]
    assert Trace().summary(every).splitlines()[1:] == [
        "operation  called at  calls  bytes   total  median  longest  waited  for",
        "gather     a.py:1         6      3  60.000  10.000   10.000  14.000  rank 1 (86%)",
        "waited for:",
        "  rank 1  12.000 ms, by rank 0 8.000, rank 2 4.000",
        "  rank 2  2.000 ms, by rank 0 1.000, rank 1 1.000",
    ]


def test_the_table_of_many_ranks_and_of_none():
    trace = Trace()
    assert trace.summary() == "0 calls of this rank"
    assert trace.summary([[], []]) == "2 ranks, 0 calls"
    late = [tuple(9 if rank == last else 1 for rank in range(20)) for last in range(12)]
    trace.calls.extend([call(came=came) for came in late])
    lines = trace.summary().splitlines()
    assert lines[-1] == "  … and 2 more ranks"
    assert lines[-2].endswith("rank 8 8.000, rank 10 8.000, 9 more")
    assert len(lines) == 2 + 1 + 1 + 10 + 1


def test_waits_end_with_the_call_where_clocks_differ():
    skewed = call(came=(5, 5000), end=10)
    assert (skewed.last, skewed.waited, skewed.waited_by(1)) == (1, 5 * 10**6, 0)
