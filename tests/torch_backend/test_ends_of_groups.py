"""Groups of ``easydist_shm``: making, failures, ends and renewal."""

import os
import re
import signal
import sys
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import launching
import pytest
import torch
import torch.distributed as dist

import easydist
from easydist.errors import CollectiveTimeout, RemoteError
from easydist.liveness.monitor import Monitor
from easydist.liveness.page import PeerPage
from easydist.process_group import NAME
from easydist.shm.segment import Segment
from easydist.testing import distributed
from easydist.torch_backend.group import SharedMemoryGroup
from easydist.transport.backends import shm
from easydist.transport.backends.native import over
from easydist.transport.backends.solo import Solo


def group(**options):
    return dist.new_group(backend=NAME, **options)


def test_a_group_that_torch_does_not_know_yet_names_no_device():
    made = SharedMemoryGroup(Solo(), dist.HashStore(), timedelta(seconds=1), Monitor(0, 1, 1.0))
    assert made._device_types == []  # else torch 2.15 would ask C++ for its backend, before the group is made


@distributed(world_size=2)
def test_devices(rank):
    made = group()
    assert made._device_types == [torch.device("cpu")]
    assert dist.distributed_c10d._device_capability(made) == ["cpu"]
    assert made._get_backend(torch.device("cpu")) is made
    with pytest.raises(RuntimeError, match="easydist_shm serves the CPU only, got cuda"):
        made._get_backend(torch.device("cuda"))
    assert over(made) is over(made, "cuda") is None


@pytest.mark.slow
@distributed(world_size=3)
def test_timeout_names_who_is_missing(rank):
    made = group()
    dist.barrier(group=made)
    made.set_timeout(timedelta(seconds=1))
    if rank < 2:
        with pytest.raises(
            CollectiveTimeout, match=r"(?s)all_reduce: 1 of 3 ranks did not.*rank 2: .*is alive"
        ) as info:
            dist.all_reduce(torch.ones(3), group=made)
        assert info.value.missing == (2,)
    dist.barrier()
    with pytest.raises(CollectiveTimeout, match=r"all_reduce: 1 of 3 ranks did not come"):
        dist.barrier(group=made)


ALONE = {
    "scatter": (lambda made: dist.scatter(torch.ones(1), None, group=made, group_src=1), (1, 2)),
    "broadcast": (lambda made: dist.broadcast(torch.ones(1), group=made, group_src=1), (1, 2)),
    "all_reduce": (lambda made: dist.all_reduce(torch.ones(1), group=made), (1, 2)),
    "recv": (lambda made: dist.recv(torch.ones(1), group=made, group_src=1), (1,)),
}
"""Operations of rank 0 alone, and the ranks for which it then waits in vain."""


@pytest.mark.slow
@pytest.mark.parametrize("operation", ALONE)
@distributed(world_size=3)
def test_ranks_that_exchanged_messages_before_are_missing_where_they_do_not_come(operation, rank):
    made, (call, missing) = group(), ALONE[operation]
    for _ in range(3):  # through pipes, and of some ranks only: neither of them has numbers that all ranks share
        dist.all_to_all_single(torch.empty(3), torch.ones(3), group=made)
        if rank == 1:
            dist.send(torch.ones(1), group=made, group_dst=2)
        elif rank == 2:
            dist.recv(torch.ones(1), group=made, group_src=1)
    if rank == 0:
        made.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(CollectiveTimeout, match=rf"{operation}: {len(missing)} of 3 ranks did not come") as info:
            call(made)
        assert info.value.missing == missing
        assert re.findall(r"rank (\d): missing; last seen in (?:send|recv)", str(info.value)) == [*map(str, missing)]
    dist.barrier()


def coalesced(made):
    with dist._coalescing_manager(made):
        dist.all_reduce(torch.ones(1), group=made)


NESTED = {
    "reduce_scatter_single": lambda made: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), group=made),
    "all_reduce": coalesced,
}
"""Calls of torch that lead through files of other packages before they reach the group."""


@pytest.mark.parametrize("operation", NESTED)
@distributed(world_size=2)
def test_the_place_of_a_call_is_a_line_of_the_caller(operation, rank):
    made = group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 has new names
        NESTED[operation](made)
    (place,) = [one.place for one in PeerPage.find(os.getpid()).entries() if f"{operation}, call 2" in one.place]
    assert __file__ in place


@pytest.mark.slow
@pytest.mark.parametrize("src", [1, None])
@distributed(world_size=2)
def test_a_rank_has_come_once_a_part_of_its_message_has(src, rank):
    made, store = group(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        sent = dist.isend(torch.ones(4_000_000), group=made, group_dst=0)  # its first parts wait for the receiver
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CollectiveTimeout):
            sent.wait()
        return
    pid, filled = int(store.get("pid")), torch.zeros(4_000_000)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass
    made.set_timeout(timedelta(seconds=0.5))
    try:
        with pytest.raises(CollectiveTimeout, match="recv: all ranks came, but their data did not arrive") as info:
            dist.recv(filled, group=made, group_src=src)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert info.value.missing == ()
    assert filled[0] == 1
    assert re.search(r"rank 1: has begun it, but waits for nothing; .* is alive but stopped", str(info.value))


@distributed(world_size=2)
def test_a_failed_operation_is_under_way_no_more(rank):
    made = group()
    dist.barrier(group=made)
    made.set_timeout(timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(3), group=made)
    dist.barrier()
    if rank == 1:  # it hears of that before it joins the operation
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(3), group=made)
    told = [one for one in PeerPage.find(os.getpid()).entries() if "all_reduce, call 3" in one.place]
    assert [one.is_in_call for one in told] == [False]  # else the others take a body that follows for one that waits
    dist.barrier()


@distributed(world_size=2)
def test_abort_ends_the_waits_of_others(rank):
    made = group()
    dist.barrier(group=made)
    if rank == 0:
        threading.Timer(0.1, made.abort).start()
        with pytest.raises(RuntimeError, match="closed"):
            dist.recv(torch.ones(1), 1, group=made)
    else:
        with pytest.raises(RemoteError, match="rank 0 has aborted"):
            dist.barrier(group=made)
    dist.barrier()


@distributed(world_size=2)
def test_a_forked_child_does_not_abort_the_group_of_its_parent(rank):
    made = group()
    dist.barrier(group=made)
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gloo has threads
            child = os.fork()
        if not child:
            try:
                dist.all_reduce(torch.ones(1), group=made)
            except RuntimeError as error:
                made.abort()
                os._exit(not str(error).startswith("this process is a child of a rank of the group"))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(tensor := torch.ones(1), group=made)  # rank 1 has waited here meanwhile
    assert tensor.item() == 2


@distributed(world_size=2)
def test_ranks_that_do_not_share_memory(rank):
    before = os.environ.get("EASYDIST_SHM")
    os.environ["EASYDIST_SHM"] = str(rank)
    try:
        with pytest.raises(RuntimeError, match=r"rank 0 on .*, rank 1 on .*\. Use gloo: init_process_group\('gloo'\)"):
            group()
    finally:
        del os.environ["EASYDIST_SHM"]
        if before is not None:
            os.environ["EASYDIST_SHM"] = before
    dist.barrier()


REASONS = {
    "create": r"rank 0 has no room for \d+ bytes in /dev/shm \(refused\)",
    "attach": r"rank 1 cannot attach the memory of rank 0 \(refused\)",
}


def refuse(*args):
    raise OSError("refused")


@pytest.mark.parametrize("step", REASONS)
@distributed(world_size=3)
def test_one_rank_without_memory_fails_the_group_on_all(rank, step):
    with pytest.MonkeyPatch.context() as patch:
        if rank == list(REASONS).index(step):
            patch.setattr(Segment, step, refuse)
        text = rf"^easydist_shm needs memory that all ranks share: {REASONS[step]}\. Use gloo: "
        with pytest.raises(RuntimeError, match=text):
            group()
    dist.barrier()


def created(store, rank, size, seconds):
    """Create a group as torch does."""
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.global_ranks_in_group = timedelta(seconds=seconds), []
    return dist.distributed_c10d.Backend._plugins[NAME.upper()].creator_fn(options, None)


@distributed(world_size=2)
def test_rank_that_does_not_come(rank):
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"init_process_group: 1 of 2 ranks did not come within 0\.2 s"):
            created(dist.HashStore(), 0, 2, 0.2)
    dist.barrier()


@distributed(world_size=[2, 3])
def test_ranks_meet_after_an_attempt_to_which_not_all_came(rank, world_size):
    store = dist.PrefixStore("again", dist.group.WORLD.get_group_store())
    if rank != 1:
        with pytest.raises(CollectiveTimeout, match="rank 1: missing"):
            created(store, rank, world_size, 0.2)
    dist.barrier()
    made = created(store, rank, world_size, launching.within(20))
    made.allreduce(total := torch.ones(1)).wait()
    assert total.item() == world_size
    made.shutdown()


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
import easydist.process_group
rank = int(os.environ["RANK"])
for again in range(2):  # the same store and the same names
    dist.init_process_group("easydist_shm")
    dist.all_reduce(tensor := torch.tensor([rank]))
    assert tensor.tolist() == [3]
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
    assert dist.get_backend(mesh["tp"].get_group()) == "easydist_shm"
    assert easydist.gather(torch.tensor([rank])).tolist() == [0, 1, 2]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    whole = {} if rank else {"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model.module, whole, options=options)
    assert model.module.weight.tolist() == [[7, 7]]
    checkpoint.async_save(state := {"x": torch.ones(2)}, checkpoint_id=sys.argv[1]).result()
    checkpoint.load(state := {"x": torch.zeros(2)}, checkpoint_id=sys.argv[1])
    assert state["x"].tolist() == [1, 1]
    dist.barrier()
    if not again:
        dist.destroy_process_group()
if rank == 2:
    os._exit(3)
if rank == 1:  # asks until the end instead of waiting
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    print(work.exception())
    dist.destroy_process_group()
    sys.exit()
try:
    dist.all_reduce(tensor)
except easydist.PeerLostError as error:
    print(error)
    dist.destroy_process_group()
"""


@pytest.mark.battery
@pytest.mark.slow
def test_default_group_under_a_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "WORLD_SIZE": 3, "OMP_NUM_THREADS": 1}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": launching.ROOT}
    command = (sys.executable, "-W", "ignore", script, tmp_path / "saved")
    processes = [launching.start(*command, env=os.environ | variables | {"RANK": rank}) for rank in range(3)]
    told = launching.finished(*processes)
    assert [process.returncode for process in processes] == [0, 0, 3], told
    for text, _ in told[:2]:
        assert re.search(r"rank 2 is lost: process \d+ on \S+ ended \(exit status 3\)", text)


ENDED = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
import easydist.process_group
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3)
dist.init_process_group("easydist_shm", store=store, rank=rank, world_size=3)
if rank == 1:
    os._exit(3)
limit = timedelta(seconds=float(sys.argv[3]))
try:
    dist.new_group([2, 1, 0], backend="easydist_shm", timeout=limit)
except easydist.PeerLostError as error:
    print(error.rank, error)
survivors = dist.new_group([2, 0], backend="easydist_shm", timeout=limit, use_local_synchronization=True)
dist.all_reduce(tensor := torch.ones(1), group=survivors)
assert tensor.item() == 2
"""


@pytest.mark.slow
def test_a_new_group_does_not_wait_for_a_process_that_has_ended(tmp_path):
    command, given = (launching.fork(), "-c", ENDED), (tmp_path / "store", launching.within(20))
    processes = [launching.start(*command, rank, *given, env=os.environ | launching.OWN) for rank in range(3)]
    told = launching.finished(*processes)
    assert [process.returncode for process in processes] == [0, 3, 0], told
    for text, _ in told[::2]:
        assert re.search(r"^1 init_process_group: rank 1 is lost: process \d+ on \S+ ended", text)


RAISED = """
import sys, torch, torch.distributed as dist
import easydist, easydist.process_group
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("easydist_shm", store=store, rank=rank, world_size=2)
easydist.wait_for_everyone()  # from now on an exception that ends a rank is reported
dist.barrier()
data = torch.full((3,), float(rank))
if rank == 1:
    dist.send(data, dst=0)
    dist.broadcast(data, src=1)
    raise ValueError("bad batch")
try:
    easydist.wait_for_everyone()
except easydist.RemoteError:
    dist.recv(data, src=1)
    print(data.tolist())
    dist.broadcast(data.zero_(), src=1)
    print(data.tolist())
try:
    dist.barrier()
except easydist.RemoteError as error:
    print(error)
"""


@pytest.mark.slow
def test_data_that_a_rank_had_sent_before_an_exception_ended_it_still_arrives(tmp_path):
    processes = [
        launching.start(launching.fork(), "-c", RAISED, rank, tmp_path / "store", env=os.environ | launching.OWN)
        for rank in range(2)
    ]
    told = launching.finished(*processes)
    assert [process.returncode for process in processes] == [0, 1], told
    one, other, *error = told[0][0].splitlines()
    assert one == other == "[1.0, 1.0, 1.0]"
    assert error[:2] == [
        "barrier: rank 1 ended with an exception while rank 0 waited for it",
        "  rank 1: ValueError: bad batch",
    ]


@distributed(world_size=3)
def test_a_group_is_renewed_in_place(rank):
    made = group()
    for place in ("renewed", "renewed again"):
        if rank == 1:
            made.abort()
        else:
            with pytest.raises(RemoteError, match="rank 1 has aborted the group"):
                dist.all_reduce(torch.ones(1), group=made)
        with pytest.raises((RuntimeError, RemoteError)):
            dist.barrier(made)
        made.renew(dist.PrefixStore(place, dist.distributed_c10d._get_default_store()))
        dist.all_reduce(tensor := torch.ones(1), group=made)
        assert tensor.item() == 3
    assert easydist.gather(torch.tensor([rank]), group=made).tolist() == [0, 1, 2]


@distributed(world_size=1)
def test_verbs_take_a_group_of_one(rank):
    made = group()
    made.renew(dist.HashStore())
    assert easydist.gather({"x": torch.ones(2)}, group=made)["x"].tolist() == [1, 1]


@distributed(world_size=2)
def test_ctrl_c_as_an_operation_begins_is_told_to_a_rank_that_waits_in_it(rank):
    made, data = group(), torch.ones(300_000)
    dist.barrier(group=made)
    if rank == 1:
        work = dist.all_reduce(data, group=made, async_op=True)
        dist.barrier()
        with pytest.raises(RemoteError, match="rank 0 was interrupted"):
            work.wait()
    else:
        dist.barrier()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm, "_reduce_share", interrupt)  # before the wait: the data of rank 1 are there already
            with pytest.raises(KeyboardInterrupt) as info:
                dist.all_reduce(data, group=made)
        signal.signal(signal.SIGINT, before)
        assert "_begin" in [entry.name for entry in info.traceback]
    dist.barrier()


def interrupt(*args):
    os.kill(os.getpid(), signal.SIGINT)
