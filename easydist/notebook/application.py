"""IPython's kernel for a rank: no history, profile or heartbeat; Ctrl-C and tracebacks reach only the user's code."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import linecache
import os
import signal
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ipykernel.compiler import XCachingCompiler
from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.error import StdinNotImplementedError

from easydist.liveness.watchdog import interrupting
from easydist.notebook.connection import ACT, META, VALUE

_CANNOT_ASK = (
    "ranks cannot ask; ask in a cell of the notebook itself, and give the answer to all ranks: "
    "answer = input(), then %push answer"
)

_Group: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none

_INNER = "<easydist>"
"""The file name of requests that have no source."""


class _Compiler(XCachingCompiler):
    """A compiler that names cells by the notebook's numbers, so that ``easydist top`` shows ``<cell 5>:3``."""

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        if raw_code.strip() == ACT:
            return _INNER
        name = f"<cell {number}>"
        return name if name not in linecache.cache else f"<cell {number}, part {len(linecache.cache)}>"


class _Shell(ZMQInteractiveShell):
    """A shell that can be interrupted only in the user's code, and shows only that code."""

    _first_names: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"compiler_class": _Compiler})  # ipykernel 6 asks no kernel for it

    def init_user_ns(self) -> None:
        super().init_user_ns()  # at the start, and after %reset
        self.define(self._first_names)

    def define(self, names: Mapping[str, Any]) -> None:
        """Define names that cells find from the start."""
        self._first_names = names
        self.user_ns.update(names)
        self.user_ns_hidden.update(names)

    def transform_cell(self, raw_cell: str) -> str:
        cell: str = super().transform_cell(raw_cell)
        self.history_manager.input_hist_parsed[-1] = cell  # a value is not shown if a semicolon ends the last input
        return cell

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        self.kernel.is_interruptible = True
        try:
            return await super().run_code(code_obj, result, async_=async_)
        finally:
            self.kernel.is_interruptible = False

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        self.kernel.is_interruptible = False
        kind, value, trace = self._get_exc_info(exc_tuple)
        value.__traceback__ = _users_part(trace)
        _cut_causes(value)
        if value.__traceback__ is None:  # an error in a request without source
            self._showtraceback(kind, value, self.InteractiveTB.get_exception_only(kind, value))
        elif _has_group(value):  # IPython would print it, and send no error
            self._showtraceback(kind, value, traceback.format_exception(value))
        else:
            super().showtraceback((kind, value, value.__traceback__), *args, **kwargs | {"tb_offset": 0})

    def ask_exit(self) -> None:
        print("exit() does not end a rank: cluster.stop() ends all of them", file=sys.stderr)


class _Kernel(IPythonKernel):
    """A kernel that takes the cell's number from the notebook, and accepts requests that carry bytes."""

    shell_class = _Shell
    is_interruptible = False
    own_rank: Any = None

    def pre_handler_hook(self) -> None:
        """Keep the signal handler."""

    post_handler_hook = pre_handler_hook

    async def do_execute(self, code: str, silent: bool, *args: Any, cell_meta: Any = None, **kwargs: Any) -> Any:
        meta = (cell_meta or {}).get(META, {})
        if "number" in meta:
            self.shell.execution_count = meta["number"]
        if "action" in meta:
            self.shell.user_ns[ACT.partition("(")[0]] = lambda: self.act(meta)
        return await super().do_execute(code, silent, *args, cell_meta=cell_meta, **kwargs)

    def _publish_execute_input(self, *_: object) -> None:
        """Publish nothing: the notebook knows the source."""

    def _publish_status(self, status: str, *args: Any, **kwargs: Any) -> None:
        """Publish only the end of a request: the notebook knows when it begins, and each message takes time."""
        if status == "idle":
            super()._publish_status(status, *args, **kwargs)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Let Ctrl-C end an awaiting cell at once, in its call or its await, instead of at the loop's next event."""
        loop = future.get_loop()

        @interrupting
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

    def raw_input(self, *_: Any, **__: Any) -> str:
        """Refuse to ask: the ranks' questions cannot reach the page.

        Raises:
            StdinNotImplementedError: Always.
        """
        raise StdinNotImplementedError(_CANNOT_ASK)

    getpass = raw_input

    def act(self, meta: dict[str, Any]) -> Any:
        """Perform the action of a request without source."""
        if meta["action"] == "leave":
            return self.io_loop.add_callback(self.io_loop.stop)
        buffers = self.get_parent("shell").get("buffers", [])
        return self.own_rank.act(meta, buffers, self.publish)

    def publish(self, buffer: Any) -> None:
        """Send bytes to the notebook."""
        parent, topic = self.get_parent("shell"), self._topic("easydist_value")
        self.session.send(self.iopub_socket, VALUE, {}, parent, topic, [buffer])

    def on_interrupt(self) -> None:
        """Handle SIGINT."""
        if self.is_interruptible:
            raise KeyboardInterrupt


class _Application(IPKernelApp):
    """An application without profile, debugger and heartbeat."""

    kernel_class = _Kernel
    folder = ""

    def init_profile_dir(self) -> None:
        """Use an empty profile."""
        self.ipython_dir = self.folder
        super().init_profile_dir()

    def load_config_file(self, *_: object, **__: object) -> None:
        """Load no configuration."""

    def init_heartbeat(self) -> None:
        """Start no heartbeat, since the notebook watches the process itself."""

    def init_iopub(self, context: Any) -> None:
        context.sndhwm = 0  # output is never dropped
        super().init_iopub(context)

    def init_signal(self) -> None:
        signal.signal(signal.SIGINT, interrupting(lambda *_: self.kernel.on_interrupt() if self.kernel else None))

    def log_connection_info(self) -> None:
        """Log nothing, since nobody reads it."""


def start(connection_file: str, folder: str) -> Any:
    """Start the kernel, and return its application.

    Args:
        connection_file: The file with the addresses to listen at.
        folder: The folder for an empty profile.
    """
    OutStream.flush_interval = 0.05
    app = _Application.instance(connection_file=connection_file, quiet=True, log_level=50)
    app.folder = folder
    app.config.HistoryManager.enabled = False
    app.config.HistoryAccessor.enabled = False
    app.initialize([])
    sys.breakpointhook = app.kernel.raw_input  # debugpy's, which ipykernel has loaded, does nothing
    return app


@contextlib.contextmanager
def started(connection_file: str, folder: str) -> Iterator[Any]:
    """Start the kernel as ``start`` does, and end it after the block: the process goes on with its own streams."""
    streams, main, hook = (sys.stdout, sys.stderr), sys.modules["__main__"], sys.breakpointhook
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    app = start(connection_file, folder)
    try:
        yield app
    finally:
        captured, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), streams
        for stream in captured:
            stream.close()  # it gives the file descriptor back
        atexit.unregister(app.close)
        app.close()
        sys.stdout, sys.stderr = streams
        sys.modules["__main__"], sys.breakpointhook = main, hook
        for kind in (_Shell, _Kernel, _Application):
            kind.clear_instance()
        asyncio.set_event_loop(None)
        loop.close()


def _has_group(error: BaseException | None) -> bool:
    """True if an error, or one that led to it, is a group of exceptions."""
    return error is not None and (isinstance(error, _Group) or _has_group(error.__context__))


def _cut_causes(error: BaseException) -> None:
    """Remove causes of an error that lie inside easydist and torch; of the others, keep the user's frames."""
    for member in error.exceptions if isinstance(error, _Group) else ():
        member.__traceback__ = _users_part(member.__traceback__)
        _cut_causes(member)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return
    cause.__traceback__ = _users_part(cause.__traceback__)
    if cause.__traceback__ is None:
        error.__cause__, error.__suppress_context__ = None, True
    else:
        _cut_causes(cause)


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of easydist, torch and IPython; None if no frames are left."""
    frames = []
    part = trace
    while part is not None:
        frames.append(part)
        part = part.tb_next
    users = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_inner_folders())]
    shorter: types.TracebackType | None = None
    for frame in reversed(users):
        shorter = types.TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter


def _inner_folders() -> tuple[str, ...]:
    names = ("torch", "IPython", "ipykernel", "asyncio")
    loaded = [sys.modules[name].__file__ for name in names if name in sys.modules]
    folders = [os.path.dirname(file) + os.sep for file in loaded if file]
    return (*folders, _INNER, os.path.dirname(os.path.dirname(__file__)) + os.sep)
