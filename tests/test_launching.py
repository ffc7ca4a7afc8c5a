"""A command in a fork of the fork server behaves as the same command of Python, and a lost server is reported."""

import contextlib
import signal

import launching
import psutil
import pytest

EXIT = "import atexit, sys; atexit.register(print, 'at exit'); print('here'); sys.exit"
KILL = "import os, sys; print('here', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
WHERE = "import os, sys; print(sys.argv, sys.path[:3], __name__, os.getcwd(), os.getpid() == os.getsid(0))"
SAME = {
    "code": (0, "-c", WHERE, "x", "-y"),
    "module": (0, "-m", "calendar", "2000"),
    "script": (1, launching.SCRIPTS / "forked.py"),
    "status": (3, "-c", f"{EXIT}(3)"),
    "text": (1, "-u", "-c", f"{EXIT}('bye')"),
    "exception": (1, "-c", "def f():\n    raise KeyError\nf()"),
    "signal": (-signal.SIGKILL, "-c", KILL),
}
WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
KILLS_SERVER = "import os, psutil; psutil.Process(os.getppid()).parent().kill()"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_fork_does_and_ends_as_python_does(name):
    status, *command = SAME[name]
    assert launching.forked(*command, status=status) == launching.python(*command, status=status)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_the_process_that_stands_for_it(number):
    process = launching.start(launching.fork(), "-c", WAITS)
    fork = psutil.Process(int(process.stdout.readline()))
    process.send_signal(number)
    launching.finished(process)
    assert process.returncode == -number
    fork.wait(launching.within(10))


@pytest.mark.slow
def test_nothing_stays_behind():
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"  # it holds the streams
    out, _ = launching.forked("-c", code)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(out)).wait(launching.within(10))


@pytest.mark.slow
def test_a_command_of_a_server_that_has_ended_fails():
    interpreter = launching.fork.__wrapped__()
    launching.python("-c", KILLS_SERVER, interpreter=interpreter)
    _, err = launching.python("-c", "", interpreter=interpreter, status=1)
    assert err.startswith("the fork server does not answer: ")
