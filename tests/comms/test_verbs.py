"""Verbs with a communicator as ``group=``: its time limit and theirs, and the errors of works and of making one."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import free_port, within

import easydist
from easydist import CollectiveTimeout, DisagreementError, PeerLostError
from easydist.comms import CommTimeout, ReduceOp, new_comm, wrap
from easydist.testing import distributed

CPU = torch.device("cpu")
on_both = pytest.mark.parametrize("backend", ["shm", "gloo"])


def made(backend, seconds):
    return new_comm(backend, CPU, "main", timeout=timedelta(seconds=seconds))


@pytest.mark.slow
@pytest.mark.parametrize("has_met", [False, True])
@pytest.mark.parametrize("limit", ["of the call", "of the communicator"])
@on_both
@distributed(world_size=2)
def test_a_verb_over_a_communicator_ends_at_its_limit(rank, backend, limit, has_met):
    comm = made(backend, within(30))
    if has_met:
        easydist.gather(rank, group=comm)
    if limit == "of the communicator":
        comm.set_timeout(timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"^gather: 1 of 2 ranks .* within 0\.3\d* s"):
            easydist.gather(rank, group=comm, timeout=0.3 if limit == "of the call" else None)
    dist.barrier()


@pytest.mark.slow
@on_both
@distributed(world_size=2)
def test_works_under_way_when_another_one_fails_fail_with_its_type(rank, backend):
    comm = made(backend, within(30))
    comm.barrier(False)
    if rank == 0:
        limit = timedelta(seconds=0.2)
        works = [comm.all_reduce(torch.ones(1), ReduceOp.SUM, True, timeout=limit) for _ in range(3)]
        for work in works[::-1]:
            with pytest.raises(CommTimeout, match="rank 1 did not come") as error:
                work.wait()
            assert error.value.missing == (1,)
    dist.barrier()


def test_a_communicator_whose_store_is_not_served_names_the_rank_that_has_not_come(monkeypatch):
    port = free_port()  # nobody listens there
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    head = rf"the rendezvous store at 127\.0\.0\.1:{port} was not reached within 0\.1 s"
    text = rf"^new_comm 'main': {head}\n  rank 0: missing; it serves"
    with pytest.raises(CommTimeout, match=text) as error:
        made("auto", 0.1)
    assert error.value.missing == (0,)


def test_rank_0_says_why_a_communicator_has_no_store(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = "127.0.0.1", other.getsockname()[1]
        for (address, port), reason in (
            (taken, "because the port is in use"),
            (("192.0.2.1", free_port()), "or cannot reach it there"),
        ):
            for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
                monkeypatch.setenv(name, str(value))
            text = rf"^new_comm 'main': rank 0 cannot serve the store at {address}:{port}, {reason}"
            with pytest.raises(CommTimeout, match=text):
                made("auto", 0.1)


@pytest.mark.slow
@distributed(world_size=[2, 3], timeout=within(60))
def test_first_calls_that_do_not_match_are_an_error_at_once(rank):
    """The ranks have not met in a verb yet, so they see one another's waits in the store only."""
    comm = made("gloo", within(60))
    with pytest.raises(DisagreementError, match="ranks wait for one another, in calls that do not match"):
        easydist.recv_object(1, group=comm) if rank == 0 else easydist.gather(rank, group=comm)


@pytest.mark.slow
@distributed(world_size=[2, 3])
def test_a_finalize_that_gives_up_says_why(rank):
    """Its own part of the operation has come, so that the others can end that one."""
    comm = made("shm", within(30))
    if rank == 0:
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, True)
        comm.set_timeout(timedelta(seconds=0.2))
        comm.finalize()
    dist.barrier()
    if rank != 0:
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, False)
        with pytest.raises(CommTimeout, match=r"in time for another rank.* \(finalize in the communicator 'main'"):
            comm.barrier(False)
    dist.barrier()


@on_both
@distributed(world_size=2)
def test_verbs_over_a_finalized_communicator_say_so(rank, backend):
    """Also that of a backward pass, whose graph still knows the group."""
    comm, unused = made(backend, within(60)), made(backend, within(60))
    x = torch.ones(2, requires_grad=True)
    loss = easydist.gather(x, differentiable=True, group=comm).sum()
    for one in (comm, unused):
        one.finalize()
    for _ in range(2):
        for call in (loss.backward, lambda: easydist.gather(x, group=comm)):
            with pytest.raises(
                PeerLostError, match=rf"rank {rank} has left the group: .* has destroyed or finalized it"
            ):
                call()
        with pytest.raises(RuntimeError, match=r"^TorchComm 'main' not initialized: it has been finalized"):
            easydist.gather(x, group=unused)


@distributed(world_size=[2, 3])
def test_a_wrapped_communicator_says_how_to_replace_it(rank):
    comm = wrap(dist.new_group())
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"is broken\. Make a new one; over a process group, wrap what easydist"):
            comm.recv(torch.ones(1), 1, False, timeout=timedelta(seconds=0.1))
    dist.barrier()


def waits_in(name, comm, other):
    return {
        "send": lambda: easydist.send_object(1, group_dst=other, group=comm),
        "receive": lambda: easydist.recv_object(group_src=other, group=comm),
        "gather": lambda: easydist.gather(torch.ones(1), group=comm),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("calls", [("receive", "receive"), ("send", "gather"), ("gather", "receive")])
@on_both
@distributed(world_size=2, timeout=within(60))
def test_calls_that_do_not_match_end_the_verbs_over_a_communicator(rank, backend, calls):
    comm = made(backend, within(60))
    wait = waits_in(calls[rank], comm, 1 - rank)
    with pytest.raises(DisagreementError, match=r"do not match|different calls|wait for one another"):
        wait()
    with pytest.raises(DisagreementError, match=r"Verbs can no longer use this communicator\. Make a new one"):
        easydist.gather(rank, group=comm)
    other = made(backend, within(60))
    assert easydist.gather_object(rank, group=other) == [0, 1]
