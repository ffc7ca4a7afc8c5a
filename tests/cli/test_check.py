"""``easydist check`` on a machine that works, and on broken ones: each fault is named with what to do."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from click.testing import CliRunner
from test_env import easydist

from easydist.cli import check
from easydist.cli.findings import Finding, surroundings
from easydist.cli.main import main

IS_POSSIBLE = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"]


def states(results):
    return {row["check"]: row["state"] for row in results["findings"]}


@pytest.mark.slow
def test_a_machine_that_works():
    out, _ = easydist("check", "-n", "3", "--json")
    results = json.loads(out)
    assert set(states(results).values()) == {"ok"}
    assert {"gather", "send_tensor_dict", "rendezvous", "/dev/shm"} <= set(states(results))
    assert all(row["easydist"] > 0 and row["gloo"] > 0 for row in results["times"])


@pytest.mark.battery
@pytest.mark.slow
def test_ranks_may_print_more_than_a_pipe_holds(tmp_path):
    text = "import os, sys\nprint('a library')\nif os.environ.get('RANK') == '1': sys.stderr.write('x' * 300_000)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(launching.ROOT), str(tmp_path)])
    out, _ = launching.python("-m", "easydist", "check", "--json", PYTHONPATH=path)
    assert set(states(json.loads(out.partition("\n")[2])).values()) == {"ok"}


@pytest.mark.slow
def test_under_a_launcher_rank_0_prints():
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launching.free_port())}
    ranks = [start(env | {"RANK": str(rank)}, interpreter=launching.fork()) for rank in range(2)]
    (out, err), (nothing, errors) = launching.finished(*ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err + errors
    assert "ok       rendezvous: 2 ranks at 127.0.0.1:" in out
    assert "time     gather 4 MB: " in out
    assert not nothing


MPIRUN = Path(sys.executable).parent / "mpirun"


@pytest.mark.slow
@pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun beside the interpreter")
def test_under_mpirun_rank_0_prints():
    process = start({}, MPIRUN, "-n", "2")
    ((out, err),) = launching.finished(process)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert [line.partition("rendezvous: ")[2][:10] for line in lines if "rendezvous" in line] == ["2 ranks at"]
    assert sum(line.startswith("ok       gather: right") for line in lines) == 1
    assert not any(line.startswith("FAULT") for line in lines)


def start(env, *prefix, options=(), interpreter=sys.executable):
    own = {"PYTHONPATH": str(launching.ROOT), "OMP_NUM_THREADS": "1"}
    command = [*prefix, interpreter, "-m", "easydist", "check", *options]
    return launching.start(*command, env=os.environ | own | env)


def fault(env, *prefix):
    """Return the output of a rank that finds a fault."""
    interpreter = sys.executable if prefix else launching.fork()
    process = start(env, *prefix, options=("--timeout", "5"), interpreter=interpreter)
    ((out, err),) = launching.finished(process)
    assert process.returncode == 1, out + err
    return out


@pytest.mark.slow
def test_a_missing_rank_is_named():
    out = fault({"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launching.free_port())})
    assert "FAULT    rendezvous: 2 of 3 ranks did not reach 127.0.0.1:" in out
    assert "within 5 s: 1, 2\n         Start them" in out


@pytest.mark.slow
def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        out = fault({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert f"FAULT    rendezvous: rank 0 cannot listen at 127.0.0.1:{port}" in out
    assert "address already in use" in out


@pytest.mark.slow
def test_a_wrong_master_address_is_named():
    out = fault({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"})
    assert "FAULT    rendezvous: rank 1 cannot reach rank 0 within 5 s at no-such-host.invalid:29500" in out
    assert "MASTER_ADDR must be a name or address of the host of rank 0" in out


@pytest.mark.slow
def test_too_few_file_descriptors_are_named():
    out = fault({}, "sh", "-c", 'ulimit -n 64 && exec "$@"', "sh")
    assert "FAULT    open files: a process may open 64" in out
    assert "ulimit -n 4096" in out


def can_mount():
    return bool(shutil.which("unshare")) and subprocess.run(IS_POSSIBLE, capture_output=True).returncode == 0


@pytest.mark.battery
@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_too_little_shared_memory_is_named():
    """All verbs work nonetheless, over gloo."""
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    process = start({}, "unshare", "-m", "sh", "-c", mount, "sh")
    ((out, err),) = launching.finished(process)
    assert process.returncode == 0, out + err
    assert "warning  /dev/shm: 0.1 MiB free\n         Ranks of one host exchange data there" in out
    assert "communicate over gloo\n" in out


def test_variables_of_another_launcher_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = CliRunner().invoke(main, ["check"])
    assert said.exit_code == 1
    assert "FAULT    variables: RANK=3 is outside the world of WORLD_SIZE=2" in said.output


def test_an_interface_that_is_not_there_is_named():
    (found,) = [row for row in surroundings({"GLOO_SOCKET_IFNAME": "lo,eth99"}) if row.state == "fault"]
    assert found.said == "GLOO_SOCKET_IFNAME=lo,eth99, but eth99 does not exist or is down"
    assert found.advice.startswith("Name one of ")


def found(name, state="ok"):
    return Finding(name, state, f"{name} is {state}")


def test_of_other_ranks_only_faults_are_added_and_no_check_of_the_host_is_repeated(monkeypatch):
    host = [found("memory", "warning"), found("network")]
    own = [{"work": "gather", "easydist": 1.0, "gloo": 2.0}]
    others = [{"work": "gather", "easydist": 3.0, "gloo": 4.0}]
    of_ranks = [
        check._as_results([*host, found("rendezvous"), found("gather")], own),
        check._as_results([*host, found("rendezvous"), found("gather", "fault")], others),
        check._as_results([found("memory", "fault"), found("ranks", "fault")]),
    ]
    monkeypatch.setattr(check, "_outcomes", lambda ranks, timeout: of_ranks[:ranks])
    results = check._as_launcher(3, host, 5.0)
    joined = [found("rendezvous"), found("gather"), found("gather", "fault"), found("ranks", "fault")]
    assert results == check._as_results([*host, *joined], own)


def outcome(script):
    """Return the findings of rank 1, which is this shell script."""
    return check._outcome(1, subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE))


def test_a_rank_whose_output_holds_no_results_is_a_fault_unless_it_has_ended_well():
    told = check._as_results([found("gather")])
    assert outcome(f"echo a library; echo '{json.dumps(told)}'; exit 1") == told
    assert outcome("echo a library") == check._as_results([])
    for script in ("exit 3", "echo '{\"findings\": [';  exit 3"):
        (row,) = outcome(f"printf '%0600d' 0 >&2; echo 'no memory' >&2; {script}")["findings"]
        assert row["state"] == "fault"
        assert row["said"] == f"rank 1 ended with exit status 3: {'0' * 491}no memory"
    (row,) = outcome("printf '%0600d\\nno\\nmemory\\n' 0 >&2; exit 3")["findings"]
    assert row["said"] == "rank 1 ended with exit status 3: no\nmemory"


@pytest.mark.parametrize(("rank", "state", "is_shown"), [(0, "ok", True), (1, "ok", False), (1, "fault", True)])
def test_rank_0_prints_and_so_does_each_rank_with_a_fault(monkeypatch, rank, state, is_shown):
    monkeypatch.setattr(check, "_results", lambda ranks, timeout: (check._as_results([found("gather", state)]), rank))
    said = CliRunner().invoke(main, ["check"])
    assert said.exit_code == (state == "fault")
    assert ("gather: gather is" in said.output) == is_shown
