"""Operations of communicators with random values, and their results as one process works them out."""

import functools

import torch

from easydist.comms import ReduceOp

NAMES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_to_all", "ring", "barrier"]
OPS = {"SUM": torch.add, "MAX": torch.maximum, "BXOR": torch.bitwise_xor, "PRODUCT": torch.mul}


def values(seed, rank, numel):
    return torch.randint(0, 5, (numel,), generator=torch.Generator().manual_seed(100 * seed + rank))


def begin(comm, step, members, me):
    """Begin one operation, and return the work, the tensor that it fills, and the values that it must have then.

    Args:
        comm: The communicator.
        step: Name, anything, number of elements, root, reduction and seed.
        members: The numbers of the ranks, from which their values follow.
        me: The place of this rank among the members.
    """
    name, _, numel, root, op, seed = step
    size = len(members)
    every = [values(seed, member, numel) for member in members]
    mine, root = every[me].clone(), root % size
    folded = functools.reduce(OPS[op], every)
    if name == "all_reduce":
        return comm.all_reduce(mine, getattr(ReduceOp, op), True), mine, folded
    if name == "reduce":
        return comm.reduce(mine, root, getattr(ReduceOp, op), True), mine, folded if me == root else every[me]
    if name == "broadcast":
        return comm.broadcast(mine, root, True), mine, every[root]
    if name == "all_gather":
        output = torch.empty(size * numel, dtype=torch.int64)
        return comm.all_gather_single(output, mine, True), output, torch.cat(every)
    if name == "gather":
        output = torch.zeros(size * numel, dtype=torch.int64)
        work = comm.gather_single(output, mine, root, True)
        return work, output, torch.cat(every) if me == root else torch.zeros_like(output)
    if name == "all_to_all":
        whole = [values(seed, member, numel * size) for member in members]
        output = torch.empty(size * numel, dtype=torch.int64)
        work = comm.all_to_all_single(output, whole[me], True)
        return work, output, torch.cat([part[numel * me : numel * (me + 1)] for part in whole])
    if name == "ring":
        output = torch.zeros(numel, dtype=torch.int64)
        batch = comm.batch_op_create()
        if size > 1:
            batch.send(mine, (me + 1) % size)
            batch.recv(output, (me - 1) % size)
            return batch.issue(True), output, every[(me - 1) % size]
    return comm.barrier(True), mine, every[me]
