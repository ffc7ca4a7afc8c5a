"""easydist in the jobs of a real SLURM cluster of two nodes."""

import os
import re
import signal
import sys
import time

import launching
import psutil
import pytest
from launching import within

pytestmark = pytest.mark.slow

NODES = "-N2", "--ntasks-per-node=2", "-n4"

WORLD = """
import sys, torch, easydist
state = easydist.ProcessState()
ranks = easydist.gather(torch.tensor([state.process_index])).tolist()
about = state.process_index, state.local_process_index, state.node_rank, state.num_nodes, state.local_world_size, ranks
sys.stdout.write(" ".join(map(str, about)) + "\\n")  # in one piece
"""
OF_TWO_AND_TWO = [f"{rank} {rank % 2} {rank // 2} 2 2 [0, 1, 2, 3]" for rank in range(4)]
DIES = """
import os, sys, torch, easydist
state = easydist.ProcessState()
easydist.wait_for_everyone()
if state.process_index == 1:
    {end}
try:
    easydist.gather(torch.ones(1))
except easydist.PeerLostError as error:
    print(state.process_index, error)
    {then}
"""
RECOVERS = """easydist.recover()
    print("left", easydist.gather(torch.tensor([state.process_index])).tolist())"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script, and returns the command line for it."""

    def write(text, name="script.py"):
        (tmp_path / name).write_text(text)
        return [sys.executable, "-u", str(tmp_path / name)]

    return write


def lines(done, status=0):
    """Return the lines of output, sorted, of a command with this exit status."""
    assert done.returncode == status, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def batch(slurm, folder, *commands, options=NODES):
    """Run commands as a batch script, and return the lines of its output, sorted."""
    head = "\n".join(f"#SBATCH {option}" for option in [*options, "--time=5", f"--output={folder}/out"])
    (folder / "job.sh").write_text("\n".join(["#!/bin/bash", head, *commands, ""]))
    done = slurm.run("sbatch", "--wait", folder / "job.sh")
    out = (folder / "out").read_text()
    assert done.returncode == 0, out + done.stderr
    return sorted(out.splitlines())


def test_srun(slurm, script):
    assert lines(slurm.run("srun", *NODES, *script(WORLD))) == OF_TWO_AND_TWO


def test_check_under_srun(slurm):
    """Rank 0 prints."""
    done = slurm.run("srun", *NODES, sys.executable, "-m", "easydist", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rendezvous: 4 ranks at") == 1


def test_hosts_with_different_numbers_of_tasks(slurm, script):
    got = lines(slurm.run("srun", "-N2", "-n3", "--distribution=cyclic", *script(WORLD)))
    assert [line.split()[1:5] for line in got] == [["0", "0", "2", "2"], ["0", "1", "2", "1"], ["1", "0", "2", "2"]]


def test_a_heterogeneous_step(slurm, script):
    got = lines(slurm.run("srun", "-n1", *script(WORLD), ":", "-n2", *script(WORLD)))
    assert [line[-9:] for line in got] == ["[0, 1, 2]"] * 3


def test_a_batch_job_with_two_steps_at_once_and_python_outside_of_them(slurm, script, tmp_path):
    step = " ".join(["srun --overlap -N1 -n2", *script(WORLD)])
    got = batch(slurm, tmp_path, f"{step} & {step} & wait", " ".join(script(WORLD)))
    assert got == sorted(["0 0 0 1 2 [0, 1]", "1 1 0 1 2 [0, 1]"] * 2 + ["0 0 0 1 1 [0]"])


def test_salloc(slurm, script):
    assert lines(slurm.run("salloc", *NODES, "srun", *script(WORLD))) == OF_TWO_AND_TWO


@pytest.mark.parametrize("launcher", ["torchrun", "easydist run"])
def test_a_launcher_in_each_task(slurm, script, launcher):
    """The usual way to start torchrun on several nodes."""
    port = launching.free_port()
    module = ["torch.distributed.run"] if launcher == "torchrun" else ["easydist", "run"]
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=n1", f"--master-port={port}"]
    command = [sys.executable, "-m", *module, *options, "--node-rank=$SLURM_NODEID", script(WORLD)[-1]]
    done = slurm.run("srun", "-N2", "-n2", "bash", "-c", " ".join(command))
    assert sorted(re.findall(r"\d \d \d 2 2 \[0, 1, 2, 3\]", done.stdout)) == OF_TWO_AND_TWO, done.stderr


def test_a_rank_exported_before_srun_is_that_of_no_task(slurm, script, tmp_path):
    """A batch script has no rank of its own: $SLURM_PROCID is 0 there."""
    exported = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    got = batch(slurm, tmp_path, exported, " ".join(["srun", *script(WORLD)]))
    assert [line for line in got if line[0].isdigit()] == OF_TWO_AND_TWO
    assert sum("RANK=0 is not the number of this task of srun" in line for line in got) == 3


@pytest.mark.parametrize("way", ["shell", "python", "alone"])
def test_a_rank_that_each_task_sets_is_its_own(slurm, script, way):
    port = launching.free_port()
    own = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=n1 MASTER_PORT={port}"
    if way == "shell":
        done = slurm.run("srun", *NODES, "bash", "-c", " ".join([own, *script(WORLD)]))
    elif way == "python":
        own = f"RANK=os.environ['SLURM_PROCID'], MASTER_ADDR='n1', MASTER_PORT='{port}'"
        sets = f"import os\nos.environ.update({own})\n"
        done = slurm.run("srun", *NODES, *script(sets + WORLD), env={"RANK": "0", "WORLD_SIZE": "4"})
    else:
        done = slurm.run("srun", *NODES, *script(WORLD), env={"RANK": "0", "WORLD_SIZE": "1"})
    ends = {line.partition("[")[2] for line in lines(done)}
    assert ends == ({"0]"} if way == "alone" else {"0, 1, 2, 3]"})


def test_an_order_of_ones_own(slurm, script, tmp_path):
    """Rank 0 is on the second node, which nothing tells the others."""
    (tmp_path / "hosts").write_text("n2\nn1\nn1\n")
    own = {"SLURM_HOSTFILE": tmp_path / "hosts"}
    done = slurm.run("srun", "-n3", "--distribution=arbitrary", *script(WORLD), env=own)
    assert done.stderr.count("ValueError: srun has placed the tasks in an order of your own") == 3
    done = slurm.run("srun", "-n3", "--distribution=arbitrary", *script(WORLD), env=own | {"MASTER_ADDR": "n2"})
    assert [line[-9:] for line in lines(done)] == ["[0, 1, 2]"] * 3


def test_a_rank_that_is_killed_is_named_and_the_others_recover(slurm, script):
    text = DIES.format(end="os.kill(os.getpid(), 9)", then=RECOVERS)
    done = slurm.run("srun", "--kill-on-bad-exit=0", *NODES, *script(text))
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stdout.count("rank 1 is lost") == 3
    assert done.stdout.count("left [0, 1, 2]") == 3


def test_a_node_that_is_lost(slurm, script):
    """The ranks of the other node raise, and continue without those of the node."""
    text = DIES.format(end="print('ready', flush=True); import time; time.sleep(1000)", then=RECOVERS)
    text = text.replace("process_index == 1", "node_rank == 1").replace("recover()", "recover(timeout=8)")
    command = ["srun", "--kill-on-bad-exit=0", "--no-kill", *NODES, *script(text)]
    process = launching.start(*command, env=slurm.env)
    try:
        said = [process.stdout.readline() for _ in range(2)]
        assert said == ["ready\n"] * 2
        slurm.kill_node("n2")
        left = [line for _ in range(12) if (line := process.stdout.readline())]
        while "".join(left).count("left [0, 1]") < 2 and (line := process.stdout.readline()):
            left.append(line)
        assert "".join(left).count("left [0, 1]") == 2, left
        assert re.search("rank [23] is lost", "".join(left))
    finally:
        slurm.run("scancel", "--user=root")
        launching.finished(process)
        slurm.start_node("n2")


def test_a_job_that_is_requeued_meets_again(slurm, script, tmp_path):
    """After a preemption the job has the same number, and so the same port."""
    text = WORLD + "import os, time\nif 'SLURM_RESTART_COUNT' not in os.environ: open('began', 'w'); time.sleep(1000)"
    script(text)
    options = [*NODES, "--requeue", f"--chdir={tmp_path}", "--open-mode=append", f"--output={tmp_path}/out"]
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nsrun {sys.executable} -u script.py\n")
    job = slurm.run("sbatch", "--parsable", *options, tmp_path / "job.sh").stdout.strip()
    until = time.monotonic() + within(30)
    while not (tmp_path / "began").exists() or (tmp_path / "out").read_text().count("[0, 1, 2, 3]") < 4:
        assert time.monotonic() < until, (tmp_path / "out").read_text()
        time.sleep(0.1)
    assert slurm.run("scontrol", "requeue", job).returncode == 0
    until = time.monotonic() + within(60)
    ended = time.time()
    while has_steps(job) or int(time.time()) <= int(ended):  # a node refuses what begins in the second of the end
        assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job).stdout
        time.sleep(0.1)
    while (out := (tmp_path / "out").read_text()).count("[0, 1, 2, 3]") < 8:
        slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")  # it would wait for two minutes
        assert time.monotonic() < until, out + slurm.run("scontrol", "show", "job", job).stdout
        time.sleep(0.2)


def has_steps(job):
    """True while a step of a job runs on this machine."""
    found = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]  # None: it is a zombie
    return any(f"slurmstepd: [{job}." in " ".join(line) for line in found)


def easydist_run(slurm, *options, folder, status=0, **variables):
    process = launching.start(
        sys.executable, "-m", "easydist", "run", "--on", "slurm", *options, env=slurm.env | variables, cwd=folder
    )
    ((out, err),) = launching.finished(process)
    assert process.returncode == status, out + err
    return out, err


def test_run_on_slurm(slurm, script, tmp_path):
    script(WORLD)
    out, _ = easydist_run(slurm, "-n", 4, "-N", 2, "--slurm=--time=5", "script.py", folder=tmp_path)
    assert sorted(out.splitlines()) == [f"[rank {line[0]}] {line}" for line in OF_TWO_AND_TWO]


def test_run_on_slurm_inside_a_job(slurm, script, tmp_path):
    script(WORLD)
    command = f"{sys.executable} -m easydist run --on slurm -n 2 -N 1 {tmp_path}/script.py"
    assert batch(slurm, tmp_path, command) == ["[rank 0] 0 0 0 1 2 [0, 1]", "[rank 1] 1 1 0 1 2 [0, 1]"]


def test_the_script_of_a_dry_run_does_the_same(slurm, script, tmp_path):
    script(WORLD)
    options = ["-n", 4, "-N", 2, "--cpus-per-rank", 1, "--slurm", "--time=5 --job-name='a b'", "--dry-run", "script.py"]
    text, _ = easydist_run(slurm, *options, folder=tmp_path)
    (tmp_path / "job.sh").write_text(text)
    done = slurm.run("sbatch", "--wait", f"--output={tmp_path}/out", tmp_path / "job.sh", cwd=tmp_path)
    assert done.returncode == 0, text
    got = sorted(line.partition(": ")[2] for line in (tmp_path / "out").read_text().splitlines())
    assert got == OF_TWO_AND_TWO


@pytest.mark.parametrize(
    ("end", "status", "report"),
    [
        ("sys.exit(3)", 3, "Rank 1 failed first, on n1: exit status 3."),
        ("os.kill(os.getpid(), 9)", 137, "Rank 1 failed first, on n1: killed by SIGKILL."),
    ],
    ids=["exit", "kill"],
)
def test_a_failing_rank_ends_the_others(slurm, script, tmp_path, end, status, report):
    script(DIES.format(end=end, then="import time; time.sleep(1000)"))
    _, err = easydist_run(slurm, "-n", 4, "-N", 2, "script.py", folder=tmp_path, status=status)
    assert err.splitlines()[-1] == report


def test_survivors_go_on(slurm, script, tmp_path):
    script(DIES.format(end="os.kill(os.getpid(), 9)", then=RECOVERS))
    out, err = easydist_run(slurm, "-n", 4, "-N", 2, "--survivors", "script.py", folder=tmp_path)
    assert out.count("left [0, 1, 2]") == 3
    assert "Rank 1 failed first" in err


def test_survivors_of_a_lost_node_go_on(slurm, script, tmp_path):
    text = DIES.format(end="print('ready', flush=True); import time; time.sleep(1000)", then=RECOVERS)
    script(text.replace("process_index == 1", "node_rank == 1").replace("recover()", "recover(timeout=8)"))
    command = ["-m", "easydist", "run", "--on", "slurm", "-n", "4", "-N", "2", "--survivors", "script.py"]
    process = launching.start(sys.executable, *command, env=slurm.env, cwd=tmp_path)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[rank 2] ready\n", "[rank 3] ready\n"]
    slurm.kill_node("n2")
    ((out, err),) = launching.finished(process, seconds=60)
    slurm.start_node("n2")
    assert process.returncode == 0, err
    assert out.count("left [0, 1]") == 2


@pytest.mark.parametrize("why", ["the job has reached its time limit", "a job of higher priority has preempted theirs"])
def test_the_end_of_a_job_is_told(slurm, script, tmp_path, why):
    """SLURM sends SIGTERM, which these ranks ignore, and then SIGKILL."""
    script("import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nimport time\ntime.sleep(1000)")
    command = ["-m", "easydist", "run", "--on", "slurm", "-n", "2", "-N", "2", "--slurm=--exclusive --time=5"]
    process = launching.start(sys.executable, *command, "script.py", env=slurm.env, cwd=tmp_path)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[rank 0] ready\n", "[rank 1] ready\n"]
    if "limit" in why:
        job = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
        assert slurm.run("scontrol", "update", f"jobid={job}", "timelimit=0").returncode == 0
    else:
        assert slurm.run("srun", "--partition=urgent", "-N2", "--exclusive", "true").returncode == 0
    ((_, err),) = launching.finished(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == f"SLURM ended the ranks: {why}."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_step(slurm, script, tmp_path, number):
    """Also a SIGKILL, and ranks that ignore the signals."""
    ignores = "import signal, time\nfor one in (2, 15): signal.signal(one, signal.SIG_IGN)\n"
    script(ignores + "print('ready', flush=True)\ntime.sleep(1000)")
    command = ["-m", "easydist", "run", "--on", "slurm", "-n", "2", "-N", "2", "script.py"]
    process = launching.start(sys.executable, *command, env=slurm.env, cwd=tmp_path)
    said = sorted(process.stdout.readline() for _ in range(2))
    assert said == ["[rank 0] ready\n", "[rank 1] ready\n"]
    os.kill(process.pid, number)
    ((_, err),) = launching.finished(process, seconds=20)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert number == signal.SIGKILL or f"easydist run: ended by {number.name}" in err
    slurm.until(lambda: not slurm.run("squeue", "-h").stdout)
