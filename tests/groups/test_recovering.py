"""Ranks are killed at random moments, in calls and while they recover; the survivors agree and go on."""

import functools
import json
import queue
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import launching
import pytest
import torch
import torch.distributed as dist

import easydist
import easydist.process_group
from easydist import ProcessState
from easydist.comms import ReduceOp, new_comm
from easydist.errors import OverlappingCallError, PeerLostError, RemoteError
from easydist.groups.communicators import Communicators
from easydist.groups.registers import RecoveryState
from easydist.testing import distributed

SCRIPT = Path(__file__).parent.parent / "scripts" / "recovering.py"
KINDS = ["shm", "gloo", "torch_shm", "comm_shm", "comm_gloo"]
FOUND = ["4/shm/2260", "4/gloo/2321"]
"""Rank 0, whose process serves the store, dies before the recovered group's first call."""


def cases(count):
    """The first of a sequence of cases, all kinds in turn: mostly of four ranks."""
    sizes = [4, 4, 4, 4, 4, 3, 4, 2, 4]
    return [f"{sizes[seed % len(sizes)]}/{KINDS[seed % len(KINDS)]}/{seed}" for seed in range(count)]


FEW = cases(9) + FOUND


@functools.cache
def launched(some):
    """Return for each case the survivors' rows by rank, and the exit statuses of all ranks."""
    out, _ = launching.forked(SCRIPT, *some, seconds=90, GLOO_SOCKET_IFNAME="lo")
    found = {}
    for row in [json.loads(line) for line in out.splitlines() if line.startswith("{")]:  # torch 2.9 writes, too
        rows, ended = found.setdefault(row["case"], ({}, {}))
        ended.update(row) if "statuses" in row else rows.update({row["rank"]: row})
    return found


def check(case, rows, ended):
    """Each survivor has gone on with all survivors, and with nobody else."""
    size = int(case.split("/")[0])
    left = [rank for rank in range(size) if rank not in ended["victims"]]
    assert [ended["statuses"][rank] for rank in left] == [0] * len(left)
    pids = [ended["pids"][rank] for rank in left]
    assert {rank: row["pids"] for rank, row in rows.items()} == dict.fromkeys(left, pids)
    assert [(rows[rank]["index"], rows[rank]["sum"]) for rank in left] == [(i, len(left)) for i in range(len(left))]
    victims = {ended["pids"][rank] for rank in ended["victims"]}
    assert {pid for row in rows.values() for pid in row["lost"]} <= victims
    if not case.split("/")[1].startswith("comm"):
        assert [(rows[rank]["main"], rows[rank]["local"]) for rank in left] == [(i == 0, i) for i in range(len(left))]
        assert all(rows[rank]["node"] == [0, 1, len(left)] for rank in left)


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW)
def test_the_survivors_go_on(case):
    check(case, *launched(tuple(FEW))[case])


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.skipif(launching.examples(1200) == 1200, reason="100 deaths take minutes: make stress")
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_the_survivors_go_on_a_hundred_times(first):
    some = tuple(cases(100)[first : first + 10])
    for case, (rows, ended) in launched(some).items():
        check(case, rows, ended)


@pytest.mark.parametrize("kind", ["group", "gloo", "shm"])
@distributed(world_size=2)
def test_names_and_keys_do_not_grow_with_each_recovery(kind, rank):
    """A store on TCP takes keys of 8 KiB: without this, some forty recoveries were the end of it."""
    comm, depths, names = None if kind == "group" else new_comm(kind, torch.device("cpu"), "often"), set(), []
    for _ in range(4):
        if comm is None:
            group = easydist.recover()
            names.append(group.group_name)
        else:
            comm = comm.recover()
        depths.add(depth_of(comm.store if comm else group.get_group_store()))
        assert easydist.gather(rank, group=comm).tolist() == [0, 1]
    assert len(depths) == 1
    assert [name.count("recovered") for name in names] == [1] * len(names)
    assert len(set(names)) == len(names)
    if comm is not None:
        comm.finalize()


def depth_of(store):
    """Return the number of prefixes of a store's keys."""
    return 1 + depth_of(store.underlying_store) if isinstance(store, dist.PrefixStore) else 0


@distributed(world_size=2)
def test_an_attempt_that_fails_leaves_no_group():
    """The members connect, but cannot meet the first time."""
    met, attempts = Communicators.met, []

    def once(comms, *limits):
        attempts.append(comms)
        if len(attempts) == 1:
            raise PeerLostError("a member was lost")
        return met(comms, *limits)

    known = dist.distributed_c10d._world.pg_map
    old = dist.new_group([0, 1])
    assert easydist.gather(1, group=old).tolist() == [1, 1]
    before = set(known)
    with mock.patch.object(Communicators, "met", once):
        new = easydist.recover(old, timeout=launching.within(20))
    assert len(attempts) >= 2  # on a busy machine another one may fail by itself
    assert set(known) - before == {new}
    assert easydist.gather(2, group=new).tolist() == [2, 2]
    for group in (new, old):
        dist.destroy_process_group(group)


@pytest.mark.slow
@pytest.mark.parametrize("is_comm", [False, True])
@distributed(world_size=2)
def test_of_two_threads_that_recover_a_group_at_once_one_raises(rank, is_comm):
    old = new_comm("shm", torch.device("cpu"), "recovered at once") if is_comm else dist.new_group([0, 1])
    found = queue.SimpleQueue()

    def recover():
        try:
            found.put(easydist.recover(old))
        except OverlappingCallError as error:
            found.put(error)

    threads = [threading.Thread(target=recover) for _ in range(2 - rank)]
    if rank == 0:
        for thread in threads:
            thread.start()
        error = found.get(timeout=launching.within(10))
        assert str(error).startswith("recover: another thread of this process is recovering this group"), error
    easydist.wait_for_everyone()
    if rank == 1:
        threads[0].start()
    for thread in threads:
        thread.join()
    new = found.get_nowait()
    assert easydist.gather(rank, group=new).tolist() == [0, 1]
    for group in (old, new):
        group.finalize() if is_comm else dist.destroy_process_group(group)


@pytest.mark.slow
@pytest.mark.parametrize("is_between_two", [False, True])
@distributed(world_size=2)
def test_a_wait_in_another_group_hears_of_a_recovery_and_can_be_repeated_after_it(is_between_two, rank):
    old, other = dist.new_group(), dist.new_group()

    def exchange():
        if is_between_two:
            return easydist.send_object(7, 0, group=other) if rank else easydist.recv_object(1, group=other)
        return easydist.gather(rank, group=other)

    for group in (old, other):
        easydist.gather(rank, group=group)
    if rank == 0:
        with pytest.raises(RemoteError, match=r"rank 1 recovers the group .*, and waits for this rank there\n"):
            exchange()
    new = easydist.recover(old, timeout=launching.within(20))
    if is_between_two and rank:  # as after Ctrl-C, rank 0 is past that call
        with pytest.raises(RemoteError):
            exchange()
    exchange()
    assert [easydist.gather(rank, group=group).tolist() for group in (new, other)] == [[0, 1]] * 2
    for group in (new, old, other):
        dist.destroy_process_group(group)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "gloo", None])
@distributed(world_size=2)
def test_a_wait_outside_of_verbs_hears_of_a_recovery_of_another_group(kind, rank):
    old, is_comm = dist.new_group(), kind is not None
    other = new_comm(kind, torch.device("cpu"), "beside") if is_comm else dist.new_group(backend="easydist_shm")

    def total(group):
        tensor = torch.tensor([1.0 + rank])
        group.all_reduce(tensor, ReduceOp.SUM, async_op=False) if is_comm else dist.all_reduce(tensor, group=group)
        return tensor.item()

    assert (easydist.gather(rank, group=old).tolist(), total(other)) == ([0, 1], 3)
    if rank == 0:
        with pytest.raises(RemoteError, match=r"rank 1 recovers the group .*\nCall recover\(\) .* then for this one"):
            total(other)
    groups = [easydist.recover(group, timeout=launching.within(20)) for group in (old, other)]
    assert (easydist.gather(rank, group=groups[0]).tolist(), total(groups[1])) == ([0, 1], 3)
    for group in (old, groups[0]):
        dist.destroy_process_group(group)
    for group in (other, groups[1]):
        group.finalize() if is_comm else dist.destroy_process_group(group)


@distributed(world_size=2)
def test_a_wait_in_a_call_of_torch_hears_of_the_recovery_of_its_group(rank):
    """As in DDP's backward pass, if only this rank's neighbour in gloo's ring had a connection to the lost one."""
    group = dist.new_group(timeout=timedelta(minutes=10))
    easydist.gather(rank, group=group)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"(closed|reset) by peer"):
            dist.recv(torch.empty(1), group_src=0, group=group)
    new = easydist.recover(group, timeout=launching.within(10))
    assert easydist.gather(rank, group=new).tolist() == [0, 1]
    for one in (new, group):
        dist.destroy_process_group(one)


@distributed(world_size=3)
def test_a_rank_of_this_host_is_waited_for_though_an_error_calls_it_lost(rank):
    """A connection may break, with no reason to be found in time, while the process at its other end lives."""
    group = dist.new_group()
    easydist.gather(rank, group=group)
    monitor = ProcessState().communicators(group).monitor
    if rank == 2:
        until = time.monotonic() + 0.5  # long enough for the others to go on without it
        while time.monotonic() < until and not all(
            RecoveryState.from_json(p.register()).register.slot for p in peers(monitor)
        ):
            time.sleep(0.01)
    else:
        error = PeerLostError("gather: rank 2 is lost: its connection broke")
        error.rank = 2
        monitor.give_up(error)
    new = easydist.recover(group, timeout=launching.within(20))
    assert easydist.gather(rank, group=new).tolist() == [0, 1, 2]
    for one in (new, group):
        dist.destroy_process_group(one)


def peers(monitor):
    return list(monitor.peers.values())
