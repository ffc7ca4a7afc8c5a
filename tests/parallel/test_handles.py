"""Handles of messages between two ranks: waited for, polled, dropped, refused."""

import contextlib
import gc
import os
import signal
import weakref

import launching
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from coordinators import made, text_of
from groups import of_all

import easydist
from easydist import DisagreementError
from easydist.testing import distributed

LARGE = 70_000


@contextlib.contextmanager
def over_memory(rank):
    """A coordinator of two ranks that share memory, whatever the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", "1")
        with made(rank, 2) as group:
            yield group


def connect_again(rank, group):
    """Let a call fail, and the next one work."""
    for late in (0, 1):  # rank 1 comes when rank 0 has given up
        if rank == late:
            with pytest.raises(easydist.CollectiveTimeout):
                easydist.gather(torch.ones(1), group=group, timeout=0.05 if rank == 0 else None)
        of_all(None)
    assert group.all_gather(torch.tensor([rank])).tolist() == [0, 1]


@distributed(world_size=2)
def test_numpy_scalars_are_there_when_irecv_returns(rank):
    """They are copies, so data that arrives later would not reach those that the caller holds."""
    with made(rank, 2) as group:
        if rank == 0:
            group.send_tensor_dict([{"step": np.int64(7)}, torch.ones(LARGE), (np.float32(1.5),)])
        else:
            tree, handles, after = group.irecv_tensor_dict()
            held = [tree[0]["step"], tree[2][0]]
            for step in [*(handle.wait for handle in handles), *after]:
                step()
            assert held == [7, 1.5]
            assert [tree[0]["step"], tree[2][0], tree[1].sum()] == [7, 1.5, LARGE]


@distributed(world_size=2)
def test_handles_are_waited_for_twice_or_dropped(rank):
    with made(rank, 2) as group:
        data = {"x": torch.arange(LARGE), "y": torch.ones(3), "n": 5}
        if rank == 0:
            handle, _ = group.isend_tensor_dict(data)
            second, _ = group.isend_tensor_dict({"small": 1})
            second.wait()
            for _ in range(3):
                handle.wait()
            assert handle.is_completed()
            assert second.is_completed()
        else:
            tree, handles, after = group.irecv_tensor_dict()
            assert tree.keys() == data.keys()
            for handle in handles * 2:
                handle.wait()
            for finish in after:
                finish()
            assert torch.equal(tree["x"], data["x"])
            assert tree["n"] == 5
            assert group.irecv_tensor_dict() == ({"small": 1}, [], [])
        peer, mine = 1 - rank, {"x": torch.full((LARGE,), rank)}
        handles = group.isend_tensor_dict(mine, peer)  # both send first, as neither waits
        assert group.recv_tensor_dict(peer)["x"][0] == peer
        handles[0].wait()


@distributed(world_size=2)
def test_tensors_may_be_overwritten_after_all_handles_but_the_first(rank):
    """vLLM's workers wait for ``handles[1:]``, as the first one is that of the structure there."""
    with made(rank, 2) as group:
        for step in range(5):
            if rank == 0:
                hidden = torch.full((LARGE,), step)
                for handle in group.isend_tensor_dict({"hidden": hidden})[1:]:
                    handle.wait()
                hidden.fill_(-1)
            else:
                tree, handles, after = group.irecv_tensor_dict()
                for finish in [*(handle.wait for handle in handles), *after]:
                    finish()
                assert tree["hidden"].unique().tolist() == [step]


@distributed(world_size=2)
def test_a_handle_from_before_the_ranks_connected_again_says_so(rank):
    with over_memory(rank) as group:  # over gloo the small one may have arrived
        handles = [group.isend_tensor_dict({"x": torch.ones(n)})[0] for n in (3, LARGE)] if rank == 0 else []
        connect_again(rank, group)
        for handle in handles * 2:
            with pytest.raises(
                easydist.RemoteError, match="isend_tensor_dict: the message to or from rank 1 was under"
            ):
                handle.wait()
        if rank == 0:
            group.send_tensor_dict({"x": "again"})
        else:
            assert group.recv_tensor_dict() == {"x": "again"}


@distributed(world_size=2)
def test_a_message_that_had_arrived_before_the_ranks_connected_again_has_arrived(rank):
    with made(rank, 2) as group:
        if rank == 0:
            handle, _ = group.isend_tensor_dict({"x": torch.ones(LARGE)})
            group.send_tensor_dict({"x": torch.ones(3)})
        else:
            tree, (handle,), _ = group.irecv_tensor_dict()
            assert group.recv_tensor_dict()["x"].tolist() == [1, 1, 1]
        while not handle.is_completed():
            pass
        of_all(None)
        connect_again(rank, group)
        handle.wait()
        if rank == 1:
            assert tree["x"].sum() == LARGE


@distributed(world_size=2, timeout=launching.within(20))
def test_a_refusal_that_nobody_read_before_the_ranks_connected_again_is_not_waited_for(rank):
    """Its text went with the connection, unless it came by gloo."""
    with made(rank, 2) as group:
        if rank == 0:
            handle, _ = group.isend_tensor_dict({"x": torch.ones(3)})
        else:
            with pytest.raises(DisagreementError):
                group.recv_object(0)
        of_all(None)
        connect_again(rank, group)
        if rank == 0:
            with pytest.raises(
                (easydist.RemoteError, DisagreementError), match=r"was under way when|called recv_object"
            ):
                handle.wait()
            group.send_object("next", 1)
        else:
            assert group.recv_object(0) == "next"


@distributed(world_size=2)
def test_refusals_of_dropped_messages_are_not_those_of_others(rank):
    with made(rank, 2) as group:
        calls = [group.recv_object, lambda src: group.recv(torch.Size([1]), torch.float32, src)] * 3
        if rank == 0:
            for step in range(5):
                group.isend_tensor_dict({"step": step})
            handle, _ = group.isend_tensor_dict({"x": torch.ones(LARGE)})
            assert text_of(handle.wait).startswith("DisagreementError: recv: rank 0 called send_tensor_dict")
        else:
            for call in calls:
                assert "rank 0 called send_tensor_dict, rank 1 called recv" in text_of(lambda call=call: call(0))


@pytest.mark.slow
@distributed(world_size=2)
def test_a_hundred_dropped_handles_keep_nothing(rank):
    with made(rank, 2) as group:
        known = []
        for step in range(100):
            if rank == 0:
                tensor = torch.full((LARGE,), step)
                known.append(weakref.ref(tensor))
                group.isend_tensor_dict({"x": tensor, "step": step})
                del tensor
            else:
                got = group.recv_tensor_dict()
                assert (got["step"], got["x"][-1]) == (step, step)
        if rank == 0:
            last, _ = group.isend_tensor_dict({})
            last.is_completed()  # from now on the thread that waits for dropped ones waits for it, too
            last.wait()
            gc.collect()
            assert [ref() for ref in known] == [None] * 100
        else:
            assert group.recv_tensor_dict() == {}


@distributed(world_size=2)
def test_a_refusal_keeps_no_message(rank):
    with over_memory(rank) as group:
        with pytest.raises(DisagreementError):
            group.recv(torch.Size([3]), torch.float32, 0) if rank else group.send(torch.ones(2), 1)
        box = group.communicators.mailbox(1 - rank)
        assert [one.body.untyped_storage().nbytes() for one in box.refusals.values()] == [0] * (1 - rank)


POLLING = """
import os, time, torch.distributed as dist
from easydist import PeerLostError
from easydist.parallel import GroupCoordinator
dist.init_process_group("gloo")
group = GroupCoordinator([[0, 1]], rank := dist.get_rank(), "gloo", False)
if rank:
    group.recv_tensor_dict(0)
    os._exit(3)
group.send_tensor_dict({"x": 1}, 1)
handle, _ = group.isend_tensor_dict({"x": 2}, 1)
while not handle.is_completed():
    time.sleep(0.01)
try:
    handle.wait()
except PeerLostError as error:
    print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_handle_that_is_polled_ends_with_its_receiver(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(POLLING)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": launching.ROOT}
    command = (launching.fork(), script)
    processes = [launching.start(*command, env=os.environ | variables | {"RANK": rank}) for rank in range(2)]
    told = launching.finished(*processes)
    assert [process.returncode for process in processes] == [0, 3], told
    assert "rank 1 is lost" in told[0][0]


@pytest.mark.slow
@distributed(world_size=2)
def test_what_a_rank_has_sent_before_it_left_is_waited_for_while_it_is_stopped(rank):
    pid, data = easydist.gather(os.getpid()).tolist()[0], torch.arange(1 << 24)
    with over_memory(rank) as group:
        if rank == 0:
            group.isend_tensor_dict({"x": data}, 1)
            group.destroy()
            os.kill(pid, signal.SIGSTOP)
            return
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            pass
        found, handles, after = group.irecv_tensor_dict(0)
        assert not any(handle.is_completed() for handle in handles)
        os.kill(pid, signal.SIGCONT)
        for step in [handle.wait for handle in handles] + after:
            step()
        assert torch.equal(found["x"], data)
