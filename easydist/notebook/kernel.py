"""The process of a rank: an IPython kernel without what only a person needs; ``python -m easydist.notebook.kernel``.

History, completion, the debugger and the user's profile are left out: with them a rank starts later, and several ranks
would write to the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import linecache
import os
import select
import shutil
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from easydist.notebook.messages import ACT, META, VALUE

_ALIVE = 1000
"""Milliseconds between two looks at the parent, whose end closes the pipe in any case but one: a child has it too."""


_ACT_NAME = "<easydist>"


def watch(lifeline: int, parent: int, folder: str) -> None:
    """Begin to end this process, and all that it has started, once the notebook's process is gone.

    Args:
        lifeline: The read end of a pipe whose other end only that process has.
        parent: That process.
        folder: Removed then.
    """

    def wait() -> None:
        pipe = select.poll()
        pipe.register(lifeline, select.POLLIN)
        while not pipe.poll(_ALIVE) and os.getppid() == parent:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="easydist-lifeline", daemon=True).start()


def main() -> None:
    """Become the rank that the first argument describes."""
    settings = json.loads(sys.argv.pop())  # cells find no arguments
    watch(settings["lifeline"], settings["parent"], settings["folder"])
    sys.path[:] = settings["path"]
    sys.modules["tqdm.autonotebook"] = _BarsAsText("tqdm.autonotebook")
    app = _application(settings)
    from easydist.notebook.member import Member

    member = Member(settings["rank"], settings["size"], settings["folder"], app.shell.user_ns)
    member.join(settings["epoch"])
    app.shell.user_ns_hidden.update(app.shell.user_ns)
    app.kernel.member = member
    app.start()


def _application(settings: dict[str, Any]) -> Any:
    from ipykernel.compiler import XCachingCompiler
    from ipykernel.iostream import OutStream
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelapp import IPKernelApp
    from ipykernel.zmqshell import ZMQInteractiveShell

    class Compiler(XCachingCompiler):  # type: ignore[misc]
        """Names cells by the notebook's numbers, so that ``easydist top`` says ``<cell 5>:3``."""

        def get_code_name(self, raw_code: str, code: str, number: int) -> str:
            if raw_code.strip() == ACT:
                return _ACT_NAME
            name = f"<cell {number}>"
            return name if name not in linecache.cache else f"<cell {number}, part {len(linecache.cache)}>"

    class Shell(ZMQInteractiveShell):  # type: ignore[misc]
        """Hears Ctrl-C in the user's code only, and shows that code only."""

        async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
            self.kernel.is_interruptible = True
            try:
                return await super().run_code(code_obj, result, async_=async_)
            finally:
                self.kernel.is_interruptible = False

        def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
            self.kernel.is_interruptible = False
            kind, value, trace = self._get_exc_info(exc_tuple)
            value.__traceback__ = users_part(trace)
            cut_causes(value)
            if value.__traceback__ is None:  # of a request without source
                self._showtraceback(kind, value, self.InteractiveTB.get_exception_only(kind, value))
            else:
                super().showtraceback((kind, value, value.__traceback__), *args, **kwargs | {"tb_offset": 0})

        def ask_exit(self) -> None:
            print("exit() does not end a rank: cluster.stop() ends all of them", file=sys.stderr)

    class Kernel(IPythonKernel):  # type: ignore[misc]
        """Takes the cell's number from the notebook, and requests that carry bytes."""

        shell_class = Shell
        compiler_class = Compiler
        is_interruptible = False
        member: Any = None

        def pre_handler_hook(self) -> None:
            """Leave the signal's handler as it is."""

        post_handler_hook = pre_handler_hook

        async def do_execute(self, code: str, silent: bool, *args: Any, cell_meta: Any = None, **kwargs: Any) -> Any:
            meta = (cell_meta or {}).get(META, {})
            if "number" in meta:
                self.shell.execution_count = meta["number"]
            if "action" in meta:
                self.shell.user_ns[ACT.partition("(")[0]] = lambda: self.act(meta)
            return await super().do_execute(code, silent, *args, cell_meta=cell_meta, **kwargs)

        @contextlib.contextmanager
        def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
            """In a cell that awaits: end what it calls, or what it awaits, now and not with the loop's next event."""
            loop = future.get_loop()

            def cancel(*_: object) -> None:
                if asyncio.current_task(loop) is future:
                    self.on_interrupt()
                else:
                    loop.call_soon_threadsafe(future.cancel)

            before = signal.signal(signal.SIGINT, cancel)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, before)

        def act(self, meta: dict[str, Any]) -> Any:
            """Do what a request asks for that has no source."""
            buffers = self.get_parent("shell").get("buffers", [])
            return self.member.act(meta, buffers, self.publish)

        def publish(self, buffer: Any) -> None:
            """Send bytes to the notebook."""
            parent, topic = self.get_parent("shell"), self._topic("easydist_value")
            self.session.send(self.iopub_socket, VALUE, {}, parent, topic, [buffer])

        def on_interrupt(self, *_: object) -> None:
            """What SIGINT does."""
            if self.is_interruptible:
                raise KeyboardInterrupt

    class App(IPKernelApp):  # type: ignore[misc]
        """An application without profile, debugger and heartbeat."""

        kernel_class = Kernel

        def init_profile_dir(self) -> None:
            """Have an empty one."""
            self.ipython_dir = settings["folder"]
            super().init_profile_dir()

        def load_config_file(self, *_: object, **__: object) -> None:
            """Load none."""

        def init_heartbeat(self) -> None:
            """Have none: the process itself is looked at."""

        def init_iopub(self, context: Any) -> None:
            context.sndhwm = 0  # output is never dropped
            super().init_iopub(context)

        def init_signal(self) -> None:
            signal.signal(signal.SIGINT, lambda *args: self.kernel.on_interrupt(*args) if self.kernel else None)

        def log_connection_info(self) -> None:
            """There is nobody to read it."""

    OutStream.flush_interval = 0.05
    app = App.instance(connection_file=settings["connection_file"], quiet=True, log_level=50)
    app.config.HistoryManager.enabled = False
    app.config.HistoryAccessor.enabled = False
    app.initialize([])
    return app


class _BarsAsText(types.ModuleType):
    """In place of the module that chooses widgets in a kernel: a rank's have no way to the notebook's page."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tqdm.std"), name)


def cut_causes(error: BaseException) -> None:
    """Leave out what has led to an error inside easydist and torch; of the rest, keep the user's frames."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return
    cause.__traceback__ = users_part(cause.__traceback__)
    if cause.__traceback__ is None:
        error.__cause__, error.__suppress_context__ = None, True
    else:
        cut_causes(cause)


def users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of easydist, torch and IPython; None where no others are left."""
    frames = []
    part = trace
    while part is not None:
        frames.append(part)
        part = part.tb_next
    users = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_inner())]
    shorter: types.TracebackType | None = None
    for frame in reversed(users):
        shorter = types.TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter


def _inner() -> tuple[str, ...]:
    names = ("torch", "IPython", "ipykernel", "asyncio")
    loaded = [sys.modules[name].__file__ for name in names if name in sys.modules]
    folders = [os.path.dirname(file) + os.sep for file in loaded if file]
    return (*folders, _ACT_NAME, os.path.dirname(os.path.dirname(__file__)) + os.sep)


if __name__ == "__main__":
    main()
