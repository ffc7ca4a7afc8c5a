"""Communicators: making, splitting, adopting and ending them, and the errors of wrong arguments."""

import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launching import forked, within

import easydist
from easydist.comms import (
    BatchP2POptions,
    CommTimeout,
    Gloo,
    ReduceOp,
    Solo,
    TorchComm,
    new_comm,
    register_backend,
    wrap,
)
from easydist.process_group import NAME
from easydist.testing import distributed

CPU = torch.device("cpu")
SUM = ReduceOp.SUM


def made(backend, name="main", **options):
    return new_comm(backend, CPU, name, **({"timeout": timedelta(seconds=within(30))} | options))


def total(comm):
    tensor = torch.ones(1)
    comm.all_reduce(tensor, SUM, False)
    return tensor.item()


@pytest.mark.slow
@distributed(world_size=4)
def test_ranks_that_have_no_rank_0_make_a_communicator(rank):
    """Two at a time on one store, under names of their own; nobody else takes part."""
    pair = rank // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHCOMM_RANK", str(1 - rank % 2))
        patch.setenv("TORCHCOMM_SIZE", "2")
        if pair == 1:
            for backend in ("gloo", "shm"):
                comm = made(backend, "pair")
                assert (comm.get_rank(), comm.get_size()) == (1 - rank % 2, 2)
                assert total(comm) == 2
    dist.barrier()
    everybody = made("gloo", "pair")
    assert total(everybody) == 4


@pytest.mark.battery
@pytest.mark.slow
@distributed(world_size=3)
def test_ranks_may_close_a_communicator_while_others_still_connect(rank):
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        for i in range(100):
            made("gloo", f"short {i}").finalize()
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Counting(Gloo):
    """A backend of the user's own."""


def counting(place):
    return Counting(dist.group.WORLD, place.device, "counting")


@pytest.mark.slow
@distributed(world_size=2)
def test_what_is_made_says_what_it_is(rank):
    store = dist.group.WORLD.get_group_store()
    hints = {"interface": "lo"}
    comm = made("gloo", "named", abort_process_on_timeout_or_error=False, store=store, hints=hints)
    options = comm.get_options()
    assert (options.hints, options.store) == (hints, store)
    assert options.abort_process_on_timeout_or_error is False
    assert (comm.get_backend(), comm.get_device(), comm.get_name()) == ("gloo", CPU, "named")
    assert comm.unsafe_get_backend() is comm.get_backend_impl()
    assert comm.get_backend_version()
    comm.set_timeout(timedelta(seconds=1234))
    assert comm.get_options().timeout == 1_234_000
    assert comm.split([0, 1], "child").get_options().timeout == 1_234_000
    assert comm.split([0, 1], "hinted", hints={}).get_options().hints == {}
    assert comm.get_options().hints == hints
    assert made("auto").get_backend() == "shm"
    register_backend("counting", counting)
    with pytest.raises(ValueError, match="'gloo' is built in"):
        register_backend("gloo", counting)
    assert (made("counting").get_backend(), total(made("counting"))) == ("counting", 2)

    # a group that exists
    wrapped = wrap(dist.group.WORLD)
    assert (wrapped.get_size(), total(wrapped)) == (2, 2)
    child = wrapped.split([1, 0], "reversed")
    assert child.get_rank() == 1 - rank
    wrapped.finalize()
    assert total(child) == 2
    dist.barrier()

    # verbs take communicators
    assert easydist.gather(torch.tensor([rank]), group=comm).tolist() == [0, 1]
    assert total(comm) == 2

    # after the end
    child = comm.split([0, 1], "child")
    comm.finalize()
    with pytest.raises(RuntimeError, match=r"^barrier: TorchComm 'named' not initialized"):
        comm.barrier(False)
    with pytest.raises(RuntimeError, match=r"already finalized"):
        comm.finalize()
    assert (comm.get_rank(), comm.get_size(), comm.get_backend(), comm.get_name()) == (rank, 2, "gloo", "named")
    assert total(child) == total(comm.split([0, 1], "later")) == 2


@distributed(world_size=2)
def test_wrap_of_a_group_in_shared_memory_shares_memory_of_its_own(rank):
    group = dist.new_group(backend=NAME)
    wrapped = wrap(group)
    assert (wrapped.get_backend(), total(wrapped)) == ("shm", 2)
    works = [dist.isend, dist.irecv][rank](torch.ones(1), 1 - rank, group=group)  # theirs never meet ours
    assert total(wrapped) == 2
    works.wait()
    wrapped.finalize()
    dist.barrier(group)


@pytest.mark.slow
@distributed(world_size=2)
def test_hooks_see_every_operation_and_trace_does(rank):
    comm, seen = made("shm"), []
    before = comm.register_pre_hook(lambda name, op_id, args: seen.append((name, op_id, args.async_op)))
    after = comm.register_post_hook(
        lambda op_id, args: seen.append((op_id, args.work.is_completed(), len(args.outputs)))
    )
    with easydist.trace() as trace:
        comm.all_reduce(torch.ones(4), SUM, False)
        comm.barrier(False)
        message = comm.send if rank == 0 else comm.recv
        message(torch.zeros(2), 1 - rank, False)
    name, outputs = message.__name__, rank
    assert seen[:4] == [("all_reduce", 0, False), (0, True, 1), ("barrier", 1, False), (1, True, 0)]
    assert seen[4:] == [(name, 2, False), (2, True, outputs)]
    assert [(call.operation, call.nbytes, call.group, call.number) for call in trace.calls] == [
        ("all_reduce", 16, "main", 1),
        ("barrier", 0, "main", 2),
        (name, 8 * outputs, "main", 3),
    ]
    assert all("test_new_comm.py" in call.site for call in trace.calls)
    before.remove()
    before.remove()
    seen.clear()

    def refuse(name, op_id, args):
        raise ValueError("not today")

    with comm.register_pre_hook(refuse), pytest.raises(ValueError, match="not today"):
        comm.barrier(False)
    with pytest.raises(RuntimeError, match="root must be"):
        comm.broadcast(torch.ones(1), 7, False)
    assert not seen  # nothing had begun
    after.remove()
    itself = comm.register_pre_hook(lambda name, op_id, args: itself.remove())
    comm.barrier(False)
    with pytest.raises(TypeError, match=r"callable"):
        comm.register_pre_hook(None)
    assert total(comm) == 2


one, two, ints = torch.ones(1), torch.ones(2), torch.ones(1, dtype=torch.int32)
WRONG = {
    "send dst": (lambda c: c.send(one, 7, False), r"dst must be in range \[0, 2\), but got 7"),
    "recv src": (lambda c: c.recv(one, -1, False), r"src must be in range \[0, 2\), but got -1"),
    "root": (lambda c: c.reduce(one, 2, SUM, False), r"root must be in range \[0, 2\), but got 2"),
    "self send": (lambda c: c.send(one, c.get_rank(), False), "Cannot send to self"),
    "self recv": (lambda c: c.recv(one, c.get_rank(), False), "Cannot recv from self"),
    "all_gather": (lambda c: c.all_gather([one], one, False), "tensor_list size must equal comm_size for all_gather"),
    "all_gather sizes": (
        lambda c: c.all_gather([one, two], one, False),
        "All tensors in tensor_list must have same size as input tensor",
    ),
    "all_gather_single": (
        lambda c: c.all_gather_single(one, one, False),
        r"Output tensor size must be input_size \* comm_size for all_gather_single",
    ),
    "reduce_scatter": (
        lambda c: c.reduce_scatter(one, [one], SUM, False),
        "input_list size must equal comm_size for reduce_scatter",
    ),
    "reduce_scatter sizes": (
        lambda c: c.reduce_scatter(one, [two, two], SUM, False),
        "All input tensors must have same size as output tensor",
    ),
    "reduce_scatter_single": (
        lambda c: c.reduce_scatter_single(one, one, SUM, False),
        r"Input tensor size must be output_size \* comm_size for reduce_scatter_single",
    ),
    "all_to_all": (lambda c: c.all_to_all([one], [one, one], False), "size must equal comm_size for all_to_all"),
    "all_to_all_single": (
        lambda c: c.all_to_all_single(two, torch.ones(4), False),
        "Input and output tensors must have same size for all_to_all_single",
    ),
    "all_to_all_single odd": (
        lambda c: c.all_to_all_single(torch.ones(3), torch.ones(3), False),
        "Tensor size must be divisible by comm_size for all_to_all_single",
    ),
    "v length": (
        lambda c: c.all_to_all_v_single(two, torch.ones(2), [1, 1], [1], False),
        "input_split_sizes length must equal comm_size for all_to_all_v_single",
    ),
    "v sum": (
        lambda c: c.all_to_all_v_single(two, torch.ones(2), [2, 2], [1, 1], False),
        "Sum of output_split_sizes exceeds output tensor size for all_to_all_v_single",
    ),
    "scatter": (
        lambda c: c.scatter(one, [one], c.get_rank(), False),
        "input_tensor_list size must equal comm_size for scatter",
    ),
    "gather": (
        lambda c: c.gather([one], one, c.get_rank(), False),
        "output_tensor_list size must equal comm_size for gather",
    ),
    "gather sizes": (
        lambda c: c.gather([two, two], one, c.get_rank(), False),
        "All output tensors must have same size as input tensor",
    ),
    "contiguous": (lambda c: c.broadcast(one.expand(3), 0, False), "Tensor must be contiguous"),
    "dtype": (lambda c: c.all_gather_single(two, ints, False), "must have one dtype"),
    "empty batch": (lambda c: c.batch_op_create().issue(False), "Cannot issue empty batch operation"),
    "split range": (lambda c: c.split([99], "s"), "Invalid rank 99 in ranks. Valid ranks are 0 to 1"),
    "split twice": (lambda c: c.split([0, 1, 1], "s"), "Duplicate ranks found in ranks list"),
    "split member": (
        lambda c: c.split([1 - c.get_rank()], "s"),
        r"Current rank \d is not included in the provided ranks list",
    ),
}
WRONG_TYPES = {
    "hints": (lambda c: c.barrier(False, hints={"a": 1}), "hints must be a mapping of str to str"),
    "timeout": (lambda c: c.barrier(False, timeout=5), "timeout must be a timedelta, got 5"),
    "root": (lambda c: c.broadcast(one, 0.5, False), "root=0.5 is not a rank: pass an integer"),
    "op": (lambda c: c.all_reduce(one, "sum", False), "op must be an easydist.comms.ReduceOp"),
    "tensor": (lambda c: c.all_reduce([1.0], SUM, False), "takes tensors, got list"),
    "async_op": (lambda c: c.all_reduce(one, SUM), "async_op"),
    "negative": (lambda c: c.all_to_all_v_single(two, torch.ones(2), [-1, 1], [1, 1], False), "must not be negative"),
    "device": (lambda c: new_comm("gloo", "cpu", "x"), "device must be a device, got 'cpu'; pass torch.device"),
    "name": (lambda c: new_comm("gloo", CPU, None), "name must be a str"),
    "store": (lambda c: new_comm("gloo", CPU, "x", store="there"), "store must be a Store"),
}


@pytest.mark.slow
@distributed(world_size=2)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank):
    """On one rank at a time, while the other one goes on."""
    comm = made("gloo")
    assert comm.all_gather_single(torch.empty(2, 1), torch.ones(()), False).wait() is None  # sizes count, not shapes
    for cases, kind in ((WRONG, RuntimeError), (WRONG_TYPES, TypeError)):
        for name, (call, text) in cases.items():
            for turn in range(2):
                if rank == turn:
                    with pytest.raises(kind, match=text):
                        call(comm)
            if name in ("root", "op"):
                assert total(comm) == 2
    with pytest.raises(ModuleNotFoundError, match=r"failed to find backend GLOO, is it registered"):
        made("GLOO")
    assert total(comm) == 2


@pytest.mark.slow
@distributed(world_size=2)
def test_a_rank_that_comes_after_a_timeout_does_not_wait(rank):
    """Over shared memory it may still get the data of the others, but hears of the timeout in its next operation."""
    comm = made("shm")
    if rank == 0:
        with pytest.raises(CommTimeout, match="rank 1 did not come"):
            comm.barrier(False, timeout=timedelta(milliseconds=100))
    dist.barrier()
    if rank == 1:
        comm.barrier(False)
        with pytest.raises(CommTimeout, match=r"rank 1 did not come in time for another rank.*within 0\.1 s"):
            comm.barrier(False)


@distributed(world_size=2)
def test_an_error_of_gloo_names_the_communicator(rank):
    with pytest.raises(RuntimeError, match=r"^new_comm 'here': failed\. The communicator was not created\. .* nowhere"):
        made("gloo", "here", hints={"interface": "nowhere"})


@pytest.mark.slow
@distributed(world_size=3)
def test_a_rank_that_does_not_come_is_named_and_the_next_attempt_works(rank):
    for backend in ("gloo", "shm"):
        if rank != 1:
            with pytest.raises(RuntimeError, match=r"(?s)new_comm 'late'.*rank 1: missing"):
                made(backend, "late", timeout=timedelta(milliseconds=200))
        dist.barrier()
        assert total(made(backend, "late")) == 3


def test_a_world_of_one():
    comm = TorchComm(Solo(), "alone")
    assert comm.split([], "none") is None
    with pytest.raises(RuntimeError, match="was made without a store"):
        comm.split([0], "same")
    with pytest.raises(RuntimeError, match="Invalid rank 1"):
        comm.split([1], "other")
    comm.barrier(False)
    options = BatchP2POptions()
    assert options.hints is None


def test_without_a_launcher_the_error_says_what_to_set(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCHCOMM_", "RANK", "WORLD_SIZE", "OMPI_", "PMI_", "SLURM_")):
            monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=r"^Unable to determine rank and size from environment variables"):
        made("gloo")
    monkeypatch.setenv("TORCHCOMM_RANK", "x")
    monkeypatch.setenv("TORCHCOMM_SIZE", "1")
    with pytest.raises(RuntimeError, match=r"^Invalid value for environment variable TORCHCOMM_RANK: x"):
        made("gloo")
    monkeypatch.setenv("TORCHCOMM_RANK", "1")
    with pytest.raises(RuntimeError, match=r"^Unable to determine rank and size: rank 1 is outside of 1 ranks$"):
        made("gloo")
    monkeypatch.setenv("TORCHCOMM_RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR env is not set"):
        made("gloo")


@pytest.mark.parametrize("op", [*(ReduceOp.SUM, ReduceOp.AVG), ReduceOp.PREMUL_SUM(0.5)], ids=repr)
def test_operations_are_compared_by_value_and_pickled(op):
    again = pickle.loads(pickle.dumps(op))
    assert again == op
    assert hash(again) == hash(op)
    assert again != ReduceOp.MAX
    assert ReduceOp.PREMUL_SUM(torch.ones(2)) == ReduceOp.PREMUL_SUM(torch.ones(2)) != ReduceOp.PREMUL_SUM(1.0)
    with pytest.raises(RuntimeError, match="PREMUL_SUM needs a factor"):
        ReduceOp(type(op.type).PREMUL_SUM)
    with pytest.raises(TypeError, match="takes a RedOpType"):
        ReduceOp("sum")
    for wrong in ("2", None):
        with pytest.raises(TypeError, match="takes a number or a tensor"):
            ReduceOp.PREMUL_SUM(wrong)


@pytest.mark.slow
def test_scripts_of_the_original_run_under_a_launcher():
    """The store of MASTER_ADDR, a rank that dies, and a process that is aborted, in processes of their own."""
    out, err = forked("tests/scripts/communicators.py", seconds=120)
    lines = out.splitlines()
    assert lines == [
        *[f"{backend}: rank {rank} sums 6" for backend in ("gloo", "shm") for rank in range(3)],
        *[f"{backend}: rank 0 of 2 heard that rank 1 ended by {signal.SIGKILL.value}" for backend in ("gloo", "shm")],
        *[f"rank 1 ended by {signal.SIGKILL.value}: wait_signal: rank 1 "] * 2,
        *[f"rank 2 ended by {signal.SIGKILL.value}: wait_signal: rank 2 "] * 2,
        *[f"rank 3 ended by {signal.SIGKILL.value}: wait_signal: rank 3 "] * 3,
        *[f"rank 1 ended by {signal.SIGKILL.value}: new_comm 'main': rank 1 "] * 4,
        "gloo mesh: 4 ranks agree",
        "shm mesh: 4 ranks agree",
        f"aborted: {-signal.SIGABRT.value}",
    ], err
    assert "easydist: aborting the process: recv in the communicator 'abort' (rank 0 of 2): timed out" in err
