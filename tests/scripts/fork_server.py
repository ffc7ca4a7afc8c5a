"""Runs commands of Python in forks of a process that has torch loaded: the server of ``launching.forked``.

Usage: python fork_server.py LISTENER [MODULE …], the file descriptor of a listening socket, and what the forks have
loaded beside torch; the server ends when its stdin ends.

For each command comes a connection, with the arguments, the environment, the working directory and the standard
streams. It is served by a keeper, which forks the process that becomes Python with all of these, passes signals on to
it and tells how it has ended.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types


def request(listener: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Serve until the tests end; return, in the process that a command gets, its arguments, environment and folder."""
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # a keeper that has ended
                pass
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return keep(connection)
        connection.close()
    os._exit(0)


def keep(connection: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork the process, and return in it; in the keeper, tell how it has ended."""
    length, streams, *_ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as file:
        message = file.read(int.from_bytes(length, "big"))
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        threading.Thread(target=pass_on, args=(connection, pid), daemon=True).start()
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # all that it has left behind
        with contextlib.suppress(OSError):
            connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return json.loads(message)


def pass_on(connection: socket.socket, pid: int) -> None:
    """Send a process the signals that its client gets, and kill it if the client is gone."""
    with contextlib.suppress(ProcessLookupError):
        while number := connection.recv(1):
            os.kill(pid, number[0])
        os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)  # it may have none yet


def run(first: str, *rest: str) -> None:
    """Run a script, ``-m module`` or ``-c code`` as the main module, with ``-u`` before it as launchers do."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-u":
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), sys.stdout.encoding, write_through=True)
        run(*rest)
    elif first == "-m":
        sys.argv, sys.path[0] = list(rest), os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(rest[0], vars(main))
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.realpath(first))
        main.__file__ = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
        exec(code, vars(main))


def leave_objects() -> None:
    """Let this process and its forks end without destroying the objects of C++, which takes a sixth of a second.

    Those of Python are destroyed before. Processes that are not forked show that the rest ends well.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)  # what is registered last runs first


def show(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
    """Print an uncaught exception without the frames of this module."""
    while traceback and traceback.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    gc.disable()  # all that is loaded stays: looking for garbage among it would take a third of the time
    import torch.distributed  # noqa: F401 - the forks have it

    for name in sys.argv[2:]:
        importlib.import_module(name)
    leave_objects()
    gc.freeze()  # the objects of torch are then not scanned, and so not copied, in the forks
    gc.enable()
    with socket.socket(socket.AF_UNIX, fileno=int(sys.argv[1])) as listener:
        arguments, environment, folder = request(listener)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "").partition(":")
    sys.stdout = open(1, "w", encoding=encoding or None, errors=errors or None, closefd=False)  # noqa: SIM115
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.excepthook = show
    run(*arguments)
