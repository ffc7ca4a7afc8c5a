"""``easydist run --on ray``: a script on the ranks of a real Ray cluster."""

import json
import os
import re
import signal
import subprocess

import launching
import psutil
import pytest
from actors import MARKS, SECOND, logs, travels
from click.testing import CliRunner
from launching import within

from easydist.cli import check, on_ray
from easydist.cli.findings import Finding
from easydist.cli.main import main
from easydist.cluster import script as programs
from easydist.cluster.connection import is_here

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = MARKS
travels(__name__)

SAYS = """
import os, sys
import easydist
from beside import NAME
state = easydist.ProcessState()
ranks = easydist.gather_object([state.process_index])
print(NAME, sys.argv[1:], ranks, os.environ["NODE_RANK"], __name__)
os.system("echo a child")
print("a warning", file=sys.stderr)
"""
RAISES = """
import easydist
if easydist.ProcessState().process_index == 1:
    raise ValueError("a bad batch")
easydist.wait_for_everyone()
"""
EXITS = "import os, sys\nsys.exit(3 * int(os.environ['RANK']))"
KILLED = "import os, easydist\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\neasydist.wait_for_everyone()"
TERMINATED = KILLED.replace("9)", "15)")
SPAWNS = """
import multiprocessing, os, sys
def says():
    print("a child", __name__)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=says)
    child.start()
    child.join()
    print(child.exitcode, sys.argv, os.path.isabs(__file__))
"""
WAITS = "import os, time\nprint('pid', os.getpid())\ntime.sleep(1000)"


def script(folder, text):
    (folder / "beside.py").write_text("NAME = 'beside'")
    (folder / "script.py").write_text(text)


def command(*options):
    return [launching.fork(), "-m", "easydist", "run", "--on", "ray", "-n", *options]


def environment(cluster):
    return os.environ | launching.OWN | {"RAY_ADDRESS": cluster.address}


def run(cluster, folder, *options, status=0, **variables):
    """Return the output and the errors of the command, in the folder of the script."""
    process = launching.start(*command(*options), env=environment(cluster) | variables, cwd=folder)
    ((out, err),) = launching.finished(process, seconds=90)
    assert process.returncode == status, err
    return out, err


def test_ranks_of_two_nodes_run_a_script_and_show_its_output(cluster, tmp_path):
    node = cluster.add_node(node_ip_address=SECOND, num_cpus=2, env_vars={"EASYDIST_HOST_ID": "second"}, **cluster.node)
    script(tmp_path, SAYS)
    out, err = run(cluster, tmp_path, 4, "--nodes", 2, "script.py", "--lr", 0.1)
    cluster.remove_node(node)
    said = [f"[rank {r}] beside ['--lr', '0.1'] [0, 1, 2, 3] {r // 2} __main__" for r in range(4)]
    assert sorted(out.splitlines()) == sorted([*said, *(f"[rank {rank}] a child" for rank in range(4))])
    assert {f"[rank {rank}] a warning" for rank in range(4)} <= {*err.splitlines()}


def test_processes_that_a_script_spawns_find_it(cluster, tmp_path):
    script(tmp_path, SPAWNS)
    out, _ = run(cluster, tmp_path, 1, "script.py")
    assert sorted(out.splitlines()) == ["[rank 0] 0 ['script.py'] True", "[rank 0] a child __mp_main__"]


@pytest.mark.battery
def test_a_module_may_fail_on_one_rank(cluster, tmp_path):
    script(tmp_path, RAISES)
    out, err = run(cluster, tmp_path, 2, "-m", "script", status=1)
    assert out == ""
    assert re.search(
        r"^run: rank 1 of 2 raised ValueError: a bad batch\n  rank 0 raised RemoteError", err, re.MULTILINE
    )
    assert 'script.py", line 4, in <module>' in err
    assert "variables" not in err


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (EXITS, 3),
        pytest.param(KILLED, 1, marks=pytest.mark.battery),  # Ray does not tell the signal
        pytest.param(TERMINATED, 128 + signal.SIGTERM, marks=pytest.mark.battery),
    ],
    ids=["exits", "killed", "terminated"],
)
def test_the_status_is_that_of_the_rank_that_failed(cluster, tmp_path, text, status):
    script(tmp_path, text)
    _, err = run(cluster, tmp_path, 2, "script.py", status=status)
    assert ("run: rank 1 is lost: process " in err) == (text == KILLED)
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_and_sigterm_end_all_ranks(cluster, tmp_path, number):
    script(tmp_path, WAITS)
    process = launching.start(*command(2, "script.py"), env=environment(cluster), cwd=tmp_path)
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(number)
    ((_, err),) = launching.finished(process)
    assert process.returncode == 128 + number, err
    assert f"easydist run: ended by {number.name}\n" in err
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], launching.within(10))
    assert not any(map(psutil.pid_exists, pids))


BAR = """
import os, sys, time
for text in ("1%", "2%", "3%"):
    sys.stdout.write(f"\\r{text}")
    sys.stdout.flush()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.stdout.write("\\rdone\\r\\n\\nend")
"""


def test_a_progress_bar_shows_as_lines_while_it_grows(cluster, tmp_path):
    """As on this machine, where torchrun shows its states as lines."""
    script(tmp_path, BAR)
    go = tmp_path / "go"
    process = launching.start(*command(1, "script.py", go), env=environment(cluster), cwd=tmp_path)
    shown = [process.stdout.readline() for _ in range(3)]
    go.touch()
    ((rest, err),) = launching.finished(process)
    assert process.returncode == 0, err
    assert "".join([*shown, rest]).replace("[rank 0] ", "").splitlines() == ["", "1%", "2%", "3%", "done", "", "end"]


def writes(sink):
    programs._ARRIVES_WITHIN = 0.0
    with programs._sent(sink, 0):
        child = subprocess.Popen("cat", stdin=subprocess.PIPE)  # which has the output open for longer
        for number in range(3000):
            print(number)
    with child:
        pass


def test_all_output_arrives_however_slowly_it_is_read(cluster, monkeypatch, capsys):
    monkeypatch.setattr(programs, "_ARRIVES_WITHIN", 0.0)
    with programs.printed() as sink:
        ray.get(ray.remote(num_cpus=0)(writes).remote(sink), timeout=within(60))
    assert capsys.readouterr().out.splitlines() == [f"[rank 0] {number}" for number in range(3000)]


def test_a_script_that_the_nodes_do_not_get_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "is_here", lambda *_: False)
    script(tmp_path, SAYS)
    (inner := tmp_path / "inner").mkdir()
    monkeypatch.chdir(inner)
    done = CliRunner().invoke(main, ["run", "--on", "ray", "-n", "1", "../script.py"])
    assert done.exit_code == 1
    assert f"../script.py is not in the working directory {inner}, which the nodes get" in done.output


def test_nodes_that_join_while_the_ranks_wait_get_the_script(cluster, tmp_path, monkeypatch):
    known = iter([True, False])  # before the ranks wait for resources, and after it
    monkeypatch.setattr(on_ray, "is_here", lambda *_: next(known))
    script(tmp_path, "import os, beside\nprint('at', os.getcwd())")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["run", "--on", "ray", "-n", "1", "script.py"])
    assert done.exit_code == 0, done.output
    assert re.findall(r"at .*working_dir_files", done.output)


def test_nodes_have_to_join_if_this_machine_has_too_little(cluster):
    assert is_here(1, {"CPU": 4})
    assert not is_here(1, {"CPU": 5})
    assert not is_here(2)


def test_a_check_runs_on_the_nodes(cluster):
    command = [launching.fork(), "-m", "easydist", "check", "--on", "ray", "-n", "2", "--json"]
    process = launching.start(*command, env=environment(cluster))
    ((out, err),) = launching.finished(process, seconds=90)
    assert process.returncode == 0, out + err
    assert [row["said"][:10] for row in json.loads(out)["findings"] if row["check"] == "rendezvous"] == ["2 ranks at"]


def test_a_fault_of_a_node_names_its_rank(monkeypatch):
    faults = [Finding("open files", "fault", "a process may open 5", "Raise it.")]
    monkeypatch.setattr(check, "_results", lambda ranks, timeout: (check._as_results(faults), 3))
    (row,) = check._of_node(1.0)["findings"]
    assert re.match(r"rank 3 on .+: a process may open 5$", row["said"])


def test_ranks_get_the_settings_of_the_shell_and_ray_logs_no_key(cluster, tmp_path):
    text = "from easydist import settings\nprint(settings.read(settings.JOB_KEY), settings.read('EASYDIST_WARN_AFTER'))"
    script(tmp_path, text)
    out, _ = run(cluster, tmp_path, 1, "script.py", EASYDIST_JOB_KEY="k" * 40, EASYDIST_WARN_AFTER="20.125")
    assert out.rstrip().endswith("k" * 40 + " 20.125")
    assert "20.125" in (logged := logs(cluster))
    assert "k" * 40 not in logged


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["gpu", "script.py"], "--on ray takes a number of ranks, got -n gpu"),
        (["4", "--nnodes", "2", "script.py"], "--on ray does not take --nnodes; use --nodes"),
        (["2", "--survivors", "script.py"], "--on ray does not take --survivors: a lost rank ends the command"),
        (["2", "--max-restarts", "3", "script.py"], "--on ray does not take --max-restarts"),
        (["2", "--standalone", "script.py"], "--on ray does not take --standalone"),
        (["2", "--log-dir", "logs", "script.py"], "--on ray does not take --log-dir"),
        (["3", "--nodes", "2", "script.py"], "3 ranks cannot be divided evenly among 2 nodes"),
        (["3", "--dry-run", "script.py"], "--on ray does not take --dry-run"),
    ],
)
def test_what_cannot_be_is_refused(options, text):
    done = CliRunner().invoke(main, ["run", "--on", "ray", "-n", *options])
    assert done.exit_code == 2
    assert text in done.output
