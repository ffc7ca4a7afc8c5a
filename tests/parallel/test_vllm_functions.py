"""Tests of vLLM 0.33's names beside the collectives: context parallelism, functions of one group, partitions."""

import itertools

import pytest
import torch
import torch.distributed as dist
from coordinators import made, text_of, values
from groups import of_all
from launching import forked

import easydist
from easydist import parallel
from easydist.parallel import GroupCoordinator, get_pp_indices, parallel_groups, rank_lists
from easydist.parallel.groups import _lists
from easydist.testing import distributed


def test_ranks_of_context_parallel_groups():
    lists = _lists(8, 2, 1, None, 2, 2)
    assert lists["pcp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lists["dcp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]  # those with another pcp first
    assert lists["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists["ep"] == [[*range(8)]]
    assert lists["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert _lists(8, 2, 1, None, 2, 4)["dcp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _lists(8, 4, 2, None, 1, 2)["dcp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _lists(4, 4, 1, None, 1, 1)["dcp"] == [[0], [1], [2], [3]]
    with pytest.raises(ValueError, match="dcp=3 needs a divisor of pcp × tp, which is 4"):
        _lists(4, 4, 1, None, 1, 3)


def test_layers_of_pipeline_stages(monkeypatch):
    for layers, stages in itertools.product(range(1, 20), range(1, 6)):
        bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
        counts = [stop - start for start, stop in bounds]
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert sum(counts) == layers
        assert max(counts) - min(counts) <= 1
        assert counts[-1] == layers // stages
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,4")
    assert get_pp_indices(5, 1, 2) == (1, 5)
    for wrong in ("1,3", "5", "a,b"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", wrong)
        with pytest.raises(ValueError, match="is not a list of 2 numbers whose sum is 5"):
            get_pp_indices(5, 0, 2)


def test_parts_of_tensors():
    x = torch.arange(12).view(3, 4)
    views = parallel.split_tensor_along_last_dim(x, 2)
    assert [part.tolist() for part in views] == [x[:, :2].tolist(), x[:, 2:].tolist()]
    assert not views[0].is_contiguous()
    assert all(p.is_contiguous() for p in parallel.split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True))
    with pytest.raises(ValueError, match="4 is not divisible by 3"):
        parallel.split_tensor_along_last_dim(x, 3)
    parallel.verify_group_size_divides_partition(64, 32)
    with pytest.raises(ValueError, match=r"part of mlp\.down has 48 inputs, .* groups of 32"):
        parallel.verify_group_size_divides_partition(48, 32, "mlp.down")
    assert parallel.utils.divide is parallel.divide


@distributed(world_size=1)
def test_a_group_of_one_returns_its_tensors(rank):
    parameter = torch.ones(2, 3, requires_grad=True)
    with made(rank, 1) as group:
        compiled = torch.compile(lambda x: group.all_reduce(group.all_gather(x, 0)), fullgraph=True, backend="eager")
        for result in (group.all_reduce(parameter), group.all_gather(parameter, 0), group.reduce_scatter(parameter, 1),
                       group.gather(parameter, 0), group.cpu_all_reduce_(parameter), compiled(parameter)):  # fmt: skip
            assert result is parameter
        every = group.dispatch(parameter, parameter, extra_tensors=[parameter])
        assert every[0] is every[1] is every[2][0] is group.combine(parameter) is parameter
        assert text_of(lambda: group.combine(None)).startswith("TypeError: combine: ")
        for name in ("all_gather", "reduce_scatter"):
            found = text_of(lambda name=name: getattr(group, name)(parameter, 2))
            assert found == f"ValueError: {name}: the tensor of shape (2, 3) has no dim 2"
            found = text_of(lambda name=name: getattr(group, name)(parameter, 0.5))
            assert found == "TypeError: dim=0.5 is not a dimension: pass an integer"
        assert text_of(lambda: group.all_reduce([1])) == "TypeError: all_reduce: input_ has to be a tensor, got list"
        assert text_of(lambda: group.gather(parameter, 1)).startswith(
            "ValueError: gather: dst=1 is not a rank of the group"
        )
    assert "was destroyed" in text_of(lambda: group.all_reduce(parameter))


@distributed(world_size=(2, 3))
def test_results_are_written_into_outputs(rank, world_size):
    sizes = [2, *[1] * (world_size - 1)]
    whole = sum(values((sum(sizes), 3), torch.float32, r) for r in range(world_size))
    want = whole.split(sizes)[rank]
    with made(rank, world_size) as group:
        output = torch.zeros(3, sizes[rank]).t()  # any strides
        mine = values((sum(sizes), 3), torch.float32, rank)
        assert group.reduce_scatterv_into_output(mine, output, 0, sizes) is output
        assert torch.equal(output, want)
        total = values((5,), torch.int64, rank)
        assert group.cpu_all_reduce_(total) is total
        assert torch.equal(total, sum(values((5,), torch.int64, r) for r in range(world_size)))
        tokens = torch.ones(rank + 1, 2)
        every, _ = group.dispatch(tokens, tokens, True)
        assert group.allocate_combine_input(tuple(every.shape), every.dtype, every.device, True) is None
        part = torch.zeros(rank + 1, 2)
        assert group.combine_into_output(every, part, True) is part
        assert torch.equal(part, tokens * world_size)
        for wrong in (
            torch.zeros(9, 3),
            torch.zeros(sizes[rank], 3, dtype=torch.int32),
            torch.zeros(1).expand(sizes[rank], 3),
            None,
        ):
            found = text_of(
                lambda wrong=wrong: group.reduce_scatterv_into_output(mine, wrong if rank == 1 else output, 0, sizes)
            )
            assert found.startswith("RemoteError: reduce_scatterv: rank 1 failed before the exchange"), found
            assert "output" in found
        assert torch.equal(output, want)
        assert group.all_reduce(torch.ones(1)).item() == world_size


@distributed(world_size=2)
def test_objects_are_sent_without_waiting(rank):
    with made(rank, 2) as group:
        if rank == 0:
            handles = [group.isend_object({"step": step, "data": [0] * 10**step}, 1) for step in range(5)]
            for handle in handles:
                handle.wait()
                assert handle.is_completed()
        else:
            assert [group.recv_object(0) for _ in range(5)] == [{"step": s, "data": [0] * 10**s} for s in range(5)]


@distributed(world_size=2)
def test_attributes_and_a_sibling_of_the_device_group(rank):
    lists = [torch.tensor([0]), torch.tensor([1])]  # the rows of a layout
    group = GroupCoordinator(lists, rank, "gloo", True, use_all2all=True)
    assert (group.group_ranks, group.ranks, group.device_index) == ([[0], [1]], [rank], rank)
    assert (group.torch_distributed_backend, group.device_communicator, group.use_custom_op_call) == (
        "gloo",
        None,
        True,
    )
    limit = easydist.ProcessState().communicators().monitor.timeout
    assert group.cpu_timeout.total_seconds() == pytest.approx(limit, abs=0.01)  # torch may drop a millisecond
    sibling = group.make_sibling_device_group("beside")
    assert sibling is not group.device_group
    assert dist.get_process_group_ranks(sibling) == [rank]
    dist.destroy_process_group(sibling)
    group.destroy()
    assert text_of(lambda: GroupCoordinator([0, 1], rank, "gloo", False)) == (
        "TypeError: group_ranks has 0; pass lists of ranks, such as [[0, 1], [2, 3]]"
    )
    alone = GroupCoordinator.alone(rank, "mine")
    assert "has no group of torch.distributed" in text_of(alone.make_sibling_device_group)
    assert (alone.ranks, alone.world_size, alone.broadcast_object({"a": 1})) == ([rank], 1, {"a": 1})
    alone.destroy()


@pytest.mark.slow
@distributed(world_size=4)
def test_an_engine_with_context_parallelism(rank):
    parallel.init_distributed_environment()
    assert parallel.get_dcp_world_size_and_rank() == (1, 0)
    assert "pass backend='gloo'" in text_of(lambda: parallel.initialize_model_parallel(2, 1, "gloo"))
    parallel.initialize_model_parallel(2, 1, 2, 2, "gloo")
    assert parallel.get_pcp_group().ranks == parallel.get_dcp_group().ranks == [rank % 2, rank % 2 + 2]
    assert parallel.get_dcp_world_size_and_rank() == (2, rank // 2)
    assert parallel.get_dcp_world_size_and_rank(enabled=False) == (1, 0)
    assert parallel.get_pipeline_model_parallel_rank() == 0
    assert parallel.get_node_count() == 1
    assert (parallel.is_global_first_rank(), parallel.is_local_first_rank()) == (rank == 0, rank == 0)
    parallel.ensure_model_parallel_initialized(2, 1, 2, 2)
    with pytest.raises(ValueError, match="the group 'tp' exists with 2 ranks, not 4"):
        parallel.ensure_model_parallel_initialized(4, 1)
    x = torch.full((2,), float(rank))
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert parallel.tensor_model_parallel_all_reduce(x).tolist() == [sum(pair)] * 2
    assert parallel.tensor_model_parallel_all_gather(x).tolist() == [pair[0]] * 2 + [pair[1]] * 2
    assert parallel.tensor_model_parallel_reduce_scatter(x).tolist() == [sum(pair)]
    gathered = parallel.tensor_model_parallel_gather(x, 1)
    assert (gathered is None) if rank % 2 == 0 else (gathered.tolist() == [pair[0]] * 2 + [pair[1]] * 2)
    assert parallel.broadcast_tensor_dict({"x": x}, 1)["x"].tolist() == [pair[1]] * 2
    with parallel.graph_capture(torch.device("cpu")) as context:
        assert context.stream is None
    parallel.destroy_model_parallel()
    parallel.ensure_model_parallel_initialized(2, 2, backend="gloo")
    assert parallel.get_pcp_group().world_size == parallel.get_dcp_group().world_size == 1
    assert parallel.get_pcp_group().all_reduce(x) is x
    world = parallel.init_world_group([0, 1, 2, 3], rank, "gloo")
    pairs = parallel.init_model_parallel_group([[0, 1], [2, 3]], rank, "gloo", group_name="pairs")
    assert world.all_reduce(torch.ones(1)).item() == 4
    assert pairs.all_reduce(torch.ones(1)).item() == 2
    assert of_all(pairs.unique_name.partition(":")[0]) == ["pairs"] * 4
    for group in (world, pairs):
        group.destroy()
    parallel.destroy_distributed_environment()  # other tests begin without


@pytest.mark.slow
def test_the_path_of_a_file_store_is_taken_as_it_stands(tmp_path):
    code = f"""if True:
        from easydist import parallel
        parallel.init_distributed_environment(1, 0, "file://{tmp_path}/store#?")
        print(parallel.get_world_group().world_size)"""
    assert forked("-c", code)[0] == "1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["store#?"]


def test_a_layout_with_context_parallelism_in_one_process():
    groups = parallel_groups(pcp=1, dcp=1)
    assert groups.dcp.all_reduce(torch.ones(1)).item() == 1
    groups.destroy()
    assert rank_lists(1, {"pcp": 1}) == {"pcp": [[0]]}
    x = {"x": torch.ones(1)}
    assert parallel.broadcast_tensor_dict(x) is x  # as vLLM's, without a default process group
