"""Operations over gloo after a rank has broken its connections."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from easydist.comms import new_comm
from easydist.groups.connecting import gloo_beside
from easydist.liveness import keepalive
from easydist.state import communicators
from easydist.testing import distributed
from easydist.transport.backends.waits import GlooMessage, _Lookout


def notice(gloo, peer):
    """Wait until gloo has noticed that the connection to a rank broke."""
    with pytest.raises(RuntimeError):
        gloo.recv(torch.zeros(1), peer).wait()


@distributed(world_size=3)
def test_who_finds_a_connection_broken_sends_nothing_to_the_others_either(rank):
    store = dist.group.WORLD.get_group_store()
    gloo = gloo_beside(dist.group.WORLD, PrefixStore("broken", store), 30.0)
    dist.barrier()  # a rank may be connected before the others are
    mine, parts = torch.ones(1), [torch.zeros(1) for _ in range(3)]
    if rank == 0:  # it comes after rank 2 has given up; messages to rank 1 go first
        store.wait(["has_left"])
        notice(gloo, 2)
        with pytest.raises(RuntimeError):
            gloo.all_gather_v(parts, mine)
        gloo.disconnect()
    else:
        work = gloo.all_gather_v(parts, mine)
        from_late, from_other = [message.work for message in work._part._messages if message.is_recv]
        if rank == 2:
            store.wait(["has_come"])
            gloo.disconnect()
            store.set("has_left", "")
        else:
            from_other.wait()
            store.set("has_come", "")
            with pytest.raises(RuntimeError):
                from_late.wait()
    dist.barrier()


SIZES = 1 << 15, 1 << 16, 1 << 19


@pytest.mark.parametrize("hosts", ["00", "01"])
@distributed(world_size=2)
def test_a_message_to_another_host_may_be_half_sent_sooner(hosts, rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {hosts[rank]}")
        patch.setenv("EASYDIST_SHM", "0")
        of_verbs = communicators().met().control.backend
        of_users = new_comm("gloo", torch.device("cpu"), "main").unsafe_get_backend()
    for gloo in (of_verbs, of_users):
        sends = [gloo.send(torch.zeros(n, dtype=torch.uint8), 1 - rank) for n in SIZES]
        recvs = [gloo.recv(torch.zeros(n, dtype=torch.uint8), 1 - rank) for n in SIZES]
        for work in recvs + sends:
            work.wait()
        assert [work.is_large for work in sends] == [False, hosts == "01", True]


MOVING, STILL = 1 << 20, 1 << 10
LEFT, STAYS = {("a", 1, "b", 2): 0}, {}


@pytest.mark.parametrize(
    ("first", "each", "after", "looks"), [(LEFT, MOVING, 5, None), (LEFT, STILL, 5, 2), (STAYS, STILL, 5, 5)]
)
def test_a_receive_is_looked_at_only_if_nothing_arrives_any_more(first, each, after, looks, monkeypatch):
    """A look would drop what a sender that ended has left under way; broken connections and silent hosts are seen."""
    here, arrived = ("a", 1, "c", 3), itertools.count(step=each)
    rows = itertools.chain([first | {here: 0}], ({here: nbytes} for nbytes in arrived))
    monkeypatch.setattr(keepalive, "received", lambda: next(rows))
    monkeypatch.setattr(keepalive, "AFTER", after)
    lookout = _Lookout(
        SimpleNamespace(recv_alone=None, monitor=None), GlooMessage(None, 1, is_recv=True, is_large=True)
    )
    found = []
    monkeypatch.setattr(_Lookout, "_look", lambda self: found.append(True))
    for look in range(1, 10):
        lookout._look_at = 0.0
        lookout()
        assert bool(found) == (looks is not None and look >= looks)
