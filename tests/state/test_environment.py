"""The meaning of each launcher's variables."""

import re
import warnings

import launching
import pytest
from hypothesis import given, settings, strategies as st

from easydist.state.environment import World, first_host, launched, restart_key

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "3",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_NODELIST": "gpu[001-009]",
}
MPI = {"Open MPI": OPEN_MPI, "hydra": HYDRA, "MVAPICH": MVAPICH}
ALL = {"torchrun": TORCHRUN, **MPI, "SLURM": SLURM}


def who(world):
    return world.launcher, world.rank, world.size, world.local_rank, world.local_size


def node(world):
    return world.node_rank, world.num_nodes, world.local_size if world.tells_local_size else None


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_no_launcher_is_a_world_of_one():
    assert launched({}) == World("none", 0, 1, 0, 1, "127.0.0.1", 29500)


def test_torchrun():
    assert launched(TORCHRUN) == World("torchrun", 5, 8, 1, 4, "node0", 1234, True, None, None)


def test_torchrun_by_hand_needs_rank_and_world_size_only():
    world = launched({"RANK": "1", "WORLD_SIZE": "2"})
    assert world == World("torchrun", 1, 2, 1, 2, "127.0.0.1", 29500, False, None, None)


NODES = {
    "torchrun": ({**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, (1, 2, 4)),
    "torchrun on one host": ({**TORCHRUN, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}, (0, 1, 6)),
    "torchrun without the hosts": (TORCHRUN, (None, None, 4)),
    "by hand": ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (None, None, None)),
    "by hand, alone": ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 1)),
    "SLURM": ({**SLURM, "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}, (1, 2, 4)),
    "SLURM without the nodes": (without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), (None, None, None)),
    "SLURM on one node": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, (0, 1, 8)),
    "Open MPI": (OPEN_MPI, (0, 1, 4)),
    "Open MPI on two hosts": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "a"}, (None, None, 2)),
    "hydra without local variables": (without(HYDRA, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), (None, None, None)),
    "MVAPICH": (MVAPICH, (0, 1, 4)),
    "none": ({}, (0, 1, 1)),
}


@pytest.mark.parametrize("name", NODES)
def test_hosts_as_the_launcher_tells_them(name):
    env, expected = NODES[name]
    assert node(launched(env)) == expected


def test_a_host_outside_the_hosts_is_an_error():
    with pytest.raises(ValueError, match=r"^GROUP_RANK=2 is outside of the hosts of GROUP_WORLD_SIZE=2$"):
        launched({**TORCHRUN, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"})


@pytest.mark.parametrize(("name", "rank"), [("Open MPI", 1), ("hydra", 2), ("MVAPICH", 3)])
def test_mpi_launchers(name, rank):
    world = launched(MPI[name])
    assert who(world) == ("mpi", rank, 4, rank, 4)
    assert world.address == "127.0.0.1"
    assert 20000 <= world.port < 32000


@pytest.mark.parametrize("name", MPI)
def test_all_ranks_of_one_mpi_job_find_the_same_port(name):
    env = MPI[name]
    rank, _, local, _ = list(env)[:4]
    assert len({launched({**env, rank: str(r), local: str(r)}).port for r in range(4)}) == 1


@pytest.mark.parametrize(
    ("env", "name"), [(OPEN_MPI, "PMIX_NAMESPACE"), ({**HYDRA, "I_MPI_HYDRA_UUID": "a"}, "I_MPI_HYDRA_UUID")]
)
def test_two_jobs_on_one_host_find_different_ports(env, name):
    assert len({launched({**env, name: f"job {i}"}).port for i in range(5)}) == 5


def test_slurm_inside_a_step():
    world = launched(SLURM)
    assert who(world) == ("slurm", 5, 8, 1, 4)
    assert world.address == "gpu003"
    assert 20000 <= world.port < 32000
    assert launched({**SLURM, "SLURM_PROCID": "0"}).port == world.port
    assert launched({**SLURM, "SLURM_JOB_ID": "43"}).port != world.port


def test_tasks_of_slurm_with_and_without_a_rank_of_their_own_meet():
    """Each task may set RANK, or only some: a RANK that is exported to all is right for one of them."""
    own = launched({**SLURM, "RANK": "5", "WORLD_SIZE": "8"})
    assert (own.rank, own.address, own.port) == (5, "gpu003", launched(SLURM).port)
    assert launched({**SLURM, "RANK": "1", "WORLD_SIZE": "2"}).address == "127.0.0.1"  # a world inside of a task


def test_slurm_with_an_order_of_ones_own_needs_master_addr():
    """Rank 0 may be on any host then."""
    env = {**SLURM, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(ValueError, match=r"order of your own.*export MASTER_ADDR"):
        launched(env)
    assert launched({**env, "MASTER_ADDR": "gpu004"}).address == "gpu004"
    assert launched({**env, "SLURM_STEP_NUM_NODES": "1"}).address == "gpu003"
    assert launched(env, has_group=True).size == 8


def test_slurm_outside_a_step_is_a_world_of_one():
    assert launched(without(SLURM, "SLURM_STEP_ID")) == World()


def test_slurm_on_hosts_with_different_numbers_of_tasks():
    env = {**SLURM, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
    assert launched({**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).local_size == 4
    assert launched({**env, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}).local_size == 3
    with pytest.raises(ValueError, match=r"='4,3' does not say how many tasks are on host 2$"):
        launched({**env, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})


def test_srun_with_pmi2_across_hosts_is_slurms_world():
    world = launched({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert who(world) == ("slurm", 5, 8, 1, 4)
    assert world.address == "gpu003"


def test_torchruns_variables_come_first_then_mpis_then_slurms():
    assert launched({**TORCHRUN, **OPEN_MPI, **SLURM}).launcher == "torchrun"
    assert launched({**OPEN_MPI, **SLURM}).launcher == "mpi"


@pytest.mark.parametrize("name", ALL)
def test_master_addr_and_port_are_honoured(name):
    world = launched({**ALL[name], "MASTER_ADDR": "other", "MASTER_PORT": "4321"})
    assert (world.address, world.port) == ("other", 4321)


@pytest.mark.parametrize("name", ALL)
def test_master_port_zero_means_any_that_the_ranks_agree_on(name):
    assert launched({**ALL[name], "MASTER_PORT": "0"}).port == launched(without(ALL[name], "MASTER_PORT")).port != 0


@pytest.mark.parametrize("name", ALL)
def test_empty_variables_count_as_absent(name):
    assert launched(dict.fromkeys(ALL[name], "")) == World()


@pytest.mark.parametrize("name", MPI)
def test_mpi_on_several_hosts_needs_master_addr(name):
    env = MPI[name]
    local_size = list(env)[3]
    assert launched(env | {local_size: "2"}, has_group=True).local_size == 2  # they have met already
    text = (
        "4 ranks were launched by mpi on several hosts, but MASTER_ADDR is not set: export it with the host name of "
        "rank 0 (mpirun -x MASTER_ADDR=… with Open MPI, -genv MASTER_ADDR … with Intel MPI"
    )
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        launched({**env, local_size: "2"})
    assert launched({**env, local_size: "2", "SLURM_JOB_NODELIST": "gpu[07-09]"}).address == "gpu07"
    world = launched({**env, local_size: "2", "MASTER_ADDR": "node0"})
    assert world.address == "node0"
    if name != "Open MPI":  # they name no job, and each host has a parent of its own
        assert world.port == 29500


@pytest.mark.parametrize("name", ALL)
def test_a_rank_outside_the_world_is_an_error(name):
    env = ALL[name]
    rank, size = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") if name == "SLURM" else list(env)[:2]
    with pytest.raises(ValueError, match=f"^{rank}=8 is outside the world of {size}=8$"):
        launched({**env, rank: "8", size: "8"})


@pytest.mark.parametrize("text", ["two", "-1", "2abc", "1.5"])
def test_what_is_no_number_is_an_error(text):
    with pytest.raises(ValueError, match=f"^RANK={text!r} is not a number$"):
        launched({**TORCHRUN, "RANK": text})


LONE = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_lone_process_of_accelerate_launch_is_told_so():
    with pytest.warns(
        RuntimeWarning, match="^accelerate launch started one process although it was asked for several"
    ) as record:
        assert launched(LONE) == World()
    assert "torchrun --nproc-per-node N" in str(record[0].message)


@pytest.mark.parametrize(("name", "value", "missing"), [("WORLD_SIZE", "2", "RANK"), ("RANK", "1", "WORLD_SIZE")])
def test_half_a_description_of_several_processes_is_a_warning(name, value, missing):
    with pytest.warns(
        RuntimeWarning, match=f"^{name}={value} is set, but {missing} is not, so this process works alone"
    ):
        assert launched({name: value, missing: ""}) == World()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launched({name: value}, has_group=True) == World()


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"WORLD_SIZE": "2", **OPEN_MPI},
        {**LONE, "RANK": "0", "WORLD_SIZE": "1"},
        without(LONE, "MASTER_ADDR"),
        {**LONE, **OPEN_MPI},
    ],
)
def test_nobody_else_is_warned(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launched(env)


HOSTS = {
    "gpu[003-007,012],login1": "gpu003",
    "gpu[3,5]": "gpu3",
    "gpu[12-15]": "gpu12",
    "a1,b2": "a1",
    "a1": "a1",
    "login1,gpu[1-2]": "login1",
    "n[1-2]-ib": "n1-ib",
    "n[01-02]-ib,m1": "n01-ib",
    "node-a.example.org": "node-a.example.org",
    "rack[1-2]node[3-4]": "rack1node3",
    "10.0.0.[1-4]": "10.0.0.1",
    "": "",
}


@pytest.mark.parametrize("nodelist", HOSTS)
def test_first_host_of_a_node_list(nodelist):
    assert first_host(nodelist) == HOSTS[nodelist]


@settings(max_examples=launching.examples(60), deadline=None)
@given(
    st.from_regex(r"[a-z]{1,3}-?", fullmatch=True),
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_first_host_is_the_prefix_with_the_first_number(prefix, numbers, width):
    listed = ",".join(f"{n:0{width}}" for n in numbers)
    assert first_host(f"{prefix}[{listed}],other[1-3]") == f"{prefix}{numbers[0]:0{width}}"


def test_ranks_that_a_launcher_starts_again_are_told_from_those_before():
    env = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    keys = [restart_key(env | {"TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")]
    assert len({*keys, restart_key({"WORLD_SIZE": "3"})}) == 3
    assert restart_key(env) == keys[0]


def test_the_restarts_of_an_agent_do_not_count_where_rank_0_serves_a_new_store_each_time():
    env = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert len({restart_key(env | {"TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")}) == 1
