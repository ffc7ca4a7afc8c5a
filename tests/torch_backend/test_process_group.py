"""``init_process_group("easydist_shm")``: every operation of torch.distributed, and DDP as over gloo."""

import time
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import easydist
from easydist.process_group import NAME
from easydist.testing import distributed
from easydist.torch_backend.group import SharedMemoryGroup

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
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=made)
    options = dist.GatherOptions()
    options.rootRank = 1
    for numel in (24, 0):
        whole = laid(layout, torch.zeros(3, numel))
        made.gather_single(whole, laid(layout, every[rank].view(-1)[:numel]), options).wait()
        equal(whole, (rank == 1) * torch.stack(every).view(3, -1)[:, :numel])
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
    dist.ReduceOp.AVG: lambda every: mean(every),
    dist.ReduceOp.BAND: lambda every: every[0] & every[1] & every[2],
    dist.ReduceOp.BOR: lambda every: every[0] | every[1] | every[2],
    dist.ReduceOp.BXOR: lambda every: every[0] ^ every[1] ^ every[2],
}
BITWISE = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR


def mean(every):
    """The mean; of integers, truncated, without an overflow in between."""
    if every[0].dtype.is_floating_point:
        return sum(every[1:], every[0]) / 3
    return sum(one.to(torch.int64) for one in every).div(3, rounding_mode="trunc").to(every[0].dtype)


@LAYOUTS
@distributed(world_size=3)
def test_reductions(layout, rank):
    made = group()
    for dtype in DTYPES:
        every = [value(r, dtype) for r in range(3)]
        for op, oracle in REDUCED.items():
            if op in BITWISE and dtype.is_floating_point:
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
    mine = torch.tensor([1 + 2j]) * (rank + 1)
    dist.reduce_scatter(got := torch.zeros_like(mine), [mine] * 3, dist.ReduceOp.AVG, group=made)
    assert got.tolist() == [2 + 4j]
    mine = torch._neg_view(torch.tensor([1.0 + rank]))
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=made)
    assert mine.tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@distributed(world_size=2)
def test_the_mean_of_large_values_in_small_floats_does_not_overflow(rank, dtype):
    made, largest = group(), torch.full((3,), torch.finfo(dtype).max).to(dtype)
    mine, got = largest.clone(), torch.zeros(3).to(dtype)
    dist.all_reduce(mine, dist.ReduceOp.AVG, group=made)
    dist.reduce_scatter(got, [largest, largest], dist.ReduceOp.AVG, group=made)
    assert mine.tolist() == got.tolist() == largest.tolist()


@distributed(world_size=2)
def test_what_is_refused(rank):
    made, tensor = group(), torch.ones(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"Cannot use .*BXOR with non-integral dtype"):
        dist.all_reduce(tensor.float(), dist.ReduceOp.BXOR, group=made)
    with pytest.raises(RuntimeError, match=r"Cannot use .*AVG with torch\.bool"):
        dist.all_reduce(tensor.bool(), dist.ReduceOp.AVG, group=made)
    with pytest.raises(ValueError, match="adds up sparse tensors alone, got ReduceOp"):
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX, group=made)
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        dist.broadcast(torch.eye(2).to_sparse(), 0, group=made)
    with pytest.raises(ValueError, match="dense tensors on the CPU"):
        dist.all_reduce(torch.empty(2, device="meta"), group=made)
    for tag in (-1, 1 << 20):
        with pytest.raises(ValueError, match=f"has tags from 0 to 1048575, got {tag}"):
            made.send([tensor], 1 - rank, tag)
    with pytest.raises(ValueError, match="cannot exchange messages with rank"):
        dist.irecv(tensor, rank, group=made)
    with pytest.raises(ValueError, match="does not fit its counterpart"):
        dist.all_gather([torch.zeros(2, dtype=torch.int64)] * 2, tensor, group=made)
    with pytest.raises(ValueError, match="needs 2 tensors"):
        dist.all_gather([torch.zeros_like(tensor)], tensor, group=made)
    for numel in (5, 7):
        with pytest.raises(ValueError, match=rf"2 times torch.int64 \(3,\) on cpu do not fit torch.int64 \({numel},\)"):
            made.all_gather_single(tensor.new_zeros(numel), tensor)
    if rank == 0:
        with pytest.raises(ValueError, match=r"gather_single: 2 times torch.int64 \(3,\) on cpu do not fit"):
            made.gather_single(tensor.new_zeros(5), tensor, dist.GatherOptions())
    for call in (
        lambda: made.all_gather_single(torch.zeros(6, dtype=torch.float64), tensor),
        lambda: made.reduce_scatter_single(torch.zeros(1, dtype=torch.float64), tensor[:2]),
        lambda: made.allgather([[torch.zeros(3, dtype=torch.float64)] * 2], [tensor]),
        lambda: made.alltoall([torch.zeros(3, dtype=torch.float64)] * 2, [tensor] * 2),
    ):
        with pytest.raises(ValueError, match="float64"):
            call()
    expanded = torch.zeros(1, 2).expand(3, 2)
    with pytest.raises(ValueError, match=r"cannot fill torch.float32 \(3, 2\) on cpu, which is expanded; fill a clone"):
        dist.all_reduce(expanded, group=made)
    with pytest.raises(RuntimeError, match=r"not implemented|not supported"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn).view(torch.bits8), group=made)
    dist.all_reduce(tensor, group=made)
    assert tensor.tolist() == [2, 2, 2]


@distributed(world_size=3)
def test_the_second_forms_of_the_groups_own_methods(rank):
    made, own, add = group(), value(rank), dist.ReduceOp.SUM
    every, total = [value(r) for r in range(3)], sum(value(r) for r in range(3))
    made.allreduce(one := own.clone(), add).wait()
    made.allreduce([two := own.clone()], op=dist.ReduceOp(add)).wait()
    made.allreduce(three := own.clone()).wait()
    made.allreduce(four := torch.ones(()), dist.ReduceOp.MAX, timedelta(seconds=60)).wait()
    for got in (one, two, three):
        equal(got, total)
    assert four.item() == 1
    made.broadcast(one := own.clone(), 2).wait()
    made.broadcast([two := own.clone()]).wait()
    made.broadcast(tensor=(three := own.clone()), root=1).wait()
    for got, root in ((one, 2), (two, 0), (three, 1)):
        equal(got, every[root])
    made.allgather(outputs := [torch.zeros(3, 4) for _ in range(3)], own).wait()
    assert all(map(torch.equal, outputs, every))
    made.reduce_scatter(one := torch.zeros(3, 4), [own] * 3, add).wait()
    equal(one, total)
    made.reduce(one := own.clone(), 1, add).wait()
    equal(one, total if rank == 1 else own)
    made.scatter(one := torch.zeros(3, 4), every if rank == 2 else [], 2).wait()
    equal(one, own)
    outputs = [torch.zeros(3, 4) for _ in range(3)] if rank == 1 else []
    made.gather(input_tensor=own, output_tensors=outputs, root=1).wait()
    assert all(map(torch.equal, outputs, every))
    made.barrier(timeout=timedelta(seconds=60)).wait()
    made._reduce_scatter_base(outputTensor=(one := torch.zeros(2)), inputTensor=torch.ones(6)).wait()
    assert one.tolist() == [3, 3]
    if rank < 2:
        message = made.send(tensors=[one], dstRank=1, tag=3) if rank == 0 else made.recv([one], srcRank=0, tag=3)
        message.wait()
    for wrong in (lambda: made.allreduce(), lambda: made.allgather([own] * 3)):
        with pytest.raises(TypeError, match=r"^all\w+: takes [12] arguments with tensors, got [01]$"):
            wrong()
    for wrong in (lambda: made.allreduce([1, 2]), lambda: made.allgather([own, own, None], own)):
        with pytest.raises(TypeError, match=r"^all\w+: takes tensors, got (int|NoneType)$"):
            wrong()
    with pytest.raises(TypeError, match=r"^allreduce: takes a ReduceOp, a root, a timedelta or .* options, got 'sum'$"):
        made.allreduce(own, "sum")


LIMITED = {
    "barrier": lambda made, limit: made.barrier(timeout=limit),
    "allreduce": lambda made, limit: made.allreduce(torch.ones(2), dist.ReduceOp.SUM, limit),
    "broadcast": lambda made, limit: made.broadcast(torch.ones(2), 1, timeout=limit),
    "alltoall": lambda made, limit: made.alltoall([torch.ones(1)] * 2, [torch.ones(1)] * 2, limit),
    "alltoall_base": lambda made, limit: made.alltoall_base(torch.ones(2), torch.ones(2), [], [], timeout=limit),
}


def options(kind, limit):
    """torch's options with a limit."""
    made = kind()
    made.timeout = limit
    return made


TWO, FOUR = [torch.zeros(2), torch.zeros(2)], [torch.zeros(4), torch.zeros(4)]
LIMITED |= {
    "all_gather_single": lambda made, limit: made.all_gather_single(
        FOUR[0], TWO[0], options(dist.distributed_c10d.AllgatherOptions, limit)
    ),
    "all_gather_single_coalesced": lambda made, limit: made.all_gather_single_coalesced(
        FOUR, TWO, options(dist.distributed_c10d.AllgatherOptions, limit)
    ),
    "allgather_coalesced": lambda made, limit: made.allgather_coalesced(
        [TWO, TWO], TWO, options(dist.distributed_c10d.AllgatherOptions, limit)
    ),
    "allreduce_coalesced": lambda made, limit: made.allreduce_coalesced(
        TWO, options(dist.AllreduceCoalescedOptions, limit)
    ),
    "reduce_scatter_single": lambda made, limit: made.reduce_scatter_single(
        TWO[0], FOUR[0], options(dist.ReduceScatterOptions, limit)
    ),
    "reduce_scatter_single_coalesced": lambda made, limit: made.reduce_scatter_single_coalesced(
        TWO, FOUR, options(dist.ReduceScatterOptions, limit)
    ),
}


@pytest.mark.parametrize("name", LIMITED)
@distributed(world_size=2)
def test_the_limit_of_one_operation(name, rank):
    made = group()
    if rank == 0:
        with pytest.raises(easydist.CollectiveTimeout, match=r"within the timeout of 0\.25 s"):
            LIMITED[name](made, timedelta(seconds=0.25)).wait()
    easydist.gather_object(None)


@distributed(world_size=3)
def test_sparse_tensors_are_added_up(rank):
    made = group()
    for shape, values in (((6, 4), ()), ((6,), (2, 3)), ((5,), ())):
        every = []
        for r in range(3):
            places = torch.stack([torch.arange(r) % size for size in shape])  # rank 0 has none
            parts = torch.arange(r * torch.Size(values).numel()).reshape(r, *values).double()
            every.append(torch.sparse_coo_tensor(places, parts, (*shape, *values), check_invariants=True))
        mine = every[rank].clone()
        work = dist.all_reduce(mine, group=made, async_op=True)
        work.wait()
        assert mine.layout is torch.sparse_coo
        equal(mine.to_dense(), sum(one.to_dense() for one in every))
    with pytest.raises(easydist.DisagreementError, match=r"shapes \[\[2, 3\], \[3, 2\], \[2, 3\]\]"):
        dist.all_reduce((torch.ones(3, 2) if rank == 1 else torch.ones(2, 3)).to_sparse(), group=made)
    embedding = torch.nn.Embedding(7, 3, sparse=True)
    torch.manual_seed(rank)
    own = torch.randint(7, (4,))
    model = torch.nn.parallel.DistributedDataParallel(embedding, process_group=made)
    model(own).sum().backward()
    counts = torch.zeros(7)
    for r in range(3):
        torch.manual_seed(r)
        counts += torch.randint(7, (4,)).bincount(minlength=7)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), (counts / 3)[:, None].expand(7, 3))


@pytest.mark.slow
@distributed(world_size=2)
def test_a_barrier_with_a_limit_of_its_own(rank):
    made, began = group(), time.monotonic()
    if rank == 0:
        with pytest.raises(easydist.CollectiveTimeout, match=r"within the timeout of 0\.5 s"):
            dist.barrier(made, timeout=timedelta(seconds=0.5))
        assert time.monotonic() - began < 60
    easydist.gather_object(None)


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
    made, gather_single = group(), getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def begun(operation):
        tensors = [torch.ones(3), torch.ones(3)]
        works = operation(tensors)
        return works, [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    def coalesced(tensors):
        with dist._coalescing_manager(made, torch.device("cpu"), async_ops=True) as batch:
            for tensor in tensors:
                dist.all_reduce(tensor, group=made)
        return [batch]

    def gathered(tensors):
        with dist._coalescing_manager(made, torch.device("cpu"), async_ops=True) as batch:
            for tensor in tensors:
                gather_single(tensor.new_empty(6), tensor, group=made)
        return [batch]

    def each(tensors):
        return [dist.all_reduce(tensor, group=made, async_op=True) for tensor in tensors]

    for operation in (each, coalesced, gathered, each):
        works, tensors = begun(operation)
        for work in works:
            work.wait()
        del works, work
        assert [tensor() for tensor in tensors] == [None, None]


@distributed(world_size=2)
def test_a_coalesced_sum_of_sparse_tensors_is_written(rank):
    made, own = group(), torch.sparse_coo_tensor([[rank, 2]], torch.ones(2), (3,), check_invariants=True)
    with dist._coalescing_manager(made, torch.device("cpu"), async_ops=True) as batch:
        dist.all_reduce(own, group=made)
    batch.wait()
    assert own.to_dense().tolist() == [1, 1, 2]


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
