"""Operations of communicators that differ between ranks, and the check that all ranks raise the same error."""

import random

import torch
import torch.distributed as dist

from easydist.comms import P2POpType, ReduceOp
from easydist.errors import DisagreementError

OPERATIONS = (
    "all_gather",
    "all_gather_single",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
"""The collectives, by their names in TorchComm."""

EQUAL = {"all_gather", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast", "reduce"}
ROOTED = {"broadcast", "gather", "reduce", "scatter"}
REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
DTYPES = (torch.float32, torch.int32, torch.float64, torch.int64)
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)


def begin(comm, name, numel=4, dtype=torch.float32, root=0, op=ReduceOp.SUM, async_op=False):
    """Begin an operation of this name, and return its work."""
    size, is_root = comm.get_size(), root == comm.get_rank()
    data, more = torch.ones(numel, dtype=dtype), lambda: torch.ones(size * numel, dtype=dtype)
    parts = lambda: [*torch.zeros(size, numel, dtype=dtype)]  # noqa: E731
    calls = {
        "all_gather": lambda: comm.all_gather(parts(), data, async_op),
        "all_gather_single": lambda: comm.all_gather_single(more(), data, async_op),
        "all_gather_v": lambda: comm.all_gather_v(parts(), data, async_op),
        "all_reduce": lambda: comm.all_reduce(data, op, async_op),
        "all_to_all": lambda: comm.all_to_all(parts(), [data] * size, async_op),
        "all_to_all_single": lambda: comm.all_to_all_single(more(), more(), async_op),
        "barrier": lambda: comm.barrier(async_op),
        "broadcast": lambda: comm.broadcast(data, root, async_op),
        "gather": lambda: comm.gather(parts() if is_root else [], data, root, async_op),
        "reduce": lambda: comm.reduce(data, root, op, async_op),
        "reduce_scatter": lambda: comm.reduce_scatter(data, [data] * size, op, async_op),
        "scatter": lambda: comm.scatter(data, [data] * size if is_root else [], root, async_op),
        "send": lambda: comm.send(data, (comm.get_rank() + 1) % size, async_op),
        "recv": lambda: comm.recv(data, (comm.get_rank() - 1) % size, async_op),
        "ring": lambda: _ring(comm, data, async_op),
    }
    return calls[name]()


def _ring(comm, data, async_op):
    batch, rank, size = comm.batch_op_create(), comm.get_rank(), comm.get_size()
    batch.send(data, (rank + 1) % size)
    batch.recv(data.clone(), (rank - 1) % size)
    assert [op.type for op in batch.ops] == [P2POpType.SEND, P2POpType.RECV]
    return batch.issue(async_op)


def error_of(run):
    """Return the text of the disagreement that ``run`` raises."""
    try:
        run()
    except DisagreementError as error:
        return str(error)
    return None


def demand_one_error(run, comm, goes_on=True):
    """Check that ``run`` raises the same error on all ranks, and that the communicator goes on."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, error_of(run))
    assert None not in texts, texts
    assert len({*texts}) == 1, "\n---\n".join(texts)
    if goes_on:
        total = torch.ones(3)
        comm.all_reduce(total, ReduceOp.SUM, False)
        assert total.tolist() == [comm.get_size()] * 3
    return texts[0]


def drawn(seed, size):
    """Draw a program for each rank: operations with their arguments; one operation differs on one rank."""
    draw = random.Random(seed)
    program = [_operation(draw, size) for _ in range(draw.randrange(1, 8))]
    wrong, victim = draw.randrange(len(program)), draw.randrange(size)
    changed = _changed(draw, *program[wrong], size)
    program[wrong:wrong] = [None]
    programs = [[*program] for _ in range(size)]
    programs[victim][wrong : wrong + 2] = changed
    # Messages have no place in the order of collectives: two ranks may wait for each other in one of each.
    are_in_step = len(changed) == 1 and changed[0][0] == program[wrong + 1][0]
    kept = [[one for one in own if one and (are_in_step or one[0] != "ring")] for own in programs]
    return kept, draw.random() < 0.5


def _operation(draw, size):
    name = draw.choice([*OPERATIONS, "ring"])
    arguments = {"numel": draw.choice([0, 1, 4, 5000]), "dtype": draw.choice(DTYPES)}
    if name in ROOTED:
        arguments["root"] = draw.randrange(size)
    if name in REDUCING:
        arguments["op"] = draw.choice(OPS)
    return name, arguments


def _changed(draw, name, arguments, size):
    """Return what one rank does in place of an operation: another one, one with another argument, or none."""
    kinds = ["name", "skip", "twice"] + ["numel", "dtype"] * (name != "barrier")
    kinds += ["root"] * (name in ROOTED) + ["op"] * (name in REDUCING)
    kind = draw.choice(kinds if name != "ring" else ["numel", "dtype"])
    if kind == "skip":
        return []
    if kind == "twice":
        return [(name, arguments)] * 2
    if kind == "name":
        other = _operation(draw, size)
        return [other] if other[0] not in (name, "ring") else []
    different = {
        "numel": arguments["numel"] + draw.choice([1, 7, 9000, 90_000]),
        "dtype": draw.choice([dtype for dtype in DTYPES if dtype is not arguments["dtype"]]),
        "root": (arguments.get("root", 0) + 1) % size,
        "op": draw.choice([op for op in OPS if op != arguments.get("op")]),
    }
    return [(name, arguments | {kind: different[kind]})]


def play(comm, seed):
    """Run this rank's drawn program, and an operation like no other: it tells ranks that have returned from theirs."""
    programs, is_async = drawn(seed, comm.get_size())
    works = [begin(comm, name, async_op=is_async, **arguments) for name, arguments in programs[comm.get_rank()]]
    for work in works:
        work.wait()
    begin(comm, "all_gather_single", numel=77)
