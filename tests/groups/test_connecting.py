"""Errors about connections, which say that a rank is missing, and errors of a machine that cannot connect at all."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from easydist.errors import CollectiveTimeout
from easydist.groups import connecting
from easydist.groups.connecting import is_of_connections
from easydist.liveness.limited import NoAnswerError
from easydist.liveness.monitor import Monitor


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
