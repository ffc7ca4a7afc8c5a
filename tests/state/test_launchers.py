"""With every launcher, easydist finds the launched world, and leaves nothing behind."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import launching
import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
WORLD = SCRIPTS / "world.py"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI", "MPI", "OMPI", "I_MPI", "MV2_", "SLURM_", "ACCELERATE_")
ENV = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | {
    "PATH": PATH,
    **launching.OWN,
    "ACCELERATE_USE_CPU": "1",
}

pytestmark = pytest.mark.slow
needs_mpich = pytest.mark.skipif(
    "HYDRA" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if (found := shutil.which("mpirun", path=PATH))
    else True,
    reason="there is no mpirun of MPICH",
)


def start(*command: object, **env: object) -> subprocess.Popen:
    variables = {name: value for name, value in (ENV | env).items() if value is not None}
    return launching.start(*command, env=variables, cwd=ROOT)


def finish(*processes: subprocess.Popen, seconds: float = 60) -> str:
    """All of them end well; what they wrote."""
    texts = ["".join(told) for told in launching.finished(*processes, seconds=seconds)]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return "\n".join(texts)


def launch(*command: object, seconds: float = 60, **env: object) -> str:
    return finish(start(*command, **env), seconds=seconds)


def torchrun(nproc: int, *script: object, python: object = None, **options: object) -> str:
    """Launch a script with torchrun, both in forks, or both by another interpreter."""
    python = python or launching.fork()
    command = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    return launch(*command, *script, PYTHON_EXEC=python, **options)


def accelerate(*arguments: object) -> str:
    command = (sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", launching.free_port())
    return launch(*command, *arguments, ACCELERATE_USE_CPU=None)


def worlds(folder: Path) -> list[dict]:
    """Return the findings of the ranks, in order."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda found: found["rank"])


def a_world_of(size: int, *, adopted: bool = False, hosts: int = 1) -> list[dict]:
    """Return the findings of the ranks of some hosts, with equally many ranks on each."""
    here = size // hosts
    rest = {"size": size, "gathered": list(range(size)), "adopted": adopted, "warnings": []}
    return [{"rank": r, "local_rank": r % here, "node": [r // here, hosts, here], **rest} for r in range(size)]


@pytest.mark.parametrize("size", [2])  # accelerate's own checks, below, run on 4 as well
def test_torchrun_on_the_cpu_means_the_launched_world(size, tmp_path):
    text = torchrun(size, WORLD, tmp_path, python=sys.executable)
    assert worlds(tmp_path) == a_world_of(size)
    assert "Traceback" not in text
    assert "Warning" not in text


FAILS_ONCE = r"""
import os, torch, easydist
from easydist.comms import ReduceOp, new_comm
state, count = easydist.ProcessState(), os.environ["TORCHELASTIC_RESTART_COUNT"]
total = torch.ones(1)
comm = new_comm("gloo", torch.device("cpu"), "again")
comm.all_reduce(total, ReduceOp.SUM, False)
if (count, state.process_index) == ("0", 1):
    os._exit(3)
os.write(1, f"{count} {easydist.gather_object(count)} {total.item()}\n".encode())  # in one piece
comm.finalize()
"""


def test_ranks_that_torchrun_restarts_meet_again(tmp_path):
    """The store of the agent outlives them, with all that the ranks before wrote to it."""
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    text = torchrun(2, "--max-restarts=1", tmp_path / "fails_once.py")
    assert text.count("1 ['1', '1'] 2.0") == 2, text


FAILS_ON_ONE_NODE = r"""
import os, signal, torch, easydist
from easydist.comms import ReduceOp, new_comm
state, count = easydist.ProcessState(), os.environ["TORCHELASTIC_RESTART_COUNT"]
easydist.wait_for_everyone()
if (count, state.node_rank) == ("0", 1):
    os._exit(3)
try:
    counts = easydist.gather_object(count)
except easydist.PeerLostError:
    signal.pause()  # until the agent ends this rank, because the other node comes again
comm = new_comm("gloo", torch.device("cpu"), "again")
comm.all_reduce(total := torch.ones(1), ReduceOp.SUM, False)
os.write(1, f"{sorted(counts)} {total.item()}\n".encode())
comm.finalize()
"""


def test_ranks_whose_agents_have_counted_different_restarts_meet_again(tmp_path):
    """An agent does not count the restarts because of failures on the other nodes."""
    (tmp_path / "fails_on_one_node.py").write_text(FAILS_ON_ONE_NODE)
    options = ("--nnodes=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=1", "--local-addr=127.0.0.1")
    command = (launching.fork(), "-m", "torch.distributed.run", *options)
    command += (f"--rdzv-endpoint=127.0.0.1:{launching.free_port()}", tmp_path / "fails_on_one_node.py")
    env = {"PYTHON_EXEC": launching.fork(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    text = finish(*[start(*command, **env) for _ in range(2)])
    assert text.count("['0', '1'] 2.0") == 2, text


def test_two_agents_of_torchrun_are_two_hosts(tmp_path):
    options = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={launching.free_port()}")
    command = (launching.fork(), "-m", "torch.distributed.run", *options)
    ranks = {"PYTHON_EXEC": launching.fork()}
    finish(*[start(*command, f"--node-rank={node}", WORLD, tmp_path, **ranks) for node in range(2)])
    assert worlds(tmp_path) == a_world_of(4, hosts=2)


def test_ranks_that_were_told_only_their_number_find_their_hosts(tmp_path):
    port = launching.free_port()
    env = {"WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [env | {"RANK": r, "LOCAL_RANK": r % 2, "EASYDIST_HOST_ID": f"host {r // 2}"} for r in range(4)]
    finish(*[start(launching.fork(), WORLD, tmp_path, **env) for env in each])
    assert worlds(tmp_path) == a_world_of(4, hosts=2)


def test_python_alone_is_a_world_of_one(tmp_path):
    assert launch(sys.executable, WORLD, tmp_path) == ""
    assert worlds(tmp_path) == a_world_of(1)


def test_an_empty_address_means_this_host(tmp_path):
    port = launching.free_port()
    env = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "", "MASTER_PORT": port}
    each = [{name: str(value) for name, value in (env | {"RANK": r, "LOCAL_RANK": r}).items()} for r in range(2)]
    finish(*[start(launching.fork(), WORLD, tmp_path, **env) for env in each])
    assert worlds(tmp_path) == a_world_of(2)


def test_the_group_of_accelerate_is_adopted(tmp_path):
    torchrun(2, WORLD, tmp_path, "accelerate-first")
    assert worlds(tmp_path) == a_world_of(2, adopted=True)


@pytest.mark.battery
def test_accelerate_launch_with_one_process_works_and_says_so(tmp_path):
    accelerate("--cpu", "--num_processes", 2, WORLD, tmp_path)
    (found,) = worlds(tmp_path)
    assert (found["size"], found["gathered"]) == (1, [0])
    assert len(found["warnings"]) == 1
    assert "accelerate launch started one process although it was asked for several" in found["warnings"][0]
    assert "torchrun --nproc-per-node" in found["warnings"][0]


@needs_mpich
def test_accelerate_launch_with_mpirun(tmp_path):
    accelerate("--config_file", "examples/accelerate_cpu.yaml", WORLD, tmp_path)
    assert worlds(tmp_path) == a_world_of(2)


@pytest.mark.battery
@needs_mpich
def test_two_jobs_of_mpirun_side_by_side(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    finish(*[start("mpirun", "-n", 2, sys.executable, WORLD, folder) for folder in folders])
    assert [worlds(folder) for folder in folders] == [a_world_of(2)] * 2


def test_a_job_step_of_slurm(tmp_path):
    step = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_STEP_NODELIST": "localhost",
    }
    finish(
        *[start(launching.fork(), WORLD, tmp_path, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in range(2)]
    )
    assert worlds(tmp_path) == a_world_of(2)


def test_a_job_step_of_slurm_on_two_nodes(tmp_path):
    step = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_STEP_ID": 1,
        "SLURM_STEP_NUM_TASKS": 4,
        "SLURM_STEP_NUM_NODES": 2,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2} for rank in range(4)]
    finish(*[start(launching.fork(), WORLD, tmp_path, **step, **task) for task in tasks])
    assert worlds(tmp_path) == a_world_of(4, hosts=2)


@pytest.mark.battery
@needs_mpich
def test_mpirun_on_two_hosts_that_easydist_finds(tmp_path):
    """To MPICH two names are two hosts; it does not number them."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1:1\nlocalhost:1\n")
    (folder := tmp_path / "found").mkdir()
    meeting = ("-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", launching.free_port())
    named = ("sh", "-c", 'EASYDIST_HOST_ID=$PMI_RANK exec "$@"', "sh")  # this machine poses as two
    launch("mpirun", "-launcher", "fork", "-f", hosts, *meeting, "-n", 2, *named, sys.executable, WORLD, folder)
    assert worlds(folder) == a_world_of(2, hosts=2)


def test_scripts_without_any_cleanup_end_well():
    cases = ["none"] * launching.examples(6) + ["0", "3"] * launching.examples(2)
    text = launch(launching.fork(), SCRIPTS / "exits.py", *cases)
    # torch 2.9 prints, in pieces that mix with our lines, that gloo connects.
    said = re.findall(r"(?:none|[03])(?: -?\d+){4}", text) if "[Gloo]" in text else text.splitlines()
    assert sorted(said) == sorted(f"{case} 0 0 0 0" for case in cases)


@pytest.mark.battery
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux, to let gloo's threads starve")
def test_gloo_threads_release_the_last_tensors_before_the_interpreter_ends():
    assert launch(launching.fork(), SCRIPTS / "endings.py", 20).split() == ["0"] * 20


def test_at_exit_easydist_takes_down_its_own_group_only(tmp_path):
    (folder := tmp_path / "left").mkdir()
    launch(launching.fork(), SCRIPTS / "leave.py", folder, "mine", "easydist", "later")
    left = {path.name: path.read_text() for path in folder.iterdir()}
    assert left == {f"{who}-{rank}": str(who != "easydist") for who in ("mine", "easydist", "later") for rank in (0, 1)}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.battery)])
def test_accelerates_own_checks_pass(size, tmp_path):
    source = Path(importlib.util.find_spec("accelerate").submodule_search_locations[0])
    text = (source / "test_utils" / "scripts" / "test_ops.py").read_text()
    names = "from accelerate import|from accelerate.utils.dataclasses import|from accelerate.utils.operations import"
    text, count = re.subn(f"^({names})", "from easydist import", text, flags=re.MULTILINE)
    assert count == 3
    (tmp_path / "ops.py").write_text(text)
    assert "testing sending tensors across devices" in torchrun(size, tmp_path / "ops.py")
