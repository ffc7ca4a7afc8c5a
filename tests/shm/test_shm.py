import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import examples, sampled, within

import easydist.shm.futex
from easydist.comms import ReduceOp, TorchComm
from easydist.errors import CollectiveTimeout, DisagreementError
from easydist.shm.calls import Calls
from easydist.shm.segment import FOLDER, Segment
from easydist.shm.slots import NEVER, Slots
from easydist.shm.streams import Operation, Streams
from easydist.testing import check_comm, distributed
from easydist.transport.backends.shm import Shm
from easydist.transport.work import TorchWork

TINY, SMALL, LARGE = 256, 1 << 14, 1 << 22
KINDS = (
    "gather_v",
    "gather_parts",
    "upto",
    "reduce",
    "broadcast",
    "multicast",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "barrier",
)


CALLS = examples(1200)
"""Random calls of a stress test; 100 000 take some minutes."""


class GaveUp(Exception):
    """An error that the guards of these tests raise."""


def patient(ranks, seconds):
    if seconds > within(10):
        raise GaveUp(ranks, seconds)


def backend(rank, world_size, slot=SMALL, guard=patient):
    """The backend over a segment whose name the default group carries."""
    nbytes = Shm.nbytes(world_size, slot)
    segment = Segment.create(nbytes) if rank == 0 else None
    names = [segment.name if segment else None]
    dist.broadcast_object_list(names)
    segment = segment or Segment.attach(names[0], nbytes)
    dist.barrier()
    segment.unlink()
    assert not [name for name in os.listdir(FOLDER) if name.startswith("easydist")]
    return Shm(segment, rank, world_size, guard)


def make(rank, world_size):
    return TorchComm(backend(rank, world_size), "shm")


def make_large(rank, world_size):
    return TorchComm(backend(rank, world_size, LARGE), "shm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "world_size"), sampled([(make, 3), (make, 1), (make_large, 2), (make, 2), (make_large, 3), (make, 4)])
)
def test_battery(make, world_size):
    check_comm(make, [world_size])


def filled(rank, number, nbytes):
    """Bytes that differ between ranks and between calls."""
    return ((torch.arange(nbytes) + 37 * rank + 11 * number) % 251).to(torch.uint8)


def random_call(shm, number, draw):
    """Begin a call that all ranks draw alike; returns its work, and functions that look at what has arrived."""
    rank, size = shm.rank, shm.size
    root, nbytes = draw.randrange(size), draw.choice([0, 1, 8, 100, 2000])
    sizes = [draw.choice([0, 3, 500, nbytes]) for _ in range(size)]
    outputs = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    wanted = [filled(r, number, n) for r, n in enumerate(sizes)]
    kind = draw.choice(KINDS)
    if kind == "gather_v":
        return shm.all_gather_v(outputs, wanted[rank]), list(zip(outputs, wanted, strict=True))
    if kind == "gather_parts":
        whole, more = torch.cat(outputs), torch.zeros(size, nbytes + 1, dtype=torch.uint8)
        others = [filled(r, number + 1, nbytes + 1) for r in range(size)]
        work = shm.all_gather_parts([(whole, wanted[rank], sizes), (more.view(-1), others[rank], None)])
        return work, list(zip([*whole.split(sizes), *more], [*wanted, *others], strict=True))
    if kind == "upto":
        rows = torch.zeros(size, 2100, dtype=torch.uint8)
        rows[rank, : sizes[rank]] = wanted[rank]
        return shm.all_gather_upto(rows, sizes[rank]), [(rows[r, :n], wanted[r]) for r, n in enumerate(sizes)]
    if kind == "reduce":
        every = torch.stack([filled(r, number, nbytes).to(torch.float64) for r in range(size)])
        mine, total = every[rank].clone(), torch.empty_like(every[rank])
        if number % 3 == 0:
            other = torch.stack([filled(r, number + 1, 700).to(torch.float64) for r in range(size)])
            work = shm.all_reduce_parts([total, more := torch.empty(700).double()], [mine, other[rank]], ReduceOp.SUM)
            return work, [(total, every.sum(0)), (more, other.sum(0)), (mine, every[rank])]
        if number % 3 == 1:
            return shm.all_reduce_from(total, mine, ReduceOp.SUM), [(total, every.sum(0)), (mine, every[rank])]
        return shm.all_reduce(mine, ReduceOp.SUM), [(mine, every.sum(0))]
    if kind == "broadcast":
        tensor, more = filled(rank, number, nbytes), filled(rank, number + 1, 700)
        wanted = [filled(root, number, nbytes), filled(root, number + 1, 700)]
        return shm.broadcast_parts([tensor, more], root), list(zip([tensor, more], wanted, strict=True))
    if kind == "multicast":
        tensor, ranks = filled(rank, number, nbytes), draw.sample(range(size), draw.randint(1, size - 1))
        wanted = filled(root, number, nbytes)
        return shm.multicast(tensor, root, sorted({*ranks} - {root})), [(tensor, wanted)] if rank in ranks else []
    if kind == "gather":
        outputs = outputs if rank == root else []
        return shm.gather(outputs, wanted[rank], root), list(zip(outputs, wanted, strict=False))
    if kind == "scatter":
        return shm.scatter(outputs[rank], wanted if rank == root else [], root), [(outputs[rank], wanted[rank])]
    if kind == "all_to_all":
        inputs = [filled(rank, number, sizes[rank]) for _ in range(size)]
        return shm.all_to_all_v(outputs, inputs), list(zip(outputs, wanted, strict=True))
    peer = (root + 1) % size
    if kind == "send" and rank == root:
        return shm.send(filled(root, number, nbytes), peer), []
    if kind == "send" and rank == peer:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return shm.recv(tensor, root), [(tensor, filled(root, number, nbytes))]
    return (shm.barrier() if kind == "barrier" else None), []


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("slot", [TINY, SMALL])
@distributed(world_size=sampled([3, 4]), timeout=within(30 + CALLS / 50))
def test_random_calls(slot, rank, world_size):
    shm = backend(rank, world_size, slot)
    draw, own_draw = random.Random(slot), random.Random(rank)
    under_way = []
    for number in range(CALLS):
        under_way.append((number, *random_call(shm, number, draw)))
        while len(under_way) > 6 or (under_way and own_draw.random() < 0.5):
            done, work, pairs = under_way.pop(own_draw.randrange(len(under_way)))
            if work is not None:
                work.wait()
            assert all(torch.equal(got, want) for got, want in pairs), f"call {done}"
    for _, work, _ in under_way:
        if work is not None:
            work.wait()


@distributed(world_size=3)
def test_reductions_have_the_same_bits_everywhere(rank, world_size):
    shm = backend(rank, world_size)
    for dtype, numel in ((torch.float32, 100), (torch.float32, 50_000), (torch.bfloat16, 50_000)):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        shm.all_reduce(tensor, ReduceOp.SUM).wait()
        copies = torch.empty(world_size, tensor.nbytes, dtype=torch.uint8)
        shm.all_gather_single(copies.view(-1), tensor.view(torch.uint8)).wait()
        assert (copies == copies[0]).all()


@distributed(world_size=2)
def test_both_send_before_they_receive(rank):
    shm = backend(rank, 2)
    mine, theirs = torch.full((1 << 20,), rank + 1, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    sent = shm.send(mine, 1 - rank)
    shm.recv(theirs, 1 - rank).wait()
    sent.wait()
    assert (theirs == 2 - rank).all()


@distributed(world_size=3)
def test_ranks_wait_for_several_communicators_in_any_order(rank, world_size):
    comms = [backend(rank, world_size) for _ in range(3)]
    for round_ in range(5):
        order = [(rank + i) % 3 for i in range(3)]
        outputs = [torch.zeros(world_size, 100_000, dtype=torch.uint8) for _ in comms]
        data = torch.full((100_000,), rank + round_, dtype=torch.uint8)
        works = {i: comms[i].all_gather_single(outputs[i].view(-1), data) for i in order}
        for i in reversed(order):
            works[i].wait()
            assert outputs[i][:, 0].tolist() == outputs[i][:, -1].tolist() == [r + round_ for r in range(world_size)]


@distributed(world_size=3)
def test_threads_wait_for_communicators_of_their_own(rank, world_size):
    comms = [backend(rank, world_size) for _ in range(3)]
    outputs = [torch.zeros(world_size, 50_000, dtype=torch.uint8) for _ in comms]

    def work(i):
        for _ in range(20):
            comms[i].all_gather_single(outputs[i].view(-1), torch.full((50_000,), rank, dtype=torch.uint8)).wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(output[:, -1].tolist() == list(range(world_size)) for output in outputs)


@distributed(world_size=2)
def test_a_size_that_differs_is_an_error_of_its_own_operation_only(rank):
    """Rank 0 finds it while it waits for another communicator, or asks whether the operation has ended."""
    asked, unequal, other = [backend(rank, 2) for _ in range(3)]
    begun = [shm.recv(torch.zeros(5, dtype=torch.uint8), 1) for shm in (asked, unequal)] if rank == 0 else []
    dist.barrier()
    for shm in (asked, unequal) if rank == 1 else ():
        shm.send(torch.zeros(6, dtype=torch.uint8), 0).wait()
    dist.barrier()
    if begun:
        assert begun[0].is_completed()
    other.barrier().wait()
    for work in begun:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^rank 1 passed 6 bytes, and this rank expects 5"):
                work.wait()
    if rank == 0:
        with pytest.raises(RuntimeError, match="can no longer be used: rank 1 passed 6 bytes"):
            unequal.barrier()
    other.barrier().wait()


@distributed(world_size=2)
def test_the_data_of_an_operation_that_has_ended_is_freed_while_its_handle_is_kept(rank):
    shm, array = backend(rank, 2), np.ones(4)
    if rank == 0:
        data, work = weakref.ref(array), shm.recv(torch.from_numpy(array), 1)
        del array
        assert data() is not None
    dist.barrier()
    if rank == 1:
        shm.send(torch.zeros(4, dtype=torch.float64), 0)
    dist.barrier()
    if rank == 0:
        assert work.is_completed()
        assert data() is None


@distributed(world_size=3)
def test_guard_ends_a_wait(rank):
    calls = []

    def guard(ranks, seconds):
        calls.append((list(ranks), seconds))
        if len(calls) == 3:
            raise GaveUp

    for begin, awaited in (
        (lambda shm: shm.barrier(), [1, 2]),
        (lambda shm: shm.recv(torch.zeros(5, dtype=torch.uint8), 2), [2]),
    ):
        shm = backend(rank, 3, guard=guard)
        shm.barrier().wait()
        if rank == 0:
            calls.clear()
            earlier, work = shm.recv(torch.zeros(5, dtype=torch.uint8), 1), TorchWork([begin(shm)])
            with pytest.raises(GaveUp):
                work.wait()
            assert work.is_completed()
            assert [ranks for ranks, _ in calls] == [awaited] * 3
            assert [seconds for _, seconds in calls] == sorted(seconds for _, seconds in calls)
            with pytest.raises(RuntimeError, match="GaveUp"):
                earlier.wait()
            with pytest.raises(RuntimeError, match=r"can no longer be used: GaveUp\(\)$"):
                shm.barrier()
    dist.barrier()


def test_words_have_room_for_2100_disagreements():
    segment = Segment.create(Slots.nbytes(2, 4096))
    slots = [Slots(segment, rank, 2) for rank in (0, 1)]
    first, second = map(Calls, slots)
    second.end = second.keep
    for number in range(2100):
        for mine, calls in zip(slots, (first, second), strict=True):
            mine.publish(number, (0, 4, calls.begin((mine.rank, 4))))
        first.differ(0, 1, 4, 4)
        with pytest.raises(DisagreementError):
            second.check()
        assert first.begin((0, 0)) == second.begin((0, 0))


@pytest.mark.slow
def test_a_guard_is_called_while_another_thread_advances_the_same_streams():
    segment, reached = Segment.create(Slots.nbytes(2, 4096)), [0]
    slots = Slots(segment, 0, 2)
    streams = Streams(slots, Calls(slots), lambda ranks, seconds: None)

    need = NEVER, (1,)

    def until(number):
        while reached[0] < number:
            yield need

    def advance():
        for number in range(20_000):
            streams.begin([(None, until(number))], None)
            reached[0] = number - 3
            streams.advance()

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=advance)
        thread.start()
        other = Operation(streams)
        while thread.is_alive():
            assert streams._awaited(other) == []
        thread.join()
    finally:
        sys.setswitchinterval(switches)
    reached[0] = 20_000
    streams.advance()


@distributed(world_size=2)
def test_reduction_that_torch_cannot_do(rank):
    shm = backend(rank, 2)
    with pytest.raises(RuntimeError, match=r"not implemented|not supported|complex"):
        shm.all_reduce(torch.ones(3, dtype=torch.complex64), ReduceOp.MAX)
    shm.barrier().wait()


@distributed(world_size=2)
def test_time_limit_of_a_call(rank):
    comm = make(rank, 2)
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] are missing"):
            comm.barrier(async_op=False, timeout=timedelta(seconds=0.1))
    dist.barrier()


@pytest.mark.slow
@distributed(world_size=2)
def test_waiting_does_not_use_the_core(rank):
    def guard(ranks, seconds):
        if seconds > 1:
            raise GaveUp

    shm = backend(rank, 2, guard=guard)
    if rank == 0:
        before = time.thread_time()
        with pytest.raises(GaveUp):
            shm.barrier().wait()
        assert time.thread_time() - before < 0.05
    dist.barrier()


@distributed(world_size=2)
def test_signals_reach_a_wait(rank):
    shm = backend(rank, 2)
    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            shm.barrier().wait()
        signal.signal(signal.SIGINT, before)
    dist.barrier()


def come_and_die(name, nbytes):
    shm = Shm(Segment.attach(name, nbytes), 1, 2, patient)
    shm.barrier().wait()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_peer_that_is_killed():
    nbytes = Shm.nbytes(2, SMALL)
    segment = Segment.create(nbytes)
    peer = multiprocessing.get_context("forkserver").Process(target=come_and_die, args=(segment.name, nbytes))
    peer.start()

    def guard(ranks, seconds):
        patient(ranks, seconds)
        if not peer.is_alive():
            raise ConnectionError(f"lost {ranks}")

    shm = Shm(segment, 0, 2, guard)
    shm.barrier().wait()
    segment.unlink()
    with pytest.raises(ConnectionError, match=r"lost \[1\]"):
        shm.barrier().wait()
    peer.join()
    assert peer.exitcode == -signal.SIGKILL


@distributed(world_size=2)
def test_forked_child_does_not_speak_for_its_parent(rank):
    shm, token = backend(rank, 2), torch.zeros(1, dtype=torch.uint8)
    under_way = shm.recv(token, 1 - rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking a process with threads
        child = os.fork()
    if child == 0:
        try:
            for call in (shm.barrier, under_way.wait):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            shm.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    total = torch.ones(3)
    shm.all_reduce(total, ReduceOp.SUM).wait()
    assert total.tolist() == [2, 2, 2]
    shm.send(torch.tensor([7], dtype=torch.uint8), 1 - rank).wait()
    under_way.wait()
    assert token.tolist() == [7]


@distributed(world_size=2)
def test_close_gives_the_memory_back(rank):
    def mapped():
        with open("/proc/self/maps") as maps:
            return {line.split()[4] for line in maps if FOLDER in line}  # inodes

    before = mapped()
    shm = backend(rank, 2)
    shm.barrier().wait()
    late = shm.recv(torch.zeros(9, dtype=torch.uint8), 1 - rank)
    new = mapped() - before
    assert len(new) == 1
    shm.close()
    assert not new & mapped()
    with pytest.raises(RuntimeError, match="closed"):
        late.wait()
    with pytest.raises(RuntimeError, match="closed"):
        shm.barrier()
    dist.barrier()


@pytest.mark.slow
@distributed(world_size=3)
def test_other_machines(rank, world_size):
    """With membarrier instead of the order of stores, and without futexes: what arm64 and sandboxes use."""
    easydist.shm.futex._ORDERED = False
    try:
        shm = backend(rank, world_size, TINY)
    finally:
        easydist.shm.futex._ORDERED = True
    shm._steps.slots.futex._call = None
    for number in range(300):
        outputs = [torch.zeros(number, dtype=torch.uint8) for _ in range(world_size)]
        shm.all_gather_v(outputs, filled(rank, number, number)).wait()
        assert all(torch.equal(output, filled(r, number, number)) for r, output in enumerate(outputs))


def test_machine_without_membarrier(monkeypatch):
    monkeypatch.setattr(easydist.shm.futex, "_ORDERED", False)
    monkeypatch.setattr(easydist.shm.futex, "_CALLS", {})
    segment = Segment.create(Shm.nbytes(1, TINY))
    segment.unlink()
    with pytest.raises(OSError, match="membarrier"):
        Shm(segment, 0, 1, patient)


@pytest.mark.parametrize("changed", ["device", "inode", "size"])
def test_another_file_than_the_announced_one_is_not_attached(changed):
    segment = Segment.create(4096)
    try:
        pid, number, device, inode = map(int, segment.name.split("/"))
        assert Segment.attach(segment.name, 4096).nbytes == 4096
        name = f"{pid}/{number}/{device + (changed == 'device')}/{inode + (changed == 'inode')}"
        with pytest.raises(PermissionError, match="is not the segment that was announced"):
            Segment.attach(name, 4096 + (changed == "size"))
    finally:
        segment.unlink()
