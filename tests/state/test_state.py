"""The process state: this process and the others."""

import contextlib
import copy
import io
import os
from typing import NamedTuple

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import events, everyone

import easydist
from easydist import DisagreementError, DistributedType, PartialState, ProcessState
from easydist.state.environment import flag
from easydist.state.groups import world_of
from easydist.testing import distributed

EVERY = (1, 2, 3, 4)
SEVERAL = (2, 3, 4)


class Pair(NamedTuple):
    text: list
    number: torch.Tensor


@distributed(world_size=EVERY)
def test_attributes_of_an_adopted_group(rank, world_size):
    state = ProcessState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (rank, rank, world_size)
    assert state.is_main_process == state.is_local_main_process == (rank == 0)
    assert state.is_last_process == (rank == world_size - 1)
    assert state.use_distributed == (world_size > 1)
    assert state.distributed_type == (DistributedType.MULTI_CPU if world_size > 1 else DistributedType.NO)
    assert state.device == torch.device("cpu")
    assert (state.backend, state.debug, state.initialized) == ("gloo", False, True)
    assert state.process_group is dist.group.WORLD
    assert f"Num processes: {world_size}\nProcess index: {rank}\n" in repr(state)


def test_a_process_alone_is_a_world_of_one():
    state = ProcessState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.is_main_process
    assert state.is_last_process
    assert (state.use_distributed, state.backend, state.process_group) == (False, None, None)
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        assert everyone() == [0]
    state.destroy_process_group()


def test_partial_state_is_process_state():
    assert PartialState is ProcessState


ABSENT = {
    "_shared_state": "needs no check before it reads num_processes or use_distributed",
    "_cpu": "device.type == 'cpu'",
    "fork_launched": "read the variable FORK_LAUNCHED",
    "default_device": "use ProcessState().device",
    "rank": "use process_index",
    "world_size": "use num_processes",
    "device_mesh": "accelerate's AcceleratorState",
    "_mixed_precision": "accelerate's AcceleratorState",
}


@pytest.mark.parametrize("name", ABSENT)
def test_absent_names_of_accelerates_say_what_to_use(name):
    for owner in (PartialState, PartialState()):
        assert not hasattr(owner, name)
        with pytest.raises(
            AttributeError, match=rf"^ProcessState \(PartialState\) has no attribute '{name}': "
        ) as caught:
            getattr(owner, name)
        assert ABSENT[name] in str(caught.value)
        assert caught.value.name == name
    with pytest.raises(AttributeError, match=name):
        setattr(PartialState, name, {})


def test_every_private_name_of_accelerates_state_is_there_or_absent_by_name():
    theirs = {
        name
        for name in {*vars(accelerate.PartialState), *accelerate.PartialState._known_attrs}
        if not (name.startswith("__") or name in vars(object))
    }
    for name in theirs - set(dir(ProcessState)) - vars(ProcessState()).keys():
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': "):
            getattr(ProcessState(), name)


def test_other_unknown_names_are_plain_errors_and_copies_work():
    with pytest.raises(AttributeError, match=r"has no attribute 'ranks'$"):
        _ = ProcessState().ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch, "accelerator")
        ProcessState._reset_state()
        with pytest.raises(AttributeError, match="module 'torch' has no attribute 'accelerator'"):
            _ = ProcessState().device
    ProcessState._reset_state()
    assert copy.copy(ProcessState()).num_processes == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessState, "print", None)
        assert ProcessState().print is None


@distributed(world_size=2)
def test_every_instance_is_the_same_one(rank):
    first, second = ProcessState(), PartialState()
    first.debug = True
    assert second.debug
    second.device = "meta"
    assert first.device == torch.device("meta")
    ProcessState._reset_state()
    assert (ProcessState().debug, ProcessState().device) == (False, torch.device("cpu"))
    assert first.num_processes == 2


@distributed(world_size=SEVERAL)
def test_a_group_is_adopted_with_local_rank_unset_or_set(rank, world_size):
    assert ProcessState().local_process_index == rank
    assert everyone() == list(range(world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % 2))
        ProcessState._reset_state()
        state = ProcessState()
        assert (state.process_index, state.local_process_index) == (rank, rank % 2)
        assert state.is_local_main_process == (rank % 2 == 0)
        assert everyone() == list(range(world_size))


def node():
    state = ProcessState()
    return state.node_rank, state.num_nodes, state.local_world_size


@distributed(world_size=SEVERAL)
def test_ranks_of_an_adopted_group_know_their_hosts_after_the_first_call(rank, world_size):
    for name in ("node_rank", "num_nodes", "local_world_size"):
        with pytest.raises(
            RuntimeError, match=r"^the launcher does not tell .* call easydist.wait_for_everyone\(\) on"
        ):
            getattr(ProcessState(), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_HOST_ID", f"host {rank % 2}")
        assert everyone() == list(range(world_size))
        assert node() == (rank % 2, 2, (world_size + 1 - rank % 2) // 2)


@distributed(world_size=2)
def test_without_shared_memory_ranks_know_their_hosts_as_well(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASYDIST_SHM", "0")
        assert everyone() == [0, 1]
    assert node() == (0, 1, 2)


@distributed(world_size=2)
def test_a_group_is_adopted_whatever_another_launcher_has_left_over(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "5")
        patch.setenv("WORLD_SIZE", "2")
        ProcessState._reset_state()
        assert (ProcessState().process_index, ProcessState().num_processes) == (rank, 2)


@distributed(world_size=2)
def test_a_group_made_later_is_adopted(rank, tmp_path):
    state = ProcessState()
    state.destroy_process_group()
    assert not dist.is_initialized()
    assert (state.process_index, state.num_processes, everyone()) == (0, 1, [0])
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=1 - rank, world_size=2)
    assert (state.process_index, state.num_processes) == (1 - rank, 2)
    assert everyone() == [0, 1]


@distributed(world_size=3)
def test_destroying_a_subgroup_leaves_the_default_group(rank):
    group = dist.new_group([0, 1, 2])
    ProcessState().destroy_process_group(group)
    assert everyone() == [0, 1, 2]


@distributed(world_size=1)
def test_an_option_that_comes_too_late_is_an_error():
    late = r"must come before the first call: the process group exists already \(backend 'gloo'\)"
    with pytest.raises(ValueError, match=rf"ProcessState\(backend='nccl'\) {late}"):
        ProcessState(backend="nccl")
    with pytest.raises(ValueError, match=rf"ProcessState\(timeout=5\) {late}"):
        ProcessState(timeout=5)
    ProcessState(backend="gloo")
    ProcessState(cpu=True)


@distributed(world_size=1)
def test_cpu_comes_too_late_on_another_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
        assert ProcessState().device == torch.device("meta")
        with pytest.raises(
            ValueError, match=r"ProcessState\(cpu=True\) must come before the first use: the state is on meta already"
        ):
            ProcessState(cpu=True)


@pytest.mark.slow
def test_distributed_types_equal_those_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    for ours in DistributedType:
        theirs = accelerate.DistributedType(ours.value)
        assert ours == theirs
        assert ours in {theirs}


@distributed(world_size=EVERY)
def test_a_decorated_function_runs_where_it_says(rank, world_size):
    state = ProcessState()

    def whoami(mark, *, end=""):
        return f"{mark}{rank}{end}"

    last = world_size - 1
    for decorate, where in (
        (state.on_main_process, 0),
        (state.on_local_main_process, 0),
        (state.on_last_process, last),
        (state.on_process(process_index=last), last),
        (state.on_local_process(local_process_index=last), last),
    ):
        here = decorate(whoami)
        assert here.__name__ == "whoami"
        assert here("<", end=">") == (f"<{rank}>" if rank == where else None)
    assert state.on_process(whoami, process_index=0)("") == ("0" if rank == 0 else None)


@distributed(world_size=4)
def test_local_decorators_and_print_go_by_the_host(rank):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("LOCAL_RANK", str(rank % 2))
        state = ProcessState()
        state.print("rank", rank, sep="=", end=";")
        assert out.getvalue() == (f"rank={rank};" if rank in (0, 2) else "")
        assert state.on_local_main_process(lambda: rank)() == (rank if rank in (0, 2) else None)
        assert state.on_local_process(lambda: rank, local_process_index=1)() == (rank if rank in (1, 3) else None)


@distributed(world_size=EVERY)
def test_print_prints_on_the_main_process_only(rank):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        ProcessState().print("hello", "there")
    assert out.getvalue() == ("hello there\n" if rank == 0 else "")


def share(length: int, parts: int, part: int, padded: bool) -> list[int]:
    """Return the elements of a rank: the oracle."""
    shares = [chunk.tolist() for chunk in np.array_split(np.arange(length), parts)]
    longest = max(map(len, shares))
    return shares[part] + [length - 1] * (longest - len(shares[part]) if padded else 0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
@distributed(world_size=EVERY)
def test_split_gives_the_first_ranks_one_more(rank, world_size, length, padded):
    mine = share(length, world_size, rank, padded)
    rows = torch.arange(3 * length).view(length, 3)
    inputs = {
        "list": [f"s{i}" for i in range(length)],
        "inner": {"tuple": tuple(range(length)), "tensor": rows.half()},
        "pair": Pair([{"id": i} for i in range(length)], rows),
        "array": rows.numpy().astype(np.int16),
    }
    before = copy.deepcopy(inputs)
    with ProcessState().split_between_processes(inputs, apply_padding=padded) as got:
        assert got["list"] == [f"s{i}" for i in mine]
        assert got["inner"]["tuple"] == tuple(mine)
        assert got["inner"]["tensor"].dtype == torch.half
        assert torch.equal(got["inner"]["tensor"], rows.half()[mine])
        assert isinstance(got["pair"], Pair)
        assert got["pair"].text == [{"id": i} for i in mine]
        assert got["array"].dtype == np.int16
        assert got["array"].tolist() == rows[mine].tolist()
    for alone in ([f"s{i}" for i in range(length)], tuple(range(length)), rows, rows.numpy()):
        with ProcessState().split_between_processes(alone, apply_padding=padded) as got:
            assert type(got) is type(alone)
            assert len(got) == len(mine)
            assert all(np.array_equal(got[i], alone[j]) for i, j in enumerate(mine))
    assert repr(inputs) == repr(before)


@pytest.mark.parametrize("padded", [False, True])
@distributed(world_size=3)
def test_split_of_nothing_is_nothing(padded):
    with ProcessState().split_between_processes({"a": [], "t": torch.empty(0, 2)}, apply_padding=padded) as got:
        assert got["a"] == []
        assert got["t"].shape == (0, 2)


@distributed(world_size=3)
def test_split_asks_nobody(rank):
    if rank == 1:
        with ProcessState().split_between_processes(list(range(7))) as got:
            assert got == [3, 4]
        with (
            pytest.raises(ValueError, match=r"same length to be split between processes, got \[.a.\]: 2, \[.b.\]: 3"),
            ProcessState().split_between_processes({"a": [1, 2], "b": (1, 2, 3)}),
        ):
            pass
    assert everyone() == [0, 1, 2]


@distributed(world_size=EVERY)
def test_nobody_leaves_wait_for_everyone_before_all_have_come(tmp_path, world_size):
    store = events(tmp_path, world_size)
    for turn in range(1, 4):
        store.add("came", 1)
        ProcessState().wait_for_everyone()
        assert store.add("came", 0) >= turn * world_size
    easydist.wait_for_everyone()


@distributed(world_size=SEVERAL)
def test_waiting_while_another_rank_gathers_is_an_error_everywhere(rank, world_size):
    with pytest.raises(DisagreementError, match=r"(?s)ranks made different calls.*rank 0: wait_for_everyone\(\)"):
        easydist.wait_for_everyone() if rank == 0 else easydist.gather(torch.zeros(1))
    assert everyone() == list(range(world_size))


@distributed(world_size=4)
def test_split_shares_out_among_the_ranks_of_a_group(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with ProcessState().split_between_processes(list(range(5)), group=pairs[rank % 2]) as share:
        assert share == ([0, 1, 2] if rank < 2 else [3, 4])


@distributed(world_size=4)
def test_group_takes_a_subgroup(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    got = easydist.gather(torch.tensor([rank]), group=pairs[rank % 2])
    assert got.tolist() == [rank % 2, rank % 2 + 2]
    other = pairs[1 - rank % 2]
    with pytest.raises(ValueError, match=f"rank {rank} is not in this group: only its members may call"):
        easydist.gather(torch.tensor([rank]), group=other)
    assert everyone() == [0, 1, 2, 3]


@distributed(world_size=4)
def test_group_takes_a_mesh_of_one_dimension(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([rank])
    assert easydist.gather(x, group=mesh["tp"]).tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert easydist.gather(x, group=mesh["dp"]).tolist() == [rank % 2, rank % 2 + 2]
    with pytest.raises(ValueError, match=r"a DeviceMesh of 2 dimensions is not one group: pass mesh\[name\]"):
        easydist.gather(x, group=mesh)
    assert everyone() == [0, 1, 2, 3]


@distributed(world_size=3)
def test_a_rank_outside_a_mesh_is_told_so(rank):
    mesh = dist.DeviceMesh("cpu", [0, 1])
    if rank < 2:
        assert easydist.gather(torch.tensor([rank]), group=mesh).tolist() == [0, 1]
    else:
        with pytest.raises(ValueError, match="rank 2 is not in this group: only its members may call"):
            easydist.gather(torch.tensor([rank]), group=mesh)
    assert everyone() == [0, 1, 2]


@distributed(world_size=EVERY)
def test_group_takes_a_communicator(rank, world_size):
    comm = ProcessState().communicators().met().control
    assert easydist.gather(torch.tensor([rank]), group=comm).tolist() == list(range(world_size))
    assert easydist.gather(torch.tensor([rank]), group=dist.group.WORLD).tolist() == list(range(world_size))


@distributed(world_size=2)
def test_group_takes_nothing_else():
    with pytest.raises(TypeError, match="a one-dimensional DeviceMesh, a TorchComm or a GroupCoordinator, got int"):
        easydist.gather(torch.zeros(1), group=3)
    assert everyone() == [0, 1]


@distributed(world_size=1)
def test_debug_follows_the_environment():
    for value, debug in (("1", True), ("Yes", True), ("t", True), ("0", False), ("off", False), ("N", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_DEBUG_MODE", value)
            ProcessState._reset_state()
            assert ProcessState().debug is debug
    assert "ACCELERATE_DEBUG_MODE" not in os.environ


@pytest.mark.parametrize("name", ["ACCELERATE_DEBUG_MODE", "ACCELERATE_USE_CPU"])
@pytest.mark.parametrize("value", ["", "2", "maybe", " true"])
@distributed(world_size=1)
def test_a_flag_that_says_neither_yes_nor_no_is_an_error_until_it_does(name, value):
    with pytest.MonkeyPatch.context() as patch:
        ProcessState._reset_state()
        patch.setenv(name, value)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^invalid truth value {value} of {name}: use one of y, yes, t, "):
                ProcessState()
        patch.setenv(name, "no")
        assert ProcessState().debug is False
        patch.setenv(name, value)  # read when the first instance is made, as accelerate does
        assert ProcessState().device == torch.device("cpu")


def outcome(call):
    """Return the result; for an error its class and the beginning of its text."""
    try:
        return call()
    except ValueError as error:
        return type(error), str(error).split(" of FLAG")[0]


@pytest.mark.slow
def test_flags_are_read_as_accelerate_reads_them():
    environment = pytest.importorskip("accelerate.utils.environment")
    words = ["y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0", "True", "NO", "", "2", "ja", " 1"]
    for word in words:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLAG", word)
            assert outcome(lambda: flag("FLAG")) == outcome(lambda: environment.parse_flag_from_env("FLAG"))


def test_on_process_runs_in_a_world_of_one_whatever_the_number():
    state = ProcessState()
    assert state.on_process(process_index=3)(lambda: "ran")() == "ran"
    assert state.on_local_process(local_process_index=3)(lambda: "ran")() == "ran"


@distributed(world_size=2)
def test_an_older_instance_works_after_a_reset(rank):
    state = ProcessState()
    ProcessState._reset_state()
    assert (state.process_index, state.num_processes) == (rank, 2)


@distributed(world_size=2)
def test_destroyed_groups_are_forgotten(rank):
    from easydist.groups import known

    for _ in range(5):
        group = torch.distributed.new_group([0, 1])
        assert easydist.gather(rank, group=group).tolist() == [0, 1]
        torch.distributed.destroy_process_group(group)
    assert easydist.gather(rank, group=torch.distributed.new_group([0, 1])).tolist() == [0, 1]
    assert len(known._CACHE) == 1


@distributed(world_size=2)
def test_an_empty_local_rank_is_an_unset_one(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "")
        ProcessState._reset_state()
        assert ProcessState().local_process_index == rank


@distributed(world_size=2)
def test_variables_that_another_launch_has_left_over_do_not_count(rank):
    before = dict(os.environ)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "LOCAL_WORLD_SIZE": "2"}
    try:
        for told, size in ((1 - rank, 2), (rank, 3)):
            os.environ.update(address | {"RANK": str(told), "LOCAL_RANK": str(told), "WORLD_SIZE": str(size)})
            world = world_of(dist.group.WORLD)
            assert (world.launcher, world.rank, world.size) == ("adopted", rank, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        assert world_of(dist.group.WORLD).launcher == "torchrun"
    finally:
        os.environ.clear()
        os.environ.update(before)
