"""Coordinators: making, destroying and compiling them, and the requests of engines."""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from coordinators import made, text_of
from groups import of_all
from torch.distributed.device_mesh import init_device_mesh

from easydist import gather, parallel
from easydist.parallel import GroupCoordinator, parallel_groups
from easydist.testing import distributed

MISTAKES = {
    "rank 2 of the world is missing": ([[0, 1]], "ValueError: group_ranks=[[0, 1]] does not have rank 2"),
    "one rank twice": ([[0, 1, 2], [2]], "ValueError: group_ranks has rank 2 twice"),
    "no such rank": ([[0, 1, 2, 3]], "ValueError: group_ranks has rank 3, but the world has 3 ranks"),
    "not in order": ([[2, 0], [1]], "ValueError: group_ranks has [2, 0]; torch.distributed accepts ranks in ascending"),
    "no numbers": ([["a"], [0, 1, 2]], "TypeError: "),
}


@distributed(world_size=3)
def test_lists_that_do_not_fit_are_refused_on_all_ranks_before_a_group_is_made(rank):
    count = len(dist.distributed_c10d._world.pg_map)
    for lists, begin in MISTAKES.values():
        found = text_of(lambda lists=lists: GroupCoordinator(lists, rank, "gloo", False))
        assert found.startswith(begin), found
    for lists, backend in ([[[0], [1, 2]], [[0, 1], [2]]][rank % 2], "gloo"), ([[0, 1, 2]], ["gloo", "nccl"][rank % 2]):
        found = text_of(lambda lists=lists, backend=backend: GroupCoordinator(lists, rank, backend, False))
        assert found.startswith("DisagreementError: ")
        assert len(set(of_all(found))) == 1
    for name in ("use_device_communicator", "use_message_queue_broadcaster", "weights_only"):
        options = {"use_device_communicator": False, name: rank == 1}
        found = text_of(lambda options=options: GroupCoordinator([[0, 1, 2]], rank, "gloo", **options))
        assert found.startswith("DisagreementError: "), found
        assert f"{name}=True" in found
    assert "RemoteError" in text_of(lambda: GroupCoordinator([[0, 1, 2]], None if rank else 0, "gloo", False))
    assert len(dist.distributed_c10d._world.pg_map) == count


@distributed(world_size=2)
def test_destroy_takes_everything_down_and_may_be_called_twice(rank):
    count = len(dist.distributed_c10d._world.pg_map)
    group = GroupCoordinator([[0, 1]], rank, "easydist_shm" if False else "gloo", True, True)
    assert repr(group).endswith(f"ranks=[0, 1], rank_in_group={rank})")
    group.prepare_communication_buffer_for_model(torch.nn.Linear(1, 1))
    assert group.all_reduce(torch.ones(1)).item() == 2
    with group.graph_capture() as context:
        assert context.stream is None
        with group.graph_capture(context) as again:
            assert again is context
    group.barrier()
    group.destroy()
    group.destroy()
    assert (group.cpu_group, group.device_group, group.mq_broadcaster) == (None, None, None)
    assert len(dist.distributed_c10d._world.pg_map) == count
    assert "was destroyed; make a new GroupCoordinator" in text_of(lambda: group.all_reduce(torch.ones(1)))
    with made(rank, 2) as group:  # a new one works
        assert group.all_reduce(torch.ones(1)).item() == 2


@distributed(world_size=2)
def test_a_rank_that_destroys_a_coordinator_says_so_at_once(rank):
    group = GroupCoordinator([[0, 1]], rank, "gloo", False)
    group.barrier()
    if rank == 1:
        group.destroy()
    assert of_all(rank) == [0, 1]
    if rank == 0:
        assert group.communicators.monitor.peers[1].has_left()
        assert "rank 1 has left the group" in text_of(group.barrier)
        group.destroy()


@pytest.mark.slow
@distributed(world_size=2)
def test_collectives_are_part_of_a_compiled_function(rank):
    with made(rank, 2) as group:

        def layer(x):
            y = group.all_reduce(x * 2) + 1
            z = group.all_gather(y, -1)
            return group.reduce_scatter(z, 0)[:, :4] - group.all_gather(x, 0)[:1]

        x = torch.arange(8.0).view(2, 4) * (rank + 1)
        want = layer(x)
        assert torch.equal(compiled(layer, x), want)
        assert group.all_gather(torch.ones(1 + rank), 0).shape == (3,)
        name = group.unique_name
    gc.collect()
    with pytest.raises(LookupError, match="there is no GroupCoordinator"):
        torch.ops.easydist.group_all_reduce(x, name)


def compiled(function, *args):
    """Call a compiled function; the compiler's own warnings are no concern of the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(function, fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.slow
@distributed(world_size=3)
def test_sizes_that_differ_in_a_compiled_function_are_an_error_on_all_ranks(rank):
    with made(rank, 3) as group:
        found = text_of(
            lambda: compiled(lambda x: group.all_gather(x, 0), torch.ones(rank + 1, 2))
        )  # 1 + 2 + 3 = 3 * 2
        told = "rank 0: (1, 2), rank 1: (2, 2), rank 2: (3, 2)\nCall all_gatherv outside of it."
        assert found.startswith(
            "DisagreementError: all_gather: in a compiled function all ranks need one size along dim 0"
        )
        assert found.endswith(told)
        assert group.all_reduce(torch.ones(1)).item() == 3


@pytest.mark.slow
@distributed(world_size=2)
def test_a_compiled_call_whose_result_one_rank_does_not_use_still_happens(rank):
    with made(rank, 2) as group:

        def layer(x):
            every, total, part = group.all_gather(x, 0), group.all_reduce(x), group.reduce_scatter(x)
            return every + torch.cat([total, part, part]) if group.is_first_rank else x

        x = torch.arange(2.0) + rank
        assert torch.equal(compiled(layer, x), layer(x))
        assert group.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.slow
@distributed(world_size=2)
def test_compiled_functions_take_parameters_and_tensors_without_dimensions(rank):
    with made(rank, 2) as group:

        def layer(x, weight):
            total, part = group.all_reduce(x * weight), group.reduce_scatter(x * weight)
            return total * group.all_gather(x.sum()), part * weight[:1]

        x, weight = torch.arange(2.0) + rank, torch.ones(2, requires_grad=True)
        for got, want in zip(compiled(layer, x, weight), layer(x, weight), strict=True):
            assert torch.equal(got, want)
            assert got.requires_grad == want.requires_grad
        compiled(layer, x, weight)[1].sum().backward()
        assert weight.grad[0] == layer(x, weight)[1].item()


def mixture(hidden, logits, experts):
    """One process: each token goes to its best expert."""
    best = logits.argmax(-1)
    return (
        torch.stack([experts[e] @ token for e, token in zip(best.tolist(), hidden, strict=True)])
        if len(hidden)
        else hidden
    )


@pytest.mark.slow
@distributed(world_size=(1, 2, 3, 4))
def test_a_mixture_of_experts_equals_that_of_one_process(rank, world_size):
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 2, 5][:world_size]
    hidden = torch.randint(-3, 4, (sum(sizes), 4), generator=generator).float()
    logits = torch.rand(sum(sizes), world_size, generator=generator)
    experts = torch.randint(-3, 4, (world_size, 4, 4), generator=generator).float()
    want = mixture(hidden, logits, experts).split(sizes)[rank]
    mine, mine_logits = hidden.split(sizes)[rank], logits.split(sizes)[rank]
    with made(rank, world_size) as group:
        for call in (group.dispatch, group.dispatch_router_logits):
            every, every_logits = call(mine, mine_logits)
            assert torch.equal(every, hidden)
            assert torch.equal(every_logits, logits)
            own = (every_logits.argmax(-1) == rank).unsqueeze(-1) * (every @ experts[rank].t())
            assert torch.equal(group.combine(own), want)
        weights, ids = mine_logits.max(-1, keepdim=True)
        for form in ((mine, weights, ids), (mine, weights, ids, True, [ids + 1])):
            got = group.dispatch(*form)
            assert torch.equal(got[2].flatten(), logits.argmax(-1))
            assert len(got) == 3 or torch.equal(got[3][0].flatten(), logits.argmax(-1) + 1)
        got = group.dispatch(hidden_states=mine, topk_weights=weights, topk_ids=ids)
        assert torch.equal(got[1].flatten(), logits.max(-1).values)
        with_extra = group.dispatch(mine, router_logits=mine_logits, extra_tensors=[mine + 1])
        assert torch.equal(with_extra[2][0], hidden + 1)
        if world_size > 1:
            assert "there was no dispatch of 99 tokens" in text_of(lambda: group.combine(torch.ones(99, 4)))


@distributed(world_size=2)
def test_a_rank_whose_tokens_are_wrong_makes_all_ranks_raise(rank):
    with made(rank, 2) as group:
        x = torch.ones(2, 3)
        for wrong in (None, x[0, 0], x[:1]):
            found = text_of(lambda wrong=wrong: group.dispatch(wrong if rank else x, x))
            assert found.startswith("RemoteError: "), found
            assert "dispatch: each tensor needs one row per token, got [" in found
        assert text_of(lambda: group.dispatch(x, x, x[:1])).startswith("ValueError: dispatch: ")
        group.dispatch(x, x)
        for wrong in (torch.ones(5, 3), torch.ones(()), None):
            found = text_of(lambda wrong=wrong: group.combine(wrong if rank else torch.ones(4, 3)))
            assert found.startswith("RemoteError: "), found
        assert text_of(lambda: group.combine(x)).startswith("RuntimeError: combine: there was no dispatch of 2 tokens")
        assert group.combine(torch.ones(4, 3)).tolist() == [[2.0] * 3] * 2


@pytest.mark.slow
@distributed(world_size=4)
def test_groups_of_a_layout_and_vllms_names(rank):
    groups = parallel_groups(tp=2, pp=2)
    assert [groups[name].ranks for name in groups] == [
        [0, 1, 2, 3],
        [rank],
        [rank % 2, rank % 2 + 2],
        [rank],
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank],
    ]
    assert groups.tp.all_reduce(torch.tensor([rank])).item() == [1, 1, 5, 5][rank]
    hidden = torch.full((2, 3), float(rank))
    assert groups.ep.dispatch(hidden, hidden)[0].shape == (2, 3)  # one data-parallel group: the tokens are the same
    assert groups.ep.dispatch(hidden, hidden, is_sequence_parallel=True)[0].shape == (4, 3)
    assert groups.ep.combine(torch.ones(4, 3), is_sequence_parallel=True).tolist() == [[2.0] * 3] * 2
    with pytest.raises(AttributeError, match="there is no group 'cp'; there are world, dp, pp, pcp, tp, ep, dcp"):
        groups.cp.barrier()
    assert copy.copy(groups).tp is groups.tp
    groups.destroy()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    of_mesh = parallel_groups(mesh)
    assert [of_mesh[name].ranks for name in ("dp", "tp")] == [
        [rank % 2, rank % 2 + 2],
        [rank // 2 * 2, rank // 2 * 2 + 1],
    ]
    of_mesh.destroy()
    assert text_of(lambda: parallel_groups(tp=3)).startswith(
        "ValueError: a layout of dp=1 × pp=1 × pcp=1 × tp=3 needs 3 ranks"
    )
    assert text_of(lambda: parallel_groups(tp=0)).startswith(
        "ValueError: a layout needs at least one rank along each axis, got tp=0"
    )
    assert text_of(lambda: parallel_groups(tp="2")) == "TypeError: tp='2' is not a number of ranks: pass an integer"
    assert text_of(lambda: parallel_groups(tp=3 if rank else 2)).startswith(
        "RemoteError: parallel_groups: ranks 1, 2, 3"
    )
    assert text_of(lambda: parallel_groups(tp=4 if rank else 2)).startswith("DisagreementError: ")

    with pytest.raises(RuntimeError, match="call initialize_model_parallel first"):
        parallel.get_tp_group()
    parallel.init_distributed_environment()
    parallel.initialize_model_parallel(2, 2)
    assert parallel.model_parallel_is_initialized()
    assert parallel.get_world_group().world_size == 4
    assert parallel.get_tensor_model_parallel_rank() == parallel.get_tp_group().rank_in_group == rank % 2
    assert parallel.get_tensor_model_parallel_world_size() == 2
    assert parallel.get_pp_group().is_first_rank == (rank < 2)
    assert parallel.get_tp_group().broadcast_object(rank, src=1) == rank // 2 * 2 + 1
    assert (parallel.get_dp_group().world_size, parallel.get_ep_group().world_size) == (1, 2)
    assert parallel.in_the_same_node_as(parallel.get_world_group(), 3) == [True] * 4
    for source in (4, "a"):  # of one rank only
        found = text_of(lambda source=source: parallel.in_the_same_node_as(None, 0 if rank else source))
        assert found.startswith("ValueError: in_the_same_node_as: source_rank=4" if source == 4 else "TypeError: "), (
            found
        )
    with pytest.raises(RuntimeError, match="exist already"):
        parallel.initialize_model_parallel(2, 2)
    parallel.destroy_model_parallel()
    assert not parallel.model_parallel_is_initialized()
    parallel.get_world_group().destroy()
    with pytest.raises(RuntimeError, match="'world' does not exist; call init_distributed_environment first"):
        parallel.get_world_group()
    parallel.init_distributed_environment()
    assert parallel.get_world_group().all_reduce(torch.ones(1)).item() == 4
    dist.barrier()
    parallel.destroy_distributed_environment()
    assert not dist.is_initialized()


@distributed(world_size=3)
def test_a_group_of_its_own_needs_no_default_world(rank):
    world = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    members = {1: 0, 2: 1}  # rank 0 stays outside
    if rank in members:
        for name in ("weights", "more weights"):
            store = dist.PrefixStore("later", world)
            group = GroupCoordinator.stateless(store, members[rank], 2, name, use_message_queue_broadcaster=True)
            assert (group.ranks, group.rank_in_group) == ([0, 1], members[rank])
            assert group.all_gather(torch.tensor([float(rank)])).tolist() == [1, 2]
            assert gather(torch.tensor([rank]), group=group).tolist() == [1, 2]
            assert gather(torch.tensor([rank]), group=group.cpu_group).tolist() == [1, 2]
            assert group.broadcast_object(rank, 1) == 2
            if rank == 1:
                group.send_tensor_dict({"x": torch.arange(100_000)})
            else:
                assert group.recv_tensor_dict()["x"].sum() == 4999950000
            group.barrier()
            group.destroy()
            group.destroy()
        for name in ("use_message_queue_broadcaster", "weights_only"):
            options = {"use_message_queue_broadcaster": False, name: rank == 1}
            found = text_of(
                lambda name=name, options=options: GroupCoordinator.stateless(
                    world, members[rank], 2, f"{name} differs", **options
                )
            )
            assert found.startswith("DisagreementError: "), found
    found = text_of(lambda: GroupCoordinator.stateless(world, 0, 3, f"only {rank}", timeout=0.2))
    assert found.startswith(f"CollectiveTimeout: GroupCoordinator.stateless 'only {rank}': 2 of 3 ranks did not come")
    assert "\n  rank 1: missing; not seen in this group yet\n  rank 2: missing; " in found
    found = text_of(lambda: GroupCoordinator.stateless(world, 2, 2, "too few"))
    assert found == "ValueError: GroupCoordinator.stateless: rank=2 is not below world_size=2; count from 0"
