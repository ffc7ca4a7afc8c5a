"""``init_process_group("easydist_shm")``: every operation of torch.distributed, and DDP as over gloo."""

import os
import re
import sys
import threading
import time
import warnings
import weakref
from datetime import timedelta

import launching
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import easydist
from easydist.errors import CollectiveTimeout, RemoteError
from easydist.liveness.monitor import Monitor
from easydist.process_group import NAME
from easydist.shm.segment import Segment
from easydist.testing import distributed
from easydist.torch_backend.group import SharedMemoryGroup
from easydist.transport.backends.c10d import over
from easydist.transport.backends.solo import Solo

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
MOVED = [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def group(**options):
    return dist.new_group(backend=NAME, **options)


def value(rank, dtype=torch.float32, shape=(3, 4)):
    """Small integers that differ between ranks, exact in every dtype."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 3 + rank) % 5 + 1).reshape(shape).to(dtype)


def strided(tensor):
    """The same values, not contiguous, amid memory that nobody may touch."""
    wide = torch.zeros((2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


def same(tensor):
    return tensor.clone()


LAYOUTS = pytest.mark.parametrize("layout", [same, strided, "transposed"], ids=["contiguous", "strided", "transposed"])


def laid(layout, tensor):
    return tensor.t().contiguous().t() if layout == "transposed" else layout(tensor)


def equal(got, want):
    assert got.dtype is want.dtype
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), (got, want)


@distributed(world_size=3)
def test_what_torch_says_about_the_group(rank):
    made = group(group_desc="mine")
    assert isinstance(made, SharedMemoryGroup)
    assert (dist.get_rank(made), dist.get_world_size(made), dist.get_backend(made)) == (rank, 3, NAME)
    assert made.group_desc == "mine"
    assert dist.distributed_c10d._resolve_process_group(made.group_name) is made
    assert made.name() in repr(dist.get_backend_config(made))
    pair = dist.new_group([0, 2], backend=NAME)
    if rank != 1:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2]
        dist.destroy_process_group(pair)
    alone = [dist.new_group([r], backend=NAME) for r in range(3)][rank]
    dist.all_reduce(tensor := torch.tensor([rank]), group=alone)
    assert tensor.tolist() == [rank]


@LAYOUTS
@distributed(world_size=3)
def test_moving_operations(layout, rank, world_size):
    made = group()
    for dtype in MOVED:
        mine, every = laid(layout, value(rank, dtype)), [value(r, dtype) for r in range(3)]
        empty = [laid(layout, torch.zeros(3, 4, dtype=dtype)) for _ in range(3)]
        dist.all_gather(empty, mine, group=made)
        for got, want in zip(empty, every, strict=True):
            equal(got, want)

        mine = laid(layout, value(rank, dtype))
        dist.broadcast(mine, group_src=1, group=made)
        equal(mine, every[1])

        got = [laid(layout, torch.zeros(3, 4, dtype=dtype)) for _ in range(3)] if rank == 2 else None
        dist.gather(laid(layout, value(rank, dtype)), got, dst=2, group=made)
        for one, want in zip(got or [], every, strict=False):
            equal(one, want)

        got = laid(layout, torch.zeros(3, 4, dtype=dtype))
        dist.scatter(got, [laid(layout, one) for one in every] if rank == 1 else None, src=1, group=made)
        equal(got, every[rank])

        got = [laid(layout, torch.zeros(3, 4, dtype=dtype)) for _ in range(3)]
        dist.all_to_all(got, [laid(layout, value(rank + 3 * s, dtype)) for s in range(3)], group=made)
        for s, one in enumerate(got):
            equal(one, value(s + 3 * rank, dtype))

        got = laid(layout, torch.zeros(3, 4, dtype=dtype))
        works = [
            dist.isend(laid(layout, value(rank, dtype)), (rank + 1) % 3, group=made),
            dist.irecv(got, (rank - 1) % 3, group=made),
        ]
        for work in works:
            work.wait()
        equal(got, every[rank - 1])
    dist.barrier(group=made)


@LAYOUTS
@distributed(world_size=3)
def test_operations_on_one_tensor(layout, rank):
    made = group()
    every = [value(r, shape=(6, 4)) for r in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.13 has new names for the two
        got = laid(layout, torch.zeros(18, 4))
        dist.all_gather_into_tensor(got, laid(layout, every[rank]), group=made)
        equal(got, torch.cat(every))
        got = torch.zeros(3, 6, 4)
        dist.all_gather_into_tensor(got, laid(layout, every[rank]), group=made)
        equal(got, torch.stack(every))
        got = laid(layout, torch.zeros(2, 4))
        dist.reduce_scatter_tensor(got, laid(layout, every[rank]), group=made)
        equal(got, sum(every)[2 * rank : 2 * rank + 2])
    got = laid(layout, torch.zeros(6, 4))
    dist.all_to_all_single(got, laid(layout, every[rank]), group=made)
    equal(got, torch.cat([one[2 * rank : 2 * rank + 2] for one in every]))
    sizes = [[1, 2, 3], [2, 2, 2], [0, 4, 2]]
    theirs = [row[rank] for row in sizes]
    got = laid(layout, torch.zeros(sum(theirs), 4))
    dist.all_to_all_single(got, laid(layout, every[rank]), theirs, sizes[rank], group=made)
    equal(got, torch.cat([one.split(row)[rank] for one, row in zip(every, sizes, strict=True)]))
    with pytest.raises(ValueError, match="input of 6 rows cannot be split as"):
        dist.all_to_all_single(got, every[0], theirs, [1, 1, 1], group=made)


REDUCED = {
    dist.ReduceOp.SUM: lambda every: sum(every[1:], every[0]),
    dist.ReduceOp.PRODUCT: lambda every: every[0] * every[1] * every[2],
    dist.ReduceOp.MIN: lambda every: torch.stack(every).amin(0),
    dist.ReduceOp.MAX: lambda every: torch.stack(every).amax(0),
    dist.ReduceOp.AVG: lambda every: sum(every[1:], every[0]) / 3,
}


@LAYOUTS
@distributed(world_size=3)
def test_reductions(layout, rank):
    made = group()
    for dtype in DTYPES:
        every = [value(r, dtype) for r in range(3)]
        for op, oracle in REDUCED.items():
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            want, mine = oracle(every), laid(layout, every[rank])
            dist.all_reduce(mine, op, group=made)
            equal(mine, want)
            mine = laid(layout, every[rank])
            dist.reduce(mine, 1, op, group=made)
            equal(mine, want if rank == 1 else every[rank])
            got = laid(layout, torch.zeros(3, 4, dtype=dtype))
            dist.reduce_scatter(got, [laid(layout, every[rank]) for _ in range(3)], op, group=made)
            equal(got, want)
    mine = torch.tensor([1 + 2j]) * (rank + 1)
    dist.all_reduce(mine, group=made)
    assert mine.tolist() == [6 + 12j]


@distributed(world_size=2)
def test_what_is_refused(rank):
    made, tensor = group(), torch.ones(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduces with SUM, AVG, PRODUCT, MIN, MAX, got BXOR; use gloo"):
        dist.all_reduce(tensor, dist.ReduceOp.BXOR, group=made)
    with pytest.raises(ValueError, match="AVG needs floating point"):
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=made)
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        dist.all_reduce(torch.eye(2).to_sparse(), group=made)
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        dist.all_reduce(torch.empty(2, device="meta"), group=made)
    with pytest.raises(ValueError, match="who sends"):
        dist.recv(tensor, group=made)
    with pytest.raises(ValueError, match="no tags"):
        dist.send(tensor, 1 - rank, group=made, tag=3)
    with pytest.raises(ValueError, match="cannot talk to rank"):
        dist.irecv(tensor, rank, group=made)
    with pytest.raises(ValueError, match="does not fit its counterpart"):
        dist.all_gather([torch.zeros(2, dtype=torch.int64)] * 2, tensor, group=made)
    with pytest.raises(ValueError, match="needs 2 tensors"):
        dist.all_gather([torch.zeros_like(tensor)], tensor, group=made)
    expanded = torch.zeros(1, 2).expand(3, 2)
    with pytest.raises(ValueError, match=r"cannot fill torch.float32 \(3, 2\) on cpu, which is expanded; fill a clone"):
        dist.all_reduce(expanded, group=made)
    with pytest.raises(RuntimeError, match=r"not implemented|not supported"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn).view(torch.bits8), group=made)
    dist.all_reduce(tensor, group=made)
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.parametrize("root", [-1, 2, 7])
@distributed(world_size=2)
def test_root_that_is_no_rank(root, rank):
    made, tensor = group(), torch.ones(3)
    for name, options, tensors in (
        ("broadcast", dist.BroadcastOptions(), [[tensor]]),
        ("gather", dist.GatherOptions(), [[], [tensor]]),
        ("reduce", dist.ReduceOptions(), [[tensor]]),
        ("scatter", dist.ScatterOptions(), [[tensor], []]),
    ):
        options.rootRank = root
        with pytest.raises(ValueError, match=f"^{name}: a group of 2 ranks has no rank {root}$"):
            getattr(made, name)(*tensors, options)
    dist.all_reduce(tensor, group=made)
    assert tensor.tolist() == [2, 2, 2]


@distributed(world_size=3)
def test_work_and_future(rank):
    made = group()
    tensors = [strided(torch.full((40_000, 2), float(rank + i))) for i in range(4)]
    works = [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]
    works[3].wait()
    while not works[1].is_completed():
        time.sleep(0)
    assert works[1].is_success()
    assert works[0].get_future().wait()[0] is tensors[0]
    assert works[2].get_future().then(lambda future: future.value()[0]).wait() is tensors[2]
    for i, tensor in enumerate(tensors):
        assert (tensor == 3 + 3 * i).all()
        assert works[i].result()[0] is tensor
    with dist._coalescing_manager(made) as _:
        for tensor in tensors:
            dist.all_reduce(tensor, group=made)
    assert tensors[3][0].tolist() == [36, 36]
    with dist._coalescing_manager(made, torch.device("cpu"), async_ops=True) as batch:
        got = torch.zeros(2)
        dist.isend(torch.full((2,), float(rank)), (rank + 1) % 3, group=made)
        dist.irecv(got, (rank - 1) % 3, group=made)
    batch.wait()
    assert got.tolist() == [(rank - 1) % 3] * 2
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), group=made, group_peer=(rank - 1) % 3),
        dist.P2POp(dist.irecv, got, group=made, group_peer=(rank + 1) % 3),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [(rank + 1) % 3] * 2


@distributed(world_size=2)
def test_nothing_is_held_after_the_end(rank):
    made = group()

    def begun(operation):
        tensors = [torch.ones(3), torch.ones(3)]
        works = operation(tensors)
        return works, [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    def coalesced(tensors):
        with dist._coalescing_manager(made, async_ops=True) as batch:
            for tensor in tensors:
                dist.all_reduce(tensor, group=made)
        return [batch]

    def each(tensors):
        return [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]

    for operation in (each, coalesced):
        works, tensors = begun(operation)
        for work in works:
            work.wait()
        del works, work
        assert [tensor() for tensor in tensors] == [None, None]


@distributed(world_size=2)
def test_coalesced_work_does_not_block_who_asks(rank):
    made, tensor = group(), torch.ones(3)
    if rank == 1:
        dist.barrier()
    with dist._coalescing_manager(made, torch.device("cpu"), async_ops=True) as batch:
        dist.isend(tensor, 0, group=made) if rank else dist.irecv(tensor, 1, group=made)
    if rank == 0:
        assert not batch.works[0].is_completed()
        dist.barrier()
    batch.wait()
    assert batch.works[0].is_completed()


@distributed(world_size=2)
def test_works_that_nobody_waits_for(rank):
    made, tensors = group(), []
    for _ in range(300):
        tensor = torch.ones(3)
        tensors.append(weakref.ref(tensor.untyped_storage()))
        dist.all_reduce(tensor, group=made, async_op=True)
    for _ in range(2):
        dist.barrier(group=made)  # the first ends them all, the second lets go
    left = sum(tensor() is not None for tensor in tensors)
    assert left <= 101


@pytest.mark.slow
@pytest.mark.parametrize("initial", [False, True])
@distributed(world_size=2)
def test_ddp_join(initial, rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False), process_group=group())
    with model.join(divide_by_initial_world_size=initial):  # C++ holds its works
        for _ in range(2 + rank):
            model(torch.full((1, 2), 10.0)).sum().backward()
    third = 15 if initial else 30  # of rank 1 alone
    assert model.module.weight.grad.unique().tolist() == [[20, third][rank]]


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
@distributed(world_size=2)
def test_objects_functional_collectives_and_meshes(rank):
    made = group(timeout=timedelta(seconds=50))
    every = [None, None]
    dist.all_gather_object(every, {"rank": rank, "pad": "x" * 10 * rank}, group=made)
    assert every == [{"rank": 0, "pad": ""}, {"rank": 1, "pad": "x" * 10}]
    told = [rank, {"a": rank}]
    dist.broadcast_object_list(told, group_src=1, group=made)
    assert told == [1, {"a": 1}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 2.13 has new names for some
        assert functional.all_reduce(torch.tensor([rank]), "sum", made).tolist() == [1]
        assert functional.all_gather_tensor(torch.tensor([rank]), 0, made).tolist() == [0, 1]
        assert functional.reduce_scatter_tensor(torch.tensor([1, 2]), "sum", 0, made).tolist() == [2 + 2 * rank]
        assert (
            functional.all_to_all_single(torch.tensor([rank, 5]), None, None, made).tolist() == [[0, 1], [5, 5]][rank]
        )
    assert easydist.comms.of_group(made).monitor.timeout == made.timeout.total_seconds() == 50
    mesh = dist.DeviceMesh.from_group(made, "cpu")
    assert mesh.get_group() is made
    assert easydist.gather(torch.tensor([rank]), group=made).tolist() == [0, 1]
    assert easydist.gather_object([rank], group=mesh) == [0, 1]
    assert easydist.reduce({"x": torch.ones(2)}, "sum", group=made)["x"].tolist() == [2, 2]


class Forked(torch.nn.Module):
    """A model one of whose branches may stay unused."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (torch.nn.Linear(8, 8) for _ in range(3))
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x, branch):
        x = torch.relu(self.first(x))
        return self.last(torch.tanh((self.left if branch else self.right)(x)))


def trained(made, rank, world_size, unused):
    """The weights after 20 steps, every second one of which accumulates two gradients."""
    torch.manual_seed(0)
    # Buckets of a few hundred bytes, so that there are several.
    model = DistributedDataParallel(Forked(), process_group=made, find_unused_parameters=unused, bucket_cap_mb=0.0003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(rank + 1)

    def backward(step):
        x = torch.randn(4, 8, generator=draw)
        branch = (step + rank) % 3 > 0
        loss = model(x, branch).square().mean()
        (loss if unused else loss + 0 * sum(p.sum() for p in model.parameters())).backward()

    for step in range(20):
        if step % 2:
            with model.no_sync():
                backward(step)
        backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("unused", [False, True], ids=["all", "unused"])
@distributed(world_size=[2, 3])
def test_ddp_trains_as_over_gloo(unused, rank, world_size):
    made = group()
    ours, theirs = (trained(one, rank, world_size, unused) for one in (made, dist.new_group(backend="gloo")))
    if world_size == 2:  # a + b == b + a
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    every = [torch.empty_like(ours) for _ in range(world_size)]
    dist.all_gather(every, ours, group=made)
    assert all(torch.equal(one, ours) for one in every)


def then_hook(made, bucket):
    """As torch's power SGD: a future, and further operations when it has come."""
    made_of = dist.all_reduce(bucket.buffer(), group=made, async_op=True).get_future()

    def again(future):
        tensor = future.value()[0]
        dist.all_reduce(tensor, group=made, async_op=True).get_future().wait()
        return tensor / 4

    return made_of.then(again)


@pytest.mark.slow
@distributed(world_size=2)
def test_communication_hooks(rank):
    made = group()
    model = DistributedDataParallel(torch.nn.Linear(50, 50), process_group=made, bucket_cap_mb=0.001)
    model.register_comm_hook(made, then_hook)
    model(torch.full((1, 50), rank + 1.0)).sum().backward()
    assert (model.module.weight.grad == 1.5).all()


@pytest.mark.slow
@distributed(world_size=3)
def test_timeout_names_who_is_missing(rank):
    made = group(timeout=timedelta(seconds=1))
    dist.barrier(group=made)
    if rank < 2:
        with pytest.raises(
            CollectiveTimeout, match=r"(?s)all_reduce: 1 of 3 ranks did not.*rank 2: .*is alive"
        ) as info:
            dist.all_reduce(torch.ones(3), group=made)
        assert info.value.missing == (2,)
    dist.barrier()
    with pytest.raises(CollectiveTimeout, match=r"all_reduce: 1 of 3 ranks did not come"):
        dist.barrier(group=made)


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


@distributed(world_size=2)
def test_rank_that_does_not_come(rank):
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"init_process_group: 1 of 2 ranks did not come within 0\.2 s"):
            dist.distributed_c10d.Backend._plugins[NAME.upper()].creator_fn(
                dist.HashStore(), 0, 2, timedelta(seconds=0.2)
            )
    dist.barrier()


SCRIPT = """
import os, sys, torch, torch.distributed as dist
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
try:
    dist.all_reduce(tensor)
except easydist.PeerLostError as error:
    print(error)
    dist.destroy_process_group()
"""


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


@distributed(world_size=3)
def test_a_group_is_renewed_in_place(rank):
    made = group()
    if rank == 1:
        made.abort()
    else:
        with pytest.raises(RemoteError, match="rank 1 has aborted the group"):
            dist.all_reduce(torch.ones(1), group=made)
    with pytest.raises((RuntimeError, RemoteError)):
        dist.barrier(made)
    made.renew(dist.PrefixStore("renewed", dist.distributed_c10d._get_default_store()))
    dist.all_reduce(tensor := torch.ones(1), group=made)
    assert tensor.item() == 3
    assert easydist.gather(torch.tensor([rank]), group=made).tolist() == [0, 1, 2]


@distributed(world_size=1)
def test_verbs_take_a_group_of_one(rank):
    made = group()
    made.renew(dist.HashStore())
    assert easydist.gather({"x": torch.ones(2)}, group=made)["x"].tolist() == [1, 1]
