"""The number of exchanges of every verb, as its docstring says under "Cost": the same for one leaf and for many."""

import math

import pytest
import torch
from counting import exchanges
from groups import short_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import easydist
from easydist import memory
from easydist.testing import distributed

SMALL, MANY, LARGE = "small", "many", "large"
SIZES = {
    SMALL: lambda: {"x": torch.ones(6)},
    MANY: lambda: {str(i): torch.ones(2 + i % 3) for i in range(500)},
    LARGE: lambda: {"x": torch.ones(300_000)},
}
HEADER = ["header"]


def only_on(wanted, tree):
    """The tree on one rank, None on the others."""
    return tree if torch.distributed.get_rank() == wanted else None


VERBS = {
    "gather": (easydist.gather, [], ["all_gather"]),
    "gather to one": (lambda tree: easydist.gather(tree, dst=1), [], ["gather"]),
    "broadcast": (easydist.broadcast, [], ["broadcast"]),
    "broadcast to None": (
        lambda tree: easydist.broadcast(only_on(0, tree)),
        ["header", "header", "broadcast"],
        ["header", "header", "broadcast"],
    ),
    "copy_tensor_to_devices": (
        lambda tree: easydist.copy_tensor_to_devices(only_on(1, tree)),
        ["header", "header", "broadcast"],
        ["header", "header", "broadcast"],
    ),
    "scatter": (easydist.scatter, ["header", "scatter"], ["header", "scatter"]),
    "all_to_all": (easydist.all_to_all, ["all_to_all"], ["all_to_all"]),
    "reduce": (easydist.reduce, [], ["all_reduce"]),
    "reduce to nothing": (lambda tree: easydist.reduce(tree, "none"), [], []),
    "gather_object": (easydist.gather_object, [], ["all_gather"]),
    "broadcast_object_list": (lambda tree: easydist.broadcast_object_list([tree]), [], ["broadcast"]),
    "broadcast_tensor_dict": (
        lambda tree: easydist.broadcast_tensor_dict(only_on(0, tree)),
        [],
        ["header", "broadcast"],
    ),
    "pad_across_processes": (easydist.pad_across_processes, [], []),
    "assert_equal": (easydist.assert_equal, [], []),
}


@pytest.mark.parametrize("verb", VERBS)
@distributed(world_size=[2, 3])
def test_a_header_and_what_follows_it(verb):
    call, *wanted = VERBS[verb]
    for size, want in zip((SMALL, LARGE), wanted, strict=True):
        tree = SIZES[size]()
        assert exchanges(lambda tree=tree: call(tree)) == HEADER + want


@pytest.mark.parametrize("verb", ["gather", "broadcast", "all_to_all", "reduce", "gather_object"])
@distributed(world_size=2)
def test_many_small_leaves_cost_what_one_costs(verb):
    call, small, _ = VERBS[verb]
    tree = SIZES[MANY]()
    assert exchanges(lambda: call(tree)) == HEADER + small


@pytest.mark.slow
@distributed(world_size=2)
def test_structures_with_no_room_in_the_header_are_broadcast_as_well(rank):
    tree = {f"{i:06}": torch.ones(2) for i in range(5000)}
    data = ["header", "broadcast", "header", "broadcast"]
    with short_rows() as group:
        easydist.wait_for_everyone(group=group)
        mine = only_on(0, tree)
        assert exchanges(lambda: easydist.broadcast(mine, group=group)) == HEADER + data
        assert exchanges(lambda: easydist.copy_tensor_to_devices(mine, group=group)) == HEADER + data
        assert exchanges(lambda: easydist.scatter(mine, group=group)) == [*HEADER, "broadcast", "header", "scatter"]


@pytest.mark.slow
@distributed(world_size=2)
def test_sizes_that_differ_travel_with_the_header_where_they_have_room(rank):
    some, many = ({str(i): torch.ones(1 + rank + i % 2) for i in range(n)} for n in (100, 5000))
    with short_rows() as group:
        easydist.wait_for_everyone(group=group)
        assert exchanges(lambda: easydist.pad_across_processes(some, group=group)) == HEADER
        assert exchanges(lambda: easydist.pad_across_processes(many, group=group)) == [*HEADER, "all_gather"]
        assert exchanges(lambda: easydist.gather(some, group=group)) == HEADER
        assert exchanges(lambda: easydist.gather(many, group=group)) == [*HEADER, "all_gather", "all_gather"]
        assert exchanges(lambda: easydist.all_to_all(some, group=group)) == [*HEADER, "all_to_all"]
        assert exchanges(lambda: easydist.all_to_all(many, group=group)) == [*HEADER, "all_gather", "all_to_all"]


@distributed(world_size=2)
def test_reduce_takes_each_dtype_alone_and_large_leaves_together(rank):
    small = {"float": torch.ones(20_000), "double": torch.ones(20_000).double(), "half": torch.ones(20_000).half()}
    assert exchanges(lambda: easydist.reduce(small, "sum")) == HEADER + 2 * ["all_reduce"]
    large = {"a": torch.ones(70_000), "b": torch.ones(70_000), "c": torch.ones(5000), "d": torch.ones(5000)}
    assert exchanges(lambda: easydist.reduce(large)) == HEADER + 2 * ["all_reduce"]


@pytest.mark.parametrize(("numel", "messages"), [((1 << 16) - 1, 1), (1 << 16, 2), ((1 << 16) + 1, 2)])
@distributed(world_size=2)
def test_a_leaf_of_256_kib_is_large(rank, numel, messages):
    tree = {"x": torch.full((numel,), 1.0 + rank), "y": torch.full((9,), 3.0 + rank)}
    with short_rows() as group:
        easydist.wait_for_everyone(group=group)
        assert exchanges(lambda: easydist.reduce(tree, group=group)) == HEADER + messages * ["all_reduce"]
        assert exchanges(lambda: easydist.reduce({"x": tree["x"]}, group=group)) == [*HEADER, "all_reduce"]
    for verb, want in {
        easydist.gather: {"x": [1.0, 2.0], "y": [3.0, 4.0]},
        easydist.broadcast: {"x": [1.0], "y": [3.0]},
        easydist.reduce: {"x": [1.0], "y": [3.0]},  # after the broadcast
    }.items():
        assert {name: leaf.unique().tolist() for name, leaf in verb(tree).items()} == want


@pytest.mark.parametrize("verb", ["gather", "gather to one", "broadcast", "all_to_all"])
@distributed(world_size=4)
def test_a_single_leaf_is_not_packed_even_if_it_is_small(verb, rank):
    asked, empty = [], memory.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "empty", lambda *args: asked.append(args[0]) or empty(*args))
        VERBS[verb][0]({"x": torch.ones(40_000)})
    gathered = {"gather": 160_000, "gather to one": 160_000 * (rank == 1), "all_to_all": 40_000}
    assert sum(map(math.prod, asked)) == gathered.get(verb, 0)


@pytest.mark.parametrize("numel", [1, 300_000])
@distributed(world_size=[2, 3])
def test_scatter_object_list(rank, world_size, numel):
    output, values = [None], [torch.ones(numel)] * world_size
    found = exchanges(lambda: easydist.scatter_object_list(output, only_on(0, values)))
    assert found == ["header", "broadcast", "scatter"]


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ({"x": torch.empty(0, 3), "y": 1}, 0),
        ({"x": torch.ones(2), "y": 1}, 0),
        ({"x": torch.ones(40_000), "y": torch.ones(40_000)}, 1),
        ({"x": torch.ones(70_000), "y": torch.ones(70_000), "z": torch.ones(2)}, 3),
    ],
    ids=["empty", "small", "packed", "large"],
)
@distributed(world_size=2)
def test_tensor_dicts_between_two_ranks_and_to_all(rank, tree, count):
    def call():
        return easydist.recv_tensor_dict(0) if rank else easydist.send_tensor_dict(tree, 1)

    easydist.wait_for_everyone()  # from now on, frames go through shared memory
    assert exchanges(call) == count * ["recv" if rank else "send"]
    into = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for name, value in tree.items()}
    sent = ["header", "header"] + count * ["broadcast"]
    assert exchanges(lambda: easydist.broadcast_tensor_dict(tree, into=into)) == sent


@distributed(world_size=2)
def test_nothing_of_a_refused_tree_is_sent(rank):
    easydist.wait_for_everyone()  # from now on, frames go through shared memory

    def call():
        tree = {"x": torch.ones(1 if rank else 300_000)}
        with pytest.raises(easydist.DisagreementError):
            easydist.recv_tensor_dict(0, into=tree) if rank else easydist.send_tensor_dict(tree, 1)

    assert exchanges(call) == ["send" if rank else "recv"]  # the refusal


@distributed(world_size=2)
def test_synchronize_rng_states():
    assert exchanges(lambda: easydist.synchronize_rng_states(["torch", "numpy", "python"])) == HEADER


def body_of(manager):
    with manager:
        pass


@distributed(world_size=2)
def test_barriers():
    assert exchanges(easydist.wait_for_everyone) == HEADER
    assert exchanges(lambda: body_of(easydist.together())) == HEADER
    assert exchanges(lambda: body_of(easydist.ProcessState().main_process_first())) == 2 * HEADER


@pytest.mark.slow
@pytest.mark.parametrize(("numel", "data"), [(4, []), (300_000, ["broadcast"])])
@distributed(world_size=2)
def test_gathered_parameters(numel, data):
    plain = torch.nn.Parameter(torch.ones(numel))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(numel), init_device_mesh("cpu", (2,)), [Shard(0)]))
    for parameter in (plain, sharded):  # whose all-gather is torch's own
        assert exchanges(lambda parameter=parameter: body_of(easydist.GatheredParameters(parameter))) == 3 * HEADER
        written = exchanges(lambda parameter=parameter: body_of(easydist.GatheredParameters(parameter, 1)))
        assert written == 4 * HEADER + data
