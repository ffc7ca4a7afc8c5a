"""The output of ranks on its way to the terminal: whole lines, which torchrun itself may tear.

torchrun reads the files into which the ranks write, and shows whatever it finds at that moment. A line that is only
half there would be followed by one of another rank, or by its own second half with the rank in front of it again.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import locale
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import click

__all__ = ["show_whole_lines", "tail"]

_CHUNK = 1 << 20
"""The most bytes to read at once."""

_LONGEST = 1 << 24
"""The characters of a line that are held back until its end comes; more are shown at once."""


def show_whole_lines() -> None:
    """Let torchrun read the files of the ranks with ``tail``."""
    from torch.distributed.elastic.multiprocessing import tail_log

    tail_log.tail_logfile = tail


def tail(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Show the lines of a file as they come, until ``finished`` is set and all of them are shown.

    Text without an end of line, such as a prompt, is shown if nothing follows within an interval.

    Args:
        header: The text in front of each line.
        file: The path of the file, which need not exist yet.
        dst: The stream to which the lines of all ranks go.
        finished: An event that is set once nobody writes to the file any more.
        interval_sec: The seconds between two looks at the file.
        log_line_filter: A function that returns False for lines that are not shown.

    Source: ``tail_logfile`` of torch.
    """
    while not Path(file).exists():
        if finished.is_set():
            return
        time.sleep(interval_sec)
    screen, held, decoder = _screen_of(dst), "", _decoder()
    with open(file, "rb", buffering=0) as written:
        while True:
            was_finished = finished.is_set()  # asked before reading: what was written before it must not stay unread
            found = written.read(_CHUNK)
            *ended, held = f"{held}{decoder.decode(found, final=was_finished and not found)}".split("\n")
            lines = [f"{line}\n" for line in ended]
            if held and (not found or len(held) >= _LONGEST):
                lines, held = [*lines, held], ""
            if log_line_filter is not None:
                lines = [*filter(log_line_filter, lines)]
            if lines:
                screen.show(file, header, lines)
            if was_finished and not found:
                return
            if len(found) < _CHUNK and not was_finished:
                time.sleep(interval_sec)


def _decoder() -> io.IncrementalNewlineDecoder:
    """Return what decodes text as ``open`` does, but waits for the rest of a character of which it has a part."""
    kind = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
    return io.IncrementalNewlineDecoder(kind("replace"), translate=True)


class _Screen:
    """A stream to which the lines of several ranks go.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._unended: str | None = None
        self._cut_off = set[str]()
        self._is_lost = False

    def show(self, source: str, header: str, lines: Sequence[str]) -> None:
        """Show lines, each on a line of its own, or the first one behind the last part of one from the same source.

        Args:
            source: The name of the place from which they come.
            header: The text in front of each.
            lines: One or more lines; only the last one may lack its end.
        """
        with self._lock:
            if lines[0] == "\n" and source in self._cut_off:  # another rank's line has ended this one
                lines = lines[1:]
            self._cut_off.discard(source)
            if lines:
                self._write(self._begin(source, header, lines[0]) + header.join(lines))
                self._unended = None if lines[-1].endswith("\n") else source

    def _begin(self, source: str, header: str, text: str) -> str:
        """Return the text in front of a line or a part of one."""
        if self._unended is None:
            return header
        if self._unended == source:
            # In a terminal, the answer to a prompt may have ended the line.
            return header if self._stream.isatty() and text != "\n" else ""
        self._cut_off.add(self._unended)
        return f"\n{header}"

    def _write(self, text: str) -> None:
        """Write until it fails once: the ranks go on without anybody who sees their output."""
        try:
            if not self._is_lost:
                self._stream.write(text)
                self._stream.flush()
        except OSError as error:
            self._is_lost = True
            if not isinstance(error, BrokenPipeError):  # as in easydist run … | head
                click.echo(f"easydist run: cannot show the ranks' output any more: {error.strerror}", err=True)


@functools.cache
def _screen_of(stream: TextIO) -> _Screen:
    """Return the screen of a stream, which is one for stdout and stderr if both go to the same terminal or file."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # one of them may be closed, or no file
        if stream is sys.stderr and os.path.sameopenfile(sys.stdout.fileno(), stream.fileno()):
            return _screen_of(sys.stdout)
    return _Screen(stream)
