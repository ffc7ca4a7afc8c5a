"""Errors about connections, which say that a rank is missing, and errors of a machine that cannot connect at all."""

import threading
from datetime import timedelta

import launching
import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

import easydist
from easydist.errors import CollectiveTimeout
from easydist.groups import connecting
from easydist.groups.connecting import is_of_connections, registered_group
from easydist.liveness.background import NoAnswerError
from easydist.liveness.monitor import Monitor
from easydist.testing import distributed


def error_of(store):
    with pytest.raises(RuntimeError) as caught:
        ProcessGroupGloo(store, 0, 2, timedelta(milliseconds=50))
    return caught.value


def served():
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def ended():
    """Return a store whose server has ended."""
    server = served()
    store = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    del server
    return store


@pytest.mark.parametrize("store", [HashStore, served, ended])
def test_a_missing_rank_and_a_store_that_has_ended_are_errors_of_connections(store):
    assert is_of_connections(error_of(PrefixStore("group", store())))


def test_a_network_interface_that_does_not_exist_is_none(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    error = error_of(HashStore())
    assert "nowhere" in str(error)
    assert not is_of_connections(error)
    assert not is_of_connections(RuntimeError("Distributed package doesn't have NCCL built in"))


def test_after_a_time_limit_nobody_waits_for_the_reason(monkeypatch):
    def make():
        raise NoAnswerError("the store has not answered within 1 s")

    monitor = Monitor(0, 2, 1.0)
    monitor.begin("the group", "here")
    monkeypatch.setattr(connecting.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(CollectiveTimeout):
        connecting.connect(make, 1.0, monitor)


@distributed(world_size=2)
def test_two_threads_connect_groups_in_one_store_at_once(rank):
    """Not in the order of the other rank; torch waits in the store: one wait at a time for a connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = easydist.broadcast_object_list([server and server.port])[0]
    store = server or TCPStore("127.0.0.1", port, is_master=False)
    limit, made = timedelta(seconds=launching.within(10)), []

    def connect(name):
        made.append(registered_group([0, 1], rank, "gloo", PrefixStore(name, store), name, limit))

    if rank == 0:
        threads = [threading.Thread(target=connect, args=(name,)) for name in ("one", "other")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        connect("other")
        connect("one")
    assert len(made) == 2
    for group in sorted(made, key=lambda group: group.group_name):
        dist.destroy_process_group(group)
    easydist.wait_for_everyone()
