"""``easydist run``: ranks, their lines, their failures, and what is left after Ctrl-C."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import tracemalloc
from types import SimpleNamespace

import launching
import psutil
import pytest
from click.testing import CliRunner
from test_env import easydist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from easydist.cli import launch
from easydist.cli.failures import report, traceback_in
from easydist.cli.main import main
from easydist.cli.options import _has_own_interpreter, check_values, parsed

HELLO = "import os, sys\nprint('hello', os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"


def script(folder, text, name="script.py"):
    path = folder / name
    path.write_text(text)
    path.chmod(0o700)
    return path


@pytest.mark.slow
def test_each_line_stands_after_its_rank_and_the_script_has_its_arguments(tmp_path):
    out, err = easydist("run", "-n", "2", script(tmp_path, HELLO), "-n", "7", "--help", "--", "x")
    rest = "2 ['-n', '7', '--help', '--', 'x']"
    assert sorted(out.splitlines()) == [f"[rank {rank}] hello {rank} {rest}" for rank in range(2)]
    assert not err


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_output_that_the_terminal_cannot_show_is_replaced(tmp_path, errors):
    text = "import os\nos.write(1, b'caf\\xe9\\n')\nprint('end')"
    out, err = easydist("run", "-n", "1", script(tmp_path, text), PYTHONIOENCODING=f"ascii:{errors}")
    assert (out.splitlines(), err) == (["[rank 0] caf?", "[rank 0] end"], "")
    out, _ = easydist("check", "--help", PYTHONIOENCODING=f"latin-1:{errors}")
    assert "torchrun --nnodes 2 ? -m easydist check" in out


@pytest.mark.slow
def test_ranks_go_on_without_a_word_if_nobody_reads_their_output_any_more(tmp_path):
    text = "import sys\nfor line in range(20_000): print(line)\nopen(sys.argv[1], 'w')"
    code = (
        "import subprocess, sys; subprocess.run(f'{sys.executable} -m easydist run -n 1 {sys.argv[1]} {sys.argv[2]} |"
    )
    done = tmp_path / "done"
    out, err = launching.python("-c", f"{code} head -1', shell=True)", script(tmp_path, text), done)
    assert (out, err, done.exists()) == ("[rank 0] 0\n", "", True)


@pytest.mark.slow
def test_modules_torchruns_options_and_two_ranks_by_default(tmp_path):
    script(tmp_path, HELLO, "hello_module.py")
    path = os.pathsep.join([str(launching.ROOT), str(tmp_path)])
    out, _ = easydist("run", "--max-restarts", "0", "-m", "--", "hello_module", "x", PYTHONPATH=path)
    assert sorted(out.splitlines()) == [f"[rank {rank}] hello {rank} 2 ['x']" for rank in range(2)]


@pytest.mark.slow
def test_a_script_with_another_interpreter_is_run_by_it(tmp_path):
    path = script(tmp_path, "#!/bin/sh\necho shell $RANK $1", "script")
    out, _ = easydist("run", "-n", "2", path, "x")
    assert sorted(out.splitlines()) == ["[rank 0] shell 0 x", "[rank 1] shell 1 x"]


@pytest.mark.slow
def test_survivors_go_on_when_a_rank_fails(tmp_path):
    text = "import os, sys\nsys.exit(3 * int(os.environ['RANK']))"
    _, err = easydist("run", "--survivors", "-n", "3", script(tmp_path, text))
    assert sorted(line.partition(": process")[0] for line in err.splitlines()) == ["[rank 1] rank 1", "[rank 2] rank 2"]
    assert err.count("; the others continue") == 2


@pytest.mark.slow
def test_survivors_hear_at_once_of_a_rank_that_ended_before_its_first_call(tmp_path):
    text = """
import sys
import easydist
state = easydist.ProcessState(cpu=True)
if state.process_index == 1:
    sys.exit(3)
try:
    easydist.gather(state.process_index)
except easydist.PeerLostError as error:
    print(error.rank, error.exit_status, str(error).splitlines()[0].partition(" ended ")[2])
easydist.recover()
print(easydist.gather(state.process_index).tolist())
"""
    out, _ = easydist("run", "--survivors", "-n", "3", script(tmp_path, text))
    lines = ["1 3 (exit status 3) before its first call", "[0, 1]"]
    assert sorted(out.splitlines()) == sorted(f"[rank {rank}] {line}" for rank in (0, 2) for line in lines)


@pytest.mark.slow
def test_without_survivors_the_status_is_that_of_the_first_rank(tmp_path):
    text = "import os, sys\nsys.exit(3 + int(os.environ['RANK']))"
    easydist("run", "--survivors", "-n", "2", script(tmp_path, text), status=3)


@pytest.mark.slow
def test_signals_reach_ranks_below_survivors_once(tmp_path):
    text = """
import signal
found = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: found.append(number))
print("here", flush=True)
signal.pause()
print([int(number) for number in found if not signal.sigtimedwait([], 1)], flush=True)  # a second one comes at once
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.raise_signal(signal.SIGTERM)
"""
    path = script(tmp_path, text)
    process = launching.start(
        sys.executable,
        "-m",
        "easydist",
        "run",
        "--survivors",
        "-n",
        "1",
        path,
        env=os.environ | {"PYTHONPATH": launching.ROOT},
    )
    assert process.stdout.readline() == "[rank 0] here\n"
    process.send_signal(signal.SIGTERM)
    ((out, err),) = launching.finished(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.splitlines()[0] == f"[rank 0] [{int(signal.SIGTERM)}]"
    assert "ended by SIGTERM" in err


RAISES = """
import easydist, torch
state = easydist.ProcessState(cpu=True)
easydist.gather(torch.ones(1))
if state.process_index == 1:
    try:
        {}["key"]
    except KeyError:
        raise ValueError("bad data")
easydist.gather(torch.ones(1))
"""


@pytest.mark.slow
def test_the_first_failing_rank_is_shown_first_with_its_traceback(tmp_path):
    """Rank 0 fails, too, because of rank 1, and may end before it."""
    _, err = easydist("run", "-n", "2", script(tmp_path, RAISES), status=1, PYTHON_EXEC=launching.fork())
    end = err.partition("\nRank 1 failed first: process ")[2]
    assert end.splitlines()[0].endswith(
        (" ended with exit status 1.", " was terminated by SIGTERM after its exception.")
    )
    assert end.splitlines()[1] == "Traceback (most recent call last):"
    assert "KeyError: 'key'" in end
    assert end.index("ValueError: bad data") < end.index("Rank 0:")
    assert "ChildFailedError" not in err


def test_a_rank_that_the_launcher_ends_after_its_exception_has_failed_first(tmp_path, capsys):
    """Its process was still ending when the other one had failed because of it."""
    said = {0: "easydist.errors.RemoteError: rank 1 failed", 1: "ValueError: bad data"}
    for rank, line in said.items():
        (folder := tmp_path / "run" / "attempt_0" / str(rank)).mkdir(parents=True)
        (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n  here\n{line}\n")
    failures = {rank: ProcessFailure(rank, 100 + rank, status, "") for rank, status in ((0, 1), (1, -signal.SIGTERM))}
    assert report(failures, tmp_path) == 1
    err = capsys.readouterr().err
    assert "Rank 1 failed first: process 101 was terminated by SIGTERM after its exception." in err
    assert "Rank 0: process 100 ended with exit status 1. easydist.errors.RemoteError: rank 1 failed" in err


def test_a_rank_that_the_system_kills_is_the_first_and_one_that_the_launcher_ends_is_not(tmp_path, capsys):
    def failure(rank, status, second):
        (folder := tmp_path / "run" / "attempt_0" / str(rank)).mkdir(parents=True)
        (folder / "stderr.log").write_text("Traceback (most recent call last):\nOSError: gone\n" * (status == 1))
        os.utime(folder / "stderr.log", (second, second))
        return ProcessFailure(rank, 100 + rank, status, "")

    failures = {1: failure(1, 1, 3), 2: failure(2, -signal.SIGKILL, 2), 0: failure(0, -signal.SIGTERM, 1)}
    assert report(failures, tmp_path) == 128 + signal.SIGKILL
    err = capsys.readouterr().err
    assert err.startswith("\nRank 2 failed first: process 102 was killed by SIGKILL.\nIt left no traceback. The system")
    assert err.index("Rank 1:") < err.index("Rank 0:")


def test_of_ranks_that_sigterm_has_ended_the_one_that_torchrun_has_noticed_first_has_failed_first(tmp_path, capsys):
    """torchrun has ended the other one then."""
    for rank in (0, 1):
        (folder := tmp_path / "run" / "attempt_0" / str(rank)).mkdir(parents=True)
        (folder / "stderr.log").touch()
        os.utime(folder / "stderr.log", (rank, rank))
    failures = {rank: ProcessFailure(rank, 100 + rank, -signal.SIGTERM, "") for rank in (1, 0)}
    assert report(failures, tmp_path) == 128 + signal.SIGTERM
    assert "Rank 1 failed first: process 101 was killed by SIGTERM." in capsys.readouterr().err


def test_only_the_end_of_a_long_output_is_read(tmp_path, capsys):
    (folder := tmp_path / "run" / "attempt_0" / "0").mkdir(parents=True)
    with (folder / "stderr.log").open("w") as file:
        file.seek(1 << 30)  # a hole
        file.write("\nTraceback (most recent call last):\n  here\nValueError: bad data\n")
    tracemalloc.start()
    try:
        assert report({0: ProcessFailure(0, 100, 1, "")}, tmp_path) == 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()
    assert "\nTraceback (most recent call last):\n  here\nValueError: bad data\n" in capsys.readouterr().err


def test_a_full_disk_is_named(tmp_path, capsys, monkeypatch):
    """On it a rank can write neither its output nor a traceback."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    assert report({0: ProcessFailure(0, 100, 1, "")}, tmp_path) == 1
    said = f"It left no traceback.\nNo space is left in {tmp_path}, where the ranks' output is kept: set TMPDIR"
    assert said in capsys.readouterr().err


def test_a_failure_is_reported_if_the_folder_of_the_output_has_been_removed(tmp_path, capsys):
    """A program that removes old temporary files may have done so."""
    assert report({0: ProcessFailure(0, 100, 3, "")}, tmp_path / "removed") == 3
    assert "Rank 0 failed first: process 100 ended with exit status 3." in capsys.readouterr().err


def test_a_rank_that_a_signal_without_a_name_kills_is_reported(tmp_path, capsys):
    assert report({0: ProcessFailure(0, 100, -35, "")}, tmp_path) == 163
    assert "Rank 0 failed first: process 100 was killed by signal 35." in capsys.readouterr().err


@pytest.mark.slow
def test_a_survivors_wrapper_names_any_signal(tmp_path):
    text = "import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 35)"
    _, err = easydist("run", "--survivors", "-n", "2", script(tmp_path, text))
    assert "was killed by signal 35; the others continue" in err


KILLED = RAISES.partition("    try")[0] + "    import os\n    os.kill(os.getpid(), 9)\neasydist.gather(torch.ones(1))"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    _, err = easydist("run", "-n", "2", script(tmp_path, KILLED), status=137, PYTHON_EXEC=launching.fork())
    assert "Rank 1 failed first: process " in err
    assert "was killed by SIGKILL.\nIt left no traceback." in err


SLOW_TO_END = RAISES.replace("    try", "    import atexit, time; atexit.register(time.sleep, 1000)\n    try")


@pytest.mark.slow
def test_a_rank_that_raised_is_first_even_if_the_launcher_has_to_end_it(tmp_path):
    """Rank 0 has ended before, because of rank 1."""
    _, err = easydist("run", "-n", "2", script(tmp_path, SLOW_TO_END), status=1, PYTHON_EXEC=launching.fork())
    end = err.partition("\nRank 1 failed first: process ")[2]
    assert "was terminated by SIGTERM after its exception." in end.splitlines()[0]
    assert end.index("ValueError: bad data") < end.index("Rank 0: process ")


def on_two_nodes(path, *options, second=("-m", "easydist")):
    """The lines, the errors and the status of two agents on this machine, with two ranks each."""
    own = {"PYTHONPATH": launching.ROOT, "GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": launching.fork()}
    nodes = []
    for node, program in enumerate([("-m", "easydist"), second]):
        command = [*program, "run", "--nnodes", "2", "-n", "2", "--node-rank", str(node), *options, path]
        env = own | {"EASYDIST_HOST_ID": f"node{node}", "FIRST": nodes and nodes[0].pid}
        nodes.append(launching.start(launching.fork(), *command, env=os.environ | env))
    told = launching.finished(*nodes)
    return [(sorted(out.splitlines()), err, node.returncode) for (out, err), node in zip(told, nodes, strict=True)]


MEETS = """
import easydist, os
state = easydist.ProcessState(cpu=True)
line = f"{os.environ['GROUP_RANK']} {easydist.gather_object([state.process_index])}\\n"
os.write(1, line.encode())  # torchrun's ranks write each argument of print on its own, and lines of two ranks would mix
"""


@pytest.mark.slow
def test_two_nodes_that_are_told_where_they_meet(tmp_path):
    place = ("--master-addr", "127.0.0.1", "--master-port", str(launching.free_port()))
    for node, (lines, err, status) in enumerate(on_two_nodes(script(tmp_path, MEETS), *place)):
        assert (lines, status) == ([f"[rank {2 * node + i}] {node} [0, 1, 2, 3]" for i in range(2)], 0)
        assert "\nRank " not in err  # but torch warns there where the agent that keeps the store ends first
        assert "Traceback" not in err


ENDS_SECOND = """
import os, psutil
from torch.distributed.elastic.utils import store
from easydist.cli.main import main
arrived = store._barrier_nonblocking
def late(store, world_size, key_prefix):
    try:
        return arrived(store, world_size, key_prefix)
    finally:
        if "terminal_state" in key_prefix:
            psutil.Process(int(os.environ["FIRST"])).wait()
store._barrier_nonblocking = late
main()
"""


@pytest.mark.slow
def test_an_agent_may_end_after_the_one_that_serves_the_store(tmp_path):
    """All ranks have succeeded: that torch's agents then wait for each other is no news, and no traceback."""
    place = ("--master-addr", "127.0.0.1", "--master-port", str(launching.free_port()))
    nodes = on_two_nodes(script(tmp_path, MEETS), *place, second=("-c", ENDS_SECOND))
    assert [status for _, _, status in nodes] == [0, 0], nodes
    assert "Traceback" not in nodes[1][1]


@pytest.mark.slow
def test_on_two_nodes_each_says_why_its_ranks_failed(tmp_path):
    """They agree on who is the first node by themselves."""
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{launching.free_port()}", "--rdzv-id", "job")
    nodes = on_two_nodes(script(tmp_path, RAISES.replace("== 1", "== 3")), *place)
    ends = dict(err.partition("\nRank ")[2].partition(" failed ")[::2] for _, err, _ in nodes)
    assert [status for _, _, status in nodes] == [1, 1], ends
    assert ends.pop("3").startswith("first: process ")
    ((rank, end),) = ends.items()
    assert rank in "01"
    assert end.startswith("because of another rank: process ")
    assert "RemoteError: gather: rank 3 ended with an exception" in end
    assert "rank 3: ValueError: bad data" in end


STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("ignored", flush=True))
print("pids", os.getpid(), child.pid, flush=True)
while True:
    time.sleep(1000)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_no_orphan(tmp_path):
    """The ranks ignore it, and have children in sessions of their own: a second one kills them all, without a wait."""
    command = [sys.executable, "-m", "easydist", "run", "-n", "2", script(tmp_path, STUBBORN)]
    env = {"PYTHONPATH": launching.ROOT, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 1000}
    process = launching.start(*command, env=os.environ | env)
    limit = threading.Timer(launching.within(60), process.kill)
    limit.start()
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        pids = [int(text) for line in lines for text in line.partition("pids")[2].split()]
        assert len(pids) == 4, process.communicate()
        process.send_signal(signal.SIGINT)
        assert "ignored" in process.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * launch._TOGETHER)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    finally:
        limit.cancel()
        process.kill()
    assert process.returncode == 130, err
    assert "ended by SIGINT" in err
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


@pytest.mark.parametrize(("seconds", "kills"), [(60, 0), (-1, 1)])
def test_two_signals_at_once_are_one(monkeypatch, seconds, kills):
    """``timeout`` sends one to its child and one to its group, and a terminal's Ctrl-C may be passed on by a parent."""
    killed = []
    monkeypatch.setattr(launch, "_TOGETHER", seconds)
    monkeypatch.setattr(launch, "_kill_children", lambda: killed.append(True))
    pipe, end = os.pipe()
    os.write(end, bytes([signal.SIGCHLD, signal.SIGTERM, signal.SIGTERM]))
    os.close(end)
    launch._kill_at_second(pipe)
    assert len(killed) == kills


@pytest.mark.parametrize("option", ["--nnods", "--nodes"])
def test_wrong_options_give_a_suggestion(option):
    said = CliRunner().invoke(main, ["run", option, "2", "x.py"])
    assert said.exit_code == 2
    assert "--nnodes" in said.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("-n 0", "-n: give a number above 0"),
        ("-n -1", "-n: give a number above 0"),
        ("-n two", "-n takes a number of ranks, cpu, gpu or auto, got two"),
        ("--nnodes 2", "name the rendezvous on each machine"),
        ("--nnodes two", "'two'"),
        ("--nnodes 2:1", "min_nodes"),
        ("--monitor-interval 0", "--monitor-interval: give a number above 0"),
        ("--max-restarts -1", "max_restarts must be >= 0"),
        ("--tee 9", "9 does not match"),
        ("--log-dir /proc/none", "/proc/none"),
        ("--master-port 99999", "--master-port: 99999 is no port"),
        (
            "--nnodes 2 --node-rank 2 --master-addr node1",
            "--node-rank: 2 is outside of --nnodes 2; nodes count from 0",
        ),
        ("--nnodes 2 --node-rank -1 --master-addr node1", "--node-rank: -1 is outside of --nnodes 2"),
        ("--node-rank 1 --master-addr node1", "--node-rank: 1 is outside of --nnodes 1; nodes count from 0"),
    ],
)
def test_wrong_values_of_options_are_refused_before_any_rank_starts(options, text):
    said = CliRunner().invoke(main, ["run", *options.split(), __file__])
    assert (said.exit_code, text in said.output) == (2, True), said.output


def test_a_limit_of_open_files_that_is_too_low_is_named(monkeypatch, capsys):
    args = parsed(["-n", "200", __file__])
    for limit in (1024, resource.RLIM_INFINITY, 4096):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        check_values(args)
    assert capsys.readouterr().err == (
        "easydist run: only 1024 files may be open, and 200 ranks need about 1220: "
        "raise the limit, such as by ulimit -n 2440\n"
    )


@pytest.mark.parametrize("options", [(), ("-n", "2"), ("-m",), ("--on", "slurm")])
def test_a_missing_script_is_named_as_in_the_help(options):
    said = CliRunner().invoke(main, ["run", *options])
    assert (said.exit_code, "Error: Missing argument 'SCRIPT [ARGUMENTS]...'." in said.output) == (2, True), said.output


@pytest.mark.parametrize("options", [("-h",), ("-n", "2", "-h"), ("-n", "2", "--help"), ("--on", "ray", "--help")])
def test_help_is_that_of_easydist_wherever_it_is_asked_for(options):
    said = CliRunner().invoke(main, ["run", *options])
    assert said.exit_code == 0
    assert said.output == CliRunner().invoke(main, ["run", "--help"]).output
    assert said.output.startswith("Usage: main run [-n N]")


def test_a_script_that_is_not_there_is_said_at_once():
    said = CliRunner().invoke(main, ["run", "package.train"])
    assert said.exit_code == 2
    assert (
        "cannot read package.train: No such file or directory (if it is a module, put -m before its name)"
        in said.output
    )


def test_without_a_traceback_the_last_lines_are_shown():
    assert traceback_in("\n".join(map(str, range(100)))).splitlines() == [str(i) for i in range(80, 100)]


def test_a_traceback_is_shown_with_those_that_led_to_it_and_no_others():
    first, second, third = (f"Traceback (most recent call last):\n  here\n{name}: text" for name in ("A", "B", "C"))
    chained = f"{second}\n\nDuring handling of the above exception, another exception occurred:\n\n{third}"
    assert traceback_in(f"{first}\n\na line\n\n{chained}\n") == chained


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 6, in <module>
  | ExceptionGroup: two losses (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 2, in first
    | ValueError: bad data
    +---------------- 2 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "train.py", line 4, in second
    | ExceptionGroup: nested (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'key'
      +------------------------------------"""


def test_a_group_of_exceptions_is_shown_with_all_its_members(tmp_path, capsys):
    for rank in (0, 1):
        (folder := tmp_path / "run" / "attempt_0" / str(rank)).mkdir(parents=True)
        (folder / "stderr.log").write_text("".join(f"[rank{rank}]: {line}\n" for line in GROUP.splitlines()))
    assert report({rank: ProcessFailure(rank, 100, 1, "") for rank in (0, 1)}, tmp_path) == 1
    err = capsys.readouterr().err
    assert f"exit status 1.\n{GROUP}\n" in err
    assert err.endswith("exit status 1. ExceptionGroup: two losses (2 sub-exceptions)\n")


@pytest.mark.parametrize(
    ("begin", "is_own"),
    [("#!/bin/sh", True), ("#!/usr/bin/python3", False), ("#!/bin/easydist run", False), ("", False)],
)
def test_a_script_has_its_own_interpreter_unless_that_is_python_or_easydist(tmp_path, begin, is_own):
    assert _has_own_interpreter(str(script(tmp_path, f"{begin}\npass"))) is is_own
