"""The ranks and folders of an ``easydist run`` that was killed, and the addresses on which its store listens."""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import launching
import psutil
import pytest
from test_env import easydist
from test_run import script

from easydist.cli.home import PIPE, home

SLEEPS = """
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(1000)
"""
BY_PIPE = """
import os, subprocess, sys, time
from easydist.cli import rank
from easydist.cli.home import PIPE, home
if len(sys.argv) == 1:
    with home() as folder:
        subprocess.run([sys.executable, __file__, str(os.getpid()), os.path.join(folder, PIPE)])
else:
    sys.platform = "neither"
    shell = "sleep 1000 & echo pid $$; echo pid $!; wait"
    rank.become(int(sys.argv[1]), sys.argv[2], ["sh", "-c", shell])
"""


def runs(pid):
    """True if a process runs; it may not have been collected by its parent yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_after_kill(command, folder):
    """Kill a launcher once two pids have been printed; return those that still run in the end, and its folders."""
    process = launching.start(
        *command, env=os.environ | {"PYTHONPATH": launching.ROOT, "TMPDIR": folder, "OMP_NUM_THREADS": 1}
    )
    limit = threading.Timer(launching.within(60), process.kill)
    limit.start()
    try:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.kill()
        process.wait()
        deadline = time.monotonic() + launching.within(20)
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [pid for pid in pids if runs(pid)], list(folder.glob("easydist-run-*"))
    finally:
        limit.cancel()
        launching.finished(process)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--survivors",)], ids=["plain", "survivors"])
def test_ranks_end_with_a_launcher_that_is_killed_and_the_next_one_removes_its_folder(tmp_path, options):
    path = script(tmp_path, SLEEPS)
    left, folders = left_after_kill([sys.executable, "-m", "easydist", "run", "-n", "2", *options, path], tmp_path)
    assert not left
    assert len(folders) == 1
    easydist("run", "-n", "1", script(tmp_path, "", "empty.py"), TMPDIR=tmp_path)
    assert not list(tmp_path.glob("easydist-run-*"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--survivors",)], ids=["plain", "survivors"])
def test_the_program_that_a_shell_script_has_started_ends_too(tmp_path, options):
    path = script(tmp_path, "#!/bin/sh\necho pid $$\nsh -c 'echo pid $$; sleep 1000; true'\ntrue", "script")
    command = [sys.executable, "-m", "easydist", "run", "-n", "1", *options, path]
    assert left_after_kill(command, tmp_path)[0] == []


@pytest.mark.slow
def test_what_a_rank_has_started_ends_also_if_the_rank_has_been_killed_first():
    """The kernel kills it with the launcher, before the process that watches the pipe has looked again."""
    code = "import os; from easydist.cli.rank import _watch; pipe, end = os.pipe(); os.close(end); "
    launching.forked("-c", code + "_watch(pipe, 0); os.wait()", status=-signal.SIGKILL)


@pytest.mark.slow
def test_without_linux_a_rank_and_its_children_end_by_the_pipe(tmp_path):
    left, folders = left_after_kill([sys.executable, script(tmp_path, BY_PIPE)], tmp_path)
    assert not left
    assert len(folders) == 1


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["linux", "neither"])
def test_a_rank_whose_launcher_has_ended_before_does_not_begin(tmp_path, platform):
    os.mkfifo(tmp_path / PIPE)
    held = os.open(tmp_path / PIPE, os.O_RDWR)
    code = f"import sys; sys.platform = {platform!r}\nfrom easydist.cli.rank import become\n"
    out, _ = launching.python("-c", code + f"become(1, {str(tmp_path / PIPE)!r}, ['echo', 'begun'])", status=137)
    os.close(held)
    assert out == ""


@pytest.mark.slow
def test_a_command_that_is_not_there_is_named(tmp_path):
    _, err = easydist("run", "-n", "1", "--no-python", "no-such-command", status=1)
    assert "cannot run no-such-command: No such file or directory" in err


def test_only_folders_of_ended_launchers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("without-a-pipe", "ended", "removed-in-part"):
        (tmp_path / f"easydist-run-{name}").mkdir()
    (tmp_path / "easydist-run-removed-in-part" / "logs").mkdir()
    os.utime(tmp_path / "easydist-run-removed-in-part", (0, 0))
    os.mkfifo(tmp_path / "easydist-run-ended" / PIPE)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    os.mkfifo(elsewhere / PIPE)
    (tmp_path / "easydist-run-link").symlink_to(elsewhere)
    with home() as outer:
        with home() as inner:
            assert os.path.exists(outer)
            names = {path.name for path in tmp_path.iterdir()}
            kept = {"easydist-run-without-a-pipe", "easydist-run-link", "elsewhere"}
            assert names == kept | {os.path.basename(outer), os.path.basename(inner)}
        assert not os.path.exists(inner)
    assert (elsewhere / PIPE).exists()


LISTENS = """
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
agent = psutil.Process(os.getppid())
print([c.laddr for c in agent.net_connections("inet") if c.status == psutil.CONN_LISTEN], flush=True)
"""


@pytest.mark.slow
def test_on_one_host_there_is_one_store_and_it_listens_on_loopback_only(tmp_path):
    path = script(tmp_path, LISTENS)
    for options in ((), ("--standalone",)):
        out, _ = easydist("run", "-n", "1", *options, path, GLOO_SOCKET_IFNAME="lo")
        assert out.count("ip=") == 1, out
        assert "ip='127.0.0.1'" in out


@pytest.mark.slow
def test_a_port_may_be_given_and_an_error_names_it_if_it_is_in_use(tmp_path):
    port = launching.free_port()
    with socket.create_server(("127.0.0.1", port)):
        path = script(tmp_path, "import os; print(os.environ['MASTER_PORT'])")
        _, err = easydist("run", "-n", "1", "--master-port", port, path, status=1)
    assert f"Error: cannot listen on port {port} of 127.0.0.1: Address already in use" in err
    assert "Traceback" not in err
    out, _ = easydist("run", "-n", "1", "--master-port", port, path)
    assert out == f"[rank 0] {port}\n"


FAILS_ONCE = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
os._exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


@pytest.mark.slow
def test_restarted_ranks_meet_again(tmp_path):
    path = script(tmp_path, FAILS_ONCE)
    options = {"GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": launching.fork()}
    out, _ = easydist("run", "-n", "2", "--max-restarts", "1", path, **options)
    assert sorted(out.splitlines())[-1] == "[rank 1] 1"


@pytest.mark.slow
def test_ctrl_c_ends_ranks_and_removes_the_folder(tmp_path):
    command = [sys.executable, "-m", "easydist", "run", "-n", "2", script(tmp_path, SLEEPS)]
    process = launching.start(*command, env=os.environ | {"PYTHONPATH": launching.ROOT, "TMPDIR": tmp_path})
    for _ in range(2):
        assert "pid" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    launching.finished(process)
    assert process.returncode == 130
    assert not list(tmp_path.glob("easydist-run-*")) + list(tmp_path.glob("torchelastic_*"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "check", "bench", "env"])
def test_ctrl_c_while_torch_loads_ends_it_at_once(tmp_path, command):
    rest = [script(tmp_path, "print('ran')")] if command == "run" else []
    process = launching.start(
        sys.executable, "-m", "easydist", command, *rest, env=os.environ | {"PYTHONPATH": launching.ROOT}
    )
    end = time.monotonic() + launching.within(30)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    ((out, err),) = launching.finished(process)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


LOADS = """
import signal
from easydist.cli.loading import loading
with loading():
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
with loading():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("lost")
"""


@pytest.mark.slow
def test_ctrl_c_while_torch_loads_is_not_lost():
    """numpy's code in C drops the exception, or makes an ImportError of it."""
    assert launching.python("-c", LOADS, status=130) == ("", "")
