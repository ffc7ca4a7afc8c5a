"""The steps of a storm. Each compares its results with those that one process works out from step, rank and members."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from operations import NAMES, OPS, begin, values
from storm_plan import SIZES, Step

import easydist
from easydist import EasydistError
from easydist.comms import ReduceOp, SignalCmpOp, TorchComm, objcol
from easydist.parallel import GroupCoordinator


class Wrong(Exception):
    """A result is not what it must be."""


class Place(NamedTuple):
    """The place of a rank among the ranks that are left.

    Attributes:
        members: Their ranks in the world.
        me: The rank of this process among them.
        group: The argument ``group=`` of verbs.
        comm: The communicator, or torch's calls with its methods; None if there is neither.
        coordinator: A coordinator of all ranks; None once one has been lost.
    """

    members: tuple[int, ...]
    me: int
    group: Any
    comm: Any
    coordinator: GroupCoordinator | None = None

    @property
    def ops(self) -> list[str]:
        """The names of the reductions; easydist_shm has none of bits."""
        return sorted(OPS) if isinstance(self.comm, TorchComm) else ["MAX", "PRODUCT", "SUM"]

    @property
    def size(self) -> int:
        return len(self.members)

    def seed(self, step: Step, part: int = 0) -> int:
        """Return a number that differs between steps, members and parts."""
        return zlib.crc32(repr((step.case, step.number, self.members, part)).encode())

    def every(self, step: Step) -> list[torch.Tensor]:
        """Return the values of all ranks."""
        return [values(self.seed(step), member, step.numel) for member in self.members]


def expect(step: Step, got: object, want: object) -> None:
    if not _equal(got, want):
        raise Wrong(f"{step}: got {str(got)[:300]}, not {str(want)[:300]}")


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_equal(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_equal, got, want))
    return bool(got == want)


# The verbs.


def _gather(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    mine = {"x": every[at.me], "rank": at.members[at.me]}
    want = {"x": torch.cat(every), "rank": torch.tensor(at.members)}
    expect(step, easydist.gather(mine, group=at.group), want)


def _broadcast(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    got = easydist.broadcast([every[at.me].clone(), at.members[at.me]], group=at.group, group_src=root)
    expect(step, got, [every[root], at.members[root]])


def _reduce(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    expect(step, easydist.reduce(every[at.me], "sum", group=at.group), sum(every))


def _scatter(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    got = easydist.scatter(every[at.me], group=at.group, group_src=root)
    expect(step, got, torch.tensor_split(every[root], at.size)[at.me])


def _all_to_all(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    want = torch.cat([torch.tensor_split(one, at.size)[at.me] for one in every])
    expect(step, easydist.all_to_all(every[at.me], group=at.group), want)


def _pad(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    lengths = [step.numel * (member % 3) // 2 for member in at.members]
    got = easydist.pad_across_processes(every[at.me][: lengths[at.me]], group=at.group)
    want = torch.zeros(max(lengths), dtype=torch.int64)
    want[: lengths[at.me]] = every[at.me][: lengths[at.me]]
    expect(step, got, want)


def _gather_object(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    got = easydist.gather_object({"x": every[at.me], "from": at.members[at.me]}, group=at.group, group_dst=root)
    want = [{"x": one, "from": member} for one, member in zip(every, at.members, strict=True)]
    expect(step, got, want if at.me == root else None)


def _broadcast_objects(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    got = easydist.broadcast_object_list([every[at.me], str(at.members[at.me])], group=at.group, group_src=root)
    expect(step, got, [every[root], str(at.members[root])])


def _scatter_objects(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    output = [None]
    inputs = [[step.number, member, one] for member, one in zip(at.members, every, strict=True)]
    easydist.scatter_object_list(output, inputs if at.me == root else None, group=at.group, group_src=root)
    expect(step, output, [[step.number, at.members[at.me], every[at.me]]])


def _tensor_dict(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    tree = {"x": every[root], "deep": {"from": at.members[root], "text": repr(step)}}
    got = easydist.broadcast_tensor_dict(tree if at.me == root else None, group=at.group, group_src=root)
    expect(step, got, tree)


def _wait(at: Place, step: Step, every: list[torch.Tensor], root: int) -> None:
    easydist.wait_for_everyone(group=at.group)


_VERBS = [_gather, _broadcast, _reduce, _scatter, _all_to_all, _pad, _gather_object, _broadcast_objects]
_VERBS += [_scatter_objects, _tensor_dict, _wait]


def verb(at: Place, step: Step) -> None:
    step.draw().choice(_VERBS)(at, step, at.every(step), step.root % at.size)


def pair(at: Place, step: Step) -> None:
    """Send a tensor dict from one rank to another; the others do nothing."""
    if at.size == 1:
        return
    source = step.root % at.size
    target = (source + 1 + step.peer % (at.size - 1)) % at.size
    tree = {"x": at.every(step)[source], "step": step.number, "members": list(at.members)}
    if at.me == source:
        easydist.send_tensor_dict(tree, target, group=at.group, group_dst=target) if at.group else _send(tree, target)
    elif at.me == target:
        expect(step, easydist.recv_tensor_dict(source, group=at.group), tree)


def _send(tree: dict[str, Any], target: int) -> None:
    easydist.send_tensor_dict(tree, target)


def coordinator(at: Place, step: Step) -> None:
    """Use the methods of a coordinator."""
    if at.coordinator is None:
        return verb(at, step)
    every, root = at.every(step), step.root % at.size
    target = (root + 1 + step.peer % (at.size - 1)) % at.size
    expect(step, at.coordinator.all_reduce(every[at.me]), sum(every))
    if at.me == root:
        at.coordinator.send_tensor_dict({"x": every[root], "step": step.number}, target)
    elif at.me == target:
        expect(step, at.coordinator.recv_tensor_dict(root), {"x": every[root], "step": step.number})
    expect(step, at.coordinator.broadcast_object(at.members[at.me], root), at.members[root])
    expect(step, at.coordinator.all_gather(every[at.me], 0), torch.cat(every))
    return None


# Communicators.


def burst(at: Place, step: Step) -> None:
    """Begin some operations, and wait for most of them in an order of this rank's own."""
    draw, own, begun = step.draw(), step.draw(at.me), []
    for part in range(draw.randint(1, 5)):
        name, numel, op = draw.choice(NAMES), draw.choice(SIZES), draw.choice(at.ops)
        one = (name, None, numel, draw.randrange(60), op, at.seed(step, part))
        begun.append((one, *begin(at.comm, one, at.members, at.me)))
    own.shuffle(begun)
    for one, work, got, want in begun:
        if own.random() < 0.9:
            work.wait()
            if not torch.equal(got, want):
                raise Wrong(f"{step}, {one}: got {got}, not {want}")


def split(at: Place, step: Step) -> None:
    """Make a communicator of some of the ranks, use it, and finalize it, also after an error."""
    draw = step.draw()
    ranks = draw.sample(range(at.size), draw.randint(1, at.size))
    if at.me not in ranks:
        return
    child, members = None, tuple(at.members[rank] for rank in ranks)
    try:
        child = at.comm.split(ranks, f"part {step.number}")
        burst(Place(members, ranks.index(at.me), child, child), step)
    except EasydistError as error:
        error.members_of_part = members
        raise
    finally:
        if child is not None:
            child.finalize()


def window(at: Place, step: Step) -> None:
    """Put values into the window of the next rank, and signal it."""
    every, to, source = at.every(step), (at.me + 1) % at.size, (at.me - 1) % at.size
    made = at.comm.window_allocate(8 * step.numel + 8)
    made.put(every[at.me], to, 1, False)
    made.signal(3, step.number + 1000, to, False)
    made.wait_signal(3, step.number + 1000, SignalCmpOp.EQ, step.root % 2 == 0).wait()
    expect(step, made.get_tensor(at.me, (step.numel,), torch.int64, 1), every[source])


def registered(at: Place, step: Step) -> None:
    """Put values into the tensor of the next rank, and signal it."""
    every, to, source = at.every(step), (at.me + 1) % at.size, (at.me - 1) % at.size
    tensor = torch.zeros(step.numel + 1, dtype=torch.int64)
    made = at.comm.new_window(tensor)
    made.put(every[at.me], to, 1, False)
    made.signal(to, False)
    made.wait_signal(source, step.root % 2 == 0).wait()
    expect(step, tensor[1:], every[source])


def objects(at: Place, step: Step) -> None:
    """Exchange objects, in one of the functions for all ranks."""
    every, root, mine = at.every(step), step.root % at.size, {"x": at.every(step)[at.me], "from": at.members[at.me]}
    all_of_them = [{"x": one, "from": member} for one, member in zip(every, at.members, strict=True)]
    output: list[Any] = [None] * (1 if step.peer % 4 == 2 else at.size)
    if step.peer % 4 == 0:
        objcol.all_gather_object(at.comm, output, mine)
        expect(step, output, all_of_them)
    elif step.peer % 4 == 1:
        objcol.gather_object(at.comm, mine, root, output if at.me == root else None)
        expect(step, output, all_of_them if at.me == root else [None] * at.size)
    elif step.peer % 4 == 2:
        objcol.scatter_object_list(at.comm, root, output, all_of_them if at.me == root else None)
        expect(step, output, [mine])
    else:
        output = [mine, step.number]
        objcol.broadcast_object_list(at.comm, output, root)
        expect(step, output, [all_of_them[root], step.number])


def message(at: Place, step: Step) -> None:
    """Send objects from one rank to another; the others do nothing."""
    if at.size == 1:
        return
    source = step.root % at.size
    target = (source + 1 + step.peer % (at.size - 1)) % at.size
    values = [at.every(step)[source], step.number]
    if at.me == source:
        objcol.send_object_list(at.comm, values, target)
    elif at.me == target:
        got = [None, None]
        objcol.recv_object_list(at.comm, got, source)
        expect(step, got, values)


PLAY: dict[str, Callable[[Place, Step], None]] = {
    "verb": verb,
    "pair": pair,
    "coordinator": coordinator,
    "burst": burst,
    "split": split,
    "window": window,
    "registered": registered,
    "objects": objects,
    "message": message,
}


# torch's own calls, with the methods of a communicator.


class TorchCalls:
    """The functions of ``torch.distributed`` over one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Any:
        return dist.all_reduce(tensor, _torch_op(op), self._group, async_op)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool) -> Any:
        return dist.reduce(tensor, op=_torch_op(op), group=self._group, async_op=async_op, group_dst=root)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        return dist.broadcast(tensor, group=self._group, async_op=async_op, group_src=root)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(output, tensor, self._group, async_op)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        size = dist.get_world_size(self._group)
        parts = list(output.view(size, -1)) if dist.get_rank(self._group) == root else None
        return dist.gather(tensor, parts, group=self._group, async_op=async_op, group_dst=root)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Any:
        return dist.all_to_all_single(output, tensor, group=self._group, async_op=async_op)

    def batch_op_create(self) -> _TorchBatch:
        return _TorchBatch(self._group)

    def barrier(self, async_op: bool) -> Any:
        return dist.barrier(self._group, async_op)


class _TorchBatch:
    """Messages that begin together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ops, self._works = group, list[dist.P2POp](), list[Any]()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._ops.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer))

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._ops.append(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer))

    def issue(self, async_op: bool) -> _TorchBatch:
        self._works = dist.batch_isend_irecv(self._ops)
        return self

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _torch_op(op: ReduceOp) -> Any:
    return getattr(dist.ReduceOp, op.type.name)
