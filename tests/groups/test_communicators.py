"""Frames, time limits and hosts of a group, and which of its communicators carries which data."""

import errno
import os
import threading
from datetime import timedelta

import pytest
import torch
from groups import BACKENDS, check_works, made

import easydist
from easydist import CollectiveTimeout, ProcessState
from easydist.comms import Hierarchical
from easydist.groups import known, sharing
from easydist.groups.communicators import Frames
from easydist.shm.segment import Segment
from easydist.testing import distributed


def refuse(name, nbytes):
    raise PermissionError("not to be seen from here")


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 47, 100, 255, 257, 5000])
def test_rows_of_frames_are_aligned_and_bounded(size):
    for are_cut in (False, True):
        nbytes = Frames(size, are_cut).nbytes
        assert nbytes % 64 == 0  # so that every row starts as aligned as the first
        assert nbytes * size <= 1 << 20 or nbytes == 1 << 12
        assert 1 << 12 <= nbytes <= ((1 << 19) // size + 1024 if are_cut and size <= 16 else 1 << 15)


@distributed(world_size=[2, 4])
def test_a_slot_has_room_for_a_frame(rank):
    comms = ProcessState().communicators().met()
    assert comms.control.backend._steps.slots.slot >= comms.frames.nbytes


@pytest.mark.parametrize("limit", [timedelta(seconds=20.5), timedelta(days=1, minutes=1)], ids=str)
@distributed(world_size=2)
def test_calls_have_the_time_that_the_groups_maker_gave(rank, limit):
    with made("gloo", timeout=limit) as group:
        assert ProcessState().communicators(group).monitor.timeout == limit.total_seconds()


@pytest.mark.slow
@BACKENDS
@distributed(world_size=2)
def test_no_data_goes_by_connections_that_were_broken(rank, backend):
    elsewhere = torch.device("meta")  # for which the group has no backend
    with made(backend) as group:
        check_works(group, backend)
        comms, store = ProcessState().communicators(group), group.get_group_store()
        before = comms.data(elsewhere)
        assert before is comms.control
        if rank == 1:
            store.wait(["rank 0 gave up"])
        with pytest.raises(CollectiveTimeout):
            easydist.gather(rank, group=group, timeout=0.2 if rank == 0 else 20)
        if rank == 0:
            store.set("rank 0 gave up", "")
        check_works(group, backend)
        assert comms.data(elsewhere) is comms.control is not before


@pytest.mark.slow
@distributed(world_size=2)
def test_the_announcements_of_a_meeting_are_dropped_once_the_ranks_are_connected(rank):
    with made("gloo") as group:
        check_works(group, "gloo")
        monitor, store = ProcessState().communicators(group).monitor, group.get_group_store()
        known = set(monitor._logs)
        for attempt in range(3):
            if rank == 1:
                store.wait([f"rank 0 gave up {attempt}"])
            with pytest.raises(CollectiveTimeout):
                easydist.gather(rank, group=group, timeout=0.2 if rank == 0 else 20)
            if rank == 0:
                store.set(f"rank 0 gave up {attempt}", "")
            check_works(group, "gloo")
        assert set(monitor._logs) - known <= {"reports/log", "who"}


@pytest.mark.slow
@distributed(world_size=3)
def test_large_data_goes_with_the_small_where_one_rank_gets_no_more_memory(rank):
    with made("shm") as group, pytest.MonkeyPatch.context() as patch:
        assert easydist.gather(rank, group=group).tolist() == [0, 1, 2]
        if rank == 2:
            patch.setattr(Segment, "attach", refuse)
        for _ in range(2):
            check_works(group, "shm")
        comms = ProcessState().communicators(group)
        assert comms.cpu(1 << 30) is comms.control


@distributed(world_size=4)
def test_hosts_stand_in_the_order_of_their_lowest_ranks(rank):
    """Ranks 0 and 2 are on one host, where rank 2 cannot attach, and ranks 1 and 3 on another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {rank % 2}")
        if rank == 2:
            patch.setattr(Segment, "attach", refuse)
        comms = ProcessState().communicators().met()
    assert isinstance(comms.control.backend, Hierarchical)
    assert comms._hosts == [[0], [1, 3], [2]]
    assert easydist.gather(rank).tolist() == [0, 1, 2, 3]


@distributed(world_size=1)
def test_two_threads_that_come_first_get_the_same():
    """Else neither would know of the other's calls."""
    over, arrived, go_on, found = known.over, threading.Event(), threading.Event(), []

    def slowly(group):
        arrived.set()
        assert go_on.wait(20)
        return over(group)

    with made("gloo") as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "over", slowly)
        threads = [threading.Thread(target=lambda: found.append(known.of_group(group))) for _ in range(2)]
        threads[0].start()
        assert arrived.wait(20)
        arrived.clear()
        threads[1].start()
        assert not arrived.wait(0.1)  # it waits for the first
        go_on.set()
        for thread in threads:
            thread.join(20)
        assert found[0] is found[1]


@pytest.mark.parametrize(("number", "advises"), [(errno.ENOSPC, True), (errno.ENOMEM, False), (errno.EFBIG, False)])
def test_only_where_dev_shm_is_full_the_warning_advises_to_enlarge_it(number, advises, caplog):
    sharing._warn(f"rank 0 has no room ({OSError(number, os.strerror(number))})")
    (said,) = [one.getMessage() for one in caplog.records]
    assert ("--shm-size" in said) == advises
    assert "EASYDIST_SHM=0" in said
