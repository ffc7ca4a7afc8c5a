"""A script as the main program of ranks, and its output on the way to the driver: whole lines, by way of an actor."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import secrets
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, TypeAlias

Piece: TypeAlias = tuple[int, str]
"""A file descriptor, 1 or 2, and lines."""

_READ = 1 << 16
"""The most bytes of one piece."""

_BREAK = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""The end of a line, also of a progress bar's; a last carriage return may have its line feed in the next piece."""

_ARRIVES_WITHIN = 2.0
"""Seconds within which the last lines arrive after Ctrl-C; otherwise they may take as long as their reader wants."""


@contextlib.contextmanager
def printed() -> Iterator[str]:
    """Yield the name of the sink of the ranks' output, and print what arrives there, until the end of the block."""
    import ray

    name = f"easydist-output-{secrets.token_hex(8)}"  # by ray://, handles do not travel in pickled arguments
    sink = ray.remote(num_cpus=0)(_sink()).options(name=name).remote()
    thread = threading.Thread(target=_print, args=(sink,), name="easydist-output", daemon=True)
    thread.start()
    limit = None
    try:
        yield name
    except KeyboardInterrupt:
        limit = _ARRIVES_WITHIN
        raise
    finally:
        try:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(sink.put.remote(None), timeout=limit)
                thread.join(limit)
        finally:
            ray.kill(sink)


def _sink() -> type[Any]:
    """Return a class that travels by its code, because a node may have no easydist outside of the ranks."""

    class OutputQueue:
        def __init__(self) -> None:
            import asyncio

            # Once it is full, ranks wait for the driver, as they would for a full pipe.
            self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue(100)

        async def put(self, piece: Piece | None) -> None:
            await self._pieces.put(piece)

        async def take(self) -> Piece | None:
            return await self._pieces.get()

    return OutputQueue


def _print(sink: Any) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        while (piece := ray.get(sink.take.remote())) is not None:
            stream = sys.stdout if piece[0] == 1 else sys.stderr
            with contextlib.suppress(OSError):  # nobody reads it any more; the ranks must not wait for that
                stream.write(piece[1])
                stream.flush()


def main(sink: str, folder: str, is_module: bool, name: str, arguments: Sequence[str]) -> None:
    """Run a script or a module in the process of a rank.

    Args:
        sink: The name of the actor to which its output goes.
        folder: The working directory; empty if this process is there.
        is_module: True if ``name`` is that of a module, else it is a path from the working directory.
        name: The script or the module.
        arguments: Its arguments.

    Raises:
        SystemExit: The script has ended with a status other than 0.
    """
    if folder:
        os.chdir(folder)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)))
    sys.argv = [name, *arguments]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # Ray's own handler exits with 1
    with _sent(sink, int(os.environ["RANK"])):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                _run_file(name)
        except SystemExit as end:
            if isinstance(end.code, int) or end.code is None:
                if not end.code:
                    return
                raise
            print(end.code, file=sys.stderr)
            raise SystemExit(1) from None


def _run_file(name: str) -> None:
    """Run a file as Python itself does: tracebacks show its name, and processes that it spawns find its whole path."""
    main, before = types.ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = os.path.abspath(name)
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _sent(name: str, rank: int) -> Iterator[None]:
    """Send to the sink what this process and its children write during the block; each line begins with the rank."""
    import ray

    sink, end = ray.get_actor(name), secrets.token_hex(16).encode()
    kept = {number: os.dup(number) for number in (1, 2)}
    pipes = {number: _pipe_at(number) for number in kept}
    threads = [
        threading.Thread(target=_send, args=(reader, end, number, sink, rank), daemon=True)
        for number, (reader, _) in pipes.items()
    ]
    for thread in threads:
        thread.start()
    streams = sys.stdout, sys.stderr
    with _text_to(1) as sys.stdout, _text_to(2) as sys.stderr:
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = streams
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
                with contextlib.suppress(OSError), open(pipes[number][1], "wb", buffering=0) as writer:
                    writer.write(end)  # children may have the pipe open for longer
            for thread in threads:
                thread.join()


def _text_to(number: int) -> TextIO:
    return open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _pipe_at(number: int) -> tuple[int, int]:
    """Let a file descriptor be the end of a new pipe, and return both ends."""
    reader, writer = os.pipe()
    os.dup2(writer, number)
    return reader, writer


def _send(reader: int, end: bytes, number: int, sink: Any, rank: int) -> None:
    """Send the lines from a pipe, until these bytes come, or nobody has it open any more."""
    import ray

    rest, ended = b"", b""
    with open(reader, "rb", buffering=0) as pipe, contextlib.suppress(ray.exceptions.RayError):
        while not ended and (chunk := pipe.read(_READ)):
            text, ended, _ = (rest + chunk).partition(end)
            *lines, rest = _BREAK.split(text)
            if lines:
                ray.get(sink.put.remote((number, _text(lines, rank))))
        if rest := rest.removesuffix(b"\r"):
            ray.get(sink.put.remote((number, _text([rest], rank))))


def _text(lines: list[bytes], rank: int) -> str:
    return "".join([f"[rank {rank}] {line.decode(errors='replace')}\n" for line in lines])
