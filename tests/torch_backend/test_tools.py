"""torch's tools see the operations of a group as those of gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import easydist.process_group  # noqa: F401 - registers the backend
from easydist.base import torch_private
from easydist.errors import PeerLostError
from easydist.testing import distributed


def operations(rank, size, group):
    """Yield calls of ``torch.distributed`` by name, with the tensors that they fill."""
    mine, every = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(size)]
    flat, part = torch.empty(4 * size), torch.empty(4)
    # The names in torch 2.12 and older come second.
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    yield "all_reduce", lambda: dist.all_reduce(mine, group=group), [mine]
    yield "broadcast", lambda: dist.broadcast(mine, 0, group=group), [mine]
    yield "all_gather", lambda: dist.all_gather(every, mine, group=group), every
    yield "all_gather_single", lambda: gather_single(flat, mine, group=group), [flat]
    yield "reduce_scatter_single", lambda: scatter_single(part, flat.clone(), group=group), [part]
    yield "all_to_all_single", lambda: dist.all_to_all_single(part, mine, group=group), [part]
    yield "all_to_all", lambda: dist.all_to_all(every, [mine] * size, group=group), every
    total = mine.clone()
    yield "reduce", lambda: dist.reduce(total, 0, group=group), [total] if rank == 0 else []  # else it is not defined
    outputs = every if rank == 0 else None
    yield "gather", lambda: dist.gather(mine, outputs, 0, group=group), every
    yield "scatter", lambda: dist.scatter(part, outputs, 0, group=group), [part]
    yield "barrier", lambda: dist.barrier(group=group), []
    message = dist.isend, dist.irecv
    yield "send and recv", lambda: message[rank % 2](part, rank ^ 1, group=group).wait(), [part]


def hooked(rank, size, group):
    """Return what the hooks of a group have seen of these calls, and of calls after they have been removed."""
    seen = []
    group.register_pre_hook(
        5, lambda args: seen.append((str(args.name), args.async_op, args.root, args.op_id, shapes(args.input_tensors)))
    )
    group.register_post_hook(
        6, lambda args: seen.append((str(args.name), args.async_op, args.op_id, isinstance(args.work, dist.Work)))
    )
    for _, call, _ in operations(rank, size, group):
        call()
    dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    group.unregister_pre_hook(5)
    group.unregister_post_hook(6)
    dist.barrier(group)
    return seen


def shapes(tensors):
    return [tuple(tensor.shape) for tensor in tensors]


shown = pytest.mark.skipif(torch_private.idle_backend is None, reason="this torch shows modes no operation of Python")
later = pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch has hooks of groups from 2.14")


@later
@distributed(world_size=2)
def test_hooks_see_operations_as_they_do_with_gloo(rank):
    ours, gloo = (dist.new_group(backend=backend) for backend in ("easydist_shm", "gloo"))
    seen = hooked(rank, 2, ours)
    assert seen == hooked(rank, 2, gloo)
    assert len(seen) >= 26
    ours.register_pre_hook(5, refuse)
    with pytest.raises(ZeroDivisionError):
        dist.all_reduce(torch.ones(2), group=ours)
    ours.unregister_pre_hook(5)
    works = []
    ours.register_post_hook(6, lambda args: works.append(args.work))
    dist.gather_single(torch.ones(1), whole := torch.zeros(2) if rank == 0 else None, group=ours)
    assert rank or whole.tolist() == [1, 1]
    assert [work.operation for work in works] == ["gather_single"]


def refuse(args):
    raise ZeroDivisionError


@later
@distributed(world_size=2)
def test_torch_finds_tensors_with_nan(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        made = dist.new_group(backend="easydist_shm")
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([float("nan")]), group=made)
    dist.all_reduce(tensor := torch.ones(1), group=made)
    assert tensor.item() == 2


@later
@distributed(world_size=1)
def test_what_only_later_groups_have_is_refused_by_name(rank):
    made = dist.new_group(backend="easydist_shm")
    assert [made.supports_window, made.supports_reconfigure, made.supports_splitting] == [False] * 3
    for call in (lambda: made.new_window(torch.ones(1)), made.get_reconfigure_handle):
        with pytest.raises(RuntimeError, match="Backend easydist_shm does not support"):
            call()


@later
def test_a_group_that_torch_could_reconfigure_is_refused():
    told = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "enable_reconfigure": True}
    with pytest.raises(ValueError, match=r"easydist\.recover"):
        dist.init_process_group("easydist_shm", **told)
    assert not dist.is_initialized()


class Names(TorchDispatchMode):
    """Records the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@shown
@pytest.mark.slow
@distributed(world_size=2)
def test_a_mode_sees_the_operators_that_it_sees_with_gloo(rank, world_size):
    seen, filled = {}, {}
    for backend in ("gloo", "easydist_shm"):
        group = dist.new_group(backend=backend)
        seen[backend], filled[backend] = {}, {}
        for name, call, targets in operations(rank, world_size, group):
            with Names() as names:
                call()
            seen[backend][name] = [one for one in names.seen if one.startswith("c10d.")]
            filled[backend][name] = [target.tolist() for target in targets]
    assert seen["easydist_shm"] == seen["gloo"]
    assert all(seen["gloo"].values())
    assert filled["easydist_shm"] == filled["gloo"]


@shown
@pytest.mark.slow
@distributed(world_size=2)
def test_communication_is_counted(rank, world_size):
    group = dist.new_group(backend="easydist_shm")
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_gather([torch.empty(r + 1) for r in range(world_size)], torch.ones(rank + 1), group=group)
        dist.all_gather_object([None] * world_size, {"rank": rank}, group=group)
        dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (2,), check_invariants=True), group=group)
    assert mode.get_total_counts() == 5


@pytest.mark.slow
@distributed(world_size=2)
def test_a_profiler_shows_the_operations_and_their_waits(rank, world_size):
    group = dist.new_group(backend="easydist_shm")
    with profile() as profiler:
        dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(3), 0, group=group, async_op=True).wait()
    names = {event.key for event in profiler.key_averages()}
    assert {f"easydist_shm:{name}{wait}" for name in ("all_reduce", "broadcast") for wait in ("", " (wait)")} <= names


@pytest.mark.slow
@distributed(world_size=2)
def test_operations_stay_in_a_compiled_graph_and_errors_name_the_line_that_called_it(rank):
    group = dist.new_group(backend="easydist_shm")

    def total(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor + 1

    compiled = torch.compile(total, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"rank 0 waited in all_reduce, call \d+, at \S*test_tools\.py:\d+\n"):
            compiled(torch.ones(2))
    dist.destroy_process_group(group)
