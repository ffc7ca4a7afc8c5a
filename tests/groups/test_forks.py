"""A forked child must not speak in its parent's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import forked, free_port, in_a_child, within

import easydist
import easydist.process_group
from easydist.testing import distributed

ROOT = Path(__file__).parent.parent.parent

CHILD_CALLS_FIRST = """
import os, easydist, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if (child := os.fork()) == 0:
    try:
        easydist.gather(1.0)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_groups_made_before_the_first_use_of_easydist_are_known_as_the_parents():
    command, env = [sys.executable, "-c", CHILD_CALLS_FIRST], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("this process is a child of a rank of the group and not a rank itself")


LOADS_DATA = """
import os, sys, torch, easydist
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        state = easydist.ProcessState()
        try:
            easydist.gather(torch.ones(1))
        except RuntimeError as error:
            return f"{state.process_index} of {state.num_processes}: {error}"

if __name__ == "__main__":
    if "first" in sys.argv:
        easydist.gather(1)
    rank = easydist.ProcessState().process_index
    for texts in DataLoader(Data(), num_workers=1, multiprocessing_context=sys.argv[-1]):
        assert texts[0].startswith(f"{rank} of 2: this process is a child of a rank of the group"), texts
    assert easydist.gather(rank).tolist() == [0, 1]
    os.write(1, f"well {rank}\\n".encode())
"""

STARTS_CHILDREN = """
import os, subprocess, sys, easydist, torch.distributed as dist
from multiprocessing import get_context

def told(_):
    try:
        return easydist.gather(1, timeout=20)
    except RuntimeError as error:
        return str(error)

if __name__ == "__main__":
    if "torch" in sys.argv:
        dist.init_process_group("gloo")
    rank = easydist.gather_object(easydist.ProcessState().process_index).index(int(os.environ["RANK"]))
    start = f"rank {rank} is process {os.getpid()}; this process is a child of a rank of the group"
    if rank == 0 or "torch" in sys.argv:  # the others would take a child for this rank, or the children one another
        with get_context("spawn").Pool(1) as pool:
            assert pool.map(told, [0])[0].startswith(start)
        done = subprocess.run([sys.executable, "-c", "import easydist; easydist.gather(1, timeout=20)"],
                              capture_output=True, text=True)
        assert f"RuntimeError: {start}" in done.stderr, done.stderr
    assert easydist.gather(rank).tolist() == [0, 1]
    os.write(1, f"well {rank}\\n".encode())
"""

LAUNCHES = """
import os, sys, torch, easydist
from accelerate import debug_launcher, notebook_launcher

def train():
    state = easydist.ProcessState()
    ranks = easydist.gather(torch.tensor([state.process_index])).tolist()
    os.write(1, f"rank {state.process_index} of {state.num_processes} {ranks}\\n".encode())

if "first" in sys.argv:
    assert easydist.ProcessState().num_processes == 1
    easydist.gather(1)
if "debug" in sys.argv:
    debug_launcher(train, num_processes=2)
else:
    notebook_launcher(train, (), num_processes=2, use_port=sys.argv[1])
"""

FORKS_RANKS = """
import os, sys, torch, easydist
from multiprocessing import get_context

def rank(index, port):
    os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.write(1, f"{easydist.gather_object(index)}\\n".encode())

import torch.distributed as dist
if "first" in sys.argv:  # a group of one of the parent's own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    easydist.gather(1)
children = [get_context("fork").Process(target=rank, args=(i, sys.argv[1])) for i in range(2)]
for child in children: child.start()
for child in children: child.join()
assert [child.exitcode for child in children] == [0, 0]
assert easydist.gather(7).tolist() == [7]
"""


def run(folder, text, *arguments, torchrun=False):
    script = folder / "script.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "works alone" not in done.stderr
    return sorted(done.stdout.splitlines())


WHEN = pytest.mark.parametrize("when", ["later", pytest.param("first", marks=pytest.mark.battery)])


@pytest.mark.slow
@pytest.mark.parametrize(("when", "context"), [("first", "fork"), ("later", "fork"), ("first", "spawn")])
def test_a_worker_of_a_data_loader_knows_its_rank_and_exchanges_nothing(tmp_path, when, context):
    assert run(tmp_path, LOADS_DATA, when, context, torchrun=True) == ["well 0", "well 1"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["yes", "no"])
def test_a_child_that_was_not_forked_exchanges_nothing_and_disturbs_nobody(tmp_path, monkeypatch, memory):
    monkeypatch.setenv("EASYDIST_SHM", memory)
    assert run(tmp_path, STARTS_CHILDREN, torchrun=True) == ["well 0", "well 1"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "easydist_shm"])
@distributed(world_size=2)
def test_a_child_does_not_recover_the_group_of_its_parent(rank, backend):
    group = dist.new_group(backend=backend)
    assert easydist.reduce(1, "sum", group=group) == 2
    if rank == 0:
        told = in_a_child(lambda: easydist.recover(group))
        assert told.startswith("this process is a child of a rank of the group")
    assert easydist.reduce(1, "sum", group=group) == 2  # rank 1 has waited here meanwhile, and heard of no recovery
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == 2


@pytest.mark.slow
def test_a_child_of_a_rank_whose_group_torch_has_made_exchanges_nothing(tmp_path):
    assert run(tmp_path, STARTS_CHILDREN, "torch", torchrun=True) == ["well 0", "well 1"]


@pytest.mark.slow
def test_a_child_of_rank_0_is_told_so_where_that_rank_serves_the_store(tmp_path):
    script, port = tmp_path / "script.py", str(free_port())
    script.write_text(STARTS_CHILDREN)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | env | {"PYTHONPATH": str(ROOT), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        assert process.communicate(timeout=within(60)) == (f"well {rank}\n", "")


@pytest.mark.slow
@WHEN
@pytest.mark.parametrize("launcher", ["notebook", "debug"])
def test_the_children_of_accelerates_launchers_are_ranks(tmp_path, launcher, when):
    lines = run(tmp_path, LAUNCHES, str(free_port()), launcher, when)
    assert [line for line in lines if line.startswith("rank")] == ["rank 0 of 2 [0, 1]", "rank 1 of 2 [0, 1]"]


@pytest.mark.slow
@WHEN
def test_forked_children_with_ranks_of_their_own_form_a_world(tmp_path, when):
    assert run(tmp_path, FORKS_RANKS, str(free_port()), when) == ["[0, 1]", "[0, 1]"]


OUTLIVED = """
import os, signal, sys, easydist
from multiprocessing import get_context

def rank(index, port, ends):
    os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["EASYDIST_HOST_ID"] = str(index)
    easydist.wait_for_everyone()
    if index == 1:
        if "spawn" in sys.argv:
            actions = [(os.POSIX_SPAWN_DUP2, ends[0], 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
            os.posix_spawn("/bin/cat", ["cat"], os.environ, file_actions=actions)
        elif os.fork() == 0:
            os.close(ends[1])
            os.read(ends[0], 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        easydist.wait_for_everyone(timeout=60)
    except easydist.EasydistError as error:
        os.write(1, f"{type(error).__name__}: {error}\\n".encode())

ends = os.pipe()
children = [get_context("fork").Process(target=rank, args=(i, sys.argv[1], ends)) for i in range(2)]
for child in children: child.start()
for child in children: child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_that_outlives_a_rank_does_not_hide_its_end_from_other_hosts(way):
    out, _ = forked("-c", OUTLIVED, free_port(), way, GLOO_SOCKET_IFNAME="lo")
    assert "PeerLostError: wait_for_everyone: rank 1 is lost" in out
