"""Several hosts of several ranks, simulated: ranks with equal ``EASYDIST_HOST_ID`` share memory, the others do not."""

import contextlib
import itertools
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from groups import many
from launching import sampled

import easydist
from easydist import CollectiveTimeout, DisagreementError, EasydistError
from easydist.agreement import frames
from easydist.comms import Gloo, ReduceOp, TorchComm, of_comm
from easydist.messages.channels import Channel
from easydist.shm.segment import Segment
from easydist.state import communicators
from easydist.testing import check_comm, distributed
from easydist.transport.backends.hierarchical import Hierarchical

PAIRS, MIXED, THREE_AND_ONE, MANY = "0011", "0101", "0001", "01202"


@contextlib.contextmanager
def on_hosts(hosts, rank):
    """This process is on host ``hosts[rank]``."""
    os.environ["EASYDIST_HOST_ID"] = f"host {hosts[rank]}"
    try:
        yield
    finally:
        del os.environ["EASYDIST_HOST_ID"]


def over_hosts(hosts, rank):
    with on_hosts(hosts, rank):
        comm = communicators().met().control
    assert isinstance(comm.backend, Hierarchical)
    return comm


def pairs(rank, world_size):
    return over_hosts(PAIRS, rank)


def mixed(rank, world_size):
    return over_hosts(MIXED, rank)


def three_and_one(rank, world_size):
    return over_hosts(THREE_AND_ONE, rank)


def two_and_one(rank, world_size):
    return over_hosts("100", rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "world_size"), sampled([(two_and_one, 3), (mixed, 4), (pairs, 4), (three_and_one, 4)], 4)
)
def test_battery(make, world_size):
    check_comm(make, [world_size])


class Counting:
    """A group that counts the bytes that this rank sends to other hosts."""

    def __init__(self, group, hosts):
        self.sent, self._group, self._hosts = 0, group, hosts
        self.lengths = []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, tensors, dst, tag):
        if self._hosts[dst] != self._hosts[self.rank()]:
            self.sent += sum(tensor.nbytes for tensor in tensors)
            self.lengths += [tensor.nbytes for tensor in tensors]
        return self._group.send(tensors, dst, tag)


def counted(hosts, rank, is_flat=False):
    """A communicator, and what counts the bytes that it sends between hosts."""
    group = Counting(dist.group.WORLD, hosts)
    comm = TorchComm(Gloo(group, torch.device("cpu"), "gloo"), "counted")
    if not is_flat:
        with on_hosts(hosts, rank):
            comm = of_comm(comm).met().control
        assert isinstance(comm.backend, Hierarchical)
    group.sent = 0
    return comm, group


def total(sent):
    """Over all ranks."""
    flat = torch.tensor(sent)
    dist.all_reduce(flat)
    return int(flat)


N = 10_000
CALLS = {
    "all_gather": lambda comm: comm.all_gather_single(torch.empty(4 * N), torch.ones(N), async_op=False),
    "broadcast": lambda comm: comm.broadcast(torch.ones(4 * N), 1, async_op=False),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(4 * N), ReduceOp.SUM, async_op=False),
    "barrier": lambda comm: comm.barrier(async_op=False),
}
BYTES = {  # between two hosts of two ranks: flat, and from leader to leader
    "all_gather": (8 * 4 * N, 4 * 4 * N),
    "all_reduce": (16 * 4 * N, 8 * 4 * N),
    "barrier": (8, 2),
}
EDGES = {PAIRS: 3, MIXED: 2}
"""The number of a broadcast's messages that go to another host."""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PAIRS, MIXED])
@distributed(world_size=4)
def test_bytes_between_hosts_fall_by_the_ranks_per_host(hosts, rank):
    expected = {**BYTES, "broadcast": (EDGES[hosts] * 4 * 4 * N, 4 * 4 * N)}
    (flat, flat_count), (comm, count) = counted(hosts, rank, is_flat=True), counted(hosts, rank)
    for name, call in CALLS.items():
        flat_count.sent = count.sent = 0
        call(flat)
        call(comm)
        assert (total(flat_count.sent), total(count.sent)) == expected[name], name
        if hosts.index(hosts[rank]) != rank:
            assert count.sent == 0, name  # only the first rank of a host talks to another one


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PAIRS, MIXED])
@distributed(world_size=4)
def test_a_multicast_crosses_once_to_each_host_that_has_a_receiver(hosts, rank):
    comm, count = counted(hosts, rank)
    for root, number in itertools.product(range(4), range(1, 4)):
        for ranks in itertools.combinations(range(4), number):
            tensor, count.sent = torch.full((N,), float(rank)), 0
            comm.multicast(tensor, root, ranks, async_op=False)
            far = {hosts[one] for one in ranks} - {hosts[root]}
            assert total(count.sent) == len(far) * 4 * N, (root, ranks)
            assert rank not in ranks or tensor.unique().tolist() == [root]


@distributed(world_size=4)
def test_frames_of_a_host_are_one_message_no_longer_than_they_are(rank):
    comm, count = counted(PAIRS, rank)
    for lengths in ([0, 70, 3, 64], [1 << 14, 0, 1, 5]):
        rows = torch.zeros(4, 1 << 14, dtype=torch.uint8)
        rows[rank] = rank + 1
        count.sent = 0
        comm.all_gather_upto(rows, lengths[rank], async_op=False)
        for r, length in enumerate(lengths):
            assert (rows[r, :length] == r + 1).all()
        assert count.sent == (0 if rank % 2 else sum(8 + length for length in lengths[rank : rank + 2]))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PAIRS, MIXED, MANY])
@distributed(world_size=[4, 5])
def test_reductions_have_the_same_bits_everywhere(hosts, rank, world_size):
    hosts = (hosts * 2)[:world_size]
    with on_hosts(hosts, rank):
        comm = communicators().met().control
    for numel in 3001, 200_001:  # whole, and in chunks
        every = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        of_hosts = [sum(every[r] for r in range(world_size) if hosts[r] == host) for host in dict.fromkeys(hosts)]
        mine = every[rank].clone()
        comm.all_reduce(mine, ReduceOp.SUM, async_op=False)
        assert torch.equal(mine, sum(of_hosts))  # host by host


@distributed(world_size=4)
def test_small_reductions_cross_once_between_hosts(rank):
    comm, count = counted(PAIRS, rank)
    for op, numel in (ReduceOp.SUM, 10), (ReduceOp.AVG, 10), (ReduceOp.MAX, 1000), (ReduceOp.SUM, 200_000):
        count.sent, count.lengths = 0, []
        mine = torch.full((numel,), rank + 1.0)
        comm.all_reduce(mine, op, async_op=False)
        want = {ReduceOp.SUM: 10, ReduceOp.AVG: 2.5, ReduceOp.MAX: 4}[op]
        assert mine.unique().tolist() == [want]
        # A leader sends all of its host's result, or half of it and the total of the other half.
        assert count.sent == (0 if rank % 2 else mine.nbytes)
        assert len(count.lengths) == (0 if rank % 2 else 2 if numel == 200_000 else 1)


def results(rank, group=None):
    """Return the results of some calls as text."""
    large = torch.full((70_000,), rank)
    tree = {"small": torch.arange(3) + rank, "large": large, "n": rank}
    calls = [
        easydist.gather(tree, group=group),
        easydist.reduce(tree, "sum", group=group),
        easydist.broadcast({"large": large.clone()}, from_process=3, group=group),
        easydist.gather_object("x" * rank, group=group),
    ]
    return [repr(result) for result in calls]


@pytest.mark.slow
@distributed(world_size=5)
def test_calls_between_as_many_hosts_as_go_round(rank):
    want = results(rank)
    with on_hosts(MANY, rank), many(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FOLDED_FROM", 2)
        group = dist.new_group()
        assert results(rank, group) == want
        assert isinstance(communicators(group).control.backend, Hierarchical)
        with pytest.raises(DisagreementError, match="ranks disagree on 1 of 1 leaves"):
            easydist.gather(torch.ones(2, 2 + (rank == 4)), group=group)
        assert results(rank, group) == want


@distributed(world_size=4)
def test_narrow_floats_are_rounded_once(rank):
    comm = over_hosts(PAIRS, rank)
    mine = torch.full((5,), [2048.0, 1.0, 1.0, 1.0][rank], dtype=torch.float16)
    comm.all_reduce(mine, ReduceOp.SUM, async_op=False)
    assert mine.tolist() == [2052.0] * 5  # 2051; with every sum rounded it would be 2048 or 2050
    mine = torch.full((5,), 1 + 22 / 1024, dtype=torch.float16)
    comm.all_reduce(mine, ReduceOp.PRODUCT, async_op=False)
    assert mine.tolist() == [1 + 91 / 1024] * 5  # 90.88; with every host's product rounded it would be 90


@distributed(world_size=4)
def test_works_are_waited_for_in_any_order(rank):
    comm, works = over_hosts(PAIRS, rank), []
    for i in range(6):
        tensor = torch.full((1000,), float(i))
        works.append((comm.all_reduce(tensor, ReduceOp.SUM, async_op=True), tensor))
        if (rank + i) % 3 == 0:
            works[-1][0].wait()
    for i in torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist():
        works[i][0].wait()
        assert works[i][1].tolist() == [4.0 * i] * 1000


@distributed(world_size=4)
def test_reduce_to_one_and_scatter_of_a_reduction(rank):
    comm = over_hosts(MIXED, rank)
    tensor = torch.tensor([1.0, rank])
    comm.reduce(tensor, 2, ReduceOp.SUM, async_op=False)
    assert tensor.tolist() == ([4, 6] if rank == 2 else [1, rank])
    output = torch.empty(rank)
    comm.reduce_scatter(output, [torch.full((r,), float(10 * r)) for r in range(4)], ReduceOp.SUM, async_op=False)
    assert output.tolist() == [40.0 * rank] * rank


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [PAIRS, MIXED, MANY])
@distributed(world_size=[4, 5])
def test_verbs(hosts, rank, world_size):
    hosts = (hosts * 2)[:world_size]
    with on_hosts(hosts, rank):
        small = {"x": torch.full((rank, 3), rank), "y": [torch.ones(2)]}
        got = easydist.gather(small)
        assert got["x"][:, 0].tolist() == [r for r in range(world_size) for _ in range(r)]
        large = easydist.gather(torch.full((100_000 * (1 + rank % 2),), rank))  # a communicator with more room
        assert large.bincount().tolist() == [100_000 * (1 + r % 2) for r in range(world_size)]
        tree = {"w": torch.randn(400_000, generator=torch.Generator().manual_seed(rank))}
        wanted = torch.randn(400_000, generator=torch.Generator().manual_seed(3))
        assert torch.equal(easydist.broadcast(tree, from_process=3)["w"], wanted)
        mean = easydist.gather(easydist.reduce(tree, "mean")["w"][None])
        assert (mean == mean[0]).all()
        assert easydist.gather_object(("of", rank)) == [("of", r) for r in range(world_size)]
        with pytest.raises(DisagreementError, match="ranks disagree on 1 of 1 leaves"):
            easydist.gather(torch.ones(2, rank))
        assert easydist.gather(rank).tolist() == list(range(world_size))
        assert isinstance(communicators().met().control.backend, Hierarchical)


@pytest.mark.slow
@distributed(world_size=4)
def test_tensor_dicts_between_and_inside_hosts(rank):
    with on_hosts(PAIRS, rank):
        for src, dst in ((0, 1), (1, 2), (3, 1)):
            tree = {"small": torch.arange(4), "large": torch.full((500_000,), src)}
            if rank == src:
                easydist.send_tensor_dict(tree, dst)
            if rank == dst:
                got = easydist.recv_tensor_dict(src)
                assert all(torch.equal(got[key], tree[key]) for key in tree)


@pytest.mark.slow
@distributed(world_size=3)
@pytest.mark.parametrize("nbytes", [100_000, 300_000])
def test_a_wait_for_a_message_between_hosts_has_a_time_limit(rank, nbytes):
    with on_hosts("001", rank), pytest.MonkeyPatch.context() as patch:
        easydist.gather(rank)
        store = dist.group.WORLD.get_group_store()
        if rank == 0:
            with pytest.raises(CollectiveTimeout):
                easydist.recv_tensor_dict(2, timeout=1)
            store.set("late", "")
        if rank == 2:
            move = Channel.move
            patch.setattr(Channel, "move", lambda *args, **options: store.wait(["late"]) or move(*args, **options))
            with pytest.raises(EasydistError):
                easydist.send_tensor_dict({"": torch.zeros(nbytes, dtype=torch.uint8)}, 0)


@distributed(world_size=4)
def test_rank_that_cannot_attach_is_a_host_of_its_own(rank):
    with on_hosts(PAIRS, rank), pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(Segment, "attach", refuse)
        comm = communicators().met().control
    assert isinstance(comm.backend, Hierarchical)
    assert communicators()._hosts == [[0, 1], [2], [3]]
    assert easydist.gather(rank).tolist() == [0, 1, 2, 3]


def refuse(name, nbytes):
    raise PermissionError("not to be seen from here")


@distributed(world_size=4)
def test_without_shared_memory_on_one_rank_all_go_through_gloo(rank):
    with on_hosts(PAIRS, rank), pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setenv("EASYDIST_SHM", "0")
        assert communicators().met().control.get_backend() == "gloo"
        assert easydist.gather(rank).tolist() == [0, 1, 2, 3]


@distributed(world_size=2)
def test_each_rank_alone_on_its_host(rank):
    with on_hosts("01", rank):
        assert communicators().met().control.get_backend() == "gloo"


@distributed(world_size=4)
def test_an_operation_that_fails_ends_the_backend(rank):
    comm = over_hosts(PAIRS, rank)
    slots = weakref.ref(comm.backend._near._steps.slots)
    with pytest.raises(RuntimeError, match="not implemented"):  # refused: nothing has moved
        comm.all_reduce(torch.ones(1, dtype=torch.complex64), ReduceOp.MAX, async_op=False)
    comm.barrier(async_op=False)
    comm.finalize()
    with pytest.raises(RuntimeError, match="closed"):
        comm.barrier(async_op=False)
    dist.barrier()
    assert slots() is None  # the host's memory has been released
